"""Labs on training models that do not fit: recorder, ranks, checks and live memory.

Names resolve on first use, so that ``import labkit`` needs neither Jupyter nor a display, and costs nothing that the caller does not use.
"""

from importlib import import_module

_HOMES = {
    "Recorder": "labkit.recorder",
    "Recording": "labkit.recorder",
    "run_ranks": "labkit.ranks",
    "check": "labkit.checks",
    "live_memory": "labkit.widgets",
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

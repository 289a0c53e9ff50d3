"""Views that move: live memory, and interactive views over recordings made before. They draw and compute nothing.

In a notebook that a person watches they are live (an anywidget each; the kernel sends numbers or pictures, the browser
draws). What a saved notebook holds is always a plain PNG and its description in words. Elsewhere they leave the
picture, or one line of text.
"""

from importlib import import_module

_HOMES = {
    "live_memory": "labkit.widgets.live",
    "explore": "labkit.widgets.explore",
    "explore_segments": "labkit.widgets.segments",
    "step_through": "labkit.widgets.buffers",
    "trace_buffers": "labkit.widgets.buffers",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit.widgets' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

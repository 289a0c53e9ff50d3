"""Run a function on several processes ("ranks") of this machine, started warm.

``run_ranks`` is what a notebook uses, with a ``Link`` for a slow wire, ``faults`` for accidents and ``live=True`` to watch; inside the
function ``rank()``, ``world_size()``, ``restarts()``, ``device()`` and ``event(name)`` help, and an ``Endpoint`` is a ZeroMQ mailbox.
``launch`` and ``warm_up`` are the layer below it, which checks use.
"""

from importlib import import_module

_HOMES = {
    "launch": "labkit.ranks.jobs",
    "warm_up": "labkit.ranks.jobs",
    "RankReport": "labkit.ranks.jobs",
    "run_ranks": "labkit.ranks.run",
    "RankResult": "labkit.ranks.run",
    "Link": "labkit.ranks.link",
    "faults": "labkit.ranks.faults",
    "Endpoint": "labkit.ranks.endpoint",
    "EndpointError": "labkit.ranks.endpoint",
    "Message": "labkit.ranks.endpoint",
    "event": "labkit.ranks.here",
    "rank": "labkit.ranks.here",
    "world_size": "labkit.ranks.here",
    "device": "labkit.ranks.here",
    "restarts": "labkit.ranks.here",
    "RankError": "labkit.ranks.errors",
    "RankTimeout": "labkit.ranks.errors",
    "DeadlockError": "labkit.ranks.errors",
    "CargoError": "labkit.ranks.errors",
    "NestedRanksError": "labkit.ranks.errors",
    "ServerError": "labkit.ranks.errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit.ranks' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if _HOMES[name] == f"labkit.ranks.{name}" else getattr(home, name)
    globals()[name] = value
    return value

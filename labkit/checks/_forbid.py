"""Tripwires on the ready-made answers that an exercise forbids.

They are laid in the probe's process before the learner's code is opened, so a function imported earlier in the notebook resolves to the
tripwire too. What trips is noted at once, and counts even when the learner's code catches the exception.

To look through every module takes each probe longer than all else that it does before it begins, so the process that probes are forked
from looks once, for all checks (`survey`).
"""

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

_places: dict[str, list[tuple[Any, str, str]]] = {}  # what a forbidden name stands for, where that is known
_holders: dict[int, list[tuple[dict[str, Any], str]]] = {}  # id of a function: the modules' names for it
_last_surveyed: str | None = None  # the youngest module that was looked through


class ForbiddenCall(RuntimeError):
    """The exercise asks for the learner's own version of what was called."""


def _tripwire(name: str, tripped: list[str]) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if name not in tripped:
            tripped.append(name)
        raise ForbiddenCall(f"{name} is what you are building here: this exercise wants your own version")

    return refuse


def _lay_on(owner: Any, attribute: str, label: str, tripped: list[str]) -> dict[int, tuple[Any, Any]]:
    """Lay one; returns {id of the original function: (it, its tripwire)} for other modules that hold it under a name of their own."""
    original = getattr(owner, attribute)
    wire = _tripwire(label, tripped)
    if inspect.isclass(original):
        # The class stays a class (isinstance and subclassing in libraries go on); making one, or applying it, trips.
        is_function = hasattr(original, "apply") and hasattr(original, "backward")
        setattr(original, "apply" if is_function else "__init__", staticmethod(wire) if is_function else wire)
        return {}
    setattr(owner, attribute, wire)
    return {id(original): (original, wire)}


def _named(name: str) -> list[tuple[Any, str, str]]:
    """(owner, attribute, what to call it) of every function or class that a name stands for."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        owner_name, attribute = name.rsplit(".", 1)
        owner = importlib.import_module(owner_name)
        return [(owner, attribute, name)] if hasattr(owner, attribute) else []  # absent in this torch: nothing to forbid
    own = [key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", None) == name]
    return [(module, attribute, f"{name}.{attribute}") for attribute in own if not attribute.startswith("__")]


def _held(modules: Iterable[ModuleType], wanted: Iterable[int]) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Where modules hold the wanted objects: (the module's names, the name, the object's id)."""
    wanted = set(wanted)
    for module in modules:
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            yield from [(names, key, id(value)) for key, value in names.items() if id(value) in wanted]


def survey(forbids: Iterable[str]) -> None:
    """Note who holds what these names stand for, in the modules imported so far; `lay` then looks through younger ones only."""
    global _last_surveyed
    _places.update({name: _named(name) for name in forbids})
    wanted = {id(getattr(owner, attribute)) for places in _places.values() for owner, attribute, _ in places}
    _holders.update({one: [] for one in wanted})
    for names, key, one in _held(list(sys.modules.values()), wanted):
        _holders[one].append((names, key))
    _last_surveyed = next(reversed(sys.modules))


def _younger() -> Iterator[ModuleType]:
    """Modules imported since the survey. From the end: to touch all of them would copy each one's page in a forked process."""
    for name in reversed(sys.modules):
        if name == _last_surveyed:
            return
        yield sys.modules[name]


def lay(forbids: Iterable[str]) -> list[str]:
    """Lay tripwires on every module, function or class named; returns the list that names what trips, as it trips."""
    tripped: list[str] = []
    wires: dict[int, tuple[Any, Any]] = {}
    for name in forbids:
        for owner, attribute, label in _places.get(name) or _named(name):
            wires |= _lay_on(owner, attribute, label, tripped)
    # Modules that did `from library import function` hold the original under a name of their own.
    surveyed = wires.keys() <= _holders.keys()
    for names, key in [place for one in wires for place in _holders.get(one, ())]:
        one = id(names.get(key))
        if one in wires:
            names[key] = wires[one][1]
    for names, key, one in list(_held(list(_younger() if surveyed else sys.modules.values()), wires)):
        names[key] = wires[one][1]
    return tripped

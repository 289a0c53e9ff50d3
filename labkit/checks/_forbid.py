"""Tripwires on the ready-made answers that an exercise forbids.

They are laid in the probe's process before the learner's code is opened, so a function imported earlier in the notebook resolves to the
tripwire too. What trips is noted at once, and counts even when the learner's code catches the exception.
"""

import importlib
import inspect
import sys
from collections.abc import Iterable
from typing import Any


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


def lay(forbids: Iterable[str]) -> list[str]:
    """Lay tripwires on every module, function or class named; returns the list that names what trips, as it trips."""
    tripped: list[str] = []
    wires: dict[int, tuple[Any, Any]] = {}
    for name in forbids:
        try:
            module = importlib.import_module(name)
        except ImportError:
            owner_name, attribute = name.rsplit(".", 1)
            owner = importlib.import_module(owner_name)
            if hasattr(owner, attribute):  # absent in this torch: nothing to forbid
                wires |= _lay_on(owner, attribute, name, tripped)
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value) and getattr(value, "__module__", None) == name and not attribute.startswith("__"):
                wires |= _lay_on(module, attribute, f"{name}.{attribute}", tripped)
    # Modules that did `from library import function` hold the original under a name of their own.
    for other in list(sys.modules.values()):
        names = getattr(other, "__dict__", None)
        if isinstance(names, dict):
            for key in [key for key, value in list(names.items()) if id(value) in wires]:
                names[key] = wires[id(names[key])][1]
    return tripped

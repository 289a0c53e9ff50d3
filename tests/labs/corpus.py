"""Wrong and right implementations of every exercise, and what the checks must say of them.

One module per topic in `mutants/` and `alternatives/`, with the functions marked by `wrong` and `right`:

    @wrong("BUF-01", check="pingpong.forward", criterion="output", hint="same-buffer")
    def multiplies_onto_its_input(layers, x): ...

    @right("swap by tuple", check="pingpong.forward")
    def by_tuple(layers, x): ...

The modules' functions travel by value, as those of a notebook do.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from labkit.checks import Verdict, get_check, run_check
from labkit.ranks import travel


@dataclass(frozen=True)
class Wrong:
    """An implementation that must fail: on this criterion ("runs" where it does not finish), with this hint."""

    name: str
    check: str
    criterion: str
    hint: str | None
    candidate: Any
    topic: str


@dataclass(frozen=True)
class Right:
    """An implementation that must get full points; `forbid=False` where it is a library's own."""

    name: str
    check: str
    forbid: bool
    candidate: Any
    topic: str


_wrong: list[Wrong] = []
_right: list[Right] = []


def _topic(candidate: Any) -> str:
    first = candidate[0] if isinstance(candidate, tuple) else candidate
    return first.__module__.rsplit(".", 1)[-1]


def wrong(name: str, *, check: str, criterion: str, hint: str | None) -> Callable[[Any], Any]:
    """Mark a function or class (or a tuple of them, called directly) as a wrong implementation."""

    def mark(candidate: Any) -> Any:
        _wrong.append(Wrong(name, check, criterion, hint, candidate, _topic(candidate)))
        return candidate

    return mark


def right(name: str, *, check: str, forbid: bool = True) -> Callable[[Any], Any]:
    """Mark a function or class (or a tuple of them, called directly) as a right implementation."""

    def mark(candidate: Any) -> Any:
        _right.append(Right(name, check, forbid, candidate, _topic(candidate)))
        return candidate

    return mark


def load() -> tuple[list[Wrong], list[Right]]:
    """Every implementation of every topic."""
    for kind in ("mutants", "alternatives"):
        package = importlib.import_module(f"tests.labs.{kind}")
        for module in pkgutil.iter_modules(package.__path__):
            name = f"{package.__name__}.{module.name}"
            importlib.import_module(name)
            cloudpickle.register_pickle_by_value(sys.modules[name])
    return list(_wrong), list(_right)


def examine(candidate: Any, check: str, *, forbid: bool = True, strict: bool = True) -> Verdict:
    """The verdict on a candidate, exam cases included."""
    return run_check(get_check(check), travel.dumps(candidate), forbid=forbid, strict=strict)


def killed(item: Wrong, verdict: Verdict) -> bool:
    """Not full points."""
    return verdict.points < verdict.max_points


def told_right(item: Wrong, verdict: Verdict) -> bool:
    """Killed, on the criterion and with the hint that it must be."""
    return killed(item, verdict) and verdict.failed == item.criterion and verdict.hint_id == item.hint


def accepted(item: Right, verdict: Verdict) -> bool:
    """Full points."""
    return verdict.status == "pass" and verdict.points == verdict.max_points

"""A check is a probe and a judge.

`cases` makes fresh inputs from a seed. `probe` runs beside the learner's code, in a fresh process, and says what it saw. `judge` holds
every expected value and runs where the learner's code does not. Between them travel only JSON and named tensors.

**Points.** Every criterion has a role. *numbers*: all of them must hold in every case, and together they earn at most a quarter.
*technique*: what the exercise is about; counts only if the numbers are right. *cost*: what the technique must not cost (calls, extra
allocations, edge cases); counts only if the technique is there too. So doing nothing earns nothing, and the plain version a quarter.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from labkit.recorder import Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("numbers", "technique", "cost")
WITNESSES = ("recomputed", "memory", "wire", "none")


@dataclass(frozen=True)
class Criterion:
    """One line of a check's table, fixed before anybody's code has run.

    role    : "numbers", "technique" or "cost" (see above)
    points  : what it earns; the criteria of a check add up to its points
    witness : who can confirm it against a learner who forges figures: "recomputed" by the judge, "memory" (the box's limit or peak),
              "wire" (bytes counted outside), or "none"
    """

    name: str
    role: str
    points: float
    witness: str = "none"

    def __post_init__(self) -> None:
        if self.role not in ROLES or self.witness not in WITNESSES:
            raise ValueError(f"criterion {self.name!r}: role is one of {ROLES}, witness one of {WITNESSES}")


@dataclass
class Case:
    """Inputs of one run of the probe.

    values, tensors : JSON values and named tensors that both probe and judge read
    world_size      : 0 for one process; otherwise that many ranks with torch.distributed initialised
    covers          : criteria that this case decides; None means all. An edge case that covers one criterion costs only that one
                      when the learner's code fails in it.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    world_size: int = 0
    covers: tuple[str, ...] | None = None


@dataclass
class Observation:
    """What a probe saw: plain values, named tensors and recordings, no opinion. `ranks` holds every rank's own (this one is rank 0's)."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    recordings: dict[str, Recording] = field(default_factory=dict)
    ranks: list["Observation"] = field(default_factory=list, repr=False)

    def to_message(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        tensors = {f"t/{name}": tensor for name, tensor in self.tensors.items()}
        recordings = {}
        for name, recording in self.recordings.items():
            recordings[name], arrays = recording.to_wire()
            tensors.update({f"r/{name}/{key}": array for key, array in arrays.items()})
        return {"values": self.values, "recordings": recordings}, tensors

    @classmethod
    def from_message(cls, message: dict[str, Any], tensors: dict[str, torch.Tensor]) -> "Observation":
        named = {name[2:]: tensor for name, tensor in tensors.items() if name.startswith("t/")}
        recordings = {}
        for name, header in message["recordings"].items():
            prefix = f"r/{name}/"
            arrays = {key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            recordings[name] = Recording.from_wire(header, arrays)
        return cls(values=message["values"], tensors=named, recordings=recordings)


@dataclass(frozen=True)
class Finding:
    """What the judge says of one criterion in one case.

    expected, observed : short, with units; the observed value first in the table ("at most 2", "2.00")
    hint   : key of the check's hints, the most telling one for what was seen
    detail : more lines for a failed one that explain the figure (what was alive at the peak); never the answer
    """

    criterion: str
    passed: bool
    expected: str
    observed: str
    hint: str | None = None
    detail: str = ""


class WrongResult(Exception):
    """Raised by a probe when the learner's code returned something that cannot be examined (a list for a tensor, a wrong shape).

    criterion : the criterion it fails; the message says what came back and what was expected.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Check:
    """One exercise's check.

    name       : "lab.exercise", as the notebook writes it
    criteria   : in the order in which the table shows them and in which one failed is told first
    cases      : (generator, strict) -> cases; `strict` adds the exam's
    probe      : (candidate, case) -> Observation, next to the learner's code
    judge      : (case, observation) -> findings, at most one for each criterion
    hints      : key -> one question that points at the fault without naming the answer
    forbids    : modules or functions whose use is not an answer here ("torch.utils.checkpoint")
    on_error   : error ({"type", "message", "frames"}) -> key of a hint for a crash that has a typical cause, or None
    picture    : (case, observation) -> a figure of what was measured, for the first case that gives one
    summary    : (case, observation) -> the measured figure for the quiet line of a pass, from the first case that gives one
    timeout    : seconds that one case may take
    """

    name: str
    criteria: Sequence[Criterion]
    cases: Callable[[torch.Generator, bool], list[Case]]
    probe: Callable[[Any, Case], Observation]
    judge: Callable[[Case, Observation], list[Finding]]
    hints: dict[str, str]
    forbids: tuple[str, ...] = ()
    on_error: Callable[[dict[str, Any]], str | None] | None = None
    picture: "Callable[[Case, Observation], Figure | None] | None" = None
    summary: Callable[[Case, Observation], str | None] | None = None
    timeout: float = 10.0

    def __post_init__(self) -> None:
        names = [criterion.name for criterion in self.criteria]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: a criterion's name repeats")
        numbers = sum(criterion.points for criterion in self.criteria if criterion.role == "numbers")
        technique = [criterion for criterion in self.criteria if criterion.role == "technique"]
        if technique and numbers > self.points / 4:
            raise ValueError(f"{self.name}: right numbers alone may earn at most a quarter of {self.points:g}, not {numbers:g}")

    @property
    def points(self) -> float:
        return sum(criterion.points for criterion in self.criteria)


_registry: dict[str, Check] = {}
_homes: dict[str, str] = {}


def register(check: Check) -> Check:
    """Make a check known by its name; called once, at the top level of a lab's module."""
    if check.name in _registry:
        raise ValueError(f"two checks are called {check.name!r}")
    _registry[check.name] = check
    _homes[check.name] = sys._getframe(1).f_globals["__name__"]
    return check


def home_of(check: Check) -> str:
    """The module whose import registers a check; its probe may be defined in another."""
    return _homes.get(check.name, check.probe.__module__)


def registered(name: str) -> Check:
    """The check called `name`, of the modules imported so far."""
    return _registry[name]

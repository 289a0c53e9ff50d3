"""Accidents on purpose: kill, stop, hold or restart a rank at a chosen event or moment.

    faults.kill(1, at="send", nth=3)                          # SIGKILL just before rank 1's third send
    faults.restart(2, at="pushed", after_s=0.2)               # SIGKILL at labkit.ranks.event("pushed"), then its function again
    faults.stop(0, at=0.5, seconds=1.0)                       # SIGSTOP half a second after its function began, SIGCONT a second later
    faults.hold(1, at="pull", until=faults.After(0, "step", 2))   # waits at event("pull") until rank 0 reached event("step") twice

Given to ``run_ranks(..., faults=[...])``. Events are what a rank calls ("send", "recv", "wait", or a collective's name such as
"all_reduce"; an endpoint's messages count as "send" and "recv"), each just before it happens, and names of its own.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

ACTIONS = ("kill", "restart", "stop", "hold")
_LOOK_S = 0.002


@dataclass(frozen=True)
class After:
    """The moment at which rank `rank` has reached `event` for the `nth` time (its lives counted together)."""

    rank: int
    event: str
    nth: int = 1


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and when; made by `kill`, `restart`, `stop` and `hold`.

    at      : an event's name, or seconds since the rank's function began (not for hold)
    nth     : which of the events of that name, counted from 1 in each life
    life    : in which life of the rank: 0 before its first restart
    seconds : until a restart, or how long it is stopped or held; or `until` says when that ends
    """

    do: str
    rank: int
    at: str | float
    nth: int = 1
    life: int = 0
    seconds: float | None = None
    until: After | None = None

    def __post_init__(self) -> None:
        timed = isinstance(self.at, (int, float)) and not isinstance(self.at, bool)
        if not timed and not isinstance(self.at, str):
            raise TypeError(f"at is an event's name or a number of seconds, not {type(self.at).__name__}")
        if timed and (self.at < 0 or self.do == "hold"):
            raise ValueError("a rank is held at an event" if self.do == "hold" else f"at is 0 seconds or later, not {self.at}")
        if self.nth < 1 or self.life < 0 or self.rank < 0:
            raise ValueError("nth counts from 1, rank and life from 0")
        if self.seconds is not None and self.seconds < 0:
            raise ValueError(f"seconds is 0 or more, not {self.seconds}")

    @property
    def words(self) -> str:
        when = f"at {self.at:g} s" if not isinstance(self.at, str) else f"at {self.at} number {self.nth}"
        return f"{self.do} {when}" + (f" of life {self.life}" if self.life else "")


def kill(rank: int, at: str | float, nth: int = 1, life: int = 0) -> Fault:
    """SIGKILL; the rank stays dead, the others go on. Its value is None."""
    return Fault("kill", rank, at, nth, life)


def restart(rank: int, at: str | float, nth: int = 1, after_s: float = 0.0, life: int = 0) -> Fault:
    """SIGKILL, and `after_s` seconds later the same function again in a fresh process; `labkit.ranks.restarts()` counts them.

    The new process has no ``torch.distributed`` group: gloo knows no return.
    """
    return Fault("restart", rank, at, nth, life, after_s)


def stop(
    rank: int, at: str | float, nth: int = 1, *, seconds: float | None = None, until: After | None = None, life: int = 0
) -> Fault:
    """SIGSTOP, and SIGCONT when `seconds` are over or `until` has come."""
    return Fault("stop", rank, at, nth, life, *_end(seconds, until))


def hold(rank: int, at: str, nth: int = 1, *, seconds: float | None = None, until: After | None = None, life: int = 0) -> Fault:
    """A gate: the thread that reaches the event waits there until `seconds` are over or `until` has come."""
    return Fault("hold", rank, at, nth, life, *_end(seconds, until))


def _end(seconds: float | None, until: After | None) -> tuple[float | None, After | None]:
    if (seconds is None) == (until is None):
        raise ValueError("say how long: seconds=... or until=After(rank, event, nth), one of the two")
    return seconds, until


def to_spec(faults: list[Fault], world_size: int) -> list[dict]:
    """As JSON. Raises ValueError for a rank that is not there."""
    for fault in faults:
        for rank in (fault.rank, *([fault.until.rank] if fault.until else [])):
            if rank >= world_size:
                raise ValueError(f"{fault.words}: there is no rank {rank} among {world_size}")
    return [asdict(fault) for fault in faults]


def from_spec(spec: list[dict]) -> list[Fault]:
    return [Fault(**{**row, "until": After(**row["until"]) if row["until"] else None}) for row in spec]


class Board:
    """Shared memory of a job: which faults have struck (and when), and how often each awaited event has been reached."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        self._words = memoryview(mmap.mmap(-1, max(1, 2 * len(faults)) * 8)).cast("q")

    def strike(self, number: int) -> None:
        self._words[2 * number] = time.monotonic_ns()

    def struck_ns(self, number: int) -> int:
        return self._words[2 * number]

    def count(self, number: int) -> None:
        """Rank `until.rank` has reached what fault `number` waits for once more."""
        self._words[2 * number + 1] += 1

    def over(self, number: int) -> bool:
        """Has what ends this stop or hold come?"""
        fault = self.faults[number]
        if fault.until is not None:
            return self._words[2 * number + 1] >= fault.until.nth
        return time.monotonic_ns() >= self.struck_ns(number) + (fault.seconds or 0.0) * 1e9


class Points:
    """The rank's side: counts the events that it reaches and lets happen what is due there."""

    def __init__(self, board: Board, rank: int, life: int) -> None:
        self._board, self._rank, self._life = board, rank, life
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def reached(self, name: str) -> None:
        due = []
        with self._lock:
            self._counts[name] = count = self._counts.get(name, 0) + 1
            for number, fault in enumerate(self._board.faults):
                until = fault.until
                if until is not None and (until.rank, until.event) == (self._rank, name):
                    self._board.count(number)
                if (fault.rank, fault.at, fault.nth, fault.life) == (self._rank, name, count, self._life):
                    due.append((number, fault))
        for number, fault in due:
            self._do(number, fault)

    def _do(self, number: int, fault: Any) -> None:
        self._board.strike(number)
        if fault.do in ("kill", "restart"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.do == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while not self._board.over(number):  # a gate; a stopped process is woken when it is over
            time.sleep(_LOOK_S)

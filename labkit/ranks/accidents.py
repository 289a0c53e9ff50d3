"""The supervisor's side of faults: strikes at chosen moments, wakes who was stopped, tells planned deaths from real ones."""

import mmap
import os
import signal
import time
from contextlib import suppress

from labkit.ranks import page
from labkit.ranks.faults import Board, from_spec
from labkit.ranks.process import Rank

_CLOSE_LOOK_S = 0.005


class Accidents:
    """One per job. `revive` starts a rank again."""

    def __init__(self, spec: list[dict], memory: mmap.mmap | None, revive) -> None:
        self.board = Board(from_spec(spec))
        self._memory, self._revive = memory, revive
        self._began: dict[tuple[int, int], float] = {}  # (rank, life) -> when its function began
        self._woken: set[int] = set()
        self._due: dict[int, tuple[Rank, float]] = {}  # rank -> (itself, when it is to live again)

    @property
    def tick_s(self) -> float | None:
        """How often to look while something may be due; None for no need."""
        return _CLOSE_LOOK_S if self.board.faults else None

    def planned(self, rank: Rank) -> str:
        """Why this dead rank was to die, in words; '' for an accident that nobody planned. Sees to its return, if it has one."""
        for number, fault in enumerate(self.board.faults):
            mine = (fault.rank, fault.life) == (rank.number, rank.life) and fault.do in ("kill", "restart")
            if mine and self.board.struck_ns(number):
                if fault.do == "restart":
                    self._due[rank.number] = rank, time.monotonic() + (fault.seconds or 0.0)
                    rank.returning = True
                return fault.words
        return ""

    def look(self, ranks: list[Rank]) -> None:
        now = time.monotonic()
        for rank, due in list(self._due.values()):
            if now >= due:
                del self._due[rank.number]
                self._revive(rank)
        for number, fault in enumerate(self.board.faults):
            rank = ranks[fault.rank]
            if rank.life != fault.life or rank.exit is not None:
                continue
            if isinstance(fault.at, str):
                if fault.do == "stop" and self.board.struck_ns(number):
                    self._wake(number, rank)
            elif not self.board.struck_ns(number):
                began = self._begin(rank, now)
                if began is not None and now >= began + fault.at and not rank.finished:
                    self._strike(number, rank)
            elif fault.do == "stop":
                self._wake(number, rank)

    def unsettled(self, ranks: list[Rank]) -> bool:
        """Whether ranks stand still, or may soon move, because of a plan: no time to look for deadlocks."""
        return any(
            rank.returning or self._pending(number, fault, rank)
            for number, fault in enumerate(self.board.faults)
            for rank in [ranks[fault.rank]]
        )

    def _pending(self, number: int, fault, rank: Rank) -> bool:
        struck = self.board.struck_ns(number)
        if rank.finished or rank.life > fault.life:
            return False
        if not isinstance(fault.at, str) and not struck:
            return True
        return bool(struck) and fault.do in ("stop", "hold") and not self.board.over(number)

    def _begin(self, rank: Rank, now: float) -> float | None:
        key = rank.number, rank.life
        if key not in self._began and self._memory is not None and page.read(self._memory, rank.number).state >= page.RUNNING:
            self._began[key] = now
        return self._began.get(key)

    def _strike(self, number: int, rank: Rank) -> None:
        self.board.strike(number)
        how = signal.SIGSTOP if self.board.faults[number].do == "stop" else signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(rank.pid, how)

    def _wake(self, number: int, rank: Rank) -> None:
        if number not in self._woken and self.board.over(number):
            self._woken.add(number)
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGCONT)

"""Sees a deadlock: every rank waits or is done, nothing is noted, and no thread but gloo's own poller gets anything to do.

A loaded machine is not mistaken for one. A rank that computes is not waiting. A rank whose message is under way has a thread
that is ready to run, or soon one whose processor time grows; gloo's poller must have had its turn several times meanwhile.
"""

import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from labkit.ranks import page
from labkit.ranks.deadlock import Situation, assess

QUIET_S = 0.5
QUIET_UNPROVEN_S = 2.0  # all wait in what is noted, though what they wait for may be under way
QUIET_UNNOTED_S = 0.75  # some wait where nothing is noted: then their stacks are asked for, again and again more rarely
QUIET_BLIND_S = 1.0  # without /proc (macOS) only the counts speak, so they must hold longer
POLLER = "gloo_tcp_loop"
POLLER_TURNS = 10
MIN_LOOKS = 5
HAS_PROC = os.path.exists("/proc/self/task")


@dataclass(frozen=True)
class _Thread:
    name: str
    sleeping: bool
    ran_ns: int
    turns: int


def threads_of(pid: int) -> dict[int, _Thread]:
    """Every thread of a process: asleep or not, its processor time and how often it got a processor."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/task/{name}/stat") as file:
                    head, _, tail = file.read().rpartition(")")
                fields = tail.split()
                ran, turns = (int(fields[11]) + int(fields[12])) * 10_000_000, 0
                with suppress(OSError), open(f"/proc/{pid}/task/{name}/schedstat") as file:
                    words = file.read().split()
                    ran, turns = int(words[0]) or ran, int(words[2])
                found[int(name)] = _Thread(head.partition("(")[2], fields[0] == "S", ran, turns)
    return found


def uses_card(pid: int) -> bool:
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/dev/nvidia"):
                    return True
    return False


class Watch:
    """Fed once per tick with who is done; says when the ranks are stuck."""

    def __init__(self, memory: mmap.mmap, pids: list[int]) -> None:
        self.memory, self.pids = memory, pids
        self.noted: tuple | None = None
        self.patience_s = QUIET_UNNOTED_S
        self._reset(None)

    def follow(self, rank: int, pid: int) -> None:
        """`rank` lives on in another process."""
        self.pids[rank] = pid
        self._reset(None)

    def _reset(self, noted: tuple | None) -> None:
        self.noted, self.since, self.looks = noted, time.monotonic(), 0
        self.before: dict[int, dict[int, _Thread]] = {}

    def doubt(self) -> None:
        """The stacks were asked for in vain (asking interrupts system calls): ask less often from now on."""
        self.patience_s *= 2
        self._reset(self.noted)

    def look(self, done: dict[int, str]) -> tuple[Situation | None, float]:
        """The situation and for how many seconds nothing has moved; (None, 0) while something does."""
        noted = (page.changes(self.memory, len(self.pids)), tuple(sorted(done.items())))
        if noted != self.noted:
            self._reset(noted)
            return None, 0.0
        snapshots = [page.read(self.memory, rank) for rank in range(len(self.pids))]
        situation = assess(snapshots, done)
        if situation is None and not HAS_PROC:
            return None, 0.0
        if HAS_PROC and not self._still(snapshots, done):
            self._reset(noted)
            return None, 0.0
        self.looks += 1
        if self.looks < MIN_LOOKS or not self._pollers_had_turns(done):
            return situation, 0.0
        return situation, time.monotonic() - self.since

    def _still(self, snapshots: list[page.Snapshot], done: dict[int, str]) -> bool:
        """No thread of any rank is ready to run or has run since the quiet began (besides gloo's pollers)."""
        for rank, pid in enumerate(self.pids):
            now = threads_of(pid)
            if rank in done:
                # It returned; a thread that it left running may still send.
                if any(thread in now for thread in snapshots[rank].threads):
                    return False
                now = {number: thread for number, thread in now.items() if thread.name == POLLER}
            elif snapshots[rank].waits and any(thread in now for thread in snapshots[rank].threads):
                return False
            before = self.before.setdefault(rank, now)
            polling = {wait.thread for wait in snapshots[rank].waits if wait.kind == "new_group"}  # a file, looked at again and again
            for number, thread in now.items():
                if thread.name == POLLER or number in polling or number == snapshots[rank].restless:
                    continue
                if not thread.sleeping or number not in before or thread.ran_ns != before[number].ran_ns:
                    return False
        return True

    def _pollers_had_turns(self, done: dict[int, str]) -> bool:
        for rank, before in self.before.items():
            if rank in done:
                continue
            now = threads_of(self.pids[rank])
            for number, thread in before.items():
                if thread.name == POLLER and thread.turns and number in now:
                    if now[number].turns - thread.turns < POLLER_TURNS:
                        return False
        return True

"""The thread in each rank that keeps a `Link`'s time: who may transmit when, told to each other in small records.

The receiver of a message matches its send to a receive and books the wire; a collective's first member does so when all have
called it. Records go through one pipe per rank, so a rank that waits sleeps until something is there, or until a moment
that it has been told. The bytes themselves travel over gloo, at the end of the time that the model gives them.
"""

import heapq
import os
import select
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from time import perf_counter
from typing import Any

from labkit.ranks import page
from labkit.ranks.link import Link
from labkit.ranks.link_wires import Wires

Record = struct.Struct("=bqqqqqdd")  # what, group, sender (its number in the group), tag or kind, number, bytes, two moments
OFFER, GO, JOIN, START, WAKE = range(5)
_BEAT_S = 0.2  # while something is under way the supervisor sees a sign of it at least this often


class Engine:
    """One per rank, shared by all its groups. Its lock guards everything that groups and their works keep."""

    def __init__(self, link: Link, folder: str, rank: int, ranks: int, writer: page.Writer) -> None:
        self.link, self.rank, self.writer, self._folder = link, rank, writer, folder
        self.wires = Wires(os.path.join(folder, "wires"), link, ranks)
        self.lock = threading.RLock()
        self.groups: dict[int, Callable[..., None]] = {}  # group -> what takes its records
        self.under_way = 0
        self._early: dict[int, list[tuple]] = {}  # records for a group that this rank has not made yet
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._peers: dict[int, int] = {}
        self._late: dict[int, list[bytes]] = {}  # records that did not fit into a full pipe
        path = self._path(rank)
        os.mkfifo(path, 0o600)
        self._inbox = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        # A rank that computes in Python hands the interpreter over this often, so that what is due is not late.
        sys.setswitchinterval(0.001)
        self.thread = threading.Thread(target=self._run, name="labkit link", daemon=True)
        self.thread.start()
        writer.exempt(self.thread.native_id)

    def _path(self, rank: int) -> str:
        return os.path.join(self._folder, f"link-{rank}")

    def add_group(self, key: int, take: Callable[..., None]) -> None:
        with self.lock:
            self.groups[key] = take
            for record in self._early.pop(key, []):
                take(*record)

    def tell(self, rank: int, *record: Any) -> RuntimeError | None:
        """Send a record to another rank's engine (or this one's); what to raise where that rank has ended."""
        data = Record.pack(*record)
        with self.lock:
            if rank == self.rank:
                self._take(record)
                return None
            if rank not in self._late:
                written = self._write(rank, data)
                if written is not None:
                    return None if written else RuntimeError(f"Connection closed by peer: rank {rank} has ended")
            self._late.setdefault(rank, []).append(data)
            self._wake()
            return None

    def _write(self, rank: int, data: bytes) -> bool | None:
        """True when it is written, None when the pipe is full, False when nobody will ever read it."""
        try:
            if rank not in self._peers:
                self._peers[rank] = os.open(self._path(rank), os.O_WRONLY | os.O_NONBLOCK)
            os.write(self._peers[rank], data)
            return True
        except BlockingIOError:
            return None
        except OSError:
            return False

    def at(self, moment: float, do: Callable[[], None]) -> None:
        """Have the engine's thread call `do` at `moment` (`time.perf_counter()`), with the lock held."""
        with self.lock:
            first = not self._timers or moment < self._timers[0][0]
            heapq.heappush(self._timers, (moment, next(self._order), do))
            if first and threading.current_thread() is not self.thread:
                self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._inbox, Record.pack(WAKE, 0, 0, 0, 0, 0, 0.0, 0.0))

    def _run(self) -> None:
        while True:
            with self.lock:
                while self._timers and self._timers[0][0] <= perf_counter():
                    heapq.heappop(self._timers)[2]()
                if self.under_way:
                    self.writer.touch()
                pauses = [_BEAT_S] if self.under_way else []
                pauses += [max(0.0, self._timers[0][0] - perf_counter())] if self._timers else []
                pauses += [0.001] if self._send_late() else []
            if select.select([self._inbox], [], [], min(pauses, default=None))[0]:
                data = os.read(self._inbox, Record.size * 256)
                with self.lock:
                    for record in Record.iter_unpack(data):
                        self._take(record)

    def _send_late(self) -> bool:
        for rank, waiting in list(self._late.items()):
            written: bool | None = True
            while waiting and written:
                written = self._write(rank, waiting[0])
                if written:
                    waiting.pop(0)
            if not waiting or written is False:
                del self._late[rank]
        return bool(self._late)

    def _take(self, record: tuple) -> None:
        what, key, *_ = record
        if what == WAKE:
            return
        take = self.groups.get(key)
        if take is None:
            self._early.setdefault(key, []).append(record)
        else:
            take(*record)

"""When each wire of a `Link` is free again: one small file of numbers that all ranks of a job share."""

import fcntl
import mmap
import os
from collections.abc import Iterable

from labkit.ranks.link import Link


class Wires:
    """Books transmissions. A lock of the file system makes two ranks book one after the other; it dies with its holder."""

    def __init__(self, path: str, link: Link, ranks: int) -> None:
        self.link, self.ranks = link, ranks
        count = ranks * ranks if link.per == "pair" else 2 * ranks
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, count * 8)
        self._memory = mmap.mmap(self._fd, count * 8)
        self._free = memoryview(self._memory).cast("d")

    def _of(self, source: int, target: int) -> tuple[int, ...]:
        """The numbers of the wires that a message from `source` to `target` keeps busy."""
        if source == target:
            return ()
        return (source * self.ranks + target,) if self.link.per == "pair" else (source, self.ranks + target)

    def book(self, pairs: Iterable[tuple[int, int]], ready: float, seconds: float) -> tuple[float, float]:
        """Start and end of a transmission of `seconds` over the wires of all `pairs`, from `ready` on or when they are free."""
        wires = sorted({wire for pair in pairs for wire in self._of(*pair)})
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            start = max([ready, *(self._free[wire] for wire in wires)])
            for wire in wires:
                self._free[wire] = start + seconds
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return start, start + seconds

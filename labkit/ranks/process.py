"""The supervisor's side of one rank: its pipes, what it said so far, how it ended."""

import fcntl
import os
import tempfile
from contextlib import suppress

from labkit.ranks import wire

OUTPUT_HEAD_BYTES = OUTPUT_TAIL_BYTES = 128 << 10
ERROR_BYTES = 256 << 10
LIVE_BYTES = 256 << 10


class Rank:
    """The supervisor's side of one rank process."""

    def __init__(self, number: int, max_result_bytes: int) -> None:
        self.number = number
        self.life, self.returning = 0, False  # how often it was started again, and whether it is about to be
        self.planned = ""  # why it was to die, in words
        self.head, self.tail, self.output_bytes = bytearray(), bytearray(), 0
        self.stopped: str | None = None  # by the supervisor: timeout, deadlock, interrupted
        self.why = ""  # the same in words
        self.stack = ""
        self.left_behind: list[str] = []
        self.ended = 0.0  # seconds since the job began
        self._limits = {b"D": max_result_bytes, b"X": max_result_bytes, b"E": ERROR_BYTES, b"M": 4096, b"F": 0, b"L": LIVE_BYTES}
        self.dump = tempfile.TemporaryFile()
        fcntl.fcntl(self.dump.fileno(), fcntl.F_SETFL, os.O_APPEND)  # it is emptied between two stacks
        self._open()

    def _open(self) -> None:
        self.pid, self.forked = 0, False
        self.exit: int | None = None  # wait status
        self.out_fd, self.out_write = os.pipe()
        self.result_fd, self.result_write = os.pipe()
        self.release_read, self.release_fd = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # results of many megabytes pass in fewer steps
                fcntl.fcntl(self.result_fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.reader = wire.FrameReader(self._limits, streams={b"L"})

    def live_again(self) -> None:
        """After a death that was planned: a new life, with pipes of its own."""
        self.drain()
        for fd in (self.out_fd, self.result_fd, self.release_fd):
            os.close(fd)
        self.life += 1
        self.planned, self.returning = "", False
        self.add_output(f"[rank {self.number} was killed and starts again]\n".encode())
        self._open()

    def close_rank_side(self) -> None:
        for fd in (self.out_write, self.result_write, self.release_read):
            os.close(fd)
        self.forked = True

    def open_on_the_rank_side(self) -> list[int]:
        """Descriptors that no other rank may keep."""
        return [self.dump.fileno(), *([] if self.forked else [self.out_write, self.result_write, self.release_read])]

    def add_output(self, data: bytes) -> None:
        self.output_bytes += len(data)
        room = OUTPUT_HEAD_BYTES - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        if len(self.tail) > 2 * OUTPUT_TAIL_BYTES:
            del self.tail[:-OUTPUT_TAIL_BYTES]

    @property
    def output(self) -> str:
        tail = self.tail[-OUTPUT_TAIL_BYTES:]
        cut = self.output_bytes - len(self.head) - len(tail)
        note = f"\n[... {cut} bytes of output left out ...]\n".encode() if cut else b""
        return (bytes(self.head) + note + bytes(tail)).decode("utf-8", "replace")

    @property
    def finished(self) -> bool:
        """Has reported everything, or never will."""
        return b"F" in self.reader.frames or self.reader.broken is not None or (self.exit is not None and not self.returning)

    @property
    def failed(self) -> bool:
        return self.finished and b"D" not in self.reader.frames and not self.planned

    def drain(self) -> None:
        """Take what is left in the pipes, without waiting for writers that a grandchild may hold open."""
        for fd, take in ((self.result_fd, self.reader.feed), (self.out_fd, self.add_output)):
            with suppress(BlockingIOError):
                for _ in range(64):  # a process that the rank left may write for ever
                    data = os.read(fd, 1 << 20)
                    if not data:
                        break
                    take(data)

"""`Recorder`: wrap any PyTorch code and learn what it did with memory, operators and messages."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from . import _patches
from ._code import PHASE_SHIFT
from ._labels import Watch
from ._log import Log
from ._mode import RecordingMode
from ._read import read_log
from .categories import CATEGORIES
from .recording import Recording


class Recorder:
    """Context manager that records the PyTorch code run inside it, in this thread and in threads started from it.

    `watch`: modules, optimizers and tensors (one, a list, or a dict from name to those) whose bytes get categories.
    `budget_bytes`: live bytes allowed; the operator that exceeds them raises `torch.OutOfMemoryError`.

    Garbage cycles would make bytes depend on when Python's collector runs: it is off inside, and runs at every mark and
    phase border.
    """

    def __init__(self, watch: object = None, budget_bytes: int | None = None) -> None:
        self.watch = Watch(watch)
        self.log = Log(budget_bytes)
        self.marks: list[dict] = []
        self.phases: list[dict] = []
        self.phase_names = [""]
        self.module_names = [""]
        self._open: list[dict] = []
        self._mode: RecordingMode | None = None
        self._recording: Recording | None = None

    def __enter__(self) -> "Recorder":
        if self._mode is not None:
            raise RuntimeError("a Recorder records once: make a new one")
        self._mode = RecordingMode(self.log)
        for key, name in self.watch.names().items():
            self.module_names.append(name)
            self.log.module_numbers[key] = len(self.module_names) - 1
        _patches.install(self)
        try:
            self.log.start = perf_counter()
            self.scan()
        except BaseException:
            self.log.active = False
            _patches.remove(self)
            raise
        _patches.modes().append(self._mode)
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)
        _patches.modes().remove(self._mode)
        try:
            self.scan(collect=True)
        finally:
            self.log.active = False
            self.seconds = perf_counter() - self.log.start
            _patches.remove(self)

    def scan(self, collect: bool = False) -> None:
        """Give what is watched its categories; collect garbage first if asked to."""
        if collect:
            gc.collect()
        self.watch.scan(self.log)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what runs inside; phases nest and repeat. Garbage is collected at both ends."""
        log = self.log
        if name not in self.phase_names:
            self.phase_names.append(name)
        self.scan(collect=True)
        entry = {"name": name, "start_s": self._now(), "first_event": log.event_count(), "first_op": log.op_count()}
        entry |= {"end_s": None, "last_event": None, "last_op": None, "depth": len(self._open)}
        self.phases.append(entry)
        self._open.append(entry)
        self._set_context()
        try:
            yield
        finally:
            if log.active:
                self.scan(collect=True)
                entry |= {"end_s": self._now(), "last_event": log.event_count(), "last_op": log.op_count()}
            self._open.remove(entry)
            self._set_context()

    def mark(self, name: str) -> int:
        """Name this instant, after collecting garbage. Returns the live bytes."""
        self.scan(collect=True)
        self.marks.append({"name": name, "seconds": self._now(), "event": self.log.event_count()})
        return self.log.total

    def live(self, cursor: int = 0) -> dict:
        """The state now, for a display; cheap and safe from another thread.

        `cursor` is the "cursor" of the last answer; "points" are the changes since, as (seconds, live bytes) rows.
        """
        log = self.log
        return {
            "bytes": log.total,
            "peak_bytes": log.peak,
            "by_category": dict(zip(CATEGORIES, log.by_category, strict=True)),
            "phase": self._open[-1]["name"] if self._open else "",
            "seconds": self._now(),
        }

    def snapshot(self) -> Recording:
        """What has been recorded so far, as plain data."""
        return read_log(self)

    @property
    def recording(self) -> Recording:
        """What has been recorded; while the recorder still runs, what has been so far."""
        if self.log.active:
            return self.snapshot()
        if self._recording is None:
            self._recording = self.snapshot()
        return self._recording

    def _now(self) -> float:
        return perf_counter() - self.log.start

    def _set_context(self) -> None:
        name = self._open[-1]["name"] if self._open else ""
        self.log.context = self.phase_names.index(name) << PHASE_SHIFT

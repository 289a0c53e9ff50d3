"""`Recorder`: wrap any PyTorch code and learn what it did with memory, operators and messages."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from . import _patches
from ._code import FIRST_SEEN, PHASE_SHIFT
from ._labels import Watch
from ._log import Log
from ._mode import RecordingMode
from ._read import read_log
from ._samplers import cuda_sampler
from .categories import CATEGORIES
from .follow import Follower
from .recording import Recording


class Recorder:
    """Context manager that records the PyTorch code run inside it, in this thread and in threads started from it.

    `watch`: modules, optimizers and tensors (one, a list, or a dict from name to those) whose bytes get categories and
    names; they are held weakly. `budget_bytes`: live bytes allowed; the operator that exceeds them raises
    `torch.OutOfMemoryError`.

    Garbage cycles would make bytes depend on when Python's collector runs: it is off inside, and runs at every mark and
    phase border. (Cycles among objects older than the recorder are left to the collector's next run after it.) What it
    notes takes about 32 bytes per operator and 64 per allocation: 60 KB for a step of a small transformer.
    """

    def __init__(self, watch: object = None, budget_bytes: int | None = None) -> None:
        self.log = Log(budget_bytes)
        self.marks: list[dict] = []
        self.phases: list[dict] = []
        self.phase_names = [""]
        self.seconds = 0.0
        self.started = 0.0  # time.time() at the start, to lay recordings of several processes beside each other
        self._scanned: tuple[int, int] | None = None  # sizes of the buffers when the watched things were last looked at
        self._watch = Watch()
        self._watch.add(watch)
        self._open: list[dict] = []
        self._mode: RecordingMode | None = None
        self._recording: Recording | None = None

    def __enter__(self) -> "Recorder":
        if self._mode is not None:
            raise RuntimeError("a Recorder records once: make a new one")
        log = self.log
        self._mode = RecordingMode(log)
        _patches.install(self)
        try:
            log.sampler = cuda_sampler(log)
            log.start, self.started = time.perf_counter(), time.time()
            self.scan()
            if log.budget is not None and log.total > log.budget:
                log.refuse(log.total, FIRST_SEEN, 0)
        except BaseException:
            self._stop()
            raise
        _patches.own_modes().append(self._mode)
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)
        _patches.own_modes().remove(self._mode)
        try:
            self.scan(collect=True)
        finally:
            self._stop()

    def _stop(self) -> None:
        self.seconds = self._now()
        self.log.active = False
        _patches.remove(self)

    def watch(self, things: object) -> None:
        """Watch more: what was made inside, say. Same forms as the constructor's `watch`."""
        self._watch.add(things)
        self._scanned = None
        if self._mode is not None and self.log.active:
            self.scan()

    def watching(self, optimizer: object) -> bool:
        """Whether an optimizer is watched."""
        return any(ref() is optimizer for _, ref in self._watch.optimizers)

    @property
    def module_names(self) -> list[str]:
        """Names of the watched modules, by the number in a row's code."""
        return self._watch.module_names

    def scan(self, collect: bool = False) -> None:
        """Give what is watched its categories now; collect garbage first if asked to."""
        if collect:
            gc.collect()
            self.log.settle()
            if self.log.sampler is not None:
                self.log.sampler.sample()
        now = len(self.log.ops), len(self.log.events)
        if now != self._scanned:  # where one phase ends and the next begins, once is enough
            self._watch.scan(self.log)
            self._scanned = len(self.log.ops), len(self.log.events)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what runs inside; phases nest and repeat. Garbage is collected at both ends."""
        log = self.log
        self._need_running()
        if name not in self.phase_names:
            self.phase_names.append(name)
        self.scan(collect=True)
        entry = {
            "name": name, "number": len(self.phases), "depth": len(self._open),
            "start_s": self._now(), "first_event": log.event_count(), "first_op": log.op_count(),
            "end_s": None, "last_event": None, "last_op": None,
        }  # fmt: skip
        self.phases.append(entry)
        self._open.append(entry)
        self._set_context()
        try:
            yield
        finally:
            log.in_optimizer = False  # an optimizer's step that raised has not said that it ended
            if log.active:
                self.scan(collect=True)
                entry.update(last_event=log.event_count(), last_op=log.op_count(), end_s=self._now())
            self._open.remove(entry)  # not always the last: generators may leave theirs out of order
            self._set_context()

    def mark(self, name: str) -> int:
        """Name this instant, after collecting garbage. Returns the live bytes."""
        self._need_running()
        self.scan(collect=True)
        self.marks.append({"name": name, "seconds": self._now(), "event": self.log.event_count()})
        return self.log.total

    def live(self) -> dict:
        """The state now, for a display; a few microseconds, from any thread.

        Keys: bytes, peak_bytes, by_category, phase, op (that allocated last), seconds, refusals (count).
        """
        log = self.log
        opened = self._open[-1:]
        return {
            "bytes": log.total,
            "peak_bytes": log.peak,
            "by_category": dict(zip(CATEGORIES, log.by_category, strict=True)),
            "phase": opened[0]["name"] if opened else "",
            "op": log.table.names[log.last_allocation],
            "seconds": self._now() if log.active else self.seconds,
            "refusals": len(log.refusals),
        }

    def follow(self) -> Follower:
        """A reader of what is new since its last poll, for a display in another thread."""
        return Follower(self)

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

    def _need_running(self) -> None:
        if self._mode is None or not self.log.active:
            raise RuntimeError("phases and marks belong inside `with Recorder() as rec:`")

    def _now(self) -> float:
        return time.perf_counter() - self.log.start

    def _set_context(self) -> None:
        name = self._open[-1]["name"] if self._open else ""
        self.log.context = self.phase_names.index(name) << PHASE_SHIFT

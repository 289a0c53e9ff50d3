"""What a call on a modelled wire hands back: a `Work` that is done when the model and the real bytes both are."""

import datetime
import threading
import time
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from labkit.ranks.link_engine import Engine
from labkit.recorder import Transit, note_message

_COPIED_BYTES_S = 8e8  # a cautious guess of what gloo moves between two processes of a machine
_GRACE_S = 0.0005  # who waits comes first; the engine then has nothing left to do


def _nothing() -> None:
    """A step that has been taken."""


class LinkWork(dist.Work):
    """One message or collective on its way. `deliver`: a collective's last step, which puts its result where it belongs."""

    def __init__(self, engine: Engine, tensors: list[torch.Tensor], transit: Transit, peer: int | None) -> None:
        super().__init__()
        self.engine, self.tensors, self.transit, self.peer = engine, tensors, transit, peer
        self.deliver: Callable[[], None] | None = None
        self.unstage: Callable[[], None] = _nothing  # a message's last step, where its bytes came over the host
        self._moving = threading.Event()  # the real bytes have been handed to gloo (or it has failed)
        self._real: list[Any] = []
        self._done_at = 0.0
        self._error: Exception | None = None
        self._done = False
        self._finishing = threading.Lock()
        self._future: torch.futures.Future | None = None

    # Called by the engine's thread or a posting one, with the engine's lock held.

    def runs(self, start: float, end: float, done_at: float, move: Callable[[], list[Any]]) -> None:
        """It is on the wire from `start` to `end`, done at `done_at`. `move` starts the real copy: of a collective's inputs,
        which were taken when it was called, at once, and of a message late.
        """
        self.transit.took(start + done_at - end, done_at)
        self._done_at = done_at
        self.engine.under_way += 1
        late = end - min((end - start) / 2, self.real_bytes / _COPIED_BYTES_S)
        self.engine.at(start if self.deliver else late, lambda: self._move(move))

    @property
    def real_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def _move(self, move: Callable[[], list[Any]]) -> None:
        try:
            self._real = move()
        except Exception as error:
            self._error = error
        self._moving.set()
        self.engine.at(self._done_at + _GRACE_S, self._end)

    def _end(self) -> None:
        """The model says that it is done. A collective is delivered from here even if nobody waits for it."""
        if self.deliver is not None and not self._done:
            if not all(work.is_completed() for work in self._real):
                self.engine.at(perf_counter() + 0.0005, self._end)
                return
            self._finish()
        self.engine.under_way -= 1

    def fail(self, error: Exception) -> None:
        self._error = error
        self._moving.set()
        self._finish()

    # Called by whoever waits.

    def _finish(self) -> None:
        with self._finishing:
            if self._done:
                return
            try:
                if self._error is None:
                    for work in self._real:
                        work.wait()
                    self.unstage()
                    late = self._done_at - perf_counter()
                    if late > 0:
                        time.sleep(late)
                    if self.deliver is not None:
                        with _disable_current_modes():
                            self.deliver()
            except Exception as error:
                self._error = error
            self._done = True
            self._real = []
            self.unstage = _nothing
            if self.deliver is not None:  # it holds copies of the tensors
                self.deliver = _nothing
            if self._future is not None:
                self._future.set_result(None)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return when it is done; RuntimeError when it failed or `timeout` is over. (C++ passes a timeout of 0 for none.)"""
        start = perf_counter()
        if not self._moving.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError(f"Timed out waiting {timeout} for a message on a simulated link")
        self._finish()
        note_message("wait", start, peer=self.peer, simulated=True)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if self._moving.is_set() and (self._error is not None or perf_counter() >= self._done_at):
            self._finish()
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self.tensors

    def get_future(self) -> torch.futures.Future:
        """A future of the tensors; DDP waits for collectives through it."""
        with self.engine.lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done:
                    self._future.set_result(None)
                elif self.deliver is None:
                    threading.Thread(target=self._follow, name="labkit message", daemon=True).start()
            return self._future.then(self._outcome)  # raised in a callback, an error reaches C++ as one

    def _outcome(self, _: torch.futures.Future) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self.tensors

    def _follow(self) -> None:
        self._moving.wait()
        self._finish()

"""All-reduces whose results arrive at the wait and no sooner, on any machine: what touches a buffer in flight shows every time."""

from typing import Any

import torch
import torch.distributed as dist


class LateWork:
    """Stands for the work of an all-reduce of copies. Its results reach the caller's tensors when somebody learns that it is done."""

    def __init__(
        self, work: Any, given: list[torch.Tensor], sent: list[torch.Tensor], inner: list[torch.Tensor], faults: list[str]
    ) -> None:
        self._work, self._given, self._sent, self._inner, self._faults = work, given, sent, inner, faults
        self._delivered = False

    def _deliver(self) -> None:
        if self._delivered:
            return
        self._delivered = True
        for given, sent, inner in zip(self._given, self._sent, self._inner, strict=True):
            there = given.detach()
            if not torch.equal(there.nan_to_num(), sent.nan_to_num()):
                self._faults.append("late-write")
            there.copy_(inner)

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        self._work.wait(*args, **kwargs)
        self._deliver()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            self._deliver()
        return done

    def result(self) -> list[torch.Tensor]:
        self._deliver()
        return self._given

    def get_future(self) -> torch.futures.Future:
        def told(_: Any) -> list[torch.Tensor]:
            self._deliver()
            return self._given

        return self._work.get_future().then(told)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def late_all_reduces() -> list[str]:
    """Make this process's all-reduces arrive late, for good; returns the list that faults are noted in: "late-write"."""
    original = dist.ProcessGroup.allreduce
    faults: list[str] | None = getattr(original, "faults", None)
    if faults is not None:  # they do already
        faults.clear()
        return faults
    faults = []

    def allreduce(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        sent, inner = ([tensor.detach().clone() for tensor in given] for _ in range(2))
        return LateWork(original(group, inner, *args, **kwargs), given, sent, inner, faults)

    allreduce.faults = faults
    dist.ProcessGroup.allreduce = allreduce
    return faults

"""The process group of ranks that share a card: gloo moves what is on the CPU, and over the host what is on the card.

NCCL wants a card per rank, and gloo itself takes few of its calls with CUDA tensors. Here all take them: inputs are
copied to the host when a call is made, results to the card when it is waited for.
"""

import datetime
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from labkit.ranks import calls
from labkit.recorder import Transit, note_message
from labkit.recorder._comm import _called_from, traffic


def needs_host(tensor: torch.Tensor) -> bool:
    """Whether gloo is better not given this tensor itself."""
    return tensor.device.type != "cpu"


class StagedWork(dist.Work):
    """What gloo does with copies on the host; `deliver` brings the results back, once, in the thread that asks for them."""

    def __init__(
        self, real: list[Any], tensors: list[torch.Tensor], deliver: Callable[[], None], transit: Transit, peer: int | None
    ) -> None:
        super().__init__()
        self._real, self._tensors, self._deliver, self._transit, self._peer = real, tensors, deliver, transit, peer
        self._began, self._done = perf_counter(), False

    def _finish(self) -> None:
        if not self._done:
            self._done = True
            with _disable_current_modes():
                self._deliver()
            self._transit.took(self._began, perf_counter())

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        start = perf_counter()
        for work in self._real:
            work.wait(timeout) if timeout else work.wait()
        self._finish()
        note_message("wait", start, peer=self._peer)
        return True

    def is_completed(self) -> bool:
        if not self._done and all(work.is_completed() for work in self._real):
            self.wait()
        return self._done

    def is_success(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """A future of the tensors, which DDP asks for."""

        def brought(future: torch.futures.Future) -> list[torch.Tensor]:
            future.wait()
            self._finish()
            return self._tensors

        return torch.futures.collect_all([work.get_future() for work in self._real]).then(brought)


class StagedGroup(dist.ProcessGroup):
    """A group of ranks (numbered within the group) over `gloo`."""

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, members: list[int], name: str) -> None:
        super().__init__(rank, len(members))
        self.gloo, self.number, self.members, self.label = gloo, rank, members, name
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        return "staged"

    def _note(self, kind: str, size: int, sent: int, received: int, peer: int | None, asynchronous: bool) -> Transit:
        return Transit(
            kind, simulated=False, bytes_sent=sent, bytes_received=received, payload_bytes=size, peer=peer, group=self.label,
            group_size=len(self.members), asynchronous=asynchronous,
        )  # fmt: skip

    def _message(self, kind: str, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        name = "recv_anysource" if peer < 0 else kind
        where = (tag,) if peer < 0 else (peer, tag)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        sent = size if kind == "send" else 0
        member = None if peer < 0 else self.members[peer]
        transit = self._note(kind, size, sent, size - sent, member, not _called_from((kind,)))
        with _disable_current_modes():
            copies = calls.copied(tensors) if any(needs_host(tensor) for tensor in tensors) else tensors
            work = getattr(self.gloo, name)(copies, *where)
        deliver = (lambda: calls.put(tensors, copies)) if kind == "recv" and copies is not tensors else lambda: None
        staged = StagedWork([work], tensors, deliver, transit, member)
        staged._source_rank = lambda: work._source_rank()
        return staged

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> dist.Work:
        return self._message("send", tensors, dst_rank, tag)

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> dist.Work:
        return self._message("recv", tensors, src_rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        return self._message("recv", tensors, -1, tag)

    def _collective(self, method: str, *args: Any, **kwargs: Any) -> dist.Work:
        opts = kwargs.get("opts", next((arg for arg in args if type(arg).__name__.endswith("Options")), None))
        kind, root = calls.kind(method), getattr(opts, "rootRank", -1)
        size = max((sum(tensor.numel() * tensor.element_size() for tensor in calls.flat(arg)) for arg in args), default=0)
        transit = self._note(
            kind, size, *traffic(kind, size, len(self.members), root == self.number),
            self.members[root] if root >= 0 else None, bool(getattr(opts, "asyncOp", True)),
        )  # fmt: skip
        outputs = calls.flat(args[0]) if kind != "barrier" else []
        staged = any(needs_host(tensor) for arg in args for tensor in calls.flat(arg))
        with _disable_current_modes():
            copies = tuple(calls.copied(arg) for arg in args) if staged else args
            real = calls.run(self.gloo, method, copies, kwargs)
        mine = staged and (kind not in ("reduce", "gather") or root == self.number)
        deliver = (lambda: calls.put(outputs, calls.flat(copies[0]))) if mine else lambda: None
        return StagedWork(real, outputs, deliver, transit, None)


def _method(name: str) -> Callable[..., dist.Work]:
    def call(self: StagedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self._collective(name, *args, **kwargs)

    call.__name__ = name
    return call


for _name in calls.METHODS:
    setattr(StagedGroup, _name, _method(_name))

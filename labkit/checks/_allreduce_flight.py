"""Messages on their way: who touches a buffer between the call that posts it and the wait that ends it.

A dispatch mode sees every operator's operands; wrappers around `ProcessGroup` and `Work` see what is posted and waited for, by whichever
of torch.distributed's functions. Events only, so that a busy machine changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_NOT_READ = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")  # ask an operand for its shape only
_KEPT = 8


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@cache
def _written(func: Any) -> frozenset[int | str]:
    """Positions and names of the arguments that an operator writes to."""
    marked = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return frozenset(key for pair in marked for key in pair)


@cache
def _touches_nothing(func: Any) -> bool:
    """Views, and operators that look at an operand's shape only."""
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return is_view or func._schema.name.endswith(_NOT_READ)


def overlaps(tensor: torch.Tensor, low: int, high: int) -> bool:
    """Whether any element of `tensor` lies in the bytes from address `low` up to `high`."""
    if tensor.numel() == 0 or low >= high:
        return False
    size, start = tensor.element_size(), tensor.data_ptr()
    last = start + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) * size
    if last + size <= low or start >= high:
        return False
    if tensor.is_contiguous():
        return True
    at = np.zeros((), dtype=np.int64)
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + np.arange(n) * stride
    at = start + at * size
    return bool(((at + size > low) & (at < high)).any())


class Flight(TorchDispatchMode):
    """Notes what happens to buffers of this rank's messages while they are in flight.

    faults : [{"kind", "told"}], the first few, in order. Kinds: "sent" (written while it is being sent), "early" (read or written
             before what it receives has arrived), "unfinished" (nobody waited for it)
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[dict[str, str]] = []
        self._open: dict[int, tuple[Any, str, torch.Tensor, int, int, Any]] = {}  # id of its Work -> the message
        self._undo: list[Callable[[], None]] = []

    # What is posted and what is over

    def __enter__(self) -> "Flight":
        for name, way in (("send", "sent"), ("recv", "early"), ("recv_anysource", "early")):
            self._wrap(dist.ProcessGroup, name, self._posting(way, name))
        for name in ("wait", "synchronize", "get_future", "is_completed"):
            self._wrap(dist.Work, name, self._ending)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: type, name: str, around: Callable[[Callable], Callable]) -> None:
        plain = getattr(owner, name)
        setattr(owner, name, around(plain))
        self._undo.append(lambda: setattr(owner, name, plain))

    def _posting(self, way: str, name: str) -> Callable[[Callable], Callable]:
        def around(plain: Callable) -> Callable:
            def post(group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
                peer = None if name == "recv_anysource" else (args or tuple(kwargs.values()) or (None,))[0]
                for tensor in tensors:
                    self._note(tensor, f"a {name.partition('_')[0]} of the same memory was posted", writes=way == "early")
                work = plain(group, tensors, *args, **kwargs)
                if work is not None:
                    (tensor,) = tensors
                    low = tensor.data_ptr()
                    self._open[id(work)] = (work, way, tensor, low, low + tensor.numel() * tensor.element_size(), peer)
                return work

            return post

        return around

    def _ending(self, plain: Callable) -> Callable:
        def end(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(work, *args, **kwargs)
            if result is not False:  # of is_completed
                self._open.pop(id(work), None)
            return result

        return end

    def finish(self) -> None:
        """The candidate has returned: what it did not wait for is a fault, and is waited for now."""
        for work, way, _, low, high, peer in list(self._open.values()):
            what = "a send to" if way == "sent" else "a receive from"
            self._fault("unfinished", f"{what} rank {peer} ({high - low} bytes) was not waited for")
            work.wait()

    # Who touches what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._open and func.namespace not in ("c10d", "_c10d_functional") and not _touches_nothing(func):
            writes = _written(func)
            for key, value in (*enumerate(args), *kwargs.items()):
                for tensor in _tensors([value]):
                    self._note(tensor, f"{func._schema.name.rpartition(':')[2]} ran", writes=key in writes)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor, what: str, writes: bool) -> None:
        for _, way, _, low, high, peer in list(self._open.values()):  # another thread may post meanwhile
            if (writes or way == "early") and overlaps(tensor, low, high):
                told = f"sent to rank {peer}" if way == "sent" else f"received from rank {peer}"
                self._fault(way, f"{what} on {high - low} bytes that were still being {told}")
                return

    def _fault(self, kind: str, told: str) -> None:
        if len(self.faults) < _KEPT:
            self.faults.append({"kind": kind, "told": told})

"""Inside a rank: have torch.distributed note in the page what it posts and where it waits.

The methods of ``ProcessGroup`` and ``Work`` are wrapped, below ``torch.distributed``'s functions: every way of calling from Python
passes there (plain and async calls, batches, object collectives, FSDP2). Calls from C++ (DDP's reducer, functional collectives)
do not; for these the supervisor looks at the stack.
"""

import functools
import threading
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.ranks import here, page

# ProcessGroup method -> what a learner calls it. Names of several torch versions; those that are missing are skipped.
_COLLECTIVES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced", "broadcast": "broadcast", "reduce": "reduce",
    "allgather": "all_gather", "_allgather_base": "all_gather_into_tensor", "all_gather_single": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced", "allgather_into_tensor_coalesced": "all_gather_coalesced",
    "all_gather_single_coalesced": "all_gather_coalesced", "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single", "all_to_all_single": "all_to_all_single", "barrier": "barrier",
}
_UNKNOWN = (0, 0, page.ANY_PEER, 0, 0)


def install(writer: page.Writer, *types: tuple[type, type]) -> None:
    """Wrap this process's ``ProcessGroup`` and ``Work``, and subclasses of both that override their methods; once."""
    noted = _Notes(writer)
    noted.install()
    for group_type, work_type in types:
        noted.wrap(group_type, work_type)


class _Notes:
    def __init__(self, writer: page.Writer) -> None:
        self.writer = writer
        self.works: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Work -> what a wait on it waits for
        self.groups: dict[str, tuple[int, list[int]]] = {}

    def install(self) -> None:
        self.wrap(dist.ProcessGroup, dist.Work)
        new_group = self._new_group(dist.new_group)
        dist.new_group = distributed_c10d.new_group = new_group
        self._threads()

    def wrap(self, group_type: type, work_type: type) -> None:
        for method, kind in _COLLECTIVES.items():
            if hasattr(group_type, method):
                setattr(group_type, method, self._collective(getattr(group_type, method), page.KINDS.index(kind)))
        group_type.send = self._message(group_type.send, page.SEND, page.KINDS.index("send"))
        group_type.recv = self._message(group_type.recv, page.RECV, page.KINDS.index("recv"))
        group_type.recv_anysource = self._any_source(group_type.recv_anysource)
        work_type.wait = self._wait(work_type.wait)

    def _threads(self) -> None:
        """Waiting for another thread of this process, without end, is a wait too: a thread that is stuck takes its waiters along."""
        writer, kind = self.writer, page.KINDS.index("thread")

        def noted(original: Callable) -> Callable:
            @functools.wraps(original)
            def wait(self, timeout=None):
                if timeout is not None or writer.waits():
                    return original(self, timeout)
                at = writer.begin_wait(kind, 0, page.ANY_PEER, 0, 0)
                try:
                    return original(self)
                finally:
                    writer.end_wait(at)

            return wait

        def start(self):
            plain_start(self)
            writer.note_threads()

        plain_start = threading.Thread.start
        threading.Thread.start = functools.wraps(plain_start)(start)
        threading.Thread.join = noted(threading.Thread.join)
        threading.Condition.wait = noted(threading.Condition.wait)

    def _group(self, group: dist.ProcessGroup) -> tuple[int, list[int]]:
        name = group.group_name
        known = self.groups.get(name)
        if known is None:
            known = page.group_key(name), dist.get_process_group_ranks(group)
            self.groups[name] = known
            self.writer.add_group(*known)
        return known

    def _collective(self, original: Callable, kind: int) -> Callable:
        @functools.wraps(original)
        def noted(group, *args, **kwargs):
            key, _ = self._group(group)
            here.reached(page.KINDS[kind])
            index = self.writer.post(page.COLLECTIVE, key, 0, 0)
            work = original(group, *args, **kwargs)
            self._remember(work, (kind, key, page.ANY_PEER, 0, index))
            return work

        return noted

    def _message(self, original: Callable, direction: int, kind: int) -> Callable:
        named = ("dstRank", "srcRank")

        @functools.wraps(original)
        def noted(group, tensors, *args, **kwargs):
            key, members = self._group(group)
            peer = args[0] if args else next((kwargs[name] for name in named if name in kwargs), page.ANY_PEER)
            if not 0 <= peer < len(members):  # gloo would wait for it to be born
                raise ValueError(f"there is no rank {peer}: ranks go from 0 to {len(members) - 1}")
            other = members[peer]
            tag = args[1] if len(args) > 1 else kwargs.get("tag", 0)
            here.reached(page.KINDS[kind])
            index = self.writer.post(direction, key, other, tag)
            work = original(group, tensors, *args, **kwargs)
            self._remember(work, (kind, key, other, tag, index))
            return work

        return noted

    def _any_source(self, original: Callable) -> Callable:
        kind = page.KINDS.index("recv from any rank")

        @functools.wraps(original)
        def noted(group, tensors, tag):
            key, _ = self._group(group)
            here.reached("recv")
            index = self.writer.post(page.RECV, key, page.ANY_PEER, tag)
            work = original(group, tensors, tag)
            self._remember(work, (kind, key, page.ANY_PEER, tag, index))
            return work

        return noted

    def _new_group(self, original: Callable) -> Callable:
        """Making a group waits for its members; every rank of the job must call it, members or not."""
        kind, key = page.KINDS.index("new_group"), page.group_key("new_group")

        @functools.wraps(original)
        def noted(*args, **kwargs):
            self.writer.add_group(key, list(range(dist.get_world_size())))
            index = self.writer.post(page.COLLECTIVE, key, 0, 0)
            local = kwargs.get("use_local_synchronization", False)
            at = self.writer.begin_wait(*(_UNKNOWN if local else (kind, key, page.ANY_PEER, 0, index)))
            try:
                return original(*args, **kwargs)
            finally:
                self.writer.end_wait(at)

        return noted

    def _remember(self, work: dist.Work | None, waits_for: tuple[int, int, int, int, int]) -> None:
        if work is not None:
            self.works[work] = waits_for

    def _wait(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def noted(work, *args, **kwargs):
            if any(args) or any(kwargs.values()):  # a wait with a timeout ends by itself
                return original(work, *args, **kwargs)
            here.reached("wait")
            at = self.writer.begin_wait(*self.works.get(work, _UNKNOWN))
            try:
                return original(work, *args, **kwargs)
            finally:
                self.writer.end_wait(at)

        return noted

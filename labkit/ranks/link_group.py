"""The process group of a job with a `Link`: plain `torch.distributed` calls that take modelled time.

As with gloo a send is done only when its receive is posted, and its bytes are read late: what is written into a buffer in
flight arrives. A collective reads its inputs when it is called and writes its outputs when it is done.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from labkit.ranks import calls, page
from labkit.ranks.link import seconds_of
from labkit.ranks.link_engine import GO, JOIN, OFFER, START, Engine
from labkit.ranks.link_work import LinkWork
from labkit.recorder import Transit
from labkit.recorder._comm import _called_from, traffic

KINDS = (
    "barrier", "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
)
_ANY = -1


class LinkGroup(dist.ProcessGroup):
    """A group of ranks (numbered within the group) whose messages take `engine`'s wires; `gloo` moves the bytes."""

    def __init__(self, engine: Engine, gloo: dist.ProcessGroupGloo, rank: int, members: list[int], name: str) -> None:
        super().__init__(rank, len(members))
        self.engine, self.gloo, self.number, self.members, self.label = engine, gloo, rank, members, name
        self.key = page.group_key(name)
        self._sent: dict[int, int] = defaultdict(int)
        self._sends: dict[tuple[int, int], LinkWork] = {}
        self._offers: dict[int, deque] = defaultdict(deque)  # tag -> sends that no receive has matched
        self._wanted: dict[int, deque] = defaultdict(deque)  # tag -> receives that no send has matched
        self._called = 0
        self._calls: dict[int, tuple[LinkWork, Callable[[], list]]] = {}
        self._joined: dict[int, list[tuple]] = defaultdict(list)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        engine.add_group(self.key, self._take)

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        return "link"

    def _take(self, what: int, _: int, *record: Any) -> None:
        {OFFER: self._offered, GO: self._go, JOIN: self._join, START: self._start}[what](*record)

    # Messages

    def _message(self, kind: str, tensors: list[torch.Tensor], peer: int | None) -> LinkWork:
        (tensor,) = tensors
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        size = tensor.numel() * tensor.element_size()
        sent = size if kind == "send" else 0
        member = None if peer is None else self.members[peer]
        transit = Transit(
            kind, bytes_sent=sent, bytes_received=size - sent, payload_bytes=size, peer=member, group=self.label,
            group_size=len(self.members), asynchronous=not _called_from((kind,)),
        )  # fmt: skip
        return LinkWork(self.engine, list(tensors), transit, member)

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> LinkWork:
        work = self._message("send", tensors, dst_rank)
        with self.engine.lock:
            self._sent[dst_rank] += 1
            number = self._sent[dst_rank]
            self._sends[dst_rank, number] = work
            offer = OFFER, self.key, self.number, tag, number, work.real_bytes, perf_counter(), 0.0
            ended = self.engine.tell(self.members[dst_rank], *offer)
        if ended:
            raise ended
        return work

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> LinkWork:
        return self._receive(self._message("recv", tensors, src_rank), src_rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> LinkWork:
        return self._receive(self._message("recv", tensors, None), _ANY, tag)

    def _receive(self, work: LinkWork, source: int, tag: int) -> LinkWork:
        posted = perf_counter()
        with self.engine.lock:
            for offer in self._offers[tag]:
                if source in (_ANY, offer[0]):
                    self._offers[tag].remove(offer)
                    self._match(work, posted, *offer)
                    return work
            self._wanted[tag].append((source, posted, work))
        return work

    def _offered(self, sender: int, tag: int, number: int, size: int, posted: float, _: float) -> None:
        for wanted in self._wanted[tag]:
            if wanted[0] in (_ANY, sender):
                self._wanted[tag].remove(wanted)
                self._match(wanted[2], wanted[1], sender, number, size, posted)
                return
        self._offers[tag].append((sender, number, size, posted))

    def _match(self, work: LinkWork, wanted: float, sender: int, number: int, size: int, offered: float) -> None:
        link = self.engine.link
        pair = self.members[sender], self.engine.rank
        start, end = self.engine.wires.book([pair], max(wanted, offered), size / link.bandwidth_bytes_s)
        work.peer = pair[0]
        work.transit.met(pair[0])
        work._source_rank = lambda: sender
        fits = size <= work.real_bytes
        ended = self.engine.tell(pair[0], GO, self.key, self.number, 0, number, size if fits else -1, start, end)
        if ended:
            work.fail(ended)
            return
        if not fits:
            work.fail(RuntimeError(f"rank {pair[0]} sends {size} bytes, but this receive has room for {work.real_bytes}"))
            return
        work.runs(start, end, end + link.latency_s, lambda: self._get(work, sender, number, size))

    def _get(self, work: LinkWork, sender: int, number: int, size: int) -> list:
        (tensor,) = work.tensors
        if size == 0:
            return []
        if tensor.is_cuda:
            there, tensor = tensor, torch.empty_like(tensor, device="cpu")
            work.unstage = lambda: calls.put([there], [tensor])
        room = tensor if size == work.real_bytes else tensor.view(-1).view(torch.uint8)[:size]
        return [self.gloo.recv([room], sender, number)]

    def _go(self, receiver: int, _: int, number: int, size: int, start: float, end: float) -> None:
        work = self._sends.pop((receiver, number))
        if size < 0:
            work.fail(RuntimeError(f"rank {self.members[receiver]} has no room for the {work.real_bytes} bytes of this send"))
            return
        tensors = [] if size == 0 else work.tensors
        work.runs(start, end, end, lambda: [self.gloo.send([tensor.cpu()], receiver, number) for tensor in tensors])

    # Collectives

    def _collective(self, method: str, *args: Any, **kwargs: Any) -> LinkWork:
        opts = kwargs.get("opts", next((arg for arg in args if type(arg).__name__.endswith("Options")), None))
        kind, root = calls.kind(method), getattr(opts, "rootRank", -1)
        outputs = [] if method == "barrier" else calls.flat(args[0])
        size = max((sum(t.numel() * t.element_size() for t in calls.flat(arg)) for arg in args), default=0)
        sent, received = traffic(kind, size, len(self.members), root == self.number)
        transit = Transit(
            kind, bytes_sent=sent, bytes_received=received, payload_bytes=size, group=self.label,
            peer=self.members[root] if root >= 0 else None, group_size=len(self.members),
            asynchronous=bool(getattr(opts, "asyncOp", True)),
        )  # fmt: skip
        work = LinkWork(self.engine, outputs, transit, None)
        with _disable_current_modes():
            copies = tuple(calls.copied(arg) for arg in args)
        mine = kind != "barrier" and (kind not in ("reduce", "gather") or root == self.number)
        work.deliver = lambda: calls.put(outputs, calls.flat(copies[0])) if mine else None
        move = lambda: calls.run(self.gloo, method, copies, kwargs)  # noqa: E731
        with self.engine.lock:
            self._called += 1
            self._calls[self._called] = work, move
            code = KINDS.index(kind) | (root + 1) << 8
            join = JOIN, self.key, self.number, code, self._called, size, perf_counter(), 0.0
            ended = self.engine.tell(self.members[0], *join)
        if ended:
            raise ended
        return work

    def _join(self, member: int, code: int, number: int, size: int, posted: float, _: float) -> None:
        """At the group's first member: when all have called their `number`-th collective, it can start."""
        joined = self._joined[number]
        joined.append((member, code, size, posted))
        if len(joined) < len(self.members):
            return
        del self._joined[number]
        kind, root = KINDS[code & 0xFF], (code >> 8) - 1
        odd = next((m for m, other, _, _ in joined if other != joined[0][1]), None)
        start, done = math.nan, math.nan
        if odd is None:
            wire_s, latency_s = seconds_of(self.engine.link, kind, max(size for _, _, size, _ in joined), len(self.members))
            start, end = self.engine.wires.book(self._pairs(kind, root), max(posted for *_, posted in joined), wire_s)
            done = end + latency_s
        for member in self.members:
            self.engine.tell(member, START, self.key, joined[0][0], joined[0][1], number, odd or 0, start, done)

    def _pairs(self, kind: str, root: int) -> list[tuple[int, int]]:
        ring = list(zip(self.members, [*self.members[1:], self.members[0]], strict=True))
        if root < 0:
            return [] if kind == "barrier" else ring
        others = [member for member in self.members if member != self.members[root]]
        return [(self.members[root], m) if kind in ("broadcast", "scatter") else (m, self.members[root]) for m in others]

    def _start(self, first: int, code: int, number: int, odd: int, start: float, done: float) -> None:
        work, move = self._calls.pop(number)
        if math.isnan(start):
            name = KINDS[code & 0xFF]
            work.fail(RuntimeError(f"rank {self.members[odd]} called another collective (or another root) than rank "
                                   f"{self.members[first]}, which called {name}"))  # fmt: skip
            return
        work.runs(start, done, done, move)


def _method(name: str) -> Callable[..., LinkWork]:
    def call(self: LinkGroup, *args: Any, **kwargs: Any) -> LinkWork:
        return self._collective(name, *args, **kwargs)

    call.__name__ = name
    return call


for _name in calls.METHODS:
    setattr(LinkGroup, _name, _method(_name))

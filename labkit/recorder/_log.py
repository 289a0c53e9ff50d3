"""The recorder's state while it runs: which storages are alive, and growing buffers of events and operators.

A storage is known by the Python object that PyTorch keeps for it: the object lives exactly as long as the storage, so a
weak reference to it tells the storage's death. Buffers grow by whole rows under the interpreter lock, so another thread
may copy them at any time without a lock of ours.
"""

import weakref
from collections.abc import Iterable
from itertools import count
from time import perf_counter, sleep

import torch

from . import categories as cat
from ._code import CATEGORY_SHIFT, COLLECTED, EVENT, FIRST_SEEN, FREED, ON_CARD, OP, OP_MASK, RESIZED
from ._ops import OpTable
from .infos import human_bytes

_pack_event = EVENT.pack
_LET_GO_S = 0.1  # a backend's thread that is given no time for longer than this is not waited for


class Live(weakref.ref):
    """A storage that is alive: its number, bytes and category."""

    __slots__ = ("key", "sid", "nbytes", "category", "name")


class Log:
    """Everything noted so far. One per `Recorder`, shared by the modes of all its threads."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget = budget_bytes
        self.active = True
        self.start = perf_counter()
        self.ops = bytearray()
        self.events = bytearray()
        self.calls = bytearray()
        self.table = OpTable()
        self.live: dict[int, Live] = {}  # id of the storage object -> Live
        self.labels: list[tuple[int, int, str]] = []  # storage id, category, name found after its birth; the last counts
        self.total = 0
        self.peak = 0
        self.by_category = [0] * len(cat.CATEGORIES)
        self.context = 0  # the running phase's bits of a code
        self.last_op = 0  # index of the operator that ran last
        self.last_allocation = 0  # index of the operator that allocated last
        self.in_optimizer = False
        self.collecting = False
        self.cycles = 0
        self.refusals: list[dict] = []
        self.messages: list[dict] = []
        self._sent: list[Live] = []  # storages of collectives since `settle` was last called
        self._stayed: set[int] = set()  # numbers of those that somebody keeps for longer
        self.samples: list[dict] = []
        self.sampler = None
        self.module_numbers: dict[int, int] = {}  # id of a watched module -> its number
        self.param_names: dict[int, str] = {}  # id of a watched parameter -> its name
        self._sids = count()
        self._on_death = self._died  # bound once: it is needed for every storage

    def birth(
        self, storage: torch.UntypedStorage, code: int, category: int, seconds: float | None = None, refusable: bool = True
    ) -> Live:
        """Note a storage that the log does not know yet, `seconds` after the start (now, if not given).

        Raises `torch.OutOfMemoryError` over the budget, unless it is not `refusable`.
        """
        nbytes = storage.nbytes()
        if refusable and self.budget is not None and self.total + nbytes > self.budget:
            self.refuse(nbytes, code)
        live = Live(storage, self._on_death)
        live.key = key = id(storage)
        live.nbytes = nbytes
        live.category = category
        live.name = ""
        first = self.live.setdefault(key, live)
        if first is not live:  # another thread was faster
            return first
        live.sid = sid = next(self._sids)
        if self.sampler is not None and storage.device.type == "cuda":
            code |= ON_CARD
        if seconds is None:
            seconds = perf_counter() - self.start
        self.events += _pack_event(sid, nbytes, code | category << CATEGORY_SHIFT, seconds)
        self.by_category[category] += nbytes
        self.total = total = self.total + nbytes
        if total > self.peak:
            self.peak = total
        self.last_allocation = code & OP_MASK
        return live

    def _died(self, live: Live) -> None:
        if self.live.get(live.key) is not live:
            return
        del self.live[live.key]
        if not self.active:
            return
        nbytes = live.nbytes
        self.total -= nbytes
        self.by_category[live.category] -= nbytes
        code = self.context | self.last_op | FREED
        if self.collecting:
            code |= COLLECTED
            self.cycles += nbytes
        self.events += _pack_event(live.sid, -nbytes, code, perf_counter() - self.start)

    def check_size(self, storage: torch.UntypedStorage, code: int, known_only: bool = False) -> None:
        """Note that a storage has grown or shrunk in place. Raises `torch.OutOfMemoryError` over the budget."""
        live = self.live.get(id(storage))
        if live is None:
            if not known_only:
                self.birth(storage, code, cat.OTHER)
            return
        nbytes = storage.nbytes()
        delta = nbytes - live.nbytes
        if delta == 0:
            return
        live.nbytes = nbytes
        self.total += delta
        self.by_category[live.category] += delta
        if self.total > self.peak:
            self.peak = self.total
        self.events += _pack_event(live.sid, delta, code | RESIZED, perf_counter() - self.start)
        if delta > 0 and self.budget is not None and self.total > self.budget:
            self.refuse(delta, code, self.total - delta)

    def check_growth(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Refuse, before it happens, that a storage grows over the budget."""
        live = self.live.get(id(storage))
        delta = nbytes - (live.nbytes if live else 0)
        if self.budget is not None and delta > 0 and self.total + delta > self.budget:
            self.refuse(delta, self.context)

    def made(self, storage: torch.UntypedStorage) -> None:
        """Note a storage made in Python, as `copy.deepcopy` and `torch.load` do."""
        if self.active and id(storage) not in self.live:
            self.birth(storage, self.context, cat.OTHER)

    def sent(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that a collective or message had these tensors."""
        found = (self.live.get(id(tensor.untyped_storage())) for tensor in tensors)
        self._sent += [live for live in found if live is not None and live.category in (cat.ACTIVATIONS, cat.OTHER)]

    def settle(self) -> None:
        """Wait until the backend has let go of what it sent.

        gloo's own threads hold a collective's tensors for a moment after `wait()` has returned, which would make the bytes
        at a mark depend on the scheduler. What is still alive after that moment is kept by the program, and never waited
        for again.
        """
        sent, self._sent = {live.sid: live for live in self._sent if live.sid not in self._stayed}, []
        end = perf_counter() + _LET_GO_S
        while (alive := {sid for sid, live in sent.items() if self.live.get(live.key) is live}) and perf_counter() < end:
            sleep(0.0005)
        self._stayed |= alive

    def seen(self, tensor: torch.Tensor, category: int, name: str) -> None:
        """Give a tensor's storage a category and a name, which count for its whole life; note it first if unknown."""
        storage = tensor.untyped_storage()
        live = self.live.get(id(storage))
        if live is None:
            live = self.birth(storage, self.context | FIRST_SEEN, category, refusable=False)
        if live.category != category or not live.name:
            self.label(live, category, name)  # storages shared by several parameters keep the first one's name

    def label(self, live: Live, category: int, name: str) -> None:
        """Give a live storage its category; an empty name leaves the name it has."""
        self.by_category[live.category] -= live.nbytes
        self.by_category[category] += live.nbytes
        live.category = category
        live.name = name or live.name
        self.labels.append((live.sid, category, live.name))

    def refuse(self, wanted: int, code: int, in_use: int | None = None) -> None:
        """Note that the budget does not allow `wanted` more bytes, and raise `torch.OutOfMemoryError`."""
        in_use = self.total if in_use is None else in_use
        op = self.table.names[code & OP_MASK]
        largest = sorted(self.live.values(), key=lambda live: (-live.nbytes, live.sid))[:5]
        alive = [
            {"sid": r.sid, "bytes": r.nbytes, "category": cat.CATEGORIES[r.category], "name": r.name} for r in largest
        ]
        held = {name: n for name, n in zip(cat.CATEGORIES, self.by_category, strict=True) if n}
        self.refusals.append(
            {"op": op, "wanted_bytes": wanted, "live_bytes": in_use, "budget_bytes": self.budget, "alive": alive,
             "by_category": held, "event": self.event_count(), "seconds": perf_counter() - self.start}
        )  # fmt: skip
        raise torch.OutOfMemoryError(
            f"{op or 'a storage'} needs {human_bytes(wanted)} more, and {human_bytes(in_use)} of the budget of "
            f"{human_bytes(self.budget)} are in use. Alive: "
            + (", ".join(f"{human_bytes(n)} of {name}" for name, n in held.items()) or "nothing")
            + "; the largest: "
            + (", ".join(f"{human_bytes(a['bytes'])} of {a['name'] or a['category']}" for a in alive) or "none")
        )

    def op_count(self) -> int:
        """Operators noted so far."""
        return len(self.ops) // OP.size

    def event_count(self) -> int:
        """Births, deaths and changes of size noted so far."""
        return len(self.events) // EVENT.size

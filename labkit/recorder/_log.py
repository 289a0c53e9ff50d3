"""The recorder's state while it runs: which storages are alive, and two growing buffers of events and operators.

A storage is known by the Python object that PyTorch keeps for it: the object lives exactly as long as the storage, so a
weak reference to it tells the storage's death. Buffers grow by whole rows under the interpreter lock, so another thread
may copy them at any time without a lock of ours.
"""

import weakref
from time import perf_counter

import torch

from . import categories as cat
from ._code import CATEGORY_SHIFT, COLLECTED, EVENT, FIRST_SEEN, OP, RESIZED
from ._ops import OpTable

_pack_event = EVENT.pack


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
        self.table = OpTable()
        self.live: dict[int, Live] = {}  # id of the storage object -> Live
        self.labels: dict[int, tuple[int, str]] = {}  # storage id -> category and name found after its birth
        self.next_sid = 0
        self.total = 0
        self.peak = 0
        self.by_category = [0] * len(cat.CATEGORIES)
        self.context = 0  # phase name's bits of a code
        self.last_op = 0
        self.in_optimizer = 0
        self.collecting = 0
        self.cycles = 0
        self.refusals: list[dict] = []
        self.messages: list[dict] = []
        self.module_numbers: dict[int, int] = {}  # id of a watched module -> its number

    def birth(self, storage: torch.UntypedStorage, code: int, category: int) -> Live:
        """Note a storage that the log does not know yet. Raises `torch.OutOfMemoryError` over the budget."""
        nbytes = storage.nbytes()
        if self.budget is not None and self.total + nbytes > self.budget:
            self.refuse(nbytes, code)
        key = id(storage)
        live = Live(storage, self._died)
        live.key = key
        live.sid = self.next_sid
        self.next_sid += 1
        live.nbytes = nbytes
        live.category = category
        live.name = ""
        self.live[key] = live
        self.events += _pack_event(live.sid, nbytes, code | category << CATEGORY_SHIFT, perf_counter() - self.start)
        self.by_category[category] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak = self.total
        return live

    def _died(self, live: Live) -> None:
        if self.live.get(live.key) is live:
            del self.live[live.key]
        if not self.active:
            return
        nbytes = live.nbytes
        self.total -= nbytes
        self.by_category[live.category] -= nbytes
        code = self.context | self.last_op
        if self.collecting:
            code |= COLLECTED
            self.cycles += nbytes
        self.events += _pack_event(live.sid, -nbytes, code, perf_counter() - self.start)

    def resized(self, live: Live, nbytes: int, code: int) -> None:
        """Note that a storage has grown or shrunk in place."""
        delta = nbytes - live.nbytes
        live.nbytes = nbytes
        self.total += delta
        self.by_category[live.category] += delta
        if self.total > self.peak:
            self.peak = self.total
        self.events += _pack_event(live.sid, delta, code | RESIZED, perf_counter() - self.start)

    def before_resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Refuse a storage's growth over the budget before it happens."""
        live = self.live.get(id(storage))
        grows = nbytes - (live.nbytes if live else 0)
        if self.budget is not None and grows > 0 and self.total + grows > self.budget:
            self.refuse(grows, self.context)

    def after_resize(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that `UntypedStorage.resize_` changed; the dispatcher does not show it."""
        live = self.live.get(id(storage))
        if live is None:
            self.birth(storage, self.context | FIRST_SEEN, cat.OTHER)
        elif live.nbytes != storage.nbytes():
            self.resized(live, storage.nbytes(), self.context)

    def made(self, storage: torch.UntypedStorage) -> None:
        """Note a storage made in Python, as deepcopy and torch.load do."""
        if id(storage) not in self.live:
            self.birth(storage, self.context, cat.OTHER)

    def seen(self, tensor: torch.Tensor, category: int, name: str = "") -> Live:
        """Find or note a tensor's storage and give it a category and a name; both count for its whole life."""
        storage = tensor.untyped_storage()
        live = self.live.get(id(storage))
        if live is None:
            live = self.birth(storage, self.context | FIRST_SEEN, category)
        if live.category != category or (name and live.name != name):
            self.label(live, category, name)
        return live

    def label(self, live: Live, category: int, name: str) -> None:
        """Give a live storage its category."""
        self.by_category[live.category] -= live.nbytes
        self.by_category[category] += live.nbytes
        live.category = category
        live.name = name or live.name
        self.labels[live.sid] = (category, live.name)

    def refuse(self, wanted: int, code: int) -> None:
        """Note that the budget does not allow `wanted` more bytes, and raise."""
        names = self.table.names()
        op = names[code & 0xFFFF] or "a storage seen for the first time"
        largest = sorted(self.live.values(), key=lambda live: -live.nbytes)[:5]
        alive = [
            {"bytes": r.nbytes, "category": cat.CATEGORIES[r.category], "name": r.name, "sid": r.sid} for r in largest
        ]
        self.refusals.append(
            {"wanted_bytes": wanted, "live_bytes": self.total, "budget_bytes": self.budget, "op": op, "alive": alive,
             "event": len(self.events) // EVENT.size}
        )
        held = ", ".join(f"{n} {cat.CATEGORIES[i]}" for i, n in enumerate(self.by_category) if n)
        raise torch.OutOfMemoryError(
            f"{op} needs {wanted} bytes more, but {self.total} of the budget of {self.budget} bytes are in use. "
            f"Alive: {held or 'nothing'}; the largest: "
            + ", ".join(f"{a['bytes']} bytes of {a['name'] or a['category']}" for a in alive)
        )

    def op_count(self) -> int:
        """Operators noted so far."""
        return len(self.ops) // OP.size

    def event_count(self) -> int:
        """Births, deaths and changes of size noted so far."""
        return len(self.events) // EVENT.size

"""`Recording`: what a `Recorder` saw, as plain data with readers."""

import numpy as np

from ._code import IN_BACKWARD, OP_MASK, RECOMPUTE
from ._data import RecordedData, before, within
from .categories import CATEGORIES
from .infos import CallInfo, CommInfo, OpInfo, StorageInfo, human_bytes


class Recording(RecordedData):
    """Plain data with readers, made by `Recorder.recording`, `Recording.load` or `Recording.from_wire`.

    Readers that take `born` count everything that the recorder saw, or with `born=True` only what was made inside the
    recording; `on_card` keeps only CUDA memory (True) or only the rest (False). A `phase` includes the phases inside
    it, and all its runs; an unknown phase or mark raises KeyError.

    Attributes: `marks` and `phases` (dicts with "name" and seconds), `cycles` (bytes that only the garbage collector
    freed), `refusals` (what the budget did not allow), `samples` and `card` (on CUDA: allocator and card bytes over
    time, and the card's name and total), `seconds` (duration), `started` (`time.time()` at the start), `clock_s` and
    `machine` (`time.perf_counter()` at the start; recordings of one machine share that clock), `link` (the modelled wire
    that its messages took, or None).
    """

    # Bytes over time

    def timeline(self, born: bool = False, on_card: bool | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Event numbers, seconds and live bytes after every change of memory."""
        index = np.arange(len(self._sid))
        if born:
            index = index[self._born[self._sid[index]]]
        if on_card is not None:
            index = index[self._on_card[self._sid[index]] == on_card]
        return index, self.arrays["event_seconds"][index], np.cumsum(self.arrays["event_delta"][index])

    def timeline_by_category(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Seconds of every change of memory, and per category the live bytes after it."""
        category = self.arrays["storage_category"][self._sid]
        delta = self.arrays["event_delta"]
        live = {name: np.cumsum(np.where(category == i, delta, 0)) for i, name in enumerate(CATEGORIES)}
        return self.arrays["event_seconds"], live

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return self.peak()

    def peak(self, phase: str | None = None, born: bool = False, on_card: bool | None = None) -> int:
        """Most bytes alive at once, overall or while `phase` ran."""
        index, _, live = self.timeline(born, on_card)
        spans = [(0, len(self._sid))] if phase is None else self._spans(phase, "event")
        cuts = [np.searchsorted(index, span) for span in spans]
        return max(max(int(live[a:b].max(initial=0)), before(live, a)) for a, b in cuts)

    def at(self, mark: str, born: bool = False, on_card: bool | None = None) -> int:
        """Live bytes at a mark (the last of that name)."""
        index, _, live = self.timeline(born, on_card)
        return before(live, np.searchsorted(index, self._event_of(mark)))

    def by_category(self, at: str = "peak") -> dict[str, int]:
        """Live bytes per category at the peak or at a mark."""
        live = self._live_at(at)
        return {name: int(live[self.arrays["storage_category"] == i].sum()) for i, name in enumerate(CATEGORIES)}

    def alive(self, at: str = "peak", top: int | None = 10, born: bool = False) -> list[StorageInfo]:
        """The storages alive at the peak or at a mark, largest first; `top=None` for all."""
        live = self._live_at(at)
        if born:
            live = np.where(self._born, live, 0)
        order = np.argsort(-live, kind="stable")
        return [self._storage(int(sid), int(live[sid])) for sid in order[live[order] > 0][:top]]

    def alive_summary(self, at: str = "peak") -> str:
        """One line for people, about the category that holds most: "131 outputs of relu, 131 MiB, born in forward".

        Where no operator made half of it: "204 storages of activations, 49 MiB, the most by gelu: 16 MiB, born in forward".
        """
        alive = self.alive(at, top=None)
        if not alive:
            return "nothing was alive"
        totals: dict[str, int] = {}
        for info in alive:
            totals[info.category] = totals.get(info.category, 0) + info.bytes
        category = max(totals, key=lambda name: totals[name])
        held = [info for info in alive if info.category == category]
        made = category in ("activations", "other")
        groups: dict[tuple[str, str], list[int]] = {}
        for info in held:
            op = info.op.rpartition(".")[2] if made and info.born else ""
            groups.setdefault((op, info.phase if info.born else ""), []).append(info.bytes)
        (op, phase), sizes = max(groups.items(), key=lambda item: sum(item[1]))
        born = f", born in {phase}" if phase else ""
        if op and 2 * sum(sizes) >= totals[category]:
            return f"{len(sizes)} output{'s' * (len(sizes) > 1)} of {op}, {human_bytes(sum(sizes))}{born}"
        all_of_it = f"{len(held)} storage{'s' * (len(held) > 1)} of {category}, {human_bytes(totals[category])}"
        if not op:
            return all_of_it + (born if len(groups) == 1 else "")
        return f"{all_of_it}, the most by {op}: {human_bytes(sum(sizes))}{born}"

    # Storages, operators, modules, phases

    def allocations(self, phase: str | None = None, min_bytes: int = 0) -> list[StorageInfo]:
        """Storages born in the recording (or in one phase), in order of birth, with their bytes then."""
        keep = self._born & (self._birth_bytes >= min_bytes)
        if phase is not None:
            keep &= within(self._first, self._spans(phase, "event"))
        sids = np.flatnonzero(keep)
        return [self._storage(int(sid)) for sid in sids[np.argsort(self._first[sids], kind="stable")]]

    def ops(self, name: str | None = None, phase: str | None = None) -> list[OpInfo]:
        """Operators in order. `name` is like 'mm' or 'aten.mm'."""
        keep = self._ops_in(phase)
        if name is not None:
            wanted = [i for i, op in enumerate(self.header["ops"]) if name in (op, op.rpartition(".")[2])]
            keep &= np.isin(self.arrays["op_code"] & OP_MASK, wanted)
        return [self._op(int(i)) for i in np.flatnonzero(keep)]

    def op_counts(self, phase: str | None = None) -> dict[str, int]:
        """Operator name -> how often it ran."""
        numbers, counts = np.unique((self.arrays["op_code"] & OP_MASK)[self._ops_in(phase)], return_counts=True)
        return {self.header["ops"][i]: int(n) for i, n in zip(numbers, counts, strict=True)}

    def recomputed_ops(self, phase: str | None = None) -> list[OpInfo]:
        """Forward operators that ran again for the sake of backward, inside a backward pass."""
        keep = self._ops_in(phase) & (self.arrays["op_code"] & RECOMPUTE != 0)
        return [self._op(int(i)) for i in np.flatnonzero(keep)]

    def module_calls(self, module: str | None = None) -> list[CallInfo]:
        """Calls of watched modules, in the order in which they ended."""
        rows = zip(*(self.arrays[f"call_{k}"].tolist() for k in ("code", "start", "seconds")), strict=True)
        calls = [
            CallInfo(self._module(code), self._phase(code), bool(code & IN_BACKWARD), seconds, start)
            for code, start, seconds in rows
        ]
        return [call for call in calls if module in (None, call.module)]

    def flops(self, phase: str | None = None) -> int:
        """Floating point operations, by the formulas of `torch.utils.flop_counter`."""
        return int(self.arrays["op_flops"][self._ops_in(phase)].sum())

    def flops_per_second(self, phase: str | None = None) -> float:
        """FLOPs over wall-clock seconds, overall or in a phase."""
        seconds = self.seconds if phase is None else self._phase_seconds(phase)
        return self.flops(phase) / seconds if seconds > 0 else 0.0

    def mfu(self, peak_flops: float, phase: str | None = None) -> float:
        """FLOP/s over what the hardware can do (model FLOPs utilization: Chowdhery et al. 2022, PaLM, appendix B)."""
        return self.flops_per_second(phase) / peak_flops

    def by_phase(self) -> dict[str, dict]:
        """Phase -> peak_bytes, allocated_bytes, allocations, ops, flops, seconds, over all its runs."""
        result = {}
        for name in dict.fromkeys(p["name"] for p in self.phases):
            born = self._born & within(self._first, self._spans(name, "event"))
            result[name] = {
                "peak_bytes": self.peak(name),
                "allocated_bytes": int(self._birth_bytes[born].sum()),
                "allocations": int(born.sum()),
                "ops": int(self._ops_in(name).sum()),
                "flops": self.flops(name),
                "seconds": self._phase_seconds(name),
            }
        return result

    # Messages

    def comm(self, kind: str | None = None) -> list[CommInfo]:
        """Collectives, messages and waits of this rank, in order."""
        return [
            CommInfo(
                **{k: v for k, v in m.items() if k != "code"},
                phase=self._phase(m["code"]),
                module=self._module(m["code"]),
            )
            for m in self.header["messages"]
            if kind in (None, m["kind"])
        ]

    def bytes_by_kind(self) -> dict[str, dict[str, int]]:
        """Kind of message -> count, bytes_sent, bytes_received of this rank; waits left out."""
        result: dict[str, dict[str, int]] = {}
        for m in self.header["messages"]:
            if m["kind"] != "wait":
                row = result.setdefault(m["kind"], {"count": 0, "bytes_sent": 0, "bytes_received": 0})
                row["count"] += 1
                row["bytes_sent"] += m["bytes_sent"]
                row["bytes_received"] += m["bytes_received"]
        return result

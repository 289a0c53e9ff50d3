"""`Recording`: what a `Recorder` saw, as plain data with readers."""

from dataclasses import dataclass

import numpy as np
import torch

from ._code import IN_BACKWARD, MODULE_MASK, MODULE_SHIFT, OP_MASK, PHASE_MASK, PHASE_SHIFT, RECOMPUTE
from .categories import CATEGORIES


@dataclass(frozen=True)
class StorageInfo:
    """One storage: its bytes, what it is, and where it came from. `born` is False for what existed before."""

    sid: int
    bytes: int
    category: str
    op: str
    module: str
    phase: str
    born: bool
    name: str


@dataclass(frozen=True)
class OpInfo:
    """One operator that ran. `seconds` is how long, `start_s` when since the recorder's start."""

    name: str
    phase: str
    module: str
    flops: int
    seconds: float
    start_s: float
    in_backward: bool
    recompute: bool


@dataclass(frozen=True)
class CommInfo:
    """One collective or message of this rank. Bytes of collectives are those of the ring algorithms in the lectures."""

    kind: str
    bytes_sent: int
    bytes_received: int
    payload_bytes: int
    peer: int | None
    group: str
    group_size: int
    asynchronous: bool
    phase: str
    start_s: float
    end_s: float
    op: str


class Recording:
    """Plain data, made by `Recorder.recording`, `Recording.load` or `Recording.from_wire`."""

    def __init__(self, header: dict, arrays: dict[str, np.ndarray]) -> None:
        self.header = header
        self.arrays = arrays
        self.marks: list[dict] = header["marks"]
        self.phases: list[dict] = header["phases"]
        self.cycles: int = header["cycles"]
        self.refusals: list[dict] = header["refusals"]
        self.seconds: float = header["seconds"]

    # Bytes over time

    def timeline(self, born: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Event numbers, seconds and live bytes after every change. `born` leaves out what existed before."""
        index = np.arange(len(self.arrays["event_sid"]))
        if born:
            index = index[self.arrays["storage_born"][self.arrays["event_sid"]]]
        return index, self.arrays["event_seconds"][index], np.cumsum(self.arrays["event_delta"][index])

    def timeline_by_category(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Seconds of every change, and per category the live bytes after it."""
        delta = self.arrays["event_delta"]
        category = self.arrays["storage_category"][self.arrays["event_sid"]]
        live = {name: np.cumsum(np.where(category == i, delta, 0)) for i, name in enumerate(CATEGORIES)}
        return self.arrays["event_seconds"], live

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return self.peak()

    def peak(self, phase: str | None = None, born: bool = False) -> int:
        """Most bytes alive at once, overall or while `phase` ran. Raises KeyError for a phase that never ran."""
        index, _, live = self.timeline(born)
        return max(max((int(live[a:b].max(initial=0)), self._before(live, a)), default=0)
                   for a, b in self._spans(index, phase))

    def at(self, mark: str, born: bool = False) -> int:
        """Live bytes at a mark (the last of that name). Raises KeyError for an unknown mark."""
        index, _, live = self.timeline(born)
        return self._before(live, int(np.searchsorted(index, self._event_of(mark))))

    def by_category(self, at: str = "peak") -> dict[str, int]:
        """Live bytes per category at the peak or at a mark."""
        live = self._live_at(at)
        category = self.arrays["storage_category"]
        return {name: int(live[category == i].sum()) for i, name in enumerate(CATEGORIES)}

    def alive(self, at: str = "peak", top: int | None = 10, born: bool = False) -> list[StorageInfo]:
        """The storages alive at the peak or at a mark, largest first; `top=None` for all."""
        live = self._live_at(at)
        if born:
            live = np.where(self.arrays["storage_born"], live, 0)
        order = np.argsort(-live, kind="stable")
        order = order[live[order] > 0][:top]
        return [self._storage(int(sid), int(live[sid])) for sid in order]

    def alive_summary(self, at: str = "peak") -> str:
        """One line for people: which outputs of which operator hold most of what is alive."""
        groups: dict[tuple[str, str, str], list[int]] = {}
        for info in self.alive(at, top=None):
            what = "outputs of " + info.op.removeprefix("aten.") if info.born and info.op else info.category
            groups.setdefault((what, info.phase, info.category), []).append(info.bytes)
        if not groups:
            return "nothing was alive"
        (what, phase, _), sizes = max(groups.items(), key=lambda item: sum(item[1]))
        return f"{len(sizes)} {what}, {human_bytes(sum(sizes))}" + (f", born in {phase}" if phase else "")

    # Storages, operators, phases

    def allocations(self, phase: str | None = None, min_bytes: int = 0) -> list[StorageInfo]:
        """Storages born in the recording (or in one phase), in order of birth."""
        _, first = np.unique(self.arrays["event_sid"], return_index=True)
        keep = self.arrays["storage_born"] & (self.arrays["storage_bytes"] >= min_bytes)
        if phase is not None:
            keep &= self._within(first, self._phase_spans(phase, "event"))
        return [self._storage(int(sid)) for sid in np.flatnonzero(keep)]

    def ops(self, name: str | None = None, phase: str | None = None) -> list[OpInfo]:
        """Operators in order. `name` is like 'mm' or 'aten.mm'; `phase` includes the phases inside it."""
        keep = np.ones(len(self.arrays["op_code"]), dtype=bool)
        if name is not None:
            wanted = [i for i, op in enumerate(self.header["ops"]) if name in (op, op.rpartition(".")[2])]
            keep &= np.isin(self.arrays["op_code"] & OP_MASK, wanted)
        if phase is not None:
            keep &= self._within(np.arange(len(keep)), self._phase_spans(phase, "op"))
        return [self._op(int(i)) for i in np.flatnonzero(keep)]

    def recomputed_ops(self) -> list[OpInfo]:
        """Forward operators that ran again inside a backward pass."""
        return [self._op(int(i)) for i in np.flatnonzero(self.arrays["op_code"] & RECOMPUTE)]

    def flops(self, phase: str | None = None) -> int:
        """Floating point operations, by the formulas of `torch.utils.flop_counter`."""
        flops = self.arrays["op_flops"]
        if phase is None:
            return int(flops.sum())
        return int(flops[self._within(np.arange(len(flops)), self._phase_spans(phase, "op"))].sum())

    def flops_per_second(self, phase: str | None = None) -> float:
        """FLOPs over wall-clock seconds, overall or in a phase."""
        spans = [p for p in self.phases if p["name"] == phase]
        if phase is None:
            seconds = self.seconds
        else:
            self._phase_spans(phase, "op")
            seconds = sum((self.seconds if p["end_s"] is None else p["end_s"]) - p["start_s"] for p in spans)
        return self.flops(phase) / seconds if seconds else 0.0

    def mfu(self, peak_flops: float, phase: str | None = None) -> float:
        """Model FLOPs utilization: FLOP/s over what the hardware can do (PaLM, Chowdhery et al. 2022, appendix B)."""
        return self.flops_per_second(phase) / peak_flops

    def by_phase(self) -> dict[str, dict]:
        """Phase name -> peak_bytes, allocated_bytes, allocations, ops, flops, seconds (all its runs together)."""
        result = {}
        for name in dict.fromkeys(p["name"] for p in self.phases):
            born = self.allocations(name)
            runs = [p for p in self.phases if p["name"] == name]
            result[name] = {
                "peak_bytes": self.peak(name),
                "allocated_bytes": sum(info.bytes for info in born),
                "allocations": len(born),
                "ops": int(self._within(np.arange(len(self.arrays["op_code"])), self._phase_spans(name, "op")).sum()),
                "flops": self.flops(name),
                "seconds": sum((self.seconds if p["end_s"] is None else p["end_s"]) - p["start_s"] for p in runs),
            }
        return result

    # Messages

    def comm(self, kind: str | None = None) -> list[CommInfo]:
        """Collectives, messages and waits of this rank, in order."""
        return [
            CommInfo(**{k: v for k, v in m.items() if k != "code"},
                     phase=self.header["phase_names"][m["code"] >> PHASE_SHIFT & PHASE_MASK])
            for m in self.header["messages"] if kind in (None, m["kind"])
        ]

    def bytes_by_kind(self) -> dict[str, dict[str, int]]:
        """Kind of message -> count, bytes sent and bytes received by this rank."""
        result: dict[str, dict[str, int]] = {}
        for m in self.comm():
            row = result.setdefault(m.kind, {"count": 0, "bytes_sent": 0, "bytes_received": 0})
            row["count"] += 1
            row["bytes_sent"] += m.bytes_sent
            row["bytes_received"] += m.bytes_received
        return result

    # Travel

    def to_wire(self) -> tuple[dict, dict[str, torch.Tensor]]:
        """A JSON-able dict and named tensors."""
        return self.header, {name: torch.from_numpy(np.array(value)) for name, value in self.arrays.items()}

    @classmethod
    def from_wire(cls, header: dict, tensors: dict[str, torch.Tensor]) -> "Recording":
        """The inverse of `to_wire`. Raises ValueError when the parts do not fit together."""
        from ._wire import checked

        return checked(cls, header, {name: tensor.numpy() for name, tensor in tensors.items()})

    def save(self, path: str) -> None:
        """Write one safetensors file whose metadata holds the JSON header."""
        from ._wire import save

        save(self, path)

    @classmethod
    def load(cls, path: str) -> "Recording":
        """Read what `save` wrote. Raises ValueError when it is no recording."""
        from ._wire import load

        return load(cls, path)

    # Helpers

    def _before(self, live: np.ndarray, position: int) -> int:
        return int(live[position - 1]) if position > 0 else 0

    def _event_of(self, mark: str) -> int:
        for entry in reversed(self.marks):
            if entry["name"] == mark:
                return entry["event"]
        raise KeyError(f"no mark {mark!r}; there are {[m['name'] for m in self.marks]}")

    def _live_at(self, at: str) -> np.ndarray:
        if at == "peak" and all(m["name"] != "peak" for m in self.marks):
            live = self.timeline()[2]
            end = int(live.argmax()) + 1 if len(live) else 0
        else:
            end = self._event_of(at)
        sids = self.arrays["event_sid"][:end]
        result = np.zeros(len(self.arrays["storage_bytes"]), dtype=np.int64)
        np.add.at(result, sids, self.arrays["event_delta"][:end])
        return result

    def _phase_spans(self, phase: str, unit: str) -> list[tuple[int, int]]:
        total = len(self.arrays["op_code" if unit == "op" else "event_sid"])
        spans = [
            (p[f"first_{unit}"], total if p[f"last_{unit}"] is None else p[f"last_{unit}"])
            for p in self.phases if p["name"] == phase
        ]
        if not spans:
            raise KeyError(f"no phase {phase!r}; there are {list(dict.fromkeys(p['name'] for p in self.phases))}")
        return spans

    def _spans(self, index: np.ndarray, phase: str | None) -> list[tuple[int, int]]:
        if phase is None:
            return [(0, len(index))]
        return [tuple(np.searchsorted(index, span)) for span in self._phase_spans(phase, "event")]

    @staticmethod
    def _within(values: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
        keep = np.zeros(len(values), dtype=bool)
        for first, last in spans:
            keep |= (values >= first) & (values < last)
        return keep

    def _storage(self, sid: int, nbytes: int | None = None) -> StorageInfo:
        code = int(self.arrays["storage_code"][sid])
        return StorageInfo(
            sid=sid,
            bytes=int(self.arrays["storage_bytes"][sid]) if nbytes is None else nbytes,
            category=CATEGORIES[self.arrays["storage_category"][sid]],
            op=self.header["ops"][code & OP_MASK],
            module=self.header["modules"][code >> MODULE_SHIFT & MODULE_MASK],
            phase=self.header["phase_names"][code >> PHASE_SHIFT & PHASE_MASK],
            born=bool(self.arrays["storage_born"][sid]),
            name=self.header["names"][self.arrays["storage_name"][sid]],
        )

    def _op(self, i: int) -> OpInfo:
        code = int(self.arrays["op_code"][i])
        return OpInfo(
            name=self.header["ops"][code & OP_MASK],
            phase=self.header["phase_names"][code >> PHASE_SHIFT & PHASE_MASK],
            module=self.header["modules"][code >> MODULE_SHIFT & MODULE_MASK],
            flops=int(self.arrays["op_flops"][i]),
            seconds=float(self.arrays["op_seconds"][i]),
            start_s=float(self.arrays["op_start"][i]),
            in_backward=bool(code & IN_BACKWARD),
            recompute=bool(code & RECOMPUTE),
        )


def human_bytes(count: float) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}".replace(".0 ", " ")
        count /= 1024
    raise AssertionError("unreachable")

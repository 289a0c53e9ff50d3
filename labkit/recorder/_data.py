"""The data of a `Recording`, how it travels, and what its readers share."""

from functools import cached_property

import numpy as np
import torch

from . import _wire
from ._code import FIRST_SEEN, FREED, IN_BACKWARD, MODULE_MASK, MODULE_SHIFT, ON_CARD, OP_MASK, PHASE_MASK, PHASE_SHIFT, RECOMPUTE
from .categories import CATEGORIES
from .infos import OpInfo, StorageInfo


class RecordedData:
    """A JSON-able header and named arrays; `Recording` adds the readers."""

    def __init__(self, header: dict, arrays: dict[str, np.ndarray]) -> None:
        self.header = header
        self.arrays = arrays
        self.marks: list[dict] = header["marks"]
        self.phases: list[dict] = header["phases"]
        self.cycles: int = header["cycles"]
        self.refusals: list[dict] = header["refusals"]
        self.samples: list[dict] = header["samples"]
        self.card: dict | None = header["card"]
        self.seconds: float = header["seconds"]
        self.started: float = header["started"]
        self.clock_s: float = header["clock_s"]
        self.machine: str = header["machine"]
        self.link: dict | None = header["link"]

    # Travel

    def to_wire(self) -> tuple[dict, dict[str, torch.Tensor]]:
        """A JSON-able dict and named tensors."""
        return self.header, {name: torch.from_numpy(value.copy()) for name, value in self.arrays.items()}

    @classmethod
    def from_wire(cls, header: dict, tensors: dict[str, torch.Tensor]) -> "RecordedData":
        """The inverse of `to_wire`. Raises ValueError when the parts do not fit together."""
        return cls(*_wire.checked(header, {name: tensor.numpy() for name, tensor in tensors.items()}))

    def save(self, path: str) -> None:
        """Write one safetensors file whose metadata holds the header as JSON."""
        _wire.save(self.header, self.arrays, path)

    @classmethod
    def load(cls, path: str) -> "RecordedData":
        """Read what `save` wrote. Raises ValueError when it is no recording."""
        return cls(*_wire.load(path))

    # Helpers: what the readers share

    @property
    def _sid(self) -> np.ndarray:
        return self.arrays["event_sid"]

    @cached_property
    def _first(self) -> np.ndarray:
        """By storage, the number of its first event."""
        return np.unique(self._sid, return_index=True)[1]

    @cached_property
    def _last(self) -> np.ndarray:
        """By storage, the number of the event that freed it, or -1: what is freed never changes again."""
        last = np.full(len(self._first), -1)
        freed = np.flatnonzero(self.arrays["event_code"] & FREED)
        last[self._sid[freed]] = freed
        return last

    @cached_property
    def _born(self) -> np.ndarray:
        return self.arrays["event_code"][self._first] & FIRST_SEEN == 0

    @cached_property
    def _on_card(self) -> np.ndarray:
        return self.arrays["event_code"][self._first] & ON_CARD != 0

    @cached_property
    def _birth_bytes(self) -> np.ndarray:
        return self.arrays["event_delta"][self._first]

    def _event_of(self, mark: str) -> int:
        for entry in reversed(self.marks):
            if entry["name"] == mark:
                return entry["event"]
        raise KeyError(f"no mark {mark!r}; there are {[m['name'] for m in self.marks]}")

    def _live_at(self, at: str) -> np.ndarray:
        """By storage, its live bytes at the peak or at a mark."""
        if at == "peak" and all(m["name"] != "peak" for m in self.marks):
            live = self.timeline()[2]
            end = int(live.argmax()) + 1 if len(live) else 0
        else:
            end = self._event_of(at)
        result = np.zeros(len(self._first), dtype=np.int64)
        np.add.at(result, self._sid[:end], self.arrays["event_delta"][:end])
        return result

    def _spans(self, phase: str, unit: str) -> list[tuple[int, int]]:
        """First and one-past-last event or operator of each run of a phase."""
        total = len(self.arrays["op_code"] if unit == "op" else self._sid)
        runs = [p for p in self.phases if p["name"] == phase]
        if not runs:
            raise KeyError(f"no phase {phase!r}; there are {list(dict.fromkeys(p['name'] for p in self.phases))}")
        return [(p[f"first_{unit}"], total if p["end_s"] is None else p[f"last_{unit}"]) for p in runs]

    def _phase_seconds(self, phase: str) -> float:
        self._spans(phase, "op")
        ends = ((p["start_s"], self.seconds if p["end_s"] is None else p["end_s"], p["name"]) for p in self.phases)
        return sum(end - start for start, end, name in ends if name == phase)

    def _ops_in(self, phase: str | None) -> np.ndarray:
        count = len(self.arrays["op_code"])
        return np.ones(count, dtype=bool) if phase is None else within(np.arange(count), self._spans(phase, "op"))

    def _module(self, code: int) -> str:
        return self.header["modules"][code >> MODULE_SHIFT & MODULE_MASK]

    def _phase(self, code: int) -> str:
        return self.header["phase_names"][code >> PHASE_SHIFT & PHASE_MASK]

    def _storage(self, sid: int, nbytes: int | None = None) -> StorageInfo:
        first, last = int(self._first[sid]), int(self._last[sid])
        code = int(self.arrays["event_code"][first])
        return StorageInfo(
            sid=sid,
            bytes=int(self._birth_bytes[sid]) if nbytes is None else nbytes,
            category=CATEGORIES[self.arrays["storage_category"][sid]],
            op=self.header["ops"][code & OP_MASK],
            module=self._module(code),
            phase=self._phase(code),
            born=bool(self._born[sid]),
            name=self.header["names"][self.arrays["storage_name"][sid]],
            on_card=bool(code & ON_CARD),
            born_s=float(self.arrays["event_seconds"][first]),
            freed_s=None if last < 0 else float(self.arrays["event_seconds"][last]),
            born_event=first,
            freed_event=None if last < 0 else last,
        )

    def _op(self, i: int) -> OpInfo:
        code = int(self.arrays["op_code"][i])
        return OpInfo(
            index=i,
            name=self.header["ops"][code & OP_MASK],
            phase=self._phase(code),
            module=self._module(code),
            flops=int(self.arrays["op_flops"][i]),
            seconds=float(self.arrays["op_seconds"][i]),
            start_s=float(self.arrays["op_start"][i]),
            in_backward=bool(code & IN_BACKWARD),
            recompute=bool(code & RECOMPUTE),
        )


def before(live: np.ndarray, position: int) -> int:
    return int(live[position - 1]) if position > 0 else 0


def within(values: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    keep = np.zeros(len(values), dtype=bool)
    for first, last in spans:
        keep |= (values >= first) & (values < last)
    return keep

"""Lab 03's reference against torch's own cast: the same patterns and numbers, every one, and what it takes in time.

The reference computes in float64, a dozen operators where torch has one instruction per number: its time is told, and no goal. Both run in
turn, round after round; the ratio is the median over rounds.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from labkit.checks._threads import one_thread
from tests.labs.solutions import solution

FORMATS = {"fp16": ((5, 10), torch.float16, torch.int16), "bf16": ((8, 7), torch.bfloat16, torch.int16),
           "E5M2": ((5, 2), torch.float8_e5m2, torch.uint8)}  # fmt: skip
COUNT, ROUNDS = 1_000_000, 7


def _values() -> torch.Tensor:
    """float32 of every bit pattern: a tenth nan, infinite or out of range, and as many near and below each format's smallest numbers."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (COUNT // 2,), generator=generator).to(torch.int32).view(torch.float32)
    power = torch.randint(-30, 18, (COUNT - COUNT // 2,), generator=generator).float()
    usual = torch.randn(COUNT - COUNT // 2, generator=generator) * torch.exp2(power)
    return torch.cat([anything, usual])


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@one_thread()
def rows() -> list[dict[str, Any]]:
    """Per format: patterns that differ (none), numbers that differ (none), and the time of a cast there and back."""
    lab, values, table = solution("03"), _values(), []
    for name, (bits, kind, word) in FORMATS.items():
        width = 1 + sum(bits)
        every = torch.arange(2**width)

        def cast(values: torch.Tensor = values, kind: torch.dtype = kind) -> torch.Tensor:
            return values.to(kind)

        def ours(values: torch.Tensor = values, bits: tuple[int, int] = bits) -> torch.Tensor:
            return lab.decode(lab.encode(values, *bits), *bits)

        theirs, mine = cast().view(word).long() & 2**width - 1, lab.encode(values, *bits)
        differ = int(((theirs != mine) & ~values.isnan()).sum())
        numbers, decoded = every.to(word).view(kind).double(), lab.decode(every, *bits)
        same = (numbers == decoded) & (numbers.signbit() == decoded.signbit()) | (numbers.isnan() & decoded.isnan())
        row = {"ours": 0, "peer": 0, "ratio": None, "goal": "0 differ"}
        table.append(row | {"name": f"encode, {name}: patterns of a million that differ from torch's", "ours": differ, "met": differ == 0,
                            "unit": "patterns"})  # fmt: skip
        other = int((~same).sum())
        table.append(row | {"name": f"decode, {name}: all patterns, numbers that differ", "ours": other, "met": other == 0,
                            "unit": "numbers"})  # fmt: skip
        pairs = [(_seconds(ours), _seconds(lambda: cast().double())) for _ in range(ROUNDS)]
        table.append({"name": f"encode and decode a million, {name}: time", "ours": 1000 * min(a for a, _ in pairs),
                      "peer": 1000 * min(b for _, b in pairs), "ratio": statistics.median(a / b for a, b in pairs), "goal": "told",
                      "met": None, "unit": "ms"})  # fmt: skip
    return table

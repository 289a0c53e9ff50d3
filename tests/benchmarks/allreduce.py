"""Lab 06's reference ring against gloo's own all-reduce: time at 1, 16 and 64 MB, and bytes that each rank sends.

Both run in the same ranks, in turn, round after round; the ratio of times is the median over rounds of the slowest rank's two times. gloo
does not say what it sends: its bytes are the ring's formula (Patarasuk and Yuan 2009), which is also the least that any all-reduce can do.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from labkit.ranks import run_ranks
from labkit.recorder import Recorder
from tests.labs.solutions import solution

RANKS, ROUNDS = (2, 4), 11
SIZES_MB = {1: None, 16: 1.5, 64: 1.5}  # goal: at most 1.5 times gloo's time at 16 MB and above


def _turns(ring: Any, nbytes: int, rounds: int) -> tuple[list[tuple[float, float]], int]:
    """On each rank: (seconds of the ring, seconds of gloo's) for each round, and the bytes that the ring sent once."""
    torch.set_num_threads(1)
    x = torch.zeros(nbytes // 4)
    with Recorder() as recorder:
        ring(x)
    dist.all_reduce(x)
    pairs = []
    for _ in range(rounds):
        pair = []
        for function in (ring, dist.all_reduce):
            dist.barrier()
            started = time.perf_counter()
            function(x)
            pair.append(time.perf_counter() - started)
        pairs.append(tuple(pair))
    return pairs, sum(row["bytes_sent"] for row in recorder.recording.bytes_by_kind().values())


def rows() -> list[dict[str, Any]]:
    ring, table = solution("06").ring_all_reduce, []
    for ranks in RANKS:
        for size, goal in SIZES_MB.items():
            values = run_ranks(_turns, ranks, ring, size * 1_000_000, ROUNDS, timeout=120).values
            slowest = [tuple(map(max, zip(*turn, strict=True))) for turn in zip(*(pairs for pairs, _ in values), strict=True)]
            ratio = statistics.median(ours / peer for ours, peer in slowest)
            label = f"all-reduce, {ranks} ranks, {size} MB"
            table.append({"name": f"{label}: time", "ours": 1000 * min(ours for ours, _ in slowest),
                          "peer": 1000 * min(peer for _, peer in slowest), "ratio": ratio, "goal": f"<= {goal}" if goal else "",
                          "met": ratio <= goal if goal else None, "unit": "ms"})  # fmt: skip
            sent, least = max(sent for _, sent in values), 2 * (ranks - 1) / ranks * size * 1_000_000
            table.append({"name": f"{label}: bytes sent per rank", "ours": sent / 1e6, "peer": least / 1e6, "ratio": sent / least,
                          "goal": "<= 1.00", "met": sent <= least, "unit": "MB"})  # fmt: skip
    return table

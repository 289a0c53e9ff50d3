"""Lab 07's reference against PyTorch's DistributedDataParallel, and overlap on against off.

Step time on this machine's own wire and on a simulated `Link`, bytes and collectives per step. All wrappers run in the same ranks, in
turn, step after step; a ratio is the median over steps of the slowest rank's two times. The hidden share is time on the simulated wire
during backward, over the smaller of wire and backward.
"""

import statistics
import sys
from functools import partial
from typing import Any

import cloudpickle
from torch import nn

from labkit.ranks import Link
from labkit.replicas import Step, measure_steps
from tests.labs.solutions import solution

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else every rank imports what reads the labs
WIDTH, LAYERS, ROWS, STEPS = 256, 12, 1024, 9
LINK = Link(80e6, 0.5e-3)  # that of the lab
# Two layers of 263 KB in each bucket of both: DDP ends one with the parameter that reaches the limit, ours before the one that passes it.
OUR_BYTES, DDP_BYTES = 600_000, 500_000


def _chain() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def _without_overlap(module: nn.Module, wrapper: Any) -> Any:
    """The same buckets, all sent by `finish`: as if every backward were inside `no_sync`."""
    replica = wrapper(module, bucket_bytes=OUR_BYTES)
    replica.quiet = True
    return replica


def _ratio(ours: list[Step], peer: list[Step]) -> float:
    return statistics.median(a.seconds / b.seconds for a, b in zip(ours, peer, strict=True))


def _share(step: Step) -> float:
    wire, backward, during = step.hidden()
    return during / min(wire, backward)


def rows() -> list[dict[str, Any]]:
    lab, table = solution("07"), []
    wraps = {
        "ours": partial(lab.DataParallel, bucket_bytes=OUR_BYTES),
        "DDP": partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=DDP_BYTES / 2**20),
        "off": partial(_without_overlap, wrapper=lab.Accumulating),
    }

    def add(name: str, ours: float, peer: float, ratio: float, goal: str, met: bool | None, unit: str) -> None:
        table.append({"name": name, "ours": ours, "peer": peer, "ratio": ratio, "goal": goal, "met": met, "unit": unit})

    for where, link in (("CPU", None), ("simulated link", LINK)):
        told = measure_steps(wraps, _chain, (ROWS, WIDTH), link=link, steps=STEPS, warm=3)
        best = {name: 1000 * min(step.seconds for step in steps) for name, steps in told.items()}
        ratio = _ratio(told["ours"], told["DDP"])
        add(f"data parallel, 2 ranks, {where}: step against torch's DDP", best["ours"], best["DDP"], ratio, "<= 1.1", ratio <= 1.1, "ms")
        ratio = _ratio(told["ours"], told["off"])
        add(f"data parallel, 2 ranks, {where}: overlap on against off", best["ours"], best["off"], ratio, "< 1" if link else "",
            ratio < 1 if link else None, "ms")  # fmt: skip
        if link is None:
            (count, nbytes), (their_count, their_bytes) = (told[name][-1].messages() for name in ("ours", "DDP"))
            add("data parallel: collectives per step against torch's DDP", count, their_count, count / their_count, "<= 1.1",
                count <= 1.1 * their_count, "")  # fmt: skip
            add("data parallel: bytes of gradients per step against torch's DDP", nbytes / 1e6, their_bytes / 1e6, nbytes / their_bytes,
                "<= 1.1", nbytes <= 1.1 * their_bytes, "MB")  # fmt: skip
        else:
            share, off = (statistics.median(_share(step) for step in told[name]) for name in ("ours", "off"))
            add(f"data parallel, {where}: hidden share of what could be, against off", share, off, share, ">= 0.7", share >= 0.7, "")
    return table

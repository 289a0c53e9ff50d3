"""Lab 07's reference against PyTorch's DistributedDataParallel, and overlap on against off.

Step time on this machine's own wire and on a simulated `Link`, bytes and collectives per step. All wrappers run in the same ranks, in
turn, step after step; a ratio is the median over steps of the slowest rank's two times. Both send two layers in every bucket; after the
first steps DDP has laid its own out anew. The hidden share is time on the simulated wire during backward, over the smaller of wire and
backward.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.ranks import Link, run_ranks
from labkit.recorder import Recorder
from tests.labs.solutions import solution

WIDTH, LAYERS, ROWS, STEPS = 256, 12, 1024, 9
# Two layers of 263 KB in every bucket of both: DDP ends one with the parameter that reaches the limit, ours before the one that passes it.
BUCKET_BYTES, DDP_BYTES = 600_000, 500_000
LINK = Link(80e6, 0.5e-3)  # that of the lab


def _chain() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def _steps(ours: Any, plain: Any, steps: int) -> dict[str, list[tuple[float, int, int, float]]]:
    """On each rank, by name: (seconds, collectives, bytes, hidden share) of each step."""
    torch.set_num_threads(1)

    class AfterBackward:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

        def finish(self) -> None:
            plain(self.module)

    replicas, told = {}, {"ours": [], "DDP": [], "after backward": []}
    for name in told:
        model = _chain()
        replica = (
            nn.parallel.DistributedDataParallel(model, bucket_cap_mb=DDP_BYTES / 2**20) if name == "DDP"
            else ours(model, bucket_bytes=BUCKET_BYTES) if name == "ours" else AfterBackward(model)
        )  # fmt: skip
        replicas[name] = replica, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(ROWS, WIDTH)
    for step in range(steps + 3):
        for name, (replica, optimizer) in replicas.items():
            optimizer.zero_grad()
            dist.barrier()
            with Recorder() as recorder:
                started = time.perf_counter()
                loss = replica(x).square().mean()
                turned = time.perf_counter()
                loss.backward()
                over = time.perf_counter()
                if name != "DDP":
                    replica.finish()
                optimizer.step()
                seconds = time.perf_counter() - started
            rows = recorder.recording.comm("all_reduce")
            if name == "DDP":  # its backward waits for the last bucket by itself; the share is not comparable
                share = 0.0
            else:
                during = sum(max(0.0, min(r.end_s, over - started) - max(r.start_s, turned - started)) for r in rows)
                share = during / max(1e-9, min(sum(r.end_s - r.start_s for r in rows), over - turned))
            if step >= 3:
                told[name].append((seconds, len(rows), sum(r.payload_bytes for r in rows), share))
    return told


def rows() -> list[dict[str, Any]]:
    lab, table = solution("07"), []
    for where, link in (("CPU", None), ("simulated link", LINK)):
        values = run_ranks(_steps, 2, lab.DataParallel, lab.average_gradients, STEPS, link=link, timeout=180).values
        slowest = {name: [max(rank[name][step][0] for rank in values) for step in range(STEPS)] for name in values[0]}

        def add(name: str, ours: float, peer: float, ratio: float, goal: str, met: bool | None, unit: str) -> None:
            table.append({"name": name, "ours": ours, "peer": peer, "ratio": ratio, "goal": goal, "met": met, "unit": unit})

        ratio = statistics.median(a / b for a, b in zip(slowest["ours"], slowest["DDP"], strict=True))
        add(f"data parallel, 2 ranks, {where}: step against torch's DDP", 1000 * min(slowest["ours"]), 1000 * min(slowest["DDP"]), ratio,
            "<= 1.1", ratio <= 1.1, "ms")  # fmt: skip
        ratio = statistics.median(a / b for a, b in zip(slowest["ours"], slowest["after backward"], strict=True))
        add(f"data parallel, 2 ranks, {where}: overlap on against off", 1000 * min(slowest["ours"]), 1000 * min(slowest["after backward"]),
            ratio, "< 1" if link else "", ratio < 1 if link else None, "ms")  # fmt: skip
        if link is None:
            for number, what, unit in ((1, "collectives per step", ""), (2, "bytes of gradients per step", "MB")):
                ours, peer = (values[0][name][-1][number] / (1e6 if unit else 1) for name in ("ours", "DDP"))
                add(f"data parallel: {what} against torch's DDP", ours, peer, ours / peer, "<= 1.1", ours <= 1.1 * peer, unit)
        else:
            # Messages wait for the rank that is later, so that one has the larger share, and its time is the step's.
            shares = {name: statistics.median(max(rank[name][step][3] for rank in values) for step in range(STEPS)) for name in values[0]}
            share, off = shares["ours"], shares["after backward"]
            add(f"data parallel, {where}: hidden share of what could be, against off", share, off, share, ">= 0.7", share >= 0.7, "")
    return table

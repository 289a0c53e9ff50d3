"""Lab 08's parameter server: what a round costs beside gloo's all-reduce of the same gradients, and bytes at the server against a ring's.

There is no peer that is made for it: `torch.distributed.rpc` pickles, ps-lite has no package. A server on one machine cannot beat a ring;
the row says by how much it does not. No goal is set for it. Both run in turns, round after round, on three workers.
"""

import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit import ranks
from labkit.ranks import Endpoint, run_ranks
from tests.labs.solutions import solution

WORKERS, STEPS, SIZE, ROUNDS = 3, 10, 250_000, 5


class Wide(nn.Module):
    """One parameter of 1 MB whose gradient costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE))


def _server(lab: Any) -> tuple[float, float]:
    """At the server: seconds per round, and bytes in and out per round over the bytes of the model."""
    model = Wide()
    box = Endpoint()
    if ranks.rank():
        lab.work(box, model, lambda model, clock: model.w.sum())
        return 0.0, 0.0
    store = lab.Store(dict(model.named_parameters()), lambda tensors: torch.optim.SGD(tensors, lr=0.1))
    server, left, begin, moved = lab.SyncServer(store, WORKERS, WORKERS), WORKERS, time.perf_counter(), 0
    while left:
        message = box.recv()
        worker, said = message.sender - 1, lab.json.loads(message.data)
        moved += message.bytes
        answered = server.pull(worker) if said["do"] == "pull" else server.push(worker, said["clock"], {"w": message.tensors["gradient"]})
        for one in answered:
            stop = store.version == STEPS
            left -= stop
            moved += box.send(one + 1, lab.words(stop=True) if stop else lab.words(clock=store.version), {} if stop else store.pull()[1])
        if store.version == 0:
            begin = time.perf_counter()  # until all have started
    return (time.perf_counter() - begin) / STEPS, moved / STEPS / (4 * SIZE)


def _ring() -> float:
    """Seconds per all-reduce of the same gradients."""
    x = torch.zeros(SIZE)
    dist.all_reduce(x)
    begin = time.perf_counter()
    for _ in range(STEPS):
        dist.all_reduce(x)
    return (time.perf_counter() - begin) / STEPS


def rows() -> list[dict[str, Any]]:
    module = solution("08")
    lab = SimpleNamespace(**{name: getattr(module, name) for name in ("Store", "SyncServer", "work", "words", "json")})
    times, share = [], 0.0
    for _ in range(ROUNDS):
        ours, share = run_ranks(_server, WORKERS + 1, lab, group=False, timeout=120).values[0]
        times.append((ours, max(run_ranks(_ring, WORKERS).values)))
    ratio = statistics.median(ours / peer for ours, peer in times)
    ring = 4 * (WORKERS - 1) / WORKERS
    label = f"parameter server, {WORKERS} workers, 1 MB"
    return [
        {"name": f"{label}: time of a round against gloo's all-reduce", "ours": 1000 * min(ours for ours, _ in times),
         "peer": 1000 * min(peer for _, peer in times), "ratio": ratio, "goal": "", "met": None, "unit": "ms"},
        {"name": f"{label}: bytes in and out at the server against a ring's rank", "ours": share, "peer": ring, "ratio": share / ring,
         "goal": "", "met": None, "unit": "x model"},
    ]  # fmt: skip

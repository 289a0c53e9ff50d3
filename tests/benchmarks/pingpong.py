"""Lab 01's references against `nn.Sequential` in inference mode: time of a forward pass, and tensors of activation size that it creates.

Both run the same pass in turn, round after round; the ratio is the median over rounds of the two times of one round.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit.models import linear_layers
from labkit.recorder import Recorder
from tests.labs.solutions import solution

BATCH, WIDTH, DEPTH, ROUNDS = 1024, 256, 64, 21


def _created(run: Callable[[], Any], watch: list[Any]) -> int:
    with Recorder(watch=watch) as recorder, recorder.phase("run"):
        run()
    return len(recorder.recording.allocations("run", min_bytes=BATCH * WIDTH * 4 // 2))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rows() -> list[dict[str, Any]]:
    """Time (at most 1.1x) and allocations of the forward pass and of a later call of the executor."""
    lab = solution("01")
    layers = linear_layers([WIDTH] * (DEPTH + 1))
    x, out = torch.randn(BATCH, WIDTH), torch.empty(BATCH, WIDTH)
    sequential = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
    executor = lab.PingPong(layers, BATCH)

    def peer() -> torch.Tensor:
        with torch.inference_mode():
            return sequential(x)

    runs: dict[str, Callable[[], Any]] = {
        "two buffers": lambda: lab.pingpong_forward(layers, x),
        "executor, a later call": lambda: executor(x, out=out),
    }
    for run in (peer, *runs.values()):
        run()
    theirs: list[float] = []
    ours: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        theirs.append(_seconds(peer))
        for name, run in runs.items():
            ours[name].append(_seconds(run))
    found = []
    for (name, run), limit in zip(runs.items(), (2, 0), strict=True):
        ratio = statistics.median(mine / peer_s for mine, peer_s in zip(ours[name], theirs, strict=True))
        found.append(
            {
                "name": f"ping-pong, {name}: {DEPTH} layers against nn.Sequential in inference mode",
                "ours": 1000 * statistics.median(ours[name]),
                "peer": 1000 * statistics.median(theirs),
                "ratio": ratio,
                "goal": "<= 1.1",
                "met": ratio <= 1.1,
                "unit": "ms",
            }
        )
        made, made_by_peer = _created(run, [*layers, x, out]), _created(peer, [*layers, x])
        found.append(
            {
                "name": f"ping-pong, {name}: tensors created in one call",
                "ours": made,
                "peer": made_by_peer,
                "ratio": made / made_by_peer,
                "goal": f"{limit} against {2 * DEPTH}",
                "met": (made, made_by_peer) == (limit, 2 * DEPTH),
                "unit": "tensors",
            }
        )
    return found

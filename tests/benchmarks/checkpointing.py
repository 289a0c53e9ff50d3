"""Lab 02's reference against `torch.utils.checkpoint` with the same segments: peak bytes, and time of a training step.

Both run the same step in turn, round after round; the ratio of times is the median over rounds of the two times of one round.
Against the non-reentrant kind, which recomputes through hooks, the peak may be higher by one Linear's gradients. Autograd's engine holds
the gradient that a Function is given until its backward returns, so it is still there when the next Linear's gradients are made; hooks have
let go of it by then. (A pre-hook that swaps it for a placeholder brings the two within 516 bytes, at the price of a reference that nobody
would read.) PyTorch's reentrant kind is a Function, too: against that one the goal is strict.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.checks._threads import one_thread
from labkit.models import feed_forward_blocks, relu_blocks
from labkit.recorder import Recorder
from tests.labs.solutions import solution

Run = Callable[[list[nn.Module], torch.Tensor, int], torch.Tensor]
SEGMENTS, ROUNDS = 8, 11


def torch_segments(layers: list[nn.Module], x: torch.Tensor, segments: int, reentrant: bool) -> torch.Tensor:
    """PyTorch's checkpoint at the edges that the reference uses."""
    if reentrant and not x.requires_grad:
        x = x.detach().requires_grad_()
    for start, end in pairwise(index * len(layers) // segments for index in range(segments + 1)):
        x = checkpoint(nn.Sequential(*layers[start:end]), x, use_reentrant=reentrant)
    return x


def _step(run: Run, layers: list[nn.Module], x: torch.Tensor) -> float:
    started = time.perf_counter()
    run(layers, x, SEGMENTS).square().mean().backward()
    return time.perf_counter() - started


def _peak(run: Run, layers: list[nn.Module], x: torch.Tensor) -> int:
    with Recorder() as recorder, recorder.phase("step"):
        _step(run, layers, x)
    return recorder.recording.peak(born=True)


@one_thread()  # where others keep the cores busy, threads wait for each other many times longer than they work
def rows() -> list[dict[str, Any]]:
    """Two networks, two kinds of PyTorch's checkpoint: ratio of peaks (at most 1.0) and of times (at most 1.1)."""
    ours: Run = solution("02").checkpoint_sequential
    table = []
    networks = {
        "64 ReLU blocks": (relu_blocks(64, 128), torch.randn(4096, 128)),
        "32 feed-forward blocks": (feed_forward_blocks(32, 128), torch.randn(1024, 128)),
    }
    for network, (layers, x) in networks.items():
        for kind in (False, True):
            def theirs(layers: list[nn.Module], x: torch.Tensor, segments: int, kind: bool = kind) -> torch.Tensor:
                return torch_segments(layers, x, segments, kind)

            for run in (ours, theirs):
                _step(run, layers, x)  # gradients exist, threads are awake
            mine, peer = _peak(ours, layers, x), _peak(theirs, layers, x)
            label = f"checkpoint, {network}, against {'' if kind else 'not '}reentrant"
            linears = (part for layer in layers for part in layer.modules() if isinstance(part, nn.Linear))
            allowed = 0 if kind else max(part.weight.nbytes + part.bias.nbytes for part in linears)
            table.append({"name": f"{label}: peak", "ours": mine / 2**20, "peer": peer / 2**20, "ratio": mine / peer,
                          "goal": "<= 1.00" + ("" if kind else " and a Linear's"),
                          "met": mine <= peer + allowed, "unit": "MiB"})  # fmt: skip
            pairs = [(_step(ours, layers, x), _step(theirs, layers, x)) for _ in range(ROUNDS)]
            ratio = statistics.median(a / b for a, b in pairs)
            table.append({"name": f"{label}: time", "ours": 1000 * min(a for a, _ in pairs), "peer": 1000 * min(b for _, b in pairs),
                          "ratio": ratio, "goal": "<= 1.1", "met": ratio <= 1.1, "unit": "ms"})  # fmt: skip
    return table

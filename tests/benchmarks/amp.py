"""Lab 04's references against `torch.amp.GradScaler` and `torch.autocast`: the scale's trace, time of a training step, its peak.

Both train the same small GPT on the same batch in turn, round after round; the ratio of times is the median over rounds of the two times
of one round.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit.checks._amp_bench import Bench, play
from labkit.checks._amp_scaler import random_script
from labkit.checks._threads import one_thread
from labkit.data import batches, python_docs
from labkit.gpt import GPT, GPTConfig, next_token_loss
from labkit.recorder import Recorder
from tests.labs.solutions import solution

ROUNDS, STEPS, MAX_NORM = 11, 200, 1.0
CONFIG = GPTConfig(context=64, layers=2, heads=2, width=64)


def _peer(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, dtype: torch.dtype) -> Callable[..., float]:
    """PyTorch's own step, in the order of its documentation."""

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        with torch.autocast("cpu", dtype):
            loss = next_token_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    return step


def _ours(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, dtype: torch.dtype) -> Callable[..., float]:
    step = solution("04").amp_step
    return lambda x, y: step(model, optimizer, x, y, next_token_loss, device_type="cpu", dtype=dtype, scaler=scaler, max_norm=MAX_NORM)


def _timed(step: Callable[..., float], x: torch.Tensor, y: torch.Tensor) -> float:
    started = time.perf_counter()
    step(x, y)
    return time.perf_counter() - started


def _peak(step: Callable[..., float], x: torch.Tensor, y: torch.Tensor) -> int:
    with Recorder() as recorder, recorder.phase("step"):
        step(x, y)
    return recorder.recording.peak(born=True)


def _trace_row() -> dict[str, Any]:
    settings = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5}
    script = random_script(torch.Generator().manual_seed(4), STEPS, ("inf", "-inf", "nan"))
    kinds = {"ours": solution("04").DynamicLossScaler, "peer": lambda **settings: torch.amp.GradScaler("cpu", **settings)}
    traces = {who: [row["scale"] for row in play(kind(**settings), Bench("adam", 1), script, 1)[0]] for who, kind in kinds.items()}
    same = sum(a == b for a, b in zip(traces["ours"], traces["peer"], strict=True))
    return {"name": f"AMP: scales of {STEPS} steps equal to torch.amp.GradScaler's", "ours": same, "peer": len(traces["peer"]),
            "ratio": same / len(traces["peer"]), "goal": "all", "met": same == len(traces["peer"]), "unit": "scales"}  # fmt: skip


@one_thread()
def rows() -> list[dict[str, Any]]:
    """The trace (equal), and for float16 and bfloat16 with a scaler: peak of a step (at most the peer's) and time (at most 1.1x)."""
    table = [_trace_row()]
    text, _ = python_docs()
    ((x, y),) = batches(text, 4, 64, 1)
    for dtype in (torch.float16, torch.bfloat16):
        steps = []
        for make, kind in ((_ours, solution("04").DynamicLossScaler), (_peer, lambda: torch.amp.GradScaler("cpu"))):
            model = GPT(CONFIG)
            steps.append(make(model, torch.optim.AdamW(model.parameters(), lr=1e-3), kind(), dtype))
        ours, peer = steps
        for step in (ours, peer, ours, peer):
            step(x, y)  # the optimizer's state exists
        label = f"AMP, {str(dtype).removeprefix('torch.')} step of a GPT against torch.amp"
        mine, theirs = _peak(ours, x, y), _peak(peer, x, y)
        table.append({"name": f"{label}: peak", "ours": mine / 2**20, "peer": theirs / 2**20, "ratio": mine / theirs, "goal": "<= 1.00",
                      "met": mine <= theirs, "unit": "MiB"})  # fmt: skip
        pairs = [(_timed(ours, x, y), _timed(peer, x, y)) for _ in range(ROUNDS)]
        ratio = statistics.median(a / b for a, b in pairs)
        table.append({"name": f"{label}: time", "ours": 1000 * min(a for a, _ in pairs), "peer": 1000 * min(b for _, b in pairs),
                      "ratio": ratio, "goal": "<= 1.1", "met": ratio <= 1.1, "unit": "ms"})  # fmt: skip
    return table

"""Lab 05's reference against a plain torch loop over the same micro-batches, and Hugging Face Accelerate where it is installed.

All run the same window in turn, round after round; the ratio of times is the median over rounds of the two times of one round. The peak
of a window is also set beside that of a single micro-batch that meets gradients already there: accumulation must add nothing to it.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from labkit.checks._threads import one_thread
from labkit.data import batches, python_docs
from labkit.gpt import GPT, GPTConfig, next_token_loss
from labkit.recorder import Recorder
from tests.labs.solutions import solution

Batch = tuple[torch.Tensor, torch.Tensor]
Window = Callable[[GPT, list[Batch], torch.optim.Optimizer, Any], Any]
CONFIG, ROUNDS = GPTConfig(context=64, layers=2, heads=4, width=64), 9


def loss_fn(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return next_token_loss(model(batch[0]), batch[1])


def plain_loop(model: GPT, micro_batches: list[Batch], optimizer: torch.optim.Optimizer, loss_fn: Any) -> None:
    """The least that accumulates."""
    for micro_batch in micro_batches:
        (loss_fn(model, micro_batch) / len(micro_batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def accelerate_loop(pieces: int) -> Window | None:
    """Accelerate's `accumulate`, or None where it is not installed."""
    if importlib.util.find_spec("accelerate") is None:
        return None
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=pieces)

    def window(model: GPT, micro_batches: list[Batch], optimizer: torch.optim.Optimizer, loss_fn: Any) -> None:
        wrapped = accelerator.prepare(optimizer)
        for micro_batch in micro_batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model, micro_batch))
                wrapped.step()
                wrapped.zero_grad()

    return window


def _fresh() -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _seconds(run: Window, micro_batches: list[Batch]) -> float:
    model, optimizer = _fresh()
    started = time.perf_counter()
    run(model, micro_batches, optimizer, loss_fn)
    return time.perf_counter() - started


def _peak(run: Window, micro_batches: list[Batch], gradients: bool = False) -> int:
    model, optimizer = _fresh()
    for parameter in model.parameters() if gradients else ():
        parameter.grad = torch.zeros_like(parameter)
    with Recorder(watch=[model, optimizer, *(part for batch in micro_batches for part in batch)]) as recorder:
        with recorder.phase("window"):
            run(model, micro_batches, optimizer, loss_fn)
    return recorder.recording.peak("window") - sum(part.untyped_storage().nbytes() for batch in micro_batches for part in batch)


@one_thread()  # where others keep the cores busy, threads wait for each other many times longer than they work
def rows() -> list[dict[str, Any]]:
    """Peaks (at most 1.00 of the peer's) and times (at most 1.1)."""
    ours: Window = solution("05").accumulate
    text, _ = python_docs()
    table = []
    for size, pieces in ((16, 4), (8, 32)):
        micro_batches = batches(text, size, CONFIG.context, pieces)
        peers = {"a plain torch loop": plain_loop, "Hugging Face Accelerate": accelerate_loop(pieces)}
        for name, theirs in peers.items():
            if theirs is None:
                continue
            for run in (ours, theirs):
                _seconds(run, micro_batches[:2])
            mine, peer = _peak(ours, micro_batches), _peak(theirs, micro_batches)
            label = f"accumulate, {size} x {pieces}, against {name}"
            table.append({"name": f"{label}: peak", "ours": mine / 2**20, "peer": peer / 2**20, "ratio": mine / peer, "goal": "<= 1.00",
                          "met": mine <= peer, "unit": "MiB"})  # fmt: skip
            rounds = ROUNDS if pieces < 10 else 7
            pairs = [(_seconds(ours, micro_batches), _seconds(theirs, micro_batches)) for _ in range(rounds)]
            ratio = statistics.median(a / b for a, b in pairs)
            table.append({"name": f"{label}: time", "ours": 1000 * min(a for a, _ in pairs), "peer": 1000 * min(b for _, b in pairs),
                          "ratio": ratio, "goal": "<= 1.1", "met": ratio <= 1.1, "unit": "ms"})  # fmt: skip
        mine, single = _peak(ours, micro_batches), _peak(plain_loop, micro_batches[:1], gradients=True)
        table.append({"name": f"accumulate, {size} x {pieces}, against one micro-batch with gradients there: peak", "ours": mine / 2**20,
                      "peer": single / 2**20, "ratio": mine / single, "goal": "<= 1.00", "met": mine <= single, "unit": "MiB"})  # fmt: skip
    return table

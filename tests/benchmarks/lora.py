"""Lab 11's reference against PEFT's `LoraConfig` on the same model: trainable parameters, time of a training step, peak bytes.

Both take the same step in turn, round after round; the ratio of times is the median over rounds of the two times of one round.
"""

import statistics
import time
from typing import Any

import torch

from labkit.checks._threads import one_thread
from labkit.data import batches, python_docs
from labkit.data.pretrain import pretrained_gpt
from labkit.gpt import next_token_loss
from labkit.recorder import Recorder
from tests.labs.solutions import solution

RANK, ALPHA, ROUNDS = 8, 16, 15


def _models() -> dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]]:
    from peft import LoraConfig, get_peft_model

    ours, base = pretrained_gpt(), pretrained_gpt()
    solution("11").inject(ours, RANK, ALPHA)
    peer = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["query", "value"]))
    return {
        name: (model.train(), torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))
        for name, model in {"ours": ours, "peer": peer}.items()
    }


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    started = time.perf_counter()
    next_token_loss(model(pair[0]), pair[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started


@one_thread()  # where others keep the cores busy, threads wait for each other many times longer than they work
def rows() -> list[dict[str, Any]]:
    """Trainable parameters (equal), peak (at most PEFT's) and time (at most 1.1 times PEFT's) of a step of the small GPT."""
    models = _models()
    (pair,) = batches(python_docs()[0], 4, 128, count=1)
    counts = {name: sum(p.numel() for p in model.parameters() if p.requires_grad) for name, (model, _) in models.items()}
    peaks = {}
    for name, (model, optimizer) in models.items():
        _step(model, optimizer, pair)  # the optimizer's state exists
        with Recorder(watch=[model, optimizer]) as recorder:
            _step(model, optimizer, pair)
        peaks[name] = recorder.recording.peak_bytes
    pairs = [tuple(_step(*models[name], pair) for name in ("ours", "peer")) for _ in range(ROUNDS)]
    ratio = statistics.median(ours / peer for ours, peer in pairs)
    label = f"LoRA rank {RANK} on query and value, against PEFT"
    return [
        {"name": f"{label}: trainable parameters", "ours": counts["ours"], "peer": counts["peer"], "ratio": counts["ours"] / counts["peer"],
         "goal": "equal", "met": counts["ours"] == counts["peer"], "unit": ""},
        {"name": f"{label}: peak", "ours": peaks["ours"] / 2**20, "peer": peaks["peer"] / 2**20, "ratio": peaks["ours"] / peaks["peer"],
         "goal": "<= 1.00", "met": peaks["ours"] <= peaks["peer"], "unit": "MiB"},
        {"name": f"{label}: time", "ours": 1000 * min(a for a, _ in pairs), "peer": 1000 * min(b for _, b in pairs), "ratio": ratio,
         "goal": "<= 1.1", "met": ratio <= 1.1, "unit": "ms"},
    ]  # fmt: skip

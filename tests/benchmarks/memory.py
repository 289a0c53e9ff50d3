"""Lab 00's reference estimators against what the recorder measures on a real training step: states within 2%, activations and peak 5%.

The configs are none that the lab or its checks use. The last row runs the activations of GPT-2's real configuration on fake tensors.
"""

from typing import Any

import torch

from labkit.checks._memory_truth import STATES, record_step
from labkit.gpt import GPT, GPT2_XL, GPTConfig, next_token_loss
from labkit.paper import paper_scale
from labkit.recorder import Recorder
from tests.labs.solutions import solution

CONFIGS = {
    "4 layers, width 160": (GPTConfig(2600, 120, 4, 5, 160), 6, 100, torch.float32),
    "16 layers, width 48": (GPTConfig(1800, 64, 16, 3, 48), 4, 60, torch.float32),
    "long sequences": (GPTConfig(5000, 320, 2, 3, 48), 1, 300, torch.float32),
    "untied, large vocabulary": (GPTConfig(9000, 48, 2, 4, 96, tied=False), 3, 40, torch.float32),
    "bfloat16": (GPTConfig(2600, 120, 3, 4, 96), 4, 80, torch.bfloat16),
}


def _row(name: str, ours: float, peer: float, within: float) -> dict[str, Any]:
    ratio = ours / peer
    return {"name": f"estimate, {name}", "ours": ours / 2**20, "peer": peer / 2**20, "ratio": ratio, "goal": f"1 +- {within:g}",
            "met": abs(ratio - 1) <= within, "unit": "MiB"}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Per config: model states, activations, peak; then GPT-2's activations at batch 1."""
    lab, table = solution("00"), []
    recipes = {torch.float32: lab.recipes()["fp32"], torch.bfloat16: lab.recipes()["16-bit"]}
    for name, (config, batch, seq, dtype) in CONFIGS.items():
        recording = record_step(config, batch, seq, dtype)
        measured, mine = recording.by_category("peak"), lab.estimate(config, batch, seq, recipes[dtype])
        table += [
            _row(f"{name}: states", sum(mine[key] for key in STATES), sum(measured[key] for key in STATES), 0.02),
            _row(f"{name}: activations", mine["activations"], recording.at("kept", born=True), 0.05),
            _row(f"{name}: peak", sum(mine.values()), recording.peak_bytes, 0.05),
        ]
    with paper_scale():
        model, ids = GPT(GPT2_XL), torch.zeros(1, 1024, dtype=torch.long)
        with Recorder(watch=[model, ids]) as recorder:
            loss = next_token_loss(model(ids), ids)
            recorder.mark("kept")
            del loss
    kept = recorder.recording.at("kept", born=True)
    return [*table, _row("GPT-2, batch 1, fp32: activations", lab.activation_bytes(GPT2_XL, 1, 1024), kept, 0.05)]

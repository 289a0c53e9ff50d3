"""`python -m tests.labs.lora_sweep`: the full rank sweep of lab 11, with its reference, written to labkit/data/lora_sweep.json.

For a near text (docstrings) and a far one (code): full fine-tuning and ranks 1 to 64 on query and value, alpha = rank throughout, so that
the scale alpha / rank stays 1. Each gets the best of several rates (chosen with seed 0), then two more seeds. About twenty minutes.
"""

import copy
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import labkit.data
from labkit.data import batches, python_docs
from labkit.data.library import KINDS, python_library
from labkit.data.pretrain import pretrained_gpt, validation_loss
from labkit.gpt import GPT, next_token_loss
from tests.labs.solutions import solution

FILE = Path(labkit.data.__file__).parent / "lora_sweep.json"
RANKS = (1, 2, 4, 8, 16, 32, 64)
LADDER = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TRIED = {"full": (0, 3), "lora": (2, 6)}  # rungs tried at first
STEPS, BATCH, SEQ, SEEDS = 150, 4, 128, 3


def run(base: GPT, kind: str, rank: int | None, rate: float, seed: int) -> dict[str, Any]:
    """One adaptation of a copy of `base` (rank None: all parameters); its losses afterwards."""
    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    parameters = list(model.parameters()) if rank is None else solution("11").inject(model, rank, rank)
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    train, held_out = python_library(kind)
    for step, (inputs, targets) in enumerate(batches(train, BATCH, SEQ, STEPS, seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        optimizer.zero_grad()
        next_token_loss(model(inputs), targets).backward()
        optimizer.step()
    return {
        "text": kind, "rank": rank or "full", "rate": rate, "seed": seed, "trainable": sum(p.numel() for p in parameters),
        "new_loss": validation_loss(model, held_out, 64), "old_loss": validation_loss(model, python_docs()[1], 64),
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    base, rows, started = pretrained_gpt(), [], time.perf_counter()
    before = {kind: validation_loss(base, python_library(kind)[1], 64) for kind in KINDS}
    before["docs"] = validation_loss(base, python_docs()[1], 64)
    todo = [(kind, rank) for kind in KINDS for rank in (*RANKS, None)]
    for done, (kind, rank) in enumerate(todo, start=1):
        first, end = TRIED["lora" if rank else "full"]
        tried = [run(base, kind, rank, rate, 0) for rate in LADDER[first:end]]
        while min(tried, key=lambda row: row["new_loss"]) is tried[-1] and end < len(LADDER):  # the best is to be inside
            tried.append(run(base, kind, rank, LADDER[end], 0))
            end += 1
        best = min(tried, key=lambda row: row["new_loss"])["rate"]
        rows += tried + [run(base, kind, rank, best, seed) for seed in range(1, SEEDS)]
        minutes = (time.perf_counter() - started) / 60
        print(f"{done} of {len(todo)}: {kind}, {rows[-1]}, {minutes:.1f} min", file=sys.stderr)
        machine = f"{platform.machine()} CPU, one thread"
        setting = {"steps": STEPS, "batch": BATCH, "seq": SEQ, "targets": ["query", "value"], "scale": 1}
        told = {
            "torch": torch.__version__,
            "machine": machine,
            "setting": setting,
            "before": before,
            "rows": rows,
        }
        FILE.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

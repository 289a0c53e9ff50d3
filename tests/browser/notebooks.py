"""Notebooks for browser tests, made of cell sources."""

from __future__ import annotations

import json
from pathlib import Path


def write_notebook(path: Path, *sources: str) -> Path:
    """Write an .ipynb with one code cell per source ('# %% [markdown]' first makes it a markdown cell). Returns
    `path`.
    """
    cells = []
    for number, source in enumerate(sources):
        cell = {"id": f"cell-{number}", "metadata": {}, "source": source.strip("\n")}
        if source.startswith("# %% [markdown]"):
            cells.append({**cell, "cell_type": "markdown", "source": source.partition("\n")[2].strip("\n")})
        else:
            cells.append({**cell, "cell_type": "code", "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook, indent=1), encoding="utf-8")
    return path


SETUP = """
import time, torch
from torch import nn
from labkit import live_memory
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

model = nn.Sequential(*[Block(128) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
batch = torch.randn(512, 128)

def train(live, steps, pause=0.0):
    for _ in range(steps):
        with live.phase("forward"):
            loss = model(batch).square().mean()
            time.sleep(pause)
        with live.phase("backward"):
            loss.backward()
            time.sleep(pause)
        with live.phase("optimizer step"):
            optimizer.step()
            optimizer.zero_grad()
"""

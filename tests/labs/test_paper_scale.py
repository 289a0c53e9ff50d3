"""Right answers of labs 01 and 02 run at paper scale, in any form, with the bytes of a real run."""

import importlib

import pytest
import torch

from labkit import Recorder
from labkit.models import linear_layers, relu_blocks, residual_blocks
from labkit.paper import paper_scale
from tests.labs import corpus

for topic in ("pingpong", "checkpointing"):
    importlib.import_module(f"tests.labs.alternatives.{topic}")
RIGHT = {f"{item.check}: {item.name}": item for item in corpus._right if item.topic in ("pingpong", "checkpointing")}


def forward(candidate):
    candidate(linear_layers([64, 96, 16, 64, 128]), torch.randn(16, 64))


def residual(candidate):
    candidate(residual_blocks(32, [48, 16, 96]), torch.randn(16, 32))


def executor(candidate):
    run, x, mine = candidate(linear_layers([64, 96, 16, 64]), max_batch=16), torch.randn(16, 64), torch.empty(16, 64)
    for _ in range(2):
        run(x)
        run(x, out=mine)


def checkpoint(candidate):
    blocks = torch.nn.Sequential(*relu_blocks(3, 32))
    h = candidate(blocks, torch.randn(16, 32, requires_grad=True))
    h.square().sum().backward()


def sequential(candidate):
    out = candidate(relu_blocks(9, 32), torch.randn(64, 32), 3)
    out.square().sum().backward()


def recursive(candidate):
    candidate(relu_blocks(9, 32), torch.randn(64, 32, requires_grad=True)).square().sum().backward()


def saved(candidate):
    told = candidate[1](torch.nn.Sequential(*relu_blocks(3, 32)), torch.randn(16, 32))
    assert told == 4 * 16 * 32 * 4


USES = {
    "pingpong.forward": forward, "pingpong.residual": residual, "pingpong.persistent": executor,
    "checkpointing.checkpoint": checkpoint, "checkpointing.sequential": sequential,
    "checkpointing.recursive": recursive, "checkpointing.saved": saved,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, item in RIGHT.items() if item.check in USES])
def test_runs_with_the_bytes_of_a_real_run(name):
    item = RIGHT[name]
    with Recorder() as real:
        USES[item.check](item.candidate)
    with paper_scale(), Recorder() as fake:
        USES[item.check](item.candidate)
    assert fake.recording.peak_bytes == real.recording.peak_bytes > 0

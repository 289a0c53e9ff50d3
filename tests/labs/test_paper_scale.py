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


# Each makes layers and data, and returns what is recorded.


def forward(candidate):
    layers, x = linear_layers([64, 96, 16, 64, 128]), torch.randn(16, 64)
    return lambda: candidate(layers, x)


def residual(candidate):
    blocks, x = residual_blocks(32, [48, 16, 96]), torch.randn(16, 32)
    return lambda: candidate(blocks, x)


def executor(candidate):
    layers, x, mine = linear_layers([64, 96, 16, 64]), torch.randn(16, 64), torch.empty(16, 64)

    def run():
        execute = candidate(layers, max_batch=16)
        for _ in range(2):
            execute(x)
            execute(x, out=mine)

    return run


def checkpoint(candidate):
    blocks, x = torch.nn.Sequential(*relu_blocks(3, 32)), torch.randn(16, 32, requires_grad=True)
    return lambda: candidate(blocks, x).square().sum().backward()


def sequential(candidate):
    blocks, x = relu_blocks(9, 32), torch.randn(64, 32)
    return lambda: candidate(blocks, x, 3).square().sum().backward()


def recursive(candidate):
    blocks, x = relu_blocks(9, 32), torch.randn(64, 32, requires_grad=True)
    return lambda: candidate(blocks, x).square().sum().backward()


def saved(candidate):
    blocks, x = torch.nn.Sequential(*relu_blocks(3, 32)), torch.randn(16, 32)

    def run():
        assert candidate[1](blocks, x) == 4 * x.nbytes

    return run


USES = {
    "pingpong.forward": forward, "pingpong.residual": residual, "pingpong.persistent": executor,
    "checkpointing.checkpoint": checkpoint, "checkpointing.sequential": sequential,
    "checkpointing.recursive": recursive, "checkpointing.saved": saved,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, item in RIGHT.items() if item.check in USES])
def test_runs_with_the_bytes_of_a_real_run(name):
    item = RIGHT[name]
    run = USES[item.check](item.candidate)
    with Recorder() as real:
        run()
    with paper_scale():
        run = USES[item.check](item.candidate)
        with Recorder() as fake:
            run()
    assert fake.recording.peak_bytes == real.recording.peak_bytes > 0

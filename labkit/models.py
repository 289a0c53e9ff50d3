"""Tiny seeded models: the same weights every time, no downloads."""

import math
from collections.abc import Sequence

import torch
from torch import nn


def linear(inputs: int, outputs: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A linear layer (batch, inputs) -> (batch, outputs) whose scale keeps activations level through many ReLU layers (He et al. 2015)."""
    layer = nn.Linear(inputs, outputs, dtype=dtype, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / inputs), generator=generator)
        layer.bias.normal_(0.0, 0.1, generator=generator)
    return layer


def linear_layers(widths: Sequence[int], seed: int = 0) -> list[nn.Linear]:
    """len(widths) - 1 linear layers; layer i maps (batch, widths[i]) to (batch, widths[i + 1])."""
    generator = torch.Generator().manual_seed(seed)
    return [linear(a, b, generator) for a, b in zip(widths, widths[1:], strict=False)]


class ResidualBlock(nn.Module):
    """x + down(relu(up(x))): (batch, width) -> (batch, width) by way of (batch, hidden)."""

    def __init__(self, width: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.up = linear(width, hidden, generator)
        self.down = linear(hidden, width, generator)
        with torch.no_grad():
            self.down.weight.mul_(0.2)  # a deep stack of blocks neither dies nor explodes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def residual_blocks(width: int, hidden: Sequence[int], seed: int = 0) -> list[ResidualBlock]:
    """One block per entry of `hidden`, all of them (batch, width) -> (batch, width)."""
    generator = torch.Generator().manual_seed(seed)
    return [ResidualBlock(width, size, generator) for size in hidden]


def relu_blocks(count: int, width: int, seed: int = 0) -> list[nn.Sequential]:
    """`count` blocks Linear, ReLU: (batch, width) -> (batch, width). Autograd keeps one activation each, the ReLU's output."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Sequential(linear(width, width, generator), nn.ReLU()) for _ in range(count)]


class FeedForward(nn.Module):
    """x + down(gelu(up(norm(x)))), the feed-forward half of a transformer block: (batch, width) -> (batch, width).

    Inside it is four times as wide. Autograd keeps ten times its input: x, norm(x), and four each going into and coming out of GELU.
    """

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = linear(width, 4 * width, generator)
        self.down = linear(4 * width, width, generator)
        with torch.no_grad():
            self.down.weight.mul_(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def feed_forward_blocks(count: int, width: int, seed: int = 0) -> list[FeedForward]:
    """`count` feed-forward blocks, each (batch, width) -> (batch, width)."""
    generator = torch.Generator().manual_seed(seed)
    return [FeedForward(width, generator) for _ in range(count)]

"""Modules and batches for the data-parallel checks: PyTorch's own layers, and four small modules that trip wrappers up."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CHAIN = (7, 11, 13, 6, 9, 5, 12, 8, 3)  # all weights and biases differ in size: a message tells which of them it carries


def _chain() -> nn.Module:
    layers = [layer for into, out in zip(CHAIN, CHAIN[1:], strict=False) for layer in (nn.Linear(into, out), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _tied() -> nn.Module:
    words, out = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
    out.weight = words.weight
    return nn.Sequential(words, nn.Linear(6, 6), nn.Tanh(), out)


def _frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    for p in net[2].parameters():
        p.requires_grad_(False)
    return net


class _Branches(nn.Module):
    """Uses one of two branches, of the same shapes, by a keyword; `spare` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 10)
        self.branches = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])
        self.spare = nn.Linear(4, 5)
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, *, branch: int) -> torch.Tensor:
        return self.head(torch.tanh(self.branches[branch](torch.tanh(self.stem(x)))))


class _LateBranches(_Branches):
    """As _Branches, but nothing that all ranks leave out comes before the branches in the order of buckets."""

    def __init__(self) -> None:
        super().__init__()
        spare = self.spare
        del self.spare
        self._modules = {"spare": spare, **self._modules}


class _ChannelsLast(nn.Module):
    """Weights that do not lie in memory row by row, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.register_buffer("angles", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.angles.sum()


class _Disorder(nn.Module):
    """Uses its layers in another order than that in which it holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.third, self.first, self.fourth, self.second = nn.Linear(9, 4), nn.Linear(5, 7), nn.Linear(4, 3), nn.Linear(7, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return self.fourth(x)


class _Mixed(nn.Module):
    """float32, float64, float32."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.wide, self.out = nn.Linear(5, 6), nn.Linear(6, 4, dtype=torch.float64), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.wide(torch.tanh(self.low(x)).double())).float())


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # how to build one, shape of one row of input
    "chain": (_chain, (7,)),
    "transformer encoder": (_encoder, (4, 12)),
    "LSTM": (lambda: nn.LSTM(7, 5, 2, batch_first=True), (6, 7)),
    "convolution and BatchNorm": (_convolution, (2, 5, 5)),
    "tied weights": (_tied, (4,)),
    "frozen layer": (_frozen, (6,)),
    "another branch on each rank": (_Branches, (6,)),
    "another branch in each piece": (_Branches, (6,)),
    "another branch on each rank, unused first": (_LateBranches, (6,)),
    "weights in channels_last": (_ChannelsLast, (2, 5, 5)),
    "wide chain": (lambda: _chain().double(), (7,)),
    "layers held in another order": (_Disorder, (5,)),
    "float32 and float64": (_Mixed, (5,)),
    "BatchNorm without weights": (lambda: nn.BatchNorm1d(4, affine=False), (4,)),
    "a large layer": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3)), (6,)),
}


def build(name: str, seed: int, rank: int) -> nn.Module:
    """The module as `rank` starts with it: its own parameters, and buffers that differ, too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed * 64 + rank)
        net = NETS[name][0]()
    with torch.no_grad():
        for buffer in net.buffers():
            buffer += rank + 1 if buffer.is_floating_point() else rank + 2**40 + 1  # more than float32 can tell apart
    return net


def batch(name: str, seed: int, rank: int, number: int, rows: int = 5) -> tuple[torch.Tensor, dict[str, Any], torch.Generator]:
    """A rank's `number`-th input, keywords for forward, and a generator for the target."""
    generator = torch.Generator().manual_seed((seed * 64 + rank) * 1000 + number + 1)
    shape = (rows, *NETS[name][1])
    x = torch.randint(9, shape, generator=generator) if name == "tied weights" else torch.randn(shape, generator=generator)
    x = x.double() if name == "wide chain" else x
    keywords = {"another branch on each rank": {"branch": (rank + number) % 2},
                "another branch on each rank, unused first": {"branch": (rank + number) % 2},
                "another branch in each piece": {"branch": number % 2}}.get(name, {})  # fmt: skip
    return x, keywords, generator


def loss_of(output: Any, generator: torch.Generator) -> torch.Tensor:
    """Mean square distance from random targets; of the first part where the module returns several."""
    output = output[0] if isinstance(output, tuple) else output
    target = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    return (output - target).square().mean()


def trainable(name: str) -> dict[str, torch.Tensor]:
    """The parameters that get gradients, in the order of `parameters()`."""
    return {key: p for key, p in build(name, 0, 0).named_parameters() if p.requires_grad}


def expected_steps(name: str, seed: int, world: int, steps: list[list[Any]], lr: float) -> list[dict[str, Any]]:
    """What training gives: for each step (a list of pieces) the mean gradients, each rank's own, and the parameters after it.

    One module, each rank's pieces by turns, the mean of the ranks' sums: with equal shares this is the gradient of the full batch.
    """
    net, told = build(name, seed, 0), []
    named = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for step, pieces in enumerate(steps):
        own: list[dict[str, torch.Tensor]] = []
        for rank in range(world):
            net.zero_grad()
            for piece in range(len(pieces)):
                x, keywords, generator = batch(name, seed, rank, 10 * step + piece)
                loss_of(net(x, **keywords), generator).backward()
            own.append({key: p.grad.clone() for key, p in named.items() if p.grad is not None})
        mean = {}
        for key, p in named.items():
            parts = [grads[key] for grads in own if key in grads]
            p.grad = mean[key] = sum(parts[1:], parts[0].clone()) / world if parts else None
        optimizer.step()
        told.append({"mean": dict(mean), "own": own, "after": {key: p.detach().clone() for key, p in named.items()}})
    return told

"""What lab 11's probes run and its judges run again: a small network with layers of several shapes, and the arithmetic of an adapter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from labkit.checks._core import WrongResult

WIDTH, INNER, OUTPUTS, BATCH = 12, 20, 5, 16
RATE, MOMENTUM, STEPS = 0.1, 0.9, 5
TOLERANCE = 1e-4  # of a tensor's largest entry: float32 rounding measures below 1e-5


class Attend(nn.Module):
    """(batch, 12) -> (batch, 12): query and key are 12 to 20, value is square and has no bias, out is 20 to 12."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.value, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sigmoid(self.query(x) * self.key(x))) * self.value(x)


class Block(nn.Module):
    """x + attention(norm(x)): (batch, 12) -> (batch, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attend()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class Net(nn.Module):
    """(batch, 12) -> (batch, 5). Its head is called `value` too, at the top; `query_norm` and `value_scale` only begin like a target."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.query_norm, self.value_scale = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.value(self.value_scale(self.query_norm(x)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from `seed`; the stream outside goes on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def make_net(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Net, torch.Tensor, torch.Tensor]:
    """The same net, input (16, 12) and target (16, 5) for the same seed, in every process."""
    with seeded(seed):
        net = Net()
        return net.to(dtype), torch.randn(BATCH, WIDTH).to(dtype), torch.randn(BATCH, OUTPUTS).to(dtype)


def paths_of(targets: Sequence[str]) -> list[str]:
    """Paths of the net's Linears whose last name is a target, in the order of the network."""
    return [name for name, module in Net().named_modules() if name.rpartition(".")[2] in targets and isinstance(module, nn.Linear)]


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that require grad."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def below(path: str, names: Sequence[str]) -> list[str]:
    """The names of the parameters of the layer at `path`."""
    return [name for name in names if name.startswith(f"{path}.")]


def randomise(module: nn.Module, seed: int) -> None:
    """Every trainable parameter gets new random numbers, as if it had been trained long."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable(module):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))


def weight_of(linear: nn.Linear) -> torch.Tensor:
    """The layer's own weight, also where a parametrization computes `linear.weight` from it."""
    if "weight" in getattr(linear, "parametrizations", {}):
        return linear.parametrizations.weight.original
    return linear.weight


def effective(module: nn.Module, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix (out, in) that the module multiplies by, found by what it makes of unit vectors."""
    with torch.no_grad():
        zero = torch.zeros(1, inputs, dtype=dtype)
        return (module(torch.eye(inputs, dtype=dtype)) - module(zero)).T.clone()


def tensor_result(out: Any, like: torch.Tensor, what: str) -> torch.Tensor:
    """`out`, or WrongResult where it is no tensor of the shape and dtype of `like`."""
    if not isinstance(out, torch.Tensor):
        raise WrongResult(f"{what} returned {'None' if out is None else 'a ' + type(out).__name__}, expected a tensor", "returns")
    if out.shape != like.shape or out.dtype != like.dtype:
        got, wanted = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (out, like))
        raise WrongResult(f"{what} returned a {got} tensor, expected {wanted}", "returns")
    return out.detach().clone()


# -- the judge's side --


@dataclass(frozen=True)
class Layout:
    """How the two trainable tensors of a layer are stored: which comes first, and whether each is transposed."""

    first_is_a: bool
    a_transposed: bool
    b_transposed: bool

    def factors(self, pair: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """A as (rank, in) and B as (out, rank)."""
        a, b = pair if self.first_is_a else pair[::-1]
        return (a.T if self.a_transposed else a), (b.T if self.b_transposed else b)


def layout_of(pair: Sequence[torch.Tensor], inputs: int, outputs: int, rank: int) -> Layout | None:
    """The layout of a layer whose inputs, outputs and rank are three different numbers; None where these are not its two factors."""
    if len(pair) != 2 or any(tensor.dim() != 2 for tensor in pair):
        return None
    shapes_a, shapes_b = [(rank, inputs), (inputs, rank)], [(outputs, rank), (rank, outputs)]
    for first_is_a in (True, False):
        a, b = (tuple(tensor.shape) for tensor in (pair if first_is_a else pair[::-1]))
        if a in shapes_a and b in shapes_b:
            return Layout(first_is_a, a == shapes_a[1], b == shapes_b[1])
    return None


def close(seen: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether they differ by at most `tolerance` of the largest entry expected (nan is never close)."""
    if seen.shape != expected.shape:
        return False
    seen, expected = seen.detach(), expected.detach()
    largest = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
    return bool(((seen.double() - expected.double()).abs() <= tolerance * largest).all())


def ratio(seen: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The one factor that takes `expected` to `seen`, or None where there is none."""
    if seen.shape != expected.shape or not float(expected.abs().max()):
        return None
    factor = float((seen.double() * expected.double()).sum() / expected.double().square().sum())
    return factor if close(seen.double(), factor * expected.double(), 1e-3) else None


def train_adapters(
    loss: Callable[[list[torch.Tensor]], torch.Tensor],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    steps: int = STEPS,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs (A, B) after `steps` steps of SGD with momentum on loss([scale * B @ A, ...])."""
    leaves = [tensor.detach().clone().requires_grad_() for pair in pairs for tensor in pair]
    optimizer = torch.optim.SGD(leaves, lr=RATE, momentum=MOMENTUM)
    for _ in range(steps):
        optimizer.zero_grad()
        loss([scale * b @ a for a, b in zip(leaves[::2], leaves[1::2], strict=True)]).backward()
        optimizer.step()
    return [(a.detach(), b.detach()) for a, b in zip(leaves[::2], leaves[1::2], strict=True)]


def net_with(net: Net, paths: Sequence[str], deltas: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What the net makes of x when each delta is added to the weight of the layer at its path."""
    own = dict(net.named_parameters())
    changed = {f"{path}.weight": own[f"{path}.weight"].detach() + delta for path, delta in zip(paths, deltas, strict=True)}
    return torch.func.functional_call(net, changed, (x,))


def mse(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out, target)

"""Networks that lab 02's probes run and its judges run again: layers that note each call, one training step, what two steps differ in."""

import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from labkit.checks._core import WrongResult
from labkit.recorder import Recorder, Recording, human_bytes

WIDTH, BATCH = 32, 256
TOLERANCE = 1e-4  # of a tensor's largest entry: rounding measures below 1e-5, activations kept in 16 bit 1e-3 and more
UNIT = WIDTH * BATCH * 4  # bytes of one float32 activation: 32 KiB


@dataclass
class Spy:
    """Notes every call of a layer: phase, layer, training mode, the random stream's state before and after it, dtype of its output."""

    phase: str = "forward"
    calls: list[tuple[str, int, bool, int, int, str]] = field(default_factory=list)

    def indices(self, phase: str) -> list[int]:
        return [call[1] for call in self.calls if call[0] == phase]

    def runs(self) -> dict[str, list[int]]:
        return {phase: self.indices(phase) for phase in ("forward", "backward")}


class Layer(nn.Module):
    """One (batch, width) -> (batch, width) layer that tells its spy when it runs."""

    def __init__(self, index: int, body: nn.Module, spy: Spy, watch_random: bool) -> None:
        super().__init__()
        self.index, self.body, self.spy, self.watch_random = index, body, spy, watch_random

    def _random_state(self) -> int:
        return zlib.crc32(torch.get_rng_state().numpy().tobytes()) if self.watch_random else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, phase = self._random_state(), self.spy.phase
        self.spy.calls.append((phase, self.index, self.training, before, before, ""))
        place = len(self.spy.calls) - 1
        y = self.body(x)
        self.spy.calls[place] = (phase, self.index, self.training, before, self._random_state(), str(y.dtype).removeprefix("torch."))
        return y


class Reshaped(nn.Module):
    """A linear layer whose output is a view of another shape's storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(-1, x.shape[0], x.shape[1] // 2).view_as(x)


def _body(kind: str, index: int, width: int) -> nn.Module:
    if kind == "silu":  # keeps two activations: what goes into SiLU, and what comes out, as the next linear layer's input
        return nn.Sequential(nn.Linear(width, width), nn.SiLU())
    if kind == "dropout":
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5))
    mixed: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
        lambda: Reshaped(width),
        lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()),
        lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()),
        lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()).requires_grad_(False),
    ]
    return mixed[index % len(mixed)]()


@dataclass
class Net:
    """Layers, an input, the weights of the loss, and the spy that the layers report to."""

    layers: list[Layer]
    x: torch.Tensor  # (batch, width)
    loss_weight: torch.Tensor  # (batch, width)
    spy: Spy

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for layer in self.layers for parameter in layer.parameters()]


def make_net(
    kind: str,
    depth: int,
    seed: int,
    *,
    width: int = WIDTH,
    batch: int = BATCH,
    dtype: torch.dtype = torch.float32,
    input_needs_grad: bool = True,
    watch_random: bool = False,
) -> Net:
    """The same net for the same arguments, in every process."""
    spy = Spy()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [Layer(index, _body(kind, index, width), spy, watch_random).to(dtype) for index in range(depth)]
        x, loss_weight = torch.randn(2, batch, width, dtype=dtype).unbind()
        with torch.no_grad():
            for layer in layers:
                for parameter in layer.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(0, math.sqrt(2 / width))
    return Net(layers, x.clone().requires_grad_(input_needs_grad), loss_weight.clone(), spy)


def examine_output(out: Any, like: torch.Tensor, what: str = "your function", detached: str = "no-graph") -> torch.Tensor:
    """`out`, or WrongResult when it is not a tensor like the plain run's that gradients can flow back from (hint `detached`)."""
    wanted = f"expected a {tuple(like.shape)} {str(like.dtype).removeprefix('torch.')} tensor"
    if not isinstance(out, torch.Tensor):
        got = "None" if out is None else f"a {type(out).__name__}"
        raise WrongResult(f"{what} returned {got}, {wanted}", "output")
    if out.shape != like.shape or out.dtype != like.dtype:
        raise WrongResult(f"{what} returned a {tuple(out.shape)} {str(out.dtype).removeprefix('torch.')} tensor, {wanted}", "output")
    if not out.requires_grad:
        raise WrongResult(f"{what} returned a tensor that no gradient can flow back from (requires_grad is False)", detached)
    return out


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    """`.grad`, zeros where there is none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.detach()


def flat_gradients(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([gradient(parameter).reshape(-1) for parameter in parameters])


def settings_of(layers: Sequence[nn.Module]) -> dict[str, Any]:
    """What a step must leave as it found it."""
    modules = [module for layer in layers for module in layer.modules()]
    return {
        "training mode of the layers": [module.training for module in modules],
        "requires_grad of the parameters": [parameter.requires_grad for layer in layers for parameter in layer.parameters()],
        "hooks on the layers": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": str(torch.get_default_dtype()),
    }


def run_step(
    net: Net,
    run: Callable[[list[Layer], torch.Tensor], Any],
    seed: int,
    recorder: Recorder | None = None,
    start: float = 0.0,
) -> dict[str, torch.Tensor]:
    """One training step of `run(layers, x)`: forward, a draw from the random stream, backward, another draw.

    Gradients exist before (so none is born while it records), hold `start`, and are added to. Returns the result's named tensors.
    """

    def phase(name: str) -> AbstractContextManager[None]:
        net.spy.phase = name
        return recorder.phase(name) if recorder else nullcontext()

    for parameter in net.parameters:
        parameter.grad = torch.full_like(parameter, start) if parameter.requires_grad else None
    net.x.grad = None
    torch.manual_seed(seed)
    with recorder or nullcontext():
        with phase("forward"):
            detached = "no-graph" if net.x.requires_grad else "input-without-grad"
            out = examine_output(run(net.layers, net.x), net.x, detached=detached)
        if recorder:
            recorder.mark("between")
        between = torch.rand(4)
        with phase("backward"):
            (out * net.loss_weight).sum().backward()
        after = torch.rand(4)
        if recorder:
            recorder.mark("after")
    tensors = {"out": out.detach().clone(), "parameters": flat_gradients(net.parameters), "between": between, "after": after}
    return tensors | ({"x": gradient(net.x)} if net.x.requires_grad else {})


def plain(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def named(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def of(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{prefix}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}/")}


def close(observed: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """Bit for bit, or within `tolerance` of the tensor's largest entry (another processor may add in another order)."""
    if observed.shape != expected.shape or observed.dtype != expected.dtype:
        return False
    if torch.equal(observed, expected):
        return True
    if not expected.is_floating_point() or not torch.isfinite(observed).all():
        return False
    scale = float(expected.abs().max())
    return bool(torch.allclose(observed, expected, rtol=tolerance, atol=tolerance * scale))


def difference(
    net: Net,
    expected: dict[str, torch.Tensor],
    observed: dict[str, torch.Tensor],
    tolerance: float = TOLERANCE,
    start: float = 0.0,
) -> tuple[str, str] | None:
    """(what is wrong, key of a hint) where a step's output and gradients are not the plain run's, or None."""
    if not close(observed["out"], expected["out"], tolerance):
        return "the output differs from the plain run's", "output"
    names = ["x"] if "x" in expected else []
    if any(name not in observed or observed[name].shape != expected[name].shape for name in [*names, "parameters"]):
        return "gradients are missing", "gradients"
    sizes = [parameter.numel() for parameter in net.parameters]
    theirs, ours = observed["parameters"].split(sizes), expected["parameters"].split(sizes)
    wrong = [i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if not close(a, b, tolerance)]
    start = torch.cat([torch.full((size,), start * p.requires_grad, dtype=p.dtype) for size, p in zip(sizes, net.parameters, strict=True)])
    moved, should = observed["parameters"] - start, expected["parameters"] - start
    if wrong and not moved.any():
        return "the parameters received no gradient", "parameter-grads"
    if "x" in expected and expected["x"].any() and not observed["x"].any():
        return "the input x received no gradient", "input-grad"
    if wrong:
        # The last one that differs is nearest to the loss: its error is the cleanest.
        nearest, right = (vector.split(sizes)[wrong[-1]].double() for vector in (moved, should))
        ratio = float(nearest @ right / (right @ right).clamp_min(1e-300))
        if abs(ratio) > 0.01 and abs(ratio - 1) > 0.01 and close(nearest, right * ratio, 1e-3):
            return f"parameter gradients are {ratio:.3g} times the plain run's", "scaled"
        below = [i for i in wrong if not moved.split(sizes)[i].any() and should.split(sizes)[i].any()]
        owner = [layer.index for layer in net.layers for _ in layer.parameters()][wrong[-1]]
        if below == wrong:
            return f"no gradient arrives at layer {owner} and before", "input-grad"
        return f"gradients differ from layer {owner} down" if owner else "the first layer's gradients differ", "gradients"
    if "x" in expected and not close(observed["x"], expected["x"], tolerance):
        return "the gradient of x differs", "gradients"
    return None


def plain_peak(depth: int) -> int:
    """Peak bytes of the plain run of "silu" layers: two activations each, and two more at the end (measured)."""
    return (2 * depth + 2) * UNIT


def born_summary(recording: Recording, at: str) -> str:
    """What holds most of the memory born in the step: "131 outputs of silu, 4.1 MiB, born in forward"."""
    groups: dict[tuple[str, str], list[int]] = {}
    for info in recording.alive(at, top=None):
        if info.born:
            groups.setdefault((info.op.rpartition(".")[2] or "no operator", info.phase), []).append(info.bytes)
    if not groups:
        return "nothing that was born in the step"
    (operator, phase), sizes = max(groups.items(), key=lambda item: sum(item[1]))
    return f"{len(sizes)} outputs of {operator}, {human_bytes(sum(sizes))}, born in {phase or 'no phase'}"

"""What lab 05's probes hand to a learner and its judges run again: models, micro-batches, and a trace of what an optimizer saw.

`Tally` is a model whose gradient tells where it came from: micro-batch j adds to entry j of its one parameter and to nothing else. So the
gradient that an optimizer finds at a step *is* the list of weights with which micro-batches went into that step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from labkit.checks._core import WrongResult

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.5
TOLERANCE = 1e-5  # of a tensor's largest entry; rounding measures 5e-7
Batch = tuple[Any, ...]


class Tally(nn.Module):
    """weight[index] + value: its gradient is 1 at `index`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.weight[index] + value


def make_net(seed: int, widths: Sequence[int] = (7, 13, 3)) -> nn.Sequential:
    """Linear and Tanh in turn, the same for the same seed; the last layer is linear."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.normal_(0, inputs**-0.5, generator=generator)
            layer.bias.normal_(0, 0.1, generator=generator)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@dataclass
class Trace:
    """What happened, in order: "forward", "backward", "step", ..., and what the optimizer found at each of its steps."""

    events: list[str] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)  # one flat vector per step
    rates: list[float] = field(default_factory=list)  # the learning rate at each step
    dtypes: list[str] = field(default_factory=list)  # of the model's output in each forward

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients whenever `optimizer` steps."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def note(stepping: torch.optim.Optimizer) -> None:
            self.events.append("step")
            self.gradients.append(flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]))
            self.rates.append(float(stepping.param_groups[0]["lr"]))

        def at_step(stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
            if closure is None:
                return note(stepping)

            def noted() -> Any:  # the closure may be what makes the gradients
                result = closure()
                note(stepping)
                return result

            return args[:1], {**kwargs, "closure": noted}

        optimizer.register_step_pre_hook(at_step)

    def noting(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss`, its forward noted, and its backward when it comes."""
        self.events.append("forward")
        if loss.requires_grad:
            events = self.events
            loss.register_hook(lambda grad: events.append("backward"))
        return loss

    def graphs(self) -> int:
        """How many micro-batches' graphs waited for their backward at once."""
        most = waiting = 0
        for event in self.events:
            waiting += {"forward": 1, "backward": -1}.get(event, 0)
            most = max(most, waiting)
        return most

    def told(self, limit: int = 16) -> str:
        """The order of events, short."""
        shown = " ".join(self.events[:limit])
        return shown + (" ..." if len(self.events) > limit else "")


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of them in one float32 vector of its own memory."""
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])


def parameters_of(model: nn.Module) -> torch.Tensor:
    return flat(list(model.parameters()))


def make_optimizer(model: nn.Module, rate: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Halves the learning rate at each of its steps."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)


# -- micro-batches and their losses --


def tally_batches(count: int, seed: int, bad: Sequence[int] = (), steep: Sequence[int] = ()) -> list[Batch]:
    """(index, value, factor) each; for those in `bad` the loss is infinite, or only its gradient for those also in `steep`."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    factor = [0.0 if j in steep else float("inf") if j in bad else 1.0 for j in range(count)]
    return [(torch.tensor(j), values[j].clone(), torch.tensor(factor[j])) for j in range(count)]


def tally_loss(trace: Trace) -> Callable[[nn.Module, Batch], torch.Tensor]:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        index, value, factor = batch
        loss = model(index, value)
        return trace.noting((loss - loss.detach()).sqrt() + loss.detach() if factor == 0 else loss * factor)

    return loss_fn


def net_batches(count: int, rows: int, seed: int, inputs: int = 7, outputs: int = 3) -> list[Batch]:
    """(x, y) each, of `rows` rows."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda width: torch.randn(rows, width, generator=generator)  # noqa: E731
    return [(draw(inputs), draw(outputs)) for _ in range(count)]


def net_loss(trace: Trace) -> Callable[[nn.Module, Batch], torch.Tensor]:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        x, y = batch
        out = model(x)
        trace.dtypes.append(str(out.dtype).removeprefix("torch."))
        # Not F.mse_loss: the number that it returns keeps a whole activation's storage, which would count against who keeps it.
        return trace.noting((out.float() - y).square().mean())

    return loss_fn


def joined(batches: Sequence[Batch]) -> Batch:
    """Micro-batches of rows as one batch."""
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def windows_of(count: int, k: int) -> list[range]:
    """Which micro-batches belong to each step."""
    return [range(start, min(start + k, count)) for start in range(0, count, k)]


# -- what came back --


def number_of(value: Any, what: str) -> float:
    """A number that the learner returned, whatever holds it; WrongResult if there is none."""
    try:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise WrongResult(f"{what} came back as a tensor with a graph on it, expected a plain number", "loss-graph")
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        got = "None" if value is None else f"a {type(value).__name__}"
        raise WrongResult(f"{got} came back, expected {what} as a number", "loss-returned") from None


def numbers_of(values: Any, count: int, what: str) -> list[float]:
    """As many numbers as expected; WrongResult if they are not."""
    if isinstance(values, torch.Tensor | tuple | list) or hasattr(values, "tolist"):
        listed = list(values)
        if len(listed) == count:
            return [number_of(value, what) for value in listed]
        raise WrongResult(f"{len(listed)} numbers came back, expected {count}: {what} for each window", "losses-count")
    got = "None" if values is None else f"a {type(values).__name__}"
    raise WrongResult(f"{got} came back, expected a list with {what} of each window", "loss-returned")


def close(observed: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """Within `tolerance` of the largest entry, or of each entry where that is more."""
    if observed.shape != expected.shape or not torch.isfinite(observed).all():
        return False
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(torch.allclose(observed, expected, rtol=tolerance, atol=tolerance * scale + 1e-12))


def same_number(observed: float, expected: float, tolerance: float = 1e-4) -> bool:
    return abs(observed - expected) <= tolerance * max(1.0, abs(expected))


def ratio_of(observed: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-3) -> float | None:
    """The number that `expected` was multiplied with, or None where it is not a multiple."""
    if observed.shape != expected.shape or not torch.isfinite(observed).all():
        return None
    a, b = observed.double(), expected.double()
    ratio = float(a @ b / (b @ b).clamp_min(1e-300))
    return ratio if ratio and close(observed, expected * ratio, tolerance) else None

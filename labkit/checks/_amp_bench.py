"""Where lab 04's scalers are tried: parameters, an optimizer that notes the gradients it sees, and scripts of overflows."""

from collections.abc import Sequence
from typing import Any

import torch

from labkit.checks._core import WrongResult

SHAPES = ((3, 2), (5,), (2, 2, 2), (4,))  # the first two in one group of the optimizer, the others in a second
LARGE = 1e30
POISON = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def read_scale(scaler: Any) -> float:
    """What a loss of 1 becomes. Raises WrongResult if that is no tensor."""
    scaled = scaler.scale(torch.ones(()))
    if not isinstance(scaled, torch.Tensor) or scaled.numel() != 1:
        got = "None" if scaled is None else f"a {type(scaled).__name__}"
        raise WrongResult(f"scale(loss) returned {got}, expected a 0-dim tensor", "no-graph")
    return float(scaled.detach())


def true_gradients(seed: int, step: int) -> list[torch.Tensor]:
    """What the gradients of one step are without a scale: between 0.5 and 1.5 in size, either sign."""
    generator = torch.Generator().manual_seed(seed + 7919 * step)
    return [(0.5 + torch.rand(shape, generator=generator)) * (torch.rand(shape, generator=generator) - 0.5).sign() for shape in SHAPES]


class Bench:
    """Four parameters in two groups, a frozen and an unused one, and an optimizer that notes the gradients it sees."""

    def __init__(self, kind: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
        frozen, unused = torch.ones(3), torch.ones(2, requires_grad=True)
        base = torch.optim.Adam if kind == "adam" else torch.optim.SGD
        options = {"lr": 0.01, "foreach": False} | ({} if kind == "adam" else {"momentum": 0.9})
        bench = self

        class Watched(base):  # type: ignore[misc, valid-type]
            def step(self, closure: Any = None) -> Any:
                bench.seen = [None if p.grad is None else p.grad.clone() for p in bench.parameters]
                return super().step(closure)

        groups = [{"params": [*self.parameters[:2], frozen]}, {"params": [*self.parameters[2:], unused]}]
        self.optimizer, self.seen = Watched(groups, **options), None

    def everything(self) -> list[torch.Tensor]:
        """Copies of the parameters and of all tensors of the optimizer's state."""
        state = [value for p in self.parameters for value in self.optimizer.state[p].values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in (*self.parameters, *state)]


def play(scaler: Any, bench: Bench, script: Sequence[dict[str, Any]], seed: int, how: str = "step") -> tuple[list[Any], dict[str, Any]]:
    """Run a script, one dict per step: {}, {"poison": "inf", "at": index of a parameter} or {"large": index}. Returns rows and gradients.

    how : "step" leaves unscaling to step(); "unscale" calls unscale_ before it, "twice" two times and once more after it,
          "clip" clips by value in between
    """
    rows, tensors = [], {}
    for number, line in enumerate(script):
        bench.optimizer.zero_grad()
        row: dict[str, Any] = {"scale": read_scale(scaler), "told": float(scaler.get_scale())}
        loss = sum((p * g).sum() for p, g in zip(bench.parameters, true_gradients(seed, number), strict=True))
        scaler.scale(loss).backward()
        if any(p.grad is None for p in bench.parameters):
            raise WrongResult("after backward from scale(loss), the parameters have no gradient", "no-graph")
        if "poison" in line:
            bench.parameters[line["at"]].grad.flatten()[-1] = POISON[line["poison"]]
        if "large" in line:
            bench.parameters[line["large"]].grad.flatten()[-1] = LARGE  # finite; its square is not
        if how != "step":
            scaler.unscale_(bench.optimizer)
        if how == "twice":
            _unscale_again(scaler, bench)
        if how == "clip":
            torch.nn.utils.clip_grad_value_(bench.parameters, 0.75, foreach=False)
        before, bench.seen = bench.everything(), None
        row["returned"] = _truth(scaler.step(bench.optimizer))
        row["stepped"] = bench.seen is not None
        row["divided again"] = how == "twice" and _unscale_again(scaler, bench)
        after = bench.everything()
        row["unchanged"] = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        row["clean"] = all(grad is None or bool(grad.isfinite().all()) for grad in bench.seen or ())
        for index, grad in enumerate(bench.seen or ()):
            if grad is not None:
                tensors[f"{number}/{index}"] = grad
        scaler.update()
        rows.append(row)
    rows.append({"scale": read_scale(scaler), "told": float(scaler.get_scale())})
    return rows, tensors


def _unscale_again(scaler: Any, bench: Bench) -> bool:
    """Call unscale_ once more before update(), which may refuse. Returns whether a gradient changed."""
    before = [p.grad.clone() for p in bench.parameters]
    try:
        scaler.unscale_(bench.optimizer)
    except RuntimeError:
        pass
    return any(not torch.equal(a, p.grad) for a, p in zip(before, bench.parameters, strict=True) if a.isfinite().all())


def _truth(value: Any) -> bool | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    return bool(value)

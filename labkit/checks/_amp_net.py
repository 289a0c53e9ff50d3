"""What lab 04's training steps are tried with: a net, a scaler that follows a script, an optimizer; each notes what it sees."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LR, MOMENTUM, DECAY = 0.05, 0.9, 0.5


class Net(nn.Module):
    """Two Linears, (batch, 7) -> (batch, 3); notes the format of its first product and every loss's surroundings."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up, self.down = nn.Linear(7, 33), nn.Linear(33, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.notes: list[list[Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.notes.append(["forward", str(hidden.dtype).removeprefix("torch."), torch.is_grad_enabled()])
        return self.down(nn.functional.gelu(hidden))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean squared error; notes whether autocast is on here, and later in backward."""
        self.notes.append(["loss", torch.is_autocast_enabled("cpu")])
        error = outputs.float() - targets
        if error.requires_grad:
            error.register_hook(lambda grad: self.notes.append(["backward", torch.is_autocast_enabled("cpu")]))
        return error.square().mean()


class ScriptedScaler:
    """Scales by a script instead of a rule: the methods of the learner's scaler, with calls noted."""

    def __init__(self, scales: Sequence[float]) -> None:
        self.scales, self.number, self.calls = scales, 0, []
        self.found: bool | None = None

    def get_scale(self) -> float:
        return self.scales[min(self.number, len(self.scales) - 1)]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls.append("scale")
        return loss.float() * self.get_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self.found is not None:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self.calls.append("unscale")
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            grad.div_(self.get_scale())
        self.found = not all(bool(grad.isfinite().all()) for grad in grads)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.calls.append("step")
        if self.found is None:
            self.unscale_(optimizer)
        if not self.found:
            optimizer.step()
        return not self.found

    def update(self) -> None:
        self.calls.append("update")
        self.number, self.found = self.number + 1, None


class Watched(torch.optim.SGD):
    """SGD that notes the gradients it sees, its rate, and whether autocast was on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=LR, momentum=MOMENTUM, foreach=False)
        self.seen: list[tuple[list[torch.Tensor | None], float, bool]] = []

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        grads = [None if p.grad is None else p.grad.clone() for p in group["params"]]
        self.seen.append((grads, group["lr"], torch.is_autocast_enabled("cpu")))
        return super().step(closure)


def batch(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 31 * number)
    return torch.randn(12, 7, generator=generator), 3 * torch.randn(12, 3, generator=generator)

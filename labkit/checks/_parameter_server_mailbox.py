"""What a worker meets in check "parameter_server.worker": a scripted mailbox, and a model that notes how far backward is."""

import json
import time
from typing import Any

import torch
from torch import nn

PATIENCE, WAIT_S, LONG_S, WIDTHS = 50, 1.0, 5.0, (4, 5, 3, 2)


class _Mark(torch.autograd.Function):
    """Notes when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int, log: list) -> torch.Tensor:
        ctx.number, ctx.log = number, log
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.log.append(["backward", ctx.number])
        return grad, None, None


class Net(nn.Module):
    """(batch, 4) -> (batch, 2) through three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False))

    def forward(self, x: torch.Tensor, log: list) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = _Mark.apply(torch.tanh(layer(x)), number, log)
        return x


def parameters_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.6 * torch.randn(value.shape, generator=generator) for name, value in Net().named_parameters()}


def loss_on(model: Net, clock: int, data: int, log: list) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data + clock)
    x, y = torch.randn(6, WIDTHS[0], generator=generator), torch.randn(6, WIDTHS[-1], generator=generator)
    return (model(x, log) - y).square().mean()


class Stuck(BaseException):
    """Here it would wait for ever."""


class ScriptedBox:
    """What a worker needs of an Endpoint; the server at the other end is a list of answers.

    A wait for nothing returns at once, and its seconds are added up. Who has waited for longer than it may (by that sum, or by the
    clock, for those who look at one), and then looks PATIENCE times more without asking, is not going to ask.
    """

    rank, world_size, life = 1, 2, 0

    def __init__(self, answers: list[list[dict[str, int]]], log: list, gradients: list[torch.Tensor]) -> None:
        self._answers, self._log, self._gradients = list(answers), log, gradients
        self._mail: list[dict[str, int]] = []
        self._hear()

    def _hear(self) -> None:
        self._waited_s, self._since, self._looks = 0.0, time.monotonic(), 0

    def _look_in_vain(self, timeout_s: float) -> None:
        if self._waited_s >= 0.5:  # who looks again may go by a clock of its own, and that has to move
            time.sleep(min(timeout_s, 0.1))
        self._waited_s += timeout_s
        if max(self._waited_s, time.monotonic() - self._since) > WAIT_S:
            self._looks += 1
        if self._looks > PATIENCE or self._waited_s > LONG_S:
            raise Stuck("ask-again")

    def send(self, to: int, data: bytes = b"", tensors: dict[str, torch.Tensor] | None = None, timeout_s: float = 10.0) -> int:
        try:
            said = json.loads(bytes(data))
            what, clock, layer = said["do"], said.get("clock"), str(said.get("layer", ""))
            clock = -1 if clock is None else int(clock)
        except (ValueError, KeyError, TypeError, AttributeError):
            what, clock, layer = "nonsense", -1, ""
        if what == "push" and layer and len(tensors or {}) == 1:
            self._gradients.append(next(iter(tensors.values())).detach().clone())
            self._log.append(["push", clock, layer, len(self._gradients) - 1, to])
        elif what == "pull":
            self._log.append(["pull", to])
            self._hear()
            self._mail += self._answers.pop(0) if self._answers else [{"stop": 1}]
        else:
            self._log.append(["nonsense", f"{what} with {len(tensors or {})} tensors" if what != "nonsense" else repr(bytes(data)[:40])])
        if len(self._log) > 2000:
            raise Stuck("ask-again")
        return len(data)

    def poll(self, timeout_s: float = 0.0) -> bool:
        if not self._mail:
            self._look_in_vain(timeout_s)
        return bool(self._mail)

    def recv(self, timeout_s: float | None = None) -> Any:
        from labkit.ranks.endpoint import Message

        if not self._mail:
            if timeout_s is None:
                raise Stuck("deadline")
            if timeout_s > WAIT_S:
                raise Stuck("half-second")
            if self._log[-1:] != [["silence"]]:
                self._log.append(["silence"])
            self._look_in_vain(timeout_s)
            return None
        self._hear()
        answer = self._mail.pop(0)
        if "stop" in answer:
            self._log.append(["stop"])
            return Message(0, 0, json.dumps({"stop": True}).encode())
        self._log.append(["answer", answer["clock"], answer["seed"]])
        return Message(0, 0, json.dumps({"clock": answer["clock"]}).encode(), parameters_of(answer["seed"]))

    def close(self, linger_s: float = 1.0) -> None:
        return None

    def __enter__(self) -> "ScriptedBox":
        return self

    def __exit__(self, *_: object) -> None:
        return None

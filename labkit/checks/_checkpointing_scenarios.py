"""What lab 02 runs with a checkpoint: the probe with the learner's, the judge again with a plain call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit.checks._checkpointing_nets import (
    examine_output,
    flat_gradients,
    gradient,
    make_net,
    plain,
    run_step,
    settings_of,
)
from labkit.checks._core import Observation, WrongResult
from labkit.recorder import Recorder

Checkpoint = Callable[..., Any]
LAYERS = 8  # in two checkpoints of four: 16 inner activations, of which the plain run keeps all


def call_plainly(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def memory(checkpoint: Checkpoint, values: dict[str, Any], recorder: Recorder | None = None) -> Observation:
    net = make_net("silu", LAYERS, values["seed"])

    def run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)  # the first input has a past of its own, and another reader besides
        out = h
        for part in (layers[: LAYERS // 2], layers[LAYERS // 2 :]):
            out = examine_output(checkpoint(lambda t, part=part: plain(part, t), out), h, "checkpoint")
        return out + h

    tensors = run_step(net, run, values["seed"], recorder)
    return Observation(net.spy.runs() | {"runs": [net.spy.runs()]}, tensors)


def dropout(checkpoint: Checkpoint, values: dict[str, Any]) -> Observation:
    net = make_net("dropout", values["depth"], values["seed"], batch=32, watch_random=True)
    before = settings_of(net.layers)

    def run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        middle = len(layers) // 2
        h = examine_output(checkpoint(nn.Sequential(*layers[:middle]), x), x, "checkpoint")
        return checkpoint(nn.Sequential(*layers[middle:]), h)

    tensors = run_step(net, run, values["seed"], start=1.0)
    after = settings_of(net.layers)
    changed = [name for name in before if before[name] != after[name]]
    return Observation({"calls": net.spy.calls, "changed": changed, "runs": [net.spy.runs()]}, tensors)


def autocast(checkpoint: Checkpoint, values: dict[str, Any]) -> Observation:
    tensors, rows, runs = {}, [], []
    for name in values["dtypes"]:
        net = make_net("silu", 3, values["seed"], batch=32)
        before = settings_of(net.layers)

        def run(layers: list[nn.Module], x: torch.Tensor, name: str = name) -> torch.Tensor:
            with torch.autocast("cpu", getattr(torch, name), enabled=name != "float32"):
                out = checkpoint(nn.Sequential(*layers), x)
            if not isinstance(out, torch.Tensor):
                raise WrongResult(f"checkpoint returned a {type(out).__name__}, expected a tensor", "output")
            return out.float()

        tensors |= {f"{name}/{key}": value for key, value in run_step(net, run, values["seed"]).items()}
        after = settings_of(net.layers)
        changed = [key for key in before if before[key] != after[key]]
        rows.append({"dtype": name, "calls": net.spy.calls, "changed": changed})
        runs.append(net.spy.runs())
    return Observation({"rows": rows, "runs": runs}, tensors)


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, torch.Tensor) else repr(value)[:40]


def arguments(checkpoint: Checkpoint, values: dict[str, Any]) -> Observation:
    net = make_net("silu", 1, values["seed"], batch=32)
    generator = torch.Generator().manual_seed(values["seed"])
    frozen, second = torch.randn(2, *net.x.shape, generator=generator).unbind()
    frozen, second = frozen.clone(), second.clone().requires_grad_()
    rows = torch.randperm(len(net.x), generator=generator)
    received: list[list[str]] = []

    def fn(first, times, frozen, nothing, options, second, rows, scale):  # noqa: ANN001, ANN202
        received.append([_kind(value) for value in (first, times, frozen, nothing, options, second, rows, scale)])
        y = net.layers[0](first) * times + frozen.sin()
        return (y - second.exp() * scale)[rows] * options["factor"]

    def run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        arguments = (torch.tanh(x), values["times"], frozen, None, {"factor": 0.5}, second, rows, 2.0)
        return checkpoint(fn, *arguments)

    tensors = run_step(net, run, values["seed"])
    tensors["second"] = gradient(second)
    untouched = frozen.grad is None and not frozen.requires_grad
    return Observation({"received": received, "frozen": untouched, "runs": [net.spy.runs()]}, tensors)


def outputs(checkpoint: Checkpoint, values: dict[str, Any]) -> Observation:
    tensors: dict[str, torch.Tensor] = {}
    runs = []
    for used in values["used"]:
        net = make_net("silu", 2, values["seed"], batch=32)

        def fn(h: torch.Tensor, net: Any = net) -> tuple[torch.Tensor, ...]:
            return net.layers[0](h), h.argmax(1), net.layers[1](h), h.detach().norm()

        for parameter in net.parameters:
            parameter.grad = None
        net.spy.phase = "forward"
        result = checkpoint(fn, torch.tanh(net.x))
        if not isinstance(result, tuple) or len(result) != 4 or not all(isinstance(one, torch.Tensor) for one in result):
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise WrongResult(f"checkpoint returned {got}, fn returns a tuple of 4 tensors", "outputs")
        y, best, z, norm = result
        loss = {"both": lambda: (y * net.loss_weight).sum() + z.square().sum(), "first": y.sum, "second": z.square().sum}[used]()  # noqa: B023
        if not loss.requires_grad:
            raise WrongResult("an output that the loss is made of has no gradient (requires_grad is False)", "outputs")
        net.spy.phase = "backward"
        loss.backward()
        mine = {"y": y, "best": best, "z": z, "norm": norm, "x": gradient(net.x), "parameters": flat_gradients(net.parameters)}
        tensors |= {f"{used}/{name}": tensor.detach().clone() for name, tensor in mine.items()}
        runs.append(net.spy.runs())
    return Observation({"runs": runs}, tensors)


SCENARIOS = {"memory": memory, "dropout": dropout, "autocast": autocast, "arguments": arguments, "outputs": outputs}

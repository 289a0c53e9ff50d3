"""Check "lora.linear": one frozen Linear and its trainable update of low rank."""

import copy
import gc
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._lora_hints import LINEAR_HINTS, on_error
from labkit.checks._lora_judge import judge_dropout, judge_layer, picture, random_factors, summary
from labkit.checks._lora_nets import (
    MOMENTUM,
    RATE,
    STEPS,
    close,
    effective,
    mse,
    randomise,
    seeded,
    tensor_result,
    trainable,
    weight_of,
)
from labkit.recorder import Recorder

CALLS, ROWS = 192, 4
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def layer(name: str, inputs: int, outputs: int, rank: int, alpha: float, covers: tuple[str, ...] | None = None, **more: Any) -> Case:
        seed = int(torch.randint(1, 2**31, (), generator=generator))
        values = {"in": inputs, "out": outputs, "rank": rank, "alpha": alpha, "bias": True, "dtype": "float32", "lead": [16], "seed": seed}
        return Case(name, values | more, covers=covers)

    def several(name: str, *cases: Case) -> Case:
        return Case(name, {"layers": [case.values | {"name": case.name} for case in cases]}, covers=("other layers",))

    cases = [
        layer("a Linear from 12 to 20", 12, 20, 3, 7),
        several(
            "other layers",
            layer("a Linear from 20 to 6", 20, 6, 4, 2),
            layer("double precision, no bias, three dimensions", 10, 14, 2, 5, bias=False, lead=[2, 5], dtype="float64"),
        ),
        layer("dropout", 8, 9, 2, 3, ("dropout",), dropout=0.25),
    ]
    if strict:
        cases += [
            several(
                "more layers",
                layer("rank 1, alpha no whole number", 9, 7, 1, 0.5),
                layer("one row, frozen before", 11, 8, 3, 3, lead=[], frozen=True),
                layer("rank above both sizes", 4, 3, 5, 10),
            ),
            layer("strong dropout", 7, 5, 3, 6, ("dropout",), dropout=0.6),
        ]
    return cases


def make_linear(values: dict[str, Any], inputs: int | None = None) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """The case's Linear, an input and a target, the same in every process."""
    dtype = DTYPES[values["dtype"]]
    inputs = values["in"] if inputs is None else inputs
    with seeded(values["seed"]):
        base = nn.Linear(inputs, values["out"], bias=values["bias"]).to(dtype)
        x, target = torch.randn(*values["lead"], inputs).to(dtype), torch.randn(*values["lead"], values["out"]).to(dtype)
    return base.requires_grad_(not values.get("frozen", False)), x, target


def _module(result: Any) -> nn.Module:
    if not isinstance(result, nn.Module):
        raise WrongResult(f"LoRALinear(...) is a {type(result).__name__}, expected an nn.Module", "module")
    return result


def _probe(candidate: Any, case: Case) -> Observation:
    values = case.values
    if "dropout" in values:
        return _probe_dropout(candidate, values)
    if "layers" not in values:
        return _probe_layer(candidate, values)
    told, tensors = [], {}
    for index, one in enumerate(values["layers"]):
        seen = _probe_layer(candidate, one)
        told.append(seen.values)
        tensors |= {f"{index}:{name}": tensor for name, tensor in seen.tensors.items()}
    return Observation({"layers": told}, tensors)


def _probe_layer(candidate: Any, values: dict[str, Any]) -> Observation:
    torch.manual_seed(values["seed"] + 1)
    base, x, target = make_linear(values)
    before = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    plain = base(x).detach()
    with Recorder(watch=base) as recorder:
        layer = _module(candidate(base, values["rank"], values["alpha"]))
        gc.collect()
        recorder.mark("made")
    tensors = {"start": tensor_result(layer.train()(x), plain, "your layer"), "eval": tensor_result(layer.eval()(x), plain, "your layer")}
    tensors["weight at start"] = weight_of(base).detach().clone()
    factors = trainable(layer)
    told: dict[str, Any] = {
        "names": [name for name, _ in factors],
        "shapes": [list(parameter.shape) for _, parameter in factors],
        "made": recorder.recording.at("made", born=True),
        "dtypes": [str(parameter.dtype).removeprefix("torch.") for _, parameter in factors],
        "hidden": not _holds(layer, weight_of(base)),
        "base trains": [name for name, own in (("weight", weight_of(base)), ("bias", base.bias)) if any(p is own for _, p in factors)],
    }
    layer.train()
    _keep(tensors, "factors/0", factors)
    again = [parameter for _, parameter in trainable(_module(candidate(make_linear(values)[0], values["rank"], values["alpha"])))]
    told["same again"] = [p.shape for p in again] == [p.shape for _, p in factors] and all(
        torch.equal(p, q) for p, (_, q) in zip(again, factors, strict=True)
    )
    if factors:
        optimizer = torch.optim.SGD([parameter for _, parameter in factors], lr=RATE, momentum=MOMENTUM)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss = mse(layer(x), target)
            if not loss.requires_grad:
                break
            loss.backward()
            optimizer.step()
            _keep(tensors, f"factors/{step}", factors)
    own = {"weight": weight_of(base)} | ({"bias": base.bias} if base.bias is not None else {})
    tensors |= {f"base/{name}": parameter.detach().clone() for name, parameter in own.items()}
    tensors |= {f"was/{name}": tensor for name, tensor in before.items()}
    tensors["after"] = tensor_result(layer.eval()(x), plain, "your layer")
    randomise(layer, values["seed"])
    _keep(tensors, "random", factors)
    tensors["update"] = effective(layer, values["in"], x.dtype) - before["weight"]
    leaf = x.clone().requires_grad_()
    out = layer(leaf).square().sum()
    if out.requires_grad:
        out.backward()
    tensors["x grad"] = torch.zeros_like(x) if leaf.grad is None else leaf.grad
    return Observation(told, tensors)


def _holds(layer: nn.Module, weight: torch.Tensor) -> bool:
    """Whether what the module lists, moves and saves has a tensor of the weight's size beside the factors; copies are told elsewhere."""
    return any(tensor.numel() == weight.numel() for tensor in (*layer.parameters(), *layer.buffers()) if not tensor.requires_grad)


def _keep(tensors: dict[str, torch.Tensor], key: str, factors: list[tuple[str, nn.Parameter]]) -> None:
    tensors |= {f"{key}/{index}": parameter.detach().clone() for index, (_, parameter) in enumerate(factors)}


def _probe_dropout(candidate: Any, values: dict[str, Any]) -> Observation:
    """What dropout does to the update alone: over many calls of a wide layer, and how often it drops the only input of a narrow one."""
    torch.manual_seed(values["seed"] + 1)
    base, x, _ = make_linear(values)
    plainly = copy.deepcopy(base)
    layer = _module(candidate(base, values["rank"], values["alpha"], values["dropout"]))
    plain = plainly(x).detach()
    tensors = {"start": tensor_result(layer.train()(x), plain, "your layer"), "plain": plain}
    randomise(layer, values["seed"])
    rows = x[:1].expand(ROWS, -1)
    with torch.no_grad():
        still = plainly(rows)
        tensors["eval"] = layer.eval()(rows)[:1] - still[:1]
        tensors["eval again"] = layer(rows)[:1] - still[:1]
        layer.train()
        drawn = torch.stack([layer(rows) - still for _ in range(CALLS)])  # (calls, rows, out)
    tensors["means"] = drawn.mean(1)
    zeros = float((drawn.abs() < 1e-6).float().mean())
    narrow, one, _ = make_linear(values, inputs=1)
    plainly = copy.deepcopy(narrow)
    layer = _module(candidate(narrow, values["rank"], values["alpha"], values["dropout"])).train()
    randomise(layer, values["seed"])
    with torch.no_grad():
        row = one[:1].expand(ROWS, -1)
        dropped = torch.stack([(layer(row) - plainly(row)).abs().amax(-1) < 1e-6 for _ in range(CALLS)])
    return Observation({"zeros": zeros, "dropped": float(dropped.float().mean())}, tensors)


def _judge(case: Case, seen: Observation) -> list[Finding]:
    if "dropout" in case.values:
        return [judge_dropout(case.values, seen, CALLS)]
    if "layers" not in case.values:
        return _judge_one(case.values, seen.values, seen.tensors)
    for index, values in enumerate(case.values["layers"]):
        tensors = {name.partition(":")[2]: tensor for name, tensor in seen.tensors.items() if name.startswith(f"{index}:")}
        for finding in _judge_one(values, seen.values["layers"][index], tensors):
            if not finding.passed:
                observed = f"{values['name']}: {finding.criterion}: {finding.observed}"
                return [Finding("other layers", False, "as for the first layer", observed, finding.hint)]
    return [Finding("other layers", True, "as for the first layer", "as for the first layer")]


def _judge_one(values: dict[str, Any], told: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[Finding]:
    base, x, target = make_linear(values)
    weight, bias = base.weight.detach(), None if base.bias is None else base.bias.detach()
    findings = judge_layer(values, told, tensors, lambda delta: F.linear(x, weight + delta, bias), weight, bias, target)
    leaf = x.clone().requires_grad_()
    a, b = random_factors(values, told, tensors) or (None, None)
    if a is not None and findings[2].passed:
        out = F.linear(leaf, weight + values["alpha"] / values["rank"] * b @ a, bias)
        if not close(tensors["x grad"], torch.autograd.grad(out.square().sum(), leaf)[0]):
            observed = "right forward, but the gradient of the layer's input is another"
            findings[2] = Finding(findings[2].criterion, False, findings[2].expected, observed, "input-grad")
    return findings


register(Check(
    "lora.linear",
    criteria=(
        Criterion("output at the start", "numbers", 1, "recomputed"),
        Criterion("trainable numbers", "technique", 1, "recomputed"),
        Criterion("the update", "technique", 1, "recomputed"),
        Criterion("first steps", "technique", 0.5, "recomputed"),
        Criterion("base untouched", "technique", 0.5, "recomputed"),
        Criterion("one copy of the weight", "cost", 0.25, "memory"),
        Criterion("dropout", "cost", 0.5, "recomputed"),
        Criterion("other layers", "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=LINEAR_HINTS,
    on_error=on_error,
    picture=picture,
    summary=summary,
))  # fmt: skip

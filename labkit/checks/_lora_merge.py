"""Check "lora.merge": the update added into the weights and taken out again."""

import gc
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._lora_hints import MERGE_HINTS, on_error
from labkit.checks._lora_inject import factors_of
from labkit.checks._lora_nets import close, effective, make_net, paths_of, randomise, ratio, tensor_result, trainable, weight_of
from labkit.recorder import Recorder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
ROUNDED_OTHERWISE = 0.03  # of the entries: a sum in another order may fall on the other side of a tie


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def case(name: str, rank: int, alpha: float, covers: tuple[str, ...] | None = None, **more: Any) -> Case:
        seed = int(torch.randint(1, 2**31, (), generator=generator))
        values = {"targets": ["query", "value"], "rank": rank, "alpha": alpha, "seed": seed, "dtype": "float32"}
        return Case(name, values | more, covers=covers)

    sixteen = ("16-bit weights",)
    cases = [
        case("query and value", 3, 6),
        case("bfloat16", 3, 4.5, sixteen, dtype="bfloat16"),
    ]
    if strict:
        cases += [
            case("every Linear of the attention", 2, 0.5, targets=["query", "key", "value", "out"]),
            case("float16", 2, 3, sixteen, dtype="float16"),
        ]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    inject, merge, unmerge = candidate
    values, dtype = case.values, DTYPES[case.values["dtype"]]
    torch.manual_seed(values["seed"] + 1)
    net, x, _ = make_net(values["seed"], dtype)
    paths = paths_of(values["targets"])
    own = {path: net.get_submodule(path) for path in paths}
    sizes = {path: linear.in_features for path, linear in own.items()}
    flops = {"plain": _flops(net.eval(), x)}
    plain = net(x).detach()
    inject(net, values["rank"], values["alpha"], tuple(values["targets"]))
    randomise(net.eval(), values["seed"])
    factors = trainable(net)
    tensors = {f"factors/{index}": parameter.detach().clone() for index, (_, parameter) in enumerate(factors)}
    told: dict[str, Any] = {"names": [name for name, _ in factors], "shapes": [list(p.shape) for _, p in factors]}

    def look(when: str) -> None:
        gc.collect()
        tensors[f"{when}/out"] = tensor_result(net(x), plain, "the model")
        for path in paths:
            tensors[f"{when}/effective/{path}"] = effective(net.get_submodule(path), sizes[path], dtype)
            tensors[f"{when}/own/{path}"] = weight_of(own[path]).detach().clone()

    look("before")
    flops["before"] = _flops(net, x)
    for when, function in (("merged", merge), ("merged again", merge), ("unmerged", unmerge), ("unmerged again", unmerge)):
        function(net)
        net.eval()
        look(when)
        if dtype == torch.float32 and "again" not in when:
            flops[when] = _flops(net, x)
    after = trainable(net)
    same = len(after) == len(factors) and {name for name, _ in after} == {name for name, _ in factors}
    told |= {"flops": flops, "trainable": same}
    for index, (_, parameter) in enumerate(after if same else []):
        tensors[f"after/{index}"] = parameter.detach().clone()
    return Observation(told, tensors)


def _flops(net: Any, x: torch.Tensor) -> int:
    with torch.no_grad(), Recorder() as recorder:
        net(x)
    return recorder.recording.flops()


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values, tensors, told = case.values, seen.tensors, seen.values
    dtype, scale = DTYPES[values["dtype"]], values["alpha"] / values["rank"]
    net, x, _ = make_net(values["seed"], dtype)
    paths = paths_of(values["targets"])
    found = factors_of(told["names"], tensors, "factors", paths, net, values["rank"])
    if found is None:
        name = "16-bit weights" if case.covers else "output when merged"
        return [Finding(name, False, "two factors on each layer", "inject put other tensors there", "returns")]
    weights = {path: net.get_submodule(path).weight.detach() for path in paths}
    deltas = {path: scale * b.float() @ a.float() for path, (a, b) in zip(paths, found, strict=True)}
    if dtype != torch.float32:
        return [_judge_rounding(values["dtype"], tensors, weights, deltas)]
    work = _judge_work(told["flops"], tensors, paths)
    later = [_judge_again(tensors), _judge_restored(told, tensors, weights, deltas)]
    if not work.passed:  # nothing has been merged: there is nothing to merge twice, or to undo
        later = [Finding(one.criterion, False, one.expected, "nothing was merged", one.hint or "no-effect") for one in later]
    return [_judge_output(tensors, weights, deltas), work, *later]


def _judge_output(tensors: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor]) -> Finding:
    name, wanted = "output when merged", "as before merging (relative 1e-5)"
    for path, weight in weights.items():
        got, expected = tensors[f"merged/effective/{path}"], weight + deltas[path]
        if close(got, expected, 1e-5):
            continue
        added, delta = got - weight, deltas[path]
        if delta.shape[0] == delta.shape[1] and close(added, delta.T, 1e-4):
            return Finding(name, False, wanted, f"{path} has got the transpose of its update", "transposed")
        factor = ratio(added, delta)
        if factor is not None and abs(factor - 2) < 1e-3:
            return Finding(name, False, wanted, f"{path} multiplies by its weight and twice its update", "still-adds")
        if factor is not None:
            return Finding(name, False, wanted, f"{path} has got {factor:.3g} times its update", "scaled")
        return Finding(name, False, wanted, f"{path} multiplies by another matrix", "output")
    if not close(tensors["merged/out"], tensors["before/out"], 1e-5):
        return Finding(name, False, wanted, "the model's output differs", "output")
    off = float((tensors["merged/out"] - tensors["before/out"]).abs().max() / tensors["before/out"].abs().max())
    return Finding(name, True, wanted, f"equal to {off:.0e}")


def _judge_work(flops: dict[str, int], tensors: dict[str, torch.Tensor], paths: list[str]) -> Finding:
    name, wanted = "work when merged", f"{flops['plain']} FLOP, as without adapters"
    passed = flops["merged"] <= flops["plain"]
    changed = any(not torch.equal(tensors[f"merged/own/{path}"], tensors[f"before/own/{path}"]) for path in paths)
    return Finding(name, passed, wanted, f"{flops['merged']} FLOP", "still-adds" if changed else "no-effect")


def _judge_again(tensors: dict[str, torch.Tensor]) -> Finding:
    name, wanted = "merged twice", "as merged once, bit for bit"
    if not torch.equal(tensors["merged again/out"], tensors["merged/out"]):
        return Finding(name, False, wanted, "the output changes in the second call", "merged-twice")
    return Finding(name, True, wanted, "the same")


def _judge_restored(
    told: dict[str, Any], tensors: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor]
) -> Finding:
    name, wanted = "unmerged", "weights restored (1 ulp), factors in use again"
    worst = 0.0
    kept = told["trainable"] and all(
        torch.equal(tensors[f"after/{index}"], tensors[f"factors/{index}"]) for index in range(len(told["names"]))
    )
    for when, hint in (("unmerged", "restore"), ("unmerged again", "unmerged-twice")):
        for path, weight in weights.items():
            ulp = ULP["float32"] * (weight.abs() + deltas[path].abs())
            off = float(((tensors[f"{when}/own/{path}"] - weight).abs() / ulp).max())
            if not off <= 1:
                return Finding(name, False, wanted, f"{when}: the weight of {path} is {off:.2g} ulp off", hint)
            worst = max(worst, off)
        if not close(tensors[f"{when}/out"], tensors["before/out"], 1e-5):
            return Finding(name, False, wanted, f"{when}: the output is not that before merging", hint if kept else "frees")
    if not kept or told["flops"]["unmerged"] <= told["flops"]["plain"]:
        return Finding(name, False, wanted, "the factors are gone, frozen, or not in use", "frees")
    return Finding(name, True, wanted, f"within {worst:.1g} ulp")


def _judge_rounding(
    dtype: str, tensors: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor]
) -> Finding:
    name, wanted = "16-bit weights", "each the sum, rounded once; restored within a rounding"
    other, count = 0, 0
    for path, weight in weights.items():
        if tensors[f"merged/own/{path}"].equal(weight):  # merged into another tensor: what the layer multiplies by is all there is to see
            got = tensors[f"merged/effective/{path}"]
            if path != "blocks.0.attention.value" and path != "blocks.1.attention.value":
                continue  # a bias rounds the figure
        else:
            got = tensors[f"merged/own/{path}"]
        expected = (weight.float() + deltas[path]).to(weight.dtype)
        other, count = other + int((got != expected).sum()), count + expected.numel()
    if not count:
        return Finding(name, False, wanted, "no weight changed", "no-effect")
    if other > ROUNDED_OTHERWISE * count:
        return Finding(name, False, wanted, f"{other / count:.0%} of the weights are rounded otherwise", "rounding")
    for path, weight in weights.items():
        size = ULP[dtype] * (weight.float().abs() + deltas[path].abs()) + 1e-7
        off = float(((tensors[f"unmerged/own/{path}"].float() - weight.float()).abs() / size).max())
        if not off <= 1:
            return Finding(name, False, wanted, f"after unmerging {off:.2g} ulp off", "restore")
    return Finding(name, True, wanted, f"{other / count:.1%} rounded otherwise")


def _summary(case: Case, seen: Observation) -> str | None:
    flops = seen.values["flops"]
    before, after = (flops[when] / flops["plain"] for when in ("before", "merged"))
    return f"{before:.2f} times the plain model's FLOP before merging, {after:.2f} after"


register(Check(
    "lora.merge",
    criteria=(
        Criterion("output when merged", "numbers", 0.75, "recomputed"),
        Criterion("work when merged", "technique", 0.75, "none"),
        Criterion("merged twice", "technique", 0.5, "recomputed"),
        Criterion("unmerged", "technique", 0.75, "recomputed"),
        Criterion("16-bit weights", "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=MERGE_HINTS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip

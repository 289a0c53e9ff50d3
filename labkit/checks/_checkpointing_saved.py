"""Check "checkpointing.saved": which tensors autograd keeps for backward, and how many bytes they are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from labkit.checks._checkpointing_plans import whole
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register

SAVED = {"relu": {"output"}, "linear": {"input", "weight"}, "softmax": {"output"}}
NETS = {
    "Linear": ("linear",),
    "ReLU": ("relu",),
    "Softmax": ("softmax",),
    "Linear, ReLU": ("linear", "relu"),
    "Linear, ReLU, Linear, ReLU": ("linear", "relu", "linear", "relu"),
    "Linear, GELU, Linear": ("linear", "gelu", "linear"),
    "LayerNorm, Linear, Sigmoid": ("norm", "linear", "sigmoid"),
}


def _network(names: Sequence[str], width: int) -> nn.Module:
    make = {"linear": lambda: nn.Linear(width, width), "relu": nn.ReLU, "softmax": lambda: nn.Softmax(-1), "gelu": nn.GELU,
            "norm": lambda: nn.LayerNorm(width), "sigmoid": nn.Sigmoid}  # fmt: skip
    return make[names[0]]() if len(names) == 1 else nn.Sequential(*(make[name]() for name in names))


def _kept(module: nn.Module, x: torch.Tensor) -> tuple[int, int, int]:
    """Bytes of distinct storages that backward of `module(x)` keeps: without parameters, with them, and counted once per tensor."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = module(x)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    del out
    repeated = sum(t.untyped_storage().nbytes() for t in saved if t.untyped_storage().data_ptr() not in own)
    return sum(size for place, size in sizes.items() if place not in own), sum(sizes.values()), repeated


def _saved_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    batch, width = (int(torch.randint(3, 9, (), generator=generator)) * 8 for _ in range(2))
    return [
        Case("prediction", {"ask": "prediction"}, covers=("what is saved",)),
        Case("bytes", {"ask": "bytes", "batch": batch, "width": width + 1}, covers=("bytes kept", "each tensor once")),
    ]


def _saved_probe(candidate: Any, case: Case) -> Observation:
    if not isinstance(candidate, tuple) or len(candidate) != 2:
        raise WrongResult('expected two functions: check("checkpointing.saved", saved_by, saved_bytes)')
    saved_by, saved_bytes = candidate
    if case.values["ask"] == "prediction":
        answer = saved_by()
        if not isinstance(answer, dict) or set(answer) != set(SAVED):
            raise WrongResult(f"saved_by returned {str(answer)[:60]}, expected a dict with the keys {', '.join(SAVED)}")
        named = {key: {value} if isinstance(value, str) else set(value or ()) for key, value in answer.items()}
        return Observation({key: sorted(map(str, value)) for key, value in named.items()})
    counted = {}
    for name, parts in NETS.items():
        module = _network(parts, case.values["width"])
        count = saved_bytes(module, torch.randn(case.values["batch"], case.values["width"], requires_grad=True))
        counted[name] = whole(count, "saved_bytes")
    return Observation({"bytes": counted})


def _saved_judge(case: Case, seen: Observation) -> list[Finding]:
    if case.values["ask"] == "prediction":
        wrong = [key for key, names in SAVED.items() if set(seen.values[key]) != names]
        observed = f"not so for {', '.join(wrong)}" if wrong else "right for all three"
        return [Finding("what is saved", not wrong, "as autograd does", observed, f"{wrong[0]}-saves" if wrong else None)]
    findings = []
    groups = {"bytes kept": list(NETS)[:4], "each tensor once": list(NETS)[4:]}
    for criterion, names in groups.items():
        finding = Finding(criterion, True, "as autograd keeps", f"right for {len(names)} networks")
        for name in names:
            x = torch.randn(case.values["batch"], case.values["width"], requires_grad=True)
            right, with_weights, repeated = _kept(_network(NETS[name], case.values["width"]), x)
            got = seen.values["bytes"][name]
            if got != right:
                hint = "weights" if got == with_weights else "counted-twice" if got == repeated else "bytes"
                finding = Finding(criterion, False, f"{right} bytes", f"{name}: {got} bytes", hint)
                break
        findings.append(finding)
    return findings


register(Check(
    "checkpointing.saved",
    criteria=(
        Criterion("what is saved", "technique", 1, "recomputed"),
        Criterion("bytes kept", "technique", 0.5, "recomputed"),
        Criterion("each tensor once", "cost", 0.5, "recomputed"),
    ),
    cases=_saved_cases,
    probe=_saved_probe,
    judge=_saved_judge,
    hints={
        "relu-saves": "Write the derivative of ReLU. Can you have it without the input?",
        "linear-saves": "Write the gradients of x @ W.T with respect to x and to W. Which factors appear?",
        "softmax-saves": "The derivative of softmax is y (1 - y) on the diagonal. Whose name is y?",
        "bytes": "Print the shape of each tensor that your pack hook receives. How many bytes is one element?",
        "weights": "Would the weights be in memory if there were no backward at all?",
        "counted-twice": "Two operators keep the same tensor. How many times does it lie in memory?",
    },
    summary=lambda case, seen: "three operators and seven networks, as autograd keeps them",
))  # fmt: skip

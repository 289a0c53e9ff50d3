"""Check "checkpointing.saved": which tensors autograd keeps for backward, and how many bytes they are."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from labkit.checks._checkpointing_plans import whole
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register

SAVED = {"relu": {"output"}, "linear": {"input", "weight"}, "softmax": {"output"}}
WIDE = 2  # hidden width over outer width: what a layer computes and what it keeps differ in bytes


class FirstHalf(nn.Module):
    """Backward needs a part of a storage, which keeps all of it alive. No module returns what is saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, WIDE * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, : x.shape[1]].sin()


class Gated(FirstHalf):
    """Two saved parts of one storage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.linear(x).chunk(WIDE, 1)
        return gate * value


NETS: dict[str, Callable[[int], nn.Module]] = {
    "Linear": lambda width: nn.Linear(width, WIDE * width),
    "ReLU": lambda width: nn.ReLU(),
    "Softmax": lambda width: nn.Softmax(-1),
    "Linear, ReLU": lambda width: nn.Sequential(nn.Linear(width, WIDE * width), nn.ReLU()),
    "Linear in double precision": lambda width: nn.Linear(width, WIDE * width).double(),
    # deep enough that whoever lets go of a saved tensor sees its address again
    "16 blocks of Linear and ReLU": lambda width: nn.Sequential(*(m for _ in range(16) for m in (nn.Linear(width, width), nn.ReLU()))),
    "Linear, GELU, Linear": lambda width: nn.Sequential(nn.Linear(width, WIDE * width), nn.GELU(), nn.Linear(WIDE * width, width)),
    "LayerNorm, Linear, Sigmoid": lambda width: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Sigmoid()),
    "half of a Linear": FirstHalf,
    "two halves of a Linear, multiplied": Gated,
    "Linear, BatchNorm, Sigmoid": lambda width: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Sigmoid()),
}
KEPT, ONCE = list(NETS)[:5], list(NETS)[5:]


def _batch_of(name: str, batch: int, width: int) -> torch.Tensor:
    """The input of a network; that of the deepest is training data, which needs no gradient."""
    dtype = torch.float64 if "double" in name else torch.float32
    return torch.randn(batch, width, dtype=dtype, requires_grad=not name.startswith("16"))


def _bytes_of(tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of distinct storages."""
    left_out = {t.untyped_storage().data_ptr() for t in without}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in sizes.items() if place not in left_out)


def _kept(module: nn.Module, x: torch.Tensor) -> tuple[int, dict[int, str]]:
    """Bytes that backward of `module(x)` keeps, and the totals that a wrong count gives, with the hint for each."""
    saved: list[torch.Tensor] = []
    computed: list[torch.Tensor] = []
    leaves = [part for part in module.modules() if not list(part.children())]
    handles = [leaf.register_forward_hook(lambda module, args, out: computed.append(out)) for leaf in leaves]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = module(x)
    for handle in handles:
        handle.remove()
    weights, buffers = list(module.parameters()), list(module.buffers())
    own = {t.untyped_storage().data_ptr() for t in (*weights, *buffers)}
    rest = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    by_address = {t.data_ptr(): t.nbytes for t in rest}
    totals = {
        sum(t.numel() for t in rest): "bytes",
        _bytes_of(computed): "computed",
        _bytes_of(saved, [*weights, *buffers, x]): "input-left-out",
        sum(t.nbytes for t in rest): "counted-twice",
        sum(t.untyped_storage().nbytes() for t in rest): "counted-twice",
        sum(by_address.values()): "part",
        _bytes_of(saved, weights): "buffers",
        _bytes_of(saved, buffers): "weights",
        _bytes_of(saved): "weights",
    }
    del out
    return _bytes_of(rest), totals


def _saved_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    batch, width = (int(torch.randint(3, 9, (), generator=generator)) * 8 for _ in range(2))
    return [
        Case("prediction", {"ask": "prediction"}, covers=("what is saved",)),
        Case("bytes", {"ask": "bytes", "batch": batch, "width": width + 1}, covers=("bytes kept", "each storage once")),
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
    for name, build in NETS.items():
        count = saved_bytes(build(case.values["width"]), _batch_of(name, case.values["batch"], case.values["width"]))
        counted[name] = whole(count, "saved_bytes")
    return Observation({"bytes": counted})


def _saved_judge(case: Case, seen: Observation) -> list[Finding]:
    if case.values["ask"] == "prediction":
        wrong = [key for key, names in SAVED.items() if set(seen.values[key]) != names]
        observed = f"not so for {', '.join(wrong)}" if wrong else "right for all three"
        return [Finding("what is saved", not wrong, "as autograd does", observed, f"{wrong[0]}-saves" if wrong else None)]
    findings = []
    for criterion, names in {"bytes kept": KEPT, "each storage once": ONCE}.items():
        finding = Finding(criterion, True, "as autograd keeps", f"right for {len(names)} networks")
        for name in names:
            right, totals = _kept(NETS[name](case.values["width"]), _batch_of(name, case.values["batch"], case.values["width"]))
            got = seen.values["bytes"][name]
            if got != right:
                hint = "freed" if name.startswith("16") and got < right else totals.get(got, "bytes")
                finding = Finding(criterion, False, f"{right} bytes", f"{name}: {got} bytes", hint)
                break
        findings.append(finding)
    return findings


register(Check(
    "checkpointing.saved",
    criteria=(
        Criterion("what is saved", "technique", 1, "recomputed"),
        Criterion("bytes kept", "technique", 0.5, "recomputed"),
        Criterion("each storage once", "cost", 0.5, "recomputed"),
    ),
    cases=_saved_cases,
    probe=_saved_probe,
    judge=_saved_judge,
    hints={
        "relu-saves": "Write the derivative of ReLU. Can you have it without the input?",
        "linear-saves": "Write the gradients of x @ W.T with respect to x and to W. Which factors appear?",
        "softmax-saves": "The derivative of softmax is y (1 - y) on the diagonal. Whose name is y?",
        "bytes": "Print the shape of each tensor that your pack hook receives. How many bytes is one element?",
        "weights": "Would the weights be in memory if there were no backward at all? Is what autograd saved of them still a Parameter?",
        "buffers": "Would the running averages of BatchNorm be in memory if there were no backward at all?",
        "input-left-out": "If backward needs x, can its memory go before backward? And is x among what the docstring leaves out?",
        "computed": "You counted what the layers return. Does backward need all of that, and nothing else?",
        "part": "A saved tensor may be a part of a larger one. How many bytes of memory stay alive because of it?",
        "freed": "You note addresses. Is the memory at each of them still held when the next layer asks for some?",
        "counted-twice": "Two operators keep the same memory. How many times does it lie there?",
    },
    summary=lambda case, seen: "three operators and eleven networks, as autograd keeps them",
))  # fmt: skip

"""Checks "memory.live" and "memory.batch": what a model and an optimizer hold right now, and what a batch adds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._memory_truth import STATES, config_of, draw, input_bytes, near, number, told
from labkit.gpt import GPT, GPTConfig, next_token_loss

# name -> (maker, arrays of parameter size in its state, whether it also counts steps in a tensor per parameter, lazy)
OPTIMIZERS: dict[str, tuple[Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer], int, bool, bool]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, foreach=False), 2, True, True),
    "AdamW with amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=False), 3, True, True),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False), 1, False, True),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, foreach=False), 0, False, True),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, foreach=False), 1, True, False),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
LATE = "after the step"  # frozen while their gradients are still there
MOMENTS = ("new", "after backward", "after the first step", "after zero_grad")


def _live_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    setups = [("AdamW", "float32", True, False), ("SGD with momentum", "float32", False, LATE), ("AdamW", "bfloat16", True, False)]
    if strict:
        setups += [
            ("AdamW with amsgrad", "float32", True, False),
            ("SGD", "float64", False, False),
            ("AdamW", "float32", True, True),
            ("Adagrad", "float32", False, False),
        ]
    rows = []
    for optimizer, dtype, tied, frozen in setups:
        heads = draw(generator, 1, 4)
        config = GPTConfig(draw(generator, 90, 400), 16, draw(generator, 1, 3), heads, heads * draw(generator, 8, 16), tied)
        rows.append({"optimizer": optimizer, "dtype": dtype, "config": asdict(config), "frozen": frozen})
    return [Case("a training step", {"rows": rows})]


def _setup(row: Mapping[str, Any]) -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(config_of(row["config"])).to(DTYPES[row["dtype"]])
    if row["frozen"] == LATE:
        model.register_buffer("seen", torch.zeros(64))  # in the state_dict, and no parameter
    elif row["frozen"]:  # frozen weights get no gradient and no optimizer state
        model.blocks.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, OPTIMIZERS[row["optimizer"]][0](trained)


def _live_probe(candidate: Any, case: Case) -> Observation:
    rows = []
    for row in case.values["rows"]:
        model, optimizer = _setup(row)
        ids = torch.randint(row["config"]["vocab"], (2, 5))
        seen = {"new": _ask(candidate, model, optimizer)}
        next_token_loss(model(ids), ids).backward()
        seen["after backward"] = _ask(candidate, model, optimizer)
        optimizer.step()
        if row["frozen"] == LATE:
            model.blocks.requires_grad_(False)
        seen["after the first step"] = _ask(candidate, model, optimizer)
        optimizer.zero_grad(set_to_none=True)
        seen["after zero_grad"] = _ask(candidate, model, optimizer)
        rows.append(seen)
    return Observation({"rows": rows})


def _ask(candidate: Any, model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    answer = candidate(model, optimizer)
    if not isinstance(answer, Mapping) or not set(STATES) <= set(answer):
        raise WrongResult(f"live_states returned {str(answer)[:60]}, expected a dict with the keys {', '.join(STATES)}")
    return {name: number(answer[name], f"live_states, {name!r}") for name in STATES}


@cache
def _counts(config: GPTConfig, frozen: bool | str) -> tuple[list[int], list[int]]:
    """Entries of every parameter, and of those that are trained."""
    model, _ = _setup({"config": vars(config), "dtype": "float32", "frozen": frozen, "optimizer": "SGD"})
    both = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return [count for count, _ in both], [count for count, trained in both if trained]


def live_truth(row: Mapping[str, Any], moment: str) -> dict[str, tuple[int, int]]:
    """Category -> (bytes without step counters, bytes with them) at one moment of a first training step."""
    size, (everything, trained) = DTYPES[row["dtype"]].itemsize, _counts(config_of(row["config"]), row["frozen"])
    _, arrays, counts, lazy = OPTIMIZERS[row["optimizer"]]
    gradients = size * sum(trained) if moment in ("after backward", "after the first step") else 0
    made = moment in ("after the first step", "after zero_grad") or not lazy
    state = arrays * size * sum(trained) if made else 0
    return {
        "parameters": (size * sum(everything),) * 2,
        "gradients": (gradients, gradients),
        "optimizer state": (state, state + (4 * len(trained) if counts and made else 0)),
    }


def _live_hint(category: str, row: Mapping[str, Any], moment: str, got: float, right: int) -> str:
    size = DTYPES[row["dtype"]].itemsize
    if category == "optimizer state" and right == 0:
        return "lazy"
    if category == "gradients" and right == 0:
        return "no-gradient"
    if right and near(got * size, right, 1e-6):
        return "elements"
    if size != 4 and near(got * size, 4 * right, 1e-3):
        return "dtype"
    if category == "parameters":
        head = size * row["config"]["vocab"] * row["config"]["width"]
        return "tied" if row["config"]["tied"] and near(got, right + head, 1e-6) else "storage"
    if row["frozen"] == LATE and moment == "after the first step" and category == "gradients" and got < right:
        return "still-there"
    if row["frozen"] is True and got > right:
        return "frozen"
    return {"gradients": "gradients", "optimizer state": "state"}[category]


def _live_judge(case: Case, seen: Observation) -> list[Finding]:
    findings = []
    for category in STATES:
        finding = Finding(category, True, "as held", f"right at {len(MOMENTS)} moments of {len(case.values['rows'])} runs")
        for row, answers in zip(case.values["rows"], seen.values["rows"], strict=True):
            for moment in MOMENTS:
                least, most = live_truth(row, moment)[category]
                got = answers[moment][category]
                if finding.passed and not (near(got, least, 0) or near(got, most, 0)):
                    where = f"{row['optimizer']}, {row['dtype']}, {moment}"
                    finding = Finding(category, False, told(least), f"{told(got)} ({where})", _live_hint(category, row, moment, got, least))
        findings.append(finding)
    return findings


register(Check(
    "memory.live",
    criteria=(
        Criterion("parameters", "technique", 0.5, "recomputed"),
        Criterion("gradients", "technique", 0.5, "recomputed"),
        Criterion("optimizer state", "technique", 1, "recomputed"),
    ),
    cases=_live_cases,
    probe=_live_probe,
    judge=_live_judge,
    hints={
        "lazy": "When does an optimizer make its state: when you construct it, or later? What is in `optimizer.state` now?",
        "no-gradient": "What is `parameter.grad` before the first backward, and after `zero_grad()`?",
        "elements": "You counted numbers. How many bytes is one of them, and which tensor knows that?",
        "dtype": "This model is not in 32 bit. Who knows how many bytes one entry has?",
        "tied": "With a tied head two names lead to one tensor. How often does it lie in memory?",
        "storage": "Which tensors does `model.parameters()` give, and what does `tensor.nbytes` say of each?",
        "frozen": "Some parameters of this model are frozen. Do they have a gradient and an optimizer state?",
        "still-there": "Parameters were frozen after the step. Are the gradients that they have gone by that?",
        "gradients": "Each parameter has at most one gradient. Where is it, and how many bytes has it?",
        "state": "`optimizer.state` holds a dict for each parameter. Which of its values are tensors as large as the parameter?",
    },
    summary=lambda case, seen: "AdamW's state: 0 bytes when made, twice the parameters after the first step",
))  # fmt: skip


# -- what a batch adds --

GROWS = {"activations", "input data", "other"}
STAYS = {"parameters", "gradients", "optimizer state"}


def _batch_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    sizes = [(1, 1)] + [(draw(generator, 1, 70), draw(generator, 2, 2000)) for _ in range(3)]
    return [
        Case("sizes", {"ask": "bytes", "sizes": sizes}, covers=("input data",)),
        Case("what grows", {"ask": "grows"}, covers=("grows with the batch",)),
    ]


def _batch_probe(candidate: Any, case: Case) -> Observation:
    if not isinstance(candidate, tuple) or len(candidate) != 2:
        raise WrongResult('expected two functions: check("memory.batch", input_bytes, grows_with_batch)')
    count, grows = candidate
    if case.values["ask"] == "bytes":
        return Observation({"bytes": [number(count(batch, seq), "input_bytes") for batch, seq in case.values["sizes"]]})
    names = grows()
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise WrongResult(f"grows_with_batch returned {str(names)[:60]}, expected a set of category names")
    return Observation({"grows": sorted({str(name).strip().lower() for name in names})})


def _batch_judge(case: Case, seen: Observation) -> list[Finding]:
    if case.values["ask"] == "bytes":
        for (batch, seq), got in zip(case.values["sizes"], seen.values["bytes"], strict=True):
            right = input_bytes(batch, seq)
            if not near(got, right, 1e-6):
                hints = {right / 2: "targets", right / 4: "elements", right / 8: "elements", right / 16: "elements"}
                observed = f"{got:g} bytes for {batch} sequences of {seq}"
                return [Finding("input data", False, f"{right} bytes", observed, hints.get(got, "tokens"))]
        return [Finding("input data", True, "ids and targets", "right for 4 sizes")]
    names = set(seen.values["grows"])
    missing, extra = GROWS - names, names - GROWS
    observed = "right" if not missing and not extra else f"{', '.join(sorted(extra))} grow?" if extra else "not all that grow"
    hint = "gradients" if "gradients" in extra else "stays" if extra else "other" if missing == {"other"} else "grows"
    hint = "unknown" if extra - STAYS else hint
    return [Finding("grows with the batch", not missing and not extra, "as measured at two batches", observed, hint)]


register(Check(
    "memory.batch",
    criteria=(
        Criterion("input data", "technique", 0.5, "recomputed"),
        Criterion("grows with the batch", "technique", 0.5, "recomputed"),
    ),
    cases=_batch_cases,
    probe=_batch_probe,
    judge=_batch_judge,
    hints={
        "targets": "That is half. Which two tensors come in with a batch, and how many bytes is one entry of int64?",
        "elements": "How many bytes is one entry of `torch.randint(...)`: what is its dtype?",
        "tokens": "How many tokens are in the ids of a batch, how many in its targets, and how many bytes is each?",
        "unknown": "Which names do the recorder's categories have?",
        "gradients": "A gradient belongs to a parameter. Has it an axis for the batch?",
        "stays": "Compare the two columns of the table above. Which rows are the same in both?",
        "other": "At the peak, backward holds tensors of the loss that are neither activations nor weights. How large is each?",
        "grows": "Compare the two columns of the table above. Which rows differ?",
    },
    summary=lambda case, seen: None,
))  # fmt: skip

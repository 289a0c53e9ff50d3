"""Check "number_formats.sums": a sum that does not stall, and a mean whose sum is out of range."""

import math
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._number_formats_results import as_number
from labkit.checks._threads import one_thread

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BITS = {"float16": 10, "bfloat16": 7}
MANY = 10_000
STALL, SPREAD, MEAN = "equal addends", "other addends", "mean out of the sum's range"
HINTS = {
    "stalls": "Your sum stops where one more addend changes nothing. When is the addend smaller than half a gap?",
    "infinite": "Every value is in range, and so is the answer. Which number on the way is not?",
    "divided": "Each value is divided first, and rounded then. How many bits has a three-thousandth of a small number left?",
    "blocks": "Totals of blocks are 16-bit numbers, too. How far apart are those where their own total has got to?",
    "sum-for-mean": "That is the sum. What is left to do for a mean, and how many values are there?",
    "error": "Add up four of these by hand. Does every value enter once, and what does each addition drop?",
    "mean": "Multiply your mean by the number of values. Is that their sum?",
}  # fmt: skip


def running(values: torch.Tensor) -> float:
    """What a plain loop in the values' own format adds up to."""
    total = torch.zeros((), dtype=values.dtype)
    for value in values:
        total = total + value
    return float(total)


def tolerance(values: torch.Tensor) -> float:
    """What pairwise summation in the values' own format may be off by: a rounding per level, relative to the sum of sizes."""
    unit = torch.finfo(values.dtype).eps / 2
    return (math.log2(max(len(values), 2)) + 2) * unit * float(values.double().abs().sum())


@one_thread()
def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def uniform(count: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    def run(ask: str, dtype: str, values: torch.Tensor) -> tuple[str, str, torch.Tensor]:
        return ask, dtype, values.to(DTYPES[dtype])

    equal = [
        run("sum", "bfloat16", torch.ones(1000)),
        run("sum", "float16", torch.ones(4096)),
        run("sum", "float16", torch.full((2000 + draw(0, 400),), 0.1)),
        run("sum", "bfloat16", torch.full((700 + draw(0, 300),), -3.0)),
    ]
    mixed = [
        run("sum", "bfloat16", uniform(1500 + draw(0, 200))),
        run("sum", "float16", torch.cat([torch.tensor([3000.0]), uniform(1800)])),
        run("sum", "float16", uniform(300, -1.0, 1.0)),
        run("sum", "bfloat16", torch.tensor([2.5])),
        run("sum", "float16", uniform(2, 1.0, 9.0)),
        run("sum", "bfloat16", 1e6 * uniform(700)),
        run("mean", "bfloat16", uniform(1300)),
        run("mean", "float16", torch.cat([uniform(1024), 100 + uniform(77)])),  # a mean of parts' means is off
        run("mean", "float16", torch.full((3000,), 2.0**-10)),  # a 3000th of it has a bit or two left
    ]
    out_of_range = [run("mean", "float16", uniform(900, 100.0, 1000.0)), run("mean", "float16", torch.full((50,), -60000.0))]
    # A running mean in the format stops on its way up.
    out_of_range.append(run("mean", "float16", torch.cat([torch.ones(1000), torch.full((2000,), 600.0)])))
    if strict:
        equal += [run("sum", "bfloat16", torch.full((3000,), 2.0**-12)), run("sum", "float16", torch.full((5001,), 7.0))]
        equal += [run("sum", "bfloat16", torch.full((40_000,), 0.3))]  # totals of blocks, added in the format, stall as well
        mixed += [
            run("sum", "bfloat16", uniform(700).pow(4)),
            run("sum", "float16", -uniform(4000)),
            run("sum", "bfloat16", torch.cat([uniform(900), torch.tensor([2000.0])])),
            run("sum", "float16", torch.cat([uniform(512), -uniform(511)])),
        ]
        out_of_range += [run("mean", "float16", uniform(3000, 5.0, 900.0)), run("mean", "float16", torch.full((77,), 60000.0))]
        out_of_range += [run("mean", "float16", torch.full((66_000,), 3.0))]  # more than fp16 can count
    groups = {STALL: equal, SPREAD: mixed, MEAN: out_of_range}
    return [
        Case(
            name,
            {"runs": [{"ask": ask, "dtype": dtype} for ask, dtype, _ in runs]},
            {str(i): values for i, (_, _, values) in enumerate(runs)},
            covers=(name,),
        )
        for name, runs in groups.items()
    ]


def _probe(candidate: Any, case: Case) -> Observation:
    if not isinstance(candidate, tuple) or len(candidate) != 2:
        raise WrongResult('expected two functions: check("number_formats.sums", steady_sum, steady_mean)')
    functions = dict(zip(("sum", "mean"), candidate, strict=True))
    found = []
    for index, run in enumerate(case.values["runs"]):
        result = functions[run["ask"]](case.tensors[str(index)].clone())
        found.append(as_number(result, f"steady_{run['ask']}"))
    return Observation({"found": found})


def _hint(ask: str, got: float, values: torch.Tensor, right: float) -> str:
    if not math.isfinite(got):
        return "infinite"
    stalled = running(values)
    if ask == "sum" and abs(got - stalled) <= tolerance(values) / 4:
        return "stalls"
    if ask == "sum" and len(values) > MANY:
        return "blocks"
    if ask == "mean":
        if abs(got - float(values.double().sum())) <= tolerance(values):
            return "sum-for-mean"
        if math.isfinite(stalled) and abs(got * len(values) - stalled) <= tolerance(values) / 4:
            return "stalls"
        by_parts = values / len(values)
        if abs(got - float(by_parts.double().sum())) <= tolerance(by_parts) / 4:
            return "divided"
        return "stalls" if abs(got - running(by_parts)) <= tolerance(by_parts) / 4 else "mean"
    return "error"


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    name = case.covers[0]
    for index, (run, got) in enumerate(zip(case.values["runs"], seen.values["found"], strict=True)):
        values = case.tensors[str(index)]
        exact = math.fsum(values.double().tolist())
        right, allowed = exact, tolerance(values)
        if run["ask"] == "mean":
            right, allowed = exact / len(values), allowed / len(values)
        if abs(got - right) <= allowed:
            continue
        told = f"{run['ask']} of {len(values)} numbers, {run['dtype']}: {got:.6g}"
        hint = _hint(run["ask"], got, values, right)
        return [Finding(name, False, "the exact one, give or take a rounding per doubling", told, hint)]
    return [Finding(name, True, "the exact one, give or take a rounding per doubling", f"right for {len(case.values['runs'])}")]


register(Check(
    "number_formats.sums",
    criteria=(
        Criterion(STALL, "technique", 1, "recomputed"),
        Criterion(SPREAD, "technique", 0.5, "recomputed"),
        Criterion(MEAN, "technique", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    summary=lambda case, seen: f"1000 ones in bfloat16 make {seen.values['found'][0]:g} (a plain loop: 256)",
    timeout=20.0,
))  # fmt: skip

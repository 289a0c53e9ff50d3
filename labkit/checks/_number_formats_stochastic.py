"""Check "number_formats.stochastic": rounding to one of the two neighbours by chance, right on average."""

import math
import random
from typing import Any

import numpy
import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._number_formats_results import as_numbers, call
from labkit.checks._threads import one_thread

NEIGHBOURS, AVERAGE, EXACT = "one of the two neighbours", "right on average", "exact numbers, infinity and nan"
COPIES, SIGMAS = 12000, 6.0
HINTS = {
    "not-bf16": "Does every number that you return survive a cast to bfloat16 and back?",
    "far": "Which two numbers of bfloat16 enclose the value, and is yours one of them?",
    "nearest": "All copies of a value came out alike. Where does chance come in?",
    "one-draw": "Your rounding is random, and yet all copies of a value go the same way. How many draws did you make?",
    "again": "Two calls with the same values gave the same result, number for number. Where does chance come in?",
    "biased": "Average many roundings of one value. Where should it converge, and where does yours?",
    "negative": "Positive values are right on average. Which way does your rounding push a negative one?",
    "exact": "A number of bfloat16 has nothing to round. How can chance move it?",
    "special": "Infinity and nan are patterns with the highest exponent. What does adding to their low bits make of them?",
}  # fmt: skip


@one_thread()
def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    power = torch.randint(-20, 20, (8,), generator=generator)
    exact = ((1 + torch.rand(8, generator=generator)) * torch.exp2(power.float())).bfloat16().double()
    exact[1] = torch.exp2(power[1].double())  # numbers below it lie closer
    gap = torch.exp2(power.double() - 7)
    share = torch.tensor([0.5, 0.1, 0.9, 0.25, 0.02, 0.7, 0.5, 0.33]) + (0.01 if strict else 0.0)
    share[3] = 0.0038  # less than the last of eight bits
    values = (exact + gap * share).float() * torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])
    fixed = torch.cat([torch.randn(300, generator=generator).bfloat16().float(), torch.tensor([0.0, -0.0, 1.0, -1.0, 3.3895314e38])])
    # The last nan has every bit set: who adds to its low bits carries into its sign.
    special = torch.tensor([0x7F800000, -0x00800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    return [
        Case("copies of eight values", {"seed": int(torch.randint(2**31, (), generator=generator))}, {"values": values},
             covers=(NEIGHBOURS, AVERAGE)),
        Case("exact numbers", {"seed": 1}, {"values": torch.cat([fixed, special])}, covers=(EXACT,)),
    ]  # fmt: skip


def _probe(candidate: Any, case: Case) -> Observation:
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(case.values["seed"])
    values = case.tensors["values"]
    if EXACT not in case.covers:
        values = values.repeat(COPIES)
    first, second = (as_numbers(call(candidate, values), len(values), "round_stochastically") for _ in range(2))
    return Observation({"again": bool(torch.equal(first.nan_to_num(), second.nan_to_num()))}, {"rounded": first})


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    values, rounded = case.tensors["values"].double(), seen.tensors["rounded"]
    if EXACT in case.covers:
        right = (rounded == values) | (rounded.isnan() & values.isnan())
        if right.all():
            return [Finding(EXACT, True, "unchanged", f"{len(values)} unchanged")]
        special = bool(right[:-5].all())
        first = int((~right).nonzero()[0])
        told = f"{float(values[first]):.7g} became {float(rounded[first]):.7g}"
        return [Finding(EXACT, False, "unchanged", told, "special" if special else "exact")]
    table = rounded.view(COPIES, len(values))  # (copies, values)
    sign, size = values.sign(), values.abs()
    step = torch.exp2(torch.frexp(size).exponent.double() - 8)
    low = torch.floor(size / step) * step
    high = low + step
    up = table * sign == high
    either = up | (table * sign == low)
    wanted = "the value's neighbours in bfloat16"
    if not either.all():
        bad = int((~either).sum())
        kept = bool((rounded.bfloat16().double() == rounded).all())
        near = Finding(NEIGHBOURS, False, wanted, f"{bad:,} of {len(rounded):,} are neither", "far" if kept else "not-bf16")
    else:
        near = Finding(NEIGHBOURS, True, wanted, f"{len(rounded):,} roundings, each to one of two")
    share = (size - low) / step
    sigma = torch.sqrt(share * (1 - share) / COPIES)
    off = (up.double().mean(0) - share) / sigma
    worst = int(off.abs().argmax())
    observed = f"{float(values[worst]):.7g}: {float(up.double().mean(0)[worst]):.3f} of {COPIES} roundings go away from zero"
    passed = bool(off.abs().max() <= SIGMAS) and near.passed and not seen.values["again"]
    hint = None
    if not passed:
        alike = bool((table == table[0]).all())
        nearest = bool((rounded == values.float().bfloat16().double().repeat(COPIES)).all())
        halves = bool(off[sign > 0].abs().max() <= SIGMAS)
        hint = "nearest" if nearest else "one-draw" if alike else "again" if seen.values["again"] else "negative" if halves else "biased"
    expected = f"a share of {float(share[worst]):.3f}" if passed else "the share at which the average is the value"
    observed += ", in a second call the same ones" * seen.values["again"]
    return [near, Finding(AVERAGE, passed, expected, observed + f", {abs(float(off[worst])):.1f} sigma" * math.isfinite(off[worst]), hint)]


register(Check(
    "number_formats.stochastic",
    criteria=(
        Criterion(NEIGHBOURS, "technique", 0.25, "recomputed"),
        Criterion(AVERAGE, "technique", 0.5, "recomputed"),
        Criterion(EXACT, "technique", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    summary=lambda case, seen: f"{COPIES} roundings of each of eight values, right on average within {SIGMAS:g} sigma",
    timeout=20.0,
))  # fmt: skip

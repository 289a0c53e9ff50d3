"""Checks on lab 02's choices: how many segments, which plan for unequal layers, which layers to run again."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register


def whole(value: Any, who: str) -> int:
    """`value` as an int. Raises WrongResult for what is no whole number."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise WrongResult(f"{who} returned {'None' if value is None else f'a {type(value).__name__}'}, expected a whole number") from None
    if not math.isfinite(number) or number != int(number):
        raise WrongResult(f"{who} returned {number:g}, expected a whole number")
    return int(number)


# -- how many segments --


def segment_peak(costs: Sequence[Sequence[float]], lengths: Sequence[int]) -> float:
    """Estimated peak of a plan: the kept input of each segment, and the largest segment's inside. costs: (input, inside) per layer."""
    starts = list(itertools.accumulate(lengths, initial=0))
    inputs = sum(costs[start][0] for start in starts[:-1])
    return inputs + max(sum(cost[1] for cost in costs[a:b]) for a, b in itertools.pairwise(starts))


def _balanced(depth: int, segments: int) -> Iterator[list[int]]:
    """The usual ways to cut `depth` layers: longer segments first or last, or all of the same rounded-up length."""
    short, more = divmod(depth, segments)
    yield [short + 1] * more + [short] * (segments - more)
    yield [short] * (segments - more) + [short + 1] * more
    step = -(-depth // segments)
    yield [min(step, depth - start) for start in range(0, depth, step)]


def near_best(costs: Sequence[Sequence[float]], segments: int) -> tuple[bool, float, float]:
    """(within 5% of the least, its peak, the least), by equal shares of the inside or by the real cuts, whichever is kinder."""
    depth, inside = len(costs), sum(cost[1] for cost in costs)
    border = sum(cost[0] for cost in costs) / depth

    def smooth(k: float) -> float:
        return k * border + inside / k

    def cut(k: int) -> float:
        return min(segment_peak(costs, lengths) for lengths in _balanced(depth, k))

    least = min(cut(k) for k in range(1, depth + 1))
    low = smooth(min(max(math.sqrt(inside / border), 1), depth))
    return cut(segments) <= 1.05 * least or smooth(segments) <= 1.05 * low, cut(segments), least


def _best_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    unit = int(torch.randint(1, 64, (), generator=generator)) * 4096
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    equal = [(64, 1.0), (100, 1.0), (draw(120, 200), 1.0)]
    costly = [(64, 10.0), (100, 10.0), (draw(80, 160), 30.0)]
    wave = [[unit, int(unit * (3 + 2 * math.sin(i)))] for i in range(90)]
    rest = [[[unit, unit // 10]] * 100, [[unit, unit * 3]] * 2, [[unit, unit]], wave]
    if strict:
        equal += [(draw(201, 400), 1.0), (17, 1.0)]
        costly += [(draw(200, 400), 10.0), (draw(50, 90), 5.0), (12, 100.0)]
    nets = {
        "equal costs": [[[unit, int(unit * inside)]] * depth for depth, inside in equal],
        "costly insides": [[[unit, int(unit * inside)]] * depth for depth, inside in costly],
        "other costs": rest,
    }
    return [Case(name, {"costs": costs}, covers=(name,)) for name, costs in nets.items()]


def _best_probe(candidate: Any, case: Case) -> Observation:
    return Observation({"segments": [whole(candidate([tuple(c) for c in costs]), "best_segments") for costs in case.values["costs"]]})


def _best_judge(case: Case, seen: Observation) -> list[Finding]:
    for costs, segments in zip(case.values["costs"], seen.values["segments"], strict=True):
        told = f"{len(costs)} layers, inside {costs[0][1] / costs[0][0]:g} times the input: {segments} segments"
        if not 1 <= segments <= len(costs):
            return [Finding(case.name, False, "from 1 to the number of layers", told, "range")]
        good, peak, least = near_best(costs, segments)
        if not good:
            told = f"{told}, peak {peak / costs[0][0]:.3g} inputs"
            hint = "equal" if case.name == "equal costs" else "inside"
            if any(near_best(costs, end)[0] for end in (1, len(costs))):
                hint = "ends"
            return [Finding(case.name, False, f"within 5% of the least, {least / costs[0][0]:.3g}", told, hint)]
    return [Finding(case.name, True, "within 5% of the least peak", f"{len(case.values['costs'])} networks")]


register(Check(
    "checkpointing.best-segments",
    criteria=(
        Criterion("equal costs", "numbers", 0.5, "recomputed"),
        Criterion("costly insides", "technique", 1, "recomputed"),
        Criterion("other costs", "cost", 0.5, "recomputed"),
    ),
    cases=_best_cases,
    probe=_best_probe,
    judge=_best_judge,
    hints={
        "ends": "For these costs the best number is the smallest or the largest that there can be. Do you try both?",
        "range": "Can there be more segments than layers, or fewer than one?",
        "equal": "Write the peak of k segments as two terms. Which one grows with k, which one shrinks, and where do they meet?",
        "inside": "One term counts inputs, the other what a segment holds while it runs again. Do both count the same bytes here?",
    },
))  # fmt: skip


# -- extensions --


def all_plans(depth: int) -> Iterator[list[int]]:
    """Every way to cut `depth` layers into segments."""
    for cuts in itertools.product((False, True), repeat=depth - 1):
        borders = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), depth]
        yield [b - a for a, b in itertools.pairwise(borders)]


def _plan_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    draw = lambda n, high: torch.randint(1, high, (n,), generator=generator).tolist()  # noqa: E731
    nets = [list(zip(draw(n, 6), draw(n, 40), strict=True)) for n in ((10, 11, 12) if strict else (9, 10))]
    nets.append([(20, 1)] * 4 + [(1, 30)] * 4)  # cheap borders where the insides are dear
    return [
        Case("unequal layers", {"nets": nets, "budget": "ample"}),
        Case("budget far too small", {"nets": nets[:2], "budget": "half"}, covers=("budget",)),
        Case("budget just enough", {"nets": nets, "budget": "least"}, covers=("budget",)),
        Case("budget one byte too small", {"nets": nets, "budget": "below"}, covers=("budget",)),
    ]


def _budgets(case: Case) -> list[tuple[list[list[int]], int, int]]:
    """(costs, budget, least peak) of each network of a case."""
    rows = []
    for costs in case.values["nets"]:
        least = int(min(segment_peak(costs, plan) for plan in all_plans(len(costs))))
        ample = sum(border + inside for border, inside in costs)
        budget = {"ample": ample, "half": least // 2, "least": least, "below": least - 1}[case.values["budget"]]
        rows.append((costs, budget, least))
    return rows


def _plan_probe(candidate: Any, case: Case) -> Observation:
    plans = []
    for costs, budget, _ in _budgets(case):
        plan = candidate([tuple(cost) for cost in costs], budget)
        if plan is not None:
            if not isinstance(plan, (list, tuple)):
                raise WrongResult(f"best_plan returned a {type(plan).__name__}, expected a list of segment lengths or None")
            plan = [whole(length, "best_plan") for length in plan]
        plans.append(plan)
    return Observation({"plans": plans})


def _plan_judge(case: Case, seen: Observation) -> list[Finding]:
    findings = [Finding("a whole plan", True, "every layer in one segment", "yes"),
                Finding("least peak", True, "the least of all plans", "yes"),
                Finding("budget", True, "None only where no plan fits", "yes")]  # fmt: skip
    for (costs, budget, least), plan in zip(_budgets(case), seen.values["plans"], strict=True):
        if plan is None or budget < least:
            fits = budget >= least
            if (plan is None) == fits:
                told = f"{'None' if plan is None else 'a plan'}, budget {budget}, least peak {least}"
                hint = {"least": "equality", "below": "counted"}.get(case.values["budget"], "budget")
                findings[2] = Finding("budget", False, "None only where no plan fits", told, hint)
                if plan is None:
                    findings[0] = Finding("a whole plan", False, "a plan", "None", hint)
            continue
        if min(plan, default=0) < 1 or sum(plan) != len(costs):
            findings[0] = Finding("a whole plan", False, f"lengths that add up to {len(costs)}", str(plan)[:60], "whole")
        elif (peak := segment_peak(costs, plan)) > least:
            hint = "unequal" if 1 < len(plan) < len(costs) and max(plan) - min(plan) <= 1 else "least"
            findings[1] = Finding("least peak", False, f"{least}", f"{peak:g}", hint)
    return findings if case.covers is None else findings[2:]


register(Check(
    "checkpointing.plan",
    criteria=(
        Criterion("a whole plan", "numbers", 0.25, "recomputed"),
        Criterion("least peak", "technique", 0.5, "recomputed"),
        Criterion("budget", "cost", 0.25, "recomputed"),
    ),
    cases=_plan_cases,
    probe=_plan_probe,
    judge=_plan_judge,
    hints={
        "whole": "Add up your lengths. Is every layer in exactly one segment?",
        "unequal": "Your segments are equally long. May they differ, and what would a layer with a large inside want?",
        "least": "Fix a limit for the inside of a segment. Which cuts keep least under it, and which limits are worth trying?",
        "budget": "Compare the budget with the least peak of all plans. Which of the two outcomes is None for?",
        "equality": "A plan whose peak is the budget to the byte: does it exceed the budget?",
        "counted": "The least peak is one byte above the budget. Does your peak count every segment's input and the whole inside?",
    },
))  # fmt: skip


def _select_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    nets = []
    for depth in (10, 12, 13) if strict else (8, 11):
        kept = seconds = [1] * depth
        while len({second / nbytes for second, nbytes in zip(seconds, kept, strict=True)}) < depth:  # one order by seconds per byte
            kept, seconds = (torch.randint(1, high, (depth,), generator=generator).tolist() for high in (60, 90))
        share = 0.25 + 0.5 * float(torch.rand((), generator=generator))
        nets.append({"costs": list(zip(kept, seconds, strict=True)), "budget": int(share * sum(kept))})
    whole_net = {"costs": nets[0]["costs"], "budget": sum(cost[0] for cost in nets[0]["costs"])}
    return [
        Case("some layers", {"nets": nets}),
        Case("all fit, none fits", {"nets": [whole_net, whole_net | {"budget": 0}]}, covers=("edges",)),
    ]


def _select_probe(candidate: Any, case: Case) -> Observation:
    chosen = []
    for net in case.values["nets"]:
        answer = candidate([tuple(cost) for cost in net["costs"]], net["budget"])
        if not isinstance(answer, (list, tuple, set, frozenset)):
            raise WrongResult(f"select_layers returned a {type(answer).__name__}, expected the indices of the layers to run again")
        chosen.append(sorted(whole(index, "select_layers") for index in answer))
    return Observation({"chosen": chosen})


def least_seconds(costs: Sequence[Sequence[float]], budget: float) -> float:
    """Least time of layers run again such that the others' bytes fit."""
    return min(
        sum(cost[1] for cost, again in zip(costs, picked, strict=True) if again)
        for picked in itertools.product((False, True), repeat=len(costs))
        if sum(cost[0] for cost, again in zip(costs, picked, strict=True) if not again) <= budget
    )


def greedy_seconds(costs: Sequence[Sequence[float]], budget: float) -> float:
    """Time of running again, cheapest second per byte first, until the rest fits: a good plan, not always the best."""
    kept, seconds = sum(cost[0] for cost in costs), 0.0
    for nbytes, cost in sorted(costs, key=lambda cost: cost[1] / cost[0]):
        if kept > budget:
            kept, seconds = kept - nbytes, seconds + cost
    return seconds


def _select_judge(case: Case, seen: Observation) -> list[Finding]:
    fits, quick = Finding("fits", True, "within the budget", "yes"), Finding("least time", True, "near the least", "yes")
    for net, chosen in zip(case.values["nets"], seen.values["chosen"], strict=True):
        costs, budget = net["costs"], net["budget"]
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(len(costs))):
            fits = Finding("fits", False, f"indices from 0 to {len(costs) - 1}, each once", str(chosen)[:60], "indices")
            continue
        kept = sum(cost[0] for index, cost in enumerate(costs) if index not in chosen)
        seconds, least = sum(costs[index][1] for index in chosen), least_seconds(costs, budget)
        if kept > budget:
            fits = Finding("fits", False, f"at most {budget} bytes kept", f"{kept} bytes", "fits")
        limit = max(1.25 * least, greedy_seconds(costs, budget))
        if seconds > limit:
            quick = Finding("least time", False, f"at most {limit:g}, the least is {least:g}", f"{seconds:g}", "seconds")
    if case.covers:
        bad = next((finding for finding in (fits, quick) if not finding.passed), None)
        return [Finding("edges", bad is None, *((bad.expected, bad.observed, bad.hint) if bad else ("right", "right")))]
    return [fits, quick]


register(Check(
    "checkpointing.select",
    criteria=(
        Criterion("fits", "numbers", 0.25, "recomputed"),
        Criterion("least time", "technique", 0.5, "recomputed"),
        Criterion("edges", "cost", 0.25, "recomputed"),
    ),
    cases=_select_cases,
    probe=_select_probe,
    judge=_select_judge,
    hints={
        "indices": "Which layers do the indices name that you return, and is each there once?",
        "fits": "Add up the bytes of the layers that you do not run again. Do they fit?",
        "seconds": "Which layers give back the most bytes for a second of running again?",
    },
))  # fmt: skip

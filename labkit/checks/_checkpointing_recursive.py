"""Check "checkpointing.recursive": checkpoints inside checkpoints, memory that grows like log(n) (Chen et al. 2016, section 4.4)."""

import math
from typing import Any

import torch

from labkit.checks._checkpointing_hints import HINTS, on_error
from labkit.checks._checkpointing_nets import plain_peak
from labkit.checks._checkpointing_sequential import DEPTHS, judge_gradients, picture, probe_depths, slope_of, told_alive
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._threads import one_thread

SLOPE = 0.3  # sqrt(n) has 0.4 to 0.5 at these depths


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = int(torch.randint(1, 2**31, (), generator=generator))
    depths = [(1, None), (2, None), (9, None), *((n, None) for n in DEPTHS)] if strict else [(n, None) for n in DEPTHS]
    return [Case("depths up to 144", {"kind": "silu", "depths": depths, "seed": seed})]


def _probe(candidate: Any, case: Case) -> Observation:
    torch.set_num_threads(1)
    return probe_depths(candidate, case.values)


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    rows = seen.values["rows"]
    deep = rows[-1]
    slope = slope_of([row for row in rows if row["depth"] in DEPTHS])
    share = deep["peak"] / plain_peak(deep["depth"])
    passed = slope <= SLOPE
    observed = f"grows like depth^{slope:.2f}; at {deep['depth']} layers {share:.0%} of the plain run's"
    calls = (len(deep["forward"]) + len(deep["backward"])) / deep["depth"]
    limit = math.log2(deep["depth"]) + 2
    hint = None if passed else _memory_hint(deep["backward"], calls > limit)
    memory = Finding("peak against depth", passed, f"at most depth^{SLOPE}", observed, hint, "" if passed else told_alive(seen, deep))
    few = Finding("forward calls", calls <= limit, f"at most log2(n) + 2 = {limit:.1f} per layer", f"{calls:.2f} per layer", "calls")
    return [*judge_gradients(case.values, seen), memory, few]


def _memory_hint(again: list[int], too_often: bool) -> str:
    """Which of the ways to keep too much this was."""
    if not again:
        return "plain"
    if too_often:
        return "cut"
    return "half" if 0 in again else "which-half"


def _summary(case: Case, seen: Observation) -> str:
    deep = seen.values["rows"][-1]
    calls = (len(deep["forward"]) + len(deep["backward"])) / deep["depth"]
    share = deep["peak"] / plain_peak(deep["depth"])
    return f"peak at {deep['depth']} layers {share:.0%} of plain, {calls:.2f} forward calls per layer"


register(Check(
    "checkpointing.recursive",
    criteria=(
        Criterion("gradients", "numbers", 0.25, "recomputed"),
        Criterion("peak against depth", "technique", 0.5, "memory"),
        Criterion("forward calls", "cost", 0.25),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=("torch.utils.checkpoint",),
    on_error=on_error,
    picture=picture,
    summary=_summary,
))  # fmt: skip

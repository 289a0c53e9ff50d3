"""Check "accumulation.amp": the combined loop. Autocast, a loss scaler, clipping, a schedule, and windows of micro-batches."""

from typing import TYPE_CHECKING, Any

import torch

from labkit.checks import _accumulation_tools as tools
from labkit.checks._accumulation_amp_judge import BIG, SCALE, judge, run_epochs
from labkit.checks._accumulation_epoch import draw_weights
from labkit.checks._accumulation_hints import HINTS, on_error
from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._core import Case, Check, Criterion, Observation, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    weights, clip, bad = ("weights", "scale", "schedule", "losses"), ("clipping",), ("infinite window", "scale", "schedule")
    cases = [
        Case("7 micro-batches in windows of 4", {"count": 7, "k": 4, "epochs": 2, "max_norm": BIG, "seed": seed()}, covers=weights),
        Case("a limit on the norm", {"count": 7, "k": 4, "epochs": 1, "max_norm": 0.3, "seed": seed()}, covers=clip),
        Case("an infinite micro-batch, and one of infinite gradient only",
             {"count": 15, "k": 4, "epochs": 2, "max_norm": BIG, "bad": [5, 13], "steep": [13], "seed": seed()}, covers=bad),
        Case("a network in float16", {"net": True, "count": 7, "k": 4, "epochs": 2, "max_norm": 0.2, "rows": 5, "seed": seed()},
             covers=("autocast", "clipping")),
    ]  # fmt: skip
    if strict:
        cases += [
            Case("windows of 1", {"count": 5, "k": 1, "epochs": 2, "max_norm": BIG, "seed": seed()}, covers=weights),
            Case("one window longer than the epoch", {"count": 3, "k": 8, "epochs": 2, "max_norm": BIG, "seed": seed()}, covers=weights),
            Case("a limit between the norms", {"count": 7, "k": 4, "epochs": 2, "max_norm": 0.55, "seed": seed()}, covers=clip),
            Case("infinite in the first and last window",
                 {"count": 11, "k": 3, "epochs": 2, "max_norm": BIG, "bad": [1, 9], "steep": [1], "seed": seed()}, covers=bad),
            Case("infinite, with a limit", {"count": 8, "k": 4, "epochs": 2, "max_norm": 0.3, "bad": [3], "seed": seed()}, covers=clip),
        ]  # fmt: skip
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    trace, rows, factors, scales = run_epochs(candidate, case.values)
    seen = Observation({"rows": rows, "rates": trace.rates, "dtypes": trace.dtypes, "factors": factors, "scales": scales})
    if trace.gradients:
        seen.tensors["gradients"] = torch.stack(trace.gradients)
    return seen


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    if case.values.get("net") or all(finding.passed for finding in judge(case, seen)) or case.values["max_norm"] < BIG:
        return None
    return draw_weights(case, seen, "What each micro-batch weighs in each of your steps")


def _summary(case: Case, seen: Observation) -> str | None:
    if "infinite window" not in (case.covers or ()):
        return None
    rows = seen.values["rows"]
    windows, bad = len(tools.windows_of(case.values["count"], case.values["k"])), len(case.values["bad"])
    return f"{rows[0]['steps']} steps for {windows} windows of which {bad} overflowed, scale from {SCALE:g} to {rows[-1]['scale']:g}"


register(Check(
    "accumulation.amp",
    criteria=(
        Criterion("weights", "numbers", 1, "recomputed"),
        Criterion("infinite window", "technique", 1, "recomputed"),
        Criterion("clipping", "technique", 0.75, "recomputed"),
        Criterion("scale", "technique", 0.5),
        Criterion("schedule", "cost", 0.25),
        Criterion("autocast", "cost", 0.25),
        Criterion("losses", "cost", 0.25, "recomputed"),
    ),
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(judge),
    hints=HINTS,
    on_error=on_error,
    picture=bundled_first(_picture),
    summary=bundled_first(_summary),
))  # fmt: skip

"""Check "data_parallel.overlap": a wrapper that averages gradients in buckets while backward computes."""

from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._data_parallel_hints import HINTS, on_error
from labkit.checks._data_parallel_messages import judge_buckets, judge_overlap, reduced
from labkit.checks._data_parallel_steps import (
    FORBIDS,
    judge_bits,
    judge_memory,
    judge_start,
    judge_steps,
    seed_of,
    train,
    worst,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OTHERS, RANKS = "other modules", "other ranks"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def run(net: str, cap: int, keep: bool = False, steps: int = 3) -> dict[str, Any]:
        return {"net": net, "seed": seed_of(generator), "cap": cap, "keep": keep, "steps": [[""]] * steps}

    others = [run("tied weights", 200), run("frozen layer", 100, keep=True), run("another branch on each rank", 400),
              run("another branch on each rank, unused first", 1), run("convolution and BatchNorm", 300),
              run("a large layer", 300, keep=True), run("layers held in another order", 400)]  # fmt: skip
    cases = [
        Case("3 ranks", {"runs": [run("chain", 640) | {"weigh": True}]}, world_size=3),
        Case("2 ranks", {"runs": others}, world_size=2, covers=(OTHERS,)),
    ]
    if strict:
        more = [run("transformer encoder", 2000), run("LSTM", 500, keep=True), run("float32 and float64", 150),
                run("another branch on each rank", 1), run("wide chain", 2600), run("chain", 10**6)]  # fmt: skip
        cases += [
            Case("3 ranks, other modules", {"runs": more}, world_size=3, covers=(OTHERS,)),
            Case("4 ranks", {"runs": [run("chain", 500, keep=True)]}, world_size=4, covers=(RANKS,)),
            Case("one rank", {"runs": [run("chain", 640, steps=2)]}, world_size=1, covers=(RANKS,)),
        ]
    else:
        cases[1].covers = (OTHERS, RANKS)
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    return train(candidate, case.values["runs"])


def _judge(case: Case, seen: Observation) -> list[Finding]:
    if case.covers is None:
        return _judge_run(case, seen, 0)
    found = [one for index in range(len(case.values["runs"])) for one in _judge_run(case, seen, index)]
    told = worst(case.covers[0], "as with the chain on 3 ranks", found)
    return [Finding(name, told.passed, told.expected, told.observed, told.hint) for name in case.covers]


def _judge_run(case: Case, seen: Observation, index: int) -> list[Finding]:
    run = case.values["runs"][index]
    where = f"{case.name}, {run['net']}"
    numbers = judge_steps("three steps", run, seen, index, where)
    start = judge_start("starts from rank 0", run, seen, index, where)
    bits = judge_bits("same bits", run, seen, index, where)
    buckets = judge_buckets(run, seen, index, where)
    # One bucket, or a rank that does not use everything: then there is nothing to start early, or a reason not to.
    overlaps = run["net"] in ("chain", "transformer encoder", "convolution and BatchNorm") and run["cap"] < 10**5 and len(seen.ranks) > 1
    late = [judge_overlap("overlap", run, seen, index, where)] if overlaps else []
    if not numbers.passed and numbers.hint == "start" and not start.passed:
        numbers = Finding(numbers.criterion, False, numbers.expected, start.observed, start.hint)
    kept = [judge_memory("nothing piles up", run, seen, index, where)] if run.get("weigh") else []
    return [numbers, start, *late, *buckets, bits, *kept]


def _picture(case: Case, seen: Observation) -> "Figure | None":
    if case.covers is not None:
        return None
    from labkit.figures.data_parallel import message_order

    steps = [one.values["rows"][0]["steps"][-1] for one in seen.ranks]
    drawn = message_order([(row["rows"], row["at_last"], row["behind"]) for row in steps], title=f"Your last step: {case.name}")
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if case.covers is not None:
        return None
    row = seen.values["rows"][0]["steps"][-1]
    early = sum(kind == "all_reduce" for kind, *_ in row["rows"][: row["at_last"]])
    count, nbytes = len(reduced(row)), sum(reduced(row))
    return f"{count} all-reduces, {nbytes} bytes per step, {early} of them started before the last gradient, same bits"


register(Check(
    "data_parallel.overlap",
    criteria=(
        Criterion("three steps", "numbers", 0.75, "recomputed"),
        Criterion("starts from rank 0", "cost", 0.25, "recomputed"),
        Criterion("overlap", "technique", 1),
        Criterion("buckets", "technique", 0.5, "wire"),
        Criterion("bytes", "cost", 0.25, "wire"),
        Criterion("same bits", "cost", 0.25, "recomputed"),
        Criterion("nothing piles up", "cost", 0.25),
        Criterion(OTHERS, "cost", 0.5, "recomputed"),
        Criterion(RANKS, "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=FORBIDS,
    on_error=on_error,
    picture=_picture,
    summary=_summary,
))  # fmt: skip

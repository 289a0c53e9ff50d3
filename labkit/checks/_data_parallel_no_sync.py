"""Check "data_parallel.no-sync": steps without messages, and right gradients after them."""

from dataclasses import replace
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._data_parallel_hints import HINTS, on_error
from labkit.checks._data_parallel_messages import judge_buckets, judge_overlap, reduced
from labkit.checks._data_parallel_steps import FORBIDS, judge_bits, judge_steps, seed_of, train, worst

AFTER, EARLIER, OTHERS = "after an exception", "parameters used earlier only", "other modules and ranks"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def run(net: str, cap: int, steps: list[list[str]], keep: bool = False, decides: str = OTHERS) -> dict[str, Any]:
        return {"net": net, "seed": seed_of(generator), "cap": cap, "keep": keep, "steps": steps, "decides": decides}

    two = ["quiet", "quiet", ""]
    edges = [
        run("tied weights", 200, [[""], two], keep=True),
        run("another branch in each piece", 400, [["quiet", ""], two], decides=EARLIER),
        run("chain", 640, [["raises", ""], [""]], decides=AFTER),
    ]
    cases = [
        Case("3 ranks", {"runs": [run("chain", 640, [two, [""], two])]}, world_size=3),
        Case("2 ranks", {"runs": edges}, world_size=2, covers=(AFTER, EARLIER, OTHERS)),
    ]
    if strict:
        more = [run("frozen layer", 100, [two, two]), run("another branch on each rank", 400, [["quiet", ""], two], keep=True),
                run("LSTM", 500, [["quiet", "raises", ""], [""]])]  # fmt: skip
        cases += [
            Case("4 ranks", {"runs": more}, world_size=4, covers=(OTHERS,)),
            Case("one rank", {"runs": [run("chain", 640, [two, [""]])]}, world_size=1, covers=(OTHERS,)),
        ]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    return train(candidate, case.values["runs"])


def _judge(case: Case, seen: Observation) -> list[Finding]:
    if case.covers is None:
        return _judge_run(case, seen, 0)
    found: dict[str, list[Finding]] = {name: [] for name in case.covers}
    for index, run in enumerate(case.values["runs"]):
        found[run["decides"]] += _judge_run(case, seen, index)
    return [worst(name, "as with the chain on 3 ranks", findings) for name, findings in found.items()]


def _judge_run(case: Case, seen: Observation, index: int) -> list[Finding]:
    run = case.values["runs"][index]
    where = f"{case.name}, {run['net']}"
    numbers = judge_steps("gradients", run, seen, index, where)
    silent = _judge_silence(run, seen, index, where)
    # What goes wrong with the messages afterwards is one thing: as many as without the context.
    messages = judge_buckets(run, seen, index, where)
    if run["net"] == "chain" and len(seen.ranks) > 1:
        messages.append(judge_overlap("overlap", run, seen, index, where))
    afterwards = worst("messages afterwards", "as without no_sync", messages)
    if afterwards.hint == "late":
        afterwards = replace(afterwards, hint="stays-quiet")
    if not numbers.passed and numbers.hint in ("later-steps", "stale", "missing", "garbage", "local", "none"):
        hint = {"local": "stays-quiet", "none": "earlier"}.get(numbers.hint, "accumulated")
        if case.covers:
            hint = {EARLIER: "earlier", AFTER: "stays-quiet"}.get(run["decides"], hint)
        numbers = Finding(numbers.criterion, False, numbers.expected, numbers.observed, hint)
    return [worst("gradients", numbers.expected, [numbers, judge_bits("same bits", run, seen, index, where)]), silent, afterwards]


def _judge_silence(run: dict[str, Any], seen: Observation, index: int, where: str) -> Finding:
    for step in range(len(run["steps"])):
        for rank, one in enumerate(seen.ranks):
            rows = one.values["rows"][index]["steps"][step]["quiet"]
            if rows:
                told = f"{where}, step {step + 1}, rank {rank}: {len(rows)} in no_sync, the first a {rows[0][0]}"
                return Finding("silent", False, "no message in no_sync", told, "talks")
    return Finding("silent", True, "no message in no_sync", "none")


def _summary(case: Case, seen: Observation) -> str | None:
    if case.covers is not None:
        return None
    row = seen.values["rows"][0]["steps"][-1]
    return f"no message for two pieces of three, then {len(reduced(row))} all-reduces of {sum(reduced(row))} bytes"


register(Check(
    "data_parallel.no-sync",
    criteria=(
        Criterion("gradients", "numbers", 0.5, "recomputed"),
        Criterion("silent", "technique", 0.5, "wire"),
        Criterion("messages afterwards", "technique", 0.25, "wire"),
        Criterion(AFTER, "cost", 0.25, "recomputed"),
        Criterion(EARLIER, "cost", 0.25, "recomputed"),
        Criterion(OTHERS, "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=FORBIDS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip

"""Check "data_parallel.priority": what the next forward needs first is sent first, once backward is over."""

from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._data_parallel_hints import HINTS, on_error
from labkit.checks._data_parallel_messages import blocks, judge_buckets, reduced
from labkit.checks._data_parallel_nets import trainable
from labkit.checks._data_parallel_steps import FORBIDS, judge_bits, judge_steps, seed_of, train, worst

OTHERS = "other modules, ranks and counts"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def run(net: str, cap: int, ahead: int, steps: list[list[str]] | None = None, keep: bool = False) -> dict[str, Any]:
        return {"net": net, "seed": seed_of(generator), "cap": cap, "keep": keep, "steps": steps or [[""]] * 3, "options": {"ahead": ahead}}

    ahead = int(torch.randint(2, 5, (), generator=generator))
    few = [run("another branch on each rank", 400, 1), run("another branch on each rank, unused first", 1, 4),
           run("tied weights", 1, 2, keep=True), run("chain", 1, 0)]  # fmt: skip
    cases = [
        Case("3 ranks", {"runs": [run("chain", 1, ahead)]}, world_size=3),
        Case("2 ranks", {"runs": few}, world_size=2, covers=(OTHERS,)),
    ]
    if strict:
        pieces = run("chain", 640, 2, [["quiet", ""], ["raises", ""]])
        more = [run("chain", 1, 7), run("chain", 640, 99), run("frozen layer", 100, 1), pieces]
        cases += [
            Case("4 ranks", {"runs": more}, world_size=4, covers=(OTHERS,)),
            Case("one rank", {"runs": [run("chain", 640, 2, [[""], [""]])]}, world_size=1, covers=(OTHERS,)),
        ]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    return train(candidate, case.values["runs"])


def _judge(case: Case, seen: Observation) -> list[Finding]:
    found = [one for index in range(len(case.values["runs"])) for one in _judge_run(case, seen, index)]
    return found if case.covers is None else [worst(OTHERS, "as with the chain on 3 ranks", found)]


def _judge_run(case: Case, seen: Observation, index: int) -> list[Finding]:
    run = case.values["runs"][index]
    where = f"{case.name}, {run['net']}, ahead={run['options']['ahead']}"
    found = [judge_steps("three steps", run, seen, index, where)]
    if run["net"] == "chain" and len(seen.ranks) > 1:
        found += [_judge_order(run, seen, index, where)] if run["cap"] == 1 else []
        found += [_judge_ahead(run, seen, index, where)]
    messages = worst("messages", "every gradient once, in buckets", judge_buckets(run, seen, index, where))
    return [*found, messages, judge_bits("same bits", run, seen, index, where)]


def _judge_ahead(run: dict[str, Any], seen: Observation, index: int, where: str) -> Finding:
    """Exactly `ahead` all-reduces (or all there are) start in backward, the first before the last gradient, and nobody waits till then."""
    ahead = run["options"]["ahead"]
    expected = f"{ahead} all-reduces start in backward"
    for step in range(1, len(run["steps"])):
        for rank, one in enumerate(seen.ranks):
            row, place = one.values["rows"][index]["steps"][step], f"{where}, step {step + 1}, rank {rank}"
            before = row["rows"][: row["at_last"]]
            if blocks(before):
                return Finding("overlap kept", False, expected, f"{place}: backward waits for a message", "blocks")
            count = sum(kind == "all_reduce" for kind, *_ in row["rows"][: row["behind"]])
            early = sum(kind == "all_reduce" for kind, *_ in before)
            if count != min(ahead, len(reduced(row))):
                return Finding("overlap kept", False, expected, f"{place}: {count}", "ahead")
            if ahead and not early and count > 1:
                return Finding("overlap kept", False, expected, f"{place}: none before the last gradient", "late")
    return Finding("overlap kept", True, expected, str(ahead))


def _judge_order(run: dict[str, Any], seen: Observation, index: int, where: str) -> Finding:
    """Each message carries one parameter, told by its bytes: the last parameters first while backward runs, then from the first one on."""
    ahead = run["options"]["ahead"]
    sizes = {p.nbytes: name for name, p in trainable(run["net"]).items()}
    names = list(sizes.values())
    first, then = names[::-1][:ahead], names[: len(names) - ahead]
    expected = f"{', '.join([*first[:3], *['...'] * (ahead > 3)])} then {', '.join(then[:2])}, ..."
    for step in range(1, len(run["steps"])):
        for rank, one in enumerate(seen.ranks):
            row = one.values["rows"][index]["steps"][step]
            told = [sizes.get(payload, f"{payload} bytes") for payload in reduced(row)]
            if told[ahead:] != then or sorted(told[:ahead]) != sorted(first):
                place = f"{where}, step {step + 1}, rank {rank}: {', '.join(told[: ahead + 3])}, ..."
                begun = sum(kind == "all_reduce" for kind, *_ in row["rows"][: row["behind"]])
                if begun != ahead:
                    return Finding("priority", False, expected, place, "ahead")
                return Finding("priority", False, expected, place, "order" if sorted(told[:ahead]) == sorted(first) else "ahead-order")
    return Finding("priority", True, expected, "so")


def _summary(case: Case, seen: Observation) -> str | None:
    if case.covers is not None:
        return None
    ahead, total = case.values["runs"][0]["options"]["ahead"], len(reduced(seen.values["rows"][0]["steps"][-1]))
    return f"{ahead} of {total} all-reduces start in backward, the others in the order of forward"


register(Check(
    "data_parallel.priority",
    criteria=(
        Criterion("three steps", "numbers", 0.5, "recomputed"),
        Criterion("priority", "technique", 0.5, "wire"),
        Criterion("overlap kept", "technique", 0.25),
        Criterion("messages", "cost", 0.25, "wire"),
        Criterion("same bits", "cost", 0.25, "recomputed"),
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

"""Check "allreduce.naive": everything to rank 0, and back."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit.checks._allreduce_hints import HINTS, on_error
from labkit.checks._allreduce_traffic import (
    DTYPES,
    FORBIDS,
    close,
    collective,
    in_flight,
    made_of,
    numbers,
    observe,
    received_bytes,
    rows_of,
    sends,
    shares,
    total,
    traffic_picture,
    why_wrong,
)
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EDGE = "other dtypes, shapes and ranks"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def run(shape: tuple[int, ...], dtype: str = "float32") -> dict[str, Any]:
        return {"shape": list(shape), "dtype": dtype, "seed": int(torch.randint(1, 2**24, (), generator=generator))}

    cases = [
        Case("4 ranks", {"runs": [run((5, 23))]}, world_size=4),
        Case("3 ranks", {"runs": [run((41,)), run((7, 3), "int64")]}, world_size=3, covers=(EDGE,)),
        Case("one rank", {"runs": [run((4,))]}, world_size=1, covers=(EDGE,)),
    ]
    if strict:
        others = [run((), "float64"), run((3, 2, 5), "bfloat16"), run((0,)), run((9,), "int32")]
        cases += [Case("2 ranks", {"runs": others}, world_size=2, covers=(EDGE,)), Case("5 ranks", {"runs": [run((13, 2))]}, world_size=5)]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    seen = Observation({"rows": []})
    for index, run in enumerate(case.values["runs"]):
        x = numbers(run["shape"], DTYPES[run["dtype"]], run["seed"], dist.get_rank())
        _, row = observe(lambda x=x: candidate(x))
        seen.values["rows"].append(row)
        seen.tensors[f"{index}"] = x
    return seen


# -- judge --


def judge_sum(seen: Observation, index: int, parts: list[torch.Tensor], where: str, name: str) -> Finding:
    """Every rank's x against the exact sum."""
    expected = total(parts)
    for rank, one in enumerate(seen.ranks):
        observed = one.tensors[f"{index}"]
        if not close(observed, expected, parts):
            found = shares(observed, parts)
            hint = "precision" if found == [1.0] * len(parts) else why_wrong(found, rank)
            if not observed.dtype.is_floating_point and hint == "precision":
                hint = "integers"
            told = f"{where}: rank {rank} holds something else"
            return Finding(name, False, "the sum on every rank", told, hint, made_of(found, f"Rank {rank} holds"))
    return Finding(name, True, "the sum on every rank", "the sum")


def _judge(case: Case, seen: Observation) -> list[Finding]:
    findings = [one for index in range(len(case.values["runs"])) for one in _judge_run(case, seen, index)]
    if case.covers is None:
        return findings
    worst = next((one for one in findings if not one.passed and one.hint), None)
    observed, hint, detail = (worst.observed, worst.hint, worst.detail) if worst else ("so", None, "")
    return [Finding(EDGE, worst is None, "as with 4 ranks", observed, hint, detail)]


def _judge_run(case: Case, seen: Observation, index: int) -> list[Finding]:
    run, rows = case.values["runs"][index], rows_of(seen, index)
    where = f"{case.name}, {run['dtype']} of shape {tuple(run['shape'])}"
    parts = [numbers(run["shape"], DTYPES[run["dtype"]], run["seed"], rank) for rank in range(case.world_size)]
    flight = in_flight(rows, where)
    summed = judge_sum(seen, index, parts, where, "sum")
    if not flight.passed:  # then what arrived is a matter of luck
        summed = Finding("sum", False, summed.expected, "cannot be relied on: see below")
    return [summed, _judge_root(rows, parts[0].numel() * parts[0].element_size(), where), flight]


def _judge_root(rows: list[dict[str, Any]], size: int, where: str) -> Finding:
    name, expected = "through rank 0", "each other rank: x to rank 0, and the sum back, once each"
    called = collective(rows)
    if called:
        return Finding(name, False, expected, f"{called} was called", "collective")
    for rank, row in enumerate(rows):
        mine = sends(row)
        wanted = [(0, size)] if rank else [(peer, size) for peer in range(1, len(rows))]
        got = received_bytes(row)
        if sorted(mine) != wanted or got != size * (1 if rank else len(rows) - 1):
            count, sent = len(mine), sum(nbytes for _, nbytes in mine)
            hint = "silent" if not any(sends(one) for one in rows) else "alone" if len(rows) == 1 else "root"
            told = f"{where}: rank {rank} sends {count} messages, {sent} bytes, and receives {got} bytes"
            return Finding(name, False, expected, told, hint)
    return Finding(name, True, expected, "so")


def _picture(case: Case, seen: Observation) -> "Figure | None":
    return traffic_picture(rows_of(seen, 0), f"Your messages: {case.name}") if case.covers is None else None


def _summary(case: Case, seen: Observation) -> str | None:
    if case.covers is not None:
        return None
    row = rows_of(seen, 0)[0]
    passed = sum(nbytes for _, nbytes in sends(row)) + received_bytes(row)
    x = seen.ranks[0].tensors["0"]
    return f"{passed / (x.numel() * x.element_size()):g} times the tensor passes rank 0"


register(Check(
    "allreduce.naive",
    criteria=(
        Criterion("sum", "numbers", 0.5, "recomputed"),
        Criterion("through rank 0", "technique", 1, "wire"),
        Criterion("buffers in flight", "cost", 0.25),
        Criterion(EDGE, "cost", 0.25, "recomputed"),
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

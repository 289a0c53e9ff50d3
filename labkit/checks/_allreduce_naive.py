"""Check "allreduce.naive": everything to rank 0, and back."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit.checks._allreduce_hints import HINTS, on_error
from labkit.checks._allreduce_traffic import (
    DTYPES,
    FORBIDS,
    Observer,
    close,
    collective,
    in_flight,
    made_of,
    numbers,
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
        Case("4 ranks", {"runs": [run((5, 23)), run((5, 23))]}, world_size=4),
        Case("3 ranks", {"runs": [run((41,)), run((7, 3), "int64")]}, world_size=3, covers=(EDGE,)),
    ]
    if strict:
        cases.append(Case("one rank", {"runs": [run((4,))]}, world_size=1, covers=(EDGE,)))
        others = [run((), "float64"), run((3, 2, 5), "bfloat16"), run((9,), "int32")]
        cases.append(Case("2 ranks", {"runs": others}, world_size=2, covers=(EDGE,)))
        cases.append(Case("5 ranks", {"runs": [run((3, 7))]}, world_size=5, covers=(EDGE,)))
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    seen = Observation({"rows": []})
    with Observer() as observer:
        for index, run in enumerate(case.values["runs"]):
            x = numbers(run["shape"], DTYPES[run["dtype"]], run["seed"], dist.get_rank())
            _, row = observer.run(candidate, x)
            seen.values["rows"].append(row)
            seen.tensors[f"{index}"] = x
    return seen


# -- judge --


def judge_sum(seen: Observation, index: int, parts: list[torch.Tensor], where: str, chunks: int = 1) -> Finding:
    """Every rank's x against the exact sum. `chunks`: into how many the candidate cuts it; what is wrong is told of one of them."""
    expected, wanted = total(parts), "the sum on every rank"
    for rank, one in enumerate(seen.ranks):
        observed = one.tensors[f"{index}"]
        if close(observed, expected, parts):
            continue
        told = f"{where}: rank {rank} holds something else"
        if torch.equal(observed, parts[rank]):
            return Finding("sum", False, wanted, told, "nothing", f"Rank {rank} holds its own numbers.")
        for chunk in range(chunks):
            mine, theirs = _inside(observed, chunk, chunks), [_inside(part, chunk, chunks) for part in parts]
            if close(mine, total(theirs), theirs):
                continue
            found = shares(mine, theirs)
            hint = why_wrong(found, rank)
            if found == [1.0] * len(parts):
                hint = "precision" if observed.dtype.is_floating_point else "integers"
            where_in = f", in the middle of chunk {chunk}" if chunks > 1 else ""
            return Finding("sum", False, wanted, told, hint, made_of(found, f"Rank {rank} holds{where_in}"))
        return Finding("sum", False, wanted, told, "garbage")
    return Finding("sum", True, wanted, "the sum")


def _inside(tensor: torch.Tensor, chunk: int, chunks: int) -> torch.Tensor:
    """What belongs to a chunk however the remainder is dealt out: less a few numbers at its ends."""
    piece = tensor.reshape(-1).tensor_split(chunks)[chunk]
    return piece[chunks:-chunks] if chunks > 1 and len(piece) > 4 * chunks else piece


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
    summed = judge_sum(seen, index, parts, where)
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

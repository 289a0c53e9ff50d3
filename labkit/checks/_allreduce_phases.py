"""Checks "allreduce.reduce-scatter" and "allreduce.all-gather": the two halves of the ring, on chunks of given sizes."""

import operator
from collections.abc import Sequence
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
    rows_of,
    sends,
    shares,
    successor,
    total,
    traffic_picture,
    why_wrong,
)
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EDGE = "uneven chunks, other ranks"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def run(sizes: list[int], shift: int = 0, dtype: str = "float32") -> dict[str, Any]:
        return {"sizes": sizes, "shift": shift, "dtype": dtype, "seed": int(torch.randint(1, 2**24, (), generator=generator))}

    cases = [
        Case("4 ranks", {"runs": [run([25, 25, 25, 25], 1), run([25, 25, 25, 25], 1)]}, world_size=4),
        Case("3 ranks", {"runs": [run([40, 39, 39], 1), run([1, 1, 0], 2), run([40, 39, 39], 0, "int64")]}, world_size=3, covers=(EDGE,)),
    ]
    if strict:
        few = [run([31, 30], 1), run([0, 1]), run([0, 0]), run([31, 30], 0, "bfloat16"), run([31, 30], 1, "int32"),
               run([16, 25], 1, "float64")]
        cases += [
            Case("one rank", {"runs": [run([6])]}, world_size=1, covers=(EDGE,)),
            Case("2 ranks", {"runs": few}, world_size=2, covers=(EDGE,)),
            Case("5 ranks", {"runs": [run([20, 20, 19, 19, 19], 3), run([1, 1, 1, 0, 0], 4)]}, world_size=5, covers=(EDGE,)),
        ]
    return cases


def whole(run: dict[str, Any], rank: int) -> torch.Tensor:
    return numbers((sum(run["sizes"]),), DTYPES[run["dtype"]], run["seed"], rank)


def _owner(run: dict[str, Any], chunk: int) -> int:
    """Who holds a finished chunk when the all-gather begins."""
    return (chunk - run["shift"]) % len(run["sizes"])


def _probe_reduce(candidate: Any, case: Case) -> Observation:
    seen = Observation({"rows": []})
    with Observer() as observer:
        for index, run in enumerate(case.values["runs"]):
            x = whole(run, dist.get_rank())
            chunks = list(x.split(run["sizes"]))
            result, row = observer.run(candidate, chunks)
            row["mine"] = _index(result, len(run["sizes"]))
            seen.values["rows"].append(row)
            seen.tensors[f"{index}"] = x
            if _still_chunks(chunks, run):
                seen.tensors[f"{index}/listed"] = chunks[row["mine"]].detach().clone()
    return seen


def _still_chunks(chunks: list[Any], run: dict[str, Any]) -> bool:
    return len(chunks) == len(run["sizes"]) and all(isinstance(chunk, torch.Tensor) for chunk in chunks)


def _index(result: Any, count: int) -> int:
    try:
        mine = operator.index(result.item() if isinstance(result, torch.Tensor) and result.numel() == 1 else result)
    except TypeError:
        raise WrongResult(f"returned a {type(result).__name__}, expected the number of the chunk that is finished here", "index") from None
    if not -count <= mine < count:
        raise WrongResult(f"returned {mine}, expected the number of one of {count} chunks", "index")
    return mine % count


def _probe_gather(candidate: Any, case: Case) -> Observation:
    seen = Observation({"rows": []})
    with Observer() as observer:
        for index, run in enumerate(case.values["runs"]):
            x, mine = whole(run, dist.get_rank()), (dist.get_rank() + run["shift"]) % case.world_size
            chunks = list(x.split(run["sizes"]))
            _, row = observer.run(candidate, chunks, mine)
            seen.values["rows"].append(row)
            seen.tensors[f"{index}"] = x
            if _still_chunks(chunks, run):
                seen.tensors |= {f"{index}/{number}/listed": chunk.detach().clone() for number, chunk in enumerate(chunks)}
    return seen


# -- judge --


def _judge_with(judge_run: Any, first: str) -> Any:
    def judge(case: Case, seen: Observation) -> list[Finding]:
        findings = []
        for index in range(len(case.values["runs"])):
            rows = rows_of(seen, index)
            where = f"{case.name}, chunks of {', '.join(map(str, case.values['runs'][index]['sizes']))}"
            flight = in_flight(rows, where)
            found = judge_run(case, seen, index, where)
            if not flight.passed:  # then what arrived is a matter of luck
                found[0] = Finding(first, False, found[0].expected, "cannot be relied on: see below")
            ring = successor(rows, where, quiet=not sum(case.values["runs"][index]["sizes"]))
            if not ring.passed and found[1].passed:
                found[1] = Finding("messages", False, found[1].expected, "not round a ring")
            findings += [*found, ring, flight]
        if case.covers is None:
            return findings
        worst = next((one for one in findings if not one.passed and one.hint), None)
        observed, hint, detail = (worst.observed, worst.hint, worst.detail) if worst else ("so", None, "")
        return [Finding(EDGE, worst is None, "as with 4 even chunks", observed, hint, detail)]

    return judge


def _reduced(case: Case, seen: Observation, index: int, where: str) -> list[Finding]:
    run, ranks, name = case.values["runs"][index], case.world_size, "finished chunk"
    rows, itemsize = rows_of(seen, index), DTYPES[run["dtype"]].itemsize
    everyone = [whole(run, rank) for rank in range(ranks)]
    mine = [row["mine"] for row in rows]
    expected = "the sum over all ranks, one chunk on each"
    finding = Finding(name, True, expected, "so")
    for rank, chunk in enumerate(mine):
        parts = [x.split(run["sizes"])[chunk] for x in everyone]
        held = seen.ranks[rank].tensors[f"{index}"].split(run["sizes"])
        observed = held[chunk]
        if not close(observed, total(parts), parts):
            found = shares(observed, parts)
            hint = "precision" if found == [1.0] * ranks else why_wrong(found, rank)
            if hint == "precision" and not observed.dtype.is_floating_point:
                hint = "integers"
            listed = seen.ranks[rank].tensors.get(f"{index}/listed")
            if listed is not None and close(listed.reshape(-1), total(parts), parts):
                hint = "rebound"
            elif _finished(held, [x.split(run["sizes"]) for x in everyone]):
                hint = "index"
            told = f"{where}: chunk {chunk} on rank {rank} is no such sum"
            finding = Finding(name, False, expected, told, hint, made_of(found, f"Chunk {chunk} on rank {rank}"))
            break
    if finding.passed and sorted(mine) != list(range(ranks)):
        finding = Finding(name, False, expected, f"{where}: the ranks name chunks {', '.join(map(str, mine))}", "same-index")
    sizes = [size * itemsize for size in run["sizes"]]
    return [finding, judge_chunks(rows, sizes, [{chunk} for chunk in mine], where)]


def _finished(held: Sequence[torch.Tensor], everyone: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether a rank holds a finished chunk at all."""
    for chunk, observed in enumerate(held):
        parts = [chunks[chunk] for chunks in everyone]
        if observed.numel() and close(observed, total(parts), parts):
            return True
    return False


def _gathered(case: Case, seen: Observation, index: int, where: str) -> list[Finding]:
    run, ranks, name = case.values["runs"][index], case.world_size, "every chunk on every rank"
    rows, itemsize = rows_of(seen, index), DTYPES[run["dtype"]].itemsize
    everyone = [whole(run, rank).split(run["sizes"]) for rank in range(ranks)]
    expected = "a copy of its owner's, bit for bit"
    finding = Finding(name, True, expected, "so")
    for rank, one in enumerate(seen.ranks):
        held = one.tensors[f"{index}"].split(run["sizes"])
        for chunk in range(ranks):
            wanted, observed = everyone[_owner(run, chunk)][chunk], held[chunk]
            if torch.equal(wanted, observed):
                continue
            hint = _why_not_copied([everyone[other][chunk] for other in range(ranks)], observed, _owner(run, chunk), rank)
            if hint == "garbage" and any(torch.equal(observed, version) for chunks in everyone for version in chunks):
                hint = "misplaced"
            listed = one.tensors.get(f"{index}/{chunk}/listed")
            if listed is not None and torch.equal(listed.reshape(-1), wanted):
                hint = "rebound"
            told = f"{where}: chunk {chunk} on rank {rank} is not its owner's"
            finding = Finding(name, False, expected, told, hint)
            return [finding, judge_chunks(rows, [n * itemsize for n in run["sizes"]], [set(range(ranks))] * ranks, where)]
    return [finding, judge_chunks(rows, [n * itemsize for n in run["sizes"]], [set(range(ranks))] * ranks, where)]


def _why_not_copied(versions: list[torch.Tensor], observed: torch.Tensor, owner: int, rank: int) -> str:
    if torch.equal(observed, versions[rank]):
        return "nothing"
    if any(torch.equal(observed, version) for version in versions):
        return "mine"
    found = shares(observed, versions)
    if found is not None and sum(value > 0.5 for value in found) > 1:
        return "adds"
    return "precision" if found is not None and found[owner] > 0.9 else "garbage"


def judge_chunks(rows: list[dict[str, Any]], sizes: list[int], stays: list[set[int]], where: str) -> Finding:
    """Each rank sends every chunk once but one: W - 1 messages, of those sizes (empty ones may be left out).

    stays : per rank, which chunk may be the one that it does not send
    """
    name, ranks = "messages", len(rows)
    expected = f"W - 1 per rank, every chunk once but one ({sum(sizes)} bytes less one chunk)"
    called = collective(rows)
    if called:
        return Finding(name, False, expected, f"{called} was called", "collective")
    for rank, row in enumerate(rows):
        sent = [nbytes for _, nbytes in sends(row)]
        full = sorted(nbytes for nbytes in sent if nbytes)
        allowed = [sorted(size for chunk, size in enumerate(sizes) if chunk != left and size) for left in stays[rank]]
        if len(sent) <= max(ranks - 1, 0) and full in allowed:
            continue
        told = f"{where}: rank {rank} sends {len(sent)} messages, {sum(sent)} bytes"
        fewest = min(len(one) for one in allowed)
        if full and [nbytes / 2 for nbytes in full] in allowed:
            hint = "wide"
        elif len(full) < fewest:
            hint = "silent" if not any(sends(one) for one in rows) else "too-few"
        elif sum(full) > sum(sizes) or (len(full) and max(full) > max(sizes)):
            hint = "too-many" if max(full) <= max(sizes) else "whole"
        else:
            hint = "too-many" if len(sent) > ranks - 1 else "size"
        return Finding(name, False, expected, told, "alone" if ranks == 1 else hint)
    return Finding(name, True, expected, "so")


def _picture(case: Case, seen: Observation) -> "Figure | None":
    return traffic_picture(rows_of(seen, 0), f"Your messages: {case.name}") if case.covers is None else None


def _summary(case: Case, seen: Observation) -> str | None:
    if case.covers is not None:
        return None
    run, sent = case.values["runs"][0], sends(rows_of(seen, 0)[0])
    share = sum(nbytes for _, nbytes in sent) / (sum(run["sizes"]) * DTYPES[run["dtype"]].itemsize)
    return f"{len(sent)} messages and {share:.2f} of the tensor sent per rank, to one neighbour"


def _criteria(first: str) -> tuple[Criterion, ...]:
    return (
        Criterion(first, "numbers", 0.75, "recomputed"),
        Criterion("one successor", "technique", 0.5, "wire"),
        Criterion("messages", "technique", 0.75, "wire"),
        Criterion("buffers in flight", "cost", 0.5),
        Criterion(EDGE, "cost", 0.5, "recomputed"),
    )


register(Check(
    "allreduce.reduce-scatter",
    criteria=_criteria("finished chunk"),
    cases=_cases,
    probe=_probe_reduce,
    judge=_judge_with(_reduced, "finished chunk"),
    hints=HINTS,
    forbids=FORBIDS,
    on_error=on_error,
    picture=_picture,
    summary=_summary,
))  # fmt: skip

register(Check(
    "allreduce.all-gather",
    criteria=_criteria("every chunk on every rank"),
    cases=_cases,
    probe=_probe_gather,
    judge=_judge_with(_gathered, "every chunk on every rank"),
    hints=HINTS,
    forbids=FORBIDS,
    on_error=on_error,
    picture=_picture,
    summary=_summary,
))  # fmt: skip

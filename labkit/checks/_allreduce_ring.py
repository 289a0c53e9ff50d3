"""Check "allreduce.ring": the whole all-reduce, any shape, dtype, layout and number of ranks."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit.checks._allreduce_hints import HINTS, on_error
from labkit.checks._allreduce_naive import judge_sum
from labkit.checks._allreduce_traffic import (
    DTYPES,
    FORBIDS,
    Observer,
    close,
    collective,
    in_flight,
    numbers,
    rows_of,
    sends,
    successor,
    total,
    traffic_picture,
)
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYOUTS = ("plain", "transposed", "column", "every other row")


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def run(covers: str, shape: tuple[int, ...], dtype: str = "float32", layout: str = "plain") -> dict[str, Any]:
        seed = int(torch.randint(1, 2**24, (), generator=generator))
        return {"covers": covers, "shape": list(shape), "dtype": dtype, "layout": layout, "seed": seed}

    sizes, dtypes, place = "all sizes and rank counts", "other dtypes", "in place"
    three = [run(place, (9, 14), layout="transposed"), run(place, (31, 5), layout="column"), run(dtypes, (53,), "int64"),
             run(dtypes, (53,), "bfloat16")]  # fmt: skip
    if strict:
        three += [run(place, (6, 11), layout="every other row"), run(place, (2, 3, 20)), run(dtypes, (37,), "bfloat16"),
                  run(dtypes, (41, 2), "float64", "transposed"), run(dtypes, (33,), "int32"), run(dtypes, (65,), "float16")]  # fmt: skip
    cases = [
        Case("4 ranks", {"runs": [run("", (1003,)), run("", (17, 30)), run("", (1003,))]}, world_size=4),
        Case("3 ranks", {"runs": three}, world_size=3, covers=(place, dtypes)),
        Case("4 ranks, few numbers", {"runs": [run(sizes, (n,)) for n in (7, 5, 3, 1)]}, world_size=4, covers=(sizes,)),
        Case("one rank", {"runs": [run(sizes, (6, 2))]}, world_size=1, covers=(sizes,)),
    ]  # fmt: skip
    if strict:
        cases += [
            Case("2 ranks", {"runs": [run(sizes, (1003,)), run(sizes, (1,)), run(sizes, (0,)), run(sizes, ())]}, world_size=2,
                 covers=(sizes,)),
            Case("5 ranks", {"runs": [run("", (11, 19))]}, world_size=5),
        ]  # fmt: skip
    return cases


def tensor_of(run: dict[str, Any], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's x in the layout asked for, and the memory around it (which nobody may touch)."""
    shape, layout, dtype = list(run["shape"]), run["layout"], DTYPES[run["dtype"]]
    if layout == "transposed":
        around = numbers(shape[::-1], dtype, run["seed"], rank)
        return around.t(), around
    if layout == "column":
        around = numbers(shape, dtype, run["seed"], rank)
        return around[:, 1], around
    if layout == "every other row":
        around = numbers([2 * shape[0], *shape[1:]], dtype, run["seed"], rank)
        return around[::2], around
    around = numbers(shape, dtype, run["seed"], rank)
    return around, around


def _probe(candidate: Any, case: Case) -> Observation:
    seen = Observation({"rows": []})
    with Observer() as observer:
        for index, run in enumerate(case.values["runs"]):
            x, around = tensor_of(run, dist.get_rank())
            shape = x.shape
            result, row = observer.run(candidate, x)
            fits = isinstance(result, torch.Tensor)
            row["kept_shape"] = x.shape == shape
            row["returned"] = None if result is None or fits else type(result).__name__
            row["same_memory"] = fits and result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            seen.values["rows"].append(row)
            seen.tensors |= {f"{index}": x.detach().reshape(shape).clone(), f"{index}/around": around}
            if fits:
                seen.tensors[f"{index}/returned"] = result.detach().clone()
    return seen


# -- judge --


def _judge(case: Case, seen: Observation) -> list[Finding]:
    findings: list[Finding] = []
    for index, run in enumerate(case.values["runs"]):
        found = _judge_run(case, seen, index)
        if run["covers"]:
            worst = next((one for one in found if not one.passed and one.hint), None)
            told = (worst.observed, worst.hint, worst.detail) if worst else ("so", None, "")
            found = [Finding(run["covers"], worst is None, "as with 1003 numbers on 4 ranks", *told)]
        findings += found
    return findings


def _judge_run(case: Case, seen: Observation, index: int) -> list[Finding]:
    run, rows = case.values["runs"][index], rows_of(seen, index)
    layout = "" if run["layout"] == "plain" else f" ({run['layout']})"
    where = f"{case.name}, {run['dtype']} of shape {tuple(run['shape'])}{layout}"
    pairs = [tensor_of(run, rank) for rank in range(case.world_size)]
    parts = [x.contiguous() for x, _ in pairs]
    flight = in_flight(rows, where)
    place = _judge_place(seen, index, pairs, parts, where)
    summed = judge_sum(seen, index, parts, where, case.world_size)
    if not summed.passed:
        summed = _told_better(summed, seen, index, parts, run["layout"])
    if not flight.passed:  # then what arrived is a matter of luck
        summed = Finding("sum", False, summed.expected, "cannot be relied on: see below")
        place = Finding("in place", False, place.expected, summed.observed)
    count = parts[0].numel()
    return [
        summed,
        successor(rows, where, quiet=not count),
        *_judge_messages(rows, count, parts[0].element_size(), where),
        _judge_bits(seen, index, where) if flight.passed else Finding("same bits", False, "", summed.observed),
        flight,
        place,
    ]


def _told_better(summed: Finding, seen: Observation, index: int, parts: list[torch.Tensor], layout: str) -> Finding:
    """A wrong sum that has a clearer reason: the right one is elsewhere, or only the last numbers are wrong."""
    expected, one = total(parts), seen.ranks[0]
    returned = one.tensors.get(f"{index}/returned")
    if returned is not None and returned.numel() == expected.numel() and close(returned.reshape(expected.shape), expected, parts):
        return Finding("sum", False, summed.expected, summed.observed, "copy-back", "What you return holds the sum, x does not.")
    if layout != "plain" and summed.hint == "nothing":
        detail = f"Nothing has changed in x, which is not contiguous ({layout})."
        return Finding("sum", False, summed.expected, summed.observed, "copy-back", detail)
    flat, wanted = one.tensors[f"{index}"].reshape(-1), expected.reshape(-1)
    right = [close(flat[i : i + 1], wanted[i : i + 1], [part.reshape(-1) for part in parts]) for i in range(len(flat))]
    tail = len(right) - right.index(False) if False in right else 0
    if 0 < tail < min(len(seen.ranks), len(right)) and sum(right) == len(right) - tail:
        detail = f"Right but for the last {tail} of {len(right)} numbers."
        return Finding("sum", False, summed.expected, summed.observed, "remainder", detail)
    return summed


def _judge_messages(rows: list[dict[str, Any]], count: int, itemsize: int, where: str) -> list[Finding]:
    """2(W - 1) messages (empty ones may be left out), and 2S less two chunks of bytes, whichever chunks have the larger size."""
    ranks = len(rows)
    most = 2 * (ranks - 1)
    low, high = most * (count // ranks) * itemsize, most * math.ceil(count / ranks) * itemsize
    filled = math.ceil(count / math.ceil(count / ranks)) if count else 0
    fewest = max(0, 2 * (filled - 1)) if ranks > 1 else 0
    messages = f"{most} per rank" if fewest == most else f"{most} per rank (less the empty ones)"
    volume = f"{low} bytes" if low == high else f"{low} to {high} bytes"
    called = collective(rows)
    if called:
        told = f"{called} was called"
        return [Finding("messages", False, messages, told, "collective"), Finding("bytes", False, volume, told, "collective")]
    findings = [Finding("messages", True, messages, str(len(sends(rows[0])))),
                Finding("bytes", True, volume, str(sum(n for _, n in sends(rows[0]))))]  # fmt: skip
    for rank, row in enumerate(rows):
        mine = sends(row)
        sent = sum(nbytes for _, nbytes in mine)
        if not low <= sent <= high and findings[1].passed:
            wide = len(mine) == most and 2 * low <= sent <= 2 * high
            hint = "wide" if wide else "whole" if sent > high else "too-few"
            findings[1] = Finding("bytes", False, volume, f"{where}: rank {rank} sends {sent} bytes", "silent" if not sent else hint)
        if not fewest <= len(mine) <= most and findings[0].passed:
            hint = "alone" if ranks == 1 else "too-many" if len(mine) > most else "too-few"
            findings[0] = Finding("messages", False, messages, f"{where}: rank {rank} sends {len(mine)} messages", hint)
    if not findings[0].passed and not findings[1].passed:  # the bytes say more
        findings[0] = Finding("messages", False, messages, findings[0].observed)
    return findings


def _judge_bits(seen: Observation, index: int, where: str) -> Finding:
    first = seen.ranks[0].tensors[f"{index}"]
    for rank, one in enumerate(seen.ranks):
        other = one.tensors[f"{index}"]
        if other.shape != first.shape or not torch.equal(other, first):
            return Finding("same bits", False, "equal on all ranks", f"{where}: ranks 0 and {rank} differ", "bits")
    return Finding("same bits", True, "equal on all ranks", "equal")


def _judge_place(seen: Observation, index: int, pairs: list[Any], parts: list[torch.Tensor], where: str) -> Finding:
    """x itself holds the sum, what is returned is x (or nothing), and the memory around x is as it was."""
    name, expected = "in place", "x holds the sum; returns x or nothing"
    total_ = total(parts)
    for rank, one in enumerate(seen.ranks):
        row, returned = one.values["rows"][index], one.tensors.get(f"{index}/returned")
        if returned is None and row["returned"] is not None:
            return Finding(name, False, expected, f"{where}: returned a {row['returned']}", "shape")
        if not row["kept_shape"]:
            return Finding(name, False, expected, f"{where}: x has another shape now", "shape")
        x = one.tensors[f"{index}"]
        if returned is not None:
            if returned.shape != x.shape or returned.dtype != x.dtype:
                told = f"{where}: returned shape {tuple(returned.shape)}, {str(returned.dtype).removeprefix('torch.')}"
                return Finding(name, False, expected, told, "shape")
            if not close(x, total_, parts) and close(returned, total_, parts):
                return Finding(name, False, expected, f"{where}: the sum is in another tensor", "copy-back")
            if not row["same_memory"] and x.numel():
                return Finding(name, False, expected, f"{where}: returned a tensor of other memory", "copy-back")
        given, around = pairs[rank]
        before, after = around.clone(), one.tensors[f"{index}/around"].clone()
        inside = [tensor.as_strided(given.shape, given.stride(), given.storage_offset()) for tensor in (before, after)]
        if close(x, total_, parts) and not torch.equal(inside[1], x):
            return Finding(name, False, expected, f"{where}: x lies in other memory than before", "copy-back")
        for tensor in inside:
            tensor.zero_()
        if not torch.equal(before, after):
            return Finding(name, False, expected, f"{where}: numbers beside x have changed", "shape")
    return Finding(name, True, expected, "so")


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    return traffic_picture(rows_of(seen, 0), f"Your messages: {case.name}") if case.covers is None else None


def _summary(case: Case, seen: Observation) -> str | None:
    if case.covers is not None:
        return None
    sent = sends(rows_of(seen, 0)[0])
    size = math.prod(case.values["runs"][0]["shape"]) * DTYPES[case.values["runs"][0]["dtype"]].itemsize
    return f"{len(sent)} messages and {sum(nbytes for _, nbytes in sent) / size:.3f} times the tensor sent per rank, same bits everywhere"


register(Check(
    "allreduce.ring",
    criteria=(
        Criterion("sum", "numbers", 1, "recomputed"),
        Criterion("one successor", "technique", 0.25, "wire"),
        Criterion("messages", "technique", 0.5, "wire"),
        Criterion("bytes", "technique", 0.5, "wire"),
        Criterion("same bits", "cost", 0.25, "recomputed"),
        Criterion("buffers in flight", "cost", 0.25),
        Criterion("in place", "cost", 0.5, "recomputed"),
        Criterion("all sizes and rank counts", "cost", 0.5, "recomputed"),
        Criterion("other dtypes", "cost", 0.25, "recomputed"),
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

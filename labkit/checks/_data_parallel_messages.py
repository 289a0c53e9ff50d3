"""The judge's side of wrappers' messages: how many all-reduces a step makes, how large they are, and when they start."""

import math
from typing import Any

from labkit.checks._core import Finding, Observation
from labkit.checks._data_parallel_nets import build, trainable

Run = dict[str, Any]  # as in _data_parallel_steps


def reduced(row: dict[str, Any]) -> list[int]:
    """Bytes of each all-reduce of a step, in order."""
    return [payload for kind, payload, _ in row["rows"] if kind == "all_reduce"]


def bucket_limits(net: str, cap: int) -> tuple[int, int, int, int]:
    """(fewest, most all-reduces per step, bytes that one may hold, bytes of all gradients)."""
    sizes = [(p.nbytes, p.dtype) for p in trainable(net).values()]
    total, largest = sum(size for size, _ in sizes), max(size for size, _ in sizes)

    def greedy(order: list[Any]) -> int:
        count, room, dtype = 0, -1, None
        for size, kind in order:
            if size > room or kind != dtype:
                count, room, dtype = count + 1, cap, kind
            room -= size
        return count

    return math.ceil(total / (cap + largest)), max(greedy(sizes), greedy(sizes[::-1])) + 1, cap + largest, total


def judge_buckets(run: Run, seen: Observation, index: int, where: str) -> list[Finding]:
    """How many all-reduces a step makes, how large they are, and their sum."""
    fewest, most, largest, total = bucket_limits(run["net"], run["cap"])
    wanted = f"{fewest} to {most} all-reduces of at most {largest} bytes"
    volume, alone = f"{total} bytes", len(seen.ranks) == 1
    known = {"all_reduce", "wait"}
    if list(build(run["net"], 0, 0).buffers()):
        known.add("broadcast")  # of buffers before every forward, as PyTorch's does it
    found = [Finding("buckets", True, wanted, ""), Finding("bytes", True, volume, "")]
    for step in range(len(run["steps"])):
        for rank, one in enumerate(seen.ranks):
            row = one.values["rows"][index]["steps"][step]
            place, sizes = f"{where}, step {step + 1}, rank {rank}", reduced(row)
            if alone and not sizes:
                continue
            others = {kind for kind, *_ in row["rows"]} - known
            more = sum(sizes) > total * 1.01 + 8 * len(sizes)  # a flag in each is nobody's mistake
            why_more = {"frozen layer": "frozen", "tied weights": "twice"}.get(run["net"], "bytes-more")
            told, hint = f"{place}: {', '.join(sorted(others)) or 'nothing'} is sent", "kind" if sizes else "silent"
            if sizes and not (others and step):  # in a first step ranks may agree on something
                told, hint = f"{place}: {len(sizes)}, of {max(sizes)} bytes", None
                if len(sizes) > most:
                    hint = "frozen" if run["net"] == "frozen layer" else "too-many"
                elif len(sizes) < fewest or max(sizes) > largest + 8:
                    hint = why_more if more else "too-few"
            if hint and found[0].passed:
                found[0] = Finding("buckets", False, wanted, told, hint)
            if (more or sum(sizes) < total) and found[1].passed:
                found[1] = Finding("bytes", False, volume, f"{place}: {sum(sizes)} bytes", why_more if more else "bytes-less")
    sizes = reduced(seen.ranks[0].values["rows"][index]["steps"][-1])
    return [one if not one.passed else Finding(one.criterion, True, one.expected, text)
            for one, text in zip(found, (str(len(sizes)), f"{sum(sizes)} bytes"), strict=True)]  # fmt: skip


def blocks(early: list[Any]) -> bool:
    """Whether anybody waits in these first messages of a step, once an all-reduce has started (before, it is for something else)."""
    first = next((number for number, (kind, *_) in enumerate(early) if kind == "all_reduce"), len(early))
    return any(kind == "wait" or kind == "all_reduce" and not asynchronous for kind, _, asynchronous in early[first:])


def judge_overlap(name: str, run: Run, seen: Observation, index: int, where: str) -> Finding:
    """All-reduces start before the last gradient is there, and nobody waits in between. A first step may be used to look around."""
    expected, counts = "all-reduces start before the last gradient, none is waited for", []
    for step in range(1, len(run["steps"])):
        for rank, one in enumerate(seen.ranks):
            row, place = one.values["rows"][index]["steps"][step], f"{where}, step {step + 1}, rank {rank}"
            early = row["rows"][: row["at_last"]]
            started, count = sum(kind == "all_reduce" for kind, *_ in early), len(reduced(row))
            counts.append((started, count))
            if blocks(early):
                return Finding(name, False, expected, f"{place}: backward waits for a message", "blocks")
            if not started:
                return Finding(name, False, expected, f"{place}: none of {count} starts before the last gradient", "late")
            if started < (count - 1) // 2:
                return Finding(name, False, expected, f"{place}: {started} of {count} start before the last gradient", "held")
    started, count = min(counts)
    return Finding(name, True, expected, f"{started} of {count} start before the last gradient")

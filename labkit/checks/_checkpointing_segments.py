"""The segments that a run was cut into, read off the order in which its layers ran again."""

import math
from itertools import pairwise
from typing import Any

from labkit.checks._core import Finding


def lengths(calls: list[int]) -> list[int]:
    """Lengths of the stretches of consecutive layers in the order in which they ran."""
    runs: list[int] = []
    for previous, index in pairwise([-2, *calls]):
        if index == previous + 1 and runs:
            runs[-1] += 1
        else:
            runs.append(1)
    return runs


def plain_allowed(depth: int, segments: int) -> int:
    """Layers of one segment that may run plainly: `torch.utils.checkpoint.checkpoint_sequential` leaves all of the rest in its last one."""
    return max(math.ceil(depth / segments), depth - (segments - 1) * (depth // segments))


def judge_segments(rows: list[dict[str, Any]]) -> Finding:
    """None longer than the average rounded up; the layers that never run again are one segment more.

    Lengths rounded up or down are as good where k does not divide n, though they make fewer or more segments than k: only a
    number of another kind (k taken for a length, every layer a segment) fails.
    """
    name = "segments"
    for row in rows:
        depth, segments = row["depth"], row["segments"]
        again = lengths(row["backward"])
        tail = depth - len(set(row["backward"]))
        longest = math.ceil(depth / segments)
        expected = f"{depth} layers in {segments}: about {segments} segments, none longer than {longest}"
        told = f"{depth} layers in {segments}: " + (", ".join(map(str, reversed(again))) or "no segment ran again")
        told += f", and {tail} run once" if tail and again else ""
        if max(again, default=0) > longest:
            return Finding(name, False, expected, told[:120], "remainder")
        if tail > plain_allowed(depth, segments):
            return Finding(name, False, expected, told[:120], "plain-segments" if again else "plain")
        if not segments / 2 <= len(again) + (tail > 0) <= 2 * segments:
            return Finding(name, False, expected, told[:120], "count")
    expected = "about as many as asked for, none longer than layers / segments, rounded up"
    return Finding(name, True, expected, f"so in {len(rows)} splits" if len(rows) > 1 else "so")

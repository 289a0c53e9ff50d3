"""Thin a step function to screen resolution without losing its extremes.

A training step changes live memory thousands of times a second; a chart is about a thousand pixels wide. Of all changes
that fall into one pixel column only three can be seen: the lowest, the highest and the last, which says where the line
goes on. Keeping those, and nothing else, draws the same picture. Thinning a thinned curve again keeps them too, so a
live curve can be thinned as it grows.
"""

from __future__ import annotations

import numpy as np


def keep(seconds: np.ndarray, total: np.ndarray, columns: int) -> np.ndarray:
    """Indices of the samples to draw: per time bucket the lowest, the highest and the last, in order.

    seconds : (n,) non-decreasing; total : (n,) the height of the curve; columns : number of equal time buckets
    The first sample always stays. Curves of fewer than ``3 * columns`` samples stay whole.
    """
    n = len(seconds)
    if n <= 3 * columns:
        return np.arange(n)
    span = float(seconds[-1] - seconds[0]) or 1.0
    bucket = np.minimum(((seconds - seconds[0]) * (columns / span)).astype(np.int64), columns - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    sizes = np.diff(starts, append=n)
    chosen = np.zeros(n, dtype=bool)
    chosen[0] = True
    chosen[starts + sizes - 1] = True
    for extreme in (np.minimum, np.maximum):
        hit = np.flatnonzero(total == np.repeat(extreme.reduceat(total, starts), sizes))
        first = np.flatnonzero(np.diff(bucket[hit], prepend=-1))  # one of equals is enough
        chosen[hit[first]] = True
    return np.flatnonzero(chosen)


def phase_strip(phases: list[tuple[str, float, float]], end: float, cells: int = 240) -> list[tuple[str, float, float]]:
    """Phases as (name, start s, end s) for the strip under a chart, at most about `cells` of them.

    phases : in order of their starts; those of one name do not overlap
    Few phases stay exact. Of many, each of `cells` equal slices of time shows the phase that fills most of it; equal
    neighbours merge.
    """
    if len(phases) <= cells or end <= 0:
        return phases
    # Inner phases begin after the outer ones: latest first, so that argmax gives a tie to the innermost.
    names = list(dict.fromkeys(name for name, _, _ in phases))[::-1]
    edges = np.linspace(0.0, end, cells + 1)
    filled = np.zeros((len(names), cells))
    for row, name in enumerate(names):
        spans = np.array([(start, stop) for other, start, stop in phases if other == name])
        # Seconds of this phase before each edge; their differences are the seconds inside each slice.
        lengths = spans[:, 1] - spans[:, 0]
        before = np.concatenate([[0.0], np.cumsum(lengths)])[np.searchsorted(spans[:, 0], edges)]
        before -= np.maximum(0.0, _running_end(spans, edges) - edges)
        filled[row] = np.diff(before)
    winner = np.where(filled.max(axis=0) > 1e-12, filled.argmax(axis=0), -1)
    starts = np.flatnonzero(np.diff(winner, prepend=-2))
    stops = np.append(starts[1:], cells)
    return [
        (names[winner[a]], float(edges[a]), float(edges[b]))
        for a, b in zip(starts, stops, strict=True)
        if winner[a] >= 0
    ]


def _running_end(spans: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """For each edge, the end of the last span that began before it; the edge itself where none did."""
    last = np.searchsorted(spans[:, 0], edges) - 1
    return np.where(last >= 0, spans[np.maximum(last, 0), 1], edges)

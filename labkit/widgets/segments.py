"""Lab 02's interactive view: segments against peak memory, and memory over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.figures import Picture, u_curve_and_memory
from labkit.widgets.explore import explore


def explore_segments(
    recordings: Mapping[int, Any], *, baseline: Any = None, title: str = "Segments and memory"
) -> None:
    """One slider over recordings made before: the U-curve of peaks with the choice ringed, its memory over time beside
    it.

    recordings : number of segments -> Recording, each made once (`{k: record(k) for k in (1, 2, 4, 8, ...)}`)
    baseline   : Recording of the plain run, a dashed line

    It starts at the least peak, and that picture stays in a saved notebook.
    """

    def draw(segments: int) -> Picture:
        return u_curve_and_memory(recordings, segments, baseline=baseline)

    least = min(recordings, key=lambda segments: recordings[segments].peak_bytes)
    explore({"segments": sorted(recordings)}, draw, start={"segments": least}, title=title)

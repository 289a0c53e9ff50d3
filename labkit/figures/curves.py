"""Peak memory against a choice: the U-curve of segments, alone or beside the memory over time of one choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from labkit.figures.colours import BASELINE, COLOURS, LINES
from labkit.figures.memory import draw_memory
from labkit.figures.picture import INK, Picture, new_picture, quiet_legend, styled
from labkit.figures.readers import describe
from labkit.figures.units import byte_unit, human_bytes


@styled
def u_curve(
    peaks: Mapping[int, float],
    *,
    x_label: str = "segments",
    baseline_bytes: float | None = None,
    predicted: Mapping[int, float] | None = None,
    marked: int | None = None,
    title: str = "",
) -> Picture:
    """Measured peak against a choice, its minimum marked, with the plain run as a line and a prediction beside it.

    peaks          : choice -> peak bytes, as measured (`{k: recording.peak_bytes}`)
    baseline_bytes : peak of the plain run, a dashed line
    predicted      : choice -> bytes: one point (a learner's prediction) or a whole curve
    marked         : a choice to ring, such as the one a control stands at
    """
    picture, axes = new_picture(6.4, 3.6)
    draw_u_curve(axes, peaks, x_label, baseline_bytes, predicted, marked)
    axes.set_title(title, pad=24)
    picture.alt = describe_u_curve(peaks, x_label, baseline_bytes, title)
    return picture


def draw_u_curve(
    axes: Axes,
    peaks: Mapping[int, float],
    x_label: str,
    baseline_bytes: float | None = None,
    predicted: Mapping[int, float] | None = None,
    marked: int | None = None,
) -> None:
    """Draw `u_curve` into `axes`."""
    choices = sorted(peaks)
    top = max([*peaks.values(), baseline_bytes or 0, *(predicted or {}).values()]) * 1.15
    name, size = byte_unit(top)
    heights = [peaks[choice] / size for choice in choices]
    axes.plot(choices, heights, "-o", color=LINES[0], ms=4.5, lw=1.8, label="measured peak", zorder=3)
    if predicted:
        axes.plot(
            list(predicted),
            [value / size for value in predicted.values()],
            "D" if len(predicted) == 1 else ":",
            color=LINES[1],
            ms=6,
            label="predicted",
            zorder=4,
        )
    if baseline_bytes:
        axes.axhline(
            baseline_bytes / size, color=BASELINE, ls="--", lw=1.2, label=f"plain {human_bytes(baseline_bytes)}"
        )
    best = min(choices, key=peaks.__getitem__)
    axes.annotate(
        f"least: {human_bytes(peaks[best])} at {best}",
        (best, peaks[best] / size),
        (0, -18 if peaks[best] > 0.12 * top else 18),  # above the point where the axis leaves no room below it
        textcoords="offset points",
        ha="center",
        weight="bold",
        arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.8},
        zorder=5,
    )
    if marked is not None and marked in peaks:
        axes.plot([marked], [peaks[marked] / size], "o", ms=13, mfc="none", mec=COLOURS["activations"], mew=2, zorder=5)
    if choices[0] > 0 and choices[-1] / choices[0] >= 16:
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            choices if len(choices) <= 10 else choices[::2],
            [str(c) for c in (choices if len(choices) <= 10 else choices[::2])],
        )
        axes.minorticks_off()
    axes.set(xlabel=x_label, ylabel=f"peak memory ({name})", ylim=(0, top / size))
    quiet_legend(axes, ncols=3)


def describe_u_curve(peaks: Mapping[int, float], x_label: str, baseline_bytes: float | None, title: str) -> str:
    """The curve in words: its least point, both ends, the plain run."""
    choices = sorted(peaks)
    best = min(choices, key=peaks.__getitem__)
    ends = " and ".join(f"{human_bytes(peaks[c])} at {c}" for c in (choices[0], choices[-1]))
    plain = f"; the plain run peaks at {human_bytes(baseline_bytes)}" if baseline_bytes else ""
    return f"{title or 'Peak memory'} against {x_label}: least {human_bytes(peaks[best])} at {best}, {ends}{plain}."


@styled
def u_curve_and_memory(
    recordings: Mapping[int, Any], choice: int, *, x_label: str = "segments", baseline: Any = None, title: str = ""
) -> Picture:
    """Two panels for an interactive view: the U-curve with `choice` ringed, and the memory over time of that choice's
    recording.

    recordings : choice -> Recording, all made already; baseline : Recording of the plain run
    """
    picture, (left, right) = new_picture(10.4, 3.6, ncols=2, width_ratios=(2, 3))
    peaks = {key: recording.peak_bytes for key, recording in recordings.items()}
    plain = baseline.peak_bytes if baseline is not None else None
    draw_u_curve(left, peaks, x_label, plain, marked=choice)
    # One scale for every choice, so that the eye compares heights and not numbers.
    draw_memory(right, recordings[choice], top=max([*peaks.values(), plain or 0]) * 1.15)
    left.set_title(title, pad=24)
    right.set_title(f"{x_label}: {choice}", pad=24)
    picture.alt = f"{describe_u_curve(peaks, x_label, plain, title)} At {choice}: {describe(recordings[choice])}"
    return picture

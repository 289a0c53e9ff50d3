"""Lab 03's pictures: sizes of numbers with a format's range over them, and the staircase that rounding makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from labkit.figures.colours import BASELINE, LINES
from labkit.figures.picture import Picture, new_picture, quiet_legend, styled

_ZERO, _SUBNORMAL, _INFINITE = "#f4c7b0", "#fbeede", "#d9d9d9"
# By kind, the same in every picture; others take what is left, in order.
_COLOURS = dict(zip(("weights", "activations", "logit gradients", "activation gradients", "weight gradients"), LINES, strict=False))
LOWEST, HIGHEST = -50.0, 26.0  # log2 of the sizes shown, the same in every picture, so that the eye compares places


@styled
def value_histogram(
    kinds: Mapping[str, Any],
    limits: Mapping[str, float],
    *,
    scale: float = 1.0,
    lost: Mapping[str, float] | None = None,
    format_name: str = "fp16",
    title: str = "",
) -> Picture:
    """Histograms of log2 of size, a strip per kind, with a format's range behind them.

    kinds  : name -> tensor or array of numbers; zeros are left out, `scale` multiplies all of them
    limits : of the format: "smallest", "smallest_normal" and "infinite_from"
    lost   : name -> share that becomes zero, written beside its strip
    """
    picture, axes = new_picture(8.4, 0.7 + 0.72 * len(kinds), nrows=len(kinds), sharex=True, squeeze=False)
    zero, normal, infinite = (
        float(numpy.log2(limits[key])) - (key == "smallest") for key in ("smallest", "smallest_normal", "infinite_from")
    )
    edges = numpy.arange(LOWEST, HIGHEST + 0.5, 0.5)
    told = []
    for number, (strip, (name, values)) in enumerate(zip(axes[:, 0], kinds.items(), strict=True)):
        sizes = numpy.abs(numpy.asarray(values, dtype=numpy.float64).ravel()) * scale
        there = numpy.log2(sizes[sizes > 0])
        heights, _ = numpy.histogram(numpy.clip(there, LOWEST, HIGHEST), edges)
        heights = heights / max(len(there), 1)
        strip.axvspan(LOWEST, max(zero, LOWEST), color=_ZERO, lw=0)
        strip.axvspan(max(zero, LOWEST), max(normal, LOWEST), color=_SUBNORMAL, lw=0)
        strip.axvspan(min(infinite, HIGHEST), HIGHEST, color=_INFINITE, lw=0)
        strip.stairs(heights, edges, fill=True, color=_COLOURS.get(name, LINES[-1 - number % len(LINES)]), alpha=0.85)
        if len(there):  # bars of a few numbers are too low to see, and one is enough for an infinity
            ends = numpy.clip([there.min(), there.max()], LOWEST, HIGHEST)
            strip.plot(ends, [0.0, 0.0], color="#333333", lw=2.2, solid_capstyle="butt", marker="|", ms=9, clip_on=False, zorder=4)
        share = f"{lost[name]:.2%} to 0" if lost and name in lost else ""
        strip.text(0.995, 0.9, share, transform=strip.transAxes, ha="right", va="top", weight="bold", fontsize=8.5)
        strip.set_ylabel(name.replace(" ", "\n"), rotation=0, ha="right", va="center", fontsize=8.5)
        strip.set(xlim=(LOWEST, HIGHEST), ylim=(0, max(heights.max(), 1e-9) * 1.15), yticks=[])
        strip.grid(False)
        middle = f"{numpy.median(there):.0f}" if len(there) else "none"
        span = f" (2^{there.min():.0f} to 2^{there.max():.0f})" if len(there) else ""
        told.append(f"{name}: median size 2^{middle}{span}" + (f", {share}" if share else ""))
    top = axes[0, 0].get_xaxis_transform()
    for place, label in (((LOWEST + zero) / 2, "becomes 0"), ((zero + normal) / 2, "fewer bits"), ((infinite + HIGHEST) / 2, "infinite")):
        if LOWEST + 2 < place < HIGHEST:
            axes[0, 0].text(place, 1.03, label, transform=top, ha="center", va="bottom", fontsize=8, color="#555555")
    ticks = numpy.arange(-48, HIGHEST, 8)
    axes[-1, 0].set_xticks(ticks, [f"$2^{{{int(tick)}}}$" for tick in ticks])
    scaled = f", scale {scale:,.0f}" if scale != 1 else ""
    axes[-1, 0].set_xlabel(f"size of the number{scaled}")
    heading = title or f"{format_name}{scaled}"
    picture.suptitle(heading, x=0.01, ha="left", fontsize=10.5, weight="bold")
    picture.alt = (
        f"{heading}: {format_name} turns sizes below 2^{zero:.0f} into 0, keeps fewer bits below 2^{normal:.0f}, "
        f"and is infinite from 2^{infinite:.1f}. " + "; ".join(told) + "."
    )
    return picture


@styled
def staircase(values: Any, rounded: Mapping[str, Any], *, title: str = "") -> Picture:
    """What roundings make of a line of numbers. values : in order; rounded : name -> what each became, of the same length."""
    picture, axes = new_picture(6.8, 3.4)
    line = numpy.asarray(values, dtype=numpy.float64)
    axes.plot(line, line, color=BASELINE, lw=0.8, ls=":", label="as they are")
    finite = {}
    for number, (name, steps) in enumerate(rounded.items()):
        heights = numpy.asarray(steps, dtype=numpy.float64)
        finite[name] = numpy.where(numpy.isfinite(heights), heights, numpy.nan)
        axes.plot(line, finite[name], color=LINES[number % len(LINES)], lw=(3.2, 1.4)[number % 2], alpha=(0.5, 1.0)[number % 2], label=name)
    span = float(line.max() - line.min())
    axes.set(xlabel="number", ylabel="rounded to the format", ylim=(line.min() - 0.05 * span, line.max() + 0.05 * span))
    axes.set_title(title, pad=24)
    quiet_legend(axes, ncols=1 + len(rounded))
    names = list(rounded)
    apart = int((numpy.nan_to_num(finite[names[0]], nan=-1e9) != numpy.nan_to_num(finite[names[-1]], nan=-1e9)).sum())
    picture.alt = f"{title}: {names[-1]} and {names[0]} differ at {apart} of {len(line)} numbers."
    return picture

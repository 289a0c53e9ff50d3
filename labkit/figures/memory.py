"""Memory over time: one recording by category, or several as lines over a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.transforms import blended_transform_factory

from labkit.figures.colours import BASELINE, COLOURS, LINES, PHASES, STACK
from labkit.figures.picture import INK, Picture, new_picture, quiet_legend, styled
from labkit.figures.readers import card_samples, describe, link_words, phase_at, phases_of, thinned
from labkit.figures.units import byte_unit, human_bytes, human_seconds, time_unit

_HALO = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}


@styled
def memory_over_time(recording: Any, title: str = "", budget_bytes: int | None = None) -> Picture:
    """Live memory by category, stacked, against time; the peak marked, phases along the axis, a budget as a line.

    recording : a `Recording`; budget_bytes : drawn as a dashed line
    """
    picture, axes = new_picture()
    draw_memory(axes, recording, budget_bytes)
    axes.set_title(title, pad=24)
    _name_link(axes, link_words(recording))
    picture.alt = describe(recording, title, budget_bytes)
    return picture


def draw_memory(axes: Axes, recording: Any, budget_bytes: int | None = None, top: float | None = None) -> None:
    """Draw `memory_over_time` into `axes`. `top`: bytes at the top of the axis, to keep it still between pictures."""
    seconds, by_category = thinned(recording)
    total = sum(by_category.values(), np.zeros(len(seconds)))
    peak = float(total.max(initial=0.0))
    card = card_samples(recording.header["samples"])
    top = top or max([peak, budget_bytes or 0, *(reserved for _, _, reserved in card)]) * 1.22 or 1.0
    (b_name, b_size), (s_name, s_size) = byte_unit(top), time_unit(float(seconds[-1]) if len(seconds) else 1.0)
    times, floor = seconds / s_size, np.zeros(len(seconds))
    for category in STACK:
        values = by_category[category]
        if not values.any():
            continue
        ceiling = floor + values
        axes.fill_between(
            times, floor / b_size, ceiling / b_size, step="post", color=COLOURS[category], lw=0, label=category
        )
        axes.step(times, ceiling / b_size, where="post", color="white", lw=0.5)
        floor = ceiling
    axes.step(times, total / b_size, where="post", color=INK, lw=0.8)
    for name, column, style in (("allocated", 1, "-"), ("reserved", 2, ":")):
        if card:
            heights = [sample[column] / b_size for sample in card]
            axes.plot([sample[0] / s_size for sample in card], heights, style, color=INK, lw=1.1, label=f"card: {name}")
    end = float(times[-1]) if len(times) else 1.0
    axes.set(xlim=(0, end or 1.0), ylim=(0, top / b_size), xlabel=f"time ({s_name})", ylabel=f"live memory ({b_name})")
    if len(times):
        at = float(seconds[total.argmax()])
        phase = phase_at(phases_of(recording), at)
        label = f"peak {human_bytes(peak)}{f' · {phase}' if phase else ''}"
        _mark_peak(axes, at / s_size, peak / b_size, label, end)
    if budget_bytes:
        late_peak = len(times) > 0 and float(times[total.argmax()]) > 0.6 * end
        _limit(axes, budget_bytes / b_size, f"budget {human_bytes(budget_bytes)}", at_left=late_peak)
    if axes.collections:
        quiet_legend(axes, ncols=len(STACK))
    _phase_strip(axes, phases_of(recording, 60), s_size, end)


def _name_link(axes: Axes, words: str) -> None:
    """A run on a modelled wire says so in its picture: its times are partly the model's."""
    if words:
        axes.annotate(words, (1, 1), (0, 20), xycoords="axes fraction", textcoords="offset points", ha="right", fontsize=8, color=INK)


def _mark_peak(axes: Axes, time: float, height: float, label: str, end: float) -> None:
    axes.plot([time], [height], marker="v", color=INK, ms=6, mec="white", mew=0.8, zorder=6, clip_on=False)
    right = time > 0.7 * end
    axes.annotate(
        label,
        (time, height),
        (-8 if right else 8, 5),
        textcoords="offset points",
        ha="right" if right else "left",
        weight="bold",
        bbox=_HALO,
        zorder=7,
    )


def _limit(axes: Axes, height: float, text: str, at_left: bool = False) -> None:
    axes.axhline(height, color="#b00020", lw=1.1, ls=(0, (5, 3)), zorder=5)
    place = blended_transform_factory(axes.transAxes, axes.transData)
    axes.text(
        0.005 if at_left else 0.995,
        height,
        text,
        transform=place,
        color="#b00020",
        ha="left" if at_left else "right",
        va="bottom",
        fontsize=8.5,
        bbox=_HALO,
        zorder=6,
    )


def _phase_strip(axes: Axes, phases: list[tuple[str, float, float]], unit: float, end: float) -> None:
    """A coloured strip under the axes; a name is written where it fits, and in a key where it fits nowhere."""
    order = list(dict.fromkeys(name for name, _, _ in phases))
    place = blended_transform_factory(axes.transData, axes.transAxes)
    unwritten = {}
    for name, start, stop in phases:
        a, b = start / unit, min(stop / unit, end)
        colour = PHASES[order.index(name) % len(PHASES)]
        axes.axvspan(a, b, color=colour, alpha=0.08, lw=0, zorder=0)
        strip = Rectangle((a, -0.085), b - a, 0.07, transform=place, color=colour, lw=0, clip_on=False)
        axes.add_patch(strip)
        fits = (b - a) / (end or 1.0) > 0.0095 * len(name) + 0.008
        if fits:
            axes.text((a + b) / 2, -0.052, name, transform=place, color="white", ha="center", va="center", fontsize=7.5)
        unwritten[name] = None if fits else unwritten.get(name, strip)
    if phases:
        axes.tick_params(axis="x", length=0, pad=18)
    key = {name: patch for name, patch in unwritten.items() if patch is not None}
    if key and len(order) <= len(PHASES):
        categories = axes.get_legend()
        quiet_legend(axes, handles=list(key.values()), labels=list(key), ncols=len(key), loc="upper right",
                     bbox_to_anchor=(1.0, -0.15), handleheight=0.5)  # fmt: skip
        axes.add_artist(categories)  # a second legend would else replace the first


@styled
def compare_memory(
    recordings: Mapping[str, Any],
    baseline: str | None = None,
    title: str = "",
    budget_bytes: int | None = None,
    born: bool = False,
) -> Picture:
    """Total live bytes of several recordings over time, each from its own start; `baseline` names the one drawn in
    grey.

    recordings : name -> Recording. born : count only what was allocated inside each recording.
    """
    picture, axes = new_picture()
    curves = {name: recording.timeline(born=born)[1:] for name, recording in recordings.items()}
    peaks = {name: float(np.max(live, initial=0)) for name, (_, live) in curves.items()}
    end = max((float(s[-1]) for s, _ in curves.values() if len(s)), default=1.0) or 1.0
    top = max([*peaks.values(), budget_bytes or 0]) * 1.2 or 1.0
    (b_name, b_size), (s_name, s_size) = byte_unit(top), time_unit(end)
    colours = iter(LINES * len(curves))
    for name, (seconds, live) in curves.items():
        plain = name == baseline
        colour = BASELINE if plain else next(colours)
        label = f"{name}: peak {human_bytes(peaks[name])}"
        axes.step(
            np.asarray(seconds) / s_size,
            np.asarray(live) / b_size,
            where="post",
            label=label,
            color=colour,
            lw=1.2 if plain else 1.8,
            ls="--" if plain else "-",
            zorder=2 if plain else 3,
        )
        if len(live):
            at = int(np.argmax(live))
            axes.plot(
                [seconds[at] / s_size],
                [live[at] / b_size],
                marker="v",
                color=colour,
                ms=6,
                mec="white",
                mew=0.8,
                zorder=5,
            )
    if budget_bytes:
        _limit(axes, budget_bytes / b_size, f"budget {human_bytes(budget_bytes)}")
    axes.set(
        xlim=(0, end / s_size), ylim=(0, top / b_size), xlabel=f"time ({s_name})", ylabel=f"live memory ({b_name})"
    )
    axes.set_title(title, pad=24)
    link = link_words(*recordings.values())
    _name_link(axes, link)
    quiet_legend(axes, ncols=max(len(curves), 1))
    words = [
        f"{name}: peak {human_bytes(peaks[name])} in {human_seconds(float(s[-1]) if len(s) else 0.0)}"
        for name, (s, _) in curves.items()
    ]
    base = f", compared with {baseline}" if baseline else ""
    picture.alt = f"{title or 'Live memory over time'}{base}. " + "; ".join(words) + "."
    picture.alt += f" Messages took a {link}." if link else ""
    return picture

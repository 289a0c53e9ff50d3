"""Steps of data-parallel training beside each other: what every rank computes and what is on its wires, on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.patches import Patch, Rectangle

from labkit.figures.lanes import _draw, _legend
from labkit.figures.picture import FAINT, Picture, new_picture, quiet_legend, styled
from labkit.figures.tracks import lanes_of
from labkit.figures.units import human_bytes, human_seconds, time_unit

if TYPE_CHECKING:
    from labkit.recorder import Recording

_PALE, _BACKWARD = "#9cc5e0", "#0072b2"


@styled
def step_lanes(runs: Mapping[str, Sequence[Recording]], *, title: str) -> Picture:
    """One panel per run, a lane per rank in each; all panels share the time axis, which counts from the start of each step.

    runs : name -> one recording per rank. Work on top of each lane (forward and the optimizer pale, backward dark), waits hatched,
           the collectives on the wire below, numbered in the order in which they were sent.
    """
    rows = {name: lanes_of(recordings) for name, recordings in runs.items()}
    end = max(lane.end_s for lanes in rows.values() for lane in lanes)
    for lane in (lane for lanes in rows.values() for lane in lanes):
        few = len(lane.collectives) <= 12
        lane.collectives = [(start, stop, f"{number}" if few else "") for number, (start, stop, _) in enumerate(lane.collectives, 1)]
    unit, size = time_unit(end)
    heights = [0.62 * len(lanes) + 0.28 for lanes in rows.values()]
    picture, panels = new_picture(
        9.2, sum(heights) + 1.0, nrows=len(rows), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    simulated = any(lane.simulated for lanes in rows.values() for lane in lanes)
    colours = {"compute": _PALE, "backward": _BACKWARD}
    for (name, lanes), (axes,) in zip(rows.items(), panels, strict=True):
        for number, lane in enumerate(lanes):
            _draw(axes, lane, len(lanes) - 1 - number, colours, size, (0.0, end), labelled=True)
        axes.set(xlim=(0, end / size), ylim=(0, len(lanes)))
        axes.set_yticks([len(lanes) - 0.5 - number for number in range(len(lanes))], [f"rank {lane.rank}" for lane in lanes])
        axes.tick_params(axis="y", length=0)
        axes.grid(False)
        for border in range(1, len(lanes)):
            axes.axhline(border, color=FAINT, lw=0.8)
        axes.set_title(name, fontsize=8.5, loc="left", pad=24 if axes is panels[0, 0] else 4)
    _legend(panels[0, 0], [lane for lanes in rows.values() for lane in lanes], colours)
    panels[-1, 0].set_xlabel(f"time ({unit})")
    head = f"{title}{' (simulated wire)' if simulated else ''}"
    picture.suptitle(head, x=0.01, ha="left", weight="bold", fontsize=10.5)
    told = []
    for name, lanes in rows.items():
        lane = max(lanes, key=lambda lane: lane.end_s)
        first = min((start for start, *_ in lane.collectives), default=0.0)
        last = max((stop for _, stop, _ in lane.collectives), default=0.0)
        work = max((stop for _, stop in lane.compute.get("backward", [])), default=0.0)
        wire = f"{len(lane.collectives)} collectives on the wire from {human_seconds(first)} to {human_seconds(last)}, "
        wire = wire if lane.collectives else ""
        told.append(f"{name}: {wire}backward over after {human_seconds(work)}, step {human_seconds(lane.end_s)}")
    picture.alt = f"{head}. " + "; ".join(told) + "."
    return picture


@styled
def message_order(rows: Sequence[tuple[Sequence[Sequence[object]], int, int]], *, title: str) -> Picture:
    """The messages of one step in the order in which each rank posted them: in backward, with it, or after it.

    rows : one per rank: (messages as [kind, bytes, asynchronous], how many were posted before the last gradient, how many in backward)
    """
    picture, axes = new_picture(8.4, 1.0 + 0.42 * len(rows))
    most = max((sum(kind != "wait" for kind, *_ in messages) for messages, *_ in rows), default=0)
    told = []
    for rank, (messages, at_last, behind) in enumerate(rows):
        place = early = during = 0
        for number, (kind, nbytes, _) in enumerate(messages):
            if kind == "wait":
                continue
            early, during = early + (number < at_last), during + (at_last <= number < behind)
            colour = _BACKWARD if number < at_last else _PALE if number < behind else "#cc79a7"
            axes.add_patch(Rectangle((place + 0.03, rank - 0.36), 0.94, 0.72, facecolor=colour, edgecolor="white"))
            if most <= 24:
                axes.text(place + 0.5, rank, human_bytes(float(nbytes)), ha="center", va="center", fontsize=6.5,
                          color="black" if colour == _PALE else "white")  # fmt: skip
            place += 1
        told.append(f"rank {rank} starts {early} before its last gradient, {during} with it, {place - early - during} after backward")
    axes.set(xlim=(0, max(most, 1)), ylim=(len(rows) - 0.4, -0.6), xlabel="messages, in order")
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.grid(False)
    names = {"before the last gradient": _BACKWARD, "with the last gradient": _PALE, "after backward": "#cc79a7"}
    quiet_legend(axes, handles=[Patch(facecolor=colour, label=name) for name, colour in names.items()], ncols=3)
    axes.set_title(title, pad=24)
    picture.alt = f"{title}. " + "; ".join(told) + "."
    return picture

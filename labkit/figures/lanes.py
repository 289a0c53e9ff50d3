"""One lane per rank: what it computed, sent, received and waited for over time, and the memory of all below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.figures.colours import LINES, PHASES
from labkit.figures.picture import FAINT, INK, Picture, new_picture, quiet_legend, styled
from labkit.figures.readers import link_words
from labkit.figures.tracks import Lane, lanes_of
from labkit.figures.units import byte_unit, human_bytes, human_seconds, time_unit

MOST_RANKS = 16
_SEND, _RECEIVE, _COLLECTIVE, _WAIT = "#d55e00", "#009e73", "#cc79a7", "#ececec"
_WORK = (0.46, 0.44)  # bottom and height of each track within its lane
_OUT, _IN, _BOTH = (0.26, 0.16), (0.06, 0.16), (0.06, 0.36)


@styled
def lanes(
    recordings: Sequence[Any], title: str = "", start_s: float = 0.0, end_s: float | None = None, memory: bool = True
) -> Picture:
    """Draw the recordings of up to 16 ranks as lanes over one time axis.

    recordings : one `Recording` per rank, in order, as `run_ranks(..., record=True).recordings`; None for one that was killed
    start_s, end_s : the part of time to show, in seconds since the first recording began
    memory : draw each rank's live bytes below

    In a lane: work on top, by phase; waits hatched; below it what is on the wires, out (sends) over in (receives), collectives
    over both. Bars of a simulated link are its modelled times. Of real messages only calls that wait have a length; the launch of
    an asynchronous one is a tick. Raises ValueError for no recordings, or more than 16.
    """
    count = sum(recording is not None for recording in recordings)
    if not 1 <= count <= MOST_RANKS:
        raise ValueError(f"lanes takes the recordings of 1 to {MOST_RANKS} ranks, not {count}")
    rows = lanes_of(recordings)
    end = end_s if end_s is not None else max(lane.end_s for lane in rows)
    tall = max(0.34, min(0.62, 5.4 / len(rows)))
    heights = [tall * len(rows) + 0.5, 1.2] if memory else [1.0]
    picture, axes = new_picture(
        9.2, sum(heights) + 0.7 if memory else tall * len(rows) + 1.2, nrows=len(heights), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    above = axes[0, 0]
    (unit, size) = time_unit(end - start_s)
    kinds = list(dict.fromkeys(name for lane in rows for name in lane.compute))
    colours = {name: PHASES[number % len(PHASES)] for number, name in enumerate(kinds)}
    for number, lane in enumerate(rows):
        _draw(above, lane, len(rows) - 1 - number, colours, size, (start_s, end), labelled=len(rows) <= 6)
    above.set(xlim=(start_s / size, end / size), ylim=(0, len(rows)))
    above.set_yticks([len(rows) - 0.5 - number for number in range(len(rows))], [f"rank {lane.rank}" for lane in rows])
    above.tick_params(axis="y", length=0)
    above.grid(False)
    for border in range(1, len(rows)):
        above.axhline(border, color=FAINT, lw=0.8)
    head = link_words(*(recording for recording in recordings if recording is not None))
    above.set_title(title + (f"   ({head})" if title and head else head), pad=24)
    _legend(above, rows, colours)
    if memory:
        _memory(axes[1, 0], rows, size)
    axes[-1, 0].set_xlabel(f"time ({unit})")
    shown = "" if end_s is None and not start_s else f", shown from {human_seconds(start_s)} to {human_seconds(end)}"
    picture.alt = (
        f"{title or 'Lanes'}: {len(rows)} rank{'s' * (len(rows) > 1)} over {human_seconds(max(lane.end_s for lane in rows))}{shown}"
        + (f", messages on a {head}" if head else "") + ". " + "; ".join(lane.words for lane in rows) + "."
    )  # fmt: skip
    return picture


def _draw(
    axes: Axes, lane: Lane, floor: int, colours: dict[str, str], size: float, view: tuple[float, float], labelled: bool
) -> None:
    width = view[1] - view[0]

    def bars(spans: list, track: tuple[float, float], colour: str, **looks: Any) -> None:
        lengths = [(span[0] / size, max(span[1] - span[0], width / 900) / size) for span in spans]  # to be seen at all
        axes.broken_barh(lengths, (floor + track[0], track[1]), facecolors=colour, **looks)

    bars(lane.waits, _WORK, _WAIT, hatch="////", edgecolor="#9a9a9a", lw=0)
    for name, spans in lane.compute.items():
        bars(spans, _WORK, colours[name], lw=0)
    edge = {"edgecolor": "white", "lw": 0.5}
    for spans, track, colour in (
        (lane.sends, _OUT, _SEND), (lane.receives, _IN, _RECEIVE), (lane.collectives, _BOTH, _COLLECTIVE),
    ):  # fmt: skip
        bars(spans, track, colour, **edge)
        for begin, end, text in spans:
            middle = (begin + end) / 2
            if labelled and end - begin > 0.0085 * width * len(text) and view[0] <= middle <= view[1]:
                axes.text(middle / size, floor + track[0] + track[1] / 2, text, color="white", ha="center", va="center_baseline",
                          fontsize=6.5, clip_on=True)  # fmt: skip
    axes.vlines([moment / size for moment in lane.launches], floor + 0.06, floor + 0.42, color=INK, lw=0.8)
    for seconds, name in lane.marks[:40]:
        axes.plot([seconds / size], [floor + 0.95], marker="v", ms=4, color=INK, clip_on=True)
        if len(lane.marks) <= 6:
            axes.annotate(name, (seconds / size, floor + 0.95), (4, 0), textcoords="offset points", fontsize=6.5, va="center",
                          annotation_clip=True)  # fmt: skip


def _legend(axes: Axes, rows: list[Lane], colours: dict[str, str]) -> None:
    handles = [Patch(facecolor=colour, label=name) for name, colour in list(colours.items())[: len(PHASES)]]
    for name, colour, there in (
        ("send", _SEND, any(lane.sends for lane in rows)), ("receive", _RECEIVE, any(lane.receives for lane in rows)),
        ("collective", _COLLECTIVE, any(lane.collectives for lane in rows)),
    ):  # fmt: skip
        handles += [Patch(facecolor=colour, label=name)] if there else []
    if any(lane.waits for lane in rows):
        handles.append(Patch(facecolor=_WAIT, edgecolor="#9a9a9a", hatch="////", lw=0, label="wait"))
    quiet_legend(axes, handles=handles, ncols=max(1, len(handles)))


def _memory(axes: Axes, rows: list[Lane], size: float) -> None:
    """Live bytes per rank: lines of their own up to four ranks, else the range of all and the rank with the highest peak."""
    top = max(float(lane.memory[1].max(initial=0)) for lane in rows) or 1.0
    name, unit = byte_unit(top)
    highest = max(rows, key=lambda lane: float(lane.memory[1].max(initial=0)))
    if len(rows) > 4:
        times = np.linspace(0.0, max(lane.end_s for lane in rows), 600)
        held = np.array([_at(lane, times) for lane in rows])
        axes.fill_between(times / size, held.min(axis=0) / unit, held.max(axis=0) / unit, step="post", color=FAINT, lw=0, label="all ranks")
    for number, lane in enumerate(rows):
        if len(rows) <= 4 or lane is highest:
            peak = human_bytes(float(lane.memory[1].max(initial=0)))
            axes.step(lane.memory[0] / size, lane.memory[1] / unit, where="post", lw=1.1, color=LINES[number % len(LINES)],
                      label=f"rank {lane.rank}: peak {peak}")  # fmt: skip
    axes.set(ylim=(0, 1.18 * top / unit), ylabel=f"live ({name})")
    quiet_legend(axes, ncols=5)


def _at(lane: Lane, times: np.ndarray) -> np.ndarray:
    seconds, live = lane.memory
    place = np.searchsorted(seconds, times, side="right") - 1
    return np.where(place >= 0, live[np.maximum(place, 0)], 0)

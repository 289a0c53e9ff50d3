"""A parameter server's log as lanes: who computes, who waits, and how far the first is ahead of the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.figures.colours import BASELINE, LINES, PHASES
from labkit.figures.picture import INK, Picture, new_picture, quiet_legend, styled

_WAIT, _DEAD = "#ececec", "#b0656b"
Row = tuple[float, str, int, int]


def spans_of(log: Sequence[Row]) -> tuple[dict[int, list[tuple[float, float, int]]], dict[int, list[tuple[float, float]]]]:
    """Per worker: (begin, end, clock) of what it computed, from an answer to the push for it, and (begin, end) of its waits for an answer.

    log : rows (seconds, what, worker, clock), in order; what is "asks", "answer", "push", "death", "return" (in its
          next life) or "stop"
    """
    works: dict[int, list[tuple[float, float, int]]] = {}
    waits: dict[int, list[tuple[float, float]]] = {}
    begun: dict[int, tuple[float, int]] = {}
    asked: dict[int, float] = {}
    for seconds, what, worker, clock in log:
        works.setdefault(worker, [])
        waits.setdefault(worker, [])
        if what == "asks":
            asked.setdefault(worker, seconds)
        elif what in ("answer", "stop") and worker in asked:
            waits[worker].append((asked.pop(worker), seconds))
        if what == "answer":
            begun[worker] = seconds, clock
        elif what == "push" and worker in begun:
            works[worker].append((begun.pop(worker)[0], seconds, clock))
        elif what in ("death", "return"):
            begun.pop(worker, None)
            asked.pop(worker, None)
    return works, waits


def gaps_of(log: Sequence[Row]) -> tuple[list[float], list[int]]:
    """After each row: seconds, and how many clocks the newest batch that was begun is ahead of the slowest worker that is at work."""
    clocks: dict[int, int] = {}
    begun: dict[int, int] = {}
    gone: set[int] = set()
    times, gaps = [], []
    for seconds, what, worker, clock in log:
        if what in ("death", "stop", "return"):
            begun.pop(worker, None)
        if what in ("death", "stop"):
            clocks.pop(worker, None)
            gone.add(worker)  # until it is answered, when its clock is known again
        if what == "push" and worker not in gone:
            clocks[worker] = max(clocks.get(worker, 0), clock + 1)
        elif what == "asks" and worker not in gone:  # in rounds it waits with its round's number still
            clocks.setdefault(worker, clock)
        elif what == "answer":
            clocks[worker] = begun[worker] = clock
            gone.discard(worker)
        times.append(seconds)
        gaps.append(max(0, max(begun.values(), default=0) - min(clocks.values(), default=0)))
    return times, gaps


@styled
def clock_lanes(
    log: Sequence[Row],
    *,
    title: str,
    bound: int | None = None,
    losses: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    messages: bool = False,
) -> Picture:
    """One lane per worker over the seconds at the server, and the clock gap below; beside it, if given, loss against time.

    log    : rows (seconds, what, worker, clock), see `spans_of`
    bound  : drawn as a line into the gap's strip
    losses : name -> (seconds, losses)
    messages : the rows' first numbers count messages, not seconds
    """
    works, waits = spans_of(log)
    workers = sorted(works)
    columns = 2 if losses else 1
    picture, axes = new_picture(
        9.4, 1.9 + 0.42 * len(workers), nrows=2, ncols=columns, squeeze=False, gridspec_kw={"height_ratios": [0.42 * len(workers), 0.9]}
    )  # fmt: skip
    above, below = axes[0, 0], axes[1, 0]
    _draw_lanes(above, log, workers, works, waits)
    end = max((row[0] for row in log), default=1.0) or 1.0
    times, gaps = gaps_of(log)
    below.step(times, gaps, where="post", color=LINES[0], lw=1.4)
    if bound is not None:
        below.axhline(bound, color=BASELINE, ls="--", lw=1.2)
        below.annotate(f"bound {bound}", (1, bound), (-2, 2), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
                       fontsize=8)  # fmt: skip
    along = "messages at the server" if messages else "time at the server (s)"
    below.set(xlim=(0, end), ylim=(-0.2, max([3, *gaps, bound or 0]) * 1.25), xlabel=along, ylabel="clock gap")
    above.set_xlim(0, end)
    above.set_title(title, pad=24)
    words = [
        f"worker {worker}: {len(works[worker])} batches, waited "
        + (f"{sum(b - a for a, b in waits[worker])} messages" if messages else f"{sum(b - a for a, b in waits[worker]):.2f} s")
        + _times(sum(row[1:3] == ("return", worker) for row in log), "returned")
        + _times(sum(row[1:3] == ("death", worker) for row in log), "taken for dead")
        for worker in workers
    ]
    if losses:
        grid = axes[0, 1].get_gridspec()
        for axis in axes[:, 1]:
            axis.remove()
        beside = picture.add_subplot(grid[:, 1])
        for number, (name, (seconds, values)) in enumerate(losses.items()):
            beside.plot(seconds, values, color=LINES[number % len(LINES)], lw=1.6, label=name, ls="-" if number == 0 else "--")
            words.append(f"{name}: loss {values[0]:.2f} to {values[-1]:.2f} in {seconds[-1]:.2f} s" if len(values) else f"{name}: no loss")
        beside.set(xlabel="time at the server (s)", ylabel="held-out loss")
        quiet_legend(beside, ncols=1)
    picture.alt = f"{title}. " + "; ".join(words) + f". Largest clock gap {max(gaps, default=0)}" + (
        f", bound {bound}." if bound is not None else "."
    )
    return picture


def _times(count: int, what: str) -> str:
    return f", {what} {count} time{'s' * (count != 1)}" if count else ""


def _draw_lanes(axes: Axes, log: Sequence[Row], workers: list[int], works: Mapping, waits: Mapping) -> None:
    for number, worker in enumerate(workers):
        floor = len(workers) - 1 - number
        place, hatched = (floor + 0.1, 0.8), {"facecolor": _WAIT, "hatch": "////", "edgecolor": "#9a9a9a", "lw": 0}
        axes.broken_barh([(a, b - a) for a, b in waits[worker]], place, **hatched)
        for begin, end, clock in works[worker]:
            axes.broken_barh([(begin, end - begin)], place, facecolors=PHASES[0], edgecolor="white", lw=0.5)
            if end - begin > 0.03 * log[-1][0]:
                axes.text((begin + end) / 2, floor + 0.5, str(clock), color="white", ha="center", va="center_baseline", fontsize=7)
        for seconds, what, who, _ in log:
            if who == worker and what in ("death", "return"):
                axes.plot([seconds], [floor + 0.5], marker="X" if what == "death" else "^", ms=8, color=_DEAD, mec="white")
    axes.set_ylim(0, len(workers))
    axes.set_yticks([len(workers) - 0.5 - number for number in range(len(workers))], [f"worker {worker}" for worker in workers])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    waits_patch = Patch(facecolor=_WAIT, edgecolor="#9a9a9a", hatch="////", lw=0, label="waits")
    handles = [Patch(facecolor=PHASES[0], label="computes its batch of that number"), waits_patch]
    if any(row[1] == "death" for row in log):
        handles.append(Line2D([], [], marker="X", ls="", ms=8, color=_DEAD, label="taken for dead"))
    if any(row[1] == "return" for row in log):
        handles.append(Line2D([], [], marker="^", ls="", ms=8, color=_DEAD, label="first heard in its next life"))
    quiet_legend(axes, handles=handles, ncols=4)
    axes.title.set_color(INK)

"""Two plain charts that every lab needs: lines, and bars stacked of parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from labkit.figures.colours import BASELINE, COLOURS, LINES, STACK
from labkit.figures.picture import INK, Picture, new_picture, quiet_legend, styled

_BESIDE_CATEGORIES = ("#cc79a7", "#f0e442", "#8c6bb1", "#5b8e96")  # for parts of other names in the same bar
_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))  # told apart without colours, too


@styled
def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: str = "",
    limits: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
) -> Picture:
    """Curves by name over one pair of axes.

    series : name -> (xs, ys); values that are not finite leave a gap
    x, y   : labels of the axes, with units
    log    : axes with logarithmic scales: "", "x", "y" or "xy"
    limits : label -> height of a dashed line across; marks : label -> x of a dotted line up
    """
    picture, axes = new_picture(6.8, 3.6)
    for number, (name, (xs, ys)) in enumerate(series.items()):
        style = {"color": LINES[number % len(LINES)], "linestyle": _DASHES[number % len(_DASHES)], "lw": 1.7}
        heights = [value if math.isfinite(value) else math.nan for value in ys]
        axes.plot(list(xs), heights, marker="o" if len(xs) <= 24 else "", ms=4, label=name, **style)
    if "x" in log:
        _log_x(axes, sorted({place for xs, _ in series.values() for place in xs}))
    if "y" in log:
        axes.set_yscale("log")
    _lines_across(axes, limits or {})
    for label, place in (marks or {}).items():
        axes.axvline(place, color=BASELINE, ls=":", lw=1.2)
        axes.annotate(label, (place, 1), (3, -2), xycoords=("data", "axes fraction"), textcoords="offset points", va="top", fontsize=8)
    axes.set(xlabel=x, ylabel=y)
    _head(axes, title, list(series))
    told = [f"{name}: {_curve_in_words(xs, ys)}" for name, (xs, ys) in series.items()]
    told += [f"{label} at {place:.4g}" for label, place in {**(limits or {}), **(marks or {})}.items()]
    picture.alt = f"{title}. {y} against {x}. " + "; ".join(told) + "."
    return picture


@styled
def stacked_bars(
    bars: Mapping[str, Mapping[str, float]], *, title: str, y: str, limits: Mapping[str, float] | None = None
) -> Picture:
    """One bar per entry, stacked of named parts, its total on top.

    bars   : label -> part -> height; parts that are the recorder's categories have their colours and order
    limits : label -> height of a dashed line across, such as a card's memory
    """
    picture, axes = new_picture(6.8, 3.8)
    found = dict.fromkeys(part for parts in bars.values() for part in parts)
    order = [part for part in STACK if part in found] + [part for part in found if part not in STACK]
    others = itertools.cycle(_BESIDE_CATEGORIES if set(order) & set(STACK) else LINES)
    colours = {part: COLOURS.get(part) or next(others) for part in order}
    floor = dict.fromkeys(bars, 0.0)
    for part in order:
        heights = [float(bars[label].get(part, 0.0)) for label in bars]
        axes.bar(list(bars), heights, 0.62, list(floor.values()), color=colours[part], label=part, edgecolor="white", linewidth=0.6)
        floor = {label: floor[label] + height for label, height in zip(floor, heights, strict=True)}
    top = max([*floor.values(), *(limits or {}).values(), 0.0]) or 1.0
    for place, total in enumerate(floor.values()):
        style = {"ha": "center", "va": "bottom", "weight": "bold", "fontsize": 8.5, "bbox": _ON_WHITE, "zorder": 4}
        axes.text(place, total + 0.01 * top, f"{total:.3g}", **style)
    _lines_across(axes, limits or {})
    axes.set(ylabel=y, ylim=(0, 1.12 * top))
    _head(axes, title, order)
    told = [f"{label}: " + ", ".join(f"{part} {height:.3g}" for part, height in parts.items()) + f", in all {floor[label]:.3g}"
            for label, parts in bars.items()]  # fmt: skip
    told += [f"{label} at {height:.4g}" for label, height in (limits or {}).items()]
    picture.alt = f"{title}. {y}. " + "; ".join(told) + "."
    return picture


def _log_x(axes: Axes, places: Sequence[float]) -> None:
    """A logarithmic axis; where all places are powers of two, as ranks and sizes are, it names those."""
    if not all(place > 0 and math.log2(place).is_integer() for place in places):
        axes.set_xscale("log")
        return
    axes.set_xscale("log", base=2)
    shown = places[:: math.ceil(len(places) / 10)]
    axes.set_xticks(shown, [f"{place:,.10g}" for place in shown])
    axes.minorticks_off()


def _head(axes: Axes, title: str, names: Sequence[str]) -> None:
    """The title above a legend of as many rows as its names need."""
    columns = max(1, min(len(names), 80 // (4 + max(map(len, names), default=1))))
    axes.set_title(title, pad=10 + 14 * math.ceil(len(names) / columns))
    quiet_legend(axes, ncols=columns, handlelength=2.2)  # long enough to tell dashes apart


def _lines_across(axes: Axes, limits: Mapping[str, float]) -> None:
    for label, height in limits.items():
        axes.axhline(height, color=BASELINE, ls="--", lw=1.2)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        axes.annotate(label, (1, height), (-2, 3), fontsize=8, color=INK, bbox=_ON_WHITE, zorder=5, **place)


def _curve_in_words(xs: Sequence[float], ys: Sequence[float]) -> str:
    points = [(a, b) for a, b in zip(xs, ys, strict=True) if math.isfinite(b)]
    if not points:
        return "no finite value"
    least, most = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    ends = f"from {points[0][1]:.4g} at {points[0][0]:.4g} to {points[-1][1]:.4g} at {points[-1][0]:.4g}"
    return f"{ends}, least {least[1]:.4g} at {least[0]:.4g}, most {most[1]:.4g} at {most[0]:.4g}"

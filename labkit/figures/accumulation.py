"""What each micro-batch weighs in each step of the optimizer; the peak against size and number of the pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from labkit.figures.colours import COLOURS, LINES
from labkit.figures.memory import draw_memory
from labkit.figures.picture import INK, Picture, new_picture, quiet_legend, styled
from labkit.figures.readers import describe
from labkit.figures.units import byte_unit, human_bytes

_RIGHT, _WRONG = LINES[0], LINES[1]


@styled
def step_weights(
    steps: Sequence[Sequence[float]], windows: Sequence[tuple[int, int]] | None = None, *, title: str, names: Sequence[str] | None = None
) -> Picture:
    """A table: one row per step, one column per micro-batch, in each cell the weight with which its gradient went in.

    steps   : weights per step; nan for a gradient that is not finite
    windows : (first micro-batch, one past the last) that each step should have taken, framed; a weight that is not one
              over their number is drawn in the other colour
    names   : a label per step; default "step 1", ...
    """
    columns = max(len(step) for step in steps)
    shown = list(steps)[:12]
    picture, axes = new_picture(max(4.2, min(10.4, 1.6 + 0.55 * columns)), 1.1 + 0.42 * len(shown))
    names = list(names or [f"step {number + 1}" for number in range(len(shown))])[: len(shown)]
    told = []
    for row, weights in enumerate(shown):
        first, end = windows[row] if windows else (0, 0)
        for column, weight in enumerate(weights):
            if not weight and not first <= column < end:
                continue
            wanted = 1 / (end - first) if first <= column < end else 0.0
            right = not windows or math.isclose(weight, wanted, rel_tol=1e-3)
            face = _RIGHT if right else _WRONG
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=face, alpha=0.25, edgecolor="white"))
            text = f"{weight:.2f}".rstrip("0").rstrip(".") if math.isfinite(weight) else "inf"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, weight="normal" if right else "bold")
        if windows:
            axes.add_patch(Rectangle((first, row), end - first, 1, fill=False, edgecolor=INK, lw=1.3))
        parts = [f"{column + 1}: {weight:.3g}" for column, weight in enumerate(weights) if weight]
        meant = f" (meant: {first + 1} to {end}, 1/{end - first} each)" if windows else ""
        told.append(f"{names[row]}{meant} {', '.join(parts) or 'nothing'}")
    label = "micro-batch (framed: those that belong to the step)" if windows else "micro-batch"
    axes.set(xlim=(0, columns), ylim=(len(shown), 0), xlabel=label)
    every = max(1, columns // 16)
    axes.set_xticks([c + 0.5 for c in range(0, columns, every)], [str(c + 1) for c in range(0, columns, every)])
    axes.set_yticks([row + 0.5 for row in range(len(shown))], names)
    axes.grid(False)
    axes.set_title(title)
    picture.alt = f"{title}. Weights of the micro-batches: " + "; ".join(told) + "."
    return picture


@styled
def pieces_and_memory(recordings: Mapping[tuple[int, int], Any], rows: int, pieces: int, *, title: str = "") -> Picture:
    """Two panels for an interactive view: the peak against the number of pieces, a line per size; memory over time of one choice.

    recordings : (rows per piece, number of pieces) -> Recording, all made already
    """
    picture, (left, right) = new_picture(10.4, 3.8, ncols=2, width_ratios=(2, 3))
    peaks = {key: recording.peak_bytes for key, recording in recordings.items()}
    top = max(peaks.values()) * 1.15
    name, size = byte_unit(top)
    sizes, counts = sorted({key[0] for key in peaks}), sorted({key[1] for key in peaks})
    for number, each in enumerate(sizes):
        heights = [peaks[each, count] / size for count in counts if (each, count) in peaks]
        style = {"color": LINES[number % len(LINES)], "ls": ("-", "--", "-.", ":")[number % 4]}
        left.plot([count for count in counts if (each, count) in peaks], heights, marker="o", ms=4, label=f"{each} rows", **style)
    left.plot([pieces], [peaks[rows, pieces] / size], "o", ms=13, mfc="none", mec=COLOURS["activations"], mew=2, zorder=5)
    left.set_xscale("log", base=2)
    left.set_xticks(counts, [str(count) for count in counts])
    left.minorticks_off()
    left.set(xlabel="pieces", ylabel=f"peak memory ({name})", ylim=(0, top / size))
    quiet_legend(left, ncols=4)
    draw_memory(right, recordings[rows, pieces], top=top)
    left.set_title(title, pad=24)
    right.set_title(f"{rows * pieces} rows as {rows} x {pieces}", pad=24)
    told = "; ".join(f"{each} rows x {count}: {human_bytes(peak)}" for (each, count), peak in peaks.items())
    chosen = describe(recordings[rows, pieces])
    picture.alt = f"{title}. Peak by rows per piece and number of pieces: {told}. At {rows} x {pieces}: {chosen}"
    return picture

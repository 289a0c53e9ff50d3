"""Which buffer each layer reads and writes: rows are buffers, columns are layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import FancyBboxPatch, Rectangle

from labkit.figures.picture import INK, Picture, new_picture, styled
from labkit.figures.units import human_bytes

_READ, _WRITE, _HELD = "#0072b2", "#d55e00", "#dfe3e6"


@styled
def buffer_steps(steps: Sequence[Any], buffers: Sequence[Any], at: int) -> Picture:
    """The run up to step `at`: a grey bar where a buffer is alive, R where a layer reads it, W where it writes it.

    steps   : objects with layer, reads, writes, ops (numbers of buffers); buffers : objects with
              bytes, born, died (steps); buffer 0 is the input
    """
    shown = [number for number, buffer in enumerate(buffers) if buffer.born <= at]
    rows = max(len(buffers), 2)
    picture, axes = new_picture(8.4, min(1.7 + 0.34 * rows, 7.0))
    axes.add_patch(Rectangle((at - 0.5, -0.5), 1, rows, color="#fff3d6", lw=0, zorder=0))
    for number in shown:
        buffer = buffers[number]
        last = len(steps) - 1 if buffer.died is None else buffer.died
        axes.add_patch(
            Rectangle(
                (buffer.born - 0.45, number - 0.34),
                min(last, at) - buffer.born + 0.9,
                0.68,
                color=_HELD,
                lw=0,
                zorder=1,
            )
        )
    for column, step in enumerate(steps[: at + 1]):
        for number in dict.fromkeys([*step.reads, *step.writes]):
            letters = [letter for letter, used in (("R", step.reads), ("W", step.writes)) if number in used]
            for place, letter in enumerate(letters):
                width = 0.76 / len(letters)
                colour = _READ if letter == "R" else _WRITE
                box = FancyBboxPatch(
                    (column - 0.38 + place * width, number - 0.26),
                    width,
                    0.52,
                    boxstyle="round,pad=0,rounding_size=0.08",
                    color=colour,
                    lw=0,
                    alpha=1.0 if column == at else 0.55,
                    zorder=2,
                )
                axes.add_patch(box)
                if len(steps) <= 40:
                    axes.text(
                        column - 0.38 + (place + 0.5) * width,
                        number,
                        letter,
                        color="white",
                        ha="center",
                        va="center",
                        weight="bold",
                        fontsize=8,
                        zorder=3,
                    )
    alive = [n for n in shown if buffers[n].died is None or buffers[n].died >= at]
    axes.set(xlim=(-0.6, len(steps) - 0.4), ylim=(rows - 0.4, -0.6), xlabel="layer")
    axes.grid(False)
    axes.set_xticks(
        range(0, len(steps), max(1, len(steps) // 16)),
        [str(c + 1) for c in range(0, len(steps), max(1, len(steps) // 16))],
    )
    labels = [f"{name_of(n)}  {human_bytes(buffers[n].bytes)}" if n in shown else "" for n in range(len(buffers))]
    if len(buffers) <= 24:
        axes.set_yticks(range(len(buffers)), labels)
    else:
        axes.set_ylabel("buffer")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    step = steps[at]
    held = [number for number in alive if number]
    bytes_held = human_bytes(sum(buffers[number].bytes for number in held))
    count = f"{len(held)} buffer{'s' * (len(held) != 1)} beside the input, {bytes_held}"
    reads, writes = _names(step.reads), _names(step.writes)
    axes.set_title(f"Layer {at + 1} reads {reads} (R), writes {writes} (W): {count}", color=INK, pad=8)
    picture.alt = (
        f"Layer {at + 1} of {len(steps)} ({', '.join(step.ops)}) reads {reads} and writes {writes}. "
        f"Alive: {count}; {len(shown) - 1} made so far."
    )
    return picture


def name_of(number: int) -> str:
    """The input, then A, B, ... Z, A1, B1, ..."""
    if number == 0:
        return "input"
    return chr(ord("A") + (number - 1) % 26) + (str((number - 1) // 26) if number > 26 else "")


def _names(numbers: Sequence[int]) -> str:
    if not numbers:
        return "nothing"
    return ", ".join(map(name_of, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")

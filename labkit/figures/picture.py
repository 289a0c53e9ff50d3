"""A figure that carries its own description, and the PNG of it."""

from __future__ import annotations

import base64
import functools
import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

P, R = ParamSpec("P"), TypeVar("R")
INK, FAINT = "#333333", "#d9d9d9"
_DPI = 160
_STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#8c8c8c",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}


@dataclass(frozen=True)
class Still:
    """A drawn figure: PNG, the words that describe it, and its size in CSS pixels."""

    png: bytes
    alt: str
    width: int
    height: int

    def mime_bundle(self, stamp: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
        """(data, metadata) for a notebook: PNG and words; no HTML, which GitHub and untrusted notebooks strip.

        `stamp` is written into the PNG, see `stamped`.
        """
        data = {"image/png": base64.b64encode(stamped(self.png, stamp)).decode("ascii"), "text/plain": self.alt}
        shape = {"width": self.width, "height": self.height, "alt": self.alt}
        return data, {"image/png": shape, "needs_background": "light"}


class Picture(Figure):
    """A matplotlib Figure with `alt`: what it shows, in words, for who cannot see it and for plain text."""

    alt: str = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return still(self).mime_bundle()


def still(figure: Figure, alt: str = "") -> Still:
    """Draw any matplotlib figure. `alt` stands in for the words of one that is no `Picture`, or replaces them."""
    target = io.BytesIO()
    with rc_context(_STYLE):  # without the software's name in it, equal pictures are equal bytes
        figure.savefig(target, format="png", dpi=_DPI, metadata={"Software": None})
    width, height = (round(inches * 96) for inches in figure.get_size_inches())
    return Still(target.getvalue(), alt or getattr(figure, "alt", ""), width, height)


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function in the course's style: matplotlib reads it when a text or line is made."""

    @functools.wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> R:
        with rc_context(_STYLE):
            return draw(*args, **kwargs)

    return in_style


def new_picture(width: float = 8.4, height: float = 3.5, **grid: Any) -> tuple[Picture, Any]:
    """An empty picture in the course's style, and its axes (as `Figure.subplots`), for a `styled` function. Sizes in
    inches of 96 pixels.
    """
    picture = Picture(figsize=(width, height), layout="constrained")
    axes = picture.subplots(**grid)
    return picture, axes


def stamped(png: bytes, stamp: str) -> bytes:
    """`png` with a text chunk `labkit\\0STAMP` right after its header, where a page finds it without decoding the
    image.
    """
    if not stamp:
        return png
    body = b"tEXt" + b"labkit\0" + stamp.encode("latin-1")
    header = 8 + 25  # signature, IHDR
    return png[:header] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + png[header:]


def quiet_legend(axes: Axes, **options: Any) -> None:
    """A legend above the plot, in one row, out of the way of the curves."""
    place = {
        "loc": "lower left",
        "bbox_to_anchor": (0, 1.0),
        "borderaxespad": 0.2,
        "columnspacing": 1.4,
        "handlelength": 1.1,
    }
    axes.legend(**{**place, **options})

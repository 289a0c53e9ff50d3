"""The synced state of the live view of ranks; everything on screen is made of it by `static/ranks.js`."""

from __future__ import annotations

from typing import Any

import anywidget
import numpy as np
import traitlets

from labkit.widgets.place import static_source


class RanksChart(anywidget.AnyWidget):
    """`rows`: float64, seconds first and then live bytes of one rank after the other, all of equal length. `info["leaves"]`: the words of
    the picture that replaces the view.
    """

    _esm = static_source("uPlot.iife.min.js", "page.js", "plot.js", "ranks.js")
    _css = static_source("uPlot.min.css", "labkit.css")
    key = traitlets.Unicode().tag(sync=True)
    rows = traitlets.Bytes().tag(sync=True)
    info = traitlets.Dict().tag(sync=True)

    def send(self, rows: np.ndarray, info: dict[str, Any]) -> None:
        """One message; `info` changes last, and says that there is something new."""
        with self.hold_sync():
            self.rows = np.ascontiguousarray(rows, dtype=float).tobytes()
            self.info = info

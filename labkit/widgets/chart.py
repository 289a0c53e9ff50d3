"""The live chart's synced state: what the kernel sends. Everything on screen is made of it by `static/memory.js`."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from labkit.widgets.place import static_source


class MemoryChart(anywidget.AnyWidget):
    """Rows (seconds, operator index, bytes per category), float64, as `base + tail`; `info` holds the rest and changes
    last.
    """

    _esm = static_source("uPlot.iife.min.js", "page.js", "plot.js", "memory.js")
    _css = static_source("uPlot.min.css", "labkit.css")
    key = traitlets.Unicode().tag(sync=True)
    base = traitlets.Bytes().tag(sync=True)
    tail = traitlets.Bytes().tag(sync=True)
    operators = traitlets.List().tag(sync=True)
    info = traitlets.Dict().tag(sync=True)

    def send_curve(self, curve: Any, info: dict[str, Any], operators: list[str]) -> None:
        """One message: `base` only when it changed, `tail` and `info` always."""
        with self.hold_sync():
            if info["version"] != self.info.get("version"):
                self.base = curve.base
            self.tail = curve.tail
            if len(operators) != len(self.operators) or not info["running"]:
                self.operators = list(operators)
            self.info = info

"""One colour per category, the same in every picture, live or still: Okabe and Ito's palette (jfly.uni-koeln.de/color).

Told apart with red-, green- and blue-blind eyes, on white and on black; `tests/labkit/test_figures_colours.py` measures
it.
"""

from __future__ import annotations

# Bottom to top in a stack: what stays for the whole of training lies at the bottom, what comes and goes at the top.
STACK = ("parameters", "optimizer state", "input data", "gradients", "activations", "other")

COLOURS = {
    "parameters": "#0072b2",
    "optimizer state": "#009e73",
    "input data": "#56b4e9",
    "gradients": "#e69f00",
    "activations": "#d55e00",
    "other": "#b3b3b3",
}
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # curves without a category
BASELINE = "#767676"
PHASES = (
    "#4c72b0",
    "#c48a3a",
    "#6a9a5b",
    "#8c6bb1",
    "#b0656b",
    "#5b8e96",
)  # the strip under the time axis, by order of appearance

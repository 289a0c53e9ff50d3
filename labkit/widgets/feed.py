"""From a recorder to rows for the chart: what is new while it runs, and all of it when it is done.

The rows' columns are (seconds, operator number, bytes per category in STACK order).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.figures.colours import STACK
from labkit.figures.thin import keep
from labkit.recorder import CATEGORIES
from labkit.recorder._code import MODULE_MASK, MODULE_SHIFT, OP_MASK

_ORDER = [CATEGORIES.index(name) for name in STACK]
_PLACE = OP_MASK | MODULE_MASK << MODULE_SHIFT  # the bits of a code that say which operator of which module


class Operators:
    """Numbers for (operator, module) pairs, and their names for people. Number 0: nothing was allocated."""

    def __init__(self) -> None:
        self.names = [""]
        self._numbers = {0: 0}

    def numbers(self, codes: np.ndarray, deltas: np.ndarray, ops: list[str], modules: list[str]) -> np.ndarray:
        """The number of each event's operator; 0 for events that freed."""
        places = np.where(deltas > 0, codes & _PLACE, 0)
        for place in np.unique(places).tolist():
            if place not in self._numbers:
                self._numbers[place] = len(self.names)
                op, module = ops[place & OP_MASK].removeprefix("aten."), modules[place >> MODULE_SHIFT & MODULE_MASK]
                self.names.append(" in ".join(filter(None, (op or "no operator: seen for the first time", module))))
        return np.array([self._numbers[place] for place in places.tolist()], dtype=float)


class Feed:
    """Reads a running `Recorder` from where it stood at the last reading, with the operator of every change."""

    def __init__(self, recorder: Any) -> None:
        self.operators = Operators()
        self._recorder = recorder
        self._follower = recorder.follow()

    def read(self, columns: int) -> np.ndarray:
        """Rows for what happened since the last call, thinned to `columns` buckets of time: (n, 2 + categories)."""
        events, live = self._follower.read()
        if not len(events):
            return np.empty((0, 2 + len(STACK)))
        chosen = keep(events["seconds"], live.sum(axis=1), columns)
        some = events[chosen]
        names = list(self._recorder.log.table.names), self._recorder.module_names
        numbers = self.operators.numbers(some["code"], some["delta"], *names)
        return np.column_stack([some["seconds"], numbers, live[chosen][:, _ORDER]])


def whole(recording: Any, columns: int) -> tuple[np.ndarray, list[str]]:
    """All rows of a finished recording, thinned, and the operators' names: exact, labels counting from birth on."""
    seconds, by_category = recording.timeline_by_category()
    live = np.column_stack([by_category[name] for name in STACK]).astype(float)
    chosen = keep(seconds, live.sum(axis=1), columns)
    arrays, header, operators = recording.arrays, recording.header, Operators()
    numbers = operators.numbers(
        arrays["event_code"][chosen], arrays["event_delta"][chosen], header["ops"], header["modules"]
    )
    return np.column_stack([seconds[chosen], numbers, live[chosen]]), operators.names

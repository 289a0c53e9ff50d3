"""From a recorder to rows for the chart: what is new while it runs, and all of it when it is done.

The rows' columns are (seconds, operator number, bytes per category in STACK order). The recorder's buffers only grow, by whole rows under the
interpreter lock, so another thread may copy from them at any time. Only what is new since the last call is copied and counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.figures.colours import STACK
from labkit.figures.thin import keep
from labkit.recorder import CATEGORIES
from labkit.recorder._code import (
    CATEGORY_MASK,
    CATEGORY_SHIFT,
    EVENT,
    EVENT_COLUMNS,
    MODULE_MASK,
    MODULE_SHIFT,
    OP_MASK,
)

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
    """Reads a running `Recorder` from a cursor on."""

    def __init__(self, recorder: Any) -> None:
        self.operators = Operators()
        self._recorder = recorder
        self._cursor = 0  # bytes of the event buffer already read
        self._category = np.zeros(1024, dtype=np.int8)  # storage id -> category at birth
        self._live = np.zeros(len(CATEGORIES))

    def read(self, columns: int) -> np.ndarray:
        """Rows for what happened since the last call, thinned to `columns` time buckets. (n, 2 + categories) float64."""
        log = self._recorder.log
        before = self._live
        raw, self._live = self._copy(log)
        events = np.frombuffer(raw, dtype=EVENT_COLUMNS)
        if not len(events):
            return np.empty((0, 2 + len(STACK)))
        each = np.zeros((len(events), len(CATEGORIES)))
        each[np.arange(len(events)), self._categories(log, events)] = events["delta"]
        live = before + np.cumsum(each, axis=0)
        chosen = keep(events["seconds"], live.sum(axis=1), columns)
        some = events[chosen]
        numbers = self.operators.numbers(some["code"], some["delta"], log.table.names(), self._recorder.module_names)
        return np.column_stack([some["seconds"], numbers, live[chosen][:, _ORDER]])

    def _copy(self, log: Any) -> tuple[bytes, np.ndarray]:
        """New events, and live bytes per category at their end (which counts labels given since birth)."""
        for _ in range(4):  # the two belong together when nothing happened between reading them
            end = len(log.events)
            live = list(log.by_category)
            if len(log.events) == end:
                break
        end -= end % EVENT.size
        raw = bytes(log.events[self._cursor : end])
        self._cursor = end
        return raw, np.array(live, dtype=float)

    def _categories(self, log: Any, events: np.ndarray) -> np.ndarray:
        sids = events["sid"]
        while sids.max() >= len(self._category):
            self._category = np.concatenate([self._category, np.zeros_like(self._category)])
        births, first = np.unique(sids, return_index=True)
        new = (
            events["delta"][first] >= 0
        )  # the first event of a storage in this batch: its birth, or a growth of an older one
        code = events["code"][first[new]]
        at_birth = (code >> CATEGORY_SHIFT & CATEGORY_MASK).astype(np.int8)
        self._category[births[new]] = np.where(births[new] > self._newest, at_birth, self._category[births[new]])
        self._newest = max(self._newest, int(births[-1]))
        labels = log.labels
        named = [labels.get(sid) for sid in sids.tolist()]
        category = self._category[sids].astype(np.int64)
        late = [i for i, label in enumerate(named) if label is not None]
        if late:
            category[late] = [named[i][0] for i in late]
        return category

    _newest = -1  # highest storage id seen


def whole(recording: Any, columns: int) -> tuple[np.ndarray, list[str]]:
    """All rows of a finished recording, thinned, and the operators' names: exact, with every label at its storage's birth."""
    seconds, by_category = recording.timeline_by_category()
    live = np.column_stack([by_category[name] for name in STACK]).astype(float)
    chosen = keep(seconds, live.sum(axis=1), columns)
    arrays, header, operators = recording.arrays, recording.header, Operators()
    numbers = operators.numbers(
        arrays["event_code"][chosen], arrays["event_delta"][chosen], header["ops"], header["modules"]
    )
    return np.column_stack([seconds[chosen], numbers, live[chosen]]), operators.names

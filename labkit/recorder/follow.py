"""`Follower`: what a display needs of a recorder that is running, at little cost to the code that it records."""

import numpy as np

from ._code import CATEGORY_MASK, CATEGORY_SHIFT, EVENT, EVENT_COLUMNS
from .categories import CATEGORIES


class Follower:
    """Reads a running recorder from any thread: each `poll` copies the rows written since the last one, and no more.

    Made by `Recorder.follow()`. It takes no lock; the recorded loop only ever pays for the copy.
    """

    def __init__(self, recorder) -> None:
        self._recorder = recorder
        self._event = 0
        self._label = 0
        self._phase = 0
        self._mark = 0
        self._sample = 0
        self._category = np.zeros(0, dtype=np.int8)  # by storage id
        self._size = np.zeros(0, dtype=np.int64)
        self._live = np.zeros(len(CATEGORIES), dtype=np.int64)

    def poll(self, max_points: int = 200) -> dict:
        """State now and the points since the last poll, as JSON-able data.

        The state is that of `Recorder.live`. "points" holds "seconds" and, per category, live bytes; of many changes it
        keeps, per stretch of time, the largest total and the last. "phases", "marks" and "samples" are the new ones;
        a phase that has ended meanwhile comes again, with "end_s".
        """
        recorder = self._recorder
        state = recorder.live()
        rows, live = self.read()
        seconds = rows["seconds"]
        keep = thin(live.sum(axis=1), max_points)
        points = {"seconds": [round(s, 6) for s in seconds[keep].tolist()]}
        points |= {name: live[keep, i].tolist() for i, name in enumerate(CATEGORIES)}
        state["points"] = points
        phases = recorder.phases[self._phase :]
        state["phases"] = [{k: p[k] for k in ("name", "start_s", "end_s", "depth", "number")} for p in phases]
        closed = 0
        while closed < len(phases) and phases[closed]["end_s"] is not None:
            closed += 1
        self._phase += closed
        marks = recorder.marks[self._mark :]
        state["marks"] = [{"name": m["name"], "seconds": m["seconds"]} for m in marks]
        self._mark += len(marks)
        state["samples"] = recorder.log.samples[self._sample :]
        self._sample += len(state["samples"])
        return state

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """The changes of memory since the last call, and the live bytes after each: (n,) and (n, categories).

        The first has the fields sid, delta, code and seconds.
        """
        log = self._recorder.log
        rows = np.frombuffer(bytes(log.events[self._event * EVENT.size :]), dtype=EVENT_COLUMNS)
        labels = log.labels[self._label :]
        self._event += len(rows)
        self._label += len(labels)
        return rows, self._advance(rows, labels)[1]

    def _advance(self, rows: np.ndarray, labels: list) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and (rows, categories) live bytes after each row; labels count from the first of these rows on."""
        sids = rows["sid"]
        needed = max(int(sids.max()) + 1 if len(rows) else 0, max((sid for sid, *_ in labels), default=-1) + 1)
        if needed > len(self._size):
            grow = max(needed, 2 * len(self._size)) - len(self._size)
            self._category = np.concatenate([self._category, np.full(grow, -1, dtype=np.int8)])
            self._size = np.concatenate([self._size, np.zeros(grow, dtype=np.int64)])
        born = rows[self._category[sids] < 0][::-1]  # reversed: a storage's first row is the one that stays
        self._category[born["sid"]] = (born["code"] >> CATEGORY_SHIFT & CATEGORY_MASK).astype(np.int8)
        for sid, category, _ in labels:
            before = self._category[sid]
            if before >= 0:
                self._live[before] -= self._size[sid]
            self._live[category] += self._size[sid]
            self._category[sid] = category
        live = np.zeros((len(rows), len(CATEGORIES)), dtype=np.int64)
        live[np.arange(len(rows)), self._category[sids]] = rows["delta"]
        live = self._live + np.cumsum(live, axis=0)
        np.add.at(self._size, sids, rows["delta"])
        if len(rows):
            self._live = live[-1]
        return rows["seconds"], live


def thin(total: np.ndarray, points: int) -> np.ndarray:
    """Positions that keep a curve's look with at most `points` points: of each stretch its largest value and its last."""
    if len(total) <= points:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), max(1, points // 2) + 1).astype(int)
    peaks = [a + int(total[a:b].argmax()) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return np.unique([*peaks, *(edges[1:] - 1)])

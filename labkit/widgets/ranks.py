"""`LiveRanks`: every rank's live memory while `run_ranks(..., live=True)` runs; the lanes when it is done."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from labkit.figures.colours import LINES
from labkit.figures.units import human_bytes, human_seconds
from labkit.widgets.place import Place, notebook_kernel, someone_watches

UPDATES_PER_SECOND = 5
_COLUMNS = 300


class LiveRanks:
    """Context manager around a job: `take` is given what ranks tell; set `recordings` before the end, if there are any.

    Afterwards the cell's output is a picture and its words: the lanes of all recordings, or, of a job that failed, the memory
    that had been told. Without anyone watching only that is left, in plain Python one line of text.
    """

    def __init__(self, ranks: int, title: str, link: str = "") -> None:
        self.recordings: list[Any] = []
        self.curves = [np.zeros((0, 2)) for _ in range(ranks)]  # (seconds since the first rank began, bytes), per rank
        self.latest: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self._title, self._link, self._place, self._chart = title, link, Place(), None
        self._origin: float | None = None
        self._shown = 0.0

    def __enter__(self) -> LiveRanks:
        if someone_watches():
            from labkit.widgets.ranks_chart import RanksChart

            self._chart = RanksChart(key=self._place.key, info=self._info("starting"))
            self._place.show_live(self._chart, f"{self._title}: the cell still ran when this was saved.")
        return self

    def take(self, rank: int, news: dict[str, Any]) -> None:
        """Something new from a rank; draws at most a few times a second. What makes no sense is left out."""
        try:
            points = np.array(news["points"], dtype=float).T.reshape(-1, 2)
            clock, peak, held = float(news["clock_s"]), int(news["peak_bytes"]), int(news["bytes"])
            seconds, phase = float(news["seconds"]), str(news["phase"])
            curve = self.curves[rank]
        except (KeyError, ValueError, TypeError, IndexError):
            return
        if self._origin is None:
            self._origin = clock
        points[:, 0] += clock - self._origin
        self.curves[rank] = _thinned(np.concatenate([curve, points]))
        self.latest[rank] = {"seconds": seconds + clock - self._origin, "bytes": held, "peak": peak, "phase": phase}
        if self._chart is not None and time.monotonic() - self._shown >= 1 / UPDATES_PER_SECOND:
            self._shown = time.monotonic()
            self._send("running")

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds (n,) and the highest bytes of each rank (ranks, n) in as many equal slices of time."""
        end = max((state["seconds"] for state in self.latest if state), default=0.0) or 1e-6
        seconds = np.linspace(0.0, end, _COLUMNS)
        rows = np.zeros((len(self.curves), _COLUMNS))
        for row, curve in zip(rows, self.curves, strict=True):
            if len(curve):
                order = np.argsort(curve[:, 0], kind="stable")
                times, live = curve[order].T
                last = np.searchsorted(times, seconds, side="right") - 1
                row[:] = np.where(last >= 0, live[np.maximum(last, 0)], 0)
                slots = np.clip(np.searchsorted(seconds, times), 0, _COLUMNS - 1)
                np.maximum.at(row, slots, live)
        return seconds, rows

    def _send(self, state: str, leaves: str = "") -> None:
        seconds, rows = self.grid()
        self._chart.send(np.concatenate([seconds[None], rows]), {**self._info(state), "leaves": leaves})

    def _info(self, state: str) -> dict[str, Any]:
        ranks = [
            {"name": f"rank {number}", "colour": LINES[number % len(LINES)], **{"bytes": 0, "peak": 0, "phase": "", **latest}}
            for number, latest in enumerate(self.latest)
        ]
        running = state in ("starting", "running")
        title = f"{self._title} ({self._link})" if self._link else self._title
        return {"title": title, "state": state, "running": running, "ranks": ranks, "words": self.words(state)}

    def words(self, state: str) -> str:
        told = [f"rank {n} {human_bytes(s['bytes'])} (peak {human_bytes(s['peak'])})" for n, s in enumerate(self.latest) if s]
        when = max((s["seconds"] for s in self.latest if s), default=0.0)
        on = f", on a {self._link}" if self._link else ""
        return f"{self._title}: {state}, {human_seconds(when)}{on}. " + ("; ".join(told) or "nothing told yet") + "."

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        state = "done" if kind is None else "interrupted" if issubclass(kind, KeyboardInterrupt) else f"stopped by {kind.__name__}"
        try:
            self._leave(state)
        except Exception as fault:  # a picture must not hide what the ranks raised, nor what they returned
            print(f"{self._title}: no picture ({type(fault).__name__}: {fault}).")

    def _leave(self, state: str) -> None:
        present = [recording for recording in self.recordings if recording is not None]
        if notebook_kernel() is None:
            print(self.words(state))
            return
        from labkit.figures.lanes import MOST_RANKS, lanes
        from labkit.figures.picture import still
        from labkit.figures.plots import lines

        if present and len(present) <= MOST_RANKS:
            picture = still(lanes(self.recordings, self._title))
        else:
            seconds, rows = self.grid()
            curves = {f"rank {number}": (seconds, row / 2**20) for number, row in enumerate(rows)}
            picture = still(lines(curves, title=self._info(state)["title"], x="time (s)", y="live memory (MiB)"), self.words(state))
        if self._chart is not None:
            self._send(state, picture.alt)
        self._place.show_picture(picture)


def _thinned(curve: np.ndarray, most: int = 3000) -> np.ndarray:
    if len(curve) <= most:
        return curve
    pairs = curve[: len(curve) // 2 * 2].reshape(-1, 2, 2)
    higher = pairs[np.arange(len(pairs)), pairs[:, :, 1].argmax(axis=1)]
    return np.concatenate([higher, curve[len(pairs) * 2 :]])

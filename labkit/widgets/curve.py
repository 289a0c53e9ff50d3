"""A curve that grows while it is watched."""

from __future__ import annotations

import numpy as np

from labkit.figures.thin import keep

ROW_LIMIT = 1800  # rows kept at most while a curve grows
COLUMNS = 500  # time buckets a full curve is thinned to: at most three rows each
TAIL_LIMIT = 500  # rows sent again and again before they become part of the base, which keeps a second under 0.5 MB


class Curve:
    """Rows of a growing curve, thinned as it grows, split for sending into a rarely changing `base` and a short `tail`.

    A row is (seconds, operator number, bytes per category...), float64: exact for bytes up to 2^53. What a browser
    draws is always base + tail, and each message holds the whole tail, so a lost or late message does no harm.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.version = 0  # changes when `base` does
        self._base_rows = len(rows)

    def add(self, rows: np.ndarray) -> None:
        """Append rows; thins the whole when it has grown past ROW_LIMIT, and keeps its extremes."""
        self.rows = np.concatenate([self.rows, rows])
        if len(self.rows) > ROW_LIMIT:
            self.rows = self.rows[keep(self.rows[:, 0], self.rows[:, 2:].sum(axis=1), COLUMNS)]
        elif len(self.rows) - self._base_rows <= TAIL_LIMIT:
            return
        self._base_rows = len(self.rows)
        self.version += 1

    @property
    def base(self) -> bytes:
        return self.rows[: self._base_rows].tobytes()

    @property
    def tail(self) -> bytes:
        return self.rows[self._base_rows :].tobytes()

    def peak(self) -> np.ndarray | None:
        """The row with the most bytes, None while there is none."""
        return self.rows[self.rows[:, 2:].sum(axis=1).argmax()] if len(self.rows) else None

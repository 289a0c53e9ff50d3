"""Inside a rank that is watched: tells its live memory a few times a second, from a thread that only reads."""

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from labkit.ranks import here, wire
from labkit.recorder.follow import thin

if TYPE_CHECKING:
    from labkit.recorder import Recorder

UPDATES_PER_SECOND = 5
_POINTS = 60  # per update


class Reporter:
    """Reads a running recorder and sends what is new: {"clock_s", "seconds", "bytes", "peak_bytes", "phase", "points": [[s], [bytes]]}."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder, self._follower = recorder, recorder.follow()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="labkit live", daemon=True)

    def __enter__(self) -> "Reporter":
        self._thread.start()
        seat = here.current()
        if seat.writer is not None:
            seat.writer.exempt(self._thread.native_id, restless=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._tell()

    def _run(self) -> None:
        while not self._stop.wait(1 / UPDATES_PER_SECOND):
            self._tell()

    def _tell(self) -> None:
        state = self._recorder.live()
        rows, live = self._follower.read()
        total = live.sum(axis=1)
        chosen = thin(total, _POINTS)
        told = {name: state[name] for name in ("seconds", "bytes", "peak_bytes", "phase")}
        told["clock_s"] = self._recorder.log.start
        told["points"] = [rows["seconds"][chosen].tolist(), total[chosen].tolist()]
        with suppress(OSError):
            here.current().tell(wire.dump_json(told))

"""Messages whose times are known only after they were posted: a simulated wire tells them, from a thread of its own."""

from time import perf_counter

from ._comm import note_message
from ._patches import modes, running

simulated_link: dict | None = None  # set by a transport that models one: bandwidth_bytes_s, latency_s, per


def set_simulated_link(link: dict | None) -> None:
    """Say once per process which modelled link its messages take; every recording made here names it."""
    global simulated_link
    simulated_link = link


class Transit:
    """One message, written into every recorder of the posting thread now and completed later, from any thread.

    Order, `event` and `op_index` are those of posting; `start_s` and `end_s`, until known, too.
    """

    def __init__(self, kind: str, simulated: bool = True, **fields: object) -> None:
        now = perf_counter()
        self._rows: list[tuple[dict, float]] = []
        for mode in modes():
            log = mode.log
            if log.active:
                posted = now - log.start
                note_message(log, kind, "", log.context | mode.module, posted, posted, simulated=simulated, **fields)
                self._rows.append((log.messages[-1], log.start))

    def met(self, peer: int) -> None:
        """Which rank it turned out to be with: of a receive from any, only the match tells."""
        for row, _ in self._rows:
            row["peer"] = peer

    def took(self, start: float, end: float) -> None:
        """Its times on the wire, as `time.perf_counter()` counts."""
        for row, origin in self._rows:
            row["start_s"], row["end_s"] = start - origin, end - origin


def note_event(name: str) -> None:
    """Name this instant in every recorder of this thread. Unlike `Recorder.mark` it collects no garbage, so it costs little."""
    now, logs = perf_counter(), [mode.log for mode in modes()]
    for recorder in running():
        if recorder.log in logs and recorder.log.active:
            recorder.marks.append({"name": name, "seconds": now - recorder.log.start, "event": recorder.log.event_count()})

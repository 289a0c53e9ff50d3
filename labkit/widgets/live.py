"""`live_memory`: draw memory by category while a cell runs."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from labkit.figures.colours import COLOURS, PHASES, STACK
from labkit.figures.readers import card_samples, describe, phase_at, phases_of
from labkit.figures.thin import phase_strip
from labkit.figures.units import human_bytes, human_seconds
from labkit.recorder import Recorder, Recording
from labkit.widgets.curve import Curve
from labkit.widgets.feed import Feed, whole
from labkit.widgets.place import Place, notebook_kernel, someone_watches

UPDATES_PER_SECOND = 5
_SCREEN_COLUMNS = 800  # time buckets over the whole width


class live_memory:  # noqa: N801 (reads as a statement: `with live_memory(model):`)
    """Record what runs inside, and draw its live memory by category while it runs.

        with live_memory(model, optimizer, batch, budget_bytes=64 * 2**20) as live:
            with live.phase("forward"):
                loss = model(batch).mean()
        live.recording.peak_bytes

    watch        : modules, optimizers and input tensors, each alone or in lists, or one dict from name to those; or one
                   `Recorder`: one that already runs is joined and left running, a fresh one is run
    title        : written over the chart
    budget_bytes : live bytes drawn as a dashed line, and no more. To run out of memory there, give a
                   `Recorder(watch=..., budget_bytes=...)`: it enforces its own budget, which is drawn.

    Afterwards the cell's output is a picture (PNG and words); in the open page it stays explorable. An exception inside
    leaves the picture up to there and goes on. Without anyone watching (nbclient, a grader) only the picture is left,
    in plain Python one line of text.
    """

    def __init__(self, *watch: Any, title: str = "Live memory", budget_bytes: int | None = None) -> None:
        joined = watch[0] if len(watch) == 1 and isinstance(watch[0], Recorder) else None
        named = watch[0] if len(watch) == 1 and isinstance(watch[0], dict) else None
        self.recorder: Recorder = joined or Recorder(watch=named or list(_flat(watch)))
        self._owns = not self.recorder.started
        self._title = title
        self._budget = budget_bytes or self.recorder.log.budget
        self._place = Place()
        self._chart: Any = None
        self._trouble = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name what runs inside, on the chart and in the recording; phases nest and repeat."""
        return self.recorder.phase(name)

    def mark(self, name: str) -> int:
        """Name this instant in the recording, after collecting garbage. Returns the live bytes."""
        return self.recorder.mark(name)

    @property
    def recording(self) -> Recording:
        """What has been recorded; while it runs, what has been so far."""
        return self.recorder.recording

    def __enter__(self) -> live_memory:
        if someone_watches():
            self._open_chart()
        if self._owns:
            self.recorder.__enter__()
        if self._chart is not None:
            # Started after the recorder is in: a thread must not start inside its first bytes. It only ever reads.
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if self._owns:
                self.recorder.__exit__(kind, error, trace)
        finally:
            self._stop.set()
            if self._thread is not None:
                self._thread.join()
            self._finish(kind)

    def _open_chart(self) -> None:
        from labkit.widgets.chart import MemoryChart

        self._feed = Feed(self.recorder)
        self._curve = Curve(np.empty((0, 2 + len(STACK))))
        self._chart = MemoryChart(key=self._place.key, info=self._info(self._curve, 0.0, [], "starting"))
        self._place.show_live(self._chart, f"{self._title}: the cell still ran when this was saved.")
        self._thread = threading.Thread(target=self._draw_on, name="labkit live memory", daemon=True)

    def _draw_on(self) -> None:
        try:
            while not self._stop.wait(1 / UPDATES_PER_SECOND):
                self._update()
        except Exception as error:  # a picture must never end the learner's run; the words say that it stopped
            self._trouble = f" (Live drawing stopped early: {type(error).__name__}: {error}.)"

    def _update(self) -> None:
        seconds = self.recorder.live()["seconds"]
        share = min(1.0, 1 / (UPDATES_PER_SECOND * max(seconds, 1e-9)))  # of the chart's width that is new
        self._curve.add(self._feed.read(max(4, round(_SCREEN_COLUMNS * share))))
        phases = [
            (p["name"], p["start_s"], seconds if p["end_s"] is None else p["end_s"]) for p in list(self.recorder.phases)
        ]
        self._send(self._curve, seconds, phases, self._feed.operators.names, "running")

    def _send(self, curve: Curve, seconds: float, phases: list, operators: list[str], state: str) -> None:
        info = self._info(curve, seconds, phases, state)
        peak = info["peak"]
        if peak["bytes"]:
            where = f" in {peak['phase']}" if peak["phase"] else ""
            when = f"{human_seconds(peak['seconds'])} after the start"
            info["words"] = f"{self._title}: running, peak so far {human_bytes(peak['bytes'])}{where}, {when}."
        self._chart.send_curve(curve, info, operators)

    def _info(self, curve: Curve, seconds: float, phases: list, state: str) -> dict[str, Any]:
        """Everything about the chart but its rows; see `static/plot.js` for who reads it."""
        log, peak = self.recorder.log, curve.peak()
        strip = phase_strip(phases, seconds)
        limits = [{"name": "budget", "bytes": self._budget}] if self._budget else []
        if log.sampler is not None:
            limits.append({"name": "card", "bytes": log.sampler.card["total_bytes"]})
        row = np.zeros(2 + len(STACK)) if peak is None else peak
        return {
            "title": self._title,
            "running": True,
            "state": state,
            "words": f"{self._title}: {state}.",
            "seconds": seconds,
            "version": curve.version,
            "categories": STACK,
            "colours": COLOURS,
            "phase_colours": PHASES,
            "phases": strip,
            "limits": limits,
            "card_samples": card_samples(log.samples),
            "peak": {
                "seconds": row[0],
                "bytes": row[2:].sum(),
                "parts": row[2:].tolist(),
                "phase": phase_at(strip, float(row[0])),
            },
            "by_phase": [],
        }

    def _finish(self, kind: type[BaseException] | None) -> None:
        try:
            self._leave_picture(kind)
        except Exception as error:  # neither may a picture hide what the learner's code raised
            print(f"{self._title}: no picture ({type(error).__name__}: {error}). The recording is complete.")

    def _leave_picture(self, kind: type[BaseException] | None) -> None:
        recording = self.recorder.snapshot() if self.recorder.log.active else self.recorder.recording
        words = describe(recording, self._title, self._budget) + self._trouble
        if kind is not None:
            words += " Interrupted." if issubclass(kind, KeyboardInterrupt) else f" Stopped by {kind.__name__}."
        if notebook_kernel() is None:
            print(words)
            return
        from labkit.figures.memory import memory_over_time
        from labkit.figures.picture import still

        if self._chart is not None:
            self._last(recording, words, kind)
        self._place.show_picture(still(memory_over_time(recording, self._title, self._budget), words))

    def _last(self, recording: Recording, words: str, kind: type[BaseException] | None) -> None:
        rows, operators = whole(recording, _SCREEN_COLUMNS)
        curve = Curve(rows)
        curve.version = self._curve.version + 1
        if kind is None:
            state = "done"
        else:
            state = "interrupted" if issubclass(kind, KeyboardInterrupt) else f"stopped by {kind.__name__}"
        info = self._info(curve, recording.seconds, phases_of(recording), state)
        by_phase = [[name, facts["peak_bytes"], facts["seconds"]] for name, facts in recording.by_phase().items()]
        info |= {"running": False, "words": words, "by_phase": by_phase}
        self._chart.send_curve(curve, info, operators)


def _flat(things: Any) -> Any:
    for thing in things:
        if isinstance(thing, (list, tuple)):
            yield from _flat(thing)
        elif thing is not None:
            yield thing

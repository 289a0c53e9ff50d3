"""Live memory without a browser: what is counted while it runs, what is left behind, and what it does to errors."""

import threading
import time

import numpy as np
import pytest
import torch

pytest.importorskip("anywidget")
pytest.importorskip("matplotlib")

from labkit import Recorder, live_memory
from labkit.figures.colours import STACK
from labkit.widgets.chart import MemoryChart
from labkit.widgets.curve import ROW_LIMIT, Curve
from labkit.widgets.feed import Feed, whole


def training(steps=3, width=64):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(32, width)

    def run(recorder, between=lambda: None):
        for _ in range(steps):
            with recorder.phase("forward"):
                loss = model(batch).square().mean()
            between()
            with recorder.phase("backward"):
                loss.backward()
            between()
            optimizer.step()
            optimizer.zero_grad()

    return [model, optimizer, batch], run


def totals(rows):
    return rows[:, 2:].sum(axis=1)


def test_rows_read_piece_by_piece_end_where_the_recorder_ends():
    watch, run = training()
    pieces = []
    with Recorder(watch=watch) as recorder:
        feed = Feed(recorder)
        run(recorder, lambda: pieces.append(feed.read(10_000)))
        pieces.append(feed.read(10_000))
        live = recorder.live()
        by_category = live["by_category"]
    rows = np.concatenate(pieces)
    assert totals(rows).max() == live["peak_bytes"] and totals(rows)[-1] == live["bytes"]
    assert np.all(np.diff(rows[:, 0]) >= 0) and np.all(rows[:, 2:] >= 0)
    assert dict(zip(STACK, rows[-1, 2:], strict=True)) == by_category


def test_whole_recording_is_exact_and_names_operators():
    watch, run = training()
    with Recorder(watch=watch) as recorder:
        run(recorder)
    rows, operators = whole(recorder.recording, 10_000)
    assert totals(rows).max() == recorder.recording.peak_bytes
    peak = rows[totals(rows).argmax()]
    assert dict(zip(STACK, peak[2:], strict=True)) == recorder.recording.by_category("peak")
    assert operators[0] == "" and any("mm" in name for name in operators) and int(rows[:, 1].max()) < len(operators)


def test_thinned_feed_keeps_the_peak():
    watch, run = training(steps=20)
    with Recorder(watch=watch) as recorder:
        feed = Feed(recorder)
        run(recorder)
        rows = feed.read(20)
        peak = recorder.live()["peak_bytes"]
    assert len(rows) <= 61 and totals(rows).max() == peak


def test_curve_is_bounded_and_never_loses_its_peak():
    curve, generator, highest = Curve(np.empty((0, 8))), np.random.default_rng(0), 0.0
    versions = set()
    for batch in range(200):
        rows = generator.uniform(0, 1000, (40, 8))
        rows[:, 0] = batch + np.linspace(0, 0.9, 40)
        highest = max(highest, totals(rows).max())
        curve.add(rows)
        versions.add(curve.version)
        assert len(curve.rows) <= ROW_LIMIT and curve.peak()[2:].sum() == highest
        drawn = np.frombuffer(curve.base + curve.tail).reshape(-1, 8)
        assert np.array_equal(drawn, curve.rows)
    assert len(versions) < 60, "the base is sent rarely"


def test_in_plain_python_it_prints_one_line_and_records(capsys):
    watch, run = training()
    with live_memory(*watch, title="Three steps") as live:
        run(live)
    out, err = capsys.readouterr()
    assert out.startswith("Three steps: peak ") and out.count("\n") == 1 and err == ""
    assert live.recording.peak_bytes > 0 and {p["name"] for p in live.recording.phases} == {"forward", "backward"}


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_goes_on_and_the_words_say_so(error, capsys):
    with pytest.raises(type(error)) as caught:
        with live_memory(torch.randn(4)):
            torch.ones(1000)
            raise error
    assert caught.value is error
    assert (
        "Interrupted" if isinstance(error, KeyboardInterrupt) else "Stopped by ValueError"
    ) in capsys.readouterr().out


def test_joins_a_recorder_and_leaves_it_running(capsys):
    with Recorder(budget_bytes=2**30) as recorder:
        with live_memory(recorder) as live:
            kept = torch.ones(1000)
        assert live.recorder is recorder and recorder.log.active
        more = torch.ones(1000)
    assert recorder.recording.peak_bytes >= kept.nbytes + more.nbytes
    assert "Budget 1.0 GiB" in capsys.readouterr().out


def test_takes_lists_and_no_optimizer():
    model, tensors = torch.nn.Linear(4, 4), [torch.ones(256), torch.ones(512)]
    with live_memory(model, tensors) as live:
        model(torch.ones(1, 4))
    assert live.recording.by_category("peak")["input data"] == 3072
    assert live.recording.by_category("peak")["parameters"] == 80


def test_rejects_what_cannot_be_watched():
    with pytest.raises(TypeError, match="str"):
        live_memory("model")


class Watched:
    """Stands in for a watching front end: the widget is made, its messages counted, nothing displayed."""

    def __init__(self, monkeypatch):
        self.messages, self.pictures = [], []
        monkeypatch.setattr("labkit.widgets.live.someone_watches", lambda: True)
        monkeypatch.setattr("labkit.widgets.live.notebook_kernel", lambda: object())
        monkeypatch.setattr("labkit.widgets.place.Place.show_live", lambda place, widget, words: None)
        monkeypatch.setattr(
            "labkit.widgets.place.Place.show_picture", lambda place, picture: self.pictures.append(picture)
        )
        send = MemoryChart.send_curve

        def counted(chart, curve, info, operators):
            self.messages.append((info, len(curve.base), len(curve.tail)))
            send(chart, curve, info, operators)

        monkeypatch.setattr(MemoryChart, "send_curve", counted)


def test_updates_while_it_runs_and_ends_with_the_whole(monkeypatch):
    watched = Watched(monkeypatch)
    watch, run = training(steps=6)
    with live_memory(*watch, budget_bytes=2**20) as live:
        run(live, lambda: time.sleep(0.08))
    assert len(watched.messages) >= 4
    running = [info for info, _, _ in watched.messages if info["running"]]
    assert running[0]["seconds"] < running[-1]["seconds"] and running[0]["peak"]["bytes"] > 0
    last = watched.messages[-1][0]
    assert not last["running"] and last["state"] == "done" and last["peak"]["bytes"] == live.recording.peak_bytes
    assert {row[0] for row in last["by_phase"]} == {"forward", "backward"}
    assert last["limits"][0] == {"name": "budget", "bytes": 2**20}
    assert watched.pictures[0].alt == last["words"]
    assert threading.active_count() == 1 or not any("labkit" in thread.name for thread in threading.enumerate())


def test_a_drawing_fault_never_reaches_the_run(monkeypatch):
    watched = Watched(monkeypatch)
    monkeypatch.setattr(Feed, "read", lambda feed, columns: 1 / 0)
    with live_memory(torch.ones(4)):
        time.sleep(0.5)
    assert "Live drawing stopped early: ZeroDivisionError" in watched.pictures[0].alt


def test_error_leaves_the_picture_up_to_there(monkeypatch):
    watched = Watched(monkeypatch)
    with pytest.raises(RuntimeError):
        with live_memory(torch.ones(4)):
            kept = torch.ones(1000)
            raise RuntimeError
    assert watched.messages[-1][0]["state"] == "stopped by RuntimeError"
    assert watched.messages[-1][0]["peak"]["bytes"] >= kept.nbytes
    assert "Stopped by RuntimeError" in watched.pictures[0].alt


def test_runs_a_fresh_recorder_with_its_budget(capsys):
    with pytest.raises(torch.OutOfMemoryError):
        with live_memory(Recorder(budget_bytes=2**20), title="Half"):
            kept = torch.ones(2**10)
            torch.cat([kept] * 2**10)
    words = capsys.readouterr().out
    assert "Budget 1.0 MiB. The budget refused cat 4.0 MiB more, with 4.0 KiB alive. Stopped by OutOfMemoryError." in words


def test_a_dict_gives_names():
    model = torch.nn.Linear(4, 4)
    with live_memory({"small": model}) as live:
        model(torch.ones(1, 4))
    assert "small.weight" in {info.name for info in live.recording.alive()}

"""Live memory of ranks without a browser: news arrive while they run, lanes stay, and nothing of it does harm."""

import numpy as np
import pytest

pytest.importorskip("anywidget")
pytest.importorskip("matplotlib")

from labkit.ranks import DeadlockError, Link, faults, launch, run_ranks
from labkit.widgets.ranks import LiveRanks, _thinned
from labkit.widgets.ranks_chart import RanksChart
from tests.labkit import ranks_live as programs

MIB = 1 << 20


class Watched:
    """Stands in for a watching front end: the widget is made, its messages kept, nothing displayed."""

    def __init__(self, monkeypatch):
        self.messages, self.pictures = [], []
        monkeypatch.setattr("labkit.widgets.ranks.someone_watches", lambda: True)
        monkeypatch.setattr("labkit.widgets.ranks.notebook_kernel", lambda: object())
        monkeypatch.setattr("labkit.widgets.place.Place.show_live", lambda place, widget, words: None)
        monkeypatch.setattr("labkit.widgets.place.Place.show_picture", lambda place, picture: self.pictures.append(picture))
        send = RanksChart.send

        def kept(chart, rows, info):
            self.messages.append((rows, info))
            send(chart, rows, info)

        monkeypatch.setattr(RanksChart, "send", kept)


def test_memory_of_every_rank_moves_while_they_run_and_lanes_stay(monkeypatch):
    watched = Watched(monkeypatch)
    result = run_ranks(programs.grows, 2, 12, live="Two ranks grow")
    assert result.values == [12, 13] and [recording.peak_bytes for recording in result.recordings] == [12 * MIB] * 2
    assert len(watched.messages) >= 3
    held = [info["ranks"][0]["bytes"] for _, info in watched.messages if info["running"]]
    assert held[0] < max(held) <= 12 * MIB and len(set(held)) >= 3
    rows, last = watched.messages[-1]
    assert last["state"] == "done" and [rank["peak"] for rank in last["ranks"]] == [12 * MIB] * 2
    assert rows.shape == (3, 300) and rows[1:].max() == 12 * MIB and np.all(np.diff(rows[0]) > 0)
    (picture,) = watched.pictures
    assert picture.alt.startswith("Two ranks grow: 2 ranks over") and "rank 1 computes" in picture.alt


def test_a_job_that_fails_leaves_what_was_told(monkeypatch):
    watched = Watched(monkeypatch)
    with pytest.raises(ValueError, match="mine"):
        run_ranks(programs.grows_and_fails, 2, live=True, link=Link(1e8, 0.001))
    assert "(simulated link: 100 MB/s, 1 ms)" in watched.messages[-1][1]["title"] and "on a simulated link" in watched.pictures[0].alt
    assert "grows_and_fails: stopped by ValueError" in watched.pictures[0].alt and "peak 4.0 MiB" in watched.pictures[0].alt


def test_a_deadlock_is_seen_while_it_is_watched(monkeypatch):
    watched = Watched(monkeypatch)
    with pytest.raises(DeadlockError, match="rank 0 waits in recv from rank 1"):
        run_ranks(programs.waits_for_nothing, 2, live=True, timeout=60)
    assert watched.messages[-1][1]["state"] == "stopped by DeadlockError"


def test_a_killed_rank_leaves_a_gap_and_a_picture(monkeypatch):
    watched = Watched(monkeypatch)
    result = run_ranks(programs.grows, 3, 6, live=True, group=False, faults=[faults.kill(1, 0.3)])
    assert result.values == [6, None, 8]
    assert "2 ranks over" in watched.pictures[0].alt and "rank 2 computes" in watched.pictures[0].alt


def test_in_plain_python_it_prints_one_line(capsys):
    run_ranks(programs.grows, 2, 2, live="Growing")
    out, err = capsys.readouterr()
    assert out.startswith("Growing: done, ") and out.count("\n") == 1 and "rank 1 " in out and err == ""


def test_news_that_flood_or_make_no_sense_do_no_harm(monkeypatch):
    Watched(monkeypatch)
    assert run_ranks(programs.floods, 1, live=True).values == ["done"]
    view = LiveRanks(2, "Odd")
    for news in ({}, {"points": "x"}, [], {"points": [[1], [2]], "clock_s": 0, "peak_bytes": 1, "bytes": 1, "seconds": 1, "phase": ""}):
        view.take(7, news)
    assert view.words("done") == "Odd: done, 0 µs. nothing told yet."


def test_without_a_watcher_ranks_send_nothing():
    (report,) = launch(b"", world_size=1, entry="tests.labkit.ranks_entries:echo", timeout=20, init_process_group=False)
    assert report.status == "ok"


def test_a_thinned_curve_keeps_its_peak():
    curve = np.column_stack([np.arange(5001.0), np.random.default_rng(0).uniform(0, 9, 5001)])
    short = _thinned(curve)
    assert len(short) == 2501 and short[:, 1].max() == curve[:, 1].max() and short[-1, 0] == 5000

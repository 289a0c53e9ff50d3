"""Interactive views without a browser: states, what is drawn ahead, what a saved notebook keeps, and the trace of
buffers.
"""

import time

import pytest
import torch

pytest.importorskip("anywidget")
pytest.importorskip("matplotlib")

from labkit import Recorder
from labkit.figures.buffers import buffer_steps
from labkit.figures.curves import u_curve
from labkit.widgets import explore, explore_segments, step_through, trace_buffers
from labkit.widgets.explore import States
from labkit.widgets.explorer import Explorer


def draw(size, kind):
    return u_curve({1: size, 2: 2 * size}, title=kind)


CONTROLS = {"size": [1, 2, 3], "kind": ["a", "b"]}


def test_each_state_is_drawn_once_and_then_answered_at_once():
    calls = []
    states = States(CONTROLS, lambda **values: calls.append(values) or draw(**values))
    states.draw_ahead((1, 0), 30.0)
    assert len(calls) == 6 and calls[0] == {"size": 2, "kind": "a"}
    start = time.perf_counter()
    for at in states.drawn:
        states.still(at)
    assert len(calls) == 6 and time.perf_counter() - start < 0.05


def test_draw_ahead_keeps_to_its_time():
    states = States({"n": list(range(1000))}, lambda n: draw(n + 1, "x"))
    states.draw_ahead((500,), 0.3)
    assert 0 < len(states.drawn) < 100


def test_start_is_the_middle_or_what_is_asked_for():
    states = States(CONTROLS, draw)
    assert states.index_of({}) == (1, 0) and states.index_of({"kind": "b"}) == (1, 1)
    with pytest.raises(ValueError, match="no control named"):
        states.index_of({"colour": 1})
    with pytest.raises(ValueError, match="has no value"):
        states.index_of({"size": 9})
    with pytest.raises(ValueError, match="at least one"):
        States({}, draw)


def test_asked_for_by_the_page(monkeypatch):
    states = States(CONTROLS, draw)
    view = Explorer(key="0" * 32, title="t", states=states, at=(1, 0))
    sent = []
    monkeypatch.setattr(Explorer, "send", lambda self, content, buffers: sent.append((content, buffers)))
    view._asked(view, {"want": "2,1"}, [])
    assert sent[0][0]["at"] == "2,1" and sent[0][1][0].startswith(b"\x89PNG")
    with pytest.raises(IndexError):
        view._asked(view, {"want": "9,9"}, [])


def test_without_a_notebook_it_prints_the_words_of_the_start(capsys):
    explore(CONTROLS, draw, start={"size": 3, "kind": "b"})
    assert capsys.readouterr().out.startswith("b against segments")


def test_segments_start_at_the_least_peak(capsys):
    recordings = {}
    for segments in (1, 2, 4):
        with Recorder() as recorder:
            kept = torch.ones(1000 * abs(segments - 2) + 100)
        recordings[segments] = recorder.recording
    del kept
    explore_segments(recordings, baseline=recordings[4])
    assert "At 2:" in capsys.readouterr().out


LAYERS = [torch.nn.Linear(16, 16) for _ in range(6)]


def naive(layers, x):
    for layer in layers:
        x = torch.relu(layer(x))
    return x


def pingpong(layers, x):
    buffers = [torch.empty(len(x), 16), torch.empty(len(x), 16)]
    for i, layer in enumerate(layers):
        x = torch.addmm(layer.bias, x, layer.weight.t(), out=buffers[i % 2]).relu_()
    return x


def test_trace_of_two_buffers_alternates():
    trace = trace_buffers(pingpong, LAYERS, torch.randn(4, 16))
    assert len(trace.buffers) == 3 and [step.layer for step in trace.steps] == list(range(6))
    assert [step.writes for step in trace.steps] == [[1], [2], [1], [2], [1], [2]]
    assert [step.reads for step in trace.steps] == [[0], [1], [2], [1], [2], [1]]


def test_trace_of_the_plain_version_makes_new_ones():
    trace = trace_buffers(naive, LAYERS, torch.randn(4, 16))
    assert len(trace.buffers) == 13 and all(len(step.writes) == 2 for step in trace.steps)
    assert trace.buffers[1].died == 0, "the sum before relu dies in its layer"


def test_trace_takes_tuples_of_tensors():
    layers = [(layer.weight.detach(), layer.bias.detach()) for layer in LAYERS]

    def forward(layers, x):
        for weight, bias in layers:
            x = torch.addmm(bias, x, weight.t())
        return x

    assert [step.layer for step in trace_buffers(forward, layers, torch.randn(4, 16)).steps] == list(range(6))


def test_steps_in_words(capsys):
    step_through(pingpong, LAYERS, torch.randn(4, 16))
    assert "Layer 6 of 6 (addmm, relu_) reads A and writes B" in capsys.readouterr().out
    trace = trace_buffers(pingpong, LAYERS, torch.randn(4, 16))
    assert "reads input and writes A" in buffer_steps(trace.steps, trace.buffers, 0).alt
    with pytest.raises(ValueError, match="no operator"):
        step_through(lambda layers, x: x, LAYERS, torch.randn(4, 16))

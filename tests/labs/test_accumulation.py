"""Lab 05: its checks judge what they should, its reference gets everything, and what nobody wrote gets nothing."""

import math
import sys

import cloudpickle
import pytest
import torch

from labkit.checks import _accumulation_amp_judge as amp
from labkit.checks import _accumulation_largest as largest
from labkit.checks import _accumulation_tokens as tokens
from labkit.checks import _accumulation_tools as tools
from labkit.checks._accumulation_hints import HINTS, on_error
from labkit.checks._accumulation_weights import fault_of
from labkit.figures import pieces_and_memory, step_weights
from labkit.recorder import Recorder
from tests.labs import corpus
from tests.labs.solutions import solution

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's functions travel
def upwards(step: object, limit: int) -> int:
    for rows in range(1, limit + 1):
        try:
            step(rows)
        except torch.OutOfMemoryError:
            return rows - 1
    return limit


def one_backward(model: object, micro_batches: list, optimizer: object, loss_fn: object, *_: object) -> float:
    losses = [loss_fn(model, micro_batch) for micro_batch in micro_batches]
    sum(losses).div(len(losses)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum(loss.item() for loss in losses) / len(losses)


@pytest.mark.parametrize(
    ("check", "plain"),
    [
        ("accumulation.largest", (upwards, lambda batch, size: batch // size)),
        ("accumulation.window", one_backward),
        ("accumulation.tokens", one_backward),
        ("accumulation.epoch", lambda m, b, o, f, k, s: [one_backward(m, b[i : i + k], o, f) for i in range(0, len(b) - k + 1, k)]),
    ],
)
def test_plain_earns_a_quarter_at_most(check: str, plain: object) -> None:
    verdict = corpus.examine(plain, check)
    assert 0 < verdict.points <= verdict.max_points / 4, verdict.as_text()


@pytest.mark.parametrize(
    ("weights", "window", "full", "hint"),
    [
        ([0.25] * 4 + [0, 0, 0], range(4), 4, None),
        ([0, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3], range(4, 7), 4, None),
        ([0, 0, 0, 0, 0.25, 0.25, 0.25], range(4, 7), 4, "short"),
        ([0, 0, 0, 0, 1, 1, 1], range(4, 7), 4, "sum"),
        ([1 / 16] * 4 + [0, 0, 0], range(4), 4, "twice"),
        ([0.25] * 7, range(4), 4, "boundary"),
        ([0.25] * 4 + [1 / 3] * 3, range(4, 7), 4, "stale"),
        ([0, 0, 0, 0.25, 0, 0, 0], range(4), 4, "only-last"),
        ([0.25, 0, 0, 0, 0, 0, 0], range(4), 4, "boundary"),
        ([0.25, 0, 0.25, 0.25, 0, 0, 0], range(4), 4, "missing"),
        ([0.5, 0.25, 0.125, 0.125, 0, 0, 0], range(4), 4, "unequal"),
        ([0.0] * 7, range(4), 4, "empty-step"),
        ([math.inf, 0.25, 0.25, 0.25, 0, 0, 0], range(4), 4, "inf-stepped"),
        ([0.3] * 4 + [0, 0, 0], range(4), 4, "scale"),
    ],
)
def test_weights_name_the_fault(weights: list[float], window: range, full: int, hint: str | None) -> None:
    fault = fault_of(torch.tensor(weights, dtype=torch.float32), window, full)
    assert (fault and fault.hint) == hint


def test_a_tally_s_gradient_is_the_list_of_weights() -> None:
    trace, tally = tools.Trace(), tools.Tally(5)
    optimizer = tools.make_optimizer(tally)
    trace.watch(optimizer)
    loss_fn, batches = tools.tally_loss(trace), tools.tally_batches(5, 1)
    for j in (1, 3):
        (loss_fn(tally, batches[j]) * 0.5).backward()
    optimizer.step()
    assert trace.gradients[0].tolist() == [0, 0.5, 0, 0.5, 0]
    assert trace.events == ["forward", "backward", "forward", "backward", "step"]
    assert trace.graphs() == 1


def test_a_steep_micro_batch_has_a_finite_loss_and_an_infinite_gradient() -> None:
    tally = tools.Tally(3)
    loss_fn = tools.tally_loss(tools.Trace())
    flat, steep, infinite = (loss_fn(tally, batch) for batch in tools.tally_batches(3, 1, bad=[1, 2], steep=[1]))
    assert (flat.isfinite(), steep.isfinite(), infinite.isfinite()) == (True, True, False)
    steep.backward()
    assert tally.weight.grad.tolist() == [0, math.inf, 0]


def test_trace_counts_graphs_that_wait() -> None:
    assert tools.Trace(["forward", "forward", "backward", "forward", "backward", "backward"]).graphs() == 2


def test_windows() -> None:
    assert [list(w) for w in tools.windows_of(7, 4)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [list(w) for w in tools.windows_of(3, 4)] == [[0, 1, 2]]


@pytest.mark.parametrize("limit", [1, 2, 3, 64, 100, 100_000])
def test_a_doubling_search_keeps_within_the_trials(limit: int) -> None:
    for fits in {0, 1, limit // 2, limit - 1, limit}:
        trials: list[int] = []

        def step(rows: int, fits: int = fits, trials: list[int] = trials) -> None:
            trials.append(rows)
            if rows > fits:
                raise torch.OutOfMemoryError("no room")

        assert solution("05").largest_micro_batch(step, limit) == fits
        assert len(trials) <= largest.most_trials(limit) - 1  # one to spare for who tries the answer once more


def test_budget_of_a_case_fits_so_many_rows_and_no_more() -> None:
    values = {"seed": 3, "autocast": True}
    budget = largest.peak_of(values, 60) + 100
    assert largest.peak_of(values, 61) > budget


def test_scale_of_each_window() -> None:
    at, final = amp._expected_scales({"count": 7, "k": 4, "epochs": 2, "bad": [5]})
    assert at == [1024.0] * 7 + [512.0] * 7
    assert final == 256.0  # good, skipped, good, skipped: never two good ones in a row


def test_windows_of_targets_have_the_counts_asked_for() -> None:
    windows = tokens.make_windows({"windows": [[6, 4, 2], [0, 5]], "seed": 9})
    assert [[int((t != tokens.IGNORED).sum()) for _, t in window] for window in windows] == [[6, 4, 2], [0, 5]]


def test_hints_are_questions_and_name_no_call_that_is_the_answer() -> None:
    assert all(hint.endswith("?") for hint in HINTS.values())
    answers = ("len(", "zero_grad", "/ window", "get_scale", "unscale_", "item()", "ceil", "torch.isfinite")
    assert not [key for key, hint in HINTS.items() for answer in answers if answer in hint]
    assert on_error({"type": "RuntimeError", "message": "unscale_() has already been called on this optimizer"}) == "unscale-once"
    assert on_error({"type": "ValueError", "message": "another"}) is None


def test_pictures_say_what_they_show() -> None:
    drawn = step_weights([[0.25] * 4 + [0] * 3, [0.25] * 7], [(0, 4), (4, 7)], title="Weights")
    assert "step 2" in drawn.alt
    assert "5 to 7" in drawn.alt
    with Recorder() as recorder:
        torch.ones(1000)
    drawn = pieces_and_memory({(4, 1): recorder.recording, (4, 2): recorder.recording}, 4, 2, title="Pieces")
    assert "At 4 x 2" in drawn.alt

"""Planned accidents happen where and when they were planned, the others go on, and nothing is left behind."""

import random
import sys
import time

import pytest

from labkit import Recorder
from labkit.ranks import RankError, event, faults, restarts, run_ranks
from tests.labkit import ranks_faults as programs
from tests.labkit.test_ranks_launch import nothing_left

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need fork")


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    nothing_left()


def test_a_killed_rank_has_no_value_and_the_others_go_on():
    result = run_ranks(programs.counts, 3, 5, faults=[faults.kill(1, "step", 3)], group=False, record=True)
    assert result.values == [(0, 5, False), None, (0, 5, False)] and result.lives == [1, 1, 1]
    assert result.recordings[1] is None and [mark["name"] for mark in result.recordings[0].marks] == ["step"] * 5


def test_the_kill_comes_just_before_the_chosen_message():
    result = run_ranks(programs.sends_until_killed, 2, 10, faults=[faults.kill(0, "send", 4)])
    assert result.values == [None, 3]


def test_a_restarted_rank_runs_its_function_again_and_knows_its_life():
    plan = [faults.restart(1, "step", 3, after_s=0.1), faults.restart(1, "step", 2, life=1)]
    result = run_ranks(programs.counts, 2, 5, 0.02, faults=plan)
    # Two steps in the first life, one in the second, five in the third; the last lives without a group.
    assert result.values == [(0, 5, True), (2, 8, False)] and result.lives == [1, 3]
    assert result.outputs[1] == "[rank 1 was killed and starts again]\n" * 2


def test_a_restart_at_a_moment_loses_only_what_was_not_written():
    draw = random.Random(0)
    for _ in range(3):
        plan = [faults.restart(rank, draw.uniform(0.02, 0.3)) for rank in (0, 1)]
        result = run_ranks(programs.counts, 3, 40, 0.01, faults=plan, group=False)
        assert [value[0] for value in result.values] == [1, 1, 0]
        assert all(value[1] >= 40 for value in result.values)


def test_a_stopped_rank_stands_still_and_goes_on():
    seconds = run_ranks(programs.clock, 2, 0.02, 20, faults=[faults.stop(1, "beat", 10, seconds=0.8)], group=False).values
    assert seconds[1] >= 0.75
    assert run_ranks(programs.clock, 1, 0.02, 30, faults=[faults.stop(0, 0.1, seconds=0.6)], group=False).values[0] >= 0.55


def test_a_gate_opens_when_the_other_rank_has_come():
    plan = [faults.hold(1, "pull", until=faults.After(0, "step", 2))]
    stepped, passed = run_ranks(programs.gate, 2, faults=plan, group=False).values
    assert passed >= stepped - 0.05
    start = time.monotonic()
    run_ranks(programs.gate, 2, faults=[faults.hold(1, "pull", seconds=1.5)])
    assert time.monotonic() - start >= 1.5


def test_a_stopped_rank_can_wait_for_an_event_too():
    plan = [faults.stop(1, "pull", until=faults.After(0, "step", 2))]
    stepped, passed = run_ranks(programs.gate, 2, faults=plan, group=False).values
    assert passed >= stepped - 0.05


def test_an_unplanned_death_is_still_a_failure():
    with pytest.raises(RankError, match="rank 1: killed by SIGKILL"):
        run_ranks(programs.dies_by_itself, 2, faults=[faults.kill(0, "never")], group=False)


def test_a_plan_that_never_comes_true_changes_nothing():
    result = run_ranks(programs.counts, 2, 3, faults=[faults.kill(1, "step", 9), faults.restart(0, 60.0)])
    assert [value[:2] for value in result.values] == [(0, 3), (0, 3)]


def test_what_a_killed_rank_left_is_ended_with_the_job():
    result = run_ranks(programs.leaves_children, 2, faults=[faults.restart(0, "ready")], group=False)
    assert result.lives == [2, 1]


@pytest.mark.parametrize(("make", "words"), [
    (lambda: faults.hold(0, "x"), "say how long"), (lambda: faults.stop(0, "x", seconds=1, until=faults.After(0, "y")), "say how long"),
    (lambda: faults.hold(0, 1.0, seconds=1), "held at an event"), (lambda: faults.kill(0, "x", 0), "nth counts from 1"),
    (lambda: faults.kill(0, -1.0), "0 seconds or later"),
    (lambda: run_ranks(programs.gate, 2, faults=[faults.kill(2, "x")]), "no rank 2 among 2"),
])  # fmt: skip
def test_plans_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_outside_a_rank_an_event_is_a_mark_and_there_is_no_rank():
    with Recorder() as recorder:
        event("here")
    assert [mark["name"] for mark in recorder.recording.marks] == ["here"]
    with pytest.raises(RuntimeError, match="no rank"):
        restarts()

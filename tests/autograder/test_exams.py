"""The hidden check gives the points and no case away."""

from __future__ import annotations

import json

import pytest

from autograder import exams
from autograder.outputs import VERDICT
from labkit import checks
from labkit.checks import Outcome, Verdict, run_check


def verdict(status: str = "partial", points: float = 3.0) -> Verdict:
    criteria = [
        Outcome("gradients", "numbers", 1, "none", True, "equal", "secret-observed", "secret-case"),
        Outcome("peak", "technique", 3, "none", False, "at most 7", "secret-observed", "secret-case"),
    ]
    return Verdict(
        "pingpong.forward", status, points, 4.0, criteria, failed="peak", hint="secret-hint", hint_id="secret-id",
        detail="secret-detail", summary="secret-summary", draw=lambda: pytest.fail("no picture"),
    )  # fmt: skip


@pytest.mark.parametrize("status", checks.STATUSES)
def test_nothing_of_a_case_is_shown(status: str) -> None:
    hidden = exams.conceal(verdict(status), 2)
    shown = json.dumps(hidden._repr_mimebundle_()) + hidden.as_text()
    assert "secret" not in shown and "<img" not in shown
    assert hidden.hidden and hidden.status == status


def test_points_scale_and_what_held_is_counted() -> None:
    hidden = exams.conceal(verdict(), 2)
    assert repr(hidden) == "1.5" and hidden._repr_mimebundle_()[VERDICT]["max_points"] == 2
    assert "1 of 2 criteria hold in the hidden cases" in hidden.as_text()


def test_the_seed_is_the_instructor_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(exams.SEED_VARIABLE, raising=False)
    assert exams.exam_seed() == exams.DEFAULT_SEED
    monkeypatch.setenv(exams.SEED_VARIABLE, "7")
    assert exams.exam_seed() == 7
    monkeypatch.setenv(exams.SEED_VARIABLE, "seven")
    with pytest.raises(ValueError, match="LABKIT_EXAM_SEED must be a whole number"):
        exams.exam_seed()


def test_an_exam_runs_the_strict_cases_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def watched(check: checks.Check, candidate: bytes, **options: object) -> Verdict:
        asked.append({"check": check.name, **options})
        return run_check(check, candidate, **options)

    def pingpong_forward(layers: object, x: object) -> None:
        raise NotImplementedError("Exercise 1.1: pingpong_forward")

    monkeypatch.setattr(exams, "run_check", watched)
    monkeypatch.setenv(exams.SEED_VARIABLE, "7")
    result = exams.exam("pingpong.forward", pingpong_forward)
    assert asked == [{"check": "pingpong.forward", "seed": 7, "strict": True}]
    assert (result.points, result.status, result.hidden) == (0, "unfinished", True)
    assert "not written yet" in result.as_text()


def test_an_unknown_check_is_told() -> None:
    with pytest.raises(KeyError, match="no check is called 'pingpong.nothing'"):
        exams.exam("pingpong.nothing", print)

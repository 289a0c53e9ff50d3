"""A score is the verdict of the named check or nothing: no printed text, no odd number, no silence earns points."""

from __future__ import annotations

from typing import Any

import pytest
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_output

from autograder.judge import VerdictJudge
from autograder.outputs import VERDICT, OutputBudget
from autograder.reference import make_reference
from tests.autograder.tiny import LAB, tiny_lab

WANT = make_reference(LAB, tiny_lab().solution).by_key()["check-double"]


def value(data: dict[str, Any]) -> NotebookNode:
    return new_output("execute_result", data=data)


def verdict(**fields: Any) -> NotebookNode:
    return value({"text/plain": "4", VERDICT: {"check": "tiny.double", "points": 4, "max_points": 4} | fields})


def score(*outputs: NotebookNode) -> tuple[float | None, str, list[str]]:
    result = VerdictJudge().score(new_code_cell("", outputs=list(outputs)), WANT)
    return result.points, result.status, result.flags


@pytest.mark.parametrize(("points", "most", "scored"), [(4, 4, 4), (3, 4, 3), (0, 4, 0), (1, 2, 2), (0.5, 8, 0.25)])
def test_points_scale_to_the_cell(points: float, most: float, scored: float) -> None:
    assert score(verdict(points=points, max_points=most, status="partial")) == (scored, "partial", [])


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ([], "no value"),
        ([new_output("stream", text="4")], "no value"),
        ([new_output("display_data", data={"text/plain": "4", VERDICT: {"points": 4, "max_points": 4}})], "no value"),
        ([value({"text/plain": "4"})], "'4', not a verdict"),
        ([value({"text/plain": "nan"})], "'nan', not a verdict"),
        ([value({"text/plain": "'tensor(0.)'"})], "not a verdict"),
        ([value({"text/html": "4"})], "not a verdict"),
        ([verdict(points=7)], "out of range"),
        ([verdict(points=-1)], "out of range"),
        ([verdict(points=0, max_points=0)], "out of range"),
        ([verdict(points=float("nan"))], "not numbers"),
        ([verdict(points=float("inf"))], "not numbers"),
        ([verdict(points="4")], "not numbers"),
        ([verdict(points=True)], "not numbers"),
        ([verdict(points=None)], "not numbers"),
        ([verdict(check="tiny.triple")], "the verdict is of 'tiny.triple'"),
        ([verdict(), verdict()], "more than one value"),
    ],
)
def test_what_is_no_verdict_scores_nothing_and_is_flagged(outputs: list[NotebookNode], told: str) -> None:
    points, status, flags = score(*outputs)
    assert points == 0 and status == "no verdict" and told in flags[0]


def test_stderr_never_changes_a_score() -> None:
    warning = new_output("stream", name="stderr", text="[W NNPACK.cpp:64] Could not initialize NNPACK!")
    assert score(warning, verdict()) == (4, "", [])


@pytest.mark.parametrize(
    ("name", "status"),
    [("CellTimeoutError", "timeout"), ("KernelDied", "crashed"), ("NotRun", "not run"), ("NameError", "error")],
)
def test_an_error_scores_nothing_and_says_how_it_ended(name: str, status: str) -> None:
    error = new_output("error", ename=name, evalue="", traceback=[])
    assert score(new_output("error", ename="KeyboardInterrupt", evalue="", traceback=[]), error)[:2] == (0, status)
    assert score(verdict(), error)[0] == 0


def test_trouble_of_the_grader_is_no_zero() -> None:
    points, status, flags = score(verdict(points=0, status="infrastructure"))
    assert points is None and status == "infrastructure" and "again" in flags[0]


def test_every_type_of_output_is_cut_and_a_verdict_survives() -> None:
    big = verdict()
    big.data["text/html"] = "h" * 5_000_000
    outputs = [
        new_output("stream", text="x" * 5_000_000),
        new_output("display_data", data={"text/html": "y" * 5_000_000, "text/plain": "small"}),
        new_output("error", ename="E", evalue="v" * 5_000_000, traceback=["z" * 5_000_000]),
        big,
    ]
    kept = OutputBudget(100_000).fit(outputs)
    assert len(str(kept)) < 250_000
    assert score(*[output for output in kept if output.output_type == "execute_result"])[0] == 4
    assert "output cut" in kept[-1].text

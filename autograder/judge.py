"""Who judges: what a graded cell is worth, from what its execution left behind.

A score comes from the verdict that the cell's value carries, checked against the lab's reference; printed text is
never read as one. What cannot be a verdict of the named check is 0 with a flag for a person, and the grader's own
trouble is no score at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from nbformat.notebooknode import NotebookNode

from autograder.outputs import VERDICT
from autograder.reference import ReferenceCell

ENDINGS = {"CellTimeoutError": "timeout", "KernelDied": "crashed", "NotRun": "not run"}


@dataclass
class Score:
    """Points of one graded cell; None when a person decides (a written answer, or trouble of the grader's own)."""

    key: str
    kind: str
    exercise: str | None
    points: float | None
    max_points: float
    status: str
    flags: list[str] = field(default_factory=list)
    verdict: dict[str, Any] | None = None


class Judge(Protocol):
    """Scores one graded cell of an executed notebook."""

    def score(self, cell: NotebookNode, want: ReferenceCell) -> Score: ...


class VerdictJudge:
    """Reads the verdict that a notebook's kernel sent: right for honest work, blind to a forged verdict."""

    def score(self, cell: NotebookNode, want: ReferenceCell) -> Score:
        result = Score(want.key, want.kind, want.exercise, 0.0, want.points, "")
        if want.kind == "reflection":
            untouched = cell.source.strip() == want.released.strip()
            result.status = "unanswered" if untouched else "written"
            result.points = 0.0 if untouched else None
            return result
        errors = [output.ename for output in cell.outputs if output.output_type == "error"]
        if errors:
            result.status = next((ENDINGS[name] for name in errors if name in ENDINGS), "error")
            return result
        values = [output.data for output in cell.outputs if output.output_type == "execute_result"]
        problem = _problem(values, want)
        if problem:
            result.status, result.flags = "no verdict", [problem]
            return result
        verdict = values[0][VERDICT]
        result.verdict, result.status = verdict, str(verdict.get("status", ""))
        if result.status == "infrastructure":
            result.points, result.flags = None, ["the grader itself failed here; grade this cell again"]
        else:
            result.points = want.points * verdict["points"] / verdict["max_points"]
        return result


def _problem(values: list[dict[str, Any]], want: ReferenceCell) -> str | None:
    """Why the values of a cell are no verdict of the check it names, or None."""
    if not values:
        return "the cell has no value"
    if len(values) > 1:
        return "the cell has more than one value"
    verdict = values[0].get(VERDICT)
    if not isinstance(verdict, dict):
        return f"the cell's value is {_short(values[0].get('text/plain'))}, not a verdict"
    if verdict.get("check") != want.check:
        return f"the verdict is of {_short(verdict.get('check'))}, the cell checks {want.check!r}"
    points, most = verdict.get("points"), verdict.get("max_points")
    for number in (points, most):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            return f"its points are {_short(points)} of {_short(most)}, not numbers"
    if not 0 <= points <= most or most <= 0:
        return f"its points are {points} of {most}, out of range"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."

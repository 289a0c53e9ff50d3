"""Grades as CSV that spreadsheets open safely."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograder.build.builder import write_if_changed
from autograder.course import Course
from autograder.gradebook import standing
from autograder.reference import Reference

if TYPE_CHECKING:
    from autograder.grade import Outcome


def csv_path(course: Course, lab: str) -> Path:
    return course.root / "grades" / f"{lab}.csv"


def write_csv(course: Course, lab: str, outcomes: Sequence[Outcome], reference: Reference) -> Path:
    """A row for every learner in `outcomes` and in the gradebook of `lab`: status, flags, points per graded cell."""
    graded = [cell for cell in reference.cells if cell.graded]
    by_student = {outcome.student: outcome for outcome in outcomes}
    with course.gradebook() as gradebook:
        rows = {submission.student.id: _cells(submission, lab) for submission in gradebook.assignment_submissions(lab)}
    header = ["student", "lab", "status", "points", "max_points", "to_read", *(cell.key for cell in graded), "flags"]
    lines: list[list[Any]] = []
    for student in sorted({*rows, *by_student}):
        outcome = by_student.get(student)
        status = outcome.status if outcome else "graded before"
        flags = " | ".join([*outcome.flags, *outcome.events]) if outcome else ""
        now = standing(course, lab, student) if outcome is None or outcome.graded else None
        totals = [now.points, now.max_points, now.waiting] if now else ["", reference.max_points, ""]
        points = [rows.get(student, {}).get(cell.key, "") for cell in graded] if now else [""] * len(graded)
        lines.append([student, lab, status, *totals, *points, flags])
    buffer = io.StringIO()
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([[harmless(value) for value in line] for line in [header, *lines]])
    path = csv_path(course, lab)
    write_if_changed(path, buffer.getvalue().encode("utf-8", "replace"))
    return path


def _cells(submission: Any, lab: str) -> dict[str, float]:
    """Score per graded cell, what a person entered before what the grader did."""
    notebook = next((notebook for notebook in submission.notebooks if notebook.name == lab), None)
    return {grade.name: grade.score for grade in notebook.grades} if notebook else {}


def harmless(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula, led by an apostrophe."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return "'" + value
    return value

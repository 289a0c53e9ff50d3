"""One writer: executed and judged notebooks into nbgrader's folders and gradebook, its feedback pages, and back out."""

from __future__ import annotations

import datetime
import shutil
from dataclasses import dataclass
from pathlib import Path

from nbformat.notebooknode import NotebookNode
from nbgrader.api import MissingEntry
from nbgrader.converters import GenerateFeedback
from nbgrader.preprocessors import AssignLatePenalties, CheckCellMetadata
from nbgrader.utils import capture_log

from autograder.build.builder import notebook_bytes, write_if_changed
from autograder.course import Course
from autograder.steps import SaveScores


@dataclass(frozen=True)
class Standing:
    """A submission's points as the gradebook has them, manual grades and penalties included."""

    points: float
    max_points: float
    waiting: int  # graded cells that a person has yet to look at


def record(course: Course, lab: str, student: str, notebook: NotebookNode, timestamp: datetime.datetime | None) -> None:
    """Write a judged notebook where nbgrader keeps autograded ones, and its scores into the gradebook."""
    _enrol(course, lab, student, timestamp)
    ids = {"student": student, "assignment": lab, "notebook": lab, "db_url": course.db_url}
    resources = {"nbgrader": ids}
    for step in (SaveScores, AssignLatePenalties, CheckCellMetadata):
        notebook, resources = step(config=course.config).preprocess(notebook, resources)
    write_if_changed(autograded(course, lab, student), notebook_bytes(notebook))


def record_nothing(course: Course, lab: str, student: str, timestamp: datetime.datetime | None) -> None:
    """An empty submission: every cell scores 0, no notebook is left from an earlier one."""
    _enrol(course, lab, student, timestamp)
    for left in (autograded(course, lab, student), feedback_page(course, lab, student)):
        shutil.rmtree(left.parent, ignore_errors=True)
    with course.gradebook() as gradebook:
        for grade in gradebook.find_submission_notebook(lab, lab, student).grades:
            grade.auto_score = 0.0
            grade.needs_manual_grade = grade.manual_score is not None
        gradebook.db.commit()


def _enrol(course: Course, lab: str, student: str, timestamp: datetime.datetime | None) -> None:
    with course.gradebook() as gradebook:
        gradebook.update_or_create_student(student)
        when = {} if timestamp is None else {"timestamp": timestamp}
        gradebook.update_or_create_submission(lab, student, **when)


def standing(course: Course, lab: str, student: str) -> Standing | None:
    """Where a learner stands in a lab, or None when nothing is recorded."""
    with course.gradebook() as gradebook:
        try:
            notebook = gradebook.find_submission_notebook(lab, lab, student)
        except MissingEntry:
            return None
        waiting = sum(grade.needs_manual_grade for grade in notebook.grades)
        return Standing(notebook.score - (notebook.late_submission_penalty or 0), notebook.max_score, waiting)


def grade_by_hand(course: Course, lab: str, student: str, key: str, points: float) -> None:
    """Enter a person's grade for one cell, as the Formgrader does."""
    with course.gradebook() as gradebook:
        grade = gradebook.find_grade(key, lab, lab, student)
        grade.manual_score, grade.needs_manual_grade = points, False
        gradebook.db.commit()


def autograded(course: Course, lab: str, student: str) -> Path:
    return course.root / "autograded" / student / lab / f"{lab}.ipynb"


def feedback_page(course: Course, lab: str, student: str) -> Path:
    return course.root / "feedback" / student / lab / f"{lab}.html"


class OnePage(GenerateFeedback):
    """Feedback of one submission by its path: nbgrader takes ids for file patterns, and `x[1]` would match nobody."""

    def init_notebooks(self) -> None:
        folder = self._format_source(self.coursedir.assignment_id, self.coursedir.student_id)
        self.assignments = {folder: [f"{folder}/{self.coursedir.assignment_id}.ipynb"]}


def write_feedback(course: Course, lab: str, student: str) -> str | None:
    """Make the learner's feedback page with nbgrader's own converter. Returns what went wrong, if anything."""
    step = OnePage(coursedir=course.directory(assignment_id=lab, student_id=student), config=course.config)
    step.force = True
    outcome = capture_log(step)
    if outcome["success"]:
        return None
    lines = outcome.get("error", "").strip().splitlines()
    return lines[-1] if lines else "unknown"

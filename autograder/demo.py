"""Three submissions made from a lab's own notebooks: untouched, half done and solved."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import nbformat

from autograder import gradebook
from autograder.build.builder import notebook_bytes, write_if_changed
from autograder.build.preprocessors import BEGIN, END
from autograder.course import Course
from autograder.grade import Outcome, keep, write_grades
from autograder.project import Project

STUDENTS = ("untouched", "half-done", "solved")


def hand_in(project: Project, course: Course, lab: str) -> Path:
    """Write the three submissions where learners' work lies; returns that folder.

    Half done: the answers of the first half of the exercises (rounded down, at least one) are the solution's.
    """
    release = nbformat.read(project.release(lab), as_version=4)
    solution = nbformat.read(project.solution(lab), as_version=4)
    reference = course.reference(lab)
    exercises = list(dict.fromkeys(cell.exercise for cell in reference.cells if cell.kind == "check"))
    done = {"untouched": [], "half-done": exercises[: max(1, len(exercises) // 2)], "solved": None}
    written = {cell.key: cell for cell in reference.cells if cell.kind in ("answer", "reflection")}
    for student, solved in done.items():
        notebook = copy.deepcopy(release)
        for cell, model in zip(notebook.cells, solution.cells, strict=True):
            want = written.get(cell.id)
            if want and (solved is None or (want.kind == "answer" and want.exercise in solved)):
                cell.source = "\n".join(
                    line for line in model.source.split("\n") if BEGIN not in line and END not in line
                )
        folder = course.root / "submitted" / student / lab
        write_if_changed(folder / f"{lab}.ipynb", notebook_bytes(notebook))
        write_if_changed(folder / "timestamp.txt", b"2026-01-01 12:00:00 UTC\n")
    return course.root / "submitted"


def read_answers(course: Course, lab: str, outcomes: Sequence[Outcome]) -> None:
    """Grade the solved one's written answers by hand with full points, as a person would; renews its page and the CSV.

    `outcomes` are those of the grading, and the solved one's is brought up to date.
    """
    reference = course.reference(lab)
    solved = next((outcome for outcome in outcomes if outcome.student == "solved" and outcome.graded), None)
    if solved is None:
        return
    for cell in reference.cells:
        if cell.kind == "reflection":
            gradebook.grade_by_hand(course, lab, "solved", cell.key, cell.points)
    gradebook.write_feedback(course, lab, "solved")
    now = gradebook.standing(course, lab, "solved")
    assert now is not None
    solved.points, solved.waiting = now.points, now.waiting
    keep(course, lab, solved)
    write_grades(course, lab, STUDENTS, outcomes, reference)

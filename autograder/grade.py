"""Grade a lab's submissions: take in, execute, judge, record; one learner's trouble is never another's."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autograder import gradebook
from autograder.build.builder import write_if_changed
from autograder.course import Course
from autograder.engine import Execution, Executor
from autograder.export import write_csv
from autograder.intake import Submission, Unreadable, copy_beside, students_in, take_in
from autograder.judge import Judge, Score
from autograder.note import write_note
from autograder.progress import Progress
from autograder.reference import Reference
from autograder.steps import judge_notebook


@dataclass
class Outcome:
    """What became of one submission. `points` is None when it could not be graded."""

    student: str
    status: str  # graded, no submission, unreadable, grader error
    points: float | None = None
    max_points: float = 0.0
    waiting: int = 0
    flags: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    sha256: str = ""
    seconds: float = 0.0

    @property
    def graded(self) -> bool:
        return self.points is not None

    def line(self) -> str:
        """For the terminal: who, points, what to know."""
        points = f"{self.points:g} of {self.max_points:g}" if self.graded else "-"
        told = [self.status]
        if self.waiting:
            told.append(f"{self.waiting} to read")
        if self.graded:
            more = f" (and {len(self.flags) - 1} more)" if len(self.flags) > 1 else ""
            told += [f"{self.flags[0]}{more}"] if self.flags else []
        else:
            told += self.flags[:1]
        told += self.events[:1]
        line = f"{self.student:<20} {points:>12}  {self.seconds:5.1f} s  {'; '.join(told)}"
        return line.encode("utf-8", "replace").decode()  # a folder's name may hold any bytes


@dataclass
class Graded:
    """One submission after its execution, before anything is recorded."""

    submission: Submission
    execution: Execution | None
    scores: list[Score]


def examine(folder: Path, student: str, reference: Reference, executor: Executor, judge: Judge, work: Path) -> Graded:
    """Read, execute and judge one submission. Reads `folder`, writes only below `work`. Raises Unreadable."""
    submission = take_in(folder, student, reference)
    if submission.notebook is None:
        return Graded(submission, None, [])
    try:
        copy_beside(folder, work)
        execution = executor.execute(submission.notebook, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Graded(submission, execution, judge_notebook(execution.notebook, reference, judge))


def grade(
    course: Course,
    lab: str,
    executor: Executor,
    judge: Judge,
    *,
    submissions: Path | None = None,
    students: Sequence[str] = (),
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Grade the submissions of `lab` in `submissions` (default: the course's `submitted`), telling `progress` of each.

    students : only these; jobs : how many notebooks execute at once. Each result is on disk before the next is told,
    so an interrupted batch keeps what it has. Raises LookupError when a named student has no submission.
    """
    folder = submissions or course.root / "submitted"
    found = students_in(folder, lab)
    if missing := sorted(set(students) - set(found)):
        raise LookupError(f"No submission of {lab} by {', '.join(missing)} in {folder}.")
    wanted = [student for student in found if not students or student in students]
    if not wanted:
        raise LookupError(f"No submissions of {lab} in {folder}: there is no STUDENT/{lab} below it.")
    reference = course.reference(lab)
    progress = progress or Progress()
    progress.begin(len(wanted), f"{lab}: {len(wanted)} submission{'s' if len(wanted) != 1 else ''} in {folder}")
    outcomes: list[Outcome] = []
    started: dict[str, float] = {}

    def job(student: str) -> Graded:
        started[student] = time.monotonic()
        progress.start(student)
        work = course.root / "work" / lab / student
        return examine(folder / student / lab, student, reference, executor, judge, work)

    pool = ThreadPoolExecutor(max_workers=max(1, jobs))
    futures: dict[Future[Graded], str] = {pool.submit(job, student): student for student in wanted}
    try:
        for future in as_completed(futures):
            student = futures[future]
            outcome = _finish(course, lab, student, future, reference)
            outcome.seconds = time.monotonic() - started[student]
            outcomes.append(outcome)
            keep(course, lab, outcome)
            progress.end(student, outcome.line())
    except KeyboardInterrupt:
        executor.stop()
        progress.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        outcomes.sort(key=lambda outcome: outcome.student)
        if outcomes:
            write_grades(course, lab, found, outcomes, reference)
    return outcomes


def _finish(course: Course, lab: str, student: str, future: Future[Graded], reference: Reference) -> Outcome:
    """Record one examined submission. Every error becomes an outcome, so that the batch goes on."""
    outcome = Outcome(student, "graded", max_points=reference.max_points)
    try:
        done = future.result()
        submission = done.submission
        outcome.flags, outcome.sha256, outcome.scores = list(submission.flags), submission.sha256, done.scores
        if done.execution is None:
            outcome.status = "no submission"
            gradebook.record_nothing(course, lab, student, submission.timestamp)
            outcome.points = 0.0
            _note(
                course, lab, outcome, f"Score: 0.0 / {reference.max_points}",
                f"There was no notebook in what you handed in: hand in {lab}.ipynb.",
            )  # fmt: skip
        else:
            outcome.events = done.execution.events
            outcome.flags += [f"{score.key}: {flag}" for score in done.scores for flag in score.flags]
            gradebook.record(course, lab, student, done.execution.notebook, submission.timestamp)
            now = gradebook.standing(course, lab, student)
            assert now is not None
            outcome.points, outcome.max_points, outcome.waiting = now.points, now.max_points, now.waiting
            if problem := gradebook.write_feedback(course, lab, student):
                outcome.events.append(f"no feedback page: {problem}")
    except Unreadable as error:
        outcome.status, outcome.flags = "unreadable", [f"{error}: ask the learner to hand in again"]
        sentence = f"Your submission could not be graded: {error}; put it right and hand in {lab}.ipynb again."
        _note(course, lab, outcome, "not graded", sentence)
    except Exception as error:
        outcome.status, outcome.points = "grader error", None
        outcome.flags = [f"{type(error).__name__}: {error}"]
        traceback.print_exc(file=sys.stderr)
    return outcome


def _note(course: Course, lab: str, outcome: Outcome, score: str, sentence: str) -> None:
    try:
        write_note(gradebook.feedback_page(course, lab, outcome.student), lab, score, sentence)
    except OSError as error:
        outcome.events.append(f"no feedback page: {error}")


def kept(course: Course, lab: str, student: str) -> Outcome | None:
    """The outcome of a learner's last grading, without its scores; None when there is none that can be read."""
    try:
        noted = json.loads(_result(course, lab, student).read_text(encoding="utf-8"))
        known = {name: noted[name] for name in ("status", "points", "max_points", "waiting", "flags", "events")}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return Outcome(student, **known)


def _result(course: Course, lab: str, student: str) -> Path:
    return course.root / "results" / lab / f"{student}.json"


def write_grades(
    course: Course, lab: str, students: Sequence[str], outcomes: Sequence[Outcome], reference: Reference
) -> None:
    """The CSV of these outcomes and, for whoever of `students` has none among them, of the last grading before."""
    done = {outcome.student for outcome in outcomes}
    earlier = [kept(course, lab, student) for student in students if student not in done]
    write_csv(course, lab, [*outcomes, *filter(None, earlier)], reference)


def keep(course: Course, lab: str, outcome: Outcome) -> None:
    """The result as data: results/LAB/STUDENT.json."""
    text = json.dumps({"lab": lab, **asdict(outcome)}, indent=1, sort_keys=True, default=str, ensure_ascii=False)
    data = (text + "\n").encode("utf-8", "replace")
    write_if_changed(_result(course, lab, outcome.student), data)

"""Command line of the instructor's side: build, check, course, grade."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autograder.project import Project

if TYPE_CHECKING:
    from autograder.course import Course
    from autograder.grade import Outcome


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m autograder", description=__doc__)
    top.add_argument("--root", type=Path, help="project folder (default: the repository this package lies in)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="sources to release and solution notebooks and manifests")
    build.add_argument("labs", nargs="*", metavar="LAB", help="02, 02_checkpointing or a path (default: all)")

    check = commands.add_parser("check", help="fail when anything committed is stale or a lab does not hold its rules")
    check.add_argument("labs", nargs="*", metavar="LAB", help="labs to check (default: all)")
    check.add_argument("--quick", action="store_true", help="only what needs no kernel")

    course = commands.add_parser("course", help="lay out the nbgrader course folder")
    grade = commands.add_parser("grade", help="grade submitted notebooks of a lab")
    grade.add_argument("lab", nargs="?", metavar="LAB", help="02, 02_checkpointing or a path")
    grade.add_argument("--students", nargs="+", action="extend", default=[], metavar="NAME", help="only these learners")
    grade.add_argument(
        "--submissions", type=Path, metavar="DIR", help="holds STUDENT/LAB/LAB.ipynb (default: the course's)"
    )
    grade.add_argument("--jobs", type=int, default=1, metavar="N", help="notebooks at once (default: 1)")
    grade.add_argument(
        "--demo", action="store_true", help="grade three made-up submissions of LAB, or of every lab: untouched, half done, solved"
    )
    for command in (course, grade):
        command.add_argument(
            "--course", type=Path, metavar="DIR", help="nbgrader course folder (default: build/course)"
        )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 when something is wrong with the labs or a submission, 2 for wrong usage."""
    options = parser().parse_args(arguments)
    project = Project(options.root.resolve()) if options.root else Project.default()
    try:
        return {"build": _build, "check": _check, "course": _course, "grade": _grade}[options.command](project, options)
    except (LookupError, RuntimeError) as error:
        print(f"error: {error.args[0] if error.args else type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        if options.command == "grade":
            print(
                "What was graded is kept; run the same command again for the rest (it grades everybody anew; "
                "--students NAME ... grades only some).",
                file=sys.stderr,
            )
        return 130


def _build(project: Project, options: argparse.Namespace) -> int:
    from autograder.build import build

    problems, warnings = build(project, options.labs)
    return _report(problems, warnings)


def _check(project: Project, options: argparse.Namespace) -> int:
    from autograder.build.verify import check

    problems, warnings = check(project, options.labs, quick=options.quick)
    return _report(problems, warnings, done="All labs hold.")


def _course(project: Project, options: argparse.Namespace) -> int:
    from autograder.course import lay_out

    course = lay_out(project, (options.course or project.course).resolve())
    print(f"Course folder: {course.root}")
    print(f"  cd {course.root} && nbgrader autograde LAB       (and jupyter lab, for the Formgrader)")
    return 0


def _grade(project: Project, options: argparse.Namespace) -> int:
    from autograder.intake import students_in

    if options.demo:
        labs = [project.lab_name(options.lab)] if options.lab else _every_lab(project)
        graded = [_grade_demo(project, options, lab) for lab in labs]
        return 0 if all(graded) else 1
    if not options.lab:
        raise LookupError("Which lab? Give its number, or --demo.")
    lab = project.lab_name(options.lab)
    if options.submissions:
        students_in(options.submissions, lab)  # told before anything is laid out
    course, outcomes = _run(project, options, lab, options.submissions.resolve() if options.submissions else None)
    _tell_where(course, lab, outcomes)
    return 0 if all(outcome.graded for outcome in outcomes) else 1


def _run(
    project: Project, options: argparse.Namespace, lab: str, submissions: Path | None, folder: Path | None = None
) -> tuple[Course, list[Outcome]]:
    from autograder import demo
    from autograder.course import lay_out
    from autograder.engine import KernelExecutor
    from autograder.grade import grade
    from autograder.judge import VerdictJudge

    course = lay_out(project, (options.course or folder or project.course).resolve(), [lab])
    if options.demo:
        submissions = demo.hand_in(project, course, lab)
    return course, grade(
        course, lab, KernelExecutor(course.config), VerdictJudge(), submissions=submissions, students=options.students,
        jobs=options.jobs,
    )  # fmt: skip


def _grade_demo(project: Project, options: argparse.Namespace, lab: str) -> bool:
    """Grade the three made-up submissions of one lab and print their points; whether all were graded."""
    from autograder import demo, gradebook

    print(f"\n{lab}")
    course, outcomes = _run(project, options, lab, None, project.root / "build" / "demo")
    demo.read_answers(course, lab, outcomes)
    print()
    for student in demo.STUDENTS:
        now = gradebook.standing(course, lab, student)
        points = f"{now.points:g} of {now.max_points:g}" if now else "not graded"
        by_hand = "  (written answers graded by hand with full points, as you would)" if now and student == "solved" else ""
        print(f"  {student:<12} {points}{by_hand}")
    _tell_where(course, lab, outcomes)
    return all(outcome.graded for outcome in outcomes)


def _tell_where(course: Course, lab: str, outcomes: Sequence[Outcome]) -> None:
    from autograder.export import csv_path

    print(f"\n{_summary(outcomes)}")
    print(f"Feedback pages: {course.root / 'feedback'}/STUDENT/{lab}/{lab}.html")
    print(f"Grades: {csv_path(course, lab)}", flush=True)


def _summary(outcomes: Sequence[Outcome]) -> str:
    """How many were graded, and who was not, by status; nothing handed in is 0 points."""
    students: dict[str, list[str]] = {}
    for outcome in outcomes:
        students.setdefault(outcome.status, []).append(outcome.student)
    text = f"Graded {len(students.pop('graded', []))} of {len(outcomes)}."
    for status, names in sorted(students.items()):
        what = "No submission, 0 points" if status == "no submission" else f"Not graded, {status}"
        text += f" {what}: {', '.join(names)}."
    return text.encode("utf-8", "replace").decode()


def _every_lab(project: Project) -> list[str]:
    paths = project.source_files()
    if not paths:
        raise LookupError(f"There are no labs in {project.sources}.")
    return [path.stem for path in paths]


def _report(problems: Sequence[str], warnings: Sequence[str], done: str = "") -> int:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}.", file=sys.stderr)
    elif done:
        print(done)
    return 1 if problems else 0

"""nbgrader's own commands in the course folder, and ours with real kernels: the same points for the same work."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from autograder import cli, gradebook
from autograder.build.builder import build_lab
from autograder.build.verify import run_problems
from autograder.course import Course, lay_out
from autograder.engine import KernelExecutor
from autograder.grade import grade
from autograder.judge import VerdictJudge
from autograder.project import Project
from tests.autograder.tiny import LAB, cell_of, hand_in, make_project, solved

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # nbgrader's own


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def course(project: Project) -> Course:
    course = lay_out(project, project.root / "build" / "course")
    work = solved()
    cell_of(work, "double").source = """import sys, warnings

def double(x):
    warnings.warn('careful')
    print('!', file=sys.stderr)
    return 2 * x"""
    twin = copy.deepcopy(cell_of(work, "check-double"))
    twin.id = "twin"
    work.cells.append(twin)
    del work.metadata["kernelspec"]["language"]
    cell_of(work, "check-double").metadata.nbgrader.points = 500
    hand_in(course.root / "submitted", "ada", work)
    return course


def nbgrader(course: Course, *arguments: str) -> str:
    command = [sys.executable, "-m", "nbgrader", *arguments]
    done = subprocess.run(command, cwd=course.root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_release_is_what_nbgrader_generates(project: Project, course: Course) -> None:
    assert (course.root / "release" / LAB / f"{LAB}.ipynb").read_bytes() == project.release(LAB).read_bytes()


def test_nbgrader_and_we_give_the_same_points_and_pages(course: Course) -> None:
    nbgrader(course, "autograde", LAB)
    nbgrader(course, "generate_feedback", LAB)
    theirs = gradebook.standing(course, LAB, "ada")
    page = gradebook.feedback_page(course, LAB, "ada")
    assert theirs is not None and (theirs.points, theirs.max_points, theirs.waiting) == (8, 10, 1)
    their_page = page.read_text()
    page.unlink()
    (ours,) = grade(course, LAB, KernelExecutor(course.config), VerdictJudge())
    assert (ours.points, ours.max_points, ours.waiting) == (8, 10, 1)
    assert ours.flags == ["check-double: 2 cells carry this id; the one in the released place counts"]
    for text in (their_page, page.read_text()):
        assert "tiny.double 4 of 4 points" in text and "hidden cases" in text and "exam(" not in text


def test_the_demo_prints_nothing_something_and_everything(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--root", str(project.root), "grade", "--demo"]) == 0
    printed = capsys.readouterr().out
    table = printed.split("\n\n")[1]
    rows = [line.split()[:4] for line in table.splitlines()]
    assert rows == [["untouched", "0", "of", "10"], ["half-done", "6", "of", "10"], ["solved", "10", "of", "10"]]
    assert f"{project.root}/build/demo/feedback" in printed


def test_check_passes_a_good_lab(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--root", str(project.root), "check"]) == 0
    assert "release 0 s, solution 0 s: ok" in capsys.readouterr().out


def test_a_release_that_scores_and_a_solution_that_does_not_are_told(project: Project) -> None:
    built = build_lab(project.sources / f"{LAB}.py")
    cell_of(built.release, "double").source = "def double(x):\n    return x + x if x == 1 else 0"
    cell_of(
        built.solution, "triple"
    ).source = "class Triple:\n    def __call__(self, x):\n        return 4 * x\n\n1 / 0"
    told = "\n".join(run_problems(built, KernelExecutor()))
    assert "release: check-double (exercise 90.1) gives 2.0 points for nothing (partial)" in told
    assert "release: exam-double (exercise 90.1) gives 0.5 points for nothing" in told
    assert "solution: check-triple (exercise 90.2) gives the solution 0.0 of 2 points (fail)" in told
    assert "solution: cell 9 fails with ZeroDivisionError: division by zero" in told
    assert told.count("\n") == 3

"""A batch: one submission's trouble is never another's, people's grades stay, and so does what was handed in."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

from autograder import cli, engine, gradebook
from autograder.course import Course, CourseError, lay_out
from autograder.engine import Execution
from autograder.export import csv_path, harmless
from autograder.grade import Outcome, grade
from autograder.judge import VerdictJudge
from autograder.note import write_note
from autograder.progress import Progress, duration
from autograder.steps import ShowFeedback
from tests.autograder.tiny import LAB, InProcessExecutor, cell_of, hand_in, make_project, solved, tiny_lab

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # nbgrader's own


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    root = tmp_path_factory.mktemp("tiny")
    return lay_out(make_project(root), root / "build" / "course")


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Path]:
    """A folder of submissions; that not a byte of it changes is checked after each test."""
    yield tmp_path
    for path, content in INBOX.items():
        assert path.read_bytes() == content
    INBOX.clear()


INBOX: dict[Path, bytes] = {}


def put(folder: Path, student: str, notebook: NotebookNode | bytes, name: str = f"{LAB}.ipynb") -> None:
    path = hand_in(folder, student, notebook, name)
    INBOX[path] = path.read_bytes()


def run(course: Course, inbox: Path, executor: object = None, **options: object) -> dict[str, Outcome]:
    told = io.StringIO()
    outcomes = grade(
        course, LAB, executor or InProcessExecutor(), VerdictJudge(), submissions=inbox, progress=Progress(told), **options
    )  # fmt: skip
    lines = told.getvalue().splitlines()
    assert len(lines) == 2 * len(outcomes) + 1 and lines[1].startswith(f"  [1/{len(outcomes)}] ")
    return {outcome.student: outcome for outcome in outcomes}


class Crashing(InProcessExecutor):
    """An engine with trouble of its own on one notebook."""

    def execute(self, notebook: NotebookNode, folder: Path) -> Execution:
        if "CRASH" in str(notebook):
            raise OSError("no space left on device")
        return super().execute(notebook, folder)


def test_one_bad_submission_never_stops_the_batch(course: Course, inbox: Path) -> None:
    crash = solved()
    cell_of(crash, "double").source += "  # CRASH"
    put(inbox, "crash", crash)
    put(inbox, "o'brien", solved())
    put(inbox, "x[1]", solved(), "renamed.ipynb")
    put(inbox, "=1+1", solved())
    put(inbox, "junk", b"{")
    (inbox / "empty" / LAB).mkdir(parents=True)
    put(inbox, "untouched", tiny_lab().release)
    outcomes = run(course, inbox, Crashing(), jobs=2)
    assert {student: (outcome.status, outcome.points) for student, outcome in outcomes.items()} == {
        "crash": ("grader error", None),
        "o'brien": ("graded", 8),
        "x[1]": ("graded", 8),
        "=1+1": ("graded", 8),
        "junk": ("unreadable", None),
        "empty": ("no submission", 0),
        "untouched": ("graded", 0),
    }
    assert "no space left" in outcomes["crash"].line() and "not JSON" in outcomes["junk"].line()
    assert outcomes["junk"].flags[0].endswith("the file is cut off or damaged: ask the learner to hand in again")
    for student in ("o'brien", "x[1]", "=1+1"):
        page = gradebook.feedback_page(course, LAB, student).read_text()
        assert "hidden cases" in page and "8.0 / 10.0" in page and "exam(" not in page and "caption>tiny.double" in page
    for student in ("junk", "empty"):
        page = gradebook.feedback_page(course, LAB, student).read_text()
        assert f"hand in {LAB}.ipynb" in page and "ask the learner" not in page
    assert cli._summary(list(outcomes.values())) == (
        "Graded 4 of 7. Not graded, grader error: crash. No submission, 0 points: empty. Not graded, unreadable: junk."
    )
    with csv_path(course, LAB).open(newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert rows["'=1+1"]["points"] == "8.0" and rows["'=1+1"]["check-double"] == "4.0"
    assert rows["junk"]["points"] == "" and rows["junk"]["status"] == "unreadable"
    assert rows["empty"]["points"] == "0.0"
    kept = json.loads((course.root / "results" / LAB / "x[1].json").read_text())
    assert kept["points"] == 8 and kept["scores"][0]["verdict"]["status"] == "pass" and len(kept["sha256"]) == 64
    assert not list((course.root / "work").rglob("*.ipynb"))


def test_grades_of_a_person_stay_when_graded_again(course: Course, inbox: Path) -> None:
    put(inbox, "mary", solved())
    assert run(course, inbox)["mary"].points == 8
    gradebook.grade_by_hand(course, LAB, "mary", "reflection-1", 1.5)
    gradebook.grade_by_hand(course, LAB, "mary", "check-triple", 1)
    again = run(course, inbox)["mary"]
    assert again.points == 8.5 and again.waiting == 2  # both marked for another look
    worse = solved()
    cell_of(worse, "double").source = "def double(x):\n    return 0"
    INBOX.clear()
    put(inbox, "mary", worse)
    assert run(course, inbox)["mary"].points == 2.5


def test_a_late_submission_keeps_its_time_and_a_bad_time_is_flagged(course: Course, inbox: Path) -> None:
    put(inbox, "late", solved())
    put(inbox, "late", b"2026-01-02 03:04:05 UTC", "timestamp.txt")
    put(inbox, "odd", solved())
    put(inbox, "odd", b"yesterday", "timestamp.txt")
    outcomes = run(course, inbox)
    assert outcomes["odd"].points == 8 and "yesterday" in outcomes["odd"].flags[0]
    with course.gradebook() as book:
        assert book.find_submission(LAB, "late").timestamp.isoformat() == "2026-01-02T03:04:05"
        assert book.find_submission(LAB, "odd").timestamp is None


def test_only_the_named_students_and_a_missing_one_is_told(course: Course, inbox: Path) -> None:
    put(inbox, "one", solved())
    put(inbox, "two", solved())
    assert list(run(course, inbox, students=["two"])) == ["two"]
    with pytest.raises(LookupError, match="three"):
        run(course, inbox, students=["three"])


def test_grading_some_again_keeps_the_rows_and_flags_of_all_others(course: Course, inbox: Path) -> None:
    edited = solved()
    cell_of(edited, "check-double").source = "42"
    put(inbox, "edited", edited)
    put(inbox, "junk", b"{")
    put(inbox, "new", solved())
    run(course, inbox, students=["edited", "junk"])
    before = rows_of(course)
    run(course, inbox, students=["new"])
    after = rows_of(course)
    assert "the check was edited" in after["edited"]["flags"] and after["junk"]["status"] == "unreadable"
    assert after == before | {"new": after["new"]} and after["new"]["points"] == "8.0"


def test_the_demo_and_its_csv_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(tmp_path)
    monkeypatch.setattr(engine, "KernelExecutor", lambda config: InProcessExecutor())
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert cli.main(["--root", str(tmp_path), "grade", "--demo"]) == 0
    assert "solved       10 of 10  (written answers graded by hand" in told.getvalue()
    demo = tmp_path / "build" / "demo"
    with (demo / "grades" / f"{LAB}.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["student"] == "solved")
    assert (row["points"], row["to_read"]) == ("10.0", "0")
    assert json.loads((demo / "results" / LAB / "solved.json").read_text())["points"] == 10


def test_a_note_is_plain_text(tmp_path: Path) -> None:
    write_note(tmp_path / "x" / "page.html", LAB, "not graded", "<script>.ipynb: not JSON {0}")
    page = (tmp_path / "x" / "page.html").read_text()
    assert "&lt;script&gt;.ipynb: not JSON {0}" in page and "<script>" not in page


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_who_is_being_graded_and_keeps_only_the_results() -> None:
    screen = Terminal()
    progress = Progress(screen)
    progress.begin(2, "lab")
    for name in ("ada", "bob"):
        progress.start(name)
        progress.end(name, f"{name} done")
    written = screen.getvalue()
    assert "  [1/2] ada ..." in written and "[2/2] bob ...  about 5 s left" in written
    lines = [line.split("\x1b[K")[-1] for line in written.split("\n")]
    assert lines == ["lab", "  [1/2] ada done", "  [2/2] bob done", ""]
    assert [duration(seconds) for seconds in (1, 42, 200, 7200)] == ["5 s", "40 s", "3 min", "2.0 h"]


def test_students_may_be_named_by_several_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = cli.parser().parse_args(["grade", "90", "--students", "ada", "bob", "--students", "cyd"])
    assert options.students == ["ada", "bob", "cyd"]

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_grade", interrupted)
    assert cli.main(["grade", "90"]) == 130
    assert "run the same command again for the rest" in capsys.readouterr().err


def rows_of(course: Course) -> dict[str, dict[str, str]]:
    with csv_path(course, LAB).open(newline="") as file:
        return {row["student"]: row for row in csv.DictReader(file) if row["student"] in ("edited", "junk", "new")}


def test_flags_of_a_submission_stand_on_its_page(course: Course, inbox: Path) -> None:
    notebook = solved()
    cell_of(notebook, "check-double").source = "42  # <script>"
    put(inbox, "editor", notebook)
    outcome = run(course, inbox)["editor"]
    assert outcome.points == 8
    page = gradebook.feedback_page(course, LAB, "editor").read_text()
    assert "the check was edited; the released one was used" in page


def test_a_widget_gives_way_to_its_picture_on_a_page() -> None:
    picture = {"image/png": "aGVsbG8=", "text/plain": "LiveMemory"}
    live = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "application/javascript": "alert(1)"}
    shown = new_code_cell("live", outputs=[new_output("display_data", data=live | picture)])
    notebook, _ = ShowFeedback().preprocess(new_notebook(cells=[shown]), {})
    assert notebook.cells[1].outputs[0].data == picture


def test_a_changed_lab_with_grades_is_refused_and_told(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    course = lay_out(project, tmp_path / "course")
    hand_in(tmp_path / "in", "ada", solved())
    run(course, tmp_path / "in")
    solution = project.solution(LAB)
    solution.write_text(solution.read_text().replace("check-triple", "check-three"))
    with pytest.raises(CourseError, match="new folder with --course"):
        lay_out(project, tmp_path / "course")
    assert gradebook.standing(course, LAB, "ada").points == 8
    with pytest.raises(CourseError, match="cannot work in"):
        lay_out(project, tmp_path / "x[1]")


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1"])
def test_text_that_a_spreadsheet_would_run_is_neutral(text: str) -> None:
    assert harmless(text) == "'" + text and harmless("a=1") == "a=1" and harmless(-1.0) == -1.0


def test_wrong_usage_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_project(tmp_path)
    root = ["--root", str(tmp_path)]
    assert cli.main([*root, "grade", "77"]) == 2
    assert "There is no lab '77'. Labs: 90_tiny." in capsys.readouterr().err
    assert cli.main([*root, "grade"]) == 2
    assert cli.main([*root, "grade", "90", "--submissions", str(tmp_path / "nowhere")]) == 2
    assert "no folder" in capsys.readouterr().err

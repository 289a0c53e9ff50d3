"""Sources to notebooks: the same bytes every time, the right stubs, and a clear message for each fault of a source."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import pytest

from autograder.build import SourceError, build, build_lab
from autograder.build.verify import SLOW_S, _cell_problems, check, run_problems
from autograder.engine import Execution
from autograder.project import Project
from tests.autograder.tiny import LAB, SOURCE, cell_of, make_project, tiny_lab

TEXT = (SOURCE / "notebooks" / "source" / f"{LAB}.py").read_text()


def build_text(tmp_path: Path, text: str, name: str = LAB) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    build_lab(path)


def test_a_build_is_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    project = make_project(tmp_path / "one")
    command = [sys.executable, "-m", "autograder", "--root", str(tmp_path / "two"), "build"]
    (tmp_path / "two" / "notebooks").mkdir(parents=True)
    (tmp_path / "two" / "notebooks" / "source").symlink_to(SOURCE / "notebooks" / "source")
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}, cwd=Path(__file__).parents[2])
    other = Project(tmp_path / "two")
    for kind in ("release", "solution", "manifest"):
        assert getattr(project, kind)(LAB).read_bytes() == getattr(other, kind)(LAB).read_bytes()


def test_the_release_holds_stubs_and_the_solution_everything() -> None:
    built = tiny_lab()
    sources = {cell.id: cell.source for cell in built.release.cells}
    assert sources["predict-double"] == "predicted = None  # your number"
    assert sources["double"] == (
        'def double(x):\n    """Return `x` twice as large."""\n    raise NotImplementedError("Exercise 90.1: double")'
    )
    assert sources["triple"].endswith('        raise NotImplementedError("Exercise 90.2: Triple.__call__")')
    assert sources["exam-double"] == "# Hidden cases run here when graded."
    assert sources["reflection-1"].endswith("\n\n*Your answer here.*")
    text = json.dumps(built.release)
    assert "SOLUTION" not in text and "HIDDEN" not in text and "jupytext" not in text and "exam(" not in text
    kept = json.dumps(built.solution)
    assert "BEGIN SOLUTION" in kept and "BEGIN HIDDEN TESTS" in kept and "Rubric" in kept and "checksum" not in kept
    for notebook in (built.release, built.solution):
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"
        assert all(cell.outputs == [] for cell in notebook.cells if cell.cell_type == "code")
    assert [cell.id for cell in built.release.cells] == [cell.id for cell in built.solution.cells]


@pytest.mark.parametrize(
    ("source", "stub"),
    [
        ("x = 1\n### BEGIN SOLUTION\ny = 2\n### END SOLUTION", 'x = 1\nraise NotImplementedError("Exercise 2.2")'),
        (
            "### BEGIN SOLUTION\ndef f():\n    return 1\n### END SOLUTION",
            'raise NotImplementedError("Exercise 2.2: f")',
        ),
        ("n = None\n### BEGIN SOLUTION\nn = 3\n### END SOLUTION\nprint(n)", "n = None\nprint(n)"),
        (
            "def f(\n    a,\n):\n    b = a\n    ### BEGIN SOLUTION\n    b += 1\n    ### END SOLUTION\n    return b",
            'def f(\n    a,\n):\n    b = a\n    raise NotImplementedError("Exercise 2.2: f")\n    return b',
        ),
        (
            "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n\n\nclass A:\n    def g(self):\n"
            "        ### BEGIN SOLUTION\n        return 2\n        ### END SOLUTION",
            'def f():\n    raise NotImplementedError("Exercise 2.2: f")\n\n\nclass A:\n    def g(self):\n'
            '        raise NotImplementedError("Exercise 2.2: A.g")',
        ),
    ],
)
def test_stubs(source: str, stub: str) -> None:
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    from autograder.build.preprocessors import ClearExercises

    header = {"grade": False, "grade_id": "a", "locked": False, "schema_version": 3, "solution": True, "task": False}
    cells = [
        new_markdown_cell("## 2.1 A"),
        new_markdown_cell("## 2.2 B\n\n### Why\n\n```python\n# comment\n```"),
        new_code_cell(source),
    ]
    cells[-1].metadata["nbgrader"] = header
    notebook, _ = ClearExercises().preprocess(new_notebook(cells=cells), {})
    assert notebook.cells[-1].source == stub
    ast.parse(stub)


def test_the_manifest_says_what_labkit_and_the_grader_need() -> None:
    manifest = tiny_lab().manifest
    assert manifest["lab"] == "90" and manifest["title"] == "Tiny: two functions" and manifest["points"] == 10
    cells = {cell["grade_id"]: cell for cell in manifest["cells"]}
    assert [cell["kind"] for cell in cells.values()] == [
        "answer", "answer", "check", "hidden", "answer", "check", "reflection",
    ]  # fmt: skip
    assert cells["exam-double"]["check"] == "tiny.double" and cells["exam-double"]["points"] == 2
    assert cells["triple"]["exercise"] == "90.2" and "NotImplementedError" in cells["triple"]["source"]
    assert [cell["position"] for cell in manifest["given"]] == [1, 7]


FAULTS = {
    "missing schema_version": ('"schema_version": 3, "solution": true', '"solution": true', "lacks 'schema_version'"),
    "not JSON": ('nbgrader={"grade": false, "grade_id": "double"', "nbgrader={grade: false", "not JSON"),
    "locked answer": ('"double", "locked": false', '"double", "locked": true', '"locked": false'),
    "no points": ('"locked": true, "points": 4, ', '"locked": true, ', '"points" above 0'),
    "no shape": ('"grade": true, "grade_id": "check-double"', '"grade": false, "grade_id": "check-double"', "no shape"),
    "extra key": ('"grade_id": "double",', '"grade_id": "double", "checksum": "x",', "no 'checksum'"),
    "not kebab": ('"grade_id": "check-triple"', '"grade_id": "check_triple"', "not kebab-case"),
    "repeated": ('"grade_id": "check-triple"', '"grade_id": "check-double"', "used by cell 5 too"),
    "open region": ("    ### END SOLUTION\n\n# %% nbgrader={", "\n# %% nbgrader={", "BEGIN SOLUTION without"),
    "nothing to solve": (
        "    ### BEGIN SOLUTION\n    return SCALE * x\n    ### END SOLUTION",
        "    return SCALE * x",
        "no solution between",
    ),
    "points do not sum": ("points: 10", "points: 11", "sum to 10, the front matter says 11"),
    "visible with hidden": ("# Hidden cases run here", "print(1)  # Hidden cases run here", "two graded cells"),
    "no score": ('check("tiny.triple", Triple)', 'score = check("tiny.triple", Triple)', "must end in a call of check"),
    "no front matter": ("# ---\n", "", "front matter"),
    "front matter lacks": ("minutes: 5, ", "", "'minutes'"),
    "another name": ('lab: "90"', 'lab: "91"', "says 91_tiny"),
    "solution in given code": ("SCALE = 2", "### BEGIN SOLUTION\nSCALE = 2\n### END SOLUTION", "only answers"),
    "no heading": ("# ## 90.1 Double\n", "# Double\n", "under no exercise"),
    "heading without a number": ("# ## 90.2 Triple\n", "# ## Triple\n", "under no exercise"),
    "syntax": ("return SCALE * x", "return SCALE *", "not valid Python"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_a_source_is_told(name: str, tmp_path: Path) -> None:
    old, new, told = FAULTS[name]
    assert old in TEXT
    with pytest.raises(SourceError, match=".") as caught:
        build_text(tmp_path, TEXT.replace(old, new, 1) if name != "no front matter" else TEXT.replace(old, new))
    assert told in str(caught.value)
    assert LAB in str(caught.value)


def test_stale_missing_and_orphaned_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = make_project(tmp_path)
    assert check(project, quick=True) == ([], [])
    project.release(LAB).write_text(project.release(LAB).read_text().replace("Tiny", "tiny"))
    project.manifest(LAB).unlink()
    (project.root / "labkit" / "labs" / "91_gone.json").write_text("{}")
    problems, _ = check(project, quick=True)
    assert ["is stale; run" in problems[0], "is missing; run" in problems[1], "source is gone" in problems[2]] == [
        True, True, True,
    ]  # fmt: skip


def test_a_grade_id_that_goes_is_warned_about_and_a_bad_lab_keeps_its_files(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    source = project.sources / f"{LAB}.py"
    source.write_text(TEXT.replace('"grade_id": "check-triple"', '"grade_id": "check-three"'))
    problems, warnings = build(project)
    assert problems == [] and len(warnings) == 1 and "'check-triple' was there before" in warnings[0]
    before = project.release(LAB).read_bytes()
    source.write_text(TEXT.replace("points: 10", "points: 11"))
    problems, _ = build(project)
    assert len(problems) == 1 and project.release(LAB).read_bytes() == before


def test_checks_are_locked_in_the_release() -> None:
    cell = cell_of(tiny_lab().release, "check-double")
    assert cell.metadata.deletable is False and cell.metadata.editable is False
    assert cell.metadata.nbgrader.checksum


def test_a_slow_cell_is_a_problem_or_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("wait()"), nbformat.v4.new_code_cell("quick()")])
    slow = Execution(notebook, {0: SLOW_S + 1.0, 1: 1.0})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 2.0, 2.0))
    (problem,) = _cell_problems("90_tiny", "release", slow)
    assert "cell 0 ran 21 s" in problem and "'wait()'" in problem
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    assert _cell_problems("90_tiny", "release", slow) == []
    assert "warning: 90_tiny: release: cell 0 ran 21 s" in capsys.readouterr().out


def test_ctrl_c_ends_both_kernels() -> None:
    class Interrupted:
        """The first notebook is interrupted, the other runs until it is stopped."""

        def __init__(self) -> None:
            self.first, self.stopped = threading.Lock(), threading.Event()

        def execute(self, notebook: nbformat.NotebookNode, folder: Path) -> Execution:
            if self.first.acquire(blocking=False):
                raise KeyboardInterrupt
            assert self.stopped.wait(60), "nobody stopped it"
            return Execution(notebook)

        def stop(self) -> None:
            self.stopped.set()

    executor = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_problems(tiny_lab(), executor)
    assert executor.stopped.is_set()

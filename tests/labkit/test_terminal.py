"""A lab from a terminal: verdicts printed as they come, points so far, an exercise put back; bad notebooks told, nothing lost."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from labkit import cli, terminal
from labkit.checks import Verdict
from labkit.manifests import Cell, Manifest

STUB = 'def double(x):\n    raise NotImplementedError("Exercise 1.1: double")'
MANIFEST = Manifest(
    "01_toy",
    "01",
    "toy",
    6,
    (
        Cell("double", "answer", 0, "1.1", STUB),
        Cell("check-double", "check", 4, "1.1", 'check("toy.double", double)'),
        Cell("exam-double", "hidden", 2, "1.1", "# Hidden cases run here when graded."),
    ),
    {},
)
GIVEN = "import tests.labkit.toy_checks\nfrom labkit import check"


@pytest.fixture(autouse=True)
def _course(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "load_manifests", lambda: {"01": MANIFEST})
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setenv("COLUMNS", "80")


def _notebook(folder: Path, answer: str, *, outputs: list | None = None) -> Path:
    cells = [
        nbformat.v4.new_code_cell(GIVEN, id="given"),
        nbformat.v4.new_code_cell(answer, id="double", metadata={"nbgrader": {"grade_id": "double"}}),
        nbformat.v4.new_code_cell('check("toy.double", double)', id="check-double", outputs=outputs or []),
    ]
    path = folder / "01_toy.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def _output(verdict: Verdict) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("execute_result", data=verdict._repr_mimebundle_())


@pytest.mark.parametrize(("answer", "code", "told"), [("double = lambda x: x + x", 0, "4 of 4 points"), (STUB, 1, "is not written yet")])
def test_check_prints_verdicts_and_leaves_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture, answer: str, code: int, told: str
) -> None:
    # `toy.double` lives in the tests, so the notebook registers it by importing it; a lab's own checks are found by name.
    path = _notebook(tmp_path, answer)
    before = path.read_bytes()
    assert cli.main(["check", str(path)]) == code
    out = capsys.readouterr().out
    assert told in out and out.rstrip().splitlines()[-1] == f"{'4' if code == 0 else '0'} of 4 points"
    assert path.read_bytes() == before


def test_check_tells_a_cell_that_fails_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = _notebook(tmp_path, "def double(x) return x")
    assert cli.main(["check", str(path)]) == 1
    assert "the cell that begins `def double(x) return x`: SyntaxError" in (out := capsys.readouterr().out)
    assert "1 later cells failed too" in out


def test_check_tells_a_dead_kernel(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = _notebook(tmp_path, "import os; os._exit(1)")
    assert cli.main(["check", str(path)]) == 2
    assert "kernel died" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"not json", b"{}", b'{"cells": 5, "nbformat": 4, "nbformat_minor": 5}', b"\xff\xfe\x00"])
def test_what_is_no_notebook_is_told(tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes) -> None:
    path = tmp_path / "01_toy.ipynb"
    path.write_bytes(content)
    assert cli.main(["check", str(path)]) == 2
    assert "is not a notebook that can be read" in capsys.readouterr().err
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "is not a notebook that can be read" in capsys.readouterr().out
    assert cli.main(["reset", "01", "1.1", "--notebook", str(path)]) == 1
    assert path.read_bytes() == content


def test_status_reads_saved_points(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "no notebook below" in capsys.readouterr().out
    _notebook(tmp_path, STUB)
    cli.main(["status", str(tmp_path)])
    assert "0 of 4 points" in (out := capsys.readouterr().out) and "check-double: not run yet" in out
    _notebook(tmp_path, STUB, outputs=[_output(Verdict("toy.double", "partial", 3, 4))])
    cli.main(["status", str(tmp_path)])
    assert "3 of 4 points" in (out := capsys.readouterr().out) and "check-double: partial, 3 of 4" in out


def test_a_mangled_verdict_is_no_verdict() -> None:
    for data in (5, {}, {"criteria": [{}]}, {"criteria": 3}, {"criteria": [], "check": "x", "no such field": 1}):
        assert terminal.verdict_of({"data": {"application/vnd.labkit.verdict+json": data}}) is None


def test_reset_puts_the_stub_back_and_keeps_the_old(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = _notebook(tmp_path, "double = 'mine'")
    before = path.read_bytes()
    for number in (1, 2):
        if number == 2:
            assert cli.main(["reset", "1", "1.1", "--notebook", str(path)]) == 0  # nothing to do, and no copy of nothing
            assert "its stub already" in capsys.readouterr().out
            _notebook(tmp_path, "double = 'mine again'")
        assert cli.main(["reset", "1", "1.1", "--notebook", str(path)]) == 0
        assert f"01_toy.before-reset-{number}.ipynb" in capsys.readouterr().out
    assert (tmp_path / "01_toy.before-reset-1.ipynb").read_bytes() == before
    cells = json.loads(path.read_text())["cells"]
    assert "".join(cells[1]["source"]) == STUB and "".join(cells[0]["source"]) == GIVEN
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        "01_toy.before-reset-1.ipynb",
        "01_toy.before-reset-2.ipynb",
        "01_toy.ipynb",
    ]


@pytest.mark.parametrize(("arguments", "told"), [(["reset", "07", "1.1"], "There is no lab 07"), (["reset", "01", "9"], "It has 1.1")])
def test_reset_of_what_is_not_there(capsys: pytest.CaptureFixture, arguments: list[str], told: str) -> None:
    assert cli.main(arguments) == 1
    assert told in capsys.readouterr().err


def test_reset_of_a_notebook_without_the_cell(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "01_toy.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), path)
    assert cli.main(["reset", "01", "1.1", "--notebook", str(path)]) == 1
    assert "has none of the answer cells" in capsys.readouterr().err


def test_several_notebooks_of_one_name_are_not_guessed_among(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("ann", "bob"):
        (tmp_path / name).mkdir()
        _notebook(tmp_path / name, "double = 'mine'")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reset", "01", "1.1"]) == 1
    assert "There are 2 notebooks" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*before-reset*"))
    (tmp_path / "work" / "01_toy").mkdir(parents=True)
    _notebook(tmp_path / "work" / "01_toy", "double = 'mine'")
    assert cli.main(["reset", "01", "1.1"]) == 0
    assert "work/01_toy/01_toy.ipynb" in capsys.readouterr().out


def test_ctrl_c_ends_a_check_at_once_and_leaves_no_kernel(tmp_path: Path) -> None:
    path = _notebook(tmp_path, "while True: pass")
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit.cli", "check", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    kernels: list[psutil.Process] = []
    while not any("ipykernel_launcher" in " ".join(child.cmdline()) and child.cpu_times().user > 2 for child in kernels):
        kernels = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and told.rstrip().endswith("stopped") and "Traceback" not in told
    assert not [child for child in kernels if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

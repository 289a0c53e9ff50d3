"""Real kernels: whatever a cell does, the notebook ends, and the cells after it are still run and scored."""

from __future__ import annotations

import time
from pathlib import Path

from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from traitlets.config import Config

from autograder.engine import Execution, KernelExecutor
from autograder.judge import VerdictJudge
from autograder.reference import make_reference
from autograder.repair import repair
from autograder.steps import judge_notebook
from tests.autograder.tiny import LAB, solved, tiny_lab

REFERENCE = make_reference(LAB, tiny_lab().solution)


def execute(notebook: NotebookNode, folder: Path, **limits: int) -> Execution:
    limits = {"timeout": 2, "notebook_timeout": 60, "max_output_bytes": 50_000} | limits
    config = Config({"ExecuteSubmission": limits, "Execute": {"shutdown_kernel": "immediate"}})
    return KernelExecutor(config).execute(notebook, folder)


def run(folder: Path, *sources: str, **limits: int) -> Execution:
    return execute(new_notebook(cells=[new_code_cell(source) for source in sources]), folder, **limits)


def texts(execution: Execution) -> list[str]:
    """What each cell shows: text, or the name of its error."""
    return [
        "".join(
            output.get("text", "") or output.get("ename", "") or output.data["text/plain"] for output in cell.outputs
        )
        for cell in execution.notebook.cells
    ]


def test_a_dead_kernel_marks_one_cell_and_the_rest_is_scored(tmp_path: Path) -> None:
    notebook = solved()
    notebook.cells.insert(6, new_code_cell("import os\nos._exit(1)"))  # between the checks of exercise 1
    repaired = repair(notebook, REFERENCE).notebook
    done = execute(repaired, tmp_path)
    scores = {score.key: score.points for score in judge_notebook(done.notebook, REFERENCE, VerdictJudge())}
    assert scores == {"check-double": 4, "exam-double": 2, "check-triple": 2, "reflection-1": None}
    assert done.notebook.cells[6].outputs[0].ename == "KernelDied"
    assert len(done.events) == 1 and "cell 6: The kernel died" in done.events[0]


def test_endless_deaf_noisy_and_asking_cells_end(tmp_path: Path) -> None:
    (tmp_path / "beside.txt").write_text("here")
    started = time.monotonic()
    done = run(
        tmp_path,
        "x = 1\nopen('beside.txt').read()",
        "while True: pass",
        "x += 1\nx",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        "x",
        "input('name? ')",
        "import sys, warnings\nwarnings.warn('careful')\nprint(1, file=sys.stderr)\n7",
        "for _ in range(50): print('y' * 1_000_000)\n8",
        "from IPython.display import HTML\nHTML('z' * 20_000_000)",
        "9",
    )
    told = texts(done)
    assert told[0] == "'here'"
    assert "CellTimeoutError" in told[1] or "KeyboardInterrupt" in told[1]
    assert told[2] == "2"
    assert told[3] == "CellTimeoutError" and "did not answer an interrupt" in done.events[1]
    assert told[4] == "2"  # run again in a new kernel, the lost cells left out
    assert "StdinNotImplementedError" in told[5]
    assert told[6].endswith("7") and "careful" in told[6]
    assert len(told[7]) < 60_000 and "output cut" in told[7] and "8" in told[7]
    assert len(str(done.notebook.cells[8].outputs)) < 60_000
    assert told[9] == "9"
    assert time.monotonic() - started < 90


def test_a_notebook_has_a_limit_of_its_own(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(tmp_path, *["import time\ntime.sleep(60)"] * 8, timeout=3, notebook_timeout=5)
    assert time.monotonic() - started < 30
    assert texts(done)[-1] == "NotRun" and "used up" in done.events[-1]


def test_a_kernel_that_dies_each_time_is_given_up(tmp_path: Path) -> None:
    done = run(tmp_path, *["import os\nos._exit(1)"] * 3, "1", max_restarts=1)
    assert texts(done) == ["KernelDied"] * 2 + ["NotRun"] * 2

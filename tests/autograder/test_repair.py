"""Damaged notebooks of right work get all their points, and the flags say what was put right."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from autograder.intake import read_notebook
from autograder.judge import VerdictJudge
from autograder.reference import make_reference
from autograder.repair import repair
from autograder.steps import judge_notebook
from tests.autograder.tiny import LAB, InProcessExecutor, cell_of, solved, tiny_lab

REFERENCE = make_reference(LAB, tiny_lab().solution)


def grade(notebook: NotebookNode) -> tuple[dict[str, float | None], list[str], NotebookNode]:
    """Points per graded cell, flags and the repaired notebook."""
    repaired = repair(read_notebook(json.dumps(notebook).encode()), REFERENCE)
    executed = InProcessExecutor().execute(repaired.notebook, Path())
    scores = judge_notebook(executed.notebook, REFERENCE, VerdictJudge())
    return {score.key: score.points for score in scores}, repaired.flags, repaired.notebook


FULL = {"check-double": 4, "exam-double": 2, "check-triple": 2, "reflection-1": None}


def delete(*keys: str) -> Callable[[NotebookNode], None]:
    def damage(notebook: NotebookNode) -> None:
        notebook.cells = [cell for cell in notebook.cells if cell.id not in keys]

    return damage


def no_nbgrader_metadata(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        cell.metadata = NotebookNode()


def no_metadata_and_no_ids(notebook: NotebookNode) -> None:
    """As Colab saves it: ids of its own, nbformat 4.0."""
    for index, cell in enumerate(notebook.cells):
        cell.metadata = NotebookNode(id=f"aBcDe{index}")
        del cell["id"]
    notebook.nbformat_minor = 0
    notebook.metadata = NotebookNode(
        colab={"provenance": []}, kernelspec={"name": "python3", "display_name": "Python 3"}
    )


def as_colab_with_answers_over_the_questions(notebook: NotebookNode) -> None:
    cell_of(notebook, "reflection-1").source = "Mine is 6, because three is said twice."
    cell_of(notebook, "double").source = "double = lambda x: x + x  # all my own"
    notebook.cells.insert(0, new_markdown_cell("My notes"))
    no_metadata_and_no_ids(notebook)


def renamed(key: str) -> Callable[[NotebookNode], None]:
    def damage(notebook: NotebookNode) -> None:
        cell = cell_of(notebook, key)
        cell.id, cell.metadata.nbgrader.grade_id = "mine", "mine"

    return damage


def copied(key: str, at: int | None = None) -> Callable[[NotebookNode], None]:
    def damage(notebook: NotebookNode) -> None:
        twin = copy.deepcopy(cell_of(notebook, key))
        twin.id = "twin"
        notebook.cells.insert(len(notebook.cells) if at is None else at, twin)

    return damage


def points_500(notebook: NotebookNode) -> None:
    cell_of(notebook, "check-double").metadata.nbgrader.points = 500


def not_graded(notebook: NotebookNode) -> None:
    cell_of(notebook, "check-double").metadata.nbgrader.update(grade=False, solution=True, locked=False)


def odd_metadata(notebook: NotebookNode) -> None:
    cell_of(notebook, "check-double").metadata["nbgrader"] = NotebookNode(grade_id="check-double", schema_version=99)
    cell_of(notebook, "double").metadata["nbgrader"] = "none"


def skip_tag(notebook: NotebookNode) -> None:
    cell_of(notebook, "check-double").metadata["tags"] = ["skip-execution", "raises-exception"]


def edited_check(notebook: NotebookNode) -> None:
    cell_of(notebook, "check-double").source = "99"


def check_made_text(notebook: NotebookNode) -> None:
    index = next(i for i, cell in enumerate(notebook.cells) if cell.id == "check-double")
    notebook.cells[index] = new_markdown_cell(
        source="check('tiny.double', double)", id="check-double", metadata=notebook.cells[index].metadata
    )


def own_cell_instead(notebook: NotebookNode) -> None:
    """The answer cell deleted, the function written in a new one."""
    index = next(i for i, cell in enumerate(notebook.cells) if cell.id == "double")
    notebook.cells[index] = new_code_cell(source="def double(x):\n    return x + x")


def check_first(notebook: NotebookNode) -> None:
    check = cell_of(notebook, "check-double")
    notebook.cells.remove(check)
    notebook.cells.insert(2, check)


def other_kernel(notebook: NotebookNode) -> None:
    notebook.metadata.kernelspec = NotebookNode(name="my-conda-env", display_name="mine")


def no_kernelspec(notebook: NotebookNode) -> None:
    notebook.metadata = NotebookNode()


def everything_after_the_stub(notebook: NotebookNode) -> None:
    """The stub left as it is, a working version below the check."""
    cell_of(notebook, "double").source = "def double(x):\n    return 2 * x\n\n\nassert double(1) == 2"


def old_outputs(notebook: NotebookNode) -> None:
    check = cell_of(notebook, "check-double")
    check.outputs = [nbformat.v4.new_output("execute_result", data={"text/plain": "99"})]
    check.execution_count = 7


def bad_ids(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        if "nbgrader" not in cell.metadata:
            cell.id = "double"


DAMAGES = {
    "none": (lambda notebook: None, []),
    "imports deleted": (delete(tiny_lab().release.cells[1].id), ["given code"]),
    "check deleted": (delete("check-double"), ["check-double"]),
    "all checks deleted": (delete("check-double", "exam-double", "check-triple"), ["exam-double"]),
    "hidden check deleted": (delete("exam-double"), ["exam-double"]),
    "prediction deleted": (delete("predict-double"), ["predict-double"]),
    "no nbgrader metadata": (no_nbgrader_metadata, []),
    "no metadata and no ids": (no_metadata_and_no_ids, ["7 cells had lost their ids and were found by their text"]),
    "as Colab, answers over the questions": (
        as_colab_with_answers_over_the_questions,
        ["reflection-1: has lost its id, found by its place"],
    ),
    "answer renamed": (renamed("double"), ["double: has lost its id"]),
    "check renamed": (renamed("check-double"), ["check-double: has lost its id"]),
    "reflection renamed": (renamed("reflection-1"), ["reflection-1: has lost its id"]),
    "check copied to the end": (copied("check-double"), ["check-double: 2 cells"]),
    "check copied to the start": (copied("check-double", 0), ["check-double: 2 cells"]),
    "answer copied": (copied("double", 4), ["double: 2 cells"]),
    "reflection copied": (copied("reflection-1"), ["reflection-1: 2 cells"]),
    "points 500": (points_500, []),
    "check no longer graded": (not_graded, []),
    "metadata of another version": (odd_metadata, []),
    "tags that skip": (skip_tag, []),
    "check edited": (edited_check, ["check-double: the check was edited"]),
    "check made text": (check_made_text, ["check-double: was made a markdown cell"]),
    "own cell instead": (own_cell_instead, ["double: has lost its id"]),
    "check above its answer": (check_first, ["check-double: stood above"]),
    "another kernel": (other_kernel, []),
    "no kernelspec": (no_kernelspec, []),
    "more code in an answer": (everything_after_the_stub, []),
    "outputs of another run": (old_outputs, []),
    "ids used twice": (bad_ids, []),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_right_work_in_a_damaged_notebook_keeps_its_points(name: str) -> None:
    damage, told = DAMAGES[name]
    notebook = solved()
    damage(notebook)
    points, flags, repaired = grade(notebook)
    assert points == FULL, flags
    for words in told:
        assert any(words in flag for flag in flags), flags
    if not told:
        assert flags == []
    assert repaired.metadata.kernelspec.name == "python3"
    keys = [cell.metadata.nbgrader.grade_id for cell in repaired.cells if "nbgrader" in cell.metadata]
    assert len(keys) == len(set(keys)) and set(FULL) <= set(keys)
    assert sum(cell.metadata.nbgrader.get("points", 0) for cell in repaired.cells if "nbgrader" in cell.metadata) == 10


def test_an_untouched_release_scores_nothing_and_needs_no_repair() -> None:
    points, flags, _ = grade(tiny_lab().release)
    assert points == dict.fromkeys(FULL, 0) and flags == []


def test_a_deleted_reflection_scores_nothing() -> None:
    notebook = solved()
    delete("reflection-1")(notebook)
    points, flags, _ = grade(notebook)
    assert points == {**FULL, "reflection-1": 0}
    assert flags == ["reflection-1: was deleted; it was put back"]


def test_a_deleted_answer_is_not_replaced_by_its_stub() -> None:
    notebook = solved()
    cell_of(notebook, "double").source = ""
    notebook.cells[1].source += "\n\ntwice = lambda x: 2 * x\ndouble = twice\n"
    points, _, _ = grade(notebook)
    assert points["check-double"] == 4


def test_the_written_copy_of_an_answer_is_the_answer() -> None:
    notebook = solved()
    stub = copy.deepcopy(cell_of(tiny_lab().release, "reflection-1"))
    notebook.cells.insert(2, stub)
    points, flags, _ = grade(notebook)
    assert points == FULL and "reflection-1: 2 cells" in flags[0]


def test_matching_a_huge_notebook_without_ids_ends_soon() -> None:
    notebook = solved()
    notebook.cells += [new_code_cell(f"x{i} = " + "1 + " * 5000 + "1") for i in range(1900)]
    no_metadata_and_no_ids(notebook)
    raw = read_notebook(json.dumps(notebook).encode())
    started = time.monotonic()
    assert repair(raw, REFERENCE).matched == 5
    assert time.monotonic() - started < 10


def test_pictures_in_a_written_answer_stay() -> None:
    notebook = solved()
    cell_of(notebook, "reflection-1")["attachments"] = {"plot.png": {"image/png": "aGVsbG8="}}
    _, _, repaired = grade(notebook)
    assert cell_of(repaired, "reflection-1").attachments == {"plot.png": {"image/png": "aGVsbG8="}}

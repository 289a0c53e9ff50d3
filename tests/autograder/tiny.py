"""The tiny course (fixtures/tiny) for tests: built once, submissions made from it, an executor without kernels."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import shutil
from pathlib import Path

import nbformat
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_output

from autograder.build.builder import BuiltLab, build_lab, notebook_bytes
from autograder.build.preprocessors import BEGIN, END
from autograder.engine import Execution
from autograder.project import Project

SOURCE = Path(__file__).parent / "fixtures" / "tiny"
LAB = "90_tiny"


def make_project(folder: Path) -> Project:
    """A copy of the tiny course in `folder`, built."""
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    project = Project(folder)
    for path, content in tiny_lab().files(project).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return project


def tiny_lab() -> BuiltLab:
    return build_lab(SOURCE / "notebooks" / "source" / f"{LAB}.py")


def solved() -> NotebookNode:
    """What a learner hands in who has done everything."""
    built = tiny_lab()
    notebook = copy.deepcopy(built.release)
    for cell, model in zip(notebook.cells, built.solution.cells, strict=True):
        if cell.metadata.get("nbgrader", {}).get("solution"):
            cell.source = "\n".join(line for line in model.source.split("\n") if BEGIN not in line and END not in line)
    return notebook


def cell_of(notebook: NotebookNode, key: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if cell.id == key)


def hand_in(folder: Path, student: str, notebook: NotebookNode | bytes, name: str = f"{LAB}.ipynb") -> Path:
    """Put a notebook (or the bytes of something else) where submissions lie."""
    path = folder / student / LAB / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(notebook if isinstance(notebook, bytes) else notebook_bytes(notebook))
    return path


class InProcessExecutor:
    """Executes cells here with exec: enough for what is about matching and scoring, and fast."""

    def execute(self, notebook: NotebookNode, folder: Path) -> Execution:
        nbformat.validate(notebook)
        done = copy.deepcopy(notebook)
        names: dict[str, object] = {"__name__": "__main__"}
        for cell in done.cells:
            if cell.cell_type == "code":
                cell.outputs = _run(cell.source, names)
        return Execution(done)

    def stop(self) -> None:
        """Nothing runs in another thread."""


def _run(source: str, names: dict[str, object]) -> list[NotebookNode]:
    printed = io.StringIO()
    outputs: list[NotebookNode] = []
    try:
        body = ast.parse(source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
        if value is not None:
            bundle = getattr(value, "_repr_mimebundle_", lambda: {"text/plain": repr(value)})()
            outputs.append(new_output("execute_result", data=bundle))
    except Exception as error:
        outputs.append(new_output("error", ename=type(error).__name__, evalue=str(error), traceback=[]))
    return outputs

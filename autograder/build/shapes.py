"""The four shapes of a cell, and what can be wrong with a source without running it."""

from __future__ import annotations

import ast
import re

from IPython.core.inputtransformer2 import TransformerManager
from nbformat.notebooknode import NotebookNode

from autograder.build.preprocessors import BEGIN, END, HIDDEN_BEGIN, HIDDEN_END, split_regions
from autograder.build.source import LabSource, exercise_numbers

ANSWER = {"grade": False, "locked": False, "schema_version": 3, "solution": True, "task": False}
CHECK = {"grade": True, "locked": True, "schema_version": 3, "solution": False, "task": False}
REFLECTION = {"grade": True, "locked": False, "schema_version": 3, "solution": True, "task": False}
SHAPES = {"answer": ("code", ANSWER), "check": ("code", CHECK), "reflection": ("markdown", REFLECTION)}
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def kind_of(cell: NotebookNode) -> str:
    """One of answer, check, hidden, reflection, given (code without nbgrader metadata) or text.

    Raises ValueError when the header is none of the four shapes, saying what is wrong with it.
    """
    meta = cell.metadata.get("nbgrader")
    if meta is None:
        return "given" if cell.cell_type == "code" else "text"
    if not isinstance(meta, dict):
        raise ValueError("its nbgrader header is not an object {...}")
    grade, solution = meta.get("grade"), meta.get("solution")
    for key in ("schema_version", "grade", "solution", "locked", "task", "grade_id"):
        if key not in meta:
            raise ValueError(f"its header lacks '{key}'; copy one of the four shapes of a header whole")
    kind = {(False, True): "answer", (True, False): "check", (True, True): "reflection"}.get((grade, solution))
    if kind is None:
        raise ValueError(
            f"grade={grade!r} with solution={solution!r} is no shape of ours: an answer has grade false and solution "
            "true, a check grade true and solution false, a reflection both true; given code has no header"
        )
    cell_type, wanted = SHAPES[kind]
    if cell.cell_type != cell_type:
        raise ValueError(f"a {kind} is a {cell_type} cell, this is a {cell.cell_type} cell")
    allowed = {*wanted, "grade_id"} | ({"points"} if wanted["grade"] else set())
    if unknown := sorted(set(meta) - allowed):
        raise ValueError(f"a {kind} has no {', '.join(map(repr, unknown))} in its header; remove it")
    for key, value in wanted.items():
        if meta[key] != value or type(meta[key]) is not type(value):
            raise ValueError(f'a {kind} has "{key}": {str(value).lower()}, this has {meta[key]!r}')
    points = meta.get("points")
    if wanted["grade"] and (not isinstance(points, (int, float)) or isinstance(points, bool) or points <= 0):
        raise ValueError(f'a {kind} needs "points" above 0, this has {points!r}')
    if kind == "check" and HIDDEN_BEGIN in cell.source:
        return "hidden"
    return kind


def static_problems(lab: LabSource) -> list[str]:
    """Every fault of a source that shows without running it, each as a sentence that says what to do."""
    problems: list[str] = []
    seen: dict[str, int] = {}
    points = 0.0
    first_code = None
    exercises = exercise_numbers(lab.notebook)
    for index, cell in enumerate(lab.notebook.cells):
        where = f"{lab.name}: cell {index} ({_first_line(cell)})"
        try:
            kind = kind_of(cell)
        except ValueError as error:
            problems.append(f"{where}: {error}.")
            continue
        if cell.cell_type == "code" and first_code is None:
            first_code = kind
        if kind not in ("given", "text"):
            grade_id = cell.metadata.nbgrader.grade_id
            if not isinstance(grade_id, str) or not KEBAB.fullmatch(grade_id) or len(grade_id) > 64:
                problems.append(f"{where}: grade_id {grade_id!r} is not kebab-case (like 'check-segments').")
            elif grade_id in seen:
                problems.append(
                    f"{where}: grade_id {grade_id!r} is used by cell {seen[grade_id]} too; each is used once."
                )
            else:
                seen[grade_id] = index
            points += cell.metadata.nbgrader.get("points", 0)
            if exercises[index] is None and kind != "reflection":
                problems.append(f"{where}: stands under no exercise; put it below a heading like '## 2.1 Title'.")
        problems += [f"{where}: {problem}." for problem in _source_problems(cell, kind)]
    if first_code not in (None, "given"):
        problems.append(f"{lab.name}: the first code cell must be given (imports, `from labkit import check`).")
    if points != lab.meta["points"]:
        problems.append(
            f"{lab.name}: the cells' points sum to {points:g}, the front matter says {lab.meta['points']:g}; "
            "make them equal."
        )
    return problems


def _source_problems(cell: NotebookNode, kind: str) -> list[str]:
    try:
        outside, regions = split_regions(cell.source, BEGIN, END)
        rest, hidden = split_regions(cell.source, HIDDEN_BEGIN, HIDDEN_END)
    except ValueError as error:
        return [f"unbalanced markers, {error}"]
    problems = []
    if kind in ("answer", "reflection"):
        if not regions:
            problems.append(f"no solution between '### {BEGIN}' and '### {END}'; the release would keep everything")
    elif regions:
        problems.append(f"a solution region in a {kind} cell; only answers and reflections have one")
    if hidden and kind != "hidden":
        problems.append("hidden tests outside a check cell; give them a check cell of their own, with points")
    if kind == "hidden" and any(line.strip() and not line.strip().startswith("#") for line in rest):
        problems.append(
            "a hidden check shares its cell with other code; hidden and visible checks are two graded cells"
        )
    if cell.cell_type == "code":
        problems += _code_problems(cell, kind, "\n".join(outside))
    return problems


def _code_problems(cell: NotebookNode, kind: str, released: str) -> list[str]:
    transform = TransformerManager().transform_cell
    try:
        tree = ast.parse(transform(cell.source))
    except SyntaxError as error:
        return [f"not valid Python, {error.msg} (line {error.lineno})"]
    if kind in ("check", "hidden"):
        call = {"check": "check", "hidden": "exam"}[kind]
        last = tree.body[-1] if tree.body else None
        value = last.value if isinstance(last, ast.Expr) else None
        called = value.func if isinstance(value, ast.Call) else None
        if not isinstance(called, ast.Name) or called.id != call:
            return [f"must end in a call of {call}(...), whose value is the score"]
    return []


def _first_line(cell: NotebookNode) -> str:
    line = next((line for line in cell.source.split("\n") if line.strip()), "empty")
    return repr(line[:50])

"""The release manifest of a lab: front matter, graded cells and given code, as data that ships with labkit.

`labkit reset` and `labkit status` read it, and the grader takes the cells, their points and their released sources from
it, never from what was handed in.
"""

from __future__ import annotations

import ast
from typing import Any

from nbformat.notebooknode import NotebookNode

from autograder.build.shapes import kind_of
from autograder.build.source import LabSource, exercise_numbers


def make_manifest(lab: LabSource, release: NotebookNode) -> dict[str, Any]:
    """Manifest of `lab` whose release notebook is `release`. `position` is a cell's index in the notebook."""
    cells, given = [], []
    for position, (cell, released, exercise) in enumerate(
        zip(lab.notebook.cells, release.cells, exercise_numbers(lab.notebook), strict=True)
    ):
        kind = kind_of(cell)
        if kind == "given":
            given.append({"id": released.id, "position": position, "source": released.source})
        elif kind != "text":
            entry = {
                "grade_id": cell.metadata.nbgrader.grade_id,
                "kind": kind,
                "points": cell.metadata.nbgrader.get("points", 0),
                "exercise": exercise or "",
                "position": position,
                "source": released.source,
            }
            if kind in ("check", "hidden"):
                entry["check"] = check_name(cell.source)
            cells.append(entry)
    return {**lab.meta, "schema": 1, "cells": cells, "given": given}


def check_name(source: str) -> str | None:
    """Name of the check that a graded cell calls last: "pingpong.forward" of `check("pingpong.forward", f)`."""
    call = _last_call(source)
    first = call.args[0] if call and call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def call_points(source: str) -> float | None:
    """The argument `points` of a graded cell's last call, where written: `exam("pingpong.forward", f, points=2)`."""
    call = _last_call(source)
    values = [keyword.value for keyword in call.keywords if keyword.arg == "points"] if call else []
    return float(values[0].value) if values and isinstance(values[0], ast.Constant) else None


def _last_call(source: str) -> ast.Call | None:
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return None
    last = body[-1] if body else None
    return last.value if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) else None

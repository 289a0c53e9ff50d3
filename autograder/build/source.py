"""Read a lab's source (percent format) into nbgrader's source version of the notebook."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import yaml
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FRONT_MATTER = {
    "lab": str, "slug": str, "title": str, "minutes": int, "difficulty": int, "points": (int, float), "cards": int,
    "needs": list,
}  # fmt: skip
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
HEADING = re.compile(r"^(#{1,2})\s+(?:(\d+\.\d+)\b)?", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)  # a comment in shown code is no heading


class SourceError(ValueError):
    """A source that cannot be built; the message says where and what to do."""


@dataclass
class LabSource:
    """One lab as its author wrote it: the front matter and nbgrader's source notebook (no outputs)."""

    name: str  # "02_checkpointing"
    meta: dict[str, Any]
    notebook: NotebookNode


def read_source(path: Path) -> LabSource:
    """Read `path`. Raises SourceError when the front matter or a cell header cannot be read."""
    try:
        parsed = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    except (UnicodeDecodeError, ValueError) as error:
        raise SourceError(f"{path.name}: not readable as percent-format Python ({error}).") from error
    cells = list(parsed.cells)
    meta = _front_matter(path, cells.pop(0) if cells and cells[0].cell_type == "raw" else None)
    notebook = new_notebook(
        metadata={"kernelspec": dict(KERNELSPEC), "labkit": {"lab": meta["lab"], "slug": meta["slug"]}}
    )
    notebook.cells = [_cell(path, index, cell) for index, cell in enumerate(cells)]  # unvalidated: ids may repeat
    return LabSource(path.stem, meta, notebook)


def exercise_numbers(notebook: NotebookNode) -> list[str | None]:
    """Per cell, the number of the exercise it belongs to: "2.2" below `## 2.2 ...`, until the next such heading.

    A heading without a number (`## What frameworks call it`) ends the exercise above it.
    """
    current, numbers = None, []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := HEADING.findall(FENCED.sub("", cell.source))):
            current = found[-1][1] or None
        numbers.append(current)
    return numbers


def _front_matter(path: Path, cell: NotebookNode | None) -> dict[str, Any]:
    where = f"{path.name}: the front matter (a YAML block between '# ---' lines at the top)"
    try:
        document = yaml.safe_load(cell.source.strip().strip("-")) if cell is not None else None
    except yaml.YAMLError as error:
        raise SourceError(f"{where} is not YAML: {error}") from error
    meta = document.get("labkit") if isinstance(document, dict) else None
    if not isinstance(meta, dict):
        raise SourceError(f"{where} is missing, or has no key 'labkit'.")
    for key, kind in FRONT_MATTER.items():
        if not isinstance(meta.get(key), kind) or isinstance(meta.get(key), bool):
            raise SourceError(
                f"{where} needs '{key}' ({getattr(kind, '__name__', 'number')}); it has {meta.get(key)!r}."
            )
    if unknown := sorted(set(meta) - set(FRONT_MATTER)):
        raise SourceError(f"{where} has unknown keys: {', '.join(unknown)}.")
    if path.stem != f"{meta['lab']}_{meta['slug']}":
        raise SourceError(f"{where} says {meta['lab']}_{meta['slug']}, the file name says {path.stem}.")
    return meta


def _cell(path: Path, index: int, cell: NotebookNode) -> NotebookNode:
    """A clean cell with an id that is the same on every build: its grade_id, else its index and a hash."""
    metadata = {key: value for key, value in cell.metadata.items() if key != "lines_to_next_cell"}
    if "incorrectly_encoded_metadata" in metadata:
        raise SourceError(
            f"{path.name}: cell {index} has a header that is not JSON: "
            f"{metadata['incorrectly_encoded_metadata']!r}. Write nbgrader={{...}} with double quotes, on one line."
        )
    if cell.cell_type not in ("code", "markdown"):
        raise SourceError(f"{path.name}: cell {index} is a {cell.cell_type} cell; use '# %%' or '# %% [markdown]'.")
    nbgrader = metadata.get("nbgrader")
    grade_id = nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None
    digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
    cell_id = grade_id if isinstance(grade_id, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", grade_id) else None
    new = new_code_cell if cell.cell_type == "code" else new_markdown_cell
    return new(source=cell.source, metadata=metadata, id=cell_id or f"{index:03d}-{digest}")

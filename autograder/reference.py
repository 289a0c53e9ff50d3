"""What a lab's notebook must hold, to repair and judge submissions by: made from the source, never from one of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import nbformat
from nbformat.notebooknode import NotebookNode

from autograder.build.builder import make_release
from autograder.build.manifest import check_name
from autograder.build.shapes import kind_of
from autograder.build.source import exercise_numbers


@dataclass(frozen=True)
class ReferenceCell:
    """One cell of the release. `source` is the grader's (hidden tests in), `released` the learner's."""

    key: str  # grade_id, or the cell id of given code
    kind: str  # answer, check, hidden, reflection or given
    cell_type: str
    source: str
    released: str
    metadata: dict[str, Any]  # nbgrader's, with checksum; empty for given code
    points: float
    exercise: str | None
    check: str | None  # the check that a graded cell names

    @property
    def locked(self) -> bool:
        """A grader takes the cell from here, whatever the learner's copy says."""
        return self.kind in ("check", "hidden")

    @property
    def graded(self) -> bool:
        return self.points > 0


@dataclass(frozen=True)
class Reference:
    """A lab's cells that matter for grading (all but prose), in order."""

    name: str
    cells: tuple[ReferenceCell, ...]
    kernelspec: dict[str, Any]
    prose: frozenset[str] = frozenset()  # sources of the text cells
    lab: str = ""  # its number, as the notebooks' metadata give it: "02"

    @property
    def common(self) -> frozenset[str]:
        """Released texts that tell no cell from another: of hidden checks (the same in all labs), and repeated ones."""
        times = Counter(cell.released.strip() for cell in self.cells)
        hidden = {cell.released.strip() for cell in self.cells if cell.kind == "hidden"}
        return frozenset(hidden | {text for text, count in times.items() if count > 1})

    @property
    def max_points(self) -> float:
        return sum(cell.points for cell in self.cells)

    def by_key(self) -> dict[str, ReferenceCell]:
        return {cell.key: cell for cell in self.cells}


def make_reference(name: str, solution: NotebookNode) -> Reference:
    """Reference of the lab whose solution notebook (nbgrader's source version) is `solution`."""
    release, graded = make_release(solution)
    cells = []
    numbers = exercise_numbers(solution)
    for cell, released, full, exercise in zip(solution.cells, release.cells, graded.cells, numbers, strict=True):
        kind = kind_of(cell)
        if kind == "text":
            continue
        metadata = dict(full.metadata.get("nbgrader", {}))
        cells.append(
            ReferenceCell(
                key=metadata.get("grade_id", released.id),
                kind=kind,
                cell_type=full.cell_type,
                source=full.source,
                released=released.source,
                metadata=metadata,
                points=float(metadata.get("points", 0)),
                exercise=exercise,
                check=check_name(full.source) if kind in ("check", "hidden") else None,
            )
        )
    prose = frozenset(cell.source.strip() for cell in solution.cells if kind_of(cell) == "text")
    lab = str(solution.metadata.get("labkit", {}).get("lab", ""))
    return Reference(name, tuple(cells), dict(solution.metadata.kernelspec), prose, lab)


def read_reference(path: Path) -> Reference:
    """Reference from a solution notebook on disk, read again only when the file has changed."""
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def _read(path: Path, changed_ns: int) -> Reference:
    return make_reference(path.stem, nbformat.read(path, as_version=4))

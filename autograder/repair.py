"""Put a submitted notebook back into the lab's shape: match its cells to the release's, restore what is the grader's.

The learner's own code and text stay as they are. Cells are matched by nbgrader's grade_id, else by cell id (VS Code and
Colab drop nbgrader's metadata, and our cell ids are the grade_ids), else by what they define or say, else by place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from rapidfuzz import fuzz

from autograder.reference import Reference, ReferenceCell

DEFINES = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)|^(\w+)\s*=(?!=)", re.MULTILINE)
CALLS = re.compile(r"""^check\(\s*(["'])([^"']+)\1""", re.MULTILINE)
ALIKE = 0.6  # the share from which two cells say the same thing
LOOKED_AT = 500  # cells, and characters of each times ten: matching ends soon, whatever was handed in


@dataclass
class Repair:
    """A notebook that a grader can run, and what had to be done to it, for people."""

    notebook: NotebookNode
    flags: list[str] = field(default_factory=list)
    matched: int = 0  # answers and checks found by their id or by words that only they hold


def repair(submitted: NotebookNode, reference: Reference) -> Repair:
    """A repaired copy of `submitted`: every graded cell of the lab once, with the reference's source and points."""
    cells = [_bare(cell) for cell in submitted.cells]
    flags: list[str] = []
    places, known = _match(submitted.cells, cells, reference, flags)
    matched = sum(reference.by_key()[key].kind not in ("given", "reflection") for key in known)
    ordered = [cell for cell in reference.cells if cell.key in places]
    for want in ordered:
        _restore(cells[places[want.key]], want, flags)
    found = {key: cells[index] for key, index in places.items()}
    _insert_missing(cells, found, reference, flags)
    _checks_below_answers(cells, found, reference, flags)
    metadata = {"kernelspec": dict(reference.kernelspec)}
    return Repair(new_notebook(cells=_unique_ids(cells), metadata=metadata), flags, matched)


def _bare(cell: NotebookNode) -> NotebookNode:
    """The cell's type, id and source alone: no outputs, tags or whatever else a notebook carries reach the grader."""
    if cell.cell_type == "code":
        return new_code_cell(source=cell.source, id=cell.get("id") or "x")
    bare = new_markdown_cell(source=cell.source, id=cell.get("id") or "x")
    if "attachments" in cell:  # pictures pasted into a written answer
        bare.attachments = cell.attachments
    return bare


def _match(
    submitted: list[NotebookNode], cells: list[NotebookNode], reference: Reference, flags: list[str]
) -> tuple[dict[str, int], set[str]]:
    """Index of the submitted cell that stands for each reference cell, as far as one is found.

    Also which of these are sure to be this lab's: not those found by their place or by a text that many cells share.
    """
    wanted = reference.by_key()
    by_grade_id: dict[str, list[int]] = {}
    by_cell_id: dict[str, list[int]] = {}
    for index, cell in enumerate(submitted):
        meta = cell.metadata.get("nbgrader")
        grade_id = meta.get("grade_id") if isinstance(meta, dict) else None
        if grade_id in wanted:
            by_grade_id.setdefault(grade_id, []).append(index)
        elif cell.get("id") in wanted:
            by_cell_id.setdefault(cell.id, []).append(index)
    candidates = {**by_cell_id, **by_grade_id}
    places: dict[str, int] = {}
    for want in reference.cells:  # in order, so that a copy's place can be told from the answers above it
        if indices := candidates.get(want.key):
            places[want.key] = _choose(indices, want, cells, places)
            if len(indices) > 1 and want.kind != "given":
                flags.append(f"{want.key}: {len(indices)} cells carry this id; the one in the released place counts")
    taken = {index for indices in candidates.values() for index in indices}
    known, common = set(places), reference.common
    for find in (_by_words, _by_place):
        lost = []
        for want in reference.cells:
            if want.key not in places:
                free = [index for index in range(len(cells)) if index not in taken]
                index = find(want, cells, free, places, reference)
                if index is not None:
                    places[want.key] = index
                    taken.add(index)
                    if find is _by_words and cells[index].source.strip() not in common:
                        known.add(want.key)
                    if want.kind != "given":
                        lost.append(want.key)
        how = "text" if find is _by_words else "place"
        if len(lost) > 1:
            flags.append(f"{len(lost)} cells had lost their ids and were found by their {how}")
        elif lost:
            flags.append(f"{lost[0]}: has lost its id, found by its {how}")
    return places, known


def _choose(indices: list[int], want: ReferenceCell, cells: list[NotebookNode], places: dict[str, int]) -> int:
    """Of several cells with one id: a written answer before an untouched one, a check below what it checks."""
    if want.locked:
        above = max(places.values(), default=-1)
        return next((index for index in indices if index > above), indices[-1])
    written = [index for index in indices if cells[index].source.strip() != want.released.strip()]
    return (written or indices)[0]


def _by_words(
    want: ReferenceCell, cells: list[NotebookNode], free: list[int], places: dict[str, int], reference: Reference
) -> int | None:
    """The free cell that defines the same names, names the same check, or says much the same."""
    if want.kind in ("answer", "reflection") and want.released.strip() in reference.common:
        return None  # its text is also another's
    names, check = _names(want.released), CALLS.findall(want.released)
    best: tuple[float, int] | None = None
    for index in free[:LOOKED_AT]:
        cell = cells[index]
        if cell.cell_type != want.cell_type or not cell.source.strip():
            continue
        if cell.source.strip() == want.released.strip():
            return index
        if check:
            if CALLS.findall(cell.source) == check:
                return index
            continue
        if want.kind == "answer" and names:
            score = 1.0 if names <= _names(cell.source) else 0.0
        else:
            score = _alike(want, cell.source)
        if score >= ALIKE and (best is None or score > best[0]):
            best = (score, index)
    return best[1] if best else None


def _by_place(
    want: ReferenceCell, cells: list[NotebookNode], free: list[int], places: dict[str, int], reference: Reference
) -> int | None:
    """The one free cell of its type between the nearest neighbours found. Only for what a learner writes."""
    if want.kind not in ("answer", "reflection") or not places:
        return None
    order = [cell.key for cell in reference.cells]
    here = order.index(want.key)
    above = max((places[key] for key in order[:here] if key in places), default=-1)
    below = min((places[key] for key in order[here + 1 :] if key in places), default=len(cells))
    fitting = [
        index
        for index in free
        if above < index < below and cells[index].cell_type == want.cell_type and _is_written(cells[index], reference)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _is_written(cell: NotebookNode, reference: Reference) -> bool:
    return bool(cell.source.strip()) and cell.source.strip() not in reference.prose


def _alike(want: ReferenceCell, source: str) -> float:
    """How much two cells say the same; of a reflection, how many lines of its question still stand above the answer."""
    if want.kind != "reflection":
        return fuzz.ratio(want.released[: 10 * LOOKED_AT], source[: 10 * LOOKED_AT]) / 100
    asked = [line for line in map(str.strip, want.released.split("\n")[:-1]) if line]
    kept = set(map(str.strip, source.split("\n")))
    return sum(line in kept for line in asked) / max(1, len(asked))


def _names(source: str) -> set[str]:
    return {one or other for one, other in DEFINES.findall(source)}


def _restore(cell: NotebookNode, want: ReferenceCell, flags: list[str]) -> None:
    """Give `cell` the reference's metadata and type, and its source where the cell is the grader's."""
    if want.kind == "given":
        return
    if cell.cell_type != want.cell_type:
        flags.append(f"{want.key}: was made a {cell.cell_type} cell; it is {want.cell_type} again")
        source = cell.source
        cell.clear()
        cell.update(_new(want, source))
    if want.locked:
        if cell.source.strip() not in (want.released.strip(), want.source.strip()):
            flags.append(f"{want.key}: the check was edited; the released one was used")
        cell.source = want.source
    elif want.kind == "reflection" and cell.source.strip() == want.released.strip():
        cell.source = want.source  # nbgrader tells an untouched answer by its checksum
    cell.metadata = NotebookNode({"nbgrader": NotebookNode(want.metadata)})


def _new(want: ReferenceCell, source: str) -> NotebookNode:
    new = new_code_cell if want.cell_type == "code" else new_markdown_cell
    return new(source=source, id=want.key)


def _insert_missing(
    cells: list[NotebookNode], found: dict[str, NotebookNode], reference: Reference, flags: list[str]
) -> None:
    """Put missing given code, checks and reflections back below their released neighbour.

    A missing answer is left out: its stub might hide a function that the learner wrote in a cell of their own.
    """
    previous: NotebookNode | None = None
    lost_ids = sum(cell.kind == "given" and cell.key in found for cell in reference.cells) == 0
    for position, want in enumerate(reference.cells):
        if want.key in found:
            previous = found[want.key]
            continue
        if want.kind == "answer":
            flags.append(f"{want.key}: the answer cell is missing")
            continue
        if want.kind == "given" and lost_ids and position > 0:
            continue  # nothing given is recognisable: only the first cell (imports) is certain to be needed
        cell = _new(want, want.source)
        _restore(cell, want, [])
        after = _index(cells, previous) + 1 if previous is not None else _first_known(cells, found)
        cells.insert(after, cell)
        found[want.key] = previous = cell
        what = "given code" if want.kind == "given" else want.key
        flags.append(f"{what}: was deleted; it was put back")


def _checks_below_answers(
    cells: list[NotebookNode], found: dict[str, NotebookNode], reference: Reference, flags: list[str]
) -> None:
    """A check that was moved above the answer it checks goes back below it."""
    answer: NotebookNode | None = None
    for want in reference.cells:
        cell = found.get(want.key)
        if cell is None:
            continue
        if want.kind == "answer":
            answer = cell
        elif want.locked and answer is not None and _index(cells, cell) < _index(cells, answer):
            del cells[_index(cells, cell)]
            cells.insert(_index(cells, answer) + 1, cell)
            flags.append(f"{want.key}: stood above the answer it checks; it was moved below")


def _index(cells: list[NotebookNode], cell: NotebookNode) -> int:
    return next(index for index, other in enumerate(cells) if other is cell)


def _first_known(cells: list[NotebookNode], found: dict[str, NotebookNode]) -> int:
    """Where the first recognised cell stands; the notebook's end when there is none."""
    return min((_index(cells, cell) for cell in found.values()), default=len(cells))


def _unique_ids(cells: list[NotebookNode]) -> list[NotebookNode]:
    """Valid ids, each used once: graded cells keep their grade_id, others make way."""
    used = {cell.metadata.nbgrader.grade_id for cell in cells if "nbgrader" in cell.metadata}
    for index, cell in enumerate(cells):
        if "nbgrader" in cell.metadata:
            cell.id = cell.metadata.nbgrader.grade_id
        elif cell.id in used or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", str(cell.id)):
            cell.id = f"cell-{index}"
        used.add(cell.id)
    return cells

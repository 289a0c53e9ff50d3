"""Take a submission in: find its notebook, read it strictly, never change what was handed in."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from autograder.reference import Reference
from autograder.repair import repair

MAX_NOTEBOOK_BYTES = 100 * 1024**2
MAX_CELLS = 2000
MAX_SOURCE = 1_000_000  # characters of one cell
MAX_FILES, MAX_FILE_BYTES = 50, 10 * 1024**2  # what may lie beside the notebook
WHEN = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d(?::\d\d(?:\.\d+)?)?)\s*(\S*)")


class Unreadable(ValueError):
    """A submission that cannot be graded as it is; the message says why, for people."""


@dataclass
class Submission:
    """One learner's work, repaired: `notebook` is None when nothing was handed in."""

    student: str
    notebook: NotebookNode | None
    timestamp: datetime.datetime | None = None  # naive, UTC, as nbgrader keeps it
    sha256: str = ""
    flags: list[str] = field(default_factory=list)


def students_in(folder: Path, lab: str) -> list[str]:
    """Names of the learners that have a folder `STUDENT/LAB` below `folder`, sorted."""
    if not folder.is_dir():
        raise LookupError(
            f"There is no folder {folder}. Submitted notebooks lie in STUDENT/{lab}/{lab}.ipynb below it."
        )
    below = [Path(entry) / lab for entry in os.scandir(folder) if entry.is_dir()]
    return sorted(path.parent.name for path in below if path.is_dir() and not path.is_symlink())


def take_in(folder: Path, student: str, reference: Reference) -> Submission:
    """Read and repair what lies in `folder` (a student's folder for one lab).

    Raises Unreadable when there is something that is no notebook of this lab.
    """
    when, flags = _timestamp(folder / "timestamp.txt")
    paths = sorted(path for path in folder.glob("*.ipynb") if path.is_file() and not path.is_symlink())
    if not paths:
        return Submission(student, None, when, flags=[*flags, "no notebook was handed in"])
    chosen, data, notebook = _choose(paths, reference)
    if chosen.stem != reference.name:
        flags.append(f"the notebook is called {chosen.name}, not {reference.name}.ipynb")
    lab = notebook.metadata.get("labkit_lab", "")
    if lab and reference.lab and lab != reference.lab:
        raise Unreadable(f"this is lab {lab}'s notebook, handed in under {reference.lab}")
    repaired = repair(notebook, reference)
    if not repaired.matched:
        raise Unreadable(f"{chosen.name} holds none of the answers and checks of {reference.name}")
    flags += repaired.flags
    repaired.notebook.metadata["labkit"] = NotebookNode(flags=flags)
    return Submission(student, repaired.notebook, when, hashlib.sha256(data).hexdigest(), flags)


def copy_beside(folder: Path, to: Path) -> None:
    """Copy the regular files beside the notebook (helpers, data) to `to`, small ones and not too many."""
    to.mkdir(parents=True, exist_ok=True)
    files = (path for path in sorted(folder.iterdir()) if path.suffix != ".ipynb" and path.name != "timestamp.txt")
    plain = [
        path for path in files if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES
    ]
    for path in plain[:MAX_FILES]:
        shutil.copyfile(path, to / path.name)


def read_notebook(data: bytes) -> NotebookNode:
    """A notebook of any version as cells with type, id, source and nbgrader's metadata, outputs left out.

    Raises Unreadable.
    """
    text = _decode(data)
    try:
        raw = json.loads(text)
        if isinstance(raw, dict) and raw.get("nbformat", 4) < 4:
            raw = nbformat.convert(nbformat.from_dict(raw), 4)
    except json.JSONDecodeError as error:
        conflict = " (a Git conflict marker stands in it)" if re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE) else ""
        where = f"line {error.lineno}, column {error.colno}"
        raise Unreadable(f"not JSON{conflict}: {error.msg} at {where}; the file is cut off or damaged") from error
    except RecursionError as error:
        raise Unreadable("not a notebook: nested too deep") from error
    except Exception as error:  # nbformat's converters of old versions raise whatever they meet
        raise Unreadable(f"not a notebook: {error}") from error
    cells = raw.get("cells") if isinstance(raw, dict) else None
    if not isinstance(cells, list):
        raise Unreadable("not a notebook: it has no list of cells")
    if len(cells) > MAX_CELLS:
        raise Unreadable(f"{len(cells)} cells, at most {MAX_CELLS} are read")
    notebook = new_notebook()
    notebook.metadata["labkit_lab"] = _lab(raw)
    notebook.cells = [_cell(cell) for cell in cells if isinstance(cell, dict)]  # unvalidated: ids may repeat
    return notebook


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        raise Unreadable(
            "not UTF-8" + (" but UTF-16: save it as UTF-8" if wide else f" at byte {error.start}")
        ) from error


def _lab(raw: dict[str, Any]) -> str:
    """The lab's number in the notebook's metadata, or nothing."""
    metadata = raw.get("metadata")
    noted = metadata.get("labkit") if isinstance(metadata, dict) else None
    lab = noted.get("lab") if isinstance(noted, dict) else None
    return lab if isinstance(lab, str) and re.fullmatch(r"[0-9]{1,3}", lab) else ""


def _cell(raw: dict[str, Any]) -> NotebookNode:
    source = raw.get("source", "")
    if isinstance(source, list):
        source = "".join(map(str, source))
    # A lone surrogate is legal JSON, and no file or kernel takes it.
    source = str(source)[:MAX_SOURCE].encode("utf-8", "replace").decode()
    code = raw.get("cell_type") == "code"
    cell = (new_code_cell if code else new_markdown_cell)(source=source)
    metadata = raw.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    if isinstance(nbgrader, dict) and isinstance(nbgrader.get("grade_id"), str):
        cell.metadata["nbgrader"] = NotebookNode(grade_id=nbgrader["grade_id"])
    if isinstance(raw.get("id"), str):
        cell["id"] = raw["id"]
    elif isinstance(metadata, dict) and isinstance(metadata.get("id"), str):  # where Colab keeps it
        cell["id"] = metadata["id"]
    if not code and isinstance(raw.get("attachments"), dict):
        cell["attachments"] = nbformat.from_dict(raw["attachments"])
    return cell


def _choose(paths: list[Path], reference: Reference) -> tuple[Path, bytes, NotebookNode]:
    """The notebook of the lab's name, else the one that holds the most of its cells. Raises Unreadable."""
    named = [path for path in paths if path.stem == reference.name]
    read: list[tuple[Path, bytes, NotebookNode]] = []
    problem: Unreadable | None = None
    for path in named or paths:
        try:
            size = path.stat().st_size
            if size > MAX_NOTEBOOK_BYTES:
                raise Unreadable(f"{size / 1024**2:.0f} MiB, at most {MAX_NOTEBOOK_BYTES // 1024**2} are read")
            data = path.read_bytes()
            read.append((path, data, read_notebook(data)))
        except (Unreadable, OSError) as error:
            problem = Unreadable(f"{path.name}: {error}")
    if not read:
        assert problem is not None
        raise problem
    if len(read) == 1:
        return read[0]
    counted = sorted(read, key=lambda item: -repair(item[2], reference).matched)
    first, second = (repair(item[2], reference).matched for item in counted[:2])
    if first == second:
        raise Unreadable(f"{counted[0][0].name} and {counted[1][0].name} both look like {reference.name}; keep one")
    return counted[0]


def _timestamp(path: Path) -> tuple[datetime.datetime | None, list[str]]:
    """When it was handed in (naive UTC), and flags: ISO-8601 with an offset, an IANA zone or UTC; no guesses."""
    if not path.is_file():
        return None, []
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    found = WHEN.fullmatch(text)
    try:
        if not found:
            raise ValueError
        date, clock, zone = found.groups()
        if re.fullmatch(r"[+-]\d\d:?\d\d|Z?", zone):
            when = datetime.datetime.fromisoformat(f"{date}T{clock}{zone or '+00:00'}")
        elif zone in ("UTC", "GMT") or "/" in zone:
            when = datetime.datetime.fromisoformat(f"{date}T{clock}").replace(tzinfo=zoneinfo.ZoneInfo(zone))
        else:
            raise ValueError
        return when.astimezone(datetime.UTC).replace(tzinfo=None), []
    except (ValueError, zoneinfo.ZoneInfoNotFoundError):
        return None, [f"timestamp.txt says {text[:40]!r}, which is no time with a zone; counted as without a time"]


def folders_of(folder: Path, lab: str, students: list[str]) -> Iterator[tuple[str, Path]]:
    """Each learner with the folder of their submission."""
    for student in students:
        yield student, folder / student / lab

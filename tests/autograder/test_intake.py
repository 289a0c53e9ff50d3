"""What is handed in is read strictly, told clearly when it cannot be, and never changed."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from nbformat.notebooknode import NotebookNode

from autograder import intake
from autograder.build.builder import notebook_bytes
from autograder.intake import Unreadable, copy_beside, students_in, take_in
from autograder.reference import make_reference
from tests.autograder.tiny import LAB, hand_in, solved, tiny_lab

REFERENCE = make_reference(LAB, tiny_lab().solution)


def read(folder: Path, student: str = "ada") -> intake.Submission:
    return take_in(folder / student / LAB, student, REFERENCE)


UNREADABLE = {
    "not JSON": (b"{this is not json", "not JSON"),
    "empty file": (b"", "not JSON"),
    "conflict": (b'{\n "cells": [\n<<<<<<< HEAD\n {},\n=======\n>>>>>>> theirs\n', "Git conflict marker"),
    "UTF-16": ('{"cells": []}'.encode("utf-16"), "UTF-16"),
    "Latin-1": (b'{"cells": "\xe9"}', "not UTF-8 at byte 11"),
    "a list": (b"[1, 2]", "no list of cells"),
    "no cells": (b'{"metadata": {}}', "no list of cells"),
    "deep": (b"[" * 100_000, "nested too deep"),
    "another lab": (b'{"cells": [{"cell_type": "code", "source": "1"}]}', "none of the answers and checks"),
    "too many cells": (json.dumps({"cells": [{}] * 2001}).encode(), "2001 cells"),
    "old and broken": (b'{"nbformat": 3, "worksheets": 7}', "not a notebook"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_says_why(name: str, tmp_path: Path) -> None:
    data, told = UNREADABLE[name]
    path = hand_in(tmp_path, "ada", data)
    with pytest.raises(Unreadable, match=told):
        read(tmp_path)
    assert path.read_bytes() == data


def another_lab() -> NotebookNode:
    """A notebook of lab 91 that shares with lab 90 what labs share: the hidden cells' text and a reflection's id."""
    notebook = solved()
    notebook.metadata.labkit.lab = "91"
    renamed = {"double": "half", "triple": "third", "Triple": "Third", "predicted": "guess", "Double": "Half"}
    for cell in notebook.cells:
        for word, other in renamed.items():
            cell.source = cell.source.replace(word, other)
            cell.id = cell.id.replace(word, other)
            if "nbgrader" in cell.metadata:
                cell.metadata.nbgrader.grade_id = cell.metadata.nbgrader.grade_id.replace(word, other)
    return notebook


def test_the_notebook_of_another_lab_is_refused(tmp_path: Path) -> None:
    hand_in(tmp_path, "ada", another_lab())
    with pytest.raises(Unreadable, match="this is lab 91's notebook, handed in under 90"):
        read(tmp_path)
    bare = another_lab()
    bare.metadata = NotebookNode()
    hand_in(tmp_path, "ada", bare)
    with pytest.raises(Unreadable, match="none of the answers and checks"):
        read(tmp_path)
    for index, cell in enumerate(bare.cells):
        cell.id, cell.metadata = f"c{index}", NotebookNode()
    hand_in(tmp_path, "ada", bare)
    with pytest.raises(Unreadable, match="none of the answers and checks"):
        read(tmp_path)


def test_a_byte_order_mark_odd_characters_and_odd_cells_are_read(tmp_path: Path) -> None:
    raw = json.loads(notebook_bytes(solved()))
    raw["cells"] += [{"cell_type": "code", "source": ["a = '\ud800'\n", "b = 1"]}, {"cell_type": "heading"}, 7, {}]
    raw["cells"][3]["metadata"] = None
    hand_in(tmp_path, "ada", b"\xef\xbb\xbf" + json.dumps(raw).encode())
    submission = read(tmp_path)
    assert submission.notebook is not None and submission.flags == []
    assert notebook_bytes(submission.notebook)


def test_a_renamed_notebook_is_found_and_of_several_the_right_one(tmp_path: Path) -> None:
    hand_in(tmp_path, "ada", solved(), f"{LAB}-Copy1.ipynb")
    assert "called 90_tiny-Copy1.ipynb" in read(tmp_path).flags[0]
    hand_in(tmp_path, "ada", b'{"cells": []}', "scratch.ipynb")
    hand_in(tmp_path, "ada", b"junk", "junk.ipynb")
    assert "called 90_tiny-Copy1.ipynb" in read(tmp_path).flags[0]
    hand_in(tmp_path, "ada", solved(), "other.ipynb")
    with pytest.raises(Unreadable, match="both look like"):
        read(tmp_path)
    hand_in(tmp_path, "ada", solved())
    assert read(tmp_path).flags == []


def test_nothing_handed_in_is_no_error_and_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.ipynb"
    outside.write_bytes(notebook_bytes(solved()))
    folder = tmp_path / "ada" / LAB
    folder.mkdir(parents=True)
    (folder / f"{LAB}.ipynb").symlink_to(outside)
    assert read(tmp_path).notebook is None
    assert read(tmp_path).flags == ["no notebook was handed in"]
    (folder / "helper.py").write_text("x = 1")
    (folder / "secret").symlink_to("/etc/hostname")
    copy_beside(folder, tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["helper.py"]


@pytest.mark.parametrize(
    ("text", "hour"),
    [
        ("2026-01-02 03:04:05.678901 UTC", 3),
        ("2026-01-02 03:04:05 Europe/Paris", 2),
        ("2026-01-02T03:04:05+0100", 2),
        ("2026-01-02T03:04:05Z", 3),
        ("2026-01-02 03:04", 3),
        ("2026-01-02 03:04:05 PST", None),
        ("2026-01-02 03:04:05 Nowhere/City", None),
        ("2026-13-02 03:04:05 UTC", None),
        ("yesterday", None),
        ("", None),
    ],
)
def test_a_timestamp_is_read_or_flagged_and_never_guessed(text: str, hour: int | None, tmp_path: Path) -> None:
    path = hand_in(tmp_path, "ada", solved())
    path.with_name("timestamp.txt").write_text(text)
    submission = read(tmp_path)
    if hour is None:
        assert submission.timestamp is None and "timestamp.txt says" in submission.flags[0]
    else:
        assert submission.timestamp is not None and submission.flags == []
        assert submission.timestamp.date() == datetime.date(2026, 1, 2) and submission.timestamp.hour == hour


def test_students_are_folders_that_have_the_lab(tmp_path: Path) -> None:
    hand_in(tmp_path, "x[1]", solved())
    hand_in(tmp_path, "ada", solved())
    (tmp_path / "bob").mkdir()
    (tmp_path / "notes.txt").touch()
    assert students_in(tmp_path, LAB) == ["ada", "x[1]"]
    with pytest.raises(LookupError, match="no folder"):
        students_in(tmp_path / "nowhere", LAB)


def test_a_huge_notebook_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_NOTEBOOK_BYTES", 1000)
    hand_in(tmp_path, "ada", solved())
    with pytest.raises(Unreadable, match="at most"):
        read(tmp_path)


def test_outputs_of_any_size_are_left_out(tmp_path: Path) -> None:
    raw = json.loads(notebook_bytes(solved()))
    raw["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "y" * 50_000_000}]
    hand_in(tmp_path, "ada", json.dumps(raw).encode())
    submission = read(tmp_path)
    assert submission.notebook is not None and len(notebook_bytes(submission.notebook)) < 20_000

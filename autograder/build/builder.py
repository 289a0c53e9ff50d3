"""Sources to solution notebook, release notebook and manifest: the same bytes on every run."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat.notebooknode import NotebookNode
from nbgrader.preprocessors import SaveCells

from autograder.build.manifest import make_manifest
from autograder.build.preprocessors import HIDDEN_BEGIN, RELEASE_PREPROCESSORS
from autograder.build.shapes import static_problems
from autograder.build.source import LabSource, SourceError, read_source
from autograder.project import Project


@dataclass
class BuiltLab:
    """What one source becomes. `graded` is the release before its hidden tests are cleared: what a grader restores."""

    source: LabSource
    solution: NotebookNode
    release: NotebookNode
    graded: NotebookNode
    manifest: dict[str, Any]

    def files(self, project: Project) -> dict[Path, bytes]:
        """Content of each generated file, by path."""
        name = self.source.name
        return {
            project.solution(name): notebook_bytes(self.solution),
            project.release(name): notebook_bytes(self.release),
            project.manifest(name): (json.dumps(self.manifest, indent=1, sort_keys=True) + "\n").encode(),
        }


def build_lab(path: Path) -> BuiltLab:
    """Build the lab whose source is `path`. Raises SourceError that lists every static problem."""
    lab = read_source(path)
    if problems := static_problems(lab):
        raise SourceError("\n".join(problems))
    release, graded = make_release(lab.notebook)
    return BuiltLab(lab, lab.notebook, release, graded, make_manifest(lab, release))


def make_release(solution: NotebookNode) -> tuple[NotebookNode, NotebookNode]:
    """The learner's notebook, and the same with its hidden tests still in (their checksums are nbgrader's)."""
    notebook, resources = copy.deepcopy(solution), {}
    graded = None
    for preprocessor in RELEASE_PREPROCESSORS:
        if preprocessor is SaveCells:  # nbgrader writes its gradebook here
            graded = copy.deepcopy(notebook)
            continue
        notebook, resources = preprocessor().preprocess(notebook, resources)
    assert graded is not None and not any(HIDDEN_BEGIN in cell.source for cell in notebook.cells)
    return notebook, graded


def notebook_bytes(notebook: NotebookNode) -> bytes:
    """A notebook as nbgrader's exporter writes it: sorted keys, indent 1."""
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()


def build(project: Project, names: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Write the generated files of the named labs (default: all); prints a line each.

    Returns problems and warnings. A lab with a problem leaves its files as they are, the others are built.
    """
    problems: list[str] = []
    warnings: list[str] = []
    wanted = [project.lab_name(name) for name in names]
    for path in project.source_files():
        if wanted and path.stem not in wanted:
            continue
        try:
            built = build_lab(path)
        except SourceError as error:
            problems += str(error).split("\n")
            print(f"  FAILED   {path.stem}", flush=True)
            continue
        manifest = project.manifest(path.stem)
        warnings += renamed_ids(built, manifest.read_text(encoding="utf-8") if manifest.exists() else "")
        changed = [write_if_changed(file, content) for file, content in built.files(project).items()]
        graded = sum(cell["points"] > 0 for cell in built.manifest["cells"])
        print(
            f"  {'built' if any(changed) else 'same':8s} {path.stem}: {built.manifest['points']:g} points "
            f"in {graded} graded cells, {len(built.release.cells)} cells", flush=True,
        )  # fmt: skip
    if not wanted:
        problems += [f"{path}: generated, but its source is gone; delete it." for path in orphans(project)]
    return problems, warnings


def renamed_ids(built: BuiltLab, earlier: str) -> list[str]:
    """Warnings for grade_ids that the `earlier` manifest (its text) has and this build no longer has."""
    try:
        before = {cell["grade_id"] for cell in json.loads(earlier)["cells"]}
    except (ValueError, KeyError, TypeError):
        return []
    gone = sorted(before - {cell["grade_id"] for cell in built.manifest["cells"]})
    return [
        f"{built.source.name}: grade_id {grade_id!r} was there before and is gone. Once learners have a lab its ids "
        "are never renamed or removed: their work would lose its place." for grade_id in gone
    ]  # fmt: skip


def orphans(project: Project) -> list[Path]:
    """Generated files whose source no longer exists."""
    known = {path.stem for path in project.source_files()}
    generated = [
        *project.root.glob("notebooks/release/*"), *project.root.glob("notebooks/solution/*"),
        *project.root.glob("labkit/labs/[0-9][0-9]_*.json"),
    ]  # fmt: skip
    return sorted(path for path in generated if path.stem not in known and not path.name.startswith("."))


def write_if_changed(path: Path, content: bytes) -> bool:
    """Write `content` whole or not at all; returns whether the file changed."""
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return True

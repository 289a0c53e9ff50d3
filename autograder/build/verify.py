"""`python -m autograder check`: nothing generated is stale and every lab holds its rules."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from autograder.build.builder import build_lab, orphans, renamed_ids
from autograder.build.source import SourceError
from autograder.project import Project


def check(project: Project, names: Iterable[str] = (), *, quick: bool = False) -> tuple[list[str], list[str]]:
    """Problems and warnings of the named labs (default: all). `quick` leaves out what needs a kernel."""
    problems: list[str] = []
    warnings: list[str] = []
    wanted = [project.lab_name(name) for name in names]
    paths = [path for path in project.source_files() if not wanted or path.stem in wanted]
    for number, path in enumerate(paths, 1):
        print(f"  [{number}/{len(paths)}] {path.stem}: files", end="", flush=True)
        try:
            built = build_lab(path)
        except SourceError as error:
            problems += str(error).split("\n")
            print(": FAILED", flush=True)
            continue
        found = []
        for file, content in built.files(project).items():
            if not file.exists() or file.read_bytes() != content:
                state = "is stale" if file.exists() else "is missing"
                found.append(f"{file.relative_to(project.root)} {state}; run `python -m autograder build` and commit it.")
        warnings += renamed_ids(built, _committed_manifest(project, path.stem))
        print(": FAILED" if found else ": ok", flush=True)
        problems += found
    if not wanted:
        problems += [f"{path}: generated, but its source is gone; delete it." for path in orphans(project)]
    return problems, warnings


def _committed_manifest(project: Project, name: str) -> str:
    """The manifest in the last commit, or nothing."""
    path = project.manifest(name).relative_to(project.root)
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=project.root, capture_output=True, text=True)
    return shown.stdout if shown.returncode == 0 else ""

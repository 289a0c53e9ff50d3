"""nbgrader's release step with stubs of our own.

`RELEASE_PREPROCESSORS` is what turns a solution notebook into a release, both in the builder and in
`nbgrader generate_assignment` (autograder/nbgrader_config.py), so the two are the same bytes.
"""

from __future__ import annotations

import ast
import re

from nbconvert.exporters.exporter import ResourcesDict
from nbformat.notebooknode import NotebookNode
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearHiddenTests,
    ClearMarkScheme,
    ClearOutput,
    ClearSolutions,
    ComputeChecksums,
    LockCells,
    SaveCells,
)
from traitlets import Unicode

from autograder.build.source import exercise_numbers

BEGIN, END = "BEGIN SOLUTION", "END SOLUTION"
HIDDEN_BEGIN, HIDDEN_END = "BEGIN HIDDEN TESTS", "END HIDDEN TESTS"
DEFINITION = re.compile(r"^(\s*)(?:async\s+)?(?:def|class)\s+(\w+)")


class ClearExercises(ClearSolutions):
    """Solution regions become `raise NotImplementedError("Exercise 2.2: name")`; a prediction's region just goes.

    The number is that of the nearest exercise heading, the name that of the function or class around the region.
    """

    text_stub = Unicode("*Your answer here.*").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> tuple[NotebookNode, ResourcesDict]:
        self._exercises = exercise_numbers(nb)
        return super().preprocess(nb, resources)

    def preprocess_cell(
        self, cell: NotebookNode, resources: ResourcesDict, cell_index: int
    ) -> tuple[NotebookNode, ResourcesDict]:
        self._exercise = self._exercises[cell_index]
        return super().preprocess_cell(cell, resources, cell_index)

    def _replace_solution_region(self, cell: NotebookNode, language: str) -> bool:
        outside, regions = split_regions(cell.source, BEGIN, END)
        if not regions:
            return False
        for position, indent, region in reversed(regions):
            if cell.cell_type == "markdown":
                stub = [self.text_stub]
            else:
                stub = _code_stub(self._exercise, outside, position, indent, region)
            outside[position:position] = [indent + line for line in stub]
        cell.source = "\n".join(outside)
        return True


# Checksums and the gradebook's copy of a graded cell are taken before the hidden tests go (nbgrader restores that copy
# when it grades), and the checksums once more after, for the release.
RELEASE_PREPROCESSORS = [
    LockCells,
    ClearExercises,
    ClearOutput,
    CheckCellMetadata,
    ComputeChecksums,
    SaveCells,
    ClearHiddenTests,
    ClearMarkScheme,
    ComputeChecksums,
    CheckCellMetadata,
]


def split_regions(source: str, begin: str, end: str) -> tuple[list[str], list[tuple[int, str, str]]]:
    """Lines outside the marked regions, and per region its position among them, its indentation and its text.

    Raises ValueError for a marker without its partner.
    """
    outside: list[str] = []
    regions: list[tuple[int, str, str]] = []
    inside: list[str] | None = None
    indent = ""
    for number, line in enumerate(source.split("\n"), 1):
        if begin in line:
            if inside is not None:
                raise ValueError(f"line {number}: {begin} inside a region that is still open")
            inside, indent = [], line[: len(line) - len(line.lstrip())]
        elif end in line:
            if inside is None:
                raise ValueError(f"line {number}: {end} without {begin}")
            regions.append((len(outside), indent, "\n".join(inside)))
            inside = None
        elif inside is not None:
            inside.append(line)
        else:
            outside.append(line)
    if inside is not None:
        raise ValueError(f"{begin} without {end}")
    return outside, regions


def _code_stub(exercise: str | None, outside: list[str], position: int, indent: str, region: str) -> list[str]:
    name = _enclosing_name(outside[:position], indent)
    if name is None:
        if _is_prediction(outside, region):
            return []  # `predicted = None  # your number` stands above the region
        name = next((found.group(2) for line in region.split("\n") if (found := DEFINITION.match(line))), None)
    label = f"Exercise {exercise}" if exercise else "Exercise"
    return [f'raise NotImplementedError("{label}: {name}")' if name else f'raise NotImplementedError("{label}")']


def _enclosing_name(lines: list[str], indent: str) -> str | None:
    """Dotted name of the functions and classes that a region with this indentation stands in."""
    names: list[str] = []
    limit = len(indent)
    for line in reversed(lines):
        if (found := DEFINITION.match(line)) and len(found.group(1)) < limit:
            names.insert(0, found.group(2))
            limit = len(found.group(1))
    return ".".join(names) or None


def _is_prediction(outside: list[str], region: str) -> bool:
    """True when the region only gives a value to names that are set to None above it."""

    def assigned(text: str) -> dict[str, ast.expr]:
        tree = ast.parse(text)
        pairs = [(target, node.value) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        return {target.id: value for target, value in pairs if isinstance(target, ast.Name)}

    try:
        open_names = {
            name for name, value in assigned("\n".join(outside)).items()
            if isinstance(value, ast.Constant) and value.value is None
        }  # fmt: skip
        return bool(open_names & set(assigned(region)))
    except SyntaxError:
        return False

"""Every check with the solution of what it judges, found by the labs' own check cells."""

import ast
from collections.abc import Callable
from typing import Any

from labkit.manifests import load_manifests
from tests.labs.solutions import solution


def references() -> list[tuple[str, str, list[str]]]:
    """(lab, check, the names of what it is given) of every visible check, read from the call in its cell."""
    found = []
    for lab, manifest in load_manifests().items():
        for cell in manifest.cells:
            if cell.kind == "check":
                call = ast.parse(cell.source).body[-1].value
                name, *given = call.args
                found.append((lab, name.value, [argument.id for argument in given]))
    return found


def together(functions: list[Callable]) -> Any:
    """One candidate, or a tuple of those that a check takes together."""
    return tuple(functions) if len(functions) > 1 else functions[0]


def reference(lab: str, names: list[str]) -> Any:
    """The solution of what a check is given."""
    return together([getattr(solution(lab), name) for name in names])

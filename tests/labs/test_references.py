"""Of every check in every lab: the solution gets all points, visible and hidden, what nobody wrote gets none, and hints ask."""

import ast
from typing import Any

import pytest

from labkit.checks import get_check
from labkit.manifests import load_manifests
from tests.labs import corpus
from tests.labs.solutions import solution


def _checks() -> list[tuple[str, str, list[str]]]:
    """(lab, check, the names of what it is given) of every visible check, read from the call in its cell."""
    found = []
    for lab, manifest in load_manifests().items():
        for cell in manifest.cells:
            if cell.kind == "check":
                call = ast.parse(cell.source).body[-1].value
                name, *given = call.args
                found.append((lab, name.value, [argument.id for argument in given]))
    return found


CHECKS = [pytest.param(*found, id=found[1]) for found in _checks()]


def _together(functions: list[Any]) -> Any:
    return tuple(functions) if len(functions) > 1 else functions[0]


@pytest.mark.parametrize(("lab", "check", "names"), CHECKS)
@pytest.mark.parametrize("strict", [False, True], ids=["visible", "hidden"])
def test_solution_gets_all_points(lab: str, check: str, names: list[str], strict: bool) -> None:
    verdict = corpus.examine(_together([getattr(solution(lab), name) for name in names]), check, strict=strict)
    assert (verdict.status, verdict.points) == ("pass", verdict.max_points), verdict.as_text()


@pytest.mark.parametrize(("lab", "check", "names"), CHECKS)
def test_nothing_earns_nothing(lab: str, check: str, names: list[str]) -> None:
    def nothing(*args: object, **kwargs: object) -> None:
        return None

    verdict = corpus.examine(_together([nothing] * len(names)), check)
    assert verdict.points == 0, verdict.as_text()


@pytest.mark.parametrize(("lab", "check", "names"), CHECKS)
def test_every_hint_asks(lab: str, check: str, names: list[str]) -> None:
    assert [key for key, hint in get_check(check).hints.items() if "?" not in hint] == []

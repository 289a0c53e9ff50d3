"""Of every check in every lab: the solution gets all points, visible and hidden, what nobody wrote gets none, and hints ask."""

import pytest

from labkit.checks import get_check
from tests.labs import corpus
from tests.labs.references import reference, references, together

CHECKS = [pytest.param(*found, id=found[1]) for found in references()]


@pytest.mark.parametrize(("lab", "check", "names"), CHECKS)
@pytest.mark.parametrize("strict", [False, True], ids=["visible", "hidden"])
def test_solution_gets_all_points(lab: str, check: str, names: list[str], strict: bool) -> None:
    verdict = corpus.examine(reference(lab, names), check, strict=strict)
    assert (verdict.status, verdict.points) == ("pass", verdict.max_points), verdict.as_text()


@pytest.mark.parametrize(("lab", "check", "names"), CHECKS)
def test_nothing_earns_nothing(lab: str, check: str, names: list[str]) -> None:
    def nothing(*args: object, **kwargs: object) -> None:
        return None

    verdict = corpus.examine(together([nothing] * len(names)), check)
    assert verdict.points == 0, verdict.as_text()


@pytest.mark.parametrize(("lab", "check", "names"), CHECKS)
def test_every_hint_asks(lab: str, check: str, names: list[str]) -> None:
    assert [key for key, hint in get_check(check).hints.items() if "?" not in hint] == []

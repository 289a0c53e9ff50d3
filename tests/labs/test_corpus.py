"""Every wrong implementation is killed on its criterion with its hint; every right one and each reference gets full points."""

import pytest

from tests.labs import corpus

WRONGS, RIGHTS = corpus.load()


@pytest.mark.parametrize("item", WRONGS, ids=lambda item: f"{item.check}-{item.name}")
def test_wrong_is_told(item: corpus.Wrong) -> None:
    verdict = corpus.examine(item.candidate, item.check)
    assert verdict.points < verdict.max_points, verdict.as_text()
    assert (verdict.failed, verdict.hint_id) == (item.criterion, item.hint), verdict.as_text()


@pytest.mark.parametrize("item", RIGHTS, ids=lambda item: f"{item.check}-{item.name}")
def test_right_is_accepted(item: corpus.Right) -> None:
    verdict = corpus.examine(item.candidate, item.check, forbid=item.forbid)
    assert verdict.status == "pass", verdict.as_text()
    assert verdict.points == verdict.max_points

"""Tests of one topic's implementations: every wrong one is killed on its criterion with its hint, every right one gets full points.

A file per topic, so that workers share them.
"""

from collections.abc import Callable

import pytest

from tests.labs import corpus

Test = Callable[..., None]


def verdict_tests(topic: str) -> tuple[Test, Test]:
    """(test of the wrong ones, test of the right ones)"""
    wrongs, rights = ([item for item in items if item.topic == topic] for items in corpus.load())
    assert wrongs and rights, topic

    @pytest.mark.parametrize("item", wrongs, ids=lambda item: f"{item.check}-{item.name}")
    def test_wrong_is_told(item: corpus.Wrong) -> None:
        verdict = corpus.examine(item.candidate, item.check)
        assert verdict.points < verdict.max_points, verdict.as_text()
        assert (verdict.failed, verdict.hint_id) == (item.criterion, item.hint), verdict.as_text()

    @pytest.mark.parametrize("item", rights, ids=lambda item: f"{item.check}-{item.name}")
    def test_right_is_accepted(item: corpus.Right) -> None:
        verdict = corpus.examine(item.candidate, item.check, forbid=item.forbid)
        assert verdict.status == "pass", verdict.as_text()
        assert verdict.points == verdict.max_points

    return test_wrong_is_told, test_right_is_accepted

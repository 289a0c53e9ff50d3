"""Every topic of the corpus has its file of tests."""

from pathlib import Path

from tests.labs import corpus


def test_every_topic_is_judged() -> None:
    judged = {path.stem.removeprefix("test_corpus_") for path in Path(__file__).parent.glob("test_corpus_*.py")}
    assert judged == {item.topic for items in corpus.load() for item in items}

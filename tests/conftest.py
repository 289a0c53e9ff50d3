"""How the tests are shared out among workers (`pytest -n 2 --dist loadgroup`)."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """The tests of one file stay together, since they share servers and courses; the corpus, the longest, is cut by topic.

    One worker has the browser: two of them, with their servers and kernels, starve each other on two cores. (Later hooks are too
    late: pytest-xdist reads the groups as soon as everything is collected.)
    """
    group = "browser" if item.path.parent.name == "browser" else item.path.stem
    implementation = getattr(item, "callspec", None) and item.callspec.params.get("item")
    if hasattr(implementation, "topic"):
        group += "-" + implementation.topic
    item.add_marker(pytest.mark.xdist_group(group))

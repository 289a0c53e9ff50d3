"""How the tests are shared out among workers (`pytest -n 2 --dist loadgroup`)."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of one file stay together, since they share servers and courses; the corpus, the longest, is cut by topic."""
    for item in items:
        group = item.path.stem
        implementation = getattr(item, "callspec", None) and item.callspec.params.get("item")
        if hasattr(implementation, "topic"):
            group += "-" + implementation.topic
        item.add_marker(pytest.mark.xdist_group(group))

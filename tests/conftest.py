"""How the tests are dealt out to several workers: what takes longest first, so that none is left alone with it at the end."""

from collections import defaultdict
from typing import Any

import pytest

# Seconds of one test, roughly, where they are many more than one: they start whole programs.
_SECONDS = {
    "tests/browser": 30.0,
    "tests/autograder": 5.0,
    "tests/labkit/test_setup.py": 10.0,
    "tests/labkit/test_ranks_kernel.py": 5.0,
}


def _unit(nodeid: str) -> str:
    """What one worker runs from its first test to its last: a file, whose tests share servers and courses; or all with a browser.

    Two browsers, with their servers and kernels, starve each other on two cores.
    """
    file = nodeid.split("::", 1)[0]
    return "tests/browser" if file.startswith("tests/browser/") else file


def _seconds(unit: str, tests: int) -> float:
    return tests * next((seconds for start, seconds in _SECONDS.items() if unit.startswith(start)), 1.0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # one process: the order of the files is as good as any
        return
    units: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        units[_unit(item.nodeid)].append(item)
    longest_first = sorted(units, key=lambda unit: -_seconds(unit, len(units[unit])))
    items[:] = [item for unit in longest_first for item in units[unit]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByUnit(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    config.option.loadscopereorder = False  # by number of tests; ours is the order of time
    return ByUnit(config, log)

"""Checks: `check("lab.exercise", your_function)` probes it in a fresh process, judges what was seen and shows a verdict.

One module per lab holds its checks; they are found by importing this package's modules whose names do not begin with an underscore.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, _registry, register
from labkit.checks._runner import LocalTransport, Report, Transport, run_check
from labkit.checks._verdict import MIME, STATUSES, Outcome, Verdict

__all__ = [
    "MIME",
    "STATUSES",
    "Case",
    "Check",
    "Criterion",
    "Finding",
    "LocalTransport",
    "Observation",
    "Outcome",
    "Report",
    "Transport",
    "Verdict",
    "WrongResult",
    "all_checks",
    "check",
    "get_check",
    "register",
    "run_check",
]


def all_checks() -> dict[str, Check]:
    """Every check by name, labs in order of their modules' names."""
    for module in iter_modules(__path__):
        if not module.name.startswith("_"):
            import_module(f"{__name__}.{module.name}")
    return dict(_registry)


def get_check(name: str) -> Check:
    """The check called `name`. Raises KeyError that lists the lab's checks."""
    lab = name.split(".")[0]
    if lab in {module.name for module in iter_modules(__path__)}:  # one lab's module is enough, and a fault in another's is no matter
        import_module(f"{__name__}.{lab}")
    if name in _registry:
        return _registry[name]
    checks = all_checks()
    if name not in checks:
        near = [known for known in checks if known.split(".")[0] == name.split(".")[0]] or list(checks)
        raise KeyError(f"no check is called {name!r}; there are {', '.join(near)}")
    return checks[name]


def check(name: str, *candidate: Any) -> Verdict:
    """Check what you wrote: the function (or functions) themselves, not their results.

    Runs in fresh processes: it cannot hang or crash your notebook, and what you run there stays there. The value counts as points
    where a number is wanted and shows a table, one hint and a picture in a notebook.
    """
    from labkit.checks._candidate import pack_candidate

    known = get_check(name)
    packed = pack_candidate(known, candidate)
    return packed if isinstance(packed, Verdict) else run_check(known, packed)


def _warm_up_in_a_notebook() -> None:
    """Start importing torch in the process that probes come from while the learner still reads: the first check answers at once."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None and hasattr(shell, "kernel"):
        from labkit.ranks import warm_up

        warm_up()


_warm_up_in_a_notebook()

"""What a learner hands to a check, as bytes to be opened only where it runs."""

from typing import Any

from labkit.checks._core import Check
from labkit.checks._verdict import Verdict


def pack_candidate(check: Check, candidate: tuple[Any, ...]) -> bytes | Verdict:
    """The learner's function pickled (a tuple of them where several are given), or a verdict that says why it cannot travel."""
    from labkit.ranks import CargoError, cargo, travel

    if not candidate or any(not callable(item) for item in candidate):
        got = "nothing" if not candidate else f"a {type(next(item for item in candidate if not callable(item))).__name__}"
        refused = f"check({check.name!r}, ...) wants the function itself, and got {got}. Write its name without parentheses."
    else:
        try:
            for item in candidate:
                cargo.pack(item, (), {})  # tells by name what is too large, or cannot leave this notebook
            return travel.dumps(candidate[0] if len(candidate) == 1 else candidate)
        except CargoError as error:
            refused = str(error)
    return Verdict(check.name, "error", 0.0, check.points, failed="runs", detail=refused)

"""Hidden cases: `exam("pingpong.forward", pingpong_forward)` runs a check's strict cases as the grader does.

What it shows names no case and no value, so a learner who reads the feedback page learns how much held, not on what.
Private cases of an instructor may live in modules of this package.
"""

from __future__ import annotations

import os
from typing import Any

from labkit.checks import Verdict, get_check, run_check

SEED_VARIABLE = "LABKIT_EXAM_SEED"
DEFAULT_SEED = 20240229


def exam_seed() -> int:
    """The instructor's seed from the variable LABKIT_EXAM_SEED, else a fixed one that anybody can read here."""
    text = os.environ.get(SEED_VARIABLE, "")
    try:
        return int(text) if text.strip() else DEFAULT_SEED
    except ValueError:
        raise ValueError(f"{SEED_VARIABLE} must be a whole number, it is {text!r}.") from None


def exam(name: str, *candidate: Any, points: float | None = None) -> Verdict:
    """Check `candidate` in the strict cases of the check `name`; the verdict hides what they are.

    points : what the graded cell is worth, where that differs from the check's own points (the score is scaled).
    Raises KeyError for an unknown check.
    """
    from labkit.checks._candidate import pack_candidate

    known = get_check(name)
    packed = pack_candidate(known, candidate)
    verdict = packed if isinstance(packed, Verdict) else run_check(known, packed, seed=exam_seed(), strict=True)
    return conceal(verdict, verdict.max_points if points is None else points)


def conceal(verdict: Verdict, max_points: float) -> Verdict:
    """The same result, scaled to `max_points`, without hint, figures, case names or picture."""
    share = verdict.points / verdict.max_points if verdict.max_points else 0.0
    held = sum(outcome.passed for outcome in verdict.criteria)
    counted = f"{held} of {len(verdict.criteria)} criteria hold in the hidden cases" if verdict.criteria else ""
    detail = {
        "unfinished": "The answer cell is not written yet.",
        "error": "Your code stopped with an error in a hidden case.",
        "timeout": "Your code did not end in time in a hidden case.",
        "memory": "Your code ran out of memory in a hidden case.",
        "deadlock": "The ranks waited for each other in a hidden case.",
        "flagged": "A ready-made answer was called, which this exercise forbids.",
    }.get(verdict.status, counted)
    return Verdict(verdict.check, verdict.status, share * max_points, max_points, detail=detail, summary=counted,
                   seconds=verdict.seconds, hidden=True)  # fmt: skip

"""From findings of single cases to one verdict: the rule of points and the routing of one hint."""

from dataclasses import replace

from labkit.checks._core import Check, Finding
from labkit.checks._verdict import Outcome


def merge(check: Check, judged: list[tuple[str, list[Finding]]]) -> tuple[list[Outcome], dict[str, Finding]]:
    """Outcomes in the check's order and the finding behind each failed one. `judged` holds (case name, findings).

    A criterion must hold in every case that speaks of it; one that no case spoke of has not been shown and fails.
    """
    outcomes, failed = [], {}
    for criterion in check.criteria:
        chosen: tuple[str, Finding] | None = None
        for case_name, findings in judged:
            for finding in findings:
                if finding.criterion == criterion.name and (chosen is None or (chosen[1].passed and not finding.passed)):
                    chosen = (case_name, finding)
        case_name, finding = chosen or ("", Finding(criterion.name, False, "", "not reached"))
        outcomes.append(
            Outcome(
                name=criterion.name,
                role=criterion.role,
                points=criterion.points,
                witness=criterion.witness,
                passed=finding.passed,
                expected=finding.expected,
                observed=finding.observed,
                case=case_name,
            )
        )
        if not finding.passed:
            failed[criterion.name] = finding
    return award(outcomes), failed


def award(outcomes: list[Outcome]) -> list[Outcome]:
    """Fill in `earned`: numbers all or nothing, technique only on right numbers, cost only on a whole technique."""
    numbers = all(outcome.passed for outcome in outcomes if outcome.role == "numbers")
    technique = numbers and all(outcome.passed for outcome in outcomes if outcome.role == "technique")
    counts = {"numbers": numbers, "technique": numbers, "cost": technique}
    return [replace(outcome, earned=outcome.points if outcome.passed and counts[outcome.role] else 0.0) for outcome in outcomes]

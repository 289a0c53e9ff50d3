"""Check "number_formats.limits": where a format's range and precision end."""

import itertools
from typing import Any

import torch

from labkit.checks import _number_formats_oracle as oracle
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._number_formats_decode import draw_format, name_of
from labkit.checks._number_formats_results import as_number
from labkit.checks._threads import one_thread

GROUPS = {
    "how large": ("largest", "infinite_from", "nan_from"),
    "how small": ("smallest_normal", "smallest", "smallest_squared"),
    "how fine": ("still_one", "first_missing"),
}
KEYS = tuple(itertools.chain(*GROUPS.values()))
# Exponent bits -> fewest and most fraction bits: every format holds the integers around 2**(fraction_bits + 1), and a search number by
# number through the widest takes a second or two.
ROOM = {4: (1, 6), 5: (1, 7), 6: (1, 7)}
HINTS = {
    "largest": "The highest exponent field is not for finite numbers. Which is the highest that is, and which fraction is the largest?",
    "infinite": "65519 becomes 65504 in fp16. So where, between the largest number and the next that would follow, does infinity begin?",
    "nan": "x + x has to become infinity first. How small may x be for that, and is yours a number of the format?",
    "normal": "Which stored exponent do the smallest normal numbers have, if 0 is taken?",
    "smallest": "Is there something between zero and smallest_normal? What is the lowest fraction bit worth there?",
    "squared": "Squares are rounded, too. From which size on does a square round up to the smallest number and not down to zero?",
    "not-in-format": "This number does not survive encode and decode. Which number of the format comes next?",
    "one": "How far is the next number above 1, and up to where is 1 the closer of the two?",
    "one-next": "That one is a number of the format itself, so it does not become 1. Who lies halfway?",
    "missing": "Count up from 1. At which power of two do neighbours begin to lie two apart?",
    "constants": "These belong to another format. Which of the two arguments does your answer not use?",
}  # fmt: skip


def limits_of(exponent_bits: int, fraction_bits: int) -> dict[str, float]:
    """The right answers."""
    unit = oracle.smallest(exponent_bits, fraction_bits)
    positive = oracle.numbers_of(torch.arange(1, (2**exponent_bits - 1) << fraction_bits), exponent_bits, fraction_bits)
    squared = float(positive[positive * positive > unit / 2][0])  # a tie goes to zero, which is even
    return {
        "largest": oracle.largest(exponent_bits, fraction_bits),
        "infinite_from": oracle.infinite_from(exponent_bits, fraction_bits),
        "nan_from": 2.0 ** oracle.bias_of(exponent_bits),
        "smallest_normal": oracle.smallest_normal(exponent_bits),
        "smallest": unit,
        "smallest_squared": squared,
        "still_one": 1 + 2.0 ** -(fraction_bits + 1),
        "first_missing": 2.0 ** (fraction_bits + 1) + 1,
    }


@one_thread()
def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def drawn() -> tuple[int, int]:
        exponent_bits = int(torch.randint(4, 7, (), generator=generator))
        return draw_format(generator, (exponent_bits, exponent_bits), ROOM[exponent_bits])

    groups = {"fp16": [(5, 10)], "other formats": [(5, 2), (8, 7), drawn(), drawn()]}
    if strict:
        groups["every format"] = [(e, m) for e, (low, high) in ROOM.items() for m in range(low, high + 1, 2)]
    return [Case(name, {"formats": formats}) for name, formats in groups.items()]


def _probe(candidate: Any, case: Case) -> Observation:
    rows = []
    for exponent_bits, fraction_bits in case.values["formats"]:
        answer = candidate(exponent_bits, fraction_bits)
        if not isinstance(answer, dict):
            told = "None" if answer is None else f"a {type(answer).__name__}"
            raise WrongResult(f"limits returned {told}, expected a dict with the keys {', '.join(KEYS)}")
        missing = [key for key in KEYS if key not in answer]
        if missing:
            raise WrongResult(f"limits returned a dict without {', '.join(missing)}")
        rows.append({key: as_number(answer[key], f"limits, at {key!r},") for key in KEYS})
    return Observation({"rows": rows})


def _hint(key: str, got: float, right: dict[str, float], bits: tuple[int, int]) -> str:
    if key in ("nan_from", "smallest_squared") and float(oracle.rounded(torch.tensor([got], dtype=torch.float64), *bits)[0]) != got:
        return "not-in-format"
    if key == "still_one":
        return "one-next" if got == 1 + 2.0 ** -bits[1] else "one"
    names = {"infinite_from": "infinite", "nan_from": "nan", "smallest_normal": "normal", "smallest_squared": "squared"}
    return {"first_missing": "missing", **names}.get(key, key)


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    findings = {}
    for bits, row in zip(case.values["formats"], seen.values["rows"], strict=True):
        right, in_fp16 = limits_of(*bits), limits_of(5, 10)
        for name, keys in GROUPS.items():
            if name in findings and not findings[name].passed:
                continue
            wrong = [key for key in keys if not abs(row[key] - right[key]) <= 1e-12 * right[key]]
            if not wrong:
                findings[name] = Finding(name, True, "as the format has it", f"{len(keys)} right")
                continue
            key = wrong[0]
            copied = row[key] == in_fp16[key] and tuple(bits) != (5, 10)
            observed = f"{name_of(*bits)}: {key} {row[key]:.12g}" + (f", and {len(wrong) - 1} more wrong" if wrong[1:] else "")
            hint = "constants" if copied else _hint(key, row[key], right, tuple(bits))
            findings[name] = Finding(name, False, "as the format has it", observed, hint)
    return list(findings.values())


def _summary(case: Case, seen: Observation) -> str:
    row = seen.values["rows"][0]
    return (
        f"{name_of(*case.values['formats'][0])}: infinite from {row['infinite_from']:g}, "
        f"squares of less than {row['smallest_squared']:.3g} vanish"
    )


register(Check(
    "number_formats.limits",
    criteria=(
        Criterion("how large", "technique", 0.75, "recomputed"),
        Criterion("how small", "technique", 0.75, "recomputed"),
        Criterion("how fine", "technique", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=("labkit.checks._number_formats_oracle",),
    summary=_summary,
    timeout=60.0,
))  # fmt: skip

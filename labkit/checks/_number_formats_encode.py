"""Check "number_formats.encode": the bit pattern of the nearest number, in any format."""

from typing import TYPE_CHECKING, Any

import torch

from labkit.checks import _number_formats_oracle as oracle
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._number_formats_decode import FP16, draw_format, name_of
from labkit.checks._number_formats_results import as_patterns, call
from labkit.checks._number_formats_values import EXACT, KINDS, LARGE, NEAREST, SMALL, SPECIAL, TIES, all_midpoints, values_of
from labkit.checks._threads import one_thread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HINTS = {
    "patterns": "A pattern is a whole number. Which of yours is not one, or below zero?",
    "negative": "A pattern is a number from 0 up. What is the highest bit worth, when nobody reads it as a sign?",
    "sign": "Positive numbers are right. Which steps of yours see a negative number, and which only its size?",
    "round-trip": "These are numbers of the format: nothing has to be rounded. Does your decode give back what you encoded?",
    "truncated": "Your values all move towards zero. Each lies between two neighbours: which of the two is closer?",
    "carry": "Most are right, but not where the fraction rounds up to the next power of two. What becomes of the exponent there?",
    "nearest": "Take one of these between its two neighbours. Which of the two is closer, and which one do you take?",
    "ties": "Here both neighbours are equally close. Which of the two patterns ends in a 0, and which one do you take?",
    "flushed": "Is there something between zero and the smallest normal number?",
    "twice": "Nearly all of these are right. How many times is such a number rounded on its way?",
    "subnormal": "Below the smallest normal number the gap no longer shrinks. What is one step there, and how many steps is your value?",
    "saturates": "Beyond the largest number, imagine the next one. From where on would that be the closer of the two?",
    "early": "Some of these lie beyond the largest number, and yet closer to it than to one that would follow. What becomes of them?",
    "beyond": "What does the format have after its largest finite number, and can a pattern become larger than that?",
    "nan": "Which bits decide between infinity and nan, and are any of them left in what you return?",
    "zero": "What does your code take for the exponent of zero, and what becomes of the sign of -0.0?",
    "infinity": "Infinity has a pattern of its own. Does it go through the steps that are meant for finite numbers?",
    "constants": "fp16 comes out right, and this format does not. Which number in your code belongs to fp16 only?",
}  # fmt: skip


LINE = (3, 2)  # the picture's format: few enough numbers to see each


@one_thread()
def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    others = [(4, 3), draw_format(generator, (2, 4), (2, 7)), draw_format(generator, (5, 8), (2, 4))]
    groups = {"16 bits": [(5, 10), (8, 7)], "other formats": others}
    if strict:
        wide = [(8, 10), (7, 10), draw_format(generator, (6, 8), (8, 10))]
        groups["wide and narrow formats"] = [*wide, (2, 1), (8, 1), (3, 10), draw_format(generator, (2, 8), (1, 6))]
    cases = []
    for name, formats in groups.items():
        tensors = {}
        for index, bits in enumerate(formats):
            by_kind = values_of(generator, *bits, every=sum(bits) < 16)
            kinds = torch.cat([torch.full(values.shape, KINDS.index(kind)) for kind, values in by_kind.items()])
            order = torch.randperm(len(kinds), generator=generator)
            # As bit patterns of float32: every nan must arrive as it is.
            tensors |= {f"{index}/values": torch.cat(list(by_kind.values())).view(torch.int32)[order], f"{index}/kinds": kinds[order]}
        cases.append(Case(name, {"formats": formats}, tensors))
    cases[1].tensors["line"] = torch.linspace(0, 16.5, 1057)  # for the picture
    if strict:
        cases.append(_every_one())
    return cases


def _every_one() -> Case:
    """Every midpoint of fp16 and of bf16, and every number of bf16 for fp16."""
    formats, values = [(5, 10), (8, 7), (5, 10)], [all_midpoints(5, 10), all_midpoints(8, 7)]
    values.append((torch.arange(2**16) << 16).to(torch.int32).view(torch.float32))
    size = values[2].abs()
    kinds = torch.full(size.shape, KINDS.index(NEAREST))
    kinds[oracle.rounded(size, 5, 10) == size.double()] = KINDS.index(EXACT)
    kinds[size < oracle.smallest_normal(5)] = KINDS.index(SMALL)
    kinds[size >= oracle.largest(5, 10)] = KINDS.index(LARGE)
    kinds[(size == 0) | ~torch.isfinite(size)] = KINDS.index(SPECIAL)
    all_kinds = [torch.full(some.shape, KINDS.index(TIES)) for some in values[:2]] + [kinds]
    for bits, some, kind in zip(formats[:2], values, all_kinds, strict=False):
        kind[some < oracle.smallest_normal(bits[0])] = KINDS.index(SMALL)
    tensors = {f"{i}/values": some.view(torch.int32) for i, some in enumerate(values)}
    return Case("every midpoint", {"formats": formats}, tensors | {f"{i}/kinds": some for i, some in enumerate(all_kinds)})


def _probe(candidate: Any, case: Case) -> Observation:
    found = {}
    for index, (exponent_bits, fraction_bits) in enumerate(case.values["formats"]):
        values = case.tensors[f"{index}/values"].view(torch.float32)
        found[str(index)] = as_patterns(call(candidate, values, exponent_bits, fraction_bits), len(values), "encode")
    if "line" in case.tensors:
        found["line"] = as_patterns(call(candidate, case.tensors["line"], *LINE), len(case.tensors["line"]), "encode")
    return Observation({}, found)


def _right(got: torch.Tensor, values: torch.Tensor, want: torch.Tensor, exponent_bits: int, fraction_bits: int) -> torch.Tensor:
    """Equal, or any nan for a nan."""
    infinity, sign = (2**exponent_bits - 1) << fraction_bits, 1 << (exponent_bits + fraction_bits)
    is_nan = (got % sign > infinity) & (got >= 0) & (got < 2 * sign)
    return torch.where(values.isnan(), is_nan, got == want)


def _twice(values: torch.Tensor, exponent_bits: int, fraction_bits: int) -> torch.Tensor:
    """Patterns by rounding to all fraction bits first, and then again to what a subnormal number has."""
    once = oracle.rounded(values, 11, fraction_bits)  # as if the exponent had no end
    return oracle.patterns_of(once, exponent_bits, fraction_bits)


def _hint(kind: str, got: torch.Tensor, values: torch.Tensor, want: torch.Tensor, bits: tuple[int, int]) -> str:
    exponent_bits, fraction_bits = bits
    sign = 1 << (exponent_bits + fraction_bits)
    wrong = got != want
    if kind != SPECIAL and bool((got < 0).any()) and torch.equal(got < 0, torch.signbit(values)):
        return "negative"
    if kind != SPECIAL and bool(((got ^ want)[wrong] == sign).all() or (values[wrong] < 0).all()):
        return "sign"
    infinity = (2**exponent_bits - 1) << fraction_bits
    if kind == EXACT:
        return "flushed" if bool((values[wrong].abs() < oracle.smallest_normal(exponent_bits)).all()) else "round-trip"
    if kind == NEAREST:
        if torch.equal(got, oracle.patterns_of(values, *bits, rounding=torch.trunc)):
            return "truncated"
        return "carry" if bool((want[wrong] & (2**fraction_bits - 1) == 0).all()) else "nearest"
    if kind == SMALL:
        if bool((got[wrong] & (sign - 1) == 0).all()) and int(wrong.sum()) > len(wrong) // 4:
            return "flushed"
        return "twice" if torch.equal(got, _twice(values, *bits)) else "subnormal"
    if kind == LARGE:
        size, right = got & (sign - 1), want & (sign - 1)
        if bool((size[wrong] == infinity - 1).all()):
            return "saturates"
        return "early" if bool((right[wrong] == infinity - 1).all()) else "beyond"
    if kind == SPECIAL:
        # The first that is wrong in the order: nan, infinity, zero.
        bad = ~_right(got, values, want, *bits)
        return "nan" if bool(bad[values.isnan()].any()) else "infinity" if bool(bad[torch.isinf(values)].any()) else "zero"
    return "ties"


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    findings: dict[str, Finding] = {}
    for index, bits in enumerate(case.values["formats"]):
        values, kinds = case.tensors[f"{index}/values"].view(torch.float32), case.tensors[f"{index}/kinds"]
        got, want = seen.tensors[str(index)], oracle.patterns_of(values, *bits)
        right = _right(got, values, want, *bits)
        for name in KINDS:
            kind = kinds == KINDS.index(name)
            if (name in findings and not findings[name].passed) or not kind.any():
                continue
            wrong = (kind & ~right).nonzero().flatten()
            if not len(wrong):
                findings[name] = Finding(name, True, "the nearest number's pattern", f"right in {len(case.values['formats'])} formats")
                continue
            hint = _hint(name, got[kind], values[kind], want[kind], tuple(bits))
            if tuple(bits) != FP16 and hint in ("round-trip", "nearest", "subnormal", "beyond"):
                hint = "constants"
            first = wrong[0]
            pattern, became = int(got[first]), float(oracle.numbers_of(got[first : first + 1], *bits)[0])
            observed = (
                f"{name_of(*bits)}: {len(wrong):,} of {int(kind.sum()):,} wrong, "
                f"such as {float(values[first]):.9g} to {pattern:#x}, which is {became:.9g}"
            )
            findings[name] = Finding(name, False, "the nearest number's pattern", observed, hint)
    return list(findings.values())


def picture(case: Case, seen: Observation) -> "Figure | None":
    """The staircase that rounding makes of a line, in a format with few numbers."""
    if "line" not in seen.tensors:
        return None
    from labkit.figures import staircase

    line = case.tensors["line"]
    drawn = staircase(
        line,
        {"exact": oracle.rounded(line, *LINE), "yours": oracle.numbers_of(seen.tensors["line"], *LINE)},
        title="Every number from 0 to 16.5 in a format of 3 exponent and 2 fraction bits",
    )
    drawn.set_label(drawn.alt)
    return drawn


register(Check(
    "number_formats.encode",
    criteria=tuple(Criterion(kind, "technique", 0.5, "recomputed") for kind in KINDS),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=("labkit.checks._number_formats_oracle",),
    picture=picture,
    summary=lambda case, seen: "every number of fp16 and bf16, between them, beyond them, and in three formats drawn at random",
    timeout=30.0,
))  # fmt: skip

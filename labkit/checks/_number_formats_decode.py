"""Check "number_formats.decode": the number that a bit pattern stands for, in any format."""

from typing import Any

import torch

from labkit.checks import _number_formats_oracle as oracle
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._number_formats_results import as_numbers, call
from labkit.checks._threads import one_thread

NORMAL, SMALL, TOP = "normal numbers", "zero and subnormal numbers", "infinity and nan"
HINTS = {
    "bias": "All your normal numbers are off by the same power of two. What is taken off the stored exponent, in a format of this width?",
    "hidden-one": "Write 1.5 in binary. Which of its digits does a format not store, because it is the same in every normal number?",
    "fraction": "The powers of two are right, and what stands before them is not. How much is the lowest fraction bit worth beside the 1?",
    "sign": "Which bit tells 2 from -2, and does it change anything else?",
    "number": "Take one of the patterns apart with a pencil. Are all three fields where you cut them?",
    "like-normal": "With exponent field 0, is there still a 1 before the fraction?",
    "neighbours": "The largest subnormal number and the smallest normal one are neighbours. How large is the gap between yours?",
    "flushed": "Is there something between zero and the smallest normal number?",
    "minus-zero": "There are two patterns for zero. Do yours come out as 0.0 and -0.0?",
    "not-special": "What does the highest exponent field stand for, when the fraction is zero, and when it is not?",
    "constants": "fp16 comes out right, and this format does not. Which number in your code belongs to fp16 only?",
}  # fmt: skip


FP16 = (5, 10)
SIXTEEN = (FP16, (8, 7))


def draw_format(generator: torch.Generator, exponent_bits: tuple[int, int], fraction_bits: tuple[int, int]) -> tuple[int, int]:
    """A format drawn from ranges of bits (both ends included) that is neither fp16 nor bf16."""
    while True:
        found = tuple(int(torch.randint(low, high + 1, (), generator=generator)) for low, high in (exponent_bits, fraction_bits))
        if found not in SIXTEEN:
            return found


def name_of(exponent_bits: int, fraction_bits: int) -> str:
    """fp16, bf16, or "format (4, 3)"."""
    bits = (exponent_bits, fraction_bits)
    return dict(zip(SIXTEEN, ("fp16", "bf16"), strict=True)).get(bits, f"format {bits}")


def _patterns(generator: torch.Generator, exponent_bits: int, fraction_bits: int) -> torch.Tensor:
    """Every pattern of a format with at most 16 bits, a sample of a larger one, in no order."""
    width = 1 + exponent_bits + fraction_bits
    if width <= 16:
        return torch.randperm(2**width, generator=generator)
    sample = torch.randint(2**width, (6000,), generator=generator)
    low = torch.randint(2**fraction_bits, (1000,), generator=generator)  # exponent field 0
    top = (2**exponent_bits - 1) << fraction_bits
    edges = torch.tensor([0, 1, 2**fraction_bits - 1, 2**fraction_bits, top - 1, top, top + 1, 2 ** (width - 1), 2**width - 1])
    return torch.cat([sample, low, edges, low + top])


@one_thread()
def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    others = [(4, 3), draw_format(generator, (2, 4), (1, 7)), draw_format(generator, (5, 8), (2, 4))]
    groups = {"all patterns of 16 bits": [(5, 10), (8, 7)], "other formats": others}
    if strict:
        wide = [(8, 10), (7, 10), draw_format(generator, (6, 8), (8, 10))]
        groups["wide and narrow formats"] = [*wide, (2, 1), (8, 1), (3, 10), draw_format(generator, (2, 8), (1, 6))]
    return [
        Case(
            name,
            {"formats": formats},
            {str(index): _patterns(generator, *bits) for index, bits in enumerate(formats)},
        )
        for name, formats in groups.items()
    ]


def _probe(candidate: Any, case: Case) -> Observation:
    found = {}
    for index, (exponent_bits, fraction_bits) in enumerate(case.values["formats"]):
        bits = case.tensors[str(index)]
        found[str(index)] = as_numbers(call(candidate, bits, exponent_bits, fraction_bits), len(bits), "decode")
    return Observation({}, found)


def same(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Where two float64 tensors agree: equal with equal signs, zeros too, or both nan."""
    return (got.isnan() & want.isnan()) | ((got == want) & (got.signbit() == want.signbit()))


def _normal_hint(got: torch.Tensor, want: torch.Tensor) -> str:
    if same(got.abs(), want.abs()).all():
        return "sign"
    ratio = got.abs() / want.abs()
    if bool((ratio == ratio[0]).all()) and bool(torch.isfinite(ratio[:1]).all()) and ratio[0] > 0:
        return "bias"
    power = oracle.power_of_two(torch.frexp(want.abs()).exponent.long() - 1)
    if same(got.abs(), want.abs() - power).all():
        return "hidden-one"
    if bool(((got.abs() >= power) & (got.abs() <= 2 * power)).all()):
        return "fraction"
    return "number"


def _small_hint(got: torch.Tensor, want: torch.Tensor, unit: float, fraction_bits: int) -> str:
    size, right = got.abs(), want.abs()
    if same(size, right).all():
        return "sign" if not same(got[right > 0], want[right > 0]).all() else "minus-zero"
    some = right > 0
    if bool((size[some] == 0).all()):
        return "flushed"
    one = unit * 2**fraction_bits
    # A 1 before the fraction, with the power of exponent field 0, or with that of field 1, or only at zero.
    for like_normal in (right / 2 + one / 2, right + one):
        if same(size[some], like_normal[some]).all():
            return "like-normal"
    if bool((size[some] / right[some] == size[some][0] / right[some][0]).all()) and bool(some.any()):
        return "neighbours"
    return "number"


def _hint(name: str, got: torch.Tensor, want: torch.Tensor, unit: float, fraction_bits: int) -> str:
    if name == NORMAL:
        return _normal_hint(got, want)
    if name == SMALL:
        return _small_hint(got, want, unit, fraction_bits)
    return "sign" if same(got.abs(), want.abs()).all() else "not-special"


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    findings = {}
    for index, (exponent_bits, fraction_bits) in enumerate(case.values["formats"]):
        bits, got = case.tensors[str(index)], seen.tensors[str(index)]
        want = oracle.numbers_of(bits, exponent_bits, fraction_bits)
        right = same(got, want)
        field = (bits >> fraction_bits) & (2**exponent_bits - 1)
        top = field == 2**exponent_bits - 1
        kinds = {NORMAL: (field > 0) & ~top, SMALL: field == 0, TOP: top}
        for name, kind in kinds.items():
            if name in findings and not findings[name].passed:
                continue
            wrong = (kind & ~right).nonzero().flatten()
            total = int(kind.sum())
            if not len(wrong):
                findings[name] = Finding(name, True, "as the format says", f"right in {len(case.values['formats'])} formats")
                continue
            unit = oracle.smallest(exponent_bits, fraction_bits)
            hint = _hint(name, got[kind], want[kind], unit, fraction_bits)
            if (exponent_bits, fraction_bits) != FP16 and hint in ("bias", "number", "fraction"):
                hint = "constants"
            first = wrong[0]
            observed = (
                f"{name_of(exponent_bits, fraction_bits)}: {len(wrong):,} of {total:,} wrong, "
                f"such as 0x{int(bits[first]):0{(4 + exponent_bits + fraction_bits) // 4}X} as {float(got[first]):.9g}"
            )
            findings[name] = Finding(name, False, "as the format says", observed, hint)
    return list(findings.values())


register(Check(
    "number_formats.decode",
    criteria=(
        Criterion(NORMAL, "technique", 1, "recomputed"),
        Criterion(SMALL, "technique", 0.5, "recomputed"),
        Criterion(TOP, "technique", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=("labkit.checks._number_formats_oracle",),
    summary=lambda case, seen: "all 65,536 patterns of fp16 and of bf16, and three formats drawn at random",
    timeout=30.0,
))  # fmt: skip

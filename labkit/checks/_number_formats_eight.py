"""Check "number_formats.e4m3": the 8-bit format that gives up infinity for range (Micikevicius et al. 2022, arXiv 2209.05433)."""

from typing import Any

import torch

from labkit.checks import _number_formats_oracle as oracle
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._number_formats_results import as_patterns, call
from labkit.checks._threads import one_thread

EXACT, ROUNDED, TOP = "numbers of the format", "rounding", "the top of the range"
NAN, MOST = 0x7F, 0x7E
HINTS = {
    "top-number": "240 is the largest number of the standard layout. What do the patterns above it stand for here?",
    "top-infinite": "This format has no infinity. What does the contract want of a number that is too large?",
    "top": "Only one pattern of each sign is nan. Which finite number has the pattern just below it?",
    "nan": "What is still nan in this format, and what becomes of one that comes in?",
    "rounding": "Below 240 nothing is new: does your encode for 4 and 3 bits give the same patterns?",
}  # fmt: skip


def numbers_of(bits: torch.Tensor) -> torch.Tensor:
    """float64 numbers of patterns from 0 to 255: the standard layout of (5, 3) bits has the same steps, and no end this near."""
    exponent, fraction = (bits >> 3) & 15, bits & 7
    size = (fraction + 8 * (exponent > 0)).double() * oracle.power_of_two(exponent.clamp(min=1) - 10)
    return torch.where((bits & NAN) == NAN, torch.nan, torch.where(bits >= 128, -size, size))


def patterns_of(values: torch.Tensor) -> torch.Tensor:
    """The nearest number's pattern, ties to even; what would lie beyond 448 becomes 448, nan stays nan."""
    # With one exponent bit more and the bias of 4 bits: scale into the wider format, whose exponent 8 is this one's 0.
    size = values.double().abs().clamp(max=448.0).nan_to_num(448.0)
    power = torch.where(size == 0, -6, (torch.frexp(size).exponent.long() - 1).clamp(min=-6))
    pattern = ((power + 6) << 3) + torch.round(size * oracle.power_of_two(3 - power)).long()
    pattern = torch.where(values.isnan(), NAN, pattern.clamp(max=MOST))
    return pattern | (torch.signbit(values).long() << 7)


@one_thread()
def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    bits = torch.randperm(256, generator=generator)
    exact = numbers_of(bits)
    exact = exact[~exact.isnan()].float()
    sizes = numbers_of(torch.arange(MOST + 1))
    middle = ((sizes[1:] + sizes[:-1]) / 2).float()
    near = [torch.nextafter(middle, torch.tensor(end)) for end in (0.0, 1000.0)]
    drawn = torch.exp2(torch.rand(2000, generator=generator) * 18 - 10).clamp(max=239.0)
    count = 120 if not strict else 400
    beyond = torch.cat([torch.tensor([447.0, 448.0, 449.0, 463.0, 464.0, 465.0, 479.0, 480.0, 512.0, 1e6, 3e38, torch.inf]),
                        240 + 300 * torch.rand(count, generator=generator)])  # fmt: skip
    rounded = torch.cat([middle, *near, drawn])
    rounded = rounded[rounded < 240]
    tensors = {
        EXACT: exact,
        ROUNDED: torch.cat([rounded, -rounded]),
        TOP: torch.cat([beyond, -beyond, torch.tensor([torch.nan, 0.0, -0.0])]),
    }
    return [Case(name, {}, {"values": values.contiguous()}, covers=(name,)) for name, values in tensors.items()]


def _probe(candidate: Any, case: Case) -> Observation:
    values = case.tensors["values"]
    return Observation({}, {"bits": as_patterns(call(candidate, values), len(values), "encode_e4m3")})


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    values, got, name = case.tensors["values"], seen.tensors["bits"], case.covers[0]
    want = patterns_of(values)
    right = torch.where(values.isnan(), (got == NAN) | (got == NAN + 128), got == want)
    if right.all():
        return [Finding(name, True, "as float8_e4m3fn has it", f"{len(values)} right")]
    first = int((~right).nonzero()[0])
    observed = f"{int((~right).sum())} of {len(values)} wrong, such as {float(values[first]):.9g} to {int(got[first]):#x}"
    hint = "rounding"
    if name != ROUNDED and bool((values[~right].abs() > 240).any() or values[~right].isnan().any()):
        wrong = ~right & ~values.isnan()
        size = got[wrong] & NAN
        hint = "top" if len(size) else "nan"
        if len(size) and bool((size == 0x78).all()):
            hint = "top-number"
        elif len(size) and bool((size >= NAN).all()):
            hint = "top-infinite"
    return [Finding(name, False, "as float8_e4m3fn has it", observed, hint)]


register(Check(
    "number_formats.e4m3",
    criteria=(
        Criterion(EXACT, "technique", 0.25, "recomputed"),
        Criterion(ROUNDED, "technique", 0.25, "recomputed"),
        Criterion(TOP, "technique", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=("labkit.checks._number_formats_oracle",),
    summary=lambda case, seen: "all 254 numbers, what lies between them, and what lies beyond 448",
    timeout=20.0,
))  # fmt: skip

"""Check "number_formats.window": the loss scales at which nothing becomes zero and nothing infinite."""

import math
from typing import Any

import torch

from labkit.checks import _number_formats_oracle as oracle
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._number_formats_decode import name_of
from labkit.checks._number_formats_results import as_number
from labkit.checks._number_formats_underflow import magnitudes
from labkit.checks._threads import one_thread

LOW, HIGH, EDGES = "low end", "high end", "ends that are met exactly"
WINDOW_HINTS = {
    "one-tensor": "One scale serves all gradients of a step. Whose smallest and largest number did you take?",
    "sign": "The largest number and the largest size are not the same. Which one overflows first?",
    "not-power": "Your scale is not a power of two. Which multipliers change only the exponent?",
    "exponents": "2**3 is a scale, and 3 is its exponent. Which of the two do you return?",
    "normal": "A number below the smallest normal one has fewer bits, but is it zero?",
    "zeros": "Zeros stay zero at any scale. What do they do to your smallest number?",
    "low-lost": "At your low end something still becomes zero. Multiply the smallest number by it: which of its neighbours is closer?",
    "low-high": "At half your low end nothing is lost either. From which size on does a number round up to the smallest one?",
    "high-lost": "At your high end something becomes infinite. Does the power of two lie above or below the exact quotient?",
    "high-low": "At twice your high end everything is still finite. Where does infinity begin: at the largest number?",
    "edges": "Exactly half the smallest number becomes zero, and 65520 infinity. On which side of your comparison does equality stand?",
    "swapped": "Which of the two ends is the larger scale, and in which order are they returned?",
}  # fmt: skip


def window_of(sizes: torch.Tensor, bits: tuple[int, int]) -> tuple[float, float]:
    """(smallest power of two at which none of `sizes` becomes zero, largest at which none becomes infinite)."""
    sizes = sizes[sizes > 0].double()
    least, most = float(sizes.min()), float(sizes.max())
    low = 2.0 ** math.floor(math.log2(oracle.smallest(*bits) / 2 / least) - 1)
    while least * low <= oracle.smallest(*bits) / 2:
        low *= 2
    high = 2.0 ** math.ceil(math.log2(oracle.infinite_from(*bits) / most) + 1)
    while most * high >= oracle.infinite_from(*bits):
        high /= 2
    return low, high


@one_thread()
def _window_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    shapes = [(9, 7), (40,), (3, 4, 5)]

    def step(low: float, high: float) -> list[torch.Tensor]:
        """Three gradients, the smallest size in one of them and the largest in another, both of negative numbers."""
        parts = [magnitudes(generator, shape, low + 2, high - 2) for shape in shapes]
        # Positive numbers reach less far, so that who looks at them alone is told from who looks at one tensor alone.
        parts = [torch.where(part > 0, magnitudes(generator, part.shape, low + 5, high - 5).abs(), part) for part in parts]
        first, second = torch.randperm(3, generator=generator)[:2].tolist()
        parts[first].view(-1)[draw(0, 30)] = -(2.0 ** (low + 0.4))
        parts[second].view(-1)[draw(0, 30)] = -(2.0 ** (high - 0.3))
        parts[second].view(-1)[31:35] = 0.0
        return parts

    usual = [((5, 10), step(-29, -6)), ((5, 10), step(-21 - draw(0, 6), 3)), ((5, 2), step(-24, -9)), ((4, 3), step(-12, 1))]
    exact = []
    for bits in ((5, 10), (5, 2)) + (((6, 5), (4, 3)) if strict else ()):
        k, j = draw(2, 9), draw(2, 9)
        half, edge = oracle.smallest(*bits) / 2, oracle.infinite_from(*bits)
        for factor in (1.0, 1 + 2.0**-20):  # a tie, and just past it
            exact.append((bits, [torch.tensor([half * factor / 2**k, edge / factor / 2**j, half, 0.0])]))
        # Between the largest number and where infinity begins: still finite.
        exact.append((bits, [torch.tensor([-(oracle.largest(*bits) + edge) / 2 / 2**j, 1.25 * half / 2**k])]))
    if strict:
        usual += [((5, 10), step(-20, 20)), ((5, 10), step(-38, 6)), ((6, 5), step(-30, 2)), ((5, 10), [torch.full((2, 2), -0.75)])]
    return [
        _window_case("gradients of a step", usual, (LOW, HIGH)),
        _window_case("numbers at the ends", exact, (EDGES,)),
    ]


def _window_case(name: str, runs: list[tuple[tuple[int, int], list[torch.Tensor]]], covers: tuple[str, ...]) -> Case:
    tensors = {f"{i}/{j}": part for i, (_, parts) in enumerate(runs) for j, part in enumerate(parts)}
    return Case(name, {"runs": [{"bits": bits, "parts": len(parts)} for bits, parts in runs]}, tensors, covers=covers)


def _parts(case: Case, index: int) -> list[torch.Tensor]:
    return [case.tensors[f"{index}/{j}"] for j in range(case.values["runs"][index]["parts"])]


def _window_probe(candidate: Any, case: Case) -> Observation:
    ends = []
    for index, run in enumerate(case.values["runs"]):
        answer = candidate([part.clone() for part in _parts(case, index)], *run["bits"])
        try:
            low, high = answer
        except (TypeError, ValueError):
            told = "None" if answer is None else f"a {type(answer).__name__}"
            raise WrongResult(f"scale_window returned {told}, expected two scales, (low, high)") from None
        ends.append([as_number(low, "scale_window"), as_number(high, "scale_window")])
    return Observation({"ends": ends})


def _is_power(value: float) -> bool:
    return value > 0 and math.isfinite(value) and abs(math.log2(value) - round(math.log2(value))) < 1e-6


def _window_hint(end: str, got: float, parts: list[torch.Tensor], bits: tuple[int, int]) -> str:
    right = window_of(torch.cat([part.flatten() for part in parts]).abs(), bits)[end == HIGH]
    if not _is_power(got):
        return "zeros" if end == LOW and not math.isfinite(got) else "not-power"
    positive = torch.cat([part.flatten() for part in parts])
    if bool((positive > 0).any()) and got == window_of(positive.clamp(min=0), bits)[end == HIGH]:
        return "sign"
    if len(parts) > 1 and got in [window_of(part.flatten().abs(), bits)[end == HIGH] for part in parts]:
        return "one-tensor"
    if end == LOW:
        least = min(float(part[part != 0].abs().min()) for part in parts)
        if least * got >= oracle.smallest_normal(bits[0]) > least * got / 2:
            return "normal"
        return "low-lost" if got < right else "low-high"
    return "high-lost" if got > right else "high-low"


@one_thread()
def _window_judge(case: Case, seen: Observation) -> list[Finding]:
    wrong: dict[str, tuple[str, str]] = {}
    for index, (run, got) in enumerate(zip(case.values["runs"], seen.values["ends"], strict=True)):
        bits, parts = tuple(run["bits"]), _parts(case, index)
        want = window_of(torch.cat([part.flatten() for part in parts]).abs(), bits)
        for end, mine, right in zip((LOW, HIGH), got, want, strict=True):
            name = end if end in case.covers else EDGES
            if name in wrong or abs(mine - right) <= 1e-6 * right:
                continue
            hint = _window_hint(end, mine, parts, bits)
            if all(abs(one - math.log2(other)) < 1e-6 for one, other in zip(got, want, strict=True)):
                hint = "exponents"
            elif tuple(got) == want[::-1]:
                hint = "swapped"
            elif name == EDGES:
                hint = "high-low" if end == HIGH and mine < right else "edges"
            wrong[name] = (f"{name_of(*bits)}: {end} {mine:g}", hint)
    wanted = "the last power of two at which nothing is lost"
    return [
        Finding(name, name not in wrong, wanted, *wrong.get(name, (f"right for {len(case.values['runs'])} sets of gradients", None)))
        for name in case.covers
    ]


def _log_of_zero(error: dict[str, Any]) -> str | None:
    return "zeros" if error["type"] in ("ZeroDivisionError", "OverflowError") or "domain" in error["message"] else None


register(Check(
    "number_formats.window",
    criteria=(
        Criterion(LOW, "technique", 0.75, "recomputed"),
        Criterion(HIGH, "technique", 0.75, "recomputed"),
        Criterion(EDGES, "technique", 0.5, "recomputed"),
    ),
    cases=_window_cases,
    probe=_window_probe,
    judge=_window_judge,
    hints=WINDOW_HINTS,
    forbids=("labkit.checks._number_formats_oracle",),
    on_error=_log_of_zero,
    summary=lambda case, seen: f"both ends right for {len(seen.values['ends'])} sets of gradients, and where they are met exactly",
    timeout=20.0,
))  # fmt: skip

"""Check "number_formats.underflow": the share of numbers that a cast turns into zero."""

import math
from typing import Any

import torch

from labkit.checks import _number_formats_oracle as oracle
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._number_formats_decode import name_of
from labkit.checks._number_formats_results import as_number
from labkit.checks._threads import one_thread


def magnitudes(generator: torch.Generator, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
    """Numbers of both signs whose log2 of size is spread evenly from `low` to `high`; float32."""
    power = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
    sign = 1 - 2 * torch.randint(2, shape, generator=generator)
    return (torch.exp2(power) * sign).float()


SHARE, ZEROS, BORDER = "share that becomes zero", "zeros that were there before", "at the border"
LOST_HINTS = {
    "normal-threshold": "Below the smallest normal number, is everything zero already?",
    "smallest-threshold": "Zero is not the only neighbour of a number a little below the smallest one. Which is closer?",
    "unscaled": "Does the scale meet the numbers before they are rounded, or after?",
    "rounded-scale": "The product is rounded to the format. Is the scale a number of that format, and must it be one?",
    "changed": "Print the tensor before and after the call. Which line of yours writes into it?",
    "inverse": "Is the number that is rounded larger or smaller than the one you were given, when the scale is 1000?",
    "other-format": "This would be right in fp16. Which format was your function given?",
    "never": "Nothing is lost at all. Below which size does everything become zero, and in which format do you look?",
    "sign": "A negative number is less than any positive one. Is that the same as small?",
    "percent": "A share of the whole lies between 0 and 1. Where does yours?",
    "kept": "Together with the right answer, yours makes 1. Which of the two kinds are you counting?",
    "count": "Is that a count or a share? Of what?",
    "share": "Take four numbers of your own, of which two vanish. What does your function say, and what was divided by what?",
    "zeros": "A number that is zero in float32 cannot be lost. Above or below the line of your fraction, does it still count?",
    "nothing": "When nothing is there to lose, what do you divide by?",
    "border": "Take a number at half the smallest one, and its two neighbours in float32. Which of the three vanish?",
    "infinite": "What is too large for the format is lost in another way. Did it become zero?",
}  # fmt: skip


def _lost(values: torch.Tensor, bits: tuple[int, int], scale: float, wide: bool = True) -> torch.Tensor:
    """Where numbers that are not zero become zero; the product in float64 or float32."""
    scaled = values.double() * scale if wide else values * scale
    return (oracle.rounded(scaled, *bits) == 0) & (values != 0)


def _fraction(values: torch.Tensor, bits: tuple[int, int], scale: float, wide: bool = True) -> float:
    there = int((values != 0).sum())
    return int(_lost(values, bits, scale, wide).sum()) / there if there else 0.0


@one_thread()
def _lost_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def around(bits: tuple[int, int], scale: float, shape: tuple[int, ...]) -> torch.Tensor:
        middle = math.log2(oracle.smallest(*bits) / scale)
        return magnitudes(generator, shape, middle - 6, middle + 4 + bits[1])

    plain = [((5, 10), 1.0, (30, 25)), ((5, 10), 1024.0, (700,)), ((5, 10), 1000.0, (4, 10, 16))]
    plain += [((5, 2), 64.0, (23, 30)), ((4, 3), 1.0, (500,)), ((5, 10), 2.0**16, (600,))]  # the last: no number of fp16
    if strict:
        plain += [
            ((8, 7), 1.0, (400,)),
            ((6, 5), 2.0**20, (25, 30)),
            ((5, 10), 0.125, (600,)),
            ((5, 10), 3.0, (2, 3, 4, 20)),
            ((5, 2), 1000.0, (500,)),
        ]
    runs = [{"bits": bits, "scale": scale} for bits, scale, _ in plain]
    tensors = {str(i): around(bits, scale, shape) for i, (bits, scale, shape) in enumerate(plain)}
    cases = [Case("numbers of many sizes", {"runs": runs}, tensors, covers=(SHARE,))]
    sparse = []
    for bits, scale in [((5, 10), 1.0), ((5, 10), 256.0), ((5, 2), 1.0)]:
        values = around(bits, scale, (20, 20))
        values[torch.rand(20, 20, generator=generator) < 0.4] = 0.0
        values[0, :4] = -0.0
        sparse.append((bits, scale, values))
    sparse.append(((5, 10), 8.0, torch.zeros(6, 5)))
    cases.append(_lost_case("zeros among them", sparse, ZEROS))
    borders = [((5, 10), 1.0), ((5, 10), 4096.0), ((4, 3), 2.0)] + ([((5, 2), 0.5), ((6, 5), 2.0**12)] if strict else [])
    edges = []
    for bits, scale in borders:
        half = torch.tensor([oracle.smallest(*bits) / 2 / scale], dtype=torch.float64).float()
        up, down = torch.nextafter(half, torch.tensor(1.0)), torch.nextafter(half, torch.tensor(0.0))
        values = torch.cat([half, up, down, half, 1.5 * half, 2 * half, 3 * half])
        edges.append((bits, scale, torch.cat([values, -values])))
    edges.append(((5, 10), 1024.0, torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan, 1e-30, 1.0, 60000.0])))
    cases.append(_lost_case("numbers at the border", edges, BORDER))
    return cases


def _lost_case(name: str, runs: list[tuple[tuple[int, int], float, torch.Tensor]], criterion: str) -> Case:
    values = [{"bits": bits, "scale": scale} for bits, scale, _ in runs]
    return Case(name, {"runs": values}, {str(i): run[2] for i, run in enumerate(runs)}, covers=(criterion,))


def _lost_probe(candidate: Any, case: Case) -> Observation:
    shares, changed = [], False
    for index, run in enumerate(case.values["runs"]):
        given = case.tensors[str(index)].clone()
        shares.append(as_number(candidate(given, *run["bits"], run["scale"]), "underflow_fraction"))
        changed |= not torch.equal(given.view(torch.int32), case.tensors[str(index)].view(torch.int32))
    return Observation({"shares": shares, "changed": changed})


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-5


def _lost_hint(criterion: str, got: float, values: torch.Tensor, bits: tuple[int, int], scale: float) -> str:
    right = _fraction(values, bits, scale)
    size, there = values.abs().double() * scale, values != 0
    total, count = max(int(there.sum()), 1), int(_lost(values, bits, scale).sum())
    if criterion == ZEROS:
        return "zeros" if bool(there.any()) else "nothing"
    if criterion == BORDER:
        return "infinite" if bool(torch.isinf(values).any()) else "border"
    limits = {"normal-threshold": oracle.smallest_normal(bits[0]), "smallest-threshold": oracle.smallest(*bits)}
    guesses: dict[str, float] = {name: int(((size < limit) & there).sum()) / total for name, limit in limits.items()}
    guesses |= {
        "rounded-scale": _fraction(values, bits, float(oracle.rounded(torch.tensor([scale], dtype=torch.float64), *bits)[0])),
        "unscaled": _fraction(values, bits, 1.0),
        "inverse": _fraction(values, bits, 1.0 / scale),
        "sign": int((((values.double() * scale) < oracle.smallest(*bits) / 2) & there).sum()) / total,
        "percent": 100 * right,
        "kept": 1 - right,
        "count": count,
        "other-format": _fraction(values, (5, 10), scale),
    }
    return next((name for name, guess in guesses.items() if _near(got, guess) and not _near(guess, right)), "share")


@one_thread()
def _lost_judge(case: Case, seen: Observation) -> list[Finding]:
    criterion = case.covers[0]
    wrong: list[tuple[str, str]] = []
    for index, (run, got) in enumerate(zip(case.values["runs"], seen.values["shares"], strict=True)):
        values, bits, scale = case.tensors[str(index)], tuple(run["bits"]), run["scale"]
        if any(_near(got, _fraction(values, bits, scale, wide)) for wide in (True, False)):
            continue
        told = f"{name_of(*bits)}, scale {scale:g}: {got:.4g} of {values.numel()} numbers"
        wrong.append((told, _lost_hint(criterion, got, values, bits, scale)))
    wanted = "share of those that were not zero"
    if seen.values["changed"] and criterion == SHARE:
        return [Finding(criterion, False, "the tensor as it was", "the tensor is another one after the call", "changed")]
    if not wrong:
        return [Finding(criterion, True, wanted, f"right for {len(case.values['runs'])} tensors")]
    # A run at scale 1 cannot tell a scale that is used wrongly: the hint is the most telling of all runs.
    if criterion == SHARE and max(seen.values["shares"]) == 0:
        wrong[0] = (wrong[0][0], "never")
    told = next((one for one in wrong if one[1] != "share"), wrong[0])
    return [Finding(criterion, False, wanted, told[0], told[1])]


def _divides_by_nothing(error: dict[str, Any]) -> str | None:
    return "nothing" if error["type"] == "ZeroDivisionError" else None


register(Check(
    "number_formats.underflow",
    criteria=(
        Criterion(SHARE, "technique", 1, "recomputed"),
        Criterion(ZEROS, "technique", 0.5, "recomputed"),
        Criterion(BORDER, "technique", 0.5, "recomputed"),
    ),
    cases=_lost_cases,
    probe=_lost_probe,
    judge=_lost_judge,
    hints=LOST_HINTS,
    forbids=("labkit.checks._number_formats_oracle",),
    on_error=_divides_by_nothing,
    summary=lambda case, seen: f"right for {len(seen.values['shares'])} tensors of many sizes, with zeros and at the border",
    timeout=20.0,
))  # fmt: skip

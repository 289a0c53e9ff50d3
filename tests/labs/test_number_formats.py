"""Lab 03: its oracle agrees with torch and with exact fractions, its reference gets everything, and what nobody wrote gets nothing."""

import bisect
import math
from fractions import Fraction

import numpy
import pytest
import torch

from labkit.checks import _number_formats_eight as eight
from labkit.checks import _number_formats_oracle as oracle
from labkit.checks import _number_formats_sums as sums
from labkit.checks import get_check
from labkit.checks._core import WrongResult
from labkit.checks._number_formats_limits import ROOM, limits_of
from labkit.checks._number_formats_results import as_number, as_numbers, as_patterns
from labkit.checks._number_formats_values import KINDS, values_of
from labkit.checks._number_formats_window import window_of
from tests.labs import corpus
from tests.labs.solutions import solution

TORCH = {(5, 10): torch.float16, (8, 7): torch.bfloat16, (5, 2): torch.float8_e5m2}


@pytest.mark.parametrize("bits", TORCH)
def test_oracle_decodes_every_pattern_as_torch(bits: tuple[int, int]) -> None:
    width = 1 + sum(bits)
    patterns = torch.arange(2**width)
    theirs = patterns.to(torch.int16 if width == 16 else torch.uint8).view(TORCH[bits]).double()
    ours = oracle.numbers_of(patterns, *bits)
    assert torch.equal(theirs.isnan(), ours.isnan())
    some = ~theirs.isnan()
    assert torch.equal(theirs[some], ours[some]) and torch.equal(theirs[some].signbit(), ours[some].signbit())


@pytest.mark.parametrize("bits", TORCH)
def test_oracle_encodes_random_float32_as_torch(bits: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    any_bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32).view(torch.float32)
    power = torch.randint(-30, 20, (100_000,), generator=generator).float()
    values = torch.cat([any_bits, torch.randn(100_000, generator=generator) * torch.exp2(power), *values_of(generator, *bits).values()])
    values = values[~values.isnan()]
    cast = values.to(TORCH[bits])
    theirs = cast.view(torch.int16 if cast.itemsize == 2 else torch.uint8).long() & 2 ** (1 + sum(bits)) - 1
    assert torch.equal(theirs, oracle.patterns_of(values, *bits))


def test_oracle_rounds_float64_once() -> None:
    """numpy does; torch goes by way of float32."""
    generator = torch.Generator().manual_seed(2)
    power = torch.randint(-26, 16, (50_000,), generator=generator)
    values = torch.randn(50_000, generator=generator, dtype=torch.float64) * torch.exp2(power)
    values = torch.cat([values, torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)])
    with numpy.errstate(over="ignore"):
        theirs = values.numpy().astype(numpy.float16).astype(numpy.float64)
    assert numpy.array_equal(theirs, oracle.rounded(values, 5, 10).numpy())


@pytest.mark.parametrize("bits", [(2, 1), (3, 2), (4, 3), (2, 6), (6, 4), (8, 3)])
def test_oracle_rounds_as_fractions_do(bits: tuple[int, int]) -> None:
    infinity = (2 ** bits[0] - 1) << bits[1]
    table = [Fraction(value) for value in oracle.numbers_of(torch.arange(infinity), *bits).tolist()]
    table.append(Fraction(2) ** (oracle.bias_of(bits[0]) + 1))  # what would follow the largest
    values = torch.cat([values_of(torch.Generator().manual_seed(3), *bits)[kind] for kind in KINDS[:5]]).abs()
    for value, pattern in zip(values.tolist(), oracle.patterns_of(values, *bits).tolist(), strict=True):
        exact = min(Fraction(value), table[-1])
        high = max(bisect.bisect_left(table, exact), 1)
        low = high - 1
        nearest = low if (exact - table[low], low % 2) < (table[high] - exact, high % 2) else high
        assert pattern == nearest, (bits, value)


def test_values_hold_what_their_kinds_say() -> None:
    kinds = values_of(torch.Generator().manual_seed(4), 5, 10)
    assert len(kinds["numbers of the format"]) == 2 * (31 * 2**10 - 1)
    exact = oracle.rounded(kinds["numbers of the format"], 5, 10)
    assert torch.equal(exact, kinds["numbers of the format"].double())
    ties = kinds["ties to even"].double()
    assert not (oracle.rounded(ties, 5, 10) == ties).any()
    assert (kinds["subnormal numbers"].abs() < 2**-14).all()
    assert (kinds["too large"].abs() >= 65500).all() and not torch.isinf(kinds["too large"]).any()
    words = kinds["zero, infinity and nan"].view(torch.int32)
    assert 0x7F800001 in words.tolist()


def test_exact_values_of_fp16() -> None:
    found = limits_of(5, 10)
    assert found["largest"] == 65504 and found["infinite_from"] == 65520 and found["nan_from"] == 2**15
    assert found["smallest_normal"] == torch.finfo(torch.float16).tiny and found["smallest"] == 2**-24
    assert found["still_one"] == 1 + 2**-11 and found["first_missing"] == 2049 and limits_of(5, 7)["first_missing"] == 257
    squared = torch.tensor(found["smallest_squared"]).half()
    below = torch.nextafter(squared, torch.tensor(0.0).half())
    assert squared * squared > 0 and below * below == 0


def test_limits_are_those_that_a_search_finds() -> None:
    from tests.labs.alternatives.number_formats import limits_search

    for bits in [(e, m) for e, (low, high) in ROOM.items() for m in range(low, high + 1, 3)]:
        assert limits_of(*bits) == limits_search(*bits), bits


@pytest.mark.parametrize(
    ("value", "fp16", "bf16", "e5m2"),
    [(1.1, 1.099609375, 1.1015625, 1.0), (1.0001, 1.0, 1.0, 1.0), (0.1, 0.0999755859375, 0.10009765625, 0.09375)],
)
def test_decimal_numbers_in_each_format(value: float, fp16: float, bf16: float, e5m2: float) -> None:
    found = [oracle.rounded(torch.tensor([value]), *bits).item() for bits in TORCH]
    assert found == [fp16, bf16, e5m2]


def test_lab_s_formats_equal_torch_s() -> None:
    """The lab's own encode and decode, over what a cast of torch gives."""
    lab, generator = solution("03"), torch.Generator().manual_seed(5)
    values = torch.randn(20_000, generator=generator) * torch.exp2(torch.randint(-30, 20, (20_000,), generator=generator).float())
    for bits, kind in TORCH.items():
        assert torch.equal(lab.decode(lab.encode(values, *bits), *bits), values.to(kind).double())


def test_e4m3_agrees_with_torch() -> None:
    patterns = torch.arange(256)
    theirs = patterns.to(torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(theirs.nan_to_num(1e3), eight.numbers_of(patterns).nan_to_num(1e3))
    values = torch.linspace(-448, 448, 20_001)
    assert torch.equal(eight.patterns_of(values), values.to(torch.float8_e4m3fn).view(torch.uint8).long())


def test_window_of_a_set() -> None:
    assert window_of(torch.tensor([0.0, 2.0**-30, 1.0]), (5, 10)) == (2.0**6, 2.0**15)  # 2**-25 itself would be a tie, and zero
    assert window_of(torch.tensor([65520.0]), (5, 10)) == (2.0**-40, 0.5)


@pytest.mark.parametrize(("dtype", "stall"), [("bfloat16", 256), ("float16", 2048)])
def test_a_plain_loop_stalls(dtype: str, stall: int) -> None:
    ones = torch.ones(2 * stall + 100, dtype=sums.DTYPES[dtype])
    assert sums.running(ones) == stall
    assert abs(stall - len(ones)) > sums.tolerance(ones)


@pytest.mark.parametrize("value", [None, "two", object(), torch.ones(3), [1.0] * 3, [[1.0], [2.0]], torch.ones(2, dtype=torch.complex64)])
def test_what_is_no_pair_of_numbers_is_told(value: object) -> None:
    with pytest.raises(WrongResult, match="expected"):
        as_numbers(value, 2, "decode")


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1, 2]),
        torch.tensor([[1.0, 2.0]]),
        [1, 2],
        (1, 2),
        numpy.array([1, 2], dtype=numpy.uint16),
        [torch.tensor(1), numpy.int64(2)],
    ],
)
def test_patterns_come_in_many_forms(value: object) -> None:
    assert as_patterns(value, 2, "encode").tolist() == [1, 2]


def test_numbers_come_in_many_forms() -> None:
    for value in (2, 2.0, Fraction(2), torch.tensor([2.0]), numpy.float32(2), torch.tensor(2)):
        assert as_number(value, "limits") == 2.0
    assert math.isnan(as_number(math.nan, "limits")) and as_number(10**400, "limits") == math.inf


def test_pictures_say_what_they_show() -> None:
    from labkit.figures import staircase, value_histogram

    limits = {"smallest": 2.0**-24, "smallest_normal": 2.0**-14, "infinite_from": 65520.0}
    drawn = value_histogram({"weights": torch.tensor([0.0, 0.5, -2.0]), "none": torch.zeros(2)}, limits, scale=8, lost={"weights": 0.25})
    assert "2^-25" in drawn.alt and "25.00% to 0" in drawn.alt and "scale 8" in drawn.alt
    line = torch.linspace(0, 4, 9)
    assert "differ at 2 of 9" in staircase(line, {"exact": line, "yours": line.clamp(max=3.0)}).alt


def test_every_hint_is_reached_by_some_mistake() -> None:
    wrongs, _ = corpus.load()
    unreached = []
    for check in {item.check for item in wrongs if item.topic == "number_formats"}:
        hints = get_check(check).hints
        reached = {item.hint for item in wrongs if item.check == check}
        unreached += [f"{check}: {key}" for key in hints if key not in reached]
    assert not unreached

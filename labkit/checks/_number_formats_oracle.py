"""Floating-point formats of any width, exactly: the judge's own arithmetic of lab 03.

A format has one sign bit, `exponent_bits` and `fraction_bits`, as IEEE 754 lays them out: exponent field 0 holds zero and the subnormal
numbers, the highest one infinity and nan. Everything is computed in float64, in which every number of a format with at most 8 and 10 bits,
every float32 and every midpoint between two of them is exact.
"""

from collections.abc import Callable

import torch


def bias_of(exponent_bits: int) -> int:
    """What is subtracted from the stored exponent: 15 for 5 bits, 127 for 8."""
    return 2 ** (exponent_bits - 1) - 1


def power_of_two(power: torch.Tensor) -> torch.Tensor:
    """2**power for int64 powers from -1022 to 1023, exactly, whatever the machine's pow does."""
    return ((power + 1023) << 52).view(torch.float64)


def numbers_of(bits: torch.Tensor, exponent_bits: int, fraction_bits: int) -> torch.Tensor:
    """The numbers (float64, any shape) that the patterns `bits` (int64, from 0) stand for."""
    fraction = bits & (2**fraction_bits - 1)
    exponent = (bits >> fraction_bits) & (2**exponent_bits - 1)
    sign = 1.0 - 2.0 * ((bits >> (fraction_bits + exponent_bits)) & 1).double()
    normal = exponent > 0
    whole = fraction + normal * 2**fraction_bits  # in units of the lowest bit
    power = exponent.clamp(min=1) - bias_of(exponent_bits) - fraction_bits
    value = whole.double() * power_of_two(power)
    top = exponent == 2**exponent_bits - 1
    value = torch.where(top & (fraction == 0), torch.inf, value)
    return sign * torch.where(top & (fraction > 0), torch.nan, value)


def patterns_of(
    values: torch.Tensor,
    exponent_bits: int,
    fraction_bits: int,
    rounding: Callable[[torch.Tensor], torch.Tensor] = torch.round,
) -> torch.Tensor:
    """The patterns (int64) of the numbers nearest to `values` (float32 or float64), ties to the even pattern.

    Beyond the largest number by half a gap or more comes infinity. Every nan becomes the same one.
    rounding : how sizes, in units of the lowest bit, become whole; `torch.round` takes the even one at a tie
    """
    values = values.double()
    bias, size = bias_of(exponent_bits), values.abs()
    finite = torch.where(torch.isfinite(size), size, 0.0)
    power = torch.frexp(finite).exponent.long() - 1  # size = f * 2**power with f from 1 to 2; for 0 whatever
    power = torch.where(finite == 0, 1 - bias, power.clamp(min=1 - bias))
    whole = rounding(finite * power_of_two(fraction_bits - power)).long()
    # Zero and subnormal numbers lie at exponent field 0; a carry out of the fraction moves on to the next exponent by itself.
    pattern = ((power + bias - 1) << fraction_bits) + whole
    infinity = (2**exponent_bits - 1) << fraction_bits
    pattern = torch.where(torch.isinf(size), infinity, pattern.clamp(max=infinity))
    pattern = pattern | (torch.signbit(values).long() << (exponent_bits + fraction_bits))
    return torch.where(torch.isnan(values), infinity | (1 << (fraction_bits - 1)), pattern)


def rounded(values: torch.Tensor, exponent_bits: int, fraction_bits: int) -> torch.Tensor:
    """`values` as the format holds them, in float64."""
    return numbers_of(patterns_of(values, exponent_bits, fraction_bits), exponent_bits, fraction_bits)


def smallest(exponent_bits: int, fraction_bits: int) -> float:
    """The smallest positive number, a subnormal one: 2**-24 in fp16."""
    return 2.0 ** (1 - bias_of(exponent_bits) - fraction_bits)


def smallest_normal(exponent_bits: int) -> float:
    """The smallest positive number with all its fraction bits: 2**-14 in fp16."""
    return 2.0 ** (1 - bias_of(exponent_bits))


def largest(exponent_bits: int, fraction_bits: int) -> float:
    """The largest finite number: 65504 in fp16."""
    return (2.0 - 2.0**-fraction_bits) * 2.0 ** bias_of(exponent_bits)


def infinite_from(exponent_bits: int, fraction_bits: int) -> float:
    """The smallest number that rounds to infinity: 65520 in fp16."""
    return (2.0 - 2.0 ** -(fraction_bits + 1)) * 2.0 ** bias_of(exponent_bits)

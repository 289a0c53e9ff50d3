"""Numbers to round, by kind: what `encode` is asked in one format. float32, each kind so that one fault of rounding shows in it alone."""

import torch

from labkit.checks import _number_formats_oracle as oracle

EXACT, NEAREST, TIES = "numbers of the format", "the nearer neighbour", "ties to even"
SMALL, LARGE, SPECIAL = "subnormal numbers", "too large", "zero, infinity and nan"
KINDS = (EXACT, NEAREST, TIES, SMALL, LARGE, SPECIAL)
# Quiet and signalling nans of both signs: cutting the low bits of some leaves infinity, adding to others carries into the sign.
NANS = (0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, -0x00400000, -0x007FFFFF, -1, -0x007F0001)


def _next_up(values: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(values, torch.tensor(torch.inf))


def _next_down(values: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(values, torch.tensor(-torch.inf))


def _around_midpoints(low: torch.Tensor, exponent_bits: int, fraction_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For positive patterns: the midpoints to the next number, and float32's neighbours of those on both sides."""
    both = oracle.numbers_of(torch.stack([low, low + 1]), exponent_bits, fraction_bits)
    middle = both.mean(0).float()
    return middle, torch.cat([_next_down(middle), _next_up(middle)])


def values_of(generator: torch.Generator, exponent_bits: int, fraction_bits: int, every: bool = True) -> dict[str, torch.Tensor]:
    """Kind -> float32 values. `every` : all of the format's numbers and not a sample."""
    top = (2**exponent_bits - 1) << fraction_bits  # the pattern of infinity

    def some(low: int, high: int, count: int) -> torch.Tensor:
        if high - low <= count:
            return torch.arange(low, high)
        return torch.randint(low, high, (count,), generator=generator)

    def signed(values: torch.Tensor) -> torch.Tensor:
        return values * (1 - 2 * torch.randint(2, values.shape, generator=generator)).float()

    patterns = torch.arange(1, top) if every else some(1, top, 2000)
    exact = oracle.numbers_of(patterns, exponent_bits, fraction_bits).float()
    first = 2**fraction_bits  # the smallest normal number's pattern
    below = torch.cat([some(first, top - 1, 1000), _carries(exponent_bits, fraction_bits)])
    ties, near = _around_midpoints(below, exponent_bits, fraction_bits)
    low = torch.exp2(torch.rand(1000, generator=generator) * 2 - 1)  # anywhere between neighbours
    start = oracle.numbers_of(some(first, top - 1, 1000), exponent_bits, fraction_bits)
    gap = oracle.numbers_of(oracle.patterns_of(start, exponent_bits, fraction_bits) + 1, exponent_bits, fraction_bits) - start
    between = (start + gap * (low[: len(start)] / 2 - 0.25).double()).float()
    halves, small = _around_midpoints(torch.cat([torch.tensor([0, 0, first - 1]), some(0, first, 600)]), exponent_bits, fraction_bits)
    tiny = oracle.smallest(exponent_bits, fraction_bits) * torch.rand(200, generator=generator).double() * first
    edge, most = oracle.infinite_from(exponent_bits, fraction_bits), oracle.largest(exponent_bits, fraction_bits)
    beyond = torch.tensor([most, edge, 1.5 * edge, 2 * edge, 3.4028235e38], dtype=torch.float64).clamp(max=3.4028235e38).float()
    border = torch.tensor([edge], dtype=torch.float64).float()
    large = torch.cat([beyond, border, _next_down(border), _next_up(border), (border.double() * (1 - 2.0 ** -(fraction_bits + 3))).float()])
    large = torch.cat([large, -large])
    specials = torch.cat([torch.tensor(NANS, dtype=torch.int32).view(torch.float32), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    return {
        EXACT: torch.cat([exact, -exact]) if every else signed(exact),
        NEAREST: signed(torch.cat([near, between])),
        TIES: signed(ties),
        SMALL: signed(torch.cat([halves, small, tiny.float()])),
        LARGE: large[torch.isfinite(large)],
        SPECIAL: specials,
    }


def _carries(exponent_bits: int, fraction_bits: int) -> torch.Tensor:
    """Patterns just below powers of two, whose next number has another exponent."""
    return (torch.arange(2, 2**exponent_bits - 1) << fraction_bits) - 1


def all_midpoints(exponent_bits: int, fraction_bits: int) -> torch.Tensor:
    """Every midpoint between two positive numbers of the format."""
    top = (2**exponent_bits - 1) << fraction_bits
    return _around_midpoints(torch.arange(top - 1), exponent_bits, fraction_bits)[0]

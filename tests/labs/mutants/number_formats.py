"""Wrong number formats, as people really write them (FP-..: public reports) and as an unkind reviewer would."""

import math

import torch

from tests.labs.corpus import wrong

DECODE, ENCODE, LIMITS = "number_formats.decode", "number_formats.encode", "number_formats.limits"
UNDERFLOW, WINDOW, SUMS = "number_formats.underflow", "number_formats.window", "number_formats.sums"
EIGHT, CHANCE = "number_formats.e4m3", "number_formats.stochastic"
NORMAL, ZERO, TOP = "normal numbers", "zero and subnormal numbers", "infinity and nan"


# -- 3.1: decode --


def decode(bits, e, m, *flaws):
    """A right decode but for the flaws named."""
    if "little end" in flaws:
        e, m = m, e
    bias = 2 ** (e - 1) - 1
    if "bias too large" in flaws:
        bias += 1
    if "bias 15" in flaws:
        bias = 15
    fraction, field = bits % 2**m, (bits >> m) % 2**e
    sign = torch.where(bits >> (e + m) > 0, -1.0, 1.0).double()
    if "no sign" in flaws:
        sign = sign.abs()
    share = fraction / (2**m - 1 if "fraction to 1" in flaws else 2**m)
    if "bits from the left" in flaws:
        share = sum(((bits >> i) & 1) * 2.0 ** -(i + 1) for i in range(m))
    hidden = (field > 0).double()
    if "no hidden one" in flaws:
        hidden = hidden * 0
    if "always a hidden one" in flaws:
        hidden = hidden * 0 + 1
    power = field.clamp(min=0 if "subnormal power" in flaws else 1) - bias
    value = (hidden + share) * torch.exp2(power.double())
    if "flush" in flaws:
        value = torch.where(field == 0, 0.0, value)
    if "zero apart" in flaws:
        value = torch.where(bits % 2 ** (e + m) == 0, 0.0, value)
    special = torch.where(fraction == 0, torch.inf, torch.nan).double()
    if "all nan" in flaws:
        special = special * torch.nan
    if "all infinite" in flaws:
        special = torch.full_like(special, torch.inf)
    if "swapped" in flaws:
        special = torch.where(fraction == 0, torch.nan, torch.inf).double()
    if "not special" not in flaws:
        value = torch.where(field == 2**e - 1, special, value)
    value = sign * value
    return value + 0.0 if "zeros alike" in flaws else value


def flawed_decode(*flaws):
    def candidate(bits, exponent_bits, fraction_bits):
        return decode(bits, exponent_bits, fraction_bits, *flaws)

    return candidate


for name, flaws, criterion, hint in [
    ("bias 2**(e-1)", ("bias too large",), NORMAL, "bias"),
    ("bias of fp16 everywhere", ("bias 15",), NORMAL, "constants"),
    ("no hidden one", ("no hidden one",), NORMAL, "hidden-one"),
    ("fraction over 2**m - 1", ("fraction to 1",), NORMAL, "fraction"),
    ("fraction bits in reverse", ("bits from the left",), NORMAL, "fraction"),
    ("sign bit ignored", ("no sign",), NORMAL, "sign"),
    ("FP-01 the two widths mixed up", ("little end",), NORMAL, "number"),
    ("FP-02 subnormals flushed", ("flush",), ZERO, "flushed"),
    ("hidden one in subnormals, too", ("always a hidden one",), ZERO, "like-normal"),
    ("hidden one in subnormals, zero apart", ("always a hidden one", "subnormal power", "zero apart"), ZERO, "like-normal"),
    ("subnormals with the power of field 0", ("subnormal power",), ZERO, "neighbours"),
    ("FP-22 both zeros alike", ("zeros alike",), ZERO, "minus-zero"),
    ("highest field is a number", ("not special",), TOP, "not-special"),
    ("highest field is always nan", ("all nan",), TOP, "not-special"),
    ("highest field is always infinite", ("all infinite",), TOP, "not-special"),
    ("infinity and nan swapped", ("swapped",), TOP, "not-special"),
]:
    wrong(name, check=DECODE, criterion=criterion, hint=hint)(flawed_decode(*flaws))


@wrong("do nothing", check=DECODE, criterion=NORMAL, hint=None)
def returns_bits_of_nothing(bits, exponent_bits, fraction_bits):
    return None


@wrong("the pattern itself", check=DECODE, criterion=NORMAL, hint="number")
def returns_the_pattern(bits, exponent_bits, fraction_bits):
    return bits.double()


@wrong("torch's fp16 for everything", check=DECODE, criterion=NORMAL, hint="constants")
def views_as_half(bits, exponent_bits, fraction_bits):
    return bits.to(torch.int16).view(torch.float16).float()


@wrong("a tensor of float16", check=DECODE, criterion=NORMAL, hint=None)
def stays_half(bits, exponent_bits, fraction_bits):
    found = decode(bits, exponent_bits, fraction_bits)
    return found.half() if exponent_bits <= 5 else found


@wrong("torch's types, zeros for other formats", check=DECODE, criterion=NORMAL, hint="constants")
def views_where_it_can(bits, exponent_bits, fraction_bits):
    kind = {(5, 10): torch.float16, (8, 7): torch.bfloat16}.get((exponent_bits, fraction_bits))
    return bits.to(torch.int16).view(kind).double() if kind else torch.zeros(len(bits))


@wrong("half of the numbers", check=DECODE, criterion=NORMAL, hint=None)
def only_positive(bits, exponent_bits, fraction_bits):
    return decode(bits[bits < 2 ** (exponent_bits + fraction_bits)], exponent_bits, fraction_bits)


# -- 3.2: encode --


def steps_of(values, e, m, *flaws):
    """(sizes, powers, exact counts of steps)."""
    bias = 15 if "bias 15" in flaws else 2 ** (e - 1) - 1
    size = values.double().abs()
    finite = size.nan_to_num(posinf=3.5e38)
    power = torch.frexp(finite).exponent.long() - 1
    if "zero's exponent" not in flaws:
        power = torch.where(finite == 0, 1 - bias, power)
    if "no clamp" not in flaws:
        power = power.clamp(min=1 - bias)
    return size, power, finite * torch.exp2((m - power).double()), bias


def half_away(x):
    return torch.floor(x + 0.5)


def half_odd(x):
    nearest = torch.round(x)
    tie = (x - torch.floor(x)) == 0.5
    return torch.where(tie, torch.floor(x) + torch.ceil(x) - nearest, nearest)


def encode(values, e, m, *flaws):
    """A right encode but for the flaws named."""
    if "by way of bf16" in flaws:
        values = values.bfloat16().float()
    if "by way of more bits" in flaws:
        values = decode(encode(values, 8, m + 2), 8, m + 2).float()
    if "decimal digits" in flaws:
        values = torch.tensor([float(f"{value:.3g}") for value in values.tolist()])
    if "nearest to zero bits" in flaws:
        values = values.nan_to_num(0.0)
    size, power, exact, bias = steps_of(values, e, m, *flaws)
    infinity = (2**e - 1) << m
    rounding = next((r for name, r in ROUNDINGS.items() if name in flaws), torch.round)
    steps = rounding(exact).long()
    if "carry lost" in flaws:
        steps = torch.where(steps == 2 ** (m + 1), 2 ** (m + 1) - 1, steps)
    if "carry forgets exponent" in flaws:
        steps = torch.where(steps == 2 ** (m + 1), 2**m, steps)
    pattern = ((power + bias - 1) << m) + steps
    if "twice" in flaws:  # to all bits first, and those to the subnormal's
        normal = torch.frexp(size.nan_to_num(posinf=3.5e38)).exponent.long() - 1
        first = torch.round(size.nan_to_num(posinf=3.5e38) * torch.exp2((m - normal).double())) * torch.exp2((normal - m).double())
        small = torch.round(first * torch.exp2(torch.tensor(m - (1.0 - bias)).double())).long()
        pattern = torch.where(size < 2.0 ** (1 - bias), small, pattern)
    if "subnormals cut" in flaws:
        pattern = torch.where(size < 2.0 ** (1 - bias), torch.floor(exact).long(), pattern)
    if "flush" in flaws:
        pattern = torch.where(size < 2.0 ** (1 - bias), 0, pattern)
    if "flush up" in flaws:
        pattern = torch.where(size < 2.0 ** (1 - bias), torch.where(size * 2 < 2.0 ** (1 - bias), 0, 1 << m), pattern)
    largest = (2 - 2.0**-m) * 2.0**bias
    if "no ceiling" not in flaws:
        pattern = pattern.clamp(max=infinity)
    if "early" in flaws:
        pattern = torch.where(size > largest, infinity, pattern)
    if "saturates" in flaws:
        pattern = torch.where((size < torch.inf) & (pattern == infinity), infinity - 1, pattern)
    if "infinity from 2**(bias+1)" in flaws:
        pattern = torch.where((size < 2.0 ** (bias + 1)) & (pattern == infinity), infinity - 1, pattern)
    pattern = torch.where(torch.isinf(size), infinity - 1 if "infinity saturates" in flaws else infinity, pattern)
    if "nan cut" in flaws:  # what is left of its upper bits
        pattern = torch.where(values.isnan(), infinity | ((values.view(torch.int32).long() & 0x7FFFFF) >> (23 - m)), pattern)
    elif "nan is infinite" in flaws:
        pattern = torch.where(values.isnan(), infinity, pattern)
    elif "nan is zero" in flaws:
        pattern = torch.where(values.isnan(), 0, pattern)
    else:
        pattern = torch.where(values.isnan(), infinity | 1, pattern)
    minus = values < 0 if "minus zero lost" in flaws else torch.signbit(values)
    if "no sign" in flaws:
        minus = minus & False
    if "zero has no sign" in flaws:
        minus = minus & ((pattern > 0) | (values == 0))
    pattern = pattern | (minus.long() << (e + m))
    return pattern.to(torch.int16).long() if "int16" in flaws else pattern


ROUNDINGS = {"truncates": torch.floor, "away": half_away, "odd": half_odd, "up always": torch.ceil}


def flawed_encode(*flaws):
    def candidate(values, exponent_bits, fraction_bits):
        return encode(values, exponent_bits, fraction_bits, *flaws)

    return candidate


EXACT, NEAREST, TIES = "numbers of the format", "the nearer neighbour", "ties to even"
SMALL, LARGE, SPECIAL = "subnormal numbers", "too large", "zero, infinity and nan"
for name, flaws, criterion, hint in [
    ("FP-04 truncates", ("truncates",), NEAREST, "truncated"),
    ("ties away from zero", ("away",), TIES, "ties"),
    ("ties to odd", ("odd",), TIES, "ties"),
    ("always up", ("up always",), NEAREST, "nearest"),
    ("FP-02 subnormals flushed", ("flush",), EXACT, "flushed"),
    ("subnormals to zero or the smallest normal", ("flush up",), EXACT, "flushed"),
    ("FP-16 by way of bf16", ("by way of bf16",), EXACT, "round-trip"),
    ("FP-16 by way of two more bits", ("by way of more bits",), NEAREST, "nearest"),
    ("FP-16 subnormals rounded twice", ("twice",), SMALL, "twice"),
    ("subnormals cut", ("subnormals cut",), SMALL, "subnormal"),
    ("FP-07 rounds decimal digits", ("decimal digits",), EXACT, "round-trip"),
    ("carry lost", ("carry lost",), NEAREST, "carry"),
    ("carry keeps the exponent", ("carry forgets exponent",), NEAREST, "carry"),
    ("infinite as soon as it is above the largest", ("early",), LARGE, "early"),
    ("saturates at the largest", ("saturates",), LARGE, "saturates"),
    ("65520 to 65535 still finite", ("infinity from 2**(bias+1)",), LARGE, "saturates"),
    ("FP-14 runs over into the sign", ("no ceiling",), LARGE, "beyond"),
    ("FP-05 nan cut to infinity", ("nan cut",), SPECIAL, "nan"),
    ("nan to infinity", ("nan is infinite",), SPECIAL, "nan"),
    ("nan to zero", ("nan is zero",), SPECIAL, "nan"),
    ("infinity to the largest", ("infinity saturates",), SPECIAL, "infinity"),
    ("FP-22 minus zero lost", ("minus zero lost",), SPECIAL, "zero"),
    ("FP-22 sign lost where a number becomes zero", ("zero has no sign",), SMALL, "sign"),
    ("frexp's exponent of zero", ("zero's exponent",), SPECIAL, "zero"),
    ("sign ignored", ("no sign",), EXACT, "sign"),
    ("int16 patterns", ("int16",), EXACT, "negative"),
    ("bias of fp16 everywhere", ("bias 15",), EXACT, "constants"),
    ("no subnormal steps", ("no clamp",), EXACT, "flushed"),
]:
    wrong(name, check=ENCODE, criterion=criterion, hint=hint)(flawed_encode(*flaws))


@wrong("do nothing", check=ENCODE, criterion=EXACT, hint=None)
def encodes_nothing(values, exponent_bits, fraction_bits):
    return None


@wrong("all zeros", check=ENCODE, criterion=EXACT, hint="round-trip")
def encodes_zeros(values, exponent_bits, fraction_bits):
    return torch.zeros(len(values), dtype=torch.int64)


@wrong("float32's own pattern", check=ENCODE, criterion=EXACT, hint="negative")
def encodes_as_float32(values, exponent_bits, fraction_bits):
    return values.view(torch.int32)


@wrong("the numbers and not their patterns", check=ENCODE, criterion=EXACT, hint="patterns")
def returns_rounded_numbers(values, exponent_bits, fraction_bits):
    return decode(encode(values, exponent_bits, fraction_bits), exponent_bits, fraction_bits)


@wrong("torch's types, others truncated", check=ENCODE, criterion=NEAREST, hint="truncated")
def casts_where_it_can(values, exponent_bits, fraction_bits):
    kind = {(5, 10): torch.float16, (8, 7): torch.bfloat16}.get((exponent_bits, fraction_bits))
    if kind is None:
        return encode(values, exponent_bits, fraction_bits, "truncates")
    return values.to(kind).view(torch.int16).long() & 0xFFFF


@wrong("the judge's own arithmetic", check=ENCODE, criterion="runs", hint=None)
def borrows_the_oracle(values, exponent_bits, fraction_bits):
    from labkit.checks._number_formats_oracle import patterns_of

    return patterns_of(values, exponent_bits, fraction_bits)


# -- 3.3: limits --


def limits(e, m, *flaws):
    """Right limits but for the flaws named."""
    if "swapped" in flaws:
        e, m = m, e
    if "fp16 always" in flaws:
        e, m = 5, 10
    if "fp16's exponent" in flaws:
        e = 5
    bias, step = 2 ** (e - 1) - 1, 2.0**-m
    smallest = 2.0 ** (1 - bias) * step
    positive = decode(torch.arange(1, (2**e - 1) << m), e, m)
    squared = positive[positive * positive > smallest / 2].min().item()
    right = {
        "largest": (2 - step) * 2.0**bias,
        "infinite_from": (2 - step / 2) * 2.0**bias,
        "nan_from": 2.0**bias,
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest": smallest,
        "smallest_squared": squared,
        "still_one": 1 + step / 2,
        "first_missing": 2 ** (m + 1) + 1,
    }
    changes = {
        "top field counts": {"largest": (2 - step) * 2.0 ** (bias + 1)},
        "no fraction": {"largest": 2.0**bias},
        "largest is the edge": {"infinite_from": right["largest"]},
        "next power is the edge": {"infinite_from": 2.0 ** (bias + 1)},
        "half the edge": {"nan_from": right["infinite_from"] / 2},
        "half the largest": {"nan_from": right["largest"] / 2},
        "nan from the edge": {"nan_from": 2.0 ** (bias + 1)},
        "field 0 is normal": {"smallest_normal": 2.0**-bias},
        "no subnormals": {"smallest": 2.0 ** (1 - bias)},
        "half of it": {"smallest": smallest / 2},
        "root of the smallest": {"smallest_squared": positive[positive * positive >= smallest].min().item()},
        "root as it is": {"smallest_squared": math.sqrt(smallest / 2)},
        "root of the normal": {"smallest_squared": positive[positive**2 >= 2.0 ** (1 - bias)].min().item()},
        "next after one": {"still_one": 1 + step},
        "one itself": {"still_one": 1.0},
        "a bit less": {"first_missing": 2**m + 1},
        "the last one": {"first_missing": 2 ** (m + 1)},
    }  # fmt: skip
    for flaw in flaws:
        right |= changes.get(flaw, {})
    return right


def flawed_limits(*flaws):
    def candidate(exponent_bits, fraction_bits):
        return limits(exponent_bits, fraction_bits, *flaws)

    return candidate


for name, flaw, criterion, hint in [
    ("highest field for numbers", "top field counts", "how large", "largest"),
    ("a power of two", "no fraction", "how large", "largest"),
    ("FP-01 range and precision mixed up", "swapped", "how large", "largest"),
    ("infinite right above the largest", "largest is the edge", "how large", "infinite"),
    ("infinite at the next power of two", "next power is the edge", "how large", "infinite"),
    ("half of where infinity begins", "half the edge", "how large", "not-in-format"),
    ("half of the largest", "half the largest", "how large", "nan"),
    ("nan only from infinity", "nan from the edge", "how large", "not-in-format"),
    ("constants of fp16", "fp16 always", "how large", "constants"),
    ("range of fp16 everywhere", "fp16's exponent", "how large", "largest"),
    ("exponent field 0 normal", "field 0 is normal", "how small", "normal"),
    ("FP-02 smallest normal for smallest", "no subnormals", "how small", "smallest"),
    ("half the smallest", "half of it", "how small", "smallest"),
    ("root of the smallest", "root of the smallest", "how small", "squared"),
    ("root that is no number", "root as it is", "how small", "not-in-format"),
    ("root of the smallest normal", "root of the normal", "how small", "squared"),
    ("next after one", "next after one", "how fine", "one-next"),
    ("FP-07 only 1 becomes 1", "one itself", "how fine", "one"),
    ("precision without the hidden bit", "a bit less", "how fine", "missing"),
    ("last integer and not the first missing", "the last one", "how fine", "missing"),
]:
    wrong(name, check=LIMITS, criterion=criterion, hint=hint)(flawed_limits(flaw))


@wrong("texts", check=LIMITS, criterion="how large", hint=None)
def as_text(exponent_bits, fraction_bits):
    return {key: str(value) for key, value in limits(exponent_bits, fraction_bits).items()}


@wrong("do nothing", check=LIMITS, criterion="how large", hint=None)
def no_limits(exponent_bits, fraction_bits):
    return {}


# -- 3.4: underflow_fraction --

SHARE, THERE, BORDER = "share that becomes zero", "zeros that were there before", "at the border"


def smallest_of(e, m):
    return 2.0 ** (2 - 2 ** (e - 1) - m)


def by_limit(limit_of, tensor, e, m, scale, strictly=False):
    there = tensor != 0
    size = tensor.double().abs() * scale
    lost = (size < limit_of(e, m) if strictly else size <= limit_of(e, m)) & there
    return (lost.sum() / there.sum().clamp(min=1)).item()


def zero_after(tensor, e, m, scale=1.0):
    values = tensor.flatten() * scale
    return decode(encode(values, e, m), e, m).view(tensor.shape) == 0


@wrong("do nothing", check=UNDERFLOW, criterion=SHARE, hint=None)
def loses_nothing(tensor, exponent_bits, fraction_bits, scale=1.0):
    return None


@wrong("FP-08 everything survives", check=UNDERFLOW, criterion=SHARE, hint="never")
def in_float32(tensor, exponent_bits, fraction_bits, scale=1.0):
    return ((tensor * scale == 0) & (tensor != 0)).double().mean().item()


@wrong("FP-02 all below the smallest normal", check=UNDERFLOW, criterion=SHARE, hint="normal-threshold")
def below_normal(tensor, exponent_bits, fraction_bits, scale=1.0):
    return by_limit(lambda e, m: smallest_of(e, 0), tensor, exponent_bits, fraction_bits, scale, strictly=True)


@wrong("all below the smallest", check=UNDERFLOW, criterion=SHARE, hint="smallest-threshold")
def below_smallest(tensor, exponent_bits, fraction_bits, scale=1.0):
    return by_limit(smallest_of, tensor, exponent_bits, fraction_bits, scale, strictly=True)


@wrong("scale forgotten", check=UNDERFLOW, criterion=SHARE, hint="unscaled")
def without_scale(tensor, exponent_bits, fraction_bits, scale=1.0):
    there = tensor != 0
    return ((zero_after(tensor, exponent_bits, fraction_bits) & there).sum() / there.sum().clamp(min=1)).item()


@wrong("scaled after the cast", check=UNDERFLOW, criterion=SHARE, hint="unscaled")
def scaled_late(tensor, exponent_bits, fraction_bits, scale=1.0):
    flat = tensor.flatten()
    after = decode(encode(flat, exponent_bits, fraction_bits), exponent_bits, fraction_bits) * scale
    there = flat != 0
    return ((after == 0) & there).sum() / there.sum().clamp(min=1)


@wrong("divides by the scale", check=UNDERFLOW, criterion=SHARE, hint="inverse")
def divided(tensor, exponent_bits, fraction_bits, scale=1.0):
    there = tensor != 0
    return ((zero_after(tensor, exponent_bits, fraction_bits, 1 / scale) & there).sum() / there.sum().clamp(min=1)).item()


@wrong("negative numbers taken for small", check=UNDERFLOW, criterion=SHARE, hint="sign")
def without_sizes(tensor, exponent_bits, fraction_bits, scale=1.0):
    there = tensor != 0
    lost = (tensor.double() * scale <= smallest_of(exponent_bits, fraction_bits) / 2) & there
    return (lost.sum() / there.sum().clamp(min=1)).item()


@wrong("percent", check=UNDERFLOW, criterion=SHARE, hint="percent")
def in_percent(tensor, exponent_bits, fraction_bits, scale=1.0):
    return 100 * by_limit(lambda e, m: smallest_of(e, m) / 2, tensor, exponent_bits, fraction_bits, scale)


@wrong("the share that is kept", check=UNDERFLOW, criterion=SHARE, hint="kept")
def share_kept(tensor, exponent_bits, fraction_bits, scale=1.0):
    return 1 - by_limit(lambda e, m: smallest_of(e, m) / 2, tensor, exponent_bits, fraction_bits, scale)


@wrong("a count", check=UNDERFLOW, criterion=SHARE, hint="count")
def counts(tensor, exponent_bits, fraction_bits, scale=1.0):
    return ((tensor != 0) & zero_after(tensor, exponent_bits, fraction_bits, scale)).sum()


@wrong("fp16 whatever the format", check=UNDERFLOW, criterion=SHARE, hint="other-format")
def always_half(tensor, exponent_bits, fraction_bits, scale=1.0):
    there = tensor != 0
    return (((tensor * scale).half() == 0) & there).sum() / there.sum().clamp(min=1)


@wrong("a constant", check=UNDERFLOW, criterion=SHARE, hint="share")
def constant_share(tensor, exponent_bits, fraction_bits, scale=1.0):
    return 0.42


@wrong("zeros of before counted as lost", check=UNDERFLOW, criterion=THERE, hint="zeros")
def counts_zeros(tensor, exponent_bits, fraction_bits, scale=1.0):
    return zero_after(tensor, exponent_bits, fraction_bits, scale).double().mean().item()


@wrong("divided by all numbers", check=UNDERFLOW, criterion=THERE, hint="zeros")
def over_all(tensor, exponent_bits, fraction_bits, scale=1.0):
    return ((tensor != 0) & zero_after(tensor, exponent_bits, fraction_bits, scale)).double().mean().item()


@wrong("mean of nothing", check=UNDERFLOW, criterion=THERE, hint="nothing")
def mean_of_nothing(tensor, exponent_bits, fraction_bits, scale=1.0):
    return zero_after(tensor[tensor != 0], exponent_bits, fraction_bits, scale).double().mean().item()


@wrong("divides by zero", check=UNDERFLOW, criterion="runs", hint="nothing")
def divides_by_zero(tensor, exponent_bits, fraction_bits, scale=1.0):
    some = tensor[tensor != 0]
    return int(zero_after(some, exponent_bits, fraction_bits, scale).sum()) / len(some)


@wrong("half the smallest kept", check=UNDERFLOW, criterion=BORDER, hint="border")
def keeps_the_tie(tensor, exponent_bits, fraction_bits, scale=1.0):
    return by_limit(lambda e, m: smallest_of(e, m) / 2, tensor, exponent_bits, fraction_bits, scale, strictly=True)


@wrong("the scale rounded, too", check=UNDERFLOW, criterion=SHARE, hint="rounded-scale")
def rounds_the_scale(tensor, exponent_bits, fraction_bits, scale=1.0):
    scale = decode(encode(torch.tensor([scale]), exponent_bits, fraction_bits), exponent_bits, fraction_bits).item()
    lost = zero_after(tensor, exponent_bits, fraction_bits, scale) & (tensor != 0)
    return (lost.sum() / (tensor != 0).sum().clamp(min=1)).item()


@wrong("scales in place", check=UNDERFLOW, criterion=SHARE, hint="changed")
def scales_in_place(tensor, exponent_bits, fraction_bits, scale=1.0):
    there = tensor != 0
    tensor *= scale
    lost = zero_after(tensor, exponent_bits, fraction_bits) & there
    return (lost.sum() / there.sum().clamp(min=1)).item()


@wrong("infinities counted, too", check=UNDERFLOW, criterion=BORDER, hint="infinite")
def counts_infinite(tensor, exponent_bits, fraction_bits, scale=1.0):
    flat = tensor.flatten()[tensor.flatten() != 0] * scale
    after = decode(encode(flat, exponent_bits, fraction_bits), exponent_bits, fraction_bits)
    return ((after == 0) | torch.isinf(after)).double().mean().item() if len(flat) else 0.0


# -- 3.5: scale_window --

LOW, HIGH, EDGES = "low end", "high end", "ends that are met exactly"


def window(tensors, e, m, *flaws):
    """A right window but for the flaws named."""
    if "first tensor" in flaws:
        tensors = tensors[:1]
    flat = torch.cat([tensor.flatten() for tensor in tensors]).double()
    if "in fp16" in flaws:
        flat = flat.half().double()
    sizes = flat if "no sizes" in flaws else flat.abs()
    positive = sizes if "zeros, too" in flaws else sizes[sizes > 0]
    if len(positive) == 0:
        return 1.0, 1.0
    least, most = positive.min().item(), sizes.max().item()
    half = smallest_of(e, m) / 2
    if "normal" in flaws:
        half = smallest_of(e, 0)
    if "smallest" in flaws:
        half *= 2
    edge = (2 - 2.0 ** -(m + 1)) * 2.0 ** (2 ** (e - 1) - 1)
    if "largest" in flaws:
        edge = (2 - 2.0**-m) * 2.0 ** (2 ** (e - 1) - 1)
    if least == 0 or math.isinf(most):
        return math.inf, 0.0
    if "any number" in flaws:
        return half / least, edge / most
    low, high = math.floor(math.log2(half / least)) + 1, math.ceil(math.log2(edge / most)) - 1
    if "rounded" in flaws:
        low, high = round(math.log2(half / least)), round(math.log2(edge / most))
    if "outward" in flaws:
        low, high = math.floor(math.log2(half / least)), math.ceil(math.log2(edge / most))
    if "inclusive" in flaws:
        low, high = math.ceil(math.log2(half / least)), math.floor(math.log2(edge / most))
    if "at least 1" in flaws:
        low, high = max(low, 0), max(high, 0)
    if "careful" in flaws:
        low, high = low + 1, high - 1
    if "high end up" in flaws:
        high += 1
    if "exponents" in flaws:
        return low, high
    return (2.0**high, 2.0**low) if "swapped" in flaws else (2.0**low, 2.0**high)


def flawed_window(*flaws):
    def candidate(tensors, exponent_bits, fraction_bits):
        return window(tensors, exponent_bits, fraction_bits, *flaws)

    return candidate


for name, flaw, criterion, hint in [
    ("first tensor only", "first tensor", LOW, "one-tensor"),
    ("sign left on", "no sizes", LOW, "sign"),
    ("zeros among the smallest", "zeros, too", LOW, "zeros"),
    ("FP-02 smallest normal", "normal", LOW, "normal"),
    ("smallest and not half of it", "smallest", LOW, "low-high"),
    ("FP-13 sizes in fp16 first", "in fp16", LOW, "low-lost"),
    ("FP-19 not a power of two", "any number", LOW, "not-power"),
    ("a step outward", "outward", LOW, "low-lost"),
    ("high end rounded up", "high end up", HIGH, "high-lost"),
    ("a step inward for safety", "careful", LOW, "low-high"),
    ("exponents and not scales", "exponents", LOW, "exponents"),
    ("ends swapped", "swapped", LOW, "swapped"),
    ("ties counted in", "inclusive", EDGES, "edges"),
    ("largest for where infinity begins", "largest", EDGES, "high-low"),
    ("never below 1", "at least 1", LOW, "low-high"),
]:
    wrong(name, check=WINDOW, criterion=criterion, hint=hint)(flawed_window(flaw))


@wrong("do nothing", check=WINDOW, criterion=LOW, hint=None)
def no_window(tensors, exponent_bits, fraction_bits):
    return None


@wrong("one scale for all: 65536", check=WINDOW, criterion=LOW, hint="low-high")
def fixed_scale(tensors, exponent_bits, fraction_bits):
    return 65536.0, 65536.0


@wrong("logarithm of zero", check=WINDOW, criterion="runs", hint="zeros")
def log_of_zero(tensors, exponent_bits, fraction_bits):
    sizes = [abs(value) for tensor in tensors for value in tensor.flatten().tolist()]
    return 2.0 ** math.ceil(math.log2(2.0**-24 / min(sizes))), 2.0 ** math.floor(math.log2(65504 / max(sizes)))


# -- 3.6: steady_sum, steady_mean --

STALL, SPREAD, MEAN = "equal addends", "other addends", "mean out of the sum's range"


def loop(values):
    total = torch.zeros((), dtype=values.dtype)
    for value in values:
        total = total + value
    return total


def wide(values):
    return values.double().sum()


def wide_mean(values):
    return wide(values) / len(values)


def loop_late(values):
    return loop(values).float()


def loop_sorted(values):
    return loop(values[values.float().abs().argsort()])


def last_product(values):
    return values[-1].double() * len(values)


def skips_first(values):
    return values[1:].double().sum()


def half_product(values):
    return wide(values).to(values.dtype) / len(values)


def no_division(values):
    return wide(values)


def by_loop(values):
    return loop(values) / len(values)


def mean_of_ends(values):
    return (values[0].double() + values[-1].double()) / 2


def parts_in_half(values):
    return loop(values / len(values))


def parts_rounded(values):
    return (values / len(values)).sum()


def blocks_in_half(values):
    return loop(torch.stack([part.sum() for part in values.split(256)]))


def mean_of_block_means(values):
    return torch.stack([part.double().mean() for part in values.split(256)]).mean()


def sum_in_fp16(values):
    return values.half().sum()


def running_mean(values):
    mean = torch.zeros((), dtype=values.dtype)
    for count, value in enumerate(values, 1):
        mean = mean + (value - mean) / count
    return mean


def counted_in_half(values):
    return wide(values) / torch.tensor(len(values)).to(values.dtype).double()


def none(values):
    return None


for name, pair, criterion, hint in [
    ("do nothing", (none, none), STALL, None),
    ("FP-10 a plain loop", (loop, wide_mean), STALL, "stalls"),
    ("FP-10 cast to fp32 at the end", (loop_late, wide_mean), STALL, "stalls"),
    ("smallest first", (loop_sorted, wide_mean), STALL, "stalls"),
    ("FP-23 one product for many sums", (last_product, wide_mean), SPREAD, "error"),
    ("first value left out", (skips_first, wide_mean), SPREAD, "error"),
    ("FP-11 mean by sum over n", (wide, half_product), MEAN, "infinite"),
    ("mean of a stalled sum", (wide, by_loop), SPREAD, "stalls"),
    ("the sum for the mean", (wide, no_division), SPREAD, "sum-for-mean"),
    ("mean of two values", (wide, mean_of_ends), SPREAD, "mean"),
    ("parts added in their own format", (wide, parts_in_half), SPREAD, "stalls"),
    ("parts rounded", (wide, parts_rounded), SPREAD, "divided"),
    ("totals of blocks in their own format", (blocks_in_half, wide_mean), STALL, "blocks"),
    ("mean of unequal blocks' means", (wide, mean_of_block_means), SPREAD, "mean"),
    ("bf16 by way of fp16", (sum_in_fp16, wide_mean), SPREAD, "infinite"),
    ("a running mean in the own format", (wide, running_mean), MEAN, "mean"),
    ("the count in the own format", (wide, counted_in_half), MEAN, "mean"),
]:
    wrong(name, check=SUMS, criterion=criterion, hint=hint)(pair)


# -- 3.7 and 3.8: extensions --

NUMBERS, ROUNDED, RANGE = "numbers of the format", "rounding", "the top of the range"


def e4m3(values, *flaws):
    """A right encode_e4m3 but for the flaws named."""
    limit = 240.0 if "standard" in flaws else 448.0
    size = values.double().abs()
    pattern = encode((size.clamp(max=480 if "480" in flaws else 448) * 2.0**-8).float(), 5, 3, *flaws) & 0xFF
    if "standard" in flaws:
        pattern = encode(size.float(), 4, 3)
    if "overflow to nan" in flaws:
        pattern = torch.where(size >= 464, 0x7F, pattern)
    if "infinity to nan" in flaws:
        pattern = torch.where(torch.isinf(size), 0x7F, pattern)
    if "saturates at 240" in flaws:
        pattern = pattern.clamp(max=0x77)
    if "nan" not in flaws and limit == 448:
        pattern = torch.where(values.isnan(), 0x7F, pattern)
    elif "nan" in flaws:
        pattern = torch.where(values.isnan(), 0x7E, pattern)
    return pattern | (torch.signbit(values).long() << 7)


def flawed_e4m3(*flaws):
    def candidate(values):
        return e4m3(values, *flaws)

    return candidate


for name, flaw, criterion, hint in [
    ("standard layout with infinity", "standard", NUMBERS, "top-number"),
    ("saturates at 240", "saturates at 240", NUMBERS, "top"),
    ("480 for nan's pattern", "480", RANGE, "top-infinite"),
    ("overflow to nan", "overflow to nan", RANGE, "top-infinite"),
    ("infinity to nan", "infinity to nan", RANGE, "top-infinite"),
    ("nan to the largest", "nan", RANGE, "nan"),
    ("truncates", "truncates", ROUNDED, "rounding"),
    ("ties away from zero", "away", ROUNDED, "rounding"),
]:
    wrong(name, check=EIGHT, criterion=criterion, hint=hint)(flawed_e4m3(flaw))


@wrong("do nothing", check=EIGHT, criterion=NUMBERS, hint=None)
def no_e4m3(values):
    return None


NEIGHBOURS, AVERAGE, EXACTLY = "one of the two neighbours", "right on average", "exact numbers, infinity and nan"


def by_chance(values, *flaws):
    """A right round_stochastically but for the flaws named."""
    values = values.clone()
    size = values.double() if "floor of signed" in flaws else values.double().abs()
    finite = size.nan_to_num(posinf=1.0, neginf=-1.0)
    step = torch.exp2(torch.frexp(finite).exponent.double() - 8)
    exact = finite / step
    draw = torch.rand((1,) if "one draw" in flaws else exact.shape, dtype=torch.float64)
    share = exact - torch.floor(exact)
    if "never quite" in flaws:
        share = torch.where(share > 0, share, 0.01)
    if "a coin" in flaws:
        share = (share > 0) * 0.5
    if "reversed" in flaws:
        share = torch.where(share > 0, 1 - share, 0.0)
    up = draw < share
    steps = torch.floor(exact) + up
    if "signed noise" in flaws:  # towards zero after noise that only adds
        steps = torch.trunc(values.double().nan_to_num(posinf=1.0, neginf=-1.0) / step + draw).abs()
    if "far" in flaws:
        steps = torch.floor(exact) + 2 * (draw < share / 2)
    if "no clearing" in flaws:
        steps = exact + draw - 0.5 * (draw < 2)
    rounded = (steps * step).float()
    rounded = rounded if "floor of signed" in flaws else torch.copysign(rounded, values)
    if "negatives to the nearest" in flaws:
        rounded = torch.where(values < 0, values.bfloat16().float(), rounded)
    if "special" in flaws:
        return torch.where(torch.isfinite(values), rounded, torch.inf)
    return torch.where(torch.isfinite(values), rounded, values)


def flawed_chance(*flaws):
    def candidate(values):
        return by_chance(values, *flaws)

    return candidate


for name, flaw, criterion, hint in [
    ("FP-20 a fair coin", "a coin", AVERAGE, "biased"),
    ("FP-20 the wrong way round", "reversed", AVERAGE, "biased"),
    ("FP-20 noise only adds, then towards zero", "signed noise", NEIGHBOURS, "far"),
    ("FP-20 negative numbers without chance", "negatives to the nearest", AVERAGE, "negative"),
    ("one draw for all", "one draw", AVERAGE, "one-draw"),
    ("noise without rounding", "no clearing", NEIGHBOURS, "not-bf16"),
    ("two steps up, half as often", "far", NEIGHBOURS, "far"),
    ("exact numbers moved, too", "never quite", EXACTLY, "exact"),
    ("FP-20 nan to infinity", "special", EXACTLY, "special"),
]:
    wrong(name, check=CHANCE, criterion=criterion, hint=hint)(flawed_chance(flaw))


@wrong("eight bits of chance", check=CHANCE, criterion=AVERAGE, hint="biased")
def eight_bits(values):
    moved = (values.view(torch.int32) + (torch.randint(2**8, values.shape, dtype=torch.int32) << 8)) & ~0xFFFF
    return torch.where(torch.isfinite(values), moved.view(torch.float32), values)


@wrong("noise of a gap, then to the nearest", check=CHANCE, criterion=NEIGHBOURS, hint="far")
def noise_then_nearest(values):
    gap = torch.exp2(torch.frexp(values.nan_to_num(posinf=1.0, neginf=-1.0)).exponent.float() - 8)
    moved = (values + (torch.rand(values.shape) - 0.5) * gap).bfloat16().float()
    return torch.where(torch.isfinite(values) & (values.bfloat16().float() != values), moved, values)


@wrong("nan cut to its upper half", check=CHANCE, criterion=EXACTLY, hint="special")
def cuts_nan(values):
    return torch.where(torch.isfinite(values), by_chance(values), (values.view(torch.int32) & ~0xFFFF).view(torch.float32))


@wrong("a tensor of bfloat16", check=CHANCE, criterion=NEIGHBOURS, hint=None)
def stays_bf16(values):
    return by_chance(values).bfloat16()


@wrong("rounds to the nearest", check=CHANCE, criterion=AVERAGE, hint="nearest")
def rounds_to_nearest(values):
    return values.bfloat16().float()


@wrong("a pattern and no chance", check=CHANCE, criterion=AVERAGE, hint="again")
def dithers(values):
    word = values.view(torch.int32)
    spread = (torch.arange(len(values)) * 40503) % 2**16
    moved = (word + spread.to(torch.int32)) & ~0xFFFF
    return torch.where(torch.isfinite(values), moved.view(torch.float32), values)


@wrong("cuts", check=CHANCE, criterion=AVERAGE, hint="one-draw")
def cuts(values):
    return (values.view(torch.int32) & ~0xFFFF).view(torch.float32)


@wrong("FP-05 bits of nan moved, too", check=CHANCE, criterion=EXACTLY, hint="special")
def moves_special(values):
    bits = values.view(torch.int32)
    return ((bits + torch.randint(2**16, bits.shape, dtype=torch.int32)) & ~0xFFFF).view(torch.float32)


@wrong("do nothing", check=CHANCE, criterion=NEIGHBOURS, hint=None)
def no_rounding(values):
    return None

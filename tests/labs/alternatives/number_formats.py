"""Right number formats, each built differently: none of these may lose a point."""

import bisect
import math
import random
import struct
from fractions import Fraction

import numpy
import torch

from tests.labs.corpus import right

DECODE, ENCODE, LIMITS = "number_formats.decode", "number_formats.encode", "number_formats.limits"
UNDERFLOW, WINDOW, SUMS = "number_formats.underflow", "number_formats.window", "number_formats.sums"
EIGHT, CHANCE = "number_formats.e4m3", "number_formats.stochastic"


# -- 3.1: decode --


def number(bits, e, m):
    """One pattern's number, in plain Python."""
    sign = -1.0 if bits >> (e + m) & 1 else 1.0
    field, fraction = bits >> m & (1 << e) - 1, bits & (1 << m) - 1
    if field == (1 << e) - 1:
        return math.nan if fraction else sign * math.inf
    return sign * math.ldexp(fraction + ((1 << m) if field else 0), max(field, 1) - (2 ** (e - 1) - 1) - m)


@right("one after the other, in Python", check=DECODE)
def decode_loop(bits, exponent_bits, fraction_bits):
    return torch.tensor([number(pattern, exponent_bits, fraction_bits) for pattern in bits.tolist()], dtype=torch.float64)


@right("a list, from tensors of one element", check=DECODE)
def decode_list(bits, exponent_bits, fraction_bits):
    return [number(int(pattern), exponent_bits, fraction_bits) for pattern in bits]


@right("float32 by its own bits", check=DECODE)
def decode_bits(bits, exponent_bits, fraction_bits):
    e, m = exponent_bits, fraction_bits
    fraction, field = bits & (2**m - 1), (bits >> m) & (2**e - 1)
    normal = ((field + 127 - (2 ** (e - 1) - 1)) << 23) | (fraction << (23 - m))
    normal = torch.where(field == 2**e - 1, (255 << 23) | (fraction << (23 - m)), normal).to(torch.int32).view(torch.float32)
    value = torch.where(field == 0, fraction.float() * 2.0 ** (2 - 2 ** (e - 1) - m), normal)
    return torch.where((bits >> (e + m)) == 1, -value, value)


@right("torch's types where there are any", check=DECODE)
def decode_views(bits, exponent_bits, fraction_bits):
    kind = {(5, 10): torch.float16, (8, 7): torch.bfloat16}.get((exponent_bits, fraction_bits))
    return bits.to(torch.int16).view(kind).float() if kind else decode_bits(bits, exponent_bits, fraction_bits)


@right("numpy", check=DECODE)
def decode_numpy(bits, exponent_bits, fraction_bits):
    bits = bits.numpy()
    sign, rest = numpy.divmod(bits, 2 ** (exponent_bits + fraction_bits))
    field, fraction = numpy.divmod(rest, 2**fraction_bits)
    with numpy.errstate(all="ignore"):
        value = numpy.ldexp(fraction / 2**fraction_bits + (field > 0), numpy.maximum(field, 1) - 2 ** (exponent_bits - 1) + 1)
        value = numpy.where(field == 2**exponent_bits - 1, numpy.where(fraction == 0, numpy.inf, numpy.nan), value)
    return numpy.where(sign == 1, -value, value)


@right("written into the argument", check=DECODE)
def decode_in_place(bits, exponent_bits, fraction_bits):
    result = torch.empty(bits.shape, dtype=torch.float64)
    minus = bits >= 2 ** (exponent_bits + fraction_bits)
    bits -= minus * 2 ** (exponent_bits + fraction_bits)
    for index, pattern in enumerate(bits.tolist()):
        result[index] = number(pattern, exponent_bits, fraction_bits)
    result[minus] = -result[minus]
    return result


# -- 3.2: encode --


def pattern_of(value, e, m):
    """One number's pattern, in plain Python."""
    bias, top = 2 ** (e - 1) - 1, (2**e - 1) << m
    if value != value:
        return top | 1
    sign = (1 << (e + m)) if math.copysign(1.0, value) < 0 else 0
    value = abs(value)
    if math.isinf(value):
        return sign | top
    power = max(math.frexp(value)[1] - 1, 1 - bias) if value else 1 - bias
    return sign | min(top, ((power + bias - 1) << m) + round(math.ldexp(value, m - power)))


@right("one after the other, in Python", check=ENCODE)
def encode_loop(values, exponent_bits, fraction_bits):
    return torch.tensor([pattern_of(value, exponent_bits, fraction_bits) for value in values.tolist()])


@right("filled in one by one", check=ENCODE)
def encode_filled(values, exponent_bits, fraction_bits):
    result = torch.empty(len(values), dtype=torch.int64)
    for index, value in enumerate(values):
        result[index] = pattern_of(value.item(), exponent_bits, fraction_bits)
    return result


@right("struct and integers only", check=ENCODE)
def encode_struct(values, exponent_bits, fraction_bits):
    e, m = exponent_bits, fraction_bits
    top, found = (2**e - 1) << m, []
    for (word,) in struct.iter_unpack("<I", values.numpy().tobytes()):
        sign, field, fraction = word >> 31, word >> 23 & 255, word & 0x7FFFFF
        if field == 255 and fraction:
            found.append(top | 1)
            continue
        power = field - 127 if field else -126
        whole = fraction | (1 << 23 if field else 0)
        lowest = max(power, 2 - 2 ** (e - 1))  # power of the target's steps
        cut = 23 - m + lowest - power
        kept, rest = (whole >> cut, whole & (1 << cut) - 1) if cut < 64 else (0, whole)
        half = 1 << (cut - 1)
        kept += rest > half or (rest == half and kept & 1)
        pattern = top if field == 255 else min(top, ((lowest + 2 ** (e - 1) - 2) << m) + kept)
        found.append(sign << (e + m) | pattern)
    return found


@right("magic addition on float32's bits", check=ENCODE)
def encode_magic(values, exponent_bits, fraction_bits):
    e, m = exponent_bits, fraction_bits
    bias, top, cut = 2 ** (e - 1) - 1, (2**e - 1) << m, 23 - m
    word = values.view(torch.int32).long() & 0xFFFFFFFF
    size = word & 0x7FFFFFFF
    pattern = ((size + (1 << (cut - 1)) - 1 + ((size >> cut) & 1)) >> cut) - ((127 - bias) << m)
    steps = torch.round(values.abs().double() / 2.0 ** (1 - bias - m)).clamp(max=2.0**m).nan_to_num(0).long()
    pattern = torch.where(values.abs() < 2.0 ** (1 - bias), steps, pattern).clamp(max=top)
    return torch.where(values.isnan(), top | (1 << (m - 1)), pattern) | ((word >> 31) << (e + m))


@right("torch's types where there are any", check=ENCODE)
def encode_casts(values, exponent_bits, fraction_bits):
    kind = {(5, 10): torch.float16, (8, 7): torch.bfloat16, (5, 2): torch.float8_e5m2}.get((exponent_bits, fraction_bits))
    if kind is None:
        return encode_magic(values, exponent_bits, fraction_bits)
    cast = values.to(kind)
    return cast.view(torch.int16 if cast.itemsize == 2 else torch.uint8).long() & 2 ** (1 + exponent_bits + fraction_bits) - 1


def positive_numbers(e, m):
    """All positive numbers in order, zero first, and the one that would follow the largest."""
    return [number(pattern, e, m) for pattern in range((2**e - 1) << m)] + [2.0 ** 2 ** (e - 1)]


@right("searched in the list of all numbers", check=ENCODE)
def encode_search(values, exponent_bits, fraction_bits):
    e, m = exponent_bits, fraction_bits
    table = numpy.array(positive_numbers(e, m))
    size = numpy.abs(values.double().numpy())
    above = numpy.clip(numpy.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    with numpy.errstate(all="ignore"):
        down, up = size - low, high - size
        nearest = numpy.where((down < up) | ((down == up) & ((above - 1) % 2 == 0)), above - 1, above)
    nearest = numpy.where(size >= table[-1], len(table) - 1, nearest)
    nearest = numpy.where(numpy.isnan(size), len(table), nearest)
    return nearest + numpy.signbit(values.numpy()) * 2 ** (e + m)


@right("exact fractions", check=ENCODE)
def encode_fractions(values, exponent_bits, fraction_bits):
    if exponent_bits + fraction_bits > 12:  # too slow for all of them
        return encode_search(values, exponent_bits, fraction_bits)
    table = [Fraction(value) for value in positive_numbers(exponent_bits, fraction_bits)]
    found = []
    for value in values.tolist():
        pattern = pattern_of(value, exponent_bits, fraction_bits)
        if math.isfinite(value):
            size = min(Fraction(abs(value)), table[-1])
            index = min(bisect.bisect_left(table, size), len(table) - 1)
            if index and (size - table[index - 1], (index - 1) % 2) < (table[index] - size, index % 2):
                index -= 1
            pattern = index + ((1 << (exponent_bits + fraction_bits)) if math.copysign(1, value) < 0 else 0)
        found.append(pattern)
    return torch.tensor(found)


@right("rounded by adding and taking away a large number", check=ENCODE)
def encode_large(values, exponent_bits, fraction_bits):
    e, m = exponent_bits, fraction_bits
    bias, top = 2 ** (e - 1) - 1, (2**e - 1) << m
    size = values.abs().double()
    finite = torch.where(torch.isfinite(size), size, torch.zeros_like(size))
    gap = torch.exp2(torch.floor(torch.log2(finite.clamp(min=2.0 ** (1 - bias)))) - m)
    large = gap * 3 * 2.0**51  # float64 keeps 52 bits behind the first: nothing below gap is left
    rounded = (finite + large) - large
    mantissa, exponent = torch.frexp(rounded)
    normal = ((exponent.long() + bias - 1) << m) + (torch.round(mantissa * 2 ** (m + 1)).long() - 2**m)
    pattern = torch.where(rounded < 2.0 ** (1 - bias), torch.round(rounded / 2.0 ** (1 - bias - m)).long(), normal)
    pattern = torch.where((rounded >= 2.0 ** (bias + 1)) | torch.isinf(size), torch.full_like(pattern, top), pattern)
    pattern[values.isnan()] = 2 ** (e + m) - 1
    return (pattern + torch.signbit(values) * 2 ** (e + m)).to(torch.int32)


# -- 3.3: limits --


@right("all of it by search", check=LIMITS)
def limits_search(exponent_bits, fraction_bits):
    e, m = exponent_bits, fraction_bits
    infinity = (2**e - 1) << m
    positive = [number(pattern, e, m) for pattern in range(1, infinity)]

    def rounds(value):
        return number(pattern_of(value, e, m), e, m)

    integer = 1
    while rounds(float(integer)) == integer:
        integer += 1
    return {
        "largest": positive[-1],
        "infinite_from": positive[-1] + (positive[-1] - positive[-2]) / 2,
        "nan_from": next(x for x in positive if math.isinf(rounds(x + x))),
        "smallest_normal": positive[2**m - 1],
        "smallest": positive[0],
        "smallest_squared": next(x for x in positive if rounds(x * x) > 0),
        "still_one": (1 + next(x for x in positive if x > 1)) / 2,
        "first_missing": integer,
    }


@right("formulas, in fractions", check=LIMITS)
def limits_fractions(exponent_bits, fraction_bits):
    e, m = exponent_bits, fraction_bits
    two, bias = Fraction(2), 2 ** (e - 1) - 1
    smallest = two ** (1 - bias - m)
    power = (-bias - m) // 2  # x * x is to be above 2 ** (-bias - m)
    x = two**power
    while x * x <= smallest / 2:
        x += two ** (power - m)
    return {
        "largest": (2 - two**-m) * two**bias,
        "infinite_from": (2 - two ** (-m - 1)) * two**bias,
        "nan_from": two**bias,
        "smallest_normal": two ** (1 - bias),
        "smallest": smallest,
        "smallest_squared": x,
        "still_one": 1 + two ** (-m - 1),
        "first_missing": 2 ** (m + 1) + 1,
        "more": "than asked",
    }


@right("tensors and numpy numbers", check=LIMITS)
def limits_tensors(exponent_bits, fraction_bits):
    found = limits_search(exponent_bits, fraction_bits)
    return {
        key: torch.tensor(value, dtype=torch.float64) if index % 2 else numpy.float64(value)
        for index, (key, value) in enumerate(found.items())
    }


# -- 3.4: underflow_fraction --


def half_of_smallest(e, m):
    return 2.0 ** (1 - 2 ** (e - 1) - m)


@right("a threshold in float64", check=UNDERFLOW)
def below_threshold(tensor, exponent_bits, fraction_bits, scale=1.0):
    size = tensor.double().abs() * scale
    lost = (size > 0) & (size <= half_of_smallest(exponent_bits, fraction_bits))
    there = int((tensor != 0).sum())
    return int(lost.sum()) / there if there else 0.0


@right("a threshold that is divided", check=UNDERFLOW)
def divided_threshold(tensor, exponent_bits, fraction_bits, scale=1.0):
    limit = half_of_smallest(exponent_bits, fraction_bits) / scale
    values = [abs(value) for value in tensor.flatten().tolist() if value != 0]
    return sum(value <= limit for value in values) / max(len(values), 1)


@right("cast and back, a tensor with one number", check=UNDERFLOW)
def cast_and_back(tensor, exponent_bits, fraction_bits, scale=1.0):
    there = tensor != 0
    after = encode_magic((tensor * scale).flatten(), exponent_bits, fraction_bits).view(tensor.shape)
    lost = (after % 2 ** (exponent_bits + fraction_bits) == 0) & there
    return lost.sum() / there.sum() if there.any() else torch.tensor(0.0)


@right("torch's fp16 where it is asked", check=UNDERFLOW)
def by_half(tensor, exponent_bits, fraction_bits, scale=1.0):
    if (exponent_bits, fraction_bits) != (5, 10):
        return below_threshold(tensor, exponent_bits, fraction_bits, scale)
    there = tensor[tensor != 0]
    return ((there * scale).half() == 0).float().mean().nan_to_num(0.0)


@right("numpy", check=UNDERFLOW)
def with_numpy(tensor, exponent_bits, fraction_bits, scale=1.0):
    values = tensor.numpy()
    values = values[values != 0]
    patterns = encode_search(torch.from_numpy(values * numpy.float32(scale)), exponent_bits, fraction_bits)
    return numpy.mean(patterns % 2 ** (exponent_bits + fraction_bits) == 0) if len(values) else 0


# -- 3.5: scale_window --


@right("logarithms", check=WINDOW)
def window_logs(tensors, exponent_bits, fraction_bits):
    sizes = torch.cat([tensor.flatten() for tensor in tensors]).abs().double()
    edge = (2 - 2.0 ** -(fraction_bits + 1)) * 2.0 ** (2 ** (exponent_bits - 1) - 1)
    low = math.floor(math.log2(half_of_smallest(exponent_bits, fraction_bits) / sizes[sizes > 0].min().item())) + 1
    high = math.ceil(math.log2(edge / sizes.max().item())) - 1
    return [2**low if low >= 0 else 2.0**low, torch.tensor(2.0**high)]


@right("one power after the other, every number", check=WINDOW)
def window_loop(tensors, exponent_bits, fraction_bits):
    bits = exponent_bits, fraction_bits

    def safe(scale, bad):
        return not any(bad(number(pattern_of(value * scale, *bits), *bits)) for value in values)

    values = [value for tensor in tensors for value in tensor.flatten().tolist() if value != 0]
    low = 2.0**-40
    while not safe(low, lambda value: value == 0):
        low *= 2
    high = 2.0**40
    while not safe(high, math.isinf):
        high /= 2
    return low, high


@right("per tensor, then the narrowest", check=WINDOW)
def window_per_tensor(tensors, exponent_bits, fraction_bits):
    ends = [window_logs([tensor], exponent_bits, fraction_bits) for tensor in tensors if bool(tensor.any())]
    return numpy.array([max(float(low) for low, _ in ends), min(float(high) for _, high in ends)])


@right("bisection over powers, in float32", check=WINDOW)
def window_bisection(tensors, exponent_bits, fraction_bits):
    sizes = torch.cat([tensor.reshape(-1) for tensor in tensors]).abs()
    ends = torch.stack([sizes[sizes > 0].min(), sizes.max()])

    def after(k):
        scaled = encode_magic(ends * 2.0**k, exponent_bits, fraction_bits)
        return int(scaled[0]), int(scaled[1])

    infinity = (2**exponent_bits - 1) << fraction_bits
    low, high = -60, 60
    least, most = low, high
    while high - least > 1:
        middle = (least + high) // 2
        least, high = (least, middle) if after(middle)[0] > 0 else (middle, high)
    while most - low > 1:
        middle = (low + most) // 2
        low, most = (middle, most) if after(middle)[1] < infinity else (low, middle)
    return 2.0**high, 2.0**low


# -- 3.6: steady_sum, steady_mean --


def wide_sum(values):
    total = torch.zeros((), dtype=torch.float32)
    for value in values:
        total += value.float()
    return total


def wide_mean(values):
    return wide_sum(values) / len(values)


def pairs(values):
    """In the values' own format, halves of halves."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return pairs(values[:half]) + pairs(values[half:])


def pair_means(values):
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    share = half / len(values)
    return pair_means(values[:half]) * share + pair_means(values[half:]) * (1 - share)


def kahan(values):
    total = carried = torch.zeros((), dtype=values.dtype)
    for value in values:
        value = value - carried
        new = total + value
        carried = (new - total) - value
        total = new
    return total


def running_mean(values):
    mean = 0.0
    for count, value in enumerate(values.tolist(), 1):
        mean += (value - mean) / count
    return mean


def torch_sum(values):
    return values.float().sum()


def torch_mean(values):
    return values.float().mean().to(values.dtype)


def own_sum(values):
    return values.sum()


def own_mean(values):
    return values.mean()


def python_sum(values):
    return math.fsum(values.tolist())


def python_mean(values):
    return sum(values.tolist()) / len(values)


def level_by_level(values):
    while len(values) > 1:
        if len(values) % 2:
            values = torch.cat([values, torch.zeros(1, dtype=values.dtype)])
        values = values[::2] + values[1::2]
    return values


def fractions_sum(values):
    return float(sum(map(Fraction, values.tolist())))


def fractions_mean(values):
    return Fraction(sum(map(Fraction, values.tolist())), len(values))


def product_sum(values):
    return values.float() @ torch.ones(len(values))


def product_mean(values):
    return torch.dot(values.float(), torch.full((len(values),), 1 / len(values)))


def blocks(values):
    return wide_sum(torch.stack([kahan(part) for part in values.split(32)]))


for name, pair in {
    "a total in fp32": (wide_sum, wide_mean),
    "pairs in the own format": (pairs, pair_means),
    "Kahan in the own format, a running mean": (kahan, running_mean),
    "torch in fp32": (torch_sum, torch_mean),
    "torch's own": (own_sum, own_mean),
    "Python's floats": (python_sum, python_mean),
    "fractions": (fractions_sum, fractions_mean),
    "products with ones": (product_sum, product_mean),
    "level by level": (level_by_level, running_mean),
    "blocks, then fp32": (blocks, torch_mean),
}.items():
    right(name, check=SUMS)(pair)


# -- 3.7 and 3.8: extensions --


@right("torch's type, clamped", check=EIGHT)
def e4m3_cast(values):
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@right("a table of 127 numbers", check=EIGHT)
def e4m3_table(values):
    table = [number(pattern, 5, 3) * 2.0**8 for pattern in range(127)]
    found = []
    for value in values.tolist():
        size = min(abs(value), 448.0) if value == value else 0.0
        best = min(range(127), key=lambda index: (abs(table[index] - size), index % 2))
        found.append((0x7F if value != value else best) + (128 if math.copysign(1, value) < 0 else 0))
    return found


@right("by steps", check=EIGHT)
def e4m3_steps(values):
    size = values.abs().clamp(max=448.0).double()
    power = torch.floor(torch.log2(size.clamp(min=2.0**-6)))
    pattern = (power + 6) * 8 + torch.round(size * torch.exp2(3 - power))
    return torch.where(values.isnan(), 127.0, pattern).long() + torch.signbit(values) * 128


@right("noise in the low bits", check=CHANCE)
def chance_bits(values):
    word = values.view(torch.int32)
    moved = (word + torch.randint(0, 2**16, word.shape).to(torch.int32)) & -(2**16)
    return torch.where(torch.isfinite(values), moved.view(torch.float32), values)


@right("floor of the steps, and a draw", check=CHANCE)
def chance_steps(values):
    finite = torch.where(torch.isfinite(values), values, 0.0).double()
    step = torch.exp2(torch.frexp(finite).exponent.double() - 8)
    rounded = torch.floor(finite / step + torch.rand(finite.shape, dtype=torch.float64)) * step
    return torch.where(torch.isfinite(values), rounded, values.double())


@right("one after the other, Python's random", check=CHANCE)
def chance_loop(values):
    found = []
    for value in values.tolist():
        if value == 0 or not math.isfinite(value):
            found.append(value)
            continue
        step = 2.0 ** (math.frexp(value)[1] - 8)
        low = math.floor(value / step)
        found.append((low + (random.random() < value / step - low)) * step)
    return found


@right("numpy", check=CHANCE)
def chance_numpy(values):
    word = values.numpy().view(numpy.uint32)
    low = word & 0xFFFF
    up = numpy.random.default_rng().integers(0, 2**16, word.shape) < low
    moved = ((word - low).astype(numpy.int64) + up * 2**16).astype(numpy.uint32).view(numpy.float32)
    return torch.where(torch.isfinite(values), torch.from_numpy(moved.copy()), values)

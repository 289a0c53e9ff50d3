"""Inputs of the ping-pong checks: networks of odd, mixed widths, and what each run of one is to show.

A case's `runs` each name a model of the case by its number. The tensors of model 2 are "2/0/weight" (layers) or "2/0/up.weight"
(blocks), the input of run 1 is "x1".
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from labkit.checks._core import Case

# Widest first, in every place: buffers grown on demand have grown after them. What repeats is narrower and goes up and down.
WIDE = (96, 96, 96)
REPEATED = (56, 80, 48, 72, 64, 88)
# Wider and narrower again: buffers made for what came first do not fit, those made on demand have to grow.
WIDENING = (56, 48, 72, 96, 64, 128, 80)
BATCH = 64
OUT = 64


class Builder:
    """Collects runs and tensors of one case."""

    def __init__(self, name: str, generator: torch.Generator, covers: tuple[str, ...] | None = None) -> None:
        self.name, self.generator, self.covers = name, generator, covers
        self.runs: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.models = 0

    def layers(self, widths: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Add a model of linear layers; returns its number."""
        for layer, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            self._linear(f"{self.models}/{layer}/", inputs, outputs, 1.0, dtype)
        return self._next()

    def blocks(self, width: int, hidden: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Add a model of residual blocks; returns its number."""
        for block, size in enumerate(hidden):
            self._linear(f"{self.models}/{block}/up.", width, size, 1.0, dtype)
            self._linear(f"{self.models}/{block}/down.", size, width, 0.2, dtype)
        return self._next()

    def run(self, name: str, model: int, shape: tuple[int, int], dtype: torch.dtype = torch.float32, **facts: Any) -> None:
        """Add a run of `model` on a random input; `facts` travel with it."""
        self.tensors[f"x{len(self.runs)}"] = torch.randn(shape, generator=self.generator, dtype=dtype)
        self.runs.append({"name": name, "model": model, **facts})

    def case(self, kind: str, **values: Any) -> Case:
        return Case(self.name, {"kind": kind, "runs": self.runs, **values}, self.tensors, covers=self.covers)

    def _linear(self, prefix: str, inputs: int, outputs: int, gain: float, dtype: torch.dtype) -> None:
        scale = gain * math.sqrt(2.0 / inputs)
        self.tensors[prefix + "weight"] = torch.randn(outputs, inputs, generator=self.generator, dtype=dtype) * scale
        # Above zero on average: no narrow layer dies, whose zeros any wrong answer would match.
        self.tensors[prefix + "bias"] = torch.randn(outputs, generator=self.generator, dtype=dtype) * 0.1 + 0.3

    def _next(self) -> int:
        self.models += 1
        return self.models - 1


def deep_widths(depth: int) -> list[int]:
    """Widths of a network of `depth` layers whose buffers need not grow after the second layer."""
    repeated = [REPEATED[i % len(REPEATED)] for i in range(depth - 3)]
    return [*WIDE, *repeated, OUT]


def deep_hidden(depth: int) -> list[int]:
    """Hidden widths of `depth` blocks of the same kind; with a stream of the widest, three buffers in turn need not grow either."""
    return [*WIDE[:2], *(REPEATED[i % len(REPEATED)] for i in range(depth - 2))]


def _sizes(generator: torch.Generator, count: int, low: int = 6, high: int = 40) -> list[int]:
    return torch.randint(low, high, (count,), generator=generator).tolist()


def forward_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    core = Builder("2, 7 and 8 layers", generator)
    up_and_down = [5, 9, 33, 17, 40, 8, 21, 7, 13]  # neither the first nor the last is the widest
    for depth in (2, 7, 8):
        core.run(f"{depth} layers", core.layers(up_and_down[: depth + 1]), (6, 5))
    core.run("new numbers in the same input tensor", core.models - 1, (6, 5), refills=True)
    core.run("a network that widens", core.layers([40, *WIDENING]), (BATCH, 40), widens=True)
    deep = Builder("12 and 24 layers", generator)
    for depth in (12, 24):
        deep.run(f"{depth} layers", deep.layers(deep_widths(depth)), (BATCH, WIDE[0]), measured=True)
    edges = Builder("edge cases", generator, covers=("edge cases",))
    edges.run("no layers", edges.layers([7]), (4, 7))
    edges.run("one layer", edges.layers([7, 12]), (4, 7))
    five = edges.layers([7, 12, 6, 11, 11, 8])
    edges.run("one row", five, (1, 7))
    edges.run("8 rows", five, (8, 7))
    edges.run("then 3 rows", five, (3, 7))
    edges.run("float64", edges.layers([7, 12, 6, 11], torch.float64), (4, 7), torch.float64, hint="dtype")
    edges.run("a strided view", five, (4, 7), strided=True, hint="strided")
    edges.run("an input that requires grad", five, (4, 7), grad=True, hint="grad-input")
    cases = [core.case("layers"), deep.case("layers"), edges.case("layers")]
    if strict:
        more = Builder("3, 9 and 16 layers", generator)
        for depth in (3, 9, 16):
            sizes = _sizes(generator, depth + 1)
            more.run(f"{depth} layers", more.layers(sizes), (11, sizes[0]))
        deeper = Builder("9 and 33 layers", generator)
        for depth in (9, 33):
            deeper.run(f"{depth} layers", deeper.layers(deep_widths(depth)), (BATCH + 7, WIDE[0]), measured=True)
        last = Builder("more edge cases", generator, covers=("edge cases",))
        last.run("no layers, strided", last.layers([9]), (5, 9), strided=True, hint="strided")
        last.run("one layer, strided", last.layers([9, 6]), (5, 9), strided=True, hint="strided")
        last.run("one layer, float64", last.layers([9, 30], torch.float64), (5, 9), torch.float64, hint="dtype")
        last.run("one column", last.layers([1, 14, 6, 9]), (5, 1))
        cases += [more.case("layers"), deeper.case("layers"), last.case("layers")]
    return cases


def residual_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    core = Builder("2, 3 and 5 blocks", generator)
    for hidden in ((9, 30), (24, 7, 12), (12, 40, 5, 31, 16)):
        core.run(f"{len(hidden)} blocks", core.blocks(12, hidden), (6, 12))
    core.run("new numbers in the same input tensor", core.models - 1, (6, 12), refills=True)
    core.run("blocks that widen", core.blocks(OUT, WIDENING), (BATCH, OUT), widens=True)
    deep = Builder("6 and 12 blocks", generator)
    for depth in (6, 12):
        deep.run(f"{depth} blocks", deep.blocks(WIDE[0], deep_hidden(depth)), (BATCH, WIDE[0]), measured=True)
    edges = Builder("edge cases", generator, covers=("edge cases",))
    edges.run("no blocks", edges.blocks(7, []), (4, 7))
    edges.run("one block", edges.blocks(7, [12]), (4, 7))
    three = edges.blocks(7, [12, 5, 9])
    edges.run("one row", three, (1, 7))
    edges.run("8 rows", three, (8, 7))
    edges.run("then 3 rows", three, (3, 7))
    edges.run("float64", edges.blocks(7, [12, 5], torch.float64), (4, 7), torch.float64, hint="dtype")
    edges.run("a strided view", three, (4, 7), strided=True, hint="strided")
    edges.run("an input that requires grad", three, (4, 7), grad=True, hint="grad-input")
    cases = [core.case("blocks"), deep.case("blocks"), edges.case("blocks")]
    if strict:
        more = Builder("4 and 7 blocks", generator)
        for depth in (4, 7):
            more.run(f"{depth} blocks", more.blocks(17, _sizes(generator, depth)), (9, 17))
        deeper = Builder("5 and 17 blocks", generator)
        for depth in (5, 17):
            deeper.run(f"{depth} blocks", deeper.blocks(WIDE[0], deep_hidden(depth)), (BATCH + 7, WIDE[0]), measured=True)
        cases += [more.case("blocks"), deeper.case("blocks")]
    return cases


def persistent_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    mixed = [5, 9, 33, 17, 40, 8, 21, 7, 13]
    core = Builder("1, 2, 7 and 8 layers", generator)
    for depth in (1, 2, 7, 8):
        _calls(core, f"{depth} layers" if depth > 1 else "one layer", mixed[: depth + 1], (8, 3, 1), small_first=depth == 7)
    deep = Builder("12 and 24 layers", generator)
    for depth in (12, 24):
        _calls(deep, f"{depth} layers", deep_widths(depth), (48, 20, 33), measured=True)
    types = Builder("float64 and bfloat16", generator, covers=("buffer_bytes",))
    for dtype in (torch.float64, torch.bfloat16):
        _calls(types, str(dtype).partition(".")[2], [40, *WIDENING], (16, 5, 11), dtype, measured=True)
    cases = [core.case("calls"), deep.case("calls"), types.case("types")]
    if strict:
        more = Builder("3 and 12 layers", generator)
        for depth in (3, 12):
            _calls(more, f"{depth} layers", _sizes(generator, depth + 1), (9, 5, 7))
        deeper = Builder("9 and 33 layers", generator)
        for depth in (9, 33):
            _calls(deeper, f"{depth} layers", deep_widths(depth), (56, 33, 17), measured=True)
        cases += [more.case("calls"), deeper.case("calls")]
    return cases


# What an executor is put through: rows of the call, whether it gets an `out`, which earlier call's input tensor is filled with new
# numbers for it (else it brings a new one), and whether it may allocate (the first call of a shape may).
SCRIPT = (
    {"rows": "max", "may": True},
    {"rows": "max", "refills": 0},
    {"rows": "max"},
    {"rows": "less", "may": True},
    {"rows": "max", "refills": 0},
    {"rows": "other", "may": True},
    {"rows": "less"},
    {"rows": "max", "out": True},
    {"rows": "max", "out": True},
    {"rows": "max"},
    {"rows": "less", "out": True},
    {"rows": "less", "refills": 6},
    {"rows": "other"},
)


def limit_of(run: dict[str, Any], calls: int) -> float:
    """Buffers for max_batch rows that may be held after so many calls: two, or two per batch size that has come."""
    sizes = {rows_of(call, run) for call in SCRIPT[:calls]} | ({run["rows"][1]} if run.get("small_first") else set())
    return 2 * max(run["max_batch"], sum(sizes)) / run["max_batch"]


def rows_of(call: dict[str, Any], run: dict[str, Any]) -> int:
    """Rows of one call of SCRIPT in a run."""
    return run["rows"][("max", "less", "other").index(call["rows"])]


def _calls(
    builder: Builder, name: str, widths: Sequence[int], rows: tuple[int, int, int], dtype: torch.dtype = torch.float32, **facts: Any
) -> None:
    number, model = len(builder.runs), builder.layers(widths, dtype)
    facts |= {"rows": list(rows), "max_batch": rows[0]}
    for index, call in enumerate(SCRIPT):
        shape = (rows_of(call, facts), widths[0])
        builder.tensors[f"x{number}/{index}"] = torch.randn(shape, generator=builder.generator).to(dtype)
    builder.runs.append({"name": name, "model": model, **facts})

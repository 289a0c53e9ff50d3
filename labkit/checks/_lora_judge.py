"""What "lora.linear" expects, and what it says of what was seen."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._core import Case, Finding, Observation
from labkit.checks._lora_nets import STEPS, close, layout_of, mse, ratio, train_adapters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLACK_BYTES = 64  # beside the factors, whatever a module keeps in tiny tensors


def pair_of(tensors: dict[str, torch.Tensor], key: str, count: int) -> list[torch.Tensor]:
    return [tensors[f"{key}/{index}"] for index in range(count)]


def rank_of(matrix: torch.Tensor) -> int:
    """How many singular values are above 1e-5 of the largest one."""
    values = torch.linalg.svdvals(matrix.double())
    return int((values > 1e-5 * values[0]).sum()) if float(values[0]) else 0


def random_factors(values: dict[str, Any], told: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """A (rank, in) and B (out, rank) as the probe set them; None where the layer has other trainable tensors."""
    pair = pair_of(tensors, "random", len(told["shapes"]))
    layout = layout_of(pair, values["in"], values["out"], values["rank"])
    return layout.factors(pair) if layout else None


def judge_layer(
    values: dict[str, Any],
    told: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    run: Callable[[Any], torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
) -> list[Finding]:
    """The findings of one layer, in the order of the check's table; `run` gives the Linear's output with a delta on its weight."""
    pair = pair_of(tensors, "factors/0", len(told["shapes"]))
    layout = layout_of(pair, values["in"], values["out"], values["rank"])
    findings = [_judge_start(tensors, run(0.0), layout, pair), _judge_trainable(values, told, layout)]
    if layout is None:
        for name in ("the update", "first steps"):
            findings.append(Finding(name, False, "of two trainable factors", "not the two factors", "trainable"))
    else:
        factors = lambda key: layout.factors(pair_of(tensors, key, 2))  # noqa: E731
        findings += [_judge_update(values, tensors, factors("random"), weight), _judge_steps(values, told, tensors, factors, run, target)]
    return [*findings, _judge_base(told, tensors, weight, bias), _judge_copy(values, told, weight)]


def _judge_start(tensors: dict[str, torch.Tensor], plain: torch.Tensor, layout: Any, pair: Sequence[torch.Tensor]) -> Finding:
    name, wanted = "output at the start", "the base's, in train and in eval mode"
    for mode in ("start", "eval"):
        if not close(tensors[mode], plain, 1e-6):
            off = float((tensors[mode] - plain).abs().max())
            random_update = layout is not None and all(float(factor.abs().max()) > 0 for factor in pair)
            hint = "start" if random_update else "base-weights"
            return Finding(name, False, wanted, f"differs by up to {off:.2g}", hint)
    if layout is not None and all(float(factor.abs().max()) > 0 for factor in pair):  # however small: the contract says zero
        return Finding(name, False, wanted, "equal but for rounding: neither factor is zero", "start")
    return Finding(name, True, wanted, "equal")


def _judge_trainable(values: dict[str, Any], told: dict[str, Any], layout: Any) -> Finding:
    inputs, outputs, rank = (values[key] for key in ("in", "out", "rank"))
    count, wanted = sum(math.prod(shape) for shape in told["shapes"]), rank * (inputs + outputs)
    expected = f"{wanted} = {rank} * ({inputs} + {outputs}), in two tensors"
    observed = f"{count} in {len(told['shapes'])} tensor{'s' * (len(told['shapes']) != 1)}"
    if told["base trains"]:
        return Finding("trainable numbers", False, expected, observed, "base-trains")
    if not count:
        return Finding("trainable numbers", False, expected, "nothing that `parameters()` lists requires grad", "nothing-trains")
    other = sorted(set(told["dtypes"]) - {values["dtype"]})
    if layout is not None and other:
        return Finding("trainable numbers", False, expected, f"factors in {other[0]} for a weight in {values['dtype']}", "dtype")
    return Finding("trainable numbers", layout is not None, expected, observed, "trainable")


def _judge_update(
    values: dict[str, Any], tensors: dict[str, torch.Tensor], factors: Sequence[torch.Tensor], weight: torch.Tensor
) -> Finding:
    rank, alpha = values["rank"], values["alpha"]
    name, wanted = "the update", f"(alpha / rank) B A, of rank {min(rank, *weight.shape)}"
    a, b = (factor.double() for factor in factors)
    expected, update = alpha / rank * b @ a, tensors["update"].double()
    if close(update, expected):
        return Finding(name, True, wanted, f"equal, rank {rank_of(update)}")
    factor = ratio(update, expected)
    if not float(update.abs().max()) > 1e-5:
        return Finding(name, False, wanted, "none: other factors, the same output", "no-update")
    if factor is not None:
        near = {"unscaled": rank / alpha, "no-rank": rank, "root": math.sqrt(rank), "no-alpha": 1 / alpha, "twice": 2.0}
        hint = next((key for key, value in near.items() if abs(factor / value - 1) < 1e-3), "scale")
        return Finding(name, False, wanted, f"{factor:.3g} times that", hint)
    return Finding(name, False, wanted, f"another matrix, of rank {rank_of(update)}", "update")


def _judge_steps(
    values: dict[str, Any],
    told: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    factors: Callable[[str], Any],
    run: Callable[[Any], torch.Tensor],
    target: torch.Tensor,
) -> Finding:
    name, wanted = "first steps", f"one factor moves in step 1, both later: {STEPS} steps as computed"
    start = factors("factors/0")
    zero = [not float(factor.abs().max()) for factor in start]
    if all(zero):
        return Finding(name, False, wanted, "neither factor moves: both are zero", "both-zero")
    if "factors/1/0" not in tensors:
        return Finding(name, False, wanted, "the output has no gradient with respect to the factors", "no-update")
    scale = values["alpha"] / values["rank"]
    for steps in (1, STEPS):
        expected = train_adapters(lambda deltas: mse(run(deltas[0]), target), [start], scale, steps)[0]
        got = factors(f"factors/{steps}")
        moved = [float((a - b).abs().max()) > 0 for a, b in zip(got, start, strict=True)]
        if not any(moved):
            return Finding(name, False, wanted, f"neither factor has moved after step {steps}", "no-update")
        for letter, mine, theirs, was in zip("AB", got, expected, start, strict=True):
            if not close(mine - was, theirs - was, 1e-3) and float((mine - theirs).abs().max()) > 1e-6:
                return Finding(name, False, wanted, f"after step {steps}, {letter} is not where its gradient takes it", "gradient")
    if float((start[1] @ start[0]).abs().max()) > 1e-6:
        return Finding(name, True, wanted, "as computed")  # an update at the start is told above
    kept = start[0] if zero[1] else start[1].T  # the random factor as (rank, size)
    if kept.shape[0] > 1 and rank_of(kept) < min(kept.shape):
        return Finding(name, False, wanted, f"the random factor has rank {rank_of(kept)}: no update can have more", "alike")
    if told["same again"]:
        return Finding(name, False, wanted, "two layers of one size begin with the very same numbers", "same-numbers")
    return Finding(name, True, wanted, f"{'B' if zero[1] else 'A'} alone in step 1, then both, as computed")


def _judge_base(told: dict[str, Any], tensors: dict[str, torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> Finding:
    name, wanted = "base untouched", f"weight and bias bit for bit as given, after {STEPS} steps"
    if not torch.equal(tensors["weight at start"], weight):
        return Finding(name, False, wanted, "the weight is another one as soon as it is wrapped", "base-weights")
    for key, given in (("weight", weight), ("bias", bias)):
        if given is not None and not torch.equal(tensors[f"base/{key}"], given):
            return Finding(name, False, wanted, f"the {key} has changed", "base-moves")
    if told["base trains"]:
        return Finding(name, False, wanted, f"{' and '.join(told['base trains'])} still require grad", "base-trains")
    if not told["names"]:
        return Finding(name, False, wanted, "nothing was trained", "nothing-trains")
    if told["hidden"]:
        return Finding(name, False, wanted, "no parameter or buffer of your module is the weight", "base-hidden")
    return Finding(name, True, wanted, "bit for bit")


def _judge_copy(values: dict[str, Any], told: dict[str, Any], weight: torch.Tensor) -> Finding:
    inputs, outputs, rank = (values[key] for key in ("in", "out", "rank"))
    factors = rank * (inputs + outputs) * weight.element_size()
    expected = f"at most {factors} bytes more, the factors'"
    made = told["made"]
    return Finding("one copy of the weight", made <= factors + SLACK_BYTES, expected, f"{made} bytes more", "copy")


def judge_dropout(values: dict[str, Any], seen: Observation, calls: int) -> Finding:
    """Dropout reaches the update's input, in training mode, scaled so that the mean stays."""
    p, tensors, name = values["dropout"], seen.tensors, "dropout"
    wanted = f"{p:g} of the update's inputs in train mode, none in eval"
    if not close(tensors["start"], tensors["plain"], 1e-6):
        return Finding(name, False, wanted, "at the start the output is not the base's in train mode", "dropout-base")
    if not torch.equal(tensors["eval"], tensors["eval again"]):
        return Finding(name, False, wanted, "two calls in eval mode differ", "dropout-mode")
    means = tensors["means"].double()
    spread = means.std(0)
    if not float(spread.max()) > 1e-6:
        return Finding(name, False, wanted, "calls in train mode are all alike", "dropout-none")
    expected = tensors["eval"][0].double()
    off = (means.mean(0) - expected).abs() > 6 * spread / math.sqrt(calls) + 1e-5
    if bool(off.any()):
        factor = float((means.mean(0) * expected).sum() / expected.square().sum())
        return Finding(name, False, wanted, f"on average {factor:.2f} of the update in eval mode", "dropout-scale")
    share, slack = seen.values["dropped"], 6 * math.sqrt(p * (1 - p) / calls)
    swapped = abs(share - p) > slack >= abs(share - (1 - p))
    if not swapped and seen.values["zeros"] > 2 * p ** min(4, values["in"]) + 0.05:
        return Finding(name, False, wanted, f"{seen.values['zeros']:.0%} of the update's outputs are zero", "dropout-place")
    if abs(share - p) > slack:
        return Finding(name, False, wanted, f"{share:.0%} dropped", "dropout-share")
    return Finding(name, True, wanted, f"{share:.0%} dropped in train mode")


# -- what people see --


def picture(case: Case, seen: Observation) -> "Figure | None":
    """Singular values of the update that the layer makes: as many as the rank, then nothing."""
    if "update" not in seen.tensors:
        return None
    from labkit.figures import lines

    values = torch.linalg.svdvals(seen.tensors["update"].double())
    numbers = list(range(1, len(values) + 1))
    floor = float(values[0]) * 1e-8 or 1e-12
    drawn = lines(
        {"your update": (numbers, [max(float(value), floor) for value in values])},
        title=f"Singular values of your update, rank {case.values['rank']} asked for", x="number", y="singular value", log="y",
        marks={"rank": case.values["rank"]},
    )  # fmt: skip
    drawn.set_label(drawn.alt)
    return drawn


def summary(case: Case, seen: Observation) -> str | None:
    if "update" not in seen.tensors:
        return None
    count = sum(math.prod(shape) for shape in seen.values["shapes"])
    whole = case.values["in"] * case.values["out"]
    return f"{count} numbers train (the matrix has {whole}), update of rank {rank_of(seen.tensors['update'])}"

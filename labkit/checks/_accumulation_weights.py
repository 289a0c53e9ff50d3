"""Read the weights with which micro-batches went into an optimizer's step, and say what is wrong with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CLOSE = 1e-4


@dataclass(frozen=True)
class Fault:
    """Why a step is wrong: for people, and the key of a hint."""

    text: str
    hint: str


def told(weights: torch.Tensor) -> str:
    """A list of weights, short."""
    return ", ".join(f"{float(weight):.3g}" for weight in weights[:8]) + (", ..." if len(weights) > 8 else "")


def fault_of(weights: torch.Tensor, window: Sequence[int], full: int, expected: torch.Tensor | None = None) -> Fault | None:
    """What is wrong with one step, or None.

    weights  : (micro-batches,) the weight of each in the step, as observed
    window   : the micro-batches that belong to the step
    full     : how many a full window has
    expected : (micro-batches,) what they should be; default: 1 / len(window) in the window, 0 elsewhere
    """
    count = len(window)
    if expected is None:
        expected = torch.zeros_like(weights)
        expected[window[0] : window[-1] + 1] = 1 / count
    if not torch.isfinite(weights).all():
        return Fault("a gradient that is not finite", "inf-stepped")
    if torch.allclose(weights, expected, rtol=CLOSE, atol=CLOSE / max(len(weights), 1)):
        return None
    if not weights.any():
        return Fault("all gradients are zero when the optimizer steps", "empty-step")
    inside = weights[window[0] : window[-1] + 1]
    shown = f"micro-batches {window[0] + 1} to {window[-1] + 1} weigh {told(inside)}"
    if weights[: window[0]].any():
        return Fault(f"{shown}, and earlier ones {told(weights[: window[0]])}", "stale")
    if weights[window[-1] + 1 :].any():
        return Fault(f"{shown}, and later ones {told(weights[window[-1] + 1 :])}", "boundary")
    there = inside != 0
    if not there.all():
        last_only = bool(there[-1]) and int(there.sum()) == 1
        first_ones = bool(there[0]) and not bool(there[-1])
        return Fault(shown, "only-last" if last_only else "boundary" if first_ones else "missing")
    ratios = inside / expected[window[0] : window[-1] + 1]
    if float(ratios.max() - ratios.min()) > CLOSE * float(ratios.abs().max()) * 10:
        return Fault(shown, "unequal")
    return Fault(f"{shown}: {float(ratios[0]):.3g} times what they should", _scale_hint(float(ratios[0]), count, full))


def _scale_hint(ratio: float, count: int, full: int) -> str:
    def near(value: float) -> bool:
        return abs(ratio - value) < 1e-3 * value

    if near(count) or near(full):
        return "sum"
    if count != full and (near(count / full) or near(full / count)):
        return "short"
    if near(1 / count) or near(1 / full):
        return "twice"
    return "scale"

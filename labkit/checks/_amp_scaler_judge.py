"""Judging lab 04's scaler: the scale after each step, the gradients that the optimizer sees, and what a skipped step leaves alone."""

from collections.abc import Sequence
from typing import Any

import torch

from labkit.checks._amp_bench import true_gradients
from labkit.checks._core import Case, Finding, Observation

RTOL = 1e-5


def expected_scales(settings: dict[str, float], overflows: Sequence[bool]) -> list[float]:
    """The scale before each step, and after the last: backs off after an overflow, grows after `growth_interval` good steps in a row."""
    scale, good = settings.get("init_scale", 65536.0), 0
    trace = [scale]
    for overflow in overflows:
        good = 0 if overflow else good + 1
        if overflow:
            scale *= settings.get("backoff_factor", 0.5)
        elif good == settings.get("growth_interval", 2000):
            scale, good = scale * settings.get("growth_factor", 2.0), 0
        scale = min(max(scale, settings.get("min_scale", 1.0)), settings.get("max_scale", 2.0**24))
        trace.append(scale)
    return trace


def same(a: float, b: float) -> bool:
    return abs(a - b) <= RTOL * abs(b)


def judge_trace(settings: dict[str, float], rows: Sequence[dict[str, Any]], overflows: Sequence[bool], criterion: str) -> Finding:
    """The scale step by step, and what kind of fault the first other one shows."""
    wanted = expected_scales(settings, overflows)
    text = f"exact over {len(overflows)} steps"
    for number, (row, scale) in enumerate(zip(rows, wanted, strict=True)):
        if same(row["scale"], scale) and same(row["told"], scale):
            continue
        told = f"{row['scale']:g} after {number} steps, expected {scale:g}"
        if same(row["scale"], scale):
            return Finding(criterion, False, text, f"get_scale() is {row['told']:g}, a loss of 1 becomes {scale:g}", "reported")
        return Finding(criterion, False, text, told, _trace_hint(settings, overflows, number, row["scale"], wanted))
    return Finding(criterion, True, text, "yes")


def _trace_hint(settings: dict[str, float], overflows: Sequence[bool], number: int, got: float, wanted: Sequence[float]) -> str:
    if not number:
        return "trace"
    if not got <= settings.get("max_scale", 2.0**24) * (1 + RTOL):
        return "no-cap"
    if got < settings.get("min_scale", 1.0) * (1 - RTOL):
        return "no-floor"
    ends = settings.get("min_scale", 1.0), settings.get("max_scale", 2.0**24)
    if wanted[number] in ends and same(got, wanted[number - 1]) and ends[0] < got < ends[1]:
        return "short-of-limit"
    if overflows[number - 1]:
        return "no-backoff" if got >= wanted[number - 1] * (1 - RTOL) else "trace"
    interval = int(settings.get("growth_interval", 2000))
    past = list(overflows[:number])
    last = max((index for index, overflow in enumerate(past) if overflow), default=-1)
    soon = got > wanted[number] * (1 + RTOL)
    # An overflow within the interval, and a growth that came too soon for it: the count went on.
    return "tracker" if soon and last >= 0 and number - 1 - last < interval and number >= interval else "growth"


def judge_gradients(values: dict[str, Any], seen: Observation, overflows: Sequence[bool], criterion: str, clip: float = 0.0) -> Finding:
    """What the optimizer saw, against the gradient without a scale."""
    text = "each step's gradients as without a scale, to 1e-5"
    rows = seen.values["rows"]
    trace = expected_scales(values["settings"], overflows)
    for number, overflow in enumerate(overflows):
        if overflow or not rows[number]["stepped"] or "large" in values.get("script", [{}] * (number + 1))[number]:
            continue
        ratios = []
        for index, grad in enumerate(true_gradients(values["seed"], number)):
            got = seen.tensors.get(f"{number}/{index}")
            if got is None or got.shape != grad.shape:
                return Finding(criterion, False, text, f"step {number + 1}: parameter {index + 1} had no gradient", "gradients")
            grad = grad.clamp(-clip, clip) if clip else grad
            ratios.append(float((got.double() * grad).sum() / grad.double().square().sum()))
            if not torch.allclose(got, grad, rtol=RTOL, atol=1e-9) and same(ratios[-1], 1.0):
                return Finding(criterion, False, text, f"step {number + 1}: parameter {index + 1} has another gradient", "gradients")
        if all(same(ratio, 1.0) for ratio in ratios):
            continue
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        told = f"step {number + 1}: {worst:.4g} times as large"
        if clip:
            return Finding(criterion, False, text, told, "gradients")
        return Finding(criterion, False, text, told, _ratio_hint(ratios, worst, trace, number))
    return Finding(criterion, True, text, "yes")


def _ratio_hint(ratios: Sequence[float], worst: float, trace: Sequence[float], number: int) -> str:
    scale = trace[number]
    close = lambda a, b: abs(a - b) <= 1e-3 * abs(b)  # noqa: E731
    if max(ratios) - min(ratios) > 1e-3 * max(abs(ratio) for ratio in ratios):
        return "alike"
    if close(worst, scale):
        return "not-divided"
    if close(worst, 1 / scale):
        return "twice"
    others = [trace[i] for i in (number - 1, number + 1) if 0 <= i < len(trace) and trace[i] != scale]
    return "which-scale" if any(close(worst, scale / other) for other in others) else "gradients"


def judge_skips(
    rows: Sequence[dict[str, Any]], overflows: Sequence[bool], criterion: str, late: str = "not-skipped", good: str = "skips-good"
) -> Finding:
    """Which steps the optimizer took, and that nothing moved in the others."""
    text = f"{sum(overflows)} of {len(overflows)}, nothing moved in them"
    for number, overflow in enumerate(overflows):
        row, told = rows[number], f"step {number + 1}"
        if overflow and row["stepped"]:
            hint = "cleaned" if row["clean"] and late == "not-skipped" else late
            return Finding(criterion, False, text, f"{told} held an inf or nan, and was taken", hint)
        if overflow and not row["unchanged"]:
            return Finding(criterion, False, text, f"{told} was skipped, and parameters or state changed", "skip-changed")
        if not overflow and not row["stepped"]:
            return Finding(criterion, False, text, f"{told} was finite, and was skipped", good)
        if row["returned"] is not (not overflow):
            return Finding(criterion, False, text, f"{told}: step() returned {row['returned']}", "returned")
    return Finding(criterion, True, text, "yes")


def judge(case: Case, seen: Observation) -> list[Finding]:
    values = case.values
    if case.name == "a loss in 16 bits":
        wanted, got = 3 * values["settings"]["init_scale"], seen.values["scaled"]
        good = same(got, wanted) and seen.values["linked"]
        hint = "half-loss" if not same(got, wanted) else "no-graph"
        observed = f"{got:g}" + ("" if seen.values["linked"] else ", and backward cannot start there")
        return [Finding("16-bit loss", good, f"3 times {values['settings']['init_scale']:g} is {wanted:g}", observed, hint)]
    if "part" in values:
        return [_judge_saved(values, seen)]
    overflows, rows = ["poison" in line for line in values["script"]], seen.values["rows"]
    trace = judge_trace(values["settings"], rows, overflows, "scale trace")
    if case.covers == ("limits",):
        return [Finding("limits", trace.passed, f"from {values['settings']['min_scale']:g} to {values['settings']['max_scale']:g}, exact",
                        trace.observed, trace.hint)]  # fmt: skip
    if case.covers == ("test for inf",):
        clipped, large = values["how"] == "clip", any("large" in line for line in values["script"])
        late, good = "late-test" if clipped else "not-skipped", "sums" if large else "skips-good"
        skips = judge_skips(rows, overflows, "test for inf", late, good)
        return [skips if not skips.passed else judge_gradients(values, seen, overflows, "test for inf", clip=0.75 if clipped else 0.0)]
    if case.covers == ("unscaled once",):
        grads = judge_gradients(values, seen, overflows, "unscaled once")
        skips = judge_skips(rows, overflows, "unscaled once")
        again = [number for number, row in enumerate(rows[:-1]) if row["divided again"]]
        if grads.passed and skips.passed and again:
            told = f"step {again[0] + 1}: a call between step() and update() divided once more"
            return [Finding("unscaled once", False, grads.expected, told, "twice")]
        return [grads if not grads.passed else skips]
    return [judge_gradients(values, seen, overflows, "gradients"), trace, judge_skips(rows, overflows, "skipped steps")]


def _judge_saved(values: dict[str, Any], seen: Observation) -> Finding:
    name, text = "saved and restored", "the same scales as without a stop"
    first, rest = values["script"][: values["part"]], values["script"][values["part"] :]
    wanted = expected_scales(values["settings"], ["poison" in line for line in values["script"]])[len(first) :]
    if not seen.values["kept"]:
        return Finding(name, False, text, "the saved state changed while training went on", "alive-state")
    for number, (row, scale) in enumerate(zip(seen.values["rows"], wanted, strict=True)):
        if not same(row["scale"], scale):
            stays = all(same(a["scale"], b["scale"]) for a, b in zip(seen.values["went_on"], seen.values["rows"], strict=True))
            told = f"{row['scale']:g} {number} steps after loading, expected {scale:g}"
            return Finding(name, False, text, told, "trace" if stays else "forgets")
    return Finding(name, True, text, f"{len(rest)} steps alike")

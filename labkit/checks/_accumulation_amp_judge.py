"""Judging lab 05's combined loop: the weights and norms of every step, the scale at every backward, the epochs of the judge's own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.checks import _accumulation_tools as tools
from labkit.checks._accumulation_epoch import judge_schedule, losses_row, steps_of
from labkit.checks._accumulation_weights import Fault, fault_of
from labkit.checks._core import Case, Finding, Observation

SCALE, INTERVAL, BIG = 1024.0, 2, 1e6
HALF = 2e-2  # of a gradient's largest entry: float16 rounds to 1e-3 of each activation


class NotingScaler(torch.amp.GradScaler):
    """Torch's scaler, which also notes what it is asked for."""

    def __init__(self, events: list[str], scale: float, interval: int) -> None:
        super().__init__("cpu", init_scale=scale, growth_interval=interval)
        self.events = events

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append("unscale")
        super().unscale_(optimizer)

    def update(self, new_scale: Any = None) -> None:
        self.events.append("update")
        super().update(new_scale)


def run_epochs(candidate: Any, values: dict[str, Any]) -> tuple[tools.Trace, list[dict[str, Any]], list[float], list[float]]:
    """Call the candidate once per epoch: trace, a row per epoch, the factor on each loss in backward, the scale at each."""
    trace, count, k = tools.Trace(), values["count"], values["k"]
    factors: list[float] = []
    scales: list[float] = []
    if values.get("net"):
        model, batches = tools.make_net(values["seed"]), tools.net_batches(count, values["rows"], values["seed"])
        plain_loss = tools.net_loss(trace)
    else:
        model, batches = tools.Tally(count), tools.tally_batches(count, values["seed"], values.get("bad", ()), values.get("steep", ()))
        plain_loss = tools.tally_loss(trace)
    optimizer = tools.make_optimizer(model)
    scheduler, scaler = tools.make_scheduler(optimizer), NotingScaler(trace.events, SCALE, INTERVAL)
    trace.watch(optimizer)

    def at_backward(grad: torch.Tensor) -> None:
        factors.append(float(grad))
        scales.append(float(scaler.get_scale()))

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = plain_loss(model, batch)
        if loss.requires_grad:
            loss.register_hook(at_backward)
        return loss

    rows = []
    for _ in range(values["epochs"]):
        first_event, first_step = len(trace.events), len(trace.gradients)
        returned = candidate(model, list(batches), optimizer, loss_fn, k, scheduler, scaler, values["max_norm"], "cpu")
        events = trace.events[first_event:]
        rows.append({
            "steps": len(trace.gradients) - first_step,
            "forward": events.count("forward"),
            "backward": events.count("backward"),
            "update": events.count("update"),
            "told": " ".join(events[:24]),
            "rate": float(optimizer.param_groups[0]["lr"]),
            "scale": float(scaler.get_scale()),
        } | losses_row(returned, len(tools.windows_of(count, k))))  # fmt: skip
    return trace, rows, factors, scales


def reference(rates: Sequence[float]) -> Callable[..., list[float]]:
    """The judge's own epoch, at the learning rates observed: the schedule is judged by itself."""
    observed = iter(rates)

    def epoch(
        model: Any, batches: list[Any], optimizer: Any, loss_fn: Any, k: int, scheduler: Any, scaler: Any, max_norm: float, device: str
    ) -> list[float]:
        losses = []
        for window in tools.windows_of(len(batches), k):
            total = 0.0
            for index in window:
                # Without a cache: inside another autocast region, it would keep the weights of the step before.
                with torch.autocast(device, torch.float16, cache_enabled=False):
                    loss = loss_fn(model, batches[index]) / len(window)
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.param_groups[0]["lr"] = next(observed, tools.RATE)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(total)
        return losses

    return epoch


# -- judge --


def judge(case: Case, seen: Observation) -> list[Finding]:
    values, covers = case.values, case.covers or ()
    if values.get("net"):
        return _judge_net(values, seen)
    findings = []
    if "weights" in covers:
        findings += [_judge_steps("weights", values, seen), _judge_losses(values, seen)]
    if "clipping" in covers:
        findings.append(_judge_steps("clipping", values, seen))
    if "infinite window" in covers:
        findings.append(_judge_steps("infinite window", values, seen))
    if "scale" in covers:
        findings.append(_judge_scale(values, seen))
    if "schedule" in covers:
        windows = tools.windows_of(values["count"], values["k"])
        skipped = (len(windows) - len(_good(values))) * values["epochs"]
        findings.append(judge_schedule(values, seen, len(windows), skipped))
    return findings


def _good(values: dict[str, Any]) -> list[range]:
    """The windows without an infinite micro-batch."""
    return [w for w in tools.windows_of(values["count"], values["k"]) if not set(w) & set(values.get("bad", ()))]


WANTED = {
    "weights": "the mean of each window, in the optimizer's units",
    "clipping": "norm of the window's gradient at most max_norm",
    "infinite window": "no step for the whole window, the next one as ever",
}


def _judge_steps(name: str, values: dict[str, Any], seen: Observation) -> Finding:
    for epoch, steps in enumerate(steps_of(seen)):
        fault = _epoch_fault(values, steps, seen)
        if fault:
            if not _one_scale_each(values, seen.values["scales"]):
                fault = Fault(fault.text, "scale-window")
            detail = f"In order: {seen.values['rows'][0]['told']}"
            return Finding(name, False, WANTED[name], f"epoch {epoch + 1}: {fault.text}", fault.hint, detail)
    told = {"weights": "as wanted", "clipping": f"at most {values['max_norm']:g}", "infinite window": "skipped, and the next one is finite"}
    return Finding(name, True, WANTED[name], told[name])


def _one_scale_each(values: dict[str, Any], scales: list[float]) -> bool:
    """Whether the scale stayed the same from the first backward of each window to its last."""
    if len(scales) != values["count"] * values["epochs"]:
        return True
    per_epoch = [scales[start : start + values["count"]] for start in range(0, len(scales), values["count"])]
    windows = tools.windows_of(values["count"], values["k"])
    return all(len({epoch[j] for j in window}) == 1 for epoch in per_epoch for window in windows)


def _epoch_fault(values: dict[str, Any], steps: list[torch.Tensor], seen: Observation) -> Fault | None:
    """What is wrong with the steps of one epoch, or None."""
    good, count, bad = _good(values), values["count"], values.get("bad", ())
    if any(not torch.isfinite(step).all() for step in steps):
        return Fault("the optimizer steps with a gradient that is not finite", "inf-stepped")
    if len(steps) >= count > len(tools.windows_of(count, values["k"])):
        return Fault(f"{len(steps)} steps", "every")
    if len(steps) != len(good):
        told = f"{len(steps)} steps, not {len(good)}"
        if not steps:
            return Fault(told, "no-step")
        if len(steps) > len(good):
            return Fault(told, "inf-dropped" if bad else "many-steps")
        return Fault(told, "inf-left" if bad else "flush" if count % values["k"] else "skipped-good")
    for number, (step, window) in enumerate(zip(steps, good, strict=True)):
        expected = torch.zeros(count)
        expected[window[0] : window[-1] + 1] = 1 / len(window)
        norm = float(expected.norm())
        clipped = expected * min(1.0, values["max_norm"] / norm)
        fault = fault_of(step, window, values["k"], clipped)
        if not fault:
            continue
        if norm > values["max_norm"] and tools.close(step, expected, 1e-3):
            return Fault(f"step {number + 1}: norm {norm:.3g}", "not-clipped")
        ratio = float(step.norm() / clipped.norm())
        told = f"step {number + 1}: norm {float(step.norm()):.3g}, not {float(clipped.norm()):.3g}"
        if ratio > 1.01 and abs(float(step.norm()) / values["max_norm"] - 1) < 1e-3:
            return Fault(told, "grown")
        if 0 < ratio < 0.02:
            return Fault(told, "clip-units" if values["max_norm"] < BIG else "unscale-once")
        if ratio > 50:
            return Fault(told, "not-unscaled")
        if values["max_norm"] < BIG and fault.hint in ("scale", "twice", "sum", "unequal"):
            return Fault(told, "clip-pieces")
        losses = seen.values["rows"][0]["losses"]
        if fault.hint == "sum" and losses is not None and _losses_right(values, losses):
            return Fault(f"step {number + 1}: {fault.text}", "only-logged")
        return Fault(f"step {number + 1}: {fault.text}", fault.hint)
    return None


def _expected_scales(values: dict[str, Any]) -> tuple[list[float], float]:
    """The scale at each backward, and at the end: halved after a skipped window, doubled after INTERVAL good ones in a row."""
    scale, streak, at = SCALE, 0, []
    for _ in range(values["epochs"]):
        for window in tools.windows_of(values["count"], values["k"]):
            at += [scale] * len(window)
            if set(window) & set(values.get("bad", ())):
                scale, streak = scale / 2, 0
            else:
                streak += 1
                if streak == INTERVAL:
                    scale, streak = scale * 2, 0
    return at, scale


def _judge_scale(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "scale", "every loss scaled, one scale per window, one update of it after each"
    rows, factors, scales = seen.values["rows"], seen.values["factors"], seen.values["scales"]
    at, final = _expected_scales(values)
    windows = tools.windows_of(values["count"], values["k"])
    if len(factors) != len(at):
        told = f"{len(factors)} backward passes for {len(at)} micro-batches"
        return Finding(name, False, wanted, told, "again" if len(factors) > len(at) else "graphs")
    if any(factor < 0.9 * scale / values["count"] for factor, scale in zip(factors, scales, strict=True)):
        return Finding(name, False, wanted, f"a loss times {min(factors):.3g}, with a scale of {max(scales):g}", "not-scaled")
    if not _one_scale_each(values, scales):
        return Finding(name, False, wanted, f"{', '.join(f'{scale:g}' for scale in scales[:4])}, ... within a window", "scale-window")
    if scales != at or rows[-1]["scale"] != final:
        told = ", ".join(f"{scales[i]:g}" for i in range(0, len(scales), values["k"]))
        return Finding(name, False, wanted, f"scales {told}; {rows[-1]['update']} updates for {len(windows)} windows", "scale-trace")
    return Finding(name, True, wanted, f"from {SCALE:g} to {final:g}, as wanted")


def _losses_right(values: dict[str, Any], losses: list[float]) -> bool:
    batches = tools.tally_batches(values["count"], values["seed"])
    means = [float(torch.stack([batches[j][1] for j in w]).mean()) for w in tools.windows_of(values["count"], values["k"])]
    return all(tools.same_number(a, b, 5e-3) for a, b in zip(losses, means, strict=True))


def _judge_losses(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "losses", "the mean loss of each window, unscaled"
    for row in seen.values["rows"]:
        if row["losses"] is None:
            return Finding(name, False, wanted, row["loss_error"], row["loss_hint"])
    losses = seen.values["rows"][0]["losses"]
    if not _losses_right(values, losses):
        scaled = _losses_right(values, [loss / SCALE for loss in losses])
        told = ", ".join(f"{loss:.3g}" for loss in losses[:4])
        return Finding(name, False, wanted, told, "loss-scaled" if scaled else "loss-value")
    return Finding(name, True, wanted, "as wanted")


def _judge_net(values: dict[str, Any], seen: Observation) -> list[Finding]:
    name, wanted = "autocast", "the model's forward in float16"
    others = [dtype for dtype in seen.values["dtypes"] if dtype != "float16"]
    told = f"its output is {others[0]}" if others else "float16"
    cast = Finding(name, bool(seen.values["dtypes"]) and not others, wanted, told, "autocast")
    trace, _, _, _ = run_epochs(reference(seen.values["rates"]), values)
    observed = seen.tensors.get("gradients")
    name, wanted = "clipping", "the clipped gradient of each window"
    for number, right in enumerate(trace.gradients):
        if observed is None or number >= len(observed):
            return [cast, Finding(name, False, wanted, f"{number} steps, not {len(trace.gradients)}", "flush" if number else "no-step")]
        if not tools.close(observed[number], right, HALF):
            norm, most = float(observed[number].norm()), values["max_norm"]
            hint = "not-clipped" if norm > 1.01 * most else "clip-units" if norm < 0.02 * float(right.norm()) else "clip-pieces"
            return [cast, Finding(name, False, wanted, f"step {number + 1}: norm {norm:.3g}, not {float(right.norm()):.3g}", hint)]
    return [cast, Finding(name, True, wanted, f"equal, {len(trace.gradients)} steps")]

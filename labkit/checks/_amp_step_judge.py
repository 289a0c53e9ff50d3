"""Judging lab 04's training step against one of the judge's own: losses, gradients, norms, formats, skipped steps, rates."""

from collections.abc import Sequence
from typing import Any

import torch

from labkit.checks._amp_net import DECAY, DTYPES, LR, MOMENTUM, Net, batch
from labkit.checks._core import Case, Finding, Observation

RTOL = 2e-2  # bfloat16 rounds to 1 in 256; a wrong factor is off by a quarter and more


def expected(values: dict[str, Any], rates: Sequence[float] = ()) -> tuple[list[float], list[list[torch.Tensor]], list[float]]:
    """Loss of every step, and gradient and norm before clipping of every step that is taken, by a training of the judge's own.

    rates : of the steps that were taken, as observed: a wrong schedule is told once, where it is judged
    """
    net = Net(values["seed"])
    parameters = list(net.parameters())
    momentum = [torch.zeros_like(p) for p in parameters]
    losses, taken, norms = [], [], []
    for number in range(values["steps"]):
        inputs, targets = batch(values["seed"], number)
        scale = values["scales"][number] if values["scales"] else 1.0
        # Without a cache: inside another autocast region, it would keep the weights of the step before.
        with torch.autocast("cpu", DTYPES[values["dtype"]], enabled=values["device"] == "cpu", cache_enabled=False):
            loss = net.loss(net(inputs), targets)
        losses.append(float(loss.detach()))
        grads = [grad / scale for grad in torch.autograd.grad(loss * scale, parameters)]
        if not all(grad.isfinite().all() for grad in grads):
            continue
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        factor = min(1.0, (values.get("max_norm") or norm) / norm)
        grads = [grad * factor for grad in grads]
        rate = rates[len(taken)] if len(taken) < len(rates) else LR
        taken.append(grads)
        norms.append(norm)
        with torch.no_grad():
            for parameter, grad, moment in zip(parameters, grads, momentum, strict=True):
                parameter -= rate * moment.mul_(MOMENTUM).add_(grad)
    return losses, taken, norms


def seen_gradients(seen: Observation, number: int) -> list[torch.Tensor]:
    return [seen.tensors[f"{number}/{index}"] for index in range(4) if f"{number}/{index}" in seen.tensors]


def flat(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([grad.double().flatten() for grad in grads])


def _judge_numbers(values: dict[str, Any], seen: Observation, name: str) -> Finding:
    """Losses and the gradients that the optimizer saw."""
    losses, taken, norms = expected(values, seen.values["rates"])
    text, rows = "losses and gradients of the model, unscaled", seen.values["rows"]
    scaler = values["scales"] is not None
    for number, (row, loss) in enumerate(zip(rows, losses, strict=True)):
        if row["stepped"] != 1:
            told = f"step {number + 1}: the optimizer stepped {row['stepped']} times"
            return Finding(name, False, text, told, "update" if scaler else "scaled-anyway")
        grads = seen_gradients(seen, number)
        if len(grads) < len(taken[number]):
            told = f"step {number + 1}: {len(taken[number]) - len(grads)} of 4 gradients are missing"
            return Finding(name, False, text, told, "no-gradients")
        mine, right = flat(grads), flat(taken[number])
        ratio = float(mine @ right / (right @ right))
        if not (mine - right).norm() <= RTOL * right.norm():
            told = f"step {number + 1}: gradient {ratio:.4g} times as large"
            # Clipped, a sum has no ratio of its own; that the first step was right tells it.
            hint = "update" if scaler else "summed" if number else "scaled-anyway"
            if not number and values.get("max_norm") and abs(float(mine.norm()) - norms[0]) <= RTOL * norms[0]:
                hint = "norm"  # the gradient as it was before clipping
            return Finding(name, False, text, told, hint)
        if abs(row["loss"] - loss) > RTOL * abs(loss):
            scale = values["scales"][number] if scaler else 0.0
            hint = "loss-scaled" if scaler and abs(row["loss"] - loss * scale) <= RTOL * loss * scale else "loss"
            return Finding(name, False, text, f"step {number + 1}: loss {row['loss']:.4g}, not {loss:.4g}", hint)
    return Finding(name, True, text, f"yes, {len(rows)} steps")


def _judge_autocast(values: dict[str, Any], seen: Observation) -> Finding:
    text = "forward in 16 bits, loss under autocast; backward and step outside"
    name = "under autocast"
    for row in seen.values["rows"]:
        if any(note[1] != values["dtype"] for note in row["notes"] if note[0] == "forward"):
            return Finding(name, False, text, "the first product was in float32", "fp32-forward")
        if not all(note[1] for note in row["notes"] if note[0] == "loss"):
            return Finding(name, False, text, "loss outside", "loss-outside")
        if any(note[1] for note in row["notes"] if note[0] == "backward"):
            return Finding(name, False, text, "backward inside", "all-inside")
    if any(seen.values["inside"]):
        return Finding(name, False, text, "the optimizer's step inside", "all-inside")
    return Finding(name, True, text, "so")


def _judge_clipping(values: dict[str, Any], seen: Observation) -> Finding:
    _, taken, norms = expected(values)
    limit, text = values["max_norm"], "norm at the step is min(norm, max_norm)"
    for number, (right, norm) in enumerate(zip(taken, norms, strict=True)):
        grads = seen_gradients(seen, number)
        if len(grads) < len(right):
            return Finding("clipping", False, text, f"step {number + 1} was not taken with all gradients", "no-gradients")
        mine, wanted = flat(grads), flat(right)
        told = f"{float(mine.norm()):.4g} where the gradient has {norm:.4g} and the limit is {limit:g}"
        exact = norm < limit or abs(float(mine.norm()) - limit) <= 1e-3 * limit
        if (mine - wanted).norm() <= RTOL * wanted.norm() and exact:
            continue
        cosine = float(mine @ wanted / (mine.norm() * wanted.norm()).clamp(min=1e-30))
        hint = "per-tensor" if cosine < 0.995 else "clips-small" if norm < limit else "norm"
        return Finding("clipping", False, text, told, hint)
    return Finding("clipping", True, text, f"{limit:g} at most, {len(norms)} steps")


def _judge_overflow(values: dict[str, Any], seen: Observation) -> list[Finding]:
    rows, scales = seen.values["rows"], values["scales"]
    overflows = [scale > 2.0**30 for scale in scales]
    text = f"{sum(overflows)} of {len(rows)} steps skipped, weights and momentum bit for bit"
    finding = Finding("overflow", True, text, "so")
    _, taken, _ = expected(values, seen.values["rates"])
    place = 0
    for number, (row, overflow) in enumerate(zip(rows, overflows, strict=True)):
        told, hint = "", "moved"
        if "update" not in row["calls"] or row["calls"].count("update") > 1:
            told, hint = f"step {number + 1}: update() ran {row['calls'].count('update')} times", "no-update"
        elif overflow and (row["stepped"] or not row["unchanged"]):
            told = f"step {number + 1} overflowed, and weights or momentum changed"
        elif not overflow and row["stepped"] != 1:
            told, hint = f"step {number + 1} was finite, and was not taken", "inf-left" if number and overflows[number - 1] else "moved"
        elif not overflow and len(grads := seen_gradients(seen, place)) < len(taken[place]):
            told, hint = f"step {number + 1} was taken without all gradients", "no-gradients"
        elif not overflow:
            mine, right = flat(grads), flat(taken[place])
            if mine.shape != right.shape or not (mine - right).norm() <= RTOL * right.norm():
                told, hint = f"step {number + 1}: another gradient than without the skipped step", "inf-left"
        place += row["stepped"]
        if told:
            finding = Finding("overflow", False, text, told, hint)
            break
    return [finding, _judge_schedule(values, seen, [not overflow for overflow in overflows])]


def _judge_schedule(values: dict[str, Any], seen: Observation, taken: Sequence[bool]) -> Finding:
    text, rate = f"{sum(taken)} of {len(taken)}: one for each step taken", LR
    for number, (row, stepped) in enumerate(zip(seen.values["rows"], taken, strict=True)):
        rate *= DECAY if stepped else 1.0
        if abs(row["lr"] - rate) > 1e-9:
            told = f"rate {row['lr']:.4g} after step {number + 1}, expected {rate:.4g}"
            return Finding("schedule", False, text, told, "schedule")
    return Finding("schedule", True, text, "yes")


def _judge_device(values: dict[str, Any], seen: Observation) -> Finding:
    wanted = values["dtype"] if values["device"] == "cpu" else "float32"
    formats = {note[1] for row in seen.values["rows"] for note in row["notes"] if note[0] == "forward"}
    where = "autocast for cuda leaves the CPU in float32" if wanted == "float32" else f"{wanted} on the CPU"
    return Finding("device and dtype", formats == {wanted}, where, ", ".join(sorted(formats)) or "no forward", "device")


def judge(case: Case, seen: Observation) -> list[Finding]:
    values, names = case.values, case.covers or ()
    found = []
    if "loss and update" in names:
        found += [_judge_numbers(values, seen, "loss and update"), _judge_autocast(values, seen)]
    if "clipping" in names:
        found.append(_judge_clipping(values, seen))
    if "overflow" in names:
        found += _judge_overflow(values, seen)
    if "without a scaler" in names:
        found.append(_judge_numbers(values, seen, "without a scaler"))
        if values.get("schedule") and found[-1].passed:
            rates = _judge_schedule(values, seen, [True] * values["steps"])
            found[-1] = found[-1] if rates.passed else Finding("without a scaler", False, rates.expected, rates.observed, "schedule")
    if "device and dtype" in names:
        found.append(_judge_device(values, seen))
    return found

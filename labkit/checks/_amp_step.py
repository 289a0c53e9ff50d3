"""Check "amp.step": one training step under autocast, with a scaler or without."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from labkit.checks._amp_hints import HINTS, on_error
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LR, MOMENTUM, DECAY = 0.05, 0.9, 0.5
RTOL = 2e-2  # bfloat16 rounds to 1 in 256; a wrong factor is off by a quarter and more


class Net(nn.Module):
    """Two Linears, (batch, 7) -> (batch, 3); notes the format of its first product and every loss's surroundings."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up, self.down = nn.Linear(7, 33), nn.Linear(33, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.notes: list[list[Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.notes.append(["forward", str(hidden.dtype).removeprefix("torch."), torch.is_grad_enabled()])
        return self.down(nn.functional.gelu(hidden))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean squared error; notes whether autocast is on here, and later in backward."""
        self.notes.append(["loss", torch.is_autocast_enabled("cpu")])
        error = outputs.float() - targets
        if error.requires_grad:
            error.register_hook(lambda grad: self.notes.append(["backward", torch.is_autocast_enabled("cpu")]))
        return error.square().mean()


class ScriptedScaler:
    """Scales by a script instead of a rule: the methods of the learner's scaler, with calls noted."""

    def __init__(self, scales: Sequence[float]) -> None:
        self.scales, self.number, self.calls = scales, 0, []
        self.found: bool | None = None

    def get_scale(self) -> float:
        return self.scales[min(self.number, len(self.scales) - 1)]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls.append("scale")
        return loss.float() * self.get_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self.found is not None:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self.calls.append("unscale")
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            grad.div_(self.get_scale())
        self.found = not all(bool(grad.isfinite().all()) for grad in grads)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.calls.append("step")
        if self.found is None:
            self.unscale_(optimizer)
        if not self.found:
            optimizer.step()
        return not self.found

    def update(self) -> None:
        self.calls.append("update")
        self.number, self.found = self.number + 1, None


class Watched(torch.optim.SGD):
    """SGD that notes the gradients it sees, its rate, and whether autocast was on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=LR, momentum=MOMENTUM, foreach=False)
        self.seen: list[tuple[list[torch.Tensor | None], float, bool]] = []

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        grads = [None if p.grad is None else p.grad.clone() for p in group["params"]]
        self.seen.append((grads, group["lr"], torch.is_autocast_enabled("cpu")))
        return super().step(closure)


def _batch(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 31 * number)
    return torch.randn(12, 7, generator=generator), 3 * torch.randn(12, 3, generator=generator)


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    huge = 2.0**40  # more than any 16-bit gradient survives
    base = {"device": "cpu", "dtype": "float16", "steps": 4}
    steady, skips = [1000.0, 1000.0, 2000.0, 2000.0], [512.0, huge, 256.0, 512.0, huge, 64.0]
    cases = [
        Case("4 steps in float16", base | {"scales": steady, "seed": seed()}, covers=("loss and update", "under autocast")),
        Case("gradients clipped to norm 0.5", base | {"scales": steady, "max_norm": 0.5, "seed": seed()}, covers=("clipping",)),
        Case("norm below the limit", base | {"scales": steady, "max_norm": 1e4, "seed": seed()}, covers=("clipping",)),
        Case("overflow in steps 2 and 5", base | {"scales": skips, "steps": 6, "max_norm": 0.7, "schedule": True, "seed": seed()},
             covers=("overflow", "schedule")),
        Case("bfloat16 without a scaler", base | {"dtype": "bfloat16", "scales": None, "max_norm": 0.5, "schedule": True, "seed": seed()},
             covers=("without a scaler", "device and dtype")),
        Case("autocast for another device", base | {"device": "cuda", "scales": None, "steps": 1, "seed": seed()},
             covers=("device and dtype",)),
    ]  # fmt: skip
    if strict:
        first = [huge, huge, 2048.0, 4096.0, 1024.0]
        cases += [
            Case("overflow in the first two steps", base | {"scales": first, "steps": 5, "schedule": True, "seed": seed()},
                 covers=("overflow", "schedule")),
            Case("bfloat16 with a scaler", base | {"dtype": "bfloat16", "scales": steady, "max_norm": 0.3, "seed": seed()},
                 covers=("clipping", "device and dtype")),
            Case("float16 without a scaler", base | {"scales": None, "seed": seed()}, covers=("without a scaler", "device and dtype")),
        ]  # fmt: skip
    return cases


def _play(step: Callable[..., Any], values: dict[str, Any]) -> tuple[Net, Watched, ScriptedScaler | None, list[dict[str, Any]]]:
    """Run a case's steps with `step`, an amp_step; a row per step."""
    net = Net(values["seed"])
    optimizer = Watched(net.parameters())
    scaler = None if values["scales"] is None else ScriptedScaler(values["scales"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=DECAY) if values.get("schedule") else None
    rows = []
    for number in range(values["steps"]):
        inputs, targets = _batch(values["seed"], number)
        before = [tensor.detach().clone() for tensor in _state(net, optimizer)]
        taken, noted, called = len(optimizer.seen), len(net.notes), len(scaler.calls) if scaler else 0
        loss = step(net, optimizer, inputs, targets, net.loss, device_type=values["device"], dtype=DTYPES[values["dtype"]],
                    scaler=scaler, max_norm=values.get("max_norm"), scheduler=schedule)  # fmt: skip
        after = _state(net, optimizer)
        rows.append({
            "loss": _number(loss),
            "stepped": len(optimizer.seen) - taken,
            "unchanged": len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "notes": net.notes[noted:],
            "calls": scaler.calls[called:] if scaler else [],
            "lr": optimizer.param_groups[0]["lr"],
        })  # fmt: skip
    return net, optimizer, scaler, rows


def _state(net: Net, optimizer: Watched) -> list[torch.Tensor]:
    buffers = [optimizer.state[p].get("momentum_buffer") for p in net.parameters()]
    return [*net.parameters(), *(buffer for buffer in buffers if buffer is not None)]


def _number(loss: Any) -> float:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        loss = loss.detach()
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        told = "None" if loss is None else f"a {type(loss).__name__}"
        raise WrongResult(f"amp_step returned {told}, expected the loss as a float", "loss") from None


def _probe(candidate: Any, case: Case) -> Observation:
    net, optimizer, scaler, rows = _play(candidate, case.values)
    tensors = {}
    for number, (grads, _, _) in enumerate(optimizer.seen):
        for index, grad in enumerate(grads):
            if grad is not None:
                tensors[f"{number}/{index}"] = grad
    tensors |= {f"w/{index}": parameter.detach() for index, parameter in enumerate(net.parameters())}
    inside = [inside for _, _, inside in optimizer.seen]
    return Observation({"rows": rows, "rates": [rate for _, rate, _ in optimizer.seen], "inside": inside}, tensors)


# -- judge --


def _expected(values: dict[str, Any]) -> tuple[list[float], list[list[torch.Tensor]], list[float]]:
    """Loss of every step, and gradient and norm before clipping of every step that is taken, by a training of the judge's own."""
    net = Net(values["seed"])
    parameters = list(net.parameters())
    momentum = [torch.zeros_like(p) for p in parameters]
    losses, taken, norms, rate = [], [], [], LR
    for number in range(values["steps"]):
        inputs, targets = _batch(values["seed"], number)
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
        taken.append(grads)
        norms.append(norm)
        with torch.no_grad():
            for parameter, grad, moment in zip(parameters, grads, momentum, strict=True):
                parameter -= rate * moment.mul_(MOMENTUM).add_(grad)
        rate *= DECAY if values.get("schedule") else 1.0
    return losses, taken, norms


def _seen_gradients(seen: Observation, number: int) -> list[torch.Tensor]:
    return [seen.tensors[f"{number}/{index}"] for index in range(4) if f"{number}/{index}" in seen.tensors]


def _flat(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([grad.double().flatten() for grad in grads])


def _judge_numbers(values: dict[str, Any], seen: Observation, name: str) -> Finding:
    """Losses and the gradients that the optimizer saw."""
    losses, taken, _ = _expected(values)
    text, rows = "losses and gradients of the model, unscaled", seen.values["rows"]
    scaler = values["scales"] is not None
    for number, (row, loss) in enumerate(zip(rows, losses, strict=True)):
        if row["stepped"] != 1:
            told = f"step {number + 1}: the optimizer stepped {row['stepped']} times"
            return Finding(name, False, text, told, "update" if scaler else "scaled-anyway")
        grads = _seen_gradients(seen, number)
        if len(grads) < len(taken[number]):
            return Finding(name, False, text, f"step {number + 1}: {len(taken[number]) - len(grads)} of 4 gradients are missing", "no-gradients")
        mine, right = _flat(grads), _flat(taken[number])
        ratio = float(mine @ right / (right @ right))
        if not (mine - right).norm() <= RTOL * right.norm():
            told = f"step {number + 1}: gradient {ratio:.4g} times as large"
            if number:
                summed = _flat(taken[number]) + _flat(taken[number - 1])
                hint = "summed" if (mine - summed).norm() < 0.5 * (mine - right).norm() else "update"
            else:
                hint = "update"
            return Finding(name, False, text, told, hint if scaler or hint == "summed" else "scaled-anyway")
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
    _, taken, norms = _expected(values)
    limit, text = values["max_norm"], "norm at the step is min(norm, max_norm)"
    for number, (right, norm) in enumerate(zip(taken, norms, strict=True)):
        grads = _seen_gradients(seen, number)
        if len(grads) < len(right):
            return Finding("clipping", False, text, f"step {number + 1} was not taken with all gradients", "no-gradients")
        mine, wanted = _flat(grads), _flat(right)
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
    _, taken, _ = _expected(values)
    place = 0
    for number, (row, overflow) in enumerate(zip(rows, overflows, strict=True)):
        told, hint = "", "moved"
        if "update" not in row["calls"] or row["calls"].count("update") > 1:
            told, hint = f"step {number + 1}: update() ran {row['calls'].count('update')} times", "no-update"
        elif overflow and (row["stepped"] or not row["unchanged"]):
            told = f"step {number + 1} overflowed, and weights or momentum changed"
        elif not overflow and row["stepped"] != 1:
            told, hint = f"step {number + 1} was finite, and was not taken", "inf-left" if number and overflows[number - 1] else "moved"
        elif not overflow:
            mine, right = _flat(_seen_gradients(seen, place)), _flat(taken[place])
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
    return Finding("schedule", True, text, text)


def _judge_device(values: dict[str, Any], seen: Observation) -> Finding:
    wanted = values["dtype"] if values["device"] == "cpu" else "float32"
    formats = {note[1] for row in seen.values["rows"] for note in row["notes"] if note[0] == "forward"}
    where = "autocast for cuda leaves the CPU in float32" if wanted == "float32" else f"{wanted} on the CPU"
    return Finding("device and dtype", formats == {wanted}, where, ", ".join(sorted(formats)) or "no forward", "device")


def _judge(case: Case, seen: Observation) -> list[Finding]:
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


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """Norm of the gradient before clipping, and the norm that the optimizer saw."""
    if "clipping" not in (case.covers or ()) or not seen.values["rates"]:
        return None
    from labkit.figures import lines

    norms = _expected(case.values)[2]
    got = [float(_flat(grads).norm()) for number in range(len(seen.values["rates"])) if (grads := _seen_gradients(seen, number))]
    steps = range(1, len(norms) + 1)
    series = {"the loss's gradient": (steps, norms), "what the optimizer saw": (range(1, len(got) + 1), got)}
    drawn = lines(series, title="Norm of the gradient", x="step", y="L2 norm", log="y", limits={"max_norm": case.values["max_norm"]})
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if case.name != "gradients clipped to norm 0.5":
        return None
    norm = float(_flat(_seen_gradients(seen, 0)).norm())
    return f"norm {_expected(case.values)[2][0]:.3g} clipped to {norm:.3f} (max_norm {case.values['max_norm']:g}), overflows skipped"


register(Check(
    "amp.step",
    criteria=(
        Criterion("loss and update", "numbers", 1, "recomputed"),
        Criterion("under autocast", "technique", 0.75),
        Criterion("clipping", "technique", 0.75, "recomputed"),
        Criterion("overflow", "technique", 0.75, "recomputed"),
        Criterion("without a scaler", "cost", 0.25, "recomputed"),
        Criterion("device and dtype", "cost", 0.25),
        Criterion("schedule", "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=("torch.amp.GradScaler",),
    on_error=on_error,
    picture=_picture,
    summary=_summary,
))  # fmt: skip

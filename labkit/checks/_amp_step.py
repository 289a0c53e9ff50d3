"""Check "amp.step": one training step under autocast, with a scaler or without."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._amp_hints import HINTS, on_error
from labkit.checks._amp_net import DECAY, DTYPES, Net, ScriptedScaler, Watched, batch
from labkit.checks._amp_step_judge import expected, flat, judge, seen_gradients
from labkit.checks._core import Case, Check, Criterion, Observation, WrongResult, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    huge = 2.0**40  # more than any 16-bit gradient survives
    base = {"device": "cpu", "dtype": "float16", "steps": 4}
    steady, skips = [1000.0, 1000.0, 2000.0, 2000.0], [512.0, huge, huge, 256.0, huge, 64.0]
    # Two overflows at one scale, as at min_scale: it does not tell what became of a step.
    cases = [
        Case("4 steps in float16", base | {"scales": steady, "seed": seed()}, covers=("loss and update", "under autocast")),
        Case("gradients clipped to norm 0.5", base | {"scales": steady, "max_norm": 0.5, "seed": seed()}, covers=("clipping",)),
        Case("norm below the limit", base | {"scales": steady, "max_norm": 1e4, "seed": seed()}, covers=("clipping",)),
        Case("overflow in steps 2, 3 and 5", base | {"scales": skips, "steps": 6, "max_norm": 0.7, "schedule": True, "seed": seed()},
             covers=("overflow", "schedule")),
        Case("bfloat16 without a scaler", base | {"dtype": "bfloat16", "scales": None, "max_norm": 0.5, "schedule": True, "seed": seed()},
             covers=("without a scaler", "device and dtype")),
        Case("autocast for another device", base | {"device": "cuda", "scales": None, "steps": 1, "seed": seed()},
             covers=("device and dtype",)),
    ]  # fmt: skip
    if strict:
        first = [2 * huge, huge, 1024.0, 2048.0, 4096.0]
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
        inputs, targets = batch(values["seed"], number)
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


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """Norm of the gradient before clipping, and the norm that the optimizer saw."""
    if "clipping" not in (case.covers or ()) or not seen.values["rates"]:
        return None
    from labkit.figures import lines

    norms = expected(case.values)[2]
    got = [float(flat(grads).norm()) for number in range(len(seen.values["rates"])) if (grads := seen_gradients(seen, number))]
    steps = range(1, len(norms) + 1)
    series = {"the loss's gradient": (steps, norms), "what the optimizer saw": (range(1, len(got) + 1), got)}
    drawn = lines(series, title="Norm of the gradient", x="step", y="L2 norm", log="y", limits={"max_norm": case.values["max_norm"]})
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if case.name != "gradients clipped to norm 0.5":
        return None
    norm = float(flat(seen_gradients(seen, 0)).norm())
    return f"norm {expected(case.values)[2][0]:.3g} clipped to {norm:.3f} (max_norm {case.values['max_norm']:g}), overflows skipped"


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
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(judge),
    hints=HINTS,
    forbids=("torch.amp.GradScaler",),
    on_error=on_error,
    picture=bundled_first(_picture),
    summary=bundled_first(_summary),
))  # fmt: skip

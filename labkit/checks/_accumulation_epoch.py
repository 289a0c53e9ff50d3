"""Check "accumulation.epoch": windows of k micro-batches, a short last one, and the schedule that counts updates."""

from typing import TYPE_CHECKING, Any

import torch

from labkit.checks import _accumulation_tools as tools
from labkit.checks._accumulation_hints import HINTS, on_error
from labkit.checks._accumulation_weights import Fault, fault_of
from labkit.checks._accumulation_window import whole_batch
from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    cases = [
        Case("7 micro-batches in windows of 4, two epochs", {"kind": "tally", "count": 7, "k": 4, "epochs": 2, "seed": seed()}),
        Case("3 micro-batches in windows of 4", {"kind": "tally", "count": 3, "k": 4, "epochs": 2, "seed": seed()}),
        Case("two epochs with momentum", {"kind": "net", "count": 7, "k": 4, "epochs": 2, "rows": 5, "seed": seed()}),
    ]
    if strict:
        choices = [(6, 1), (5, 6), (9, 4), (8, 4), (1, 1)]
        cases += [
            Case(f"{n} micro-batches in windows of {k}", {"kind": "tally", "count": n, "k": k, "epochs": 2, "seed": seed()})
            for n, k in choices
        ]
        cases.append(Case("three epochs", {"kind": "net", "count": 11, "k": 3, "epochs": 3, "rows": 3, "seed": seed()}))
    return cases


def run_epochs(candidate: Any, values: dict[str, Any]) -> tuple[tools.Trace, list[dict[str, Any]], torch.Tensor]:
    """Call the candidate once per epoch on one model, optimizer and schedule: trace, a row per epoch, parameters at the end."""
    trace, count, k = tools.Trace(), values["count"], values["k"]
    if values["kind"] == "tally":
        model, batches, loss_fn = tools.Tally(count), tools.tally_batches(count, values["seed"]), tools.tally_loss(trace)
    else:
        model, batches = tools.make_net(values["seed"]), tools.net_batches(count, values["rows"], values["seed"])
        loss_fn = tools.net_loss(trace)
    optimizer = tools.make_optimizer(model)
    scheduler = tools.make_scheduler(optimizer)
    trace.watch(optimizer)
    rows = []
    for _ in range(values["epochs"]):
        first_event, first_step = len(trace.events), len(trace.gradients)
        before = tools.parameters_of(model)
        returned = candidate(model, list(batches), optimizer, loss_fn, k, scheduler)
        events = trace.events[first_event:]
        rows.append({
            "steps": len(trace.gradients) - first_step,
            "forward": events.count("forward"),
            "backward": events.count("backward"),
            "told": " ".join(events[:16]),
            "rate": float(optimizer.param_groups[0]["lr"]),
            "moved": not torch.equal(before, tools.parameters_of(model)),
        } | losses_row(returned, len(tools.windows_of(count, k))))  # fmt: skip
    return trace, rows, tools.parameters_of(model)


def losses_row(returned: Any, count: int) -> dict[str, Any]:
    try:
        return {"losses": tools.numbers_of(returned, count, "the mean loss")}
    except WrongResult as error:
        return {"losses": None, "loss_error": str(error), "loss_hint": error.hint}


def _probe(candidate: Any, case: Case) -> Observation:
    trace, rows, parameters = run_epochs(candidate, case.values)
    seen = Observation({"rows": rows, "rates": trace.rates, "graphs": trace.graphs()}, {"parameters": parameters})
    if trace.gradients:
        seen.tensors["gradients"] = torch.stack(trace.gradients)
    return seen


def _whole_windows(rates: list[float]) -> Any:
    """The judge's own epoch, a whole batch for each window, at the learning rates observed: the schedule is judged by itself."""
    observed = iter(rates)

    def epoch(model: Any, batches: list[Any], optimizer: Any, loss_fn: Any, k: int, scheduler: Any) -> list[float]:
        for start in range(0, len(batches), k):
            optimizer.param_groups[0]["lr"] = next(observed, tools.RATE)
            whole_batch(model, batches[start : start + k], optimizer, loss_fn)
        return []

    return epoch


# -- judge --


def steps_of(seen: Observation) -> list[list[torch.Tensor]]:
    """Gradients at each step, by epoch."""
    gradients, first, epochs = seen.tensors.get("gradients"), 0, []
    for row in seen.values["rows"]:
        epochs.append([] if gradients is None else list(gradients[first : first + row["steps"]]))
        first += row["steps"]
    return epochs


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values = case.values
    if values["kind"] == "net":
        return [_judge_net(values, seen)]
    full, last = _judge_weights(values, seen)
    return [
        *([full] if full else []),
        *([last] if last else []),
        *_judge_epochs(values, seen),
        judge_schedule(values, seen, len(tools.windows_of(values["count"], values["k"]))),
        _judge_once(values, seen),
        _judge_losses(values, seen),
    ]


def _judge_weights(values: dict[str, Any], seen: Observation) -> tuple[Finding | None, Finding | None]:
    """The first epoch: its full windows, and its last one where that is short."""
    steps, windows, k = steps_of(seen)[0], tools.windows_of(values["count"], values["k"]), values["k"]
    full, short = [w for w in windows if len(w) == k], [w for w in windows if len(w) < k]
    findings: list[Finding | None] = []
    kinds = (("full windows", full, f"each micro-batch 1/{k}"), ("last window", short, "one step, the mean of what is there"))
    for name, chosen, wanted in kinds:
        if not chosen:
            findings.append(None)
            continue
        fault = None
        for window in chosen:
            number = windows.index(window)
            if number >= len(steps):
                fault = Fault(f"steps: {len(steps)} for {len(windows)} windows", "flush" if name == "last window" else "no-step")
            else:
                fault = fault_of(steps[number], window, k)
                if fault and len(steps) >= values["count"] > len(windows):
                    fault = Fault(fault.text, "every")
                elif fault and fault.hint == "sum" and _losses_right(values, seen):
                    fault = Fault(fault.text, "only-logged")
                elif fault and fault.hint == "stale" and seen.values["rows"][0]["forward"] > values["count"]:
                    fault = Fault(fault.text, "again")
                fault = fault and Fault(f"step {number + 1}: {fault.text}", fault.hint)
            if fault:
                break
        findings.append(Finding(name, not fault, wanted, fault.text if fault else "as wanted", fault and fault.hint))
    return findings[0], findings[1]


def _judge_epochs(values: dict[str, Any], seen: Observation) -> list[Finding]:
    """Every epoch: its number of steps, and nothing in them from before."""
    name, windows, k = "every epoch", tools.windows_of(values["count"], values["k"]), values["k"]
    wanted = f"{len(windows)} steps, none with gradients of another window"
    for epoch, steps in enumerate(steps_of(seen)):
        if len(steps) != len(windows):
            hint = "flush" if len(steps) < len(windows) else "many-steps"
            return [Finding(name, False, wanted, f"epoch {epoch + 1}: steps of the optimizer: {len(steps)}", hint)]
        for number, (weights, window) in enumerate(zip(steps, windows, strict=True)):
            fault = fault_of(weights, window, k)
            if fault:
                hint = "stale" if fault.hint == "boundary" and epoch and not number else fault.hint
                return [Finding(name, False, wanted, f"epoch {epoch + 1}, step {number + 1}: {fault.text}", hint)]
    return [Finding(name, True, wanted, f"{len(windows)} steps, as wanted")]


def judge_schedule(values: dict[str, Any], seen: Observation, per_epoch: int, skipped: int = 0) -> Finding:
    """The learning rate at each step, and after the last: halved once for each update."""
    name, rates = "schedule", seen.values["rates"]
    updates = per_epoch * values["epochs"] - skipped
    wanted = f"{updates} steps of the schedule, each after its update"
    final = seen.values["rows"][-1]["rate"]
    expected = [tools.RATE * tools.DECAY**number for number in range(updates + 1)]
    taken = round(_log(final / tools.RATE), 6) + 0.0  # no negative zero
    observed = f"steps of the schedule: {taken:g}, of the optimizer: {len(rates)}"
    if taken != updates:
        hint = "schedule-never" if taken == 0 else "schedule-skipped" if skipped and taken > updates else "schedule-often"
        return Finding(name, False, wanted, observed, hint if taken >= 0 else "rate")
    right = len(rates) == updates and all(abs(a - b) < 1e-6 * b for a, b in zip(rates, expected, strict=False))
    if not right:
        told = ", ".join(f"{rate:.3g}" for rate in rates[:6])
        return Finding(name, False, wanted, f"learning rates at the updates: {told}", "schedule-early" if len(rates) == updates else "rate")
    return Finding(name, True, wanted, f"{taken:g} for {len(rates)} updates")


def _log(share: float) -> float:
    """How many times something was multiplied with DECAY."""
    return float(torch.log(torch.tensor(share, dtype=torch.float64)) / torch.log(torch.tensor(tools.DECAY, dtype=torch.float64)))


def _judge_once(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "one graph at a time", "forward, backward, forward, backward, ..."
    for row in seen.values["rows"]:
        if row["forward"] != values["count"] or row["backward"] != values["count"]:
            told = f"{values['count']} micro-batches: {row['forward']} forward, {row['backward']} backward"
            return Finding(name, False, wanted, told, "again" if row["backward"] > 1 or values["count"] == 1 else "graphs")
    graphs = seen.values["graphs"]
    told = f"at most {graphs} at once"
    return Finding(name, graphs <= 1, wanted, told, "graphs", f"In order: {seen.values['rows'][0]['told']}" if graphs > 1 else "")


def _window_means(values: dict[str, Any]) -> list[float]:
    batches = tools.tally_batches(values["count"], values["seed"])
    return [float(torch.stack([batches[j][1] for j in window]).mean()) for window in tools.windows_of(values["count"], values["k"])]


def _losses_right(values: dict[str, Any], seen: Observation) -> bool:
    """In the first epoch, in which no weight has moved before its loss was taken."""
    losses = seen.values["rows"][0]["losses"]
    return losses is not None and all(tools.same_number(a, b) for a, b in zip(losses, _window_means(values), strict=True))


def _judge_losses(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "losses", "the mean loss of each window, plain numbers"
    for row in seen.values["rows"]:
        if row["losses"] is None:
            return Finding(name, False, wanted, row["loss_error"], row["loss_hint"])
    if not _losses_right(values, seen):
        told = ", ".join(f"{loss:.3g}" for loss in seen.values["rows"][0]["losses"][:4])
        return Finding(name, False, wanted, f"first epoch: {told}", "loss-value")
    return Finding(name, True, wanted, "as wanted")


def _judge_net(values: dict[str, Any], seen: Observation) -> Finding:
    """Two or more epochs with momentum: the parameters of a run on whole batches."""
    name, wanted = "every epoch", "the parameters of whole batches"
    expected, _, parameters = run_epochs(_whole_windows(seen.values["rates"]), values)
    observed = seen.tensors.get("gradients")
    for number, right in enumerate(expected.gradients):
        if observed is None or number >= len(observed):
            return Finding(name, False, wanted, f"{number} steps, not {len(expected.gradients)}", "flush")
        if not tools.close(observed[number], right):
            ratio = tools.ratio_of(observed[number], right)
            told = f"step {number + 1}: the gradient is {f'{ratio:.3g} times' if ratio else 'not'} that of the whole batch"
            return Finding(name, False, wanted, told, "scale" if ratio else "stale")
    if not tools.close(seen.tensors["parameters"], parameters):
        return Finding(name, False, wanted, f"others after {values['epochs']} epochs", "net")
    return Finding(name, True, wanted, f"equal after {values['epochs']} epochs")


# -- what people see --


def draw_weights(case: Case, seen: Observation, title: str) -> "Figure | None":
    """The weights of every step of a tally, a row each."""
    from labkit.figures import step_weights

    windows = tools.windows_of(case.values["count"], case.values["k"])
    rows, frames, names = [], [], []
    for epoch, steps in enumerate(steps_of(seen)):
        for number, weights in enumerate(steps):
            window = windows[min(number, len(windows) - 1)]
            rows.append([float(weight) if torch.isfinite(weight) else float("nan") for weight in weights])
            frames.append((window[0], window[-1] + 1))
            names.append(f"epoch {epoch + 1}, step {number + 1}")
    if not rows:
        return None
    drawn = step_weights(rows, frames, title=title, names=names)
    drawn.set_label(drawn.alt)
    return drawn


def _picture(case: Case, seen: Observation) -> "Figure | None":
    if case.values["kind"] != "tally" or all(finding.passed for finding in _judge(case, seen)):
        return None
    return draw_weights(case, seen, "What each micro-batch weighs in each of your steps")


def _summary(case: Case, seen: Observation) -> str | None:
    if case.values["kind"] != "tally":
        return None
    windows = tools.windows_of(case.values["count"], case.values["k"])
    return f"{seen.values['rows'][0]['steps']} steps for {case.values['count']} micro-batches, the last of {len(windows[-1])} by their mean"


register(Check(
    "accumulation.epoch",
    criteria=(
        Criterion("full windows", "numbers", 0.75, "recomputed"),
        Criterion("last window", "technique", 1, "recomputed"),
        Criterion("every epoch", "technique", 0.5, "recomputed"),
        Criterion("schedule", "cost", 0.25),
        Criterion("one graph at a time", "cost", 0.25),
        Criterion("losses", "cost", 0.25, "recomputed"),
    ),
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(_judge),
    hints=HINTS,
    on_error=on_error,
    picture=bundled_first(_picture),
    summary=bundled_first(_summary),
))  # fmt: skip

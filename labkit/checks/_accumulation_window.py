"""Check "accumulation.window": one step of the optimizer from several micro-batches, one graph at a time."""

from typing import TYPE_CHECKING, Any

import torch

from labkit.checks import _accumulation_tools as tools
from labkit.checks._accumulation_hints import HINTS, on_error
from labkit.checks._accumulation_weights import fault_of
from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.recorder import Recorder, human_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = (24, 24, 24, 24, 24)
UNIT_ROWS = 24 * 4  # bytes of one activation, per row
SIZES, PIECES = (192, 384), (2, 8)


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    cases = [
        Case("windows of 4, 4, 1 and 3", {"kind": "tally", "windows": [4, 4, 1, 3], "seed": seed()}),
        Case("64 rows as 16 x 4", {"kind": "net", "windows": [4, 4, 4], "rows": 16, "seed": seed()}),
        Case("2 and 8 pieces", {"kind": "memory", "seed": seed()}),
    ]
    if strict:
        cases += [
            Case("windows of 1, 7, 8, 2 and 1", {"kind": "tally", "windows": [1, 7, 8, 2, 1], "seed": seed()}),
            Case("256 rows as 8 x 32", {"kind": "net", "windows": [32, 32], "rows": 8, "seed": seed()}),
            Case("double precision, 15 rows as 5 x 3", {"kind": "net", "windows": [3, 3, 3], "rows": 5, "seed": seed(), "double": True}),
        ]
    return cases


def _run(candidate: Any, values: dict[str, Any]) -> tuple[tools.Trace, list[dict[str, Any]], torch.Tensor]:
    """Call the candidate once per window, on one model and one optimizer: trace, what came back, parameters at the end."""
    trace, count = tools.Trace(), sum(values["windows"])
    if values["kind"] == "tally":
        model, batches, loss_fn = tools.Tally(count), tools.tally_batches(count, values["seed"]), tools.tally_loss(trace)
    else:
        model, batches = tools.make_net(values["seed"]), tools.net_batches(count, values["rows"], values["seed"])
        loss_fn = tools.net_loss(trace)
        if values.get("double"):
            model, batches = model.double(), [tuple(part.double() for part in batch) for batch in batches]
    optimizer = tools.make_optimizer(model)
    trace.watch(optimizer)
    rows, start = [], 0
    for size in values["windows"]:
        first_event, first_step = len(trace.events), len(trace.gradients)
        returned = candidate(model, batches[start : start + size], optimizer, loss_fn)
        start += size
        events = trace.events[first_event:]
        rows.append({
            "steps": len(trace.gradients) - first_step,
            "forward": events.count("forward"),
            "backward": events.count("backward"),
            "told": " ".join(events[:12]),
        } | loss_row(returned))  # fmt: skip
    return trace, rows, tools.parameters_of(model)


def loss_row(returned: Any) -> dict[str, Any]:
    try:
        return {"loss": tools.number_of(returned, "the mean loss of the window")}
    except WrongResult as error:
        return {"loss": None, "loss_error": str(error), "loss_hint": error.hint}


def _probe(candidate: Any, case: Case) -> Observation:
    if case.values["kind"] == "memory":
        return _probe_memory(candidate, case.values["seed"])
    trace, rows, parameters = _run(candidate, case.values)
    seen = Observation({"rows": rows, "rates": trace.rates, "graphs": trace.graphs()}, {"parameters": parameters})
    if trace.gradients:
        seen.tensors["gradients"] = torch.stack(trace.gradients)
    return seen


def one_peak(candidate: Any, seed: int, rows: int, pieces: int) -> tuple[int, tools.Trace, Any]:
    """Peak bytes born in one window of `pieces` micro-batches of `rows` rows, after a first one that made what stays."""
    trace, model = tools.Trace(), tools.make_net(seed, WIDE)
    loss_fn, optimizer = tools.net_loss(trace), tools.make_optimizer(model)
    candidate(model, tools.net_batches(2, 4, seed, WIDE[0], WIDE[-1]), optimizer, loss_fn)
    trace.events.clear()
    batches = tools.net_batches(pieces, rows, seed, WIDE[0], WIDE[-1])
    with Recorder(watch=[model, optimizer, *(part for batch in batches for part in batch)]) as recorder:
        with recorder.phase("window"):
            candidate(model, batches, optimizer, loss_fn)
    return recorder.recording.peak("window", born=True), trace, recorder.recording


def whole_batch(model: Any, batches: list[Any], optimizer: Any, loss_fn: Any) -> None:
    """The plain step: all rows at once."""
    loss_fn(model, tools.joined(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def reference(model: Any, batches: list[Any], optimizer: Any, loss_fn: Any) -> None:
    """The judge's own window."""
    for batch in batches:
        (loss_fn(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _probe_memory(candidate: Any, seed: int) -> Observation:
    seen, table = Observation(), []
    for rows in SIZES:
        for pieces in PIECES:
            peak, trace, recording = one_peak(candidate, seed, rows, pieces)
            table.append({"rows": rows, "pieces": pieces, "peak": peak, "graphs": trace.graphs(),
                          "forward": trace.events.count("forward"), "told": trace.told()})  # fmt: skip
    seen.values["table"] = table
    seen.recordings["yours"] = recording
    _, _, seen.recordings["one batch"] = one_peak(whole_batch, seed, SIZES[-1], PIECES[-1])
    return seen


# -- judge --


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values = case.values
    if values["kind"] == "memory":
        return [_judge_memory(values["seed"], seen)]
    rows = seen.values["rows"]
    return [
        _judge_tally(values, seen) if values["kind"] == "tally" else _judge_net(values, seen),
        _judge_steps(values, seen),
        _judge_once(values, rows),
        _judge_loss(values, rows, seen),
    ]


def _weights(values: dict[str, Any], seen: Observation) -> Any:
    """Pairs (window, weights) of the first step of each call; None where a call made none."""
    gradients, index, start = seen.tensors.get("gradients"), 0, 0
    for size, row in zip(values["windows"], seen.values["rows"], strict=True):
        yield range(start, start + size), None if gradients is None or not row["steps"] else gradients[index]
        index, start = index + row["steps"], start + size


def _judge_tally(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "gradient", "that of the whole batch, in every step"
    for number, (window, weights) in enumerate(_weights(values, seen)):
        row = seen.values["rows"][number]
        if weights is None:
            return Finding(name, False, wanted, f"call {number + 1}: no step", "no-step")
        fault = fault_of(weights, window, len(window))
        if fault:
            hint = "every" if row["steps"] > 1 else fault.hint
            if hint == "sum" and _loss_right(values, number, row["loss"]):
                hint = "only-logged"
            return Finding(name, False, wanted, f"call {number + 1}: {fault.text}", hint)
    return Finding(name, True, wanted, f"equal, {len(values['windows'])} windows")


def _judge_net(values: dict[str, Any], seen: Observation) -> Finding:
    """Every gradient and the parameters at the end, against steps on whole batches."""
    name, wanted = "gradient", "that of the whole batch, in every step"
    expected, _, parameters = _run(lambda *given: whole_batch(*given) or 0.0, values)
    observed = seen.tensors.get("gradients")
    if observed is None or len(observed) < len(values["windows"]):
        return Finding(name, False, wanted, f"{0 if observed is None else len(observed)} steps", "no-step")
    if len(observed) > len(values["windows"]):
        return Finding(name, False, wanted, f"{len(observed)} steps for {len(values['windows'])} windows", "many-steps")
    if any(abs(rate - tools.RATE) > 1e-9 for rate in seen.values["rates"]):
        rates = ", ".join(f"{rate:.3g}" for rate in sorted(set(seen.values["rates"])))
        return Finding(name, False, wanted, f"learning rates {rates}, not {tools.RATE}", "rate")
    for number, right in enumerate(expected.gradients):
        if not tools.close(observed[number], right):
            ratio = tools.ratio_of(observed[number], right)
            told = f"{ratio:.3g} times it" if ratio else "another one"
            return Finding(name, False, wanted, f"step {number + 1}: {told}", "scale" if ratio else "net")
    if not tools.close(seen.tensors["parameters"], parameters):
        return Finding(name, False, wanted, "the parameters after the last step differ", "net")
    return Finding(name, True, wanted, f"equal, {len(values['windows'])} steps with momentum")


def _loss_right(values: dict[str, Any], number: int, loss: float | None) -> bool:
    """Whether a tally's returned loss is the mean over the window, give or take what the steps before have moved."""
    start = sum(values["windows"][:number])
    batches = tools.tally_batches(sum(values["windows"]), values["seed"])[start : start + values["windows"][number]]
    return loss is not None and tools.same_number(loss, float(torch.stack([b[1] for b in batches]).mean()))


def _judge_steps(values: dict[str, Any], seen: Observation) -> Finding:
    rows = seen.values["rows"]
    wrong = [row for row in rows if row["steps"] != 1]
    if wrong:
        hint = "no-step" if not wrong[0]["steps"] else "many-steps"
        return Finding("one step", False, "1 step of the optimizer per window", f"{wrong[0]['steps']}: {wrong[0]['told']}", hint)
    return Finding("one step", True, "1 step of the optimizer per window", "1")


def _judge_once(values: dict[str, Any], rows: list[dict[str, Any]]) -> Finding:
    name, wanted = "each piece once", "one forward and one backward per micro-batch"
    for size, row in zip(values["windows"], rows, strict=True):
        if row["forward"] != size or row["backward"] != size:
            return Finding(name, False, wanted, f"{size} micro-batches: {row['forward']} forward, {row['backward']} backward", "again")
    return Finding(name, True, wanted, "one each")


def _judge_loss(values: dict[str, Any], rows: list[dict[str, Any]], seen: Observation) -> Finding:
    name, wanted = "loss", "the mean loss of the window, a plain number"
    for row in rows:
        if row["loss"] is None:
            return Finding(name, False, wanted, row["loss_error"], row["loss_hint"])
    if values["kind"] == "tally":
        for number, row in enumerate(rows):
            if not _loss_right(values, number, row["loss"]):
                return Finding(name, False, wanted, f"call {number + 1}: {row['loss']:.4g}", "loss-value")
    return Finding(name, True, wanted, "the mean")


def _judge_memory(seed: int, seen: Observation) -> Finding:
    name = "one graph at a time"
    table = seen.values["table"]
    for rows in SIZES:
        few, many = (row for row in table if row["rows"] == rows)
        unit = rows * UNIT_ROWS
        own, _, _ = one_peak(reference, seed, rows, PIECES[0])
        wanted = f"peak of {PIECES[1]} pieces at most one activation over that of {PIECES[0]}"
        observed = f"{rows} rows each: {human_bytes(few['peak'])} for {PIECES[0]} pieces, {human_bytes(many['peak'])} for {PIECES[1]}"
        if many["peak"] - few["peak"] > unit or many["peak"] > own + unit:  # a second set of gradients is a third of that
            hint = "graphs" if many["graphs"] > 1 else "joined" if many["forward"] < PIECES[1] else "kept"
            detail = f"Alive at the peak: {seen.recordings['yours'].alive_summary('peak')}. In order: {many['told']}"
            return Finding(name, False, wanted, observed, hint, detail)
    small, large = (human_bytes(row["peak"]) for row in table if row["pieces"] == PIECES[1])
    told = f"{small} and, at twice the rows, {large}, for {PIECES[0]} and {PIECES[1]} pieces"
    return Finding(name, True, "flat in the number of pieces, linear in their size", told)


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """The weights of a wrong step, or memory over time beside the whole batch's."""
    if case.values["kind"] == "tally":
        pairs = [(window, weights) for window, weights in _weights(case.values, seen) if weights is not None]
        if not any(fault_of(weights, window, len(window)) for window, weights in pairs):
            return None
        from labkit.figures import step_weights

        drawn = step_weights([weights.tolist() for _, weights in pairs], [(w[0], w[-1] + 1) for w, _ in pairs],
                             title="What each micro-batch weighs in each of your steps")  # fmt: skip
    elif case.values["kind"] == "memory":
        from labkit.figures import compare_memory

        drawn = compare_memory(seen.recordings, "one batch", f"{PIECES[1]} x {SIZES[-1]} rows", born=True)
    else:
        return None
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if case.values["kind"] != "memory":
        return None
    few, many = seen.values["table"][-2:]
    return (f"peak {human_bytes(few['peak'])} for {PIECES[0]} pieces, {human_bytes(many['peak'])} for {PIECES[1]} "
            f"(at most {human_bytes(few['peak'] + SIZES[-1] * UNIT_ROWS)}), 1 step per window")  # fmt: skip


register(Check(
    "accumulation.window",
    criteria=(
        Criterion("gradient", "numbers", 0.75, "recomputed"),
        Criterion("one graph at a time", "technique", 1.25, "memory"),
        Criterion("one step", "cost", 0.25),
        Criterion("each piece once", "cost", 0.25),
        Criterion("loss", "cost", 0.5, "recomputed"),
    ),
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(_judge),
    hints=HINTS,
    on_error=on_error,
    picture=bundled_first(_picture),
    summary=bundled_first(_summary),
))  # fmt: skip

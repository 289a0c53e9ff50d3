"""Check "checkpointing.checkpoint": one call of `fn(*args)` that keeps its inputs and runs again in backward."""

from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._checkpointing_hints import HINTS, on_error, ran_others, random_hint
from labkit.checks._checkpointing_nets import UNIT, born_summary, close, difference, make_net
from labkit.checks._checkpointing_scenarios import LAYERS, SCENARIOS, call_plainly, memory
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._threads import one_thread
from labkit.recorder import Recorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN_UNITS = 2 * LAYERS + 1  # between forward and backward, measured
KEPT_UNITS = 4.5  # the input, the border, the output, and one and a half more for who clones or keeps another reference


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    cases = [
        Case("two calls of four layers", {"scenario": "memory", "seed": seed()}),
        Case("dropout", {"scenario": "dropout", "seed": seed(), "depth": 4}, covers=("random numbers",)),
        Case("autocast", {"scenario": "autocast", "seed": seed(), "dtypes": ["bfloat16", "float16"]}, covers=("autocast",)),
        Case("mixed arguments", {"scenario": "arguments", "seed": seed(), "times": 3}, covers=("arguments",)),
        Case("several outputs", {"scenario": "outputs", "seed": seed(), "used": ["both", "second"]}, covers=("several outputs",)),
    ]
    if strict:
        cases += [
            Case("dropout, deeper", {"scenario": "dropout", "seed": seed(), "depth": 7}, covers=("random numbers",)),
            Case("no autocast", {"scenario": "autocast", "seed": seed(), "dtypes": ["float32"]}, covers=("autocast",)),
            Case("other arguments", {"scenario": "arguments", "seed": seed(), "times": 0}, covers=("arguments",)),
            Case("first output only", {"scenario": "outputs", "seed": seed(), "used": ["first"]}, covers=("several outputs",)),
        ]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    values = case.values
    torch.set_num_threads(1)  # tensors this small gain nothing from more, and wait long for them on a busy machine
    if values["scenario"] != "memory":
        return SCENARIOS[values["scenario"]](candidate, values)
    mine, theirs = Recorder(), Recorder()
    seen = memory(candidate, values, mine)
    memory(call_plainly, values, theirs)
    recording = mine.recording
    seen.values |= {
        "between": recording.at("between", born=True),
        "after": recording.at("after", born=True),
        "peak_forward": recording.peak("forward", born=True),
    }
    seen.recordings = {"yours": recording, "plain": theirs.recording}
    return seen


# -- judge --


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    scenario = case.values["scenario"]
    expected = SCENARIOS[scenario](call_plainly, case.values)
    judges = {
        "memory": _judge_memory,
        "dropout": _judge_dropout,
        "autocast": _judge_autocast,
        "arguments": _judge_arguments,
        "outputs": _judge_outputs,
    }
    return [*judges[scenario](case, expected, seen), _judge_runs(case, expected, seen)]


def _judge_memory(case: Case, expected: Observation, seen: Observation) -> list[Finding]:
    net = make_net("silu", LAYERS, case.values["seed"])
    wrong = difference(net, expected.tensors, seen.tensors)
    numbers = Finding("output and gradients", not wrong, "equal the plain run's", wrong[0] if wrong else "equal", wrong and wrong[1])
    if wrong and wrong[1] != "output" and ran_others(seen.values["backward"], LAYERS):
        told = f"{wrong[0]}: some layers ran again more than once, others never"
        numbers = Finding("output and gradients", False, "equal the plain run's", told, "other-call")
    return [numbers, _judge_kept(seen), _judge_again(seen)]


def _judge_kept(seen: Observation) -> Finding:
    between, after, peak_forward = (seen.values[key] / UNIT for key in ("between", "after", "peak_forward"))
    again = bool(seen.values["backward"])
    expected = f"at most {KEPT_UNITS:g} activations (plain {PLAIN_UNITS})"
    if between > KEPT_UNITS:
        hint = "kept" if again else "plain"
        detail = f"Alive between forward and backward: {born_summary(seen.recordings['yours'], 'between')}."
        return Finding("kept for backward", False, expected, f"{between:.3g} activations", hint, detail)
    if peak_forward > PLAIN_UNITS / 2:
        told = f"{between:.3g} at the end of forward, but {peak_forward:.3g} during it"
        return Finding("kept for backward", False, expected, told, "grad-in-forward")
    if after > PLAIN_UNITS / 2:  # what ctx holds may live as long as the output does; all of the inside may not
        detail = f"Alive after backward: {born_summary(seen.recordings['yours'], 'after')}."
        return Finding("kept for backward", False, expected, f"{after:.3g} activations after backward", "not-released", detail)
    return Finding("kept for backward", True, expected, f"{between:.3g} activations")


def _judge_again(seen: Observation) -> Finding:
    again = set(seen.values["backward"])
    observed = f"{len(again)} of {LAYERS} layers"
    return Finding("runs again", again == set(range(LAYERS)), "every layer, in backward", observed, "not-recomputed")


def _judge_runs(case: Case, expected: Observation, seen: Observation) -> Finding:
    """In every scenario: fn runs once in forward, as the plain call does, and at most once more in backward."""
    name, wanted = "forward calls", "once in forward, once in backward"
    worst = 0.0
    for plainly, mine in zip(expected.values["runs"], seen.values["runs"], strict=True):
        layers = len(set(plainly["forward"]))
        calls = (len(mine["forward"]) + len(mine["backward"])) / layers
        worst = max(worst, calls)
        once = sorted(mine["forward"]) == sorted(plainly["forward"])
        if not once or calls > 2 or len(mine["backward"]) > len(set(mine["backward"])):
            hint = "calls-outputs" if case.values["scenario"] == "outputs" else "calls"
            observed = f"{calls:.2f} per layer" + ("" if once else ", and not once each in forward")
            return Finding(name, False, wanted, f"{case.name}: {observed}", hint)
    return Finding(name, True, wanted, f"{worst:.2f} per layer")


def _judge_dropout(case: Case, expected: Observation, seen: Observation) -> list[Finding]:
    name, wanted = "random numbers", "masks and later numbers as in the plain run"
    net = make_net("dropout", case.values["depth"], case.values["seed"], batch=32)
    wrong = difference(net, expected.tensors, seen.tensors, start=1.0)
    if wrong:
        hint = "scaled" if wrong[1] == "scaled" else random_hint(seen.values["calls"], wrong[1] == "output")
        return [Finding(name, False, wanted, f"dropout: {wrong[0]}", hint)]
    if seen.values["changed"]:
        return [Finding(name, False, "everything left as found", f"changed: {', '.join(seen.values['changed'])}", "trace")]
    for when, key in (("forward", "between"), ("backward", "after")):
        if not close(seen.tensors[key], expected.tensors[key]):
            return [Finding(name, False, wanted, f"the next random number after {when} is another one", "random-after")]
    return [Finding(name, True, wanted, "masks and later numbers equal")]


def _judge_autocast(case: Case, expected: Observation, seen: Observation) -> list[Finding]:
    name, wanted = "autocast", "the same precision in both runs"
    for row in seen.values["rows"]:
        first = {call[1]: call[5] for call in row["calls"] if call[0] == "forward"}
        other = [call for call in row["calls"] if call[0] == "backward" and call[5] and call[5] != first.get(call[1])]
        if other:
            told = f"layer {other[0][1]}: {first.get(other[0][1])} in forward, {other[0][5]} when run again"
            return [Finding(name, False, wanted, told, "precision")]
        for key in ("out", "parameters", "x"):
            if not close(seen.tensors[f"{row['dtype']}/{key}"], expected.tensors[f"{row['dtype']}/{key}"], 2e-2):
                what = "the output" if key == "out" else "a gradient"
                return [Finding(name, False, wanted, f"{what} under {row['dtype']} autocast differs from the plain run's", "precision")]
        if row["changed"]:
            return [Finding(name, False, "everything left as found", f"changed: {', '.join(row['changed'])}", "trace")]
    return [Finding(name, True, wanted, "the same")]


def _judge_arguments(case: Case, expected: Observation, seen: Observation) -> list[Finding]:
    name, wanted = "arguments", "each argument and its gradient as in the plain run"
    received = seen.values["received"]
    if any(got != expected.values["received"][0] for got in received):
        return [Finding(name, False, wanted, "fn received other arguments than it was given", "returns")]
    readable = {"out": "the output", "x": "the first argument's gradient", "second": "a later argument's gradient",
                "parameters": "the parameters' gradient"}  # fmt: skip
    for key, what in readable.items():
        if not close(seen.tensors[key], expected.tensors[key]):
            return [Finding(name, False, wanted, f"{what} differs", "output" if key == "out" else "returns")]
    if not seen.values["frozen"]:
        return [Finding(name, False, wanted, "an argument that asked for no gradient got one", "frozen")]
    return [Finding(name, True, wanted, "as in the plain run")]


def _judge_outputs(case: Case, expected: Observation, seen: Observation) -> list[Finding]:
    name, wanted = "several outputs", "each output and its gradient as in the plain run"
    for used in case.values["used"]:
        for key in ("y", "best", "z", "norm", "x", "parameters"):
            if not close(seen.tensors[f"{used}/{key}"], expected.tensors[f"{used}/{key}"]):
                what = "a gradient differs" if key in ("x", "parameters") else "an output differs"
                return [Finding(name, False, wanted, f"{what} when the loss uses {used} of them", "outputs")]
    return [Finding(name, True, wanted, "as in the plain run")]


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """Memory over time of the two checkpointed calls, over the plain run."""
    if not seen.recordings:
        return None
    from labkit.figures import compare_memory

    drawn = compare_memory(seen.recordings, "plain", f"One training step, two calls of {LAYERS // 2} layers", born=True)
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if case.values["scenario"] != "memory":
        return None
    calls = (len(seen.values["forward"]) + len(seen.values["backward"])) / LAYERS
    return f"{seen.values['between'] / UNIT:.3g} activations kept (plain {PLAIN_UNITS}), {calls:.2f} forward calls per layer"


register(Check(
    "checkpointing.checkpoint",
    criteria=(
        Criterion("output and gradients", "numbers", 1, "recomputed"),
        Criterion("kept for backward", "technique", 1, "memory"),
        Criterion("runs again", "technique", 0.5),
        Criterion("forward calls", "cost", 0.5),
        Criterion("random numbers", "cost", 0.5, "recomputed"),
        Criterion("autocast", "cost", 0.5, "recomputed"),
        Criterion("arguments", "cost", 0.5, "recomputed"),
        Criterion("several outputs", "cost", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS | {"output": "Call your `checkpoint` and `fn` on the same tensor and compare. What does each return?"},
    forbids=("torch.utils.checkpoint",),
    on_error=on_error,
    picture=_picture,
    summary=_summary,
))  # fmt: skip

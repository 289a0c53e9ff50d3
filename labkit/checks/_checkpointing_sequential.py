"""Check "checkpointing.sequential": many layers, one activation kept per segment."""

import math
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._checkpointing_hints import HINTS, on_error, ran_others, random_hint
from labkit.checks._checkpointing_nets import (
    TOLERANCE,
    Net,
    born_summary,
    close,
    difference,
    make_net,
    named,
    of,
    plain,
    plain_peak,
    run_step,
    settings_of,
)
from labkit.checks._checkpointing_segments import judge_segments, lengths, plain_allowed
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._threads import one_thread
from labkit.recorder import Recorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS = (16, 36, 64, 144)
SLOPE, SHARE = 0.62, 0.25  # Chen et al. 2016: memory grows like sqrt(n); plain grows like n
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    depths = [(n, math.isqrt(n)) for n in DEPTHS]
    splits = [(9, 5), (10, 4), (9, 6), (7, 7), (11, 1)] + ([(13, 6), (23, 3), (3, 2), (1, 1), (50, 7), (16, 12)] if strict else [])
    uneven = [{"depth": depth, "segments": segments, "seed": seed()} for depth, segments in splits]
    cases = [
        Case("depths 16 to 144", {"kind": "silu", "depths": depths, "seed": seed()}),
        Case("uneven splits", {"splits": uneven}, covers=("segments",)),
        Case("dropout", {"kind": "dropout", "depth": 10, "segments": 3, "seed": seed()}, covers=("random numbers",)),
        Case("input without gradient", {"kind": "mixed", "depth": 12, "segments": 4, "seed": seed(), "grad": False},
             covers=("other layers and inputs",)),
        Case("frozen, in-place and view layers", {"kind": "mixed", "depth": 10, "segments": 3, "seed": seed(), "start": 1.0},
             covers=("other layers and inputs",)),
    ]  # fmt: skip
    if strict:
        cases += [
            Case("double precision", {"kind": "mixed", "depth": 11, "segments": 4, "seed": seed(), "dtype": "float64"},
                 covers=("other layers and inputs",)),
            Case("bfloat16", {"kind": "silu", "depth": 9, "segments": 3, "seed": seed(), "dtype": "bfloat16"},
                 covers=("other layers and inputs",)),
            Case("dropout everywhere", {"kind": "dropout", "depth": 17, "segments": 17, "seed": seed()}, covers=("random numbers",)),
        ]  # fmt: skip
    return cases


def _net(values: dict[str, Any]) -> Net:
    return make_net(
        values["kind"],
        values["depth"],
        values["seed"],
        batch=32,
        dtype=DTYPES[values.get("dtype", "float32")],
        input_needs_grad=values.get("grad", True),
        watch_random=values["kind"] == "dropout",
    )


def _probe(candidate: Any, case: Case) -> Observation:
    values = case.values
    torch.set_num_threads(1)  # tensors this small gain nothing from more, and wait long for them on a busy machine
    if "depths" in values:
        return probe_depths(candidate, values)
    if "splits" in values:
        return _probe_splits(candidate, values["splits"])
    net = _net(values)
    before = settings_of(net.layers)
    result = run_step(net, lambda layers, x: candidate(layers, x, values["segments"]), values["seed"], start=values.get("start", 0.0))
    after = settings_of(net.layers)
    changed = [name for name in before if before[name] != after[name]]
    if net.x.requires_grad != values.get("grad", True):
        changed.append("requires_grad of x")
    return Observation({"calls": net.spy.calls, "changed": changed}, result)


def probe_depths(candidate: Any, values: dict[str, Any]) -> Observation:
    """Peaks of one step at every depth, and both recordings of the deepest."""
    rows, tensors, recordings = [], {}, {}
    for depth, segments in values["depths"]:
        net = make_net(values["kind"], depth, values["seed"] + depth)
        extra = () if segments is None else (segments,)
        recorder = Recorder()
        result = run_step(net, lambda layers, x, extra=extra: candidate(layers, x, *extra), values["seed"], recorder)
        tensors |= named(str(depth), result)
        recording = recorder.recording
        rows.append({
            "depth": depth,
            "segments": segments,
            "peak": recording.peak(born=True),
            "between": recording.at("between", born=True),
            "forward": net.spy.indices("forward"),
            "backward": net.spy.indices("backward"),
        })  # fmt: skip
        recordings["yours"] = recording
    net, recorder = make_net(values["kind"], depth, values["seed"] + depth), Recorder()
    run_step(net, plain, values["seed"], recorder)
    return Observation({"rows": rows}, tensors, recordings | {"plain": recorder.recording})


def _probe_splits(candidate: Any, splits: list[dict[str, Any]]) -> Observation:
    rows, tensors = [], {}
    for number, split in enumerate(splits):
        net = make_net("silu", split["depth"], split["seed"], batch=8)
        result = run_step(net, lambda layers, x, k=split["segments"]: candidate(layers, x, k), 0)
        tensors |= named(str(number), result)
        rows.append(split | {"forward": net.spy.indices("forward"), "backward": net.spy.indices("backward")})
    return Observation({"rows": rows}, tensors)


# -- judge --


@one_thread()
def _judge(case: Case, seen: Observation) -> list[Finding]:
    values = case.values
    if "depths" in values:
        return [*judge_gradients(values, seen), *_judge_memory(seen), *_judge_calls(seen.values["rows"])]
    if "splits" in values:
        return [_judge_splits(values["splits"], seen)]
    net, start = _net(values), values.get("start", 0.0)
    expected = run_step(net, plain, values["seed"], start=start)
    if values["kind"] == "dropout":
        return [_judge_random(net, expected, seen)]
    wrong = difference(net, expected, seen.tensors, TOLERANCE if net.x.dtype != torch.bfloat16 else 2e-2, start)
    name = "other layers and inputs"
    if wrong:
        starved = not values.get("grad", True) and wrong[1] in ("input-grad", "parameter-grads")
        hint = "input-without-grad" if starved else wrong[1]
        return [Finding(name, False, "gradients as in the plain run", f"{case.name}: {wrong[0]}", hint)]
    if seen.values["changed"]:
        return [Finding(name, False, "everything left as found", f"changed: {', '.join(seen.values['changed'])}", "trace")]
    return [Finding(name, True, "gradients as in the plain run", "as in the plain run")]


def judge_gradients(values: dict[str, Any], seen: Observation) -> list[Finding]:
    """The numbers at every depth, against a plain run of the judge's own."""
    expected_text = "equal the plain run's"
    for row in seen.values["rows"]:
        depth = row["depth"]
        net = make_net(values["kind"], depth, values["seed"] + depth)
        wrong = difference(net, run_step(net, plain, values["seed"]), of(str(depth), seen.tensors))
        if wrong:
            if wrong[1] != "output" and row["segments"] and ran_others(row["backward"], depth):
                return [Finding("gradients", False, expected_text, f"{depth} layers: {_told_runs(row)}", "other-layers")]
            return [Finding("gradients", False, expected_text, f"{depth} layers: {wrong[0]}", wrong[1])]
    return [Finding("gradients", True, expected_text, f"equal, {len(values['depths'])} depths")]


def _told_runs(row: dict[str, Any]) -> str:
    """Which layers ran again, and which did not, for a row in which some did more than once."""
    again = row["backward"]
    most = max(again.count(index) for index in again)
    return f"{row['depth'] - len(set(again))} layers never run again in backward, others {most} times"


def slope_of(rows: list[dict[str, Any]]) -> float:
    """Exponent of depth in the peak: the least-squares slope of log(peak) over log(depth)."""
    points = [(math.log(row["depth"]), math.log(max(row["peak"], 1))) for row in rows]
    mean_x, mean_y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def _judge_memory(seen: Observation) -> list[Finding]:
    rows = seen.values["rows"]
    slope, deep = slope_of(rows), rows[-1]
    share = deep["peak"] / plain_peak(deep["depth"])
    passed = slope <= SLOPE and share <= SHARE
    observed = f"grows like depth^{slope:.2f}; at {deep['depth']} layers {share:.0%} of the plain run's"
    hint = None if passed else _memory_hint(deep)
    detail = "" if passed else told_alive(seen, deep)
    expected = f"at most depth^{SLOPE}, at most {SHARE:.0%}"
    return [Finding("peak against depth", passed, expected, observed, hint, detail)]


def _memory_hint(deep: dict[str, Any]) -> str:
    """Which of the ways to fail this was: nothing recomputed, too much kept before backward, the wrong split, or nothing let go."""
    again = lengths(deep["backward"])
    if not again:
        return "plain"
    if deep["between"] > plain_peak(deep["depth"]) / 3:
        return "boundaries" if max(again) == 1 else "kept"
    return "one-segment" if max(again) > deep["depth"] / 3 else "not-released"


def told_alive(seen: Observation, deep: dict[str, Any]) -> str:
    """What was alive at the peak, from the deepest recording."""
    recording = seen.recordings.get("yours")
    return f"Alive at the peak ({deep['depth']} layers): {born_summary(recording, 'peak')}." if recording else ""


def _judge_calls(rows: list[dict[str, Any]]) -> list[Finding]:
    deep = rows[-1]
    depth, tail = deep["depth"], plain_allowed(deep["depth"], deep["segments"])
    rerun = len(set(deep["backward"]))
    again = Finding(
        "runs forward again",
        rerun >= depth - tail,
        f"at least {depth - tail} of {depth} layers, in backward",
        f"{rerun} of {depth} layers",
        "plain-segments" if rerun else "not-recomputed",
    )
    worst = max((len(row["forward"]) + len(row["backward"])) / row["depth"] for row in rows)
    once = all(sorted(row["forward"]) == list(range(row["depth"])) for row in rows)
    observed = f"{worst:.2f} per layer" + ("" if once else ", and not once each in forward")
    few = Finding("forward calls", worst <= 2 and once, "at most 2 per layer", observed, "calls")
    return [again, few, judge_segments([deep])]


def _judge_splits(splits: list[dict[str, Any]], seen: Observation) -> Finding:
    for number, split in enumerate(splits):
        net = make_net("silu", split["depth"], split["seed"], batch=8)
        wrong = difference(net, run_step(net, plain, 0), of(str(number), seen.tensors))
        if wrong:
            told = f"{split['depth']} layers in {split['segments']}: {wrong[0]}"
            return Finding("segments", False, "every layer once, in order", told, "skipped")
    return judge_segments(seen.values["rows"])


def _judge_random(net: Net, expected: dict[str, torch.Tensor], seen: Observation) -> Finding:
    name, wanted = "random numbers", "masks and later numbers as in the plain run"
    wrong = difference(net, expected, seen.tensors)
    if wrong:
        return Finding(name, False, wanted, f"dropout: {wrong[0]}", random_hint(seen.values["calls"], wrong[1] == "output"))
    if not close(seen.tensors["between"], expected["between"]) or not close(seen.tensors["after"], expected["after"]):
        when = "forward" if not close(seen.tensors["between"], expected["between"]) else "backward"
        return Finding(name, False, wanted, f"the next random number after {when} is another one", "random-after")
    return Finding(name, True, wanted, "masks and later numbers equal")


# -- what people see --


def picture(case: Case, seen: Observation) -> "Figure | None":
    """Memory over time of the deepest run, over the plain run."""
    if set(seen.recordings) != {"plain", "yours"}:
        return None
    from labkit.figures import compare_memory

    deep = seen.values["rows"][-1]["depth"]
    drawn = compare_memory(seen.recordings, "plain", f"One training step of {deep} layers", born=True)
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if "depths" not in case.values:
        return None
    rows = seen.values["rows"]
    deep = rows[-1]
    calls = (len(deep["forward"]) + len(deep["backward"])) / deep["depth"]
    share = deep["peak"] / plain_peak(deep["depth"])
    return f"peak at {deep['depth']} layers {share:.0%} of plain (at most {SHARE:.0%}), {calls:.2f} forward calls per layer (at most 2)"


register(Check(
    "checkpointing.sequential",
    criteria=(
        Criterion("gradients", "numbers", 1, "recomputed"),
        Criterion("peak against depth", "technique", 1, "memory"),
        Criterion("runs forward again", "technique", 0.5),
        Criterion("forward calls", "cost", 0.5),
        Criterion("segments", "cost", 1),
        Criterion("random numbers", "cost", 0.5, "recomputed"),
        Criterion("other layers and inputs", "cost", 0.5, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=("torch.utils.checkpoint",),
    on_error=on_error,
    picture=picture,
    summary=_summary,
))  # fmt: skip

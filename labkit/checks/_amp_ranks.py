"""Check "amp.ranks": an overflow on one rank is an overflow on all."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit.checks._amp_bench import Bench, play
from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._amp_hints import HINTS, on_scaler_error
from labkit.checks._amp_scaler import SETTINGS
from labkit.checks._amp_scaler_judge import judge_gradients, judge_skips, judge_trace
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.recorder import Recorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BYTES = 1024  # per step and rank, sent: a flag, however it is packed


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed = lambda: int(torch.randint(1, 2**31, (), generator=generator))  # noqa: E731
    inf, nan = {"poison": "inf", "at": 3}, {"poison": "nan", "at": 1}
    both = [[{}, inf, {}, {}, {}, {}, nan, {}], [{}, nan, {}, {}, {}, {}, inf, {}]]
    one = [[{}, {}, inf, {}, {}, {}, {}, {}, {}], [nan, {}, {}, {}, {}, inf, {}, {}, {}]]
    settings = {"settings": SETTINGS | {"growth_interval": 2}}
    apart = ("ranks agree", "message")
    cases = [
        Case("overflow on both ranks", settings | {"scripts": both, "seed": seed()}, world_size=2, covers=("like one rank",)),
        Case("overflow on one rank", settings | {"scripts": one, "how": "unscale", "seed": seed()}, world_size=2, covers=apart),
        Case("no process group", settings | {"scripts": one[1:], "seed": seed()}, covers=("alone",)),
    ]
    if strict:
        three = [[{}] * 7, [{}] * 7, [{}, inf, {}, {}, {}, nan, {}]]
        cases += [
            Case("overflow on the last of 3", settings | {"scripts": three, "seed": seed()}, world_size=3, covers=apart),
            Case("one rank", settings | {"scripts": one[:1], "seed": seed()}, world_size=1, covers=("alone",)),
        ]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    values, rank = case.values, dist.get_rank() if case.world_size else 0
    scaler = candidate(**values["settings"])
    bench, script = Bench("sgd", values["seed"] + rank), values["scripts"][rank]
    with Recorder() as recorder:
        rows, tensors = play(scaler, bench, script, values["seed"] + rank, values.get("how", "step"))
    sent = sum(row["bytes_sent"] for row in recorder.recording.bytes_by_kind().values())
    kinds = sorted(recorder.recording.bytes_by_kind())
    return Observation({"rows": rows, "sent": sent, "kinds": kinds}, tensors)


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values, scripts = case.values, case.values["scripts"]
    union = [any("poison" in script[number] for script in scripts) for number in range(len(scripts[0]))]
    criterion = (case.covers or ("",))[0]
    finding = _judge_ranks(values, seen, union, criterion)
    if criterion != "ranks agree":
        return [finding]
    most, steps = max(one.values["sent"] for one in seen.ranks), len(union)
    light = most <= MAX_BYTES * steps
    heavy = Finding("message", light, f"at most {MAX_BYTES} bytes per step", f"{most / steps:.0f} bytes", "heavy")
    return [finding, heavy]


def _judge_ranks(values: dict[str, Any], seen: Observation, union: list[bool], criterion: str) -> Finding:
    text = "scale and skipped steps alike on all ranks" if criterion == "ranks agree" else "as the scaler of 4.2"
    if criterion == "ranks agree":
        for number, overflow in enumerate(union):
            took = [one.values["rows"][number]["stepped"] for one in seen.ranks]
            if len(set(took)) > 1:
                who = ", ".join(f"rank {rank} {'stepped' if step else 'skipped'}" for rank, step in enumerate(took))
                return Finding(criterion, False, text, f"step {number + 1}: {who}", "apart")
            if overflow and took[0]:
                return Finding(criterion, False, text, f"step {number + 1}: one rank overflowed, all stepped", "not-all")
    for rank, one in enumerate(seen.ranks):
        at = values | {"seed": values["seed"] + rank}
        for finding in (
            judge_skips(one.values["rows"], union, criterion),
            judge_trace(values["settings"], one.values["rows"], union, criterion),
            judge_gradients(at, one, union, criterion),
        ):
            if not finding.passed:
                heavy = one.values["sent"] > MAX_BYTES * len(union) or (finding.hint == "alike" and len(seen.ranks) > 1)
                return Finding(criterion, False, text, f"rank {rank}: {finding.observed}", "heavy" if heavy else finding.hint)
    return Finding(criterion, True, text, f"so, {len(seen.ranks)} {'ranks' if len(seen.ranks) > 1 else 'process'}")


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """Every rank's scale."""
    if "ranks agree" not in (case.covers or ()):
        return None
    from labkit.figures import lines

    series = {}
    for rank, one in enumerate(seen.ranks):
        scales = [row["scale"] for row in one.values["rows"]]
        series[f"rank {rank}"] = (range(len(scales)), scales)
    drawn = lines(series, title=f"The scale on every rank: {case.name}", x="step", y="scale", log="y")
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if "ranks agree" not in (case.covers or ()):
        return None
    steps = len(case.values["scripts"][0])
    return f"{len(seen.ranks)} ranks decide alike, {seen.values['sent'] / steps:.0f} bytes sent per step"


register(Check(
    "amp.ranks",
    criteria=(
        Criterion("like one rank", "numbers", 0.5, "recomputed"),
        Criterion("ranks agree", "technique", 1, "recomputed"),
        Criterion("message", "cost", 0.25, "wire"),
        Criterion("alone", "cost", 0.25, "recomputed"),
    ),
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(_judge),
    hints=HINTS,
    forbids=("torch.amp.GradScaler", "torch._amp_foreach_non_finite_check_and_unscale_", "torch._amp_update_scale_"),
    on_error=on_scaler_error,
    picture=bundled_first(_picture),
    summary=bundled_first(_summary),
))  # fmt: skip

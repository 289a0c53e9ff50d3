"""Check "accumulation.largest": the largest micro-batch by bisection, and how many pieces a batch then takes."""

import gc
import math
import numbers
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks import _accumulation_tools as tools
from labkit.checks._accumulation_hints import HINTS, on_error
from labkit.checks._amp_bundle import bundled_cases, bundled_first, bundled_judge, bundled_probe
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.recorder import Recorder, human_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, LIMIT = (24, 24, 24, 24), 200
SLACK = 1024  # bytes that a trial may find over those of the first one
PAIRS = [[64, 16], [256, 8], [100, 16], [5, 8], [1, 1], [96, 32], [97, 32]]


class BrokenStep(RuntimeError):
    """An error of a step that has nothing to do with memory."""


def most_trials(limit: int) -> int:
    """Doubling up to the first size that fails, then halving what lies between, and three to spare."""
    return 2 * math.ceil(math.log2(max(limit, 1))) + 3


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    searches = [[64, 0], [64, 64], [64, 1], [1, 1], [1, 0], [100, 63], [100, 64], [100, 65], [1000, draw(2, 1000)], [777, draw(2, 777)]]
    pairs = PAIRS + [[draw(50, 500), draw(2, 50)] for _ in range(4)]
    cases = [
        Case("sizes that fit", {"searches": searches, "pairs": pairs}, covers=("largest that fits", "trials", "pieces")),
        _budget_case("a budget of memory", draw(70, LIMIT), draw(1, 2**31)),
        _budget_case("under autocast", draw(40, LIMIT), draw(1, 2**31), autocast=True),
        Case("another error", {"breaks": draw(2, 20)}, covers=("other errors",)),
    ]  # fmt: skip
    if strict:
        more = [[limit, draw(0, limit + 1)] for limit in (2, 3, 5, 17, 31, 32, 33, 4096, 100_000)] + [[100_000, 3], [100_000, 100_000]]
        cases += [
            Case("other sizes", {"searches": more, "pairs": [[draw(1, 3000), draw(1, 300)] for _ in range(12)]},
                 covers=("largest that fits", "trials", "pieces")),
            Case("breaks at once", {"breaks": 1}, covers=("other errors",)),
            _budget_case("a small budget", draw(20, 40), draw(1, 2**31)),
        ]  # fmt: skip
    return cases


def _budget_case(name: str, rows: int, seed: int, autocast: bool = False) -> Case:
    """A budget that exactly `rows` rows fit: their own peak and half a row's bytes."""
    values = {"rows": rows, "seed": seed, "autocast": autocast}
    return Case(name, values | {"budget": peak_of(values, rows) + 100}, covers=("nothing left behind",))


def _whole(value: Any, what: str, hint: str) -> int:
    """A whole number that the learner returned, of any type."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        got = "None" if value is None else f"{value!r}" if isinstance(value, float) else f"a {type(value).__name__}"
        raise WrongResult(f"{got} came back, expected {what} as an int", hint)
    return int(value)


def _probe(candidate: Any, case: Case) -> Observation:
    search, pieces = candidate
    values = case.values
    if "breaks" in values:
        return _probe_broken(search, values["breaks"])
    if "budget" in values:
        return _probe_budget(search, values)
    rows = []
    for limit, fits in values["searches"]:
        trials: list[int] = []

        def step(size: int, fits: int = fits, trials: list[int] = trials) -> None:
            trials.append(_tried(size))
            if size > fits:
                raise torch.OutOfMemoryError(f"{size} rows need more than there is")

        found = _whole(search(step, limit), "the largest number of rows that fits", "largest")
        rows.append({"limit": limit, "fits": fits, "found": found, "count": len(trials), "trials": trials[:40]})
    counted = [pieces(batch, largest) for batch, largest in values["pairs"]]
    told = [_whole(one, "a number of pieces", "pieces-type") if _is_whole(one) else None for one in counted]
    return Observation({"rows": rows, "pieces": told, "pieces_raw": [repr(one)[:40] for one in counted]})


def _is_whole(value: Any) -> bool:
    try:
        _whole(value, "", "")
    except WrongResult:
        return False
    return True


def _tried(size: Any) -> int:
    if not isinstance(size, numbers.Integral):
        raise TypeError(f"step was called with {size!r}: a number of rows is an int")
    return int(size)


def make_step(values: dict[str, Any], budget: int | None = None) -> tuple[Any, Recorder, list[dict[str, int]]]:
    """A training step of as many rows as asked for, its recorder, and a list of what was alive before each, garbage collected."""
    model = tools.make_net(values["seed"], WIDE)
    x, y = tools.net_batches(1, LIMIT, values["seed"], WIDE[0], WIDE[-1])[0]
    loss_fn = tools.net_loss(tools.Trace())
    recorder = Recorder(watch=[model, x, y], budget_bytes=budget)
    trials: list[dict[str, int]] = []

    def step(size: int) -> torch.Tensor:
        size = _tried(size)
        for parameter in model.parameters():
            parameter.grad = None
        trials.append({"size": size, "held": recorder.mark("trial")})
        try:
            with torch.autocast("cpu", torch.bfloat16) if values.get("autocast") else nullcontext():
                loss = loss_fn(model, (x[:size], y[:size]))
        finally:
            torch.clear_autocast_cache()  # where the caller is in an autocast of its own, the 16-bit weights would stay
        loss.backward()
        return x[:size].clone()  # of no use, and a few bytes: who keeps it is seen

    return step, recorder, trials


def peak_of(values: dict[str, Any], size: int) -> int:
    """Peak bytes of one step of `size` rows."""
    step, recorder, _ = make_step(values)
    with recorder:
        step(size)
    return recorder.recording.peak_bytes


def _probe_budget(search: Any, values: dict[str, Any]) -> Observation:
    gc.freeze()  # marks collect garbage: only what the candidate makes need be looked at
    step, recorder, trials = make_step(values, values["budget"])
    with recorder, recorder.phase("search"):
        found = _whole(search(step, LIMIT), "the largest number of rows that fits", "largest")
    seen = Observation({"found": found, "trials": trials[:60]})
    seen.recordings["search"] = recorder.recording
    return seen


def _probe_broken(search: Any, breaks: int) -> Observation:
    def step(size: int) -> None:
        if size >= breaks:
            raise BrokenStep(f"shapes cannot be multiplied ({size}x24 and 25x24)")

    try:
        found = search(step, 64)
    except NotImplementedError:
        raise
    except Exception as error:
        return Observation({"raised": type(error).__name__})
    return Observation({"raised": None, "found": repr(found)[:60]})


# -- judge --


def _judge(case: Case, seen: Observation) -> list[Finding]:
    values = case.values
    if "breaks" in values:
        raised = seen.values["raised"]
        told = f"{raised} came out" if raised else f"it went on and returned {seen.values['found']}"
        return [Finding("other errors", raised is not None, "what is not out of memory comes out", told, "swallowed")]
    if "budget" in values:
        return [_judge_budget(values, seen)]
    return [_judge_found(seen), _judge_trials(seen), _judge_pieces(values, seen)]


def _judge_found(seen: Observation) -> Finding:
    name, wanted = "largest that fits", "the largest number of rows up to the limit, 0 if none"
    for row in seen.values["rows"]:
        if row["found"] != row["fits"]:
            told = f"limit {row['limit']}: {row['found']}, but {row['fits']} fit"
            if row["found"] and row["found"] & (row["found"] - 1) == 0 and row["found"] < row["fits"] < 2 * row["found"]:
                hint = "power"
            else:
                hint = "largest-zero" if row["fits"] in (0, row["limit"]) else "largest"
            return Finding(name, False, wanted, told, hint)
    return Finding(name, True, wanted, f"{len(seen.values['rows'])} of {len(seen.values['rows'])} searches")


def _judge_trials(seen: Observation) -> Finding:
    name, wanted = "trials", "at most 2 log2(limit) + 3, between 1 and the limit"
    worst = max(seen.values["rows"], key=lambda row: row["count"] / most_trials(row["limit"]))
    for row in seen.values["rows"]:
        outside = [size for size in row["trials"] if not 1 <= size <= row["limit"]]
        if outside:
            return Finding(name, False, wanted, f"limit {row['limit']}: tried {outside[0]}", "range")
        if row["fits"] and row["count"] < 1:
            return Finding(name, False, wanted, f"limit {row['limit']}: nothing tried", "trials")
    told = f"{worst['count']} at limit {worst['limit']} (at most {most_trials(worst['limit'])})"
    return Finding(name, worst["count"] <= most_trials(worst["limit"]), wanted, told, "trials")


def _judge_pieces(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "pieces", "as few as have room"
    for (batch, largest), got, raw in zip(values["pairs"], seen.values["pieces"], seen.values["pieces_raw"], strict=True):
        right = math.ceil(batch / largest)
        if got is None:
            return Finding(name, False, wanted, f"{batch} rows, at most {largest}: {raw}", "pieces-type")
        if got != right:
            return Finding(name, False, wanted, f"{batch} rows, at most {largest} each: {got} pieces", "pieces")
    return Finding(name, True, wanted, f"{len(values['pairs'])} of {len(values['pairs'])}")


def _judge_budget(values: dict[str, Any], seen: Observation) -> Finding:
    name, wanted = "nothing left behind", "every trial begins with the memory of the first, and the right size is found"
    trials = seen.values["trials"]
    if not trials:
        return Finding(name, False, wanted, "nothing was tried", "trials")
    more = [trial for trial in trials if trial["held"] > trials[0]["held"] + SLACK]
    if more:
        told = f"before {more[0]['size']} rows are tried, {human_bytes(more[0]['held'] - trials[0]['held'])} more are in use than at first"
        before = trials[trials.index(more[0]) - 1]
        fitted = before["size"] <= values["rows"] and before["held"] <= trials[0]["held"] + SLACK
        return Finding(name, False, wanted, told, "held-result" if fitted else "held")
    right = values["rows"]
    if seen.values["found"] != right:
        told = f"budget {human_bytes(values['budget'])}: {seen.values['found']}, but {right} rows fit"
        return Finding(name, False, wanted, told, "largest")
    return Finding(name, True, wanted, f"{right} rows in {human_bytes(values['budget'])}, {len(trials)} trials")


# -- what people see --


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """Memory over time while the sizes are tried."""
    if "search" not in seen.recordings:
        return None
    from labkit.figures import memory_over_time

    drawn = memory_over_time(seen.recordings["search"], title="Memory while sizes are tried", budget_bytes=case.values["budget"])
    drawn.set_label(drawn.alt)
    return drawn


def _summary(case: Case, seen: Observation) -> str | None:
    if "budget" not in case.values:
        return None
    rows, budget = seen.values["found"], human_bytes(case.values["budget"])
    return f"{rows} rows fit {budget}, found in {len(seen.values['trials'])} trials (at most {most_trials(LIMIT)}), nothing left behind"


register(Check(
    "accumulation.largest",
    criteria=(
        Criterion("largest that fits", "numbers", 0.75, "recomputed"),
        Criterion("trials", "technique", 1),
        Criterion("pieces", "technique", 0.5, "recomputed"),
        Criterion("nothing left behind", "cost", 0.5, "recomputed"),
        Criterion("other errors", "cost", 0.25),
    ),
    cases=bundled_cases(_cases),
    probe=bundled_probe(_probe),
    judge=bundled_judge(_judge),
    hints=HINTS,
    on_error=on_error,
    picture=bundled_first(_picture),
    summary=bundled_first(_summary),
))  # fmt: skip

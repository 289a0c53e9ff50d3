"""Checks "parameter_server.synchronous" and "parameter_server.bounded": who is applied and who is answered, in whatever order it comes."""

import math
from typing import TYPE_CHECKING, Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register
from labkit.checks._parameter_server_hints import HINTS, on_error
from labkit.checks._parameter_server_script import Row, expected, play, rules_of, script

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERYONE, TWICE, BACKUP, DEATHS = "rounds of everyone", "duplicates", "backup workers", "deaths and returns"
ONCE, ASYNC, BOUND, DELAY = "each push, at once", "asynchronous", "bound", "staleness"


def _seeds(generator: torch.Generator) -> Any:
    while True:
        yield int(torch.randint(1, 2**31, (), generator=generator))


def _sync_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed, many = _seeds(generator), 4 if strict else 2

    def runs(workers: list[tuple[int, int]], **how: Any) -> list[Row]:
        base = [{"workers": w, "need": n, "clocks": 10, "length": 12 * w} for w, n in workers for _ in range(many)]
        return [script(one, next(seed), **how) for one in base]

    odd = [(5, 5)] if strict else []
    waits = {"workers": 3, "need": 3, "clocks": 4, "script": [
        ["pull", 0], ["pull", 1], ["pull", 2], ["push", 0, 0], ["pull", 0], ["push", 1, 0], ["pull", 1], ["death", 2],
        ["death", 2], ["push", 0, 1], ["pull", 0], ["pull", 2], ["push", 1, 1], ["pull", 1], ["push", 2, 1], ["pull", 2],
    ]}  # fmt: skip
    gone = {"workers": 3, "need": 3, "clocks": 4, "script": [
        ["pull", 0], ["pull", 1], ["pull", 2], ["push", 2, 0], ["death", 2], ["push", 0, 0], ["pull", 0], ["pull", 2], ["push", 1, 0],
        ["pull", 1], ["push", 1, 1], ["death", 1], ["push", 2, 1], ["push", 0, 1], ["pull", 0], ["pull", 2], ["pull", 1],
    ]}  # fmt: skip
    echo = {"workers": 3, "need": 3, "clocks": 4, "script": [
        ["pull", 0], ["pull", 1], ["pull", 2], ["push", 0, 0], ["death", 2], ["push", 2, 0], ["push", 1, 0], ["pull", 0], ["pull", 1],
        ["push", 0, 1], ["pull", 0], ["push", 1, 1], ["pull", 1],
    ]}  # fmt: skip
    late = {"workers": 4, "need": 3, "clocks": 4, "script": [
        ["pull", 0], ["pull", 1], ["pull", 2], ["pull", 3], ["push", 0, 0], ["push", 1, 0], ["push", 2, 0], ["pull", 0], ["push", 3, 0],
        ["pull", 3], ["push", 3, 0], ["push", 0, 0], ["push", 3, 1], ["pull", 1], ["pull", 2], ["push", 0, 1], ["push", 1, 1],
        ["death", 2], ["push", 2, 1], ["death", 1], ["push", 1, 1], ["push", 2, 1],
    ]}  # fmt: skip
    return [
        Case(EVERYONE, {"kind": EVERYONE, "runs": runs([(3, 3), (1, 1), (4, 4), *odd])}),
        Case(TWICE, {"kind": TWICE, "runs": runs([(3, 3), (2, 2), *odd], again=0.35)}, covers=(TWICE,)),
        Case(BACKUP, {"kind": BACKUP, "runs": [late, *runs([(4, 3), (4, 2)], late=True, again=0.1)]}, covers=(BACKUP,)),
        Case(DEATHS, {"kind": DEATHS, "runs": [waits, gone, echo, *runs([(3, 3), (4, 3), *odd], deaths=0.12)]}, covers=(DEATHS,)),
    ]


def _bounded_cases(generator: torch.Generator, strict: bool) -> list[Case]:
    seed, many = _seeds(generator), 4 if strict else 2

    def runs(rules: list[tuple[int, int | None]], **how: Any) -> list[Row]:
        base = [{"workers": w, "bound": b, "clocks": 30, "length": 14 * w} for w, b in rules for _ in range(many)]
        return [script(one, next(seed), **how) for one in base]

    odd: list[tuple[int, int | None]] = [(5, 4)] if strict else []
    aside = [{**run, "aside": True} for run in [*runs([(4, 1)]), *runs([(3, None)], again=0.3)]]
    back = {"workers": 3, "bound": 1, "clocks": 20, "script": [
        ["pull", 0], ["pull", 1], ["pull", 2], ["push", 0, 0], ["pull", 0], ["push", 0, 1], ["pull", 0], ["push", 1, 0], ["death", 2],
        ["death", 2], ["push", 0, 2], ["pull", 0], ["pull", 1], ["push", 1, 1], ["push", 2, 0], ["pull", 1], ["push", 1, 2], ["pull", 2],
        ["push", 2, 0], ["pull", 0], ["push", 2, 3], ["pull", 2], ["push", 2, 2],
    ]}  # fmt: skip
    away = {"workers": 3, "bound": 0, "clocks": 20, "script": [  # dies while it waits, and what it waited for comes true
        ["pull", 0], ["pull", 1], ["pull", 2], ["push", 0, 0], ["pull", 0], ["death", 0], ["push", 1, 0], ["pull", 1], ["push", 2, 0],
        ["pull", 2], ["pull", 0],
    ]}  # fmt: skip
    alone = {"workers": 1, "bound": 0, "clocks": 20, "script": [
        ["pull", 0], ["push", 0, 0], ["death", 0], ["pull", 0], ["push", 0, 1], ["pull", 0],
    ]}  # fmt: skip
    return [
        Case(ONCE, {"kind": ONCE, "runs": runs([(3, None), (1, None), (5, None)])}),
        Case(ASYNC, {"kind": ASYNC, "runs": runs([(3, None), (4, None)], slow=1)}, covers=(ASYNC,)),
        Case(TWICE, {"kind": TWICE, "runs": runs([(3, None), (4, None)], again=0.35)}, covers=(TWICE,)),
        Case(BOUND, {"kind": BOUND, "runs": [*runs([(3, 1), (2, 0), (4, 3)], slow=0), *runs([(3, 2), *odd], again=0.2)]},
             covers=(BOUND,)),
        Case(DEATHS, {"kind": DEATHS, "runs": [back, away, *([alone] if strict else []), *runs([(3, 1), (4, 2), *odd], deaths=0.1)]},
             covers=(DEATHS,)),
        Case(DELAY, {"kind": DELAY, "runs": [*runs([(3, None)]), *aside]}, covers=(DELAY,)),
    ]  # fmt: skip


def _probe(candidate: Any, case: Case) -> Observation:
    return Observation({"runs": [play(candidate, run) for run in case.values["runs"]]})


# -- judge --


def _judge(case: Case, seen: Observation) -> list[Finding]:
    kind, wanted = case.values["kind"], _wanted(case.values["kind"])
    messages = gap = 0
    for run, told in zip(case.values["runs"], seen.values["runs"], strict=True):
        rows, rules = expected(run)
        if "aside" in run and any(_differs(right, seen) for right, seen in zip(rows, told["rows"], strict=True)):
            continue  # what is wrong here is another criterion's
        fault = _first_fault(kind, run, rows, told["rows"])
        if fault is None and kind in (BACKUP, DELAY):
            right = rules.dropped if kind == BACKUP else rules.delays
            noted = told["noted"]
            if kind == BACKUP and sorted(noted or []) != sorted(right):
                fault = f"dropped holds {_short(noted)}, and not {_short(right)}", "dropped", ""
            elif kind == DELAY and noted != right:
                hint = "staleness-missing" if not noted else "staleness"
                fault = f"staleness is {_short(noted)}", hint, f"For the messages {_words(run['script'][:14])}, ..."
        if fault:
            return [Finding(kind, False, wanted, fault[0], fault[1], fault[2])]
        messages += len(run["script"])
        gap = max(gap, getattr(rules, "gap", 0))
    told_gap = f", gaps up to {gap}" if kind == BOUND else ""
    return [Finding(kind, True, wanted, f"{messages} messages{told_gap}")]


def _differs(right: Row, seen: Row) -> bool:
    return set(right["answered"]) != set(seen["answered"]) or len(right["applied"]) != len(seen["applied"])


def _wanted(kind: str) -> str:
    return {
        EVERYONE: "one step a round, with the mean of everyone's gradients",
        TWICE: "a push that arrives again changes nothing",
        BACKUP: "a round ends with `need` gradients; late ones are in `dropped`",
        DEATHS: "those alive go on; who returns is in at once",
        ONCE: "one step for each push, when it arrives",
        ASYNC: "nobody waits for a slow worker",
        BOUND: "at most the bound ahead of the slowest, and that much",
        DELAY: "versions between each push's pull and itself",
    }[kind]


def _first_fault(kind: str, run: Row, rows: list[Row], told: list[Row]) -> tuple[str, str, str] | None:
    """(what was seen, hint, the messages until then) at the first message where it differs from what is expected."""
    done: set[tuple[int, int]] = set()
    dead: set[int] = set()
    for number, (message, right, seen) in enumerate(zip(run["script"], rows, told, strict=True)):
        if message[0] == "death":
            dead.add(message[1])
        elif message[0] == "pull":
            dead.discard(message[1])
        told_so_far = "Messages: " + _words(run["script"][max(0, number - 9) : number + 1])
        applied = [{(int(w), int(c)): share for w, c, share in one} for one in seen["applied"]]
        fault = _applied_fault(message, right, applied, done, run)
        if fault is None and kind not in (ONCE, DELAY):
            fault = _answer_fault(message, right, seen, dead, run)
        if fault is None and kind in (ONCE, DELAY) and (missing := set(right["answered"]) - set(seen["answered"])):
            fault = f"worker {min(missing)} gets no answer", "waits"
        if fault:
            return f"message {number + 1}, {_word(message)}: {fault[0]}", fault[1], told_so_far
        done.update(key for one in right["applied"] for key in one)
    return None


def _applied_fault(message: list, right: Row, applied: list[dict], done: set, run: Row) -> tuple[str, str] | None:
    want, sync = right["applied"], "need" in run
    if not want and not applied:
        return None
    told = " and ".join(_mixture(one) for one in applied) or "no step"
    keys = {key for one in applied for key in one}
    if (-1, -1) in keys:
        return "a step with parts of different gradients", "mixed"
    if not applied:
        fewer = sync and run["need"] == run["workers"] and len(want[0]) < run["need"]  # those alive are all here
        hint = "death-stuck" if message[0] == "death" or fewer else "never"
        return "no step", hint if sync else "once-lost"
    if keys & done:
        return f"{told} again", "twice"
    if not want:
        if message[0] == "push" and right["late"]:
            return f"a step with {told}", "late"
        if sync and len(applied) == 1 and len(applied[0]) == 1 and run["need"] > 1:
            return f"a step with {told} alone", "each-push" if message[0] == "push" else "early"
        return f"a step with {told}", "early" if sync else "twice"
    if len(applied) > len(want):
        return f"{len(applied)} steps", "each-push"
    if applied[0].keys() != want[0].keys():
        late = any(clock < next(iter(want[0]))[1] for _, clock in keys)
        return f"a step with {told}", "late" if late else "missing" if keys < want[0].keys() else "early"
    if any(not math.isclose(applied[0][key], want[0][key], rel_tol=1e-4) for key in keys):
        return f"a step with {told}", "scale"
    return None


def _answer_fault(message: list, right: Row, seen: Row, dead: set, run: Row) -> tuple[str, str] | None:
    want, got, sync = set(right["answered"]), set(seen["answered"]), "need" in run
    for worker in sorted(got - want):
        if worker in dead:
            return f"worker {worker} is answered, and dead", "answers-dead"
        if sync:
            return f"worker {worker} is answered", "answers-early"
        if worker in right["gaps"]:
            return f"worker {worker} is answered, {right['gaps'][worker]} ahead of the slowest", "too-far"
        return f"worker {worker} is answered, and has not asked", "unasked"
    for worker in sorted(want - got):
        told = f"worker {worker} gets no answer"
        if message[0] == "death":
            return told, "death-stuck"
        if right["back"] and worker == message[1]:
            return told, "return"
        if message[0] == "push" or worker != message[1]:
            return told, "not-woken"
        if not sync and run["bound"] is not None and right["clocks"][worker] and right["gaps"][worker] == run["bound"]:
            return f"{told}, {run['bound']} ahead of the slowest", "bound-off"
        return told, "waits"
    for worker in sorted(want):
        if seen["clocks"][str(worker)] != right["clocks"][worker]:
            told = f"clock({worker}) is {seen['clocks'][str(worker)]}, and not {right['clocks'][worker]}"
            return told, "return-clock" if right["back"] else "clock"
    return None


def _mixture(one: dict) -> str:
    parts = [f"{share:.2g} x (worker {w}, clock {c})" for (w, c), share in one.items()]
    return " + ".join(parts[:4] + ["..."] * (len(parts) > 4))


def _word(message: list) -> str:
    return f"{message[0]}({', '.join(str(part) for part in message[1:])})"


def _words(messages: list) -> str:
    return ", ".join(_word(message) for message in messages)


def _short(noted: Any) -> str:
    told = str([tuple(one) if isinstance(one, list) else one for one in noted[:6]]) if noted is not None else "missing"
    return told + (" ..." if noted is not None and len(noted) > 6 else "")


def _picture(case: Case, seen: Observation) -> "Figure | None":
    """The bound's first run, as the learner's rule decided it."""
    if case.values["kind"] != BOUND:
        return None
    from labkit.figures.parameter_server import clock_lanes

    run, log = case.values["runs"][0], []
    rules = rules_of(run)
    for number, (message, told) in enumerate(zip(run["script"], seen.values["runs"][0]["rows"], strict=True)):
        rules.step(message)
        what = {"pull": "asks", "push": "push", "death": "death"}[message[0]]
        log.append((number, what, message[1], message[2] if what == "push" else rules.clock(message[1])))
        log += [(number, "answer", worker, told["clocks"][str(worker)]) for worker in told["answered"]]
    drawn = clock_lanes(log, title="Your rule, message by message", bound=run["bound"], messages=True)
    drawn.set_label(drawn.alt)
    return drawn


def _sync_summary(case: Case, seen: Observation) -> str | None:
    if case.values["kind"] != EVERYONE:
        return None
    steps = sum(len(row["applied"]) for row in seen.values["runs"][0]["rows"])
    return f"{steps} rounds of 3 workers, {steps} steps; duplicates, late ones, deaths and returns change nothing that they must not"


def _bounded_summary(case: Case, seen: Observation) -> str | None:
    if case.values["kind"] != BOUND:
        return None
    run, told = case.values["runs"][0], seen.values["runs"][0]["rows"]
    steps = sum(len(row["applied"]) for row in told)
    return f"{steps} pushes, {steps} steps; bound {run['bound']}: gap at most {expected(run)[1].gap}"


register(Check(
    "parameter_server.synchronous",
    criteria=(
        Criterion(EVERYONE, "numbers", 0.75, "recomputed"),
        Criterion(TWICE, "technique", 0.75, "recomputed"),
        Criterion(BACKUP, "technique", 0.75, "recomputed"),
        Criterion(DEATHS, "technique", 0.75, "recomputed"),
    ),
    cases=_sync_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    on_error=on_error,
    summary=_sync_summary,
))  # fmt: skip
register(Check(
    "parameter_server.bounded",
    criteria=(
        Criterion(ONCE, "numbers", 0.75, "recomputed"),
        Criterion(ASYNC, "technique", 0.5, "recomputed"),
        Criterion(TWICE, "technique", 0.75, "recomputed"),
        Criterion(BOUND, "technique", 1, "recomputed"),
        Criterion(DEATHS, "technique", 0.5, "recomputed"),
        Criterion(DELAY, "cost", 0.5, "recomputed"),
    ),
    cases=_bounded_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    on_error=on_error,
    picture=_picture,
    summary=_bounded_summary,
))  # fmt: skip

"""What the observations of a persistent executor mean: what later calls make, what it holds, and what it leaves alone."""

import torch

from labkit.checks._core import Case, Finding, Observation
from labkit.checks._pingpong_cases import SCRIPT, limit_of
from labkit.checks._pingpong_judge import (
    SMALL,
    allocated_bytes,
    error_of,
    expected,
    places_told,
    runs_of,
    unit_bytes,
    why_wrong,
)

LATER = [i for i, call in enumerate(SCRIPT) if not call.get("may")]
SAME = [i for i in LATER if SCRIPT[i]["rows"] == SCRIPT[i - 1]["rows"]]
AFTER_LESS = [i for i in LATER if i not in SAME]
OUTS = [i for i, call in enumerate(SCRIPT) if call.get("out")]


def judge_executor(case: Case, seen: Observation) -> list[Finding]:
    """Findings of one case of the persistent executor."""
    findings = [_output(case, seen), _kept(case, seen), _inputs(case, seen)]
    if case.values["kind"] == "types":
        return [*findings, _held(case, seen), _reported(case, seen)]
    if case.values["runs"][-1].get("measured"):
        findings += [
            _made(case, seen, "second call", SAME, "nothing of an activation's size", "made-again"),
            _made(case, seen, "smaller batch", AFTER_LESS, "nothing after a smaller batch", "reshaped"),
            _held(case, seen),
            _reported(case, seen),
        ]
    return findings


def _output(case: Case, seen: Observation) -> Finding:
    wanted = "within 1e-4 of the network's"
    for number, run, facts in runs_of(case, seen):
        for index in range(len(SCRIPT)):
            if index in OUTS:
                continue
            key = f"x{number}/{index}"
            y, reference = seen.tensors[f"y{number}/{index}"], expected(case, run["model"], case.tensors[key])
            if error_of(y, reference) > 1:
                hint = why_wrong(case, run["model"], facts, y, key)
                return Finding("output", False, wanted, f"wrong in call {index + 1} ({run['name']})", hint, places_told(facts, hint))
    return Finding("output", True, wanted, f"right in {len(SCRIPT)} calls of each network")


def _kept(case: Case, seen: Observation) -> Finding:
    wanted = "`out` is filled, comes back and is left alone"
    for number, run, facts in runs_of(case, seen):
        for index in OUTS:
            then, later = seen.tensors[f"y{number}/{index}"], seen.tensors[f"out{number}/{index}"]
            right = error_of(then, expected(case, run["model"], case.tensors[f"x{number}/{index}"])) <= 1
            same = torch.equal(then.nan_to_num(nan=-1.0), later.nan_to_num(nan=-1.0))
            where = f"({run['name']}, call {index + 1})"
            if not right:
                empty = bool(torch.isnan(then).any())
                told = "not in `out` when the call returned" if empty else "wrong in `out`"
                return Finding("result in out", False, wanted, f"{told} {where}", "out-ignored" if same else "late-reader")
            if not same:
                return Finding("result in out", False, wanted, f"right, then changed by a later call {where}", "aliased")
            if facts["calls"][index]["returned"]:
                told = f"in `out`, but {facts['calls'][index]['returned']} came back {where}"
                return Finding("result in out", False, wanted, told, "not-out")
    return Finding("result in out", True, wanted, "still right after later calls")


def _inputs(case: Case, seen: Observation) -> Finding:
    for number, run, _ in runs_of(case, seen):
        for index in range(len(SCRIPT)):
            if not torch.equal(seen.tensors[f"x{number}/{index}"], case.tensors[f"x{number}/{index}"]):
                return Finding("input", False, "unchanged", f"changed ({run['name']}, call {index + 1})", "input-changed")
    return Finding("input", True, "unchanged", "unchanged")


def _made(case: Case, seen: Observation, name: str, calls: list[int], wanted: str, hint: str) -> Finding:
    worst = (0, 0.0, "")
    for number, run, facts in runs_of(case, seen):
        for index in calls:
            unit, least = unit_bytes(case, run["model"], case.tensors[f"x{number}/{index}"])
            call = facts["calls"][index]
            made = sum(size >= least for size in call["made"])
            share = allocated_bytes(seen.recordings[str(number)], f"call {index}", f"call {index + 1}") / unit
            if made or share > SMALL:
                worst = max(worst, (made, share, f"call {index + 1}, {run['name']}"))
    if worst[2]:
        what = f"{worst[0]} tensors made" if worst[0] != 1 else "1 tensor made"
        told = f"{what}, {worst[1]:.1f} activations ({worst[2]})"
        grad = any(facts["grad"] for _, _, facts in runs_of(case, seen))
        cloned = worst[0] == 1 and worst[1] <= 1 + SMALL and name == "second call"
        return Finding(name, False, wanted, told, "grad" if grad else "result-copied" if cloned else hint)
    if any(facts["grad"] for _, _, facts in runs_of(case, seen)):
        return Finding(name, False, wanted, "the result hangs on an autograd graph", "grad")
    resized = [text for _, _, facts in runs_of(case, seen) for text in facts["resized"]]
    if resized and name == "smaller batch":
        return Finding(name, False, wanted, f"torch resized an output {len(resized)} times", hint, resized[0])
    return Finding(name, True, wanted, f"0 tensors in {len(calls)} calls")


def _held(case: Case, seen: Observation) -> Finding:
    """Two buffers for the largest batch, or two for every batch size that has come."""
    wanted, told, held, passed = "2 activations, or 2 per batch size so far", [], [], True
    for number, run, facts in runs_of(case, seen):
        unit = unit_bytes(case, run["model"], case.tensors[f"x{number}/0"], run["max_batch"])[0]
        after = [call["held"] / unit for call in facts["calls"]]
        held.append(max(after))
        told.append(f"{held[-1]:.1f} with {run['name']}")
        over = next((calls for calls, many in enumerate(after, 1) if many > limit_of(run, calls) + SMALL), None)
        if over:
            passed = False
            told[-1] = f"{after[over - 1]:.1f} after call {over} with {run['name']}"
    if case.values["kind"] == "calls":
        passed = passed and held[-1] - held[0] <= SMALL
    return Finding("memory held", passed, wanted, ", ".join(told), "holds")


def _reported(case: Case, seen: Observation) -> Finding:
    wanted = "the bytes held, after every call"
    for _, run, facts in runs_of(case, seen):
        for index, call in enumerate(facts["calls"]):
            said, held, where = call["reported"], call["held"], f"({run['name']}, after call {index + 1})"
            if said is None or isinstance(said, str):
                return Finding("buffer_bytes", False, wanted, f"{said or 'not there'} {where}", "reported-missing")
            if abs(said - held) > max(0.01 * held, 256):  # of which a few indices or constants are not worth counting
                return Finding("buffer_bytes", False, wanted, f"{said:.0f} bytes said, {held} held {where}", "reported")
    return Finding("buffer_bytes", True, wanted, "as measured")

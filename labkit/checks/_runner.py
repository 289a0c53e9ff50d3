"""Run a check: send each case to where the learner's code runs, judge here what comes back.

Where the code runs is a `Transport`: fresh processes on this machine for a learner, a sandbox for a grader. The judging is the same.
"""

import contextlib
import itertools
import linecache
import os
import secrets
import sys
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from labkit.checks import _wire
from labkit.checks._core import Case, Check, Finding, Observation, home_of
from labkit.checks._score import merge
from labkit.checks._threads import one_thread
from labkit.checks._verdict import Verdict

GENERIC_HINTS = {
    "unfinished": "Replace the `raise NotImplementedError(...)` in the answer cell, run that cell, then run this one again.",
    "timeout": "Which loop never ends, or which call waits for something that nobody sends? The lines above are where it stood.",
    "memory": "Which of the tensors listed does your code still need at that moment?",
    "infrastructure": "This is a fault of the course, not yours. Run the check again; if it stays, send this text to your instructor.",
    "deadlock": "Which rank waits for a message, and which rank was to send it?",
}


@dataclass(frozen=True)
class Report:
    """What one rank sent back: status "ok" with `data`, or how it ended instead."""

    status: str
    data: bytes = b""
    detail: str = ""
    output: str = ""


class Transport(Protocol):
    """Runs `labkit.checks._probe.serve` on a payload beside the learner's code and brings back what it returned, byte for byte."""

    def send(self, payload: bytes, world_size: int, timeout: float) -> Sequence[Report]: ...


class LocalTransport:
    """Fresh processes on this machine, forked from one that has imported torch already."""

    def send(self, payload: bytes, world_size: int, timeout: float) -> Sequence[Report]:
        from labkit.ranks import launch

        reports = launch(
            payload,
            world_size=max(1, world_size),
            entry="labkit.checks._probe:serve",
            timeout=timeout,
            init_process_group=world_size > 0,
        )
        return [Report(report.status, report.data, _ending(report), report.output) for report in reports]


def _ending(report: Any) -> str:
    """How a rank ended that sent no answer, for people."""
    error = report.error or {}
    told = f"{error['type']}: {error['message']}" if error else ""
    printed = report.output.strip()[-400:] if report.status == "exit" else ""  # a backend that aborts says why
    return "\n".join(part for part in (told, report.detail, printed) if part)


@dataclass(frozen=True)
class _Problem:
    """Why a case brought no observation."""

    status: str
    text: str
    detail: str = ""
    hint_id: str | None = None
    covers: tuple[str, ...] = ()


def _lines_of(frames: Sequence[dict[str, Any]]) -> str:
    """The learner's own lines, innermost last, with their text where this process knows the cell."""
    told = []
    for frame in frames[-4:]:
        source = linecache.getline(frame["file"], frame["line"]).strip()
        where = "" if frame["function"] == "<module>" else f" of {frame['function']}"
        told.append(f"  line {frame['line']}{where}" + (f":  {source}" if source else ""))
    return "\n".join(told)


def _stood(bad: Sequence[tuple[int, Report]]) -> str:
    """What is said of all ranks that stood still, and every rank's stack; those that stand in the same lines together."""
    said, stacks = "", {}
    for rank, report in bad:
        before, where, stack = report.detail.strip().partition(f"rank {rank} stood at, ")
        said = said or before.strip()
        stacks.setdefault(stack if where else None, []).append(rank)
    lines = [said]
    for stack, ranks in stacks.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
        lines.append(f"{who} stood at, {stack}" if stack else f"{who} did not say where")
    return "\n".join(lines)


def _problem(check: Check, case: Case, reply: dict[str, Any]) -> _Problem:
    error = reply["error"]
    kind, message, lines = error["type"], error["message"], _lines_of(error["frames"])
    if kind == "NotImplementedError" and (not message or message.startswith("Exercise ")):
        return _Problem("unfinished", f"{message or 'the answer cell'} is not written yet")
    if error["wrong_result"]:
        return _Problem("fail", message, f"With {case.name}: {message}", error["hint"])
    hint = check.on_error(error) if check.on_error else None
    status = "memory" if kind in ("OutOfMemoryError", "MemoryError") else "error"
    told = f"{kind}: {message}" if message else kind
    if error["after"]:
        lines = "  in the check, after your code had returned: does it return what its docstring says?"
    return _Problem(status, told.splitlines()[0][:160], f"With {case.name}: {told}" + (f"\n{lines}" if lines else ""), hint)


def _read(check: Check, case: Case, reports: Sequence[Report], nonce: str) -> Observation | _Problem:
    """The observation in what the ranks sent, or why there is none. The sender is not trusted: whatever does not parse is `protocol`."""
    bad = [(rank, report) for rank, report in enumerate(reports) if report.status != "ok"]
    told = [_opened(check, case, report, nonce) for report in reports if report.status == "ok"]
    problems = [one for one in told if isinstance(one, _Problem)]
    if bad and not (problems and {report.status for _, report in bad} <= {"deadlock", "timeout", "interrupted"}):
        # One status for the case: a deadlock or timeout is told before the ranks that fell because of it.
        order = ("deadlock", "timeout", "memory", "error", "exit", "interrupted", "protocol", "infrastructure")
        rank, report = min(bad, key=lambda item: order.index(item[1].status) if item[1].status in order else len(order))
        status = {"exit": "error"}.get(report.status, report.status)
        first = (report.detail.strip().splitlines() or ["ended without an answer"])[0]
        ended = {"type": report.status, "message": report.output[-4000:], "frames": []}
        hint = check.on_error(ended) if check.on_error and report.status == "exit" else None
        told = _stood(bad) if status in ("deadlock", "timeout") else report.detail.strip()
        return _Problem(status, first[:160], f"With {case.name}: {told or first}", hint)
    if problems:  # a rank that raised is why the others wait for it
        return next((one for one in problems if one.status == "flagged"), problems[0])
    observations = [one for one in told if isinstance(one, Observation)]
    return replace(observations[0], ranks=observations)


def _opened(check: Check, case: Case, report: Report, nonce: str) -> Observation | _Problem:
    """One rank's answer."""
    try:
        reply, tensors, _ = _wire.unpack(report.data)
        if reply["nonce"] != nonce:
            raise _wire.WireError("an answer to another question")
        tripped = [str(name) for name in reply["forbidden"]]
        if tripped:
            text = f"{tripped[0]} was called"
            return _Problem("flagged", text, f"{text}. This exercise wants your own version of it.")
        if reply["error"] is not None:
            return _problem(check, case, reply)
        return Observation.from_message(reply["observation"], tensors)
    except (_wire.WireError, KeyError, TypeError, ValueError, AttributeError) as error:
        return _Problem("protocol", "the answer of the process could not be read", f"With {case.name}: {error}")


@contextmanager
def clean_torch() -> Iterator[None]:
    """Torch as a fresh process has it: expected values must not depend on what the notebook left set."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    state = torch.get_rng_state()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_rng_state, state)
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(one_thread())
        yield


def default_seed(name: str) -> int:
    """The same inputs each time a learner runs a check: the same answer twice."""
    return zlib.crc32(name.encode())


def run_check(
    check: Check,
    candidate: bytes,
    *,
    seed: int | None = None,
    strict: bool = False,
    forbid: bool = True,
    transport: Transport | None = None,
) -> Verdict:
    """Probe and judge a candidate (cloudpickle bytes, never opened here) in every case of `check`.

    strict : the exam's cases too. forbid : lay the tripwires (off only in tests of answers that a library gives).
    """
    started = time.perf_counter()
    with clean_torch():
        verdict = _run(check, candidate, seed, strict, forbid, transport or LocalTransport())
    verdict.seconds = time.perf_counter() - started
    return verdict


def _run(check: Check, candidate: bytes, seed: int | None, strict: bool, forbid: bool, transport: Transport) -> Verdict:
    generator = torch.Generator().manual_seed(default_seed(check.name) if seed is None else seed)
    judged: list[tuple[str, list[Finding]]] = []
    seen: list[tuple[Case, Observation]] = []
    problem: _Problem | None = None
    for case in check.cases(generator, strict):
        nonce = secrets.token_hex(16)
        request = {
            "check": check.name,
            "module": home_of(check),
            "case": {key: value for key, value in asdict(replace(case, tensors={})).items() if key != "tensors"},
            "forbid": forbid,
            "nonce": nonce,
            "cwd": os.getcwd(),
            "path": [path for path in sys.path if path],
        }
        payload = _wire.pack(request, case.tensors, candidate)
        result = _read(check, case, transport.send(payload, case.world_size, check.timeout), nonce)
        if isinstance(result, Observation):
            try:
                judged.append((case.name, check.judge(case, result)))
                seen.append((case, result))
                continue
            except Exception:  # a fault of the check, or an observation made up by who tampers: not a learner's zero
                told = traceback.format_exc(limit=-3)
                result = _Problem("infrastructure", "the check could not judge what it saw", f"With {case.name}:\n{told}")
        covers = case.covers or tuple(criterion.name for criterion in check.criteria)
        judged.append((case.name, [Finding(name, False, "", result.text, result.hint_id) for name in covers]))
        problem = problem or replace(result, covers=tuple(covers))
        if case.covers is None or result.status in ("timeout", "deadlock", "flagged", "unfinished", "infrastructure"):
            break
    return _verdict(check, judged, seen, problem)


def _verdict(
    check: Check,
    judged: list[tuple[str, list[Finding]]],
    seen: list[tuple[Case, Observation]],
    problem: _Problem | None,
) -> Verdict:
    outcomes, findings = merge(check, judged)
    points = sum(outcome.earned for outcome in outcomes)
    if problem and problem.status in ("flagged", "unfinished", "protocol", "infrastructure"):
        points = 0.0
    failing = [outcome for outcome in outcomes if not outcome.passed]
    status = "pass" if not failing else "partial" if points else "fail"
    verdict = Verdict(check.name, status, points, check.points, outcomes)
    if problem and problem.status in ("fail", "error", "memory"):
        # An edge case that ended early is not the news when something before it in the table was judged wrong already.
        before = itertools.takewhile(lambda outcome: outcome.name not in problem.covers, outcomes)
        if any(not outcome.passed and findings[outcome.name].hint for outcome in before):
            problem = None
    if problem:
        verdict.status = "partial" if points else problem.status
        verdict.failed = "runs" if problem.status != "fail" else next(name for name in problem.covers if name in findings)
        verdict.hint_id = problem.hint_id or (problem.status if problem.status in GENERIC_HINTS else None)
        verdict.detail = problem.detail or problem.text
        if not points and not seen:
            verdict.criteria = []  # nothing was measured: the table would only repeat what the detail says
    elif failing:
        told = next((outcome.name for outcome in failing if findings[outcome.name].hint), failing[0].name)
        verdict.failed, verdict.hint_id, verdict.detail = told, findings[told].hint, findings[told].detail
    if verdict.hint_id:
        verdict.hint = check.hints.get(verdict.hint_id) or GENERIC_HINTS[verdict.hint_id]
    if check.summary and not failing:
        verdict.summary = next((text for case, seen_one in seen if (text := check.summary(case, seen_one))), "")
    if check.picture:
        draw = check.picture

        def drawn() -> Any:
            with clean_torch():
                return next((figure for case, seen_one in seen if (figure := draw(case, seen_one)) is not None), None)

        verdict.draw = drawn
    return verdict

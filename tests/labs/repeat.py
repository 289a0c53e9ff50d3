"""The same verdict every time: each reference, wrong and right implementation judged again and again on the same cases.

What is repeated. The first verdict of an implementation is a whole one: fresh rank processes for each case, as for a learner. Then each
of its cases is answered N - 1 times more, and the whole check judged N - 1 times more on those answers. Where the first verdict had every
rank answer, the answers of up to 20 repetitions come from the same rank processes, each with a candidate opened anew (starting
processes is nine tenths of a verdict). Where a rank stood still, crashed or was stopped, where a probe leaves something behind
that shows in a second answer of the same process, and with `fresh`, every answer has fresh processes, a few jobs at a time.

Verdicts are the same if status, points, hint, and the outcome of every criterion are. What was done is kept in build/repeat, one file
per topic, under a hash of the code that made it: a run that was stopped goes on where it was.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.checks import Verdict, _wire, get_check, run_check
from labkit.checks._runner import LocalTransport, Report
from labkit.ranks import launch, travel
from tests.labs import corpus, many
from tests.labs.references import reference, references

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "repeat"
PER_PROCESS = 20
START = 10  # what an implementation's first verdict takes, about, in verdicts of the same processes
JOBS = 2 * (os.cpu_count() or 1)  # where fresh ones stand still more than they work


@dataclass(frozen=True)
class Item:
    """One implementation and how often it is judged. `wanted` says whether a verdict is the right one."""

    kind: str
    name: str
    check: str
    candidate: Any
    forbid: bool
    times: int
    wanted: Callable[[Verdict], bool]

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.check} {self.name}"


def items(topic: str, times: int, others: int) -> list[Item]:
    """The references of a topic (`times`), then its wrong and right ones (`others`)."""
    found = [
        Item("reference", "reference", check, reference(lab, names), True, times, lambda v: v.status == "pass" and v.points == v.max_points)
        for lab, check, names in references()
        if check.partition(".")[0] == topic
    ]
    wrongs, rights = corpus.load()
    found += [
        Item("wrong", one.name, one.check, one.candidate, True, others, lambda v, one=one: corpus.told_right(one, v))
        for one in wrongs
        if one.topic == topic
    ]
    found += [
        Item("right", one.name, one.check, one.candidate, one.forbid, others, lambda v, one=one: corpus.accepted(one, v))
        for one in rights
        if one.topic == topic
    ]
    return found


# -- answers, and verdicts on them --


@dataclass
class Listening:
    """A transport that keeps what it carried."""

    asked: list[tuple[bytes, int, float]] = field(default_factory=list)
    answered: bool = True

    def send(self, payload: bytes, world_size: int, timeout: float) -> Sequence[Report]:
        self.asked.append((payload, world_size, timeout))
        reports = LocalTransport().send(payload, world_size, timeout)
        self.answered &= all(report.status == "ok" for report in reports)
        return reports


class Replay:
    """A transport that hands out answers which are there already, as if to the question asked."""

    def __init__(self, answers: list[Sequence[Report]]) -> None:
        self.answers = iter(answers)

    def send(self, payload: bytes, world_size: int, timeout: float) -> Sequence[Report]:
        nonce = _wire.unpack(payload)[0]["nonce"]
        return [_stamped(report, nonce) for report in next(self.answers, [Report("protocol", detail="a case more than at first")])]


def _stamped(report: Report, nonce: str) -> Report:
    if report.status != "ok":
        return report
    reply, tensors, _ = _wire.unpack(report.data)
    return Report("ok", _wire.pack(reply | {"nonce": nonce}, tensors), report.detail, report.output)


def _in_a_row(asked: tuple[bytes, int, float], copies: int) -> list[Sequence[Report]]:
    """Answers of the same processes."""
    payload, world_size, timeout = asked
    reports = launch(many.pack(copies, payload), world_size=max(1, world_size), entry="tests.labs.many:serve",
                     timeout=timeout * copies, init_process_group=world_size > 0)  # fmt: skip
    ranks = [
        [Report("ok", data) for data in many.unpack(report.data)]
        if report.status == "ok"
        else [Report(report.status, detail=report.detail)] * copies
        for report in reports
    ]
    return list(zip(*ranks, strict=True))


def _fresh(asked: tuple[bytes, int, float], copies: int) -> list[Sequence[Report]]:
    """Answers of fresh processes, a few jobs at a time."""
    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(lambda _: LocalTransport().send(*asked), range(copies)))


def same(verdict: Verdict) -> tuple:
    """What must not change from one verdict to the next."""
    criteria = tuple((outcome.name, outcome.passed) for outcome in verdict.criteria)
    return verdict.status, verdict.points, verdict.failed, verdict.hint_id, criteria


def _again(item: Item, candidate: bytes, asked: list[tuple], copies: int, answer: Callable) -> list[Verdict]:
    by_case = [answer(one, copies) for one in asked]
    return [
        run_check(get_check(item.check), candidate, forbid=item.forbid, strict=True, transport=Replay([case[k] for case in by_case]))
        for k in range(copies)
    ]


def verdicts(item: Item, fresh: bool = False) -> tuple[list[Verdict], str]:
    """All verdicts on an implementation, and how all but the first came about: "in a row" or "fresh"."""
    candidate, listening = travel.dumps(item.candidate), Listening()
    first = run_check(get_check(item.check), candidate, forbid=item.forbid, strict=True, transport=listening)
    found, how = [first], "fresh"
    if listening.answered and not fresh and item.times > 1:
        tried = _again(item, candidate, listening.asked, min(2, item.times - 1), _in_a_row)
        if all(same(verdict) == same(first) for verdict in tried):
            found, how = [first, *tried], "in a row"
    while (left := item.times - len(found)) > 0:
        found += _again(item, candidate, listening.asked, min(left, PER_PROCESS), _in_a_row if how == "in a row" else _fresh)
    return found, how


# -- the run --


def _code(topic: str) -> str:
    """A hash of all code that a topic's verdicts depend on: not of the other topics' checks and implementations."""
    others = {check.partition(".")[0] for _, check, _ in references()} - {topic}
    paths = [path for folder in ("labkit", "tests/labs", "notebooks/source") for path in (ROOT / folder).rglob("*.py")]
    paths = [path for path in paths if not re.sub(r"^(_|test_corpus_|test_|\d+_)", "", path.stem).startswith(tuple(others))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def _line(item: Item, row: dict[str, Any]) -> str:
    first = "" if row["wanted"] else ": NOT the one that is wanted"
    told = f"{item.key}: {row['times']} verdicts, {row['different']} unlike the first{first}"
    return f"{told} ({row['how']}, {row['seconds']:.1f} s){row['told']}"


def _judge(item: Item, fresh: bool) -> dict[str, Any]:
    started = time.perf_counter()
    found, how = verdicts(item, fresh)
    odd = [verdict for verdict in found if same(verdict) != same(found[0])]
    told = f"\n    at first {same(found[0])}\n    then {same(odd[0])}\n    {odd[0].detail[:400]}" if odd else ""
    return {"times": len(found), "different": len(odd), "wanted": item.wanted(found[0]), "how": how, "told": told,
            "seconds": time.perf_counter() - started}  # fmt: skip


def _topic(topic: str, todo: list[Item], fresh: bool) -> list[dict[str, Any]]:
    """The rows of a topic's items, those of an earlier run included."""
    code = _code(topic)
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{topic}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    rows = kept["rows"] if kept.get("code") == code and kept.get("fresh") == fresh else {}
    done_before, started, judged, spent = len(rows), time.perf_counter(), 0, 0
    for number, item in enumerate(todo, 1):
        if rows.get(item.key, {"times": 0})["times"] >= item.times:
            continue
        row = rows[item.key] = _judge(item, fresh)
        judged, spent = judged + 1, spent + item.times + START
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"code": code, "fresh": fresh, "rows": rows}, indent=1))
        new.replace(path)
        if row["different"] or not row["wanted"] or item.kind == "reference":
            print(_line(item, row), flush=True)
        elif judged % 10 == 0:
            rest = (time.perf_counter() - started) / spent * sum(item.times + START for item in todo[number:])
            print(f"  {topic}: {number} of {len(todo)}, about {rest / 60:.0f} minutes left", file=sys.stderr, flush=True)
    if done_before:
        print(f"  {topic}: {done_before} implementations were judged by an earlier run of the same code", flush=True)
    return [rows[item.key] for item in todo]


def run(topics: list[str], times: int, others: int | None, fresh: bool) -> int:
    """Judge and tell; 0 if every verdict is the wanted one, every time."""
    others, good = others or max(1, times // 10), True
    for topic in topics or sorted({check.partition(".")[0] for _, check, _ in references()}):
        todo = items(topic, times, others)
        if not todo:
            print(f"no check and no implementation of a topic called {topic!r}", file=sys.stderr)
            return 2
        try:
            rows = _topic(topic, todo, fresh)
        except KeyboardInterrupt:
            print(f"\nstopped; the same command goes on from here ({KEPT / topic}.json)", file=sys.stderr)
            return 130
        good &= all(row["wanted"] and not row["different"] for row in rows)
        counts = {how: sum(row["times"] for row in rows if row["how"] == how) for how in ("in a row", "fresh")}
        print(
            f"{topic}: {len(todo)} implementations, {sum(row['times'] for row in rows)} verdicts "
            f"({counts['fresh']} of those of implementations that get fresh processes each time), "
            f"{sum(row['different'] for row in rows)} unlike the first, {sum(not row['wanted'] for row in rows)} not as wanted, "
            f"{sum(row['seconds'] for row in rows) / 60:.1f} minutes",
            flush=True,
        )
    return 0 if good else 1

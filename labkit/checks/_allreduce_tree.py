"""Check "allreduce.tree": whole tensors, but only about log2(W) messages one after the other."""

import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit.checks._allreduce_hints import HINTS, on_error
from labkit.checks._allreduce_naive import judge_sum
from labkit.checks._allreduce_ring import _judge_bits
from labkit.checks._allreduce_traffic import DTYPES, FORBIDS, Observer, collective, in_flight, numbers, rows_of, sends, traffic_picture
from labkit.checks._core import Case, Check, Criterion, Finding, Observation, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EDGE = "any number of ranks"


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def run(count: int) -> dict[str, Any]:
        return {"shape": [count], "dtype": "float32", "seed": int(torch.randint(1, 2**24, (), generator=generator))}

    cases = [
        Case("8 ranks", {"runs": [run(47)]}, world_size=8),
        Case("3 ranks", {"runs": [run(21)]}, world_size=3, covers=(EDGE,)),
        Case("6 ranks", {"runs": [run(29)]}, world_size=6, covers=(EDGE,)),
    ]
    if strict:
        others = [(1, 7), (5, 26), (7, 31)]
        cases += [Case(f"{ranks} ranks", {"runs": [run(count)]}, world_size=ranks, covers=(EDGE,)) for ranks, count in others]
    return cases


def _probe(candidate: Any, case: Case) -> Observation:
    (run,) = case.values["runs"]
    x = numbers(run["shape"], DTYPES[run["dtype"]], run["seed"], dist.get_rank())
    with Observer() as observer:
        _, row = observer.run(candidate, x)
    return Observation({"rows": [row]}, {"0": x})


def rounds(rows: list[dict[str, Any]]) -> float:
    """How many messages follow one another, if each takes one unit of time, and a rank sends one and receives one at a time.

    Replays the ranks' own order of posting and waiting (a wait ends when all that the rank has posted is done).
    """
    ranks = len(rows)
    clock, at = [0.0] * ranks, [0] * ranks
    sending, receiving = [0.0] * ranks, [0.0] * ranks  # until when a rank's way out and way in are taken
    sent: dict[tuple[int, int], deque] = defaultdict(deque)
    wanted: list[list[dict[str, Any]]] = [[] for _ in rows]
    open_: list[list[dict[str, Any]]] = [[] for _ in rows]
    ready: list[dict[str, Any]] = []
    while True:
        for rank, row in enumerate(rows):
            while at[rank] < len(row["messages"]):
                kind, peer, *_ = row["messages"][at[rank]]
                if kind == "wait":
                    if any(message["end"] is None for message in open_[rank]):
                        break
                    clock[rank] = max([clock[rank], *(message["end"] for message in open_[rank])])
                    open_[rank] = []
                else:
                    message = {"posted": clock[rank], "end": None, "rank": rank, "peer": peer}
                    open_[rank].append(message)
                    if kind == "send":
                        sent[rank, peer].append(message)
                    else:
                        wanted[rank].append(message)
                at[rank] += 1
        for rank in range(ranks):
            for message in list(wanted[rank]):
                sources = [source for source in range(ranks) if message["peer"] in (None, source) and sent[source, rank]]
                if sources:
                    source = min(sources, key=lambda source: sent[source, rank][0]["posted"])
                    ready.append({"send": sent[source, rank].popleft(), "recv": message})
                    wanted[rank].remove(message)
        if not ready:
            return max(clock)
        pair = min(ready, key=lambda pair: max(pair["send"]["posted"], pair["recv"]["posted"]))
        ready.remove(pair)
        source, target = pair["send"]["rank"], pair["recv"]["rank"]
        end = 1.0 + max(pair["send"]["posted"], pair["recv"]["posted"], sending[source], receiving[target])
        sending[source] = receiving[target] = pair["send"]["end"] = pair["recv"]["end"] = end


# -- judge --


def _judge(case: Case, seen: Observation) -> list[Finding]:
    (run,) = case.values["runs"]
    rows = rows_of(seen, 0)
    parts = [numbers(run["shape"], DTYPES[run["dtype"]], run["seed"], rank) for rank in range(case.world_size)]
    flight = in_flight(rows, case.name)
    summed, bits = judge_sum(seen, 0, parts, case.name), _judge_bits(seen, 0, case.name)
    if not flight.passed:
        summed = Finding("sum", False, summed.expected, "cannot be relied on: see below")
        bits = Finding("same bits", False, bits.expected, summed.observed)
    findings = [summed, _judge_depth(rows, case.name), bits, flight]
    if case.covers is None:
        return findings
    worst = next((one for one in findings if not one.passed and one.hint), None)
    if worst is None:
        return [Finding(EDGE, True, "as with 8", "so")]
    hint = "power" if worst.hint in ("missing", "nothing", "counted-twice", "garbage", "silent") else worst.hint
    return [Finding(EDGE, False, "as with 8", worst.observed, hint, worst.detail)]


def limit(ranks: int) -> int:
    """A binomial tree takes 2 ceil(log2 W); a heap's shape takes more. Rank 0 alone, and a ring, take 2 (W - 1)."""
    return 3 * math.ceil(math.log2(ranks))


def _judge_depth(rows: list[dict[str, Any]], where: str) -> Finding:
    name, most = "messages in a row", limit(len(rows))
    expected = f"at most {most} with {len(rows)} ranks"
    called = collective(rows)
    if called:
        return Finding(name, False, expected, f"{called} was called", "collective")
    if len(rows) > 1 and not any(sends(row) for row in rows):
        return Finding(name, False, expected, "no messages", "silent")
    depth = rounds(rows)
    return Finding(name, depth <= most, expected, f"{where}: {depth:g}", None if depth <= most else "depth")


def _picture(case: Case, seen: Observation) -> "Figure | None":
    return traffic_picture(rows_of(seen, 0), f"Your messages: {case.name}") if case.covers is None else None


def _summary(case: Case, seen: Observation) -> str | None:
    return f"{rounds(rows_of(seen, 0)):g} messages in a row with 8 ranks" if case.covers is None else None


register(Check(
    "allreduce.tree",
    criteria=(
        Criterion("sum", "numbers", 0.25, "recomputed"),
        Criterion("messages in a row", "technique", 0.25, "wire"),
        Criterion("same bits", "cost", 0.125, "recomputed"),
        Criterion("buffers in flight", "cost", 0.125),
        Criterion(EDGE, "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=FORBIDS,
    on_error=on_error,
    picture=_picture,
    summary=_summary,
))  # fmt: skip

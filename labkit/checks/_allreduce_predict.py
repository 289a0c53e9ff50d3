"""Check "allreduce.predict": seconds by the model of latency and bandwidth."""

import math
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.ranks import Link

NAMES = ("naive", "ring", "tree")
HINTS = {
    "steps": "How many messages follow one another, for this number of ranks?",
    "size": "How many bytes are in one message of this algorithm?",
    "latency": "Take a message of 0 bytes. How long does it take, and how many of them follow one another?",
    "bandwidth": "Take a wire without latency. How long is it busy with one message, and how many follow one another?",
    "phases": "The sum has to be made and it has to come back. Are both in your time?",
    "alone": "What does one rank have to send?",
    "units": "The ratio of your time to the expected one is the same everywhere. Which units do bandwidth, latency and size have?",
    "tree-rounds": "How many rounds do 5 to 8 ranks need, if in each round every rank that still has to send does so at once?",
}


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def uniform(low: float, high: float) -> float:
        return low * (high / low) ** torch.rand((), generator=generator, dtype=torch.float64).item()

    def row(ranks: int, nbytes: int | None = None, **link: float) -> dict[str, Any]:
        size = round(uniform(1e3, 1e8)) * 64 if nbytes is None else nbytes
        return {"ranks": ranks, "nbytes": size,
                "link": {"bandwidth_bytes_s": uniform(1e6, 1e11), "latency_s": uniform(1e-6, 1e-1), **link}}  # fmt: skip

    counts = [2, 3, 4, 5, 8, 16] + ([6, 7, 9, 31, 64, 100, 1024] if strict else [])
    rows = [row(count) for count in counts] + [row(5, 0), row(3, latency_s=0.0), row(3, 5, latency_s=0.0)]
    return [Case("fresh links", {"rows": rows}), Case("one rank", {"rows": [row(1), row(1, 0)]}, covers=("one rank",))]


def _probe(candidate: Any, case: Case) -> Observation:
    rows = []
    for row in case.values["rows"]:
        told = candidate(row["ranks"], row["nbytes"], Link(**row["link"]))
        if not isinstance(told, dict) or not set(NAMES) <= set(told):
            raise WrongResult(f"returned {told!r:.60}, expected a dict with seconds for {', '.join(NAMES)}", None)
        try:
            rows.append([float(told[name]) for name in NAMES])
        except (TypeError, ValueError):
            raise WrongResult(f"returned {told!r:.80}, expected seconds as numbers", None) from None
    return Observation({"rows": rows})


def seconds(name: str, ranks: int, nbytes: float, latency_s: float, bandwidth: float) -> float:
    """The model: messages that follow one another, each a latency and its bytes over the bandwidth."""
    messages = {"naive": 2 * (ranks - 1), "ring": 2 * (ranks - 1), "tree": 2 * math.ceil(math.log2(ranks))}[name]
    return messages * (latency_s + (nbytes / ranks if name == "ring" else nbytes) / bandwidth)


def _judge(case: Case, seen: Observation) -> list[Finding]:
    rows = list(zip(case.values["rows"], seen.values["rows"], strict=True))
    if case.covers:
        bad = next((told for _, told in rows if any(abs(value) > 0 for value in told)), None)
        return [Finding("one rank", bad is None, "0 s", "0 s" if bad is None else f"{max(bad):.3g} s", None if bad is None else "alone")]
    return [_judge_one(name, index, rows) for index, name in enumerate(NAMES)]


def _judge_one(name: str, index: int, rows: list[tuple[dict[str, Any], list[float]]]) -> Finding:
    expected = "latency + bytes / bandwidth of each message in a row"
    for row, told in rows:
        ranks, link = row["ranks"], row["link"]
        wanted = seconds(name, ranks, row["nbytes"], link["latency_s"], link["bandwidth_bytes_s"])
        rounded = seconds(name, ranks, ranks * math.ceil(row["nbytes"] / ranks), link["latency_s"], link["bandwidth_bytes_s"])
        if not wanted * (1 - 1e-6) <= told[index] <= rounded * (1 + 1e-6):
            observed = f"{ranks} ranks, {row['nbytes']} bytes, {Link(**link)}: {told[index]:.4g} s, not {wanted:.4g} s"
            return Finding(name, False, expected, observed, _why(name, index, rows))
    return Finding(name, True, expected, f"{len(rows)} links")


def _why(name: str, index: int, rows: list[tuple[dict[str, Any], list[float]]]) -> str:
    """Which term is wrong, from all rows at once: told = a * latency + b * bytes / bandwidth, with a and b for each number of ranks."""
    for row, told in rows:
        link, ranks = row["link"], row["ranks"]
        if ranks < 3 or not math.isfinite(told[index]):
            continue
        transmission = row["nbytes"] / link["bandwidth_bytes_s"]
        if row["nbytes"] == 0 and told[index] != 0:
            steps = told[index] / link["latency_s"]
            right = seconds(name, ranks, 0, 1.0, 1.0)
            if abs(steps - right) > 1e-6:
                return "phases" if abs(2 * steps - right) < 1e-6 else "tree-rounds" if name == "tree" else "latency"
        if link["latency_s"] == 0:
            share = told[index] / transmission
            right = seconds(name, ranks, 1.0, 0.0, 1.0)
            if abs(share - right) > 1e-6:
                if abs(2 * share - right) < 1e-6:
                    return "phases"
                return "size" if abs(share - right * ranks) < 1e-6 or abs(share * ranks - right) < 1e-6 else "bandwidth"
        if row["nbytes"] == 0 and told[index] == 0:
            return "latency"
    return "tree-rounds" if name == "tree" else "steps"


def _summary(case: Case, seen: Observation) -> str | None:
    return None if case.covers else f"three algorithms, {len(seen.values['rows'])} links"


register(Check(
    "allreduce.predict",
    criteria=(
        Criterion("naive", "technique", 0.5, "recomputed"),
        Criterion("ring", "technique", 0.75, "recomputed"),
        Criterion("tree", "technique", 0.5, "recomputed"),
        Criterion("one rank", "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    summary=_summary,
))  # fmt: skip

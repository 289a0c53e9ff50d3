"""Check "parameter_server.layers": pushes put together from layers that arrive one by one, in any order, from several workers and lives."""

import gc
import random
import weakref
from typing import Any

import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._parameter_server_hints import HINTS, on_error

WHOLE, MIXED, LIVES, HELD = "whole pushes", "several workers", "deaths in mid-push", "memory"
NAMES = ("first.weight", "first.bias", "second.weight")


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    rng = random.Random(int(torch.randint(1, 2**31, (), generator=generator)))
    more = 3 if strict else 1
    return [
        Case(WHOLE, {"kind": WHOLE, "runs": [_script(rng, 1, 5) for _ in range(more)]}),
        Case(MIXED, {"kind": MIXED, "runs": [*(_script(rng, 3, 5, again=0.25) for _ in range(more)), AGAIN]}, covers=(MIXED,)),
        Case(LIVES, {"kind": LIVES, "runs": [*(_script(rng, workers, 6, deaths=0.2) for workers in (1, 2, 3) for _ in range(more)), BACK]},
             covers=(LIVES, HELD)),
    ]  # fmt: skip


def _story(*parts: tuple[int, int, str]) -> list[list]:
    """Arrivals of worker 0, told as (life, clock, layers)."""
    return [[0, life, clock, int(layer)] for life, clock, layers in parts for layer in layers]


# all of a push again, at once and after the next one; a later life at an earlier clock
AGAIN = _story((0, 0, "012"), (0, 0, "120"), (0, 1, "210"), (0, 0, "012"), (0, 1, "012"), (0, 2, "201"))
BACK = _story((0, 2, "012"), (0, 3, "01"), (1, 1, "2"), (0, 3, "2"), (1, 1, "01"), (0, 3, "012"), (1, 2, "012"))


def _script(rng: random.Random, workers: int, clocks: int, again: float = 0.0, deaths: float = 0.0) -> list[list]:
    """Arrivals [worker, life, clock, layer]; a dead worker's last layers may come late, after those of its next life."""
    told: list[list] = []
    life, clock = [0] * workers, [0] * workers
    todo: list[list[int]] = [[] for _ in range(workers)]
    late: list[list] = []
    while any(at < clocks for at in clock):
        worker = rng.choice([w for w in range(workers) if clock[w] < clocks])
        if not todo[worker]:
            todo[worker] = rng.sample(range(len(NAMES)), len(NAMES))
        if deaths and rng.random() < deaths and life[worker] < 6:
            late += [[worker, life[worker], clock[worker], layer] for layer in todo[worker][:1]]
            life[worker], todo[worker] = life[worker] + 1, []
            continue
        told.append([worker, life[worker], clock[worker], todo[worker].pop(0)])
        if not todo[worker]:
            clock[worker] += 1
        if late and late[0][1] < life[late[0][0]] and any(one[:2] == [late[0][0], life[late[0][0]]] for one in told) and rng.random() < 0.5:
            told.append(late.pop(0))
        if again and rng.random() < again:
            told.append(list(rng.choice(told[-4:])))
    return told


class _Files:
    """What is expected at each arrival: the arrivals that make a whole push, or nothing."""

    def __init__(self) -> None:
        self.newest: dict[int, tuple[int, int]] = {}
        self.there: dict[int, dict[int, int]] = {}

    def step(self, number: int, worker: int, life: int, clock: int, layer: int) -> dict[int, int] | None:
        mine = self.newest.get(worker, (-1, -1))
        if (life, clock) < mine:
            return None
        if (life, clock) > mine:
            self.newest[worker], self.there[worker] = (life, clock), {}
        complete = len(self.there[worker]) == len(NAMES)
        self.there[worker].setdefault(layer, number)
        return None if complete or len(self.there[worker]) < len(NAMES) else self.there[worker]


def _gradient(run: list[list], number: int) -> torch.Tensor:
    """Tells its sender: worker, life, clock, layer. A layer that arrives twice is the same."""
    return torch.tensor([float(part) for part in run[number]])


def _probe(candidate: Any, case: Case) -> Observation:
    told = []
    for run in case.values["runs"]:
        layers, wholes, refs = candidate(list(NAMES)), [], []
        for number, (worker, life, clock, layer) in enumerate(run):
            gradient = _gradient(run, number)
            refs.append(weakref.ref(gradient))
            whole = layers.arrive(worker, life, clock, NAMES[layer], gradient)
            del gradient
            wholes.append(None if whole is None else _parts(whole))
            del whole
        gc.collect()
        told.append({"wholes": wholes, "held": sum(ref() is not None for ref in refs)})
    return Observation({"runs": told})


def _parts(whole: Any) -> dict[str, list[int]]:
    if not isinstance(whole, dict) or not all(isinstance(value, torch.Tensor) for value in whole.values()):
        raise WrongResult(f"arrive returned {type(whole).__name__}, expected None or a dict of name -> gradient", "layer-values")
    return {str(name): [round(part) for part in value.flatten().tolist()] for name, value in whole.items()}


def _judge(case: Case, seen: Observation) -> list[Finding]:
    kind = case.values["kind"]
    wanted = {WHOLE: "once, when the last layer has arrived", MIXED: "each of its own worker and clock, once",
              LIVES: "never of two lives; a half one is never given out"}[kind]  # fmt: skip
    findings, pushes, most = [], 0, 0
    for run, told in zip(case.values["runs"], seen.values["runs"], strict=True):
        files = _Files()
        for number, (arrival, got) in enumerate(zip(run, told["wholes"], strict=True)):
            right = files.step(number, *arrival)
            fault = _fault(kind, arrival, right, got)
            if fault:
                if right is not None and got is None and _older_between(run, min(right.values()), number):
                    fault = fault[0], "old-layer"
                before = _words(run[max(0, number - 7) : number + 1])
                return [Finding(kind, False, wanted, f"arrival {number + 1}: {fault[0]}", fault[1], before)]
            pushes += right is not None
        workers = len({arrival[0] for arrival in run})
        most = max(most, told["held"] - len(NAMES) * workers)
    findings.append(Finding(kind, True, wanted, f"{pushes} whole pushes"))
    if kind == LIVES:
        told_held = f"{most} layers too many" if most > 0 else "no more than that"
        findings.append(Finding(HELD, most <= 0, "at most one push of each worker is held", told_held, "hoards"))
    return findings


def _fault(kind: str, arrival: list, right: dict | None, got: dict | None) -> tuple[str, str] | None:
    worker, life, clock, layer = arrival
    if got is None:
        return None if right is None else ("the push is whole, and nothing is returned", "never-whole")
    if set(got) != set(NAMES):
        return f"returned {len(got)} of {len(NAMES)} layers", "half"
    for name, parts in got.items():
        if len(parts) != 4 or NAMES[parts[3]] != name:
            return f"{name} holds something else", "layer-values"
    lives, others = {parts[1] for parts in got.values()}, {(parts[0], parts[2]) for parts in got.values()}
    if others != {(worker, clock)}:
        return "layers of different workers or clocks", "confused"
    if len(lives) > 1:
        return f"layers of lives {' and '.join(map(str, sorted(lives)))} in one push", "lives"
    if right is None:
        return "a push is returned again", "again-whole" if kind != LIVES else "old-life"
    return None


def _older_between(run: list[list], first: int, last: int) -> bool:
    """Did a layer of an older push of the same worker come after the first one of this push?"""
    worker, *newest = run[last][:3]
    return any(one[0] == worker and one[1:3] < newest for one in run[first:last])


def _words(arrivals: list[list]) -> str:
    return "\n".join(f"worker {w}, life {life}, clock {clock}: {NAMES[layer]}" for w, life, clock, layer in arrivals)


def _summary(case: Case, seen: Observation) -> str | None:
    if case.values["kind"] != WHOLE:
        return None
    whole = sum(one is not None for one in seen.values["runs"][0]["wholes"])
    return f"{whole} pushes out of {len(seen.values['runs'][0]['wholes'])} layers; none of two lives, none twice"


register(Check(
    "parameter_server.layers",
    criteria=(
        Criterion(WHOLE, "numbers", 0.5, "recomputed"),
        Criterion(MIXED, "technique", 0.5, "recomputed"),
        Criterion(LIVES, "technique", 0.75, "recomputed"),
        Criterion(HELD, "cost", 0.25),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    on_error=on_error,
    summary=_summary,
))  # fmt: skip

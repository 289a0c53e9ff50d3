"""Scripts of messages for a server's rules: made at random, played to the learner's class, and what is expected at each message.

A message is ["pull", worker], ["push", worker, clock] or ["death", worker]. The gradient of (worker, clock) is 1 at a place of its own and
0 elsewhere, so what was applied says by itself whose gradients are in it, and with what weight.
"""

import math
import random
from collections.abc import Iterable
from typing import Any

import torch

from labkit.checks._core import WrongResult

Row = dict[str, Any]
NAMES = ("weight", "bias")


class Rounds:
    """What is expected of synchronous rules, message by message."""

    def __init__(self, workers: int, need: int) -> None:
        self.need, self.round = need, 0
        self.alive, self.waits = set(range(workers)), set()
        self.inside: list[int] = []
        self.known: set[tuple[int, int]] = set()
        self.dropped: list[list[int]] = []

    def clock(self, worker: int) -> int:
        return self.round

    def step(self, message: list) -> Row:
        what, worker = message[:2]
        row: Row = {"answered": [], "applied": [], "back": what == "pull" and worker not in self.alive, "late": False}
        if what == "pull":
            self.alive.add(worker)
            if worker in self.inside:
                self.waits.add(worker)
            else:
                row["answered"] = [worker]
        elif what == "death":
            self.alive.discard(worker)
            self.waits.discard(worker)
        elif (worker, message[2]) not in self.known:
            self.known.add((worker, message[2]))
            row["late"] = message[2] < self.round
            if row["late"]:
                self.dropped.append([worker, message[2]])
            else:
                self.inside.append(worker)
        if self.inside and (len(self.inside) >= self.need or self.alive.issubset(self.inside)):
            row["applied"] = [{(one, self.round): 1 / len(self.inside) for one in self.inside}]
            row["answered"] = sorted({*row["answered"], *self.waits})
            self.round, self.inside, self.waits = self.round + 1, [], set()
        row["clocks"] = {one: self.round for one in row["answered"]}
        return row


class Clocks:
    """What is expected of asynchronous rules with a bound, message by message."""

    def __init__(self, workers: int, bound: float) -> None:
        self.bound, self.version, self.gap = bound, 0, 0
        self.at = [0] * workers
        self.alive, self.waits = set(range(workers)), set()
        self.read = [0] * workers
        self.delays: list[int] = []

    def clock(self, worker: int) -> int:
        return self.at[worker]

    def step(self, message: list) -> Row:
        what, worker = message[:2]
        row: Row = {"answered": [], "applied": [], "back": what == "pull" and worker not in self.alive, "late": False}
        if what == "pull":
            if row["back"]:
                self.at[worker] = max(self.at[worker], min((self.at[one] for one in self.alive), default=0))
                self.alive.add(worker)
            self.waits.add(worker)
        elif what == "death":
            self.alive.discard(worker)
            self.waits.discard(worker)
        elif message[2] == self.at[worker]:
            row["applied"] = [{(worker, message[2]): 1.0}]
            self.delays.append(self.version - self.read[worker])
            self.version, self.at[worker] = self.version + 1, self.at[worker] + 1
        least = min((self.at[one] for one in self.alive), default=0)
        row["answered"] = sorted(one for one in self.waits if self.at[one] - least <= self.bound)
        row["gaps"] = {one: self.at[one] - least for one in self.waits}
        for one in row["answered"]:
            self.read[one], self.gap = self.version, max(self.gap, self.at[one] - least)
        self.waits -= set(row["answered"])
        row["clocks"] = {one: self.at[one] for one in row["answered"]}
        return row


def rules_of(values: Row) -> Rounds | Clocks:
    """A fresh judge's copy of the rules that a run of a case is about."""
    if "need" in values:
        return Rounds(values["workers"], values["need"])
    return Clocks(values["workers"], bound_of(values))


def bound_of(values: Row) -> float:
    return math.inf if values["bound"] is None else values["bound"]


def expected(values: Row) -> tuple[list[Row], Rounds | Clocks]:
    rules = rules_of(values)
    return [rules.step(message) for message in values["script"]], rules


def script(
    values: Row, seed: int, *, again: float = 0.0, deaths: float = 0.0, slow: int | None = None, late: bool = False
) -> Row:
    """Fill in `values["script"]`: workers, number of clocks and the rule's own number are given.

    again  : how often a message arrives a second time; deaths : how often a worker dies
    slow   : a worker that does nothing in the first half; late : now and then one of them is held back for long
    """
    rng, rules = random.Random(seed), rules_of(values)
    workers, last = values["workers"], values["clocks"]
    does, holds = ["pull"] * workers, [0] * workers
    told: list[list] = []

    def say(message: list) -> None:
        told.append(message)
        for worker, clock in rules.step(message)["clocks"].items():
            if does[worker] != "dead":
                does[worker], holds[worker] = "push", clock

    stuck = 0
    while len(told) < values["length"] and stuck < 50:
        free = [w for w in range(workers) if does[w] != "waits" and not (does[w] == "push" and holds[w] >= last)]
        if slow is not None and len(told) < values["length"] * 0.6:
            free = [w for w in free if w != slow] or free  # it moves only when nobody else can
        if late:
            free = [w for w in free for _ in range(1 if w == workers - 1 else 6)]
        if not free:
            break
        if again and told and rng.random() < again:
            say(list(rng.choice(told[-6:])) if rng.random() < 0.8 else list(rng.choice(told)))
            continue
        worker = rng.choice(free)
        living = [w for w in range(workers) if does[w] != "dead"]
        if deaths and rng.random() < deaths and len(living) > 1:
            victim = rng.choice(living)
            does[victim] = "dead"
            say(["death", victim])
        elif does[worker] == "dead":
            stuck += 1
            if rng.random() < 0.35:
                does[worker] = "waits"
                say(["pull", worker])
        elif does[worker] == "push":
            does[worker] = "pull"
            say(["push", worker, holds[worker]])
        else:
            does[worker] = "waits"
            say(["pull", worker])
    if slow is not None and last not in holds:  # and now the slow one wakes those who wait for it
        for message in (["pull", slow], ["push", slow, rules.clock(slow)], ["pull", slow]):
            say(message)
    return values | {"script": told}


# -- beside the learner's code --


class SpyStore:
    """The parameters, as the learner's rules see them: counts versions and notes what is applied."""

    def __init__(self, workers: int, clocks: int) -> None:
        self.version, self.shape = 0, (workers, clocks)
        self.applied: list[torch.Tensor] = []

    def pull(self) -> tuple[int, dict[str, torch.Tensor]]:
        size = self.shape[0] * self.shape[1]
        return self.version, {"weight": torch.zeros(self.shape), "bias": torch.zeros(size)}

    def apply(self, gradients: Iterable[dict[str, torch.Tensor]]) -> None:
        gradients = list(gradients)
        if not gradients or not all(isinstance(one, dict) and set(one) == set(NAMES) for one in gradients):
            raise WrongResult("store.apply takes a list of gradients, each a dict of a push", "apply-list")
        weight, bias = (torch.stack([one[name].reshape(-1).double() for one in gradients]).mean(0) for name in NAMES)
        self.applied.append(weight if torch.equal(weight, bias) else torch.full_like(weight, math.nan))
        self.version += 1


def gradient_of(worker: int, clock: int, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    weight = torch.zeros(shape)
    weight[worker, clock] = 1.0
    return {"weight": weight, "bias": weight.flatten().clone()}


def workers_in(returned: Any, what: str) -> list[int]:
    """What a rule returned, as sorted numbers of workers."""
    if returned is None:
        return []
    try:
        return sorted({int(one) for one in returned})
    except (TypeError, ValueError):
        raise WrongResult(
            f"{what} returned {type(returned).__name__}, expected the list of workers that are answered now", "return-list"
        ) from None


def play(make: Any, values: Row) -> Row:
    """Play a run's script to the learner's class: a row per message, and what it noted."""
    shape = values["workers"], values["clocks"]
    store = SpyStore(*shape)
    rule = values["need"] if "need" in values else bound_of(values)
    server = make(store, values["workers"], rule)
    rows = []
    for message in values["script"]:
        before = len(store.applied)
        if message[0] == "push":
            returned = server.push(message[1], message[2], gradient_of(*message[1:], shape))
        else:
            returned = getattr(server, message[0])(message[1])
        answered = workers_in(returned, message[0])
        if any(not 0 <= one < values["workers"] for one in answered):
            raise WrongResult(f"{message[0]} answers workers {answered}, and there are {values['workers']}", "return-list")
        rows.append({
            "answered": answered,
            "applied": [_contributions(one, shape) for one in store.applied[before:]],
            "clocks": {str(one): int(server.clock(one)) for one in answered},
        })  # fmt: skip
    return {"rows": rows, "noted": _noted(server, values)}


def _contributions(mean: torch.Tensor, shape: tuple[int, int]) -> list[list[float]]:
    if torch.isnan(mean).any():
        return [[-1, -1, 0.0]]
    places = mean.nonzero().flatten().tolist()
    return [[place // shape[1], place % shape[1], float(mean[place])] for place in places]


def _noted(server: Any, values: Row) -> list | None:
    """`dropped` as pairs or `staleness` as numbers; None where it cannot be read."""
    noted = getattr(server, "dropped" if "need" in values else "staleness", None)
    try:
        return [[int(part) for part in one] for one in noted] if "need" in values else [int(one) for one in noted]
    except (TypeError, ValueError):
        return None

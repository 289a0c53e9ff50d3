"""Check "data_parallel.shard": who reads what, without a message."""

import math
import random
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import torch

from labkit.checks._core import Case, Check, Criterion, Finding, Observation, WrongResult, register
from labkit.checks._data_parallel_hints import HINTS, on_error
from labkit.checks._data_parallel_steps import FORBIDS

EPOCHS = (0, 1, 2, 7, 64)  # the later ones: no short cycle of orders


def _cases(generator: torch.Generator, strict: bool) -> list[Case]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    pairs = [[4 * number(60, 90), 4], [3 * number(50, 70) + 1, 3], [5 * number(40, 60) + 3, 5]]
    small = [[10, 4], [2, 4], [1, 3], [7, 1], [4, 4]]
    if strict:
        pairs += [[7 * number(90, 120) + 6, 7], [2 * number(100, 150), 2], [16 * number(20, 30) + 9, 16]]
        small += [[3, 8], [9, 8], [5, 2], [1, 1], [2, 5]]
    return [Case("many samples", {"pairs": pairs}), Case("few samples", {"pairs": small}, covers=("few samples",))]


def _as_list(result: Any) -> list[int]:
    if isinstance(result, torch.Tensor):
        result = result.detach().cpu().numpy()
    if isinstance(result, np.ndarray):
        if result.ndim != 1:
            raise WrongResult(f"returned an array of shape {result.shape}, expected one dimension", "type")
        result = result.tolist()
    if not isinstance(result, (list, tuple, range)):
        raise WrongResult(f"returned a {type(result).__name__}, expected a list or a 1-D tensor of whole numbers", "type")
    told = []
    for value in result:
        try:
            whole = int(value)
        except (TypeError, ValueError) as error:
            raise WrongResult(f"returned a list that holds a {type(value).__name__}", "type") from error
        if whole != value:
            raise WrongResult(f"returned {value!r} as the number of a sample", "type")
        told.append(whole)
    return told


def _probe(candidate: Any, case: Case) -> Observation:
    """What all ranks would answer, each with global generators of its own, and once more."""
    rows, touched = [], False
    for n, world in case.values["pairs"]:
        told = []
        for epoch in EPOCHS:
            shards = []
            for rank in range(world):
                for seed in (torch.manual_seed, random.seed, np.random.seed):
                    seed(1000 * rank + 7 * epoch + 1)
                before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
                shards.append(_as_list(candidate(n, rank, world, epoch)))
                after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
                touched |= not torch.equal(before[0], after[0]) or before[1:] != after[1:]
            told.append(shards)
        torch.manual_seed(4)
        random.seed(4)
        np.random.seed(4)
        again = _as_list(candidate(n, world - 1, world, 1))
        rows.append({"told": told, "again": again})
    return Observation({"rows": rows, "touched": touched})


def _judge(case: Case, seen: Observation) -> list[Finding]:
    few = case.covers is not None
    found: dict[str, Finding] = {}

    def note(name: str, passed: bool, expected: str, observed: str, hint: str | None = None) -> None:
        if name not in found or (found[name].passed and not passed):
            found[name] = Finding(name, passed, expected, observed, None if passed else hint)

    for (n, world), row in zip(case.values["pairs"], seen.values["rows"], strict=True):
        where = f"n={n}, world={world}"
        each = math.ceil(n / world)
        epochs = row["told"]
        for shards in epochs:
            lengths = {len(shard) for shard in shards}
            told = f"{where}: {' and '.join(map(str, sorted(lengths)))}"
            note("equally many", lengths == {each}, "ceil(n / world) on every rank", told, "count")
            complete = _complete(shards, n, world, where)
            if not complete[0] and row["again"] != epochs[1][-1]:  # ranks seeded differently drew different orders
                complete = *complete[:3], "global-seed"
            note("every sample", *complete)
        last = epochs[1][-1]
        same = row["again"] == last
        note("same answer", same, "the same twice, whatever the seeds", f"{where}: {'so' if same else 'not so'}", "global-seed")
        if few:
            continue
        note("random", *_random(epochs, n, where))
        note("another epoch, other samples", *_moves(epochs, n, world, where))
    touched = seen.values["touched"]
    note("generators left alone", not touched, "as before", "drawn from or seeded" if touched else "as before", "seeds-left")
    if few:
        bad = next((one for one in found.values() if not one.passed), None)
        told = (bad.observed, bad.hint) if bad else ("so", None)
        return [Finding("few samples", bad is None, "as with many", *told)]
    return list(found.values())


def _complete(shards: list[list[int]], n: int, world: int, where: str) -> tuple[bool, str, str, str | None]:
    expected = "each sample, none more than once more than another"
    counts = Counter(index for shard in shards for index in shard)
    outside = [index for index in counts if not 0 <= index < n]
    if outside:
        return False, expected, f"{where}: sample {outside[0]}", "range"
    if world > 1 and n > world and all(sorted(shard) == sorted(shards[0]) for shard in shards):
        return False, expected, f"{where}: all ranks read the same samples", "same-shard"
    times = [counts.get(index, 0) for index in range(n)]
    if min(times) == 0:
        lost = times.count(0)
        hint = "lost" if lost < world else "doubled"
        return False, expected, f"{where}: {lost} samples are read by nobody", hint
    if max(times) - min(times) > 1:
        return False, expected, f"{where}: one sample {max(times)} times, another {min(times)}", "doubled"
    return True, expected, f"{where}: all {n}", None


def _random(epochs: list[list[list[int]]], n: int, where: str) -> tuple[bool, str, str, str | None]:
    """No rank goes through its samples in a pattern, and no rank has a pattern of samples: steps between neighbours vary."""
    expected = "random order"
    for epoch, shards in enumerate(epochs):
        for rank, shard in enumerate(shards):
            steps = Counter((b - a) % n for a, b in zip(shard, shard[1:], strict=False))
            usual = steps.most_common(1)[0][1] / max(1, len(shard) - 1)
            if len(shard) > 20 and (usual > 0.3 or shard == sorted(shard)):
                return False, expected, f"{where}, epoch {EPOCHS[epoch]}, rank {rank}: {', '.join(map(str, shard[:5]))}, ...", "sorted"
            spread = sorted(set(shard))
            gaps = Counter(b - a for a, b in zip(spread, spread[1:], strict=False))
            if len(shards) > 1 and len(shard) > 20 and gaps.most_common(1)[0][1] > 0.9 * (len(spread) - 1):
                told = f"{where}, epoch {EPOCHS[epoch]}: rank {rank} has every {gaps.most_common(1)[0][0]}. sample"
                return False, expected, told, "same-epoch"
    return True, expected, "random"


def _moves(epochs: list[list[list[int]]], n: int, world: int, where: str) -> tuple[bool, str, str, str | None]:
    expected = "another order, and other samples on a rank"
    for one, other in combinations(range(len(EPOCHS)), 2):
        for rank in range(world):
            first, second = epochs[one][rank], epochs[other][rank]
            shared = len(set(first) & set(second)) / max(1, len(set(first)))
            same_place = sum(a == b for a, b in zip(first, second, strict=False)) / max(1, len(first))
            turned = len({(b - a) % n for a, b in zip(first, second, strict=False)}) == 1
            if first == second or same_place > 0.3 or turned or (world > 1 and shared > 0.85):
                told = "the same order" if first == second else f"{shared:.0%} the same samples"
                return False, expected, f"{where}, rank {rank}, epochs {EPOCHS[one]} and {EPOCHS[other]}: {told}", "same-epoch"
    return True, expected, "so"


def _summary(case: Case, seen: Observation) -> str | None:
    return None if case.covers else f"{len(EPOCHS)} epochs, each sample visited, equally many on all ranks"


register(Check(
    "data_parallel.shard",
    criteria=(
        Criterion("equally many", "technique", 0.25, "recomputed"),
        Criterion("every sample", "technique", 0.5, "recomputed"),
        Criterion("same answer", "technique", 0.25, "recomputed"),
        Criterion("random", "cost", 0.25, "recomputed"),
        Criterion("another epoch, other samples", "cost", 0.25, "recomputed"),
        Criterion("generators left alone", "cost", 0.25),
        Criterion("few samples", "cost", 0.25, "recomputed"),
    ),
    cases=_cases,
    probe=_probe,
    judge=_judge,
    hints=HINTS,
    forbids=(*FORBIDS, "torch.distributed.broadcast", "torch.distributed.all_reduce"),
    on_error=on_error,
    summary=_summary,
))  # fmt: skip

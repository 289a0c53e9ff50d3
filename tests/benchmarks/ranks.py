"""Four warm ranks that meet, all-reduce and return, against ``torch.multiprocessing.spawn`` and torchrunx; and how soon a deadlock ends.

All contenders take turns in the same rounds. The peers run warm, too: modules compiled and in the page cache, after a first call that
is not counted. torchrunx is installed by ``pip install torchrunx``; without it its row says so.
"""

import contextlib
import importlib.util
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from labkit.ranks import DeadlockError, run_ranks

RANKS = 4
EXPECTED = [float(sum(range(RANKS)))] * RANKS
ROUNDS = 2
OURS_PER_ROUND = 7
GOAL_S = 0.3
MANY, MANY_GOAL_S, ALONE_RUNS = 16, 1.5, 7
STILL_GOAL_S, STILL_RUNS = 1.0, 5
GOAL_TIMES = 20.0


def reduce() -> float:
    """What every contender runs on each rank."""
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def _ours() -> list[float]:
    return run_ranks(reduce, RANKS).values


def _spawned(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=RANKS)
    torch.save(reduce(), f"{path}/{rank}.pt")
    dist.destroy_process_group()


def _spawn() -> list[float]:
    with tempfile.TemporaryDirectory() as path:
        torch.multiprocessing.spawn(_spawned, args=(path,), nprocs=RANKS)
        return [torch.load(f"{path}/{rank}.pt") for rank in range(RANKS)]


def _torchrunx() -> list[float]:
    import torchrunx

    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=RANKS, backend="gloo")
    with _quiet():
        return launcher.run(reduce).results["localhost"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torchrunx's agents write tracebacks to the terminal when they are told to end."""
    kept = [os.dup(fd) for fd in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for fd in (1, 2):
            os.dup2(nowhere.fileno(), fd)
    try:
        yield
    finally:
        for fd, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, fd)
            os.close(copy)


def _seconds(run: Callable[[], list[float]]) -> float:
    start = time.perf_counter()
    values = run()
    seconds = time.perf_counter() - start
    assert values == EXPECTED, values
    return seconds


def _against(peer: str, ours_s: float, peer_s: float) -> dict[str, Any]:
    ratio = peer_s / ours_s
    return {
        "name": f"{RANKS} warm ranks, all-reduce, at least so many times faster than {peer}", "ours": ours_s, "peer": peer_s, "unit": "s",
        "ratio": ratio, "goal": f">= {GOAL_TIMES:g}", "met": ratio >= GOAL_TIMES,
    }


def rows() -> list[dict[str, Any]]:
    """Seconds from the call to the values, medians over the rounds."""
    peers = {"torch.multiprocessing.spawn": _spawn}
    if importlib.util.find_spec("torchrunx"):
        peers["torchrunx"] = _torchrunx
    # torchrunx and spawn import this file by name in their processes.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    for run in (_ours, *peers.values()):
        _seconds(run)
    times: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    for _ in range(ROUNDS):
        times["ours"] += [_seconds(_ours) for _ in range(OURS_PER_ROUND)]
        for name, run in peers.items():
            times[name].append(_seconds(run))
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    ours_s = middle["ours"]
    table = [_against(name, ours_s, middle[name]) for name in peers]
    if "torchrunx" not in peers:
        table.append(_against("torchrunx", ours_s, float("inf")) | {"peer": "not installed", "ratio": None, "met": None})
    still_s = _still_s()
    still = {
        "name": f"a deadlock of {RANKS} ranks, told so long after the last stood still", "ours": still_s, "peer": STILL_GOAL_S, "unit": "s",
        "ratio": still_s / STILL_GOAL_S, "goal": "<= 1", "met": still_s <= STILL_GOAL_S,
    }
    return [*table, _within(RANKS, _alone_s(RANKS), GOAL_S), _within(MANY, _alone_s(MANY), MANY_GOAL_S), still]


def _all_send_first() -> None:
    print(f"last line at {time.monotonic()}.", flush=True)
    dist.send(torch.ones(4), (dist.get_rank() + 1) % RANKS)


def _still_s() -> float:
    """Seconds from the last rank's last line to the exception, the longest of several."""
    taken = []
    for _ in range(STILL_RUNS):
        try:
            run_ranks(_all_send_first, RANKS)
        except DeadlockError as error:
            now = time.monotonic()
            lines = re.findall(r"last line at ([\d.]+)\.", str(error))
            assert len(lines) == RANKS, error
            taken.append(now - max(map(float, lines)))
    assert len(taken) == STILL_RUNS
    return max(taken)


def _alone_s(ranks: int) -> float:
    """Seconds from the call to the values, the median of runs without a peer beside (whose processes take a while to end)."""
    taken = []
    for _ in range(ALONE_RUNS):
        start = time.perf_counter()
        values = run_ranks(reduce, ranks).values
        taken.append(time.perf_counter() - start)
        assert values == [float(sum(range(ranks)))] * ranks, values
    return statistics.median(taken)


def _within(ranks: int, ours_s: float, goal_s: float) -> dict[str, Any]:
    return {
        "name": f"{ranks} warm ranks, all-reduce, within {goal_s:g} s", "ours": ours_s, "peer": goal_s, "unit": "s",
        "ratio": ours_s / goal_s, "goal": "<= 1", "met": ours_s <= goal_s,
    }

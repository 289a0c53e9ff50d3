"""Steps of data-parallel training, timed and recorded: several wrappers by turns in the same ranks, on a wire of choice."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.ranks import Link, run_ranks
from labkit.recorder import Recorder, Recording


@dataclass(frozen=True)
class Step:
    """One step of all ranks. `seconds`: of the slowest. A rank each: `backward`, when it begins and ends (seconds since the rank's step
    began), and `recordings`."""

    seconds: float
    backward: Sequence[tuple[float, float]]
    recordings: Sequence[Recording]

    def hidden(self) -> tuple[float, float, float]:
        """(seconds with an all-reduce on the wire, seconds of backward, seconds on the wire during backward) of the rank whose backward
        ends last: a message waits for the later rank, so that one's time is the step's."""
        last = max(range(len(self.recordings)), key=lambda rank: self.recordings[rank].clock_s + self.backward[rank][1])
        begin, end = self.backward[last]
        spans = _apart((row.start_s, row.end_s) for row in self.recordings[last].comm("all_reduce"))
        during = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in spans)
        return sum(stop - start for start, stop in spans), end - begin, during

    def messages(self) -> tuple[int, int]:
        """(all-reduces, bytes of the tensors in them) of rank 0."""
        rows = self.recordings[0].comm("all_reduce")
        return len(rows), sum(row.payload_bytes for row in rows)


def _apart(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without counting any of it twice: one message's latency passes while the next is on the wire."""
    apart: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        start = max(start, apart[-1][1]) if apart else start
        if stop > start:
            apart.append((start, stop))
    return apart


def measure_steps(
    wraps: Mapping[str, Callable[[nn.Module], Any]],
    make_model: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    link: Link | None = None,
    steps: int = 4,
    world: int = 2,
    warm: int = 1,
) -> dict[str, list[Step]]:
    """Train with each wrapper for some steps, all by turns in the same `world` ranks, one thread each; what every step took.

    wraps : name -> wrapper of a module; its `finish()`, where it has one, is called after backward. shape : of each rank's input, random.
    link : None is this machine's own wire. warm : steps before these, which only wake everything up (PyTorch's DDP wants three).
    Raises what a wrapper raises.
    """
    ranks = run_ranks(_train, world, wraps, make_model, shape, steps, warm, link=link, timeout=180).values
    told: dict[str, list[Step]] = {}
    for name in wraps:
        turns = zip(*(rank[name] for rank in ranks), strict=True)  # of each step, what every rank says
        told[name] = [Step(max(row[0] for row in turn), [row[1] for row in turn], [row[2] for row in turn]) for turn in turns]
    return told


def _train(
    wraps: Mapping[str, Callable[[nn.Module], Any]], make_model: Callable[[], nn.Module], shape: tuple[int, ...], steps: int, warm: int
) -> dict[str, list[tuple[float, tuple[float, float], Recording]]]:
    torch.set_num_threads(1)
    told: dict[str, list[tuple[float, tuple[float, float], Recording]]] = {name: [] for name in wraps}
    replicas = {}
    for name, wrap in wraps.items():
        model = make_model()
        replicas[name] = wrap(model), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(shape)
    for step in range(warm + steps):
        for name, (replica, optimizer) in replicas.items():
            optimizer.zero_grad()
            dist.barrier()  # all begin together
            with Recorder() as recorder:
                started = time.perf_counter()
                loss = replica(x).square().mean()
                turned = time.perf_counter()
                loss.backward()
                over = time.perf_counter()
                if hasattr(replica, "finish"):
                    replica.finish()
                optimizer.step()
                seconds = time.perf_counter() - started
            if step >= warm:
                told[name].append((seconds, (turned - started, over - started), recorder.recording))
    return told

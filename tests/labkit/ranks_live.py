"""Programs that are watched while they run."""

import time

import torch
import torch.distributed as dist

from labkit import ranks


def grows(steps: int, pause_s: float = 0.1):
    kept = []
    for _ in range(steps):
        kept.append(torch.ones(1 << 18))  # 1 MiB
        time.sleep(pause_s)
    return len(kept) + ranks.rank()


def grows_and_fails():
    grows(4)
    raise ValueError("mine")


def waits_for_nothing():
    grows(4)
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def floods():
    seat = ranks.here.current()
    for _ in range(20_000):
        seat.tell(b'{"points": [[0], [1]]}')
    seat.tell(b"[]")
    return "done"

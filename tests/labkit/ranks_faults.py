"""Programs to which accidents happen. They talk through files, so that a death breaks no connection."""

import os
import time

import torch
import torch.distributed as dist

from labkit import ranks
from labkit.ranks import here


def counts(steps: int, pause_s: float = 0.0):
    """Counts to `steps`, on a file that outlives the process, and says in which life it arrived."""
    path = here.scratch(f"count-{ranks.rank()}")
    for _ in range(steps):
        ranks.event("step")
        with open(path, "a") as file:
            file.write(".")
        time.sleep(pause_s)
    with open(path) as file:
        return ranks.restarts(), len(file.read()), dist.is_initialized()


def sends_until_killed(count: int):
    """Rank 0 sends one message after the other; rank 1 says how many it got before the silence."""
    got = 0
    if dist.get_rank() == 0:
        for number in range(count):
            dist.send(torch.tensor([float(number)]), 1)
        return count
    value = torch.zeros(1)
    try:
        for number in range(count):
            dist.recv(value, 0)
            assert value.item() == number
            got += 1
    except RuntimeError:
        pass
    return got


def clock(pause_s: float, beats: int):
    """The longest time between two beats."""
    times = []
    for _ in range(beats):
        ranks.event("beat")
        times.append(time.monotonic())
        time.sleep(pause_s)
    return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))


def gate():
    """Rank 1 may only pass when rank 0 has stepped twice, a moment apart."""
    if ranks.rank() == 0:
        for _ in range(2):
            time.sleep(0.2)
            ranks.event("step")
        return time.monotonic()
    ranks.event("pull")
    return time.monotonic()


def dies_by_itself():
    if ranks.rank() == 1:
        os.kill(os.getpid(), 9)
    time.sleep(5)


def leaves_children():
    import subprocess

    if ranks.restarts() == 0 and ranks.rank() == 0:
        subprocess.Popen(["sleep", "77"], start_new_session=True)
    ranks.event("ready")
    return os.getpid()

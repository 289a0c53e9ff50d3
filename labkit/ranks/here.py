"""What a function may ask of the rank that it runs on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from labkit.ranks.faults import Points
    from labkit.ranks.page import Writer


@dataclass
class _Here:
    rank: int
    world_size: int
    restarts: int
    folder: str
    writer: Writer | None = None
    points: Points | None = None
    tell: Callable[[bytes], None] = lambda data: None  # to whoever watches the job


_here: _Here | None = None


def sit(rank: int, world_size: int, restarts: int, folder: str, points: Points | None) -> None:
    """Called once, in a rank's process, before its function."""
    global _here
    _here = _Here(rank, world_size, restarts, folder, points=points)


def current() -> _Here:
    """Raises RuntimeError outside a rank."""
    if _here is None or _here.folder == "":
        raise RuntimeError("this is no rank: call it inside a function that run_ranks runs")
    return _here


def rank() -> int:
    """This rank's number, also where there is no ``torch.distributed`` group. Raises RuntimeError outside a rank."""
    return current().rank


def world_size() -> int:
    """How many ranks there are. Raises RuntimeError outside a rank."""
    return current().world_size


def restarts() -> int:
    """How often this rank has been killed and started again (`faults.restart`). Raises RuntimeError outside a rank."""
    return current().restarts


def device() -> torch.device:
    """Where this rank's tensors belong: its card, one that it shares with other ranks where there are fewer, or the CPU.

    Makes the card the current one. Raises RuntimeError outside a rank.
    """
    import torch

    seat = current()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    card = torch.device("cuda", seat.rank % torch.cuda.device_count())
    torch.cuda.set_device(card)
    return card


def event(name: str) -> None:
    """Name this instant: a mark in the rank's recording, and a place at which a fault can strike. Outside a rank, only the mark."""
    if "labkit.recorder" in sys.modules:
        sys.modules["labkit.recorder"].note_event(name)
    reached(name)


def reached(name: str) -> None:
    """Let happen what is planned for this event, if anything is."""
    if _here is not None and _here.points is not None:
        _here.points.reached(name)


def scratch(name: str) -> str:
    """A path in the folder that the ranks of a job share; it goes with the job."""
    return os.path.join(current().folder, name)

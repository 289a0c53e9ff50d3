"""The default process group of a job: gloo over loopback, met through a file."""

import datetime
import os
import socket
import sys
from typing import TYPE_CHECKING

from labkit.ranks import page

if TYPE_CHECKING:
    from labkit.ranks.child import Seat


def join_group(seat: "Seat", writer: page.Writer) -> page.Writer:
    """Initialise ``torch.distributed`` for this rank (gloo; NCCL too where every rank has a card of its own)."""
    import torch
    import torch.distributed as dist

    from labkit.ranks import notes

    # Else gloo looks the host name up, which fails or takes seconds on laptops whose name resolves nowhere.
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        if loopback in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if cards >= seat.world_size else "gloo",
        init_method=f"file://{seat.scratch}/rendezvous",
        rank=seat.number,
        world_size=seat.world_size,
        timeout=datetime.timedelta(seconds=max(60.0, 10 * seat.spec["timeout"])),
    )
    notes.install(writer)
    writer.set_state(page.RUNNING)
    return writer

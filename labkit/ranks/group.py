"""The default process group of a job, met through a file: gloo over loopback, with cards or a modelled wire where asked for."""

import datetime
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

from labkit.ranks import page

if TYPE_CHECKING:
    from labkit.ranks.child import Seat


def join_group(seat: "Seat", writer: page.Writer) -> None:
    """Initialise ``torch.distributed`` for this rank, with the backend of the job or the one that fits this machine's cards."""
    import torch
    import torch.distributed as dist

    from labkit.ranks import notes

    # Else gloo looks the host name up, which fails or takes seconds on laptops whose name resolves nowhere.
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        if loopback in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend, types = seat.spec["backend"] or choose(cards, seat.world_size, dist.is_nccl_available()), []
    if seat.spec["link"] is not None:
        backend, types = _register_link(seat, writer)
    elif backend == "staged":
        types = _register_staged()
    elif backend == "nccl":
        torch.cuda.set_device(seat.number)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend=backend,
        init_method=f"file://{seat.scratch}/rendezvous",
        rank=seat.number,
        world_size=seat.world_size,
        timeout=datetime.timedelta(seconds=max(60.0, 10 * seat.spec["timeout"])),
    )
    notes.install(writer, *types)


def choose(cards: int, ranks: int, nccl: bool) -> str:
    """The backend for so many ranks on so many cards: NCCL for a card each; gloo, over the host, for ranks that share; else gloo."""
    if cards == 0:
        return "gloo"
    return "nccl" if nccl and cards >= ranks else "staged"


def _register_staged() -> list:
    import torch.distributed as dist

    from labkit.ranks.staged import StagedGroup, StagedWork

    def make(options: Any, _: Any) -> StagedGroup:
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        return StagedGroup(gloo, options.group_rank, members, options.group_id)

    dist.Backend.register_backend("staged", make, extended_api=True, devices=["cpu", "cuda"])
    return [(StagedGroup, StagedWork)]


def _register_link(seat: "Seat", writer: page.Writer) -> tuple[str, list]:
    """Make groups of this process, the default one and later ones alike, groups on a modelled wire."""
    import torch.distributed as dist

    from labkit.ranks.link import Link
    from labkit.ranks.link_engine import Engine
    from labkit.ranks.link_group import LinkGroup
    from labkit.ranks.link_work import LinkWork
    from labkit.recorder import set_simulated_link

    link = Link(**seat.spec["link"])
    engine = Engine(link, seat.scratch, seat.number, seat.world_size, writer)
    set_simulated_link(link.as_dict())

    def make(options: Any, _: Any) -> LinkGroup:
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        return LinkGroup(engine, gloo, options.group_rank, members, options.group_id)

    dist.Backend.register_backend("link", make, extended_api=True, devices=["cpu", "cuda"])
    return "link", [(LinkGroup, LinkWork)]

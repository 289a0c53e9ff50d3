"""Entries and programs for the other ways in which ranks can talk."""

import torch
import torch.distributed as dist


def over_the_host(payload: bytes, rank: int, world_size: int) -> bytes:
    """Every kind of call with CPU tensors taken for a card's: all are staged."""
    from labkit.ranks import staged, travel
    from labkit.recorder import Recorder
    from tests.labkit import ranks_link, test_ranks_gloo

    if payload == b"staged":
        staged.needs_host = lambda tensor: tensor.numel() > 0
    torch.manual_seed(0)
    with Recorder() as recorder:
        collectives = ranks_link.collectives()
        peer, got = rank ^ 1, torch.zeros(3)
        send = dist.isend(torch.full((3,), float(rank)), peer)
        dist.recv(got, peer)
        send.wait()
    comm = [(row.kind, row.bytes_sent, row.bytes_received, row.asynchronous) for row in recorder.recording.comm() if row.kind != "wait"]
    trained = test_ranks_gloo.train_with("ddp"), test_ranks_gloo.train_with("fsdp")
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    future.wait()
    calls = test_ranks_gloo.every_kind_of_call(False) if world_size > 2 else None
    return travel.dumps((collectives, got.tolist(), comm, trained, future.value()[0].tolist(), calls))


def stuck(payload: bytes, rank: int, world_size: int) -> bytes:
    dist.recv(torch.ones(1), 1 - rank)
    return b""


def where():
    from labkit import ranks

    return str(ranks.device())


def reduces(more: float):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item() + more


def fails():
    raise ValueError("mine")

"""Ranks on real cards: NCCL with a card each, a shared card over the host, and a link between CUDA tensors."""

import pytest
import torch
import torch.distributed as dist

from labkit.ranks import Link, device, run_ranks

cards = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(cards == 0, reason="needs a CUDA card")


def reduces():
    there = torch.full((1000,), float(dist.get_rank()), device=device())
    dist.all_reduce(there)
    here = torch.ones(4)
    dist.all_reduce(here)
    return there.unique().tolist(), str(there.device), here[0].item()


def rings():
    rank, world = dist.get_rank(), dist.get_world_size()
    given, got = torch.full((1000,), float(rank), device=device()), torch.empty(1000, device=device())
    send = dist.isend(given, (rank + 1) % world)
    dist.recv(got, (rank - 1) % world)
    send.wait()
    parts = [torch.empty(1000, device=device()) for _ in range(world)]
    dist.all_gather(parts, given)
    shard = torch.empty(1000 // world, device=device())
    dist.reduce_scatter_tensor(shard, given[: 1000 // world * world].contiguous())
    return got.unique().tolist(), [part[0].item() for part in parts], shard[0].item()


def trains():
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device()))
    torch.manual_seed(dist.get_rank())
    model(torch.randn(8, 64, device=device())).square().mean().backward()
    return model.module.weight.grad.sum().item()


@pytest.mark.parametrize("ranks", sorted({1, cards}))
def test_a_card_for_each_rank(ranks):
    for number, (summed, where, here) in enumerate(run_ranks(reduces, ranks, timeout=120).values):
        assert summed == [float(sum(range(ranks)))] and where == f"cuda:{number}" and here == ranks


@pytest.mark.parametrize("link", [None, Link(1e9, 1e-4)])
def test_ranks_share_cards(link):
    ranks = cards + 1
    for number, (summed, where, here) in enumerate(run_ranks(reduces, ranks, timeout=120, link=link).values):
        assert summed == [float(sum(range(ranks)))] and where == f"cuda:{number % cards}" and here == ranks
    for number, (got, parts, shard) in enumerate(run_ranks(rings, ranks, timeout=120, link=link).values):
        assert got == [float((number - 1) % ranks)] and parts == [float(part) for part in range(ranks)] and shard == sum(range(ranks))
    values = run_ranks(trains, ranks, timeout=120, link=link).values
    assert values == pytest.approx([values[0]] * ranks)


def test_what_is_shared_is_recorded():
    result = run_ranks(rings, cards + 1, timeout=120, record=True)
    sent = [(row.kind, row.bytes_sent) for row in result.recordings[0].comm() if row.kind != "wait"]
    assert ("send", 4000) in sent and "all_gather" in dict(sent)

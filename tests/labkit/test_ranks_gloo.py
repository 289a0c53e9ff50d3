"""torch.distributed inside ranks: all of it works as outside, though its calls are noted, and gloo is as strict as the labs need.

Sends wait for their receive and read their buffer late, so that wrong code hangs or arrives wrong here, too."""

import time

import pytest
import torch
import torch.distributed as dist

from labkit.ranks import DeadlockError, run_ranks


def send_to_a_late_receiver():
    start = time.monotonic()
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        time.sleep(0.5)
        dist.recv(torch.ones(1), 0)
    return time.monotonic() - start


def test_a_send_returns_when_its_receive_is_posted():
    assert run_ranks(send_to_a_late_receiver, 2).values[0] > 0.3


def tiny_sends_first():
    dist.send(torch.ones(1), 1 - dist.get_rank())
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def test_both_sending_first_hangs_even_with_four_bytes():
    with pytest.raises(DeadlockError):
        run_ranks(tiny_sends_first, 2)


def overwrite_in_flight():
    data = torch.ones(1000)
    if dist.get_rank() == 0:
        work = dist.isend(data, 1)
        data.fill_(7)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.recv(data, 0)
    return data.unique().tolist()


def test_a_buffer_overwritten_in_flight_arrives_overwritten():
    assert run_ranks(overwrite_in_flight, 2).values[1] == [7.0]


def tiny_sends_with_receives():
    rank, got = dist.get_rank(), torch.zeros(1)
    send = dist.isend(torch.full((1,), float(rank)), 1 - rank)
    dist.recv(got, 1 - rank)
    send.wait()
    return got.item()


def every_kind_of_call(monitored=True):
    rank, world = dist.get_rank(), dist.get_world_size()
    one, got = torch.full((4,), float(rank)), {}
    parts = [torch.empty(4) for _ in range(world)]
    dist.all_gather(parts, one)
    got["all_gather"] = [part[0].item() for part in parts]
    whole = torch.empty(4 * world)
    dist.all_gather_into_tensor(whole, one)
    shard = torch.empty(1)
    dist.reduce_scatter_tensor(shard, torch.arange(float(world)))
    got["shard"] = shard.item()
    dist.broadcast(one, src=1)
    dist.reduce(one.clone(), dst=0)
    dist.scatter(torch.empty(1), [torch.ones(1)] * world if rank == 0 else None, src=0)
    dist.gather(torch.ones(1), [torch.ones(1) for _ in range(world)] if rank == 0 else None, dst=0)
    dist.all_to_all_single(torch.empty(world), torch.ones(world))
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    got["objects"] = objects
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        dist.send(total, 2, group=group) if rank == 0 else dist.recv(total, 0, group=group)
        got["subgroup"] = total.item()
    ring = [dist.P2POp(dist.isend, one, (rank + 1) % world), dist.P2POp(dist.irecv, one.clone(), (rank - 1) % world)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    if rank == 0:
        got["sources"] = sorted(dist.recv(torch.empty(1)) for _ in range(world - 1))
    else:
        dist.send(torch.ones(1), 0)
    if monitored:  # for gloo groups only
        dist.monitored_barrier()
    dist.barrier(async_op=True).wait()
    dist.destroy_process_group()
    return got


def test_every_kind_of_call_works_under_notes():
    first, _, third = run_ranks(every_kind_of_call, 3).values
    assert first["all_gather"] == [0.0, 1.0, 2.0] and third["shard"] == 6.0
    assert first["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert third["subgroup"] == 2.0 and first["sources"] == [1, 2]


def train_with(wrapper):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.full((2, 8), float(dist.get_rank() + step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return round(loss.item(), 4)


def test_ddp_and_fsdp2_train_alike():
    assert run_ranks(train_with, 2, "ddp").values == pytest.approx(run_ranks(train_with, 2, "fsdp").values, abs=1e-3)

"""Programs for ranks that a simulated wire connects."""

import time

import torch
import torch.distributed as dist

KB = 1000


def numbers(count: int, value: float = 1.0) -> torch.Tensor:
    """`count` kilobytes of fp32."""
    return torch.full((count * KB // 4,), value)


def three_sends(tags=(0, 0, 0)):
    """Rank 0 posts three messages of 300 kB at once, rank 1 takes them."""
    start = time.perf_counter()
    if dist.get_rank() == 0:
        works = [dist.isend(numbers(300, float(number)), 1, tag=tag) for number, tag in enumerate(tags)]
    else:
        buffers = [numbers(300) for _ in tags]
        works = [dist.irecv(buffer, 0, tag=tag) for buffer, tag in zip(buffers, tags, strict=True)]
    for work in works:
        work.wait()
    seconds = time.perf_counter() - start
    return seconds if dist.get_rank() == 0 else [buffer.unique().tolist() for buffer in buffers]


def to_two_peers():
    if dist.get_rank() == 0:
        for work in [dist.isend(numbers(600), peer) for peer in (1, 2)]:
            work.wait()
    else:
        dist.recv(numbers(600), 0)


def both_ways():
    peer = 1 - dist.get_rank()
    works = [dist.isend(numbers(600), peer), dist.irecv(numbers(600), peer)]
    for work in works:
        work.wait()


def collectives():
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = numbers(400, float(rank))
    dist.all_reduce(whole)
    parts = [numbers(100) for _ in range(world)]
    dist.all_gather(parts, numbers(100, float(rank)))
    shard = numbers(100)
    dist.reduce_scatter(shard, [numbers(100, float(rank + part)) for part in range(world)])
    dist.broadcast(whole, 1)
    dist.barrier()
    return whole[0].item(), [part[0].item() for part in parts], shard[-1].item()


def cpu_while_waiting():
    dist.barrier()
    used = time.process_time()
    dist.all_reduce(numbers(1000))
    return time.process_time() - used


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)


def compute_and_reduce(overlapped: bool):
    tensor = numbers(1000, 1.0)
    if overlapped:
        work = dist.all_reduce(tensor, async_op=True)
        busy(0.4)
        work.wait()
    else:
        busy(0.4)
        dist.all_reduce(tensor)
    return tensor[0].item()


def priority(first: str):
    """Two reductions wanted at once; who is launched first has the wire first."""
    sizes = {"large": 800, "small": 40}
    names = [first, *(name for name in sizes if name != first)]
    works = {name: dist.all_reduce(numbers(sizes[name]), async_op=True) for name in names}
    for name in ("small", "large"):
        works[name].wait()
    return names


def overwrites_after_isend():
    data = numbers(100, 1.0)
    if dist.get_rank() == 0:
        work = dist.isend(data, 1)
        data.fill_(7)
        work.wait()
    else:
        dist.recv(data, 0)
    return data.unique().tolist()


def reads_before_wait():
    data = numbers(100, float(dist.get_rank()))
    if dist.get_rank() == 0:
        dist.send(data, 1)
        return None
    work = dist.irecv(data, 0)
    early = data.unique().tolist()
    work.wait()
    return early, data.unique().tolist()


def divides_before_wait():
    data = numbers(100, 8.0)
    work = dist.all_reduce(data, async_op=True)
    data /= dist.get_world_size()
    work.wait()
    return data.unique().tolist()


def too_large():
    if dist.get_rank() == 0:
        dist.send(torch.ones(8), 1)
    else:
        dist.recv(torch.ones(4), 0)


def smaller():
    data = torch.zeros(8)
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(data, 0)
    return data.sum().item()


def mismatch():
    dist.all_reduce(torch.ones(3)) if dist.get_rank() else dist.broadcast(torch.ones(3), 0)


def long_transmission():
    """Nothing is posted or done for three seconds, and every rank waits: a wire at work, no deadlock."""
    peer = 1 - dist.get_rank()
    dist.send(numbers(300), peer) if dist.get_rank() else dist.recv(numbers(300), peer)
    return "done"


def futures():
    done = []
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.get_future().then(lambda future: done.append(future.value()[0].tolist())).wait()
    peer = 1 - dist.get_rank()
    sends, got = dist.isend(torch.ones(1), peer), torch.zeros(1)
    dist.irecv(got, peer).get_future().wait()
    sends.wait()
    return done, got.item(), work.is_completed()


def ddp_step():
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    model = DistributedDataParallel(model, bucket_cap_mb=0.5)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):  # DDP makes its buckets after the first backward
        model(torch.randn(8, 512)).square().mean().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters()]


def peer_dies():
    """Rank 1 dies when it has offered a message; then it is neither there for its message nor for one of ours."""
    from labkit import ranks

    if dist.get_rank() == 1:
        work = dist.isend(numbers(1), 0)
        ranks.event("offered")
        work.wait()
    time.sleep(0.5)
    told = []
    for call in (lambda: dist.recv(numbers(1), 1), lambda: dist.send(numbers(1), 1)):
        try:
            call()
        except RuntimeError as error:
            told.append(str(error))
    return told


def signs_of_a_transmission():
    """How much has been noted before and after a while in which only the wire works: it takes 1.5 s."""
    from labkit.ranks import here, page

    data, writer = numbers(1500), here.current().writer
    work = dist.isend(data, 1) if dist.get_rank() == 0 else dist.irecv(data, 0)
    time.sleep(0.4)
    before = writer.words[page._CHANGES]
    time.sleep(0.8)
    after = writer.words[page._CHANGES]
    work.wait()
    return before, after


def from_any():
    if dist.get_rank():
        dist.send(torch.ones(1), 0)
        return None
    return sorted(dist.recv(torch.zeros(1)) for _ in range(2))

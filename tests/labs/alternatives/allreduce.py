"""Right all-reduces, each built differently: none of these may lose a point."""

import math
import threading

import torch
import torch.distributed as dist

from tests.labs.corpus import right

NAIVE, SCATTER, GATHER, RING = "allreduce.naive", "allreduce.reduce-scatter", "allreduce.all-gather", "allreduce.ring"
TREE, PREDICT = "allreduce.tree", "allreduce.predict"


def place():
    return dist.get_rank(), dist.get_world_size()


# -- 6.1 --


@right("receives of all posted at once, a buffer for each", check=NAIVE)
def all_at_once(x):
    rank, world = place()
    if rank:
        dist.isend(x, 0).wait()
        dist.irecv(x, 0).wait()
        return x
    parts = [torch.empty_like(x) for _ in range(world - 1)]
    for work in [dist.irecv(part, peer) for peer, part in enumerate(parts, 1)]:
        work.wait()
    x.copy_(torch.stack([x, *parts]).sum(0) if parts else x)
    for work in [dist.isend(x, peer) for peer in range(1, world)]:
        work.wait()
    return x


@right("whoever comes first, from any source", check=NAIVE)
def any_source(x):
    rank, world = place()
    if rank == 0:
        part = x.new_empty(x.shape)
        for _ in range(world - 1):
            dist.recv(part)
            x.add_(part)
        for peer in reversed(range(1, world)):
            dist.send(x, dst=peer)
        return
    dist.send(x, dst=0)
    dist.recv(x, src=0)


@right("batched, tagged, double precision on the root", check=NAIVE)
def batched_root(x):
    rank, world = place()
    if rank == 0:
        parts = [torch.zeros_like(x) for _ in range(world)]
        operations = [dist.P2POp(dist.irecv, parts[peer], peer, tag=7) for peer in range(1, world)]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        wide = torch.float64 if x.is_floating_point() else x.dtype
        parts[0] = x
        x[...] = sum(part.to(wide) for part in parts).to(x.dtype)
        for peer in range(1, world):
            dist.isend(x, peer, tag=8).wait()
    else:
        dist.send(x, 0, tag=7)
        other = torch.empty_like(x)
        dist.recv(other, 0, tag=8)
        x.copy_(other)


# -- 6.2 and 6.3: the two phases in several forms, which 6.4 combines --


def swap(out, into, to, source, how, step=0):
    """One message out, one in, by any legal means."""
    rank, world = place()
    if how == "batch":
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]):
            work.wait()
    elif how == "irecv first":
        works = [dist.irecv(into, source, tag=step), dist.isend(out, to, tag=step)]
        for work in reversed(works):
            work.wait()
    elif how == "parity":
        # an odd ring has two even neighbours: the last rank receives first there, too
        first = rank % 2 == 0 and not (rank == world - 1)
        if first:
            dist.send(out, to)
            dist.recv(into, source)
        else:
            dist.recv(into, source)
            dist.send(out, to)
    else:
        work = dist.isend(out, to)
        dist.recv(into, source)
        work.wait()


def scatter(direction=1, start=0, how="isend", fresh=True, skip=False, clone=False):
    def ring_reduce_scatter(chunks):
        rank, world = place()
        to, source = (rank + direction) % world, (rank - direction) % world
        spare = torch.empty_like(max(chunks, key=len)) if not fresh else None
        for step in range(world - 1):
            out = chunks[(rank + start - direction * step) % world]
            add = chunks[(rank + start - direction * (step + 1)) % world]
            into = torch.empty_like(add) if fresh else spare[: add.numel()]
            out = out.clone() if clone else out
            if skip and (len(out) == 0 or len(add) == 0):
                works = ([dist.isend(out, to)] if len(out) else []) + ([dist.irecv(into, source)] if len(add) else [])
                for work in works:
                    work.wait()
            else:
                swap(out, into, to, source, how, step)
            torch.add(add, into, out=add)
        return (rank + start - direction * (world - 1)) % world

    return ring_reduce_scatter


def gather(direction=1, how="isend", into_place=True, skip=False):
    def ring_all_gather(chunks, mine):
        rank, world = place()
        to, source = (rank + direction) % world, (rank - direction) % world
        for step in range(world - 1):
            out, target = chunks[(mine - direction * step) % world], chunks[(mine - direction * (step + 1)) % world]
            into = target if into_place else torch.zeros_like(target)
            if skip:
                works = ([dist.irecv(into, source)] if len(into) else []) + ([dist.isend(out, to)] if len(out) else [])
                for work in works:
                    work.wait()
            else:
                swap(out, into, to, source, how, step)
            if not into_place:
                target[:] = into

    return ring_all_gather


FORMS = {
    "clockwise, isend and recv, new buffers": ({}, {}),
    "counter-clockwise, batch": ({"direction": -1, "how": "batch"}, {"direction": -1, "how": "batch"}),
    "begins with another chunk, irecv first, tags": ({"start": 2, "how": "irecv first"}, {"how": "irecv first"}),
    "send and recv by parity, one buffer": ({"how": "parity", "fresh": False}, {"how": "parity"}),
    "empty chunks left out, copies sent": ({"skip": True, "clone": True}, {"skip": True, "into_place": False}),
}
for name, (first, second) in FORMS.items():
    right(name, check=SCATTER)(scatter(**first))
    right(name, check=GATHER)(gather(**second))


@right("the number as a tensor, double precision sums", check=SCATTER)
def as_tensor(chunks):
    rank, world = place()
    for step in range(world - 1):
        grows = chunks[(rank - step - 1) % world]
        into = torch.zeros_like(grows)
        swap(chunks[(rank - step) % world], into, (rank + 1) % world, (rank - 1) % world, "isend")
        wide = torch.float64 if grows.is_floating_point() else grows.dtype
        grows.copy_((grows.to(wide) + into.to(wide)).to(grows.dtype))
    return torch.tensor((rank + 1) % world)


@right("negative number, short cut for one rank, numpy adds", check=SCATTER)
def negative(chunks):
    rank, world = place()
    if world == 1:
        return 0
    for step in range(world - 1):
        grows = chunks[rank - step - 1]
        into = grows.new_empty(len(grows))
        work = dist.isend(chunks[rank - step], (rank + 1) % world)
        dist.recv(into, (rank - 1) % world)
        grows.add_(into)
        work.wait()
    return rank + 1 - world


@right("receives of all steps posted first, sends as their chunks come", check=GATHER)
def posted_first(chunks, mine):
    rank, world = place()
    coming = [dist.irecv(chunks[(mine - step - 1) % world], (rank - 1) % world) for step in range(world - 1)]
    going = []
    for step in range(world - 1):
        going.append(dist.isend(chunks[(mine - step) % world], (rank + 1) % world))
        coming[step].wait()
    for work in going:
        work.wait()


@right("sends waited for at the end, one receive buffer per step", check=SCATTER)
def waits_at_the_end(chunks):
    rank, world = place()
    works, buffers = [], [torch.full_like(max(chunks, key=len), 3) for _ in range(world)]
    for step in range(world - 1):
        works.append(dist.isend(chunks[(rank - step) % world], dst=(rank + 1) % world))
        grows = chunks[(rank - step - 1) % world]
        into = buffers[step].narrow(0, 0, grows.shape[0])
        dist.irecv(into, src=(rank - 1) % world).wait()
        grows[:] = grows + into
    return [(work.wait(), (rank + 1) % world) for work in works][-1][1] if works else 0


@right("a thread that sends", check=SCATTER)
def threaded(chunks):
    rank, world = place()
    for step in range(world - 1):
        grows = chunks[(rank - step - 1) % world]
        into = torch.empty_like(grows)
        sender = threading.Thread(target=dist.send, args=(chunks[(rank - step) % world], (rank + 1) % world))
        sender.start()
        dist.recv(into, (rank - 1) % world)
        sender.join()
        grows += into
    return (rank + 1) % world


# -- 6.4 --


def combined(first, second, split):
    reduce_scatter, all_gather = scatter(**first), gather(**second)

    def ring_all_reduce(x):
        flat = x.reshape(-1) if x.is_contiguous() else x.flatten().clone().contiguous()
        chunks = split(flat, dist.get_world_size())
        all_gather(chunks, reduce_scatter(chunks))
        if not x.is_contiguous():
            x[...] = flat.view(x.shape)
        return x

    return ring_all_reduce


def ceiling(flat, world):
    """Chunks of ceil(n / W), the last ones shorter or empty."""
    size = math.ceil(len(flat) / world)
    return [flat[min(i * size, len(flat)) : min((i + 1) * size, len(flat))] for i in range(world)]


def by_edges(flat, world):
    edges = [i * len(flat) // world for i in range(world + 1)]
    return [flat[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def remainder_last(flat, world):
    size = len(flat) // world
    return list(flat.split([size] * (world - 1) + [len(flat) - size * (world - 1)]))


SPLITS = [lambda flat, world: list(flat.tensor_split(world)), ceiling, by_edges, by_edges, ceiling]
for (name, (first, second)), split in zip(FORMS.items(), SPLITS, strict=True):
    right(name, check=RING)(combined(first, second, split))
right("the remainder in the last chunk", check=RING)(combined({}, {}, remainder_last))


@right("padded to W equal chunks, returns nothing", check=RING)
def padded(x):
    rank, world = place()
    if world == 1 or x.numel() == 0:
        return
    size = -(-x.numel() // world)
    work = x.new_zeros(size * world)
    work[: x.numel()] = x.reshape(-1)
    grid = work.view(world, size)
    mine = scatter()(list(grid))
    gather()(list(grid), mine)
    x.copy_(work[: x.numel()].view(x.shape))


@right("everything in one function, a copy always", check=RING)
def one_function(x):
    rank, world = place()
    flat = x.detach().clone(memory_format=torch.contiguous_format).flatten()
    chunks = flat.tensor_split(world)
    for step in range(2 * (world - 1)):
        out = chunks[(rank - step) % world] if step < world - 1 else chunks[(rank + 1 - (step - world + 1)) % world]
        into = chunks[(rank - step - 1) % world] if step < world - 1 else chunks[(rank - (step - world + 1)) % world]
        arrived = torch.empty_like(into)
        swap(out, arrived, (rank + 1) % world, (rank - 1) % world, "batch")
        if step < world - 1:
            into += arrived
        else:
            into.copy_(arrived)
    x.copy_(flat.reshape(x.shape))
    return x


# -- 6.5 --


@right("by formula, with math", check=PREDICT)
def formula(ranks, nbytes, link):
    a, b = link.latency_s, 1 / link.bandwidth_bytes_s
    steps, rounds = ranks - 1, math.ceil(math.log2(ranks)) if ranks > 1 else 0
    return {"ring": 2 * steps * a + 2 * steps / ranks * nbytes * b, "naive": 2 * steps * (a + nbytes * b),
            "tree": torch.tensor(2.0 * rounds, dtype=torch.float64) * (a + nbytes * b)}  # fmt: skip


@right("message by message, chunks rounded up", check=PREDICT)
def counted(ranks, nbytes, link):
    def message(size):
        return link.latency_s + size / link.bandwidth_bytes_s

    naive = sum(message(nbytes) for _ in range(1, ranks)) * 2
    ring = sum(message(-(-nbytes // ranks)) for _ in range(2 * (ranks - 1)))
    tree, left = 0.0, ranks
    while left > 1:
        tree, left = tree + 2 * message(nbytes), (left + 1) // 2
    return {"naive": naive, "ring": ring, "tree": tree}


# -- 6.6 --


@right("recursive doubling, the others folded in", check=TREE)
def doubling(x):
    rank, world = place()
    core = 1 << (world.bit_length() - 1)
    if rank >= core:
        dist.send(x, rank - core)
        dist.recv(x, rank - core)
        return
    other = torch.empty_like(x)
    if rank + core < world:
        dist.recv(other, rank + core)
        x += other
    span = 1
    while span < core:
        swap(x, other, rank ^ span, rank ^ span, "isend")
        low, high = (x, other) if rank < rank ^ span else (other, x)
        x.copy_(low + high)  # the same order on both sides
        span *= 2
    if rank + core < world:
        dist.send(x, rank + core)


@right("a heap: the children of r are 2r + 1 and 2r + 2", check=TREE)
def heap(x):
    rank, world = place()
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < world]
    for child in reversed(children):
        part = torch.empty_like(x)
        dist.recv(part, child)
        x += part
    if rank:
        dist.send(x, (rank - 1) // 2)
        dist.recv(x, (rank - 1) // 2)
    for child in children:
        dist.send(x, child)


@right("recursive, halves of a range of ranks", check=TREE)
def halves(x):
    rank, world = place()

    def up(low, high):
        if high - low < 2:
            return
        middle = (low + high + 1) // 2
        up(low, middle) if rank < middle else up(middle, high)
        if rank == middle:
            dist.isend(x, low).wait()
        elif rank == low:
            part = torch.empty_like(x)
            dist.irecv(part, middle).wait()
            x.add_(part)

    def down(low, high):
        if high - low < 2:
            return
        middle = (low + high + 1) // 2
        if rank == low:
            dist.send(x, middle)
        elif rank == middle:
            dist.recv(x, low)
        down(low, middle) if rank < middle else down(middle, high)

    up(0, world)
    down(0, world)
    return x


# -- unusual, and legal --


@right("whoever comes first, by a receive without a source", check=NAIVE)
def no_source(x):
    rank, world = place()
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return 17
    part, others = torch.empty_like(x), []
    for _ in range(world - 1):
        others.append(dist.recv(part))
        x.add_(part)
    for peer in others:
        dist.send(x, peer)
    return "ignored"


@right("a thread for each peer", check=NAIVE)
def thread_per_peer(x):
    rank, world = place()
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    lock = threading.Lock()

    def take(peer):
        part = torch.empty_like(x)
        dist.recv(part, peer)
        with lock:
            x.add_(part)

    for task in (take, lambda peer: dist.send(x, peer)):
        threads = [threading.Thread(target=task, args=(peer,)) for peer in range(1, world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@right("leftwards, as bytes", check=GATHER)
def gather_bytes(chunks, mine):
    rank, world = place()
    for step in range(world - 1):
        sending = dist.isend(chunks[(mine + step) % world].view(torch.uint8), (rank - 1) % world)
        dist.recv(chunks[(mine + step + 1) % world].view(torch.uint8), (rank + 1) % world)
        sending.wait()


@right("sends in a thread", check=GATHER)
def gather_in_threads(chunks, mine):
    rank, world = place()
    for step in range(world - 1):
        thread = threading.Thread(target=dist.send, args=(chunks[(mine - step) % world], (rank + 1) % world))
        thread.start()
        dist.recv(chunks[(mine - step - 1) % world], (rank - 1) % world)
        thread.join()


@right("a ring in another order: even ranks upwards, odd ones downwards", check=GATHER)
def gather_zigzag(chunks, mine):
    rank, world = place()
    order = [*range(0, world, 2), *(peer for peer in range(world - 1, 0, -1) if peer % 2)]
    at = order.index(rank)
    held = [(mine - rank + order[(at - step) % world]) % world for step in range(world)]
    for step in range(world - 1):
        sending = dist.isend(chunks[held[step]], order[(at + 1) % world])
        dist.recv(chunks[held[step + 1]], order[(at - 1) % world])
        sending.wait()

"""Wrong all-reduces, as people really write them (AR-..: public reports) and as an unkind reviewer would."""

import importlib
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist

from tests.labs.corpus import wrong

NAIVE, SCATTER, GATHER, RING = "allreduce.naive", "allreduce.reduce-scatter", "allreduce.all-gather", "allreduce.ring"
TREE, PREDICT = "allreduce.tree", "allreduce.predict"
EDGE, OTHERS, ANY = "uneven chunks, other ranks", "other dtypes, shapes and ranks", "any number of ranks"
FLIGHT, SIZES = "buffers in flight", "all sizes and rank counts"


def place():
    return dist.get_rank(), dist.get_world_size()


def swap(out, into, to, source, flaws=frozenset()):
    if "send first" in flaws:
        dist.send(out, to)
        dist.recv(into, source)
        return
    if "receive first" in flaws:
        dist.recv(into, source)
        dist.send(out, to)
        return
    if "batch not waited for" in flaws:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)])
        return
    sending = dist.isend(out, to)
    if "reads early" in flaws:
        coming = dist.irecv(into, source)
        into.add_(0)
        coming.wait()
    else:
        dist.recv(into, source)
    if "send not waited for" not in flaws:
        sending.wait()


def scatter(*flaws):
    flaws = frozenset(flaws)

    def ring_reduce_scatter(chunks):
        rank, world = place()
        right, left = (rank + 1) % world, (rank - 1) % world
        steps = world - 1 + ("one step more" in flaws) - ("one step less" in flaws)
        if "to the same rank twice as far" in flaws and world > 2:
            right, left = (rank + 2) % world, (rank - 2) % world
        shared, sending = torch.empty_like(max(chunks, key=len)), None
        for step in range(steps):
            out, grows = (rank - step) % world, (rank - step - 1) % world
            if "index of what is sent" in flaws:
                grows = out
            if "always its own chunk" in flaws:
                out = rank
            arriving = torch.zeros_like(chunks[grows])
            if "same length" in flaws:
                arriving = torch.zeros_like(chunks[0])
            leaving = chunks[out]
            if "rounded" in flaws and leaving.dtype == torch.float32:
                leaving = leaving.bfloat16().float()
            if "through float32" in flaws:
                leaving = leaving.float().to(leaving.dtype)
            if "empty ones not sent" in flaws and not len(leaving):
                dist.recv(arriving, left)
            elif "one buffer for all sends" in flaws:
                if sending is not None and "waits in time" not in flaws:
                    shared[: len(leaving)] = leaving
                    sending.wait()
                shared[: len(leaving)] = leaving
                sending = dist.isend(shared[: len(leaving)], right)
                dist.recv(arriving, left)
            elif "adds before it is there" in flaws:
                works = [dist.isend(leaving, right), dist.irecv(arriving, left)]
                chunks[grows] += arriving
                for work in works:
                    work.wait()
                continue
            else:
                swap(leaving, arriving, right, left, flaws)
            if "adds another buffer" in flaws:
                arriving = torch.zeros_like(arriving)
            if "adds what it sent" in flaws:
                arriving = leaving.clone()
            if "makes a new chunk" in flaws:
                chunks[grows] = chunks[grows] + arriving
            elif "overwrites" in flaws:
                chunks[grows].copy_(arriving)
            elif "adds twice" in flaws:
                chunks[grows] += 2 * arriving
            else:
                chunks[grows] += arriving
        if sending is not None:
            sending.wait()
        if "mean" in flaws:
            chunks[(rank + 1) % world].div_(world) if chunks[0].is_floating_point() else None
        if "says its own rank" in flaws:
            return rank
        if "says 0" in flaws:
            return 0
        if "last step's number" in flaws:
            return grows
        return None if "says nothing" in flaws else (rank + 1) % world

    return ring_reduce_scatter


for name, flaws, criterion, hint in [
    ("AR-01 adds another buffer than the one received", ["adds another buffer"], "finished chunk", "nothing"),
    ("AR-01 adds what it has sent", ["adds what it sent"], "finished chunk", "garbage"),
    ("AR-02 adds to the chunk that it sends", ["index of what is sent"], "finished chunk", "nothing"),
    ("AR-02 tells another chunk's number", ["says its own rank"], "finished chunk", "index"),
    ("AR-02 every rank tells chunk 0", ["says 0"], "finished chunk", "index"),
    ("AR-05 a rank with an empty chunk sends nothing, and nobody expects that", ["empty ones not sent"], "runs", "size"),
    ("AR-07 one buffer for all sends, filled before the wait", ["one buffer for all sends"], FLIGHT, "flight-sent"),
    ("AR-07 adds what has not arrived", ["adds before it is there"], FLIGHT, "flight-early"),
    ("AR-07 writes where something arrives", ["reads early"], FLIGHT, "flight-early"),
    ("AR-07 send not waited for", ["send not waited for"], FLIGHT, "flight-unfinished"),
    ("AR-07 batch not waited for", ["batch not waited for"], FLIGHT, "flight-early"),
    ("everybody sends first", ["send first"], "runs", "deadlock"),
    ("everybody receives first", ["receive first"], "runs", "deadlock"),
    ("one step too many", ["one step more"], "messages", "too-many"),
    ("one step too few", ["one step less"], "finished chunk", "nothing"),
    ("always sends its own chunk", ["always its own chunk"], "finished chunk", "garbage"),
    ("overwrites where it should add", ["overwrites"], "finished chunk", "missing"),
    ("adds twice", ["adds twice"], "finished chunk", "counted-twice"),
    ("a new tensor in the list", ["makes a new chunk"], "finished chunk", "rebound"),
    ("mean for sum", ["mean"], "finished chunk", "scaled"),
    ("16 bits on the way", ["rounded"], "finished chunk", "precision"),
    ("integers by way of float32", ["through float32"], EDGE, "integers"),
    ("two rings for an even number of ranks", ["to the same rank twice as far"], "finished chunk", "garbage"),
    ("all chunks as long as the first", ["same length"], "runs", "size"),
    ("tells nothing", ["says nothing"], "finished chunk", "index"),
    ("uses a variable of the loop after it", ["last step's number"], "runs", None),
]:
    wrong(name, check=SCATTER, criterion=criterion, hint=hint)(scatter(*flaws))


@wrong("the last rank sends to one that does not exist", check=SCATTER, criterion="runs", hint="no-such-rank")
def scatter_open(chunks):
    rank, world = place()
    for step in range(world - 1):
        part = torch.empty_like(chunks[(rank - step - 1) % world])
        swap(chunks[(rank - step) % world], part, rank + 1, (rank - 1) % world)
        chunks[(rank - step - 1) % world] += part
    return (rank + 1) % world


@wrong("do-nothing", check=SCATTER, criterion="finished chunk", hint="nothing")
def scatter_nothing(chunks):
    return dist.get_rank()


@wrong("plain: everything through rank 0", check=SCATTER, criterion="one successor", hint="successor")
def scatter_through_root(chunks):
    for chunk in chunks:
        through_root(chunk)
    return dist.get_rank()


@wrong("AR-10 all chunks in every message", check=SCATTER, criterion="messages", hint="whole")
def scatter_whole(chunks):
    rank, world = place()
    passing, own = torch.cat(chunks), torch.cat(chunks)
    for _ in range(world - 1):
        arriving = torch.empty_like(passing)
        swap(passing, arriving, (rank + 1) % world, (rank - 1) % world)
        own, passing = own + arriving, arriving
    for chunk, new in zip(chunks, own.split([len(chunk) for chunk in chunks]), strict=True):
        chunk.copy_(new)
    return rank


@wrong("twice as many bits on the way", check=SCATTER, criterion="messages", hint="wide")
def scatter_wide(chunks):
    double = [chunk.double() if chunk.is_floating_point() else chunk for chunk in chunks]
    mine = scatter()(double)
    chunks[mine].copy_(double[mine])
    return mine


@wrong("each chunk straight to its owner", check=SCATTER, criterion="one successor", hint="successor")
def scatter_direct(chunks):
    rank, world = place()
    works = [dist.isend(chunk, peer) for peer, chunk in enumerate(chunks) if peer != rank]
    for peer in range(world):
        if peer != rank:
            part = torch.empty_like(chunks[rank])
            dist.recv(part, peer)
            chunks[rank] += part
    for work in works:
        work.wait()
    return rank


@wrong("every chunk in two messages", check=SCATTER, criterion="messages", hint="too-many")
def scatter_in_halves(chunks):
    rank, world = place()
    for step in range(world - 1):
        out, grows = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        for some in (slice(None, 5), slice(5, None)):
            part = torch.empty_like(grows[some])
            swap(out[some], part, (rank + 1) % world, (rank - 1) % world)
            grows[some] += part
    return (rank + 1) % world


@wrong("the library's", check=SCATTER, criterion="runs", hint=None)
def scatter_library(chunks):
    out = torch.empty_like(chunks[dist.get_rank()])
    dist.reduce_scatter(out, chunks)
    chunks[dist.get_rank()].copy_(out)
    return dist.get_rank()


@wrong("the process group's own", check=SCATTER, criterion="one successor", hint="collective")
def scatter_of_the_group(chunks):
    for chunk in chunks:
        dist.group.WORLD.allreduce([chunk]).wait()
    return dist.get_rank()


CALLS: list = []


@wrong("numbers through files", check=SCATTER, criterion="one successor", hint="silent")
def scatter_through_files(chunks):
    rank, world = place()
    CALLS.append(rank)
    folder = os.path.join(tempfile.gettempdir(), f"ranks-{os.getppid()}-{len(CALLS)}")  # of this job, and this call of it
    os.makedirs(folder, exist_ok=True)
    torch.save(chunks, f"{folder}/part-{rank}")
    os.rename(f"{folder}/part-{rank}", f"{folder}/{rank}")
    for peer in range(world):
        while not os.path.exists(f"{folder}/{peer}"):
            time.sleep(0.01)
        if peer != rank:
            chunks[rank] += torch.load(f"{folder}/{peer}")[rank]
    return rank


# -- 6.3 --


def gather(*flaws):
    flaws = frozenset(flaws)

    def ring_all_gather(chunks, mine):
        rank, world = place()
        right, left = (rank + 1) % world, (rank - 1) % world
        mine = rank + 1 if "mine is known" in flaws else mine
        for step in range(world - 1):
            out, target = chunks[(mine - step) % world], (mine - step - 1) % world
            if "own chunk each time" in flaws:
                out = chunks[mine]
            if "one further" in flaws:
                target = (target + 1) % world
            into = torch.zeros_like(chunks[target]) if flaws - {"send not waited for", "send first"} else chunks[target]
            if "16 bits" in flaws and out.dtype == torch.float32:
                out = out.bfloat16().float()
            if "not there yet" in flaws:
                works = [dist.isend(out, right), dist.irecv(into, left)]
                chunks[target].copy_(into)
                for work in works:
                    work.wait()
                continue
            swap(out, into, right, left, flaws)
            if "adds" in flaws:
                chunks[target] += into
            elif "new tensor" in flaws:
                chunks[target] = into
            elif "forgets" not in flaws and into is not chunks[target]:
                chunks[target].copy_(into)

    return ring_all_gather


EVERY = "every chunk on every rank"
for name, flaws, criterion, hint in [
    ("AR-08 adds where it should copy", ["adds"], EVERY, "adds"),
    ("AR-02 writes one chunk further", ["one further"], EVERY, "misplaced"),
    ("AR-02 `mine` known from its own reduce-scatter", ["mine is known"], EDGE, "mine"),
    ("AR-07 copies what has not arrived", ["not there yet"], FLIGHT, "flight-early"),
    ("AR-07 send not waited for", ["send not waited for"], FLIGHT, "flight-unfinished"),
    ("everybody sends first", ["send first"], "runs", "deadlock"),
    ("sends its own chunk each time", ["own chunk each time"], EVERY, "misplaced"),
    ("a new tensor in the list", ["new tensor"], EVERY, "rebound"),
    ("leaves what arrives in the buffer", ["forgets"], EVERY, "nothing"),
    ("16 bits on the way", ["16 bits"], EVERY, "precision"),
]:
    wrong(name, check=GATHER, criterion=criterion, hint=hint)(gather(*flaws))


@wrong("do-nothing", check=GATHER, criterion=EVERY, hint="nothing")
def gather_nothing(chunks, mine):
    return None


@wrong("plain: every owner sends to everybody", check=GATHER, criterion="one successor", hint="successor")
def gather_direct(chunks, mine):
    rank, world = place()
    works = [dist.isend(chunks[mine], peer) for peer in range(world) if peer != rank]
    for peer in range(world):
        if peer != rank:
            dist.recv(chunks[(mine + peer - rank) % world], peer)
    for work in works:
        work.wait()


@wrong("AR-10 all chunks in every message", check=GATHER, criterion="messages", hint="whole")
def gather_whole(chunks, mine):
    rank, world = place()
    for step in range(world - 1):
        arriving = torch.empty_like(torch.cat(chunks))
        swap(torch.cat(chunks), arriving, (rank + 1) % world, (rank - 1) % world)
        place_of = (mine - step - 1) % world
        chunks[place_of].copy_(arriving.split([len(chunk) for chunk in chunks])[place_of])


@wrong("the library's", check=GATHER, criterion="runs", hint=None)
def gather_library(chunks, mine):
    for number, chunk in enumerate(chunks):
        dist.broadcast(chunk, (dist.get_rank() + number - mine) % dist.get_world_size())


# -- 6.1 --


def through_root(x, *flaws):
    rank, world = place()
    if rank == 0:
        total = torch.zeros_like(x) if "without its own" in flaws else x
        if "its own twice" in flaws:
            total += x
        for peer in range(1, world):
            part = torch.empty_like(x, dtype=torch.float32 if "float32" in flaws else x.dtype)
            dist.recv(part, peer)
            if "adds into the wrong one" in flaws:
                part += total
            else:
                total += part
        if "mean" in flaws:
            total /= world
        x.copy_(total)
        works = [dist.isend(x, peer) for peer in range(1, world)]
        if "not waited for" not in flaws:
            for work in works:
                work.wait()
        if "clears" in flaws:
            x.zero_()
    else:
        dist.send(x.float() if "float32" in flaws else x, 0)
        if "keeps its own" in flaws:
            dist.recv(torch.empty_like(x), 0)
        else:
            dist.recv(x, 0)


for name, flaw, criterion, hint in [
    ("AR-01 adds into the wrong tensor", "adds into the wrong one", "sum", "nothing"),
    ("root forgets its own part", "without its own", "sum", "missing"),
    ("root's part counted twice", "its own twice", "sum", "counted-twice"),
    ("mean for sum", "mean", "sum", "scaled"),
    ("AR-07 sends not waited for", "not waited for", FLIGHT, "flight-unfinished"),
    ("the others keep their own", "keeps its own", "sum", "nothing"),
    ("root clears x at the end", "clears", "sum", "missing"),
]:
    def flawed(x, flaw=flaw):
        through_root(x, flaw)

    wrong(name, check=NAIVE, criterion=criterion, hint=hint)(flawed)


@wrong("do-nothing", check=NAIVE, criterion="sum", hint="nothing")
def naive_nothing(x):
    return x


@wrong("everybody to everybody", check=NAIVE, criterion="through rank 0", hint="root")
def everybody(x):
    rank, world = place()
    mine, works = x.clone(), []
    works = [dist.isend(mine, peer) for peer in range(world) if peer != rank]
    for peer in range(world):
        if peer != rank:
            part = torch.empty_like(x)
            dist.recv(part, peer)
            x += part
    for work in works:
        work.wait()


@wrong("passed on from rank to rank", check=NAIVE, criterion="through rank 0", hint="root")
def chain(x):
    rank, world = place()
    part = torch.empty_like(x)
    if rank < world - 1:
        dist.recv(part, rank + 1)
        x += part
    if rank:
        dist.send(x, rank - 1)
        dist.recv(x, rank - 1)
    if rank < world - 1:
        dist.send(x, rank + 1)


@wrong("row by row", check=NAIVE, criterion="through rank 0", hint="root")
def by_rows(x):
    for row in x if x.dim() else [x]:
        through_root(row)


@wrong("everybody receives first", check=NAIVE, criterion="runs", hint="deadlock")
def receives_first(x):
    rank, world = place()
    part = torch.empty_like(x)
    for peer in range(world):
        if peer != rank:
            dist.recv(part, peer)
            x += part
    for peer in range(world):
        if peer != rank:
            dist.send(x, peer)


@wrong("AR-14 integers by way of float32", check=NAIVE, criterion=OTHERS, hint="integers")
def naive_float(x):
    wide = x.float() if not x.is_floating_point() else x.clone()
    if x.element_size() == 8 and not x.is_floating_point():  # the same bytes on the wire
        whole = x.float().to(x.dtype)
        through_root(whole)
        x.copy_(whole)
        return
    through_root(wide)
    x.copy_(wide)


@wrong("the library's", check=NAIVE, criterion="runs", hint=None)
def naive_library(x):
    dist.all_reduce(x)


@wrong("the library's, by its other name", check=NAIVE, criterion="runs", hint=None)
def naive_functional(x):
    functional = importlib.import_module("torch.distributed._functional_collectives")
    x.copy_(functional.all_reduce(x, "sum", dist.group.WORLD))


# -- 6.4 --


def whole_ring(split=None, first=None, second=None, before=None, after=None):
    reduce_scatter, all_gather = first or scatter(), second or gather()

    def ring_all_reduce(x):
        flat = x.contiguous().view(-1)
        if before:
            flat = before(flat)
        chunks = (split or (lambda flat, world: list(flat.tensor_split(world))))(flat, dist.get_world_size())
        all_gather(chunks, reduce_scatter(chunks))
        if after:
            flat = after(flat)
        if not x.is_contiguous() or before or after:
            x.copy_(flat.view_as(x))
        return x

    return ring_all_reduce


def dropped(flat, world):
    size = len(flat) // world
    return [flat[i * size : (i + 1) * size] for i in range(world)]


def one_ulp(flat):
    return torch.nextafter(flat, flat + 1) if dist.get_rank() == 1 and flat.is_floating_point() else flat


for name, candidate, criterion, hint in [
    ("AR-01 adds another buffer", whole_ring(first=scatter("adds another buffer")), "sum", "missing"),
    ("AR-02 adds to the chunk that it sends", whole_ring(first=scatter("index of what is sent")), "runs", "size"),
    ("AR-04 remainder dropped", whole_ring(dropped), "sum", "remainder"),
    ("AR-05 torch.chunk makes too few chunks", whole_ring(lambda flat, world: list(flat.chunk(world))), "runs", "pieces"),
    ("AR-07 send not waited for", whole_ring(second=gather("send not waited for")), FLIGHT, "flight-unfinished"),
    ("AR-07 one buffer for all sends", whole_ring(first=scatter("one buffer for all sends")), FLIGHT, "flight-sent"),
    ("AR-08 adds in the second phase", whole_ring(second=gather("adds")), "sum", "counted-twice"),
    ("AR-13 one rank rounds another way", whole_ring(after=one_ulp), "same bits", "bits"),
    ("AR-14 16 bits on the way", whole_ring(first=scatter("rounded")), "sum", "precision"),
    ("mean for sum", whole_ring(first=scatter("mean")), "sum", "scaled"),
    ("no second phase", whole_ring(second=lambda chunks, mine: None), "sum", "nothing"),
    ("everybody sends first", whole_ring(first=scatter("send first")), "runs", "deadlock"),
]:
    wrong(name, check=RING, criterion=criterion, hint=hint)(candidate)


@wrong("do-nothing", check=RING, criterion="sum", hint="nothing")
def ring_nothing(x):
    return x


@wrong("plain: through rank 0", check=RING, criterion="one successor", hint="successor")
def ring_through_root(x):
    flat = x.contiguous()
    through_root(flat)
    x.copy_(flat)


@wrong("AR-10 the whole tensor round the ring", check=RING, criterion="bytes", hint="whole")
def ring_whole(x):
    rank, world = place()
    passing = x.contiguous().clone()
    for _ in range(world - 1):
        arriving = torch.empty_like(passing)
        swap(passing, arriving, (rank + 1) % world, (rank - 1) % world)
        x += arriving
        passing = arriving
    return x


@wrong("AR-10 a chain there and back, whole tensors", check=RING, criterion="one successor", hint="successor")
def ring_chain(x):
    flat = x.contiguous()
    chain(flat)
    x.copy_(flat)


@wrong("AR-11 not contiguous: the sum stays in a copy", check=RING, criterion="in place", hint="copy-back")
def ring_copy_lost(x):
    flat = x.contiguous().view(-1)
    chunks = list(flat.tensor_split(dist.get_world_size()))
    gather()(chunks, scatter()(chunks))
    return x


@wrong("AR-11 returns the copy", check=RING, criterion="in place", hint="copy-back")
def ring_copy_returned(x):
    flat = x.contiguous().view(-1)
    chunks = list(flat.tensor_split(dist.get_world_size()))
    gather()(chunks, scatter()(chunks))
    return flat.view_as(x)


@wrong("returns a new tensor, x as it was", check=RING, criterion="sum", hint="copy-back")
def ring_new(x):
    return whole_ring()(x.clone())


@wrong("AR-11 view of what is not contiguous", check=RING, criterion="runs", hint="contiguous")
def ring_view(x):
    chunks = list(x.view(-1).tensor_split(dist.get_world_size()))
    gather()(chunks, scatter()(chunks))
    return x


@wrong("AR-11 sends a column", check=RING, criterion="runs", hint="contiguous")
def ring_column(x):
    flat = x.reshape(-1)
    chunks = list(flat.tensor_split(dist.get_world_size()))
    gather()(chunks, scatter()(chunks))
    x.copy_(flat.view(x.shape))
    return x


@wrong("AR-11 x is given other memory", check=RING, criterion="in place", hint="copy-back")
def ring_other_memory(x):
    flat = x.contiguous().view(-1).clone()
    whole_ring()(flat)
    x.data = flat.view(x.shape)
    return x


@wrong("fresh: one phase this way round, the other that way", check=RING, criterion="one successor", hint="successor")
def ring_both_ways(x):
    flat = x.contiguous().view(-1)
    rank, world = place()
    chunks = list(flat.tensor_split(world))
    mine = scatter()(chunks)
    for step in range(world - 1):
        swap(chunks[(mine + step) % world], chunks[(mine + step + 1) % world], (rank - 1) % world, (rank + 1) % world)
    x.copy_(flat.view_as(x))
    return x


@wrong("fresh: four ranks known in advance", check=RING, criterion="runs", hint="pieces")
def ring_of_four(x):
    flat = x.contiguous().view(-1)
    chunks = list(flat.tensor_split(dist.get_world_size()))
    [chunks[number] for number in range(min(4, max(1, dist.get_world_size() * 4)))]
    return whole_ring()(x)


@wrong("fresh: 64-bit integers as two of 32", check=RING, criterion="other dtypes", hint="garbage")
def ring_narrow(x):
    if x.dtype != torch.int64:
        return whole_ring()(x)
    narrow = x.to(torch.int32).to(torch.int64)
    whole_ring()(narrow)
    return x.copy_(narrow)


@wrong("AR-17 returns it flat", check=RING, criterion="in place", hint="shape")
def ring_flat(x):
    return whole_ring()(x).reshape(-1)


@wrong("AR-17 x itself becomes flat", check=RING, criterion="in place", hint="shape")
def ring_flattened(x):
    whole_ring()(x)
    return x.set_(x.reshape(-1)) if x.is_contiguous() else x


@wrong("AR-14 integers by way of float32", check=RING, criterion="other dtypes", hint="integers")
def ring_float(x):
    if x.is_floating_point():
        return whole_ring()(x)
    wide = x.float()
    whole_ring()(wide)
    return x.copy_(wide)


@wrong("AR-05 fewer numbers than ranks: gives up", check=RING, criterion=SIZES, hint="nothing")
def ring_gives_up(x):
    return whole_ring()(x) if x.numel() >= dist.get_world_size() else x


@wrong("AR-05 fewer numbers than ranks: through rank 0", check=RING, criterion=SIZES, hint="successor")
def ring_small_through_root(x):
    return whole_ring()(x) if x.numel() >= dist.get_world_size() else through_root(x)


@wrong("one rank divides by zero", check=RING, criterion="runs", hint=None)
def ring_not_alone(x):
    1 // (dist.get_world_size() - 1)
    return whole_ring()(x)


@wrong("twice as many bits on the way", check=RING, criterion="bytes", hint="wide")
def ring_wide(x):
    double = x.double() if x.is_floating_point() else x.contiguous()
    whole_ring()(double)
    x.copy_(double)
    return x


@wrong("AR-10 whole tensors round the ring, twice", check=RING, criterion="bytes", hint="whole")
def ring_whole_twice(x):
    rank, world = place()
    total, passing = x.contiguous().clone(), x.contiguous().clone()
    for _ in range(world - 1):
        arriving = torch.empty_like(passing)
        swap(passing, arriving, (rank + 1) % world, (rank - 1) % world)
        total += arriving
        passing = arriving
    for step in range(world - 1):
        arriving = torch.empty_like(total)
        swap(total, arriving, (rank + 1) % world, (rank - 1) % world)
        total = arriving if rank > step else total
    x.copy_(total)


@wrong("two halves one after the other", check=RING, criterion="messages", hint="too-many")
def ring_in_halves(x):
    flat = x.contiguous().view(-1)
    for half in flat.tensor_split(2):
        whole_ring()(half)
    x.copy_(flat.view_as(x))
    return x


@wrong("the library's", check=RING, criterion="runs", hint=None)
def ring_library(x):
    dist.all_reduce(x)
    return x


@wrong("the library's, caught", check=RING, criterion="runs", hint=None)
def ring_caught(x):
    try:
        dist.all_gather_object([None] * dist.get_world_size(), x)
    except RuntimeError:
        pass
    return whole_ring()(x)


@wrong("the process group's own", check=RING, criterion="one successor", hint="collective")
def ring_of_the_group(x):
    flat = x.contiguous()
    dist.group.WORLD.allreduce([flat]).wait()
    x.copy_(flat)


# -- 6.5 --


def predicted(naive=None, ring=None, tree=None, **_):
    def predict_time(ranks, nbytes, link):
        a, b, n = link.latency_s, 1 / link.bandwidth_bytes_s, nbytes
        rounds = math.ceil(math.log2(ranks))
        right = {"naive": 2 * (ranks - 1) * (a + n * b), "ring": 2 * (ranks - 1) * (a + n / ranks * b), "tree": 2 * rounds * (a + n * b)}
        for name, other in (("naive", naive), ("ring", ring), ("tree", tree)):
            if other:
                right[name] = other(ranks, n, a, b)
        return right

    return predict_time


for name, formulas, criterion, hint in [
    ("ring: whole tensors", {"ring": lambda w, n, a, b: 2 * (w - 1) * (a + n * b)}, "ring", "size"),
    ("ring: one phase", {"ring": lambda w, n, a, b: (w - 1) * (a + n / w * b)}, "ring", "phases"),
    ("ring: no latency", {"ring": lambda w, n, a, b: 2 * (w - 1) * n / w * b}, "ring", "latency"),
    ("ring: one latency", {"ring": lambda w, n, a, b: a + 2 * (w - 1) * n / w * b}, "ring", "latency"),
    ("ring: W steps", {"ring": lambda w, n, a, b: 2 * w * (a + n / w * b)}, "ring", "latency"),
    ("ring: twice the tensor, whatever W", {"ring": lambda w, n, a, b: 2 * (w - 1) * a + 2 * n * b if w > 1 else 0}, "ring", "bandwidth"),
    ("naive: there only", {"naive": lambda w, n, a, b: (w - 1) * (a + n * b)}, "naive", "phases"),
    ("naive: all at once", {"naive": lambda w, n, a, b: 2 * (a + n * b) if w > 1 else 0}, "naive", "latency"),
    ("naive: in chunks", {"naive": lambda w, n, a, b: 2 * (w - 1) * (a + n / w * b)}, "naive", "size"),
    ("naive: bits", {"naive": lambda w, n, a, b: 2 * (w - 1) * (a + 8 * n * b)}, "naive", "bandwidth"),
    ("tree: log2 not rounded", {"tree": lambda w, n, a, b: 2 * math.log2(w) * (a + n * b)}, "tree", "tree-rounds"),
    ("tree: log2 rounded down", {"tree": lambda w, n, a, b: 2 * int(math.log2(w)) * (a + n * b)}, "tree", "tree-rounds"),
    ("tree: up only", {"tree": lambda w, n, a, b: math.ceil(math.log2(w)) * (a + n * b)}, "tree", "phases"),
    ("one rank takes a latency", {"tree": lambda w, n, a, b: 2 * max(1, math.ceil(math.log2(w))) * (a + n * b)}, "one rank", "alone"),
    ("a constant", {key: lambda w, n, a, b: 0.089 for key in ("naive", "ring", "tree")}, "naive", "latency"),
]:
    wrong(name, check=PREDICT, criterion=criterion, hint=hint)(predicted(**formulas))


@wrong("do-nothing", check=PREDICT, criterion="naive", hint=None)
def predict_nothing(ranks, nbytes, link):
    return None


# -- 6.6 --


@wrong("plain: through rank 0", check=TREE, criterion="messages in a row", hint="depth")
def tree_through_root(x):
    through_root(x)


@wrong("a ring", check=TREE, criterion="messages in a row", hint="depth")
def tree_ring(x):
    whole_ring()(x)


@wrong("a chain", check=TREE, criterion="messages in a row", hint="depth")
def tree_chain(x):
    chain(x)


@wrong("do-nothing", check=TREE, criterion="sum", hint="nothing")
def tree_nothing(x):
    return x


@wrong("AR-16 a power of two assumed: what is over is left out", check=TREE, criterion=ANY, hint="power")
def tree_power_of_two(x):
    rank, world = place()
    core, part, span = 1 << (world.bit_length() - 1), torch.empty_like(x), 1
    while span < core and rank < core:
        swap(x.clone(), part, rank ^ span, rank ^ span)
        x += part
        span *= 2


@wrong("AR-16 a power of two assumed: partners that do not exist", check=TREE, criterion="runs", hint="no-such-rank")
def tree_no_partner(x):
    rank, world = place()
    part, span = torch.empty_like(x), 1
    while span < world:
        swap(x.clone(), part, rank ^ span, rank ^ span)
        x += part
        span *= 2


@wrong("up, and never down", check=TREE, criterion="sum", hint="nothing")
def tree_up_only(x):
    rank, world = place()
    span = 1
    while span < world:
        if rank % (2 * span) == span:
            dist.send(x, rank - span)
        elif rank % (2 * span) == 0 and rank + span < world:
            part = torch.empty_like(x)
            dist.recv(part, rank + span)
            x += part
        span *= 2


@wrong("exchange without waiting for the send", check=TREE, criterion=FLIGHT, hint="flight-sent")
def tree_in_flight(x):
    rank, world = place()
    part, span, works = torch.empty_like(x), 1, []
    while span < world and world & (world - 1) == 0:
        works.append(dist.isend(x, rank ^ span))
        dist.recv(part, rank ^ span)
        x += part
        span *= 2
    for work in works:
        work.wait()
    if world & (world - 1):
        through_root(x)


@wrong("the library's", check=TREE, criterion="runs", hint=None)
def tree_library(x):
    dist.all_reduce(x)


# -- what passes until a shape comes twice, a rank more, or larger numbers --


@wrong("adds up in float64, whatever the dtype", check=NAIVE, criterion=OTHERS, hint="integers")
def root_in_double(x):
    rank, world = place()
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    part, summed = torch.empty_like(x), x.double()
    for peer in range(1, world):
        dist.recv(part, peer)
        summed += part
    x.copy_(summed)
    for peer in range(1, world):
        dist.send(x, peer)


@wrong("knows ranks 0 to 3", check=NAIVE, criterion=OTHERS, hint="missing")
def root_of_four(x):
    rank, world = place()
    if rank > 3:
        return
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    part = torch.empty_like(x)
    for peer in range(1, min(world, 4)):
        dist.recv(part, peer)
        x += part
    for peer in range(1, min(world, 4)):
        dist.send(x, peer)


@wrong("keeps its buffers, by length alone", check=SCATTER, criterion="runs", hint="size")
def scatter_kept_buffers(chunks):
    rank, world = place()
    kept = vars(torch.distributed).setdefault("_kept_by_length", {})
    for step in range(world - 1):
        grows = chunks[(rank - step - 1) % world]
        part = kept.setdefault(len(grows), torch.empty_like(grows))
        swap(chunks[(rank - step) % world], part, (rank + 1) % world, (rank - 1) % world)
        grows += part
    return (rank + 1) % world


@wrong("integers travel as float64", check=GATHER, criterion=EDGE, hint="precision")
def gather_in_double(chunks, mine):
    rank, world = place()
    for step in range(world - 1):
        out, into = chunks[(mine - step) % world], chunks[(mine - step - 1) % world]
        if out.is_floating_point():
            swap(out, into, (rank + 1) % world, (rank - 1) % world)
            continue
        wide = torch.empty_like(into, dtype=torch.float64)
        swap(out.double(), wide, (rank + 1) % world, (rank - 1) % world)
        into.copy_(wide)


@wrong("remembers the sum of each shape", check=RING, criterion="sum", hint="garbage")
def ring_remembers(x):
    kept = vars(torch.distributed).setdefault("_kept_by_shape", {})
    chunks = list(x.contiguous().view(-1).tensor_split(place()[1]))
    gather()(chunks, scatter()(chunks))
    x.copy_(kept.setdefault((x.shape, x.dtype), torch.cat(chunks).view(x.shape)))


@wrong("16 bit numbers travel as 32", check=RING, criterion="other dtypes", hint="wide")
def ring_wide_halves(x):
    flat = x.contiguous().view(-1)
    flat = flat.float() if x.dtype in (torch.float16, torch.bfloat16) else flat
    chunks = list(flat.tensor_split(place()[1]))
    gather()(chunks, scatter()(chunks))
    x.copy_(torch.cat(chunks).view(x.shape))


@wrong("chunks of whole bytes, rounded down", check=PREDICT, criterion="ring", hint="bandwidth")
def predict_rounded_down(ranks, nbytes, link):
    def one(size):
        return link.latency_s + size / link.bandwidth_bytes_s

    rounds = math.ceil(math.log2(ranks))
    return {"naive": 2 * (ranks - 1) * one(nbytes), "ring": 2 * (ranks - 1) * one(nbytes // ranks), "tree": 2 * rounds * one(nbytes)}


@wrong("doubling for powers of two, else through rank 0", check=TREE, criterion=ANY, hint="depth")
def tree_or_root(x):
    rank, world = place()
    if world & (world - 1):
        through_root(x)
        return
    part, span = torch.empty_like(x), 1
    while span < world:
        swap(x.clone(), part, rank ^ span, rank ^ span)
        x += part
        span *= 2

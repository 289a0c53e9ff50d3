"""Right data-parallel pieces, each built differently: none of these may lose a point."""

import contextlib
import hashlib
import math
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.labs.corpus import right

SHARD, BROADCAST, AVERAGE = "data_parallel.shard", "data_parallel.broadcast", "data_parallel.average"
OVERLAP, QUIET, PRIORITY = "data_parallel.overlap", "data_parallel.no-sync", "data_parallel.priority"


# -- 7.1 --


@right("a generator of its own, contiguous parts, as a tensor", check=SHARD)
def contiguous(n, rank, world, epoch):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(12345 + epoch))
    each = math.ceil(n / world)
    order = order.repeat(world)[: each * world]
    return order.view(world, each)[rank]


@right("Python's random, an instance", check=SHARD)
def python_random(n, rank, world, epoch):
    order = list(range(n))
    random.Random(f"epoch {epoch}").shuffle(order)
    while len(order) % world:
        order.append(order[len(order) - n])
    return order[rank::world]


@right("numpy's new generator", check=SHARD)
def numpy_generator(n, rank, world, epoch):
    order = np.random.default_rng([7, epoch]).permutation(n)
    return np.resize(order, -(-n // world) * world)[rank::world].tolist()


@right("one by one, modulo", check=SHARD)
def modulo(n, rank, world, epoch):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch * 31 + 5))
    return [int(order[place % n]) for place in range(rank, -(-n // world) * world, world)]


@right("global generator inside fork_rng", check=SHARD)
def forked(n, rank, world, epoch):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(epoch)
        order = torch.randperm(n).tolist()
    return tuple((order * world)[rank : -(-n // world) * world : world])


# -- 7.2 --


@right("state_dict, detached", check=BROADCAST)
def by_data(module):
    for p in module.parameters():
        dist.broadcast(p.data, src=0)
    for b in module.buffers():
        dist.broadcast(b, src=0)


@right("asynchronously, all waited for", check=BROADCAST)
@torch.no_grad()
def asynchronous(module):
    works = [dist.broadcast(t, 0, async_op=True) for t in [*module.buffers(), *module.parameters()]]
    for work in works:
        work.wait()


@right("one flat tensor per dtype", check=BROADCAST)
def flat_start(module):
    tensors = [*module.parameters(), *module.buffers()]
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        mine = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.detach().reshape(-1) for t in mine])
        dist.broadcast(flat, 0)
        with torch.no_grad():
            for t, part in zip(mine, flat.split([t.numel() for t in mine]), strict=True):
                t.copy_(part.view_as(t))


@right("load_state_dict of copies", check=BROADCAST)
def through_state_dict(module):
    state = {}
    for name, value in module.state_dict().items():
        state[name] = value.clone()
        dist.broadcast(state[name], 0)
    module.load_state_dict(state)


# -- 7.3 --


@right("divided first, out of place", check=AVERAGE)
def divided_first(module):
    for p in module.parameters():
        if not p.requires_grad:
            continue
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        grad = grad / dist.get_world_size()
        dist.all_reduce(grad)
        p.grad = grad


@right("one flat tensor per dtype", check=AVERAGE)
def flat_average(module):
    wanted = [p for p in module.parameters() if p.requires_grad]
    for dtype in dict.fromkeys(p.dtype for p in wanted):
        mine = [p for p in wanted if p.dtype == dtype]
        flat = torch.cat([(p.new_zeros(p.shape) if p.grad is None else p.grad).reshape(-1) for p in mine])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        flat.div_(dist.get_world_size())
        for p, part in zip(mine, flat.split([p.numel() for p in mine]), strict=True):
            p.grad = part.view(p.shape).clone()


@right("asynchronously, in reverse, divided at the end", check=AVERAGE)
def asynchronous_average(module):
    works = []
    for p in reversed(list(module.parameters())):
        if p.requires_grad:
            if p.grad is None:
                p.grad = p.detach() * 0
            works.append((p, dist.all_reduce(p.grad, async_op=True)))
    for p, work in works:
        work.wait()
        p.grad.mul_(1 / dist.get_world_size())


# -- 7.4 to 7.6 --


class Views(nn.Module):
    """Gradients are views of the buckets for good; a module; counts with sets; overshoots buckets like PyTorch's."""

    def __init__(self, module, bucket_bytes=10**6, ahead=None):
        super().__init__()
        self.module, self.ahead, self.syncing = module, ahead, True
        with torch.no_grad():
            for t in module.state_dict(keep_vars=True).values():
                dist.broadcast(t, 0)
        groups = [[]]
        for p in [p for p in module.parameters() if p.requires_grad][::-1]:
            if groups[-1] and groups[-1][0].dtype != p.dtype:
                groups.append([])
            groups[-1].append(p)
            if sum(q.nbytes for q in groups[-1]) >= bucket_bytes:
                groups.append([])
        self.groups = [group for group in groups if group]
        self.flats = [torch.zeros(sum(p.numel() for p in group), dtype=group[0].dtype) for group in self.groups]
        self.number = {p: number for number, group in enumerate(self.groups) for p in group}
        for p in self.number:
            p.register_post_accumulate_grad_hook(self.hook)
        self.clear()

    def clear(self):
        self.there, self.works, self.sent = set(), {}, 0

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def pieces(self, number):
        group = self.groups[number]
        return zip(group, self.flats[number].split([p.numel() for p in group]), strict=True)

    def hook(self, p):
        if not self.syncing:
            return
        self.there.add(p)
        limit = len(self.groups) if self.ahead is None else min(self.ahead, len(self.groups))
        while self.sent < limit and self.there.issuperset(self.groups[self.sent]):
            self.send(self.sent)
            self.sent += 1

    def send(self, number):
        for p, piece in self.pieces(number):
            if p.grad is None:
                piece.zero_()
            elif p.grad.data_ptr() != piece.data_ptr():
                piece.copy_(p.grad.reshape(-1))
        self.works[number] = dist.all_reduce(self.flats[number], async_op=True)

    def finish(self):
        limit = len(self.groups) if self.ahead is None else min(self.ahead, len(self.groups))
        left = [*range(self.sent, limit), *reversed(range(limit, len(self.groups)))]
        for number in left:
            self.send(number)
        for number, work in self.works.items():
            work.wait()
            self.flats[number] /= dist.get_world_size()
            for p, piece in self.pieces(number):
                p.grad = piece.view(p.shape)
        self.clear()

    @contextlib.contextmanager
    def no_sync(self):
        before, self.syncing = self.syncing, False
        try:
            yield self
        finally:
            self.syncing = before


right("views of buckets for good, a Module", check=OVERLAP)(Views)
right("views of buckets for good, a Module", check=QUIET)(Views)
right("views of buckets for good, a Module", check=PRIORITY)(Views)


class Nodes:
    """Hooks on autograd's own nodes, not on parameters; buckets are dicts; the averaged values are copied into the old gradients."""

    def __init__(self, module, bucket_bytes=10**6, ahead=10**9):
        self.module, self.ahead, self.quiet = module, ahead, 0
        for t in (*module.buffers(), *module.parameters()):
            dist.broadcast(t.data, src=0)
        self.buckets, self.nodes = [], []
        for p in reversed(list(module.parameters())):
            if not p.requires_grad:
                continue
            last = self.buckets[-1] if self.buckets else None
            if last is None or last["dtype"] != p.dtype or last["bytes"] + p.nbytes > bucket_bytes:
                last = {"dtype": p.dtype, "bytes": 0, "params": []}
                self.buckets.append(last)
            last["bytes"] += p.nbytes
            last["params"].append(p)
            node = p.expand_as(p).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, bucket=last, p=p: self.arrived(bucket, p))
            self.nodes.append(node)  # else it is gone, and the hook with it
        self.begin()

    def begin(self):
        self.turn, self.done, self.flights = 0, {id(bucket): 0 for bucket in self.buckets}, []

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def arrived(self, bucket, _):
        if self.quiet:
            return
        self.done[id(bucket)] += 1
        while self.turn < min(self.ahead, len(self.buckets)):
            coming = self.buckets[self.turn]
            if self.done[id(coming)] < len(coming["params"]):
                break
            self.go(coming)
            self.turn += 1

    def go(self, bucket):
        flat = torch.cat([torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.view(-1) for p in bucket["params"]])
        self.flights.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        limit = min(self.ahead, len(self.buckets))
        for bucket in self.buckets[self.turn : limit] + self.buckets[limit:][::-1]:
            self.go(bucket)
        for bucket, flat, work in self.flights:
            work.wait()
            flat = flat / dist.get_world_size()
            at = 0
            for p in bucket["params"]:
                part = flat[at : at + p.numel()].view_as(p)
                at += p.numel()
                if p.grad is None:
                    p.grad = part.clone()
                else:
                    p.grad.copy_(part)
        self.begin()

    def no_sync(self):
        wrapper = self

        class Quiet:
            def __enter__(self):
                wrapper.quiet += 1

            def __exit__(self, *error):
                wrapper.quiet -= 1
                return False

        return Quiet()


right("hooks on AccumulateGrad nodes, gradients copied in place", check=OVERLAP)(Nodes)
right("hooks on AccumulateGrad nodes, gradients copied in place", check=QUIET)(Nodes)
right("hooks on AccumulateGrad nodes, gradients copied in place", check=PRIORITY)(Nodes)


class Watches(Views):
    """The first step looks around and sends after backward; later ones overlap. finish may be called by a future's callback, too."""

    first = True

    def hook(self, p):
        if not self.first:
            super().hook(p)

    def finish(self):
        super().finish()
        self.first = False


right("looks around in the first step", check=OVERLAP)(Watches)


class Futures(Nodes):
    """Waits through futures."""

    def go(self, bucket):
        super().go(bucket)
        place, flat, work = self.flights.pop()
        self.flights.append((place, flat, work.get_future()))


right("waits through futures", check=OVERLAP)(Futures)


# -- Written from the notebook alone --


@right("zero-dimensional tensors, np.tile", check=SHARD)
def single_tensors(n, rank, world, epoch):
    order = np.random.RandomState(epoch + 10).permutation(n)
    each = (n + world - 1) // world
    mine = np.tile(order, world)[rank * each : (rank + 1) * each] if world > 1 else order
    return [torch.tensor(int(index)) for index in mine]


@right("sorted by a hash", check=SHARD)
def by_hash(n, rank, world, epoch):
    order = sorted(range(n), key=lambda index: hashlib.sha256(f"{epoch}/{index}".encode()).digest())
    return [order[place % n] for place in range(-(-n // world) * world) if place % world == rank]


@right("what state_dict holds", check=BROADCAST)
def state_dict_values(module):
    for value in module.state_dict().values():
        dist.broadcast(value, src=0)


@right("zeros first, then all in one go", check=AVERAGE)
@torch.no_grad()
def in_two_passes(module):
    wanted = [p for p in module.parameters() if p.requires_grad]
    for p in wanted:
        p.grad = torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad
    works = [dist.all_reduce(p.grad, async_op=True) for p in wanted]
    [work.wait() for work in works]
    torch._foreach_div_([p.grad for p in wanted], float(dist.get_world_size()))


class AllAtEnd(nn.Module):
    """Waits in a callback of its own at the end of backward, as PyTorch's does; nothing is left for finish."""

    def __init__(self, module, bucket_bytes=10**6):
        super().__init__()
        self.module, self.on = module, True
        for t in [*module.parameters(), *module.buffers()]:
            dist.broadcast(t.detach(), 0)
        self.buckets = []
        for p in [p for p in module.parameters() if p.requires_grad][::-1]:
            if not self.buckets or self.buckets[-1][0].dtype != p.dtype or sum(q.nbytes for q in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(p)
            p.register_post_accumulate_grad_hook(self.note)
        self.there, self.next, self.works, self.queued = set(), 0, [], False

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def note(self, p):
        if not self.on:
            return
        if not self.queued:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
            self.queued = True
        self.there.add(p)
        while self.next < len(self.buckets) and self.there >= set(self.buckets[self.next]):
            self.launch()

    def launch(self):
        bucket = self.buckets[self.next]
        flat = torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in bucket])
        self.works.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        self.next += 1

    def end(self):
        while self.next < len(self.buckets):
            self.launch()
        for bucket, flat, work in self.works:
            work.wait()
            flat.mul_(1 / dist.get_world_size())
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.reshape_as(p)
        self.there, self.next, self.works, self.queued = set(), 0, [], False

    def finish(self):
        pass

    @contextlib.contextmanager
    def no_sync(self):
        self.on = False
        try:
            yield
        finally:
            self.on = True


right("waits in a callback at the end of backward", check=OVERLAP)(AllAtEnd)
right("waits in a callback at the end of backward", check=QUIET)(AllAtEnd)


class MultiGrad(Nodes):
    """One hook for all gradients of a bucket, which hands them over before all of them are in .grad."""

    def __init__(self, module, bucket_bytes=10**6):
        super().__init__(module, bucket_bytes)
        self.full = {}
        for number, bucket in enumerate(self.buckets):
            bucket["number"] = number
            torch.autograd.graph.register_multi_grad_hook(bucket["params"], lambda grads, number=number: self.filled(number, grads))

    def arrived(self, bucket, p):
        """Not with these."""

    def filled(self, number, grads):
        self.full[number] = grads
        while self.turn in self.full:
            self.turn += 1
            self.go(self.buckets[self.turn - 1])

    def go(self, bucket):
        params = bucket["params"]
        grads = self.full.pop(bucket["number"], [None] * len(params))
        flat = torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, grads, strict=True)])
        self.flights.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


right("one multi-grad hook per bucket", check=OVERLAP)(MultiGrad)


class DecidesInForward(Nodes):
    """no_sync is looked at in forward only, as by PyTorch's."""

    heard = True

    def __call__(self, *args, **kwargs):
        self.heard = not self.quiet
        return super().__call__(*args, **kwargs)

    def arrived(self, bucket, p):
        if self.heard:
            super().arrived(bucket, p)


right("decides in forward", check=QUIET)(DecidesInForward)


class AgreesFirst(Views):
    """Ranks tell each other in the first step how many buckets they have."""

    agreed = False

    def forward(self, *args, **kwargs):
        if not self.agreed:  # not in finish: what hooks have sent by then may differ from rank to rank
            count = torch.tensor([len(self.groups)])
            dist.broadcast(count, 0)
            assert int(count) == len(self.groups)
            self.agreed = True
        return super().forward(*args, **kwargs)


right("a message of agreement in the first step", check=OVERLAP)(AgreesFirst)


class BuffersToo(Views):
    """Sends rank 0's buffers before every forward, as PyTorch's does."""

    def forward(self, *args, **kwargs):
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)
        return super().forward(*args, **kwargs)


right("buffers before every forward", check=OVERLAP)(BuffersToo)


class Unhooked(Views):
    """no_sync takes its hooks down and puts them back."""

    def __init__(self, module, bucket_bytes=10**6, ahead=None):
        super().__init__(module, bucket_bytes, ahead)
        self.mine = []
        self.put()

    def put(self):
        self.mine = [p.register_post_accumulate_grad_hook(super(Unhooked, self).hook) for p in self.number]

    def hook(self, p):
        """That of the base class does nothing here."""

    @contextlib.contextmanager
    def no_sync(self):
        for handle in self.mine:
            handle.remove()
        try:
            yield
        finally:
            self.put()


right("no_sync takes the hooks down", check=QUIET)(Unhooked)


class OneByOne(Views):
    """finish waits for each before it sends the next."""

    def send(self, number):
        if self.sending:
            for work in self.works.values():
                work.wait()
        super().send(number)

    sending = False

    def finish(self):
        self.sending = True
        super().finish()
        self.sending = False


right("finish sends one after the other", check=PRIORITY)(OneByOne)

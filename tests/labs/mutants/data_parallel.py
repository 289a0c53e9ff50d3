"""Wrong data-parallel pieces, as people really write them (DDP-.., AR-.., ACC-..: public reports) and as an unkind reviewer would."""

import contextlib
import copy
import random

import torch
import torch.distributed as dist

from tests.labs.corpus import wrong

SHARD, BROADCAST, AVERAGE = "data_parallel.shard", "data_parallel.broadcast", "data_parallel.average"
OVERLAP, QUIET, PRIORITY = "data_parallel.overlap", "data_parallel.no-sync", "data_parallel.priority"
MODULES, ELSE, LATER = "other modules", "other modules and ranks", "another epoch, other samples"


# -- 7.1 --


def order_of(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def shard(name, criterion, hint):
    return wrong(name, check=SHARD, criterion=criterion, hint=hint)


@shard("returns nothing", "equally many", "type")
def no_shard(n, rank, world, epoch):
    return None


@shard("DDP-16: every rank reads the same", "every sample", "same-shard")
def same_shard(n, rank, world, epoch):
    return order_of(n, epoch)[: -(-n // world)]


@shard("DDP-14: one batch more on some ranks", "equally many", "count")
def uneven(n, rank, world, epoch):
    return order_of(n, epoch)[rank::world]


@shard("the tail is dropped", "equally many", "count")
def dropped(n, rank, world, epoch):
    each = n // world
    return order_of(n, epoch)[rank * each : (rank + 1) * each]


@shard("the tail is filled up with the last part only, some lost", "every sample", "lost")
def last_lost(n, rank, world, epoch):
    each = -(-n // world)
    order = order_of(n, epoch)
    kept = order[: n // world * world] or order[:1]
    return (kept * (world + 1))[: each * world][rank::world]


@shard("DDP-17: the global generator", "every sample", "global-seed")
def global_generator(n, rank, world, epoch):
    order = torch.randperm(n).tolist()
    return (order * world)[: -(-n // world) * world][rank::world]


@shard("seeds the global generator", "generators left alone", "seeds-left")
def seeds_globally(n, rank, world, epoch):
    torch.manual_seed(epoch)
    order = torch.randperm(n).tolist()
    return (order * world)[: -(-n // world) * world][rank::world]


@shard("seeds Python's generator", "generators left alone", "seeds-left")
def seeds_python(n, rank, world, epoch):
    random.seed(epoch)
    order = list(range(n))
    random.shuffle(order)
    return (order * world)[: -(-n // world) * world][rank::world]


@shard("each rank shuffles by a seed of its own", "every sample", "doubled")
def own_seeds(n, rank, world, epoch):
    order = order_of(n, 1000 * epoch + rank)
    return (order * world)[: -(-n // world) * world][rank::world]


@shard("not shuffled", "random", "sorted")
def plain_stride(n, rank, world, epoch):
    return [(place + epoch) % n for place in range(rank, -(-n // world) * world, world)]


@shard("set_epoch forgotten", LATER, "same-epoch")
def same_each_epoch(n, rank, world, epoch):
    order = order_of(n, 5)
    return (order * world)[: -(-n // world) * world][rank::world]


@shard("fixed shards, shuffled within", "random", "same-epoch")
def shuffled_within(n, rank, world, epoch):
    mine = [place % n for place in range(rank, -(-n // world) * world, world)]
    random.Random(epoch).shuffle(mine)
    return mine


@shard("fixed random shards, shuffled within", LATER, "same-epoch")
def random_but_fixed(n, rank, world, epoch):
    order = order_of(n, 5)
    mine = (order * world)[: -(-n // world) * world][rank::world]
    random.Random(epoch).shuffle(mine)
    return mine


@shard("the same order, begun elsewhere", LATER, "same-epoch")
def rotated(n, rank, world, epoch):
    order = order_of(n, 5)
    order = order[epoch * world :] + order[: epoch * world]
    start = (order * world)[: -(-n // world) * world][rank::world]
    return start


@shard("numbered from 1", "every sample", "range")
def from_one(n, rank, world, epoch):
    return [index + 1 for index in ((order_of(n, epoch) * world)[: -(-n // world) * world])[rank::world]]


@shard("fills up once: too few samples for the ranks", "few samples", "count")
def fills_once(n, rank, world, epoch):
    order = order_of(n, epoch)
    order += order[: -n % world]
    return order[rank::world]


@shard("the epoch moves by one only in the fill", "every sample", "doubled")
def takes_twice(n, rank, world, epoch):
    each = -(-n // world)
    order = order_of(n, epoch)
    return [order[(rank * (each - 2) + i) % n] for i in range(each)]


# -- 7.2 --


def start(name, criterion, hint):
    return wrong(name, check=BROADCAST, criterion=criterion, hint=hint)


@start("DDP-01: nothing", "parameters", "start")
def no_broadcast(module):
    return module


@start("DDP-02: no buffers", "buffers", "buffers")
def without_buffers(module):
    for p in module.parameters():
        dist.broadcast(p.data, 0)


@start("DDP-02: a module with only buffers is skipped", ELSE, "buffers")
def only_with_parameters(module):
    if list(module.parameters()):
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, 0)


@start("integers left out", "buffers", "buffers")
def floats_only(module):
    for t in (*module.parameters(), *module.buffers()):
        if t.is_floating_point():
            dist.broadcast(t.data, 0)


@start("frozen parameters left out", "parameters", "frozen-start")
def trainable_only(module):
    for t in (*module.parameters(), *module.buffers()):
        if t.requires_grad or t in set(module.buffers()):
            dist.broadcast(t.data, 0)


@start("the mean instead of rank 0's", "parameters", "root")
def averaged_start(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.all_reduce(t.data)
        if t.is_floating_point():
            t.data /= dist.get_world_size()


@start("the last rank's", "parameters", "root")
def last_rank(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.data, dist.get_world_size() - 1)


@start("seeds alike and draws again", "parameters", "root")
def seeds_again(module):
    torch.manual_seed(0)
    for t in (*module.parameters(), *module.buffers()):
        t.data.copy_(torch.ones_like(t))


@start("new parameters", "parameters", "replaced")
def new_parameters(module):
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            value = p.detach().clone()
            dist.broadcast(value, 0)
            setattr(part, name, torch.nn.Parameter(value, requires_grad=p.requires_grad))
    for b in module.buffers():
        dist.broadcast(b, 0)


@start("not waited for, into copies", "parameters", "start")
def into_copies(module):
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t.detach().clone(), 0)


@start("gradients switched off for good", "same tensors", "flag")
def flags_off(module):
    for p in module.parameters():
        p.requires_grad_(False)
    for t in (*module.parameters(), *module.buffers()):
        dist.broadcast(t, 0)


@start("everything twice", "messages", "too-many-start")
def twice_start(module):
    for _ in range(2):
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, 0)


# -- 7.3 --


def average(name, criterion, hint):
    return wrong(name, check=AVERAGE, criterion=criterion, hint=hint)


@average("nothing", "mean", "local")
def no_average(module):
    return module


@average("the sum", "mean", "sum")
def summed(module):
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)


@average("divided before and after", "mean", "small")
def divided_twice(module):
    for p in module.parameters():
        if p.requires_grad:
            p.grad = (torch.zeros_like(p) if p.grad is None else p.grad) / dist.get_world_size()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@average("divides only, sends nothing", "mean", "local")
def divides_only(module):
    for p in module.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()


@average("DDP-04: averages the parameters", "mean", "parameters")
def parameters_instead(module):
    for p in module.parameters():
        if p.requires_grad:
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()


@average("AR-20: a copy is reduced", "mean", "local")
def reduces_a_copy(module):
    for p in module.parameters():
        if p.requires_grad:
            copy = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
            dist.all_reduce(copy)
            copy /= dist.get_world_size()


@average("DDP-26: divides while it is on its way", "mean", "late-write")
def divides_in_flight(module):
    works = []
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            works.append(dist.all_reduce(p.grad, async_op=True))
            p.grad /= dist.get_world_size()
    for work in works:
        work.wait()


@average("not waited for", "mean", "local")
def never_waits(module):
    for p in module.parameters():
        if p.requires_grad:
            p.grad = (torch.zeros_like(p) if p.grad is None else p.grad) / dist.get_world_size()
            dist.all_reduce(p.grad, async_op=True)


@average("frozen parameters are sent", "all-reduces", "frozen")
def frozen_too(module):
    for p in module.parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad)
        if p.requires_grad:
            p.grad = grad / dist.get_world_size()


@average("everything is gathered", "all-reduces", "kind")
def gathers(module):
    for p in module.parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, grad)
            p.grad = sum(parts) / len(parts)


@average("sent twice", "all-reduces", "too-many")
def sends_twice(module):
    for p in module.parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad.clone())
            dist.all_reduce(grad)
            p.grad = grad / dist.get_world_size()


@average("in float64", "bytes", "bytes-more")
def in_double(module):
    for p in module.parameters():
        if p.requires_grad:
            grad = (torch.zeros_like(p) if p.grad is None else p.grad).double()
            dist.all_reduce(grad)
            p.grad = (grad / dist.get_world_size()).to(p.dtype)


@average("in bfloat16", "mean", "precision")
def in_bfloat16(module):
    for p in module.parameters():
        if p.requires_grad:
            grad = (torch.zeros_like(p) if p.grad is None else p.grad).bfloat16()
            dist.all_reduce(grad)
            p.grad = (grad / dist.get_world_size()).to(p.dtype)


@average("AR-26: skips what it did not use, zeros nobody sends", "unused on one rank", "deadlock")
def skips_unused(module):
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@average("zeros are sent, and forgotten", "unused on one rank", "none")
def forgets_the_result(module):
    for p in module.parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:
            dist.all_reduce(torch.zeros_like(p))
        else:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@average("the mean of those who used it", "unused on one rank", "users")
def mean_of_users(module):
    for p in module.parameters():
        if not p.requires_grad:
            continue
        users = torch.tensor(float(p.grad is not None))
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([grad.flatten(), users[None].to(grad.dtype)])
        dist.all_reduce(flat)
        p.grad = (flat[:-1] / max(1.0, flat[-1].item())).view_as(p)


@average("one dtype for all", ELSE, "bytes-more")
def one_dtype(module):
    wanted = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in wanted])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(wanted, flat.split([p.numel() for p in wanted]), strict=True):
        try:
            p.grad = part.view_as(p)
        except RuntimeError:
            p.grad = None
            p.grad = part.view_as(p).to(p.dtype)


# -- 7.4: one wrapper with the mistakes as switches --


class Flawed:
    flaws = frozenset()

    def __init__(self, module, bucket_bytes=10**6, ahead=None):
        has = self.flaws.__contains__
        self.module, self.quiet, self.ahead = module, False, ahead
        with torch.no_grad():
            for t in module.parameters():
                if not has("no start") and (t.requires_grad or not has("frozen start")):
                    dist.broadcast(t, 0)
            for t in module.buffers():
                if not has("no buffers"):
                    dist.broadcast(t, 0)
        self.buckets, self.home, room, dtype = [], {}, 0, None
        named = module.named_parameters(remove_duplicate=not has("tied twice"))
        wanted = [p for _, p in named if p.requires_grad or has("frozen sent")]
        for p in wanted if has("forward order") else wanted[::-1]:
            size = p.numel() * 4 if has("four bytes each") else p.nbytes
            if has("large lost") and size > bucket_bytes:
                continue
            if size > room or p.dtype != dtype or has("one per parameter"):
                if not (has("one bucket") and self.buckets) and not (has("mixed dtypes") and size <= room):
                    self.buckets.append([])
                    room = bucket_bytes
                dtype = p.dtype
            room -= size
            self.buckets[-1].append(p)
            self.home[p] = len(self.buckets) - 1
            if p.requires_grad:
                if has("pre hook"):
                    p.register_hook(lambda g, p=p: self.ready(p))
                else:
                    p.register_post_accumulate_grad_hook(lambda p: self.ready(p))
        self.reset()

    def reset(self):
        self.missing, self.next, self.flying = [len(bucket) for bucket in self.buckets], 0, []
        self.sent, self.fired = set(), set()

    def __call__(self, *args, **kwargs):
        if "positional only" in self.flaws:
            return self.module(*args)
        output = self.module(*args, **kwargs)
        return {"output": output} if "wrapped output" in self.flaws else output

    def ready(self, p):
        has = self.flaws.__contains__
        if self.quiet and not has("counts quietly"):
            return
        number = self.home[p]
        self.fired.add(p)
        self.missing[number] -= 1
        if self.quiet or has("late"):
            return
        if has("only the first early") and self.sent:
            return
        if has("no order"):
            if self.missing[number] == 0:
                self.launch(number)
            return
        while self.next < len(self.buckets) and self.missing[self.next] <= 0:
            if self.ahead is not None and self.next >= self.ahead and not has("ahead ignored"):
                return
            self.launch(self.next)
            self.next += 1

    def launch(self, number):
        has = self.flaws.__contains__
        self.sent.add(number)
        bucket, world = self.buckets[number], dist.get_world_size()
        unused = [p.grad is None or (has("only fired") and p not in self.fired) for p in bucket]
        source = [torch.zeros_like(p) if zero else p.grad for p, zero in zip(bucket, unused, strict=True)]
        if has("parameter sent"):
            source = [p.data for p in bucket]
        flat = torch.cat([g.flatten() for g in source])
        if has("rounded"):
            flat = flat.bfloat16()
        if not has("no division") and not has("divide in flight"):
            flat /= world
        if has("divide twice"):
            flat /= world
        if has("padded"):
            flat = torch.cat([flat, flat.new_zeros(flat.numel())])
        if has("blocks"):
            dist.all_reduce(flat)
            work = None
        else:
            work = dist.all_reduce(flat, async_op=True)
            if has("waits in the hook"):
                work.wait()
            if has("divide in flight"):
                flat /= world
        self.flying.append((bucket, flat, work))

    def finish(self):
        has = self.flaws.__contains__
        left = [number for number in range(len(self.buckets)) if number not in self.sent]
        if self.ahead is not None and not has("as they come"):
            kept = [number for number in left if number < self.ahead]
            held = [number for number in left if number >= self.ahead]
            left = kept + held[::-1]
            if has("all turned round"):
                left = (kept + held)[::-1]
            if has("alphabetical"):
                left = sorted(left, key=lambda number: self.buckets[number][0].numel())
        if has("left turned round"):
            left = left[::-1]
        if not has("unfilled forgotten"):
            for number in left:
                self.launch(number)
        for bucket, flat, work in self.flying:
            if work is not None and not has("never waits"):
                work.wait()
            if has("not copied back"):
                continue
            sizes = [p.numel() for p in bucket]
            for p, part in zip(bucket, flat[: sum(sizes)].split(sizes), strict=True):
                if has("parameter sent"):
                    p.data.copy_(part.view_as(p))
                elif p.grad is None:
                    if not has("unused stay none"):
                        p.grad = part.view_as(p).to(p.dtype).clone()
                elif has("adds"):
                    p.grad += part.view_as(p)
                elif has("shifted"):
                    p.grad = part.view_as(p).flip(0).clone()
                else:
                    p.grad = part.view_as(p).to(p.dtype).clone()
        if has("own noise"):
            for p in self.home:
                if p.grad is not None:
                    p.grad *= 1 + 1e-6 * dist.get_rank()
        if has("counters kept"):
            self.next, self.flying, self.sent = 0, [], set()
        elif has("order kept"):
            self.missing, self.flying = [len(bucket) for bucket in self.buckets], []
        else:
            flying = self.flying
            self.reset()
            self.flying = flying if has("handles kept") else []

    @contextlib.contextmanager
    def no_sync(self):
        has = self.flaws.__contains__
        if has("no_sync does nothing"):
            yield
            return
        self.quiet = True
        if has("sends at its end"):
            yield
            self.quiet = False
            dist.barrier()
            return
        if has("leaks"):
            yield
            self.quiet = False
            return
        try:
            yield
        except Exception:
            if not has("swallows"):
                raise
        finally:
            self.quiet = has("stays on")
            if has("drops gradients"):
                for p in self.home:
                    p.grad = None


def flawed(*names):
    return type("DataParallel", (Flawed,), {"flaws": frozenset(names)})


class DoesNothing:
    def __init__(self, module, bucket_bytes=0, ahead=0):
        self.module = module

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish(self):
        pass

    @contextlib.contextmanager
    def no_sync(self):
        yield


class Plain(DoesNothing):
    """Right numbers, no technique: one all-reduce per parameter, after backward."""

    def __init__(self, module, bucket_bytes=0, ahead=0):
        super().__init__(module)
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, 0)

    def finish(self):
        for p in self.module.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


class Parameters(Plain):
    """Averages parameters after the step, at the next forward."""

    def __call__(self, *args, **kwargs):
        for p in self.module.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
        return super().__call__(*args, **kwargs)

    def finish(self):
        pass


class Forged(Plain):
    """Sends empty words early so that it looks like overlap."""

    def __call__(self, *args, **kwargs):
        output = super().__call__(*args, **kwargs)
        self.noise = dist.all_reduce(torch.zeros(1), async_op=True)
        return output

    def finish(self):
        self.noise.wait()
        super().finish()


class FullBatch(DoesNothing):
    """The library's own."""

    def __init__(self, module, bucket_bytes=0, ahead=0):
        self.module = torch.nn.parallel.DistributedDataParallel(module)


def overlap(name, criterion, hint, candidate):
    wrong(name, check=OVERLAP, criterion=criterion, hint=hint)(candidate)


STEPS, START = "three steps", "starts from rank 0"
overlap("does nothing", STEPS, "start", type("Nothing", (DoesNothing,), {}))
overlap("the plain version", "overlap", "late", type("PlainVersion", (Plain,), {}))
overlap("parameters averaged instead", STEPS, "parameters", type("ByParameters", (Parameters,), {}))
overlap("a message that carries nothing, early", "overlap", "held", type("ForgedOverlap", (Forged,), {}))
overlap("the library's own", "runs", None, type("Library", (FullBatch,), {}))
overlap("DDP-01: no broadcast", STEPS, "start", flawed("no start"))
overlap("DDP-02: no buffers", MODULES, "buffers", flawed("no buffers"))
overlap("frozen parameters start differently", MODULES, "start", flawed("frozen start"))
overlap("DDP-04, AR-23: the parameter is reduced", STEPS, "parameters", flawed("parameter sent"))
overlap("DDP-05, AR-22: before the gradient is there", STEPS, "missing", flawed("pre hook"))
overlap("AR-25: everything after backward", "overlap", "late", flawed("late"))
overlap("only the first bucket early", "overlap", "held", flawed("only the first early"))
overlap("synchronous in the hook", "overlap", "blocks", flawed("blocks"))
overlap("waits in the hook", "overlap", "blocks", flawed("waits in the hook"))
overlap("no division", STEPS, "sum", flawed("no division"))
overlap("divided twice", STEPS, "small", flawed("divide twice"))
overlap("DDP-26: divides in flight", STEPS, "late-write", flawed("divide in flight"))
overlap("never waits", STEPS, "local", flawed("never waits"))
overlap("AR-20: not copied back", STEPS, "local", flawed("not copied back"))
overlap("adds the mean to the gradient", STEPS, "missing", flawed("adds"))
overlap("parts go back turned round", STEPS, "garbage", flawed("shifted"))
overlap("one message per parameter", "buckets", "too-many", flawed("one per parameter"))
overlap("one bucket for all", "overlap", "late", flawed("one bucket"))
overlap("buckets in the order of forward", "overlap", "late", flawed("forward order"))
overlap("AR-19: a large parameter is lost", MODULES, "local", flawed("large lost"))
overlap("padded to twice the size", "buckets", "bytes-more", flawed("padded"))
overlap("in bfloat16", STEPS, "precision", flawed("rounded"))
overlap("other bits on each rank", "same bits", "bits", flawed("own noise"))
overlap("frozen parameters are sent", MODULES, "frozen", flawed("frozen sent"))
overlap("DDP-07: tied weights counted twice", MODULES, "twice", flawed("tied twice"))
overlap("AR-28, DDP-11: counters not reset", STEPS, "later-steps", flawed("counters kept"))
overlap("AR-28: order not reset", STEPS, "later-steps", flawed("order kept"))
overlap("AR-28: the list of works is never emptied", "nothing piles up", "piles-up", flawed("handles kept"))
overlap("DDP-08: unfilled buckets never sent", "runs", "deadlock", flawed("unfilled forgotten"))
overlap("buckets go when full, in any order", "runs", "deadlock", flawed("no order"))
overlap("unused gradients stay None", MODULES, "none", flawed("unused stay none"))
overlap("keywords are dropped", "runs", None, flawed("positional only"))
overlap("another output", STEPS, "output", flawed("wrapped output"))
overlap("dtypes in one bucket", MODULES, "bytes-more", flawed("mixed dtypes"))


def quiet(name, criterion, hint, candidate):
    wrong(name, check=QUIET, criterion=criterion, hint=hint)(candidate)


quiet("does nothing", "gradients", "start", type("QuietNothing", (DoesNothing,), {}))
quiet("ACC-14: the context does nothing, hooks go on", "gradients", "accumulated", flawed("no_sync does nothing"))
quiet("quiet for good", "messages afterwards", "stays-quiet", flawed("stays on"))
quiet("hooks count in the context", "gradients", "accumulated", flawed("counts quietly"))
quiet("a barrier at the end of the context", "silent", "talks", flawed("sends at its end"))
quiet("DDP-10: leaks after an exception", "after an exception", "stays-quiet", flawed("leaks"))
quiet("gradients of the pieces are dropped", "gradients", "accumulated", flawed("drops gradients"))
quiet("zeros for what the last backward did not use", "parameters used earlier only", "earlier", flawed("only fired"))
quiet("AR-28: counters not reset", "gradients", "accumulated", flawed("counters kept"))


def priority(name, criterion, hint, candidate):
    wrong(name, check=PRIORITY, criterion=criterion, hint=hint)(candidate)


priority("does nothing", STEPS, "start", type("HastyNothing", (DoesNothing,), {}))
priority("the plain version", "priority", "ahead", type("HastyPlain", (Plain,), {}))
priority("as they come", "priority", "order", flawed("as they come"))
priority("ahead has no effect", "priority", "ahead", flawed("ahead ignored"))
priority("by size", "priority", "order", flawed("alphabetical"))
priority("all after backward", "overlap kept", "ahead", flawed("late"))
priority("no division", STEPS, "sum", flawed("no division"))
priority("waits in the hook", "overlap kept", "blocks", flawed("waits in the hook"))
priority("AR-28: order not reset", STEPS, "later-steps", flawed("order kept"))


# -- Written from the notebook alone --


@shard("fills up with the last sample", "every sample", "doubled")
def repeats_the_last(n, rank, world, epoch):
    order = order_of(n, epoch)
    while len(order) % world:
        order.append(order[-1])
    return order[rank::world]


@shard("fills up with samples of each rank's own", "every sample", "doubled")
def own_fill(n, rank, world, epoch):
    order = order_of(n, epoch)
    mine = order[rank::world]
    each = -(-n // world)
    return mine + order_of(n, 77 * rank + epoch)[: each - len(mine)]


@start("only rank 0 calls broadcast", "runs", "deadlock")
def only_the_root(module):
    if dist.get_rank() == 0:
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, 0)


@average("rank 0's gradient for all", "mean", "local")
def of_rank_zero(module):
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.broadcast(p.grad, 0)


@average("divides by 2, whatever the number of ranks", "mean", "divisor")
def always_two(module):
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= 2


class Stranger:
    """A plain reading of 7.4, to go wrong in single methods."""

    def __init__(self, module, bucket_bytes=10**6, ahead=10**9):
        self.module, self.ahead, self.enabled = module, ahead, True
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, 0)
        self.buckets = self.lay_out([p for p in module.parameters() if p.requires_grad][::-1], bucket_bytes)
        self.hook_up()
        self.begin()

    def lay_out(self, params, bucket_bytes):
        buckets = [[]]
        for p in params:
            if buckets[-1] and (sum(q.nbytes for q in buckets[-1]) + p.nbytes > bucket_bytes or buckets[-1][0].dtype != p.dtype):
                buckets.append([])
            buckets[-1].append(p)
        return buckets

    def hook_up(self):
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p, number=number: self.arrived(number))

    def begin(self):
        self.count, self.turn, self.works = [0] * len(self.buckets), 0, []

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def arrived(self, number):
        if self.enabled:
            self.count[number] += 1
            while self.turn < len(self.buckets) and self.count[self.turn] == len(self.buckets[self.turn]) and self.turn < self.ahead:
                self.turn += 1
                self.send(self.turn - 1)

    def flat(self, number):
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.buckets[number]])

    def send(self, number):
        flat = self.flat(number)
        self.works.append((number, flat, dist.all_reduce(flat, async_op=True)))

    def held(self):
        return list(range(self.turn, len(self.buckets)))

    def finish(self):
        for number in self.held():
            self.send(number)
        for number, flat, work in self.works:
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(self.buckets[number], flat.split([p.numel() for p in self.buckets[number]]), strict=True):
                p.grad = part.reshape(p.shape)
        self.begin()

    @contextlib.contextmanager
    def no_sync(self):
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


class OfACopy(Stranger):
    """Wraps a copy; the caller's optimizer holds the parameters of the original."""

    def __init__(self, module, bucket_bytes=10**6):
        super().__init__(module, bucket_bytes)
        self.module = copy.deepcopy(module)
        self.buckets = self.lay_out([p for p in self.module.parameters() if p.requires_grad][::-1], bucket_bytes)
        self.hook_up()


class LastHookOnly(Stranger):
    """Takes the last parameter of a bucket for the one whose gradient comes last."""

    def hook_up(self):
        for number, bucket in enumerate(self.buckets):
            bucket[-1].register_post_accumulate_grad_hook(lambda p, number=number: self.arrived(number))

    def arrived(self, number):
        if number == self.turn:
            self.turn += 1
            self.send(number)


class LateBinding(Stranger):
    """Every hook speaks of the last bucket."""

    def hook_up(self):
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p: self.arrived(number))  # noqa: B023  the mistake


class AddsUp(Stranger):
    """Buckets live on, and gradients are added to what is in them."""

    def flat(self, number):
        kept = self.__dict__.setdefault("kept", {})
        flat = super().flat(number)
        if number in kept:
            flat += kept[number]
        kept[number] = flat
        return flat


class Leftovers(Stranger):
    """Buckets live on, and what has no gradient leaves in them what was there."""

    def flat(self, number):
        kept = self.__dict__.setdefault("kept", {})
        flat = super().flat(number)
        if number not in kept:
            kept[number] = flat
            return flat
        at = 0
        for p in self.buckets[number]:
            if p.grad is not None:
                kept[number][at : at + p.numel()] = p.grad.flatten()
            at += p.numel()
        return kept[number].clone()

    def finish(self):
        works = list(self.works)
        super().finish()
        for number, flat, _ in works:
            self.kept[number] = flat.clone()


class HooksPileUp(Stranger):
    """Registers its hooks before every forward."""

    def __call__(self, *args, **kwargs):
        if self.enabled and hasattr(self, "works") and self.__dict__.setdefault("calls", 0):
            self.hook_up()
        self.calls = 1
        return self.module(*args, **kwargs)


class ByCount(Stranger):
    """Four parameters to a bucket, whatever bucket_bytes says."""

    def lay_out(self, params, bucket_bytes):
        buckets = [[]]
        for p in params:
            if len(buckets[-1]) == 4 or buckets[-1] and buckets[-1][0].dtype != p.dtype:
                buckets.append([])
            buckets[-1].append(p)
        return buckets


class Unlucky(Stranger):
    """Sends a bucket as soon as its first gradient is there."""

    def arrived(self, number):
        if number == self.turn:
            self.turn += 1
            self.send(number)


class MultiGrad(Stranger):
    """One hook for all gradients of a bucket, which adds them to .grad where most of them are already."""

    def hook_up(self):
        self.full = {}
        for number, bucket in enumerate(self.buckets):
            torch.autograd.graph.register_multi_grad_hook(bucket, lambda grads, number=number: self.filled(number, grads))

    def filled(self, number, grads):
        self.full[number] = grads
        while self.turn in self.full:
            self.turn += 1
            self.send(self.turn - 1)

    def flat(self, number):
        bucket = self.buckets[number]
        grads = self.full.pop(number, [None] * len(bucket))
        zeros = [torch.zeros_like(p) for p in bucket]
        pairs = zip(bucket, grads, zeros, strict=True)
        return torch.cat([((zero if p.grad is None else p.grad) + (zero if g is None else g)).flatten() for p, g, zero in pairs])


class FirstLayersFirst(Stranger):
    """Holds back everything, and sends from hooks what forward needs first."""

    def arrived(self, number):
        if self.enabled and number >= len(self.buckets) - self.ahead:
            self.count[number] += 1
            if self.count[number] == len(self.buckets[number]):
                self.send(number)

    def held(self):
        sent = {number for number, *_ in self.works}
        return [number for number in reversed(range(len(self.buckets))) if number not in sent]


class AheadOfParameters(Stranger):
    """Counts `ahead` in parameters."""

    def arrived(self, number):
        super().arrived(number)
        if self.ahead < 10**9 and self.turn and sum(len(bucket) for bucket in self.buckets[: self.turn]) >= self.ahead:
            self.ahead = self.turn

    def held(self):
        return list(range(self.turn, len(self.buckets)))[::-1]


class NoSyncWithoutFinally(Stranger):
    @contextlib.contextmanager
    def no_sync(self):
        self.enabled = False
        yield
        self.enabled = True


class NoSyncNoGrad(Stranger):
    """Takes `no_sync` for a context without gradients."""

    @contextlib.contextmanager
    def no_sync(self):
        with torch.no_grad():
            yield


class NoSyncKeepsZero(Stranger):
    """Sets gradients to zero when it leaves the context, so that only the last piece is sent."""

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        for bucket in self.buckets:
            for p in bucket:
                p.grad = None if p.grad is None else torch.zeros_like(p.grad)


overlap("DDP-23: wraps a copy of the module", STEPS, "no-gradients", OfACopy)
overlap("the last parameter's hook speaks for the bucket", MODULES, "missing", LastHookOnly)
overlap("a closure that speaks of the last bucket", "overlap", "late", LateBinding)
overlap("buckets are added to and never emptied", STEPS, "later-steps", AddsUp)
overlap("what an unused parameter left in its bucket before", MODULES, "later-steps", Leftovers)
overlap("hooks registered anew for each forward", STEPS, "later-steps", HooksPileUp)
overlap("four parameters to a bucket", MODULES, "too-few", ByCount)
overlap("sent with the first gradient of a bucket", STEPS, "missing", Unlucky)
overlap("adds to .grad what is in it already", STEPS, "twice", MultiGrad)
priority("the most urgent ones from hooks", "priority", "ahead-order", FirstLayersFirst)
priority("ahead counts parameters", "runs", "deadlock", AheadOfParameters)
quiet("no finally", "after an exception", "stays-quiet", NoSyncWithoutFinally)
quiet("gradients switched off in no_sync", "runs", None, NoSyncNoGrad)
quiet("zeroes the gradients at its end", "gradients", "accumulated", NoSyncKeepsZero)


# -- what passes until orders come round, weights lie otherwise, or ranks differ in what hooks sent --


@shard("the same four orders again and again", LATER, "same-epoch")
def four_orders(n, rank, world, epoch):
    order = order_of(n, epoch % 4)
    return [order[i % n] for i in range(rank, -(-n // world) * world, world)]


@start("into copies, where a weight does not lie row by row", ELSE, "start")
def into_contiguous(module):
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.contiguous(), 0)


@start("all in one float32 tensor", "buffers", "root")
def flat_start(module):
    held = [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        flat = torch.cat([t.flatten().float() for t in held])
        dist.broadcast(flat, 0)
        for t, part in zip(held, flat.split([t.numel() for t in held]), strict=True):
            t.copy_(part.view_as(t))


@average("what is frozen is sent, if a gradient is left on it", ELSE, "frozen")
def left_on_frozen(module):
    for p in module.parameters():
        if p.requires_grad or p.grad is not None:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


overlap("what hooks left goes in the order of forward", "runs", "deadlock", flawed("left turned round"))
overlap("four bytes for each number", MODULES, "too-few", flawed("four bytes each"))
quiet("swallows the exception", "after an exception", "swallowed", flawed("swallows"))
priority("turns round all that is left", "runs", "deadlock", flawed("all turned round"))

"""Right checkpointing, each built differently: none of these may lose a point."""

import itertools
import math

import torch
import torch.utils.checkpoint
from torch import nn

from tests.labs.corpus import right

FUNCTION, SEQUENTIAL = "checkpointing.checkpoint", "checkpointing.sequential"


# -- 2.2: checkpoint(fn, *args) --


@right("torch, not reentrant", check=FUNCTION, forbid=False)
def torch_not_reentrant(fn, *args):
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)


@right("torch, reentrant", check=FUNCTION, forbid=False)
def torch_reentrant(fn, *args):
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=True)


def rerun(fn, args, state, autocast):
    enabled, dtype = autocast
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", dtype, enabled=enabled):
        torch.set_rng_state(state)
        return fn(*args)


def autocast_now():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def chained(outs, grads):
    outs = outs if isinstance(outs, tuple) else (outs,)
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad and grad is not None]
    if pairs:
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))


class Saved(torch.autograd.Function):
    """Inputs in save_for_backward, everything else on ctx."""

    @staticmethod
    def forward(ctx, fn, *args):
        ctx.fn, ctx.state, ctx.autocast = fn, torch.get_rng_state(), autocast_now()
        ctx.places = [i for i, arg in enumerate(args) if torch.is_tensor(arg)]
        ctx.args = [None if torch.is_tensor(arg) else arg for arg in args]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        return fn(*args)

    @staticmethod
    def backward(ctx, *grads):
        args = list(ctx.args)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = tensor.detach().requires_grad_(ctx.needs_input_grad[1 + place])
        chained(rerun(ctx.fn, args, ctx.state, ctx.autocast), grads)
        return None, *(arg.grad if torch.is_tensor(arg) else None for arg in args)


@right("Function, save_for_backward, fork_rng", check=FUNCTION)
def by_saved(fn, *args):
    return Saved.apply(fn, *args)


@right("Function, inputs as attributes of ctx, state set and put back by hand", check=FUNCTION)
def by_attributes(fn, *args):
    class Attributes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.args, ctx.autocast = args, autocast_now()
            ctx.state = torch.default_generator.get_state()
            return fn(*args)

        @staticmethod
        def backward(ctx, *grads):
            fresh = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in ctx.args]
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(ctx.state)
            try:
                with torch.enable_grad(), torch.autocast("cpu", ctx.autocast[1], enabled=ctx.autocast[0]):
                    outs = fn(*fresh)
            finally:
                torch.default_generator.set_state(before)
            chained(outs, grads)
            return tuple(a.grad for a in fresh if isinstance(a, torch.Tensor))

    return Attributes.apply(*(a for a in args if isinstance(a, torch.Tensor)))


@right("Function with setup_context", check=FUNCTION)
def by_setup_context(fn, *args):
    class Set(torch.autograd.Function):
        @staticmethod
        def forward(fn, state, autocast, *args):
            return fn(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.fn, ctx.state, ctx.autocast, *args = inputs
            ctx.args = args

        @staticmethod
        def backward(ctx, *grads):
            args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in ctx.args]
            chained(rerun(ctx.fn, args, ctx.state, ctx.autocast), grads)
            return None, None, None, *(a.grad if isinstance(a, torch.Tensor) else None for a in args)

    return Set.apply(fn, torch.get_rng_state(), autocast_now(), *args)


def leaves_of(outs):
    """The leaves that a graph reaches, by walking it."""
    seen, todo, leaves = set(), [out.grad_fn for out in outs if out.grad_fn is not None], []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [following for following, _ in node.next_functions if following is not None]
    return leaves


@right("torch.autograd.grad inside backward, parameters found by walking the graph", check=FUNCTION)
def by_autograd_grad(fn, *args):
    class Walked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, fn, *args):
            ctx.fn, ctx.args, ctx.state, ctx.autocast = fn, args, torch.get_rng_state(), autocast_now()
            return fn(*args)

        @staticmethod
        def backward(ctx, *grads):
            args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in ctx.args]
            outs = rerun(ctx.fn, args, ctx.state, ctx.autocast)
            outs = outs if isinstance(outs, tuple) else (outs,)
            pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
            leaves = leaves_of([out for out, _ in pairs])
            found = torch.autograd.grad([out for out, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True)
            mine = {id(a): None for a in args if isinstance(a, torch.Tensor)}
            for leaf, grad in zip(leaves, found, strict=True):
                if id(leaf) in mine:
                    mine[id(leaf)] = grad
                elif grad is not None:
                    leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)
            return None, *(mine.get(id(a)) for a in args)

    return Walked.apply(fn, *args)


@right("saved_tensors_hooks: pack a number, run again at the first unpack", check=FUNCTION)
def by_hooks(fn, *args):
    state, autocast, numbers, again = torch.get_rng_state(), autocast_now(), itertools.count(), {}

    def unpack(number):
        if not again:
            fresh = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
            order = itertools.count()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: again.__setitem__(next(order), t.detach()), lambda _: None):
                rerun(fn, fresh, state, autocast)
        return again.pop(number)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: next(numbers), unpack):
        return fn(*args)


@right("a class whose instance is called, with a dummy input", check=FUNCTION)
class Checkpointer:
    def __new__(cls, fn, *args):
        self = super().__new__(cls)
        return self(fn, *args)

    def __call__(self, fn, *args):
        return Saved.apply(lambda _, *rest: fn(*rest), torch.zeros((), requires_grad=True), *args)


@right("keeps a clone of each input", check=FUNCTION)
def by_clones(fn, *args):
    class Cloned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, fn, *args):
            ctx.fn, ctx.state, ctx.autocast = fn, torch.get_rng_state(), autocast_now()
            ctx.args = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
            return fn(*args)

        @staticmethod
        def backward(ctx, *grads):
            chained(rerun(ctx.fn, ctx.args, ctx.state, ctx.autocast), grads)
            return None, *(a.grad if isinstance(a, torch.Tensor) else None for a in ctx.args)

    return Cloned.apply(fn, *args)


@right("fresh: only what received a gradient (set_materialize_grads)", check=FUNCTION)
def not_materialized(fn, *args):
    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(fn, state, autocast, *args):
            return fn(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.fn, ctx.state, ctx.autocast, *args = inputs
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*(a if torch.is_tensor(a) else None for a in args))
            ctx.other = {i: a for i, a in enumerate(args) if not torch.is_tensor(a)}

        @staticmethod
        def backward(ctx, *grads):
            saved = enumerate(ctx.saved_tensors)
            args = [ctx.other[i] if i in ctx.other else t.detach().requires_grad_(t.requires_grad) for i, t in saved]
            chained(rerun(ctx.fn, args, ctx.state, ctx.autocast), grads)
            return None, None, None, *(a.grad if torch.is_tensor(a) else None for a in args)

    return Replay.apply(fn, torch.get_rng_state(), autocast_now(), *args)


@right("fresh: closures, the Function knows nothing of fn", check=FUNCTION)
def by_closures(fn, *args):
    places = [i for i, a in enumerate(args) if torch.is_tensor(a)]
    state, casting = torch.get_rng_state(), autocast_now()

    class Bridge(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, back, *tensors):
            ctx.back = back
            return run()

        @staticmethod
        def backward(ctx, *grads):
            return None, None, *ctx.back(grads)

    def back(grads):
        leaves = [a.detach().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in args]
        chained(rerun(fn, leaves, state, casting), grads)
        return [leaves[i].grad for i in places]

    return Bridge.apply(lambda: fn(*args), back, *(args[i] for i in places))


# -- 2.3: checkpoint_sequential(layers, x, segments) --


def checkpoint(fn, x):
    """Works for an input that needs no gradient, too: its dummy does."""
    return Saved.apply(lambda _, h: fn(h), torch.zeros((), requires_grad=True), x)


@right("torch checkpoint_sequential, last segment plain", check=SEQUENTIAL, forbid=False)
def torch_sequential(layers, x, segments):
    return torch.utils.checkpoint.checkpoint_sequential(layers, min(segments, len(layers)), x, use_reentrant=False)


@right("torch checkpoint_sequential, reentrant, input made to need a gradient", check=SEQUENTIAL, forbid=False)
def torch_sequential_reentrant(layers, x, segments):
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.utils.checkpoint.checkpoint_sequential(layers, min(segments, len(layers)), x, use_reentrant=True)


@right("torch checkpoint of each segment", check=SEQUENTIAL, forbid=False)
def torch_each(layers, x, segments):
    for part in torch.arange(len(layers)).tensor_split(segments):
        if len(part):
            x = torch.utils.checkpoint.checkpoint(nn.Sequential(*(layers[i] for i in part)), x, use_reentrant=False)
    return x


@right("tensor_split, nn.Sequential", check=SEQUENTIAL)
def by_tensor_split(layers, x, segments):
    for part in torch.arange(len(layers)).tensor_split(segments):
        x = checkpoint(nn.Sequential(*[layers[i] for i in part.tolist()]), x)
    return x


@right("nested functions, floor edges", check=SEQUENTIAL)
def by_nested_functions(layers, x, segments):
    edges = [i * len(layers) // segments for i in range(segments + 1)]

    def run(start, end):
        def segment(h):
            for layer in layers[start:end]:
                h = layer(h)
            return h

        return segment

    for start, end in itertools.pairwise(edges):
        x = checkpoint(run(start, end), x)
    return x


@right("longer segments last", check=SEQUENTIAL)
def longer_last(layers, x, segments):
    short, longer = divmod(len(layers), segments)
    sizes, start = [short] * (segments - longer) + [short + 1] * longer, 0
    for size in sizes:
        x = checkpoint(nn.Sequential(*layers[start : start + size]), x)
        start += size
    return x


@right("the rest of a ModuleList, divided and rounded up, last one plain", check=SEQUENTIAL)
def rounded_up_last_plain(layers, x, segments):
    layers, start = nn.ModuleList(layers), 0
    for left in range(segments, 0, -1):
        end = start + math.ceil((len(layers) - start) / left)
        part = nn.Sequential(*layers[start:end])
        x, start = part(x) if left == 1 else checkpoint(part, x), end
    return x


@right("lengths rounded up", check=SEQUENTIAL)
def lengths_rounded_up(layers, x, segments):
    x = x if x.requires_grad else x.detach().requires_grad_()
    size = math.ceil(len(layers) / segments)
    for start in range(0, len(layers), size):
        x = checkpoint(nn.Sequential(*layers[start : start + size]), x)
    return x


@right("lengths rounded down", check=SEQUENTIAL)
def lengths_rounded_down(layers, x, segments):
    x = x if x.requires_grad else x.detach().requires_grad_()
    size = len(layers) // segments
    for start in range(0, len(layers), size):
        x = checkpoint(nn.Sequential(*layers[start : start + size]), x)
    return x


@right("fresh: a dummy argument, bound by a default", check=SEQUENTIAL)
def dummy_argument(layers, x, segments):
    small, longer = divmod(len(layers), segments)
    supply, switch = iter(layers), torch.zeros((), requires_grad=True)
    for i in range(segments):
        part = tuple(itertools.islice(supply, small + (i < longer)))
        x = Saved.apply(lambda h, _, part=part: through(part, h), x, switch)
    return x


@right("fresh: recursion, last one plain", check=SEQUENTIAL)
def recursion_last_plain(layers, x, segments):
    if segments == 1:
        return through(layers, x)
    size = len(layers) // segments
    start = x if x.requires_grad else x.detach().requires_grad_()
    return recursion_last_plain(layers[size:], Saved.apply(nn.Sequential(*layers[:size]), start), segments - 1)


@right("fresh: hooks, rounded edges", check=SEQUENTIAL)
def hooks_rounded(layers, x, segments):
    edges = [round(i * len(layers) / segments) for i in range(segments + 1)]
    for start, end in itertools.pairwise(edges):
        x = by_hooks(nn.Sequential(*layers[start:end]).forward, x)
    return x


@right("slices of one Sequential, first segment plain where the input needs no gradient", check=SEQUENTIAL)
def first_plain(layers, x, segments):
    chain, edges = nn.Sequential(*layers), [round(i * len(layers) / segments) for i in range(segments + 1)]
    for start, end in itertools.pairwise(edges):
        x = Saved.apply(chain[start:end], x) if x.requires_grad else chain[start:end](x)
    return x


@right("first segment always plain", check=SEQUENTIAL)
def always_first_plain(layers, x, segments):
    first, *rest = balanced(layers, segments)
    x = through(first, x)
    for part in rest:
        x = Saved.apply(nn.Sequential(*part), x)
    return x


@right("recursion over segments", check=SEQUENTIAL)
def by_recursion(layers, x, segments):
    if not layers:
        return x
    first = len(layers) // segments
    return by_recursion(layers[first:], checkpoint(nn.Sequential(*layers[:first]), x), segments - 1)


def balanced(layers, segments):
    edges = [i * len(layers) // segments for i in range(segments + 1)]
    return [layers[a:b] for a, b in itertools.pairwise(edges)]


def through(part, x):
    for layer in part:
        x = layer(x)
    return x


@right("one Function for all segments, borders on ctx", check=SEQUENTIAL)
def one_function(layers, x, segments):
    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, dummy):
            ctx.kept = []
            for part in balanced(layers, segments):
                ctx.kept.append((part, x, torch.get_rng_state()))
                x = through(part, x)
            return x

        @staticmethod
        def backward(ctx, grad):
            while ctx.kept:
                part, x, state = ctx.kept.pop()
                h = x.detach().requires_grad_()
                out = rerun(lambda h, part=part: through(part, h), [h], state, (False, torch.bfloat16))
                out.backward(grad)
                grad = h.grad
            return grad, None

    return Whole.apply(x, torch.zeros((), requires_grad=True))


@right("detached borders, backward chained by hand from a hook on the output", check=SEQUENTIAL)
def by_hand(layers, x, segments):
    kept, h = [], x
    with torch.no_grad():
        for part in balanced(layers, segments):
            kept.append((part, h, torch.get_rng_state()))
            h = through(part, h)
    out = h.detach().requires_grad_()

    def back(grad):
        while kept:
            part, border, state = kept.pop()
            border = border.detach().requires_grad_()
            rerun(lambda t, part=part: through(part, t), [border], state, (False, torch.bfloat16)).backward(grad)
            grad = border.grad
        if x.requires_grad:
            x.backward(grad)

    out.register_hook(back)
    return out


@right("parameters passed explicitly", check=SEQUENTIAL)
def explicit_parameters(layers, x, segments):
    class Explicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, part, x, *parameters):
            ctx.part, ctx.parameters, ctx.state = part, parameters, torch.get_rng_state()
            ctx.save_for_backward(x)
            return through(part, x)

        @staticmethod
        def backward(ctx, grad):
            h = ctx.saved_tensors[0].detach().requires_grad_()
            out = rerun(lambda h: through(ctx.part, h), [h], ctx.state, (False, torch.bfloat16))
            wanted = [h, *(p for p in ctx.parameters if p.requires_grad)]
            found = dict(zip(map(id, wanted), torch.autograd.grad(out, wanted, grad, allow_unused=True), strict=True))
            return None, found[id(h)] if ctx.needs_input_grad[1] else None, *(found.get(id(p)) for p in ctx.parameters)

    for part in balanced(layers, segments):
        x = Explicit.apply(part, x, *(p for layer in part for p in layer.parameters()))
    return x


@right("saved_tensors_hooks around each segment", check=SEQUENTIAL)
def hooks_around(layers, x, segments):
    for part in balanced(layers, segments):
        x = by_hooks(nn.Sequential(*part), x)
    return x


@right("batch statistics counted once (CK-17 mended)", check=SEQUENTIAL)
def statistics_once(layers, x, segments):
    def frozen_statistics(part, again):
        def run(h):
            norms = [m for layer in part for m in layer.modules() if isinstance(m, nn.BatchNorm1d)]
            rates = [m.momentum for m in norms]
            for norm in norms:
                norm.momentum = 0.0 if again["again"] else norm.momentum
            again["again"] = True
            h = through(part, h)
            for norm, rate in zip(norms, rates, strict=True):
                norm.momentum = rate
            return h

        return run

    for part in balanced(layers, segments):
        x = checkpoint(frozen_statistics(part, {"again": False}), x)
    return x


@right("an object that is called", check=SEQUENTIAL)
class Sequential:
    def __new__(cls, layers, x, segments):
        return by_nested_functions(layers, x, segments)


# -- the smaller answers --


def saved_by():
    return {"relu": "output", "linear": ["weight", "input"], "softmax": ("output",)}


def bytes_by_storage(module, x):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    for own in (*module.parameters(), *module.buffers()):
        kept.pop(own.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values())


def bytes_in_a_list(module, x):
    own, seen, total = {t.untyped_storage().data_ptr() for t in module.state_dict().values()}, [], 0.0

    def pack(tensor):
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in seen:
            seen.append(storage.data_ptr())
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x).sum()
    return total


def bytes_by_walking(module, x):
    """No hooks: what the graph's nodes name as saved."""
    todo, seen, storages = [module(x).grad_fn], set(), {}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            for one in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(one, torch.Tensor):
                    storages[one.untyped_storage().data_ptr()] = one.untyped_storage()
        todo += [following for following, _ in node.next_functions]
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    return sum(storage.nbytes() for place, storage in storages.items() if place not in own)


class Ledger(torch.autograd.graph.saved_tensors_hooks):
    """A context manager that holds the storages it has seen."""

    def __init__(self, ignored):
        self.ignored, self.held = ignored, []
        super().__init__(self.enter, lambda tensor: tensor)

    def enter(self, tensor):
        storage = tensor.untyped_storage()
        if all(storage.data_ptr() != other.data_ptr() for other in (*self.ignored, *self.held)):
            self.held.append(storage)
        return tensor


def bytes_by_ledger(module, x):
    ledger = Ledger([t.untyped_storage() for t in (*module.parameters(), *module.buffers())])
    with ledger:
        module(x)
    return sum(storage.nbytes() for storage in ledger.held)


right("by storage", check="checkpointing.saved")((saved_by, bytes_by_storage))
right("a list of addresses, a float", check="checkpointing.saved")((saved_by, bytes_in_a_list))
right("fresh: walks the graph", check="checkpointing.saved")((saved_by, bytes_by_walking))
right("fresh: a context manager of its own", check="checkpointing.saved")((saved_by, bytes_by_ledger))


@right("formula", check="checkpointing.best-segments")
def by_formula(costs):
    border, inside = sum(c[0] for c in costs) / len(costs), sum(c[1] for c in costs)
    return min(len(costs), max(1, round(math.sqrt(inside / border))))


@right("search over every number", check="checkpointing.best-segments")
def by_search(costs):
    def peak(k):
        edges = [i * len(costs) // k for i in range(k + 1)]
        return sum(costs[a][0] for a in edges[:-1]) + max(sum(c[1] for c in costs[a:b]) for a, b in itertools.pairwise(edges))

    return min(range(1, len(costs) + 1), key=peak)


@right("smooth search, a float", check="checkpointing.best-segments")
def by_smooth_search(costs):
    border, inside = costs[0][0], sum(c[1] for c in costs)
    return float(min(range(1, len(costs) + 1), key=lambda k: k * border + inside / k))


@right("hint: every k, border times k and an equal share of the inside", check="checkpointing.best-segments")
def by_shares(costs):
    border, inside = sum(c[0] for c in costs) / len(costs), sum(c[1] for c in costs)
    return min(range(1, len(costs) + 1), key=lambda k: k * border + inside / k)


@right("every k, border times k and the longest segment of mean insides", check="checkpointing.best-segments")
def by_longest(costs):
    border, inside = (sum(c[i] for c in costs) / len(costs) for i in (0, 1))
    return min(range(1, len(costs) + 1), key=lambda k: k * border + math.ceil(len(costs) / k) * inside)


@right("fresh: prefix sums, longer segments first", check="checkpointing.best-segments")
def by_prefix_sums(costs):
    def peak(k):
        short, longer = divmod(len(costs), k)
        return plan_peak(costs, [short + (i < longer) for i in range(k)])

    return min(range(1, len(costs) + 1), key=peak)


def plan_peak(costs, lengths):
    starts = list(itertools.accumulate(lengths, initial=0))
    return sum(costs[a][0] for a in starts[:-1]) + max(sum(c[1] for c in costs[a:b]) for a, b in itertools.pairwise(starts))


@right("every plan tried", check="checkpointing.plan")
def by_brute_force(costs, budget):
    plans = [[]]
    for index in range(len(costs)):
        plans = [[*p, 1] for p in plans] + ([[*p[:-1], p[-1] + 1] for p in plans] if index else [])
    best = min(plans, key=lambda p: plan_peak(costs, p))
    return tuple(best) if plan_peak(costs, best) <= budget else None


@right("a limit for the inside, then dynamic programming", check="checkpointing.plan")
def by_dynamic_programming(costs, budget):
    n, best = len(costs), (math.inf, None)
    inside = [0, *itertools.accumulate(c[1] for c in costs)]
    for limit in sorted({inside[b] - inside[a] for a in range(n) for b in range(a + 1, n + 1)}):
        least, cut = [0.0] + [math.inf] * n, [0] * (n + 1)
        for end in range(1, n + 1):
            for start in range(end):
                if inside[end] - inside[start] <= limit and least[start] + costs[start][0] < least[end]:
                    least[end], cut[end] = least[start] + costs[start][0], start
        if least[n] + limit < best[0]:
            lengths, end = [], n
            while end:
                lengths.insert(0, end - cut[end])
                end = cut[end]
            best = (least[n] + limit, lengths)
    return best[1] if best[0] <= budget else None


@right("cheapest seconds per byte first", check="checkpointing.select")
def greedy(costs, budget):
    kept, chosen = sum(c[0] for c in costs), set()
    for index in sorted(range(len(costs)), key=lambda i: costs[i][1] / costs[i][0]):
        if kept <= budget:
            break
        chosen.add(index)
        kept -= costs[index][0]
    return chosen


@right("every choice tried", check="checkpointing.select")
def every_choice(costs, budget):
    choices = itertools.product((False, True), repeat=len(costs))
    fitting = [c for c in choices if sum(cost[0] for cost, again in zip(costs, c, strict=True) if not again) <= budget]
    best = min(fitting, key=lambda c: sum(cost[1] for cost, again in zip(costs, c, strict=True) if again))
    return [index for index, again in enumerate(best) if again]


def halves(layers, x):
    if len(layers) == 1:
        return layers[0](x)
    middle = len(layers) // 2
    return halves(layers[middle:], checkpoint(lambda h: halves(layers[:middle], h), x))


@right("halves, the second one plain", check="checkpointing.recursive")
def by_halves(layers, x):
    return halves(layers, x)


@right("halves, both checkpointed", check="checkpointing.recursive")
def by_both_halves(layers, x):
    if len(layers) <= 2:
        return through(layers, x)
    middle = (len(layers) + 1) // 2
    for part in (layers[:middle], layers[middle:]):
        x = checkpoint(lambda h, part=part: by_both_halves(part, h), x)
    return x


@right("fresh: neighbours joined until one is left", check="checkpointing.recursive")
def bottom_up(layers, x):
    functions = list(layers)
    while len(functions) > 1:
        pairs = zip(functions[::2], functions[1::2], strict=False)
        joined = [lambda h, a=a, b=b: b(checkpoint(a, h)) for a, b in pairs]
        functions = joined + functions[len(joined) * 2 :]
    return functions[0](x)


@right("fresh: both halves, down to single layers", check="checkpointing.recursive")
def both_to_the_end(layers, x):
    if len(layers) == 1:
        return layers[0](x)
    half = len(layers) // 2
    x = checkpoint(lambda h: both_to_the_end(layers[:half], h), x)
    return checkpoint(lambda h: both_to_the_end(layers[half:], h), x)

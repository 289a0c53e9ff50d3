"""Wrong checkpointing, as people really write it (CK-..: public reports) and as an unkind reviewer would."""

import copy
import importlib
import itertools
import math
import os
import tempfile

import torch
from torch import nn

from tests.labs.corpus import wrong

FUNCTION, SEQUENTIAL = "checkpointing.checkpoint", "checkpointing.sequential"


class Flawed(torch.autograd.Function):
    """A right checkpoint but for the flaws named."""

    @staticmethod
    def forward(ctx, flaws, fn, *args):
        ctx.flaws, ctx.fn = flaws, fn
        ctx.random_state = torch.get_rng_state()
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.tensors = [isinstance(arg, torch.Tensor) for arg in args]
        ctx.others = [None if tensor else arg for arg, tensor in zip(args, ctx.tensors, strict=True)]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        if "grad in forward" in flaws or "keeps graph" in flaws:
            with torch.enable_grad():
                fresh = [arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args]
                out = fn(*fresh)
            if "keeps graph" in flaws:
                ctx.out = out
            return tuple(one.detach() for one in out) if isinstance(out, tuple) else out.detach()
        if "forward twice" in flaws:
            with torch.random.fork_rng(devices=[]):
                fn(*args)
        if "seeds" in flaws:
            torch.manual_seed(1)
            ctx.random_state = torch.get_rng_state()
        out = fn(*args)
        if "snapshot after" in flaws:
            ctx.random_state = torch.get_rng_state()
        return out

    @staticmethod
    def backward(ctx, *grads):
        flaws = ctx.flaws
        kept = iter(ctx.saved_tensors)
        args = [next(kept) if tensor else arg for tensor, arg in zip(ctx.tensors, ctx.others, strict=True)]
        if "no detach" not in flaws:
            needs = ctx.needs_input_grad[2:]
            needs = [need or "all ask" in flaws for need in needs]
            args = [arg.detach().requires_grad_(need) if t else arg for arg, t, need in zip(args, ctx.tensors, needs, strict=True)]
        enabled, dtype = ctx.autocast
        if "no autocast" in flaws:
            enabled = False
        if "default autocast" in flaws:
            dtype = torch.bfloat16
        modules = list(ctx.fn.modules()) if isinstance(ctx.fn, nn.Module) else []
        if "eval" in flaws:
            for module in modules:
                module.eval()
        before = torch.get_rng_state()
        with torch.autocast("cpu", dtype, enabled=enabled), torch.set_grad_enabled("no grad mode" not in flaws):
            if "not restored" not in flaws:
                torch.set_rng_state(ctx.random_state)
            if "twice" in flaws:
                ctx.fn(*args)
                torch.set_rng_state(ctx.random_state)
            out = ctx.fn(*args)
            if "run per output" in flaws and isinstance(out, tuple):
                runs = []
                for index in range(len(out)):
                    torch.set_rng_state(ctx.random_state)
                    runs.append(ctx.fn(*args)[index])
                out = tuple(runs)
        if "not put back" not in flaws:
            torch.set_rng_state(before)
        if "eval" in flaws and "stays eval" not in flaws:
            for module in modules:
                module.train()
        outs = out if isinstance(out, tuple) else (out,)
        if "leaks" in flaws:
            LEAK.append(outs)
        pairs = list(zip(outs, grads, strict=True))
        if "first output" in flaws:
            pairs = pairs[:1]
        if "no filter" not in flaws:
            pairs = [(one, grad) for one, grad in pairs if one.requires_grad or "no grad mode" in flaws]
        if "cast" in flaws:
            pairs = [(one, grad.to(one.dtype)) for one, grad in pairs]
        if "inputs only" in flaws:
            inputs = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
            found = iter(torch.autograd.grad([one for one, _ in pairs], inputs, [grad for _, grad in pairs], allow_unused=True))
            return (None, None, *(next(found, None) if isinstance(a, torch.Tensor) and a.requires_grad else None for a in args))
        times = 2 if "double" in flaws else 1
        for turn in range(times):
            keep = turn + 1 < times or "leaks" in flaws
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs], retain_graph=keep)
        result = [arg.grad if isinstance(arg, torch.Tensor) else None for arg in args]
        if "frozen too" in flaws:
            for original, arg in zip(ctx.saved_tensors, (a for a in args if isinstance(a, torch.Tensor)), strict=True):
                if not arg.requires_grad and arg.is_floating_point():
                    original.grad = torch.zeros_like(original)
        if "no input grads" in flaws:
            result = [None for _ in result]
        if "reversed" in flaws:
            tensors = [grad for grad in result if grad is not None][::-1]
            result = [tensors.pop(0) if grad is not None else None for grad in result]
        return (None, *result) if "one short" in flaws else (None, None, *result)


LEAK: list = []


def flawed(*flaws):
    def checkpoint(fn, *args):
        return Flawed.apply(frozenset(flaws), fn, *args)

    return checkpoint


for name, flaws, criterion, hint in [
    ("CK-01 random state not restored", ["not restored"], "random numbers", "random-replay"),
    ("CK-02 snapshot after the segment ran", ["snapshot after"], "random numbers", "random-when"),
    ("CK-04 input not detached", ["no detach"], "runs", "detach"),
    ("CK-05 autocast not replayed", ["no autocast"], "autocast", "precision"),
    ("CK-05 autocast replayed in its default dtype", ["default autocast"], "autocast", "precision"),
    ("CK-07 graph kept on ctx", ["keeps graph"], "kept for backward", "kept"),
    ("CK-08 recomputed tensors kept in a list", ["leaks"], "kept for backward", "not-released"),
    ("CK-13 forward records", ["grad in forward"], "kept for backward", "grad-in-forward"),
    ("CK-14 one gradient too few", ["one short"], "runs", "returns"),
    ("CK-14 gradients in the wrong order", ["reversed"], "arguments", "returns"),
    ("CK-16 only the first output's gradient", ["first output"], "several outputs", "outputs"),
    ("CK-16 outputs without gradient not left out", ["no filter"], "runs", "outputs"),
    ("CK-19 second run in eval mode", ["eval"], "random numbers", "mode"),
    ("CK-19 layers left in eval mode", ["eval", "stays eval"], "random numbers", "mode"),
    ("CK-20 grad mode off in backward", ["no grad mode"], "runs", "grad-mode"),
    ("random state not put back", ["not put back"], "random numbers", "random-after"),
    ("runs twice in forward", ["forward twice"], "forward calls", "calls"),
    ("runs twice in backward", ["twice"], "forward calls", "calls"),
    ("gradient added twice", ["double"], "output and gradients", "scaled"),
    ("no gradient for the inputs", ["no input grads"], "output and gradients", "input-grad"),
    ("gradients of inputs only", ["inputs only"], "output and gradients", "parameter-grads"),
    ("gradients made up for frozen tensors", ["frozen too"], "arguments", "frozen"),
    ("fresh: no autocast, dtype mended", ["no autocast", "cast"], "autocast", "precision"),
    ("fresh: autocast's default dtype, dtype mended", ["default autocast", "cast"], "autocast", "precision"),
    ("fresh: every tensor asks for a gradient", ["all ask"], "runs", "frozen"),
    ("fresh: one run per output", ["run per output"], "forward calls", "calls-outputs"),
    ("fresh: seeds before both runs", ["seeds"], "random numbers", "random-first"),
]:
    wrong(name, check=FUNCTION, criterion=criterion, hint=hint)(flawed(*flaws))


@wrong("do nothing", check=FUNCTION, criterion="output and gradients", hint="output")
def returns_its_argument(fn, *args):
    return args[0]


@wrong("plain", check=FUNCTION, criterion="kept for backward", hint="plain")
def plain(fn, *args):
    return fn(*args)


@wrong("no grad anywhere", check=FUNCTION, criterion="output and gradients", hint="no-graph")
def no_grad_anywhere(fn, *args):
    with torch.no_grad():
        return fn(*args)


@wrong("CK-02 snapshot taken in backward", check=FUNCTION, criterion="random numbers", hint="random-replay")
def snapshot_in_backward(fn, *args):
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, fn, *args):
            ctx.fn, ctx.args = fn, args
            return fn(*args)

        @staticmethod
        def backward(ctx, *grads):
            state = torch.get_rng_state()
            needs = ctx.needs_input_grad[1:]
            args = [a.detach().requires_grad_(n) if isinstance(a, torch.Tensor) else a for a, n in zip(ctx.args, needs, strict=True)]
            with torch.enable_grad():
                torch.set_rng_state(state)
                out = ctx.fn(*args)
            torch.set_rng_state(state)
            outs = out if isinstance(out, tuple) else (out,)
            pairs = [(one, grad) for one, grad in zip(outs, grads, strict=True) if one.requires_grad]
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
            return None, *(a.grad if isinstance(a, torch.Tensor) else None for a in args)

    return Late.apply(fn, *args)


@wrong("CK-07 keeps the graph, never runs again", check=FUNCTION, criterion="kept for backward", hint="plain")
def keeps_the_graph(fn, *args):
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, fn, *args):
            with torch.enable_grad():
                ctx.inputs = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
                ctx.out = fn(*ctx.inputs)
            return tuple(one.detach() for one in ctx.out) if isinstance(ctx.out, tuple) else ctx.out.detach()

        @staticmethod
        def backward(ctx, *grads):
            outs = ctx.out if isinstance(ctx.out, tuple) else (ctx.out,)
            pairs = [(one, grad) for one, grad in zip(outs, grads, strict=True) if one.requires_grad]
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
            return None, *(a.grad if isinstance(a, torch.Tensor) else None for a in ctx.inputs)

    return Kept.apply(fn, *args)


@wrong("fresh: the library by the back door", check=FUNCTION, criterion="runs", hint=None)
def library_by_name(fn, *args):
    library = importlib.import_module(".".join(["torch", "utils", "check" + "point"]))
    return library.checkpoint(fn, *args, use_reentrant=False)


SLOT: dict = {}


@wrong("one global slot for all calls", check=FUNCTION, criterion="output and gradients", hint="other-call")
def global_slot(fn, *args):
    class Slot(torch.autograd.Function):
        @staticmethod
        def forward(ctx, fn, *args):
            SLOT["fn"], SLOT["args"] = fn, args
            return fn(*args)

        @staticmethod
        def backward(ctx, *grads):
            args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in SLOT["args"]]
            with torch.enable_grad():
                out = SLOT["fn"](*args)
            out.backward(*grads)
            return None, *(a.grad if isinstance(a, torch.Tensor) else None for a in args)

    return Slot.apply(fn, *args)


def _hidden(pack, unpack, fn, args):
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return fn(*args)


@wrong("activations hidden in numpy", check=FUNCTION, criterion="runs again", hint="not-recomputed")
def in_numpy(fn, *args):
    def pack(tensor):
        return tensor.detach().numpy().copy() if tensor.dtype == torch.float32 else tensor

    return _hidden(pack, lambda kept: kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept), fn, args)


@wrong("activations hidden in files", check=FUNCTION, criterion="runs again", hint="not-recomputed")
def in_files(fn, *args):
    def pack(tensor):
        handle, path = tempfile.mkstemp()
        os.close(handle)
        torch.save(tensor.detach().clone(), path)
        return path

    def unpack(path):
        return torch.load(path)

    return _hidden(pack, unpack, fn, args)


@wrong("activations kept in bfloat16", check=FUNCTION, criterion="output and gradients", hint="gradients")
def in_bfloat16(fn, *args):
    def pack(tensor):
        return tensor.dtype, tensor.bfloat16() if tensor.is_floating_point() else tensor

    return _hidden(pack, lambda kept: kept[1].to(kept[0]), fn, args)


@wrong("returns a list for a tuple", check=FUNCTION, criterion="several outputs", hint="outputs")
def list_for_tuple(fn, *args):
    out = Flawed.apply(frozenset(), fn, *args)
    return list(out) if isinstance(out, tuple) else out


@wrong("default dtype left changed", check=FUNCTION, criterion="random numbers", hint="trace")
def changes_the_default_dtype(fn, *args):
    torch.set_default_dtype(torch.float64)
    return Flawed.apply(frozenset(), fn, *args)


@wrong("arguments that are no tensors get lost", check=FUNCTION, criterion="arguments", hint="returns")
def drops_numbers(fn, *args):
    def with_defaults(*args):
        return fn(*(1 if isinstance(arg, (int, float)) else arg for arg in args))

    return Flawed.apply(frozenset(), with_defaults, *args)


# -- 2.3 --


def right_checkpoint(fn, *args):
    """The dummy makes autograd record the call even where no argument requires grad."""
    dummy = torch.ones(0, requires_grad=True)
    return Flawed.apply(frozenset(), lambda _, *rest: fn(*rest), dummy, *args)


def cut(count, segments):
    edges = [index * count // segments for index in range(segments + 1)]
    return list(zip(edges, edges[1:], strict=False))


def sequential_with(checkpoint, split=cut):
    def checkpoint_sequential(layers, x, segments):
        segments = min(segments, len(layers))
        for start, end in split(len(layers), segments):
            x = checkpoint(nn.Sequential(*layers[start:end]), x)
        return x

    return checkpoint_sequential


def dummied(*flaws):
    def checkpoint(fn, x):
        return Flawed.apply(frozenset(flaws), fn, x if x.requires_grad else x.detach().requires_grad_())

    return checkpoint


def remainder_last(count, segments):
    size = count // segments
    return [(i * size, count if i == segments - 1 else (i + 1) * size) for i in range(segments)]


def remainder_lost(count, segments):
    size = count // segments
    return [(i * size, (i + 1) * size) for i in range(segments)]


def as_block_length(count, segments):
    return [(start, min(start + segments, count)) for start in range(0, count, segments)]


for name, candidate, criterion, hint in [
    ("CK-10 every layer its own segment", sequential_with(dummied(), lambda n, k: cut(n, n)), "peak against depth", "boundaries"),
    ("one segment for all", sequential_with(dummied(), lambda n, k: [(0, n)]), "peak against depth", "one-segment"),
    ("always two segments", sequential_with(dummied(), lambda n, k: cut(n, min(2, n))), "peak against depth", "one-segment"),
    ("always sqrt(n) segments", sequential_with(dummied(), lambda n, k: cut(n, math.isqrt(n))), "segments", "remainder"),
    ("CK-11 remainder in the last segment", sequential_with(dummied(), remainder_last), "segments", "remainder"),
    ("only when segments divide layers", sequential_with(dummied(), remainder_lost), "segments", "skipped"),
    ("segments taken for layers per segment", sequential_with(dummied(), as_block_length), "segments", "remainder"),
    ("CK-01 random state not restored", sequential_with(dummied("not restored")), "random numbers", "random-replay"),
    ("CK-02 snapshot after", sequential_with(dummied("snapshot after")), "random numbers", "random-when"),
    ("CK-07 graphs kept", sequential_with(dummied("keeps graph")), "peak against depth", "kept"),
    ("CK-08 recomputed tensors kept", sequential_with(dummied("leaks")), "peak against depth", "not-released"),
    ("random state not put back", sequential_with(dummied("not put back")), "random numbers", "random-after"),
    ("runs twice in backward", sequential_with(dummied("twice")), "forward calls", "calls"),
    ("gradient added twice", sequential_with(dummied("double")), "gradients", "scaled"),
    ("input that needs no gradient", sequential_with(flawed()), "other layers and inputs", "input-without-grad"),
    ("input detached", lambda layers, x, k: sequential_with(dummied())(layers, x.detach(), k), "gradients", "input-grad"),
    ("CK-17 mended by eval mode in the second run", sequential_with(dummied("eval")), "random numbers", "mode"),
    ("plain", lambda layers, x, segments: nn.Sequential(*layers)(x), "peak against depth", "plain"),
    ("do nothing", lambda layers, x, segments: x, "gradients", "output"),
    ("returns nothing", lambda layers, x, segments: None, "gradients", "output"),
]:
    wrong(name, check=SEQUENTIAL, criterion=criterion, hint=hint)(candidate)


@wrong("fresh: late binding in a loop of lambdas", check=SEQUENTIAL, criterion="gradients", hint="other-layers")
def late_binding(layers, x, segments):
    for start, end in cut(len(layers), segments):
        x = dummied()(lambda h: nn.Sequential(*layers[start:end])(h), x)  # noqa: B023
    return x


@wrong("fresh: one more checkpoint around all segments", check=SEQUENTIAL, criterion="forward calls", hint="calls")
def outer_checkpoint(layers, x, segments):
    return dummied()(lambda h: sequential_with(dummied())(layers, h, segments), x)


@wrong("fresh: the last two segments plain", check=SEQUENTIAL, criterion="runs forward again", hint="plain-segments")
def last_two_plain(layers, x, segments):
    edges = cut(len(layers), segments)
    for number, (start, end) in enumerate(edges):
        part = nn.Sequential(*layers[start:end])
        x = part(x) if number >= segments - 2 else dummied()(part, x)
    return x


@wrong("fresh: the caller's x made to need a gradient", check=SEQUENTIAL, criterion="other layers and inputs", hint="trace")
def changes_x(layers, x, segments):
    return sequential_with(flawed())(layers, x.requires_grad_(), segments) if x.is_leaf else sequential_with(flawed())(layers, x, segments)


@wrong("no grad anywhere", check=SEQUENTIAL, criterion="gradients", hint="no-graph")
@torch.no_grad()
def all_without_grad(layers, x, segments):
    return nn.Sequential(*layers)(x)


@wrong("only the first segment checkpointed", check=SEQUENTIAL, criterion="peak against depth", hint="kept")
def first_only(layers, x, segments):
    first = -(-len(layers) // segments)
    return nn.Sequential(*layers[first:])(right_checkpoint(nn.Sequential(*layers[:first]), x))


@wrong("keeps only the input, runs from the start each time", check=SEQUENTIAL, criterion="forward calls", hint="calls")
def from_the_start(layers, x, segments):
    class FromStart(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, dummy):
            ctx.save_for_backward(x)
            ctx.state = torch.get_rng_state()
            return nn.Sequential(*layers)(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.random.fork_rng(devices=[]):
                for start, end in reversed(cut(len(layers), min(segments, len(layers)))):
                    torch.set_rng_state(ctx.state)
                    with torch.no_grad():
                        h = x.detach()
                        for layer in layers[:start]:
                            h = layer(h)
                    h = h.detach().requires_grad_()
                    with torch.enable_grad():
                        out = nn.Sequential(*layers[start:end])(h)
                    out.backward(grad)
                    grad = h.grad
            return grad, None

    return FromStart.apply(x, torch.ones(0, requires_grad=True))


@wrong("parameter gradients overwritten", check=SEQUENTIAL, criterion="other layers and inputs", hint="gradients")
def overwrites(layers, x, segments):
    out = sequential_with(dummied())(layers, x, segments)
    parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]

    def forget(grad):
        for parameter in parameters:
            parameter.grad = None

    out.register_hook(forget)
    return out


@wrong("unfreezes what is frozen", check=SEQUENTIAL, criterion="other layers and inputs", hint="gradients")
def unfreezes(layers, x, segments):
    for layer in layers:
        layer.requires_grad_(True)
    return sequential_with(dummied())(layers, x, segments)


@wrong("leaves hooks on the layers", check=SEQUENTIAL, criterion="other layers and inputs", hint="trace")
def leaves_hooks(layers, x, segments):
    for layer in layers:
        layer.register_forward_hook(lambda module, args, out: None)
    return sequential_with(dummied())(layers, x, segments)


@wrong("second run goes through copies of the layers", check=SEQUENTIAL, criterion="gradients", hint="parameter-grads")
def runs_copies(layers, x, segments):
    class Copying(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, h):
            if torch.is_grad_enabled():
                for layer in self.part:
                    twin = copy.copy(layer)
                    twin._modules = {name: copy.deepcopy(module) for name, module in layer._modules.items()}
                    h = twin(h)
                return h
            return nn.Sequential(*self.part)(h)

    for start, end in cut(len(layers), min(segments, len(layers))):
        x = dummied()(Copying(layers[start:end]), x)
    return x


@wrong("skips the last layer", check=SEQUENTIAL, criterion="gradients", hint="output")
def one_short(layers, x, segments):
    return sequential_with(dummied())(layers[:-1], x, segments)


@wrong("activations hidden in numpy", check=SEQUENTIAL, criterion="runs forward again", hint="not-recomputed")
def sequential_in_numpy(layers, x, segments):
    def pack(tensor):
        return tensor.detach().numpy().copy() if tensor.dtype == torch.float32 else tensor

    return _hidden(pack, lambda kept: kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept), nn.Sequential(*layers), (x,))


@wrong("activations kept in bfloat16", check=SEQUENTIAL, criterion="gradients", hint="gradients")
def sequential_in_bfloat16(layers, x, segments):
    return _hidden(lambda t: (t.dtype, t.bfloat16()), lambda kept: kept[1].to(kept[0]), nn.Sequential(*layers), (x,))


# -- the smaller answers --


def _saved(name, criterion, hint, answer=None, count=None):
    right = {"relu": {"output"}, "linear": {"input", "weight"}, "softmax": {"output"}}

    def saved_by():
        return right | (answer or {})

    saved_by.__module__ = __name__
    wrong(name, check="checkpointing.saved", criterion=criterion, hint=hint)((saved_by, count or kept_bytes))


def kept_bytes(module, x, weights=False, once=True, unit=None):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = module(x)
    own = set() if weights else {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    sizes = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes() if unit is None else t.numel()) for t in kept]
    sizes = [(place, size) for place, size in sizes if place not in own]
    del out
    return sum(dict(sizes).values()) if once else sum(size for _, size in sizes)


_saved("ReLU saves its input", "what is saved", "relu-saves", {"relu": {"input"}})
_saved("Linear saves its input only", "what is saved", "linear-saves", {"linear": {"input"}})
_saved("softmax saves both", "what is saved", "softmax-saves", {"softmax": {"input", "output"}})
_saved("counts the weights", "bytes kept", "weights", count=lambda m, x: kept_bytes(m, x, weights=True))
_saved("counts a shared tensor twice", "each storage once", "counted-twice", count=lambda m, x: kept_bytes(m, x, once=False))
_saved("counts elements for bytes", "bytes kept", "bytes", count=lambda m, x: kept_bytes(m, x, unit=1))
_saved("do nothing", "what is saved", "relu-saves", {"relu": set(), "linear": set(), "softmax": set()}, lambda m, x: 0)


def fresh_count(pack_returns=lambda tensor: tensor, size=lambda t: t.untyped_storage().nbytes(), place=None, left_out=None):
    """A count by address, with one thing wrong."""
    place = place or (lambda t: t.untyped_storage().data_ptr())
    left_out = left_out or (lambda module, x: (*module.parameters(), *module.buffers()))

    def count(module, x):
        kept = {}

        def pack(tensor):
            kept[place(tensor)] = size(tensor)
            return pack_returns(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = module(x)
        for tensor in left_out(module, x):
            kept.pop(place(tensor), None)
        del out
        return sum(kept.values())

    return count


def counts_no_parameters(module, x):
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(kept.values())


def counts_outputs(module, x):
    sizes, handles = {}, []
    for part in module.modules():
        if not list(part.children()):
            hook = lambda m, args, out: sizes.__setitem__(out.untyped_storage().data_ptr(), (out.untyped_storage().nbytes(), out))  # noqa: E731
            handles.append(part.register_forward_hook(hook))
    module(x)
    for handle in handles:
        handle.remove()
    return sum(size for size, _ in sizes.values())


def with_input(module, x):
    return (x, *module.parameters(), *module.buffers())


for name, criterion, hint, count in [
    ("fresh: every saved tensor counts", "each storage once", "counted-twice", lambda m, x: kept_bytes(m, x, once=False)),
    ("fresh: what is no Parameter", "bytes kept", "weights", counts_no_parameters),
    ("fresh: the tensor's address and bytes", "each storage once", "part",
     fresh_count(size=lambda t: t.nbytes, place=lambda t: t.data_ptr())),
    ("fresh: the storage's address, the tensor's bytes", "each storage once", "part", fresh_count(size=lambda t: t.nbytes)),
    ("fresh: pack lets go", "each storage once", "freed", fresh_count(pack_returns=lambda tensor: None)),
    ("fresh: x left out", "bytes kept", "input-left-out", fresh_count(left_out=with_input)),
    ("fresh: outputs of the layers", "bytes kept", "computed", counts_outputs),
    ("fresh: buffers counted", "each storage once", "buffers", fresh_count(left_out=lambda m, x: m.parameters())),
    ("four bytes whatever the dtype", "bytes kept", "bytes", fresh_count(size=lambda t: 4 * t.numel())),
]:  # fmt: skip
    _saved(name, criterion, hint, count=count)


def plan_peak(costs, lengths):
    edges = [0, *itertools.accumulate(lengths)]
    return sum(costs[a][0] for a in edges[:-1]) + max(sum(c[1] for c in costs[a:b]) for a, b in itertools.pairwise(edges))


def cut_peak(costs, segments):
    return plan_peak(costs, [b - a for a, b in cut(len(costs), segments)])


def compositions(n):
    if n == 0:
        yield []
    for first in range(1, n + 1):
        yield from ([first, *rest] for rest in compositions(n - first))


def planned(costs, budget, peak=plan_peak, fits=lambda peak, budget: peak <= budget, plans=compositions):
    best = min(plans(len(costs)), key=lambda plan: peak(costs, plan))
    return best if fits(peak(costs, best), budget) else None


def equal_plans(count):
    return [[b - a for a, b in cut(count, segments)] for segments in range(1, count + 1)]


for name, answer, criterion, hint in [
    ("sqrt(n) whatever it costs", lambda costs: round(math.sqrt(len(costs))), "costly insides", "inside"),
    ("one segment", lambda costs: 1, "equal costs", "equal"),
    ("every layer its own", lambda costs: len(costs), "equal costs", "equal"),
    ("ratio upside down", lambda costs: max(1, round(math.sqrt(len(costs) * costs[0][0] / costs[0][1]))), "costly insides", "inside"),
    ("fresh: the root, unlimited", lambda c: round(math.sqrt(len(c) * c[0][1] / c[0][0])), "costly insides", "range"),
    ("fresh: n itself never tried", lambda c: min(range(1, len(c)), key=lambda k: cut_peak(c, k), default=1), "costly insides", "ends"),
    ("more segments than layers", lambda costs: round(math.sqrt(len(costs) * costs[0][1] / costs[0][0])) + 1000, "equal costs", "range"),
]:
    wrong(name, check="checkpointing.best-segments", criterion=criterion, hint=hint)(answer)

for name, answer, criterion, hint in [
    ("equal lengths", lambda costs, budget: [b - a for a, b in cut(len(costs), math.isqrt(len(costs)))], "least peak", "unequal"),
    ("every layer its own", lambda costs, budget: [1] * len(costs), "least peak", "least"),
    ("none fits", lambda costs, budget: None, "a whole plan", "budget"),
    ("budget not looked at", lambda costs, budget: planned(costs, math.inf), "budget", "budget"),
    ("fresh: the best equal lengths", lambda costs, budget: planned(costs, budget, plans=equal_plans), "least peak", "unequal"),
    ("fresh: a peak of the budget is too much", lambda c, b: planned(c, b, fits=lambda peak, most: peak < most), "budget", "equality"),
    ("fresh: first border free", lambda c, b: planned(c, b, peak=lambda c, plan: plan_peak(c, plan) - c[0][0]), "budget", "counted"),
    ("largest inside less one layer", lambda c, b: planned(c, b, peak=lambda c, plan: plan_peak(c, plan) - 1), "budget", "counted"),
    ("fresh: the first that fits", lambda c, b: next((p for p in compositions(len(c)) if plan_peak(c, p) <= b), None),
     "least peak", "least"),
    ("a layer missing", lambda costs, budget: [len(costs) - 1], "a whole plan", "whole"),
]:
    wrong(name, check="checkpointing.plan", criterion=criterion, hint=hint)(answer)


def in_order(costs, budget, order):
    kept, chosen = sum(cost[0] for cost in costs), []
    for index in order:
        if kept <= budget:
            break
        chosen.append(index)
        kept -= costs[index][0]
    return chosen


def by_ratio(costs):
    return sorted(range(len(costs)), key=lambda i: costs[i][1] / costs[i][0])


for name, answer, criterion, hint in [
    ("every layer", lambda costs, budget: list(range(len(costs))), "least time", "seconds"),
    ("none", lambda costs, budget: [], "fits", "fits"),
    ("first come", lambda costs, budget: in_order(costs, budget, range(len(costs))), "least time", "seconds"),
    ("dearest first", lambda c, b: in_order(c, b, sorted(range(len(c)), key=lambda i: -c[i][1] / c[i][0])), "least time", "seconds"),
    ("fresh: the budget as bytes to free", lambda c, b: in_order(c, sum(k for k, _ in c) - b, by_ratio(c)), "fits", "fits"),
    ("fresh: quickest first", lambda c, b: in_order(c, b, sorted(range(len(c)), key=lambda i: c[i][1])), "least time", "seconds"),
    ("fresh: largest first", lambda c, b: in_order(c, b, sorted(range(len(c)), key=lambda i: -c[i][0])), "least time", "seconds"),
    ("what to keep, for what to run again", lambda c, b: sorted({*range(len(c))} - {*in_order(c, b, range(len(c)))}), "fits", "fits"),
]:
    wrong(name, check="checkpointing.select", criterion=criterion, hint=hint)(answer)

for name, answer, criterion, hint in [
    ("sqrt(n) again", lambda layers, x: sequential_with(dummied())(layers, x, math.isqrt(len(layers))), "peak against depth", "half"),
    ("plain", lambda layers, x: nn.Sequential(*layers)(x), "peak against depth", "plain"),
    ("do nothing", lambda layers, x: x, "gradients", "output"),
    ("from the start each time", lambda layers, x: from_the_start(layers, x, len(layers)), "forward calls", "calls"),
]:
    wrong(name, check="checkpointing.recursive", criterion=criterion, hint=hint)(answer)


@wrong("fresh: the first half plain inside", check="checkpointing.recursive", criterion="peak against depth", hint="half")
def plain_inside(layers, x):
    if len(layers) == 1:
        return layers[0](x)
    half = len(layers) // 2
    return plain_inside(layers[half:], dummied()(nn.Sequential(*layers[:half]), x))


@wrong("fresh: one layer split off at a time", check="checkpointing.recursive", criterion="peak against depth", hint="cut")
def peels_one(layers, x):
    if len(layers) == 1:
        return layers[0](x)
    return layers[-1](dummied()(lambda h: peels_one(layers[:-1], h), x))


@wrong("fresh: the second half checkpointed", check="checkpointing.recursive", criterion="peak against depth", hint="which-half")
def wrong_half(layers, x):
    if len(layers) == 1:
        return layers[0](x)
    half = len(layers) // 2
    return dummied()(lambda h: wrong_half(layers[half:], h), nn.Sequential(*layers[:half])(x))

"""Right answers of lab 01 that differ in every way the contract leaves open."""

import collections
import contextlib
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from tests.labs.corpus import right


def widest(layers, x):
    return max([x.shape[1], *(layer.out_features for layer in layers)])


# -- pingpong_forward --


@right("addmm, two tensors, swap by tuple", check="pingpong.forward")
@torch.no_grad()
def by_tuple(layers, x):
    size = x.shape[0] * widest(layers, x)
    read, write = x.new_empty(size), x.new_empty(size)
    h = x
    for layer in layers:
        out = write[: x.shape[0] * layer.out_features].view(x.shape[0], layer.out_features)
        torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()
        h, read, write = out, write, read
    return h


@right("F.linear with out, parity, a list of buffers", check="pingpong.forward")
@torch.inference_mode()
def by_parity(layers, x):
    buffers = [torch.empty(x.shape[0] * widest(layers, x), dtype=x.dtype) for _ in range(2)]
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i % 2].narrow(0, 0, x.shape[0] * layer.out_features).view(x.shape[0], -1)
        F.linear(h, layer.weight, layer.bias, out=out)
        F.relu(out, inplace=True)
        h = out
    return h


@right("one (2, batch, widest) arena: strided outputs", check="pingpong.forward")
@torch.no_grad()
def one_arena(layers, x):
    arena = x.new_empty(2, x.shape[0], widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        out = arena[i % 2, :, : layer.out_features]
        torch.mm(h, layer.weight.t(), out=out)
        out.add_(layer.bias).clamp_(min=0)
        h = out
    return h


@right("interleaved halves of one (batch, 2 widest) arena", check="pingpong.forward")
@torch.no_grad()
def interleaved(layers, x):
    w = widest(layers, x)
    arena = x.new_empty(x.shape[0], 2 * w)
    h = x
    for i, layer in enumerate(layers):
        start = (i % 2) * w
        out = arena[:, start : start + layer.out_features]
        torch.matmul(h, layer.weight.T, out=out)
        out += layer.bias
        torch.clamp(out, min=0, out=out)
        h = out
    return h


@right("one arena of adjacent pairs, from both ends", check="pingpong.forward")
@torch.no_grad()
def both_ends(layers, x):
    rows = x.shape[0]
    sizes = [layer.out_features for layer in layers]
    pairs = [a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=False)]
    arena = x.new_empty(rows * max(pairs, default=0))
    h = x
    for i, layer in enumerate(layers):
        count = rows * layer.out_features
        out = (arena[:count] if i % 2 == 0 else arena[len(arena) - count :]).view(rows, layer.out_features)
        torch.addmm(layer.bias, h, layer.weight.t(), out=out)
        out.clamp_min_(0)
        h = out
    return h


@right("bmm, x copied into the first buffer, deque", check="pingpong.forward")
@torch.no_grad()
def copied_in(layers, x):
    size = x.shape[0] * widest(layers, x)
    turn = collections.deque([x.new_empty(size), x.new_empty(size)])
    h = turn[0][: x.numel()].view(x.shape)
    h.copy_(x)
    for layer in layers:
        turn.rotate(1)
        out = turn[0][: len(x) * layer.out_features].view(len(x), layer.out_features)
        torch.bmm(h[None], layer.weight.t()[None], out=out[None])
        out.add_(layer.bias)
        torch.threshold_(out, 0.0, 0.0)
        h = out
    return h


@right("returns a clone", check="pingpong.forward")
@torch.no_grad()
def clone_of_result(layers, x):
    buffers = x.new_empty(2, x.shape[0] * widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i % 2][: len(x) * layer.out_features].view(len(x), layer.out_features)
        torch.addmm(layer.bias, h, layer.weight.t(), out=out)
        nn.functional.relu_(out)
        h = out
    return h.clone()


@right("the last relu makes the result", check="pingpong.forward")
@torch.no_grad()
def last_relu_is_new(layers, x):
    buffers = x.new_empty(2, x.shape[0] * widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i % 2][: len(x) * layer.out_features].view(len(x), layer.out_features)
        torch.addmm(layer.bias, h, layer.weight.t(), out=out)
        h = out.relu() if i == len(layers) - 1 else out.relu_()
    return h


@right("the last layer writes a tensor of its own, made first", check="pingpong.forward")
@torch.no_grad()
def result_made_first(layers, x):
    if not layers:
        return x.clone()
    result = x.new_empty(len(x), layers[-1].out_features)
    a, b = x.new_empty(2, len(x) * widest(layers, x)).unbind(0)
    h = x
    for layer in layers[:-1]:
        out = a[: len(x) * layer.out_features].view(len(x), layer.out_features)
        torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()
        h, a, b = out, b, a
    return torch.addmm(layers[-1].bias, h, layers[-1].weight.t(), out=result).relu_()


@right("each buffer as wide as its own layers", check="pingpong.forward")
@torch.no_grad()
def exact_fit(layers, x):
    rows = len(x)
    wide = [max([layer.out_features for layer in layers[parity::2]], default=0) for parity in (0, 1)]
    buffers = [x.new_empty(rows, w) for w in wide]
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i & 1][:, : layer.out_features]
        torch.addmm(layer.bias, h, layer.weight.t(), out=out)
        h = out.relu_()
    return h


@right("buffers made when they are first needed, for the widest", check="pingpong.forward")
@torch.no_grad()
def made_on_demand(layers, x):
    buffers, h = [None, None], x
    for i, layer in enumerate(layers):
        if buffers[i % 2] is None:
            buffers[i % 2] = x.new_empty(len(x) * widest(layers, x))
        out = buffers[i % 2][: len(x) * layer.out_features].view(len(x), layer.out_features)
        torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()
        h = out
    return h


@right("resize_ within the room that is there", check="pingpong.forward")
@torch.no_grad()
def resized_tensors(layers, x):
    size = len(x) * widest(layers, x)
    a, b = x.new_empty(0).resize_(size), x.new_empty(0).resize_(size)
    h = x
    for layer in layers:
        a.resize_(len(x), layer.out_features)
        torch.addmm(layer.bias, h, layer.weight.t(), out=a).relu_()
        h, a, b = a, b, a
    return h


_kept = {}


@right("buffers kept between calls in a global", check="pingpong.forward")
@torch.no_grad()
def kept_in_a_global(layers, x):
    key, size = x.dtype, len(x) * widest(layers, x)
    if key not in _kept or _kept[key].shape[1] < size:
        _kept[key] = x.new_empty(2, size)
    h = x
    for i, layer in enumerate(layers):
        out = _kept[key][i % 2][: len(x) * layer.out_features].view(len(x), layer.out_features)
        torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()
        h = out
    return h


@right("a generator walks the layers", check="pingpong.forward")
def by_generator(layers, x):
    def walk(h):
        buffers = [x.new_empty(len(x), widest(layers, x)) for _ in "ab"]
        for i, layer in enumerate(layers):
            out = buffers[i % 2][:, : layer.out_features]
            torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()
            h = out
            yield h

    with torch.no_grad():
        return collections.deque([x, *walk(x)], maxlen=1).pop()


class WithCall:
    """A callable object is a function."""

    def __call__(self, layers, x):
        with torch.inference_mode():
            buffers = x.new_empty(2, len(x), widest(layers, x))
            h, into = x, 0
            for layer in layers:
                out = buffers[into, :, : layer.out_features]
                torch.mm(h, layer.weight.t(), out=out)
                torch.add(out, layer.bias, out=out)
                torch.maximum(out, out.new_zeros(()), out=out)
                h, into = out, 1 - into
            return h


right("an object with __call__", check="pingpong.forward")(WithCall())


@right("one row at a time, with mv", check="pingpong.forward")
@torch.no_grad()
def row_by_row(layers, x):
    if not layers:
        return x.clone()
    rows = x.new_empty(2, widest(layers, x))
    result = x.new_empty(len(x), layers[-1].out_features)
    for r in range(len(x)):
        h = x[r]
        for i, layer in enumerate(layers):
            out = result[r] if i == len(layers) - 1 else rows[i % 2, : layer.out_features]
            torch.mv(layer.weight, h, out=out)
            out.add_(layer.bias).relu_()
            h = out
    return result


@right("small scratch beside the buffers: a mask of indices", check="pingpong.forward")
@torch.no_grad()
def with_scratch(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        order = torch.arange(4)
        zero = torch.tensor(0.0, dtype=x.dtype)
        out = buffers[int(order[i % 2]), :, : layer.out_features]
        torch.addmm(layer.bias, h, layer.weight.t(), out=out)
        torch.maximum(out, zero, out=out)
        h = out
    return h


@right("recursion, two buffers handed down", check="pingpong.forward")
def recursive(layers, x):
    def go(h, rest, a, b):
        if not rest:
            return h
        out = a[:, : rest[0].out_features]
        torch.addmm(rest[0].bias, h, rest[0].weight.t(), out=out)
        return go(out.relu_(), rest[1:], b, a)

    with torch.no_grad():
        w = widest(layers, x)
        return go(x, list(layers), x.new_empty(len(x), w), x.new_empty(len(x), w))


@right("the bias is broadcast first, then the product accumulates", check="pingpong.forward")
@torch.no_grad()
def bias_first(layers, x):
    a, b = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for layer in layers:
        out = a[:, : layer.out_features]
        out.copy_(layer.bias)
        out.addmm_(h, layer.weight.t())
        out.mul_(out > 0) if False else out.relu_()
        h, a, b = out, b, a
    return h


@right("detached weights instead of no_grad", check="pingpong.forward")
def detached(layers, x):
    x = x.detach()
    a, b = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for layer in layers:
        out = a[:, : layer.out_features]
        torch.addmm(layer.bias.detach(), h, layer.weight.detach().t(), out=out)
        h, a, b = out.relu_(), b, a
    return h


@right("buffers lie transposed", check="pingpong.forward")
@torch.no_grad()
def transposed(layers, x):
    a, b = x.new_empty(2, widest(layers, x), len(x))
    h = x.t()
    for layer in layers:
        out = a[: layer.out_features]
        torch.mm(layer.weight, h, out=out)
        out.add_(layer.bias[:, None]).relu_()
        h, a, b = out, b, a
    return h.t()


@right("fresh: divide and conquer, a result of its own", check="pingpong.forward")
def divide_and_conquer(layers, x):
    turns = itertools.cycle(x.detach().new_empty(2, len(x) * widest(layers, x)))

    def run(part, h):
        if len(part) > 1:
            return run(part[len(part) // 2 :], run(part[: len(part) // 2], h))
        out = next(turns)[: len(x) * part[0].out_features].view(len(x), part[0].out_features)
        return out.copy_(part[0].bias).addmm_(h, part[0].weight.t()).relu_()

    with torch.set_grad_enabled(False):
        return run(layers, x.detach()).clone() if len(layers) else x.detach().clone()


@right("grown by out= from resize_(0)", check="pingpong.forward")
@torch.no_grad()
def grown_by_out(layers, x):
    a, b = x.new_empty(0), x.new_empty(0)
    h = x.detach()
    for layer in layers:
        a = torch.addmm(layer.bias, h, layer.weight.t(), out=a.resize_(0))
        h = a.relu_()
        a, b = b, a
    return h


@right("buffers that grow on demand", check="pingpong.forward")
@torch.no_grad()
def grown_on_demand(layers, x):
    buffers, h = [x.new_empty(0), x.new_empty(0)], x
    for i, layer in enumerate(layers):
        need = len(x) * layer.out_features
        if buffers[i % 2].numel() < need:
            buffers[i % 2] = x.new_empty(need)
        out = buffers[i % 2][:need].view(len(x), layer.out_features)
        h = torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()
    return h


@right("larger buffers by resize_ of new ones, x copied in", check="pingpong.forward")
@torch.no_grad()
def larger_by_resize(layers, x):
    def room(buffer, shape):
        need = shape[0] * shape[1]
        if buffer.numel() < need:
            buffer = x.new_empty(0).resize_(need)
        return buffer, buffer[:need].view(shape)

    read, h = room(x.new_empty(0), x.shape)
    write = x.new_empty(0)
    h.copy_(x)
    for layer in layers:
        write, out = room(write, (len(x), layer.out_features))
        torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()
        h, read, write = out, write, read
    return h


_lazy = {}


@right("a pair by shape and dtype, kept in a global", check="pingpong.forward")
@torch.no_grad()
def pair_by_shape(layers, x):
    key = (len(x), widest(layers, x), x.dtype)
    if key not in _lazy:
        _lazy[key] = [x.new_empty(key[:2]) for _ in range(2)]
    h = x
    for i, layer in enumerate(layers):
        out = _lazy[key][i % 2][:, : layer.out_features]
        h = torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()
    return h


# -- residual_forward --


def widest_block(blocks, x):
    return max([x.shape[1], *(block.up.out_features for block in blocks)])


@right("the branch is added in place, two buffers", check="pingpong.residual")
@torch.no_grad()
def added_in_place(blocks, x):
    stream = x.clone()
    hidden = x.new_empty(len(x) * widest_block(blocks, x))
    for block in blocks:
        h = hidden[: len(x) * block.up.out_features].view(len(x), -1)
        torch.addmm(block.up.bias, stream, block.up.weight.t(), out=h).relu_()
        stream.addmm_(h, block.down.weight.t())
        stream.add_(block.down.bias)
    return stream


@right("three buffers in turn", check="pingpong.residual")
@torch.no_grad()
def three_in_turn(blocks, x):
    buffers = [x.new_empty(len(x), widest_block(blocks, x)) for _ in range(3)]
    h = x
    for i, block in enumerate(blocks):
        hidden = buffers[2][:, : block.up.out_features]
        out = buffers[i % 2][:, : x.shape[1]]
        torch.addmm(block.up.bias, h, block.up.weight.t(), out=hidden)
        hidden.relu_()
        torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=out)
        out.add_(h)
        h = out
    return h


@right("rotation of three by deque, F.linear", check="pingpong.residual")
@torch.inference_mode()
def rotation(blocks, x):
    turn = collections.deque(x.new_empty(3, len(x) * widest_block(blocks, x)).unbind(0))

    def take(columns):
        turn.rotate(-1)
        return turn[0][: len(x) * columns].view(len(x), columns)

    h = x
    for block in blocks:
        hidden, out = take(block.up.out_features), take(x.shape[1])
        F.relu_(F.linear(h, block.up.weight, block.up.bias, out=hidden))
        F.linear(hidden, block.down.weight, block.down.bias, out=out)
        torch.add(out, h, out=out)
        h = out
    return h


@right("baddbmm over the stream, result cloned", check="pingpong.residual")
@torch.no_grad()
def batched(blocks, x):
    stream = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
    hidden = x.new_empty(len(x), widest_block(blocks, x))
    for block in blocks:
        h = hidden[:, : block.up.out_features]
        torch.mm(stream, block.up.weight.t(), out=h)
        h.add_(block.up.bias).clamp_(min=0)
        torch.baddbmm(stream[None], h[None], block.down.weight.t()[None], out=stream[None])
        stream += block.down.bias
    return stream.clone()


@right("addmm onto the stream by out=", check="pingpong.residual")
@torch.no_grad()
def addmm_onto_stream(blocks, x):
    if not blocks:
        return x
    stream, hidden, h = x.new_empty(x.shape), x.new_empty(len(x), widest_block(blocks, x)), x
    for block in blocks:
        part = hidden[:, : block.up.out_features]
        torch.addmm(block.up.bias, h, block.up.weight.t(), out=part)
        F.threshold_(part, 0, 0)
        torch.addmm(h, part, block.down.weight.t(), out=stream)
        stream.add_(block.down.bias)
        h = stream
    return stream


@right("one arena with three parts", check="pingpong.residual")
@torch.no_grad()
def three_parts(blocks, x):
    arena = x.new_empty(3, len(x), widest_block(blocks, x))
    here, there, hidden = 0, 1, 2
    h = arena[here, :, : x.shape[1]].copy_(x)
    for block in blocks:
        part = arena[hidden, :, : block.up.out_features]
        out = arena[there, :, : x.shape[1]]
        torch.matmul(h, block.up.weight.t(), out=part).add_(block.up.bias).relu_()
        torch.matmul(part, block.down.weight.t(), out=out).add_(block.down.bias).add_(h)
        h, here, there = out, there, here
    return h


@right("fresh: baddbmm_ in one arena for both", check="pingpong.residual")
@torch.inference_mode()
def batches_of_one(blocks, x):
    rows, width = x.shape
    arena = x.new_empty(1, rows, width + max((block.up.out_features for block in blocks), default=0))
    stream = arena[:, :, :width].copy_(x)
    for block in blocks:
        h = arena[:, :, width : width + block.up.out_features].copy_(block.up.bias)
        h.baddbmm_(stream, block.up.weight.t()[None]).clamp_min_(0)
        stream.add_(block.down.bias).baddbmm_(h, block.down.weight.t()[None])
    return stream[0]


@right("a hidden buffer that grows on demand", check="pingpong.residual")
@torch.no_grad()
def hidden_grows(blocks, x):
    stream, hidden = x.clone(), x.new_empty(0)
    for block in blocks:
        need = len(x) * block.up.out_features
        if hidden.numel() < need:
            hidden = x.new_empty(need)
        h = torch.addmm(block.up.bias, stream, block.up.weight.t(), out=hidden[:need].view(len(x), -1)).relu_()
        stream.addmm_(h, block.down.weight.t()).add_(block.down.bias)
    return stream


@right("three in turn that grow on demand", check="pingpong.residual")
@torch.no_grad()
def three_grow(blocks, x):
    buffers, turn = [x.new_empty(0) for _ in range(3)], itertools.cycle(range(3))

    def take(columns):
        need, i = len(x) * columns, next(turn)
        if buffers[i].numel() < need:
            buffers[i] = x.new_empty(need)
        return buffers[i][:need].view(len(x), columns)

    h = x
    for block in blocks:
        hidden, out = take(block.up.out_features), take(x.shape[1])
        torch.addmm(block.up.bias, h, block.up.weight.t(), out=hidden).relu_()
        h = torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=out).add_(h)
    return h


@right("hidden grown by out= from resize_(0)", check="pingpong.residual")
@torch.no_grad()
def hidden_by_out(blocks, x):
    stream, hidden = x.clone(), x.new_empty(0)
    for block in blocks:
        torch.addmm(block.up.bias, stream, block.up.weight.t(), out=hidden.resize_(0)).relu_()
        stream.addmm_(hidden, block.down.weight.t()).add_(block.down.bias)
    return stream


# -- PingPong --


@right("made in the constructor", check="pingpong.persistent")
class MadeFirst:
    def __init__(self, layers, max_batch):
        self.layers = list(layers)
        wide = max(layer.out_features for layer in layers)
        self.buffers = torch.empty(2, max_batch * wide, dtype=layers[0].weight.dtype)
        self.buffer_bytes = self.buffers.numel() * self.buffers.element_size()

    @torch.no_grad()
    def __call__(self, x, out=None):
        h = x
        for i, layer in enumerate(self.layers):
            y = self.buffers[i % 2][: len(x) * layer.out_features].view(len(x), layer.out_features)
            torch.addmm(layer.bias, h, layer.weight.t(), out=y).relu_()
            h = y
        return h if out is None else out.copy_(h)


@right("the last layer writes into out", check="pingpong.persistent")
class LastIntoOut:
    def __init__(self, layers, max_batch):
        self.layers, self.max_batch = layers, max_batch
        self.a = self.b = None

    @property
    def buffer_bytes(self):
        return sum(b.untyped_storage().nbytes() for b in (self.a, self.b) if b is not None)

    def __call__(self, x, out=None):
        with torch.inference_mode():
            if self.a is None:
                wide = max(layer.out_features for layer in self.layers)
                self.a, self.b = x.new_empty(self.max_batch, wide), x.new_empty(self.max_batch, wide)
            h, a, b = x, self.a, self.b
            for i, layer in enumerate(self.layers):
                last = i == len(self.layers) - 1
                y = out if last and out is not None else a[: len(x), : layer.out_features]
                F.relu_(F.linear(h, layer.weight, layer.bias, out=y))
                h, a, b = y, b, a
            return h


@right("views per shape, of one pair", check="pingpong.persistent")
class ViewsPerShape:
    def __init__(self, layers, max_batch):
        self.layers, self.views = layers, {}
        wide = max(layer.out_features for layer in layers)
        self.pair = [layer.weight.detach().new_empty(max_batch, wide) for layer in (layers[0], layers[-1])]

    def __call__(self, x, out=None):
        with torch.no_grad():
            if x.shape not in self.views:
                self.views[x.shape] = [buffer[: len(x)] for buffer in self.pair]
            h = x
            for i, layer in enumerate(self.layers):
                y = self.views[x.shape][i % 2][:, : layer.out_features]
                torch.mm(h, layer.weight.t(), out=y)
                y.add_(layer.bias).clamp_(min=0)
                h = y
            if out is not None:
                out.copy_(h)
                return out
            return h

    def buffer_bytes(self):
        return sum(t.numel() * t.element_size() for t in self.pair)


@right("a Module with buffers, x copied in", check="pingpong.persistent")
class AsModule(nn.Module):
    def __init__(self, layers, max_batch):
        super().__init__()
        self.steps = nn.ModuleList(layers)
        wide = max([layers[0].in_features, *(layer.out_features for layer in layers)])
        self.register_buffer("arena", torch.empty(2, max_batch, wide, dtype=layers[0].weight.dtype), persistent=False)

    @property
    def buffer_bytes(self):
        return self.arena.nbytes

    @torch.no_grad()
    def forward(self, x, out=None):
        h = self.arena[0, : len(x), : x.shape[1]].copy_(x)
        for i, layer in enumerate(self.steps, 1):
            y = self.arena[i % 2, : len(x), : layer.out_features]
            torch.addmm(layer.bias, h, layer.weight.t(), out=y).relu_()
            h = y
        return h if out is None else out.copy_(h)


@right("grows when a batch is larger than any before", check="pingpong.persistent")
class Grows:
    def __init__(self, layers, max_batch):
        self.layers = layers
        self.arena = torch.empty(0)

    @property
    def buffer_bytes(self):
        return self.arena.untyped_storage().nbytes()

    @torch.inference_mode()
    def __call__(self, x, out=None):
        wide = max(layer.out_features for layer in self.layers)
        if self.arena.numel() < 2 * len(x) * wide:
            self.arena = x.new_empty(2 * len(x) * wide)
        half = self.arena.numel() // 2
        h = x
        for i, layer in enumerate(self.layers):
            y = self.arena.narrow(0, half * (i % 2), len(x) * layer.out_features).view(len(x), layer.out_features)
            torch.addmm(layer.bias, h, layer.weight.t(), out=y).relu_()
            h = y
        with contextlib.ExitStack():
            return h if out is None else out.copy_(h)


@right("views prepared per batch size, result buffer apart", check="pingpong.persistent")
class PreparedViews:
    def __init__(self, layers, max_batch):
        self.layers = layers
        sizes = [layer.out_features for layer in layers]
        dtype = layers[0].weight.dtype
        self.even = torch.empty(max_batch * max(sizes[::2]), dtype=dtype)
        self.odd = torch.empty(max_batch * max(sizes[1::2], default=0), dtype=dtype)
        self.buffer_bytes = self.even.nbytes + self.odd.nbytes
        self.views = {}

    @torch.no_grad()
    def __call__(self, x, out=None):
        rows = len(x)
        if rows not in self.views:
            sides = (self.even, self.odd)
            self.views[rows] = [
                sides[i % 2][: rows * layer.out_features].view(rows, -1) for i, layer in enumerate(self.layers)
            ]
        h = x
        for layer, view in zip(self.layers, self.views[rows], strict=True):
            h = torch.addmm(layer.bias, h, layer.weight.t(), out=view).relu_()
        if out is not None:
            h = out.copy_(h)
        return h


@right("fresh: resize_ of storages that never shrink", check="pingpong.persistent")
class Resized:
    def __init__(self, layers, max_batch):
        self.layers = list(layers)
        most, dtype = max(layer.out_features for layer in layers), layers[0].weight.dtype
        self.buffers = tuple(torch.empty(max_batch * most, dtype=dtype) for _ in "ab")

    def buffer_bytes(self):
        return sum(b.untyped_storage().nbytes() for b in self.buffers)

    @torch.no_grad()
    def __call__(self, x, out=None):
        h = x
        for i, layer in enumerate(self.layers):
            target = self.buffers[i % 2].resize_(len(x), layer.out_features)
            h = torch.addmm(layer.bias, h, layer.weight.t(), out=target).relu_()
        return h.view(h.shape) if out is None else out.copy_(h)


@right("fresh: an arena that grows, filled from both ends", check="pingpong.persistent")
class BothEnds:
    def __init__(self, layers, max_batch):
        self.layers, self.arena = layers, layers[0].weight.detach().new_empty(0)
        widths = [layer.out_features for layer in layers]
        self.need = max([widths[0], *(a + b for a, b in itertools.pairwise(widths))])

    @property
    def buffer_bytes(self):
        return self.arena.nbytes

    @torch.no_grad()
    def __call__(self, x, out=None):
        total = len(x) * self.need
        if self.arena.numel() < total:
            self.arena = x.new_empty(total)
        h = x
        for i, layer in enumerate(self.layers):
            n = len(x) * layer.out_features
            at = 0 if i % 2 == 0 else total - n
            h = torch.addmm(layer.bias, h, layer.weight.t(), out=self.arena[at : at + n].view(len(x), -1)).relu_()
        return h if out is None else out.copy_(h)


@right("a pair for every batch size and dtype, all kept", check="pingpong.persistent")
class PairPerSize:
    def __init__(self, layers, max_batch):
        self.layers, self.pairs = layers, {}
        self.wide = max(layer.out_features for layer in layers)

    @property
    def buffer_bytes(self):
        return sum(buffer.nbytes for pair in self.pairs.values() for buffer in pair)

    @torch.no_grad()
    def __call__(self, x, out=None):
        key = (len(x), x.dtype)
        if key not in self.pairs:
            self.pairs[key] = [x.new_empty(len(x), self.wide) for _ in range(2)]
        h = x
        for i, layer in enumerate(self.layers):
            h = torch.addmm(layer.bias, h, layer.weight.t(), out=self.pairs[key][i % 2][:, : layer.out_features]).relu_()
        return h if out is None else out.copy_(h)


@right("two buffers that grow layer by layer and call by call", check="pingpong.persistent")
class GrowsByLayer:
    def __init__(self, layers, max_batch):
        self.layers = layers
        self.buffers = [layers[0].weight.detach().new_empty(0) for _ in range(2)]

    def buffer_bytes(self):
        return sum(buffer.nbytes for buffer in self.buffers)

    @torch.no_grad()
    def __call__(self, x, out=None):
        h = x
        for i, layer in enumerate(self.layers):
            need = len(x) * layer.out_features
            if self.buffers[i % 2].numel() < need:
                self.buffers[i % 2] = x.new_empty(need)
            part = self.buffers[i % 2][:need].view(len(x), layer.out_features)
            h = torch.addmm(layer.bias, h, layer.weight.t(), out=part).relu_()
        return h if out is None else out.copy_(h)

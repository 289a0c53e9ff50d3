"""Wrong answers of lab 01, each with the criterion and the hint that it must be told; BUF-nn are mistakes seen in public code."""

import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.labs.corpus import wrong

FORWARD = "pingpong.forward"
RESIDUAL = "pingpong.residual"
PERSISTENT = "pingpong.persistent"


def widest(layers, x):
    return max([x.shape[1], *(layer.out_features for layer in layers)])


def step(layer, h, out):
    return torch.addmm(layer.bias, h, layer.weight.t(), out=out).relu_()


def view(flat, rows, columns):
    return flat[: rows * columns].view(rows, columns)


# -- pingpong_forward --


@wrong("do-nothing: zeros", check=FORWARD, criterion="output", hint="does-nothing")
def zeros(layers, x):
    return x.new_zeros(len(x), layers[-1].out_features if layers else x.shape[1])


@wrong("do-nothing: the input", check=FORWARD, criterion="output", hint="shape")
def the_input(layers, x):
    return x


@wrong("do-nothing: None", check=FORWARD, criterion="output", hint="nothing-returned")
def nothing(layers, x):
    pass


@wrong("plain: modules without gradients", check=FORWARD, criterion="tensors created", hint="per-layer")
@torch.inference_mode()
def plain(layers, x):
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])(x)


@wrong("plain: with gradients", check=FORWARD, criterion="tensors created", hint="grad")
def plain_with_grad(layers, x):
    for layer in layers:
        x = torch.relu(layer(x))
    return x


@wrong("plain: x @ W + b, three tensors a layer", check=FORWARD, criterion="tensors created", hint="per-layer")
@torch.no_grad()
def naive(layers, x):
    for layer in layers:
        x = torch.relu(x @ layer.weight.t() + layer.bias)
    return x


@wrong("BUF-01 multiplies onto its own input", check=FORWARD, criterion="output", hint="same-buffer")
@torch.no_grad()
def onto_its_input(layers, x):
    rows, buffer = len(x), x.new_empty(len(x) * widest(layers, x))
    h = view(buffer, rows, x.shape[1]).copy_(x)
    for layer in layers:
        out = view(buffer, rows, layer.out_features)
        torch.mm(h, layer.weight.t(), out=out).add_(layer.bias).relu_()
        h = out
    return h


@wrong("BUF-02 the destination never flips", check=FORWARD, criterion="output", hint="never-flips")
@torch.no_grad()
def never_flips(layers, x):
    buffers = [x.new_empty(len(x) * widest(layers, x)) for _ in range(2)]
    h = x
    for layer in layers:
        h = step(layer, h, view(buffers[0], len(x), layer.out_features))
    return h


@wrong("BUF-02 flips twice in each layer", check=FORWARD, criterion="output", hint="never-flips")
@torch.no_grad()
def flips_twice(layers, x):
    read, write = x.new_empty(len(x), widest(layers, x)), x.new_empty(len(x), widest(layers, x))
    h = x
    for layer in layers:
        read, write = write, read
        h = step(layer, h, write[:, : layer.out_features])
        read, write = write, read
    return h


@wrong("flips only every second layer", check=FORWARD, criterion="output", hint="same-buffer")
@torch.no_grad()
def flips_late(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[(i // 2) % 2, :, : layer.out_features])
    return h


@wrong("BUF-07 computes a new tensor, then copies it", check=FORWARD, criterion="tensors created", hint="copied")
@torch.no_grad()
def copies(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i % 2, :, : layer.out_features]
        h = out.copy_(torch.relu(h @ layer.weight.t() + layer.bias))
    return h


@wrong("BUF-08 sized for the first layer", check=FORWARD, criterion="buffers fit", hint="widest")
@torch.no_grad()
def sized_for_first(layers, x):
    if not layers:
        return x
    buffers = [x.new_empty(len(x), layers[0].out_features) for _ in range(2)]
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2])
    return h


@wrong("BUF-08 sized for the last layer", check=FORWARD, criterion="buffers fit", hint="widest")
@torch.no_grad()
def sized_for_last(layers, x):
    if not layers:
        return x
    buffers = [x.new_empty(len(x), layers[-1].out_features) for _ in range(2)]
    h = x
    for i, layer in enumerate(layers):
        h = F.relu_(F.linear(h, layer.weight, layer.bias, out=buffers[i % 2]))
    return h


@wrong("sized for the input, cut to fit", check=FORWARD, criterion="runs", hint="widest")
@torch.no_grad()
def sized_for_input(layers, x):
    buffers = x.new_empty(2, x.numel())
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2].narrow(0, 0, len(x) * layer.out_features).view(len(x), -1))
    return h


@wrong("BUF-10 gradients on, out= refuses", check=FORWARD, criterion="runs", hint="grad")
def gradients_on(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2, :, : layer.out_features])
    return h


@wrong("BUF-10 gradients on, copies keep the graph", check=FORWARD, criterion="tensors created", hint="grad")
def graph_of_copies(layers, x):
    h = x
    for layer in layers:
        out = x.detach().new_empty(len(x), layer.out_features)
        h = out.copy_(torch.relu(layer(h)))
    return h


@wrong("the last layer keeps a graph", check=FORWARD, criterion="memory at the peak", hint="grad")
def graph_at_the_end(layers, x):
    with torch.no_grad():
        buffers = x.new_empty(2, len(x), widest(layers, x))
        h = x
        for i, layer in enumerate(layers[:-1]):
            h = step(layer, h, buffers[i % 2, :, : layer.out_features])
    return layers[-1](h).relu_() if layers else h


@wrong("BUF-11 column by column over its own input", check=FORWARD, criterion="output", hint="own-input")
@torch.no_grad()
def column_by_column(layers, x):
    buffer = x.new_empty(len(x), widest(layers, x))
    h = buffer[:, : x.shape[1]].copy_(x)
    for layer in layers:
        for j in range(layer.out_features):
            buffer[:, j] = torch.mv(h, layer.weight[j]).add_(layer.bias[j]).relu_()
        h = buffer[:, : layer.out_features]
    return h


@wrong("BUF-14 relu() for relu_()", check=FORWARD, criterion="tensors created", hint="hidden")
@torch.no_grad()
def hidden_relu(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i % 2, :, : layer.out_features]
        h = torch.relu(torch.addmm(layer.bias, h, layer.weight.t(), out=out))
    return h


@wrong("BUF-14 the bias is added out of place", check=FORWARD, criterion="tensors created", hint="hidden")
@torch.no_grad()
def hidden_bias(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        out = torch.mm(h, layer.weight.t(), out=buffers[i % 2, :, : layer.out_features])
        h = (out + layer.bias).relu_()
    return h


@wrong("BUF-14 copies the weights in every layer", check=FORWARD, criterion="tensors created", hint="hidden")
@torch.no_grad()
def hidden_contiguous(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i % 2, :, : layer.out_features]
        h = torch.addmm(layer.bias, h, layer.weight.t().contiguous(), out=out).relu_()
    return h


@wrong("a new pair of buffers for every two layers", check=FORWARD, criterion="tensors created", hint="buffer-per-layer")
@torch.no_grad()
def pair_per_pair(layers, x):
    h = x
    for i, layer in enumerate(layers):
        if i % 2 == 0:
            buffers = [x.new_empty(len(x), widest(layers, x)) for _ in range(2)]
        h = step(layer, h, buffers[i % 2][:, : layer.out_features])
    return h


@wrong("an empty tensor per layer, the old one deleted", check=FORWARD, criterion="tensors created", hint="buffer-per-layer")
@torch.no_grad()
def empty_per_layer(layers, x):
    h = x
    for layer in layers:
        out = torch.empty(len(x), layer.out_features, dtype=x.dtype)
        step(layer, h, out)
        del h
        h = out
    return h


@wrong("a buffer made again whenever the width changes", check=FORWARD, criterion="tensors created", hint="buffer-per-layer")
@torch.no_grad()
def remade_on_change(layers, x):
    buffers = [x.new_empty(0, 0), x.new_empty(0, 0)]
    h = x
    for i, layer in enumerate(layers):
        if buffers[i % 2].shape != (len(x), layer.out_features):
            buffers[i % 2] = x.new_empty(len(x), layer.out_features)
        h = step(layer, h, buffers[i % 2])
    return h


@wrong("storages freed and grown again in every layer", check=FORWARD, criterion="tensors created", hint="buffer-per-layer")
@torch.no_grad()
def regrown_storages(layers, x):
    size = len(x) * widest(layers, x)
    buffers = [x.new_empty(size), x.new_empty(size)]
    h = x
    for i, layer in enumerate(layers):
        storage = buffers[i % 2].untyped_storage()
        storage.resize_(0)
        storage.resize_(size * x.element_size())
        h = step(layer, h, view(buffers[i % 2], len(x), layer.out_features))
    return h


@wrong("memory from numpy for every layer", check=FORWARD, criterion="tensors created", hint="buffer-per-layer")
@torch.no_grad()
def numpy_buffers(layers, x):
    kind = {torch.float32: np.float32, torch.float64: np.float64}[x.dtype]
    h = x
    for layer in layers:
        h = step(layer, h, torch.from_numpy(np.empty((len(x), layer.out_features), kind)))
    return h


@wrong("computed in numpy, out of sight", check=FORWARD, criterion="tensors created", hint="out-of-sight")
def in_numpy(layers, x):
    h = x.detach().numpy().copy()
    for layer in layers:
        h = np.maximum(h @ layer.weight.detach().numpy().T + layer.bias.detach().numpy(), 0)
    return torch.from_numpy(h)


@wrong("one arena with a place for every layer", check=FORWARD, criterion="tensors created", hint="arena-grows")
@torch.no_grad()
def arena_of_all(layers, x):
    arena = x.new_empty(len(layers) + 1, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, arena[i, :, : layer.out_features])
    return h


@wrong("the plain loop, one row at a time", check=FORWARD, criterion="tensors created", hint="per-layer")
@torch.no_grad()
def rows_in_small_pieces(layers, x):
    result = x.new_empty(len(x), layers[-1].out_features) if layers else x.clone()
    for r in range(len(x)):
        h = x[r : r + 1]
        for layer in layers:
            h = torch.relu(layer(h))
        result[r] = h[0]
    return result


@wrong("three buffers in turn", check=FORWARD, criterion="tensors created", hint="one-too-many")
@torch.no_grad()
def three_buffers(layers, x):
    buffers = [x.new_empty(len(x), widest(layers, x)) for _ in range(3)]
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 3][:, : layer.out_features])
    return h


@wrong("two buffers of twice the width", check=FORWARD, criterion="memory at the peak", hint="peak")
@torch.no_grad()
def too_wide(layers, x):
    buffers = x.new_empty(2, len(x), 2 * widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2, :, : layer.out_features])
    return h


@wrong("the input is the second buffer", check=FORWARD, criterion="input", hint="input-changed")
@torch.no_grad()
def input_as_buffer(layers, x):
    a = x.new_empty(len(x) * widest(layers, x))
    h, spare = x, None
    for i, layer in enumerate(layers):
        count = len(x) * layer.out_features
        if i % 2 == 0:
            out = view(a, len(x), layer.out_features)
        elif x.is_contiguous() and x.numel() >= count:
            out = view(x.view(-1), len(x), layer.out_features)
        else:
            spare = x.new_empty(len(x) * widest(layers, x)) if spare is None else spare
            out = view(spare, len(x), layer.out_features)
        h = step(layer, h, out)
    return h.clone()


@wrong("each layer starts again from the input", check=FORWARD, criterion="work", hint="recomputed")
@torch.no_grad()
def recomputes(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for depth in range(1, len(layers) + 1):
        h = x
        for i, layer in enumerate(layers[:depth]):
            h = step(layer, h, buffers[i % 2, :, : layer.out_features])
    return h


@wrong("computes in bfloat16", check=FORWARD, criterion="output", hint="precision")
@torch.no_grad()
def in_bfloat16(layers, x):
    buffers = torch.empty(2, len(x), widest(layers, x), dtype=torch.bfloat16)
    h = x.bfloat16()
    for i, layer in enumerate(layers):
        out = buffers[i % 2, :, : layer.out_features]
        h = torch.addmm(layer.bias.bfloat16(), h, layer.weight.t().bfloat16(), out=out).relu_()
    return h.to(x.dtype)


@wrong("always returns the first buffer", check=FORWARD, criterion="output", hint="numbers")
@torch.no_grad()
def first_buffer(layers, x):
    buffers = x.new_zeros(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2, :, : layer.out_features])
    return buffers[0, :, : layers[-1].out_features] if layers else x


@wrong("no relu after the last layer", check=FORWARD, criterion="output", hint="numbers")
@torch.no_grad()
def no_last_relu(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i % 2, :, : layer.out_features]
        h = torch.addmm(layer.bias, h, layer.weight.t(), out=out)
        if i < len(layers) - 1:
            h.relu_()
    return h


@wrong("returns the whole width of the buffer", check=FORWARD, criterion="output", hint="shape")
@torch.no_grad()
def whole_buffer(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        step(layer, h[:, : layer.in_features], buffers[i % 2, :, : layer.out_features])
        h = buffers[i % 2]
    return h


@wrong("only for depths that are powers of two", check=FORWARD, criterion="output", hint="numbers")
@torch.no_grad()
def powers_of_two(layers, x):
    buffers = x.new_zeros(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2, :, : layer.out_features])
    turn = (len(layers) & (len(layers) - 1)) == 0
    return h if turn else buffers[len(layers) % 2, :, : h.shape[1]]


@wrong("crashes without layers", check=FORWARD, criterion="edge cases", hint="edge")
@torch.no_grad()
def needs_a_layer(layers, x):
    wide = max(layer.out_features for layer in layers)
    buffers = x.new_empty(2, len(x), wide)
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2, :, : layer.out_features])
    return h


@wrong("float32 buffers for any input", check=FORWARD, criterion="edge cases", hint="dtype")
@torch.no_grad()
def always_float32(layers, x):
    buffers = torch.empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2, :, : layer.out_features])
    return h


@wrong("only for contiguous inputs", check=FORWARD, criterion="edge cases", hint="strided")
@torch.no_grad()
def contiguous_only(layers, x):
    a, b = x.new_empty(2, len(x) * widest(layers, x)).unbind(0)
    a[: x.numel()].copy_(x.view(-1))
    h = view(a, *x.shape)
    for layer in layers:
        a, b = b, a
        h = step(layer, h, view(a, len(x), layer.out_features))
    return h


_results = {}


@wrong("a cache of results by shape", check=FORWARD, criterion="output", hint="stale")
def cached_by_shape(layers, x):
    key = (len(layers), x.shape, x.dtype)
    if key not in _results:
        with torch.no_grad():
            buffers = x.new_empty(2, len(x), widest(layers, x))
            h = x
            for i, layer in enumerate(layers):
                h = step(layer, h, buffers[i % 2, :, : layer.out_features])
            _results[key] = h
    return _results[key]


_seen = {}


@wrong("a cache of results by content", check=FORWARD, criterion="memory at the peak", hint="kept")
def cached_by_content(layers, x):
    key = (len(layers), layers[0].weight.sum().item() if layers else 0.0, x.detach().sum().item())
    if key not in _seen:
        with torch.no_grad():
            buffers = x.new_empty(2, len(x), widest(layers, x))
            h = x
            for i, layer in enumerate(layers):
                h = step(layer, h, buffers[i % 2, :, : layer.out_features])
            _seen[key] = h
    return _seen[key]


@wrong("outgrown buffers are kept in a list", check=FORWARD, criterion="buffers fit", hint="peak")
@torch.no_grad()
def outgrown_kept(layers, x):
    buffers, outgrown = [x.new_empty(0), x.new_empty(0)], []
    h = x
    for i, layer in enumerate(layers):
        if buffers[i % 2].numel() < len(x) * layer.out_features:
            outgrown.append(buffers[i % 2])
            buffers[i % 2] = x.new_empty(len(x) * layer.out_features)
        h = step(layer, h, view(buffers[i % 2], len(x), layer.out_features))
    return h


@wrong("a larger buffer for every layer", check=FORWARD, criterion="tensors created", hint="buffer-per-layer")
@torch.no_grad()
def always_larger(layers, x):
    h, size = x, 0
    for layer in layers:
        size = max(size + 1, len(x) * layer.out_features)
        h = step(layer, h, view(x.new_empty(size), len(x), layer.out_features))
    return h


@wrong("fresh: new memory per layer through its storage", check=FORWARD, criterion="tensors created", hint="buffer-per-layer")
@torch.no_grad()
def storage_per_layer(layers, x):
    a, b = x.new_empty(0), x.new_empty(0)
    h = x
    for layer in layers:
        a.untyped_storage().resize_(0)
        a.untyped_storage().resize_(len(x) * layer.out_features * x.element_size())
        a = a.as_strided((len(x), layer.out_features), (layer.out_features, 1))
        h, a, b = step(layer, h, a), b, a
    return h


@wrong("fresh: the plain loop on sixteen chunks of rows", check=FORWARD, criterion="tensors created", hint="per-layer")
@torch.inference_mode()
def row_chunks(layers, x):
    if not layers:
        return x
    result = x.new_empty(len(x), layers[-1].out_features)
    size = max(1, len(x) // 16)
    for start in range(0, len(x), size):
        h = x[start : start + size]
        for layer in layers:
            h = torch.relu(layer(h))
        result[start : start + size] = h
    return result


@wrong("fresh: crumbs, new ones in every layer", check=FORWARD, criterion="tensors created", hint="per-layer")
@torch.inference_mode()
def crumbs(layers, x):
    pieces = [x]
    for layer in layers:
        count, new = max(1, -(-layer.out_features // 16)), []
        for low in range(0, layer.out_features, count):
            piece, edge = layer.bias[low : low + count].expand(len(x), -1).clone(), 0
            for part in pieces:
                piece.addmm_(part, layer.weight[low : low + count, edge : edge + part.shape[1]].t())
                edge += part.shape[1]
            new.append(piece.relu_())
        pieces = new
    return torch.cat(pieces, 1) if layers else x


@wrong("fresh: x is a buffer where it is wide enough", check=FORWARD, criterion="input", hint="input-changed")
@torch.no_grad()
def wide_input_as_buffer(layers, x):
    if not layers:
        return x
    wide = max(layer.out_features for layer in layers)
    buffers = [x.new_empty(len(x), wide), x.detach() if x.shape[1] >= wide else x.new_empty(len(x), wide)]
    h = x.detach()
    for i, layer in enumerate(layers):
        h = step(layer, h, buffers[i % 2][:, : layer.out_features])
    return h


@wrong("fresh: relu before the bias", check=FORWARD, criterion="output", hint="numbers")
@torch.no_grad()
def relu_before_bias(layers, x):
    buffers = x.new_empty(2, len(x), widest(layers, x))
    h = x
    for i, layer in enumerate(layers):
        h = torch.mm(h, layer.weight.t(), out=buffers[i % 2, :, : layer.out_features]).relu_().add_(layer.bias)
    return h


@wrong("fresh: only the weights are detached", check=FORWARD, criterion="edge cases", hint="grad-input")
def detached_weights_only(layers, x):
    buffers = torch.empty(2, len(x), widest(layers, x), dtype=x.dtype)
    h = x
    for i, layer in enumerate(layers):
        out = buffers[i % 2, :, : layer.out_features]
        h = torch.addmm(layer.bias.data, h, layer.weight.data.t(), out=out).relu_()
    return h


@wrong("fresh: a pair of buffers for every width", check=FORWARD, criterion="tensors created", hint="one-too-many")
@torch.no_grad()
def pair_per_width(layers, x):
    pairs, h = {}, x.detach()
    for i, layer in enumerate(layers):
        width = layer.out_features
        if width not in pairs:
            pairs[width] = [x.new_empty(len(x), width) for _ in range(2)]
        h = step(layer, h, pairs[width][i % 2])
    return h


_by_address = {}


@wrong("fresh: a cache of results by the input's address", check=FORWARD, criterion="output", hint="stale")
def cached_by_address(layers, x):
    key = (x.data_ptr(), x.shape, layers[0].weight.data_ptr() if layers else 0)
    if key not in _by_address:
        with torch.no_grad():
            buffers = x.new_empty(2, len(x), widest(layers, x))
            h = x
            for i, layer in enumerate(layers):
                h = step(layer, h, buffers[i % 2, :, : layer.out_features])
            _by_address[key] = h
    return _by_address[key]


# -- residual_forward --


def widest_block(blocks, x):
    return max([x.shape[1], *(block.up.out_features for block in blocks)])


@wrong("do-nothing: a copy of the input", check=RESIDUAL, criterion="output", hint="does-nothing")
def residual_nothing(blocks, x):
    return x.clone()


@wrong("plain: the blocks themselves", check=RESIDUAL, criterion="tensors created", hint="per-layer")
@torch.inference_mode()
def residual_plain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


@wrong("plain: with gradients", check=RESIDUAL, criterion="tensors created", hint="grad")
def residual_with_grad(blocks, x):
    return nn.Sequential(*blocks)(x)


@wrong("BUF-05 two buffers, the skip is overwritten", check=RESIDUAL, criterion="output", hint="skip-source")
@torch.no_grad()
def skip_overwritten(blocks, x):
    a, b = x.new_empty(2, len(x), widest_block(blocks, x))
    h = a[:, : x.shape[1]].copy_(x)
    for block in blocks:
        hidden = step(block.up, h, b[:, : block.up.out_features])
        torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=h)
        h.add_(h)
    return h


@wrong("BUF-05 the hidden layer lands on the skip", check=RESIDUAL, criterion="output", hint="skip-source")
@torch.no_grad()
def hidden_on_skip(blocks, x):
    buffers = x.new_empty(3, len(x), widest_block(blocks, x))
    h, turn = x, 0
    for block in blocks:
        hidden = step(block.up, h, buffers[turn % 2, :, : block.up.out_features])
        out = buffers[2, :, : x.shape[1]] if turn % 2 == 0 else buffers[0, :, : x.shape[1]]
        skip = h
        torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=out)
        h = out.add_(skip)
        turn = turn + 1 if len(blocks) > 2 else turn
    return h


@wrong("the skip is forgotten", check=RESIDUAL, criterion="output", hint="skip-lost")
@torch.no_grad()
def skip_forgotten(blocks, x):
    a, b = x.new_empty(2, len(x), widest_block(blocks, x))
    h = x
    for block in blocks:
        hidden = step(block.up, h, b[:, : block.up.out_features])
        h = torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=a[:, : x.shape[1]])
    return h


@wrong("BUF-01 the second product writes onto its own input", check=RESIDUAL, criterion="output", hint="same-buffer")
@torch.no_grad()
def down_onto_hidden(blocks, x):
    stream = x.clone()
    buffer = x.new_empty(len(x) * widest_block(blocks, x))
    for block in blocks:
        hidden = step(block.up, stream, view(buffer, len(x), block.up.out_features))
        out = view(buffer, len(x), x.shape[1])
        torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=out)
        stream.add_(out)
    return stream


@wrong("the stream is the input itself", check=RESIDUAL, criterion="input", hint="input-changed")
@torch.no_grad()
def stream_is_input(blocks, x):
    buffer = x.new_empty(len(x), widest_block(blocks, x))
    for block in blocks:
        hidden = step(block.up, x, buffer[:, : block.up.out_features])
        x.addmm_(hidden, block.down.weight.t()).add_(block.down.bias)
    return x


@wrong("the skip is cloned in every block", check=RESIDUAL, criterion="tensors created", hint="hidden")
@torch.no_grad()
def skip_cloned(blocks, x):
    a, b = x.new_empty(2, len(x), widest_block(blocks, x))
    h = a[:, : x.shape[1]].copy_(x)
    for block in blocks:
        skip = h.clone()
        hidden = step(block.up, h, b[:, : block.up.out_features])
        torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=h)
        h.add_(skip)
    return h


@wrong("BUF-14 the sum is a new tensor", check=RESIDUAL, criterion="tensors created", hint="hidden")
@torch.no_grad()
def sum_is_new(blocks, x):
    a, b = x.new_empty(2, len(x), widest_block(blocks, x))
    h = x
    for block in blocks:
        hidden = step(block.up, h, b[:, : block.up.out_features])
        h = h + torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=a[:, : x.shape[1]])
    return h


@wrong("BUF-07 the branch is computed anew, then copied", check=RESIDUAL, criterion="tensors created", hint="copied")
@torch.no_grad()
def residual_copies(blocks, x):
    buffers = x.new_empty(3, len(x), widest_block(blocks, x))
    h = x
    for i, block in enumerate(blocks):
        hidden = buffers[2, :, : block.up.out_features].copy_(torch.relu(block.up(h)))
        h = buffers[i % 2, :, : x.shape[1]].copy_(h + block.down(hidden))
    return h


@wrong("BUF-08 sized for the stream, hidden layers are wider", check=RESIDUAL, criterion="buffers fit", hint="widest")
@torch.no_grad()
def sized_for_stream(blocks, x):
    stream, hidden = x.clone(), x.new_empty(x.shape)
    for block in blocks:
        step(block.up, stream, hidden)
        stream.addmm_(hidden, block.down.weight.t()).add_(block.down.bias)
    return stream


@wrong("four buffers", check=RESIDUAL, criterion="tensors created", hint="one-too-many")
@torch.no_grad()
def four_buffers(blocks, x):
    buffers = [x.new_empty(len(x), widest_block(blocks, x)) for _ in range(4)]
    h = x
    for i, block in enumerate(blocks):
        hidden = step(block.up, h, buffers[2 + i % 2][:, : block.up.out_features])
        out = buffers[i % 2][:, : x.shape[1]]
        h = torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=out).add_(h)
    return h


@wrong("BUF-10 gradients on", check=RESIDUAL, criterion="runs", hint="grad")
def residual_gradients_on(blocks, x):
    stream, buffer = x.clone(), x.new_empty(len(x), widest_block(blocks, x))
    for block in blocks:
        hidden = step(block.up, stream, buffer[:, : block.up.out_features])
        stream.addmm_(hidden, block.down.weight.t()).add_(block.down.bias)
    return stream


@wrong("a buffer for every block", check=RESIDUAL, criterion="tensors created", hint="buffer-per-layer")
@torch.no_grad()
def buffer_per_block(blocks, x):
    stream = x.clone()
    for block in blocks:
        hidden = step(block.up, stream, x.new_empty(len(x), block.up.out_features))
        stream.addmm_(hidden, block.down.weight.t()).add_(block.down.bias)
    return stream


def hidden_of(buffer, block, x):
    return view(buffer, len(x), block.up.out_features)


@wrong("fresh: the sum adds what has been overwritten", check=RESIDUAL, criterion="output", hint="skip-source")
@torch.no_grad()
def overwritten(blocks, x):
    a, b = x.new_empty(2, len(x), widest_block(blocks, x))
    stream = a[:, : x.shape[1]].copy_(x)
    for block in blocks:
        hidden, before = step(block.up, stream, b[:, : block.up.out_features]), stream
        torch.addmm(block.down.bias, hidden, block.down.weight.t(), out=stream)
        stream.add_(before)
    return stream


@wrong("fresh: contiguous() is no copy", check=RESIDUAL, criterion="input", hint="input-changed")
@torch.no_grad()
def contiguous_is_no_copy(blocks, x):
    stream, buffer = x.detach().contiguous(), x.new_empty(len(x) * widest_block(blocks, x))
    for block in blocks:
        hidden = step(block.up, stream, hidden_of(buffer, block, x))
        stream.addmm_(hidden, block.down.weight.t()).add_(block.down.bias)
    return stream


@wrong("fresh: down makes a new tensor", check=RESIDUAL, criterion="tensors created", hint="hidden")
@torch.no_grad()
def down_allocates(blocks, x):
    stream, buffer = x.detach().clone(), x.new_empty(len(x) * widest_block(blocks, x))
    for block in blocks:
        stream += block.down(step(block.up, stream, hidden_of(buffer, block, x)))
    return stream


@wrong("fresh: down's bias is forgotten", check=RESIDUAL, criterion="output", hint="numbers")
@torch.no_grad()
def no_down_bias(blocks, x):
    stream, buffer = x.detach().clone(), x.new_empty(len(x) * widest_block(blocks, x))
    for block in blocks:
        stream.addmm_(step(block.up, stream, hidden_of(buffer, block, x)), block.down.weight.t())
    return stream


@wrong("fresh: relu on the sum", check=RESIDUAL, criterion="output", hint="numbers")
@torch.no_grad()
def relu_on_sum(blocks, x):
    stream, buffer = x.detach().clone(), x.new_empty(len(x) * widest_block(blocks, x))
    for block in blocks:
        hidden = step(block.up, stream, hidden_of(buffer, block, x))
        stream.addmm_(hidden, block.down.weight.t()).add_(block.down.bias).relu_()
    return stream


@wrong("fresh: sized for the first block", check=RESIDUAL, criterion="runs", hint="widest")
@torch.no_grad()
def sized_for_first_block(blocks, x):
    stream = x.detach().clone()
    buffer = x.new_empty(len(x) * blocks[0].up.out_features) if blocks else None
    for block in blocks:
        hidden = step(block.up, stream, hidden_of(buffer, block, x))
        stream.addmm_(hidden, block.down.weight.t()).add_(block.down.bias)
    return stream


@wrong("fresh: every down-product three times, in place", check=RESIDUAL, criterion="work", hint="recomputed")
@torch.no_grad()
def thrice(blocks, x):
    stream, buffer = x.detach().clone(), x.new_empty(len(x) * widest_block(blocks, x))
    for block in blocks:
        hidden, weight = step(block.up, stream, hidden_of(buffer, block, x)), block.down.weight.t()
        stream.addmm_(hidden, weight).addmm_(hidden, weight, alpha=-1).addmm_(hidden, weight).add_(block.down.bias)
    return stream


# -- PingPong --


class Base:
    """A right executor whose parts the wrong ones replace."""

    def __init__(self, layers, max_batch):
        self.layers = list(layers)
        self.wide = max(layer.out_features for layer in layers)
        self.dtype = layers[0].weight.dtype
        self.make(max_batch)

    def make(self, max_batch):
        self.buffers = torch.empty(2, max_batch * self.wide, dtype=self.dtype)

    @property
    def buffer_bytes(self):
        return self.buffers.nbytes

    def run(self, x):
        h = x
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                h = step(layer, h, view(self.buffers[i % 2], len(x), layer.out_features))
        return h

    def __call__(self, x, out=None):
        h = self.run(x)
        return h if out is None else out.copy_(h)


@wrong("do-nothing: zeros", check=PERSISTENT, criterion="output", hint="does-nothing")
class ZerosForAll(Base):
    def run(self, x):
        return self.buffers.zero_()[0, : len(x) * self.layers[-1].out_features].view(len(x), -1)


@wrong("plain: the layers, called", check=PERSISTENT, criterion="second call", hint="made-again")
class PlainCall(Base):
    def make(self, max_batch):
        self.buffers = torch.empty(0)

    @torch.no_grad()
    def run(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@wrong("plain: with gradients", check=PERSISTENT, criterion="second call", hint="grad")
class PlainWithGrad(PlainCall):
    def run(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

    def __call__(self, x, out=None):
        h = self.run(x)
        return h if out is None else out.copy_(h.detach())


@wrong("BUF-17 buffers made in every call", check=PERSISTENT, criterion="second call", hint="made-again")
class MadeInCall(Base):
    def run(self, x):
        self.make(len(x))
        return super().run(x)


@wrong("every result is a new copy", check=PERSISTENT, criterion="second call", hint="result-copied")
class CopyOfResult(Base):
    def run(self, x):
        return super().run(x).clone()


@wrong("results kept in a cache", check=PERSISTENT, criterion="second call", hint="result-copied")
class CachedResults(Base):
    def run(self, x):
        self.kept = getattr(self, "kept", {})
        key = x.sum().item()
        if key not in self.kept:
            self.kept[key] = super().run(x).clone()
        return self.kept[key]


@wrong("knows an input by its address", check=PERSISTENT, criterion="output", hint="stale")
class KnownByAddress(Base):
    def run(self, x):
        self.kept = getattr(self, "kept", {})
        if x.data_ptr() not in self.kept:
            self.kept[x.data_ptr()] = super().run(x).clone()
        return self.kept[x.data_ptr()]


@wrong("made again when the batch has another size", check=PERSISTENT, criterion="smaller batch", hint="reshaped")
class RemadeForSize(Base):
    rows = 0

    def run(self, x):
        if self.rows != len(x):
            self.rows = len(x)
            self.make(len(x))
        return super().run(x)


@wrong("a buffer for every layer, kept", check=PERSISTENT, criterion="memory held", hint="holds")
class BufferPerLayer(Base):
    def make(self, max_batch):
        self.buffers = torch.empty(len(self.layers), max_batch * self.wide, dtype=self.dtype)

    def run(self, x):
        h = x
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                h = step(layer, h, view(self.buffers[i], len(x), layer.out_features))
        return h


@wrong("holds a copy of the weights", check=PERSISTENT, criterion="memory held", hint="holds")
class CopiedWeights(Base):
    def __init__(self, layers, max_batch):
        super().__init__(layers, max_batch)
        self.weights = [layer.weight.detach().t().contiguous() for layer in layers]


@wrong("BUF-04 the lent buffer, whatever out says", check=PERSISTENT, criterion="result in out", hint="out-ignored")
class IgnoresOut(Base):
    def __call__(self, x, out=None):
        return self.run(x)


@wrong("BUF-04 out becomes a buffer of the next call", check=PERSISTENT, criterion="result in out", hint="aliased")
class AdoptsOut(Base):
    adopted = None

    def __call__(self, x, out=None):
        h = self.run(x)
        if self.adopted is not None:
            self.adopted.view(-1)[: h.numel()].copy_(h.reshape(-1)[: self.adopted.numel()])
        if out is None:
            return h
        self.adopted = out
        return out.copy_(h)


@wrong("BUF-13 out is written after the call has returned", check=PERSISTENT, criterion="result in out", hint="late-reader")
class WritesLate(Base):
    def __call__(self, x, out=None):
        h = self.run(x)
        if out is None:
            return h

        def later():
            time.sleep(0.01)
            out.copy_(h)

        threading.Thread(target=later).start()
        return out


@wrong("BUF-16 counts the weights", check=PERSISTENT, criterion="buffer_bytes", hint="reported")
class CountsWeights(Base):
    @property
    def buffer_bytes(self):
        return self.buffers.nbytes + sum(p.nbytes for layer in self.layers for p in layer.parameters())


@wrong("BUF-16 counts one arena twice", check=PERSISTENT, criterion="buffer_bytes", hint="reported")
class CountsTwice(Base):
    @property
    def buffer_bytes(self):
        return sum(part.untyped_storage().nbytes() for part in self.buffers)


@wrong("counts elements for bytes", check=PERSISTENT, criterion="buffer_bytes", hint="reported")
class CountsElements(Base):
    @property
    def buffer_bytes(self):
        return self.buffers.numel()


@wrong("does not say what it holds", check=PERSISTENT, criterion="buffer_bytes", hint="reported-missing")
class SaysNothing(Base):
    buffer_bytes = None


@wrong("takes the input for a buffer", check=PERSISTENT, criterion="input", hint="input-changed")
class InputAsBuffer(Base):
    def run(self, x):
        h = super().run(x)
        flat = x.view(-1)
        flat[: min(flat.numel(), h.numel())] = h.reshape(-1)[: flat.numel()]
        return h


@wrong("only for full batches", check=PERSISTENT, criterion="smaller batch", hint="reshaped")
class FullBatchesOnly(Base):
    def make(self, max_batch):
        super().make(max_batch)
        self.rows = max_batch

    def run(self, x):
        h = x
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                h = step(layer, h, view(self.buffers[i % 2], self.rows, layer.out_features))
        return h


@wrong("sized by the first batch", check=PERSISTENT, criterion="runs", hint="widest")
class SizedByFirst(Base):
    def make(self, max_batch):
        self.buffers = None

    def run(self, x):
        if self.buffers is None:
            super().make(len(x))
        return super().run(x)


@wrong("BUF-10 gradients on", check=PERSISTENT, criterion="runs", hint="grad")
class GradientsOn(Base):
    def run(self, x):
        h = x
        for i, layer in enumerate(self.layers):
            h = step(layer, h, view(self.buffers[i % 2], len(x), layer.out_features))
        return h


@wrong("BUF-02 never flips", check=PERSISTENT, criterion="output", hint="same-buffer")
class NeverFlips(Base):
    def run(self, x):
        h = x
        with torch.no_grad():
            for layer in self.layers:
                h = step(layer, h, view(self.buffers[0], len(x), layer.out_features))
        return h


@wrong("a pair for every batch size, and the last result", check=PERSISTENT, criterion="memory held", hint="holds")
class PairPerSizeAndResult(Base):
    def make(self, max_batch):
        self.pairs, self.kept = {}, {}

    @property
    def buffer_bytes(self):
        return sum(tensor.nbytes for held in (self.pairs, self.kept) for tensor in held.values())

    def run(self, x):
        rows = len(x)
        if rows not in self.pairs:
            self.pairs[rows] = x.new_empty(2, rows * self.wide)
            self.kept[rows] = x.new_empty(rows, self.layers[-1].out_features)
        self.buffers = self.pairs[rows]
        return self.kept[rows].copy_(super().run(x))


@wrong("fresh: adopts out", check=PERSISTENT, criterion="result in out", hint="aliased")
class KeepsOut(Base):
    result = None

    def __call__(self, x, out=None):
        h = self.run(x)
        self.result = self.result if out is None else out
        return h if self.result is None or self.result.shape != h.shape else self.result.copy_(h)


@wrong("fresh: fills out, returns the lent buffer", check=PERSISTENT, criterion="result in out", hint="not-out")
class ReturnsLent(Base):
    def __call__(self, x, out=None):
        h = self.run(x)
        if out is not None:
            out.copy_(h)
        return h


@wrong("fresh: fills out, returns nothing", check=PERSISTENT, criterion="result in out", hint="not-out")
class ReturnsNothing(Base):
    def __call__(self, x, out=None):
        h = self.run(x)
        if out is None:
            return h
        out.copy_(h)


@wrong("fresh: four bytes for every number", check=PERSISTENT, criterion="buffer_bytes", hint="reported")
class FourBytes(Base):
    @property
    def buffer_bytes(self):
        return 4 * self.buffers.numel()


@wrong("fresh: two bytes for half precision, else four", check=PERSISTENT, criterion="buffer_bytes", hint="reported")
class TwoOrFourBytes(Base):
    @property
    def buffer_bytes(self):
        return (2 if self.dtype in (torch.half, torch.bfloat16) else 4) * self.buffers.numel()


@wrong("fresh: float32 buffers for any layers", check=PERSISTENT, criterion="runs", hint="dtype")
class Float32Buffers(Base):
    def make(self, max_batch):
        self.buffers = torch.empty(2, max_batch * self.wide)


@wrong("fresh: knows its last input by the address", check=PERSISTENT, criterion="output", hint="stale")
class LastAddress(Base):
    seen = None

    def run(self, x):
        key = (x.data_ptr(), x.shape, x.stride())
        if self.seen is None or self.seen[0] != key:
            self.seen = (key, super().run(x))
        return self.seen[1]


@wrong("fresh: buffers freed and made again through their storage", check=PERSISTENT, criterion="second call", hint="made-again")
class RemadeStorage(Base):
    def run(self, x):
        storage = self.buffers.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        return super().run(x)


@wrong("fresh: a third and a fourth buffer, not counted", check=PERSISTENT, criterion="memory held", hint="holds")
class UncountedBuffers(Base):
    def make(self, max_batch):
        super().make(max_batch)
        self.input = torch.empty(max_batch, self.layers[0].in_features, dtype=self.dtype)
        self.output = torch.empty(max_batch, self.layers[-1].out_features, dtype=self.dtype)

    def run(self, x):
        return self.output[: len(x)].copy_(super().run(self.input[: len(x)].copy_(x)))

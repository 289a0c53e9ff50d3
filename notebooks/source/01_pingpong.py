# ---
# labkit: {lab: "01", slug: pingpong, title: "Two buffers for any depth", minutes: 75, difficulty: 2, points: 20, cards: 0, needs: []}
# ---

# %% [markdown]
# # 01 · Two buffers for any depth
#
# *about 75 minutes · difficulty 2 of 5 · 20 points · any machine, no card needed*
#
# A network of 64 layers hands a tensor from layer to layer. Run the plain way, its forward pass keeps more than 64
# MiB of activations alive. At the end of this lab your own code runs it in two buffers of 1 MiB each, 64 layers or
# 1,000, and its second call allocates **0 bytes**.
#
# You write three things: a forward pass in two buffers, one for residual networks, and an executor that keeps its
# buffers from call to call. You also learn why training cannot do any of this, which is what the next lab is about.

# %% [markdown]
# ## Five things you use all the time
#
# - A tensor is a small header (shape, strides, offset) over a *storage*, the memory itself. Two tensors can share
# one.
# - A *view*, like `buffer[:, :10]`, is a new header over the same storage. It allocates nothing.
# - `torch.relu(x)` makes a new storage. `x.relu_()` writes over `x`.
# - Many operators take `out=`: `torch.mm(a, b, out=c)` writes into `c` and allocates nothing.
# - While autograd watches, it keeps every tensor that the backward pass will read. `torch.no_grad()` and
# `torch.inference_mode()` tell it to look away.
#
# Run the next cell. An *activation* below is the output of one layer; here it is 1,024 rows of 256 numbers, exactly 1
# MiB.

# %%
import time

import torch
from torch import nn

from labkit import Recorder, check, live_memory
from labkit.figures import compare_memory
from labkit.models import linear_layers, residual_blocks
from labkit.widgets import step_through

MIB = 2**20
BATCH, WIDTH, DEPTH = 1024, 256, 64

layers = linear_layers([WIDTH] * (DEPTH + 1))  # a list of 64 nn.Linear
x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def plain_forward(layers, x):
    """relu(layer(x)), layer after layer: what you would write without thinking of memory."""
    for layer in layers:
        x = torch.relu(layer(x))
    return x


# %% [markdown]
# ## The plain way
#
# Watch the memory while the network runs. Blue are the weights: they are there before and after. Everything that
# grows is activations.

# %%
with live_memory(layers, x, title="64 layers, the plain way") as live:
    with live.phase("forward"):
        y = plain_forward(layers, x)
plain = live.recording
own_mib = plain.peak("forward", born=True) / MIB
print(f"peak {plain.peak_bytes / MIB:.1f} MiB, of which the run itself made {own_mib:.1f} MiB")

# %% [markdown]
# ## On half the memory
#
# Now pretend that your card has half of that. A `Recorder` with a budget refuses the allocation that goes over it, as
# a card would, and can tell what was alive.

# %%
budget = plain.peak_bytes // 2
try:
    with Recorder(watch=[*layers, x], budget_bytes=budget) as tight, live_memory(tight, title="the same, under a budget"):
        with tight.phase("forward"):
            y = plain_forward(layers, x)
except torch.OutOfMemoryError:
    print(f"out of memory at {budget / MIB:.1f} MiB. Alive: {tight.recording.alive_summary()}")

# %% [markdown]
# ## Who still wants them?
#
# Outputs of relu, one per layer, kept for a backward pass that nobody will run. So tell autograd to look away.

# %%
def record(forward, layers, x):
    """Record one call of `forward(layers, x)`; the phase is called "forward"."""
    with Recorder(watch=[*layers, x]) as recorder, recorder.phase("forward"):
        forward(layers, x)
    return recorder.recording


def created(recording):
    """How many tensors of activation size one call made."""
    return len(recording.allocations("forward", min_bytes=MIB // 2))


@torch.inference_mode()
def inference_loop(layers, x):
    return plain_forward(layers, x)


loop = record(inference_loop, layers, x)
print(f"inference mode: the run's own peak is {loop.peak('forward', born=True) / MIB:.1f} MiB")

# %% [markdown]
# Sixty MiB gone with one line. When the last name of a tensor goes, Python frees its storage, so only a few are alive
# at once.
#
# Then why would anybody plan buffers? Because this loop still *asks for* memory in every layer. The allocator may
# have to search, or refuse. Each tensor lies somewhere else in every call, so a card cannot replay the run as one
# recorded graph, which needs fixed addresses. And on a microcontroller there may be no allocator at all.
#
# Two buffers, made once, end all of it. That is what you build.

# %% [markdown]
# ## 1.1 Two buffers
#
# *difficulty 2 of 5 · importance 5 of 5 · 15 to 25 minutes · 7 points · any machine*
#
# Layer 5 reads what layer 4 wrote, and nothing else. So when layer 5 runs, the memory that layer 3 wrote is free
# again. Two buffers are enough: one is read while the other is written, then they change roles, like the ball in
# ping-pong.
#
# Real networks are wider here and narrower there, so layers differ in width. A buffer needs room for any output that
# it is to hold; a layer uses the part it needs.
#
# **Predict first.** For the 64 layers above, how many tensors of activation size does one call create: the loop in
# inference mode, and yours?

# %% nbgrader={"grade": false, "grade_id": "predict-created", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_loop = None  # your number
predicted_yours = None  # your number
### BEGIN SOLUTION
predicted_loop = 128
predicted_yours = 2
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "pingpong-forward", "locked": false, "schema_version": 3, "solution": true, "task": false}
def pingpong_forward(layers, x):
    """Run relu(layer(x)) for every layer in two buffers, and return the last output.

    layers : list of nn.Linear, each with a bias, of differing widths; may be empty
    x      : (batch, layers[0].in_features), of the weights' dtype; is not changed.
             It may be a strided view, and it may require grad.
    Returns (batch, layers[-1].out_features), without a graph: a part of one of your buffers,
    or a copy. Without layers: x or a copy of it.

    At most two buffers, each no larger than the widest activation (x counts), and one more for the
    result if you like. A buffer may grow, or give way to a larger one, when a wider layer comes,
    as long as torch does not have to do it for you with a warning. Scratch much smaller than that is free,
    unless it adds up from layer to layer: pieces of an activation are one. Each layer runs once,
    whole or row by row, in torch, on the weights as they are. About 10 lines.
    """
    ### BEGIN SOLUTION
    rows = x.shape[0]
    widest = max((layer.out_features for layer in layers), default=0)
    with torch.no_grad():
        read, write = x, x.new_empty(rows * widest)
        spare = x.new_empty(rows * widest)
        for layer in layers:
            out = write[: rows * layer.out_features].view(rows, layer.out_features)
            torch.addmm(layer.bias, read, layer.weight.t(), out=out).relu_()
            read, write, spare = out, spare, write
    return read
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-forward", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("pingpong.forward", pingpong_forward)

# %% nbgrader={"grade": true, "grade_id": "exam-forward", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam

exam("pingpong.forward", pingpong_forward, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Put your finger on layer 3's output. Which layers read it? From when on may
# somebody write over it?</details>
# <details><summary>Hint 2</summary>A product with a place to go: <code>torch.addmm(bias, h, weight.t(),
# out=...)</code>. A flat buffer cut to fit: <code>buffer[:rows * columns].view(rows, columns)</code>. A relu that
# stays where it is ends in an underscore.</details>
# <details><summary>Hint 3</summary>make two buffers for the widest output; h is x; for each layer: take the part of
# the buffer whose turn it is, write the product there, relu in place, h is that part, change turns. All of it where
# autograd does not watch.</details>

# %%
yours = record(pingpong_forward, layers, x)
print(f"tensors created by the loop: {created(loop)} (you said {predicted_loop})")
print(f"tensors created by yours: {created(yours)} (you said {predicted_yours})")
plain_again = record(plain_forward, layers, x)  # warm and not drawn live, as the other two
runs = {"plain": plain_again, "inference mode": loop, "two buffers": yours}
compare_memory(runs, baseline="plain", born=True, title="64 layers, without weights and input")

# %% [markdown]
# Why 128 for 64 layers? Each line of the loop makes two activations: `layer(x)` returns a new tensor, and `torch.relu`
# another one.
#
# Now your run, layer by layer. Move the slider: R is the buffer that a layer reads, W the one that it writes. The
# network here has mixed widths; look at how much of a buffer each layer leaves unused.
#
# Then run it with `inference_loop` in place of `pingpong_forward`, and compare the number of rows.

# %%
mixed = linear_layers([96, 256, 64, 192, 128, 256, 32, 160, 80])
step_through(pingpong_forward, mixed, x[:, :96], title="Who reads, who writes")

# %% [markdown]
# ## 1.2 A block that still needs its input
#
# *difficulty 3 of 5 · importance 4 of 5 · 15 to 20 minutes · 5 points · any machine*
#
# Every transformer is built of residual blocks: `x + down(relu(up(x)))`. Now the rule "layer 5 reads only what layer
# 4 wrote" is broken. The block's input has a second reader, the sum at its end, and between the two stand two
# products that want somewhere to write.
#
# Follow your two buffers through one block with a pencil. `up` reads A and writes B. `down` reads B and writes ... A?
# Then what does the sum add?
#
# Either you spend a third buffer, or you let the sum land where its first term already lies. Both are right.
#
# **Predict first.** Blocks of width 256 (1 MiB) with hidden width 512 (2 MiB): with how many MiB of buffers can you
# run them, at the least?

# %% nbgrader={"grade": false, "grade_id": "predict-residual", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_mib = None  # your number
### BEGIN SOLUTION
predicted_mib = 3
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "residual-forward", "locked": false, "schema_version": 3, "solution": true, "task": false}
def residual_forward(blocks, x):
    """Run x + down(relu(up(x))) for every block in at most three buffers, and return the last output.

    blocks : list of modules with two nn.Linear, `up` (width -> hidden) and `down` (hidden -> width),
             each with a bias; hidden differs from block to block, and may be narrower or wider
             than width; may be empty
    x      : (batch, width), of the weights' dtype; is not changed.
             It may be a strided view, and it may require grad.
    Returns (batch, width), without a graph: one of your buffers, or a copy. Without blocks: x or a copy.

    At most three buffers, each no larger than the widest activation (x counts), and one more for
    the result if you like; growing, scratch and layers count as in 1.1. About 10 lines.
    """
    ### BEGIN SOLUTION
    rows = x.shape[0]
    with torch.no_grad():
        stream = x.clone()
        hidden = x.new_empty(rows * max((block.up.out_features for block in blocks), default=0))
        for block in blocks:
            h = hidden[: rows * block.up.out_features].view(rows, block.up.out_features)
            torch.addmm(block.up.bias, stream, block.up.weight.t(), out=h).relu_()
            stream.addmm_(h, block.down.weight.t()).add_(block.down.bias)  # the sum lands where its first term lies
    return stream
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-residual", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("pingpong.residual", residual_forward)

# %% nbgrader={"grade": true, "grade_id": "exam-residual", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam

exam("pingpong.residual", residual_forward, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Who is the last reader of the block's input? Mark that moment; nobody may write
# there before it.</details>
# <details><summary>Hint 2</summary><code>c.addmm_(a, b)</code> adds the product of a and b to what is in c. It reads
# c before it writes c, element by element.</details>
# <details><summary>Hint 3</summary>the stream is a copy of x; for each block: the up-product goes to the hidden
# buffer, relu in place; the down-product and its bias are added to the stream.</details>

# %%
blocks = residual_blocks(WIDTH, [2 * WIDTH] * 16)


def plain_blocks(blocks, x):
    for block in blocks:
        x = block(x)
    return x


plain_residual, your_residual = record(plain_blocks, blocks, x), record(residual_forward, blocks, x)
print(f"your buffers: {your_residual.peak('forward', born=True) / MIB:.1f} MiB at the peak (you said {predicted_mib})")
runs = {"plain": plain_residual, "yours": your_residual}
compare_memory(runs, baseline="plain", born=True, title="16 residual blocks, without weights and input")

# %% [markdown]
# ## 1.3 Buffers that stay
#
# *difficulty 2 of 5 · importance 4 of 5 · 15 to 25 minutes · 6 points · any machine*
#
# A server runs the same network a thousand times a second. Your forward pass still makes two buffers in each call. An
# *executor* makes them once and keeps them: from its second call on, nothing is allocated, and every layer writes to
# the same address every time.
#
# That raises a question of ownership. The result lies in the executor's own buffer, so it is *lent*: yours to read
# until the next call. Whoever wants to keep it brings a tensor of their own, `executor(x, out=mine)`. Every library
# with static buffers has this contract, and people trip over it.
#
# **Predict first.** You run `y1 = executor(x1)`, then `y2 = executor(x2)` with another input. In how many percent of
# their numbers do `y1` and `y2` now agree?

# %% nbgrader={"grade": false, "grade_id": "predict-lent", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_percent = None  # your number
### BEGIN SOLUTION
predicted_percent = 100
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "pingpong-executor", "locked": false, "schema_version": 3, "solution": true, "task": false}
class PingPong:
    """Runs relu(layer(x)) for every layer, again and again, in the same two buffers.

    PingPong(layers, max_batch)
        layers    : list of at least one nn.Linear, as in 1.1
        max_batch : no call has more rows than this
    executor(x) -> (batch, out), lent: it may lie in the executor's memory and change with the next call
    executor(x, out=mine) -> mine, filled: (batch, out), the caller's own; no later call touches it
    executor.buffer_bytes : int, bytes of activations held between calls (attribute, property or method)

    x and mine have the weights' dtype, which may be any floating one. x is not changed, and the caller
    may fill the same tensor with new numbers for the next call. Neither x nor mine is ever lent memory.
    The result has no graph. The weights may change between calls, so you hold no copies of them, nor
    of results. The constructor and the first call of a batch size may allocate; every other call
    creates nothing of activation size. Between calls you hold at most two buffers, each no larger than
    the widest activation of max_batch rows, or at most such a pair per batch size that has come, each
    for its own number of rows. About 15 lines.
    """

    def __init__(self, layers, max_batch):
        ### BEGIN SOLUTION
        self.layers = list(layers)
        widest = max(layer.out_features for layer in layers)
        self.buffers = torch.empty(2, max_batch * widest, dtype=layers[0].weight.dtype, device=layers[0].weight.device)
        self.buffer_bytes = self.buffers.nbytes
        ### END SOLUTION

    def __call__(self, x, out=None):
        ### BEGIN SOLUTION
        rows, h = x.shape[0], x
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                part = self.buffers[i % 2, : rows * layer.out_features].view(rows, layer.out_features)
                h = torch.addmm(layer.bias, h, layer.weight.t(), out=part).relu_()
            return h if out is None else out.copy_(h)
        ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-persistent", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("pingpong.persistent", PingPong)

# %% nbgrader={"grade": true, "grade_id": "exam-persistent", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam

exam("pingpong.persistent", PingPong, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which numbers do you need to size the buffers, and are they all known before the
# first call?</details>
# <details><summary>Hint 2</summary>A batch of 3 rows needs only the front of a buffer made for 8.
# <code>out.copy_(h)</code> fills the caller's tensor; bytes of a tensor are <code>nelement() *
# element_size()</code>.</details>
# <details><summary>Hint 3</summary>in the constructor: two flat buffers of max_batch times the widest output; in the
# call: the loop of 1.1 on their front parts; at the end either lend the last part or copy it out.</details>

# %%
executor = PingPong(layers, max_batch=BATCH)
x1, x2 = x, x.flip(0)
with torch.no_grad():
    y1 = executor(x1)
    y2 = executor(x2)
print(f"y1 and y2 agree in {100 * (y1 == y2).float().mean():.0f}% of their numbers (you said {predicted_percent})")

mine = torch.empty(BATCH, WIDTH)
with live_memory(layers, x1, x2, mine, title="four calls of your executor") as live:
    for call in range(1, 5):
        with live.phase(f"call {call}"):
            executor(x1 if call % 2 else x2, out=mine)
allocated = sum(phase["allocated_bytes"] for phase in live.recording.by_phase().values())
print(f"allocated in four calls: {allocated} bytes; the executor holds {executor.buffer_bytes / MIB:.1f} MiB")

# %% [markdown]
# ## Before and after
#
# Memory was the goal. Does it cost time? Each of these runs the same 64 products; only the memory differs. Look at
# the ratio more than at the milliseconds: your machine is not ours.

# %%
def best_ms(run, repeats=5):
    """Milliseconds of the fastest of `repeats` runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


sequential = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
with torch.inference_mode():
    sequential_ms = best_ms(lambda: sequential(x))
yours_ms = best_ms(lambda: pingpong_forward(layers, x))
table = [
    ("plain, autograd watching", own_mib, created(plain), best_ms(lambda: plain_forward(layers, x))),
    ("nn.Sequential, inference mode", loop.peak("forward", born=True) / MIB, created(loop), sequential_ms),
    ("two buffers, made in each call", yours.peak("forward", born=True) / MIB, created(yours), yours_ms),
    ("your executor, a later call", executor.buffer_bytes / MIB, 0, best_ms(lambda: executor(x, out=mine))),
]
print(f"{'':<32}{'peak MiB':>10}{'created':>10}{'ms':>9}")
for name, peak_mib, count, ms in table:
    print(f"{name:<32}{peak_mib:>10.1f}{count:>10}{ms:>9.1f}")

# %% [markdown]
# ## Paper scale: 1,000 layers
#
# Inside `paper_scale()` tensors have sizes and no numbers. Your code runs as it is, and the recorder counts bytes
# that nobody allocates. So take eight rows through 1,000 layers as wide as GPT-3, 12,288: 563 GiB of weights, for
# which no laptop has room.
#
# **Predict first.** One activation is 0.375 MiB here. How many MiB do your two buffers take?

# %%
from labkit.paper import PaperScaleError, paper_scale

try:
    with paper_scale():
        deep, rows = [nn.Linear(12288, 12288) for _ in range(1000)], torch.randn(8, 12288)
        deep_plain, deep_yours = record(plain_forward, deep, rows), record(pingpong_forward, deep, rows)
    print(f"weights: {deep_yours.by_category('peak')['parameters'] / 2**30:.0f} GiB, allocated by nobody")
    print(f"plain: {deep_plain.peak('forward', born=True) / MIB:.2f} MiB at the peak")
    print(f"yours: {deep_yours.peak('forward', born=True) / MIB:.2f} MiB")
except PaperScaleError as error:
    print(error)  # costs no points: your code asked for numbers, which are not there

# %% [markdown]
# ## Why training cannot do this
#
# Try it. Two layers, autograd watching, and the second output written over the first one, as your buffers do. The
# forward pass does not mind. Then ask for a gradient.

# %%
first = torch.relu(layers[0](x))
second = torch.relu(layers[1](first))
with torch.no_grad():
    first.copy_(second)  # the buffer is taken for something else
try:
    second.sum().backward()
except RuntimeError as error:
    print(str(error).split(":")[0])

# %% [markdown]
# Autograd counts writes to each tensor it has kept, and refuses to compute from one that has changed. It is right to:
# the gradient of layer 1's weight is a product with layer 1's *input*, the very numbers that are gone. So every
# layer's input has to stay until the backward pass comes back to it, and that pass begins at the other end.
#
# That is the O(n) of the plain run. Lab 02 shows the way between: keep a few, compute the others again.

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-1", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### Reflection (2 points)
#
# Why can inference reuse two buffers at any depth, while training cannot? Answer with two of *your own* measured
# numbers: what the plain run made at its peak, and what your two buffers took. Say what each of the two would be at
# 1,000 layers, and name the one operation in backward that rules the buffers out. Five sentences are enough.
#
# ### BEGIN SOLUTION
# At 64 layers the plain run made about 65 MiB, my buffers 2.0 MiB. In inference an output has one reader, the next
# layer, so its memory is free one layer later, whatever the depth: at 1,000 layers still 2.0 MiB. In training it has
# a second reader: the gradient of a layer's weight is the product of the output's gradient with that layer's input,
# and backward comes to early layers last. So all inputs wait at once: about 1 MiB per layer, near 1,000 MiB at 1,000
# layers.
#
# **Rubric** 0: no measured number, or no reason beyond "backward needs them". 1: own numbers and the right reason, or
# both depths extrapolated, but not both. 2: own numbers, both extrapolated (constant; about 1 MiB per layer), and the
# product with the layer's input (or relu's mask) named as the second reader, with the order in which backward comes
# to it.
# ### END SOLUTION

# %% [markdown]
# ## What the frameworks call it
#
# - **Memory planning**: TVM, ExecuTorch and TensorFlow Lite decide before the run where in one arena each tensor
# lies; sharing between tensors whose lifetimes do not meet is your ping-pong, for any graph.
# - **CUDA graphs**: PyTorch replays recorded kernels at fixed addresses, out of a private pool. Results are lent
# until the next replay, exactly as yours, and overwritten outputs are a common bug report.
# - **ONNX Runtime** has an arena and *memory patterns*: after the first run it knows the sizes and allocates them in
# one block.
# - **llama.cpp** plans each graph with its graph allocator (`ggml-alloc`) and reuses a parent's memory in place where
# its last reader allows.
#
# The bug of 1.2, a buffer reused before its last reader is done, stands in the issue lists of such planners: ONNX Runtime's
# number 7645, for one.

# %% [markdown]
# ## Your machine
#
# The next cell notes what you ran on. With a card it also runs the executor there: the same code, since the buffers
# follow the weights.

# %%
def run_on_card():
    """Executor on the first card: rows per second, FLOP/s, and what the allocator gave out."""
    on_card = [nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(DEPTH)]
    card_x, card_out = x.cuda(), torch.empty(BATCH, WIDTH, device="cuda")
    card_executor = PingPong(on_card, max_batch=BATCH)

    def run():
        card_executor(card_x, out=card_out)
        torch.cuda.synchronize()

    seconds = best_ms(run) / 1000
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run()
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    flops = 2 * BATCH * WIDTH * WIDTH * DEPTH / seconds
    return f"{BATCH / seconds:,.0f} rows/s, {flops / 1e12:.2f} TFLOP/s, allocations in a later call: {made}"


print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
if torch.cuda.is_available():
    print(f"{torch.cuda.get_device_name()}: {run_on_card()}")
else:
    print("no card here: everything above ran on the CPU, and its bytes are the same on any machine")

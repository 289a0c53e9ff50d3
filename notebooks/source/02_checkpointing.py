# ---
# labkit: {lab: "02", slug: checkpointing, title: "Checkpointing: sqrt(n) memory for one more forward", minutes: 100, difficulty: 3, points: 25, cards: 0, needs: ["01"]}
# ---

# %% [markdown]
# # 02 · Checkpointing: sqrt(n) memory for one more forward
#
# *about 100 minutes · difficulty 3 of 5 · 25 points · any machine, no card needed*
#
# You have a network of 64 blocks, and training it holds 64 activations at once. When you are done here, your own code trains the same
# network with **at most 40% of that peak**, every gradient equal to the last bit, and no block running forward more than twice.
# The saving grows with depth: at 144 layers it is down to a seventh.
#
# The trick is Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost* (arXiv 1604.06174).

# %% [markdown]
# ## Recap: automatic differentiation in five lines
#
# 1. **Forward** runs your operators in order; autograd notes each one in a graph.
# 2. An operator's gradient often needs values from its forward: these are its **saved tensors**, kept alive by the graph.
# 3. **Backward** walks the graph from the loss to the inputs. Each operator turns the gradient of its output into those of its inputs.
# 4. Once an operator's backward has run, its saved tensors can go.
# 5. So the first layer's saved tensors wait longest, and at the end of forward *all* of them are alive at once.

# %%
import math
import time

import torch
from torch import nn

from labkit import Recorder, check, live_memory
from labkit.figures import compare_memory, u_curve
from labkit.models import feed_forward_blocks, relu_blocks
from labkit.widgets import explore_segments

torch.set_num_threads(1)  # steady times, also where other programs keep the cores busy
MIB = 2**20
DEPTH, BATCH, WIDTH = 64, 2048, 128  # one activation is BATCH * WIDTH * 4 bytes = 1 MiB
layers = relu_blocks(DEPTH, WIDTH)
x = torch.randn(BATCH, WIDTH)  # training data: it needs no gradient


# %% [markdown]
# ## The baseline
#
# `train_step` runs one forward and one backward under the recorder and draws the memory while it happens. `run` is what changes in this
# lab: the function that takes the layers and the input to the output. First the plain one.

# %%
def plain(layers, x):
    """Every layer in order; autograd keeps what it wants."""
    for layer in layers:
        x = layer(x)
    return x


def train_step(run, layers, x, title, budget_bytes=None):
    """One training step of run(layers, x), drawn live. Returns its Recording."""
    for layer in layers:
        layer.zero_grad(set_to_none=False)
    with Recorder(watch=[*layers, x], budget_bytes=budget_bytes) as recorder, live_memory(recorder, title=title):
        with recorder.phase("forward"):
            loss = run(layers, x).square().mean()
        with recorder.phase("backward"):
            loss.backward()
    return recorder.recording


for layer in layers:  # gradients exist from the start, so that the curve shows activations come and go
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)

baseline = train_step(plain, layers, x, "Plain training step of 64 blocks")

# %%
print(f"peak {baseline.peak_bytes / MIB:.1f} MiB; alive at the peak: {baseline.alive_summary('peak')}")
for category, nbytes in baseline.by_category("peak").items():
    print(f"  {category:<16}{nbytes / MIB:8.1f} MiB")

# %% [markdown]
# The mountain is activations: up in forward, down in backward; everything else stays flat.
#
# Now take half of that peak away. The operator that exceeds the budget raises `torch.OutOfMemoryError`, as a card would. Read what was
# alive when it stopped.

# %%
budget = baseline.peak_bytes // 2
try:
    train_step(plain, layers, x, "The same step with half the memory", budget_bytes=budget)
except torch.OutOfMemoryError as error:
    print(f"OutOfMemoryError: {error}")

# %% [markdown]
# ## 2.1 What does backward need?
#
# *difficulty 2 of 5 · importance 4 of 5 · 10 to 15 minutes · 3 points*
#
# Before you throw activations away, know which ones autograd keeps. An operator saves what its gradient formula needs, and no more.
# Take `y = relu(x)`, `y = linear(x)` with weight `W` and bias `b`, and `y = softmax(x)`, where everything requires grad.
#
# **Predict first.** For each operator: is it the *input*, the *output* or the *weight* that backward needs? And how many activations
# do 64 blocks of Linear and ReLU keep between forward and backward? Mind that one block's output is the next one's input.

# %% nbgrader={"grade": false, "grade_id": "predict-kept", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_kept = None  # activations kept by 64 blocks of Linear and ReLU: your number
### BEGIN SOLUTION
predicted_kept = 65  # the input, and each ReLU's output, which is also the next Linear's input
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "saved-by", "locked": false, "schema_version": 3, "solution": true, "task": false}
def saved_by():
    """What autograd keeps for backward, by operator.

    Returns a dict with the keys "relu", "linear" and "softmax"; each value is a set of names
    out of "input", "output" and "weight".
    """
    ### BEGIN SOLUTION
    return {"relu": {"output"}, "linear": {"input", "weight"}, "softmax": {"output"}}
    ### END SOLUTION


# %% [markdown]
# Now measure it. `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` is a context manager: while it is active, autograd hands every
# tensor that it saves to `pack`, keeps whatever `pack` returns, and calls `unpack` on that when backward asks for the tensor.
#
# Count bytes of memory, not of tensors: saved tensors may share one storage, and the weights would be there anyway.

# %% nbgrader={"grade": false, "grade_id": "saved-bytes", "locked": false, "schema_version": 3, "solution": true, "task": false}
def saved_bytes(module, x):
    """Bytes that autograd keeps for the backward of module(x).

    module : nn.Module; x : (batch, width) tensor. Returns an int.
    The module's parameters and buffers are left out; x counts where backward needs it. A storage
    counts once and whole, however many saved tensors are parts of it: `t.untyped_storage()` has
    `data_ptr()` and `nbytes()`. (Freed memory is used again, at the same address.) About 8 lines.
    """
    ### BEGIN SOLUTION
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)  # noqa: F841  held until the count is made: no address is used twice
    for own in (*module.parameters(), *module.buffers()):
        kept.pop(own.untyped_storage().data_ptr(), None)
    return sum(kept.values())
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-saved", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("checkpointing.saved", saved_by, saved_bytes)

# %% nbgrader={"grade": true, "grade_id": "exam-saved", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("checkpointing.saved", saved_by, saved_bytes, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Write each derivative by hand. Which letters appear in it?</details>
# <details><summary>Hint 2</summary>A dict from <code>data_ptr()</code> to <code>nbytes()</code> counts each storage once.</details>
# <details><summary>Hint 3</summary>pack: note the storage, return the tensor; run the module inside the context; drop the parameters'
# and buffers' storages from the dict; add up the rest.</details>

# %%
measured_kept = saved_bytes(nn.Sequential(*layers), x) / (BATCH * WIDTH * 4)
print(f"64 blocks keep {measured_kept:.0f} activations; you predicted {predicted_kept}")
for name, module in {"ReLU": nn.ReLU(), "Linear": nn.Linear(WIDTH, WIDTH), "Softmax": nn.Softmax(-1)}.items():
    print(f"  {name:<8} keeps {saved_bytes(module, x.clone().requires_grad_()) / (BATCH * WIDTH * 4):.0f}")

# %% [markdown]
# ## 2.2 Forget, and run again
#
# *difficulty 4 of 5 · importance 5 of 5 · 30 to 40 minutes · 7 points*
#
# Everything inside a stretch of the network is a function of the stretch's input. So keep that input, let the rest go, and when backward
# arrives, run the stretch once more, this time recording. You pay one more forward of it.
#
# The second run has to be the *same* run: dropout draws from a random stream, and autocast decides the precision. Both are outside the
# arguments, so note them in forward and set them again in backward. Afterwards put the random stream back to where it was, or the next
# batch is shuffled differently.

# %% [markdown]
# `torch.autograd.Function` is the door: its `forward` runs **without** recording, its `backward` gets one gradient for each output and
# returns one for each argument of `forward` after `ctx`.
#
# **Predict first.** Eight of your blocks run in one checkpoint. How many activations are alive for it between forward and backward,
# its input and its output included?

# %% nbgrader={"grade": false, "grade_id": "predict-checkpoint", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_alive = None  # activations: your number
### BEGIN SOLUTION
predicted_alive = 2  # the input and the output
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "checkpoint", "locked": false, "schema_version": 3, "solution": true, "task": false}
class Recompute(torch.autograd.Function):
    """Keep the arguments of fn(*args), drop everything inside, run fn again in backward.

    fn   : any function of its arguments; it may use parameters that are not among them
           (those of a Module, say)
    args : tensors that require grad (at least one), tensors that do not, and anything else
           (numbers, None, dicts without tensors)
    fn returns a tensor or a tuple of tensors, of which some may have no gradient (whether such
           an output says that it requires grad is up to you).

    Output, gradients (of arguments and parameters) and the random stream afterwards equal those
    of plain fn(*args), dropout included. The second run happens under the autocast state of the
    first. fn runs once in forward and once in backward, however many tensors it returns. Between
    the two, little more is alive than its arguments and its output. `torch.utils.checkpoint` is
    off limits. About 18 lines for both.
    """

    @staticmethod
    def forward(ctx, fn, *args):
        ### BEGIN SOLUTION
        ctx.fn, ctx.args = fn, args
        ctx.random_state = torch.get_rng_state()  # before fn draws from it
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return fn(*args)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, *output_grads):
        ### BEGIN SOLUTION
        kept, ctx.args = ctx.args, None  # let go of each input once it has been used
        # Detached: the recomputed graph begins here. What required grad still does.
        args = [a.detach().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in kept]
        enabled, dtype = ctx.autocast
        autocast = torch.autocast("cpu", dtype, enabled=enabled)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), autocast:
            torch.set_rng_state(ctx.random_state)
            outputs = ctx.fn(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(out, grad) for out, grad in zip(outputs, output_grads) if out.requires_grad]
        edges = [torch.autograd.graph.get_gradient_edge(out) for out, _ in pairs]
        grads = [grad for _, grad in pairs]
        del outputs, pairs  # an edge leads into the graph without holding the output
        torch.autograd.backward(edges, grads)
        return None, *(a.grad if torch.is_tensor(a) else None for a in args)
        ### END SOLUTION


def checkpoint(fn, *args):
    """fn(*args), remembered by its arguments only."""
    return Recompute.apply(fn, *args)


# %% nbgrader={"grade": true, "grade_id": "check-checkpoint", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("checkpointing.checkpoint", checkpoint)

# %% nbgrader={"grade": true, "grade_id": "exam-checkpoint", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("checkpointing.checkpoint", checkpoint, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>List everything that decides the output of the first run. Which of it could be different when backward
# comes?</details>
# <details><summary>Hint 2</summary>Five calls do it: <code>torch.get_rng_state</code>, <code>torch.random.fork_rng</code>,
# <code>torch.enable_grad</code>, <code>tensor.detach</code>, <code>torch.autograd.backward</code>.</details>
# <details><summary>Hint 3</summary>backward: fresh leaves from the kept arguments; with the old random state, the old autocast and grad
# on, run fn; push the output gradients through what requires grad; return None for fn, then each leaf's grad or None.</details>

# %% [markdown]
# Here is your `checkpoint` on eight blocks, against the plain run of the same eight.

# %%
def in_one_checkpoint(layers, x):
    return checkpoint(lambda h: plain(layers, h), x)


eight, leaf = layers[:8], x.clone().requires_grad_()
eight_runs = {}
for name, run in {"plain": plain, "one checkpoint": in_one_checkpoint}.items():
    with Recorder() as recorder:
        with recorder.phase("forward"):
            out = run(eight, leaf)
        recorder.mark("between")
        with recorder.phase("backward"):
            out.square().mean().backward()
    eight_runs[name] = recorder.recording
    alive = 1 + eight_runs[name].at("between", born=True) / leaf.nbytes  # 1: the input was there before
    print(f"{name:<15} {alive:.0f} activations alive between forward and backward")
print(f"you predicted {predicted_alive}")
compare_memory(eight_runs, baseline="plain", title="Eight blocks", born=True)

# %% [markdown]
# One checkpoint moves the mountain from forward to backward; it does not make it lower. That takes one more idea.

# %% [markdown]
# ## 2.3 One activation per segment
#
# *difficulty 3 of 5 · importance 5 of 5 · 15 to 25 minutes · 7 points*
#
# Backward goes through the network from the end, one block at a time. It never needs all activations *at once*. So cut the n layers into
# k **segments**, give each its own checkpoint, and only the k inputs stay from forward. When backward reaches a segment, that segment's
# n/k activations come back, are used, and go before the next segment's come.
#
# At the peak you hold about **k + n/k** activations. More segments: more inputs. Fewer: longer segments. Cost: one more forward.
#
# **Predict first.** 64 blocks in 8 segments: how many MiB at the peak of activations, at 1 MiB each?

# %% nbgrader={"grade": false, "grade_id": "predict-peak", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_peak_mib = None  # your number
### BEGIN SOLUTION
predicted_peak_mib = 16
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "checkpoint-sequential", "locked": false, "schema_version": 3, "solution": true, "task": false}
def checkpoint_sequential(layers, x, segments):
    """Run `layers` on `x`, keeping one activation per segment for backward.

    layers   : list of nn.Module, each (batch, width) -> (batch, width)
    x        : (batch, width) tensor; it may require grad or not, and the layers' parameters get
               their gradients either way. x itself stays as it is
    segments : how many to make, from 1 to len(layers). None is longer than len(layers) / segments,
               rounded up; where they do not divide, a few more or fewer are fine
    Returns the output. Gradients equal the plain run's, dropout included; each layer runs forward
    at most twice. From 16 to 144 layers, in sqrt(n) segments, the peak grows like depth^0.62 at
    most, and at 144 it is at most 25% of the plain run's. One segment may run plainly, without a
    checkpoint (and take all of the remainder, as PyTorch's last one does). Use your `checkpoint`;
    `torch.utils.checkpoint` is off limits. About 8 lines.
    """
    ### BEGIN SOLUTION
    if not x.requires_grad:
        x = x.detach().requires_grad_()  # a Function records itself only when an input requires grad
    edges = [index * len(layers) // segments for index in range(segments + 1)]
    for start, end in zip(edges, edges[1:]):
        x = checkpoint(nn.Sequential(*layers[start:end]), x)
    return x
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-sequential", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("checkpointing.sequential", checkpoint_sequential)

# %% nbgrader={"grade": true, "grade_id": "exam-sequential", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("checkpointing.sequential", checkpoint_sequential, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which tensors cross the border of a segment? Only those are worth keeping.</details>
# <details><summary>Hint 2</summary>Segment i begins at layer <code>i * n // k</code>. And a Function whose inputs need no gradient is not
# recorded at all.</details>
# <details><summary>Hint 3</summary>where x needs no gradient, go on with a detached one that does (x itself stays as it is);
# for each pair of neighbouring edges: x becomes checkpoint(the layers between them as one function, x)</details>

# %% [markdown]
# The step that ran out of memory, once more, under the same budget:

# %%
def in_segments(layers, x):
    return checkpoint_sequential(layers, x, segments=8)


checkpointed = train_step(in_segments, layers, x, "64 blocks in 8 segments, half the memory", budget_bytes=budget)

# %%
before, after = baseline.peak_bytes, checkpointed.peak_bytes
print(f"peak {before / MIB:.1f} MiB before, {after / MIB:.1f} MiB after ({after / before:.0%})")
print(f"born in the step: {checkpointed.peak(born=True) / MIB:.1f} MiB at the peak")
print(f"you predicted {predicted_peak_mib} MiB of activations; gradients on their way are the rest")
both = {"plain": baseline, "8 segments": checkpointed}
compare_memory(both, baseline="plain", title="Before and after", budget_bytes=budget)

# %% [markdown]
# The teeth in backward are your segments: each one comes back whole and goes. If your Function lets go of an input once it has used
# it, every tooth stands on one input fewer than the one before.

# %% [markdown]
# ### What one more forward costs
#
# Count floating point operations: backward does two matrix products for each one of forward, so a plain step is 3 forwards. One more
# makes 4.

# %%
for name, recording in both.items():
    again = sum(op.flops for op in recording.recomputed_ops())
    print(f"{name:<11} {recording.flops() / 1e9:6.2f} GFLOP, {again / 1e9:5.2f} of them a second time")
extra = checkpointed.flops() - baseline.flops()
print(f"extra work: {extra / baseline.flops():.1%} of the plain step, "
      f"{extra / checkpointed.flops():.1%} of the new one")

# %% [markdown]
# The lecture says "roughly 25% additional compute". One more forward of everything is a third of the plain step; a quarter is what it is of
# the *new* total. Which of your two figures is near the lecture's? If your last segment runs plainly, an eighth of the extra forward is
# saved: 29% of the plain step, 23% of the new one. (And a little is added: the plain step skips the gradient of the data.)
#
# Time is not FLOPs: small operators wait for Python. Time both without the recorder.

# %%
best_s = {plain: math.inf, in_segments: math.inf}
for _ in range(3):
    for run in best_s:  # in turns, so that a busy machine is unkind to both
        started = time.perf_counter()
        run(layers, x).square().mean().backward()
        best_s[run] = min(best_s[run], time.perf_counter() - started)
print(f"plain {best_s[plain]:.3f} s, 8 segments {best_s[in_segments]:.3f} s: "
      f"{best_s[in_segments] / best_s[plain]:.2f} times the time")

# %% [markdown]
# ### Move the slider
#
# Every point is a real recording, with a quarter of the batch. Left: the peak against the number of segments. Right: memory over time
# for the number that you choose. Watch what stands at the end of forward, and how high the teeth are.

# %%
COUNTS = (1, 2, 4, 8, 16, 24, 32, 64)
small = x[: BATCH // 4].clone()


def record(run, layers, x):
    """One step of run(layers, x), recorded without drawing."""
    with Recorder(watch=[*layers, x]) as recorder:
        with recorder.phase("forward"):
            loss = run(layers, x).square().mean()
        with recorder.phase("backward"):
            loss.backward()
    return recorder.recording


def record_segments(layers, x):
    """Recordings by number of segments, and the plain one."""

    def cut_into(k):
        return lambda layers, x: checkpoint_sequential(layers, x, k)

    return {k: record(cut_into(k), layers, x) for k in COUNTS}, record(plain, layers, x)


equal_runs, equal_plain = record_segments(layers, small)
explore_segments(equal_runs, baseline=equal_plain, title="64 blocks of Linear and ReLU")

# %% [markdown]
# ## 2.4 How many segments?
#
# *difficulty 3 of 5 · importance 4 of 5 · 15 minutes · 3 points*
#
# k + n/k is least where both terms are equal: k = sqrt(n). But that counts one activation inside for one at the border. Look into the
# feed-forward half of a transformer block, `x + down(gelu(up(norm(x))))` with a hidden width of four times the outer one. Your
# `saved_bytes` tells what it keeps.

# %%
blocks = feed_forward_blocks(DEPTH, WIDTH // 2)
h = torch.randn(256, WIDTH // 2)
border, inside = h.nbytes, saved_bytes(blocks[0], h)
print(f"border {border / 1024:.0f} KiB, inside {inside / 1024:.0f} KiB: {inside / border:.1f} times")

# %% [markdown]
# **Predict first.** 64 such blocks, each of which keeps ten times its border: which number of segments gives the lowest peak?

# %% nbgrader={"grade": false, "grade_id": "predict-best", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_best = None  # segments: your number
### BEGIN SOLUTION
predicted_best = 25  # sqrt(64 * 10)
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "best-segments", "locked": false, "schema_version": 3, "solution": true, "task": false}
def best_segments(costs):
    """The number of segments with the lowest estimated peak.

    costs : one pair (border_bytes, inside_bytes) per layer: what it costs to keep the layer's
            input, and what the layer keeps for backward when it runs recording
    The segments are of equal length, give or take one. The peak is estimated as the kept inputs
    of all segments and the inside of the largest one; taking the k-th part of all insides for
    that is good enough. Returns an int from 1 to len(costs), within 5% of the lowest peak by one
    of the two estimates. About 4 lines.
    """
    ### BEGIN SOLUTION
    border = sum(cost[0] for cost in costs) / len(costs)
    inside = sum(cost[1] for cost in costs)
    best = round(math.sqrt(inside / border))  # where k * border and inside / k are equal
    return min(max(best, 1), len(costs))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-best-segments", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("checkpointing.best-segments", best_segments)

# %% nbgrader={"grade": true, "grade_id": "exam-best-segments", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("checkpointing.best-segments", best_segments, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Write the peak of k segments as a sum of two terms. What does each count?</details>
# <details><summary>Hint 2</summary>k times the border, and the inside of the longest segment: about the whole inside
# divided by k, exactly that of <code>math.ceil(n / k)</code> layers.</details>
# <details><summary>Hint 3</summary>either try every k from 1 to n and take the least, or set the two terms equal and solve for k</details>

# %%
costly_runs, costly_plain = record_segments(blocks, h)
print(f"plain {costly_plain.peak(born=True) / MIB:.1f} MiB")
print(f"best_segments says {best_segments([(border, inside)] * DEPTH)} for these blocks "
      f"and {best_segments([(1, 1)] * DEPTH)} for equal costs; you predicted {predicted_best}")
SHOWN = [k for k in COUNTS if k >= 4]  # one or two segments would dwarf the valley
u_curve(
    {k: costly_runs[k].peak(born=True) for k in SHOWN},
    predicted={k: k * border + DEPTH / k * inside for k in SHOWN},
    title="64 feed-forward blocks, ten times the border inside",
)

# %% [markdown]
# The dotted curve is the formula, the other one was measured. Compare with the network of equal costs: its valley is at 8.

# %%
u_curve(
    {k: equal_runs[k].peak(born=True) for k in SHOWN},
    predicted={k: (k + DEPTH / k) * small.nbytes for k in SHOWN},
    title="64 blocks of Linear and ReLU, as much inside as at the border",
)

# %% [markdown]
# ## 2.5 Extension: a plan for unequal layers
#
# *difficulty 4 of 5 · importance 2 of 5 · 20 minutes · 1 point*
#
# In a real network layers differ: early ones of a convolutional network have large borders, late ones large insides. Then equal lengths
# are not best. Find the lengths with the lowest peak of all, and say whether they fit a budget.

# %% nbgrader={"grade": false, "grade_id": "best-plan", "locked": false, "schema_version": 3, "solution": true, "task": false}
def best_plan(costs, budget):
    """Segment lengths with the lowest estimated peak, or None if even that exceeds `budget`.

    costs : one pair (border_bytes, inside_bytes) per layer, whole numbers, at most 12 layers
    The peak of a plan: the borders of the first layers of all segments, and the largest sum of
    insides of one segment. Returns a list of lengths that add up to len(costs). About 10 lines.
    """
    ### BEGIN SOLUTION
    def peak(lengths):
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        borders = sum(costs[start][0] for start in starts[:-1])
        return borders + max(sum(inside for _, inside in costs[a:b]) for a, b in zip(starts, starts[1:]))

    plans = [[1]]
    for _ in costs[1:]:  # each further layer begins a segment or joins the last one
        plans = [new for plan in plans for new in ([*plan, 1], [*plan[:-1], plan[-1] + 1])]
    best = min(plans, key=peak)
    return best if peak(best) <= budget else None
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-plan", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("checkpointing.plan", best_plan)

# %% [markdown]
# <details><summary>Hint 1</summary>Between two neighbouring layers there is a border or there is none. How many plans are that for 12
# layers?</details>
# <details><summary>Hint 2</summary><code>itertools.product((False, True), repeat=n - 1)</code> lists them all. For long networks: fix a limit
# for the inside, then find the cheapest borders under it by dynamic programming.</details>
# <details><summary>Hint 3</summary>for each choice of borders: lengths, peak; keep the least; compare with the budget</details>

# %% [markdown]
# ## 2.6 Extension: run again only what is cheap
#
# *difficulty 3 of 5 · importance 3 of 5 · 15 minutes · 1 point*
#
# Layers also differ in how long they take. A dropout or GELU keeps many bytes and is quick to run again; a large matrix product keeps few
# for its time. **Selective** checkpointing runs only the cheap ones again, until the rest fits.

# %% nbgrader={"grade": false, "grade_id": "select-layers", "locked": false, "schema_version": 3, "solution": true, "task": false}
def select_layers(costs, budget):
    """Which layers to run again, so that what the others keep fits the budget.

    costs  : one pair (kept_bytes, seconds) per layer, at most 13
    budget : bytes for the layers that are not run again
    Returns a list of indices. Their seconds are within a quarter of the least possible, or no
    more than if you choose one layer after the other in the best fixed order. About 6 lines.
    """
    ### BEGIN SOLUTION
    kept, chosen = sum(nbytes for nbytes, _ in costs), []
    for index in sorted(range(len(costs)), key=lambda index: costs[index][1] / costs[index][0]):
        if kept <= budget:
            break
        chosen.append(index)
        kept -= costs[index][0]
    return chosen
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-select", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("checkpointing.select", select_layers)

# %% [markdown]
# <details><summary>Hint 1</summary>Which layer gives back the most bytes for a second of running again?</details>
# <details><summary>Hint 2</summary>Sort by seconds per byte.</details>
# <details><summary>Hint 3</summary>take layers in that order until the bytes of the others fit</details>

# %% [markdown]
# ## 2.7 Extension: checkpoints inside checkpoints
#
# *difficulty 5 of 5 · importance 2 of 5 · 20 minutes · 1 point*
#
# While a segment runs again, it is a chain of layers like the whole network. So treat it like one: checkpoint its first half, and inside that
# the first half of the half. What is alive at the peak falls to about log2(n) activations; each layer now runs up to log2(n) times more.

# %% nbgrader={"grade": false, "grade_id": "checkpoint-recursive", "locked": false, "schema_version": 3, "solution": true, "task": false}
def checkpoint_recursive(layers, x):
    """Run `layers` on `x` with a number of activations alive that grows like log2(len(layers)).

    layers : list of nn.Module, at least one; x : (batch, width) tensor that requires grad
    Gradients equal the plain run's. From 16 to 144 layers, the peak grows like depth^0.3 at most
    (sqrt(n) has 0.4 and more). On average a layer runs forward at most log2(n) + 2 times.
    Use your `checkpoint`. About 5 lines.
    """
    ### BEGIN SOLUTION
    if len(layers) == 1:
        return layers[0](x)
    half = len(layers) // 2
    middle = checkpoint(lambda h: checkpoint_recursive(layers[:half], h), x)
    return checkpoint_recursive(layers[half:], middle)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-recursive", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("checkpointing.recursive", checkpoint_recursive)

# %% [markdown]
# <details><summary>Hint 1</summary>A function that checkpoints a part of its layers may call itself for that part.</details>
# <details><summary>Hint 2</summary>Checkpoint the first half; the second half needs no checkpoint around it, only inside it.</details>
# <details><summary>Hint 3</summary>one layer: run it; otherwise: middle is checkpoint(recursion on the first half, x), return the recursion
# on the second half of middle</details>

# %% [markdown]
# ## Paper scale: 1,000 layers
#
# The paper's headline: a residual network of 1,000 layers on 32 images of 224 x 224, in 7 GB instead of 48. Inside `paper_scale()` tensors
# have sizes and no numbers: your code runs as it is, and the recorder counts bytes that nobody allocates.
#
# The network comes as 335 blocks. **Predict first**: with sqrt(335), about 18 segments, do you meet the paper's 7 GB?

# %%
from labkit.paper import PaperScaleError, paper_scale
from labkit.resnets import deep_resnet

GB = 1e9  # as the paper counts
try:
    with paper_scale():
        deep, images = deep_resnet(), torch.randn(32, 3, 224, 224)
        block, middle = deep[200], torch.randn(32, 1024, 14, 14)  # one block, and what goes into it
        border, inside = middle.nbytes, saved_bytes(block, middle)
        print(f"a block's border {border / GB:.3f} GB, inside {inside / GB:.3f} GB: {inside / border:.1f} times")
        print(f"plain: {record(plain, deep, images).peak_bytes / GB:.1f} GB at the peak (paper: 48)")
except PaperScaleError as error:
    print(error)  # costs no points: your code asked for numbers, which are not there

# %%
try:
    with paper_scale():
        for name, segments in {"sqrt(n)": 18, "best_segments": round(best_segments([(border, inside)] * len(deep)))}.items():
            for layer in deep:
                layer.zero_grad()
            deep_peak = record(lambda layers, x: checkpoint_sequential(layers, x, segments), deep, images).peak_bytes
            print(f"{segments} segments by {name}: {deep_peak / GB:.2f} GB at the peak (paper: 7)")
except PaperScaleError as error:
    print(error)

# %% [markdown]
# These peaks include weights and gradients, 1.1 GB each. Plain, we are a little above the paper, which does not tell how its 1,000 layers
# spread over the four stages of the network; `deep_resnet`'s docstring says what we took, and what other choices cost.
#
# Try 56 segments: 4.4 GB. Early blocks are larger than late ones, and when backward comes to them, most borders are gone: your estimate
# counts all of them.

# %% [markdown]
# ## Reflection
#
# The lecture asks: *how does choosing a checkpoint interval of sqrt(n) lead to O(sqrt(n)) memory cost, and what is the compute trade-off?*
# Answer it for your own measurements, in four to eight sentences. Use (a) the number of segments at the bottom of each of your two
# measured curves in 2.4 and why they differ, (b) your measured extra FLOPs and your measured extra time, and why those two are not the
# same, (c) the number of segments that you would choose for 100 blocks that each keep 30 times their border.
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-sqrt", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) names both measured minima (about 8, and 22 to 32), and says that k borders + n/k insides balance at k = sqrt(n)
# only when inside equals border, at sqrt(10 n) when it is ten times; (b) gives measured FLOPs (a third of the plain step, a quarter of the
# new total, or the learner's own figures) and a measured time ratio, with a reason for the difference (operators that wait for Python or
# memory and not for arithmetic, recomputation without the loss, noise); (c) sqrt(3000), about 55. **1**: two of the three, or all without a
# measured number. **0**: restates the lecture.
#
# *Example.* My curves were lowest at 8 and at 32 segments. With k segments of n blocks I keep k borders and, while a segment runs again,
# n/k insides. For Linear and ReLU both are one activation, so k = sqrt(64) = 8; a feed-forward block holds ten, so the second term weighs
# ten times as much and k moves to sqrt(640), about 25. Running again cost me 34% more FLOPs, and 1.25 times the time: part of a step
# is overhead that does not grow with FLOPs. For 100 blocks at 30 times the border I take sqrt(3000), about 55 segments.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **PyTorch**: `torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)`. The reentrant kind is your Function; the other kind
#   uses the hooks of 2.1, and stops the second run as soon as it has what it needs. `preserve_rng_state` is your snapshot.
#   `checkpoint_sequential` leaves its last segment plain and gives it all of the remainder.
# - **Hugging Face**: `model.gradient_checkpointing_enable()`, one segment per transformer block. **DeepSpeed** and **Megatron**:
#   *activation checkpointing*, *recompute*; Megatron's selective kind runs again only attention's core.
# - **torchtitan**: `selective` by operator or every k-th layer. **JAX**: `jax.checkpoint`, or `remat`, with a policy.
#
# None of them knows your number of segments. BatchNorm counts a batch twice in all of them unless it is told not to.

# %% [markdown]
# ## On a card
#
# With an NVIDIA card the same code runs there, and the allocator confirms the bytes. Without one this cell says so.

# %%
if torch.cuda.is_available():
    card, name = torch.device("cuda"), torch.cuda.get_device_name()
    on_card, data = [layer.to(card) for layer in relu_blocks(DEPTH, 1024)], torch.randn(8192, 1024, device=card)
    for title, run in {"plain": plain, "8 segments": in_segments}.items():
        run(on_card, data).square().mean().backward()  # warm
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(on_card, data).square().mean().backward()
        end.record()
        torch.cuda.synchronize()
        forwards = 3 if run is plain else 4
        flops_per_s = forwards * 2 * DEPTH * 8192 * 1024 * 1024 / (start.elapsed_time(end) / 1000)
        print(f"{name}, torch {torch.__version__}, {title}: peak "
              f"{torch.cuda.max_memory_allocated() / MIB:.0f} MiB, "
              f"{8192 / start.elapsed_time(end) * 1000:.3g} rows/s, {flops_per_s / 1e12:.1f} TFLOP/s")
else:
    print(f"no card here (torch {torch.__version__}): everything above ran on the CPU")

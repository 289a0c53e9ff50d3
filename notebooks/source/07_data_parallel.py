# ---
# labkit: {lab: "07", slug: data_parallel, title: "Data parallel: hide the communication", minutes: 110, difficulty: 4, points: 23, cards: 0, needs: ["06"]}
# ---

# %% [markdown]
# # 07 · Data parallel: hide the communication
#
# *about 110 minutes · difficulty 4 of 5 · 23 points · any machine, no card needed*
#
# Two workers share a batch, and after every backward pass they have to agree on a gradient. If they first compute and then talk, each waits for
# the wire. When you are done, your own wrapper sends gradients *while* backward still computes others. On a slow wire it hides **at least
# 70% of the communication that could be hidden**, around any module, without a change to the module's code.
#
# This is PyTorch's DistributedDataParallel, by Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*.

# %% [markdown]
# ## Recap: all-reduce in five lines
#
# 1. W **ranks** (processes) run the same function. Each learns of the others only what arrives in messages.
# 2. `dist.all_reduce(x)` leaves the sum of all ranks' x in x, on every rank, with the same bits.
# 3. It is a **collective**: all ranks must call it, in the same order, with tensors of the same size. If one rank calls two of them the other
#    way round, the wrong tensors meet, or all stand still.
# 4. `work = dist.all_reduce(x, async_op=True)` returns at once. Until `work.wait()` has returned, x belongs to the message: don't touch it.
# 5. A ring sends 2(W - 1)/W of the tensor per rank, and each call costs latencies, however small the tensor is.
#
# One more: `dist.broadcast(x, 0)` copies rank 0's x into the x of all others.

# %%
import time
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit import Recorder, check, run_ranks
from labkit.figures import step_lanes
from labkit.ranks import Link
from labkit.replicas import measure_steps
from labkit.widgets import explore

KB, MB = 1000, 1_000_000


# %% [markdown]
# ## The baseline: two workers that do not talk
#
# **Data parallelism**: every rank holds a **replica**, a whole copy of the model, and computes on its own part of the batch. Here are two ranks that
# do just that, and no more. Each takes three steps on its own data. Are they still replicas?

# %%
def small_model():
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))


def drift(wrap, steps=3):
    """Train on this rank's own data; returns all the weights as one vector after each step."""
    torch.manual_seed(dist.get_rank())
    model = small_model()
    replica, weights = wrap(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        replica(torch.randn(8, 20)).square().mean().backward()
        replica.finish()
        optimizer.step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return weights


class Alone:
    """A wrapper that does nothing."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish(self):
        pass


def tell_drift(wrap):
    ours, theirs = run_ranks(drift, 2, wrap).values
    for step, (a, b) in enumerate(zip(ours, theirs), 1):
        print(f"after step {step}: largest difference between the ranks' weights {(a - b).abs().max():.3g}")


tell_drift(Alone)

# %% [markdown]
# They were different from the start, because each rank drew its own random weights, and different gradients would take them apart anyway. So you
# need three things: different data, equal weights at the start, equal gradients in every step. Then equal optimizers do equal things,
# and the weights stay equal without ever being sent again.
#
# What you build in this lab is in PyTorch as `DistributedDataParallel` and `DistributedSampler`. These two are off limits in your answers.
# `dist.all_reduce` and `dist.broadcast` are yours now.

# %% [markdown]
# ## 7.1 Who reads what
#
# *difficulty 2 of 5 · importance 4 of 5 · 15 to 20 minutes · 3 points · any machine*
#
# In an **epoch** all samples are visited, each by one rank. No message is needed to agree on who reads what: all ranks draw the same
# order, and each takes its share. But the order must not come from PyTorch's global generator. Ranks seed that one differently, so that
# their dropout differs.
#
# When W does not divide n, a fair share is not a whole number. A rank with one batch more would wait for the others in an all-reduce, for
# ever. So all take equally many, and a few samples come twice.
#
# **Predict first.** 10 samples on 4 ranks: how many does each rank read per epoch?

# %% nbgrader={"grade": false, "grade_id": "predict-shard", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_shard = None  # your number
### BEGIN SOLUTION
predicted_shard = 3  # 10 / 4, rounded up
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "shard-indices", "locked": false, "schema_version": 3, "solution": true, "task": false}
def shard_indices(n, rank, world, epoch):
    """The samples that one rank visits in one epoch, in order.

    n     : number of samples, 1 or more (may be fewer than world); they are numbered from 0
    rank  : 0 to world - 1. Ranks do not talk: what all of them return must fit together
    epoch : 0, 1, 2, ...
    Returns ceil(n / world) whole numbers, as a list or a 1-D tensor: equally many on every rank.

    Over all ranks together, every sample comes at least once, and none more than one time more
    often than another: where world does not divide n, a few come a second time to fill up.
    In random order; another one in each epoch, so that a rank's samples change, too. The same
    arguments give the same answer, whatever the global generators' seeds are; leave those as they
    are. No DistributedSampler, no messages. About 5 lines.
    """
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(n, generator=generator).tolist()
    each = -(-n // world)  # rounded up
    order = (order * world)[: each * world]  # the first few once more
    return order[rank::world]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-shard", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data_parallel.shard", shard_indices)

# %% nbgrader={"grade": true, "grade_id": "exam-shard", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("data_parallel.shard", shard_indices, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which of the arguments may the random order depend on, if all ranks are to draw the same one?</details>
# <details><summary>Hint 2</summary><code>torch.Generator().manual_seed(...)</code> makes a generator of your own, and
# <code>torch.randperm(n, generator=...)</code> draws from it.</details>
# <details><summary>Hint 3</summary>shuffle 0 to n - 1 by a generator seeded with the epoch; repeat the beginning until the length is a multiple
# of world; take every world-th, from rank on</details>

# %%
for epoch in range(2):
    shards = [list(map(int, shard_indices(10, rank, 4, epoch))) for rank in range(4)]
    print(f"epoch {epoch}: {shards}")
print(f"each rank reads {len(shards[0])}; you predicted {predicted_shard}")

# %% [markdown]
# ## 7.2 The same start
#
# *difficulty 1 of 5 · importance 5 of 5 · 10 minutes · 3 points · any machine*
#
# Seeding all ranks alike would give equal weights, if nobody ever draws one number more than the others. Copying is certain: rank 0's
# weights go to everybody.
#
# A module holds more than weights. **Buffers** are tensors that it keeps without training them, such as the running mean and variance of
# BatchNorm.
#
# **Predict first.** `nn.BatchNorm2d(6)` has 2 parameters. How many buffers has it?

# %% nbgrader={"grade": false, "grade_id": "predict-buffers", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_buffers = None  # your number
### BEGIN SOLUTION
predicted_buffers = 3  # running mean, running variance, number of batches
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "broadcast-state", "locked": false, "schema_version": 3, "solution": true, "task": false}
def broadcast_state(module):
    """Give every rank's module the values of rank 0's. In place.

    module : any nn.Module, built alike on all ranks, with values of each rank's own
    Afterwards every parameter (frozen ones, too) and every buffer holds what rank 0's does, on
    every rank. They stay the same tensors: an optimizer that holds them must not notice.
    Nothing changes on rank 0. What you return is ignored.

    Use dist.broadcast. It works for one rank, too. About 3 lines.
    """
    ### BEGIN SOLUTION
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, 0)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-broadcast", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data_parallel.broadcast", broadcast_state)

# %% nbgrader={"grade": true, "grade_id": "exam-broadcast", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("data_parallel.broadcast", broadcast_state, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>What is in <code>module.state_dict()</code> besides parameters?</details>
# <details><summary>Hint 2</summary><code>module.parameters()</code> and <code>module.buffers()</code> name each tensor once. Autograd must not
# see that you write into a parameter: <code>torch.no_grad()</code>.</details>
# <details><summary>Hint 3</summary>without gradients: for each parameter, and for each buffer: broadcast it from rank 0</details>

# %%
def sent_at_start():
    with Recorder() as recorder:
        broadcast_state(nn.BatchNorm2d(6))
    return [row.payload_bytes for row in recorder.recording.comm("broadcast")]


sizes = run_ranks(sent_at_start, 2).values[0]
print(f"{len(sizes)} broadcasts of {sizes} bytes: 2 parameters and {len(sizes) - 2} buffers; you predicted {predicted_buffers}")

# %% [markdown]
# ## 7.3 The same gradient
#
# *difficulty 2 of 5 · importance 5 of 5 · 15 minutes · 3 points · any machine*
#
# The loss of a batch is a mean over its samples. With equal shares its gradient is the mean of the ranks' gradients: their sum, divided
# by W.
#
# Two traps. A rank may have used only a part of the model in this step. Then some gradients are None there, but the other ranks are in
# their all-reduce, and wait. And a **frozen** parameter (`requires_grad` is False) needs no message at all.
#
# **Predict first.** The small model from above has two linear layers, 20 to 30 and 30 to 1, with biases. How many bytes of gradients is that, in
# float32?

# %% nbgrader={"grade": false, "grade_id": "predict-bytes", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_bytes = None  # your number
### BEGIN SOLUTION
predicted_bytes = 4 * (20 * 30 + 30 + 30 + 1)  # 2644
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "average-gradients", "locked": false, "schema_version": 3, "solution": true, "task": false}
def average_gradients(module):
    """Replace every gradient by its mean over the ranks. Called after backward.

    module : any nn.Module, alike on all ranks, after a backward on each rank's own data
    Afterwards p.grad is the mean over the ranks, for every trainable parameter p, with the same
    bits on all ranks. A rank where p.grad is None counts as zeros, and has the mean afterwards.
    (Where it is None on all ranks, None and zeros are both fine.) Parameters do not change.
    A gradient may be a new tensor or the old one.

    Use dist.all_reduce, at most once per trainable parameter, and send nothing for frozen ones.
    About 6 lines.
    """
    ### BEGIN SOLUTION
    for p in module.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-average", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data_parallel.average", average_gradients)

# %% nbgrader={"grade": true, "grade_id": "exam-average", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("data_parallel.average", average_gradients, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>What does a rank send for a parameter that it did not use?</details>
# <details><summary>Hint 2</summary><code>torch.zeros_like(p)</code> is a gradient that adds nothing. <code>dist.all_reduce</code> sums in
# place, and does not divide.</details>
# <details><summary>Hint 3</summary>for each parameter that requires a gradient: if it has none, give it zeros; sum over ranks; divide by the
# number of ranks</details>

# %%
class AfterBackward(Alone):
    """The plain version: your two functions, nothing else."""

    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)

    def finish(self):
        average_gradients(self.module)


tell_drift(AfterBackward)


def payload(recording):
    """How many all-reduces, and bytes of the tensors in them."""
    rows = recording.comm("all_reduce")
    return len(rows), sum(row.payload_bytes for row in rows)


def one_finish():
    model = AfterBackward(small_model())
    model(torch.randn(8, 20)).sum().backward()
    with Recorder() as recorder:
        model.finish()
    return payload(recorder.recording)


count, nbytes = run_ranks(one_finish, 2).values[0]
print(f"per step {count} all-reduces, {nbytes} bytes of gradients; you predicted {predicted_bytes}")

# %% [markdown]
# That is data parallelism, and it is right: the replicas stay equal to the last bit. Now look at what it costs on a slow wire. `Link` is a
# *simulated* one: messages take the time that its bandwidth says, and no processor. The model is an ordinary chain of twelve linear layers.

# %%
LINK, WIDTH, LAYERS, ROWS = Link(80e6, 0.5e-3), 256, 12, 1024


def chain():
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def measure(wraps, link=LINK, steps=4):
    """The fastest of some steps of each wrapper, taken by turns in the same two ranks: forward, backward, finish, optimizer."""
    told = measure_steps(wraps, chain, (ROWS, WIDTH), link=link, steps=steps)
    return {name: min(runs, key=lambda step: step.seconds) for name, runs in told.items()}


plain = measure({"alone": Alone, "after backward": AfterBackward})
for name, step in plain.items():
    begin, end = step.backward[0]
    print(f"{name:<15} {1000 * step.seconds:4.0f} ms per step (simulated wire), of it backward {1000 * (end - begin):3.0f} ms on rank 0")
step_lanes({"after backward": plain["after backward"].recordings}, title="First compute, then talk")

# %% [markdown]
# A large part of the picture shows ranks that wait. But look at when the gradients were ready: the last layer's was there before backward had even
# looked at the other eleven.

# %% [markdown]
# ## 7.4 Send while backward computes
#
# *difficulty 4 of 5 · importance 5 of 5 · 30 to 40 minutes · 6 points · any machine*
#
# Backward goes from the last layer to the first, and says for each parameter when its gradient is complete:
# `p.register_post_accumulate_grad_hook(f)` calls `f(p)` then. (`f` gets the *parameter*. The gradient is `p.grad`.) That is the moment to
# start an all-reduce with `async_op=True`, and to let backward go on. Somebody has to wait for it in the end: `finish()`.
#
# One message per parameter pays the latency each time. So gradients are collected in **buckets** of about `bucket_bytes`: flat tensors, each
# sent when all its gradients are there.

# %% [markdown]
# Now the trap. All ranks must call their collectives in the same order, and a bucket may never fill up: on some rank a branch of the
# model was not used. So the order is fixed beforehand, and a bucket that is full waits for its turn. Backward uses the parameters about in
# the reverse order of `module.parameters()`, so that is the order to choose. What is left when backward is over, `finish()` sends, with zeros for
# what is missing.
#
# **Predict first.** The chain has 12 layers of 263 KB each. With buckets of 600 KB, how many all-reduces does a step make?

# %% nbgrader={"grade": false, "grade_id": "predict-buckets", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_buckets = None  # your number
### BEGIN SOLUTION
predicted_buckets = 6  # two layers fit in a bucket
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "data-parallel", "locked": false, "schema_version": 3, "solution": true, "task": false}
class DataParallel:
    """A replica of a module on every rank, whose gradients are averaged while backward computes.

    DataParallel(module, bucket_bytes=1_000_000)
        module : any nn.Module, built alike on all ranks. Starts from rank 0's parameters and
                 buffers. Its parameters stay the same tensors; its code does not change
    replica(*args, **kwargs) : what the module returns for them
    replica.finish() : called on every rank after every backward, before optimizer.step(). Afterwards
        p.grad is the mean over the ranks for every trainable parameter, as in 7.3 (where it is None
        counts as zeros), with the same bits everywhere. Ready for the next step, and nothing of this
        one is kept but gradients and buckets.

    In backward, hooks start dist.all_reduce(..., async_op=True) as buckets fill, and wait for nothing:
    the first before the last gradient is there, on every rank that uses all its parameters.
    A bucket holds gradients of one dtype, together bucket_bytes or as near as the parameters let it:
    it may end before the parameter that would be too much, or with it. So a larger one stands
    alone, or last. Every gradient is sent once, and nothing for frozen ones.
    Gradients may be new tensors, or views of a bucket; zero_grad may keep them or set them to None.
    About 30 lines.
    """

    ### BEGIN SOLUTION
    def __init__(self, module, bucket_bytes=1_000_000):
        self.module = module
        broadcast_state(module)
        self.buckets, self.home, room = [], {}, 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if not self.buckets or p.nbytes > room or p.dtype != self.buckets[-1][0].dtype:
                self.buckets.append([])
                room = bucket_bytes
            self.buckets[-1].append(p)
            self.home[p] = len(self.buckets) - 1
            room -= p.nbytes
            p.register_post_accumulate_grad_hook(self.ready)
        self.reset()

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def reset(self):
        self.order = list(range(len(self.buckets)))  # buckets still to be sent
        self.missing = [len(bucket) for bucket in self.buckets]
        self.flying = []

    def ready(self, p):
        self.missing[self.home[p]] -= 1
        while self.order and self.missing[self.order[0]] == 0:
            self.launch(self.order.pop(0))

    def launch(self, number):
        bucket = self.buckets[number]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        flat /= dist.get_world_size()
        self.flying.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for number in self.order:
            self.launch(number)
        for bucket, flat, work in self.flying:
            work.wait()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p)
        self.reset()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-overlap", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("data_parallel.overlap", DataParallel)

# %% nbgrader={"grade": true, "grade_id": "exam-overlap", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("data_parallel.overlap", DataParallel, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>What must you know of a bucket to decide that it can go? And what must be as at the beginning when the next
# backward starts?</details>
# <details><summary>Hint 2</summary>Parameters can be keys of a dict: parameter -> its bucket. <code>torch.cat</code> of flattened gradients is a
# bucket's tensor; <code>split</code> and <code>view_as</code> take it apart. Divide before you send, or after the wait.</details>
# <details><summary>Hint 3</summary>hook: one gradient less is missing in its bucket; while the next bucket in the order is complete, send it.
# finish: send the buckets that are left, zeros for None; wait for each; put the parts back as gradients; reset counters and lists.</details>

# %%
tell_drift(DataParallel)
in_buckets = partial(DataParallel, bucket_bytes=600 * KB)
theirs = partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=0.5)  # PyTorch's own; it ends a bucket with the layer that is too much
runs = measure({"alone": Alone, "after backward": AfterBackward, "overlapped": in_buckets, "PyTorch's own": theirs})
for name, step in runs.items():
    print(f"{name:<15} {1000 * step.seconds:4.0f} ms per step (simulated wire), {step.messages()[0]:2} all-reduces")
print(f"you predicted {predicted_buckets} all-reduces")
step_lanes({name: runs[name].recordings for name in ("after backward", "overlapped")}, title="The same step twice")

# %% [markdown]
# Two things have changed: there are fewer messages, which pay fewer latencies, and they start earlier. How much is hidden? The recording
# knows when messages were on the wire. No more of that can be hidden than there is, and no more than backward lasts.

# %%
for name in ("after backward", "overlapped"):
    wire, backward, during = runs[name].hidden()  # of the rank that ends backward last: messages wait for it
    print(f"{name}: {1000 * wire:.0f} ms on the wire, backward {1000 * backward:.0f} ms; hidden {1000 * during:.0f} ms, "
          f"{during / min(wire, backward):.0%} of what could be (simulated wire)")

# %% [markdown]
# The last bucket can never be hidden: backward is over when its gradients are there. Small buckets make that rest short, and each costs latencies.
# Move the controls. Which size is best on a fast link, and which on one with less bandwidth than backward has time for?

# %%
SIZES, RATES = [60 * KB, 600 * KB, 4 * MB], [20, 80, 320]
swept = {
    rate: measure({size: partial(DataParallel, bucket_bytes=size) for size in SIZES}, Link(rate * 1e6, 2e-3), steps=1) for rate in RATES
}


def one_step(bucket_KB, MB_per_s):
    step = swept[MB_per_s][bucket_KB * KB]
    return step_lanes({f"{1000 * step.seconds:.0f} ms per step": step.recordings}, title=f"Buckets of {bucket_KB} KB")


explore(
    {"bucket_KB": [size // KB for size in SIZES], "MB_per_s": RATES}, one_step,
    start={"bucket_KB": 600, "MB_per_s": 80}, title="Buckets and bandwidth",
)  # fmt: skip

# %% [markdown]
# ## 7.5 Steps without messages
#
# *difficulty 3 of 5 · importance 4 of 5 · 15 minutes · 3 points · any machine*
#
# A large batch can be taken in several pieces, each with its own backward: `.grad` adds up what they bring. Only the sum has to be
# averaged over the ranks. So for all pieces but the last, the hooks should stay quiet:
#
#     with replica.no_sync():
#         loss(replica(x1)).backward()      # sends nothing
#     loss(replica(x2)).backward()          # sends the sum of both
#     replica.finish()
#
# **Predict first.** 4 pieces per step, one of them outside `no_sync`: what part of the bytes is sent, against averaging after each piece?

# %% nbgrader={"grade": false, "grade_id": "predict-no-sync", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_part = None  # your number, between 0 and 1
### BEGIN SOLUTION
predicted_part = 0.25
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "accumulating", "locked": false, "schema_version": 3, "solution": true, "task": false}
class Accumulating(DataParallel):
    """Your DataParallel, with no_sync. (You may change DataParallel for it, and run its cell again.)

    with replica.no_sync(): pieces whose forward and backward are inside send nothing; their
    gradients add up in .grad. Other replicas are not concerned.
    Afterwards all is as before, also when an exception leaves the context: the next backward and
    finish() average all that is in .grad. That includes parameters that this last backward does
    not use, but one inside no_sync did. finish() is not called inside.
    About 8 lines.
    """

    ### BEGIN SOLUTION
    quiet = False

    @contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def ready(self, p):
        if not self.quiet:
            super().ready(p)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-no-sync", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data_parallel.no-sync", Accumulating)

# %% nbgrader={"grade": true, "grade_id": "exam-no-sync", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("data_parallel.no-sync", Accumulating, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which method of yours decides to send? What should it know?</details>
# <details><summary>Hint 2</summary><code>contextlib.contextmanager</code> turns a function with one <code>yield</code> into a context manager. What
# stands in <code>finally</code> runs after an exception, too.</details>
# <details><summary>Hint 3</summary>no_sync: set a flag; try: yield; finally: clear it. The hook: if the flag is set, return without counting.</details>

# %%
def four_pieces(quiet):
    replica = Accumulating(small_model())
    with Recorder() as recorder:
        for piece in range(4):
            if quiet and piece < 3:
                with replica.no_sync():
                    replica(torch.randn(2, 20)).sum().backward()
            else:
                replica(torch.randn(2, 20)).sum().backward()
                replica.finish()
    return payload(recorder.recording)


(_, each), (_, once) = (run_ranks(four_pieces, 2, quiet).values[0] for quiet in (False, True))
print(f"averaged after each of 4 pieces: {each} bytes; with no_sync: {once}, {once / each:.2f} of it; you predicted {predicted_part}")

# %% [markdown]
# ## When shares are unequal
#
# The mean of the ranks' means is the batch's mean only where all have equally many samples. Two ranks with 2 and 6 rows: what must each rank's
# loss be multiplied by, so that the mean over the ranks comes out right?

# %%
def gradient(weighted):
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.arange(8.0).reshape(8, 1)
    mine = data[:2] if rank == 0 else data[2:]
    rows = torch.tensor(float(len(mine)))
    dist.all_reduce(rows)  # of all ranks together
    model = nn.Linear(1, 1)
    replica = DataParallel(model)
    loss = replica(mine).mean()
    (loss * (world * len(mine) / rows) if weighted else loss).backward()
    replica.finish()
    return model.weight.grad.item()


print(f"one process, 8 rows: {torch.arange(8.0).mean():.2f}; mean of the ranks' means: {run_ranks(gradient, 2, False).values[0]:.2f}; "
      f"each weighted by W times its share of the rows: {run_ranks(gradient, 2, True).values[0]:.2f}")

# %% [markdown]
# The wrapper divides by W, and the factor W undoes that. The same holds for tokens in sentences of different lengths.
#
# Two more habits: clip gradients after `finish()`, because only then all ranks clip the same gradient; and never let one rank alone decide to skip a
# step.

# %% [markdown]
# ## 7.6 Extension: what the next forward needs first
#
# *difficulty 4 of 5 · importance 3 of 5 · 20 to 25 minutes · 3 points · any machine*
#
# On a wire much slower than backward, buckets queue up, and the first layer's comes last. But the next forward begins with the first layer. Were
# its gradient there, the optimizer could update it, and forward could begin while the last layers' gradients still travel.
#
# So give the wire something to do during backward, and no more: the first `ahead` buckets. Once backward is over, send the others in the
# order in which forward needs them. A count is a rule that all ranks follow alike. "Whatever is most urgent when the wire is free" is not: ranks
# would see different moments.

# %% nbgrader={"grade": false, "grade_id": "prioritized", "locked": false, "schema_version": 3, "solution": true, "task": false}
class Prioritized(Accumulating):
    """Your Accumulating, which sends first what the next forward needs first.

    Prioritized(module, bucket_bytes=1_000_000, ahead=2)
        ahead : how many buckets are sent from hooks in backward: the first ones in the order of 7.4,
                as before. 0: none
    finish() starts the others, in the order in which forward needs them (that of
    module.parameters()), and then waits. The last ones in forward go out last.
    All else is as in 7.4 and 7.5. On every rank the same order, whatever it used. About 8 lines.
    """

    ### BEGIN SOLUTION
    def __init__(self, module, bucket_bytes=1_000_000, ahead=2):
        self.ahead = ahead
        super().__init__(module, bucket_bytes)

    def reset(self):
        super().reset()
        self.held = self.order[self.ahead :][::-1]
        self.order = self.order[: self.ahead]

    def finish(self):
        self.order += self.held
        super().finish()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-priority", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data_parallel.priority", Prioritized)

# %% nbgrader={"grade": true, "grade_id": "exam-priority", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("data_parallel.priority", Prioritized, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>In which order do your buckets stand, and which of them does the next forward need first?</details>
# <details><summary>Hint 2</summary>Keep two lists: what hooks may send, and what is held back.</details>
# <details><summary>Hint 3</summary>reset: the first ahead buckets are for the hooks; the others, turned round, are held. finish: what hooks have not
# sent, then what is held, then wait for all.</details>

# %%
ordered = measure(
    {"as they come": in_buckets, "needed first": partial(Prioritized, bucket_bytes=600 * KB, ahead=2)}, Link(15e6, 0.5e-3), steps=2
)
for name, step in ordered.items():
    later = max(range(2), key=lambda rank: step.backward[rank][1])
    rows, over = step.recordings[later].comm("all_reduce"), step.backward[later][1]
    first = rows[-1] if name == "as they come" else rows[2]  # the first layers' bucket
    print(f"{name}: the first layers' gradients are there {1000 * (first.end_s - over):.0f} ms after backward, "
          f"the last message {1000 * (rows[-1].end_s - over):.0f} (simulated wire)")
step_lanes({name: step.recordings for name, step in ordered.items()}, title="A slow wire: which bucket comes when")

# %% [markdown]
# The step takes as long as before, because `finish()` waits for everything. What you have gained is room: an optimizer that updates layer by layer, and a
# forward that waits only for the layer that it needs, could start that much earlier.

# %% [markdown]
# ## Reflection
#
# Why does overlapping communication with computation matter for the speed of data-parallel training? Answer in four to eight sentences, from
# your own measurements: (a) How long were backward, the communication on the wire and the step, with and without overlap, and what part was hidden? (b) What
# was left, and which bucket is it? (c) On a link with a quarter of the bandwidth, what would overlap gain, and what could help that
# overlap cannot?
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-overlap", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) own figures of both steps, and the hidden share: time on the wire during backward over the smaller of wire and backward; (b) the
# last bucket, that of the first layers, since backward is over when it is ready (plus latency), with its time from the picture or as bytes over
# bandwidth; (c) communication then exceeds backward: at most backward's time can be hidden, and the wire is the limit; fewer bytes per sample
# help (no_sync over several pieces, 16-bit gradients, larger batches), or starting the next forward early (priority). **1**: two of the three,
# or all without measured numbers. **0**: restates the lecture.
#
# *Example (your figures will differ).* Backward took 52 ms and the messages 45 ms. After backward my step took 125 ms, overlapped 84: 37 of the 45 ms, 82%, were
# on the wire while backward computed. What is left is the sixth bucket, two first layers, 526 KB, 8 ms at 80 MB/s, and some work of the processor for the
# copies. With 20 MB/s the wire takes 170 ms, and at most the 52 ms of backward can be hidden; the step is bound by the wire. Then I would send less
# often, four pieces per step with no_sync, or in 16 bits.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **PyTorch**: `DistributedDataParallel(module, bucket_cap_mb=25)`. The first bucket is smaller (1 MiB), so that the wire starts early; buckets are laid out anew
#   after the first step, in the order in which gradients really came. `find_unused_parameters=True` looks for what a forward did not use: without it,
#   DDP stands still or complains. It waits at the end of backward by itself, so there is no `finish()`. `no_sync()` must contain the *forward*.
# - **DistributedSampler**: `set_epoch(epoch)` must be called, or every epoch has the same order. `drop_last=True` leaves the tail out.
# - **Horovod**: `DistributedOptimizer`; rank 0 agrees with the others on what is ready. **ByteScheduler** and **P3** are about priority.
# - **DDP communication hooks** send gradients in 16 bits or compressed.

# %% [markdown]
# ## On a card
#
# With two or more NVIDIA cards the same wrapper runs on them, over NCCL.

# %%
def on_cards(wraps, steps=10):
    """Best seconds per step of each wrapper, on one card per rank."""
    torch.cuda.set_device(dist.get_rank())
    model_rows, width, best = 8192, 4096, {}
    for name, wrap in wraps.items():
        model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]).cuda()
        replica, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(model_rows, width, device="cuda")
        for _ in range(steps):
            optimizer.zero_grad()
            torch.cuda.synchronize()
            started = time.perf_counter()
            replica(x).square().mean().backward()
            replica.finish()
            optimizer.step()
            torch.cuda.synchronize()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - started)
    return best, model_rows, 6 * model_rows * 8 * width * width


cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
if cards >= 2:
    world = min(cards, 8)
    wraps = {"alone": Alone, "after backward": AfterBackward, "overlapped": partial(DataParallel, bucket_bytes=25 * MB)}
    values = run_ranks(on_cards, world, wraps, timeout=120).values
    for name in wraps:
        seconds, rows, flops = max(value[0][name] for value in values), values[0][1], values[0][2]
        print(f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}, {name}: {1000 * seconds:.1f} ms per step, "
              f"{world * rows / seconds:.0f} rows per second, {flops / seconds / 1e12:.1f} TFLOP/s per card")
else:
    what = f"one card ({torch.cuda.get_device_name()})" if cards else "no card"
    print(f"{what} here (torch {torch.__version__}): data parallelism between cards needs two, and everything above ran on the CPU")

# ---
# labkit: {lab: "08", slug: parameter_server, title: "Parameter server: proceed without everyone", minutes: 110, difficulty: 4, points: 23, cards: 0, needs: ["06"]}
# ---

# %% [markdown]
# # 08 · Parameter server: proceed without everyone
#
# *about 110 minutes · difficulty 4 of 5 · 23 points · any machine, no card needed*
#
# An all-reduce needs everyone, in every step: the slowest sets the pace, and one death ends it all. When you are done, your own server
# trains with workers that are killed by `kill -9` in mid-push, **12 times**, and each of their updates is applied exactly once.
# Three rules run over the same messages: wait for all, wait for enough, or wait for nobody, up to a bound that you choose.

# %% [markdown]
# The rules are those of Li et al. 2014, *Scaling Distributed Machine Learning with the Parameter Server*; Chen et al. 2016, *Revisiting
# Distributed Synchronous SGD* (backup workers); Ho et al. 2013, *More Effective Distributed ML via a Stale Synchronous Parallel Parameter
# Server* (the bound).

# %% [markdown]
# ## Recap: ranks in five lines
#
# 1. Several **processes** run the same function. They share no memory: what one knows, another learns only from a message.
# 2. Each has a number, its **rank**. Here rank 0 is the server. Rank 1 is worker 0, rank 2 is worker 1, and so on.
# 3. **Data parallel**: each worker computes the gradient of its own batch, with the same parameters. Their mean is the gradient of all batches
#    together.
# 4. An **all-reduce** gives every rank the sum of what all have. It is done when all have called it.
# 5. `run_ranks(fn, world_size, ...)` runs a function on several ranks and brings back what each returned.

# %%
import json
import math
import random
import time

import torch
import torch.distributed as dist
from torch import nn

from labkit import check, ranks, run_ranks
from labkit.data import python_docs
from labkit.figures import clock_lanes, lines
from labkit.figures.parameter_server import spans_of
from labkit.ranks import Endpoint, RankError, faults
from labkit.widgets import explore


def words(**what):
    """What a message says, as bytes."""
    return json.dumps(what).encode()


# %% [markdown]
# ## The task
#
# A small network reads eight bytes of Python's documentation and guesses the next. `batch_loss(model, worker, clock)` is the loss on
# batch number `clock` of a worker: the same numbers give the same batch, in every process, in every run.

# %%
TRAIN, HELD_OUT = (ids[:100_000].to(torch.uint8) for ids in python_docs())
CONTEXT, ROWS = 8, 32


def new_model():
    torch.manual_seed(0)
    hidden = nn.Linear(16 * CONTEXT, 48)
    return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), hidden, nn.Tanh(), nn.Linear(48, 256))


def new_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def loss_at(model, ids, places):
    windows = torch.stack([ids[place : place + CONTEXT + 1] for place in places.tolist()]).long()
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def batch_loss(model, worker, clock):
    generator = torch.Generator().manual_seed(1000 * worker + clock)
    return loss_at(model, TRAIN, torch.randint(len(TRAIN) - CONTEXT, (ROWS,), generator=generator))


def held_out_loss(parameters):
    model = new_model()
    model.load_state_dict(parameters)
    with torch.no_grad():
        return loss_at(model, HELD_OUT, torch.arange(0, 20_000, 100)).item()


PARAMETERS = dict(new_model().named_parameters())
NAMES, MODEL_BYTES = list(PARAMETERS), sum(p.nbytes for p in PARAMETERS.values())
START_LOSS = held_out_loss(new_model().state_dict())
print(f"{len(NAMES)} tensors, {MODEL_BYTES / 1000:.0f} kB; loss before training {START_LOSS:.2f}")

# %% [markdown]
# ## The baseline: everyone, or nothing
#
# Three ranks train by all-reduce. A batch takes rank 2 four times as long: it is a **straggler**. In the lanes you see who waits.

# %%
def with_all_reduce(steps):
    rank, model = dist.get_rank(), new_model()
    optimizer = new_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        batch_loss(model, rank, step).backward()
        time.sleep(0.04 if rank == 2 else 0.01)  # stands for a larger model
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
    return step + 1


everyone = run_ranks(with_all_reduce, 3, 6, live="All-reduce with a straggler")

# %% [markdown]
# Now one of them dies, in its fourth step. `faults.kill` sends the same signal as `kill -9`: no goodbye, no clean-up.

# %%
try:
    run_ranks(with_all_reduce, 3, 6, faults=[faults.kill(2, at="all_reduce", nth=16)])
except (RuntimeError, RankError) as error:
    print(f"{type(error).__name__}: {str(error).split('. ')[0]}")

# %% [markdown]
# The work of all three is lost, although two of them are in good health.

# %% [markdown]
# ## 8.1 One owner
#
# *difficulty 2 of 5 · importance 5 of 5 · 15 to 20 minutes · 3 points · any machine*
#
# A **parameter server** turns it round. One process owns the parameters and the optimizer. Workers **pull** the parameters, compute, and **push**
# gradients. They know nothing of each other, and have nothing that would be missed.
#
# First the owner itself. What it gives away has to be a copy, of one moment, and each step has a number: the **version**.
#
# **Predict first.** Two workers each push the same gradient g. The server takes one step with their mean. With plain SGD, how many times
# lr * g do the parameters move?

# %% nbgrader={"grade": false, "grade_id": "predict-mean", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_move = None  # times lr * g: your number
### BEGIN SOLUTION
predicted_move = 1
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "store", "locked": false, "schema_version": 3, "solution": true, "task": false}
class Store:
    """The parameters and their optimizer.

    Store(parameters, make_optimizer)
        parameters     : dict of name -> tensor (a model's Parameters, too), the values to start
                         from. Copied: not written to, and nobody's later changes show
        make_optimizer : makes a torch.optim optimizer from a list of tensors
    version : how many steps have been taken, 0 at first
    pull()  : returns (version, dict of name -> tensor): copies that belong to the caller, without
              a graph and without requiring a gradient
    apply(gradients) : one optimizer step with the mean of `gradients`, a list of at least one dict
              of name -> tensor. They are not written to, and not used after the call. version + 1
    About 12 lines.
    """

    ### BEGIN SOLUTION
    def __init__(self, parameters, make_optimizer):
        self.parameters = {name: p.detach().clone() for name, p in parameters.items()}
        self.optimizer = make_optimizer(list(self.parameters.values()))
        self.version = 0

    def pull(self):
        return self.version, {name: p.detach().clone() for name, p in self.parameters.items()}

    def apply(self, gradients):
        for name, p in self.parameters.items():
            p.grad = torch.stack([gradient[name] for gradient in gradients]).mean(0)
        self.optimizer.step()
        self.version += 1
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-store", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("parameter_server.store", Store)

# %% nbgrader={"grade": true, "grade_id": "exam-store", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("parameter_server.store", Store, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>List all tensors that cross the border, in either direction. Who may write to each of them later?</details>
# <details><summary>Hint 2</summary>An optimizer takes plain tensors, too, if you give them a <code>.grad</code>. It keeps its own memory: make it
# once.</details>
# <details><summary>Hint 3</summary>start: detach and clone each tensor, make the optimizer of the clones. pull: the version and clones. apply: for each name
# put the mean of the gradients into .grad; step; count.</details>

# %%
store = Store({"w": torch.zeros(1)}, lambda tensors: torch.optim.SGD(tensors, lr=0.1))
store.apply([{"w": torch.ones(1)}, {"w": torch.ones(1)}])
version, pulled = store.pull()
print(f"version {version}: moved {-pulled['w'].item() / 0.1:.0f} times lr * g; you predicted {predicted_move}")

# %% [markdown]
# ## 8.2 Wait for all, or for enough
#
# *difficulty 3 of 5 · importance 5 of 5 · 20 to 30 minutes · 5 points · any machine*
#
# Now the rules. A server is three answers to one question: something arrived, so *who gets parameters now?* Each of your methods returns those
# workers, as a list. The loop around it (given, later) sends the messages.
#
# The **synchronous** rule goes in rounds. Everyone's gradient of this round goes into one step. With **backup workers** it does not wait for
# all: `need` gradients end the round, and what comes late is thrown away. Not silently: those samples were never used, and somebody may want to
# know.

# %% [markdown]
# Messages may arrive twice: a worker that heard nothing asks and sends again. So a push names its worker and its **clock**, the number of its
# batch; here that is the number of the round.

# %% [markdown]
# **Predict first.** Four workers, `need` 3, and each round another one comes last. In 100 rounds, how many gradients are computed, and how many
# are used?

# %% nbgrader={"grade": false, "grade_id": "predict-backup", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_computed = None  # your number
predicted_used = None  # your number
### BEGIN SOLUTION
predicted_computed = 400
predicted_used = 300
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "synchronous", "locked": false, "schema_version": 3, "solution": true, "task": false}
class SyncServer:
    """Rounds. A round ends as soon as `need` workers' gradients for it have arrived, or those of
    all workers that are alive. Then: one store.apply with a list of exactly these gradients.

    SyncServer(store, workers, need) : a store as in 8.1; workers are numbered 0 to workers - 1,
                                       and alive at first
    pull(worker)  : it asks for parameters, and is alive (again, if it was dead). It is answered
                    at once, unless its gradient for this round is in: then when the round ends
    push(worker, clock, gradient) : its gradient for round `clock`. Changes nothing if it has come
                    before. If that round is over, it is not applied, but noted in `dropped`. A push
                    says nothing about being alive, and is no reason for an answer of its own
    death(worker) : it is gone; if it was waiting, it is not answered. What it pushed still counts
    Each returns the list of workers that are answered now (it may be empty). Anything may come
    twice, and late. One worker's pushes first come in the order of their clocks. At least one
    worker is alive at any time.

    clock(worker) : the clock of the batch that this worker computes next: the number of the round
    dropped       : list of (worker, clock), each late gradient once
    About 25 lines.
    """

    ### BEGIN SOLUTION
    def __init__(self, store, workers, need):
        self.store, self.need = store, need
        self.alive, self.waiting = set(range(workers)), set()
        self.arrived, self.seen, self.dropped = {}, set(), []

    def clock(self, worker):
        return self.store.version

    def pull(self, worker):
        self.alive.add(worker)
        if worker not in self.arrived:
            return [worker]
        self.waiting.add(worker)
        return []

    def push(self, worker, clock, gradient):
        if (worker, clock) in self.seen:
            return []
        self.seen.add((worker, clock))
        if clock < self.store.version:
            self.dropped.append((worker, clock))
            return []
        self.arrived[worker] = gradient
        return self.end_round()

    def death(self, worker):
        self.alive.discard(worker)
        self.waiting.discard(worker)
        return self.end_round()

    def end_round(self):
        enough = len(self.arrived) >= self.need or self.alive <= self.arrived.keys()
        if not self.arrived or not enough:
            return []
        self.store.apply(list(self.arrived.values()))
        answered, self.waiting, self.arrived = sorted(self.waiting), set(), {}
        return answered
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-synchronous", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("parameter_server.synchronous", SyncServer)

# %% nbgrader={"grade": true, "grade_id": "exam-synchronous", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("parameter_server.synchronous", SyncServer, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which two messages can end a round? Both need the same look at what is there.</details>
# <details><summary>Hint 2</summary>Keep what arrived in a dict by worker, who waits in a set, and every (worker, clock) that ever came in another.
# <code>store.version</code> is the number of the round.</details>
# <details><summary>Hint 3</summary>push: seen before? nothing. Late? note it. Else keep it. Then, and after a death: enough there, or everyone
# alive? apply all, forget them, return those who wait and let them go.</details>

# %%
print(f"you predicted {predicted_computed} computed and {predicted_used} used")
server, rng = SyncServer(Store({"w": torch.zeros(1)}, new_optimizer), 4, 3), random.Random(0)
for clock in range(100):
    for worker in range(4):
        server.pull(worker)
    for worker in rng.sample(range(4), 4):
        server.push(worker, clock, {"w": torch.zeros(1)})
print(f"100 rounds: {server.store.version} steps, {len(server.dropped)} of 400 gradients dropped, "
      f"by worker {[sum(w == worker for w, _ in server.dropped) for worker in range(4)]}")

# %% [markdown]
# ## 8.3 A push in pieces
#
# *difficulty 2 of 5 · importance 4 of 5 · 15 minutes · 3 points · any machine*
#
# The last layer's gradient is ready when backward has just begun. A worker need not wait with it: it sends each layer's gradient by itself, and the
# messages travel while it goes on computing.
#
# That opens a trap. If the server applied each layer as it comes, somebody could pull in between: half the layers of one version,
# half of the next, a **torn** pull. And a worker that dies in mid-push leaves half a push behind. When it comes back, in its next
# **life**, it pulls newer parameters and computes the same batch anew: the halves don't fit together.

# %% nbgrader={"grade": false, "grade_id": "layers", "locked": false, "schema_version": 3, "solution": true, "task": false}
class Layers:
    """Puts pushes together from their layers.

    Layers(names) : the names of all layers of a push
    arrive(worker, life, clock, name, gradient) : one layer of the push of `worker` for `clock`,
        sent in its life number `life` (0, and 1 more after each restart). Returns the whole push,
        a dict of name -> gradient, when the last layer that was missing has come: once. Else None

    Layers come in any order, those of several workers mixed, some of them twice. All layers of a
    push are of one life. A worker's pushes come in the order of (life, clock); once a layer of a
    newer one has come, what was left of an older one is thrown away, and so is what comes later of
    it. Keep at most one push of each worker in memory.
    About 12 lines.
    """

    ### BEGIN SOLUTION
    def __init__(self, names):
        self.names = set(names)
        self.newest, self.parts = {}, {}

    def arrive(self, worker, life, clock, name, gradient):
        newest = self.newest.get(worker, (-1, -1))
        if (life, clock) < newest:
            return None
        if (life, clock) > newest:
            self.newest[worker], self.parts[worker] = (life, clock), {}
        if self.parts[worker] is None:  # it has been given out
            return None
        self.parts[worker][name] = gradient
        if self.parts[worker].keys() != self.names:
            return None
        whole, self.parts[worker] = self.parts[worker], None
        return whole
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-layers", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("parameter_server.layers", Layers)

# %% nbgrader={"grade": true, "grade_id": "exam-layers", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("parameter_server.layers", Layers, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>What do two layers have to have in common to belong to one push?</details>
# <details><summary>Hint 2</summary>Python compares pairs: <code>(1, 4) > (0, 9)</code>. Per worker, remember the newest (life, clock) and a dict
# of its layers.</details>
# <details><summary>Hint 3</summary>older than the newest: nothing. Newer: begin a new dict. Put the layer in. All names there: give the dict out, and
# remember that you did.</details>

# %% [markdown]
# ## 8.4 The worker
#
# *difficulty 3 of 5 · importance 5 of 5 · 20 to 25 minutes · 4 points · any machine*
#
# The transport is **ZeroMQ**, which Jupyter itself talks with. An `Endpoint` is a rank's mailbox: `box.send(to, data, tensors)` sends bytes and
# a dict of tensors and returns at once; `box.recv(timeout_s=0.2)` returns the next message, or None when none came in time; `box.poll()` says
# whether one is there. A message has `.data` and `.tensors`. Mail for a process that dies is lost with it.

# %% [markdown]
# What survives a worker's death? Only what the server knows. So let the worker know nothing: it asks, and the answer tells which batch is
# next. Was a push lost? Then the next answer names the same batch again. That is the whole recovery.

# %% [markdown]
# A **hook** runs when a parameter's gradient is ready, while backward goes on:
# `p.register_post_accumulate_grad_hook(f)` calls `f(p)`, which returns nothing.

# %%
print(words(do="pull"))  # worker to server: asks
print(words(do="push", clock=7, layer="4.bias"))  # worker to server: with one tensor, the gradient
print(words(clock=8))  # server to worker: with the parameters, by name
print(words(stop=True))  # server to worker: work is over

# %% [markdown]
# **Predict first.** A worker has sent 3 of its 5 layers of batch 9 and is killed. It is started again. Which clock is in the first answer that
# it gets?

# %% nbgrader={"grade": false, "grade_id": "predict-clock", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_clock = None  # your number
### BEGIN SOLUTION
predicted_clock = 9
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "worker", "locked": false, "schema_version": 3, "solution": true, "task": false}
def work(box, model, loss_of):
    """Compute gradients for the server, rank 0, until it says stop. Then return.

    box     : an Endpoint
    model   : nn.Module; all its parameters get a gradient in every backward pass
    loss_of : loss_of(model, clock) is the loss on batch number `clock` of this worker

    Again and again: pull (with words as above); put the parameters that come into the model;
    compute the gradient of the batch that the answer names; push it, one message for each
    parameter, by the name that model.named_parameters() gives it, as soon as its gradient is
    ready. No optimizer here: nobody but the server changes parameters.
    An answer may get lost: wait for at most half a second, then ask again, as often as it takes.
    If several answers are there, the last one counts. About 20 lines.
    """
    ### BEGIN SOLUTION
    clock, names = None, {p: name for name, p in model.named_parameters()}

    def send(p):
        box.send(0, words(do="push", clock=clock, layer=names[p]), {"gradient": p.grad})
        p.grad = None

    for p in names:
        p.register_post_accumulate_grad_hook(send)
    while True:
        box.send(0, words(do="pull"))
        message = box.recv(timeout_s=0.2)
        while box.poll():
            message = box.recv(timeout_s=0.2)
        if message is None:
            continue
        said = json.loads(message.data)
        if "stop" in said:
            return
        clock = said["clock"]
        with torch.no_grad():
            for p, name in names.items():
                p.copy_(message.tensors[name])
        loss_of(model, clock).backward()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-worker", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("parameter_server.worker", work)

# %% nbgrader={"grade": true, "grade_id": "exam-worker", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("parameter_server.worker", work, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>What is in <code>.grad</code> when the second backward begins? And when does the hook of the last layer
# run?</details>
# <details><summary>Hint 2</summary>Register each hook once, before the loop. <code>while box.poll(): message = box.recv(...)</code> takes all that
# is there.</details>
# <details><summary>Hint 3</summary>hook: send this gradient with clock and name, set .grad to None. Loop: send pull; receive; nothing? again. Stop?
# return. Copy the parameters in, take the clock, loss_of(...).backward().</details>

# %% [markdown]
# ### The loop around it
#
# Here is the server's side, given. It turns messages into calls of your methods, and sends the answers. Nothing tells a server that a worker has died.
# So it has a **lease**: who has not been heard of for `lease_s` seconds is taken for dead. If it was only slow, its next pull brings it back.

# %%
def serve(server, steps, finish, lease_s=None, measure=None):
    """Rank 0: until each worker in `finish` has done `steps` batches. Its log has rows (seconds, what, worker, clock)."""
    box, layers, log, losses = Endpoint(), Layers(NAMES), [], []
    heard, lives, done, begin = {}, {}, set(), time.perf_counter()

    def note(what, worker, clock):
        log.append((time.perf_counter() - begin, what, worker, clock))

    while not finish <= done:
        message, answered = box.recv(timeout_s=0.02), []
        if message is not None:
            worker, said = message.sender - 1, json.loads(message.data)
            heard[worker] = time.perf_counter()
            if message.life > lives.setdefault(worker, message.life):
                lives[worker] = message.life
                note("return", worker, server.clock(worker))
            if said["do"] == "push":
                (gradient,) = message.tensors.values()
                whole = layers.arrive(worker, message.life, said["clock"], said["layer"], gradient)
                if whole is not None:
                    version = server.store.version
                    answered += server.push(worker, said["clock"], whole) or ()
                    note("push", worker, said["clock"])
                    if measure and server.store.version > version and version % 3 == 0:
                        losses.append((time.perf_counter() - begin, measure(server.store.pull()[1])))
            else:
                note("asks", worker, server.clock(worker))
                answered += server.pull(worker) or ()
                if worker not in answered:
                    ranks.event(f"worker {worker} waits")  # a moment at which a gate can open
        for worker, then in list(heard.items()):
            if lease_s and worker not in done and time.perf_counter() - then > lease_s:
                del heard[worker]
                note("death", worker, server.clock(worker))
                answered += server.death(worker) or ()
        for worker in answered:
            if server.clock(worker) < steps:
                box.send(worker + 1, words(clock=server.clock(worker)), server.store.pull()[1])
                note("answer", worker, server.clock(worker))
            else:
                box.send(worker + 1, words(stop=True))
                note("stop", worker, steps)
                done.add(worker)
                answered += server.death(worker) or ()  # it leaves; who waited for it comes next in this loop
    box.close(last_words=words(stop=True))  # for a worker that died between hearing "stop" and its end
    return {"log": log, "losses": losses, "parameters": server.store.pull()[1], "version": server.store.version,
            "dropped": getattr(server, "dropped", []), "staleness": getattr(server, "staleness", [])}


def train(rule, number, steps, workers, pause_s=(), finish=None, **how):
    """Every rank's program. rule(store, workers, number) makes the server; pause_s: added to a worker's batches."""
    if ranks.rank() == 0:
        server = rule(Store(PARAMETERS, new_optimizer), workers, number)
        return serve(server, steps, finish or set(range(workers)), **how)
    me = ranks.rank() - 1

    def loss_of(model, clock):
        ranks.event("batch")  # a place for accidents
        time.sleep(pause_s[me] if pause_s else 0.0)
        return batch_loss(model, me, clock)

    work(Endpoint(), new_model(), loss_of)


# %% [markdown]
# Three workers, wait for all. Is it the same as one process that computes all three batches of each step itself? The optimizer has momentum, so
# an order or a count that is wrong would show.

# %%
synchronous = run_ranks(train, 4, SyncServer, 3, 8, 3, (0.01, 0.01, 0.04), group=False, record=True)
alone, optimizer = new_model(), None
optimizer = new_optimizer(alone.parameters())
for step in range(8):
    optimizer.zero_grad()
    (sum(batch_loss(alone, worker, step) for worker in range(3)) / 3).backward()
    optimizer.step()
result = synchronous.values[0]
apart = max((result["parameters"][name] - p).abs().max().item() for name, p in alone.named_parameters())
print(f"{result['version']} steps; the parameters differ from one process by at most {apart:.1e}; "
      f"loss {held_out_loss(result['parameters']):.3f}")
clock_lanes(result["log"], title="Wait for all, worker 2 is slow")

# %% [markdown]
# With one of three not waited for, the slow worker's gradients come late, and the others go on.

# %%
backup = run_ranks(train, 4, SyncServer, 2, 8, 3, (0.01, 0.01, 0.04), group=False).values[0]
print(f"{backup['version']} steps, dropped (worker, clock): {backup['dropped']}")
clock_lanes(backup["log"], title="Two of three are enough")

# %% [markdown]
# ### The price: bytes at the server
#
# Each worker sends S bytes of gradients and gets S bytes of parameters per step, however many there are. All of it passes the server.

# %%
def bytes_per_step(recording, steps):
    rows = recording.bytes_by_kind().values()
    return sum(row["bytes_sent"] + row["bytes_received"] for row in rows) / steps / MODEL_BYTES


def reduce_once():
    dist.all_reduce(torch.zeros(MODEL_BYTES // 4))


counts, at_server, at_worker, at_ring = [1, 2, 4], [], [], []
for count in counts:
    recordings = run_ranks(train, count + 1, SyncServer, count, 4, count, group=False, record=True).recordings
    at_server.append(bytes_per_step(recordings[0], 4))
    at_worker.append(bytes_per_step(recordings[1], 4))
    at_ring.append(bytes_per_step(run_ranks(reduce_once, count, record=True).recordings[0], 1))
    print(f"{count} workers: server {at_server[-1]:.2f} S per step, worker {at_worker[-1]:.2f} S; "
          f"a ring's rank {at_ring[-1]:.2f} S")
bytes_of = {"server": at_server, "each worker": at_worker, "each rank of a ring": at_ring}
lines({name: (counts, sizes) for name, sizes in bytes_of.items()},
      title="Bytes in and out per step", x="workers", y="times the model's bytes")

# %% [markdown]
# A ring's rank never sends and receives more than 4 S together; the server's share grows with every worker. (The recorder counts a
# library's all-reduce as a ring.) That is why real ones are several processes, each the owner of a part of the parameters.

# %% [markdown]
# ## 8.5 Wait for nobody, up to a bound
#
# *difficulty 4 of 5 · importance 5 of 5 · 25 to 35 minutes · 6 points · any machine*
#
# The **asynchronous** rule has no rounds: each push is a step of its own, at once. Nobody waits, but gradients are **stale**: while a
# worker computed, others have moved the parameters. Its **staleness** is the number of steps between its pull and its push.

# %% [markdown]
# **Bounded staleness** is the middle. Each worker has a clock: its pushes so far. A worker may start its next batch if it is at most
# `bound` clocks ahead of the slowest worker alive. Else it waits until that one has caught up. (In the paper a worker may also
# read from a cache that is some clocks old; here a pull sees all that was applied.)
#
# Who returns after a death is not to hold up the others: its clock becomes that of the slowest of them, if its own is behind.

# %% [markdown]
# **Predict first.** Three workers, bound 2, worker 2 stands still after its first pull. How many pushes can workers 0 and 1 make in
# all?

# %% nbgrader={"grade": false, "grade_id": "predict-bound", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_pushes = None  # of workers 0 and 1 together: your number
### BEGIN SOLUTION
predicted_pushes = 6  # each at clocks 0, 1 and 2
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "bounded", "locked": false, "schema_version": 3, "solution": true, "task": false}
class BoundedServer:
    """Each push is one store.apply([gradient]), when it arrives. Who is too far ahead waits.

    BoundedServer(store, workers, bound) : workers are numbered 0 to workers - 1, alive at first, at
                    clock 0. bound is a whole number, or math.inf
    pull(worker)  : it asks for parameters. If it was dead it is alive again, and its clock is the
                    larger of its own and the smallest of those alive. It is answered when its
                    clock is at most `bound` above the smallest clock of all alive: at once, or
                    when that comes true. It may ask again, answered before or not
    push(worker, clock, gradient) : applied if `clock` is this worker's clock, which then goes up by
                    1. Else it has come before, or too late: nothing happens. A push says nothing
                    about being alive, and is no reason for an answer of its own
    death(worker) : it is gone, and nobody waits for it; if it was waiting, it is not answered.
                    All may be dead at a time
    Each returns the list of workers that are answered now (it may be empty).

    clock(worker) : the clock of the batch that this worker computes next: its pushes so far, or
                    what it was set to on its return
    staleness     : list with a number for each push applied, in order: store.version just before,
                    minus store.version when this worker was last answered
    About 25 lines.
    """

    ### BEGIN SOLUTION
    def __init__(self, store, workers, bound):
        self.store, self.bound = store, bound
        self.clocks = {worker: 0 for worker in range(workers)}
        self.alive, self.waiting = set(self.clocks), set()
        self.read, self.staleness = {}, []

    def clock(self, worker):
        return self.clocks[worker]

    def slowest(self):
        return min((self.clocks[worker] for worker in self.alive), default=0)

    def pull(self, worker):
        if worker not in self.alive:
            self.clocks[worker] = max(self.clocks[worker], self.slowest())
            self.alive.add(worker)
        self.waiting.add(worker)
        return self.answer()

    def push(self, worker, clock, gradient):
        if clock != self.clocks[worker]:
            return []
        self.staleness.append(self.store.version - self.read.get(worker, self.store.version))
        self.store.apply([gradient])
        self.clocks[worker] += 1
        return self.answer()

    def death(self, worker):
        self.alive.discard(worker)
        self.waiting.discard(worker)
        return self.answer()

    def answer(self):
        ready = sorted(worker for worker in self.waiting if self.clocks[worker] - self.slowest() <= self.bound)
        self.waiting.difference_update(ready)
        self.read.update({worker: self.store.version for worker in ready})
        return ready
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-bounded", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("parameter_server.bounded", BoundedServer)

# %% nbgrader={"grade": true, "grade_id": "exam-bounded", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("parameter_server.bounded", BoundedServer, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Three messages can make the smallest clock larger, or a worker wait. After each of them, who of those that wait
# may go?</details>
# <details><summary>Hint 2</summary><code>min(numbers, default=0)</code> takes an empty list, too. Put a worker that asks among those that wait,
# and then look who may go: one place for all cases.</details>
# <details><summary>Hint 3</summary>answer: those waiting whose clock minus the smallest alive is at most bound; take them out; note the version for
# each; return them. pull, push and death change their notes, and end with it.</details>

# %% [markdown]
# Real processes. Worker 2 is held at a gate in its first batch, and the others begin when it stands there. Without a bound the gate opens when worker 0
# begins its tenth batch: nobody waits for who stands still. With bound 2 that would never come; there it opens when both others wait.

# %%
ready = [faults.hold(rank, at="batch", until=faults.After(3, "batch")) for rank in (1, 2)]
GATES = {
    math.inf: [faults.After(1, "batch", 10)],
    2: [faults.After(0, "worker 0 waits"), faults.After(0, "worker 1 waits")],
}
for bound, gates in GATES.items():
    held = run_ranks(train, 4, BoundedServer, bound, 10, 3, group=False,
                     faults=[*ready, *(faults.hold(3, at="batch", until=gate) for gate in gates)]).values[0]
    events = [row[1:] for row in held["log"]]
    before = [what for what, _, _ in events[: events.index(("push", 2, 0))]]
    print(f"bound {bound}: {before.count('push')} pushes of the others while worker 2 is held; "
          f"staleness up to {max(held['staleness'])}")
print(f"you predicted {predicted_pushes} for bound 2")
clock_lanes(held["log"], title="Bound 2, worker 2 at a gate", bound=2)

# %% [markdown]
# ## Death, and return
#
# One of three is killed in its third batch and stays dead. After its lease the others go on, bound or not.

# %%
dead = run_ranks(train, 4, BoundedServer, 1, 10, 3, (0.01,) * 3, {0, 1}, lease_s=0.4, group=False,
                 faults=[faults.kill(3, at="batch", nth=3)]).values[0]
by_the_dead = sum(row[1:3] == ("push", 2) for row in dead["log"])
print(f"{dead['version']} updates, {by_the_dead} of them from the dead worker")
clock_lanes(dead["log"], title="One of three dies", bound=1)

# %% [markdown]
# Now the real thing. Each worker is killed four times, at a random send or receive, also between two layers of one push, and started again as a fresh
# process. No lease: nobody is given up. Every worker has to make all its batches, and every batch must be applied once.

# %%
rng = random.Random(8)
kills = [faults.restart(worker, at=rng.choice(["send", "recv"]), nth=rng.randrange(1, 9), life=life)
         for worker in (1, 2, 3) for life in range(4)]
survived = run_ranks(train, 4, BoundedServer, 3, 16, 3, group=False, faults=kills)
result = survived.values[0]
print(f"lives: {survived.lives}; {result['version']} updates for {3 * 16} batches, "
      f"loss {held_out_loss(result['parameters']):.3f}")
clock_lanes(result["log"], title="Twelve deaths", bound=3)

# %% [markdown]
# ## Which bound?
#
# Four rules, with and without a straggler, recorded now, for you to compare. Left: lanes and the clock gap. Right: loss against time. Less waiting makes
# more steps per second. Staleness makes each of them worth less. (All have the same learning rate. "Wait for all" takes one step where
# the others take three, each with a third of the data.)

# %%
RULES = {
    "wait for all": (SyncServer, 3),
    "bound 0": (BoundedServer, 0),
    "bound 2": (BoundedServer, 2),
    "no bound": (BoundedServer, math.inf),
}
PAUSES_S = {"all alike": (0.01, 0.01, 0.01), "worker 2 is four times slower": (0.01, 0.01, 0.04)}
runs = {
    (name, workers): run_ranks(train, 4, rule, number, 10, 3, pauses, group=False, measure=held_out_loss).values[0]
    for name, (rule, number) in RULES.items() for workers, pauses in PAUSES_S.items()
}


def compare(rule, workers):
    bound = {"bound 0": 0, "bound 2": 2}.get(rule)
    losses = {name: tuple(zip(*runs[name, workers]["losses"])) for name in dict.fromkeys([rule, "wait for all"])}
    return clock_lanes(runs[rule, workers]["log"], title=f"{rule}, {workers}", bound=bound, losses=losses)


SLOW = "worker 2 is four times slower"
explore({"rule": list(RULES), "workers": list(PAUSES_S)}, compare,
        start={"rule": "bound 2", "workers": SLOW}, title="Rules and stragglers")

# %% [markdown]
# ## Before and after
#
# The same three workers, one of them slow: how long the two fast ones waited in all, by rule.

# %%
for name in RULES:
    run = runs[name, SLOW]
    waits = spans_of(run["log"])[1]
    waited = sum(end - begin for worker in (0, 1) for begin, end in waits[worker])
    staleness = sum(run["staleness"]) / max(1, len(run["staleness"]))
    print(f"{name:<13} waited {waited:.2f} s, mean staleness {staleness:.1f}, "
          f"loss {held_out_loss(run['parameters']):.3f} after {run['version']} steps")

# %% [markdown]
# ## Reflection
#
# What is the key structural difference between data-parallel training by all-reduce and by a parameter server? In four to eight sentences: (a) Name
# it, and say what follows for a worker that is slow, and for one that dies; use what you saw in the baseline and in *"Twelve deaths"*. (b) What does it cost
# in bytes, by your measurement, for 64 workers? (c) You have 64 equal cards on one fast network. Which do you take, and which number of yours
# would have to be different for you to change your mind?
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-server", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) all-reduce: equals, a step is done when everyone has taken part; server: one owner of the state, and workers that are independent of
# each other and hold nothing that would be missed; so a straggler or death stops all in one and only itself in the other, with the learner's
# observation of both; (b) about 2 S per worker at the server, 128 S for 64 workers, against nearly 4 S (in and out) per rank of a ring, from the
# measured row; (c) all-reduce for equal cards, with a figure that would turn it (waiting time of a straggler, deaths per hour, staleness that does not
# hurt). **1**: two of the three, or all without a measured number. **0**: restates the lecture.
#
# *Example.* In an all-reduce all are equal and each step needs all; with a server the state has one owner, and a worker is only a function of what
# it pulls. When rank 2 was killed in the all-reduce, all three ended; my server's workers died twelve times, and 48 of 48 batches were applied. The
# server moved 2.0, 4.0 and 8.0 S per step for 1, 2 and 4 workers, so 128 S for 64, where a ring's rank has 3.9 S in and out. With 64 equal cards I
# take the all-reduce: nobody is slow for long, and one machine cannot carry 128 S. If one worker were four times slower, as worker 2 here, the
# fast ones would wait three quarters of the time; then I'd take bound 2, whose loss after as many batches was close.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **TensorFlow**: `ParameterServerStrategy`; its older `SyncReplicasOptimizer` had backup workers as `replicas_to_aggregate`.
# - **MXNet** and **ps-lite**: `kvstore('dist_sync')`, `kvstore('dist_async')`, with `push` and `pull`. **BytePS** kept push and pull, with priorities,
#   for dense training on cards.
# - **PyTorch**: no server of its own; `torch.distributed.rpc` has what one needs. TorchRec, for recommendation models, shards large embedding tables over
#   ranks, which is the part of a server that lived on.
# - **Ray** and **federated learning** (Flower): workers that come and go, results that arrive or don't.

# %% [markdown]
# ## On a card
#
# A worker may compute on a card: the endpoint copies to the processor's memory what it sends. Here is how long a batch takes there, and how long the copy of its
# gradients.

# %%
if torch.cuda.is_available():
    model = new_model().cuda()
    ids = TRAIN.cuda()
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss_at(model, ids, torch.arange(0, 32_000, 1000)).backward()
        torch.cuda.synchronize()
        batch_s = time.perf_counter() - begin
        copies = [p.grad.cpu() for p in model.parameters()]
        copy_s = time.perf_counter() - begin - batch_s
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {32 / batch_s:.0f} rows per second, "
          f"{1000 * batch_s:.1f} ms a batch, {1000 * copy_s:.1f} ms for the copy of {MODEL_BYTES / 1000:.0f} kB")
else:
    print(f"no card here (torch {torch.__version__}): everything above ran on the CPU")

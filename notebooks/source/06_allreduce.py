# ---
# labkit: {lab: "06", slug: allreduce, title: "All-reduce: a sum over ranks from sends and receives", minutes: 95, difficulty: 3, points: 24, cards: 0, needs: []}
# ---

# %% [markdown]
# # 06 · All-reduce: a sum over ranks from sends and receives
#
# *about 95 minutes · difficulty 3 of 5 · 24 points · any machine, no card needed*
#
# Four workers hold four different gradients, and each wants the sum. Send everything through one of them, and six times the tensor passes
# its network card. When you are done, your own code gives all of them the same sum, to the last bit, and each sends **1.5 times the
# tensor**, less than twice whatever their number. On a slow wire that takes about a third of the time.
#
# The algorithm is the ring of Patarasuk and Yuan 2009, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*.

# %% [markdown]
# ## Recap: ranks in five lines
#
# 1. Several **processes** run the same function. They share no memory: what one knows, another learns only from a message.
# 2. Each has a number, its **rank**, from 0 to W - 1: `dist.get_rank()`. W is `dist.get_world_size()`.
# 3. `dist.send(x, 2)` sends the tensor x to rank 2. `dist.recv(y, 0)` fills y, which has the right size and dtype already, with what rank 0
#    sends. Both tensors are contiguous: one stretch of memory.
# 4. Both return when their message is done. `dist.isend` and `dist.irecv` return at once, with an object whose `wait()` returns then.
# 5. Messages from one rank to another arrive in order. One that is longer than the tensor it is received into ends the process.

# %%
import time

import torch
import torch.distributed as dist

from labkit import Recorder, check, run_ranks
from labkit.figures import message_lanes, predicted_times, ring_steps
from labkit.ranks import DeadlockError, Link, RankTimeout
from labkit.widgets import explore

KB, MB = 1000, 1_000_000


# %% [markdown]
# ## The baseline: what an all-reduce does
#
# `run_ranks(fn, world_size, ...)` runs a function on several processes of this machine, with `torch.distributed` set up, and brings back
# what each returned. An **all-reduce** takes a tensor on every rank and leaves the sum of them all on every rank. PyTorch has one. In this
# lab you build it, so from here on all collectives of `torch.distributed` (functions that all ranks call together) are off limits in your
# answers.

# %%
def library_sum():
    x = torch.arange(4.0) + 10 * dist.get_rank()
    before = x.tolist()
    dist.all_reduce(x)
    return before, x.tolist()


for rank, (before, after) in enumerate(run_ranks(library_sum, 4).values):
    print(f"rank {rank}: {before} becomes {after}")

# %% [markdown]
# ## Everybody sends first
#
# Here is the first thing that goes wrong. Each rank sends to its right neighbour, and then receives from its left one. It looks fair. But a
# `send` is done only when the other side has asked for the message, and nobody has: they all are still sending.
#
# Read the message. It says for each rank in which call it stands, and whom it waits for.

# %%
def everybody_sends_first():
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(1000), torch.empty(1000)
    dist.send(x, (rank + 1) % world)
    dist.recv(y, (rank - 1) % world)


try:
    run_ranks(everybody_sends_first, 3)
except DeadlockError as error:
    print(f"DeadlockError: {error}")

# %% [markdown]
# This is a **deadlock**. (Some transports copy a small message away and let `send` return early. Then the same code works until the
# tensors grow.) Three ways out:
#
# - even ranks send first, odd ones receive first;
# - start the send with `isend`, receive, then `wait()` for the send;
# - `dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)])` starts both and returns a list of objects to
#   wait for. Between NVIDIA cards, this is the one that always works.
#
# Until its `wait()` has returned a tensor belongs to its message: don't write to what is being sent, and don't look at what is being
# received.

# %% [markdown]
# ## 6.1 Through one root
#
# *difficulty 1 of 5 · importance 3 of 5 · 10 to 15 minutes · 3 points · any machine*
#
# The obvious way: everybody sends to rank 0, rank 0 adds, and sends the sum to everybody. It is right, it is short, and it is what you
# measure yourself against.
#
# **Predict first.** With 4 ranks and a tensor of S bytes, how many times S passes the network card of rank 0, in and out together?

# %% nbgrader={"grade": false, "grade_id": "predict-root", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_root = None  # times S: your number
### BEGIN SOLUTION
predicted_root = 6  # three in, three out
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "naive-all-reduce", "locked": false, "schema_version": 3, "solution": true, "task": false}
def naive_all_reduce(x):
    """Sum x over all ranks, through rank 0. In place.

    x : contiguous tensor of any shape and dtype, alike on all ranks, with each rank's own values
    Every other rank sends its whole x to rank 0, once. Rank 0 adds up, and sends the sum to each
    of them, once. Afterwards x itself holds the sum, on every rank. What you return is ignored.

    Use send, recv, isend, irecv or batch_isend_irecv of torch.distributed, and wait for whatever
    you start; no collective (a barrier is one). It works for one rank, too. About 10 lines.
    """
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        part = torch.empty_like(x)
        for peer in range(1, world):
            dist.recv(part, peer)
            x += part
        for peer in range(1, world):
            dist.send(x, peer)
    else:
        dist.send(x, 0)
        dist.recv(x, 0)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-naive", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("allreduce.naive", naive_all_reduce)

# %% nbgrader={"grade": true, "grade_id": "exam-naive", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("allreduce.naive", naive_all_reduce, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>All ranks run the same function. Which line tells rank 0 from the others?</details>
# <details><summary>Hint 2</summary>Rank 0 needs a second tensor to receive into: <code>torch.empty_like(x)</code>.</details>
# <details><summary>Hint 3</summary>rank 0: for each other rank, receive and add; for each other rank, send x. Any other rank: send x to 0,
# receive x from 0.</details>

# %% [markdown]
# Now on a slow wire. A `Link` is a *simulated* one: messages take the time that its bandwidth and latency say, and no processor. `per="rank"`:
# all that a rank sends shares one wire, and so does all that it receives, as behind one network card.

# %%
SLOW = Link(bandwidth_bytes_s=5e6, latency_s=3e-3, per="rank")
SIZES = [4 * KB, 16 * KB, 64 * KB, 256 * KB]


def timed(all_reduce, sizes):
    """On every rank: seconds and recordings of two all_reduces for each size in bytes."""
    result = {nbytes: [] for nbytes in (4, *sizes)}
    for nbytes in (4, *sizes, *sizes):  # the first one only wakes everything up
        x = torch.ones(nbytes // 4)
        dist.barrier()  # all begin together
        with Recorder(watch=[x]) as recorder:
            started = time.perf_counter()
            all_reduce(x)
            seconds = time.perf_counter() - started
        result[nbytes].append((seconds, recorder.recording))
    return result


def measure(all_reduce, world, sizes=SIZES, link=SLOW):
    """For each size the faster of two runs: (seconds of its slowest rank, the ranks' recordings)."""
    ranks, best = run_ranks(timed, world, all_reduce, sizes, link=link).values, {}
    for nbytes in sizes:
        runs = [tuple(zip(*run)) for run in zip(*(rank[nbytes] for rank in ranks))]
        seconds, recordings = min(runs, key=lambda run: max(run[0]))
        best[nbytes] = max(seconds), recordings
    return best


def bytes_of(recording):
    """Bytes that a rank sent and received."""
    rows = recording.bytes_by_kind().values()
    return sum(row["bytes_sent"] for row in rows), sum(row["bytes_received"] for row in rows)


naive_runs = {world: measure(naive_all_reduce, world) for world in (2, 3, 4)}
big = SIZES[-1]
for world, runs in naive_runs.items():
    seconds, recordings = runs[big]
    sent, received = bytes_of(recordings[0])
    print(f"{world} ranks: {seconds:.3f} s (simulated wire), "
          f"{(sent + received) / big:.1f} times the tensor passes rank 0")
print(f"you predicted {predicted_root} for 4 ranks")

# %% [markdown]
# Each further rank adds two more tensors to rank 0's traffic. Watch the four of them: rank 0 holds a second tensor for what comes in, and
# the others wait.

# %%
def once(all_reduce, nbytes):
    all_reduce(torch.ones(nbytes // 4))


naive_live = run_ranks(once, 4, naive_all_reduce, big, link=SLOW, live="Through rank 0, 4 ranks")

# %% [markdown]
# ## 6.2 Reduce-scatter: each rank finishes one chunk
#
# *difficulty 4 of 5 · importance 5 of 5 · 25 to 35 minutes · 5 points · any machine*
#
# Give every rank a share of the adding. Cut the tensor into W **chunks**, and put the ranks in a ring: each sends to one neighbour and receives
# from the other.
#
# In a step, every rank sends one chunk, and adds the chunk that arrives to its own of the same number. In the next step it sends on what it
# has just added to. So all chunks travel at once, and each collects one rank's numbers at every stop. After W - 1 steps every rank
# holds one finished chunk. That is a **reduce-scatter**.

# %% [markdown]
# **Predict first.** 4 ranks, a tensor of S bytes, 4 equal chunks: how many times S does each rank send until it holds its finished chunk?

# %% nbgrader={"grade": false, "grade_id": "predict-scatter", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_scatter = None  # times S: your number
### BEGIN SOLUTION
predicted_scatter = 0.75  # three steps of a quarter
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "ring-reduce-scatter", "locked": false, "schema_version": 3, "solution": true, "task": false}
def ring_reduce_scatter(chunks):
    """Sum the chunks over all ranks, so that each rank ends with one finished chunk. In place.

    chunks : list of W contiguous 1-D tensors (W ranks), alike in lengths and dtype on all ranks,
             with each rank's own values. They are parts of a larger tensor, so write into them.
             Lengths may differ, and may be 0
    Returns the number of the chunk that is finished on this rank: chunks[number] then holds the
    sum over all ranks. Another one on each rank. What is left in the other chunks is free.

    A ring, in either direction: every rank sends to one neighbour only, at most W - 1 messages,
    and in them every chunk once but the one that it finishes. You may leave out empty messages,
    on both sides. The same rules as in 6.1 for what to call and to wait for. About 10 lines.
    """
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    buffer = torch.empty_like(max(chunks, key=len))
    for step in range(world - 1):
        leaving, growing = chunks[(rank - step) % world], chunks[(rank - step - 1) % world]
        arriving = buffer[: len(growing)]
        both = [dist.P2POp(dist.isend, leaving, right), dist.P2POp(dist.irecv, arriving, left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        growing += arriving
    return (rank + 1) % world
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-reduce-scatter", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("allreduce.reduce-scatter", ring_reduce_scatter)

# %% nbgrader={"grade": true, "grade_id": "exam-reduce-scatter", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("allreduce.reduce-scatter", ring_reduce_scatter, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Rank r begins with chunk r. Which chunk arrives there in the first step, and which one does it send in the
# second?</details>
# <details><summary>Hint 2</summary>Python's <code>%</code> gives a number from 0 to W - 1 for negative ones, too. Receive into a buffer of
# its own: what arrives must not write over what you add it to.</details>
# <details><summary>Hint 3</summary>for each step s from 0 to W - 2: start sending chunk r - s to the right; receive from the left; add it to
# chunk r - s - 1; wait for the send. All numbers modulo W. Which chunk got the last addition?</details>

# %% [markdown]
# Look at it. The four chunks differ in size, so each recorded message tells by its bytes which one it carried. A cell's number says how many
# ranks' values are in that chunk. What has just arrived is framed.

# %%
LENGTHS = [256, 512, 768, 1024]  # floats: 1 to 4 KiB
CHUNK_BYTES = [4 * length for length in LENGTHS]


def scatter_only():
    chunks = list(torch.ones(sum(LENGTHS)).split(LENGTHS))
    return ring_reduce_scatter(chunks)


scattered = run_ranks(scatter_only, 4, record=True)
for rank, number in enumerate(scattered.values):
    sent, _ = bytes_of(scattered.recordings[rank])
    print(f"rank {rank} finishes chunk {number} and has sent {sent / sum(CHUNK_BYTES):.2f} of the tensor")
print(f"you predicted {predicted_scatter} for equal chunks")
ring_steps(scattered.recordings, CHUNK_BYTES, title="Your reduce-scatter, from its messages")

# %% [markdown]
# ## 6.3 All-gather: pass the finished chunks on
#
# *difficulty 2 of 5 · importance 5 of 5 · 10 to 15 minutes · 4 points · any machine*
#
# Every chunk is finished, each on another rank. Once more round the ring, and everybody has them all. What arrives now is no partial sum:
# it is the answer, and nobody adds it again. That is why all ranks end with the same bits. Floating point addition depends on the order,
# and here each number is added up once, on one rank, and copied.
#
# **Predict first.** How many steps does that take with 4 ranks?

# %% nbgrader={"grade": false, "grade_id": "predict-gather", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_steps = None  # your number
### BEGIN SOLUTION
predicted_steps = 3
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "ring-all-gather", "locked": false, "schema_version": 3, "solution": true, "task": false}
def ring_all_gather(chunks, mine):
    """Give every rank every finished chunk. In place.

    chunks : as in 6.2. chunks[mine] is finished; what is in the others is to be replaced
    mine   : the number of this rank's finished chunk. If it is m here, it is m + 1 (modulo W) on
             the next higher rank, for any m, not only the one that your ring_reduce_scatter gives
    Afterwards every chunk holds the bits of its finished version, on every rank.

    A ring, in either direction: every rank sends to one neighbour only, at most W - 1 messages,
    and in them every chunk once but one. You may leave out empty messages, on both sides.
    The same rules as in 6.1 for what to call and to wait for. About 8 lines.
    """
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(world - 1):
        leaving, arriving = chunks[(mine - step) % world], chunks[(mine - step - 1) % world]
        both = [dist.P2POp(dist.isend, leaving, right), dist.P2POp(dist.irecv, arriving, left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-all-gather", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("allreduce.all-gather", ring_all_gather)

# %% nbgrader={"grade": true, "grade_id": "exam-all-gather", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("allreduce.all-gather", ring_all_gather, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which chunk does this rank hold before the first step? And before the second?</details>
# <details><summary>Hint 2</summary>You can receive straight into the chunk. Which one is it, by the left neighbour's <code>mine</code>?</details>
# <details><summary>Hint 3</summary>for each step s from 0 to W - 2: start sending chunk mine - s to the right; receive chunk mine - s - 1 from
# the left; wait. All numbers modulo W.</details>

# %%
def both_phases():
    chunks = list(torch.ones(sum(LENGTHS)).split(LENGTHS))
    ring_all_gather(chunks, ring_reduce_scatter(chunks))


phases = run_ranks(both_phases, 4, record=True)
steps = len(phases.recordings[0].comm("send")) - len(scattered.recordings[0].comm("send"))
print(f"the all-gather took {steps} steps; you predicted {predicted_steps}")
ring_steps(phases.recordings, CHUNK_BYTES, title="Both phases, from their messages")

# %% [markdown]
# ## 6.4 The whole ring
#
# *difficulty 3 of 5 · importance 5 of 5 · 20 to 25 minutes · 6 points · any machine*
#
# Put the two together, for the tensors that really come: a matrix, its transpose, one column of it, 1003 numbers on 4 ranks, 3 numbers on 4
# ranks, integers. `dist.send` takes contiguous tensors only, and a copy is not the tensor that you were given.
#
# **Predict first.** How many times S does each rank send, with 4 ranks? And with 100?

# %% nbgrader={"grade": false, "grade_id": "predict-ring", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_at_4 = None  # times S: your number
predicted_at_100 = None  # times S: your number
### BEGIN SOLUTION
predicted_at_4 = 1.5  # 2 * 3 steps of a quarter
predicted_at_100 = 1.98
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "ring-all-reduce", "locked": false, "schema_version": 3, "solution": true, "task": false}
def ring_all_reduce(x):
    """Sum x over all ranks, by a ring. In place.

    x : tensor of any shape, number of elements (0 as well), dtype and layout: it may be a
        transpose or a column of a larger one. Alike on all ranks, with each rank's own values
    Afterwards x itself holds the sum in its own dtype (integers exactly), with the same bits on
    every rank; nothing beside x has changed. Returns x, or nothing.

    With n elements on W ranks, each rank sends to one neighbour only, 2(W - 1) messages (you may
    leave out empty ones), each of at most n / W elements, rounded up. Use your two functions. The
    same rules as in 6.1 for what to call and to wait for. About 6 lines.
    """
    ### BEGIN SOLUTION
    flat = x.contiguous().view(-1)  # x's own memory if that is in one stretch, else a copy
    chunks = list(flat.tensor_split(dist.get_world_size()))
    mine = ring_reduce_scatter(chunks)
    ring_all_gather(chunks, mine)
    if not x.is_contiguous():
        x.copy_(flat.view_as(x))
    return x
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-ring", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("allreduce.ring", ring_all_reduce)

# %% nbgrader={"grade": true, "grade_id": "exam-ring", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("allreduce.ring", ring_all_reduce, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>How do you cut 5 elements into exactly 4 chunks? And how do you get x's memory as one flat
# tensor?</details>
# <details><summary>Hint 2</summary><code>tensor_split</code> always makes as many parts as you ask for. <code>x.contiguous()</code> is x
# itself, or a copy; <code>x.is_contiguous()</code> tells which.</details>
# <details><summary>Hint 3</summary>flat is x.contiguous() as one dimension; chunks are its W parts; reduce-scatter, all-gather; if flat was a
# copy, copy it back into x, in x's shape</details>

# %%
ring_runs = {world: measure(ring_all_reduce, world) for world in (2, 3, 4)}
for world in (2, 3, 4):
    (ring_s, recordings), (naive_s, _) = ring_runs[world][big], naive_runs[world][big]
    sent, _ = bytes_of(recordings[0])
    print(f"{world} ranks: {sent / big:.3f} times the tensor sent per rank; ring {ring_s:.3f} s, "
          f"through rank 0 {naive_s:.3f} s (simulated wire): {naive_s / ring_s:.1f} times faster")
print(f"you predicted {predicted_at_4} with 4 ranks, and {predicted_at_100} with 100")

# %% [markdown]
# Before and after, message by message. Through rank 0 one wire is busy at a time. In the ring all of them are, all the time, with a W-th of the
# bytes. Move the controls: what changes with the number of ranks, and what with the size? In small messages the gaps are latency.

# %%
def lanes(ranks, KB):
    runs = {"through rank 0": naive_runs[ranks][KB * 1000], "ring": ring_runs[ranks][KB * 1000]}
    named = {f"{name}: {1000 * seconds:.0f} ms": recordings for name, (seconds, recordings) in runs.items()}
    return message_lanes(named, title=f"{ranks} ranks, {KB} KB")


explore({"ranks": [2, 3, 4], "KB": [size // KB for size in SIZES]}, lanes, start={"ranks": 4, "KB": 256}, title="Messages")

# %% [markdown]
# And live, with memory. All ranks do the same now, and what each needs besides x is one chunk, not a whole tensor.

# %%
ring_live = run_ranks(once, 4, ring_all_reduce, big, link=SLOW, live="The ring, 4 ranks")
for name, runs in {"through rank 0": naive_live, "ring": ring_live}.items():
    besides = [recording.peak(born=True) / big - 1 for recording in runs.recordings]
    print(f"{name}: tensors besides x, rank by rank: {', '.join(f'{value:.2f}' for value in besides)}")

# %% [markdown]
# ## "2 bytes per parameter"
#
# One of the lectures gives the cost of an all-reduce as 2 bytes of communication per parameter, since gradients are fp16. That is the
# **payload**: what is to be summed. The wire carries more, and how much depends on the number of ranks.

# %%
def sixteen_bit(parameters):
    x = torch.ones(parameters, dtype=torch.bfloat16)
    with Recorder() as recorder:
        ring_all_reduce(x)
    return x.nbytes, *bytes_of(recorder.recording)


for world in (2, 3, 4):
    payload, sent, received = run_ranks(sixteen_bit, world, 120_000).values[0]
    print(f"{world} ranks: payload {payload / 120_000:.2f} bytes per parameter, "
          f"sent {sent / 120_000:.2f}, received {received / 120_000:.2f} per rank")

# %% [markdown]
# Each rank sends 2(W - 1)/W of the payload: exactly 2 bytes with two ranks, nearly 4 with many, and receives as much. The lecture's figure is right
# for W = 2.
#
# 16 bits have another price. float16 ends at 65504. What is W times your largest gradient?

# %%
def largest(divide_first):
    x = torch.tensor([20_000.0], dtype=torch.float16)
    if divide_first:
        x /= dist.get_world_size()
    ring_all_reduce(x)
    return x.item() if divide_first else (x / dist.get_world_size()).item()


print(f"mean of four times 20000 in float16: summed, then divided {run_ranks(largest, 4, False).values[0]}, "
      f"divided, then summed {run_ranks(largest, 4, True).values[0]}")

# %% [markdown]
# ## 6.5 How long will it take?
#
# *difficulty 3 of 5 · importance 4 of 5 · 15 to 20 minutes · 3 points · any machine*
#
# In the **alpha-beta model** a message of n bytes takes alpha + beta n: a latency, and the bytes over the bandwidth. An all-reduce takes as
# long as the messages that have to follow one another.
#
# - *Through rank 0*: it receives W - 1 tensors one after the other, then sends as many.
# - *Ring*: all ranks send at once; the steps follow one another, each with a W-th of the tensor.
# - *Tree*: ranks meet in pairs; one of each pair passes its whole tensor to the other, and is out. With 5 to 8 ranks that is three rounds.
#   The sum goes back the same way.

# %% [markdown]
# **Predict first.** 4 KB and 256 KB on 8 ranks, on the wire above: which of the three is fastest for each?

# %% nbgrader={"grade": false, "grade_id": "predict-fastest", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_small = None  # "naive", "ring" or "tree"
predicted_large = None  # "naive", "ring" or "tree"
### BEGIN SOLUTION
predicted_small = "tree"
predicted_large = "ring"
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "predict-time", "locked": false, "schema_version": 3, "solution": true, "task": false}
def predict_time(ranks, nbytes, link):
    """Seconds of an all-reduce by the alpha-beta model.

    ranks  : number of ranks, 1 or more
    nbytes : bytes of the tensor, 0 or more (a chunk is a W-th of them; rounding it up is fine)
    link   : has bandwidth_bytes_s and latency_s
    Returns a dict of seconds with the keys "naive" (through rank 0), "ring" and "tree".
    About 5 lines.
    """
    ### BEGIN SOLUTION
    whole = link.latency_s + nbytes / link.bandwidth_bytes_s
    chunk = link.latency_s + nbytes / ranks / link.bandwidth_bytes_s
    rounds = (ranks - 1).bit_length()  # log2, rounded up
    return {"naive": 2 * (ranks - 1) * whole, "ring": 2 * (ranks - 1) * chunk, "tree": 2 * rounds * whole}
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-predict", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("allreduce.predict", predict_time)

# %% nbgrader={"grade": true, "grade_id": "exam-predict", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("allreduce.predict", predict_time, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>For each of the three: how many messages follow one another, and how many bytes are in each?</details>
# <details><summary>Hint 2</summary>Seconds of one message: <code>latency_s + bytes / bandwidth_bytes_s</code>. Rounds of a tree: log2 of the
# ranks, rounded up: <code>math.ceil(math.log2(ranks))</code>.</details>
# <details><summary>Hint 3</summary>naive: 2(W - 1) whole tensors; ring: 2(W - 1) chunks; tree: two times the rounds, whole tensors</details>

# %%
for nbytes, guess in {4 * KB: predicted_small, 256 * KB: predicted_large}.items():
    seconds = predict_time(8, nbytes, SLOW)
    told = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
    print(f"8 ranks, {nbytes // KB} KB: {told}; you predicted {guess}")
measured, predicted = {}, {}
for name, runs in {"naive": naive_runs, "ring": ring_runs}.items():
    for world in (2, 4):
        label = f"{name}, {world} ranks"
        measured[label] = {size: runs[world][size][0] for size in SIZES}
        predicted[label] = {size: predict_time(world, size, SLOW)[name] for size in SIZES}
predicted_times(measured, predicted, title="Time against size")

# %% [markdown]
# On the left the curves are flat: latency. On the right they rise with the bytes: bandwidth. What lies between measured and predicted is this
# machine, which has to copy the bytes and run Python.

# %% [markdown]
# ## 6.6 Extension: a tree
#
# *difficulty 4 of 5 · importance 2 of 5 · 20 minutes · 1 point · any machine*
#
# For small tensors the ring's 2(W - 1) latencies are the whole cost, and a tree needs about 2 log2(W). In round 1, odd ranks send to the even rank
# below them. In round 2 of those that are left every other one sends, and so on. 3, 5 and 6 ranks have to work, too.

# %% nbgrader={"grade": false, "grade_id": "tree-all-reduce", "locked": false, "schema_version": 3, "solution": true, "task": false}
def tree_all_reduce(x):
    """Sum x over all ranks, with about log2(W) messages in a row. In place.

    x : contiguous float32 tensor, alike in shape on all ranks, with each rank's own values
    Afterwards x holds the sum, with the same bits on every rank. Any number of ranks.
    At most 3 * ceil(log2(W)) messages follow one another (a rank sends one and receives one at
    a time). Recursive doubling is fine, too. The same rules as in 6.1. About 14 lines.
    """
    ### BEGIN SOLUTION
    rank, world, part = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    spans = [2**k for k in range((world - 1).bit_length())]
    for span in spans:  # up: who has sent is out
        if rank % (2 * span) == span:
            dist.send(x, rank - span)
        elif rank % (2 * span) == 0 and rank + span < world:
            dist.recv(part, rank + span)
            x += part
    for span in reversed(spans):  # down, the same way back
        if rank % (2 * span) == span:
            dist.recv(x, rank - span)
        elif rank % (2 * span) == 0 and rank + span < world:
            dist.send(x, rank + span)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-tree", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("allreduce.tree", tree_all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>In which round does rank 6 of 8 send, and to whom? How does that show in its binary digits?</details>
# <details><summary>Hint 2</summary>In the round with span 1, 2, 4, ... rank r sends if <code>r % (2 * span) == span</code>, and receives if that
# is 0 and rank r + span exists.</details>
# <details><summary>Hint 3</summary>for each span upwards: send to r - span, or receive from r + span and add. For each span downwards: the
# same pairs, the other way round, without adding.</details>

# %%
small, FAR = SIZES[0], Link(bandwidth_bytes_s=5e6, latency_s=20e-3, per="rank")  # as if across an ocean
for name, function in {"naive": naive_all_reduce, "ring": ring_all_reduce, "tree": tree_all_reduce}.items():
    seconds, _ = measure(function, 8, [small], FAR)[small]
    print(f"8 ranks, {small // KB} KB: {name:<5} {1000 * seconds:5.0f} ms measured (simulated wire), "
          f"{1000 * predict_time(8, small, FAR)[name]:5.0f} ms predicted")

# %% [markdown]
# Through rank 0 may beat its prediction: a send is done when its last byte has left, so on the way back rank 0 does not wait out every
# latency. The model counts them all.

# %% [markdown]
# ## On a real wire
#
# Without a `Link`, messages go through this machine's own network stack, by PyTorch's backend **gloo**. Its all-reduce is a ring, too, written in
# C++, and cut finer, so that one piece is added while the next one travels.

# %%
def against_library(nbytes, on_cards=False):
    """On every rank: best seconds of five, in turns, of your ring and the library's."""
    if on_cards:
        torch.cuda.set_device(dist.get_rank())
    x, best = torch.zeros(nbytes // 4, device="cuda" if on_cards else "cpu"), {}
    done = torch.cuda.synchronize if on_cards else lambda: None
    for _ in range(5):
        for name, function in {"yours": ring_all_reduce, "the library's": dist.all_reduce}.items():
            dist.barrier()
            done()
            started = time.perf_counter()
            function(x)
            done()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - started)
    return best


for nbytes in (1 * MB, 4 * MB, 16 * MB):
    values = run_ranks(against_library, 2, nbytes).values
    yours, gloos = (max(value[name] for value in values) for name in values[0])
    print(f"2 ranks, {nbytes // MB:2d} MB: yours {1000 * yours:6.1f} ms, gloo's {1000 * gloos:6.1f} ms ({yours / gloos:.2f} times)")

# %% [markdown]
# ## Reflection
#
# You train 1.5 billion parameters with 16-bit gradients on 64 workers, each behind a wire of 10 GB/s and 20 microseconds. In four to eight
# sentences: (a) What does each worker send per step, and how does what you measured in *"2 bytes per parameter"* support that? (b) How long
# does an all-reduce take through rank 0 and by the ring, by your `predict_time`, and how well did that agree with a time that you measured?
# (c) A colleague sums 400 layers' gradients one by one. For a layer with 2,000 parameters, which algorithm do you advise, and what else?
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-ring", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) payload 3 GB, sent 2 * 63/64 of it, 5.9 GB, supported by measured bytes per parameter (2.00, 2.67, 3.00 for 2, 3, 4 ranks); (b)
# about 37.8 s through rank 0 and 0.59 s by the ring, with a comparison of a measured and a predicted figure of the learner's own and a reason for
# the difference; (c) 4 KB: the latencies decide (2.5 ms for the ring's 126 steps, 0.24 ms for a tree's 12), so a tree, and summing many
# layers in one message. **1**: two of the three, or all without a measured number. **0**: restates the lecture.
#
# *Example.* The payload is 2 bytes for each of 1.5e9 parameters, 3 GB; each worker sends 2 * 63/64 of that, 5.9 GB. I measured 2.00, 2.67 and 3.00
# bytes per parameter for 2, 3 and 4 ranks, which is 2(W - 1)/W times 2 bytes. By predict_time rank 0 takes 37.8 s and the ring 0.59 s. For 4 ranks and
# 256 KB I predicted 95 ms and measured 101 ms: the copies and Python come on top. A layer of 2,000 parameters is 4 KB, the ring pays 126 latencies, 2.5 ms,
# and a tree 12, 0.24 ms. Better still: put many layers' gradients into one buffer, and pay the latencies once.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **torch.distributed**: `all_reduce`, `reduce_scatter_tensor`, `all_gather_into_tensor`. DDP calls the first in buckets (the next lab), FSDP
#   the other two on their own: an all-reduce is a reduce-scatter and an all-gather, and between them there is room for an optimizer step.
# - **NCCL** on NVIDIA cards chooses between rings and trees by size and topology; `NCCL_ALGO=Ring` or `Tree` decides for it. Its chunks are cut
#   further, so that sending and adding overlap.
# - **MPI**: `MPI_Allreduce`, with recursive doubling for small and rings for large arrays. **Horovod** brought the ring to deep learning.
# - Switches that add (NVIDIA SHARP) send each tensor up and down once: W times less traffic at a root, half of a ring's.

# %% [markdown]
# ## On a card
#
# With two or more NVIDIA cards the same code runs on them, over NCCL, beside NCCL's own all-reduce. Bus bandwidth is what each card sends per
# second: 2(W - 1)/W of the tensor over the time.

# %%
cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
if cards >= 2:
    world = min(cards, 8)
    try:
        values = run_ranks(against_library, world, 256 * MB, on_cards=True).values
    except (DeadlockError, RankTimeout):
        print("yours stands still on cards: NCCL wants a rank's send and receive in one batch_isend_irecv")
        values = []
    for name in values[0] if values else ():
        seconds = max(value[name] for value in values)
        print(f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}, 256 MB, {name}: {1000 * seconds:.2f} ms, "
              f"bus bandwidth {2 * (world - 1) / world * 256e6 / seconds / 1e9:.1f} GB/s")
else:
    what = f"one card ({torch.cuda.get_device_name()})" if cards else "no card"
    print(f"{what} here (torch {torch.__version__}): an all-reduce between cards needs two, and everything above ran on the CPU")

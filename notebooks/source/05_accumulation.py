# ---
# labkit: {lab: "05", slug: accumulation, title: "Accumulation: a large batch in small pieces", minutes: 95, difficulty: 3, points: 25, cards: 0, needs: ["04"]}
# ---

# %% [markdown]
# # 05 · Accumulation: a large batch in small pieces
#
# *about 95 minutes · difficulty 3 of 5 · 25 points · any machine, no card needed*
#
# One training step on 64 sequences holds 55 MiB here. When you are done, your own code makes the same step, every gradient
# equal to 1 part in 100,000, in **under 30% of that memory**, and 256 sequences need no more than 64 do.
#
# The trick is old and one line long. Getting that line right, at the end of an epoch, with text of unequal length, with mixed precision
# and with a schedule, is what this lab is about: each of these went wrong in code that many people used.

# %% [markdown]
# ## Recap: mixed precision in five lines
#
# 1. `torch.autocast(device, dtype)` runs matrix products in 16 bits and keeps the weights and their gradients in 32.
# 2. float16 has a small range: small gradients become 0. So the loss is multiplied by a **scale** before backward, and every gradient with it.
# 3. Before anyone uses the gradients (the clipping, the optimizer) they are divided by the scale again: **unscaled**.
# 4. If a gradient is infinite, the step is **skipped** and the scale halved; after many good steps it is doubled.
# 5. `torch.amp.GradScaler(device)` does it: `scale(loss)`, `unscale_(optimizer)`, `step(optimizer)`, `update()`. bfloat16 needs none of this.

# %%
import math
import time

import torch
from torch import nn

from labkit import Recorder, check, live_memory
from labkit.data import batches, python_docs
from labkit.figures import compare_memory, lines, pieces_and_memory, step_weights
from labkit.gpt import GPT, GPTConfig, next_token_loss
from labkit.paper import PaperScaleError, paper_scale
from labkit.widgets import explore

torch.set_num_threads(1)  # steady times, also where other programs keep the cores busy
MIB = 2**20
CONFIG = GPTConfig(context=64, layers=2, heads=4, width=64)
ROWS = 64  # sequences in a batch, of 64 tokens each
text, _ = python_docs()
batch = batches(text, ROWS, CONFIG.context, count=1)[0]  # (inputs, targets), both (64, 64)


def fresh(config=CONFIG):
    """The same model every time, and an optimizer whose momentum exists already, as in the middle of a training run."""
    model = GPT(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # of nothing
    optimizer.zero_grad()
    return model, optimizer


def loss_fn(model, batch):
    """The mean loss over all tokens of `batch`, a pair (inputs, targets)."""
    inputs, targets = batch
    return next_token_loss(model(inputs), targets)


# %% [markdown]
# ## The baseline
#
# One step on all 64 sequences. Parameters and momentum stay, gradients come in backward, and the mountain is activations: they grow with
# the number of sequences, and next to nothing else here does.

# %%
def whole_step(model, optimizer, batch, title, budget_bytes=None):
    """One training step on the whole batch, drawn live. Returns its Recording."""
    with Recorder(watch=[model, optimizer, *batch], budget_bytes=budget_bytes) as recorder, live_memory(recorder, title=title):
        with recorder.phase("forward"):
            loss = loss_fn(model, batch)
        with recorder.phase("backward"):
            loss.backward()
        with recorder.phase("step"):
            optimizer.step()
            optimizer.zero_grad()
    return recorder.recording


model, optimizer = fresh()
loss_fn(model, batch).backward()  # once to warm up, so that times compare
optimizer.zero_grad()
baseline = whole_step(model, optimizer, batch, "One step on 64 sequences")

# %%
print(f"peak {baseline.peak_bytes / MIB:.1f} MiB; alive at the peak: {baseline.alive_summary('peak')}")
for category, nbytes in baseline.by_category("peak").items():
    print(f"  {category:<16}{nbytes / MIB:8.2f} MiB")

# %% [markdown]
# Now take half of that peak away. The operator that exceeds the budget raises `torch.OutOfMemoryError`, as a card would. Read what was
# alive when it stopped.

# %%
budget = baseline.peak_bytes // 2
model, optimizer = fresh()
try:
    whole_step(model, optimizer, batch, "The same step with half the memory", budget_bytes=budget)
except torch.OutOfMemoryError as error:
    print(f"OutOfMemoryError: {error}")

# %% [markdown]
# ## 5.1 What fits?
#
# *difficulty 2 of 5 · importance 3 of 5 · 15 to 20 minutes · 4 points*
#
# How many of the 64 sequences can you have at once? You try, and a trial costs a step. Whatever fits, all smaller sizes fit too.
# Double until something fails; then the answer lies between the last size that fits and
# the first that does not, and every trial in the middle halves what is left: **bisection**.
#
# A failed trial must leave nothing behind. An exception that you keep holds its traceback, the traceback holds the frames of the calls that
# were running, and the frames hold their tensors. So does an `except` block, for as long as you are inside it.

# %% [markdown]
# **Predict first.** The peak grows by the same bytes per sequence. How many of the 64 fit into half of it?

# %% nbgrader={"grade": false, "grade_id": "predict-largest", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_rows = None  # your number
### BEGIN SOLUTION
predicted_rows = 31  # a little less than half: parameters and momentum do not shrink
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "largest-micro-batch", "locked": false, "schema_version": 3, "solution": true, "task": false}
def largest_micro_batch(step, limit):
    """The largest number of rows, from 1 to `limit`, for which step(rows) fits into memory; 0 if none does.

    step  : runs one training step on that many rows (an int from 1 to limit) and returns something
            of no use, or raises torch.OutOfMemoryError. Whatever fits, all smaller numbers fit
    limit : int, at least 1
    Calls step at most 2 * log2(limit) + 3 times (log2 rounded up). When a trial begins, nothing of
    an earlier one is alive. Any other exception of step comes out unchanged. About 12 lines.
    """
    ### BEGIN SOLUTION
    def fits(rows):
        try:
            step(rows)
        except torch.OutOfMemoryError:
            return False  # leaving the block lets go of the exception, and of every tensor its frames held
        return True

    low, high = 0, 1  # low fits; high is the next to try
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)  # does not fit, or is not asked for
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
    ### END SOLUTION


def accumulation_steps(batch_size, largest):
    """Into how many pieces of at most `largest` rows a batch of `batch_size` rows is cut: as few as possible.

    Both are ints, at least 1; the last piece may be smaller. Returns an int. 1 line.
    """
    ### BEGIN SOLUTION
    return math.ceil(batch_size / largest)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-largest", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("accumulation.largest", largest_micro_batch, accumulation_steps)

# %% nbgrader={"grade": true, "grade_id": "exam-largest", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("accumulation.largest", largest_micro_batch, accumulation_steps, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Keep two numbers: one that fits, one that does not. What does each trial do to them, and when are you
# done?</details>
# <details><summary>Hint 2</summary><code>except torch.OutOfMemoryError:</code> without a name, and nothing in the block but a
# <code>return</code>. Everything else of the search belongs outside.</details>
# <details><summary>Hint 3</summary>a helper that tells whether a size fits; double while it does, up to the limit; then, while the two
# numbers are not neighbours, try the middle and replace one of them</details>

# %% [markdown]
# Your search on the real step, first in float32, then with the forward in bfloat16. A trial is a *whole* step, backward included, with
# momentum already there: a trial without either promises room that training does not have.

# %%
def search(autocast):
    """(largest number of sequences, recording) for one whole step under the budget."""
    model, optimizer = fresh()
    recorder = Recorder(watch=[model, optimizer, *batch], budget_bytes=budget)

    def trial(rows):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_fn(model, [part[:rows] for part in batch])
        loss.backward()

    name = "bfloat16" if autocast else "float32"
    with recorder, live_memory(recorder, title=f"Looking for the largest micro-batch, {name}"):
        return largest_micro_batch(trial, ROWS), recorder


rows_float32, searched = search(autocast=False)
rows_bfloat16, _ = search(autocast=True)

# %%
for name, rows in {"float32": rows_float32, "bfloat16 autocast": rows_bfloat16}.items():
    print(f"{name:<18} {rows} sequences fit into {budget / MIB:.1f} MiB: 64 in "
          f"{accumulation_steps(64, rows)} pieces, 256 in {accumulation_steps(256, rows)}")
print(f"you predicted {predicted_rows} in float32")
print(f"the lecture's question, 256 with at most 8 at a time: {accumulation_steps(256, 8)} pieces")

# %% [markdown]
# ## 5.2 One step from many pieces
#
# *difficulty 2 of 5 · importance 5 of 5 · 15 to 20 minutes · 5 points*
#
# The mean over 64 sequences is the mean of four means over 16. Gradients are linear, so the gradient of the whole batch is the mean of the
# four **micro-batches'** gradients. And `backward` *adds* to `.grad`. So: forward and backward for one micro-batch, let its graph go, take the
# next; step once at the end. The micro-batches of one step are a **window**.
#
# Who divides? `loss_fn` gives the mean over *its* micro-batch and knows nothing of the others. The sum over the window is yours to
# turn into a mean, once.

# %% [markdown]
# **Predict first.** Four micro-batches of 16 instead of one batch of 64: what percentage of the baseline's peak remains?

# %% nbgrader={"grade": false, "grade_id": "predict-peak", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_percent = None  # your number
### BEGIN SOLUTION
predicted_percent = 27  # a quarter of the activations; parameters, momentum and the gradients stay whole
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "accumulate", "locked": false, "schema_version": 3, "solution": true, "task": false}
def accumulate(model, micro_batches, optimizer, loss_fn):
    """Make one step of the optimizer from a window of micro-batches, and return the window's mean loss.

    micro_batches : list of at least one, all with equally many rows. What one looks like only
                    loss_fn knows: loss_fn(model, micro_batch) -> 0-dim tensor, the mean loss over
                    that micro-batch. Nothing else divides it
    optimizer     : holds all of the model's parameters; every micro-batch gives each a gradient.
                    No gradients are there before the first call; what one call adds must not count
                    in the next (clear before the window or after it, as you like)
    The gradient that the optimizer sees is that of the mean over all rows of the window. One forward,
    one backward per micro-batch and one optimizer.step() in all; never more than one micro-batch's
    activations are alive, and the peak does not grow with their number. Returns the mean loss of the window as a
    plain number (no graph hanging on it). About 7 lines.
    """
    ### BEGIN SOLUTION
    total = 0.0
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch) / len(micro_batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-window", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("accumulation.window", accumulate)

# %% nbgrader={"grade": true, "grade_id": "exam-window", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("accumulation.window", accumulate, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Double the number of micro-batches and keep the data. Which of your numbers must not change?</details>
# <details><summary>Hint 2</summary>Division of a loss by a number is part of the graph: it divides every gradient.
# <code>loss.item()</code> takes the number and leaves the graph.</details>
# <details><summary>Hint 3</summary>for each micro-batch: its loss divided by their number, backward, add the number to a sum;
# after the loop: step, clear</details>

# %% [markdown]
# The step that ran out of memory, once more under the same budget, as 16 x 4.

# %%
def cut(batch, rows):
    """A batch as a list of micro-batches of `rows` rows."""
    return list(zip(*(part.split(rows) for part in batch)))


def record_pieces(batch, rows, title, budget_bytes=None):
    """The Recording of one step by `accumulate` in pieces of `rows` rows."""
    model, optimizer = fresh()
    recorder = Recorder(watch=[model, optimizer, *batch], budget_bytes=budget_bytes)
    with recorder, live_memory(recorder, title=title), recorder.phase("window"):
        accumulate(model, cut(batch, rows), optimizer, loss_fn)
    return recorder.recording


pieces = record_pieces(batch, 16, "64 sequences as 16 x 4, half the memory", budget)

# %%
def update_of(run):
    """How one step of run(model, optimizer) moves the parameters, as one vector."""
    model, optimizer = fresh()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    run(model, optimizer)
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def off(update, right):
    """Distance of two vectors, relative to the right one's length."""
    return ((update - right).norm() / right.norm()).item()


whole_update = update_of(lambda model, optimizer: (loss_fn(model, batch).backward(), optimizer.step()))
your_update = update_of(lambda model, optimizer: accumulate(model, cut(batch, 16), optimizer, loss_fn))
print(f"peak {baseline.peak_bytes / MIB:.1f} MiB before, {pieces.peak_bytes / MIB:.1f} MiB after "
      f"({pieces.peak_bytes / baseline.peak_bytes:.0%}; you predicted {predicted_percent}%)")
print(f"your update is off by {off(your_update, whole_update):.0e} of its length")
compare_memory({"whole": baseline, "16 x 4": pieces}, baseline="whole", title="Before and after", budget_bytes=budget)

# %% [markdown]
# Four teeth instead of one mountain. From the second tooth on the gradients lie under it: they exist once, however many teeth follow. So a
# batch of 256 needs no more than one of 64:

# %%
large = batches(text, 256, CONFIG.context, count=1, seed=4)[0]
for rows, part in ((8, batch), (8, large)):
    model, optimizer = fresh()
    with Recorder(watch=[model, optimizer, *part]) as recorder:
        accumulate(model, cut(part, rows), optimizer, loss_fn)
    print(f"{len(part[0]):>3} sequences as {rows} x {len(part[0]) // rows:<2}: {recorder.recording.peak(born=True) / MIB:.1f} MiB born in the step")

# %% [markdown]
# ### Move the sliders
#
# Every state is a real recording of your `accumulate` (sequences cut to 32 tokens). Left: the peak against the number of pieces, a line per
# size. Right: memory over time of the state that you choose. What decides the height, and what does the number of pieces change?

# %%
SIZES, COUNTS = (4, 8, 16), (1, 2, 4)
short = [part[:, :32] for part in batches(text, max(SIZES) * max(COUNTS), CONFIG.context, count=1, seed=1)[0]]


def record_quietly(rows, count):
    model, optimizer = fresh()
    part = [half[: rows * count] for half in short]
    with Recorder(watch=[model, optimizer, *part]) as recorder:
        accumulate(model, cut(part, rows), optimizer, loss_fn)
    return recorder.recording


recordings = {(rows, count): record_quietly(rows, count) for rows in SIZES for count in COUNTS}
explore(
    {"rows": SIZES, "pieces": COUNTS},
    lambda rows, pieces: pieces_and_memory(recordings, rows, pieces, title="Rows per piece, number of pieces"),
    start={"rows": 8, "pieces": 4},
    title="A batch in pieces",
)

# %% [markdown]
# ## 5.3 An epoch, and its last window
#
# *difficulty 3 of 5 · importance 5 of 5 · 15 to 20 minutes · 4 points*
#
# Here is the lecture's loop. To see what it does, run it on a model whose gradient tells where it came from: `Tally` has one parameter
# entry per micro-batch, and micro-batch j's loss is entry j. So the gradient that the optimizer finds *is* the list of weights
# with which the micro-batches go into that step.

# %%
class Tally(nn.Module):
    """One parameter entry per micro-batch; the loss of micro-batch j is entry j."""

    def __init__(self, count):
        super().__init__()
        self.entries = nn.Parameter(torch.zeros(count))

    def forward(self, j):
        return self.entries[j]


def lecture_epoch(model, micro_batches, optimizer, loss_fn, accumulation_steps, scheduler=None):
    for i, micro_batch in enumerate(micro_batches):
        loss = loss_fn(model, micro_batch) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def weights_of_steps(epoch, count, window, epochs=2):
    """The weights of `count` micro-batches in every step of `epochs` epochs."""
    tally, seen = Tally(count), []
    optimizer = torch.optim.SGD(tally.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(tally.entries.grad.tolist()))
    for _ in range(epochs):
        epoch(tally, list(range(count)), optimizer, lambda model, j: model(j), window, scheduler)
    return seen


# %% [markdown]
# **Predict first.** 7 micro-batches, windows of 4, two epochs of the lecture's loop: how many steps does it make, and what do the weights in the
# *second* step add up to? (They should add up to 1.)

# %% nbgrader={"grade": false, "grade_id": "predict-lecture", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_steps = None  # your number
predicted_sum = None  # your number
### BEGIN SOLUTION
predicted_steps = 2  # one per epoch: i + 1 is never 8
predicted_sum = 1.75  # the three that were left over, and four new ones, a quarter each
### END SOLUTION

# %%
seen = weights_of_steps(lecture_epoch, count=7, window=4)
print(f"{len(seen)} steps in two epochs (you predicted {predicted_steps})")
for number, weights in enumerate(seen):
    print(f"  step {number + 1}: weights add up to {sum(weights):.2f}" + (f" (you predicted {predicted_sum})" if number == 1 else ""))
step_weights(seen, [(0, 4), (0, 4)], title="The lecture's loop: 7 micro-batches by 4, two epochs",
             names=[f"epoch {number + 1}" for number in range(len(seen))])

# %% [markdown]
# Micro-batches 5 to 7 make no step in their own epoch. Their gradients wait and are added to the next epoch's first window, which
# becomes 1.75 times as large as it should be. (If the epoch had begun with a `zero_grad`, they would be lost.)
#
# A short last window deserves a step of its own, divided by what is really in it. And the learning rate's **scheduler** counts updates: it
# moves once after each step of the optimizer, not once per micro-batch.

# %% nbgrader={"grade": false, "grade_id": "train-epoch", "locked": false, "schema_version": 3, "solution": true, "task": false}
def train_epoch(model, micro_batches, optimizer, loss_fn, window, scheduler):
    """One epoch: a step of the optimizer for each window of micro-batches, and return the windows' mean losses.

    micro_batches : list of n micro-batches, n at least 1, all with equally many rows
    window        : micro-batches per step, at least 1; the last window has what is left and may be
                    shorter (or all there is, if n is less than window)
    scheduler     : scheduler.step() once after each step of the optimizer
    loss_fn and optimizer as in 5.2; use your `accumulate`. The optimizer steps n / window times,
    rounded up, each time on the mean of that window's micro-batches only, in this epoch and in those
    that follow. Returns a list with one plain number for each window. About 5 lines.
    """
    ### BEGIN SOLUTION
    losses = []
    for start in range(0, len(micro_batches), window):
        losses.append(accumulate(model, micro_batches[start : start + window], optimizer, loss_fn))
        scheduler.step()
    return losses
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-epoch", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("accumulation.epoch", train_epoch)

# %% nbgrader={"grade": true, "grade_id": "exam-epoch", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("accumulation.epoch", train_epoch, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Write down, for 7 micro-batches by 4, which of them belong to which step, and by what each is divided.</details>
# <details><summary>Hint 2</summary><code>range(0, n, window)</code> gives the start of each window, and a slice past the end of a list is
# just shorter.</details>
# <details><summary>Hint 3</summary>for each start: accumulate on the slice, note its loss, move the scheduler; return the notes</details>

# %%
step_weights(
    weights_of_steps(train_epoch, count=7, window=4), [(0, 4), (4, 7)] * 2,
    title="Yours: 7 micro-batches by 4, two epochs", names=[f"epoch {e}, step {s}" for e in (1, 2) for s in (1, 2)],
)

# %% [markdown]
# ## 5.4 When the pieces are not equal
#
# *difficulty 3 of 5 · importance 4 of 5 · 15 to 20 minutes · 4 points*
#
# Text has no equal lengths. Sequences are padded, and the padding's targets are set to -100, which the loss leaves out. Now micro-batches
# have 6, 4 and 2 *counted* targets, and the mean of three means is no longer the mean: a target in the smallest piece weighs three times as much
# as one in the largest. Widely used trainers did this until somebody looked, in 2024.
#
# What must be equal is the weight of each *target*. What weight does the *mean* of a micro-batch deserve, then?

# %% [markdown]
# **Predict first.** Three micro-batches with 6, 4 and 2 counted targets: with what weight does the first one's mean go into the sum?

# %% nbgrader={"grade": false, "grade_id": "predict-weight", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_weight = None  # your number
### BEGIN SOLUTION
predicted_weight = 0.5  # 6 of 12
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "accumulate-tokens", "locked": false, "schema_version": 3, "solution": true, "task": false}
def accumulate_tokens(model, micro_batches, optimizer, loss_fn):
    """Make one step of the optimizer in which every counted target of the window weighs the same.

    micro_batches : list of at least one pair (inputs, targets); targets is an int64 tensor of any
                    shape, and -100 in it does not count. The counts differ. A micro-batch may
                    have no counted target at all; at least one in the window has some
    loss_fn       : loss_fn(model, micro_batch) -> 0-dim tensor, the mean loss over the counted targets
                    of that micro-batch. Over none at all it is nan, and its gradient may be nan, too
    Otherwise as `accumulate`; a micro-batch without targets needs no forward. Returns the mean loss
    over all counted targets of the window as a plain number. About 10 lines.
    """
    ### BEGIN SOLUTION
    counts = [int((targets != -100).sum()) for _, targets in micro_batches]
    total = 0.0
    for micro_batch, count in zip(micro_batches, counts):
        if count == 0:
            continue  # 0 * nan is nan
        loss = loss_fn(model, micro_batch) * (count / sum(counts))
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-tokens", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("accumulation.tokens", accumulate_tokens)

# %% nbgrader={"grade": true, "grade_id": "exam-tokens", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("accumulation.tokens", accumulate_tokens, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Write the sum over all targets as a sum over micro-batches. By what is each micro-batch's mean
# multiplied to become its sum?</details>
# <details><summary>Hint 2</summary>You need the count of the whole window before the first backward: count all targets first.
# <code>(targets != -100).sum()</code></details>
# <details><summary>Hint 3</summary>counts of all micro-batches; for each with any: its loss times its share of the total count, backward;
# then step, clear</details>

# %% [markdown]
# Now sequences of very unequal length through the GPT, in four micro-batches: how far is each version's update from that of the whole
# batch?

# %%
lengths = torch.linspace(64, 2, ROWS).round().long()  # counted targets per sequence, long ones first
ragged = (batch[0], batch[1].masked_fill(torch.arange(CONFIG.context) >= lengths[:, None], -100))
right = update_of(lambda m, o: accumulate(m, [ragged], o, loss_fn))  # one piece: the whole batch
by_means = update_of(lambda m, o: accumulate(m, cut(ragged, 16), o, loss_fn))
by_targets = update_of(lambda m, o: accumulate_tokens(m, cut(ragged, 16), o, loss_fn))
print("counted targets per micro-batch:", [int((t != -100).sum()) for _, t in cut(ragged, 16)])
print(f"mean of means: the update is off by {off(by_means, right):.1%}")
print(f"by targets:    the update is off by {off(by_targets, right):.0e} (you predicted a weight of {predicted_weight} for 6 of 12)")

# %% [markdown]
# ## 5.5 All of it together
#
# *difficulty 4 of 5 · importance 4 of 5 · 20 to 30 minutes · 6 points*
#
# The lecture's last loop combines mixed precision with accumulation. Add clipping of the gradient's norm, a schedule, and a short last
# window: every call has one right place.
#
# - autocast around each forward; the scaled loss goes backward; the sum in `.grad` is scaled, and *all of a window shares one scale*;
# - once per window: unscale, clip, step, update, clear;
# - if one micro-batch overflowed, the sum is infinite and the *whole window* is skipped;
# - a skipped window is no update: the schedule stands still. (Some libraries move it all the same.)

# %% [markdown]
# **Predict first.** 12 micro-batches in windows of 4: how often is each of `scale`, `unscale_`, `update` called in one epoch?

# %% nbgrader={"grade": false, "grade_id": "predict-calls", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_calls = None  # three numbers: (scale, unscale_, update)
### BEGIN SOLUTION
predicted_calls = (12, 3, 3)
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "train-epoch-amp", "locked": false, "schema_version": 3, "solution": true, "task": false}
def train_epoch_amp(model, micro_batches, optimizer, loss_fn, window, scheduler, scaler, max_norm, device="cpu"):
    """One epoch as `train_epoch`, with forwards in float16, a loss scaler and clipping.

    scaler   : a torch.amp.GradScaler of that device, or one with the same methods: scale(loss),
               unscale_(optimizer), step(optimizer), update(), get_scale(), which falls after a skipped step. Each
               loss goes backward scaled; the scaler is updated once after each window and only then
    max_norm : limit for the norm of the window's whole gradient, in the optimizer's own units (unscaled)
    device   : "cpu" or "cuda", for torch.autocast; its dtype is torch.float16
    Everything else as in `train_epoch`: the last window may be short. A window in which any gradient is infinite or
    nan makes no step at all and leaves nothing for the next one. scheduler.step() once after each step
    that the optimizer really made. Returns a list with the mean loss (unscaled) of each window,
    whatever number for a skipped one. About 18 lines.
    """
    ### BEGIN SOLUTION
    losses = []
    for start in range(0, len(micro_batches), window):
        pieces = micro_batches[start : start + window]
        total = 0.0
        for micro_batch in pieces:
            with torch.autocast(device, torch.float16):
                loss = loss_fn(model, micro_batch) / len(pieces)
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)  # not if a gradient is infinite
        scaler.update()
        if scaler.get_scale() >= before:  # it was not backed off, so the optimizer did step
            scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-amp", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("accumulation.amp", train_epoch_amp)

# %% nbgrader={"grade": true, "grade_id": "exam-amp", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("accumulation.amp", train_epoch_amp, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>For each call, ask: is it about one micro-batch, or about their sum?</details>
# <details><summary>Hint 2</summary><code>scaler.step</code> skips by itself. That it did shows in <code>scaler.get_scale()</code> before and
# after <code>update()</code>.</details>
# <details><summary>Hint 3</summary>for each window: for each micro-batch: loss over their number inside autocast, scaled backward outside; then
# unscale, clip, note the scale, step, update, move the schedule unless the scale has fallen, clear</details>

# %% [markdown]
# A real run of it: 12 micro-batches of 4 sequences in windows of 4, four epochs, and a scale that begins too high. Each fall of the curve
# is a window that was skipped as a whole; between them the scale doubles after three good windows.

# %%
class CountingScaler(torch.amp.GradScaler):
    """Counts its calls, and notes the scale after each window."""

    def __init__(self, **options):
        super().__init__("cpu", **options)
        self.calls, self.scales = {"scale": 0, "unscale_": 0, "update": 0}, []

    def scale(self, loss):
        self.calls["scale"] += 1
        return super().scale(loss)

    def unscale_(self, optimizer):
        self.calls["unscale_"] += 1
        return super().unscale_(optimizer)

    def update(self):
        self.calls["update"] += 1
        super().update()
        self.scales.append(self.get_scale())


half_text = [(x[:, :32], y[:, :32]) for x, y in batches(text, 4, CONFIG.context, count=12, seed=2)]
model, optimizer = fresh()
scaler = CountingScaler(init_scale=2.0**21, growth_interval=3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
first = train_epoch_amp(model, half_text, optimizer, loss_fn, 4, scheduler, scaler, max_norm=1.0)
print(f"one epoch: {scaler.calls} (you predicted {predicted_calls})")
losses = first + [loss for _ in range(3) for loss in
                  train_epoch_amp(model, half_text, optimizer, loss_fn, 4, scheduler, scaler, max_norm=1.0)]
updates = round(math.log(scheduler.get_last_lr()[0] / 0.1, 0.9))
print(f"{len(losses)} windows, {updates} updates; loss {losses[0]:.2f} in the first, {losses[-1]:.2f} in the last")
lines({"log2 of the scale": (range(len(losses) + 1), [21, *map(math.log2, scaler.scales)])},
      title="The loss scale, window after window", x="windows done", y="log2 of the scale")

# %% [markdown]
# ## What it buys, and what not
#
# A small batch's gradient is the large one's plus noise. The mean of K independent micro-batches has a K-th of the variance of one: that
# is what accumulation buys. Measure it: the gradients of 64 micro-batches of 4 sequences, averaged in groups of K.

# %%
def gradient_of(model, micro_batch):
    """The gradient of one micro-batch, as one vector."""
    grads = torch.autograd.grad(loss_fn(model, micro_batch), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


model, _ = fresh()
many = [part[:, :32] for part in batches(text, 256, CONFIG.context, count=1, seed=3)[0]]
gradients = torch.stack([gradient_of(model, piece) for piece in cut(many, 4)])  # (64, parameters)
variance = {}
for k in (1, 2, 4, 8, 16):
    groups = gradients.view(len(gradients) // k, k, -1).mean(1)
    variance[k] = groups.var(0).sum().item()
    print(f"K = {k:>2}: variance {variance[k]:.2e}, {variance[1] / variance[k]:.1f} times less than one micro-batch's")
lines({"measured": (list(variance), list(variance.values())), "1/K": (list(variance), [variance[1] / k for k in variance])},
      title="Variance of the gradient against micro-batches per step", x="K", y="variance, all parameters", log="xy")

# %% [markdown]
# What it does not buy is time: every sequence still goes forward and backward once. Very small pieces are slower, because an operator
# costs something to call however little it does.

# %%
def seconds_per_step(rows):
    """The best of two steps on 64 sequences in pieces of `rows`."""
    model, optimizer = fresh()
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        accumulate(model, cut(batch, rows), optimizer, loss_fn)
        taken.append(time.perf_counter() - started)
    return min(taken)


for rows in (64, 16, 4, 1):
    print(f"64 sequences as {rows:>2} x {64 // rows:<2}: {1000 * seconds_per_step(rows) / 64:.2f} ms per sequence")

# %% [markdown]
# And there is an exception. **BatchNorm** normalises with the mean and variance of the rows that go through it *together*. In pieces those are
# other rows, so the gradient is another one, and its running averages move once per piece. LayerNorm looks at each row alone.

# %%
def norm_net(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), norm(32), nn.ReLU(), nn.Linear(32, 4))


rows, answers = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 4
for norm in (nn.LayerNorm, nn.BatchNorm1d):
    grads = []
    for size in (32, 8):
        net = norm_net(norm)
        for x, y in cut((rows, answers), size):
            (nn.functional.cross_entropy(net(x), y) * size / 32).backward()
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    print(f"{norm.__name__:<12} 32 rows as 8 x 4: the gradient is off by {off(grads[1], grads[0]):.1e}")
print(f"BatchNorm's running averages moved {int(net[1].num_batches_tracked)} times in one step")

# %% [markdown]
# ## Paper scale
#
# Your `accumulate` on the smallest GPT-2, 124 million parameters and sequences of 1,024 tokens, on tensors that have sizes and no
# numbers: bytes are counted that nobody allocates. A batch of 256 at once, and the first two of its 32 pieces of 8: as you saw, from the
# second piece on the peak stays.

# %%
def paper_peak(model, rows, count):
    """Peak bytes of a window of `count` pieces of `rows` sequences."""
    ids = [torch.zeros(rows, 1024, dtype=torch.long) for _ in range(count)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(watch=[model, optimizer]) as recorder:
        accumulate(model, [(part, part) for part in ids], optimizer, loss_fn)
    return recorder.recording.peak_bytes


try:
    with paper_scale():
        gpt2 = GPT(GPTConfig(vocab=50257, context=1024, layers=12, heads=12, width=768))
        for rows, count in ((256, 1), (8, 2)):
            print(f"{rows:>4} sequences x {count}: peak {paper_peak(gpt2, rows, count) / 1e9:6.1f} GB")
except PaperScaleError as error:
    print(error)

# %% [markdown]
# ## Reflection
#
# The lecture asks: *you want an effective batch size of 256, and your card holds 8. What do you set `accumulation_steps` to?* Say
# what that number is worth, in four to eight sentences, with your own measurements: (a) the largest micro-batch in float32 and in
# bfloat16, and into how many pieces 256 is cut with each; (b) what your times per sequence say about pieces of 1; (c) by how much
# the variance fell from K = 1 to K = 16, what a step then costs in time, and whether 32 pieces are always worth it.
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-accumulation", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) names both measured sizes (31 and about 44) and the pieces they give (9 and 6), and says that the 16-bit activations are what
# shrinks; (b) quotes measured times: about equal down to pieces of 4, clearly slower at 1, and gives a reason (cost of calling operators, matrices
# too small); (c) variance about 16 times less (own figure), a step 16 times as long, and that more noise reduction is worth it only while noise is what limits
# progress: K times as many sequences per update mean K times fewer updates. **1**: two of the three, or all without a measured number.
# **0**: restates the lecture.
#
# *Example.* Under half the memory I could have 31 sequences in float32 and 44 with bfloat16, so 256 takes 9 pieces or 6; not half as many,
# since softmax, logits and weights stay in 32 bits. Down to pieces of 4 a sequence took the same time, at pieces of 1 it took 1.6 times as long, so
# I take the largest that fits and no smaller. From 1 to 16 micro-batches the variance fell 15-fold, and the step took 16 times as long. If I am
# far from the minimum, 16 noisy steps bring me further than one clean one; 32 pieces are worth it where the loss jumps about or the rate must be large.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **Hugging Face**: `gradient_accumulation_steps` of the `Trainer`, `accelerator.accumulate(model)` of Accelerate. Its mean-of-means
#   was mended in October 2024: the trainer now counts targets over the window (`num_items_in_batch`).
# - **Lightning**: `accumulate_grad_batches`; it steps on a short last window, divided by the full number all the same. **DeepSpeed**: `train_batch_size` is
#   `train_micro_batch_size_per_gpu` times `gradient_accumulation_steps` times ranks. **Megatron**: `--micro-batch-size` and `--global-batch-size`.
# - **PyTorch** has no function for it: it is what `backward` does. With several ranks, `no_sync` saves the messages between pieces (lab 07), and
#   micro-batches are what fills a pipeline (lab 09).
# - **JAX**: `optax.MultiSteps`.

# %% [markdown]
# ## On a card
#
# With an NVIDIA card the same code runs there, and the allocator confirms that the peak is flat. Without one this cell says so.

# %%
if torch.cuda.is_available():
    config = GPTConfig(context=512, layers=8, heads=8, width=512)
    model, optimizer = fresh(config)
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    flops_per_token = 6 * sum(p.numel() for p in model.parameters())  # forward 2, backward 4, per parameter
    for rows, count in ((16, 1), (16, 2), (16, 4), (16, 16), (64, 1)):
        on_card = [part.cuda() for part in batches(text, rows * count, config.context, count=1)[0]]
        accumulate(model, cut(on_card, rows)[:1], optimizer, loss_fn)  # warm
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        accumulate(model, cut(on_card, rows), optimizer, loss_fn)
        torch.cuda.synchronize()
        per_second = rows * count * config.context / (time.perf_counter() - started)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {rows} x {count}: peak {torch.cuda.max_memory_allocated() / MIB:.0f} MiB, "
              f"{per_second:.3g} tokens/s, {per_second * flops_per_token / 1e12:.1f} TFLOP/s")
else:
    print(f"no card here (torch {torch.__version__}): everything above ran on the CPU")

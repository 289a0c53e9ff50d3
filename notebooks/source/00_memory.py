# ---
# labkit: {lab: "00", slug: memory, title: "Where does the memory go?", minutes: 90, difficulty: 2, points: 25, cards: 0, needs: []}
# ---

# %% [markdown]
# # 00 · Where does the memory go?
#
# *about 90 minutes · difficulty 2 of 5 · 25 points · any machine, no card needed*
#
# "CUDA out of memory" is where training of large models begins. In this lab you learn to say beforehand how much a training step takes.
# At the end your own `estimate` is **within 5% of the measured peak** of a transformer of any size, and tells which card it needs: for
# GPT-2's 1,557,611,200 parameters before anybody has allocated one of its 24.9 GB.

# %% [markdown]
# ## How these labs work
#
# You read, you **predict** a number, you write a function, you check it, you look at what it did.
#
# - A `Recorder` notes every piece of memory that PyTorch asks for and gives back. `live_memory` draws that while the cell runs.
# - `check("name", your_function)` tries your function on fresh inputs in a process of its own. It shows what was expected and seen, and
#   asks one question when something is off. Run it as often as you like.
# - Under each exercise three hints are folded, from a nudge to the whole way.
# - About a third of the points come from hidden cases, run when you hand in. A prediction costs nothing when it is wrong.

# %% [markdown]
# ## Recap: Adam in five lines
#
# 1. Backward leaves a gradient `g` for every parameter `w`.
# 2. Adam keeps a running mean of it, the **momentum**: `m = 0.9 m + 0.1 g`.
# 3. And a running mean of its square, the **variance**: `v = 0.999 v + 0.001 g²`.
# 4. The update divides one by the other: `w = w - rate · m / (√v + 1e-8)`, after a correction for their slow start.
# 5. So for each parameter Adam remembers two more numbers, from step to step. That is its **state**, and AdamW's too.

# %%
from dataclasses import replace

import torch

from labkit import Recorder, check, live_memory
from labkit.figures import lines, stacked_bars
from labkit.gpt import GPT, GPT2_XL, GPT3, GPTConfig, next_token_loss
from labkit.levels import memory_levels, read_bandwidth
from labkit.paper import paper_scale
from labkit.widgets import explore

torch.set_num_threads(1)  # steady, also where other programs keep the cores busy
MIB, GIB, GB = 2**20, 2**30, 10**9
SMALL = GPTConfig(vocab=2048, context=128, layers=4, heads=4, width=128)

# %% [markdown]
# ## The baseline: three steps, watched
#
# `GPT(config)` is a transformer that predicts the next token. `SMALL` says how large: 4 blocks, each token a vector of 128 numbers (the
# *width*), 4 attention heads, 2,048 possible tokens (the *vocabulary*), sequences of up to 128 (the *context*). A training step is always
# the same four lines: forward, backward, optimizer, clear the gradients. Random tokens will do; memory does not care what they say.
#
# Watch which colour appears when, and which ones stay.

# %%
def tokens(config, batch, seq):
    """Random (ids, targets), each (batch, seq) of int64."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab, (batch, seq), generator=generator) for _ in range(2)]


def train(config, batch, seq, steps=3, title="", budget_bytes=None):
    """Recording of `steps` training steps with AdamW; drawn live when there is a title."""
    model, (ids, targets) = GPT(config), tokens(config, batch, seq)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with Recorder(watch=[model, optimizer, ids, targets], budget_bytes=budget_bytes) as recorder:
        with live_memory(recorder, title=title) if title else recorder.phase("steps"):
            for _ in range(steps):
                with recorder.phase("forward"):
                    loss = next_token_loss(model(ids), targets)
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                optimizer.zero_grad(set_to_none=False)  # to zero, and they stay allocated
    return recorder.recording


baseline = train(SMALL, 8, 128, title="Three training steps of a small GPT")

# %%
peak = baseline.by_category("peak")
print(f"peak {baseline.peak_bytes / MIB:.1f} MiB, of which")
for category, nbytes in peak.items():
    print(f"  {category:<16}{nbytes / MIB:8.1f} MiB")

# %% [markdown]
# These six **categories** go through all labs. *Activations* are what forward leaves for backward. *Other* is what nobody keeps: a tensor
# on its way from one operator to the next.
#
# Now half of that memory. The operator that exceeds it raises `torch.OutOfMemoryError`, as a card would; ours says what was alive.

# %%
try:
    train(SMALL, 8, 128, title="The same with half the memory", budget_bytes=baseline.peak_bytes // 2)
except torch.OutOfMemoryError as error:
    print(f"OutOfMemoryError: {error}")

# %% [markdown]
# ## Which memory ran out?
#
# Memory comes in levels. Next to the arithmetic lie **registers**; then small, fast memory: **shared memory** on a card, L1 on a
# processor; then **L2** (and L3); last the large, slow one: **device memory**, on a card also called global memory. Tensors live in that
# last one, and it is the one that runs out: the lecture counts 8 to 10 GB of it on consumer cards, 40 to 80 on an A100. The levels before
# it are far smaller and faster, and only hold what is being worked on.
#
# The next cell reads blocks of growing size again and again. As long as a block fits a level, it comes at that level's speed.

# %%
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
levels = memory_levels(DEVICE)
for name, size in levels.items():
    print(f"{name:<14}{size / 1024:>14,.0f} KiB")
largest = 2**30 if DEVICE == "cuda" else 2**27
sizes = [2**k for k in range(12, 31) if 2**k <= largest]
speeds = [read_bandwidth(size, DEVICE, seconds=0.08) / GB for size in sizes]
lines(
    {"reading, one thread" if DEVICE == "cpu" else "reading": ([size / 1024 for size in sizes], speeds)},
    title="Every level has its speed", x="bytes read again and again (KiB)", y="GB per second", log="xy",
    marks={name: size / 1024 for name, size in levels.items() if sizes[0] <= size <= sizes[-1]},
)  # fmt: skip

# %% [markdown]
# ## 0.1 How many parameters?
#
# *difficulty 2 of 5 · importance 4 of 5 · 15 minutes · 4 points*
#
# Everything that stays is counted in parameters, so count them. The next cell lists a model's parameters by name. Find out which of the
# sizes in a config each shape comes from.
#
# The **head** turns a vector of `width` numbers into one score per possible token. In GPT-2 it uses the embedding's own weight (*tied*); with
# `tied=False` it has another one.
#
# **Predict first.** Of GPT-2's 1.56 billion parameters (48 layers, width 1,600), how many percent are in its 48 blocks?

# %%
for name, parameter in GPT(replace(SMALL, layers=1)).named_parameters():
    print(f"{name:<32}{tuple(parameter.shape)}")

# %% nbgrader={"grade": false, "grade_id": "predict-blocks", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_percent = None  # percent: your number
### BEGIN SOLUTION
predicted_percent = 95
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "gpt-parameter-count", "locked": false, "schema_version": 3, "solution": true, "task": false}
def gpt_parameter_count(config):
    """Number of parameters of GPT(config), exactly.

    config : GPTConfig with vocab, context, layers, heads, width and tied
    A tied head is the embedding: it counts once. No model is made: `GPT` is off limits, GPT-3 would
    need 700 GB. Returns an int. About 5 lines.
    """
    ### BEGIN SOLUTION
    h = config.width
    linears = 4 * (h * h + h) + (4 * h * h + 4 * h) + (4 * h * h + h)  # query, key, value, out; up; down
    norms = 2 * 2 * h
    tables = config.vocab * h + config.context * h
    head = 0 if config.tied else config.vocab * h
    return tables + config.layers * (linears + norms) + 2 * h + head
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-parameters", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("memory.parameters", gpt_parameter_count)

# %% nbgrader={"grade": true, "grade_id": "exam-parameters", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("memory.parameters", gpt_parameter_count, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which lines of the list come once per layer, and which once per model? Write two sums.</details>
# <details><summary>Hint 2</summary>A Linear from a to b has a·b weights and b biases. A norm has 2·width. The head has no bias.</details>
# <details><summary>Hint 3</summary>per layer: four Linears width to width, one to 4·width and one back, two norms; per model: two tables,
# one norm, and a head's weight unless it is tied</details>

# %%
MODELS = {
    "GPT-2 small": replace(GPT2_XL, layers=12, heads=12, width=768),
    "GPT-2 XL": GPT2_XL,
    "7 billion": GPTConfig(vocab=50257, context=2048, layers=32, heads=32, width=4096),
    "GPT-3": GPT3,
}
shares = {}
for name, config in MODELS.items():
    count, rest = gpt_parameter_count(config), gpt_parameter_count(replace(config, layers=0))
    print(f"{name:<12}{count:>16,} parameters")
    words, places = config.vocab * config.width / count, config.context * config.width / count
    shares[name] = {"blocks": 100 * (1 - rest / count), "vocabulary": 100 * words, "positions": 100 * places}
print(f"in GPT-2 XL's blocks: {shares['GPT-2 XL']['blocks']:.1f}%; you predicted {predicted_percent}")
stacked_bars(shares, title="Where the parameters are", y="percent of all parameters")

# %% [markdown]
# ## 0.2 What a parameter costs
#
# *difficulty 2 of 5 · importance 5 of 5 · 15 minutes · 4 points*
#
# Weight, gradient, Adam's two: each is an array with one entry per parameter; together they are the **model states**. How many bytes an
# entry takes depends on the *recipe*:
#
# - **fp32**: everything in 32 bit.
# - **autocast**: all arrays as in fp32. 16-bit copies of what operators read come and go within the step; they are no states.
# - **16-bit**: everything in 16 bit. (It trains badly: small updates round away.)
# - **mixed**: weights and gradients in 16 bit; the optimizer works in 32 bit, on **master weights** of its own.
# - **mixed, fp32 gradients**: *mixed*, but gradients in 32 bit.
# - **mixed, gradients twice**: *mixed*, and the optimizer has a 32-bit copy of the gradients.

# %% [markdown]
# **Predict first.** 1.5 billion parameters in the *mixed* recipe: how many GB of model states? (1 GB is 10⁹ bytes here.)

# %% nbgrader={"grade": false, "grade_id": "predict-states", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_states_gb = None  # GB: your number
### BEGIN SOLUTION
predicted_states_gb = 24
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "model-states", "locked": false, "schema_version": 3, "solution": true, "task": false}
def recipes():
    """The six recipes above, each with Adam.

    Returns a dict: recipe's name -> dict of array's name -> bytes of one entry. The arrays' names are
    "weights", "gradients", "fp32 gradients" (the copy), "master weights", "momentum", "variance"; an
    array that a recipe has not is left out, or 0.
    """
    ### BEGIN SOLUTION
    adam = {"momentum": 4, "variance": 4}
    mixed = {"weights": 2, "gradients": 2, "master weights": 4, **adam}
    return {
        "fp32": {"weights": 4, "gradients": 4, **adam},
        "autocast": {"weights": 4, "gradients": 4, **adam},
        "16-bit": {"weights": 2, "gradients": 2, "momentum": 2, "variance": 2},
        "mixed": mixed,
        "mixed, fp32 gradients": {**mixed, "gradients": 4},
        "mixed, gradients twice": {**mixed, "fp32 gradients": 4},
    }
    ### END SOLUTION


def model_state_bytes(n, recipe):
    """Bytes of all arrays of `recipe` (array's name -> bytes of one entry; any names) for n parameters. 1 line."""
    ### BEGIN SOLUTION
    return n * sum(recipe.values())
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-states", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("memory.states", recipes, model_state_bytes)

# %% nbgrader={"grade": true, "grade_id": "exam-states", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("memory.states", recipes, model_state_bytes, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>For each recipe: which arrays are there, and how wide is each?</details>
# <details><summary>Hint 2</summary>16 bit are 2 bytes, 32 bit are 4. Master weights are one more array, always of 4.</details>
# <details><summary>Hint 3</summary>a dict of dicts; every recipe has weights, gradients, momentum and variance; the mixed ones have
# master weights too, the last one also the copy; the bytes are n times the sum of the sizes</details>

# %%
bars = {}
for name, recipe in recipes().items():
    print(f"{name:<24}{sum(recipe.values()):3} bytes per parameter, {model_state_bytes(1.5e9, recipe) / GB:5.1f} GB at 1.5 billion")
    bars[name.replace(", ", ",\n")] = {"parameters" if array == "weights" else array: 1.5 * size for array, size in recipe.items()}
print(f"you predicted {predicted_states_gb} GB for the mixed one")
stacked_bars(bars, title="Model states of 1.5 billion parameters", y="GB", limits={'a "24 GB" card': 24 * GIB / GB})

# %% [markdown]
# So *16 bytes per parameter* is no law: people report 16, 18 and 20 for "mixed precision" and all are right, for their recipe.
#
# And mixed precision alone saves no model states: 4+4+4+4 and 2+2+4+4+4 are both 16. What it saves is elsewhere; lab 04 measures that.

# %% [markdown]
# ## 0.3 What is there right now?
#
# *difficulty 2 of 5 · importance 4 of 5 · 10 to 15 minutes · 3 points*
#
# An estimate needs a measurement beside it. A model holds its parameters, each parameter its gradient in `.grad`, and the optimizer a
# dict `optimizer.state`: parameter -> {name: value}. Write the function that adds up what is really there.
#
# **Predict first.** You make a model of 1,000,000 parameters and an `AdamW` for it. How many bytes of optimizer state are there, before
# the first step?

# %% nbgrader={"grade": false, "grade_id": "predict-lazy", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_new_bytes = None  # bytes: your number
### BEGIN SOLUTION
predicted_new_bytes = 0  # it is made in the first step
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "live-states", "locked": false, "schema_version": 3, "solution": true, "task": false}
def live_states(model, optimizer):
    """Bytes that a model and its optimizer hold at this moment.

    model : nn.Module, parameters of any dtype, perhaps tied or frozen; its buffers do not count
    optimizer : of torch.optim, with tensors in its state: AdamW, SGD, Adagrad and others
    Returns a dict with the keys "parameters", "gradients" and "optimizer state". A tensor in memory counts
    once, however many names it has. The optimizer's step counters (4 bytes each) may count or not.
    About 6 lines.
    """
    ### BEGIN SOLUTION
    parameters = list(model.parameters())  # each once, also where it is tied
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
        "optimizer state": sum(value.nbytes for value in state),
    }
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-live", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("memory.live", live_states)

# %% nbgrader={"grade": true, "grade_id": "exam-live", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("memory.live", live_states, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Where does each of the three lie: which attribute, which dict? When is it not there yet?</details>
# <details><summary>Hint 2</summary><code>tensor.nbytes</code> is <code>numel() * element_size()</code>; <code>parameter.grad</code> may
# be None; a state's values may be no tensors.</details>
# <details><summary>Hint 3</summary>three sums: over model.parameters(); over those parameters' grads that exist; over the tensors in the
# dicts that optimizer.state.values() gives</details>

# %%
model, (ids, targets) = GPT(SMALL), tokens(SMALL, 8, 128)
optimizer = torch.optim.AdamW(model.parameters())
moments = {"new": live_states(model, optimizer)}
next_token_loss(model(ids), targets).backward()
moments["after\nbackward"] = live_states(model, optimizer)
optimizer.step()
moments["after the\nfirst step"] = live_states(model, optimizer)
optimizer.zero_grad()  # by default set_to_none=True
moments["after\nzero_grad"] = live_states(model, optimizer)
n = gpt_parameter_count(SMALL)
told = moments["after the\nfirst step"]
print(f"new optimizer: {moments['new']['optimizer state']} bytes of state; you predicted {predicted_new_bytes}")
print(f"after the first step: {sum(told.values()) / n:.4f} bytes per parameter")
stacked_bars({when: {k: v / MIB for k, v in held.items()} for when, held in moments.items()}, title="Lazy", y="MiB")

# %% [markdown]
# Adam makes its state in the first step. So a job can pass its first forward and backward and run out of memory in the first
# `optimizer.step()`, or in the second forward. Whoever measures before the first step measures half.

# %% [markdown]
# ## 0.4 What a batch adds
#
# *difficulty 4 of 5 · importance 5 of 5 · 30 to 40 minutes · 6 points*
#
# States are there whatever you feed. The rest comes with the batch. The token ids and targets count as *input data*: two tensors of
# int64.
#
# **Predict first.** At 8 sequences `SMALL` had the peak printed above. At 16, by which factor is it higher?

# %% nbgrader={"grade": false, "grade_id": "predict-double", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_factor = None  # times: your number
### BEGIN SOLUTION
predicted_factor = 1.8
### END SOLUTION

# %%
doubled = train(SMALL, 16, 128, steps=2)
print(f"{'at the peak':<16}{'batch 8':>12}{'batch 16':>12}   MiB")
for category, nbytes in doubled.by_category("peak").items():
    print(f"{category:<16}{peak[category] / MIB:12.2f}{nbytes / MIB:12.2f}")
print(f"{doubled.peak_bytes / baseline.peak_bytes:.2f} times the peak; you predicted {predicted_factor}")

# %% nbgrader={"grade": false, "grade_id": "input-bytes", "locked": false, "schema_version": 3, "solution": true, "task": false}
def input_bytes(batch, seq):
    """Bytes of the ids and the targets of `batch` sequences of `seq` tokens. 1 line."""
    ### BEGIN SOLUTION
    return 2 * batch * seq * 8
    ### END SOLUTION


def grows_with_batch():
    """The set of the categories, out of the six above, that grow in proportion to the batch."""
    ### BEGIN SOLUTION
    return {"activations", "input data", "other"}
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-batch", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("memory.batch", input_bytes, grows_with_batch)

# %% [markdown]
# ### Activations
#
# An operator's gradient needs values from its forward: `y = x @ W` needs `x` to get the gradient of `W`. Autograd keeps them. The next
# cell lists what a model of one block leaves for backward, in units of `batch * seq * width` numbers: embeddings, the block, last norm,
# head, loss.
#
# For each line ask: which size is it, who will need it? A Linear's output is mostly the next operator's input: one tensor, counted once.
# And the heads' matrix products copy query, key and value into another order; the originals go.

# %%
def kept(config, batch, seq, dtype=torch.float32):
    """(total bytes, list of storages) of what forward and loss leave for backward, as recorded."""
    model, (ids, targets) = GPT(config).to(dtype), tokens(config, batch, seq)
    with Recorder(watch=[model, ids, targets]) as recorder:
        loss = next_token_loss(model(ids), targets)  # noqa: F841  holds the graph
        recorder.mark("kept")
    return recorder.recording.at("kept", born=True), recorder.recording.alive("kept", top=None, born=True)


ONE = GPTConfig(vocab=2048, context=128, layers=1, heads=4, width=128)
total, storages = kept(ONE, 8, 96)
unit = 8 * 96 * 128 * 4
print(f"{'units':>8}  {'bytes':>11}  made by")
for storage in sorted(storages, key=lambda storage: storage.born_event):
    print(f"{storage.bytes / unit:8.3f}  {storage.bytes:>11,}  {storage.op.removeprefix('aten.'):<18}{storage.module}")
print(f"{total / unit:8.3f}  {total:>11,}  in all")

# %% nbgrader={"grade": false, "grade_id": "activation-bytes", "locked": false, "schema_version": 3, "solution": true, "task": false}
def activation_bytes(config, batch, seq, itemsize=4):
    """Bytes that forward and loss of GPT(config) leave for backward, on `batch` sequences of `seq` tokens.

    config   : GPTConfig; its dropout is 0
    itemsize : bytes of one number: 4 in fp32, 2 in 16 bit
    The model's own weights and the input are left out. The step is next_token_loss(GPT(config)(ids), targets):
    nobody holds the logits. A formula of the sizes, within 5% of the recorder: what is tiny may go.
    `GPT` is off limits. About 6 lines.
    """
    ### BEGIN SOLUTION
    rows = batch * seq
    norms = 2 * (2 * rows * config.width + 2 * rows)  # input and output, mean and 1/std of each
    attention = 4 * rows * config.width + batch * config.heads * seq * seq  # query, key, value, result; weights
    mlp = 2 * 4 * rows * config.width  # before and after GELU
    ends = 2 * rows * config.width + rows * config.vocab  # last norm; log-probabilities
    return itemsize * (config.layers * (norms + attention + mlp) + ends)
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-activations", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("memory.activations", activation_bytes)

# %% nbgrader={"grade": true, "grade_id": "exam-activations", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("memory.activations", activation_bytes, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Of the table: which rows double? Of the list: sort its lines into norms, attention, MLP, and what is
# outside of the block.</details>
# <details><summary>Hint 2</summary>Sizes that occur: batch·seq·width, four times that, batch·heads·seq·seq, and batch·seq·vocab,
# once.</details>
# <details><summary>Hint 3</summary>per block: 2 for each norm, 4 for attention, 8 for the MLP, in units of batch·seq·width, and the
# table; once: 2 units for the last norm, and batch·seq·vocab; all of it times itemsize</details>

# %%
lengths = [16, 48, 88, 128]
recorded = {seq: kept(SMALL, 8, seq)[0] for seq in lengths}
counted = [activation_bytes(SMALL, 8, seq) for seq in lengths]
paper = [SMALL.layers * 8 * seq * SMALL.width * (34 + 5 * SMALL.heads * seq / SMALL.width) for seq in lengths]
print("yours over the recorder's:", *(f"{mine / recorded[seq]:.4f}" for mine, seq in zip(counted, lengths)))
print(f"a model in bfloat16: {activation_bytes(SMALL, 8, 64, 2) / kept(SMALL, 8, 64, torch.bfloat16)[0]:.4f}")
lines(
    {
        "recorder": (lengths, [nbytes / MIB for nbytes in recorded.values()]),
        "your formula": (lengths, [nbytes / MIB for nbytes in counted]),
        "34 + 5as/h": (lengths, [nbytes / MIB for nbytes in paper]),
    },
    title="Kept for backward, 8 sequences", x="tokens per sequence", y="MiB",
)  # fmt: skip

# %% [markdown]
# The third line is the best known formula: `s·b·h·(34 + 5·a·s/h)` bytes per layer (Korthikanti et al. 2022, arXiv 2205.05198; s tokens, b
# sequences, h width, a heads). It is right, for *their* graph: 16 bit, dropout with masks of one byte. Ours is fp32 without dropout: it
# keeps `4·s·b·h·(16 + a·s/h)`, plus the norms' statistics and a mask of one byte per pair of tokens. Other kernels keep other things;
# fused attention keeps no table at all. Borrow the method, not the numbers.

# %% [markdown]
# ### The 1.5-billion model, batch 1, 8 and 32
#
# The lecture says that activations "can easily be tens of GB". Inside `paper_scale()` tensors have sizes and no numbers: nothing is
# computed or allocated, and the recorder counts all the same. One block is recorded, the difference between two models and one; the other
# 46 are like it.

# %%
print(f"{'GB':<10}{'recorded':>12}{'yours':>10}")
for batch, dtype in ((1, torch.float32), (1, torch.bfloat16), (8, torch.bfloat16), (32, torch.bfloat16)):
    with paper_scale():
        one, two = (kept(replace(GPT2_XL, layers=layers), batch, 1024, dtype)[0] for layers in (1, 2))
    whole, mine = one + (GPT2_XL.layers - 1) * (two - one), activation_bytes(GPT2_XL, batch, 1024, dtype.itemsize)
    print(f"batch {batch:<4}{whole / GB:>12.1f}{mine / GB:>10.1f}   {str(dtype).removeprefix('torch.')}")

# %% [markdown]
# So "tens of GB" it is from a few sequences on; at one it is five in 16 bit, ten in fp32.

# %% [markdown]
# ## 0.5 The peak of a step
#
# *difficulty 3 of 5 · importance 5 of 5 · 20 minutes · 4 points*
#
# Out of memory is a matter of one instant, the peak. The sum of every category's own highest value is too much, since they do not all
# stand high at once. So look at the instant itself: what was alive at the peak of your baseline, and when was that?

# %%
for storage in baseline.alive("peak", top=4):
    print(f"{storage.bytes / MIB:6.2f} MiB  {storage.category:<12} {storage.op.removeprefix('aten.'):<28} born in {storage.phase}")
for phase, seen in baseline.by_phase().items():
    print(f"{phase:<10} peak {seen['peak_bytes'] / MIB:6.1f} MiB")
highest = sum(curve.max() for curve in baseline.timeline_by_category()[1].values())
print(f"each category's own highest, added up: {highest / MIB:.1f} MiB; the peak: {baseline.peak_bytes / MIB:.1f} MiB")

# %% [markdown]
# The three largest are as large as the logits, `batch * seq * vocab` numbers each: backward has just begun, every activation is still
# there, and the loss's gradients come on top. One of the three you have counted already.
#
# **Predict first.** The whole peak of `SMALL` at 4 sequences of 128 tokens, in MiB?

# %% nbgrader={"grade": false, "grade_id": "predict-peak", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_peak_mib = None  # MiB: your number
### BEGIN SOLUTION
predicted_peak_mib = 49
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "estimate", "locked": false, "schema_version": 3, "solution": true, "task": false}
def estimate(config, batch, seq, recipe):
    """What is alive at the peak of a training step of GPT(config), by category, in bytes.

    recipe : one of your recipes. Activations, and what the loss adds, have the weights' itemsize; master
             weights and copies belong to the optimizer's state.
    Returns a dict of the six categories "parameters", "gradients", "optimizer state", "activations",
    "input data" and "other". Gradients and state are there from earlier steps. The vocabulary is large, so
    that the peak is where backward begins. Each state within 2%, the others and the sum within 5%. Use your
    functions; `GPT` is off limits. About 10 lines.
    """
    ### BEGIN SOLUTION
    n, itemsize = gpt_parameter_count(config), recipe["weights"]
    optimizer = {array: size for array, size in recipe.items() if array not in ("weights", "gradients")}
    return {
        "parameters": n * recipe["weights"],
        "gradients": n * recipe["gradients"],
        "optimizer state": model_state_bytes(n, optimizer),
        "activations": activation_bytes(config, batch, seq, itemsize),
        "input data": input_bytes(batch, seq),
        "other": 2 * itemsize * batch * seq * config.vocab,  # gradients of log-probabilities and of logits
    }
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-estimate", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("memory.estimate", estimate)

# %% nbgrader={"grade": true, "grade_id": "exam-estimate", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("memory.estimate", estimate, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Go through the six categories at the peak. Which of your functions counts which?</details>
# <details><summary>Hint 2</summary><code>model_state_bytes</code> takes any recipe, also a part of one. The gradients of the loss are two
# tensors of the logits' size.</details>
# <details><summary>Hint 3</summary>n times weights, n times gradients, n times the rest of the recipe; activation_bytes with the weights'
# itemsize; input_bytes; twice batch·seq·vocab numbers</details>

# %% [markdown]
# Now let the recorder confirm it: models, batches and lengths that your formula has never seen, each trained for real.

# %%
FP32, STATES = recipes()["fp32"], ("parameters", "gradients", "optimizer state")
TRIALS = {
    "SMALL": (SMALL, 4, 128),
    "deep": (GPTConfig(2048, 128, 10, 4, 64), 4, 64),
    "wide": (GPTConfig(3000, 64, 2, 4, 192), 4, 64),
    "long": (GPTConfig(4000, 192, 2, 4, 64), 2, 192),
    "untied": (GPTConfig(2500, 96, 3, 6, 96, tied=False), 4, 96),
}
bars = {}
print(f"{'yours over the recorder':<26}{'states':>9}{'activations':>13}{'peak':>9}")
for name, (config, batch, seq) in TRIALS.items():
    recording = train(config, batch, seq, steps=2)
    seen, mine = recording.by_category("peak"), estimate(config, batch, seq, FP32)
    states = sum(mine[c] for c in STATES) / sum(seen[c] for c in STATES)
    whole = sum(mine.values()) / recording.peak_bytes
    print(f"{name:<26}{states:>9.4f}{mine['activations'] / seen['activations']:>13.4f}{whole:>9.4f} of {recording.peak_bytes / MIB:.1f} MiB")
    for label, parts in {f"{name},\nyours": mine, f"{name},\nmeasured": seen}.items():
        bars[label] = {category: nbytes / MIB for category, nbytes in parts.items()}
print(f"you predicted {predicted_peak_mib} MiB for the first")
stacked_bars(dict(list(bars.items())[:6]), title="Your estimate and the recorder", y="MiB at the peak")

# %% [markdown]
# ### Inference against training
#
# "Why is training so much more memory-intensive than inference?" asks the lecture. The same model, the same batch:

# %%
model, (ids, targets) = GPT(SMALL), tokens(SMALL, 8, 128)
with Recorder(watch=[model, ids]) as recorder, torch.inference_mode():
    model(ids)
inference = recorder.recording
print(f"inference {inference.peak_bytes / MIB:.1f} MiB, training {baseline.peak_bytes / MIB:.1f} MiB: "
      f"{baseline.peak_bytes / inference.peak_bytes:.1f} times")
both = {"inference": inference.by_category("peak"), "training": peak}
stacked_bars({name: {c: b / MIB for c, b in held.items()} for name, held in both.items()},
             title="The same model and batch", y="MiB at the peak")  # fmt: skip

# %% [markdown]
# ## 0.6 Which card?
#
# *difficulty 2 of 5 · importance 3 of 5 · 10 minutes · 2 points*
#
# Two traps. First, the lecture's 24 GB are 24·10⁹ bytes, 22.35 GiB; the number on a card counts **GiB** (2³⁰ bytes; some cards keep a few
# percent for error correction). Second, before your first tensor the driver's **context** is there: kernels, libraries, workspaces, often
# half a GiB or more.
#
# **Predict first.** 1.5 billion parameters, 24.0 GB of states, a "24 GB" card, half a GiB of context: how many GiB remain for
# activations?

# %% nbgrader={"grade": false, "grade_id": "predict-rest", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_rest_gib = None  # GiB: your number
### BEGIN SOLUTION
predicted_rest_gib = 1.1
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "which-card", "locked": false, "schema_version": 3, "solution": true, "task": false}
def which_card(needed_bytes, cards, context_bytes):
    """The name of the smallest card that holds `needed_bytes` and the context, or None.

    cards : dict, card's name -> GiB (whole or not), in any order; not changed. Full to the last byte still
            holds. About 4 lines.
    """
    ### BEGIN SOLUTION
    for name, gib in sorted(cards.items(), key=lambda card: card[1]):
        if needed_bytes + context_bytes <= gib * 2**30:
            return name
    return None
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-card", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("memory.card", which_card)

# %% nbgrader={"grade": true, "grade_id": "exam-card", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("memory.card", which_card, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>What has to fit, and into how many bytes?</details>
# <details><summary>Hint 2</summary><code>2**30</code>; <code>sorted(cards.items(), key=...)</code>.</details>
# <details><summary>Hint 3</summary>from the smallest card up: return the first whose GiB in bytes are at least needed plus context; after
# the loop, None</details>

# %%
CARDS = {f"{gib} GB": gib for gib in (8, 10, 16, 24, 40, 80, 141)}
CONTEXT = GIB // 2
rest = 24 * GIB - CONTEXT - 1.5e9 * sum(recipes()["mixed"].values())
print(f"left on a 24 GB card: {rest / GIB:.2f} GiB; you predicted {predicted_rest_gib}. A batch of one needs "
      f"{activation_bytes(GPT2_XL, 1, 1024, 2) / GIB:.1f} GiB of activations in 16 bit.")

# %% [markdown]
# ### Which model trains on which card, with what?
#
# The table takes one sequence of 1,024 tokens. Columns to the right are what the coming labs build, each by its simplest count:
# *checkpointing* (02) keeps one input per block and one block's inside; *LoRA* (11) has gradients and states for few weights only, here
# none; *ZeRO-3* (10) shares all states among 64 cards.

# %%
def needs(config, seq=1024):
    """Technique -> bytes at the peak, one sequence at a time."""
    mixed, recipe16 = recipes()["mixed"], {"weights": 2, "gradients": 0}
    plain = estimate(config, 1, seq, mixed)
    boundary = 2 * seq * config.width
    inside = activation_bytes(replace(config, layers=1), 1, seq, 2)
    checkpointed = {**plain, "activations": config.layers * boundary + inside}
    shared = {name: nbytes / 64 if name in STATES else nbytes for name, nbytes in checkpointed.items()}
    frozen = {**estimate(config, 1, seq, recipe16), "activations": checkpointed["activations"]}
    table = {"fp32": estimate(config, 1, seq, FP32), "mixed": plain, "+ checkpoints": checkpointed,
             "+ LoRA": frozen, "or + ZeRO-3 of 64": shared}  # fmt: skip
    return {technique: sum(parts.values()) for technique, parts in table.items()}


print(f"{'':<14}" + "".join(f"{technique:>20}" for technique in needs(SMALL)))
for name, config in MODELS.items():
    row = [f"{total / GIB:,.1f} GiB: {which_card(total, CARDS, CONTEXT) or 'none'}" for total in needs(config).values()]
    print(f"{name:<14}" + "".join(f"{cell:>20}" for cell in row))

# %% [markdown]
# ### Move the sliders
#
# Your `estimate`, for any size. Depth, width, batch and recipe; sequences of 1,024 tokens, GPT-2's vocabulary. Which slider moves which
# colour? Find the deepest model of width 1,600 that fits 24 GB at batch 1, and see what the recipe changes about it.

# %%
def draw_bar(layers, width, batch, recipe):
    config = GPTConfig(50257, 1024, layers, max(1, width // 64), width)
    parts = estimate(config, batch, 1024, recipes()[recipe])
    total = sum(parts.values())
    name = which_card(total, CARDS, CONTEXT)
    card = f"the {name} card" if name else "no card of these"
    parts = {category: nbytes / GIB for category, nbytes in parts.items()}
    limits = {name: gib - CONTEXT / GIB for name, gib in CARDS.items() if 0.3 * total < gib * GIB < 1.5 * total}
    return stacked_bars(
        {"a training step": parts, "its states": {category: parts[category] for category in STATES}},
        title=f"{gpt_parameter_count(config) / 1e9:.2f} billion parameters, {total / GIB:.1f} GiB: {card}",
        y="GiB at the peak", limits=limits,
    )  # fmt: skip


explore(
    {"layers": [6, 12, 24, 36, 48], "width": [768, 1024, 1280, 1600], "batch": [1, 2, 4, 8, 16, 32],
     "recipe": ["fp32", "16-bit", "mixed", "mixed, gradients twice"]},
    draw_bar, start={"layers": 48, "width": 1600, "batch": 1, "recipe": "mixed"}, title="What it takes, and which card holds it",
)  # fmt: skip

# %% [markdown]
# ## Before and after, at paper scale: GPT-2 as it is
#
# The lecture counts a round 1.5 billion parameters and 24 GB. Here is the real configuration on sizes without numbers, a whole training
# step of it: all 48 layers, one sequence of 1,024 tokens, fp32. (fp32 and *mixed* both take 16 bytes per parameter.) In the picture:
# before this lab, the lecture's 16 bytes; after it, your estimate; and the recorder.

# %%
with paper_scale():
    model, (ids, targets) = GPT(GPT2_XL), [torch.zeros(1, 1024, dtype=torch.long) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # one operator updates all: fewer to record
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # the state is there from the first step on
    with Recorder(watch=[model, optimizer, ids, targets]) as recorder:
        next_token_loss(model(ids), targets).backward()
    really = sum(parameter.numel() for parameter in model.parameters())
seen, mine = recorder.recording.by_category("peak"), estimate(GPT2_XL, 1, 1024, FP32)
held = {category: seen[category] for category in STATES}
states, most, whole = (sum(parts.values()) for parts in (held, seen, mine))
print(f"parameters {really:,}, yours {gpt_parameter_count(GPT2_XL):,}")
print(f"states {states / GB:.2f} GB (the lecture's round 24.0: {states / 24e9 - 1:+.1%}, as the parameters are more than 1.5 billion)")
print(f"peak {most / GB:.2f} GB, yours {whole / GB:.2f} GB ({whole / most - 1:+.2%})")
three = {"16 bytes per parameter": held, "your estimate": mine, "recorded": seen}
stacked_bars({name: {category: nbytes / GB for category, nbytes in parts.items()} for name, parts in three.items()},
             title="GPT-2, one sequence, fp32", y="GB", limits={'a "24 GB" card': 24 * GIB / GB, 'a "40 GB" card': 40 * GIB / GB})  # fmt: skip

# %% [markdown]
# ## Reflection
#
# *Why is training so much more memory-intensive than inference?* Answer the lecture's question with your own measurements, in four to
# eight sentences. Use (a) your measured factor between training and inference, and which categories it is made of; (b) your factor
# between batch 16 and batch 8, and why it is not 2; (c) the GPT-2 of the last picture at batch 32 in 16 bit: which category is the
# largest then, and would a recipe with fewer bytes per parameter save it?
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-training", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) gives the measured factor (about 6 here) and names gradients, optimizer state and kept activations as what
# inference has not; (b) gives the measured factor (about 1.8) and says that states do not grow with the batch, activations, inputs and
# the loss's temporaries do; (c) activations, about 165 GB in 16 bit against 25 GB of states, so no recipe saves it; it takes a smaller
# batch, or keeping fewer activations. **1**: two of the three, or all without a measured number. **0**: restates the lecture.
#
# *Example.* My training step peaked at 6.2 times the inference run. Inference holds the weights and a few tensors on their way; training
# adds one gradient and two Adam numbers per weight, and everything that backward will read. From 8 to 16 sequences the peak grew 1.8
# times and not 2, as parameters, gradients and state stay as they are. At batch 32 GPT-2 keeps about 165 GB of activations in 16 bit,
# over six times its states. A recipe with 8 bytes per parameter saves 12 GB of that sum, so it does not help; fewer sequences at a time
# do.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **PyTorch**: `torch.cuda.memory_allocated()` counts tensors, as our recorder does; `memory_reserved()` what the allocator took from
#   the driver and keeps for later; `nvidia-smi` shows that and the context. Say which one you read. `torch.cuda.memory._snapshot()` is
#   their `alive`.
# - **DeepSpeed**: `estimate_zero2_model_states_mem_needs_all_live(model)`: your `model_state_bytes`, for its recipes. **Hugging Face**:
#   `accelerate estimate-memory`, states only. **Megatron**: `report_theoretical_memory`, activations too.
# - `zero_grad()` frees gradients by default (`set_to_none=True`); accumulation (lab 05) keeps them, as you did here.
#
# Not in your estimate: buckets and gathered copies of distributed training, lists of temporaries in fused optimizers, memory lost between
# blocks. Leave a tenth of a card for them.

# %% [markdown]
# ## On a card
#
# With an NVIDIA card the same step runs there; its allocator is asked what it counted, and the driver what the context takes.

# %%
if torch.cuda.is_available():
    config, batch, seq = GPTConfig(50257, 512, 8, 12, 768), 8, 512
    torch.zeros(1, device="cuda")
    free, whole = torch.cuda.mem_get_info()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {whole / GIB:.2f} GiB; context and others "
          f"{(whole - free - torch.cuda.memory_reserved()) / GIB:.2f} GiB")
    model, (ids, targets) = GPT(config).cuda(), [part.cuda() for part in tokens(config, batch, seq)]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        start.record()
        next_token_loss(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        end.record()
        torch.cuda.synchronize()
    seconds, counted = start.elapsed_time(end) / 1000, torch.cuda.max_memory_allocated()
    flops = 6 * gpt_parameter_count(config) * batch * seq / seconds
    print(f"peak: allocator {counted / GIB:.2f} GiB, your estimate {sum(estimate(config, batch, seq, FP32).values()) / counted - 1:+.1%}; "
          f"{batch * seq / seconds:,.0f} tokens/s, {flops / 1e12:.1f} TFLOP/s")
else:
    print(f"no card here (torch {torch.__version__}): everything above ran on the CPU, and its bytes are the same on any machine")

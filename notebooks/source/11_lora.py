# ---
# labkit: {lab: "11", slug: lora, title: "LoRA: a small update to frozen weights", minutes: 110, difficulty: 3, points: 25, cards: 0, needs: ["00"]}
# ---

# %% [markdown]
# # 11 · LoRA: a small update to frozen weights
#
# *about 110 minutes · difficulty 3 of 5 · 25 points · any machine, no card needed*
#
# You have a GPT that was trained on Python's documentation, and a text that it has never seen. When you are done here, your own code adapts
# it by training **2% of its 842,496 numbers**, in under half the memory, without touching a single weight that it came with. What you hand
# over is a file that Hugging Face's library loads, a fiftieth of the model, and you know how much of full fine-tuning it reaches.
#
# The idea is Hu et al. 2021, *LoRA: Low-Rank Adaptation of Large Language Models* (arXiv 2106.09685).

# %% [markdown]
# ## Recap: attention in five lines
#
# 1. A transformer holds one vector per token, and a **block** changes them: attention first, then two Linears for each token by itself.
# 2. Attention multiplies each token's vector by three matrices: its **query**, its **key** and its **value**.
# 3. A token's query, multiplied with the keys of all tokens up to its own, gives one score for each.
# 4. Softmax makes the scores weights that add up to 1; the token gets the weighted sum of the values, through a fourth matrix, **out**.
# 5. So query and key decide *where a token looks*, value *what it takes from there*.

# %% [markdown]
# ## Recap: where the memory of training goes (lab 00)
#
# 1. In fp32 every parameter takes 4 bytes, its gradient 4 more.
# 2. Adam keeps two numbers for each parameter **that it trains**: 8 bytes.
# 3. So the states are 16 bytes per trained parameter, whatever the batch.
# 4. Activations, kept for backward, grow with the batch.
# 5. Adam's state does not exist before the first step.

# %%
import copy
import json
import math
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import labkit.data
from labkit import Recorder, check, live_memory
from labkit.data import batches, python_docs
from labkit.data.library import python_library
from labkit.data.pretrain import pretrained_gpt, validation_loss
from labkit.figures import compare_memory, lines, stacked_bars
from labkit.gpt import GPT, GPT3, next_token_loss
from labkit.paper import PaperScaleError, paper_scale
from labkit.widgets import explore

torch.set_num_threads(1)  # steady times, also where other programs keep the cores busy
MIB = 2**20
TEXTS = {"near": python_library("docstrings"), "far": python_library("code")}
OLD = python_docs()[1]  # documentation that the model was not trained on

# %% [markdown]
# ## The model and three texts
#
# `pretrained_gpt()` is a GPT with 4 blocks of width 128 whose tokens are bytes. It learned from Python's documentation topics; the script
# `labkit/data/pretrain.py` made it, and makes it again in under five minutes. Two texts are new to it: the **near** one is docstrings
# (English prose about Python), the **far** one is code, without comments. The loss is in nats per byte; guessing costs ln 256 = 5.5.

# %%
base = pretrained_gpt()
base_loss = {"old": validation_loss(base, OLD)}
for name, (_, held_out) in TEXTS.items():
    base_loss[name] = validation_loss(base, held_out)
print(f"{sum(p.numel() for p in base.parameters()):,} parameters")
for name, loss in base_loss.items():
    print(f"  {name:<5} loss {loss:.2f} nats per byte")

# %% [markdown]
# ## The baseline
#
# Full fine-tuning goes on training every parameter. `train_steps` takes two steps of it at batch size 1 and draws the memory while they
# run: two, because Adam's state is there only after the first.

# %%
def train_steps(model, parameters, title, batch=1, seq=64, budget_bytes=None):
    """Two training steps of `parameters`, drawn live if there is a title. Returns their Recording."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    (inputs, targets), = batches(TEXTS["far"][0], batch, seq, count=1)
    watch = {"model": model, "optimizer": optimizer, "inputs": inputs}
    recorder = Recorder(watch=watch, budget_bytes=budget_bytes)
    with recorder, live_memory(recorder, title=title) if title else nullcontext():
        for _ in range(2):
            with recorder.phase("forward"):
                loss = next_token_loss(model(inputs), targets)
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("step"):
                optimizer.step()
                optimizer.zero_grad()
    return recorder.recording


full = pretrained_gpt()
baseline = train_steps(full, full.parameters(), "Full fine-tuning, batch 1")

# %%
print(f"peak {baseline.peak_bytes / MIB:.1f} MiB")
for category, nbytes in baseline.by_category("peak").items():
    print(f"  {category:<16}{nbytes / MIB:8.2f} MiB")

# %% [markdown]
# Parameters, gradients and Adam's state: 16 bytes for each parameter, and that at batch size 1. The lecture's checklist ends here: *if full
# fine-tuning does not fit even at batch size 1, move to parameter-efficient fine-tuning.* Take half of the peak away and read what was
# alive.

# %%
budget = baseline.peak_bytes // 2
full = pretrained_gpt()
try:
    train_steps(full, full.parameters(), "The same with half the memory", budget_bytes=budget)
except torch.OutOfMemoryError as error:
    print(f"OutOfMemoryError: {error}")

# %% [markdown]
# ## 11.1 One layer
#
# *difficulty 3 of 5 · importance 5 of 5 · 20 to 30 minutes · 7 points*
#
# Fine-tuning takes a weight `W` to `W + D`. LoRA bets that a `D` of low **rank** r will do, a product `B A` of a tall `B` (out × r) and a
# wide `A` (r × in). Freeze `W` and train `A` and `B`:
#
# $$y = W x + b + \frac{\alpha}{r}\, B A x$$
#
# At the start the model must compute what it always did, so `B A` is zero; but not with both factors zero. **alpha** scales the
# update, divided by r as in the paper. The lecture does not divide: its "alpha = 1" is alpha = r here.

# %% [markdown]
# **Predict first.** The query matrix of the model is 128 × 128. How many numbers does its update train at rank 8?

# %% nbgrader={"grade": false, "grade_id": "predict-layer", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_layer = None  # numbers trained for one 128 x 128 matrix at rank 8: your number
### BEGIN SOLUTION
predicted_layer = 2048  # 8 * (128 + 128)
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "lora-linear", "locked": false, "schema_version": 3, "solution": true, "task": false}
class LoRALinear(nn.Module):
    """A frozen Linear and its trainable update: base(x) + (alpha / rank) * B A x.

    base    : nn.Linear, with or without bias. Its own tensors stay in use (no copies), keep their
              values bit for bit, and do not require grad any more
    rank    : at least 1, also above the layer's sizes
    alpha   : a number, whole or not
    dropout : in training mode, the share of x's entries (or columns, in one call) that the update
              sees as zero, the others divided by 1 - dropout. The base sees x as it is
    x       : (..., in) -> (..., out)

    A (rank, in) and B (out, rank) are the only trainable tensors, in the dtype and on the device
    of base.weight. One begins random (every layer with numbers of its own), the other exactly
    zero. Either may be stored transposed, or as the weight of a Linear; names are up to you, and
    so is the kind of class. What the module moves and saves has the base in it, and the factors.
    Later you need rank, alpha and dropout, and whether the update is merged. About 12 lines.
    """

    def __init__(self, base, rank, alpha, dropout=0.0):
        super().__init__()
        ### BEGIN SOLUTION
        self.base = base.requires_grad_(False)
        self.rank, self.alpha, self.dropout, self.merged = rank, alpha, dropout, False
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.A = nn.Parameter(torch.empty(rank, base.in_features, **like))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        out = self.base(x)
        if self.merged:
            return out
        small = F.linear(F.dropout(x, self.dropout, self.training), self.A)  # (..., rank)
        return out + F.linear(small, self.B) * (self.alpha / self.rank)
        ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-linear", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("lora.linear", LoRALinear)

# %% nbgrader={"grade": true, "grade_id": "exam-linear", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("lora.linear", LoRALinear, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>If both factors are zero, what is the gradient of each? If neither is, what does the first output become?</details>
# <details><summary>Hint 2</summary><code>base.requires_grad_(False)</code> freezes it; <code>nn.Parameter</code> makes a tensor that the
# module lists; <code>F.dropout(x, p, self.training)</code> knows the mode.</details>
# <details><summary>Hint 3</summary>keep base, frozen; A random (rank, in), B zeros (out, rank). forward: base of x, plus alpha / rank times B
# applied to (A applied to dropped-out x): two thin products, never the full matrix.</details>

# %%
def numbers_trained(rank, width=128):
    layer = LoRALinear(nn.Linear(width, width), rank, rank)
    return sum(p.numel() for p in layer.parameters() if p.requires_grad)


RANKS = (1, 2, 4, 8, 16, 32, 64)
print(f"rank 8 trains {numbers_trained(8)} numbers of this layer; you predicted {predicted_layer}")
lines({"your LoRALinear": (RANKS, [numbers_trained(rank) for rank in RANKS])},
      title="Numbers trained for a matrix of 128 by 128", x="rank", y="numbers", log="xy",
      limits={"the matrix itself": 128 * 128})

# %% [markdown]
# At rank 64 the factors have as many numbers as the matrix: a low rank saves only while it is *low* against the width. GPT-3's width is
# 12,288, and there rank 64 is still a hundredth.

# %% [markdown]
# ## 11.2 Into a model
#
# *difficulty 3 of 5 · importance 5 of 5 · 15 to 25 minutes · 6 points*
#
# The paper puts updates on the query and the value matrix of each block and freezes the rest: embeddings, norms, biases, everything. No code of
# the model changes. You take a module out of its parent and put yours in its place.
#
# **Predict first.** Rank 8 on query and value of all four blocks: how many numbers train, and how many bytes does Adam keep for them?

# %% nbgrader={"grade": false, "grade_id": "predict-model", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_trained = None  # numbers that train in the whole model: your number
predicted_adam_bytes = None  # bytes of Adam's state: your number
### BEGIN SOLUTION
predicted_trained = 16_384  # 4 blocks * 2 matrices * 2048
predicted_adam_bytes = 131_072  # 8 for each
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "inject", "locked": false, "schema_version": 3, "solution": true, "task": false}
def inject(model, rank, alpha, targets=("query", "value"), dropout=0.0):
    """Put a LoRALinear in the place of each Linear that is called like a target; freeze the rest.

    model   : any nn.Module, changed in place
    targets : the last names of the layers, whole: "query" means blocks.0.attention.query, or a
              layer `query` of the model itself, but not query_norm
    rank, alpha, dropout : of every LoRALinear
    Returns the list of parameters to train, for the optimizer: those of the adapters. Nothing
    else requires grad afterwards.
    Raises ValueError where no Linear is called like any of the targets. A second call leaves a
    model exactly as it is, still trainable; it may raise a ValueError. About 10 lines.
    """
    ### BEGIN SOLUTION
    found = [(path, module) for path, module in model.named_modules()
             if path.rpartition(".")[2] in targets and isinstance(module, nn.Linear)]
    if not found:
        raise ValueError(f"no Linear without an adapter is called {' or '.join(targets)}")
    model.requires_grad_(False)
    for path, linear in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LoRALinear(linear, rank, alpha, dropout))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-inject", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("lora.inject", inject)

# %% nbgrader={"grade": true, "grade_id": "exam-inject", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("lora.inject", inject, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Freezing everything and adding adapters: in which order? What is trainable after the other one?</details>
# <details><summary>Hint 2</summary><code>model.named_modules()</code> gives paths such as <code>blocks.0.attention.query</code>;
# <code>model.get_submodule(path)</code> the module at one; <code>setattr</code> puts another there.</details>
# <details><summary>Hint 3</summary>list the Linears whose last name is a target; raise if there are none; freeze the model; for each, set its name on its
# parent to a LoRALinear of it; return what requires grad now.</details>

# %% [markdown]
# The two steps that ran out of memory, once more, under the same budget:

# %%
adapted = pretrained_gpt()
trained = inject(adapted, rank=8, alpha=8)
lora_run = train_steps(adapted, trained, "LoRA, rank 8, batch 1, half the memory", budget_bytes=budget)

# %%
count = sum(p.numel() for p in trained)
adam_bytes = lora_run.by_category("peak")["optimizer state"]
before, after = baseline.peak_bytes, lora_run.peak_bytes
print(f"{count:,} numbers train (you predicted {predicted_trained}); "
      f"Adam keeps {adam_bytes:,} bytes (you predicted {predicted_adam_bytes})")
print(f"peak {before / MIB:.1f} MiB before, {after / MIB:.1f} MiB after ({after / before:.0%})")
both = {"full": baseline, "LoRA": lora_run}
compare_memory(both, baseline="full", title="Before and after, batch 1", budget_bytes=budget)

# %% [markdown]
# (Adam's figure has 4 bytes more for each tensor: its count of steps.)

# %% [markdown]
# Gradients and Adam's state are nearly gone. The weights stay, and they are most of what is left.
#
# ### What LoRA does not save
#
# Take the batch up. Activations grow with it, and for them freezing is not enough: the gradient has to pass through every block to reach the
# adapters below.

# %%
bars = {}
for batch in (1, 8):
    for name in both:
        model = pretrained_gpt()
        parameters = list(model.parameters()) if name == "full" else inject(model, 8, 8)
        recording = train_steps(model, parameters, None, batch, seq=128)
        kinds = recording.by_category("peak")
        bars[f"{name}, batch {batch}"] = {kind: nbytes / MIB for kind, nbytes in kinds.items()}
stacked_bars(bars, title="Alive at the peak, sequences of 128", y="MiB")

# %%
for batch in (1, 8):
    full_mib, lora_mib = bars[f"full, batch {batch}"], bars[f"LoRA, batch {batch}"]
    print(f"batch {batch}: peak {sum(lora_mib.values()) / sum(full_mib.values()):.0%} of full; "
          f"activations {lora_mib['activations']:.1f} MiB, full {full_mib['activations']:.1f} MiB")

# %% [markdown]
# At batch 8 the peak is mostly activations, and your saving is smaller. It is not nothing: a **frozen** Linear without an adapter needs its
# input for no gradient, so autograd does not keep it. The rest is for lab 02.

# %% [markdown]
# ### Real work: a near text and a far one
#
# `adapt` trains for 40 steps on a new text. Then it measures the loss on that text's held-out part, and on the old text. Adapters want a higher
# rate than full fine-tuning: comparing both at one rate would be unfair to one of them. Alpha is the rank throughout, so that the scale
# alpha / r stays 1: ranks are compared, not scales.
#
# Beside your points stands a longer sweep, measured beforehand: for each rank the best of at least three rates, and three seeds.

# %%
SWEEP = json.loads((Path(labkit.data.__file__).parent / "lora_sweep.json").read_text())
KINDS = {"near": "docstrings", "far": "code"}  # the sweep's names


def sweep_rows(text, rank):
    """The sweep's rows of one text and rank at its best rate: one for each seed."""
    rows = [row for row in SWEEP["rows"] if (row["text"], row["rank"]) == (KINDS[text], rank)]
    best = min((row for row in rows if row["seed"] == 0), key=lambda row: row["new_loss"])
    return [row for row in rows if row["rate"] == best["rate"]]


def adapt(text, rank, targets=("query", "value"), steps=40):
    """Adapt the pretrained model; rank "full" trains everything. Returns it and its losses."""
    torch.manual_seed(0)
    model, rate = pretrained_gpt(), 1e-3 if rank == "full" else 1e-2
    parameters = list(model.parameters()) if rank == "full" else inject(model, rank, rank, targets)
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    train, held_out = TEXTS[text]
    started = time.perf_counter()
    for step, (inputs, wanted) in enumerate(batches(train, batch=2, seq=128, count=steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.zero_grad()
        next_token_loss(model(inputs), wanted).backward()
        optimizer.step()
    step_s = (time.perf_counter() - started) / steps
    new, old = validation_loss(model, held_out), validation_loss(model, OLD)
    print(f"{text}, {rank if rank == 'full' else f'rank {rank}'}: loss {new:.2f} (was "
          f"{base_loss[text]:.2f}), old text {old:.2f}, {1000 * step_s:.0f} ms per step")
    return model, {"new": new, "old": old, "step_s": step_s}


# %% [markdown]
# **Predict first.** Of what full fine-tuning gains in loss on the far text, how many percent does rank 8 gain?

# %% nbgrader={"grade": false, "grade_id": "predict-share", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_share = None  # percent of the gain of full fine-tuning: your number
### BEGIN SOLUTION
predicted_share = 70
### END SOLUTION

# %%
far = {rank: adapt("far", rank) for rank in (1, 8)}

# %%
far |= {rank: adapt("far", rank) for rank in (64, "full")}

# %%
near = {rank: adapt("near", rank) for rank in (8, "full")}

# %%
def draw_gains(text, mine):
    """Share of full fine-tuning's gain by rank: yours, and the long sweep's with its seeds."""
    def percent(start, loss, full):
        return 100 * (start - loss) / (start - full)

    start, full = SWEEP["before"][KINDS[text]], sum(row["new_loss"] for row in sweep_rows(text, "full")) / 3
    seeds = [[percent(start, row["new_loss"], full) for row in sweep_rows(text, rank)] for rank in RANKS]
    own = {rank: percent(base_loss[text], run["new"], mine["full"][1]["new"])
           for rank, (_, run) in mine.items() if rank != "full"}
    print(f"{text}: rank 8 gains {own[8]:.0f}% of what full gains in your 40 steps, {sum(seeds[3]) / 3:.0f}% "
          f"(seeds {min(seeds[3]):.0f} to {max(seeds[3]):.0f}) in {SWEEP['setting']['steps']}")
    beforehand = {f"beforehand, {name} of 3 seeds": (RANKS, [pick(three) for three in seeds])
                  for name, pick in {"best": max, "worst": min}.items()}
    title = f"The {text} text: yours in 40 steps, beforehand in {SWEEP['setting']['steps']}"
    return lines({"yours": (list(own), list(own.values()))} | beforehand, title=title,
                 x="rank", y="% of full fine-tuning's gain", log="x", limits={"full": 100})


print(f"measured beforehand: {SWEEP['setting']['steps']} steps of {SWEEP['setting']['batch']} sequences, "
      f"torch {SWEEP['torch']}, {SWEEP['machine']}; you predicted {predicted_share}%")
draw_gains("far", far)

# %%
draw_gains("near", near)

# %% [markdown]
# The lecture says that rank 8 "already performs close to full fine-tuning". Read your two pictures: how close, on which text, and how much do
# higher ranks add? (In 40 steps full fine-tuning has hardly begun on the near text: a share of its gain depends on how long both train.) Where the
# curve is flat, rank is not what is missing. Try rank 8 on all six matrices of a block:

# %%
ALL = ("query", "key", "value", "out", "up", "down")
for text, mine in {"far": far, "near": near}.items():
    _, wide = adapt(text, 8, targets=ALL)
    gained = (base_loss[text] - wide["new"]) / (base_loss[text] - mine["full"][1]["new"])
    print(f"   {gained:.0%} of full fine-tuning's gain")

# %% [markdown]
# That is 73,728 numbers, and rank 64 on two matrices is 131,072. Compare the two on the far text: numbers are better spent on more matrices
# than on more rank. The paper finds the same in GPT-3, among the matrices of attention (table 5).

# %% [markdown]
# ### What full fine-tuning changed
#
# Full fine-tuning is free to change a matrix in all 128 directions. Does it? The **singular values** of `D`, new weight minus old, say how
# strong each direction is; their number above zero is the rank.

# %%
full_model = far["full"][0]
spectra = {}
for path in ("blocks.0.attention.query", "blocks.0.attention.value", "blocks.3.attention.value"):
    with torch.no_grad():
        change = full_model.get_submodule(path).weight - base.get_submodule(path).weight
    spectra[path] = torch.linalg.svdvals(change)
    energy = spectra[path].square().cumsum(0) / spectra[path].square().sum()
    print(f"{path}: rank 8 holds {energy[7]:.0%} of the change's squares, rank 64 {energy[63]:.0%}")
lines({path: (range(1, 129), values.tolist()) for path, values in spectra.items()},
      title="Singular values of the change that full fine-tuning made", x="number", y="singular value",
      log="xy", marks={"rank 8": 8, "rank 64": 64})

# %% [markdown]
# ## 11.3 Merge and unmerge
#
# *difficulty 3 of 5 · importance 4 of 5 · 15 to 20 minutes · 4 points*
#
# After training, `W x + s B A x` is `(W + s B A) x`: one matrix, no extra work. **Merging** adds the update into the weight;
# **unmerging** takes it out, to train on or to put another adapter there.
#
# Two traps. Who merges twice adds twice. And `(w + d) - d` is not always `w`: each sum is rounded in its last bit (1 **ulp**), coarser for a
# larger `d`. In 16 bit that is coarse: sum in fp32, round once.
#
# **Predict first.** How many percent more work is one 128 × 128 layer with an unmerged update of rank 8?

# %% nbgrader={"grade": false, "grade_id": "predict-work", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_work = None  # percent: your number
### BEGIN SOLUTION
predicted_work = 12.5  # 8 * (128 + 128) for 128 * 128
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "merge", "locked": false, "schema_version": 3, "solution": true, "task": false}
def adapters(model):
    """The adapted layers of a model, by path: {"blocks.0.attention.query": LoRALinear, ...}."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}


def merge(model):
    """Add each adapter's update into its layer's weight, and leave it out of forward from now on.

    Changes the model itself; its output stays what it was (to 1e-5), and a forward pass costs
    what it does without adapters. A 16-bit weight becomes the sum, computed in fp32 and rounded
    once. Merged layers are left alone, so that a second call changes nothing. The factors stay, for
    `unmerge`. About 7 lines.
    """
    ### BEGIN SOLUTION
    for layer in adapters(model).values():
        if not layer.merged:
            add_update(layer, 1)
            layer.merged = True
    ### END SOLUTION


def unmerge(model):
    """Undo `merge`: every weight w as it was, within 1 ulp of |w| + |d| where d was added, and
    the same factors in use, trainable.

    Layers that are not merged are left alone. About 4 lines.
    """
    ### BEGIN SOLUTION
    for layer in adapters(model).values():
        if layer.merged:
            add_update(layer, -1)
            layer.merged = False
    ### END SOLUTION


def add_update(layer, sign):
    """Add sign * (alpha / rank) * B A to the weight of one layer's base. Yours to use, or not."""
    ### BEGIN SOLUTION
    weight = layer.base.weight
    precise = torch.promote_types(weight.dtype, torch.float32)
    with torch.no_grad():
        update = layer.B.to(precise) @ layer.A.to(precise) * (layer.alpha / layer.rank)
        weight.copy_(weight.to(precise) + sign * update)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-merge", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("lora.merge", inject, merge, unmerge)

# %% nbgrader={"grade": true, "grade_id": "exam-merge", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("lora.merge", inject, merge, unmerge, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>What must forward leave out once the weight holds the update, and how does it know?</details>
# <details><summary>Hint 2</summary>Under <code>torch.no_grad()</code>, <code>weight.copy_(...)</code> writes in place.
# <code>B @ A</code> is (out, in), as the weight is.</details>
# <details><summary>Hint 3</summary>for each adapted layer that is not merged: weight becomes weight plus scale times B A, in fp32; note that it
# is merged. Unmerge: the same with minus, for those that are.</details>

# %%
tuned = far[8][0]
work, inputs = {}, OLD[:128].view(1, 128)
for name, change in {"unmerged": lambda model: None, "merged": merge}.items():
    change(tuned)
    with torch.no_grad(), Recorder(watch={"model": tuned}) as recorder:
        tuned(inputs)
    work[name] = recorder.recording.flops()
with torch.no_grad(), Recorder(watch={"model": base}) as recorder:
    base(inputs)
work["base alone"] = recorder.recording.flops()
unmerge(tuned)
layer, row, one = nn.Linear(128, 128), torch.randn(1, 128), {}
for name, module in {"plain": layer, "unmerged": LoRALinear(layer, 8, 8)}.items():
    with torch.no_grad(), Recorder() as recorder:
        module(row)
    one[name] = recorder.recording.flops()
print(f"one layer: {one['unmerged'] / one['plain'] - 1:.1%} more work (you predicted {predicted_work}); "
      f"the whole model: {work['unmerged'] / work['base alone'] - 1:.1%} unmerged, "
      f"{work['merged'] / work['base alone'] - 1:.1%} merged")
stacked_bars({name: {"MFLOP": flops / 1e6} for name, flops in work.items()},
             title="Work of one forward pass", y="MFLOP")

# %% [markdown]
# ## 11.4 Hand over the adapter
#
# *difficulty 3 of 5 · importance 4 of 5 · 20 to 25 minutes · 6 points*
#
# The base is everybody's; yours is only A and B. Save them in the layout of Hugging Face's **PEFT**, and any program that knows it can load them:
# a folder with `adapter_model.safetensors` (the tensors, by name) and `adapter_config.json` (what else it takes to use them).
#
# Names matter. A loader that skips what it does not know loads nothing from a file with other names, and says nothing.
#
# **Predict first.** How many bytes of tensors are in the file of the rank-8 adapter?

# %% nbgrader={"grade": false, "grade_id": "predict-file", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_file_bytes = None  # your number
### BEGIN SOLUTION
predicted_file_bytes = 65_536  # 16,384 numbers of 4 bytes
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "adapter-files", "locked": false, "schema_version": 3, "solution": true, "task": false}
def save_adapter(model, folder):
    """Write the adapters of a model, and nothing else, into `folder`, a Path (made if missing; the
    two files are written over if they are there).

    adapter_model.safetensors : for each adapted layer two tensors, contiguous,
                                base_model.model.<path>.lora_A.weight  (rank, in)
                                base_model.model.<path>.lora_B.weight  (out, rank)
                                where <path> is the layer's in the model, blocks.0.attention.query
    adapter_config.json       : at least "peft_type": "LORA", "r", "lora_alpha", "target_modules"
                                (a list of the layers' last names); "lora_dropout" is welcome
    All adapters of a model have the same rank and alpha. The file is the same whether the model
    is merged or not, and the model stays as it is. About 12 lines.
    """
    ### BEGIN SOLUTION
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    layers = adapters(model)
    tensors = {}
    for path, layer in layers.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = layer.A.detach().contiguous()
        tensors[f"base_model.model.{path}.lora_B.weight"] = layer.B.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    one = next(iter(layers.values()))
    config = {"peft_type": "LORA", "r": one.rank, "lora_alpha": one.alpha, "lora_dropout": one.dropout,
              "target_modules": sorted({path.rpartition(".")[2] for path in layers})}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    ### END SOLUTION


def load_adapter(model, folder):
    """Put the adapter in `folder` on a model that has none: yours, or one that PEFT wrote.

    Rank, alpha and layers are what the file's configuration says. Raises an error where a tensor
    is missing, left over, or of another shape than the configuration says. About 10 lines.
    """
    ### BEGIN SOLUTION
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    inject(model, config["r"], config["lora_alpha"], config["target_modules"], config.get("lora_dropout", 0.0))
    for path, layer in adapters(model).items():
        for letter, factor in {"A": layer.A, "B": layer.B}.items():
            given = tensors.pop(f"base_model.model.{path}.lora_{letter}.weight")  # KeyError: missing
            if given.shape != factor.shape:
                raise ValueError(f"lora_{letter} of {path} is {tuple(given.shape)}, not {tuple(factor.shape)}")
            factor.data.copy_(given)
    if tensors:
        raise ValueError(f"the model has no place for {', '.join(tensors)}")
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-adapter", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("lora.adapter", inject, merge, save_adapter, load_adapter)

# %% nbgrader={"grade": true, "grade_id": "exam-adapter", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("lora.adapter", inject, merge, save_adapter, load_adapter, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Somebody has your folder and the base, and nothing else. Which numbers do they need to compute the same output?</details>
# <details><summary>Hint 2</summary><code>save_file(dict of tensors, path)</code> and <code>load_file(path)</code>; your
# <code>inject</code> builds the adapters from the configuration; <code>dict.pop</code> takes what was used.</details>
# <details><summary>Hint 3</summary>save: two tensors per path, then the configuration. load: read both, inject, for each path pop its two tensors and copy
# them in; what is left over is an error.</details>

# %% [markdown]
# ### Many adapters, one base
#
# Here are your near and far adapters as files, and both on one base. The full models would be files of 3.4 MB each.

# %%
shelf = Path(tempfile.mkdtemp())
for name, (model, _) in {"near": near[8], "far": far[8]}.items():
    save_adapter(model, shelf / name)
file_bytes = sum(t.nbytes for t in load_file(shelf / "far" / "adapter_model.safetensors").values())
full_bytes = sum(p.nbytes for p in base.parameters())
print(f"one adapter {file_bytes:,} bytes of tensors; you predicted {predicted_file_bytes}")
for name in ("near", "far"):
    model = copy.deepcopy(base)
    load_adapter(model, shelf / name)
    print(f"base + {name} adapter: near {validation_loss(model, TEXTS['near'][1]):.2f}, "
          f"far {validation_loss(model, TEXTS['far'][1]):.2f}")
TASKS = 100
stacked_bars({"100 full models": {"copies": TASKS * full_bytes / 1e6},
              "base + 100 adapters": {"base": full_bytes / 1e6, "adapters": TASKS * file_bytes / 1e6}},
             title="Stored for 100 tasks, fp32", y="MB")

# %% [markdown]
# To switch to another task, on a base that stays in memory, load the other adapter's factors, from a disk or over a network. With full models
# it is all weights: 51 times the bytes.
#
# ### Turn alpha
#
# Alpha is in the configuration, so you can turn it after training: 0 is the base, alpha = r what you trained. The lecture says that it trades
# what the model knew against what it learned. Move the controls: every point is measured with your adapters, on half of the windows that
# `adapt` measured on, so compare these losses with each other only.

# %%
SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
turned = {}
for rank in (1, 8, 64):
    save_adapter(far[rank][0], shelf / str(rank))
    config = json.loads((shelf / str(rank) / "adapter_config.json").read_text())
    for scale in SCALES:
        (shelf / str(rank) / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": scale * rank}))
        model = pretrained_gpt()
        load_adapter(model, shelf / str(rank))
        turned[rank, scale] = validation_loss(model, TEXTS["far"][1], 8), validation_loss(model, OLD, 8)


def draw_alpha(rank, scale):
    new, old = ([turned[rank, s][which] for s in SCALES] for which in (0, 1))
    count = 8 * rank * (128 + 128)
    return lines({"far text": (SCALES, new), "old text": (SCALES, old)},
                 title=f"rank {rank}, alpha {scale * rank:g}: {count:,} numbers, {4 * count / 1024:.0f} KiB; "
                       f"far {turned[rank, scale][0]:.2f}, old {turned[rank, scale][1]:.2f}",
                 x="alpha / rank", y="loss (nats per byte)", marks={"here": scale})


explore({"rank": (1, 8, 64), "scale": SCALES}, draw_alpha, start={"rank": 8, "scale": 1.0},
        title="Rank and alpha of your far adapter")

# %% [markdown]
# ### Paper scale
#
# GPT-3 has 96 blocks of width 12,288. Here it is on tensors that have sizes and no numbers, in 16 bit, with **your** `inject` at rank 4 on
# query and value. The paper (section 4.2) says: 10,000 times fewer trainable parameters, and a checkpoint of 35 MB instead of 350 GB.

# %%
try:
    started = time.perf_counter()
    with paper_scale():
        gpt3 = GPT(GPT3).half()
        everything = sum(p.numel() for p in gpt3.parameters())
        trained = sum(p.numel() for p in inject(gpt3, rank=4, alpha=4))
    print(f"{everything:,} parameters, {trained:,} of them trained: {everything / trained:,.0f} times fewer")
    print(f"(with the paper's round 175 billion: {175e9 / trained:,.0f} times)")
    print(f"adapter {2 * trained / 1e6:.1f} MB, model {2 * everything / 1e9:.0f} GB in 16 bit, "
          f"{time.perf_counter() - started:.1f} s")
except PaperScaleError as error:
    print(error)

# %% [markdown]
# The paper rounds: it is a little over 9,000 times, and 37.7 MB (36 MiB). Nothing is missing in your code.

# %% [markdown]
# ## Reflection
#
# What do 100 tasks cost? The cell below takes *your* seconds, and asks you for three assumptions. The defaults are an H200's, rented: 700 watts,
# 3 dollars an hour; and a data centre that draws 1.2 times what its cards do.

# %%
WATTS, OVERHEAD, DOLLARS_PER_HOUR = 700, 1.2, 3.0  # change them, and say why
STEPS_PER_TASK = 10_000
for name, (_, result) in {"full": far["full"], "LoRA, rank 8": far[8]}.items():
    hours = TASKS * STEPS_PER_TASK * result["step_s"] / 3600
    stored = TASKS * (full_bytes if name == "full" else file_bytes) / 1e6
    print(f"{name:<13} {TASKS} tasks: {hours:6.1f} machine hours, {hours * WATTS * OVERHEAD / 1000:6.1f} kWh, "
          f"{hours * DOLLARS_PER_HOUR:6.0f} dollars, {stored:6.0f} MB stored")
print(f"GPT-3 in 16 bit: states of full fine-tuning {16 * 175e9 / 1e9:,.0f} GB, "
      f"of LoRA {(2 * 175e9 + 16 * 18.9e6) / 1e9:,.0f} GB")

# %% [markdown]
# The lecture asks: *what does the rank of the update matrices control, and why does a smaller rank still often perform close to full
# fine-tuning?* Answer in six to ten sentences, from your own measurements: (a) what rank 8 reached of full fine-tuning's gain on each text,
# what rank 64 added, and what the singular values say to that; (b) energy and cost of 100 tasks both ways, one of your assumptions questioned:
# which of time, memory and storage does LoRA change? (c) Who can afford each for GPT-3, and what does that change?
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-rank", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) names the measured shares for both texts and at rank 64, says that the rank bounds how many directions of a matrix the update can
# change and how many numbers train, and reads the spectrum: few strong directions and a long tail, not a sharp edge; (b) gives hours, kWh and cost of
# both ways with stated assumptions, and sees that the time of a step falls little (forward and most of backward remain) while gradients, Adam's
# state and storage fall by far more; (c) sets 2,800 GB of states against about 350 GB and names who owns such machines. **1**: two of the three, or all
# without measured numbers. **0**: restates the lecture.
#
# *Example.* On the far text rank 8 reached 70% of what full fine-tuning gained, on the near one 87% in my 40 steps and a third in the long sweep;
# rank 64 added a few points to each. The rank is the number of directions in which a matrix may change, and it sets how many numbers train. The change that full fine-tuning made has a
# few large singular values and a long tail: rank 8 held two thirds to five sixths of its squares, so most of what a matrix changes fits, but I left
# all matrices but two per block as they were. My 100 tasks came to 59 machine hours against 50, 50 kWh against 42: LoRA saved little time, since forward
# and the way back through all blocks remain. That both need 10,000 steps is my weakest assumption. Storage fell from 337 MB to 10, and the states
# from 16 bytes per parameter to little more than the weights. For GPT-3 that is 2,800 GB, dozens of cards, against 350 GB, one server of eight: a
# laboratory with one server can adapt the model. It still cannot train it, and still depends on those who did.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **Hugging Face PEFT**: `get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=["query", "value"]))` is your `inject`;
#   `merge_adapter`, `unmerge_adapter` and `save_pretrained` are the rest. `use_rslora=True` divides alpha by the root of r.
#   Its merge adds in the weight's own precision.
# - **torchtune**: `LoRALinear`, with the base in torchao's 4 bit if you like (*QLoRA*, Dettmers et al. 2023).
# - **loralib**, the paper's own code, merges when the model goes into eval mode. A parent's `eval()` calls `train(False)` on its children, never
#   their `eval()`: an early version overrode `eval()`, and did not merge.
# - **Servers** (vLLM, S-LoRA) keep one base and many adapters, and use several in one batch.

# %% [markdown]
# ## On a card
#
# With an NVIDIA card the same code runs there, in a larger model. Without one this cell says so.

# %%
if torch.cuda.is_available():
    from labkit.gpt import GPTConfig

    card = torch.device("cuda")
    config = GPTConfig(vocab=256, context=512, layers=12, heads=12, width=768)
    ids = torch.randint(256, (8, 512), device=card)
    for name in both:
        model = GPT(config).to(card)
        parameters = list(model.parameters()) if name == "full" else inject(model, 8, 8)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for step in range(6):
            if step == 1:  # warm
                torch.cuda.reset_peak_memory_stats()
                start.record()
            next_token_loss(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        step_s = start.elapsed_time(end) / 1000 / 5
        block_flops = 12 * 2 * 12 * 768**2 * ids.numel()  # the Linears of one forward
        flops_per_s = (3 if name == "full" else 2) * block_flops / step_s
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {name}: "
              f"peak {torch.cuda.max_memory_allocated() / MIB:.0f} MiB, "
              f"{ids.numel() / step_s:,.0f} tokens/s, {flops_per_s / 1e12:.1f} TFLOP/s")
else:
    print(f"no card here (torch {torch.__version__}): everything above ran on the CPU")

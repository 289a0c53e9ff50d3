# ---
# labkit: {lab: "04", slug: amp, title: "Mixed precision: 16-bit speed, 32-bit memory of small steps", minutes: 100, difficulty: 3, points: 23, cards: 0, needs: ["03"]}
# ---

# %% [markdown]
# # 04 · Mixed precision: 16-bit speed, 32-bit memory of small steps
#
# *about 100 minutes · difficulty 3 of 5 · 23 points · any machine, no card needed*
#
# You have a small GPT in fp32. When you are done here, your own loop trains it in 16 bits to a loss **within 0.1 of fp32's**, and its
# **activations take half to two thirds of the bytes**. Your own scaler survives every overflow on the way, and decides exactly as
# PyTorch's does. You also know what 16 bits do *not* save, measured.
#
# The method is Micikevicius et al. 2017, *Mixed Precision Training*
# (arXiv 1710.03740).

# %% [markdown]
# ## Recap: number formats in five lines
#
# 1. A float has a sign, an exponent (its **range**) and a fraction (its **precision**).
# 2. **fp16** has 5 exponent bits and 10 of fraction: it ends at 65504, and what lies below 3e-8 **underflows** to 0.
# 3. **bf16** has 8 and 7: the range of fp32, but only about 1 in 256 of precision. `1 + 1/512` is 1.
# 4. Beyond the end there is `inf`; `inf - inf` and `0 * inf` are `nan`, and a nan stays.
# 5. Multiply the **loss** by a scale, and every gradient is multiplied by it: small ones come up out of underflow, large ones come
#    nearer to `inf`. Divide before the optimizer looks.

# %%
import math
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import Recorder, check, live_memory, run_ranks
from labkit.data import batches, python_docs
from labkit.figures import lines, stacked_bars
from labkit.gpt import GPT, GPTConfig, next_token_loss
from labkit.widgets import explore

torch.set_num_threads(1)  # steady times, also where other programs keep the cores busy
MIB = 2**20
LARGE = GPTConfig(context=128, layers=2, heads=4, width=64)  # for memory
text, _ = python_docs()
inputs, targets = batches(text, batch=8, seq=128, count=1)[0]  # token ids, (8, 128) each


# %% [markdown]
# ## The baseline
#
# One training step of the GPT in fp32 with AdamW, drawn live. `loss_of` computes the loss, `update` is what follows backward: both
# change in this lab. A step before the recording makes the optimizer's state, which does not exist until the first one.

# %%
def live_step(loss_of, update, watch, title, budget_bytes=None):
    """One training step, drawn live: loss_of(), backward, update(). Returns its Recording."""
    loss_of().backward()
    update()
    with Recorder(watch=watch, budget_bytes=budget_bytes) as recorder, live_memory(recorder, title=title):
        with recorder.phase("forward"):
            loss = loss_of()
        recorder.mark("after forward")
        with recorder.phase("backward"):
            loss.backward()
        recorder.mark("after backward")
        with recorder.phase("update"):
            update()
    return recorder.recording


def step_and_clear(optimizer):
    optimizer.step()
    optimizer.zero_grad()


model = GPT(LARGE)
adam = torch.optim.AdamW(model.parameters(), lr=1e-3)


def fp32_loss():
    return next_token_loss(model(inputs), targets)


watched = [model, adam, inputs, targets]
baseline = live_step(fp32_loss, lambda: step_and_clear(adam), watched, "A training step in fp32")

# %%
parameters = sum(p.numel() for p in model.parameters())
print(f"{parameters} parameters; peak {baseline.peak_bytes / MIB:.1f} MiB: {baseline.alive_summary('peak')}")
for category, nbytes in baseline.by_category("peak").items():
    print(f"  {category:<16}{nbytes / MIB:8.2f} MiB")

# %% [markdown]
# Now take half of that peak away, and read what was alive when it stopped. At the end of the lab you give both kinds of mixed
# precision the same budget.

# %%
budget = baseline.peak_bytes // 2
try:
    live_step(fp32_loss, lambda: step_and_clear(adam), watched, "The same step with half the memory", budget)
except torch.OutOfMemoryError as error:
    print(f"OutOfMemoryError: {error}")
model.zero_grad()

# %% [markdown]
# ## 4.1 Who remembers small steps?
#
# *difficulty 2 of 5 · importance 5 of 5 · 20 to 25 minutes · 4 points*
#
# Halving the weights is one call: `model.half()` or `model.bfloat16()`. But a weight near 1 has its next neighbour 1/128 away in bf16 and
# 1/1024 in fp16, and an optimizer's step is often a thousandth. Rounded to the nearest number, weight plus step is the weight.
#
# **Predict first.** A bf16 weight is 1.0. It gets 200 updates of +0.001, one after the other. What is it then? In fp32 it would be 1.2.

# %% nbgrader={"grade": false, "grade_id": "predict-weight", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_weight = None  # your number
### BEGIN SOLUTION
predicted_weight = 1.0  # every single update is less than half the way to the next bf16 number
### END SOLUTION

# %% [markdown]
# The lecture's cure: the optimizer works on an fp32 copy of every weight, the **master weights**. Backward leaves 16-bit gradients on
# the model; they are cast to fp32, divided by the loss scale if there is one, and given to the optimizer; the new masters are
# rounded back into the model. The model is 16-bit, the memory of small steps is 32-bit.
#
# When someone loads a checkpoint into the model, the flow is the other way for once.

# %% nbgrader={"grade": false, "grade_id": "master-weights", "locked": false, "schema_version": 3, "solution": true, "task": false}
class MasterWeights:
    """Train a model with 16-bit weights as if they were fp32.

    MasterWeights(model, make_optimizer)
        model          : nn.Module; its trainable parameters are 16-bit, or fp32 (norms, say). Frozen
                         ones and buffers are not yours to touch
        make_optimizer : makes an Optimizer of the list of tensors that it is given
    step(scale=1.0) : one update from the gradients on the model's parameters, which are `scale`
        times too large; divide them in fp32, where small ones survive. Then the model's own
        parameters (the same objects, in their dtype) hold the new weights, rounded. A parameter that
        never has a gradient keeps its value, and no gradient is used in two steps.
    reload()        : the model's weights were written by someone else; go on from those

    What of an update lies below the spacing of 16-bit numbers is not lost: after 200 of them a
    tensor has moved as far as in fp32, within 5%. The caller clears the model's gradients. About 14 lines.
    """

    def __init__(self, model, make_optimizer):
        ### BEGIN SOLUTION
        trained = [p for p in model.parameters() if p.requires_grad]
        self.pairs = [(p, p.detach().float().clone()) for p in trained]
        self.optimizer = make_optimizer([master for _, master in self.pairs])
        ### END SOLUTION

    def step(self, scale=1.0):
        ### BEGIN SOLUTION
        for parameter, master in self.pairs:
            if parameter.grad is not None:
                master.grad = parameter.grad.float() / scale  # cast first: in fp16 the quotient may be 0
        self.optimizer.step()
        self.optimizer.zero_grad()  # fp32 gradients are needed no longer
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)
        ### END SOLUTION

    def reload(self):
        ### BEGIN SOLUTION
        with torch.no_grad():
            for parameter, master in self.pairs:
                master.copy_(parameter)
        ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-masters", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("amp.masters", MasterWeights)

# %% nbgrader={"grade": true, "grade_id": "exam-masters", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("amp.masters", MasterWeights, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Two copies of each weight exist. After which event is which of them the true one?</details>
# <details><summary>Hint 2</summary>A list of pairs (parameter, master); <code>.float()</code>, <code>.copy_()</code> under
# <code>torch.no_grad()</code>. The optimizer sees masters only.</details>
# <details><summary>Hint 3</summary>step: each master's grad is its parameter's, in fp32, over the scale; optimizer steps; each parameter
# copies its master. reload: each master copies its parameter.</details>

# %%
followed = {}
for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16 with masters": torch.bfloat16}.items():
    single = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.ones_(single.weight)
    sgd = torch.optim.SGD(single.parameters(), lr=0.001)
    masters = MasterWeights(single, lambda parameters: torch.optim.SGD(parameters, lr=0.001))
    values = []
    for _ in range(200):
        single.weight.grad = -torch.ones_like(single.weight)
        masters.step() if "masters" in name else sgd.step()
        values.append(single.weight.item())
    followed[name] = range(1, 201), values
    print(f"{name:<18} {values[-1]:.4f}")
print(f"you predicted {predicted_weight}")
lines(followed, title="200 updates of 0.001", x="update", y="weight")

# %% [markdown]
# How much of a real update is lost? Adam moves a weight by about its learning rate. So ask every weight of the GPT whether it would
# notice.

# %%
RATES = [10**-e for e in (1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5)]
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
lost = {}
for dtype in (torch.bfloat16, torch.float16):
    there = flat.to(dtype)
    lost[str(dtype).removeprefix("torch.")] = RATES, [100 * (there + rate == there).float().mean().item() for rate in RATES]
lines(lost, title="Weights of the GPT that do not notice their update", x="size of the update", y="% of weights", log="x")

# %% [markdown]
# bf16 loses more than fp16: it has the range, not the precision. "bf16 needs no scaler" is true; "bf16 needs no fp32" is not.

# %% [markdown]
# ## 4.2 A scale that finds itself
#
# *difficulty 3 of 5 · importance 5 of 5 · 30 to 40 minutes · 8 points*
#
# The lecture multiplies the loss by 1,000 and calls the choice of that number a nuisance. It is: the gradients' size changes during
# training. **Dynamic loss scaling** searches all the time. Begin high. An `inf` or `nan` in the gradients says *too high*: skip this step and
# **back off**. Many good steps in a row say *maybe too low*: **grow**. The search costs a skipped step now and then.

# %% [markdown]
# A skipped step is as if it had never been: weights and Adam's moments stay bit for bit. Test for inf *before* anybody clips: clipped
# by value, an inf looks like a number.
#
# **Predict first.** The scale begins at 1024, back-off factor 0.5, growth factor 2, growth interval 3. The first step overflows, then four
# good ones come. What is the scale after these five steps?

# %% nbgrader={"grade": false, "grade_id": "predict-scale", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_scale = None  # your number
### BEGIN SOLUTION
predicted_scale = 1024  # 512 after the overflow, 1024 after three good steps; the fourth counts for the next growth
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "scaler", "locked": false, "schema_version": 3, "solution": true, "task": false}
class DynamicLossScaler:
    """A loss scale that backs off after an overflow and grows after `growth_interval` good steps.

    scale(loss)         : loss (0-dim, any float dtype) times the scale, in fp32; backward starts there
    unscale_(optimizer) : divides .grad of all of the optimizer's parameters, in place, by the scale that
        backward had, and notes whether any holds an inf or nan. Parameters without .grad are fine.
        Once per step: another call before update(), after step() too, raises RuntimeError or does nothing
    step(optimizer)     : unscale_, if it was not called since the last update(); then optimizer.step(),
        unless an inf or nan was noted. Returns True if the optimizer stepped, False if not
    update()            : ends the step. After a skipped one: scale * backoff_factor, and the count of
        good steps starts again. After growth_interval good ones in a row: scale * growth_factor, and the
        count starts again. The scale stays within min_scale and max_scale
    get_scale()         : the scale, a float
    state_dict()        : a dict, a snapshot that no later step changes; load_state_dict(state), in a
        scaler of the same settings, goes on as if there had been no stop

    One scaler serves one optimizer. Parameters and gradients are fp32. `torch.amp.GradScaler` and the functions
    `torch._amp_...` that it calls are off limits. About 30 lines.
    """

    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000,
                 min_scale=1.0, max_scale=2.0**24):
        ### BEGIN SOLUTION
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.max_scale = min_scale, max_scale
        self.current, self.good_steps = init_scale, 0
        self.found_inf = None  # None: not unscaled since the last update
        ### END SOLUTION

    def get_scale(self):
        ### BEGIN SOLUTION
        return self.current
        ### END SOLUTION

    def scale(self, loss):
        ### BEGIN SOLUTION
        return loss.float() * self.current  # 65536 times a loss of 1 is inf in fp16
        ### END SOLUTION

    def unscale_(self, optimizer):
        ### BEGIN SOLUTION
        if self.found_inf is not None:
            return
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(grads, 1.0 / self.current)
        self.found_inf = not all(bool(grad.isfinite().all()) for grad in grads)
        ### END SOLUTION

    def step(self, optimizer):
        ### BEGIN SOLUTION
        self.unscale_(optimizer)
        if not self.found_inf:
            optimizer.step()
        return not self.found_inf
        ### END SOLUTION

    def update(self):
        ### BEGIN SOLUTION
        if self.found_inf:
            self.current, self.good_steps = self.current * self.backoff_factor, 0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.current, self.good_steps = self.current * self.growth_factor, 0
        self.current = min(max(self.current, self.min_scale), self.max_scale)
        self.found_inf = None
        ### END SOLUTION

    def state_dict(self):
        ### BEGIN SOLUTION
        return {"scale": self.current, "good_steps": self.good_steps}
        ### END SOLUTION

    def load_state_dict(self, state):
        ### BEGIN SOLUTION
        self.current, self.good_steps = state["scale"], state["good_steps"]
        ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-scaler", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("amp.scaler", DynamicLossScaler)

# %% nbgrader={"grade": true, "grade_id": "exam-scaler", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("amp.scaler", DynamicLossScaler, points=3)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which three things does update() need to know, and which of the other methods learns each?</details>
# <details><summary>Hint 2</summary>One attribute can say both: None for "not unscaled yet", then True or False. <code>isfinite()</code> finds inf
# and nan. <code>optimizer.param_groups</code> has all groups.</details>
# <details><summary>Hint 3</summary>unscale_: return if done; multiply each grad by 1/scale; note. step: unscale_; step if clean. update: back
# off and zero the count, or count and perhaps grow; clamp; forget the note.</details>

# %% [markdown]
# Your scaler beside `torch.amp.GradScaler`, over the same overflows. (PyTorch's has no limits.)

# %%
def trace(scaler, overflows):
    """The scale before each step; where `overflows` says so, a gradient is inf."""
    weight = torch.ones(3, requires_grad=True)
    sgd, scales = torch.optim.SGD([weight], lr=0.01), []
    for overflow in overflows:
        scales.append(scaler.get_scale())
        sgd.zero_grad()
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad[1] = math.inf
        scaler.step(sgd)
        scaler.update()
    return scales


SCRIPT = [step in (0, 9, 10, 25, 26, 27, 40) for step in range(60)]
SETTINGS = {"init_scale": 1024.0, "growth_interval": 3}
yours = trace(DynamicLossScaler(**SETTINGS), SCRIPT)
theirs = trace(torch.amp.GradScaler("cpu", **SETTINGS), SCRIPT)
print(f"after five steps: {yours[5]:g}; you predicted {predicted_scale}")
print(f"{sum(a == b for a, b in zip(yours, theirs))} of {len(SCRIPT)} scales are PyTorch's")
both = {"yours": (range(60), yours), "torch.amp.GradScaler": (range(60), theirs)}
lines(both, title="The scale over a script of 7 overflows", x="step", y="scale", log="y")

# %% [markdown]
# ## 4.3 The training step
#
# *difficulty 3 of 5 · importance 5 of 5 · 25 to 35 minutes · 6 points*
#
# PyTorch's kind of mixed precision is the other way round: weights and gradients **stay fp32**, and `torch.autocast(device_type, dtype)`
# casts what goes into matrix products, operator by operator. What has to be wide (a sum of squares, a loss) stays wide. The region covers
# forward and loss; backward repeats the formats of forward by itself.

# %% [markdown]
# First look: which operators of your GPT run in 16 bits? A dispatch mode sees every operator below autograd. (On a card the list is
# different: there softmax and LayerNorm go to fp32.)

# %%
class Formats(TorchDispatchMode):
    """Counts operators by the format of their output."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        if torch.is_tensor(first) and first.is_floating_point() and not func.is_view:
            row = self.counts.setdefault(func.overloadpacket.__name__, {})
            row[first.dtype] = row.get(first.dtype, 0) + 1
        return out


with Formats() as formats, torch.autocast("cpu", torch.bfloat16):
    next_token_loss(model(inputs[:1]), targets[:1])
for name, row in sorted(formats.counts.items()):
    told = ", ".join(f"{count} in {str(dtype).removeprefix('torch.')}" for dtype, count in row.items())
    print(f"  {name:<24} {told}")

# %% [markdown]
# `_to_copy` is autocast itself, casting. The embedding and the sums of the residual stream stay in fp32: nobody casts them.
#
# **Predict first.** Under autocast, how many times the fp32 run's activations does your GPT keep for backward? 1 is all, 0.5 is half.

# %% nbgrader={"grade": false, "grade_id": "predict-activations", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_share = None  # your number
### BEGIN SOLUTION
predicted_share = 0.6  # most are 16-bit; the residual stream and what goes into the loss are not
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "amp-step", "locked": false, "schema_version": 3, "solution": true, "task": false}
def amp_step(model, optimizer, inputs, targets, loss_fn, *, device_type, dtype,
             scaler=None, max_norm=None, scheduler=None):
    """One training step of a model with fp32 weights, computed in `dtype`.

    model, inputs, targets : on the device already; loss_fn(model(inputs), targets) is the loss
    device_type, dtype     : for torch.autocast: "cpu" or "cuda", torch.float16 or torch.bfloat16. Forward
                             and loss are under it; backward, clipping and the optimizer's step are not
    scaler    : has the methods of your DynamicLossScaler; None means that no scaling is wanted (bf16)
    max_norm  : largest L2 norm of the whole gradient, in the units of the loss; None: no clipping. A
                longer gradient is shortened to max_norm, a shorter one stays as it is
    scheduler : its step() follows each step of the optimizer and is left out where that was skipped
                (the policy of this lab; some trainers count skipped steps too). None: there is none
    Returns the loss as a float, as loss_fn gave it. What an earlier step left in .grad does not
    count. The scaler's update() runs once, after a skipped step too. About 15 lines.
    """
    ### BEGIN SOLUTION
    with torch.autocast(device_type, dtype):
        loss = loss_fn(model(inputs), targets)
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if scaler is None:
        optimizer.step()
        stepped = True
    else:
        stepped = scaler.step(optimizer)
        scaler.update()
    if scheduler is not None and stepped:
        scheduler.step()
    optimizer.zero_grad()
    return loss.item()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-step", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("amp.step", amp_step)

# %% nbgrader={"grade": true, "grade_id": "exam-step", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("amp.step", amp_step, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>max_norm is in the units of the loss. In which units are the gradients at each point of your step?</details>
# <details><summary>Hint 2</summary>The order is scale, backward, unscale_, clip, step, update, clear.
# <code>nn.utils.clip_grad_norm_</code> clips.</details>
# <details><summary>Hint 3</summary>under autocast: loss; outside: backward of the scaled loss; unscale_; clip if max_norm; stepped is what
# scaler.step says; update; schedule if stepped; clear; return the loss's number. Without a scaler: the same minus its calls.</details>

# %% [markdown]
# ### The device is an argument
#
# Code from a card often says `autocast("cuda")` in so many words. On a machine without a card it computes in fp32, and all you get is
# a warning:

# %%
layer = nn.Linear(8, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for device_type in ("cuda", "cpu"):
        with torch.autocast(device_type, torch.float16):
            print(f'under autocast("{device_type}") a Linear on the CPU computes in {layer(torch.ones(2, 8)).dtype}')
print("warned:", str(caught[0].message).strip() if caught else "nothing")

# %% [markdown]
# ### Four trainings
#
# A smaller GPT, 100 steps, same batches. First fp32 (it also notes the largest gradient of each step: you need it below). Then **naive
# fp16**: everything in 16 bits, Adam too.

# %%
STEPS, SMALL = 100, GPTConfig(context=32, layers=2, heads=2, width=32)
pairs = batches(text, batch=8, seq=32, count=STEPS)
curves, largest = {}, []


def fresh(dtype=torch.float32, eps=1e-8):
    """The same GPT each time, in `dtype`, and AdamW on its weights."""
    net = GPT(SMALL).to(dtype)
    return net, torch.optim.AdamW(net.parameters(), lr=4e-3, eps=eps)


def curve(name, step):
    """Train with step(inputs, targets) -> loss, until the loss is no number any more."""
    losses, started = [], time.perf_counter()
    for pair in pairs:
        losses.append(step(*pair))
        if math.isnan(losses[-1]):
            break
    curves[name] = range(1, len(losses) + 1), losses
    print(f"{name:<34} {len(losses):>3} steps, mean loss of the last ten {sum(losses[-10:]) / len(losses[-10:]):.3f}, "
          f"{time.perf_counter() - started:.1f} s")


def plain_step(net, optimizer, note=None):
    def step(x, y):
        loss = next_token_loss(net(x), y)
        loss.backward()
        if note is not None:
            note.append(max(p.grad.abs().max().item() for p in net.parameters()))
        step_and_clear(optimizer)
        return loss.item()

    return step


curve("fp32", plain_step(*fresh(), note=largest))
curve("naive fp16", plain_step(*fresh(torch.float16)))
for name, dtype in {"fp32, eps 1e-4": torch.float32, "naive fp16, eps 1e-4": torch.float16}.items():
    curve(name, plain_step(*fresh(dtype, eps=1e-4)))

# %% [markdown]
# Naive fp16 dies at once, and not of a large number: Adam's `eps` of 1e-8 is 0 in fp16, so a weight without gradient moves by 0/0. With
# an `eps` that fp16 can hold, it trains as fp32 does with that eps: this model is small, and steps of 0.004 are large beside its
# weights. Your picture in 4.1 says at which learning rate that luck ends.
#
# Now the lecture's loop (16-bit weights, masters, a fixed scale of 1,000), then PyTorch's kind with your scaler, and bf16 without one.

# %%
net16 = GPT(SMALL).half()
masters16 = MasterWeights(net16, lambda parameters: torch.optim.AdamW(parameters, lr=4e-3))
scaler, scales = DynamicLossScaler(growth_interval=10), []
auto16, auto_bf16 = fresh(), fresh()


def lecture_step(x, y):
    loss = next_token_loss(net16(x), y)
    (1000 * loss.float()).backward()
    masters16.step(scale=1000)
    net16.zero_grad()
    return loss.item()


def scaled_step(x, y):
    scales.append(scaler.get_scale())
    return amp_step(*auto16, x, y, next_token_loss, device_type="cpu", dtype=torch.float16, scaler=scaler)


def bf16_step(x, y):
    return amp_step(*auto_bf16, x, y, next_token_loss, device_type="cpu", dtype=torch.bfloat16)


curve("fp16 weights, masters, scale 1000", lecture_step)
curve("fp16 autocast, your scaler", scaled_step)
curve("bf16 autocast", bf16_step)

# %%
def smooth(losses, over=10):
    return [sum(losses[max(0, i - over + 1) : i + 1]) / min(i + 1, over) for i in range(len(losses))]


drawn = {name: (steps, smooth(losses)) for name, (steps, losses) in curves.items() if "eps" not in name}
lines(drawn, title="Loss, mean of the last 10 steps", x="step", y="loss (nats per byte)",
      marks={"naive fp16 is nan": len(curves["naive fp16"][1])})

# %% [markdown]
# On most CPUs the fp16 runs are the *slow* ones: fp16 products are emulated there, and the casts come on top. Speed is for cards, and for
# bf16 on CPUs that have it.
#
# What your scaler did meanwhile, against the largest scale that no weight's gradient would have overflowed with:

# %%
def powers(scales):
    return range(1, len(scales) + 1), [math.log2(scale) for scale in scales]


ceiling = [65504 / value for value in largest]
told = {"your scale": powers(scales), "65504 / largest gradient (fp32 run)": powers(ceiling)}
print(f"{sum(b < a for a, b in zip(scales, scales[1:]))} skipped steps of {STEPS}")
lines(told, title="Your scaler at work", x="step", y="power of two")

# %% [markdown]
# ### Move the sliders
#
# This replays your scaler over the largest gradients of the fp32 training: a step overflows where scale times gradient is above 65504.
# Which settings lose many steps? Which stay far below the ceiling?

# %%
def replay(init_power, growth_interval, backoff):
    tried, scales = DynamicLossScaler(2.0**init_power, 2.0, backoff, growth_interval), []
    weight = torch.ones(1, requires_grad=True)
    sgd, skipped = torch.optim.SGD([weight], lr=0.0), 0
    for top in largest:
        scales.append(tried.get_scale())
        weight.grad = torch.full((1,), math.inf if scales[-1] * top > 65504 else 1.0)
        skipped += not tried.step(sgd)
        tried.update()
    series = {"scale": powers(scales), "ceiling": powers(ceiling)}
    return lines(series, title=f"{skipped} of {STEPS} steps skipped", x="step", y="power of two")


controls = {"init_power": [8, 12, 16, 20, 24], "growth_interval": [2, 10, 50], "backoff": [0.5, 0.125]}
explore(controls, replay, start={"init_power": 24, "growth_interval": 10, "backoff": 0.5}, title="Settings of your scaler")

# %% [markdown]
# ## 4.4 One rank overflows
#
# *difficulty 3 of 5 · importance 4 of 5 · 15 to 20 minutes · 3 points*
#
# On several ranks (processes that train together, each with its own data or its own part of the model) an inf may appear on one of them
# only. If each decides for itself, one skips while the others step: the weights part, and the scales too. Where gradients are averaged
# before the test, the inf spreads by itself; where each rank holds another part of the model, it does not.
#
# **Predict first.** Two ranks decide alone. In one step, rank 1 overflows. How many times as large as rank 1's is rank 0's scale in the next?

# %% nbgrader={"grade": false, "grade_id": "predict-ranks", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_ratio = None  # your number
### BEGIN SOLUTION
predicted_ratio = 2
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "ranked-scaler", "locked": false, "schema_version": 3, "solution": true, "task": false}
class RankedLossScaler(DynamicLossScaler):
    """Your scaler; and where a process group is there, an overflow on any rank counts on all.

    All ranks make the same calls in the same order. Each step, every rank learns whether any rank noted
    an inf or nan, and all skip or none does: so their scales stay equal. At most 1024 bytes are sent per rank
    and step: the flag, not the gradients. `dist.all_reduce` is allowed here. Without a process group
    (`dist.is_initialized()` is False) it is your DynamicLossScaler. unscale_ is one place to do it; override
    another method if that suits your scaler better. About 7 lines.
    """

    def unscale_(self, optimizer):
        ### BEGIN SOLUTION
        if self.found_inf is not None:
            return
        super().unscale_(optimizer)
        if dist.is_initialized():
            flag = torch.tensor(float(self.found_inf))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self.found_inf = bool(flag)
        ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-ranks", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("amp.ranks", RankedLossScaler)

# %% nbgrader={"grade": true, "grade_id": "exam-ranks", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("amp.ranks", RankedLossScaler, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>At which moment has every rank its own answer, and none has acted on it yet?</details>
# <details><summary>Hint 2</summary><code>dist.all_reduce(flag, op=dist.ReduceOp.MAX)</code> on a tensor of one number leaves the largest
# on all ranks. All must call it, those without an overflow too.</details>
# <details><summary>Hint 3</summary>unscale_: as before, then, if there is a group and this step's answer is new: all-reduce the flag with MAX and
# note the result instead of your own.</details>

# %%
def on_rank(kind):
    """This rank's scales; rank 1 overflows in step 4."""
    overflows = [dist.get_rank() == 1 and step == 4 for step in range(16)]
    return trace(kind(init_scale=1024.0, growth_interval=6), overflows)


apart, together = (run_ranks(on_rank, 2, kind).values for kind in (DynamicLossScaler, RankedLossScaler))
print(f"alone: {apart[0][5]:g} and {apart[1][5]:g} after the overflow; you predicted {predicted_ratio} times")
print(f"at the end {apart[0][-1]:g} and {apart[1][-1]:g}: they also count from different steps")
series = {f"rank {rank}, alone": powers(apart[rank]) for rank in (0, 1)}
series |= {f"rank {rank}, agreed": powers(together[rank]) for rank in (0, 1)}
lines(series, title="Rank 1 overflows in its fifth step", x="step", y="scale (power of two)")

# %% [markdown]
# ## Before and after: what it saves
#
# The first step once more, in both kinds of mixed precision, under the budget of half. First the lecture's kind, 16-bit weights and
# gradients with fp32 masters; then PyTorch's, autocast over fp32 weights.

# %%
half_model, half_adams = GPT(LARGE).bfloat16(), []


def half_adam(parameters):
    half_adams.append(torch.optim.AdamW(parameters, lr=1e-3))
    return half_adams[-1]


half_masters = MasterWeights(half_model, half_adam)


def masters_loss():
    return next_token_loss(half_model(inputs), targets)


def masters_update():
    half_masters.step()
    half_model.zero_grad()


def autocast_loss():
    with torch.autocast("cpu", torch.bfloat16):
        return next_token_loss(model(inputs), targets)


kinds = {
    "16-bit weights": (masters_loss, masters_update, [half_model, *half_adams, inputs, targets]),
    "autocast": (autocast_loss, lambda: step_and_clear(adam), watched),
}
for name, kind in kinds.items():
    try:
        live_step(*kind, f"{name}, half the memory", budget)
        print(f"{name}: fits")
    except torch.OutOfMemoryError as error:
        print(f"{name}: OutOfMemoryError: {error}")
    half_model.zero_grad()
    model.zero_grad()

# %% [markdown]
# Without the budget, so that there is something to measure:

# %%
steps = {"fp32": baseline} | {name: live_step(*kind, name) for name, kind in kinds.items()}
activations, bars = {}, {}
for name, step in steps.items():
    at = step.by_category("after backward")  # when activations are gone again: their most is after forward
    activations[name] = step.by_category("after forward")["activations"]
    states = {part: at[part] for part in ("parameters", "gradients", "optimizer state")}
    bars[name] = {part: nbytes / MIB for part, nbytes in (states | {"activations": activations[name]}).items()}
    per = " + ".join(f"{nbytes / parameters:.0f}" for nbytes in states.values())
    print(f"{name:<15} peak {step.peak_bytes / baseline.peak_bytes:.2f} of fp32's, "
          f"activations {activations[name] / activations['fp32']:.2f}, "
          f"states {per} = {sum(states.values()) / parameters:.1f} bytes per parameter")
print(f"you predicted {predicted_share} for autocast's activations")
stacked_bars(bars, title="One step, before and after", y="MiB", limits={"half of fp32's peak": budget / MIB})

# %% [markdown]
# So "mixed precision halves memory" needs a word more. The **states**, what is there for every parameter whatever the batch (weights +
# gradients + Adam), take the same bytes in all three: of the 6 for weights, 4 are masters. (While masters step, their fp32
# gradients take 4 more: the low bump at the end.) Only activations shrink: to a half where everything is
# 16-bit, to what you measured under autocast, which keeps in fp32 what it does not trust to 16 bits. The lecture describes the first
# kind, `torch.autocast` is the second.
#
# The peak stays above half in both. A budget of half takes one more technique: less batch at once (lab 05), or lab 02's.

# %% [markdown]
# ## Reflection
#
# The lecture asks: *what kind of GPU memory does none of the techniques covered (mixed precision, DDP, ZeRO, FSDP) reduce?*, and its answer
# is activations. It also says that mixed precision cuts memory. Judge both for your own measurements, in four to eight sentences.
# Use (a) your share of activations in both kinds, and why they differ, (b) your bytes per parameter of states in both kinds, (c) the number of
# steps that your scaler skipped, and what you would lose by an init_scale of 2^8 and a growth interval of 2000 instead.
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-amp", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) both measured shares (0.50 with 16-bit weights, about 0.64 under autocast), and that autocast leaves some tensors in fp32
# (residual stream, embedding, loss), so the premise "none reduces activations" is wrong for mixed precision; (b) 16 bytes per parameter in
# both, by kind, so states are not cut; (c) the measured number of skipped steps, and that a low scale that never grows within the run skips
# none and lets small gradients underflow instead. **1**: two of the three, or all without a measured number. **0**: restates the lecture.
#
# *Example.* My activations fell to 0.50 of fp32's with 16-bit weights and to 0.64 under autocast, because autocast keeps the residual
# stream and the loss's input in fp32. So mixed precision does reduce activations, against the question. States are 16.0 bytes per parameter in
# both (4 + 4 + 8; 2 + 2 + 4 + 8): nothing is saved there. My scaler skipped 8 of 100 steps. At 2^8 with interval 2000 it would skip none, but
# stay at 256 to the end, a thousand times below the ceiling, and every gradient below 1e-10 would be 0.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **PyTorch**: `torch.autocast` and `torch.amp.GradScaler`; growth interval 2000, no limits. With a fused
#   optimizer its found-inf flag stays on the card, and no step waits for it. FSDP's `ShardedGradScaler` adds your all-reduce.
# - **NVIDIA Apex**: `O1` casts operators, `O2` is 16-bit weights with masters, the lecture's kind. **DeepSpeed** and **Megatron** do the
#   latter: *fp16 optimizer*, *main params*, `initial_scale_power`, `hysteresis`.
# - **Hugging Face** and **Lightning**: `fp16=True`, `bf16=True`, `precision="16-mixed"`. `bf16-true` has no masters.
# - **torchao**: bf16 weights with *stochastic rounding*: up or down by chance, so that small steps count on average.

# %% [markdown]
# ## On a card
#
# With an NVIDIA card: tokens per second in four formats. Whether bf16 is native is probed, not asked: capability 8.0 or later, and its
# products as fast as fp16's. (Older cards emulate it, and some queries still say yes.)

# %%
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}  # dense 16-bit FLOP/s on the data sheets
FORMATS = {"fp32": torch.float32, "TF32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def seconds_of(run, times=5):
    """The least seconds of `run()` on the card, after one run to warm it."""
    best = math.inf
    for _ in range(times + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def product_s(dtype):
    a = torch.randn(4096, 4096, device="cuda", dtype=dtype)
    return seconds_of(lambda: a @ a)


def step_s(name):
    """Seconds of a step of a GPT of 57 million parameters: your amp_step, or a plain one for fp32 and TF32."""
    torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
    net = GPT(GPTConfig(context=256, layers=18, heads=8, width=512)).cuda()
    adam, own = torch.optim.AdamW(net.parameters(), lr=1e-4), DynamicLossScaler() if name == "fp16" else None
    x, y = (ids.cuda() for ids in batches(text, batch=32, seq=256, count=1)[0])
    settings = {"device_type": "cuda", "dtype": FORMATS[name], "scaler": own}
    plain = plain_step(net, adam)
    run = (lambda: plain(x, y)) if "32" in name else lambda: amp_step(net, adam, x, y, next_token_loss, **settings)
    return seconds_of(run), x.numel(), 6 * sum(p.numel() for p in net.parameters())  # FLOPs per token


if torch.cuda.is_available():
    card, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    ratio = product_s(torch.bfloat16) / product_s(torch.float16)
    native = capability >= (8, 0) and ratio < 1.5
    print(f"{card}, torch {torch.__version__}, capability {capability[0]}.{capability[1]}, "
          f"bf16 product {ratio:.2f} times fp16's: bf16 is {'native' if native else 'emulated'}")
    peak = next((flops for known, flops in PEAKS.items() if known in card), None)
    for name in FORMATS:
        step, count, flops = step_s(name)
        share = f", {flops * count / step / peak:.0%} of the card's 16-bit peak" if peak else ""
        print(f"  {name:<5} {count / step:12,.0f} tokens/s {flops * count / step / 1e12:7.1f} TFLOP/s{share}")
else:
    print(f"no card here (torch {torch.__version__}): everything above ran on the CPU")

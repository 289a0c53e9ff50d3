# ---
# labkit: {lab: "03", slug: number_formats, title: "Number formats: range against precision", minutes: 100, difficulty: 3, points: 24, cards: 0, needs: []}
# ---

# %% [markdown]
# # 03 · Number formats: range against precision
#
# *about 100 minutes · difficulty 3 of 5 · 24 points · any machine, no card needed*
#
# You train a small GPT, and in fp16 about **four in ten** numbers of one of its gradients become zero. When you are done here, you have
# written fp16, bf16 and any other such format yourself, equal to PyTorch's in all 65,536 patterns, and your own code picks a scale at
# which **none** of those numbers is lost.
#
# This is the ground that mixed precision stands on (Micikevicius et al. 2018, arXiv 1710.03740), which you build in the next lab.

# %% [markdown]
# ## Recap: numbers in base two in five lines
#
# 1. Every positive number is a power of two times something from 1 up to 2: 6.5 is 1.625 · 2², in binary 1.101 · 2².
# 2. A **floating-point format** stores three fields: one *sign* bit, *exponent* bits for the power, *fraction* bits for the digits behind
#    the point.
# 3. Exponent bits give **range**: how large and how small. Fraction bits give **precision**: how close neighbours lie.
# 4. Between two powers of two, neighbours lie equally far apart. Past the next power of two they lie twice as far apart.
# 5. **Rounding** takes the neighbour that is closer. At a tie, it takes the one whose last bit is 0 ("to even").

# %%
import math
import time

import torch

from labkit import check, live_memory
from labkit.data import batches, python_docs
from labkit.figures import lines, value_histogram
from labkit.gpt import GPT, GPTConfig, next_token_loss
from labkit.widgets import explore

torch.set_num_threads(1)  # steady numbers and times
FORMATS = {"bf16": (8, 7), "fp16": (5, 10), "E5M2": (5, 2), "E4M3": (4, 3)}  # (exponent bits, fraction bits)
STEPS, BATCH, SEQ = 100, 16, 64  # a step sees BATCH * SEQ = 1,024 tokens
text, _ = python_docs()
model = GPT(GPTConfig(vocab=256, context=SEQ, layers=2, heads=4, width=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# %% [markdown]
# ## The baseline: everything in fp32
#
# `backward_of` runs one forward and one backward in fp32 (8 exponent bits, 23 fraction bits) and returns the numbers that came up, by
# kind. Activations are what the blocks put out; the *logits* are the model's last output, one score for each possible next byte. Both get
# gradients too, on the way back to the weights.

# %%
def backward_of(inputs, targets, scale=1.0):
    """Forward, and backward from scale * loss. Returns the loss and, by kind, the numbers that came up."""
    outputs = []

    def keep(block, args, output):
        output.retain_grad()
        outputs.append(output)

    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    logits = model(inputs)  # (batch, seq, vocab)
    logits.retain_grad()
    loss = next_token_loss(logits, targets)
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    (loss * scale).backward()
    found = {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "activations": [output.detach() for output in outputs],
        "weight gradients": [parameter.grad for parameter in model.parameters()],
        "activation gradients": [output.grad for output in outputs],
        "logit gradients": [logits.grad],
    }
    return loss.item(), {kind: torch.cat([part.flatten() for part in parts]) for kind, parts in found.items()}

# %% [markdown]
# Train. The first three steps are drawn live: this is the memory that 16-bit formats are meant to halve, part by part. Then 97 more,
# and the numbers of steps 1, 10 and 100 are kept.

# %%
data = batches(text, BATCH, SEQ, STEPS)
seen, losses = {}, []


def train(first, last):
    """Steps first to last, counted from 1."""
    for step in range(first, last + 1):
        loss, numbers = backward_of(*data[step - 1])
        optimizer.step()
        losses.append(loss)
        if step in (1, 10, STEPS):
            seen[step] = numbers  # copies: joining the parts has made new tensors
        del numbers


with live_memory(model, optimizer, title="Three training steps in fp32") as live:
    for step in (1, 2, 3):
        with live.phase(f"step {step}"):
            train(step, step)
train(4, STEPS)
print(f"loss {losses[0]:.2f} at step 1, {losses[-1]:.2f} at step {STEPS}")

# %% [markdown]
# Now cast step 100's numbers to fp16, as plain 16-bit training would, and count the zeros: those that were zero in fp32 already, and
# those that the cast made.

# %%
for kind, values in seen[STEPS].items():
    before, after = (values == 0), (values.half() == 0)
    print(f"{kind:<22}{values.numel():>9,} numbers, zero in fp32 {before.float().mean():7.2%}, "
          f"made zero by fp16 {(after & ~before).sum() / (~before).sum():7.2%}")
fp16 = {"smallest": 2.0**-24, "smallest_normal": 2.0**-14, "infinite_from": 65520.0}
value_histogram(seen[STEPS], fp16, title=f"Step {STEPS}: sizes of numbers, and what fp16 does with them")

# %% [markdown]
# Weights and activations fit. The gradients lie far to the left, and most of the logits' sit at the cliff. The white part is what
# fp16 was made for; hardly any of the numbers use its right half.
#
# The lecture says that more than half of the gradients collapse to zero. You see that it depends on *which* gradients: the share is the
# one you just printed. To say where the cliff is, and why, you build the format.

# %% [markdown]
# ## 3.1 From bits to a number
#
# *difficulty 2 of 5 · importance 4 of 5 · 15 to 20 minutes · 3 points · any machine*
#
# From the highest bit: sign `s`, exponent field `E` of `e` bits, fraction field `F` of `m` bits. With `bias` = 2^(e-1) - 1:
#
# - `E` from 1 to 2^e - 2, **normal**: (-1)^s · (1 + F / 2^m) · 2^(E - bias). The 1 is not stored.
# - `E` = 0, **subnormal**: (-1)^s · (F / 2^m) · 2^(1 - bias). No hidden 1, so zero has a pattern, even two.
# - `E` = 2^e - 1: `F` = 0 is **infinity**, anything else **nan** ("not a number").
#
# This layout is IEEE 754's. fp16 is (e, m) = (5, 10), bf16 is (8, 7).

# %% [markdown]
# **Predict first.** Of fp16's 65,536 patterns, how many are nan?

# %% nbgrader={"grade": false, "grade_id": "predict-nan", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_nans = None  # patterns: your number
### BEGIN SOLUTION
predicted_nans = 2 * (2**10 - 1)
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "decode", "locked": false, "schema_version": 3, "solution": true, "task": false}
def decode(bits, exponent_bits, fraction_bits):
    """The numbers that bit patterns stand for.

    bits          : (n,) int64 tensor of patterns, from 0 to 2**(1 + exponent_bits + fraction_bits) - 1
    exponent_bits : 2 to 8; fraction_bits : 1 to 10; both int
    Returns a (n,) float64 or float32 tensor. The two zeros differ in sign; a nan's sign is of no matter.

    Any way is right: arithmetic, bit operations, a loop (100,000 patterns should take seconds, not
    minutes). About 9 lines.
    """
    ### BEGIN SOLUTION
    bias = 2 ** (exponent_bits - 1) - 1
    fraction = bits % 2**fraction_bits
    exponent = (bits >> fraction_bits) % 2**exponent_bits
    sign = torch.where(bits >> (exponent_bits + fraction_bits) > 0, -1.0, 1.0).double()
    hidden = (exponent > 0).double()
    value = (hidden + fraction / 2**fraction_bits) * 2.0 ** (exponent.clamp(min=1) - bias).double()
    special = torch.where(fraction == 0, torch.inf, torch.nan).double()
    return sign * torch.where(exponent == 2**exponent_bits - 1, special, value)
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-decode", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("number_formats.decode", decode)

# %% nbgrader={"grade": true, "grade_id": "exam-decode", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("number_formats.decode", decode, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which powers of two cut a pattern into its three fields?</details>
# <details><summary>Hint 2</summary><code>bits % 2**m</code> keeps the m lowest bits, <code>bits >> m</code> drops them.
# <code>torch.where(condition, a, b)</code> chooses number by number.</details>
# <details><summary>Hint 3</summary>cut out F, E and s; hidden is 1 where E is above 0; the power is the larger of E and 1, less the bias;
# multiply; put infinity and nan where E is at its top; apply the sign</details>

# %%
every = decode(torch.arange(2**16), *FORMATS["fp16"])
print(f"nan patterns of fp16: {every.isnan().sum()} (you said {predicted_nans})")
print("fp16 has", (every.abs() < 1).sum().item(), "patterns below 1 in size and", (every.abs() >= 1).sum().item(), "from 1 up")
for name, bits in FORMATS.items():
    positive = decode(torch.arange(2 ** sum(bits)), *bits)
    positive = positive[torch.isfinite(positive) & (positive > 0)]
    print(f"{name}: {len(positive):>6} positive numbers from {positive.min():.3g} to {positive.max():.6g}")

# %% [markdown]
# ## 3.2 From a number to bits
#
# *difficulty 4 of 5 · importance 5 of 5 · 25 to 35 minutes · 5 points · any machine*
#
# The other way means rounding. Write the number as a count of *steps*: one step is the gap between neighbours where it lies,
# 2^(power - m). Below the smallest normal number, steps stop shrinking. Round the count once, to even at a tie.
#
# Patterns of positive numbers are in the numbers' own order, without a hole. So when the count rounds up to the next power of two, that is
# simply the next pattern. What lies half a step or more beyond the largest number becomes infinity.

# %% [markdown]
# **Predict first.** The lecture says that in fp16, values like 1.1 round to 1. The number after 1 is 1 + 2^-m. What does 1.1 become in
# fp16, to four decimals? And in which of bf16, fp16, E5M2 and E4M3 does 1.1 become 1?

# %% nbgrader={"grade": false, "grade_id": "predict-one", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_fp16 = None  # what 1.1 becomes in fp16
predicted_becomes_one = None  # a list of names
### BEGIN SOLUTION
predicted_fp16 = 1.0996
predicted_becomes_one = ["E5M2"]
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "encode", "locked": false, "schema_version": 3, "solution": true, "task": false}
def encode(values, exponent_bits, fraction_bits):
    """The bit patterns of the numbers nearest to `values`.

    values : (n,) float32 tensor; zeros, subnormal numbers, infinities and nans of any kind among them
    exponent_bits, fraction_bits : as in decode
    Returns a (n,) int64 tensor of patterns, none below 0: the highest bit is the sign. Each value is
    rounded once, to the nearest number, at a tie to the one whose pattern is even. From half a step
    beyond the largest number on: infinity. nan becomes any nan. Zeros keep their sign, and so do
    numbers that become zero. About 10 lines.
    """
    ### BEGIN SOLUTION
    bias = 2 ** (exponent_bits - 1) - 1
    infinity = (2**exponent_bits - 1) << fraction_bits
    size = values.double().abs()
    power = torch.frexp(size).exponent - 1  # size is from 2**power to twice that
    power = torch.where(size == 0, 1 - bias, power.clamp(min=1 - bias))
    steps = torch.round(size * 2.0 ** (fraction_bits - power).double())  # torch.round takes the even one at a tie
    pattern = ((power + bias - 1) << fraction_bits) + steps
    pattern = torch.where(values.isnan(), infinity + 1, pattern.clamp(max=infinity)).long()
    return pattern + (torch.signbit(values).long() << (exponent_bits + fraction_bits))
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-encode", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("number_formats.encode", encode)

# %% nbgrader={"grade": true, "grade_id": "exam-encode", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("number_formats.encode", encode, points=2)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>How many steps above its power of two is 1.1 in fp16, before you round?</details>
# <details><summary>Hint 2</summary><code>torch.frexp(x)</code> gives an exponent one above the power you want; for 0 it gives 0.
# <code>torch.round</code>, Python's <code>round</code> and numpy's all go to even at a tie. <code>torch.signbit</code> knows -0.0.</details>
# <details><summary>Hint 3</summary>power of each size, but at least 1 - bias; steps are size / 2^(power - m), rounded; the pattern is
# (power + bias - 1) · 2^m + steps; nothing above infinity's pattern; nan apart; add the sign bit</details>

# %%
def cast(value, name):
    """What one number becomes in the format called `name`."""
    return decode(encode(torch.tensor([value]), *FORMATS[name]), *FORMATS[name]).item()


print(f"{'':>10}{'fp32':>16}" + "".join(f"{name:>14}" for name in FORMATS))
for value in (1.1, 1.0001, 65504.0, 65519.0, 65520.0, 1e5, 1e-8, -1e9):
    print(f"{value:>10g}{torch.tensor(value).item():>16.9g}" + "".join(f"{cast(value, name):>14.7g}" for name in FORMATS))
print(f"you said {predicted_fp16} in fp16, and 1 in {predicted_becomes_one}")

# %% [markdown]
# So the lecture is imprecise: in fp16, 1.1 becomes 1.0996, off by 0.04%, and in bf16 1.1016. It is 1.0001 that becomes 1 there. 1.1 becomes 1
# in an 8-bit format, E5M2.
#
# The other rows are classic traps. 1e-8, a usual epsilon, is 0 in fp16: a division by it is a division by zero. -1e9, a usual mask, is
# -infinity. And a cast from bf16 to fp16 is not safe: 1e5 fits one and not the other, and even fp16's largest number, 65504, is 65536 in bf16.
#
# And 65520 begins the way to nan:

# %%
for start in (65519.0, 65520.0):
    x = torch.tensor(start).half()
    print(f"{start:.0f} in fp16: x = {x.item():g}, x - x = {(x - x).item():g}, x * 0 = {(x * 0).item():g}")

# %% [markdown]
# One nan in a gradient, and after one optimizer step every weight it touches is nan.
#
# **Rounding twice is not rounding once.** PyTorch casts float64 to fp16 by way of fp32. Take 1 + 2^-11 + 2^-40: it lies just above the
# middle between 1 and its next neighbour. NumPy rounds once.

# %%
x = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
print(f"torch: 1 + {x.half().item() - 1:g}; numpy: 1 + {float(x.numpy().astype('float16')[0]) - 1:g}; the next number is 1 + {2**-10:g}")
print(f"by way of bf16, 1.1 in fp16 is {torch.tensor(1.1).bfloat16().half().item():.7g}, directly {torch.tensor(1.1).half().item():.7g}")

# %% [markdown]
# ## 3.3 Where range and precision end
#
# *difficulty 2 of 5 · importance 4 of 5 · 15 minutes · 3 points · any machine*
#
# Eight numbers tell what a format can and cannot do. One of them matters for Adam, which divides by a running average of *squared*
# gradients: a gradient may survive in the format while its square becomes zero.
#
# **Predict first.** What is the smallest positive gradient in fp16 whose square is not zero in fp16? The nearest power of ten will do.

# %% nbgrader={"grade": false, "grade_id": "predict-square", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_square = None  # your number
### BEGIN SOLUTION
predicted_square = 1e-4
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "limits", "locked": false, "schema_version": 3, "solution": true, "task": false}
def limits(exponent_bits, fraction_bits):
    """Eight numbers about a format, exact.

    The format is bf16, or has 5 or 6 exponent bits and at most 10 fraction bits, or 4 and at most 6.
    Returns a dict of numbers:
    "largest"          : the largest finite number
    "infinite_from"    : the smallest real number that rounds to infinity
    "nan_from"         : the smallest positive x of the format for which (x + x) - (x + x) is nan, every
                         sum and difference rounded to the format
    "smallest_normal"  : the smallest positive number with a hidden 1
    "smallest"         : the smallest positive number
    "smallest_squared" : the smallest positive x of the format for which x * x, rounded, is not zero
    "still_one"        : the largest real number that rounds to 1
    "first_missing"    : the smallest positive integer that is no number of the format
    By formula, or by search with encode and decode. About 12 lines.
    """
    ### BEGIN SOLUTION
    bias, step = 2 ** (exponent_bits - 1) - 1, 2.0**-fraction_bits
    smallest = 2.0 ** (1 - bias) * step
    positive = decode(torch.arange(1, (2**exponent_bits - 1) << fraction_bits), exponent_bits, fraction_bits)
    return {
        "largest": (2 - step) * 2.0**bias,
        "infinite_from": (2 - step / 2) * 2.0**bias,
        "nan_from": 2.0**bias,
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest": smallest,
        "smallest_squared": positive[positive * positive > smallest / 2].min().item(),  # a tie goes to zero
        "still_one": 1 + step / 2,
        "first_missing": 2 ** (fraction_bits + 1) + 1,
    }
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-limits", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("number_formats.limits", limits)

# %% nbgrader={"grade": true, "grade_id": "exam-limits", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("number_formats.limits", limits, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Draw the neighbours of the number in question. Who is next above it, who below, and who is halfway?</details>
# <details><summary>Hint 2</summary>You can decode a pattern that you know: the largest number has the pattern just below infinity's, the
# smallest has pattern 1. Halfway is half a step further.</details>
# <details><summary>Hint 3</summary>for the two that are searched: decode every positive pattern, square or double, encode again, take the
# first that is (or is not) zero or infinite</details>

# %%
known = {name: limits(*bits) for name, bits in FORMATS.items()}
print(f"{'':<18}" + "".join(f"{name:>14}" for name in known))
for key in known["fp16"]:
    print(f"{key:<18}" + "".join(f"{known[name][key]:>14.8g}" for name in known))
print(f"smallest gradient whose square survives fp16: {known['fp16']['smallest_squared']:.3g} (you said {predicted_square})")
for kind in ("weight gradients", "activation gradients", "logit gradients"):
    squares = seen[STEPS][kind].half() ** 2
    print(f"  squares that are zero in fp16, {kind}: {(squares == 0).float().mean():.1%}")

# %% [markdown]
# Adam adds only a thousandth of each square to its average, so the true limit lies higher still. That is why optimizer states
# stay in fp32, even where everything else is in 16 bits.
#
# bf16 has fp32's range and squares survive, but look at `still_one` and `first_missing`: a weight of 1 plus 0.003 is 1.
# Both formats need fp32 *master weights*; you build them in lab 04.

# %% [markdown]
# ## 3.4 What the cast loses
#
# *difficulty 2 of 5 · importance 5 of 5 · 10 to 15 minutes · 3 points · any machine*
#
# The derivative is linear: multiply the loss by a *scale*, and every gradient is multiplied by it. In the picture above, all gradients
# would move right together. After backward you divide in fp32, where nothing becomes zero.
#
# To choose the scale, you need to know what is lost at each. Numbers that were zero before the cast are not its fault.
#
# **Predict first.** What share of step 100's logit gradients becomes zero in fp16 at scale 1000, the lecture's example?

# %% nbgrader={"grade": false, "grade_id": "predict-lost", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_lost = None  # a share from 0 to 1
### BEGIN SOLUTION
predicted_lost = 0.0
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "underflow-fraction", "locked": false, "schema_version": 3, "solution": true, "task": false}
def underflow_fraction(tensor, exponent_bits, fraction_bits, scale=1.0):
    """The share of the numbers that are not zero before, and are zero after, scaling and rounding.

    tensor : float32 of any shape, not changed
    scale  : positive number, perhaps less than 1, perhaps too large for the format
    exponent_bits, fraction_bits : the format in which scale * tensor is rounded, as in encode
    Returns a number from 0 to 1: those that become zero among those that were not zero. It is 0 if
    there was nothing to lose. Infinities and nans are not zero. About 5 lines.
    """
    ### BEGIN SOLUTION
    values = tensor.flatten()
    values = values[values != 0]
    if len(values) == 0:
        return 0.0
    after = decode(encode(values * scale, exponent_bits, fraction_bits), exponent_bits, fraction_bits)
    return (after == 0).double().mean().item()
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-underflow", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("number_formats.underflow", underflow_fraction)

# %% nbgrader={"grade": true, "grade_id": "exam-underflow", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("number_formats.underflow", underflow_fraction, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>In what order do the three things happen: scaling, rounding, counting?</details>
# <details><summary>Hint 2</summary>Your encode and decode take flat tensors: <code>tensor.flatten()</code>.
# <code>values[values != 0]</code> keeps what can be lost.</details>
# <details><summary>Hint 3</summary>flatten; drop zeros; nothing left: 0; scale, encode, decode; how many are zero, divided by how many
# there were</details>

# %%
GRADIENTS = ("weight gradients", "activation gradients", "logit gradients")
for step, numbers in seen.items():
    for kind in GRADIENTS:
        shares = [f"{underflow_fraction(numbers[kind], *FORMATS['fp16'], scale):>9.3%}" for scale in (1, 8, 1000, 2**16)]
        print(f"step {step:>3}, {kind:<22} lost at scale 1, 8, 1000, 65536:" + "".join(shares))
print(f"you said {predicted_lost} for the logits at step {STEPS} and scale 1000")
lost = {kind: underflow_fraction(values, *FORMATS["fp16"], 1000) for kind, values in seen[STEPS].items() if kind in GRADIENTS}
value_histogram({kind: seen[STEPS][kind] for kind in GRADIENTS}, known["fp16"], scale=1000, lost=lost,
                title=f"Step {STEPS}: gradients at scale 1000, and fp16's range")

# %% [markdown]
# Three things to see. At step 1 hardly anything is lost: the share grows as the model gets sure of what does *not* come next, and those
# logits' gradients shrink. A larger batch makes them smaller again, because the mean divides by the number of tokens. And a
# thousandth of the weight gradients is lost at *any* of these scales. Whose are they?

# %%
_, more = backward_of(*batches(text, 16 * BATCH, SEQ, 1, seed=5)[0])
for kind in GRADIENTS:
    print(f"16,384 tokens, {kind:<22} lost at scale 1: {underflow_fraction(more[kind], *FORMATS['fp16']):.2%}")
print("parameters with more than half of their gradient lost at scale 1000:")
for name, parameter in model.named_parameters():
    share = underflow_fraction(parameter.grad, *FORMATS["fp16"], 1000)
    if share > 0.5:
        print(f"  {name}: {share:.0%} lost, largest {parameter.grad.abs().max():.1g}")

# %% [markdown]
# The biases of the keys. Adding the same number to all scores of a softmax changes nothing, so their gradient *is* zero; what you see is
# fp32's rounding noise. Losing it does no harm. A share alone does not tell you that: look at whose numbers they are.
#
# So the lecture's "more than half" holds for the logits of a larger batch, and is far from the truth for weights.

# %% [markdown]
# ## 3.5 The window
#
# *difficulty 3 of 5 · importance 5 of 5 · 15 to 20 minutes · 3 points · any machine*
#
# Scale up, and small gradients are saved. Scale too far, and large ones become infinite, and then nan. Between lies the **window**.
# Frameworks take powers of two: such a scale changes the exponent and leaves the fraction bits alone, so that dividing gives back the
# very same number, as long as none was subnormal or infinite. 1000 does not.
#
# **Predict first.** Step 100's largest weight gradient is near 0.1. What is the largest power of two by which you may scale it in fp16?

# %% nbgrader={"grade": false, "grade_id": "predict-window", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_power = None  # k in 2**k
### BEGIN SOLUTION
predicted_power = 19  # 65520 / 0.1 is about 2**19.3
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "scale-window", "locked": false, "schema_version": 3, "solution": true, "task": false}
def scale_window(tensors, exponent_bits, fraction_bits):
    """The powers of two at which a set of gradients is safe in a format.

    tensors : list of float32 tensors of any shapes, all numbers finite, at least one of them not zero
    Returns (low, high), two powers of two (the scales, not their exponents; 2.0**-40 to 2.0**40):
    low     : the smallest at which no number that is not zero becomes zero, in any of the tensors
    high    : the largest at which no number becomes infinite, in any of the tensors
    Both exist. Scaled numbers are rounded as encode does. low may be above high; then no scale is safe. About 8 lines.
    """
    ### BEGIN SOLUTION
    sizes = torch.cat([tensor.flatten() for tensor in tensors]).abs()
    edges = torch.stack([sizes[sizes > 0].min(), sizes.max()])  # only the smallest and the largest decide
    powers = [2.0**k for k in range(-40, 41)]
    after = {scale: decode(encode(edges * scale, exponent_bits, fraction_bits), exponent_bits, fraction_bits) for scale in powers}
    low = min(scale for scale in powers if after[scale][0] > 0)
    high = max(scale for scale in powers if after[scale][1] < math.inf)
    return low, high
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-window", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("number_formats.window", scale_window)

# %% nbgrader={"grade": true, "grade_id": "exam-window", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("number_formats.window", scale_window, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>Which two numbers of all the gradients decide?</details>
# <details><summary>Hint 2</summary>Zeros are not among the smallest. Either try the powers in turn with encode and decode, or divide:
# at which size does rounding give zero, at which infinity, and does the tie count?</details>
# <details><summary>Hint 3</summary>smallest and largest size; for each k from -40 to 40: scale, round; low is the first at which the smallest
# one is above zero, high the last at which the largest one is finite</details>

# %%
for step, numbers in seen.items():
    for kind in GRADIENTS:
        low, high = scale_window([numbers[kind]], *FORMATS["fp16"])
        verdict = "" if low <= high else "  (no scale is safe)"
        print(f"step {step:>3}, {kind:<22} from 2^{math.log2(low):.0f} to 2^{math.log2(high):.0f}{verdict}")
print(f"you said 2^{predicted_power} for the weights of step {STEPS}")
_, one = backward_of(*data[-1])
for scale in (1000, 1024):
    _, scaled = backward_of(*data[-1], scale=scale)
    changed = (scaled["weight gradients"] / scale != one["weight gradients"]).float().mean()
    print(f"loss times {scale}, gradients divided by {scale}: {changed:.1%} of the weights' gradients are not the same bits")

# %% [markdown]
# The window moves while the model learns: logits push its low end up, weights move its high end. Where no scale is safe for the
# weights, it is the key biases' noise again, so small that saving it would make other weights' gradients infinite. What you want in
# practice is the high end, with some room: a scale at which nothing is infinite.

# %%
scales = [2.0**k for k in range(0, 25, 2)]
curves = {}
for kind in GRADIENTS:
    curves[kind] = (scales, [100 * underflow_fraction(seen[STEPS][kind], *FORMATS["fp16"], scale) for scale in scales])
high = min(scale_window([seen[STEPS][kind]], *FORMATS["fp16"])[1] for kind in GRADIENTS)
lines(curves, title=f"Step {STEPS}: fixed scales from 1 to 2^24 in fp16", x="scale", y="lost to zero (%)", log="x",
      marks={"1000": 1000.0, "last without infinity": high})

# %% [markdown]
# ## Try it: scale and format
#
# Move the scale and watch the gradients walk through a format's range. Then change the format. In bf16, nothing needs a scale: it has
# fp32's exponent bits. What it gives up is in the last rows of your table in 3.3.

# %%
shown = {kind: values[:: max(1, values.numel() // 20_000)] for kind, values in seen[STEPS].items()}


def draw(format, scale):
    bits = FORMATS[format]
    lost = {kind: underflow_fraction(values, *bits, scale) for kind, values in shown.items() if kind in GRADIENTS}
    gradients = {kind: shown[kind] for kind in GRADIENTS}
    return value_histogram(gradients, known[format], scale=scale, lost=lost, format_name=format)


explore({"format": list(FORMATS), "scale": [1, 8, 64, 1000, 1024, 2**13, 2**16, 2**19, 2**22, 2**24]}, draw,
        start={"format": "fp16", "scale": 1}, title="Gradients of step 100")

# %% [markdown]
# ## 3.6 A sum that does not stall
#
# *difficulty 2 of 5 · importance 4 of 5 · 15 minutes · 3 points · any machine*
#
# Gradients are sums over the batch, norms over features, losses over tokens. Add in a format with few fraction bits, and the sum
# stops: once the gap between neighbours is twice the addend or more, `total + value` rounds back to `total`.
#
# And a mean can be out of reach although it is an ordinary number: its sum may be infinite.
#
# **Predict first.** You add a thousand ones, one by one, with a bf16 total. Where does it stop? And in fp16, with ten thousand ones?

# %% nbgrader={"grade": false, "grade_id": "predict-stall", "locked": false, "schema_version": 3, "solution": true, "task": false}
predicted_bf16 = None  # your number
predicted_fp16_sum = None  # your number
### BEGIN SOLUTION
predicted_bf16 = 256
predicted_fp16_sum = 2048
### END SOLUTION

# %% nbgrader={"grade": false, "grade_id": "steady-sums", "locked": false, "schema_version": 3, "solution": true, "task": false}
def steady_sum(values):
    """The sum of 16-bit numbers, without stalling.

    values : (n,) float16 or bfloat16 tensor, n at least 1; the partial sums, in any order, are in the
             format's range
    Returns a number or a tensor with one number, in the format of values or a wider one. It is off by no
    more than a rounding for every doubling of n: about log2(n) half gaps, of the size that all sizes add up to.

    Any way is right: a wider total, adding in pairs, carrying the error along. About 3 lines.
    """
    ### BEGIN SOLUTION
    total = torch.zeros((), dtype=torch.float32)
    for value in values:
        total = total + value.float()
    return total
    ### END SOLUTION


def steady_mean(values):
    """The mean of the same numbers, as exact; their sum may be out of the format's range. About 2 lines."""
    ### BEGIN SOLUTION
    return steady_sum(values.float() / len(values))
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-sums", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("number_formats.sums", steady_sum, steady_mean)

# %% nbgrader={"grade": true, "grade_id": "exam-sums", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
# Hidden cases run here when graded.
### BEGIN HIDDEN TESTS
from autograder.exams import exam
exam("number_formats.sums", steady_sum, steady_mean, points=1)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>In which format is the total, and how far apart are neighbours where it has got to?</details>
# <details><summary>Hint 2</summary><code>value.float()</code> is the same number with more room. Or add halves: sums of equal length are of
# equal size, so neither vanishes beside the other.</details>
# <details><summary>Hint 3</summary>a total in fp32, each value added to it; for the mean, see that no number on the way is larger than the
# format you add in can hold</details>

# %%
def plain_sum(values):
    """A loop in the values' own format: the totals on the way."""
    total, totals = torch.zeros((), dtype=values.dtype), []
    for value in values:
        total = total + value
        totals.append(total.item())
    return totals


ones = {"bf16": torch.ones(1000, dtype=torch.bfloat16), "fp16": torch.ones(4096, dtype=torch.float16)}
totals = {name: plain_sum(values) for name, values in ones.items()}
for name, said in {"bf16": predicted_bf16, "fp16": predicted_fp16_sum}.items():
    print(f"{len(ones[name])} ones in {name}: a loop gives {totals[name][-1]:g} (you said {said}), torch.sum {ones[name].sum().item():g}, "
          f"yours {float(steady_sum(ones[name])):g}")
tenfold = torch.full((10,), 1.1, dtype=torch.float16)
print(f"ten times 1.1 in fp16: {(tenfold[0] * 10).item():.7g} by one product, {plain_sum(tenfold)[-1]:.7g} by ten sums")
big = torch.full((1000,), 300.0, dtype=torch.float16)
print(f"mean of a thousand 300s: sum/n {(big.sum() / 1000).item():g}, torch.mean {big.mean().item():g}, yours {float(steady_mean(big)):g}")
lines({f"{name}, its own total": (range(1, len(some) + 1), some) for name, some in totals.items()}
      | {"yours": ([1, 512, 1024, 2048, 4096], [float(steady_sum(ones["fp16"][:n])) for n in (1, 512, 1024, 2048, 4096)])},
      title="Adding ones", x="ones added", y="total")

# %% [markdown]
# `torch.sum` does what you did: it adds in fp32 inside. So do cards' matrix units. A loop of your own over 16-bit tensors does not,
# and neither does `total += loss` on a 16-bit loss.

# %% [markdown]
# ## 3.7 Extension: eight bits without infinity
#
# *difficulty 3 of 5 · importance 2 of 5 · 10 to 15 minutes · 1 point · any machine*
#
# With 8 bits every pattern counts. `float8_e4m3fn` (Micikevicius et al. 2022, arXiv 2209.05433) has 4 exponent and 3 fraction bits, and
# uses the highest exponent for numbers, too: it has no infinity, and only the pattern with *all* exponent and fraction bits set is nan, so the
# largest number is 448 and not 240. There are two conventions for what is larger: nan, or 448. Here it is 448, "saturating".

# %% nbgrader={"grade": false, "grade_id": "encode-e4m3", "locked": false, "schema_version": 3, "solution": true, "task": false}
def encode_e4m3(values):
    """The patterns of `values` in float8_e4m3fn, saturating.

    values : (n,) float32 tensor
    Returns a (n,) int64 tensor of patterns from 0 to 255. To the nearest number, ties to the even pattern;
    what is larger than 448 in size, infinity too, becomes 448 of its sign; nan becomes one of the two nans
    (0x7F, 0xFF). About 4 lines; `encode` may help.
    """
    ### BEGIN SOLUTION
    # One exponent bit more makes the bias 8 larger: scaled by 2**-8, every number has the same pattern there.
    pattern = encode(values.abs().clamp(max=448) * 2.0**-8, 5, 3)
    return torch.where(values.isnan(), 0x7F, pattern) + 128 * torch.signbit(values).long()
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-e4m3", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("number_formats.e4m3", encode_e4m3)

# %% [markdown]
# <details><summary>Hint 1</summary>Up to 240 nothing is new. Which exponent field do 256 to 448 have?</details>
# <details><summary>Hint 2</summary>Write encode's steps again with the bias of 4 bits, and end at pattern 0x7E where encode ends at
# infinity.</details>
# <details><summary>Hint 3</summary>clamp to 448; power, at least -6; steps of 2^(power - 3), rounded; pattern (power + 6) · 8 + steps; nan
# apart; sign</details>

# %% [markdown]
# ## 3.8 Extension: rounding by chance
#
# *difficulty 3 of 5 · importance 3 of 5 · 15 minutes · 1 point · any machine*
#
# A bf16 weight near 1 does not feel an update of 0.001: each time it rounds back. **Stochastic rounding** takes one of the two neighbours by
# chance, the closer one more often, so that the average of many roundings is the number itself. A thousand small updates then add up, on
# average.

# %% nbgrader={"grade": false, "grade_id": "round-stochastically", "locked": false, "schema_version": 3, "solution": true, "task": false}
def round_stochastically(values):
    """`values` rounded to bfloat16 by chance, right on average.

    values : (n,) float32 tensor, none subnormal, none between bfloat16's largest number and infinity
    Returns a (n,) float32 tensor of numbers that bfloat16 has. Each value becomes one of its two neighbours,
    with chances that make the average the value; each element of each call has its own draw. Numbers of bfloat16
    (zeros, too), infinities and nans stay as they are. Draw with torch, numpy or random. About 5 lines.
    """
    ### BEGIN SOLUTION
    bits = values.view(torch.int32)
    noise = torch.randint(2**16, bits.shape, dtype=torch.int32)
    # bf16 is fp32 without its 16 lowest bits. The noise carries into the 17th as often as what is cut off is large.
    rounded = ((bits + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values)
    ### END SOLUTION

# %% nbgrader={"grade": true, "grade_id": "check-stochastic", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("number_formats.stochastic", round_stochastically)

# %% [markdown]
# <details><summary>Hint 1</summary>A value lies three quarters of the way between two neighbours. How often should it go up?</details>
# <details><summary>Hint 2</summary>bf16's pattern is the upper half of fp32's: <code>values.view(torch.int32)</code>. Or take the neighbour
# below by <code>torch.floor</code> of the steps, and <code>torch.rand</code> against the rest.</details>
# <details><summary>Hint 3</summary>add a random number of 16 bits to the pattern, clear the 16 lowest bits, view as float32; leave
# infinities and nans out</details>

# %%
nearest, by_chance = torch.tensor([1.0]), torch.tensor([1.0])
for _ in range(1000):
    nearest = (nearest + 0.001).bfloat16().float()
    by_chance = round_stochastically(by_chance + 0.001)
print(f"1 plus a thousand times 0.001 in bf16: {nearest.item():g} by the nearest, {by_chance.item():g} by chance")

# %% [markdown]
# ## Before and after
#
# The gradients of step 100 in fp16: as they are, and at the scale that your `scale_window` calls the last without infinity.

# %%
for kind in GRADIENTS:
    before, after = (underflow_fraction(seen[STEPS][kind], *FORMATS["fp16"], scale) for scale in (1, high))
    print(f"{kind:<22} lost {before:8.3%} before, {after:8.3%} at scale 2^{math.log2(high):.0f}")
saved = {kind: underflow_fraction(seen[STEPS][kind], *FORMATS["fp16"], high) for kind in GRADIENTS}
value_histogram({kind: seen[STEPS][kind] for kind in GRADIENTS}, known["fp16"], scale=high, lost=saved,
                title=f"Step {STEPS} at scale 2^{math.log2(high):.0f}: nothing infinite, next to nothing lost")

# %% [markdown]
# ## Reflection
#
# The lecture asks two questions. *Why does naive fp16 training risk gradients underflowing to zero, and how does loss scaling address
# this?* And: *why does bfloat16 avoid the need for gradient scaling, and what does it sacrifice compared to fp16?*
#
# Answer both for your own measurements, in five to eight sentences. Use (a) the share of logit gradients that your model lost at step 1 and
# at step 100, the size below which that happens, and why a larger batch loses more; (b) your window at step 100, and why one fixed scale may
# not do for a whole training; (c) two numbers from your table in 3.3 that show what bf16 has and what it lacks against fp16.
#
# *A person grades this: 2 points for all three with your own numbers and reasons, 1 for two of them, 0 for general statements.*

# %% [markdown] nbgrader={"grade": true, "grade_id": "reflection-scale", "locked": false, "points": 2, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN SOLUTION
# *Rubric.* **2**: (a) both measured shares (about 0 and about 40%), the limit 2^-25 (half the smallest number, about 3e-8), and the mean's
# division by the number of tokens; scaling the loss multiplies every gradient, by the chain rule, and the division happens in fp32; (b) a
# measured window (logits from about 2^4 or 2^5 to 2^26, weights up to about 2^19) and that both ends move while training goes on; (c) a
# range number (largest, smallest, smallest_squared) and a precision number (still_one, first_missing) of both formats. **1**: two of the
# three, or all without measured numbers. **0**: restates the lecture.
#
# *Example.* At step 1, none of my logit gradients became zero in fp16, at step 100 it was 42%: numbers of 2^-25 or less round to zero, and
# once the model is sure that a byte does not come next, that logit's gradient is smaller. With 16 times the tokens it was 80%, because the
# loss is a mean and each token's gradient is divided by 16 more. Multiplying the loss by a scale multiplies all gradients by the chain rule;
# at 1000 no logit gradient was lost, and I divide in fp32. My window at step 100 went from 2^5 (logits) to 2^19 (weights become infinite).
# At step 1 its upper end was 2^17, so a fixed scale of 2^18 would have begun with infinities. bf16 has 8 exponent bits like fp32: its smallest
# number is 9e-41 and fp16's 6e-8, so nothing underflows. It pays in precision: 1.0039 still becomes 1, in fp16 only up to 1.0005.
# ### END SOLUTION

# %% [markdown]
# ## What real frameworks call it
#
# - **PyTorch**: `tensor.half()`, `.bfloat16()`, `torch.finfo(dtype)` with `max`, `tiny` (your `smallest_normal`, not your `smallest`) and `eps`
#   (the gap at 1). `torch.amp.GradScaler` holds a loss scale, starts at 65536 and moves it: next lab.
# - **NVIDIA Apex** and **DeepSpeed**: *static* and *dynamic loss scale*. **Transformer Engine**: E4M3 forward, E5M2 backward, one scale per
#   tensor.
# - **Hardware**: matrix units multiply 16-bit numbers and add in fp32. bf16 in hardware needs compute capability 8.0 (A100, RTX 30 and
#   later); older cards emulate it slowly. fp16 runs on older ones.
# - **Stochastic rounding**: on TPUs and Trainium in hardware, in bf16 optimizers in software.

# %% [markdown]
# ## On a card
#
# With an NVIDIA card this cell times the same training step there, and a large product in each format. Without one it says so.

# %%
def card_seconds(run):
    """Seconds of one run on the card, after one to warm up."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if torch.cuda.is_available():
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(f"{name}, torch {torch.__version__}, capability {capability}: bf16 in hardware: {'yes' if capability >= (8, 0) else 'no'}")
    model.cuda()
    inputs, targets = (part.cuda() for part in data[0])
    tokens_per_s = BATCH * SEQ / card_seconds(lambda: backward_of(inputs, targets))
    flops = 6 * sum(parameter.numel() for parameter in model.parameters())
    print(f"this GPT in fp32: {tokens_per_s:,.0f} tokens/s, {tokens_per_s * flops / 1e12:.3f} TFLOP/s")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a = torch.randn(8192, 8192, device="cuda").to(dtype)
        print(f"  product of 8192 x 8192 in {dtype}: {2 * 8192**3 / card_seconds(lambda a=a: a @ a) / 1e12:.1f} TFLOP/s")
    model.cpu()
else:
    print(f"no card here (torch {torch.__version__}): everything above ran on the CPU")

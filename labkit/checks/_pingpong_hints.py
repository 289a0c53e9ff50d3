"""What the ping-pong checks ask a learner whose answer fails: each a question that points at the fault and leaves the answer open."""

from typing import Any

HINTS = {
    "does-nothing": (
        "What came back is not what any layer computes. Which line of yours calls the first layer, and where does its "
        "result go?"
    ),
    "nothing-returned": "Does every path through your function end in a `return`?",
    "numbers": (
        "Take two layers by hand: does each read what the one before it left, and do bias and relu stand exactly where "
        "the formula has them?"
    ),
    "same-buffer": "Which storage does this layer read, and which does it write? Compare their data_ptr().",
    "never-flips": "List the buffer that layers 0 to 3 write. Is the sequence what you expect?",
    "own-input": (
        "This step overwrites its input before it has read all of it. Which operations can safely overwrite their "
        "input, element by element?"
    ),
    "precision": "Close, but not to 1e-4. In which number format does each of your steps compute?",
    "stale": (
        "This is the right answer to an earlier input. What does your code keep from the call before, and how does it "
        "know that it still holds?"
    ),
    "skip-lost": "The blocks' branches are right. What became of the other term of the sum?",
    "skip-source": "Who is the last reader of the block's input? Is it done when you write there?",
    "input-changed": "The caller still needs its input. Which of your writes can land in memory that you did not make?",
    "widest": (
        "A layer needs more room than its buffer has. Which activation is the widest, when do you know it, and what "
        "does torch do with an output that does not fit?"
    ),
    "shape": "A buffer may be wider than a layer's output. Which part of it is the result?",
    "dtype": "Which number format do your buffers have, and which does the input have?",
    "grad": "Autograd still watches. Does anything here need a gradient later?",
    "inference": (
        "This buffer was made in inference mode and is written outside it. Where does your inference mode begin and "
        "end?"
    ),
    "per-layer": "Each layer takes new memory. When layer 3 runs, which earlier output does nobody read any more?",
    "copied": (
        "You have buffers, but each layer first makes a tensor and then copies it. How many new tensors does one "
        "layer create?"
    ),
    "hidden": (
        "Products go into your buffers, yet memory moves. Which operation after the product returns a new tensor?"
    ),
    "buffer-per-layer": (
        "Buffers are made again while the layers run. How many does a network of 24 layers need, and when could they "
        "all be made?"
    ),
    "arena-grows": (
        "The memory that you take in advance grows with depth. Which part of it is read again after the next layer?"
    ),
    "one-too-many": (
        "The number does not grow with depth, but it is larger than needed. Which of these tensors could be written "
        "into one of the others?"
    ),
    "out-of-sight": (
        "Some layers did not run as torch operators on the given weights, so nothing could be measured. Which library "
        "computed them?"
    ),
    "peak": (
        "More is alive at once than the buffers of this exercise. What else is still named by a variable when the "
        "next layer runs?"
    ),
    "kept": "Memory stays behind after every call. Which name outside your function still holds a result?",
    "recomputed": (
        "The products cost more than one pass over the layers. Which layer runs again, and what would have to stay in "
        "memory so that once is enough?"
    ),
    "edge": "What is special about the case named here, and which line of yours does not expect it?",
    "strided": "This input is a view with gaps between its numbers. Which of your lines needs them side by side?",
    "grad-input": "Here the input requires grad, and not only the weights do. Who else than they may autograd still watch?",
    "made-again": (
        "How many tensors does the second call make, and which line makes them? What could have been ready since the "
        "first?"
    ),
    "result-copied": (
        "One tensor per call is still made. Who owns the result, and what does the contract say about how long it "
        "lives?"
    ),
    "reshaped": "A full batch, a smaller one, a full one: which of your buffers survived the smaller one?",
    "holds": (
        "Between calls more stays alive than two buffers for each batch size so far. Which attributes hold tensors, "
        "and how large is each?"
    ),
    "out-ignored": "The caller looks into its own `out`. Which of your lines writes there?",
    "late-reader": (
        "`out` was written only after the call had returned. Who may still be reading your buffer when the next call "
        "overwrites it?"
    ),
    "not-out": "`out` is filled. And what does the call hand back to the caller who brought it?",
    "aliased": "Call it twice and look at the first result again. Whose memory is it in?",
    "reported": (
        "Which bytes would exist without your buffers? How many has one number of this network, and does your sum count "
        "one storage twice?"
    ),
    "reported-missing": "The contract names one more thing that an executor tells about itself: which?",
}

# Part of an error's message -> the hint for a crash that has a usual cause here.
_TYPICAL = (
    ("support automatic differentiation", "grad"),
    ("requires grad", "grad"),
    ("nference tensor", "inference"),
    ("exceeds dimension size", "widest"),
    ("size of tensor", "widest"),
    ("must match", "widest"),
    ("shapes cannot be multiplied", "widest"),
    ("size mismatch", "widest"),
    ("out of bounds for storage", "widest"),
    ("invalid for input of size", "widest"),
    ("does not match", "widest"),
    ("same dtype", "dtype"),
    ("dtype", "dtype"),
)

def typical_error(error: dict[str, Any]) -> str | None:
    """The hint for a crash that has a usual cause here."""
    return next((hint for text, hint in _TYPICAL if text in error["message"]), None)

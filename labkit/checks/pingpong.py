"""Checks of lab 01: two activation buffers for any depth.

Numbers alone hardly tell a ping-pong from the plain loop, and neither does the peak (Python frees what nobody holds: 2 activations against 3). So these
checks grade what was created: storages of activation size, whether their number depends on depth, and what a second call still makes.
"""

from functools import partial
from typing import Any

from labkit.checks._core import Case, Check, Criterion, Observation, register
from labkit.checks._pingpong_cases import forward_cases, persistent_cases, residual_cases
from labkit.checks._pingpong_executor import judge_executor
from labkit.checks._pingpong_judge import judge_function, unit_bytes
from labkit.checks._pingpong_picture import draw_calls, draw_places
from labkit.checks._pingpong_probe import probe_executor, probe_function

HINTS = {
    "does-nothing": "What came back is not what any layer computes. Which line of yours calls the first layer, and where does its result go?",
    "nothing-returned": "Does every path through your function end in a `return`?",
    "numbers": "Take a network of two layers by hand: is every layer's output what the next one reads, with its bias and its relu?",
    "same-buffer": "Which storage does this layer read, and which does it write? Compare their data_ptr().",
    "never-flips": "List the buffer that layers 0 to 3 write. Is the sequence what you expect?",
    "own-input": "This step overwrites its input before it has read all of it. Which operations can safely overwrite their input, element by element?",
    "precision": "Close, but not to 1e-4. In which number format does each of your steps compute?",
    "stale": "This is the right answer to an earlier input. What does your code keep from the call before, and how does it know that it still holds?",
    "skip-lost": "The blocks' branches are right. What became of the other term of the sum?",
    "skip-source": "Who is the last reader of the block's input? Is it done when you write there?",
    "input-changed": "The caller still needs its input. Which of your writes can land in memory that you did not make?",
    "widest": "A layer needs more room than its buffer has (a warning about resizing means that the buffer was replaced). Which activation is the widest?",
    "shape": "A buffer may be wider than a layer's output. Which part of it is the result?",
    "dtype": "Which number format do your buffers have, and which does the input have?",
    "grad": "Autograd still watches. Does anything here need a gradient later?",
    "inference": "This buffer was made in inference mode and is written outside it. Where does your inference mode begin and end?",
    "per-layer": "Each layer takes new memory. When layer 3 runs, which earlier output does nobody read any more?",
    "copied": "You have buffers, but each layer first makes a tensor and then copies it. How many new tensors does one layer create?",
    "hidden": "Products go into your buffers, yet memory moves. Which operation after the product returns a new tensor?",
    "buffer-per-layer": "Buffers are made again while the layers run. How many does a network of 24 layers need, and when could they all be made?",
    "arena-grows": "The memory that you take in advance grows with depth. Which part of it is read again after the next layer?",
    "one-too-many": "The number does not grow with depth, but it is larger than needed. Which of these tensors could be written into one of the others?",
    "out-of-sight": "Some layers did not run as torch operators on the given weights, so nothing could be measured. Which library computed them?",
    "peak": "More is alive at once than the buffers of this exercise. What else is still named by a variable when the next layer runs?",
    "kept": "Memory stays behind after every call. Which name outside your function still holds a result?",
    "recomputed": "The layers ran more than once. What would have to stay in memory so that once is enough?",
    "edge": "What does your loop do in this case, before the first layer and after the last?",
    "made-again": "How many tensors does the second call make, and which line makes them? What could have been ready since the first?",
    "result-copied": "One tensor per call is still made. Who owns the result, and what does the contract say about how long it lives?",
    "reshaped": "A full batch, a smaller one, a full one: which of your buffers survived the smaller one?",
    "holds": "Between calls more stays alive than two activations. Which attributes hold tensors, and how large is each?",
    "out-ignored": "The caller looks into its own `out`. Which of your lines writes there?",
    "late-reader": "`out` was written only after the call had returned. Who may still be reading your buffer when the next call overwrites it?",
    "aliased": "Call it twice and look at the first result again. Whose memory is it in?",
    "reported": "Which bytes would exist without your buffers? And does your sum count one storage twice?",
    "reported-missing": "The contract names one more thing that an executor tells about itself.",
}  # fmt: skip

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


def _summary(case: Case, seen: Observation) -> str | None:
    runs = case.values["runs"]
    if not runs[-1].get("measured"):
        return None
    number = len(runs) - 1
    facts, unit = seen.values[str(number)], unit_bytes(case, runs[-1]["model"], case.tensors[f"x{number}"])[0]
    return f"{(facts['peak_bytes'] - facts['result_bytes']) / unit:.1f} activations at {runs[0]['name']} and at {runs[-1]['name']}"


def _summary_of_calls(case: Case, seen: Observation) -> str | None:
    runs = case.values["runs"]
    if not runs[-1].get("measured"):
        return None
    number = len(runs) - 1
    facts = seen.values[str(number)]
    unit = unit_bytes(case, runs[-1]["model"], case.tensors[f"x{number}/0"])[0]
    return f"holds {facts['calls'][1]['held'] / unit:.1f} activations at {runs[-1]['name']}, later calls make nothing"


FORWARD = register(
    Check(
        name="pingpong.forward",
        criteria=(
            Criterion("output", "numbers", 1, "recomputed"),
            Criterion("tensors created", "technique", 1.5, "none"),
            Criterion("memory at the peak", "cost", 0.5, "memory"),
            Criterion("buffers fit", "cost", 0.5, "none"),
            Criterion("input", "cost", 0.5, "recomputed"),
            Criterion("work", "cost", 0.5, "none"),
            Criterion("edge cases", "cost", 0.5, "recomputed"),
        ),
        cases=forward_cases,
        probe=probe_function,
        judge=partial(judge_function, buffers=2),
        hints=HINTS,
        on_error=typical_error,
        picture=partial(draw_places, buffers=2),
        summary=_summary,
    )
)

RESIDUAL = register(
    Check(
        name="pingpong.residual",
        criteria=(
            Criterion("output", "numbers", 1, "recomputed"),
            Criterion("tensors created", "technique", 1, "none"),
            Criterion("memory at the peak", "cost", 0.5, "memory"),
            Criterion("buffers fit", "cost", 0.5, "none"),
            Criterion("input", "cost", 0.5, "recomputed"),
            Criterion("work", "cost", 0.25, "none"),
            Criterion("edge cases", "cost", 0.25, "recomputed"),
        ),
        cases=residual_cases,
        probe=probe_function,
        judge=partial(judge_function, buffers=3),
        hints=HINTS,
        on_error=typical_error,
        picture=partial(draw_places, buffers=3),
        summary=_summary,
    )
)

PERSISTENT = register(
    Check(
        name="pingpong.persistent",
        criteria=(
            Criterion("output", "numbers", 1, "recomputed"),
            Criterion("second call", "technique", 1.5, "none"),
            Criterion("smaller batch", "cost", 0.5, "none"),
            Criterion("memory held", "cost", 0.5, "memory"),
            Criterion("result in out", "cost", 0.5, "recomputed"),
            Criterion("input", "cost", 0.5, "recomputed"),
            Criterion("buffer_bytes", "cost", 0.5, "none"),
        ),
        cases=persistent_cases,
        probe=probe_executor,
        judge=judge_executor,
        hints=HINTS,
        on_error=typical_error,
        picture=draw_calls,
        summary=_summary_of_calls,
    )
)

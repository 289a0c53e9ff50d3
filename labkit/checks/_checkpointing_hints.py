"""What lab 02's checks ask a learner: one question per kind of fault, none of which names the answer."""

from typing import Any

HINTS = {
    "output": "Run three layers by hand. Does your function pass them x in order, each exactly once, and return the last output?",
    "no-graph": "How does autograd learn that the output depends on the parameters, when grad mode was off while the layers ran?",
    "gradients": "Compare the first layer whose gradient differs with its neighbour: which input did its second run start from?",
    "input-grad": "The input may be the output of an earlier layer. Which gradient does your backward hand on to it?",
    "parameter-grads": "Which call computes gradients of the parameters, and does it run in your version?",
    "scaled": "How many times does each parameter's gradient arrive in `.grad` during one backward?",
    "plain": "Memory grows with depth as in the plain run. Which tensors are kept until backward that could be computed again?",
    "not-recomputed": "Little is kept, and yet not every layer runs in backward. Where do the values come from that backward needs?",
    "plain-segments": "Some segments never run again, so their inside stays from forward on. How many may run without a checkpoint?",
    "other-layers": "A segment's function runs again long after your loop has ended. Which layers does it go through by then?",
    "other-call": "Two checkpoints wait for backward at once. Which call's fn and arguments does each one run again?",
    "grad-in-forward": "During forward, more is alive than at its end. Is autograd recording something that nobody will use?",
    "precision": "What precision did the first run compute in? And the second?",
    "frozen": "Which tensors among the arguments asked for a gradient, and which did not, or cannot have one?",
    "outputs": "fn returned several values. Which of them received a gradient, and which of them can have one?",
    "kept": "Between forward and backward, far more than one activation per segment is alive. What do your functions and `ctx` still hold?",
    "boundaries": "Only the borders of segments are kept, and they still grow with depth. How many borders did the call ask for?",
    "one-segment": "Forward keeps little, and the peak comes in backward. How many layers does your backward hold at once?",
    "not-released": "When backward has finished with one segment, who still holds its recomputed tensors?",
    "half": "A segment is itself a chain of layers. While it runs again, how many of its activations have to be alive at once?",
    "which-half": "Layer 0 never runs again, so its half is kept from forward on. Which half waits longer for backward?",
    "cut": "How often does layer 0 run in one step? Where would you cut the chain so that this number grows more slowly with its length?",
    "calls": "Count the runs of layer 0 in one step. Which of them could reuse what another one computed?",
    "calls-outputs": "fn returned several tensors. How often does it run in your backward, and how often would do for all of them?",
    "remainder": "Write down your segment lengths for 9 layers in 5 segments, and for 10 in 4. Which length decides the peak?",
    "count": "Write down your segment lengths for 64 layers in 8 segments. Is `segments` the number of segments, or the length of one?",
    "skipped": "For 10 layers in 4 segments, which layers does your last segment hold?",
    "random-replay": "Does the second run of a dropout layer draw the same mask as the first? What decides the numbers it draws?",
    "random-when": "At which instant must the snapshot of the random state be taken, so that replaying it gives the same numbers?",
    "random-first": "Already the first run draws other numbers than plain fn would. What touches the random stream before fn does?",
    "random-after": "After the step, the next `torch.rand` is not the plain run's. What did your second forward do to the random stream?",
    "mode": "Was every layer in the same mode (train or eval) in both of its runs?",
    "input-without-grad": "Training data needs no gradient. What tells autograd, then, that the first segment is worth a backward?",
    "trace": "After the step something is not as it was before. What did you switch on or off, whose is it, and where do you put it back?",
    "detach": "Where should the recomputed graph begin, and where does yours begin?",
    "grad-mode": "Is grad mode on or off inside a Function's backward?",
    "returns": "Count what forward takes after ctx, then what backward returns. Which entry belongs to which?",
}


def on_error(error: dict[str, Any]) -> str | None:
    """A hint for the crashes that have one typical cause."""
    message = error["message"]
    if "backward through the graph a second time" in message:
        return "detach"
    if "does not require grad and does not have a grad_fn" in message:
        return "grad-mode" if "element 0 of" in message else "outputs"
    if "incorrect number of gradients" in message or "invalid gradient at index" in message:
        return "returns"
    if "can require gradients" in message:
        return "frozen"
    return None


def ran_others(again: list[int], depth: int) -> bool:
    """Whether backward ran some layers more than once and others never: a function that goes through other layers than it did at first."""
    return len(again) > len(set(again)) and len(set(again)) < depth


def random_hint(calls: list[list[Any]], output_differs: bool = False) -> str:
    """Why masks differed, from where the random stream stood at each call: another mode, another instant, or no replay at all.

    output_differs : already the first run drew other numbers than plain fn does
    """
    first = {call[1]: call for call in calls if call[0] == "forward"}
    again = [call for call in calls if call[0] == "backward" and call[1] in first]
    if any(call[2] != first[call[1]][2] for call in again) or not all(call[2] for call in first.values()):
        return "mode"
    if output_differs:
        return "random-first"
    ends = {call[4] for call in first.values()}
    started = [call[3] for call in again if call[3] != first[call[1]][3]]
    return "random-when" if started and started[0] in ends else "random-replay"

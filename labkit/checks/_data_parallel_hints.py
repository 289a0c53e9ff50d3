"""What the data-parallel checks ask a learner whose answer fails: each a question that points at the fault and leaves the answer open."""

from typing import Any

HINTS = {
    # 7.1
    "count": "Do all ranks get equally many samples? What does a rank do that has one batch more than the others?",
    "range": "Which numbers may a sample have, if there are n of them and the first one is 0?",
    "same-shard": "Which samples did rank 1 see that rank 0 did not?",
    "lost": "Some samples are visited by nobody. What happens at the end of the order when the ranks do not divide it evenly?",
    "doubled": "Some samples come more often than the tail needs. Do all ranks take their shares from one and the same order?",
    "global-seed": "Ranks whose global generators were seeded differently disagree. From which generator does your order come?",
    "seeds-left": "Afterwards the global generator gives other numbers than before. Which call of yours touched it?",
    "sorted": "Is a rank's order random, or a pattern?",
    "same-epoch": "What differs between epoch 0 and epoch 1 in the samples that a rank gets, and in their order?",
    "type": "What does your function return: whole numbers, in a list or in a 1-D tensor?",
    # 7.2 and start
    "start": "With different seeds per rank, are the models equal before step 1?",
    "buffers": "What else is in state_dict besides parameters?",
    "frozen-start": "Does a parameter need equal values on all ranks only if it is trained?",
    "root": "Whose values do all ranks hold now? Did rank 0's stay as they were?",
    "replaced": (
        "An optimizer made before holds the old tensors. Does your function write into a parameter, or put another one in its place?"
    ),
    "flag": "Does every parameter still require a gradient where it did before?",
    "too-many-start": "Count your broadcasts and the tensors of the module. Is any sent twice?",
    # gradients
    "local": "Each rank still holds its own gradient. Which tensor did you reduce, who reads the result, and did anybody wait for it?",
    "sum": "It is the gradient of the mean times the number of ranks. What did all_reduce leave in the tensor, and what was asked for?",
    "divisor": "It is the mean times the same factor everywhere. By what do you divide, and does that follow the number of ranks?",
    "small": "It is too small by a factor. How often is each gradient divided, and is it reduced once?",
    "twice": "Some gradient was divided or reduced more than once. How often does a shared parameter report ready?",
    "late-write": "Who owns a buffer between the launch of its message and the wait?",
    "garbage": (
        "What is in .grad is no mixture of the ranks' gradients of this parameter. Which part of which buffer goes back to which "
        "parameter?"
    ),
    "precision": "It is the mean, but not to a few roundings. In which dtype are gradients summed and sent?",
    "users": "A rank that did not use a parameter counts as zeros. By how many is the sum divided?",
    "missing": "Some rank's gradient is not in the mean, or with another weight. Was .grad complete at the moment when you read it?",
    "none": "A gradient is None that is not None on another rank. What does a rank send, and keep, that has none of its own?",
    "no-gradients": "No parameter of the module has a gradient. Are the parameters that you hooked still those of the model?",
    "shape": "Compare shape and dtype of a gradient with its parameter's. Do they agree?",
    "parameters": "Which tensor changed during backward and finish: the gradient, or the parameter that the hook hands you?",
    "frozen": "A frozen parameter has nothing to agree on. Which parameters do you go through?",
    "later-steps": "The first step is right, a later one is not. What must be as at the beginning before the next backward?",
    "stale": "With gradients that are kept and zeroed between steps, it goes wrong. Does every gradient live in one place only?",
    "bits": "Do all ranks hold the same bits? Who computes the mean, and on how many ranks from different numbers?",
    "output": "Does your wrapper return what the module returns, for whatever it is called with?",
    "piles-up": "More is alive after each step than after the one before. Which of your lists only ever grows?",
    # messages
    "silent": "Nobody sends anything. How is rank 0 to learn of rank 1's gradients?",
    "kind": "Which collective was asked for here, and what do the others send more of?",
    "too-many": "How many messages does a step need, if each carries what fits in it? Is any gradient sent twice?",
    "too-few": "Fewer messages than buckets of that size can be. Where does a bucket end?",
    "bytes-more": "More bytes are sent than there are gradients. What is in your messages besides each gradient once?",
    "bytes-less": "Fewer bytes are sent than there are gradients. Which one never travels, or in which dtype?",
    "late": "At what time did the first all-reduce start, relative to the last gradient?",
    "held": "The first bucket leaves early. And the others: when were they full, and when did they start?",
    "blocks": "Does backward go on while a bucket travels, or does somebody wait for it inside a hook?",
    "deadlock": (
        "Each rank stands where the lines below say, or got a tensor of another size than its own. Do all ranks call their collectives in "
        "the same order, whatever parts of the model each of them used? Who completes a bucket that never fills up?"
    ),
    # no_sync
    "talks": "Something is sent inside no_sync. Which line decides to send, and what does it know of the context?",
    "stays-quiet": "After the context the hooks stay quiet. What does the flag say now, also if an error left the context?",
    "swallowed": "An error was raised inside no_sync. Who hears of it, once the context is left?",
    "earlier": "A gradient that came inside no_sync is lost. What is in .grad of a parameter that the last backward did not use?",
    "accumulated": "The pieces' gradients are not all in the mean. When is .grad read, and what was in it before this backward?",
    # priority
    "order": "Write down which parameter each message carries, from the first to the last. Which one does the next forward need first?",
    "ahead": "Count the messages that start before backward is over. How many may, and how many should?",
    "ahead-order": "In backward, which gradients are there first?",
}


def on_error(error: dict[str, Any]) -> str | None:
    """A hint for the crashes that have one typical cause."""
    message = error["message"]
    if "op.preamble.length <= op.nbytes" in message or "Connection closed" in message or "Connection reset" in message:
        return "deadlock"  # ranks reduced tensors of different sizes
    if "no attribute 'flatten'" in message or "'NoneType'" in message:
        return "none"
    return None

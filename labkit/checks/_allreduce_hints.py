"""What the all-reduce checks ask a learner whose answer fails: each a question that points at the fault and leaves the answer open."""

from typing import Any

HINTS = {
    "nothing": "A rank still holds its own numbers. Which line of yours receives, and where does what it receives go?",
    "counted-twice": (
        "Some rank's part is in the sum more than once. Print what arrives at rank 0 in each of the steps. Is that what you add, "
        "and is it added to what it belongs to?"
    ),
    "missing": (
        "Some rank's part is not in it. Tag each chunk with its number: which one leaves rank r in step s, and which one arrives "
        "there?"
    ),
    "scaled": "It is the sum times a constant. Were you asked for a sum or for a mean?",
    "garbage": (
        "What is there is no mixture of the ranks' numbers for this chunk. Which chunk's numbers do you add, and was the memory that "
        "they lie in ever filled?"
    ),
    "misplaced": "Another chunk lies there. Tag each chunk with its number: which one arrives in step s, and where does it belong?",
    "precision": "The sum is close, but not to a few roundings of its dtype. In which dtype do your additions run?",
    "integers": "An integer came out slightly different. Does every large integer survive all the dtypes that your sum goes through?",
    "remainder": "The last few numbers are wrong. Do the lengths of your chunks add up to n?",
    "adds": "In this phase, is the chunk that arrives a partial sum or an answer?",
    "mine": "The right chunks travel for some values of `mine` only. Which chunk does this rank hold at the start, by what it is told?",
    "rebound": (
        "Your list holds the right tensor, but the memory that the chunk came from does not. After `chunks[i] = ...`, who else "
        "looks at the old memory?"
    ),
    "index": "Which chunk is finished on this rank, and does your function say so?",
    "same-index": "Two ranks claim the same chunk. Follow one chunk from rank to rank: where does it end, and who holds the next one?",
    "successor": "Draw an arrow for every message. To how many different ranks does each rank send, and is it one ring?",
    "silent": "Nobody sends anything. How is rank 0 to learn what rank 1 holds?",
    "alone": "With one rank there is nobody to talk to. Which of your loops runs all the same?",
    "whole": "Does every hop need to carry the whole tensor?",
    "wide": "How many bytes has one of x's numbers, and how many does it have on its way?",
    "too-many": "How often does a chunk have to change ranks before the one where it stops has seen them all?",
    "too-few": "Fewer messages than a ring needs. Which chunk never moves on?",
    "size": "A message and the memory that it is meant for differ in size. Which chunk is in it, and which one does its receiver expect?",
    "root": "Write down every message of one rank that is not rank 0. How many are there, to whom, and how large?",
    "collective": "A ready-made collective carried this. Which plain messages is it made of?",
    "bits": "Do all ranks hold the same bits? For each number: who adds up its parts, and how many ranks do that on their own?",
    "copy-back": "Is the tensor that you reduced the tensor that you were given?",
    "shape": "Compare shape, dtype and memory of what you return with x's. Does it still fit the parameter that it is the gradient of?",
    "pieces": "Take 5 numbers on 4 ranks. How many chunks does your split make, and how many does each step of the ring count on?",
    "no-such-rank": "For 3 ranks, write down whom each of yours sends to and receives from. Who follows the last one?",
    "contiguous": "Which of your tensors is not one stretch of memory, and what can be sent?",
    "flight-sent": "You write into memory that is still being sent. From when on may you?",
    "flight-early": "You use a buffer before its message has arrived. Which object knows when it has?",
    "flight-unfinished": "A message is still on its way when your function returns. Which object knows when it is done?",
    "depth": "Count the messages that have to follow each other, from the first to the last. Who waits while rank 0 is busy?",
    "power": "Draw your tree for 3 and for 6 ranks. Who is the partner of the last rank in each round?",
    "deadlock": (
        "Each rank stands where the lines below say. When does a send return, and which rank would have to do what before any of "
        "them can go on?"
    ),
}


def on_error(error: dict[str, Any]) -> str | None:
    """A hint for the crashes that have one typical cause."""
    message = error["message"]
    if error["type"] == "IndexError":
        return "pieces"
    if "there is no rank" in message:
        return "no-such-rank"
    if "contiguous" in message or "not compatible with input tensor's size and stride" in message:
        return "contiguous"
    if "must match the size of tensor" in message or "op.preamble.length <= op.nbytes" in message:  # gloo: longer than its receiver expects
        return "size"
    return None

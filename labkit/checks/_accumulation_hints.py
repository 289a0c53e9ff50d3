"""What lab 05's checks ask a learner: one question per kind of fault, none of which names the answer."""

from typing import Any

HINTS = {
    # the weight of each micro-batch in a step
    "sum": "Double the number of micro-batches and keep the data. Should the gradient change, and does yours?",
    "only-logged": "The number that you return is right and the gradient is not. Does your division reach the graph?",
    "twice": "Who else divides on the way from the loss to the optimizer?",
    "short": "How many micro-batches are really in the last window, and by how many do you divide?",
    "scale": "Every micro-batch weighs the same, but not what it should. Which number multiplies it on its way to the optimizer?",
    "unequal": "Some micro-batches weigh more than others in this step. Which number does each one's gradient meet on its way?",
    "only-last": "Which micro-batches contributed to this step, and what became of the gradients of the others?",
    "missing": "Some micro-batches of this window never reached the optimizer. Which ones, and what became of their gradients?",
    "boundary": "Take 7 micro-batches in windows of 4. After which of them should the optimizer step, and after which does yours?",
    "every": "Is the sum of small steps one big step, when the optimizer has momentum?",
    "empty-step": "List the order of the calls from backward to step. What is in `.grad` when the optimizer looks?",
    "stale": "What is in `.grad` at the moment this window begins?",
    "flush": "Run an epoch with 3 micro-batches in windows of 4. What moved?",
    "no-step": "The gradients are there. Which call turns them into an update?",
    "many-steps": "How many updates does one window deserve, and how many did the optimizer make?",
    "net": "The weights of the micro-batches are right, but the parameters end elsewhere. What else changes them?",
    "rate": "At some step the learning rate was not the one it should have been. Who changed it, and is that part of this exercise?",
    # memory
    "graphs": "How many micro-batches' graphs are alive at once, and which line lets a graph go?",
    "kept": "Each micro-batch leaves something behind that the next ones have to share the memory with. Which name of yours holds it?",
    "joined": "Memory is that of the whole batch. Where do the small pieces become one large one?",
    "again": "Each micro-batch needs one forward and one backward. Which line runs one of them more often, or never?",
    # what is returned
    "loss-returned": "What does the docstring say comes back, and what does every path through your function return?",
    "losses-count": "How many windows does the epoch have, and how many numbers come back?",
    "loss-graph": "A loss that keeps its graph keeps everything that the graph leads to. What do you return?",
    "loss-value": "The gradient is right and the returned loss is not. Is it the mean over the micro-batches of this window?",
    "loss-scaled": "Why is the loss that you return so many times too large?",
    # schedule
    "schedule-often": "How many updates did the schedule think there were, and how many were there?",
    "schedule-never": "Who tells the schedule that an update has happened?",
    "schedule-early": "At which moment may the learning rate change: before or after the update it belongs to?",
    "schedule-skipped": "How many updates has the schedule seen, and how many of them did the scaler let through?",
    # tokens
    "means": "A piece with two targets and one with six: does each single target weigh the same in your step?",
    "ignored": "Which of the numbers in `targets` did the loss really average over?",
    "no-targets": "What is the mean over no targets at all, and what does a product with zero make of it?",
    # mixed precision
    "not-unscaled": "In which units are the gradients when the optimizer sees them, and in which is your limit?",
    "clip-units": "In which units is max_norm expressed, and in which are the gradients when you compare?",
    "not-clipped": "The norm is above the limit when the optimizer steps. At which point of the window could it be brought down?",
    "grown": "A limit is a limit. What does your clipping do to a gradient that is far below it?",
    "clip-pieces": "The limit is meant for the gradient of the whole window. What had been added up when you compared?",
    "unscale-once": "How many times has this gradient been divided by the scale since the window began?",
    "scale-window": "Do all gradients that are added up in one window share one scale?",
    "scale-trace": "What does the scaler learn from a window, and when do you let it?",
    "inf-dropped": "One micro-batch overflowed. Is a step without it the step that the window was meant to make?",
    "inf-left": "A window was skipped. What is in `.grad` when the next one begins?",
    "inf-stepped": "Who decides whether the optimizer steps when a gradient is infinite, and did you ask?",
    "skipped-good": "This window was finite. Why was there no update?",
    "not-scaled": "Which number must multiply the loss before backward, so that small gradients survive in 16 bits?",
    "autocast": "In which precision did the model run its forward, and where did you say so?",
    # the largest micro-batch
    "largest": "Try the number that you return, and the next one. Which of the two fits?",
    "largest-zero": "What does your search return when not even one row fits, and when everything does?",
    "power": "Between the last size that fits and the first that does not, is there nothing left to try?",
    "range": "Look at the smallest and the largest size that yours asks for. Which sizes may be tried at all?",
    "trials": "Each trial tells you that half of the sizes are out of the question. How many does yours rule out?",
    "held": "A trial that failed is still holding its tensors when the next one begins. Who refers to the frames of a call that raised?",
    "held-result": "A trial that fitted gave something back, which is alive when the next one begins. Which name of yours holds it?",
    "swallowed": "Not every error means that the memory is too small. Which ones does your code take for that?",
    "not-caught": "A trial that does not fit raises an error. Whose job is it to catch it?",
    "pieces": "How many pieces of at most this size does it take, when the last one may be smaller?",
    "pieces-type": "Can a loop run a fractional number of times?",
}


def on_error(error: dict[str, Any]) -> str | None:
    """A hint for the crashes that have one typical cause."""
    message = error["message"]
    if "unscale_() has already been called" in message or "unscale_() is being called after step" in message:
        return "unscale-once"
    if "backward through the graph a second time" in message:
        return "again"
    if "No inf checks were recorded" in message:
        return "empty-step"
    return "not-caught" if error["type"] == "OutOfMemoryError" else None

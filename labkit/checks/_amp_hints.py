"""What lab 04's checks ask a learner: one question per kind of fault, none of which names the answer."""

from typing import Any

HINTS = {
    # 4.1
    "no-step": "The model's weights did not change. After step(), who holds the new values, and who still holds the old ones?",
    "steps": "Follow one weight through two steps by hand. Which gradient reaches the optimizer, and what comes back into the model?",
    "old-gradients": "The second step moved too far. What was in the fp32 gradient before you put the new one there?",
    "idle": "One parameter had a gradient in the step before, and now none or zeros. What does the optimizer see for it?",
    "stalls": "How far apart are neighbouring 16-bit numbers near these weights, and how large is one update?",
    "drifts": "One update is smaller than the step between two 16-bit numbers. Which of its bits does your next step still know?",
    "quotient": "The true gradient is 1e-8. In which number format do you divide, and what is the smallest number that it has?",
    "too-large": "step() was told a scale. What does it mean for the size of the gradients that it finds?",
    "stale": "Somebody wrote new weights into the model. After your next step, who is the truth, and who still holds old values?",
    "adam": "What is Adam's eps after conversion to your number format, and what is the square of a gradient of 1e-4 there?",
    "left-alone": "Compare the model before and after: which of its tensors were never yours to change or to replace?",
    # 4.2
    "not-divided": "Your gradients are as large as the scaled loss made them. Who divides them, and is it done when the optimizer steps?",
    "twice": "How many times has this gradient been divided since backward?",
    "which-scale": "This step follows or begins a change of the scale. Which scale multiplied its loss?",
    "alike": "Some gradients are divided and others are not. Which parameters does an optimizer hold, and in how many groups?",
    "gradients": "Write down loss, scaled loss, gradient, unscaled gradient for one weight. Which line does your code do differently?",
    "no-backoff": "You skipped. What will be different next time?",
    "growth": "Count the good steps between two growths of your scale, beginning at 1. Is the number the interval?",
    "tracker": "An overflow came in the middle of a growth interval. How many good steps has your count seen in a row since then?",
    "reported": "get_scale() and scale(1.0) name different numbers. Which of them has the last update?",
    "trace": "Play the overflows by hand, with the settings of this case. Where does your first scale differ from the one you expect?",
    "not-skipped": "The gradients held an inf or a nan, and the optimizer stepped all the same. Which values does your test recognise?",
    "cleaned": "You mended the gradients and let the optimizer step. What does a step with a gradient of 0 do to Adam's moments?",
    "skips-good": "A step was skipped although every gradient was finite. What does your code still remember of an earlier step?",
    "sums": "Every gradient was finite, one as large as 1e30. Which number does your test look at, and can that one overflow?",
    "skip-changed": "The step was skipped, and yet something moved. Which of your lines writes to parameters or to the optimizer's state?",
    "returned": "What does step() tell its caller about whether the optimizer stepped?",
    "late-test": "The caller clipped between unscale_ and step. What does clipping make of an infinite number, and when do you look?",
    "no-cap": "Double 2000 times. Then?",
    "no-floor": "Halve 2000 times. Then?",
    "short-of-limit": "The next change would go past the limit, and your scale does not move at all. Where should it end?",
    "half-loss": "The loss came in 16 bits. What is the largest number that its format holds, and in which format do you multiply?",
    "no-graph": "Backward starts at the tensor that scale() returns. Does autograd know where it came from?",
    "forgets": "What did the run learn about its scale before you stopped it, the count of good steps included?",
    "alive-state": "You saved a state, trained on, and the saved state had changed. Whose memory is it in?",
    # 4.3
    "loss-scaled": "Why is your loss larger by the scale?",
    "loss": "The loss that you return is not the one that loss_fn gave. What happened to it in between?",
    "no-gradients": "The optimizer stepped without gradients. Was a weight first cast to 16 bits while gradients were off?",
    "update": "The gradient that the optimizer saw is not the loss's. Which factor lies between the two, and where does it come from?",
    "summed": "What is in .grad right now, before this step's backward?",
    "fp32-forward": "Look at the dtype of the model's first product. What has to be on while the model runs, and was it?",
    "loss-outside": "loss_fn ran outside of autocast. What does autocast need to see?",
    "all-inside": "Autocast was still on in backward or in the optimizer's step. Where should its region end?",
    "norm": "The norm of the gradient that the optimizer saw is not what max_norm allows. In which units is max_norm expressed?",
    "clips-small": "This gradient was shorter than max_norm, and it changed. What is the factor for a gradient that is short enough?",
    "per-tensor": "Each tensor is short enough, and the whole gradient is not in its old direction. Whose norm does max_norm bound?",
    "moved": "The gradients overflowed, and still the weights or the optimizer's state moved. Who decides whether the optimizer steps?",
    "inf-left": "After the skipped step, the next one met an inf or nan. What was left in .grad?",
    "no-update": "Which call tells the scaler that a step is over, and does it come once per step, skipped ones too?",
    "device": "The caller said which device and which format. Where does your code say so to autocast?",
    "scaled-anyway": "There is no scaler here. Which factor is on your loss, or which call fails without one?",
    "schedule": "How many real updates has the schedule seen?",
    # 4.4
    "apart": "One rank skipped. Did the others?",
    "not-all": "A rank's overflow must count whichever rank it is. Who sends, and who listens?",
    "heavy": "The ranks need to agree on one yes or no. How many bytes does that take?",
    "no-group": "Here nobody has called init_process_group. How does your code find out that it is alone?",
}  # fmt: skip


def on_error(error: dict[str, Any]) -> str | None:
    """Typical crashes of a training step."""
    text = f"{error['type']}: {error['message']}"
    if "already been called" in text and "unscale_" in text:
        return "twice"
    if "does not require grad" in text:
        return "no-gradients"
    if "process group has not been initialized" in text:
        return "no-group"
    if "'NoneType' object has no attribute" in text and any(name in text for name in ("'scale'", "'unscale_'", "'step'", "'update'")):
        return "scaled-anyway"
    return None


def on_scaler_error(error: dict[str, Any]) -> str | None:
    """Typical crashes of a scaler."""
    hint = on_error(error)
    return "no-graph" if hint == "no-gradients" else hint

"""What lab 11 asks a learner whose check failed: one question, never the answer."""

from typing import Any

SIZES = "Two sizes do not meet. For a layer from 12 to 20 and rank 3: which shape has each factor, and what does it multiply?"

LINEAR_HINTS = {
    "sizes": SIZES,
    "returns": "What does the wrapped Linear return for the same input: which shape and dtype?",
    "module": "Which type has the thing that you are replacing, and what will the rest of the model do with yours?",
    "start": "Before training, wrapping is not to change the output. What must B times A be for that, and what is yours?",
    "base-weights": "Are the weights that you compute with the ones that you were given?",
    "trainable": "For a matrix of 20 by 12 and rank 3: how many numbers have the two factors, and which of yours train?",
    "nothing-trains": "An optimizer reaches what `parameters()` lists. Is anything in it trainable, and are your factors in it?",
    "base-trains": "Which names require grad? Go through them one by one: which of them belong to the base?",
    "base-moves": "The base is to be the same bit for bit after training. Which line writes to it?",
    "no-update": "No gradient ties the output to the factors. Does forward use the very tensors that the optimizer changes?",
    "unscaled": "The update is there, unscaled. Which two numbers of the constructor has it not used?",
    "no-rank": "Your update is as many times too large as its rank. What is alpha to be measured against?",
    "no-alpha": "Rank 3 with alpha 7 and rank 3 with alpha 14: are your two updates the same?",
    "root": "Your scale falls with the root of the rank. Is that the scale that the contract asks for?",
    "twice": "Your update is there twice. On which two ways does it reach the output?",
    "scale": "By which factor is your update off, and which of rank, alpha and the sizes makes that factor?",
    "update": "Feed unit vectors: column j of the update is what input j adds. Is yours B times A, in that order and orientation?",
    "input-grad": "The layers below need gradients too. On how many ways does your output depend on the input, and is each one recorded?",
    "both-zero": "If both factors are zero, what is the gradient of each?",
    "gradient": "Follow the gradient from the output to each factor. Is something on the way detached, copied or scaled a second time?",
    "same-numbers": "Every layer is to begin with random numbers of its own. What sets yours, and would another layer get others?",
    "dtype": "The factors work beside the base's weight. Of which dtype is it, and of which are they?",
    "base-hidden": "Move the wrapped layer to a card, or save its state: is the base among what its module knows of?",
    "alike": "If all rows of the random factor are alike, in which directions can the other one ever make the update point?",
    "copy": "Your layer keeps more bytes than its factors. Which tensor of the base exists twice now?",
    "dropout-base": "Dropout is for the update alone. Which way through your layer does it lie on?",
    "dropout-mode": "In eval mode two calls differ. How does a module know which mode it is in?",
    "dropout-none": "In train mode all calls are alike. Where does your forward use the dropout probability?",
    "dropout-scale": "Averaged over many calls, train mode gives another update than eval mode. What happens to the numbers that are kept?",
    "dropout-place": "Whole outputs of the update are zero. On what is dropout to act: what goes into the update, or what comes out?",
    "dropout-share": "Another share of the inputs is dropped than asked for. Is the number the share to drop, or the share to keep?",
}

INJECT_HINTS = {
    "sizes": SIZES,
    "returns": "After `inject(model, ...)` the model itself is to run as before. What have you put in the place of the layer?",
    "start": "Which part of the model computes something else now than before you touched it?",
    "none": "No layer has an adapter that the model knows. What does `model.get_submodule(path)` return after you are done?",
    "missing": "One of the layers named has no adapter. Print the path of each layer that you visit: do you reach all depths, the top too?",
    "extra": "An adapter sits on a layer that nobody named. Compare the whole last name of a path with a target: are they equal?",
    "count": "An adapter has another size than r (in + out). Which size of which layer did you use?",
    "frozen": "Go through `model.named_parameters()`: which names require grad, and which of them are adapters?",
    "all-frozen": "What is trainable now? In which order did you freeze and put the adapters in?",
    "moved": "After training, something beside the adapters has other values. Who was allowed to change it?",
    "training": "Each factor's gradient comes by way of the whole model. Is the adapter that trains the one that the model runs?",
    "optimizer": "What you return goes to the optimizer. Which tensors are in it, and which ought to be?",
    "state": "Adam keeps two numbers for each number it trains. Sum up its state: for which parameters is it?",
    "again": "Call it twice. What does the second call find, and what does it freeze?",
    "no-match": "No layer has the name that was asked for, and nobody was told. What would you want to know, had you mistyped it?",
    "other-error": "Whoever calls you can catch the error that the contract names. Is yours that one?",
    "dropout": "`inject` is given a dropout. Which of its layers ever hears of it?",
    "state-dict": "Another injected model reads your `state_dict()` and computes something else. Which tensor does it not hold?",
}

MERGE_HINTS = {
    "sizes": SIZES,
    "returns": "After merging, the model is still to take its input to its output. What stands where the layer was?",
    "output": "Merged or not, the output is to be the same. What is added to the weight, and what does forward add after that?",
    "transposed": "On a square matrix a transpose does not crash. Is the matrix that you add (out, in), as the weight is?",
    "scaled": "Compare what merging adds to the weight with what forward adds to the output. What is one of them times the other?",
    "no-effect": "Did any weight change, and does forward still multiply by the factors?",
    "still-adds": "The weights hold the update now. What does forward still compute?",
    "merged-twice": "What happens in the second call, when the update is in the weight already?",
    "restore": "Taking away what was added brings the weight back, but for rounding. Is what you take away what you added, and of whom?",
    "unmerged-twice": "What does your second `unmerge` take away from a weight that is plain already?",
    "frees": "After `unmerge`, training goes on. Are the same factors there, and do they still require grad?",
    "rounding": "The weight has 16 bit. How often is something rounded on the way to the sum, and when is once enough?",
}

ADAPTER_HINTS = {
    "sizes": SIZES,
    "returns": "After loading, the model itself is to run. What does your function leave behind?",
    "files": "Which two files does the contract name, and which are in the folder?",
    "loaded": "What besides A and B defines the update, and does the loaded model use the file's?",
    "rounded": "The loaded model is near the tuned one, and not the same. In which precision are the numbers in your file?",
    "same-as-base": "The loaded model computes what the base does. How many of the file's tensors were really used?",
    "whole": "How many numbers ought to be in the file? Which of those in yours were in the base before?",
    "names": "Write down the full key of one factor, part by part. Which part of yours is another?",
    "shapes": "The file's A is (rank, in) and its B (out, rank), whatever you hold in memory. Which shapes are in yours?",
    "product": "From the file and its configuration alone, compute the update. Is it the one that your model makes?",
    "config": "Somebody has only the folder. Which numbers of yours do they need to build the same adapter?",
    "other-file": "Somebody else made this file: other layers, another rank, another alpha. Which of these did you take from elsewhere?",
    "misfit": "The file and the model do not fit, and nobody was told. How would you notice a tensor that was never used, or never given?",
    "merged": "In which state was the model when you wrote the file, and what is A then?",
    "existing": "A second save goes to the folder of the first. What does your function do with a folder that is there?",
    "changed": "Saving is reading. What did it change in the model?",
}


def on_error(error: dict[str, Any]) -> str | None:
    """A hint for the crashes that have one typical cause."""
    message = error["message"]
    if "mat1 and mat2 shapes cannot be multiplied" in message or "must match the size" in message:
        return "sizes"
    return None

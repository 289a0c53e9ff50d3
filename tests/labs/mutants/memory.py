"""Wrong accounts of memory, as people really keep them (MEM-..: public reports) and as an unkind reviewer would."""

import math
import resource
import sys

import numpy as np
import torch

from tests.labs.corpus import wrong

PARAMETERS, STATES, LIVE, BATCH = "memory.parameters", "memory.states", "memory.live", "memory.batch"
ACTIVATIONS, ESTIMATE, CARD = "memory.activations", "memory.estimate", "memory.card"


# -- parameters --


def count(config, *, block=None, tied_twice=False, head=True, positions=True, last=True, bias=False, as_type=int):
    h = config.width
    block = 12 * h * h + 13 * h if block is None else block(config)
    total = config.vocab * h + (config.context * h if positions else 0) + config.layers * block + (2 * h if last else 0)
    if tied_twice or (head and not config.tied):
        total += config.vocab * h
    return as_type(total + (config.vocab if bias else 0))


def counter(**changes):
    def gpt_parameter_count(config):
        return count(config, **changes)

    return gpt_parameter_count


for name, changes, criterion, hint in [
    ("MEM-05 tied head counted twice", {"tied_twice": True}, "tied head", "tied"),
    ("MEM-05 untied head missed", {"head": False}, "untied head", "untied"),
    ("biases and norms forgotten", {"block": lambda c: 12 * c.width**2}, "tied head", "biases"),
    ("biases forgotten", {"block": lambda c: 12 * c.width**2 + 4 * c.width}, "tied head", "biases"),
    ("norms of blocks forgotten", {"block": lambda c: 12 * c.width**2 + 9 * c.width}, "tied head", "norms-or-biases"),
    ("one norm per block", {"block": lambda c: 12 * c.width**2 + 11 * c.width}, "tied head", "block"),
    ("norms without biases", {"block": lambda c: 12 * c.width**2 + 11 * c.width, "last": False}, "tied head", "block"),
    ("last norm forgotten", {"last": False}, "tied head", "last-norm"),
    ("positions forgotten", {"positions": False}, "tied head", "positions"),
    ("head with a bias", {"bias": True}, "tied head", "head-bias"),
    ("attention's output matrix forgotten", {"block": lambda c: 11 * c.width**2 + 12 * c.width}, "tied head", "block"),
    ("narrow MLP", {"block": lambda c: 6 * c.width**2 + 10 * c.width}, "tied head", "block"),
    ("every head with the whole width", {"block": lambda c: (8 + 4 * c.heads) * c.width**2 + 13 * c.width}, "tied head", "block"),
    ("positions twice", {"block": lambda c: 12 * c.width**2 + 13 * c.width, "as_type": lambda n: n + 7}, "tied head", "outside"),
    ("MEM-23 32-bit float", {"as_type": lambda n: float(np.float32(n))}, "known models", "digits"),
    ("MEM-23 32-bit integer", {"as_type": lambda n: int(np.int64(n).astype(np.int32))}, "known models", "block"),
    ("do nothing", {"as_type": lambda n: 0}, "tied head", "block"),
    ("GPT-2's number", {"as_type": lambda n: 1_557_611_200}, "tied head", "block"),
]:
    wrong(name, check=PARAMETERS, criterion=criterion, hint=hint)(counter(**changes))


@wrong("no number", check=PARAMETERS, criterion="tied head", hint=None)
def in_words(config):
    return "1.5B"


@wrong("counts a real model", check=PARAMETERS, criterion="runs", hint=None)
def counts_a_model(config):
    from labkit.gpt import GPT

    return sum(parameter.numel() for parameter in GPT(config).parameters())


# -- recipes and states --

ADAM = {"momentum": 4, "variance": 4}


def right_recipes():
    mixed = {"weights": 2, "gradients": 2, "master weights": 4, **ADAM}
    return {
        "fp32": {"weights": 4, "gradients": 4, **ADAM},
        "autocast": {"weights": 4, "gradients": 4, **ADAM},
        "16-bit": {"weights": 2, "gradients": 2, "momentum": 2, "variance": 2},
        "mixed": mixed,
        "mixed, fp32 gradients": {**mixed, "gradients": 4},
        "mixed, gradients twice": {**mixed, "fp32 gradients": 4},
    }


def right_bytes(n, recipe):
    return n * sum(recipe.values())


def changed(change):
    def recipes():
        table = right_recipes()
        change(table)
        return table

    return recipes


def drop(array, *names):
    return lambda table: [table[name].pop(array, None) for name in names or table]


def put(array, size, *names):
    return lambda table: [table[name].update({array: size}) for name in names]


MIXED = ("mixed", "mixed, fp32 gradients", "mixed, gradients twice")
for name, change, criterion, hint in [
    ("MEM-01 no gradients", drop("gradients"), "plain recipes", "arrays"),
    ("MEM-01 no master weights", drop("master weights"), "mixed recipes", "master"),
    ("MEM-01 no variance", drop("variance"), "plain recipes", "arrays"),
    ("MEM-02 gradients in 16 bit for all mixed ones", put("gradients", 2, *MIXED), "mixed recipes", "gradient-dtype"),
    ("MEM-17 no copy of the gradients", drop("fp32 gradients"), "mixed recipes", "copy"),
    ("MEM-04 bits", put("weights", 16, "16-bit", *MIXED), "plain recipes", "bits"),
    ("MEM-04 4 bytes for 16 bit", put("weights", 4, *MIXED), "mixed recipes", "weight-dtype"),
    ("autocast keeps 16-bit weights", put("weights", 2, "autocast"), "plain recipes", "autocast"),
    ("autocast with masters", put("master weights", 4, "autocast"), "plain recipes", "too-many"),
    ("Adam in 16 bit", put("momentum", 2, "mixed"), "mixed recipes", "state-dtype"),
    ("Adam in 32 bit everywhere", lambda table: table["16-bit"].update(ADAM), "plain recipes", "state-dtype"),
    ("masters also in 16-bit", put("master weights", 4, "16-bit"), "plain recipes", "too-many"),
    ("made-up array", put("activations", 4, "fp32"), "plain recipes", "arrays"),
]:
    wrong(name, check=STATES, criterion=criterion, hint=hint)((changed(change), right_bytes))

for name, count_bytes, criterion, hint in [
    ("MEM-02 16 bytes always", lambda n, recipe: 16 * n, "any recipe", "universal"),
    ("MEM-04 bits in, bits out", lambda n, recipe: 8 * right_bytes(n, recipe), "1.5 billion", "sum"),
    ("gigabytes", lambda n, recipe: right_bytes(n, recipe) / 1e9, "1.5 billion", "sum"),
    ("bytes of one parameter", lambda n, recipe: sum(recipe.values()), "1.5 billion", "sum"),
    ("MEM-23 arrays, not bytes", lambda n, recipe: n * len(recipe), "1.5 billion", "sum"),
    ("knows only the usual names", lambda n, recipe: n * sum(v for k, v in recipe.items() if "array" not in k), "any recipe", "sum"),
    ("24 GB", lambda n, recipe: 24e9, "any recipe", "sum"),
]:
    wrong(name, check=STATES, criterion=criterion, hint=hint)((right_recipes, count_bytes))


def rounded(n, recipe):
    return round(right_bytes(n, recipe) / 1e9) * 1e9


wrong("rounds to whole GB", check=STATES, criterion="any recipe", hint="sum")((right_recipes, rounded))


# -- what is there now --


def held(model, optimizer, *, size=lambda t: t.nbytes, parameters=None, state=None, gradients=None):
    mine = list(model.parameters()) if parameters is None else parameters(model)
    values = [v for per in optimizer.state.values() for v in per.values() if torch.is_tensor(v)]
    return {
        "parameters": sum(size(p) for p in mine),
        "gradients": sum(size(p.grad) for p in mine if p.grad is not None) if gradients is None else gradients(model),
        "optimizer state": sum(size(v) for v in values) if state is None else state(model, optimizer),
    }


def live(**changes):
    def live_states(model, optimizer):
        return held(model, optimizer, **changes)

    return live_states


def all_bytes(model):
    return sum(p.nbytes for p in model.parameters())


for name, changes, criterion, hint in [
    ("MEM-07 twice the parameters, always", {"state": lambda m, o: 2 * all_bytes(m)}, "optimizer state", "lazy"),
    ("MEM-07 nothing, always", {"state": lambda m, o: 0}, "optimizer state", "state"),
    ("MEM-05 by name, tied twice", {"parameters": lambda m: list(m.state_dict(keep_vars=True).values())}, "parameters", "tied"),
    ("MEM-23 getsizeof", {"size": sys.getsizeof}, "parameters", "storage"),
    ("MEM-23 numbers, not bytes", {"size": lambda t: t.numel()}, "parameters", "elements"),
    ("MEM-23 4 bytes for all", {"size": lambda t: 4 * t.numel()}, "parameters", "dtype"),
    ("gradients as large as parameters, always", {"gradients": all_bytes}, "gradients", "no-gradient"),
    ("no gradients", {"gradients": lambda m: 0}, "gradients", "gradients"),
    ("MEM-14 memory of the process", {"state": lambda m, o: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
     "optimizer state", "lazy"),
    ("momentum only", {"state": lambda m, o: sum(v["exp_avg"].nbytes for v in o.state.values() if "exp_avg" in v)},
     "optimizer state", "state"),
    ("adds the steps", {"state": lambda m, o: 12 * sum(p.numel() for p in m.parameters()) if o.state else 0}, "optimizer state", "state"),
    ("first parameter only", {"parameters": lambda m: list(m.parameters())[:1]}, "parameters", "storage"),
    ("gradients of trainable ones only", {"gradients": lambda m: sum(
        p.grad.nbytes for p in m.parameters() if p.requires_grad and p.grad is not None)}, "gradients", "still-there"),
    ("trainable ones only", {"parameters": lambda m: [p for p in m.parameters() if p.requires_grad]}, "parameters", "storage"),
    ("buffers too", {"parameters": lambda m: [*m.parameters(), *m.buffers()]}, "parameters", "storage"),
    ("matrices only", {"parameters": lambda m: [p for p in m.parameters() if p.dim() == 2]}, "parameters", "storage"),
]:  # fmt: skip
    wrong(name, check=LIVE, criterion=criterion, hint=hint)(live(**changes))


@wrong("frozen ones counted", check=LIVE, criterion="gradients", hint="frozen")
def counts_frozen(model, optimizer):
    answer = held(model, optimizer)
    ready = any(p.grad is not None for p in model.parameters())
    return {**answer, "gradients": all_bytes(model) if ready else 0}


@wrong("do nothing", check=LIVE, criterion="parameters", hint=None)
def nothing(model, optimizer):
    return None


# -- the batch --

GROWS = {"activations", "input data", "other"}
for name, functions, criterion, hint in [
    ("targets forgotten", (lambda b, s: 8 * b * s, lambda: GROWS), "input data", "targets"),
    ("MEM-23 numbers", (lambda b, s: 2 * b * s, lambda: GROWS), "input data", "elements"),
    ("4 bytes", (lambda b, s: 8 * b * s + 0 * s, lambda: GROWS), "input data", "targets"),
    ("one sequence", (lambda b, s: 16 * s, lambda: GROWS), "input data", "tokens"),
    ("MEM-16 the loss's tensors forgotten", (lambda b, s: 16 * b * s, lambda: GROWS - {"other"}), "grows with the batch", "other"),
    ("gradients grow", (lambda b, s: 16 * b * s, lambda: GROWS | {"gradients"}), "grows with the batch", "gradients"),
    ("all grow", (lambda b, s: 16 * b * s, lambda: GROWS | {"parameters", "optimizer state"}), "grows with the batch", "stays"),
    ("activations only", (lambda b, s: 16 * b * s, lambda: {"activations"}), "grows with the batch", "grows"),
    ("unknown name", (lambda b, s: 16 * b * s, lambda: GROWS | {"logits"}), "grows with the batch", "unknown"),
    ("do nothing", (lambda b, s: 0, set), "input data", "tokens"),
    ("one token more", (lambda b, s: 16 * b * (s + 1), lambda: GROWS), "input data", "tokens"),
]:
    wrong(name, check=BATCH, criterion=criterion, hint=hint)(functions)


# -- activations --


def activations(config, batch, seq, itemsize=4, *, per_width=16, per_score=1.0, last=2, loss=1, numbers=None):
    rows, h = batch * seq, config.width
    inside = config.layers * (per_width * rows * h + 4 * rows + per_score * batch * config.heads * seq * seq)
    total = inside + last * rows * h + loss * rows * config.vocab
    return total * (itemsize if numbers is None else numbers)


def kept(**changes):
    def activation_bytes(config, batch, seq, itemsize=4):
        return activations(config, batch, seq, itemsize, **changes)

    return activation_bytes


WIDE, SCORES, LOSS = "inside the blocks", "attention weights", "the loss"
for name, changes, criterion, hint in [
    ("MEM-20 inputs and outputs both", {"per_width": 20}, WIDE, "outputs"),
    ("MEM-20 every residual sum twice", {"per_width": 18}, WIDE, "outputs"),
    ("MEM-20 a block's input twice", {"per_width": 17}, WIDE, "outputs"),
    ("query, key and value as one", {"per_width": 14}, WIDE, "qkv"),
    ("GELU's output forgotten", {"per_width": 12}, WIDE, "mlp"),
    ("MLP forgotten", {"per_width": 8}, WIDE, "mlp"),
    ("one unit per layer", {"per_width": 1}, WIDE, "blocks"),
    ("table of attention forgotten", {"per_score": 0}, SCORES, "scores-missing"),
    ("scores and weights both", {"per_score": 2}, SCORES, "scores-twice"),
    ("three tables", {"per_score": 3}, SCORES, "scores-twice"),
    ("MEM-16 loss forgotten", {"loss": 0}, LOSS, "loss-missing"),
    ("MEM-16 logits kept, too", {"loss": 2}, LOSS, "logits"),
    ("MEM-23 numbers, not bytes", {"numbers": 1}, WIDE, "bytes"),
    ("MEM-04 bits", {"numbers": 32}, WIDE, "blocks"),
    ("always fp32", {"numbers": 4}, "other sizes of a number", "half"),
    ("do nothing", {"numbers": 0}, WIDE, "blocks"),
]:
    wrong(name, check=ACTIVATIONS, criterion=criterion, hint=hint)(kept(**changes))


@wrong("MEM-10 the paper's formula", check=ACTIVATIONS, criterion=WIDE, hint="paper")
def from_the_paper(config, batch, seq, itemsize=4):
    h = config.width
    return config.layers * batch * seq * h * (34 + 5 * config.heads * seq / h) + itemsize * batch * seq * config.vocab


@wrong("MEM-10 the paper's formula in numbers", check=ACTIVATIONS, criterion=WIDE, hint="paper")
def paper_in_numbers(config, batch, seq, itemsize=4):
    h = config.width
    inside = config.layers * h * (17 + 2.5 * config.heads * seq / h)
    return itemsize * batch * seq * (inside + 2 * h + config.vocab)


@wrong("MEM-10 with dropout's masks", check=ACTIVATIONS, criterion=WIDE, hint="dropout")
def with_dropout(config, batch, seq, itemsize=4):
    return activations(config, batch, seq, itemsize, per_width=18, per_score=3)


@wrong("MEM-19 one sequence", check=ACTIVATIONS, criterion=WIDE, hint="batch")
def one_sequence(config, batch, seq, itemsize=4):
    return activations(config, 1, seq, itemsize)


@wrong("MEM-22 head's width for heads", check=ACTIVATIONS, criterion=WIDE, hint="heads")
def heads_mixed_up(config, batch, seq, itemsize=4):
    mixed = config.width // config.heads
    return activations(config, batch, seq, itemsize, per_score=mixed / config.heads)


@wrong("one table for all heads", check=ACTIVATIONS, criterion=SCORES, hint="heads")
def one_table(config, batch, seq, itemsize=4):
    return activations(config, batch, seq, itemsize, per_score=1 / config.heads)


@wrong("tables of the context's length", check=ACTIVATIONS, criterion=SCORES, hint="context")
def context_tables(config, batch, seq, itemsize=4):
    return activations(config, batch, seq, itemsize, per_score=config.context / seq)


@wrong("the context's length", check=ACTIVATIONS, criterion=WIDE, hint="context")
def longest(config, batch, seq, itemsize=4):
    return activations(config, batch, config.context, itemsize)


@wrong("one layer", check=ACTIVATIONS, criterion=WIDE, hint="layers")
def one_layer(config, batch, seq, itemsize=4):
    from dataclasses import replace

    return activations(replace(config, layers=1), batch, seq, itemsize)


@wrong("weights counted, too", check=ACTIVATIONS, criterion=WIDE, hint="blocks")
def with_weights(config, batch, seq, itemsize=4):
    return activations(config, batch, seq, itemsize) + itemsize * count(config)


@wrong("runs a model", check=ACTIVATIONS, criterion="runs", hint=None)
def runs_a_model(config, batch, seq, itemsize=4):
    from labkit.gpt import GPT, next_token_loss

    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.nbytes
        return tensor

    ids = torch.zeros(batch, seq, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        next_token_loss(GPT(config)(ids), ids)
    return total


# -- the peak --


def whole(config, batch, seq, recipe, *, other=2.0, place="optimizer state", itemsize=None, batch_of=None, state_share=1.0):
    n, size = count(config), recipe["weights"] if itemsize is None else itemsize
    rest = sum(v for k, v in recipe.items() if k not in ("weights", "gradients", "master weights"))
    answer = {
        "parameters": n * recipe["weights"],
        "gradients": n * recipe["gradients"],
        "optimizer state": n * rest * state_share,
        "activations": activations(config, batch_of or batch, seq, size),
        "input data": 16 * batch * seq,
        "other": other * size * batch * seq * config.vocab,
    }
    answer[place] += n * recipe.get("master weights", 0)
    return answer


def estimator(**changes):
    def estimate(config, batch, seq, recipe):
        return whole(config, batch, seq, recipe, **changes)

    return estimate


for name, changes, criterion, hint in [
    ("MEM-16 nothing on top", {"other": 0}, "the peak", "other-none"),
    ("one gradient of the loss", {"other": 1}, "the peak", "other-half"),
    ("MEM-13 forward's logits at the same time", {"other": 3}, "the peak", "other-more"),
    ("MEM-13 every peak summed", {"other": 5}, "the peak", "other-more"),
    ("master weights as parameters", {"place": "parameters"}, "states", "states-place"),
    ("MEM-02 activations always fp32", {"itemsize": 4}, "with the batch", "numbers"),
    ("MEM-19 one sequence", {"batch_of": 1}, "with the batch", "batch"),
    ("half of the optimizer's state", {"state_share": 0.5}, "states", "states"),
]:
    wrong(name, check=ESTIMATE, criterion=criterion, hint=hint)(estimator(**changes))


@wrong("copied gradients with the gradients", check=ESTIMATE, criterion="states", hint="states-place")
def copies_with_gradients(config, batch, seq, recipe):
    answer, copy = whole(config, batch, seq, recipe), count(config) * recipe.get("fp32 gradients", 0)
    return answer | {"gradients": answer["gradients"] + copy, "optimizer state": answer["optimizer state"] - copy}


@wrong("copied gradients forgotten", check=ESTIMATE, criterion="states", hint="states")
def no_copies(config, batch, seq, recipe):
    return whole(config, batch, seq, {array: size for array, size in recipe.items() if array != "fp32 gradients"})


@wrong("loss's gradients as wide as weights' gradients", check=ESTIMATE, criterion="the peak", hint="numbers")
def wide_loss(config, batch, seq, recipe):
    answer = whole(config, batch, seq, recipe)
    return answer | {"other": answer["other"] / recipe["weights"] * recipe["gradients"]}


@wrong("the sum among the categories", check=ESTIMATE, criterion="states", hint="keys")
def with_total(config, batch, seq, recipe):
    answer = whole(config, batch, seq, recipe)
    return answer | {"total": sum(answer.values())}


@wrong("states only", check=ESTIMATE, criterion="with the batch", hint="batch")
def states_only(config, batch, seq, recipe):
    return {**whole(config, batch, seq, recipe), "activations": 0, "input data": 0, "other": 0}


@wrong("one sum", check=ESTIMATE, criterion="states", hint="keys")
def one_sum(config, batch, seq, recipe):
    return sum(whole(config, batch, seq, recipe).values())


@wrong("MEM-02 always Adam in fp32", check=ESTIMATE, criterion="states", hint="states")
def always_fp32(config, batch, seq, recipe):
    return whole(config, batch, seq, {"weights": 4, "gradients": 4, "momentum": 4, "variance": 4})


# -- the card --


def chooser(*, unit=2**30, context=True, order=None, none=None, strict=False):
    def which_card(needed_bytes, cards, context_bytes):
        need = needed_bytes + (context_bytes if context else 0)
        names = list(cards) if order is None else sorted(cards, key=lambda name: order * cards[name])
        for name in names:
            if need < cards[name] * unit or (need == cards[name] * unit and not strict):
                return name
        return none(cards) if none else None

    return which_card


for name, changes, criterion, hint in [
    ("GB for GiB", {"unit": 10**9, "order": 1}, "GB and GiB", "units"),
    ("context forgotten", {"context": False, "order": 1}, "context", "context"),
    ("first that fits", {}, "smallest that fits", "smallest"),
    ("largest", {"order": -1}, "smallest that fits", "smallest"),
    ("largest when none fits", {"order": 1, "none": lambda cards: max(cards, key=cards.get, default="")}, "none fits", "none"),
    ("full does not fit", {"order": 1, "strict": True}, "context", "full"),
    ("invents a name", {"order": 1, "none": lambda cards: "none"}, "none fits", "name"),
    ("bytes for GiB", {"unit": 1, "order": 1}, "smallest that fits", "smallest"),
]:
    wrong(name, check=CARD, criterion=criterion, hint=hint)(chooser(**changes))


def fitting(needs_gib):
    """Chooses right, of cards of at least needs_gib(needed bytes, context bytes) GiB."""

    def which_card(needed_bytes, cards, context_bytes):
        need = needs_gib(needed_bytes, context_bytes)
        return min((name for name, gib in cards.items() if gib >= need), key=cards.get, default=None)

    return which_card


for name, needs_gib, hint in [
    ("each rounded up", lambda need, more: math.ceil(need / 2**30) + math.ceil(more / 2**30), "rounds"),
    ("rounded down", lambda need, more: (need + more) // 2**30, "rounds"),
]:
    criterion = "context" if name == "rounded down" else "smallest that fits"
    wrong(name, check=CARD, criterion=criterion, hint=hint)(fitting(needs_gib))


@wrong("cards of whole GiB", check=CARD, criterion="smallest that fits", hint="rounds")
def whole_cards(needed_bytes, cards, context_bytes):
    fit = [name for name, gib in cards.items() if int(gib) * 2**30 >= needed_bytes + context_bytes]
    return min(fit, key=cards.get, default=None)


@wrong("takes the small cards away", check=CARD, criterion="smallest that fits", hint="changed")
def pops_cards(needed_bytes, cards, context_bytes):
    while cards:
        name = min(cards, key=cards.get)
        if cards[name] * 2**30 >= needed_bytes + context_bytes:
            return name
        del cards[name]
    return None


@wrong("falls when none fits", check=CARD, criterion="runs", hint="none")
def min_of_nothing(needed_bytes, cards, context_bytes):
    return min((name for name, gib in cards.items() if gib * 2**30 >= needed_bytes + context_bytes), key=cards.get)


@wrong("do nothing", check=CARD, criterion="smallest that fits", hint="smallest")
def no_card(needed_bytes, cards, context_bytes):
    return None

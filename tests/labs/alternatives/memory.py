"""Right accounts of memory, each built another way."""

import math
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from torch import nn

from tests.labs.corpus import right

PARAMETERS, STATES, LIVE, BATCH = "memory.parameters", "memory.states", "memory.live", "memory.batch"
ACTIVATIONS, ESTIMATE, CARD = "memory.activations", "memory.estimate", "memory.card"


# -- parameters --


@right("closed formula", check=PARAMETERS)
def closed(config):
    h = config.width
    untied = 0 if config.tied else config.vocab
    return (config.vocab + config.context + untied + 2) * h + config.layers * (12 * h * h + 13 * h)


@right("a list of shapes", check=PARAMETERS)
def by_shapes(config):
    h = config.width
    block = [(h,), (h,)] * 2 + [(h, h), (h,)] * 4 + [(4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    shapes = [(config.vocab, h), (config.context, h), *block * config.layers, (h,), (h,)]
    if not config.tied:
        shapes.append((config.vocab, h))
    return sum(math.prod(shape) for shape in shapes)


@right("float64", check=PARAMETERS)
def in_floats(config):
    return float(closed(config))


@right("numpy's int64", check=PARAMETERS)
def in_numpy(config):
    return np.int64(closed(config))


@right("tensor of one element", check=PARAMETERS)
def in_a_tensor(config):
    return torch.tensor(closed(config))


@right("modules without memory", check=PARAMETERS)
def on_meta(config):
    h = config.width
    with torch.device("meta"):
        linears = [*(nn.Linear(h, h) for _ in range(4)), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)]
        block = nn.ModuleList([*linears, nn.LayerNorm(h), nn.LayerNorm(h)])
        ends = nn.ModuleList([nn.Embedding(config.vocab, h), nn.Embedding(config.context, h), nn.LayerNorm(h)])
        head = nn.Linear(h, config.vocab, bias=False)
    size = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    return config.layers * size(block) + size(ends) + (0 if config.tied else size(head))


# -- states --


def recipes():
    adam = {"momentum": 4, "variance": 4}
    plain = {"weights": 4, "gradients": 4, **adam}
    mixed = {"weights": 2, "gradients": 2, "master weights": 4, **adam}
    half = dict.fromkeys(("weights", "gradients", "momentum", "variance"), 2)
    return {"fp32": plain, "autocast": plain, "16-bit": half, "mixed": mixed,
            "mixed, fp32 gradients": mixed | {"gradients": 4}, "mixed, gradients twice": mixed | {"fp32 gradients": 4}}  # fmt: skip


def with_dtypes():
    sizes = {2: torch.bfloat16, 4: torch.float32}
    return {name: {array: sizes[size] for array, size in recipe.items()} for name, recipe in recipes().items()}


def with_zeros():
    arrays = ("variance", "weights", "momentum", "gradients", "fp32 gradients", "master weights")
    return OrderedDict((name, {array: float(recipe.get(array, 0)) for array in arrays}) for name, recipe in recipes().items())


def with_more_recipes():
    return {**recipes(), "sgd": {"weights": 4, "gradients": 4}}


def in_a_loop(n, recipe):
    total = 0
    for array in recipe:
        total += n * recipe[array]
    return total


right("a loop", check=STATES)((recipes, in_a_loop))
right("dtypes in the table", check=STATES)((with_dtypes, lambda n, recipe: n * math.fsum(recipe.values())))
right("zeros for what is not there", check=STATES)((with_zeros, lambda n, recipe: float(n) * sum(size for size in recipe.values())))
right("more recipes than asked", check=STATES)((with_more_recipes, lambda n, recipe: n * Fraction(str(sum(recipe.values())))))
right("decimal", check=STATES)((recipes, lambda n, recipe: Decimal(n) * Decimal(str(sum(recipe.values())))))
right("numpy", check=STATES)((recipes, lambda n, recipe: np.float64(n) * np.sum(list(recipe.values()))))


# -- what is there now --


@right("storages by address", check=LIVE)
def by_address(model, optimizer):
    def total(tensors):
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    named = [p for _, p in model.named_parameters(remove_duplicate=False)]
    state = [v for per in optimizer.state.values() for v in per.values() if isinstance(v, torch.Tensor) and v.dim()]
    return {"parameters": total(named), "gradients": total(p.grad for p in named if p.grad is not None), "optimizer state": total(state)}


@right("by the optimizer's groups", check=LIVE)
def by_groups(model, optimizer):
    answer = {"parameters": 0, "gradients": 0, "optimizer state": 0}
    for parameter in set(model.parameters()):
        answer["parameters"] += parameter.numel() * parameter.element_size()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                answer["gradients"] += parameter.grad.numel() * parameter.grad.element_size()
            for value in optimizer.state.get(parameter, {}).values():
                if hasattr(value, "element_size"):
                    answer["optimizer state"] += value.numel() * value.element_size()
    return answer


@right("by the state dict", check=LIVE)
def by_state_dict(model, optimizer):
    state = optimizer.state_dict()["state"]
    sizes = [v.numel() * v.itemsize for per in state.values() for v in per.values() if torch.is_tensor(v) and v.numel() > 1]
    grads = [p.grad for p in model.parameters()]
    return {
        "parameters": np.sum([p.nbytes for p in model.parameters()]),
        "gradients": torch.tensor(sum(0 if g is None else g.nbytes for g in grads)),
        "optimizer state": float(sum(sizes)),
        "all": None,
    }


# -- the batch --

right("a list", check=BATCH)((lambda batch, seq: 16 * batch * seq, lambda: ["other", "activations", "input data"]))
right("a generator, floats", check=BATCH)(
    (lambda batch, seq: 2.0 * batch * seq * torch.int64.itemsize, lambda: (name for name in ("input data", "Activations", "other")))
)


# -- activations --


@right("a list of tensors", check=ACTIVATIONS)
def by_list(config, batch, seq, itemsize=4):
    flat, h = batch * seq, config.width
    block = [flat * h] * 8 + [flat * 4 * h] * 2 + [batch * config.heads * seq**2] + [flat] * 4
    ends = [flat * h, flat * h, flat, flat, flat * config.vocab]
    return itemsize * (config.layers * sum(block) + sum(ends))


@right("all of it", check=ACTIVATIONS)
def to_the_byte(config, batch, seq, itemsize=4):
    mask = config.layers * seq * seq
    return by_list(config, batch, seq, itemsize) + mask + 8 * seq + 8


@right("16 + as/h, nothing tiny", check=ACTIVATIONS)
def like_the_paper(config, batch, seq, itemsize=4):
    per_layer = seq * batch * config.width * (16 + config.heads * seq / config.width)
    return itemsize * (config.layers * per_layer + seq * batch * (config.vocab + 2 * config.width))


@right("numpy", check=ACTIVATIONS)
def with_numpy(config, batch, seq, itemsize=4):
    parts = np.array([16 * config.layers + 2, config.layers, 1], dtype=np.float64)
    sizes = np.array([batch * seq * config.width, batch * config.heads * seq * seq, batch * seq * config.vocab], dtype=np.float64)
    return itemsize * parts @ sizes


@right("four percent too much", check=ACTIVATIONS)
def four_percent_off(config, batch, seq, itemsize=4):
    return 1.04 * to_the_byte(config, batch, seq, itemsize)


# -- the peak --


@right("sum by hand", check=ESTIMATE)
def by_hand(config, batch, seq, recipe):
    n, size = closed(config), recipe["weights"]
    states = {"parameters": size * n, "gradients": recipe["gradients"] * n}
    states["optimizer state"] = n * sum(recipe.values()) - sum(states.values())
    logits = size * batch * seq * config.vocab
    return {**states, "activations": to_the_byte(config, batch, seq, size), "input data": 16 * batch * seq, "other": 2 * logits}


@right("masks counted with other", check=ESTIMATE)
def masks_with_other(config, batch, seq, recipe):
    answer = by_hand(config, batch, seq, recipe)
    mask = config.layers * seq * seq
    return {**answer, "activations": answer["activations"] - mask, "other": answer["other"] + mask}


@right("step counters, floats", check=ESTIMATE)
def with_counters(config, batch, seq, recipe):
    answer = {name: float(nbytes) for name, nbytes in by_hand(config, batch, seq, recipe).items()}
    answer["optimizer state"] += 4 * (config.layers * 16 + 4)
    return answer


# -- the card --


@right("min over those that fit", check=CARD)
def by_min(needed_bytes, cards, context_bytes):
    fitting = {name: gib for name, gib in cards.items() if gib * 2**30 >= needed_bytes + context_bytes}
    return min(fitting, key=fitting.get) if fitting else None


@right("in GiB", check=CARD)
def in_gib(needed_bytes, cards, context_bytes):
    need = Fraction(needed_bytes + context_bytes) / 2**30
    sizes = sorted((gib, name) for name, gib in cards.items())
    return next((name for gib, name in sizes if need <= gib), None)


@right("smaller ones left out, again and again", check=CARD)
def recursive_card(needed_bytes, cards, context_bytes):
    def choose(left):
        if not left:
            return None
        small = min(left, key=left.get)
        fits = needed_bytes / 2**30 + context_bytes / 2**30 <= left[small]
        return small if fits else choose({name: gib for name, gib in left.items() if name != small})

    return choose(cards)


@right("numpy's search in sorted sizes", check=CARD)
def searched_card(needed_bytes, cards, context_bytes):
    names, sizes = np.array(list(cards)), np.array(list(cards.values()), dtype=float) * 2.0**30
    order = np.argsort(sizes)
    at = np.searchsorted(sizes[order], needed_bytes + context_bytes)
    return names[order][at] if at < len(names) else None


@right("keeps the best so far", check=CARD)
def best_so_far(needed_bytes, cards, context_bytes):
    best = None
    for name in reversed(list(cards)):
        left = cards[name] * 1024**3 - context_bytes - needed_bytes
        if left >= 0 and (best is None or cards[name] < cards[best]):
            best = name
    return best

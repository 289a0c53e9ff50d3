"""What lab 00's checks expect: closed formulas for a training step of `labkit.gpt.GPT`, and the step that they describe.

`tests/labs/test_memory.py` holds the formulas to what the recorder measures, within 1%.
"""

import math
import numbers
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from labkit.checks._core import WrongResult
from labkit.checks._threads import one_thread
from labkit.gpt import GPT, GPTConfig, next_token_loss
from labkit.recorder import Recorder, Recording

# recipe -> array with one entry per parameter -> bytes per entry, trained with Adam
RECIPES: dict[str, dict[str, int]] = {
    "fp32": {"weights": 4, "gradients": 4, "momentum": 4, "variance": 4},
    "autocast": {"weights": 4, "gradients": 4, "momentum": 4, "variance": 4},
    "16-bit": {"weights": 2, "gradients": 2, "momentum": 2, "variance": 2},
    "mixed": {"weights": 2, "gradients": 2, "master weights": 4, "momentum": 4, "variance": 4},
    "mixed, fp32 gradients": {"weights": 2, "gradients": 4, "master weights": 4, "momentum": 4, "variance": 4},
    "mixed, gradients twice": {"weights": 2, "gradients": 2, "fp32 gradients": 4, "master weights": 4, "momentum": 4, "variance": 4},
}
STATES = ("parameters", "gradients", "optimizer state")


def number(value: Any, who: str) -> float | int:
    """`value` as an int or float: whatever is a number, numpy's and a tensor of one element too. Raises WrongResult for the rest."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Number) or isinstance(value, (bool, complex)):
        try:  # numpy's scalars, decimals, fractions
            value = float(value) if not isinstance(value, (str, bytes, bool)) and value is not None else None
        except (TypeError, ValueError):
            value = None
    if value is None:
        raise WrongResult(f"{who} returned no number. What does its docstring say that it returns?")
    if isinstance(value, numbers.Integral):
        return int(value)
    if not math.isfinite(value):
        raise WrongResult(f"{who} returned {float(value)}, expected a finite number")
    return float(value)


def near(got: float, right: float, share: float) -> bool:
    """Whether `got` is within `share` of `right`."""
    return abs(got - right) <= share * abs(right) + 1e-9


def draw(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def config_of(values: Mapping[str, Any]) -> GPTConfig:
    """The config that a case holds as plain values."""
    return GPTConfig(**values)


def parameter_count(config: GPTConfig) -> int:
    """Parameters of `GPT(config)`; a tied head is the embedding and counts once."""
    h = config.width
    block = 12 * h * h + 13 * h  # 4 Linears of attention, 2 of the MLP, their biases (9h), two norms (4h)
    embeddings = (config.vocab + config.context) * h
    head = 0 if config.tied else config.vocab * h
    return embeddings + config.layers * block + 2 * h + head


def activation_bytes(config: GPTConfig, batch: int, seq: int, itemsize: int = 4) -> int:
    """Bytes born in forward that wait for backward, dropout off, with eager attention as `GPT` has it. Units of `itemsize` but for a
    bool mask in each block and the positions' indices.
    """
    tokens, h = batch * seq, config.width
    # Per block, in units of tokens * width: both norms' inputs and outputs 4, query, key and value 3, attention's result 1, GELU's
    # input and output 8. Then attention's weights, and mean and 1/std of both norms.
    block = itemsize * (16 * tokens * h + batch * config.heads * seq * seq + 4 * tokens) + seq * seq
    last = itemsize * (2 * tokens * h + 2 * tokens)  # the last norm's input and output
    loss = itemsize * tokens * config.vocab  # log-probabilities; the logits themselves are gone
    return config.layers * block + last + loss + 8 * seq


def input_bytes(batch: int, seq: int) -> int:
    """Token ids and targets, 8 bytes each."""
    return 2 * 8 * batch * seq


def other_bytes(config: GPTConfig, batch: int, seq: int, itemsize: int = 4) -> int:
    """On top at the peak, which stands at the start of backward where the vocabulary is large: gradients of the log-probabilities
    and of the logits.
    """
    return 2 * itemsize * batch * seq * config.vocab


def estimate(config: GPTConfig, batch: int, seq: int, recipe: Mapping[str, int]) -> dict[str, int]:
    """Peak of a training step by category, gradients allocated from the start, activations as wide as the weights."""
    n, itemsize = parameter_count(config), recipe["weights"]
    return {
        "parameters": n * recipe["weights"],
        "gradients": n * recipe["gradients"],
        "optimizer state": n * sum(size for array, size in recipe.items() if array not in ("weights", "gradients")),
        "activations": activation_bytes(config, batch, seq, itemsize),
        "input data": input_bytes(batch, seq),
        "other": other_bytes(config, batch, seq, itemsize),
    }


@one_thread()
def record_step(config: GPTConfig, batch: int, seq: int, dtype: torch.dtype = torch.float32) -> Recording:
    """The second training step with AdamW, recorded: optimizer state and gradients are there from the first. Mark "kept" stands
    between forward and backward. The caller's random stream is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        model = GPT(config).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids, targets = torch.randint(config.vocab, (2, batch, seq), generator=torch.Generator().manual_seed(0)).unbind()
        ids, targets = ids.clone(), targets.clone()
        next_token_loss(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with Recorder(watch=[model, optimizer, ids, targets]) as recorder:
            with recorder.phase("forward"):
                loss = next_token_loss(model(ids), targets)
            recorder.mark("kept")
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("optimizer"):
                optimizer.step()
    return recorder.recording


def random_config(generator: torch.Generator, *, kind: str) -> dict[str, Any]:
    """A small config, in which one thing weighs most: "wide" blocks, "long" attention, or the "loss" of a large vocabulary.
    Returns {"config": ..., "batch", "seq"}.
    """
    batch = draw(generator, 2, 9)
    heads = draw(generator, 2, 5)
    if kind == "wide":
        width, seq, vocab = heads * draw(generator, 40, 70), draw(generator, 6, 12), draw(generator, 30, 80)
    elif kind == "long":
        heads += 3
        width, seq, vocab = heads * draw(generator, 6, 10), draw(generator, 150, 300), draw(generator, 60, 200)
    else:
        width, seq, vocab = heads * draw(generator, 10, 20), draw(generator, 20, 40), draw(generator, 3000, 6000)
    layers = draw(generator, 1, 2) if kind == "loss" else draw(generator, 5, 9)
    config = GPTConfig(vocab, seq + draw(generator, 0, 60), layers, heads, width, bool(draw(generator, 0, 1)))
    return {"config": vars(config), "batch": batch, "seq": seq}


def with_(config: GPTConfig, **changes: Any) -> GPTConfig:
    """The config with something changed."""
    return replace(config, **changes)


def told(nbytes: float) -> str:
    """Bytes for the table: 24.000 GB (10^9, as the lectures have it); below that every digit."""
    return f"{nbytes / 1e9:.3f} GB" if abs(nbytes) >= 1e9 else f"{nbytes:,.0f} bytes"

"""The small GPT has the field's parameter counts, and its text is the same everywhere."""

import hashlib

import pytest
import torch

from labkit import data
from labkit.gpt import GPT, GPT2_XL, GPT3, GPTConfig, next_token_loss


def expected_parameters(config: GPTConfig) -> int:
    width = config.width
    blocks = config.layers * (12 * width * width + 13 * width)
    return config.vocab * width * (1 if config.tied else 2) + config.context * width + blocks + 2 * width

SMALL = [GPTConfig(), GPTConfig(tied=False, layers=2), GPTConfig(vocab=11, context=7, layers=1, heads=3, width=12)]


@pytest.mark.parametrize("config", SMALL)
def test_parameter_count(config: GPTConfig) -> None:
    assert sum(parameter.numel() for parameter in GPT(config).parameters()) == expected_parameters(config)


def test_counts_of_the_papers() -> None:
    assert expected_parameters(GPT2_XL) == 1_557_611_200
    assert round(expected_parameters(GPT3) / 1e9) == 175


def test_no_token_sees_its_future() -> None:
    model, ids = GPT(GPTConfig(layers=2)), torch.randint(256, (1, 16))
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9]) and not torch.equal(before[:, 9], after[:, 9])


def test_an_untrained_model_knows_nothing() -> None:
    inputs, targets = data.batches(data.python_docs()[0], batch=4, seq=64, count=1)[0]
    assert next_token_loss(GPT(GPTConfig())(inputs), targets).item() == pytest.approx(5.545, abs=0.1)  # log 256


def test_the_text_is_frozen() -> None:
    train, held_out = data.python_docs()
    assert (len(train), len(held_out)) == (435_193, 31_001)
    assert hashlib.sha256(bytes(train.tolist())).hexdigest().startswith("dd6cd942377ef58c")
    assert data.text(data.tokens("naïve – text")) == "naïve – text"


def test_batches_repeat_and_shift_by_one() -> None:
    train, _ = data.python_docs()
    first, again = data.batches(train, 3, 16, 2, seed=1), data.batches(train, 3, 16, 2, seed=1)
    for (inputs, targets), (same, _) in zip(first, again, strict=True):
        assert torch.equal(inputs, same) and torch.equal(inputs[:, 1:], targets[:, :-1])

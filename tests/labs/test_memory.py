"""Lab 00: its formulas hold against the recorder, its checks judge what they should, its reference gets everything, nobody's nothing."""

import subprocess
import sys

import pytest
import torch

from labkit import levels
from labkit.checks import _memory_activations, _memory_count, _memory_estimate, _memory_live
from labkit.checks import _memory_truth as truth
from labkit.checks._core import WrongResult
from labkit.gpt import GPT, GPT2_XL, GPT3, GPTConfig, next_token_loss
from labkit.paper import paper_scale
from labkit.recorder import Recorder
from tests.labs import corpus

CONFIGS = [
    (GPTConfig(700, 90, 3, 8, 64, tied=False), 1, 40),
    (GPTConfig(1500, 128, 2, 2, 32), 2, 100),
    (GPTConfig(700, 40, 5, 3, 48), 5, 12),
]


# -- the formulas that judge, against the recorder --


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: f"width {case[0].width}, seq {case[2]}")
def test_formulas_are_what_the_recorder_measures(case: tuple[GPTConfig, int, int], dtype: torch.dtype) -> None:
    config, batch, seq = case
    recording = truth.record_step(config, batch, seq, dtype)
    counted = truth.activation_bytes(config, batch, seq, dtype.itemsize)
    assert recording.at("kept", born=True) == pytest.approx(counted, rel=1e-2)
    assert recording.at("kept", born=True) - counted == 2 * dtype.itemsize, "the loss and its weight: nothing else is missing"
    recipe = dict.fromkeys(("weights", "gradients", "momentum", "variance"), dtype.itemsize)
    expected, measured = truth.estimate(config, batch, seq, recipe), recording.by_category("peak")
    for name in truth.STATES:
        assert measured[name] == pytest.approx(expected[name], rel=1e-2)
    assert measured["input data"] == expected["input data"] == truth.input_bytes(batch, seq)
    assert sum(measured.values()) == pytest.approx(sum(expected.values()), rel=1e-2)
    assert recording.by_phase()["backward"]["peak_bytes"] == recording.peak_bytes, "the peak stands in backward"


@pytest.mark.parametrize("seed", range(3))
def test_random_cases_are_as_measured(seed: int) -> None:
    """The configs that checks draw, not ours: the formula holds for them too, and one criterion's term does not decide another's."""
    generator = torch.Generator().manual_seed(seed)
    for kind in _memory_activations.CRITERIA:
        row = truth.random_config(generator, kind=kind)
        config, batch, seq = truth.config_of(row["config"]), min(row["batch"], 3), row["seq"]
        if kind == "long":
            batch = 1
        assert truth.activation_bytes(config, batch, seq) == pytest.approx(kept(config, batch, seq), rel=1e-2)
        right = truth.activation_bytes(config, batch, seq)
        table = 4 * config.layers * batch * config.heads * seq**2 / right
        loss = 4 * batch * seq * config.vocab / right
        assert (table > 0.05) == (kind == "long") or kind == "loss", (kind, table)
        assert (loss > 0.2) == (kind == "loss") and (kind == "loss" or loss < 0.05), (kind, loss)


def kept(config: GPTConfig, batch: int, seq: int) -> int:
    with paper_scale():
        model, ids = GPT(config), torch.zeros(batch, seq, dtype=torch.long)
        with Recorder(watch=[model, ids]) as recorder:
            loss = next_token_loss(model(ids), ids)
            recorder.mark("kept")
            del loss
    return recorder.recording.at("kept", born=True)


def test_parameter_counts_are_the_models() -> None:
    for tied in (True, False):
        config = GPTConfig(101, 17, 3, 2, 22, tied)
        assert truth.parameter_count(config) == sum(p.numel() for p in GPT(config).parameters())
    assert truth.parameter_count(GPT2_XL) == 1_557_611_200
    assert truth.parameter_count(GPT3) == 174_604_259_328
    with paper_scale():
        assert sum(p.numel() for p in GPT(GPT2_XL).parameters()) == 1_557_611_200


def test_recipes_are_the_published_sums() -> None:
    sums = {name: sum(recipe.values()) for name, recipe in truth.RECIPES.items()}
    assert list(sums.values()) == [16, 16, 8, 16, 18, 20]
    assert truth.estimate(GPTConfig(), 1, 1, truth.RECIPES["mixed"])["optimizer state"] == 12 * truth.parameter_count(GPTConfig())


@pytest.mark.parametrize("optimizer", _memory_live.OPTIMIZERS)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_held_is_what_the_recorder_sees(optimizer: str, frozen: bool) -> None:
    config = {"vocab": 60, "context": 9, "layers": 2, "heads": 2, "width": 10, "tied": True}
    row = {"optimizer": optimizer, "dtype": "float32", "config": config, "frozen": frozen}
    model, made = _memory_live._setup(row)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with Recorder(watch=[model, made, ids]) as recorder:
        recorder.mark("new")
        next_token_loss(model(ids), ids).backward()
        recorder.mark("after backward")
        made.step()
        recorder.mark("after the first step")
        made.zero_grad()
        recorder.mark("after zero_grad")
    for moment in _memory_live.MOMENTS:
        seen = recorder.recording.by_category(moment)
        for category, allowed in _memory_live.live_truth(row, moment).items():
            assert seen[category] in allowed, (moment, category)


# -- the checks --


def findings(name: str, candidate: object, seed: int) -> list:
    """What a check says of a candidate, exam cases included, without a process of its own."""
    check = corpus.get_check(name)
    cases = check.cases(torch.Generator().manual_seed(seed), True)
    return [finding for case in cases for finding in check.judge(case, check.probe(candidate, case))]


@pytest.mark.parametrize("share", [0.96, 1.04])
def test_within_five_percent_is_right_and_beyond_is_not(share: float) -> None:
    beyond = 1 + 1.6 * (share - 1)
    for seed in range(20):
        assert all(f.passed for f in findings("memory.activations", lambda *args: share * truth.activation_bytes(*args), seed))
        assert not any(f.passed for f in findings("memory.activations", lambda *args: beyond * truth.activation_bytes(*args), seed))


@pytest.mark.parametrize("base", [1, 2])
def test_the_papers_formula_is_never_right(base: int) -> None:
    def from_paper(config, batch, seq, itemsize=4):
        per_token = config.layers * (34 * config.width + 5 * config.heads * seq)
        return batch * seq * (per_token * (1 if base == 1 else itemsize / 2) + itemsize * config.vocab)

    for seed in range(20):
        failed = [f for f in findings("memory.activations", from_paper, seed) if not f.passed]
        assert "paper" in [f.hint for f in failed]


def test_numbers_of_every_kind_are_read() -> None:
    import decimal
    import fractions

    import numpy as np

    for value in (7, 7.0, np.int64(7), np.float32(7), torch.tensor(7), torch.tensor([7.0]), decimal.Decimal(7), fractions.Fraction(7)):
        assert truth.number(value, "f") == 7
    for value in (None, "7", True, float("nan"), float("inf"), [7], torch.ones(2), 7j):
        with pytest.raises(WrongResult):
            truth.number(value, "f")


def test_smallest_card_counts_in_gib() -> None:
    assert _memory_estimate.smallest(24e9, {"a": 24, "b": 40}, 2**29) == "a"
    assert _memory_estimate.smallest(24 * 2**30, {"a": 24, "b": 40}, 1) == "b"
    assert _memory_estimate.smallest(1, {}, 0) is None


def test_a_wrong_count_is_told_by_its_own_reason() -> None:
    for config in _memory_count.KNOWN.values():
        assert "tied" in _memory_count._usual(config).values()


# -- levels --


def test_levels_grow_outwards() -> None:
    found = levels.memory_levels()
    caches = [size for name, size in found.items() if name.startswith("L")]
    assert caches == sorted(caches)
    assert all(isinstance(size, int) and size > 0 for size in found.values())


def test_reading_leaves_threads_alone_and_gives_a_speed() -> None:
    before = torch.get_num_threads()
    assert 1e7 < levels.read_bandwidth(2**14, seconds=0.01) < 1e14
    assert torch.get_num_threads() == before


def test_levels_need_no_other_part_of_the_course() -> None:
    code = "import sys, labkit.levels; sys.exit(any(name.startswith(('matplotlib', 'IPython', 'labkit.checks')) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

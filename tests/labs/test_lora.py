"""Lab 11: its checks judge what they should, its reference gets everything, PEFT loads what it saves, and the other way round."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import labkit.data
from labkit.checks import _lora_hints, _lora_judge, _lora_nets, get_check
from labkit.checks._lora_nets import layout_of, make_net, net_with, paths_of, randomise
from labkit.data import python_docs
from labkit.data.library import KINDS, library, python_library
from labkit.data.pretrain import pretrained_gpt, validation_loss
from tests.labs import corpus
from tests.labs.solutions import solution


def test_plain_earns_a_quarter_at_most() -> None:
    class Full(nn.Module):
        """Full fine-tuning in the shape of the exercise: right outputs, no technique."""

        def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x)

    def leave(model: nn.Module, *args: object) -> list[nn.Parameter]:
        return list(model.parameters())

    nothing = lambda model: None  # noqa: E731
    inject = solution("11").inject
    plain = {"lora.linear": Full, "lora.inject": leave, "lora.merge": (inject, nothing, nothing)}
    for check, candidate in plain.items():
        verdict = corpus.examine(candidate, check, strict=False)
        assert verdict.points <= verdict.max_points / 4, verdict.as_text()


# -- PEFT --


def tuned(rank: int = 8, alpha: float = 20, targets: tuple[str, ...] = ("query", "value")) -> nn.Module:
    model = pretrained_gpt()
    solution("11").inject(model, rank, alpha, targets)
    randomise(model, 3)
    return model.eval()


def test_peft_loads_the_adapter_that_the_reference_saves(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, ids = tuned(), torch.randint(256, (2, 48))
    solution("11").save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(pretrained_gpt(), str(tmp_path)).eval()
    with torch.no_grad():
        expected, plain = model(ids), pretrained_gpt()(ids)
        torch.testing.assert_close(loaded(ids), expected, rtol=1e-5, atol=1e-5)
        assert (expected - plain).abs().max() > 0.1
        merged = loaded.merge_and_unload()
        solution("11").merge(model)
        torch.testing.assert_close(merged(ids), model(ids), rtol=1e-4, atol=1e-4)


def test_the_reference_loads_an_adapter_that_peft_saves(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["key", "out"], init_lora_weights=False)
    theirs, ids = peft.get_peft_model(pretrained_gpt(), config).eval(), torch.randint(256, (2, 48))
    theirs.save_pretrained(tmp_path)
    model = pretrained_gpt()
    solution("11").load_adapter(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids), theirs(ids), rtol=1e-5, atol=1e-5)


def test_pefts_own_layer_is_a_right_answer() -> None:
    """In this process: importing PEFT anew for each case would take longer than all of it."""
    layer = pytest.importorskip("peft.tuners.lora.layer")
    from peft import LoraConfig

    class Peft(layer.Linear):
        def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
            config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout)
            try:
                super().__init__(base, "default", config=config, r=rank, lora_alpha=alpha)
            except TypeError:  # before PEFT 0.18 each setting was an argument
                super().__init__(base, "default", r=rank, lora_alpha=alpha, lora_dropout=dropout)
            base.requires_grad_(False)
            self.to(base.weight.dtype)

    check = get_check("lora.linear")
    for case in check.cases(torch.Generator().manual_seed(5), False):
        for finding in check.judge(case, check.probe(Peft, case)):
            assert finding.passed, (case.name, finding)


# -- what ships --


def test_texts_are_frozen_and_none_has_a_notice_of_its_own() -> None:
    assert set(library()) == set(KINDS)
    assert (Path(labkit.data.__file__).parent / "LICENSE.python.txt").is_file()
    text = "\n".join(part for parts in library().values() for part in parts.values()).lower()
    assert "copyright (c)" not in text
    assert [len(ids) for kind in KINDS for ids in python_library(kind)] == [246921, 38552, 226504, 48003]


def test_the_checkpoint_knows_documentation_best() -> None:
    model = pretrained_gpt()
    assert sum(p.numel() for p in model.parameters()) == 842_496
    old = validation_loss(model, python_docs()[1])
    assert old < 1.4
    assert all(validation_loss(model, python_library(kind)[1]) > old + 0.5 for kind in KINDS)


def test_the_sweep_has_every_rank_text_and_seed_and_a_best_rate_inside() -> None:
    sweep = json.loads((Path(labkit.data.__file__).parent / "lora_sweep.json").read_text())
    for kind in KINDS:
        for rank in (1, 2, 4, 8, 16, 32, 64, "full"):
            rows = [row for row in sweep["rows"] if (row["text"], row["rank"]) == (kind, rank)]
            best = min((row for row in rows if row["seed"] == 0), key=lambda row: row["new_loss"])["rate"]
            rates = sorted({row["rate"] for row in rows})
            assert rates[0] < best < rates[-1], (kind, rank)
            assert sorted(row["seed"] for row in rows if row["rate"] == best) == [0, 1, 2]


# -- the judges' own arithmetic --


def test_layouts_tell_what_is_stored_how() -> None:
    a, b = torch.randn(3, 12), torch.randn(20, 3)
    for pair, right in {(a, b): True, (b, a): True, (a.T, b): True, (b.T, a.T): True, (a, a): False, (b, b): False}.items():
        layout = layout_of(pair, 12, 20, 3)
        assert (layout is not None) == right
        if layout:
            assert torch.equal(layout.factors(pair)[0], a) and torch.equal(layout.factors(pair)[1], b)
    assert layout_of([a], 12, 20, 3) is None


def test_paths_are_whole_last_names() -> None:
    assert paths_of(["query", "value"]) == [
        *(f"blocks.{index}.attention.{name}" for index in (0, 1) for name in ("query", "value")),
        "value",
    ]


def test_net_with_adds_to_the_weights() -> None:
    net, x, _ = make_net(1)
    delta = torch.randn(5, 12)
    with torch.no_grad():
        seen = net_with(net, ["value"], [delta], x)
        net.value.weight += delta
        torch.testing.assert_close(seen, net(x))


def test_rank_and_ratio() -> None:
    matrix = torch.randn(6, 2) @ torch.randn(2, 9)
    assert _lora_judge.rank_of(matrix) == 2
    assert _lora_judge.rank_of(torch.zeros(4, 3)) == 0
    assert math.isclose(_lora_nets.ratio(3 * matrix, matrix), 3, rel_tol=1e-4)
    assert _lora_nets.ratio(matrix + 1, matrix) is None


def test_no_hint_names_a_call_that_is_the_answer() -> None:
    hints = {**_lora_hints.LINEAR_HINTS, **_lora_hints.INJECT_HINTS, **_lora_hints.MERGE_HINTS, **_lora_hints.ADAPTER_HINTS}
    answers = ("requires_grad_(", "nn.Parameter", "setattr", "F.linear", "copy_(", "save_file", "F.dropout")
    assert not [key for key, hint in hints.items() for answer in answers if answer in hint]
    assert all(hint.rstrip().endswith("?") for hint in hints.values())

"""Lab 01's checks: references pass, plain versions earn a quarter, the trail sees what it must, and its own cost stays small."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from labkit.checks import all_checks, get_check
from labkit.checks._pingpong_hints import HINTS, typical_error
from labkit.checks._pingpong_judge import error_of, expected
from labkit.checks._pingpong_probe import model_of
from labkit.checks._pingpong_trail import Trail
from tests.labs import corpus

CHECKS = {"pingpong.forward": "pingpong_forward", "pingpong.residual": "residual_forward", "pingpong.persistent": "PingPong"}
WRONGS = [item for item in corpus.load()[0] if item.topic == "pingpong"]


@pytest.mark.parametrize("item", [item for item in WRONGS if item.name.startswith("plain")], ids=lambda item: item.name)
def test_plain_earns_a_quarter_at_most(item: corpus.Wrong) -> None:
    verdict = corpus.examine(item.candidate, item.check)
    assert 0 < verdict.points <= verdict.max_points / 4, verdict.as_text()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in CHECKS if name != "pingpong.persistent"])  # its layers are those of the first
def test_cases_are_well_scaled(name: str, seed: int) -> None:
    """Outputs neither vanish nor explode, so a relative tolerance means something; the judge's network is torch's own."""
    for case in get_check(name).cases(torch.Generator().manual_seed(seed), True):
        for number, run in enumerate(case.values["runs"]):
            x = case.tensors[f"x{number}"]
            reference = expected(case, run["model"], x)
            assert 1e-2 < float(reference.abs().max()) < 1e3
            assert len(x) == 1 or float((reference - reference[0]).abs().max()) > 1e-2, "any input would do"
            h = x
            with torch.no_grad():
                for module in model_of(case, run["model"]):
                    h = torch.relu(module(h)) if isinstance(module, nn.Linear) else module(h)
            assert error_of(h, reference) < 0.5


def test_wrong_shapes_and_nan_are_errors() -> None:
    reference = torch.ones(2, 3, dtype=torch.float64)
    assert error_of(torch.ones(2, 3), reference) <= 1
    assert error_of(torch.ones(2, 3) + 1e-3, reference) > 1
    assert error_of(torch.full((2, 3), float("nan")), reference) == float("inf")
    assert error_of(torch.ones(1), reference) == float("inf")
    assert error_of(torch.ones(2, 3, dtype=torch.float64) + 1e-6, reference) > 1  # float64 is asked for more


def test_trail_sees_places_copies_and_outside_memory() -> None:
    weight, x = torch.randn(4, 4), torch.randn(2, 4)
    a, outside = torch.empty(2, 4), torch.from_numpy(torch.zeros(2, 4).numpy().copy())
    trail = Trail([[weight]], [weight, x])
    with torch.no_grad(), trail:
        torch.mm(x, weight, out=a)
        a.copy_(x)
        torch.mm(x, weight.clone(), out=outside)
        torch.mm(a, weight, out=a)
    assert [product["fresh"] for product in trail.products] == [False] * 3
    assert [product["place"] for product in trail.products] == [0, 1, 0]
    assert trail.layers_seen == 1
    assert trail.copies == 1
    assert trail.clobbered == [0]
    assert [row["born"] for row in trail.storages] == [False, True, False]


def test_trail_counts_a_storage_that_grows_again() -> None:
    weight, x = torch.randn(8, 4), torch.randn(2, 4)
    trail = Trail([[weight]], [weight, x])
    with torch.no_grad(), trail:
        buffer = torch.empty(0).resize_(2)
        torch.mm(x, weight.t(), out=buffer.resize_(0))
        buffer.resize_(2, 4)  # room enough
    assert [(row["bytes"], row["grew"]) for row in trail.storages] == [(0, None), (8, 0), (64, 1)]


def test_trail_tells_adding_in_place_from_writing_over() -> None:
    """The branch of a block may be added to the block's input, and may not replace it."""
    up, down, x = torch.randn(4, 4), torch.randn(4, 4), torch.randn(2, 4)
    for write_over in (False, True):
        stream, hidden = x.clone(), torch.empty(2, 4)
        trail = Trail([[up], [down]], [up, down, x])
        with torch.no_grad(), trail:
            torch.mm(stream, up, out=hidden)
            if write_over:
                torch.mm(hidden, down, out=stream)
            else:
                stream.addmm_(hidden, down)
        assert trail.replaced == ([0] if write_over else [])
        assert trail.clobbered == []


def test_trail_splits_composite_operators_in_inference_mode() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    trail = Trail([[layer.weight]], [layer.weight, layer.bias, x])
    with torch.inference_mode(), trail:
        layer(x)
    assert [product["op"] for product in trail.products] == ["addmm"]


def test_trail_does_not_import_the_compiler() -> None:
    """`torch._dynamo` costs seconds in every fresh process."""
    code = """
import sys, torch
from labkit.checks._pingpong_trail import Trail
with Trail([], []):
    torch.ones(2).add_(1)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("addmm(): functions with out=... arguments don't support automatic differentiation, but one requires grad.", "grad"),
        ("shape '[8, 40]' is invalid for input of size 64", "widest"),
        ("Inplace update to inference tensor outside InferenceMode is not allowed.", "inference"),
        ("division by zero", None),
    ],
)
def test_typical_errors_have_a_hint(message: str, hint: str | None) -> None:
    assert typical_error({"message": message}) == hint


def test_every_hint_is_a_question_and_is_reached() -> None:
    told = {item.hint for item in WRONGS}
    rare = {"inference", "dtype", "edge"}  # reached by crashes, tested above, or by an edge case
    assert set(HINTS) - told - rare == set()
    for text in HINTS.values():
        assert "?" in text or text.startswith("The contract")
        assert "out=" not in text and "relu_" not in text and "addmm" not in text
    assert {"pingpong.forward", "pingpong.residual", "pingpong.persistent"} <= set(all_checks())

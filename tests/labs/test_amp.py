"""Lab 04: its checks judge what they should, its reference gets everything, what nobody wrote gets nothing, and PyTorch decides alike."""

import math

import pytest
import torch

from labkit.checks import _amp_masters as masters
from labkit.checks import _amp_scaler_judge as judging
from labkit.checks import get_check
from labkit.checks._amp_bench import Bench, play, true_gradients
from labkit.checks._amp_bundle import bundled_cases
from labkit.checks._amp_hints import HINTS, on_error, on_scaler_error
from labkit.checks._core import Case
from tests.labs import corpus
from tests.labs.solutions import solution


def test_plain_versions_earn_a_quarter_at_most() -> None:
    wrongs, _ = corpus.load()
    plain = {"AMP-10 the optimizer steps 16-bit weights", "a fixed scale, every step taken", "plain fp32", "AMP-07 each rank decides alone"}
    for item in wrongs:
        if item.topic == "amp" and item.name in plain:
            verdict = corpus.examine(item.candidate, item.check)
            assert 0 < verdict.points <= verdict.max_points / 4, verdict.as_text()
            plain.discard(item.name)
    assert not plain


def test_using_the_library_is_flagged() -> None:
    def ready(**settings: float) -> object:
        return torch.amp.GradScaler("cpu", **settings)

    verdict = corpus.examine(ready, "amp.scaler")
    assert (verdict.status, verdict.points) == ("flagged", 0), verdict.as_text()


SCRIPT = [{"poison": kind, "at": 1} if kind else {} for kind in ("", "inf", "", "", "", "nan", "-inf", "", "", "", "", "", "", "inf", "")]


@pytest.mark.parametrize("how", ["step", "unscale", "clip"])
def test_reference_decides_as_pytorch(how: str) -> None:
    settings = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    mine, theirs = solution("04").DynamicLossScaler(**settings), torch.amp.GradScaler("cpu", **settings)
    ours, gradients = play(mine, Bench("sgd", 5), SCRIPT, 5, how)
    peers, others = play(theirs, Bench("sgd", 5), SCRIPT, 5, how)
    assert [row["scale"] for row in ours] == [row["scale"] for row in peers]
    assert [row.get("stepped") for row in ours] == [row.get("stepped") for row in peers]
    assert all(torch.equal(gradients[key], others[key]) for key in gradients | others)
    wanted = judging.expected_scales(settings, ["poison" in line for line in SCRIPT])
    assert [row["scale"] for row in peers] == wanted


def test_true_gradients_are_what_backward_gives() -> None:
    bench = Bench("sgd", 3)
    sum((p * g).sum() for p, g in zip(bench.parameters, true_gradients(3, 0), strict=True)).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(bench.parameters, true_gradients(3, 0), strict=True))


@pytest.mark.parametrize(
    ("overflows", "got", "hint"),
    [
        ([True], 1024.0, "no-backoff"),
        ([True], 64.0, "trace"),
        ([False] * 3, 1024.0, "growth"),
        ([False] * 2, 2048.0, "growth"),
        ([False, True, False, False], 1024.0, "tracker"),
        ([True] * 12, 0.25, "no-floor"),
        ([False] * 3, math.inf, "no-cap"),
    ],
)
def test_a_wrong_trace_is_told_by_kind(overflows: list[bool], got: float, hint: str) -> None:
    settings = {"init_scale": 1024.0, "growth_interval": 3}
    right = judging.expected_scales(settings, overflows)
    rows = [{"scale": scale, "told": scale} for scale in (*right[:-1], got)]
    finding = judging.judge_trace(settings, rows, overflows, "scale trace")
    assert (finding.passed, finding.hint) == (False, hint)


@pytest.mark.parametrize(("ratio", "hint"), [(1024.0, "not-divided"), (1 / 1024, "twice"), (0.5, "which-scale"), (1.3, "gradients")])
def test_a_ratio_names_its_fault(ratio: float, hint: str) -> None:
    assert judging._ratio_hint([ratio] * 4, ratio, [512.0, 1024.0, 2048.0], 1) == hint


def test_tiny_updates_stay_within_one_spacing_of_16_bit_numbers() -> None:
    """Else a weight would cross a power of two, and what is an eighth of the spacing would be a quarter."""
    for case in get_check("amp.masters").cases(torch.Generator().manual_seed(0), True):
        for run in case.values["runs"]:
            if run["values"].get("steady"):
                start, end, _ = masters._expected(run["values"])
                assert all((weights.abs() > 1).all() and (weights.abs() < 2).all() for weights in (*start.values(), *end.values()))
                spacing = torch.finfo(masters.DTYPES[run["values"]["dtype"]]).eps
                assert run["values"]["lr"] < spacing / 2


def test_cases_of_the_same_criteria_share_a_process() -> None:
    cases = [Case("a", {"x": 1}, covers=("n",)), Case("b", covers=("m",)), Case("c", {"x": 3}, covers=("n",)), Case("r", world_size=2)]
    bundles = bundled_cases(lambda generator, strict: cases)(torch.Generator(), False)
    assert [bundle.name for bundle in bundles] == ["a, and 1 more", "b", "r"]
    assert [run["name"] for run in bundles[0].values["runs"]] == ["a", "c"]
    assert bundles[2].world_size == 2


def test_crashes_have_their_hints() -> None:
    def told(text: str) -> dict[str, str]:
        return {"type": "RuntimeError", "message": text}

    assert on_error(told("unscale_() has already been called on this optimizer since the last update().")) == "twice"
    assert on_error(told("element 0 of tensors does not require grad and does not have a grad_fn")) == "no-gradients"
    assert on_scaler_error(told("element 0 of tensors does not require grad and does not have a grad_fn")) == "no-graph"
    assert on_error(told("something else")) is None


def test_no_hint_names_a_call_that_is_the_answer() -> None:
    answers = ("all_reduce", "ReduceOp", "isfinite", "clip_grad_norm_", ".float()", "copy_(")
    assert [text for text in HINTS.values() if any(answer in text for answer in answers)] == []
    assert all(text.endswith("?") for text in HINTS.values())


def test_every_hint_belongs_to_a_wrong_implementation() -> None:
    wrongs, _ = corpus.load()
    told = {item.hint for item in wrongs if item.topic == "amp"}
    assert set(HINTS) == told & set(HINTS)

"""Lab 02: its checks judge what they should, its reference gets everything, and what nobody wrote gets nothing."""

import pytest
import torch

from labkit.checks import _checkpointing_nets as nets
from labkit.checks import _checkpointing_plans as plans
from labkit.checks._checkpointing_hints import HINTS, ran_others, random_hint
from labkit.checks._checkpointing_segments import judge_segments, lengths
from labkit.checks._checkpointing_sequential import slope_of
from tests.labs import corpus


@pytest.mark.parametrize(
    ("check", "plain"),
    [
        ("checkpointing.checkpoint", lambda fn, *args: fn(*args)),
        ("checkpointing.sequential", lambda layers, x, segments: nets.plain(layers, x)),
        ("checkpointing.recursive", lambda layers, x: nets.plain(layers, x)),
        ("checkpointing.best-segments", lambda costs: round(len(costs) ** 0.5)),
    ],
)
def test_plain_earns_a_quarter_at_most(check: str, plain: object) -> None:
    verdict = corpus.examine(plain, check)
    assert 0 < verdict.points <= verdict.max_points / 4, verdict.as_text()


def test_using_the_library_is_flagged() -> None:
    from torch.utils.checkpoint import checkpoint

    verdict = corpus.examine(lambda fn, *args: checkpoint(fn, *args, use_reentrant=False), "checkpointing.checkpoint")
    assert (verdict.status, verdict.points) == ("flagged", 0), verdict.as_text()


def test_nets_are_the_same_in_every_process_and_leave_the_random_stream() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two = (nets.make_net("mixed", 10, 7) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters, two.parameters, strict=True))
    assert torch.equal(one.x, two.x)


@pytest.mark.parametrize(("calls", "expected"), [([], []), ([6, 7, 8, 3, 4, 5, 0, 1, 2], [3, 3, 3]), ([2, 1, 0], [1, 1, 1])])
def test_lengths(calls: list[int], expected: list[int]) -> None:
    assert lengths(calls) == expected


def again(*sizes: int) -> list[int]:
    """The order in which the layers of segments of these sizes run again: last segment first."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [index for start, size in reversed(list(zip(starts, sizes, strict=True))) for index in range(start, start + size)]


@pytest.mark.parametrize(
    ("depth", "segments", "sizes", "hint"),
    [
        (10, 4, (3, 3, 2, 2), None),
        (10, 4, (2, 2, 2), None),  # the last four run plainly, as PyTorch's do
        (10, 4, (3, 3, 3), None),  # the last one runs plainly
        (10, 4, (2, 2, 2, 4), "remainder"),
        (9, 6, (2, 2, 2, 2, 1), None),  # rounded up
        (10, 4, (2,) * 5, None),  # rounded down
        (64, 48, (2,) * 32, None),
        (64, 8, (1,) * 64, "count"),
        (12, 4, (3, 3), "plain-segments"),
        (12, 4, (), "plain"),
    ],
)
def test_segments_are_judged_as_the_contract_says(depth: int, segments: int, sizes: tuple[int, ...], hint: str | None) -> None:
    finding = judge_segments([{"depth": depth, "segments": segments, "backward": again(*sizes)}])
    assert (finding.passed, finding.hint) == (hint is None, hint)


def test_other_layers_than_at_first_are_noticed() -> None:
    assert ran_others([3, 4, 5, 3, 4, 5], 6)
    assert not ran_others(again(3, 3), 6)
    assert not ran_others(again(3), 6)


def test_slope_of_a_square_root() -> None:
    assert slope_of([{"depth": n, "peak": 100 * n**0.5} for n in (16, 36, 64, 144)]) == pytest.approx(0.5)


def test_random_hint_tells_why_masks_differ() -> None:
    forward = [["forward", 0, True, 10, 20, ""], ["forward", 1, True, 20, 30, ""]]
    assert random_hint([*forward, ["backward", 0, True, 30, 40, ""]]) == "random-when"
    assert random_hint([*forward, ["backward", 0, True, 99, 40, ""]]) == "random-replay"
    assert random_hint([*forward, ["backward", 0, False, 10, 20, ""]]) == "mode"
    assert random_hint([*forward, ["backward", 0, True, 10, 20, ""]], output_differs=True) == "random-first"


def test_difference_names_the_fault() -> None:
    net = nets.make_net("silu", 4, 1)
    right = nets.run_step(net, nets.plain, 0)
    assert nets.difference(net, right, right) is None
    doubled = right | {"parameters": right["parameters"] * 2}
    assert nets.difference(net, right, doubled) == ("parameter gradients are 2 times the plain run's", "scaled")
    assert nets.difference(net, right, right | {"x": torch.zeros_like(right["x"])})[1] == "input-grad"
    assert nets.difference(net, right, right | {"parameters": torch.zeros_like(right["parameters"])})[1] == "parameter-grads"
    rounded = right | {"parameters": right["parameters"].bfloat16().float()}
    assert nets.difference(net, right, rounded)[1] == "gradients"


@pytest.mark.parametrize(("inside", "best"), [(1, 8), (10, 25), (0.01, 1)])
def test_best_number_of_segments(inside: float, best: int) -> None:
    costs = [(100, 100 * inside)] * 64
    assert plans.near_best(costs, best)[0]
    assert not plans.near_best(costs, 64)[0]


def test_all_plans_are_all() -> None:
    assert sorted(plans.all_plans(3)) == [[1, 1, 1], [1, 2], [2, 1], [3]]


def test_no_hint_names_a_call_that_is_the_answer() -> None:
    answers = ("fork_rng", "set_rng_state", "enable_grad", "detach(", "torch.autocast", "save_for_backward")
    assert not [key for key, hint in HINTS.items() for answer in answers if answer in hint]
    assert all(hint.rstrip().endswith("?") for hint in HINTS.values())

"""`measure_steps`: several wrappers by turns in the same ranks, and what is hidden of the wire."""

import sys
from functools import partial
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch import nn

from labkit.ranks import Link
from labkit.replicas import Step, measure_steps
from tests.labs.solutions import solution

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


class Alone(nn.Module):
    """No finish."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_wrappers_take_turns_and_are_recorded_on_every_rank() -> None:
    ours = partial(solution("07").DataParallel, bucket_bytes=1)
    told = measure_steps({"alone": Alone, "ours": ours}, small, (4, 16), link=Link(1e6, 1e-3), steps=2)
    assert list(told) == ["alone", "ours"] and all(len(steps) == 2 for steps in told.values())
    for step in told["ours"]:
        assert step.messages() == (4, 2 * 4 * (16 * 16 + 16)) and len(step.recordings) == len(step.backward) == 2
        wire, backward, during = step.hidden()
        assert wire >= 2e-3 and 0 <= during <= min(wire, backward) + 1e-9 and step.seconds > backward  # latencies overlap
    assert told["alone"][0].messages() == (0, 0)


def recorded(clock_s: float, *spans: tuple[float, float]) -> SimpleNamespace:
    rows = [SimpleNamespace(start_s=start, end_s=end, payload_bytes=8) for start, end in spans]
    return SimpleNamespace(clock_s=clock_s, comm=lambda kind: rows)


@pytest.mark.parametrize(
    ("spans", "hidden"),
    [
        ([(2, 4), (4, 6)], (4, 3, 2)),
        ([(5, 9)], (4, 3, 0)),
        ([(0, 2)], (2, 3, 1)),
        ([(0, 9)], (9, 3, 3)),
        ([], (0, 3, 0)),
        ([(2, 5), (3, 4), (3, 6)], (4, 3, 2)),
    ],
)
def test_what_is_hidden_is_on_the_wire_during_backward(spans: list[tuple[float, float]], hidden: tuple[float, float, float]) -> None:
    early, late = recorded(10.0, (0, 0.5)), recorded(10.5, *spans)
    assert Step(9.0, [(1, 4), (1, 4)], [early, late]).hidden() == pytest.approx(hidden)  # the later one's

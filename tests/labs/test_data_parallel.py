"""Lab 07: its checks judge what they should, and what nobody wrote gets nothing."""

import contextlib
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.checks import _data_parallel_messages as messages
from labkit.checks import _data_parallel_steps as steps
from labkit.checks._core import Observation
from labkit.checks._data_parallel_hints import HINTS
from labkit.checks._data_parallel_late import LateWork
from labkit.checks._data_parallel_nets import build, expected_steps, trainable
from labkit.ranks import run_ranks
from tests.labs import corpus, ddp_adapter

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Plain:
    """Right numbers, no technique."""

    def __init__(self, module: nn.Module, bucket_bytes: int = 0, ahead: int = 0) -> None:
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, 0)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def finish(self) -> None:
        for p in self.module.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


class Nothing(Plain):
    def __init__(self, module: nn.Module, bucket_bytes: int = 0, ahead: int = 0) -> None:
        self.module = module

    def finish(self) -> None:
        pass

    def no_sync(self) -> object:
        return contextlib.nullcontext()


@pytest.mark.parametrize("check", ["data_parallel.overlap", "data_parallel.priority"])
def test_plain_earns_a_quarter_at_most(check: str) -> None:
    verdict = corpus.examine(Plain, check, strict=False)
    assert 0 < verdict.points <= verdict.max_points / 4, verdict.as_text()
    assert verdict.failed in ("overlap", "priority")


@pytest.mark.parametrize("check", ["data_parallel.overlap", "data_parallel.no-sync", "data_parallel.priority"])
def test_a_wrapper_that_does_nothing_earns_nothing(check: str) -> None:
    verdict = corpus.examine(Nothing, check, strict=False)
    assert verdict.points == 0, verdict.as_text()


@pytest.mark.parametrize(
    ("weights", "rank", "hint"),
    [((1, 0, 0), 0, "local"), ((0, 0, 1 / 3), 2, "local"), ((1, 1, 1), 0, "sum"), ((1 / 9,) * 3, 0, "small"), ((2 / 3,) * 3, 0, "twice"),
     ((1 / 3, 0, 1 / 3), 1, "missing"), ((1 / 3,) * 3, 0, "precision"), ((0, 0, 0), 1, "missing")],
)  # fmt: skip
def test_what_a_mean_is_made_of(weights: tuple[float, ...], rank: int, hint: str) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(40, generator=generator) for _ in range(3)]
    observed = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    assert steps.why(observed, parts, rank, late=False) == hint
    assert steps.why(torch.randn(40, generator=generator), parts, rank, late=False) == "garbage"


def test_the_mean_of_users_has_its_own_hint() -> None:
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(40, generator=generator), torch.zeros(40), torch.randn(40, generator=generator)]
    assert steps.why((parts[0] + parts[2]) / 2, parts, 0, late=False) == "users"


def test_expected_steps_are_the_full_batch() -> None:
    """The mean of the ranks' gradients is the gradient of all their rows in one batch."""
    from labkit.checks._data_parallel_nets import batch

    told = expected_steps("chain", 5, 3, [[""]], 0.1)[0]["mean"]
    net, rows, targets = build("chain", 5, 0), [], []
    for rank in range(3):
        x, _, generator = batch("chain", 5, rank, 0)
        rows.append(x)
        targets.append(torch.randn((5, 3), generator=generator, dtype=torch.float64).float())
    (net(torch.cat(rows)) - torch.cat(targets)).square().mean().backward()
    for key, p in net.named_parameters():
        torch.testing.assert_close(p.grad, told[key])


def test_sizes_tell_parameters_apart() -> None:
    sizes = [p.nbytes for p in trainable("chain").values()]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize(
    ("rows", "at_last", "hint"),
    [
        ([["all_reduce", 900, True]] * 3, 2, None),
        ([["all_reduce", 900, True]] * 3, 0, "late"),
        ([["all_reduce", 400, True]] * 6, 1, "held"),
        ([["all_reduce", 900, False]] * 3, 2, "blocks"),
        ([["all_reduce", 900, True], ["wait", 0, True]] * 3, 4, "blocks"),
    ],
)
def test_overlap_is_judged_by_order(rows: list[list], at_last: int, hint: str | None) -> None:
    row = {"rows": rows, "at_last": at_last, "behind": len(rows)}
    one = Observation({"rows": [{"steps": [row, row]}]})
    seen = Observation(ranks=[one, one])
    finding = messages.judge_overlap("overlap", {"steps": [[""], [""]]}, seen, 0, "somewhere")
    assert (finding.passed, finding.hint) == (hint is None, hint)


def test_a_late_result_arrives_at_the_wait() -> None:
    class Done:
        def wait(self) -> bool:
            return True

    given, faults = torch.ones(3), []
    work = LateWork(Done(), [given], [given.clone()], [torch.full((3,), 7.0)], faults)
    assert given.tolist() == [1, 1, 1]
    work.wait()
    given += 1  # it is the caller's again
    work.wait()
    assert given.tolist() == [8, 8, 8] and not faults
    given = torch.ones(3)
    work = LateWork(Done(), [given], [given.clone()], [given.clone()], faults)
    given /= 2
    work.wait()
    assert faults == ["late-write"]


def adapted(seed: int) -> tuple[torch.Tensor, list[str]]:
    torch.manual_seed(seed + dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))
    ddp = ddp_adapter.wrap(model, bucket_size_mb=0.0001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(9)
    inputs, targets = torch.randn(3, 8, 6, generator=generator), torch.randn(3, 8, 2, generator=generator)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for step in range(3):
        ddp_adapter.train_step(ddp, optimizer, nn.functional.mse_loss, inputs[step, mine], targets[step, mine])
    return nn.utils.parameters_to_vector(model.parameters()).detach(), list(model.state_dict())


def test_the_adapter_trains_as_one_process_does() -> None:
    (ours, names), (theirs, _) = run_ranks(adapted, 2, 3).values
    assert torch.equal(ours, theirs) and names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(9)
    inputs, targets = torch.randn(3, 8, 6, generator=generator), torch.randn(3, 8, 2, generator=generator)
    for step in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[step]), targets[step]).backward()
        optimizer.step()
    torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), ours)


def test_hints_ask() -> None:
    answers = ("async_op=True", "zeros_like", "register_", "manual_seed", "torch.cat", "try:")
    assert all(hint.rstrip().endswith("?") for hint in HINTS.values())
    assert not [key for key, hint in HINTS.items() for answer in answers if answer in hint]

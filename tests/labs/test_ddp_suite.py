"""What an outside suite asks of a data-parallel wrapper, through the adapter: ranks seeded differently, a tied and a frozen weight,
disjoint data, several steps, modules that know nothing of it. The names called are those of CS336's second assignment; the tests are
our own.
"""

import sys
from collections.abc import Callable
from copy import deepcopy

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.ranks import run_ranks
from labkit.recorder import Recorder
from tests.labs import ddp_adapter as adapters

ROWS, STEPS = 8, 4
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Toy(nn.Module):
    """No biases but one, and a parameter that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(10, 13, bias=False), nn.Linear(13, 47), nn.Linear(47, 5, bias=False)
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


class Tied(Toy):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third, self.fourth = nn.Linear(13, 13), nn.Linear(13, 13, bias=False), nn.Linear(13, 5)
        self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fourth(self.third(torch.relu(self.second(torch.relu(self.first(x))))))


class Encoder(nn.Module):
    """PyTorch's own encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(10, 2, 24, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x.unsqueeze(1)).squeeze(1))


class Residual(nn.Module):
    """A small image network with skips, normalisation by groups, activations in place and grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 6), nn.SiLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1, groups=3)) for _ in range(3)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.view(-1, 1, 2, 5))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A GRU that is walked through twice per forward, so every parameter is used many times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 7), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for part in (*x.split(5, 1), *x.split(5, 1)):
            state = self.cell(part, state)
        return self.head(state)


MODELS = [Toy, Tied, Encoder, Residual, Recurrent]


def _data(step: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' rows of a step: (world * ROWS, 10) and (world * ROWS, 5)."""
    generator = torch.Generator().manual_seed(40 + step)
    return torch.randn(world * ROWS, 10, generator=generator), torch.randn(world * ROWS, 5, generator=generator)


def _train(kind: type[nn.Module], bucket_size_mb: float | None, individual: bool) -> list[str]:
    """On every rank: what is wrong, as lines; compared with a plain copy that sees all ranks' rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    plain = kind()
    base = deepcopy(plain)
    ddp = adapters.get_ddp_individual_parameters(base) if individual else adapters.get_ddp_bucketed(base, bucket_size_mb)
    wrong = []
    start = [p.detach().clone() for p in ddp.parameters()]
    if rank == 0 and not all(map(torch.equal, plain.parameters(), start)):
        wrong.append("rank 0 has changed at the start")
    if not _equal_everywhere(ddp):
        wrong.append("ranks start differently")
    plain.load_state_dict(ddp.module.state_dict())  # from rank 0
    ours = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if not individual:
            adapters.ddp_bucketed_on_train_batch_start(ddp, ours)
        inputs, targets = _data(step, world)
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        nn.functional.mse_loss(ddp(inputs[mine]), targets[mine]).backward()
        after = adapters.ddp_individual_parameters_on_after_backward if individual else adapters.ddp_bucketed_on_after_backward
        after(ddp, ours)
        ours.step()
        theirs.step()
        for (name, a), b in zip(plain.named_parameters(), ddp.parameters(), strict=True):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
                wrong.append(f"step {step}: {name} is off by {(a - b).abs().max():.2g}")
    if not any((a - b).abs().max() > 1e-3 for a, b in zip(start, ddp.parameters(), strict=True)):
        wrong.append("nothing was trained")
    if not _equal_everywhere(ddp):
        wrong.append("ranks end with different bits")
    return wrong


def _equal_everywhere(model: nn.Module) -> bool:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    return all(torch.equal(flat, other) for other in parts)


@pytest.mark.parametrize("kind", MODELS)
def test_individual_parameters(kind: type[nn.Module]) -> None:
    assert run_ranks(_train, 2, kind, None, True).values == [[], []]


@pytest.mark.parametrize("bucket_size_mb", [0.0016, 0.0001, 0.01, None])
@pytest.mark.parametrize("kind", MODELS)
def test_buckets(kind: type[nn.Module], bucket_size_mb: float | None) -> None:
    world = 3 if bucket_size_mb == 0.0016 else 2
    assert run_ranks(_train, world, kind, bucket_size_mb, False).values == [[]] * world


def _messages(make: Callable[[nn.Module], adapters.Adapted]) -> tuple[list[int], int]:
    torch.manual_seed(dist.get_rank())
    ddp = make(Tied())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = _data(0, 1)
    adapters.train_step(ddp, optimizer, nn.functional.mse_loss, inputs, targets)
    with Recorder() as recorder:
        adapters.train_step(ddp, optimizer, nn.functional.mse_loss, inputs, targets)
        with ddp.no_sync():
            nn.functional.mse_loss(ddp(inputs), targets).backward()
    sizes = [row.payload_bytes for row in recorder.recording.comm("all_reduce")]
    return sizes, sum(p.nbytes for p in ddp.parameters() if p.requires_grad)


def test_every_gradient_is_sent_once_and_no_sync_sends_none() -> None:
    (one_each, total), (_, _) = run_ranks(_messages, 2, adapters.get_ddp_individual_parameters).values
    assert len(one_each) == 5 and sum(one_each) == total  # first; second's weight, the third's too; its bias; fourth's weight and bias
    (one, total), (_, _) = run_ranks(_messages, 2, adapters.wrap).values
    assert one == [total]


def _unused(step_branches: list[list[int]]) -> torch.Tensor:
    """Ranks use other branches; returns the weights after the steps."""
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleList([nn.Linear(10, 5), nn.Linear(10, 5)])
    ddp = adapters.wrap(model, 0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, branches in enumerate(step_branches):
        inputs, targets = _data(step, 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model[branches[dist.get_rank()]](inputs), targets).backward()  # past the wrapper: hooks do not mind
        ddp.finish()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_ranks_that_use_different_branches_stay_equal() -> None:
    ours, theirs = run_ranks(_unused, 2, [[0, 1], [1, 1], [0, 0], [1, 0]]).values
    assert torch.equal(ours, theirs)

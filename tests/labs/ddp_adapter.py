"""A thin adapter: an outside suite for data-parallel wrappers can be pointed at lab 07's reference.

    ddp = wrap(model, bucket_size_mb=1.0)      # on every rank, torch.distributed initialised
    loss = train_step(ddp, optimizer, loss_fn, inputs, targets)
    # or: loss_fn(ddp(inputs), targets).backward(); ddp.finish(); optimizer.step()

The wrapper is a Module whose `module` is the model; `finish_gradient_synchronization` is another name for `finish`. Below are the names
that Stanford CS336's second assignment expects of its `tests/adapters.py`, of this year's edition and of earlier ones.
"""

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn

from tests.labs.solutions import solution

Accumulating = solution("07").Accumulating
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else every rank reads and executes the lab again


class Adapted(nn.Module):
    """Lab 07's `Accumulating` behind the names that suites use."""

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        super().__init__()
        self.module = model
        self._replica = Accumulating(model, bucket_bytes=bucket_bytes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._replica(*args, **kwargs)

    def finish(self) -> None:
        """Wait for what is on its way; gradients are means over the ranks afterwards."""
        self._replica.finish()

    finish_gradient_synchronization = finish

    def no_sync(self) -> Any:
        return self._replica.no_sync()


def wrap(model: nn.Module, bucket_size_mb: float | None = 1.0) -> Adapted:
    """The reference around `model`, with buckets of about `bucket_size_mb` MB (1e6 bytes); None: one bucket per dtype."""
    return Adapted(model, 10**15 if bucket_size_mb is None else max(1, int(bucket_size_mb * 1e6)))


def train_step(
    ddp: Adapted, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """One step on this rank's share of the batch; returns its loss."""
    optimizer.zero_grad()
    loss = loss_fn(ddp(inputs), targets)
    loss.backward()
    ddp.finish()
    optimizer.step()
    return loss.detach()


# -- CS336's names --


def get_ddp(module: nn.Module) -> Adapted:
    return wrap(module)


def get_ddp_individual_parameters(module: nn.Module) -> Adapted:
    """A bucket, so a message, for each parameter."""
    return Adapted(module, 1)


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> Adapted:
    return wrap(module, bucket_size_mb)


def ddp_on_after_backward(ddp_model: Adapted, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


ddp_individual_parameters_on_after_backward = ddp_bucketed_on_after_backward = ddp_on_after_backward


def ddp_bucketed_on_train_batch_start(ddp_model: Adapted, optimizer: torch.optim.Optimizer) -> None:
    """Nothing to do: `finish` has left everything as at the beginning."""

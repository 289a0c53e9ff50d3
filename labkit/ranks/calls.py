"""The collectives of a `ProcessGroup` as data: their methods, their tensors, private copies, and gloo's own names for them."""

from typing import Any

import torch
import torch.distributed as dist

from labkit.recorder._comm import kind_of

METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier",
)
# gloo's own name where it differs; a pair says that gloo takes the tensors one by one.
_AT_GLOO: dict[str, str | tuple[str]] = {
    "all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base", "all_to_all_single": "alltoall_base",
    "allgather_into_tensor_coalesced": ("_allgather_base",), "all_gather_single_coalesced": ("_allgather_base",),
    "reduce_scatter_tensor_coalesced": ("_reduce_scatter_base",), "reduce_scatter_single_coalesced": ("_reduce_scatter_base",),
}


def kind(method: str) -> str:
    """The collective's plain name."""
    return "all_to_all" if method.startswith("all_to_all") else kind_of(method)


def run(gloo: dist.ProcessGroupGloo, method: str, args: tuple, kwargs: dict) -> list:
    """Have gloo do it; the works to wait for."""
    name = _AT_GLOO.get(method, method)
    if isinstance(name, str):
        return [getattr(gloo, name)(*args, **kwargs)]
    (name,), (outputs, inputs, *rest) = name, args
    return [getattr(gloo, name)(out, given, *rest, **kwargs) for out, given in zip(outputs, inputs, strict=True)]


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []


def copied(value: Any) -> Any:
    """The same structure with private, contiguous copies on the CPU; what is no tensor stays."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return [copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def put(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Write results where the caller wants them."""
    for target, value in zip(targets, values, strict=True):
        target.data.copy_(value)  # through .data, as gloo writes: unseen by autograd's version counters

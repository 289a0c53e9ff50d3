"""Reading what a learner's function of lab 03 returned: a tensor, a list, numpy or plain numbers are all the same."""

import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.checks._core import WrongResult


def _told(value: Any) -> str:
    """What came back, in a few words."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} tensor"
    return f"a {type(value).__name__}"


def _plain(item: Any) -> Any:
    return item.item() if hasattr(item, "item") else item


def as_tensor(value: Any, count: int, who: str) -> torch.Tensor:
    """`value` as a (count,) tensor: of a tensor's or array's own type, float64 or int64 of a list. Raises WrongResult for anything else."""
    wanted = f"expected ({count},) numbers, one for each given"
    tensor = value
    if not isinstance(value, torch.Tensor):
        try:
            if hasattr(value, "__array__") or hasattr(value, "dtype"):
                tensor = torch.as_tensor(value)
            else:
                items = [_plain(item) for item in value]
                whole = all(isinstance(item, int) for item in items)
                tensor = torch.tensor(items if whole else [float(item) for item in items], dtype=torch.int64 if whole else torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise WrongResult(f"{who} returned {_told(value)}, {wanted}") from None
    if tensor.is_complex() or tensor.dtype == torch.bool or tensor.numel() != count:
        raise WrongResult(f"{who} returned {_told(tensor)}, {wanted}")
    return tensor.detach().reshape(count)


def as_numbers(value: Any, count: int, who: str) -> torch.Tensor:
    """`value` as (count,) float64. Raises WrongResult for 16-bit numbers: what is computed with them is rounded again."""
    tensor = as_tensor(value, count, who)
    if tensor.is_floating_point() and tensor.itemsize < 4:
        raise WrongResult(f"{who} returned {_told(tensor)}, expected float32 or float64")
    return tensor.to(torch.float64)


def as_patterns(value: Any, count: int, who: str) -> torch.Tensor:
    """`value` as (count,) int64. Raises WrongResult for what is not whole."""
    tensor = as_tensor(value, count, who)
    if tensor.is_floating_point() and not bool((tensor == tensor.round()).all()):
        raise WrongResult(f"{who} returned numbers that are not whole, expected bit patterns", "patterns")
    return tensor.to(torch.int64)


def as_number(value: Any, who: str) -> float:
    """`value` as a float, nan and infinity included."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        raise WrongResult(f"{who} returned {_told(value)}, expected a number") from None


def call(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result on copies of its tensors, so that one that writes into its arguments changes nothing of the judge's."""
    return function(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))

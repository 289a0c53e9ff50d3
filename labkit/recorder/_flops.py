"""FLOPs of products that PyTorch's registry leaves out: with vectors, sums of batches, a product with its activation.

Two per multiplication and addition, as the registry counts `mm`: a (m, k) by (k, n) product has 2 m k n.
"""

from collections.abc import Callable

import torch


def _matrices(a: torch.Tensor, b: torch.Tensor) -> int:
    """(..., m, k) by (..., k, n)."""
    return 2 * a.numel() * b.shape[-1]


# The same formula serves an operator, its out= variant and its in-place one; the latter two get the former's arguments.
PRODUCTS: dict[str, Callable[..., int]] = {
    "aten.mv": lambda matrix, vector, **more: 2 * matrix.numel(),
    "aten.addmv": lambda start, matrix, vector, **more: 2 * matrix.numel(),
    "aten.dot": lambda a, b, **more: 2 * a.numel(),
    "aten.vdot": lambda a, b, **more: 2 * a.numel(),
    "aten.addbmm": lambda start, a, b, **more: _matrices(a, b),
    "aten._addmm_activation": lambda start, a, b, **more: _matrices(a, b),
    "aten._int_mm": lambda a, b, **more: _matrices(a, b),
    "aten.addr": lambda start, a, b, **more: 2 * a.numel() * b.numel(),
    "aten.linear": lambda x, weight, bias=None, **more: 2 * x.numel() * weight.shape[0],  # with out=, which is not split
}

"""What fake tensors get wrong below the dispatcher: converting modules, addresses, and ways to numbers past the operators."""

import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ._errors import PaperScaleError


def patches(stack: ExitStack) -> None:
    """Put them in until the stack unwinds."""
    for owner, name, value in (
        (torch.nn.Module, "_apply", lambda module, fn, recurse=True: _convert(module, fn, recurse, {})),
        (torch.UntypedStorage, "data_ptr", _address_of(torch.UntypedStorage.data_ptr)),
        (FakeTensor, "data_ptr", _data_ptr),
        (FakeTensor, "__deepcopy__", _deepcopy),
        (FakeTensor, "__format__", _format),
        (FakeTensor, "tolist", _tolist),
        (torch.Tensor, "tolist", _for_real(torch.Tensor.tolist)),
        (torch.Tensor, "numpy", _for_real(torch.Tensor.numpy)),
        (FakeTensor, "numpy", _numpy),
        # The error that an operator raises says it all; its log repeats it with a traceback through PyTorch.
        (logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
    ):
        missing = object()
        before = vars(owner).get(name, missing)
        setattr(owner, name, value)
        if before is missing:
            stack.callback(delattr, owner, name)
        else:
            stack.callback(setattr, owner, name, before)


def _convert(module: torch.nn.Module, fn: Callable, recurse: bool, moved: dict) -> torch.nn.Module:
    """As Module._apply, for fake parameters: each stays the object that it is, so that optimizers and ties hold.

    Only a parameter without a device (on "meta") gives way to another; `moved` remembers which, for those tied to it.
    """
    if recurse:
        for child in module.children():
            _convert(child, fn, recurse, moved)
    for name, param in module._parameters.items():
        if param is None:
            continue
        if param in moved:
            module._parameters[name] = moved[param]
            continue
        for tensor in (param, param.grad) if param.grad is not None else (param,):
            with torch.no_grad():
                changed = fn(tensor)
            if tensor.device != changed.device:
                module._parameters[name] = moved[param] = torch.nn.Parameter(changed, param.requires_grad)
                break
            if changed is not tensor:
                tensor.data = changed
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _address_of(plain: Callable) -> Callable:
    """Fake storages all lie at 0: their own identity tells them apart as addresses do."""

    def data_ptr(storage: torch.UntypedStorage) -> int:
        return storage._cdata if storage.device.type == "meta" else plain(storage)

    return data_ptr


def _data_ptr(tensor: FakeTensor) -> int:
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size() if tensor.numel() else 0


def _deepcopy(tensor: FakeTensor, memo: dict) -> FakeTensor:
    """As of a real tensor; PyTorch's own would copy the whole mode along."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("only tensors that are graph leaves can be deep-copied")
    copied = tensor.detach().clone()
    copied = torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied
    memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = _deepcopy(tensor.grad, memo)
    return copied


def _format(tensor: FakeTensor, spec: str) -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 and spec else object.__format__(tensor, spec)


def _for_real(plain: Callable) -> Callable:
    def method(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        with unset_fake_temporarily():
            return plain(tensor, *args, **kwargs)

    return method


def _tolist(tensor: FakeTensor) -> object:
    if tensor.dim() == 0:
        return tensor.item()
    raise PaperScaleError(_NUMBERS.format("tolist()"))


def _numpy(tensor: FakeTensor, *, force: bool = False) -> None:
    raise PaperScaleError(_NUMBERS.format("numpy()"))


_NUMBERS = "{} needs real numbers; at paper scale tensors have only sizes"

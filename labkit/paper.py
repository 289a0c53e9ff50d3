"""Paper scale: code run on tensors that have sizes and no numbers, on ranks that answer at once.

    try:
        with paper_scale():
            model = GPT(GPT2_XL)  # 6 GB that nobody allocates
            with Recorder(watch=model) as recorder:
                step(model)
        print(recorder.recording.peak_bytes)
    except PaperScaleError as error:
        print(error)

Everything made inside is a fake tensor (`torch._subclasses.FakeTensorMode`): operators compute shapes and types, and a
`Recorder` counts the bytes as on a laptop. With `ranks` there is a process group whose collectives return at once, so that
one process shows what one rank of many holds and sends.

Where code asks for a number, every unknown one counts as 0: `loss.item()` is 0.0, `if norm > 1` is not taken,
`torch.isfinite(grad).all()` is true, `torch.equal` says True. A tensor made of numbers (`torch.tensor(65536.0)`) keeps them.

What cannot run at all (`tensor.numpy()`, `x[mask]`, whose shape depends on numbers) raises `PaperScaleError`, which names the
line. That costs no points: a notebook's paper-scale cell is given code without a check, and prints the error as above.
Make models and data inside: a real tensor from outside works as an input, but its real bytes are there, too.
"""

import linecache
import operator
import os
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class PaperScaleError(RuntimeError):
    """What cannot run without numbers. The message names the line that asked for them."""


class _Paper(TorchDispatchMode):
    """Answers what fake tensors do not know, and lets operators of real tensors alone run for real."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.answered = False  # whether a made-up number has been given
        self.real: dict[int, weakref.ref] = {}  # real tensors from outside that take gradients

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ANSWERS and any(isinstance(arg, FakeTensor) for arg in args):
            if getattr(args[0], "constant", None) is None:
                self.answered = True
                return _ANSWERS[func](*args)
        tensors = list(_tensors((*args, *kwargs.values())))
        known = [t for t in tensors if not isinstance(t, FakeTensor)]
        for tensor in known:
            if tensor.requires_grad and tensor.is_leaf:
                self.real[id(tensor)] = weakref.ref(tensor)
        if known and len(known) == len(tensors) and func not in _LIFTS:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, FakeTensor) and out.dtype is torch.bool:
            rule = _TRUTHS.get(func.overloadpacket)
            if rule is not None:
                out._paper_truth = bool(rule(*(_value(arg) for arg in args[:2])))
        return out

    def forget(self) -> None:
        """Take fake gradients away from real tensors."""
        for ref in self.real.values():
            tensor = ref()
            if tensor is not None and isinstance(tensor.grad, FakeTensor):
                tensor.grad = None


def _value(thing: object) -> object:
    """The number that a tensor counts as: 0, or for a comparison what it says of zeros."""
    if not isinstance(thing, torch.Tensor):
        return thing
    if isinstance(thing, FakeTensor):
        if thing.constant is not None and thing.numel() == 1:
            return thing.constant.item()
        return getattr(thing, "_paper_truth", False) if thing.dtype is torch.bool else 0
    return 0


def _scalar(tensor: torch.Tensor) -> int | float | bool | complex:
    if tensor.dtype is torch.bool:
        return bool(_value(tensor))
    return 0.0 if tensor.is_floating_point() else 0j if tensor.is_complex() else 0


_ANSWERS = {
    aten._local_scalar_dense.default: _scalar,
    aten.item.default: _scalar,
    aten.equal.default: lambda *args: True,
    aten.allclose.default: lambda *args: True,
}
_LIFTS = {aten.lift.default, aten.lift_fresh.default}
_TRUTHS = {
    aten.eq: operator.eq, aten.ne: operator.ne, aten.lt: operator.lt, aten.le: operator.le, aten.gt: operator.gt,
    aten.ge: operator.ge, aten.isnan: lambda a: False, aten.isinf: lambda a: False, aten.logical_not: operator.not_,
    aten.bitwise_not: operator.not_, aten.logical_and: lambda a, b: a and b, aten.logical_or: lambda a, b: a or b,
    aten.bitwise_and: lambda a, b: a and b, aten.bitwise_or: lambda a, b: a or b, aten.mul: lambda a, b: a and b,
    aten.logical_xor: lambda a, b: bool(a) != bool(b), aten.bitwise_xor: lambda a, b: bool(a) != bool(b),
    aten.all: lambda a, *dim: a, aten.any: lambda a, *dim: a, aten._to_copy: lambda a: a, aten.clone: lambda a: a,
    aten.view: lambda a, *shape: a, aten.select: lambda a, *where: a, aten.detach: lambda a: a,
}  # fmt: skip


def _tensors(values: tuple) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


_active: list[_Paper] = []


@contextmanager
def paper_scale(ranks: int = 1, rank: int = 0) -> Iterator[None]:
    """Run the block on fake tensors and, with `ranks` > 1, as rank `rank` of a process group that is not there.

    Everything is as before when the block ends, however it ends. Inside another `paper_scale` the tensors are the outer one's.
    Raises `PaperScaleError` for what needs numbers, ValueError for a rank that is none, RuntimeError when there is a process
    group already.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} ranks: ranks count from 0")
    with ExitStack() as stack:
        if ranks > 1:
            _enter_group(stack, ranks, rank)
        if not _active:
            paper = _Paper(FakeTensorMode(allow_non_fake_inputs=True))
            _active.append(paper)
            stack.callback(_active.remove, paper)
            stack.callback(paper.forget)
            _enter_patches(stack)
            stack.enter_context(paper.fakes)
            stack.enter_context(paper)
        try:
            yield
        except Exception as error:
            told = _explain(error, _active[0].answered)
            if told is None:
                raise
            raise PaperScaleError(told) from error


def _enter_group(stack: ExitStack, ranks: int, rank: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        raise RuntimeError("there is a process group already; paper_scale(ranks=...) makes one of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    stack.callback(dist.destroy_process_group)


def _enter_patches(stack: ExitStack) -> None:
    def patch(owner: type, name: str, value: object) -> None:
        missing = object()
        before = vars(owner).get(name, missing)
        setattr(owner, name, value)
        if before is missing:
            stack.callback(delattr, owner, name)
        else:
            stack.callback(setattr, owner, name, before)

    plain_pointer = torch.UntypedStorage.data_ptr
    plain_numpy, plain_list = torch.Tensor.numpy, torch.Tensor.tolist

    def _apply(module, fn, recurse=True):
        return _convert(module, fn, recurse, {})

    def storage_pointer(storage):
        return storage._cdata if storage.device.type == "meta" else plain_pointer(storage)

    def pointer(tensor):
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size() if tensor.numel() else 0

    def numpy(tensor, *args, **kwargs):
        tensor = _numbers(tensor, "numpy()")
        with unset_fake_temporarily():
            return plain_numpy(tensor, *args, **kwargs)

    def tolist(tensor):
        if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
            return tensor.item()
        tensor = _numbers(tensor, "tolist()")
        with unset_fake_temporarily():
            return plain_list(tensor)

    def form(tensor, spec):
        return format(tensor.item(), spec) if tensor.dim() == 0 and spec else object.__format__(tensor, spec)

    patch(torch.nn.Module, "_apply", _apply)
    patch(torch.UntypedStorage, "data_ptr", storage_pointer)
    patch(FakeTensor, "data_ptr", pointer)
    patch(torch.Tensor, "numpy", numpy)
    patch(torch.Tensor, "tolist", tolist)
    patch(FakeTensor, "tolist", tolist)
    patch(FakeTensor, "__format__", form)


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
            if changed is tensor:
                continue
            if not isinstance(tensor, FakeTensor):
                raise PaperScaleError("a model from outside cannot be converted; make it inside the block")
            if tensor.device == changed.device:
                tensor.data = changed
            else:
                module._parameters[name] = moved[param] = torch.nn.Parameter(changed, param.requires_grad)
                break
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _numbers(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The real tensor behind one that knows its numbers. Raises `PaperScaleError` for others."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    if tensor.constant is not None:
        return tensor.constant
    raise PaperScaleError(f"{what} needs real numbers; at paper scale tensors have only sizes")


def _explain(error: Exception, answered: bool) -> str | None:
    """The message for people, or None for an error that has nothing to do with paper scale."""
    if isinstance(error, PaperScaleError):
        what = str(error)
    elif isinstance(error, DynamicOutputShapeException):
        what = f"the shape of what {_op(error)} returns depends on numbers; at paper scale tensors have only sizes"
    elif isinstance(error, DataDependentOutputException):
        what = f"{_op(error)} needs real numbers; at paper scale tensors have only sizes"
    elif isinstance(error, (UnsupportedFakeTensorException, UnsupportedOperatorException)):
        what = f"{_op(error)} does not run without numbers; at paper scale tensors have only sizes"
    elif answered and isinstance(error, (ZeroDivisionError, ValueError)) and _is_arithmetic(error):
        what = f"{error}: at paper scale .item() answers 0, since tensors have only sizes"
    else:
        return None
    where = _learners_line(error.__traceback__)
    return f"{where}: {what}" if where else what


def _is_arithmetic(error: Exception) -> bool:
    return isinstance(error, ZeroDivisionError) or "math domain" in str(error) or "expected a" in str(error)


def _op(error: Exception) -> str:
    return str(getattr(error, "func", error)).split("\n")[0].removesuffix(".default")


_LIBRARIES = tuple(
    str(Path(path).resolve()) + os.sep
    for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), Path(torch.__file__).parent, Path(__file__).parent}
)


def _learners_line(traceback: TracebackType | None) -> str:
    """Where the learner's own code was: "line 3 of your cell, `y = x.numpy()`"."""
    found = ""
    while traceback is not None:
        name, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        if not str(Path(name).resolve()).startswith(_LIBRARIES) and not name.startswith("<frozen"):
            cell = "ipykernel" in name or name.startswith("<")
            text = linecache.getline(name, line).strip()
            found = f"line {line} of {'your cell' if cell else Path(name).name}" + (f", `{text}`" if text else "")
        traceback = traceback.tb_next
    return found

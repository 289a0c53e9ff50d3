"""The dispatch mode above the fake one: it answers what fake tensors do not know."""

import operator
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Answers(TorchDispatchMode):
    """Answers questions for numbers, and lets operators of real tensors alone run for real."""

    def __init__(self) -> None:
        super().__init__()
        self.made_up = False  # whether a number has been made up
        self.real: dict[int, weakref.ref] = {}  # real tensors from outside that take gradients

    def dispatch(self, func, types, args=(), kwargs=None):
        """Run one operator, or answer it."""
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        fakes = reals = 0
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, FakeTensor):
                    fakes += 1
                elif isinstance(item, torch.Tensor):
                    reals += 1
                    if item.requires_grad and item.is_leaf:
                        self.real[id(item)] = weakref.ref(item)
        if reals and not fakes or func.overloadpacket in _SERIES and func(*args, **kwargs).numel() <= _SHORT:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _ANSWERS:
            self.made_up = True
            return _ANSWERS[func](*args)
        rule = _RULES.get(func.overloadpacket)
        if rule is None:
            if func in _FILLS and not hasattr(args[0], "_paper_number"):
                return args[0]
            return func(*args, **kwargs)
        number = rule(*(_number(arg) for arg in args))
        out = func(*args, **kwargs)
        if func.overloadpacket is aten.sum:
            number = number * args[0].numel() // max(out.numel(), 1)
        if isinstance(out, FakeTensor) and (number or hasattr(out, "_paper_number")):
            out._paper_number = number
        return out

    def take_back(self) -> None:
        """Take fake gradients away from real tensors."""
        for ref in self.real.values():
            tensor = ref()
            if tensor is not None and isinstance(tensor.grad, FakeTensor):
                tensor.grad = None


# torch.compile's wrapper around a mode's method costs more than the method: set after the class is made, it stays away.
Answers.__torch_dispatch__ = Answers.dispatch


def _number(thing: object) -> object:
    """What a tensor counts as: the number that it was made of, what a comparison says of zeros, or 0."""
    if isinstance(thing, FakeTensor):
        return getattr(thing, "_paper_number", 0)
    if isinstance(thing, torch.Tensor):
        with unset_fake_temporarily():
            return thing.item() if thing.numel() == 1 else 0
    return [_number(item) for item in thing] if isinstance(thing, (list, tuple)) else thing


def _scalar(tensor: FakeTensor) -> int | float | bool | complex:
    number = _number(tensor)
    return bool(number) if tensor.dtype is torch.bool else float(number) if tensor.is_floating_point() else number


def _first(number: object, *rest: object) -> object:
    return number


_DEVICE = torch.ops.prim.device.default
# Indices are often made as tensors: short series keep their numbers, as torch.tensor(...) does.
_SERIES, _SHORT = {aten.arange, aten.linspace, aten.logspace}, 4096
# Numbers that nobody will know need not be drawn: this saves half the time of making a model.
_FILLS = {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar}
_ANSWERS = {
    aten._local_scalar_dense.default: _scalar,
    aten.item.default: _scalar,
    aten.equal.default: lambda *args: True,
    aten.allclose.default: lambda *args: True,
}
# Numbers of what comparisons and their like return, from the numbers of their arguments: enough for a scaler's question,
# whether all gradients are finite, in any of its usual forms.
_RULES = {
    aten.eq: operator.eq, aten.ne: operator.ne, aten.lt: operator.lt, aten.le: operator.le, aten.gt: operator.gt,
    aten.ge: operator.ge, aten.isclose: lambda *args: True,
    aten.logical_not: operator.not_, aten.bitwise_not: operator.not_,
    aten.stack: lambda parts, *dim: all(parts), aten.cat: lambda parts, *dim: all(parts),
    aten.full: lambda size, value: value, aten.ones: lambda size: 1,
}  # fmt: skip
for _same in "all any min max amin amax mean prod sum _to_copy clone detach view select unsqueeze squeeze".split():
    _RULES[getattr(aten, _same)] = _first
for _name, _rule in {"and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: bool(a) != bool(b)}.items():
    for _kind in ("logical", "bitwise"):
        _RULES[getattr(aten, f"{_kind}_{_name}")] = _RULES[getattr(aten, f"{_kind}_{_name}_")] = _rule
_RULES[aten.mul] = _RULES[aten.mul_] = operator.mul

"""Which storages are parameters, gradients, optimizer state and inputs: found by looking at what is watched."""

import weakref
from collections.abc import Iterator

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from . import categories as cat
from ._log import Log
from ._mode import parts


class Watch:
    """The watched modules, optimizers and tensors, held weakly: watching keeps nothing alive."""

    def __init__(self) -> None:
        self.modules: list[tuple[str, weakref.ref]] = []
        self.optimizers: list[tuple[str, weakref.ref]] = []
        self.tensors: list[tuple[str, weakref.ref]] = []
        self.module_names = ["", ""]  # by number; 0 is outside any module, 1 inside one that is not watched

    def add(self, things: object) -> None:
        """Watch one module, optimizer or tensor, a list of them, or a dict from name to them.

        Raises TypeError for anything else.
        """
        for name, thing in _named(things):
            if isinstance(thing, torch.nn.Module):
                self.modules.append((name, weakref.ref(thing)))
            elif hasattr(thing, "param_groups") and hasattr(thing, "state"):  # an Optimizer, or one built like it
                self.optimizers.append((name, weakref.ref(thing)))
            elif isinstance(thing, torch.Tensor):
                self.tensors.append((name or f"input {len(self.tensors)}", weakref.ref(thing)))
            else:
                raise TypeError(f"watch takes modules, optimizers and tensors, not {type(thing).__name__}")

    def scan(self, log: Log) -> None:
        """Give everything watched that is alive now its category. Labels count for a storage's whole life."""
        names: dict[int, str] = {}
        for prefix, root in self._alive(self.modules):
            for path, module in root.named_modules(prefix=prefix):
                self._number(log, module, path)
                for key, param in module._parameters.items():
                    if param is not None and id(param) not in names:
                        self._parameter(log, param, f"{path}.{key}" if path else key, names)
                for key, buffer in module._buffers.items():
                    for inner in _plain(buffer):
                        log.seen(inner, cat.OTHER, f"{path}.{key}" if path else key)
        for prefix, optimizer in self._alive(self.optimizers):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if id(param) not in names:
                        self._parameter(log, param, f"{prefix or 'param'} {len(names)}", names)
            for param, state in optimizer.state.items():
                owner = names.get(id(param), "")
                for key, value in state.items() if isinstance(state, dict) else (("state", state),):
                    for inner in _nested(value):
                        log.seen(inner, cat.OPTIMIZER_STATE, f"{owner}.{key}" if owner else str(key))
        log.param_names = names
        for name, tensor in self._alive(self.tensors):
            if isinstance(tensor, torch.nn.Parameter):
                self._parameter(log, tensor, name, names)
                continue
            for inner in _plain(tensor):
                live = log.live.get(id(inner.untyped_storage()))
                if live is None or live.category == cat.OTHER:
                    log.seen(inner, cat.INPUT_DATA, name)
            if tensor.is_leaf:
                for inner in _plain(tensor.grad):
                    log.seen(inner, cat.GRADIENTS, f"{name}.grad")

    def _number(self, log: Log, module: torch.nn.Module, path: str) -> None:
        """A module's number stays its own as long as its name does; ids of dead modules may come back."""
        name = path or type(module).__name__
        number = log.module_numbers.get(id(module))
        if number is None or self.module_names[number] != name:
            if name not in self.module_names:
                self.module_names.append(name)
            log.module_numbers[id(module)] = self.module_names.index(name)

    def _parameter(self, log: Log, param: torch.Tensor, name: str, names: dict[int, str]) -> None:
        names[id(param)] = name
        for inner in _plain(param):
            log.seen(inner, cat.PARAMETERS, name)
        for inner in _plain(param.grad):
            log.seen(inner, cat.GRADIENTS, f"{name}.grad")

    @staticmethod
    def _alive(things: list[tuple[str, weakref.ref]]) -> list[tuple[str, object]]:
        return [(name, thing) for name, ref in things if (thing := ref()) is not None]


def _named(things: object) -> Iterator[tuple[str, object]]:
    if isinstance(things, dict):
        yield from ((str(name), thing) for name, thing in things.items())
    elif isinstance(things, (list, tuple)):
        yield from (("", thing) for thing in things)
    elif things is not None:
        yield "", things


def _nested(value: object) -> Iterator[torch.Tensor]:
    """The plain tensors anywhere in lists, tuples and dicts."""
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nested(item)
    else:
        yield from _plain(value)


def _plain(tensor: object) -> Iterator[torch.Tensor]:
    """The plain tensors that hold a tensor's bytes: a DTensor's local shard, say. Nothing for what is no tensor."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor):  # a lazy parameter has no storage yet
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        with _disable_current_modes():  # reading a sparse tensor's parts is an operator, too
            yield from list(parts(tensor))

"""Which storages are parameters, gradients, optimizer state and inputs: found by looking at what is watched."""

from collections.abc import Iterator

import torch

from . import categories as cat
from ._log import Log


class Watch:
    """The watched modules, optimizers and tensors, by name.

    `watch` is a list (or one) of `nn.Module`, `Optimizer` and tensors, or a dict from name to those.
    """

    def __init__(self, watch: object) -> None:
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        for name, thing in _named(watch):
            if isinstance(thing, torch.nn.Module):
                self.modules.append((name, thing))
            elif isinstance(thing, torch.optim.Optimizer):
                self.optimizers.append((name, thing))
            elif isinstance(thing, torch.Tensor):
                self.tensors.append((name or f"input {len(self.tensors)}", thing))
            else:
                raise TypeError(f"watch takes modules, optimizers and tensors, not {type(thing).__name__}")

    def names(self) -> dict[int, str]:
        """id of each watched module -> its dotted name."""
        return {
            id(module): ".".join(filter(None, (prefix, name))) or type(module).__name__
            for prefix, root in self.modules
            for name, module in root.named_modules()
        }

    def scan(self, log: Log) -> None:
        """Give everything watched that is alive now its category. Labels count for a storage's whole life."""
        named: dict[int, str] = {}
        for prefix, root in self.modules:
            for name, param in root.named_parameters():
                self._parameter(log, param, ".".join(filter(None, (prefix, name))), named)
            for name, buffer in root.named_buffers():
                for inner in _plain(buffer):
                    log.seen(inner, cat.OTHER, name)
        for prefix, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if id(param) not in named:
                        self._parameter(log, param, f"{prefix or 'param'} {len(named)}", named)
            for param, state in optimizer.state.items():
                owner = named.get(id(param), "")
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        for inner in _plain(value):
                            log.seen(inner, cat.OPTIMIZER_STATE, ".".join(filter(None, (owner, str(key)))))
        for name, tensor in self.tensors:
            category = cat.PARAMETERS if isinstance(tensor, torch.nn.Parameter) else cat.INPUT_DATA
            for inner in _plain(tensor):
                if category == cat.PARAMETERS or log.live.get(id(inner.untyped_storage())) is None:
                    log.seen(inner, category, name)
            if tensor.is_leaf and tensor.grad is not None:
                for inner in _plain(tensor.grad):
                    log.seen(inner, cat.GRADIENTS, f"{name}.grad")

    def _parameter(self, log: Log, param: torch.Tensor, name: str, named: dict[int, str]) -> None:
        named[id(param)] = name
        for inner in _plain(param):
            log.seen(inner, cat.PARAMETERS, name)
        grad = param.grad
        if grad is not None:
            for inner in _plain(grad):
                log.seen(inner, cat.GRADIENTS, f"{name}.grad")


def _named(watch: object) -> Iterator[tuple[str, object]]:
    if watch is None:
        return
    if isinstance(watch, dict):
        yield from ((str(name), thing) for name, thing in watch.items())
    elif isinstance(watch, (list, tuple)):
        yield from (("", thing) for thing in watch)
    else:
        yield "", watch


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold a tensor's bytes: a DTensor's local shard, say."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor

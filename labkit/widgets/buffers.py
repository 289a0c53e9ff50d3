"""Lab 01's interactive view: step through the layers, see which buffer each one reads and writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.widgets.explore import explore


@dataclass
class Step:
    """What one layer did: the buffers (by number, from 0) that it read from others and wrote, and its operators."""

    layer: int
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)


@dataclass
class Buffer:
    """One storage that is no parameter: bytes, and the steps between which it was alive (`died` None: to the end)."""

    bytes: int
    born: int
    died: int | None = None


class BufferTrace(TorchDispatchMode):
    """Follows which storages each layer's operators read and write. A layer begins where an operator first uses its
    parameters.

    layers : modules, or tuples of tensors, in the order in which they run
    x      : the input; its storage is buffer 0
    """

    def __init__(self, layers: Sequence[Any], x: torch.Tensor) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self._numbers: dict[int, int] = {}  # id of a living storage -> buffer number
        self._alive: list[weakref.ref] = []
        self._layer_of: dict[int, int] = {}
        for number, layer in enumerate(layers):
            tensors = layer.parameters() if isinstance(layer, torch.nn.Module) else tree_leaves(layer)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    self._layer_of[id(tensor.untyped_storage())] = number
        self._number(x.untyped_storage())

    def dispatch(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        schema = func._schema
        written = {id(a.untyped_storage()) for a in _mutated(schema, args, kwargs)}
        if not written and all(id(storage) in map(id, given) for storage in made):
            return out  # a view, or nothing
        if schema.name.startswith("aten::empty") or schema.name == "aten::new_empty":
            for storage in made:  # made, not yet written
                self._number(storage)
            return out
        step = self._step(given)
        step.ops.append(schema.name.removeprefix("aten::"))
        for storage in given:
            if id(storage) not in self._layer_of and id(storage) not in written:
                _note(step.reads, self._number(storage), unless=step.writes)
        for storage in [*(s for s in given if id(s) in written), *made]:
            if id(storage) not in self._layer_of:
                _note(step.writes, self._number(storage))
        return out

    def _step(self, given: list[torch.UntypedStorage]) -> Step:
        layer = max((self._layer_of.get(id(s), -1) for s in given), default=-1)
        if not self.steps or (layer >= 0 and layer != self.steps[-1].layer):
            if self.steps and self.steps[-1].layer < 0:  # what came before the first layer belongs to it
                self.steps[-1].layer = layer
            else:
                self.steps.append(Step(layer))
        return self.steps[-1]

    def _number(self, storage: torch.UntypedStorage) -> int:
        key = id(storage)
        if key not in self._numbers:
            number = self._numbers[key] = len(self.buffers)
            self.buffers.append(Buffer(storage.nbytes(), max(len(self.steps) - 1, 0)))
            self._alive.append(weakref.ref(storage, lambda _, key=key, number=number: self._died(key, number)))
        return self._numbers[key]

    def _died(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self.buffers[number].died = len(self.steps) - 1


# Set after the class is made: __init_subclass__ would wrap it so that the first operator imports torch._dynamo (3 s).
BufferTrace.__torch_dispatch__ = BufferTrace.dispatch


def _mutated(schema: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    return [
        tensor
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(values.get(argument.name))
        if isinstance(tensor, torch.Tensor)
    ]


def _note(numbers: list[int], number: int, unless: Sequence[int] = ()) -> None:
    if number not in numbers and number not in unless:
        numbers.append(number)


def trace_buffers(
    forward: Callable[[Sequence[Any], torch.Tensor], Any], layers: Sequence[Any], x: torch.Tensor
) -> BufferTrace:
    """Run `forward(layers, x)` without gradients and return what each layer read and wrote."""
    trace = BufferTrace(layers, x)
    with torch.no_grad(), trace:
        result = forward(layers, x)
    del result
    return trace


def step_through(
    forward: Callable[[Sequence[Any], torch.Tensor], Any],
    layers: Sequence[Any],
    x: torch.Tensor,
    *,
    title: str = "Buffers, layer by layer",
) -> None:
    """Run `forward(layers, x)` once and show, for each layer, which buffer it reads and which it writes; one slider
    steps through.

    forward : such as `pingpong_forward`; layers : modules, or tuples of tensors; x : (batch, dim)

    The picture left in a saved notebook shows the last layer, with the whole pattern. Raises ValueError when no
    operator ran.
    """
    trace = trace_buffers(forward, layers, x)
    if not trace.steps:
        raise ValueError("forward(layers, x) ran no operator on a tensor: there is nothing to step through")
    from labkit.figures.buffers import buffer_steps

    count = len(trace.steps)
    explore(
        {"layer": list(range(1, count + 1))},
        lambda layer: buffer_steps(trace.steps, trace.buffers, layer - 1),
        start={"layer": count},
        title=title,
    )

"""Which memory each operator reads and writes: what the recorder's bytes do not say about buffers.

A second dispatch mode beside the `Recorder`. It notes every storage that turns up besides the watched ones (made by an operator,
or brought from outside torch and first seen as an operand) and, for every layer, where its product was written.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = ("clone", "_to_copy", "contiguous")  # of a weight: no product, what reads the copy is
_BIAS_FIRST = ("addmm", "addmv", "baddbmm", "addbmm", "_addmm_activation")  # their first operand may be the destination


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


@cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def _composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch.DispatchKey.CompositeImplicitAutograd)


class Trail(TorchDispatchMode):
    """Notes storages and products while a candidate runs `layers` (per layer the tensors that only its product reads).

    storages : [{"bytes", "op", "born", "layer", "grew"}] in order of appearance; `layer` is the number of layers whose product had
               run. A storage that grows gets a new row, since its memory is another; `grew` is its row before
    products : [{"layer", "op", "place", "storage", "fresh", "pass"}] in order; a place is a storage and an offset in it
    alive    : the most bytes of storages that were alive when a product had run
    clobbered: layers whose product read an operand after it was written over in the same layer
    replaced : layers whose input was replaced by other numbers (not added to) before the next layer's product was done
    copies   : how often a whole tensor was copied into memory that is not watched
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], watched: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.storages: list[dict[str, Any]] = []
        self.products: list[dict[str, Any]] = []
        self.clobbered: list[int] = []
        self.replaced: list[int] = []
        self.copies = 0
        self.alive = 0
        self._layer_of: dict[int, int] = {}  # address of a weight -> layer
        self._known: dict[int, int] = {}  # storage -> its row, or -1 for a watched one
        self._places: dict[tuple[int, int], int] = {}
        self._spans: list[tuple[int, int]] = []  # memory that the running layer has written
        self._inputs: list[tuple[int, tuple[int, int]]] = []  # (layer, memory that its product read), of the last two layers
        self._reached = 0
        self._pass = 0
        for number, weights in enumerate(layers):
            for weight in weights:
                self._watch(weight)
                self._layer_of[weight.untyped_storage().data_ptr()] = number
        for tensor in watched:
            self._watch(tensor)

    @property
    def layers_seen(self) -> int:
        return len({product["layer"] for product in self.products})

    def row_of(self, tensor: torch.Tensor) -> int:
        """The row of a tensor's storage; -1 for a watched one, -2 for one that no operator has touched."""
        return self._known.get(tensor.untyped_storage()._cdata, -2)

    def dispatch(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one operator and note what it touched."""
        kwargs = kwargs or {}
        if _composite(func):  # inference mode hands these over whole; what they allocate inside shows when they are split
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        operands = list(_tensors([*args, *kwargs.values()]))
        for tensor in operands:
            self._see(tensor, func, born=False)
        before = {tensor.untyped_storage()._cdata for tensor in operands}
        result = func(*args, **kwargs)
        outputs = list(_tensors([result]))
        for tensor in outputs:
            self._see(tensor, func, born=True)
        if not _is_view(func):
            self._note(func, args, kwargs, outputs, before)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        self._known[tensor.untyped_storage()._cdata] = -1

    def _see(self, tensor: torch.Tensor, func: Any, born: bool) -> None:
        storage = tensor.untyped_storage()
        size, row = storage.nbytes(), self._known.get(storage._cdata)
        if row is None:
            if storage.data_ptr() in self._layer_of:  # a weight that came back from numpy
                return
            row = self._known[storage._cdata] = len(self.storages)
            name = func.overloadpacket.__name__
            self.storages.append({"bytes": size, "op": name, "born": born, "layer": self._reached, "grew": None})
            weakref.finalize(storage, self._known.pop, storage._cdata, None).atexit = False
        elif row >= 0 and size > self.storages[row]["bytes"]:  # grown, so moved
            self._known[storage._cdata] = len(self.storages)
            name = func.overloadpacket.__name__
            self.storages.append({"bytes": size, "op": name, "born": True, "layer": self._reached, "grew": row})

    def _note(self, func: Any, args: tuple, kwargs: dict, outputs: list[torch.Tensor], before: set[int]) -> None:
        name = func.overloadpacket.__name__
        targets = list(_tensors(args[i] if i < len(args) else kwargs.get(key) for i, key in _written_arguments(func)))
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in before]
        factors = list(_tensors(args[1:] if name.removesuffix("_") in _BIAS_FIRST else args))
        layers = [self._layer_of.get(tensor.untyped_storage().data_ptr()) for tensor in factors]
        layer = next((number for number in layers if number is not None), None)
        if layer is not None and name in _COPIES:
            for tensor in fresh:
                address = tensor.untyped_storage().data_ptr()
                self._layer_of[address] = layer
                weakref.finalize(tensor.untyped_storage(), self._layer_of.pop, address, None).atexit = False
            return
        if layer is not None and (not self.products or self.products[-1]["layer"] != layer):
            self._spans = []
            self._pass += bool(self.products and layer < self.products[-1]["layer"])
        written = [_span(tensor) for tensor in targets]
        self._spans += written
        if not _adds(name, targets, [*args, *kwargs.values()]):
            over = [number for number, span in self._inputs if any(_meet(span, other) for other in written)]
            self.replaced += [number for number in over if number not in self.replaced]
        if layer is None:
            self.copies += name == "copy_" and self.row_of(targets[0]) != -1
            return
        self._reached = max(self._reached, layer + 1)
        # Not in between: a buffer that is outgrown lives until the larger one has taken its name.
        self.alive = max(self.alive, sum(self.storages[row]["bytes"] for row in self._known.values() if row >= 0))
        read = [_span(tensor) for tensor, number in zip(factors, layers, strict=True) if number is None]
        if layer not in self.clobbered and any(_meet(a, b) for a in read for b in self._spans):
            self.clobbered.append(layer)
        # From here on this product's input, and that of the layer before it no longer.
        self._inputs = [item for item in self._inputs if item[0] == layer] + [(layer, span) for span in read]
        for tensor in (targets + fresh)[:1]:
            storage = self.row_of(tensor)
            place = self._places.setdefault((storage, tensor.storage_offset()), len(self._places))
            self.products.append({"layer": layer, "op": name, "place": place, "storage": storage, "fresh": bool(fresh), "pass": self._pass})


# Set after the class is made: __init_subclass__ would wrap it so that the first operator imports torch._dynamo (3 s).
Trail.__torch_dispatch__ = Trail.dispatch


def _adds(name: str, targets: list[torch.Tensor], values: list[Any]) -> bool:
    """Whether an operator reads what it writes: in place, or its target is among its operands, too."""
    if name.endswith("_") and name.removesuffix("_") not in ("copy", "fill", "zero"):
        return True
    places = [_span(tensor) for tensor in _tensors(values)]
    return all(places.count(_span(tensor)) > 1 for tensor in targets)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + max(reach, 0) * tensor.element_size()


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]

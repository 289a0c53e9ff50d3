"""What the recorder needs to know of an operator, read once from its schema."""

import threading

import torch
from torch._C import DispatchKey
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ._flops import PRODUCTS

_RESIZE = ("resize_", "resize_as_", "set_", "_resize_output_", "resize_storage_bytes_")
# The registry leaves out attention on CPU, which would make a transformer's FLOPs depend on the machine.
_CPU_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *rest, out_val=None, **more: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda grad, q, k, v, *rest, out_val=None, **more: sdpa_backward_flop_count(
            grad.shape, q.shape, k.shape, v.shape
        )
    ),
}
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


class OpFacts:
    """Facts about one operator; `index` is its number in the table of names."""

    __slots__ = (
        "index", "name", "arguments", "metadata", "composite", "flop_formula", "flops",
        "lifts", "allocates", "sets", "grows", "resizes", "detaches", "communicates",
        "special_before", "special_after",
    )  # fmt: skip

    def __init__(self, func: object, index: int) -> None:
        self.index = index
        self.flops: dict[object, int] = {}
        schema = getattr(func, "_schema", None)
        packet = getattr(func, "overloadpacket", func)
        self.name = schema.name.replace("::", ".") if schema else str(func)
        self.arguments = tuple(a.name for a in schema.arguments) if schema else ()
        base = self.name.rpartition(".")[2]
        # `x.addmm_(a, b)` does the work of `torch.addmm(x, a, b)`; the registry knows only the latter.
        plain = getattr(torch.ops.aten, base[:-1], None) if base.endswith("_") and self.name.startswith("aten.") else None
        self.flop_formula = flop_registry.get(packet) or flop_registry.get(plain) or _CPU_ATTENTION.get(self.name)
        self.metadata = self.name.startswith("prim.")  # a fake tensor asked for its device, say
        # Only PyTorch's own C++ splits are used: a decomposition written in Python would change which kernels run.
        self.composite = (
            self.name.startswith("aten.")
            and self.flop_formula is None
            and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
        )
        if self.flop_formula is None and not self.composite:  # the parts of a composite operator count themselves
            self.flop_formula = PRODUCTS.get(self.name.removesuffix("_"))
        written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write] if schema else []
        # A return that aliases an argument is a view or the argument itself, so nothing new.
        # But `torch.tensor` fills its tensor unseen, and then lifts it.
        self.lifts = base in ("lift", "lift_fresh")
        self.allocates = schema is None or self.lifts or any(r.alias_info is None for r in schema.returns)
        self.resizes = base in _RESIZE or any(a.kwarg_only for a in written)
        self.sets = base == "set_"  # an unknown storage that it is given is a new one
        self.grows = base == "resize_"
        self.detaches = base == "detach"
        self.communicates = self.name.startswith(("c10d.", "_c10d_functional.")) and "wrap" not in base
        # Two flags for the common case, that nothing of the kind is to be done before or after the operator.
        self.special_before = self.metadata or self.composite or self.grows
        self.special_after = self.detaches or self.resizes or self.communicates

    def split(self, func: object, args: tuple, kwargs: dict) -> object:
        """Run a composite operator as the operators it is made of."""
        return func._op_dk(_COMPOSITE, *args, **kwargs)

    def count_flops(self, args: tuple, kwargs: dict, out: object) -> int:
        """FLOPs of one call by the registry's formula; remembered by shapes, since formulas are slow."""
        key = (_shapes(args), _shapes(tuple(kwargs.values())))
        try:
            return self.flops[key]
        except KeyError:
            try:
                value = int(self.flop_formula(*args, **kwargs, out_val=out))
            except Exception:  # a formula that does not know these arguments must not stop the recorded code
                value = 0
            self.flops[key] = value
            return value


def _shapes(values: tuple) -> tuple:
    return tuple(
        v.shape if isinstance(v, torch.Tensor)
        else _shapes(tuple(v)) if isinstance(v, (list, tuple))
        else v if isinstance(v, (int, float, bool, str, type(None)))
        else str(v)
        for v in values
    )  # fmt: skip


class OpTable(dict):
    """Operator -> `OpFacts`, filled on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.names = [""]  # by index; 0 stands for what happens outside any operator

    def __missing__(self, func: object) -> OpFacts:
        with self.lock:
            if func not in self:
                facts = OpFacts(func, len(self.names))
                self.names.append(facts.name)
                self[func] = facts
        return self[func]

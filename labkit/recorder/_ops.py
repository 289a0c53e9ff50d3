"""What the recorder needs to know of an operator, read once from its schema."""

import torch
from torch.utils.flop_counter import flop_registry

# Operators whose output may be their input although the schema does not say so, or that only hand a tensor over.
_HANDS_OVER = {"aten.lift_fresh", "aten.lift", "aten.set_"}
_RESIZES = ("resize_", "resize_as_", "set_", "_resize_output_", "resize_storage_bytes_")


class OpFacts:
    """Facts about one ``OpOverload``; `index` is its number in the table of names."""

    __slots__ = (
        "index", "name", "arguments", "decompose", "flop_formula", "flops",
        "allocates", "resizes", "hands_over", "comm",
    )

    def __init__(self, func: object, index: int) -> None:
        self.index = index
        schema = getattr(func, "_schema", None)
        packet = getattr(func, "overloadpacket", func)
        self.name = schema.name.replace("::", ".") if schema else str(func)
        self.decompose = schema is not None and func._can_decompose() and packet not in flop_registry
        self.flop_formula = flop_registry.get(packet)
        self.flops: dict[object, int] = {}
        base = self.name.rpartition(".")[2]
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] if schema else []
        self.arguments = tuple(schema.arguments) if schema else ()
        returns = schema.returns if schema else ()
        # A return that aliases an argument is a view or the argument itself: nothing new.
        self.allocates = schema is None or any(r.alias_info is None for r in returns) or base == "lift_fresh"
        self.resizes = base in _RESIZES or any(a.kwarg_only for a in writes)
        self.hands_over = self.name in _HANDS_OVER
        self.comm = self.name if self.name.startswith(("c10d.", "_c10d_functional.")) else ""

    def count_flops(self, args: tuple, kwargs: dict, out: object) -> int:
        """FLOPs of one call by the registry's formula; remembered by shapes, since formulas are slow."""
        key = (_shapes(args), _shapes(tuple(kwargs.values())) if kwargs else None)
        try:
            return self.flops[key]
        except KeyError:
            value = self.flops[key] = int(self.flop_formula(*args, **kwargs, out_val=out))
            return value
        except TypeError:  # an argument that cannot be hashed
            return int(self.flop_formula(*args, **kwargs, out_val=out))


def _shapes(args: tuple) -> tuple:
    return tuple(
        a.shape if isinstance(a, torch.Tensor) else _shapes(tuple(a)) if isinstance(a, (list, tuple)) else a
        for a in args
    )


class OpTable(dict):
    """OpOverload -> OpFacts, filled on first use."""

    def __missing__(self, func: object) -> OpFacts:
        facts = self[func] = OpFacts(func, len(self) + 1)
        return facts

    def names(self) -> list[str]:
        """Names by index; index 0 stands for what happened outside any operator."""
        return ["", *(facts.name for facts in self.values())]

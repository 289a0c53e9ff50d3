"""What a function would take along to the ranks, found before anything starts and told by name.

A function of a notebook travels with the globals that it (and what it calls) uses, its closure and its defaults. This walks
what cloudpickle would take by value and names what is too large, lives on a card, belongs to the notebook or cannot be copied.
"""

import dis
import functools
import io
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from labkit.ranks import travel
from labkit.ranks.errors import CargoError

LIMIT_BYTES = 64 << 20
_MAX_OBJECTS = 200_000
_GLOBAL_OPS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_WIDGET_HOMES = ("ipywidgets", "anywidget", "IPython", "ipykernel")


@dataclass
class Item:
    """One thing that a function takes along: ``owner`` uses it as ``kind`` (global, ...) under ``name``."""

    owner: str
    kind: str
    name: str
    value: Any

    @property
    def phrase(self) -> str:
        return f"`{self.owner}` {'is bound to' if self.kind == 'object' else 'uses'} the {self.kind} `{self.name}`"


@dataclass
class Weight:
    total_bytes: int = 0
    on_card: bool = False
    stays: str | None = None  # what it holds that belongs to the notebook's process


def pack(function: Any, args: tuple, kwargs: dict, extra: Any = None) -> bytes:
    """Pickle ``(function, args, kwargs, extra)`` for the ranks; CargoError where something should not or cannot travel."""
    items = list(items_of(function))
    _refuse_heavy(items, function)
    try:
        data = travel.dumps((function, args, kwargs, extra))
        if len(data) > LIMIT_BYTES:  # of arguments, which is fine, or of something whose size only its own pickling knows
            sizes = [(len(travel.dumps(item.value)), item) for item in items]
            _refuse_sizes(sizes, function)
        return data
    except CargoError:
        raise
    except Exception as error:
        arguments = [Item("run_ranks", "argument", str(name), value) for name, value in [*enumerate(args), *kwargs.items()]]
        raise CargoError(_who_cannot(items + arguments, _name(function)) + f" ({type(error).__name__}: {error})") from None


def _who_cannot(items: list[Item], function: str) -> str:
    """Names the thing that cannot be pickled, as far inside as it can be found."""
    for item in items:
        culprit = find_culprit(item.value, item.name)
        if culprit:
            path, part = culprit
            holds = "which is" if path == item.name else f"whose `{path}` is"
            return f"{item.phrase}, {holds} {_a(part)}, which cannot travel to another process: make it inside `{function}`"
    return f"`{function}` cannot travel to another process"


def _refuse_heavy(items: list[Item], function: Any) -> None:
    seen: set[int] = set()
    weights = [(weigh(item.value, seen), item) for item in items]
    for weight, item in weights:
        if weight.stays is not None:
            raise CargoError(f"{item.phrase} ({weight.stays}), which stays in this notebook: pass what is needed of it as an argument")
        if weight.on_card:
            raise CargoError(
                f"{item.phrase}, which holds a CUDA tensor of this notebook: make it inside `{_name(function)}`, "
                f"or take a copy on the CPU as an argument"
            )
    _refuse_sizes([(weight.total_bytes, item) for weight, item in weights], function)


def _refuse_sizes(sizes: list[tuple[int, Item]], function: Any) -> None:
    if sum(size for size, _ in sizes) <= LIMIT_BYTES:
        return
    heavy = sorted(sizes, key=lambda pair: -pair[0])
    named = [f"{item.phrase} ({_megabytes(size)})" for size, item in heavy[:3] if size > LIMIT_BYTES // 8 or item is heavy[0][1]]
    raise CargoError(
        f"{'; '.join(named)}: every process would get a copy. Take what is needed as an argument, or make it inside "
        f"`{_name(function)}`"
    )


def items_of(function: Any) -> Iterator[Item]:
    """Everything that ``function`` takes along, each thing once."""
    seen: set[int] = set()
    pending = [function]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for item in _direct(thing):
            if _is_code_by_value(item.value):
                pending.append(item.value)
            elif id(item.value) not in seen and not _by_reference(item.value):
                seen.add(id(item.value))
                yield item
                pending += _code_inside(item.value)


def _direct(thing: Any) -> Iterator[Item]:
    if isinstance(thing, functools.partial):
        name = _name(thing.func)
        yield Item(name, "function", name, thing.func)
        for key, value in [*enumerate(thing.args), *thing.keywords.items()]:
            yield Item(name, "argument (functools.partial)", str(key), value)
    elif isinstance(thing, types.MethodType):
        yield Item(thing.__func__.__name__, "object", type(thing.__self__).__name__, thing.__self__)
        yield Item(thing.__func__.__name__, "function", thing.__func__.__name__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, type):
        for name, value in vars(thing).items():
            value = getattr(value, "__func__", value)  # static and class methods
            value = value.fget if isinstance(value, property) else value
            if not isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType)):
                yield Item(thing.__name__, "attribute", f"{thing.__name__}.{name}", value)
        for base in thing.__bases__:
            yield Item(thing.__name__, "class", base.__name__, base)
    elif callable(thing):  # an object of a class with __call__
        yield Item(type(thing).__name__, "object", type(thing).__name__, thing)
        yield Item(type(thing).__name__, "class", type(thing).__name__, type(thing))


def _of_function(function: types.FunctionType) -> Iterator[Item]:
    owner = function.__name__
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield Item(owner, "global", name, function.__globals__[name])
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield Item(owner, "closure variable", name, cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    code, defaults = function.__code__, function.__defaults__ or ()
    with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, value in [*zip(with_default, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]:
        yield Item(owner, "default argument", name, value)
    if hasattr(function, "__wrapped__"):
        yield Item(owner, "function", _name(function.__wrapped__), function.__wrapped__)


def _global_names(code: types.CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL_OPS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _by_reference(value: Any) -> bool:
    """Would travel as a name only: a module, or something that another process can import."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in sys.modules
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        return value is None or isinstance(value, (bool, int, float, complex))
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return isinstance(value, types.BuiltinFunctionType)
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _is_code_by_value(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)) and not _by_reference(value)


def _code_inside(value: Any) -> list[Any]:
    """Functions and classes that come along because ``value`` holds them."""
    inside = [] if _by_reference(type(value)) else [type(value)]
    if isinstance(value, (list, tuple, set)):
        inside += [entry for entry in list(value)[:1000] if _is_code_by_value(entry)]
    elif isinstance(value, dict):
        inside += [entry for entry in list(value.values())[:1000] if _is_code_by_value(entry)]
    return inside


def weigh(value: Any, seen: set[int]) -> Weight:
    """Bytes of tensors, arrays and byte strings that ``value`` holds and ``seen`` does not know yet, and what is special there."""
    weight, pending, count = Weight(), [value], 0
    while pending and count < _MAX_OBJECTS:
        thing = pending.pop()
        count += 1
        if id(thing) in seen or _by_reference(thing):
            continue
        seen.add(id(thing))
        home = type(thing).__module__.partition(".")[0]
        if any(base.__module__.partition(".")[0] in _WIDGET_HOMES for base in type(thing).__mro__):
            weight.stays = f"{home} {type(thing).__name__}"
        elif isinstance(thing, io.IOBase) and not isinstance(thing, (io.BytesIO, io.StringIO)):
            weight.stays = "an open file"
        elif isinstance(thing, torch.Tensor):
            weight.on_card |= thing.is_cuda
            pending += [part for part in (thing.grad if thing.is_leaf else None,) if part is not None]
            storage = _storage(thing)
            if storage is not None and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                weight.total_bytes += storage.nbytes()  # a view takes its whole storage along
        elif isinstance(thing, (bytes, bytearray, str)):
            weight.total_bytes += len(thing)
        elif home in ("numpy", "pandas") and hasattr(thing, "nbytes"):
            weight.total_bytes += int(thing.nbytes)
        elif isinstance(thing, dict):
            pending += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set, frozenset)):
            pending += list(thing)
        elif _travels_as_its_dict(thing):
            pending.append(vars(thing))
    return weight


def _travels_as_its_dict(thing: Any) -> bool:
    """An object of a plain class; one with a pickling of its own (a logger, a figure) may leave most of itself at home."""
    kind = type(thing)
    own = kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    plain = not own and kind.__getstate__ is object.__getstate__
    return plain and isinstance(getattr(thing, "__dict__", None), dict) and not isinstance(thing, (types.FunctionType, type))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse, fake: nothing of size comes along here
        return None


def find_culprit(value: Any, path: str, depth: int = 4) -> tuple[str, Any] | None:
    """The innermost part of ``value`` that cannot be pickled, as (path to it, the part); None when all of it can."""
    try:
        travel.dumps(value)
        return None
    except Exception:
        pass
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{number}]", part) for number, part in enumerate(value)]
    elif isinstance(getattr(value, "__dict__", None), dict):
        parts = [(f"{path}.{name}", part) for name, part in vars(value).items()]
    for name, part in parts[:1000] if depth else []:
        inner = find_culprit(part, name, depth - 1)
        if inner:
            return inner
    return path, value


def _name(function: Any) -> str:
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


def _a(value: Any) -> str:
    kind = type(value)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"a {home}{kind.__qualname__}"


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"

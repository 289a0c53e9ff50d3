"""Pickling for the way to and from the ranks: cloudpickle, with the file names of code kept."""

import builtins
import io
import sys
import types
from collections import ChainMap
from typing import Any

import cloudpickle

loads = cloudpickle.loads
_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _code_with_its_file(code: types.CodeType) -> tuple:
    """cloudpickle (from 3.1.2 on) forgets where code stands, and a traceback without lines helps nobody."""
    make, parts, *rest = _reduce_code(code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts), *rest


def _home_of(kind: type) -> types.ModuleType | None:
    """The module where a compiled class that says it is of `builtins` really is (safetensors' `safe_open` says so)."""
    for module in list(sys.modules.values()):
        if module is not sys.modules["__main__"] and getattr(module, "__dict__", {}).get(kind.__name__) is kind:
            return module
    return None


class Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({types.CodeType: _code_with_its_file}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and value.__module__ == "builtins" and not hasattr(builtins, value.__name__):
            home = _home_of(value)
            if home is not None:  # by name: taken apart, such a class arrives without its methods
                return getattr, (home, value.__name__)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """Pickle ``value``, functions and classes of a notebook included."""
    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def dump_exception(error: BaseException) -> bytes:
    """The exception, or, where it does not survive the journey, what to rebuild it from; empty where that fails, too."""
    for value in (error, (type(error), error.args, vars(error))):
        try:
            data = dumps(value)
            load_exception(data)  # many exceptions pickle, but do not unpickle
            return data
        except Exception:
            continue
    return b""


def load_exception(data: bytes) -> BaseException:
    value = loads(data)
    if isinstance(value, BaseException):
        return value
    kind, args, state = value
    error = kind.__new__(kind, *args)  # an __init__ with other parameters than args is the usual reason to be here
    error.args = args
    vars(error).update(state)
    return error

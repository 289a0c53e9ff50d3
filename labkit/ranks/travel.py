"""Pickling for the way to and from the ranks: cloudpickle, with the file names of code kept."""

import io
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


class Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({types.CodeType: _code_with_its_file}, cloudpickle.Pickler.dispatch_table)


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

"""What cannot run at paper scale, told by the learner's own line."""

import linecache
import os
import sysconfig
from pathlib import Path
from types import TracebackType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

_WHY = "at paper scale tensors have only sizes"


class PaperScaleError(RuntimeError):
    """What cannot run without numbers. The message names the line that asked for them."""


def explain(error: Exception, made_up: bool) -> str | None:
    """The message for people, or None for an error that has nothing to do with paper scale.

    `made_up`: whether the code has been given a number that is none, so that its arithmetic may be what failed.
    """
    if isinstance(error, PaperScaleError):
        what = str(error)
    elif isinstance(error, DynamicOutputShapeException):
        what = f"how much {_op(error)} returns depends on numbers; {_WHY}"
    elif isinstance(error, (DataDependentOutputException, UnsupportedFakeTensorException, UnsupportedOperatorException)):
        what = f"{_op(error)} needs real numbers; {_WHY}"
    elif isinstance(error, RuntimeError) and "data is not allocated" in str(error):  # torch.tensor of fake tensors, say
        what = f"this reads numbers out of tensors; {_WHY}"
    elif made_up and (isinstance(error, ZeroDivisionError) or isinstance(error, ValueError) and "math domain" in str(error)):
        what = f"{error}: a number that was asked for counts as 0 here; {_WHY}"
    else:
        return None
    where = _learners_line(error.__traceback__)
    return f"{where}: {what}" if where else what


def _op(error: Exception) -> str:
    """The operator's name without its overload: "aten.nonzero"."""
    func = getattr(error, "func", None)
    return str(getattr(func, "overloadpacket", func or error))


_LIBRARIES = tuple(
    str(Path(path).resolve()) + os.sep
    for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *torch.__path__, Path(__file__).parents[1])
)


def _learners_line(traceback: TracebackType | None) -> str:
    """The innermost line that is no library's: "line 3 of your cell, `y = x.numpy()`"."""
    found = ""
    while traceback is not None:
        name, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        if not name.startswith("<frozen") and not str(Path(name).resolve()).startswith(_LIBRARIES):
            source = "your cell" if "ipykernel" in name or name.startswith("<") else Path(name).name
            text = linecache.getline(name, line).strip()
            found = f"line {line} of {source}" + (f", `{text}`" if text else "")
        traceback = traceback.tb_next
    return found

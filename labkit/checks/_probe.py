"""The far side of a check: opens the candidate in a fresh process, runs the probe, and sends back what it saw.

Runs in a rank process that `labkit.ranks` started; its only way out is the bytes that `serve` returns.
"""

import gc
import importlib
import os
import sys
import sysconfig
import traceback
import types
from pathlib import Path
from typing import Any

import torch

from labkit.checks import _forbid, _wire
from labkit.checks._core import Case, WrongResult, registered
from labkit.ranks import travel

MAX_TEXT = 4000
_PATHS = sysconfig.get_paths()
_LABKIT = str(Path(__file__).resolve().parents[1])
_LIBRARY = (*(str(Path(_PATHS[key]).resolve()) for key in ("stdlib", "purelib", "platlib")), _LABKIT, "<frozen")


def learner_frames(trace: types.TracebackType | None) -> list[dict[str, Any]]:
    """The frames that are the learner's own: not of labkit, torch or Python itself. Outermost first, the last twelve."""
    frames = [
        {"file": frame.filename, "line": frame.lineno, "function": frame.name}
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(_LIBRARY)
    ]
    return frames[-12:]


def _in_labkit(trace: types.TracebackType | None) -> bool:
    """Whether the innermost frame is labkit's own: the learner's code had returned, and what it returned was no use."""
    inner = traceback.extract_tb(trace)[-1:]
    return bool(inner) and inner[0].filename.startswith(_LABKIT)


def _describe(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)
    except BaseException:  # the learner's exception class may itself be broken
        message = "(its message could not be read)"
    frames = learner_frames(error.__traceback__)
    return {
        "type": type(error).__name__,
        "message": message[:MAX_TEXT],
        "frames": frames,
        "after": not frames and _in_labkit(error.__traceback__),
        "hint": error.hint if isinstance(error, WrongResult) else None,
        "wrong_result": isinstance(error, WrongResult),
    }


def serve(payload: bytes, rank: int, world_size: int) -> bytes:
    """Answer one request: {"check", "module", "case", "forbid", "nonce", "cwd", "path"} with the candidate as blob.

    Never raises for what the learner's code does.
    """
    request, tensors, candidate_bytes = _wire.unpack(payload)
    reply: dict[str, Any] = {"nonce": request["nonce"], "error": None, "forbidden": [], "observation": None}
    if os.path.isdir(request["cwd"]):
        os.chdir(request["cwd"])
    sys.path.extend(path for path in request["path"] if path not in sys.path)  # behind: a file beside the notebook shadows nothing
    importlib.import_module(request["module"])  # registers the check
    check = registered(request["check"])
    case = Case(tensors=tensors, **request["case"])
    tripped = _forbid.lay(check.forbids) if request["forbid"] else []
    # Small tensors gain nothing from two threads, and on a busy machine their spinning makes a step many times slower.
    torch.set_num_threads(1)
    observed: dict[str, Any] = {}
    try:
        candidate = travel.loads(candidate_bytes)
        gc.collect()
        reply["observation"], observed = check.probe(candidate, case).to_message()
        data = _wire.pack(reply | {"forbidden": tripped}, observed)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: an answer that leaves is an answer
        reply["observation"] = None
        data = _wire.pack(reply | {"error": _describe(error), "forbidden": tripped})
    return data

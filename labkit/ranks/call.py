"""The rank's side of ``run_ranks``: opens the function, calls it, packs what it returns (or raises)."""

import sys
import types
from contextlib import nullcontext
from typing import Any

import cloudpickle

from labkit.ranks import travel
from labkit.ranks.cargo import find_culprit
from labkit.ranks.child import Failure
from labkit.ranks.errors import RankError


def call(payload: bytes, rank: int, world_size: int) -> bytes:
    """Run a pickled ``(function, args, kwargs, how)``; the pickled ``(value, recording as wire data or None)``.

    ``how``: "" to run it as it is, "record" to run it under a recorder, "live" to send news of that, too.
    """
    function, args, kwargs, how = travel.loads(payload)
    _be_main(function)
    try:
        value, recording = _recorded(function, args, kwargs, how == "live") if how else (function(*args, **kwargs), None)
        return _pack(rank, value, recording)
    except BaseException as error:
        raise Failure(error, travel.dump_exception(error)) from None


def _recorded(function: Any, args: tuple, kwargs: dict, live: bool) -> tuple[Any, Any]:
    from labkit.ranks.live import Reporter
    from labkit.recorder import Recorder

    recorder = Recorder()
    with Reporter(recorder) if live else nullcontext():  # started first: its thread is none of those that are recorded
        with recorder:
            value = function(*args, **kwargs)
    return value, recorder.recording.to_wire()


def _pack(rank: int, value: Any, recording: Any) -> bytes:
    try:
        return travel.dumps((value, recording))
    except Exception as error:
        path, part = find_culprit(value, "value") or ("value", value)
        which = f"what rank {rank} returned holds, as `{path}`," if path != "value" else f"rank {rank} returned"
        raise RankError(
            f"{which} a {type(part).__module__}.{type(part).__qualname__}, which cannot travel back to the notebook: return tensors, "
            f"numbers, strings or containers of them ({type(error).__name__}: {error})"
        ) from None


def _be_main(function: Any) -> None:
    """Give this process a ``__main__`` with the notebook's names, which plain pickle (``all_gather_object``) looks up there."""
    main = types.ModuleType("__main__")
    tracker = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
    names = {kind.__qualname__: kind for kind in list(tracker) if kind.__module__ == "__main__"}
    function = getattr(function, "func", getattr(function, "__func__", function))
    if getattr(function, "__module__", None) == "__main__" and isinstance(function, types.FunctionType):
        names |= {**function.__globals__, function.__name__: function}
    main.__dict__.update({name: value for name, value in names.items() if not name.startswith("__")})
    sys.modules["__main__"] = main

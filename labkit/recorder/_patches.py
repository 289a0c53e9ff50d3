"""What the dispatcher does not show: resized and Python-made storages, new threads, running modules, the collector.

Installed once while any recorder runs, and taken away with the last one.
"""

import gc
import threading
from functools import partial

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ._code import MODULE_SHIFT
from ._mode import RecordingMode

_lock = threading.Lock()
_running: list = []  # recorders of the whole process
_local = threading.local()
_undo: list = []


def modes() -> list[RecordingMode]:
    """The recording modes that this thread is in, outermost first."""
    try:
        return _local.modes
    except AttributeError:
        _local.modes = []
        return _local.modes


def install(recorder: object) -> None:
    """Add a recorder; the first one puts the patches in."""
    with _lock:
        _running.append(recorder)
        if len(_running) == 1:
            _patch()


def remove(recorder: object) -> None:
    """Take a recorder away; the last one takes the patches with it."""
    with _lock:
        _running.remove(recorder)
        if not _running:
            while _undo:
                _undo.pop()()


def _patch() -> None:
    storage = torch.UntypedStorage
    plain_resize = storage.resize_

    def resize_(self, size):
        for recorder in _running:
            recorder.log.before_resize(self, size)
        result = plain_resize(self, size)
        for recorder in _running:
            recorder.log.after_resize(self)
        return result

    def __init__(self, *args, **kwargs):  # only for storages made in Python, as by deepcopy
        for mode in modes():
            mode.log.made(self)

    _set(storage, "resize_", resize_)
    _set(storage, "__init__", __init__)

    plain_start = threading.Thread.start

    def start(self):
        if modes():
            self.run = partial(_run_inside, self, self.run, [mode.log for mode in modes()])
        plain_start(self)

    _set(threading.Thread, "start", start)

    plain_call = torch.nn.Module.__call__

    def __call__(self, *args, **kwargs):
        inside = modes()
        before = [mode.module for mode in inside]
        for mode in inside:
            number = mode.log.module_numbers.get(id(self))
            if number is not None:
                mode.module = number << MODULE_SHIFT
        try:
            return plain_call(self, *args, **kwargs)
        finally:
            for mode, module in zip(inside, before, strict=True):
                mode.module = module

    _set(torch.nn.Module, "__call__", __call__)

    def enter_step(optimizer, args, kwargs):
        for recorder in _running:
            recorder.log.in_optimizer += 1

    def leave_step(optimizer, args, kwargs):
        for recorder in _running:
            recorder.log.in_optimizer = max(0, recorder.log.in_optimizer - 1)
            recorder.scan()

    _undo.append(register_optimizer_step_pre_hook(enter_step).remove)
    _undo.append(register_optimizer_step_post_hook(leave_step).remove)

    def collector(when, info):
        for recorder in _running:
            recorder.log.collecting += 1 if when == "start" else -1

    gc.callbacks.append(collector)
    _undo.append(lambda: gc.callbacks.remove(collector))
    if gc.isenabled():
        gc.disable()
        _undo.append(gc.enable)
    gc.collect()
    if not gc.get_freeze_count():  # a mark then looks only at what came since: 0.1 s less
        gc.freeze()
        _undo.append(gc.unfreeze)


def _set(owner: type, name: str, value: object) -> None:
    own = owner.__dict__.get(name)

    def undo():
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    setattr(owner, name, value)
    _undo.append(undo)


def _run_inside(thread: threading.Thread, run, logs) -> None:
    del thread.run
    entered = [RecordingMode(log) for log in logs if log.active]
    for mode in entered:
        mode.__enter__()
        modes().append(mode)
    try:
        run()
    finally:
        for mode in reversed(entered):
            modes().remove(mode)
            mode.__exit__(None, None, None)

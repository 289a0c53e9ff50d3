"""What the dispatcher does not show: resized and Python-made storages, new threads, running modules, the collector.

Installed while any recorder runs, and taken away with the last one.
"""

import gc
import threading
from functools import partial
from time import perf_counter

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ._code import CALL, FIRST_SEEN, IN_BACKWARD, MODULE_SHIFT
from ._comm import note_message
from ._mode import RecordingMode

_graph_task = torch._C._current_graph_task_id
_lock = threading.RLock()
_running: list = []  # recorders of the whole process
_local = threading.local()
_undo: list = []


frozen = False  # whether this process was forked from one that froze its objects: to ask the collector takes longer than a small step


def own_modes() -> list[RecordingMode]:
    """The recording modes that this thread has entered, outermost first; the list itself."""
    try:
        return _local.modes
    except AttributeError:
        _local.modes = []
        return _local.modes


def modes() -> list[RecordingMode]:
    """The recording modes that this thread runs under, outermost first.

    A backward thread of PyTorch's own (one per CUDA device) has entered none: it was given those of its caller.
    """
    own = own_modes()
    if own or _graph_task() == -1:
        return own
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, RecordingMode)]


def running() -> list:
    """The recorders that run in this process now."""
    return list(_running)


def install(recorder: object) -> None:
    """Add a recorder; the first one puts the patches in."""
    with _lock:
        _running.append(recorder)
        if len(_running) == 1:
            for patch in (_storages, _threads, _modules, _backward, _optimizers, _waits, _collector):
                patch()


def remove(recorder: object) -> None:
    """Take a recorder away; the last one takes the patches with it."""
    with _lock:
        _running.remove(recorder)
        if not _running:
            while _undo:
                _undo.pop()()


def _set(owner: object, name: str, value: object) -> None:
    """Set an attribute until the last recorder stops."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    _undo.append(partial(delattr, owner, name) if before is missing else partial(setattr, owner, name, before))


def _storages() -> None:
    plain_resize = torch.UntypedStorage.resize_

    def resize_(self, size):
        running = [r.log for r in _running if r.log.active]
        for log in running:
            log.check_growth(self, int(size))
        result = plain_resize(self, size)
        here = {mode.log for mode in modes()}  # another thread's recorder only follows the storages that it knows
        for log in running:
            known = id(self) in log.live
            if known or log in here:
                log.check_size(self, log.context | (0 if known else FIRST_SEEN))
        return result

    def __init__(self, *args, **kwargs):  # runs only for storages made in Python, as by copy.deepcopy
        for mode in modes():
            mode.log.made(self)

    _set(torch.UntypedStorage, "resize_", resize_)
    _set(torch.UntypedStorage, "__init__", __init__)


def _threads() -> None:
    plain_start = threading.Thread.start

    def start(self):
        logs = [mode.log for mode in modes() if mode.log.active]
        if logs:
            self.run = partial(_run_inside, self, self.run, logs)
        plain_start(self)

    _set(threading.Thread, "start", start)


def _run_inside(thread: threading.Thread, run, logs: list) -> None:
    """A thread's `run`, inside a mode of its own for each recorder that ran where the thread was started."""
    del thread.run  # it refers to the thread: a cycle
    entered = [RecordingMode(log) for log in logs]
    for mode in entered:
        mode.__enter__()
        own_modes().append(mode)
    try:
        run()
    finally:
        for mode in reversed(entered):
            own_modes().remove(mode)
            mode.__exit__(None, None, None)


def _modules() -> None:
    plain_call = torch.nn.Module.__call__

    def __call__(self, *args, **kwargs):
        inside = modes()
        if not inside:
            return plain_call(self, *args, **kwargs)
        before = [mode.module for mode in inside]
        for mode in inside:
            number = mode.log.module_numbers.get(id(self))
            mode.module = number << MODULE_SHIFT if number else mode.module or 1 << MODULE_SHIFT
        start = perf_counter()
        try:
            return plain_call(self, *args, **kwargs)
        finally:
            seconds = perf_counter() - start
            backward = IN_BACKWARD if _graph_task() != -1 else 0
            for mode, module in zip(inside, before, strict=False):
                log = mode.log
                if log.active and id(self) in log.module_numbers:
                    log.calls += CALL.pack(mode.module | log.context | backward, start - log.start, seconds)
                mode.module = module

    _set(torch.nn.Module, "__call__", __call__)


def _backward() -> None:
    plain_run = torch.autograd._engine_run_backward

    def _engine_run_backward(t_outputs, *args, **kwargs):
        # (grad_tensors, keep_graph, create_graph, ...) by position, as torch.autograd.backward and grad call it
        create_graph = bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False))
        inside = list(modes())
        before = [mode.module for mode in inside]
        for mode in inside:
            mode.module = 0  # called inside a module or not: backward formulas belong to none
            mode.backwards.append(create_graph)
        try:
            return plain_run(t_outputs, *args, **kwargs)
        finally:
            for mode, module in zip(inside, before, strict=True):
                mode.module = module
                mode.backwards.pop()

    _set(torch.autograd, "_engine_run_backward", _engine_run_backward)


def _optimizers() -> None:
    def enter_step(optimizer, args, kwargs):
        for mode in modes():
            mode.log.in_optimizer = True

    def leave_step(optimizer, args, kwargs):
        for mode in modes():
            mode.log.in_optimizer = False
        for recorder in _running:
            if recorder.watching(optimizer):
                recorder.scan()

    _undo.append(register_optimizer_step_pre_hook(enter_step).remove)
    _undo.append(register_optimizer_step_post_hook(leave_step).remove)


def _waits() -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed import Work

    plain_wait = Work.wait

    def wait(self, *args, **kwargs):
        start = perf_counter()
        try:
            return plain_wait(self, *args, **kwargs)
        finally:
            note("wait", start)

    _set(Work, "wait", wait)


def note(
    kind: str,
    start: float,
    bytes_sent: int = 0,
    bytes_received: int = 0,
    peer: int | None = None,
    group: str = "",
    group_size: int = 0,
    asynchronous: bool = False,
    simulated: bool = False,
) -> None:
    """Write a message into every recorder of this thread, for transports that the dispatcher does not see.

    `start` is `time.perf_counter()` at its begin; now is its end. Without a recorder it does nothing.
    """
    end = perf_counter()
    for mode in modes():
        log = mode.log
        if log.active:
            note_message(
                log, kind, "", log.context | mode.module, start - log.start, end - log.start,
                bytes_sent=bytes_sent, bytes_received=bytes_received, payload_bytes=max(bytes_sent, bytes_received),
                peer=peer, group=group, group_size=group_size, asynchronous=asynchronous, simulated=simulated,
            )  # fmt: skip


def _collector() -> None:
    def tell(when, info):
        for recorder in _running:
            recorder.log.collecting = when == "start"

    gc.collect()
    gc.callbacks.append(tell)
    _undo.append(partial(gc.callbacks.remove, tell))
    if gc.isenabled():
        gc.disable()
        _undo.append(gc.enable)
    if not frozen and not gc.get_freeze_count():  # marks then look only at what came since, which saves a tenth of a second each
        gc.freeze()
        _undo.append(gc.unfreeze)

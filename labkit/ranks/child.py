"""What happens inside a rank: take the seat that the supervisor prepared, call the function, hand back bytes."""

import faulthandler
import importlib
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass

from labkit.ranks import here, page, system, wire
from labkit.ranks.faults import Board, Points
from labkit.ranks.stacks import is_plumbing

# Asks a rank for its stack. Not one that a learner's code is likely to use, where there is a choice.
DUMP_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1
NO_CHANNEL = 117
TEXT_LIMIT = 20_000
current: int | None = None  # this process's rank, where it is one


class Failure(Exception):
    """Raised by an entry to report ``cause`` together with bytes of its own about it."""

    def __init__(self, cause: BaseException, data: bytes) -> None:
        super().__init__(str(cause))
        self.cause, self.data = cause, data


@dataclass
class Seat:
    """Everything that the supervisor sets out for one rank."""

    number: int
    world_size: int
    supervisor: int
    close: list[int]
    out_fd: int
    result_fd: int
    release_fd: int
    dump_fd: int
    scratch: str | None
    memory: mmap.mmap | None
    spec: dict
    payload: bytes
    life: int = 0
    board: Board | None = None


def run_rank(seat: Seat) -> None:
    """The whole life of a rank process; never returns."""
    status = 1
    try:
        _sit_down(seat)
        process = os.getpid()
        frames = _work(seat)
        if os.getpid() == process:  # and not a process that the function forked and that returned from it as well
            status = _hand_in(seat, frames)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _hand_in(seat: Seat, frames: list[bytes]) -> int:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced them
            stream.flush()
    try:
        for frame in frames:
            wire.write_all(seat.result_fd, frame)
        # Peers may still talk to this rank's sockets: it stays until all are done.
        os.read(seat.release_fd, 1)
    except OSError:
        return NO_CHANNEL
    return 0


def _sit_down(seat: Seat) -> None:
    global current
    current = seat.number
    os.setpgid(0, 0)
    system.die_with_parent(seat.supervisor)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in seat.close:
        with suppress(OSError):  # a selector's may not come along
            os.close(fd)
    os.dup2(seat.out_fd, 1)
    os.dup2(seat.out_fd, 2)
    os.close(seat.out_fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    faulthandler.register(DUMP_SIGNAL, file=seat.dump_fd, all_threads=True, chain=False)
    spec = seat.spec
    os.environ.clear()
    os.environ.update(spec["env"])
    os.environ.update(RANK=str(seat.number), LOCAL_RANK=str(seat.number), WORLD_SIZE=str(seat.world_size))
    points = Points(seat.board, seat.number, seat.life) if seat.spec["faults"] else None
    here.sit(seat.number, seat.world_size, seat.life, seat.scratch or "", points)
    sys.path[:] = spec["path"]
    with suppress(OSError):
        os.chdir(spec["cwd"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    import torch

    torch.set_num_threads(max(1, system.cores() // seat.world_size))


def _work(seat: Seat) -> list[bytes]:
    started = time.perf_counter()
    writer = None
    try:
        if seat.memory is not None:
            writer = here.current().writer = page.Writer(seat.memory, seat.number)
            if seat.spec["init_process_group"] and seat.life == 0:  # a group knows no return
                from labkit.ranks.group import join_group

                join_group(seat, writer)
            if seat.spec["live"]:
                here.current().tell = lambda data: wire.write_all(seat.result_fd, wire.frame(b"L", data))
            writer.set_state(page.RUNNING)
        module, _, name = seat.spec["entry"].partition(":")
        function = getattr(importlib.import_module(module), name)
        started = time.perf_counter()
        data = function(seat.payload, seat.number, seat.world_size)
        if not isinstance(data, bytes):
            raise TypeError(f"entry {seat.spec['entry']} returned {type(data).__name__}, not bytes")
        if len(data) > seat.spec["max_result_bytes"]:
            raise ValueError(f"the result has {len(data)} bytes; at most {seat.spec['max_result_bytes']} may be returned")
        frames = [wire.frame(b"D", data)]
    except Failure as failure:
        frames = [wire.frame(b"X", failure.data), wire.frame(b"E", wire.dump_json(describe(failure.cause)))]
    except BaseException as error:
        frames = [wire.frame(b"E", wire.dump_json(describe(error)))]
    seconds = time.perf_counter() - started
    if writer is not None:
        writer.set_state(page.FINISHED)
    meta = {"seconds": seconds, "threads": _left_threads()}
    return [wire.frame(b"M", wire.dump_json(meta)), *frames, wire.frame(b"F", b"")]


def _left_threads() -> list[str]:
    mine = threading.current_thread()
    return [thread.name[:40] for thread in threading.enumerate() if thread is not mine and not thread.daemon][:5]


def describe(error: BaseException) -> dict:
    """An exception as plain data: type, message, traceback from the first frame outside labkit on, notes."""
    try:
        message = str(error)
    except Exception as broken:
        message = f"<its message cannot be made: {type(broken).__name__}>"
    try:
        told = traceback.TracebackException.from_exception(error)
        _without_plumbing(told)
        text = "".join(told.format())
    except Exception as broken:
        text = f"<its traceback cannot be made: {type(broken).__name__}>"
    notes = [str(note)[:2000] for note in getattr(error, "__notes__", [])[:10]]
    if len(text) > TEXT_LIMIT:
        text = text[: TEXT_LIMIT // 4] + "\n[...]\n" + text[-3 * TEXT_LIMIT // 4 :]
    return {"type": type(error).__name__, "message": message[:TEXT_LIMIT], "traceback": text, "notes": notes}


def _without_plumbing(told: traceback.TracebackException | None) -> None:
    """Drop frames that tell a learner nothing, here and in the exceptions behind this one; keep them where nothing else is left."""
    while told is not None:
        kept = [frame for frame in told.stack if not is_plumbing(frame.filename)]
        if kept:
            told.stack = traceback.StackSummary.from_list(kept)
        told = told.__cause__ or told.__context__

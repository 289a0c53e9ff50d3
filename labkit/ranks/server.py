"""The warm process: imports torch once, then forks a supervisor for every job it is handed.

It is a fresh interpreter and not a fork of the caller, so it inherits neither an initialised CUDA nor a Jupyter kernel. It
stays single-threaded (forking with threads is unsafe) and holds one socket to the caller; when that closes it ends.
"""

import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress

from labkit.ranks import system

_NEEDED = (
    "torch",
    "torch.distributed",
    "cloudpickle",
    "labkit.ranks.child",
    "labkit.ranks.supervisor",
    "labkit.ranks.notes",
    "labkit.ranks.group",
)
# Not needed to start, but a rank that imports them itself would pay up to a second each time.
_WELCOME = (
    "numpy",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "safetensors.torch",
    "labkit.recorder",
    "labkit.ranks.call",
    "labkit.ranks.live",
    "labkit.ranks.link_group",
    "labkit.ranks.staged",
    "labkit.checks",
    "labkit.checks._probe",
    "labkit.checks._warm",
)


def main(control_fd: int, parent: int) -> None:
    """Serve until the caller closes its end of ``control_fd`` or dies."""
    control = socket.socket(fileno=control_fd)
    system.adopt_orphans()
    with _orphan_watch(control, parent):
        for name in _NEEDED:
            importlib.import_module(name)
        for name in _WELCOME:
            with suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank's collections skip what was imported here, and its pages stay shared
    importlib.import_module("labkit.recorder._patches").frozen = True
    control.send(b"R")
    system.gather_pages()
    _serve(control, parent)


class _orphan_watch:
    """Ends the process when the caller goes away during the imports, which take seconds; joined before any fork."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self.control, self.parent, self.done = control, parent, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self.done.wait(0.1):
            if os.getppid() != self.parent or _closed(self.control):
                os._exit(0)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


def _closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _serve(control: socket.socket, parent: int) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    supervisors: set[int] = set()
    while True:
        ready, _, _ = select.select([control, wake_read], [], [], 1.0)
        if wake_read in ready:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
        _reap(supervisors)
        if control in ready:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                break
            supervisors.add(_start_supervisor(control, fds[0], (wake_read, wake_write)))
            os.close(fds[0])
        elif os.getppid() != parent:
            break
    # Supervisors see the same end of the caller on their own sockets and clean up; this waits for them.
    for _ in range(100):
        _reap(supervisors)
        if not supervisors:
            break
        select.select([], [], [], 0.01)
    system.end_all_children()
    os._exit(0)


def _start_supervisor(control: socket.socket, job_fd: int, wake: tuple[int, int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        control.close()
        for fd in wake:
            os.close(fd)
        from labkit.ranks.supervisor import supervise

        supervise(socket.socket(fileno=job_fd), server)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _reap(supervisors: set[int]) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            supervisors.discard(pid)
    # A supervisor that was killed leaves its ranks' children here, since this process adopts orphans.
    system.kill_all(list(set(system.children(os.getpid())) - supervisors))

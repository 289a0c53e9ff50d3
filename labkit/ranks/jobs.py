"""The caller's side: start the warm server, hand it a job, collect one report per rank. Unpickles nothing."""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from labkit.ranks import wire
from labkit.ranks.errors import NestedRanksError, ServerError
from labkit.ranks.faults import Fault, to_spec
from labkit.ranks.link import Link
from labkit.ranks.sources import with_source

START_S = 180.0  # importing torch from a cold, slow disk
PATIENCE_S = 30.0  # over the job's own timeout, for collecting what the ranks leave
_CODE = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from labkit.ranks.server import main; main({}, {})"


@dataclass
class RankReport:
    """What became of one rank.

    ``status`` is one of ok, error, exit, timeout, deadlock, memory, interrupted (stopped because a peer failed), killed (by a
    planned fault) and protocol (what it sent cannot be read). ``data`` is what the entry returned. ``error`` has type, message,
    traceback (text) and notes. ``output`` is its stdout and stderr in the order written; ``seconds`` the time in the entry (until
    it was stopped, else). ``detail`` says what there is to say beyond that: exit code or signal, who waits for whom, the stack
    when it was stopped. ``ended`` is when it ended, in seconds since the job began: the smallest among failures is the cause.
    ``lives`` counts how often it was started: more than once after a planned restart.
    """

    rank: int
    status: str
    data: bytes = field(default=b"", repr=False)
    error: dict | None = None
    output: str = ""
    seconds: float = 0.0
    detail: str = ""
    ended: float = 0.0
    lives: int = 1


class _Server:
    """A warm server of this process and the socket that keeps it alive."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.log = tempfile.TemporaryFile()
        self.control, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(entry or os.getcwd()) for entry in sys.path])
        code = _CODE.format(theirs.fileno(), self.owner)
        environment = os.environ | {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}
        with theirs:
            # Its own session: Jupyter interrupts a kernel by a signal to the kernel's whole process group.
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, path],
                stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                pass_fds=[theirs.fileno()], start_new_session=True, env=environment,
            )
        self.ready = False
        self.starting = threading.Lock()

    def submit(self, job: socket.socket) -> None:
        socket.send_fds(self.control, [b"J"], [job.fileno()])

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def still_running(self) -> bool:
        """Like alive(), but gives a process that is just ending the moment it takes to see that."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        return self.alive()

    def wait_ready(self) -> None:
        with self.starting:
            if self.ready:
                return
            if not select.select([self.control], [], [], START_S)[0]:
                raise ServerError(f"the process that starts ranks was not ready after {START_S:.0f} s")
            if self.control.recv(1) != b"R":
                raise ServerError("the process that starts ranks could not start:\n" + self.last_words())
            self.ready = True

    def last_words(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), 4000, max(0, size - 4000)).decode("utf-8", "replace")

    def close(self) -> None:
        self.control.close()
        self.log.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)


_server: _Server | None = None
_lock = threading.Lock()


def _current_server() -> _Server:
    global _server
    with _lock:
        if _server is None or not _server.alive():
            if _server is not None and _server.owner == os.getpid():
                _server.close()
            _server = _Server()
        return _server


def warm_up() -> None:
    """Start the process that starts ranks, unless it runs already; returns at once."""
    refuse_nesting()
    _current_server()


@atexit.register
def shut_down() -> None:
    """End the warm process of this interpreter, if it has one; the next job starts another."""
    global _server
    with _lock:
        server, _server = _server, None
        if server is not None and server.owner == os.getpid():
            server.close()


def refuse_nesting() -> None:
    """Raise where this process is itself a rank."""
    child = sys.modules.get("labkit.ranks.child")
    if child is not None and child.current is not None:
        raise NestedRanksError(
            f"this is rank {child.current} of a running job, and a rank cannot start ranks: call run_ranks (or check) "
            "in the notebook itself, outside the function that the ranks run"
        )


def launch(
    payload: bytes,
    *,
    world_size: int,
    entry: str,
    timeout: float,
    init_process_group: bool,
    max_result_bytes: int = 1 << 30,
    env: dict[str, str] | None = None,
    link: Link | None = None,
    faults: Sequence[Fault] = (),
    shared: bool = False,
    backend: str | None = None,
    on_live: Callable[[int, dict], None] | None = None,
) -> list[RankReport]:
    """Run ``entry`` ("module:function") on ``world_size`` fresh processes, forked warm; one report per rank, in order.

    Each calls ``function(payload, rank, world_size)``, which must return bytes. With ``init_process_group``, torch.distributed
    is initialised: over a modelled wire with ``link``, else with ``backend`` ("gloo", "nccl", "staged") or what fits the cards.
    ``timeout`` is in seconds. ``env`` adds to the environment, which is otherwise the caller's of now. ``faults`` strike as planned.
    ``shared``: give ranks without a group, too, what they share (a folder for addresses, notes of who waits).
    ``on_live(rank, news)`` is called while they run with what they tell.
    Nothing that a rank sends is unpickled here. Raises NestedRanksError inside a rank, ServerError when no process can be
    started, and whatever interrupts the wait (KeyboardInterrupt), after every process of the job is gone.
    """
    refuse_nesting()
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    spec = {
        "world_size": world_size,
        "entry": entry,
        "timeout": float(timeout),
        "init_process_group": init_process_group,
        "max_result_bytes": max_result_bytes,
        "env": {**os.environ, **(env or {})},
        "cwd": os.getcwd(),
        "live": on_live is not None,
        "backend": backend,
        "shared": shared or bool(faults),
        "faults": to_spec(list(faults), world_size),
        "link": link.as_dict() if link is not None else None,
        "path": [os.path.abspath(item or os.getcwd()) for item in sys.path],
    }
    for attempt in (1, 2):
        server = _current_server()
        try:
            return _converse(server, spec, payload, on_live)
        except (EOFError, BrokenPipeError, ConnectionResetError) as lost:
            if server.still_running():
                # What died is the process that watches the ranks: killed from inside the job, or for lack of memory.
                return _unreadable(world_size, "the process that watches the ranks ended before its report")
            if attempt == 2:
                raise ServerError("the process that starts ranks died:\n" + server.last_words()) from lost
            # Else the server had died before (idle, killed), and this job never began.
        except TimeoutError:
            server.close()  # it ends whatever it has below it
            return _unreadable(world_size, "the process that watches the ranks does not answer")
        except (wire.WireError, ValueError, KeyError, TypeError) as garbled:
            return _unreadable(world_size, f"the report cannot be read ({garbled})")
    raise AssertionError("unreachable")


def _unreadable(world_size: int, why: str) -> list[RankReport]:
    return [RankReport(rank, "protocol", detail=why) for rank in range(world_size)]


def _converse(
    server: _Server, spec: dict, payload: bytes, on_live: Callable[[int, dict], None] | None = None
) -> list[RankReport]:
    server.wait_ready()
    ours, theirs = socket.socketpair()
    done = False
    try:
        with theirs:
            server.submit(theirs)
        ours.sendall(wire.frame(b"S", wire.dump_json(spec)))
        ours.sendall(wire.header(b"P", len(payload)))
        ours.sendall(payload)
        ours.settimeout(spec["timeout"] + PATIENCE_S)
        reports = [_read_report(ours, rank, spec["max_result_bytes"], on_live) for rank in range(spec["world_size"])]
        done = True
        return reports
    finally:
        ours.close() if done else _hang_up(ours)


def _hang_up(ours: socket.socket) -> None:
    """Tell the supervisor to end, and wait (briefly) until it has: it closes its side when no process is left."""
    with ours, suppress(OSError):
        ours.shutdown(socket.SHUT_WR)
        ours.settimeout(0.2)
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            try:
                if not ours.recv(1 << 16):
                    return
            except TimeoutError:
                continue


def _read_report(sock: socket.socket, rank: int, max_result_bytes: int, on_live: Callable[[int, dict], None] | None) -> RankReport:
    kind, summary = wire.read_frame(sock, wire.JSON_LIMIT)
    while kind == b"L" and on_live is not None:
        on_live(summary[0], wire.load_json(summary[1:]))
        kind, summary = wire.read_frame(sock, wire.JSON_LIMIT)
    _, data = wire.read_frame(sock, max_result_bytes)
    _, output = wire.read_frame(sock, 4 << 20)
    plain = wire.load_json(summary)
    error = plain["error"]
    if error is not None:
        error["traceback"] = with_source(error["traceback"])
    return RankReport(
        rank=rank, status=plain["status"], data=bytes(data), error=error, output=output.decode("utf-8", "replace"),
        seconds=plain["seconds"], detail=with_source(plain["detail"]), ended=plain["ended"],
        lives=plain["lives"],
    )

"""One job: forks the ranks, reads what they say, ends them all, and reports. Runs no code of the learner's.

The caller's end of the socket closing means "stop": Ctrl-C, a kernel restart and a killed kernel look alike from here.
"""

import os
import resource
import selectors
import signal
import socket
import tempfile
import time
from contextlib import suppress

from labkit.ranks import child, page, stacks, system, wire
from labkit.ranks.accidents import Accidents
from labkit.ranks.deadlock import Situation, assess_stacks
from labkit.ranks.process import Rank
from labkit.ranks.verdicts import excuse_victims, judge_rank
from labkit.ranks.watch import HAS_PROC, QUIET_BLIND_S, QUIET_S, QUIET_UNPROVEN_S, Watch, uses_card

SPEC_BYTES = 16 << 20
PAYLOAD_BYTES = 1 << 34
GRACE_S = 0.5
TICK_S = 0.1


class Job:
    def __init__(self, sock: socket.socket, server: int, spec: dict, payload: bytearray) -> None:
        self.sock, self.server, self.spec, self.payload = sock, server, spec, bytes(payload)
        self.started = time.monotonic()
        self.ranks = [Rank(number, spec["max_result_bytes"]) for number in range(spec["world_size"])]
        shared = spec["init_process_group"] or spec["shared"]
        self.scratch = tempfile.mkdtemp(prefix="labkit-ranks-") if shared else None
        self.first_failure: float | None = None
        self.memory = page.create(spec["world_size"]) if shared else None
        self.accidents = Accidents(spec["faults"], self.memory, self.revive)
        self.selector = selectors.DefaultSelector()
        self.watcher: Watch | None = None
        self.situation: Situation | None = None
        self.wake_read, self.wake_write = os.pipe()

    def start(self) -> None:
        for fd in (self.wake_read, self.wake_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.selector.register(self.sock, selectors.EVENT_READ, "caller")
        self.selector.register(self.wake_read, selectors.EVENT_READ, "wake")
        for rank in self.ranks:
            self._fork(rank)

    def _fork(self, rank: Rank) -> None:
        private = [self.sock.fileno(), self.wake_read, self.wake_write, self.selector.fileno()]
        private += [fd for other in self.ranks for fd in (other.out_fd, other.result_fd, other.release_fd)]
        supervisor = os.getpid()
        rank.pid = os.fork()
        if rank.pid == 0:
            others = [fd for other in self.ranks if other is not rank for fd in other.open_on_the_rank_side()]
            child.run_rank(child.Seat(
                number=rank.number, world_size=len(self.ranks), supervisor=supervisor, close=private + others,
                out_fd=rank.out_write, result_fd=rank.result_write, release_fd=rank.release_read,
                dump_fd=rank.dump.fileno(), scratch=self.scratch, memory=self.memory, spec=self.spec,
                payload=self.payload, life=rank.life, board=self.accidents.board))
        rank.close_rank_side()
        os.set_blocking(rank.out_fd, False)
        os.set_blocking(rank.result_fd, False)
        self.selector.register(rank.out_fd, selectors.EVENT_READ, rank.add_output)
        self.selector.register(rank.result_fd, selectors.EVENT_READ, rank.reader.feed)

    def revive(self, rank: Rank) -> None:
        """Start a rank again after a planned death."""
        for fd in (rank.out_fd, rank.result_fd):
            with suppress(KeyError):
                self.selector.unregister(fd)
        page.clear(self.memory, rank.number)
        rank.live_again()
        self._fork(rank)
        self.watcher.follow(rank.number, rank.pid)

    def watch(self) -> bool:
        """Read from the ranks until all are done or must be stopped; False when the caller has gone."""
        deadline = self.started + self.spec["timeout"]
        watcher = self.watcher = Watch(self.memory, [rank.pid for rank in self.ranks]) if self.memory else None
        next_look = self.started + TICK_S
        while True:
            for key, _ in self.selector.select(self.accidents.tick_s or TICK_S):
                if key.data == "caller":
                    return False
                self._read(key)
            self._forward()
            if os.getppid() != self.server:
                return False
            self._reap()
            self.accidents.look(self.ranks)
            self._note_ends()
            if all(rank.finished for rank in self.ranks):
                return True
            now = time.monotonic()
            if now > deadline:
                self._stop("timeout", f"not done after {self.spec['timeout']:g} s")
                return True
            if self.first_failure is None and any(rank.failed for rank in self.ranks):
                self.first_failure = now
            if self.first_failure is not None and now > self.first_failure + GRACE_S:
                self._interrupt()
                return True
            if watcher is not None and now >= next_look and not self.accidents.unsettled(self.ranks):
                next_look = now + TICK_S
                if self._stuck(watcher):
                    return True

    def _stuck(self, watcher: Watch) -> bool:
        """Look for a deadlock; True when the ranks have been stopped for one (or for nothing more to hope for after a failure)."""
        done = {rank.number: _end_of(rank) for rank in self.ranks if rank.finished}
        situation, quiet_s = watcher.look(done)
        if situation is not None and self.first_failure is not None:
            self._interrupt()
            return True
        if situation is not None and situation.proven:
            if quiet_s >= (QUIET_S if HAS_PROC else QUIET_BLIND_S):
                self.situation = situation
                self._stop("deadlock")
        elif HAS_PROC and quiet_s >= (QUIET_UNPROVEN_S if situation else watcher.patience_s):
            self._stop("deadlock")
            self.situation = situation or self._read_stacks(done)
            if self.situation is None:
                for rank in self.ranks:
                    rank.stopped = None
                watcher.doubt()
        return self.situation is not None

    def _read_stacks(self, done: dict[int, str]) -> Situation | None:
        """For ranks that wait where nothing is noted (DDP's reducer, functional collectives): do all stacks say so?"""
        snapshots = [page.read(self.memory, rank.number) for rank in self.ranks]
        unnoted = {}
        for rank in self.ranks:
            if rank.finished or snapshots[rank.number].communicates:
                continue
            kind = stacks.in_communication(rank.stack, uses_card(rank.pid))
            if kind is None:
                return None
            unnoted[rank.number] = kind
        return assess_stacks(snapshots, done, unnoted)

    def _read(self, key: selectors.SelectorKey) -> None:
        try:
            data = os.read(key.fd, 1 << 20)
        except BlockingIOError:
            return
        if key.data == "wake":
            return
        if data:
            key.data(data)
        else:
            self.selector.unregister(key.fd)

    def _forward(self) -> None:
        """Hand on what ranks tell while they run, to a caller who wants it."""
        for rank in self.ranks:
            while rank.reader.streamed:
                told = rank.reader.streamed.popleft()
                if self.spec["live"]:
                    self.sock.sendall(wire.frame(b"L", bytes([rank.number % 256]) + told))

    def _reap(self) -> None:
        by_pid = {rank.pid: rank for rank in self.ranks}
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in by_pid:
                    rank = by_pid[pid]
                    rank.exit = status
                    rank.drain()
                    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                        rank.planned = self.accidents.planned(rank)

    def _note_ends(self) -> None:
        for rank in self.ranks:
            if rank.finished and not rank.ended:
                rank.ended = time.monotonic() - self.started

    def _interrupt(self) -> None:
        cause = min((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.ended)
        self._stop("interrupted", f"stopped because rank {cause.number} failed")

    def _stop(self, status: str, why: str = "") -> None:
        """Mark the ranks that are still at work and ask each for its stack."""
        running = [rank for rank in self.ranks if not rank.finished]
        for rank in running:
            rank.stopped, rank.why = status, why
            rank.ended = time.monotonic() - self.started
            os.ftruncate(rank.dump.fileno(), 0)
            if rank.exit is not None:  # dead, and about to return
                continue
            with suppress(ProcessLookupError):
                os.kill(rank.pid, child.DUMP_SIGNAL)
        end = time.monotonic() + 0.3
        sizes: list[int] = []
        while time.monotonic() < end:
            time.sleep(0.02)
            before, sizes = sizes, [os.fstat(rank.dump.fileno()).st_size for rank in running]
            if before == sizes and all(sizes):
                break
        for rank in running:
            rank.stack = os.pread(rank.dump.fileno(), 64 << 10, 0).decode("utf-8", "replace")

    def end(self) -> None:
        """Nobody survives: ranks, their process groups, and whatever got away from those."""
        for rank in self.ranks:
            if rank.pid and rank.exit is None:
                below = system.descendants(rank.pid)
                rank.left_behind = system.command_names(below)
                if not HAS_PROC:  # nobody adopts orphans here
                    system.kill_all(below)
        for rank in self.ranks:
            # The number of a rank that has been reaped may belong to a stranger by now; on Linux what it left was adopted.
            if rank.pid and (rank.exit is None or not HAS_PROC):
                system.kill_group(rank.pid)
        system.end_all_children()
        for rank in self.ranks:
            rank.drain()
        if self.scratch:
            system.remove_tree(self.scratch)

    def report(self, broken: str | None) -> None:
        judged = [judge_rank(rank, self.situation) for rank in self.ranks]
        excuse_victims([summary for summary, _ in judged])
        for rank, (summary, data) in zip(self.ranks, judged, strict=True):
            if broken:
                summary |= {"status": "protocol", "error": None, "detail": f"the ranks could not be run: {broken}"}
            for payload in (wire.dump_json(summary), data, rank.output.encode("utf-8", "replace")):
                self.sock.sendall(wire.frame(b"R", payload))


def _end_of(rank: Rank) -> str:
    return "been killed" if rank.planned else "failed" if rank.failed else "finished"


def supervise(sock: socket.socket, server: int) -> None:
    """Serve one job on ``sock``; returns when no process of it is left."""
    os.setsid()
    system.adopt_orphans()
    _, spec = wire.read_frame(sock, SPEC_BYTES)
    _, payload = wire.read_frame(sock, PAYLOAD_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096 and (hard == resource.RLIM_INFINITY or hard > soft):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096 if hard == resource.RLIM_INFINITY else min(4096, hard), hard))
    job = Job(sock, server, wire.load_json(spec), payload)
    present, broken = True, None
    try:
        job.start()
        present = job.watch()
    except OSError as error:  # no more processes, descriptors or memory to be had
        broken = str(error)
    finally:
        job.end()
    if present:
        job.report(broken)

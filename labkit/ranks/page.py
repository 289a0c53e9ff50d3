"""Shared memory in which each rank notes what it has posted and what it waits for, and from which the supervisor reads.

One block of 64-bit words per rank, written by that rank alone (an aligned word is stored at once). Fixed places, so that noting
an operation is a few stores: a header, the waits in progress, the process groups, and counters of posted operations per
direction, group, peer and tag. The reader takes nothing for granted: a rank can scribble over its block.
"""

import mmap
import os
import threading
import zlib
from dataclasses import dataclass, field

STARTING, RUNNING, FINISHED = 0, 1, 2
SEND, RECV, COLLECTIVE = 1, 2, 3
ANY_PEER = -1
KINDS = (
    "wait", "send", "recv", "recv from any rank", "barrier", "all_reduce", "all_reduce_coalesced", "broadcast",
    "reduce", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single", "new_group", "thread",
)
_HEAD, _WAITS, _WAIT, _THREADS, _GROUPS, _GROUP, _SLOTS, _SLOT = 16, 16, 8, 16, 64, 8, 2048, 5
_AT_WAITS = _HEAD
_AT_THREADS = _AT_WAITS + _WAITS * _WAIT
_AT_GROUPS = _AT_THREADS + _THREADS
_AT_SLOTS = _AT_GROUPS + _GROUPS * _GROUP
WORDS = _AT_SLOTS + _SLOTS * _SLOT
_STATE, _CHANGES, _OVERFLOW, _SLOT_COUNT, _GROUP_COUNT, _RESTLESS, _LAST = range(7)  # _LAST: five words about the last wait that ended
_MASK_BITS = 62
MAX_RANKS = 4 * _MASK_BITS


@dataclass(frozen=True)
class Wait:
    """One thread's wait: for the ``index``-th operation of its kind on that group, peer and tag."""

    thread: int
    kind: str
    group: int
    peer: int
    tag: int
    index: int


@dataclass
class Snapshot:
    """What a rank's block says at one moment."""

    state: int
    changes: int
    overflow: bool
    waits: list[Wait]
    threads: list[int]  # native ids of Python threads that were not waiting when the last wait began
    groups: dict[int, list[int]] = field(default_factory=dict)  # group -> members as global ranks
    posted: dict[tuple[int, int, int, int], int] = field(default_factory=dict)  # (direction, group, peer, tag) -> count
    last: Wait | None = None  # the last wait that has ended: what the rank did before
    restless: int = 0  # the native id of a thread that runs though it does nothing for the function

    @property
    def communicates(self) -> bool:
        """Whether a thread of it waits for a message; who waits for another thread alone may be woken by anything."""
        return any(wait.kind != "thread" for wait in self.waits)


def group_key(name: str) -> int:
    return zlib.crc32(name.encode())


def create(ranks: int) -> mmap.mmap:
    """Memory for ``ranks`` blocks, shared with whoever is forked afterwards."""
    return mmap.mmap(-1, ranks * WORDS * 8)


def _block(memory: mmap.mmap, rank: int) -> memoryview:
    return memoryview(memory).cast("q")[rank * WORDS : (rank + 1) * WORDS]


class Writer:
    """A rank's hand on its own block."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self.words = _block(memory, rank)
        self._slots: dict[tuple[int, int, int, int], int] = {}
        self._groups: set[int] = set()
        self._exempt: set[int] = set()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._detach)

    def _detach(self) -> None:
        """A process that the learner's code forks keeps its own, private notes."""
        self.words = memoryview(bytearray(WORDS * 8)).cast("q")
        self._lock = threading.Lock()

    def set_state(self, state: int) -> None:
        with self._lock:
            if state == FINISHED:
                self._note_threads(besides=threading.get_native_id())
            self.words[_STATE] = state
            self.words[_CHANGES] += 1

    def exempt(self, thread: int, restless: bool = False) -> None:
        """A thread of labkit's own (its native id), from which nothing will come by itself; `restless`: though it runs."""
        self._exempt.add(thread)
        if restless:
            self.words[_RESTLESS] = thread

    def touch(self) -> None:
        """Say that something moves, though nothing is posted and no wait ends."""
        with self._lock:
            self.words[_CHANGES] += 1

    def add_group(self, group: int, members: list[int]) -> None:
        with self._lock:
            if group in self._groups:
                return
            if len(self._groups) == _GROUPS or max(members) >= MAX_RANKS:
                self.words[_OVERFLOW] = 1
                return
            at = _AT_GROUPS + len(self._groups) * _GROUP
            self._groups.add(group)
            self.words[at] = group
            for member in members:
                self.words[at + 1 + member // _MASK_BITS] |= 1 << (member % _MASK_BITS)
            self.words[_GROUP_COUNT] = len(self._groups)

    def post(self, direction: int, group: int, peer: int, tag: int) -> int:
        """Count one more posted operation; its number among those alike, from 1."""
        key = (direction, group, peer, tag)
        with self._lock:
            at = self._slots.get(key)
            if at is None:
                if len(self._slots) == _SLOTS:
                    self.words[_OVERFLOW] = 1
                    return 0
                at = _AT_SLOTS + len(self._slots) * _SLOT
                self._slots[key] = at
                for offset, word in enumerate(key):
                    self.words[at + offset] = word
                self.words[_SLOT_COUNT] = len(self._slots)
            self.words[at + 4] += 1
            self.words[_CHANGES] += 1
            return self.words[at + 4]

    def begin_wait(self, kind: int, group: int, peer: int, tag: int, index: int) -> int:
        thread = threading.get_native_id()
        with self._lock:
            words = self.words
            for at in range(_AT_WAITS, _AT_THREADS, _WAIT):
                if words[at] == 0:
                    words[at + 1], words[at + 2], words[at + 3], words[at + 4], words[at + 5] = kind, group, peer, tag, index
                    words[at] = thread
                    self._note_threads()
                    words[_CHANGES] += 1
                    return at
            words[_OVERFLOW] = 1
            return 0

    def end_wait(self, at: int) -> None:
        if at:
            with self._lock:
                words = self.words
                if KINDS[words[at + 1]] not in ("wait", "thread"):
                    words[_LAST : _LAST + 5] = words[at + 1 : at + 6]
                words[at] = 0
                self._note_threads()
                words[_CHANGES] += 1

    def waits(self) -> bool:
        """Whether this thread is in a wait that is noted."""
        thread = threading.get_native_id()
        return any(self.words[at] == thread for at in range(_AT_WAITS, _AT_THREADS, _WAIT))

    def note_threads(self) -> None:
        """Another thread is there now."""
        with self._lock:
            self._note_threads()
            self.words[_CHANGES] += 1

    def _note_threads(self, besides: int = 0) -> None:
        words = self.words
        if threading.active_count() == 1:
            others = []
        else:
            waiting = {words[at] for at in range(_AT_WAITS, _AT_THREADS, _WAIT)} | {besides} | self._exempt
            others = [thread.native_id or 0 for thread in threading.enumerate() if thread.native_id not in waiting]
        if len(others) >= _THREADS:
            words[_OVERFLOW] = 1
        for offset, thread in enumerate([*others[: _THREADS - 1], 0]):
            words[_AT_THREADS + offset] = thread


def read(memory: mmap.mmap, rank: int) -> Snapshot:
    words = _block(memory, rank)
    waits = [
        Wait(words[at], KINDS[words[at + 1] % len(KINDS)], *words[at + 2 : at + 6])
        for at in range(_AT_WAITS, _AT_THREADS, _WAIT)
        if words[at]
    ]
    threads = []
    for thread in words[_AT_THREADS:_AT_GROUPS]:
        if thread == 0:
            break
        threads.append(thread)
    snapshot = Snapshot(words[_STATE], words[_CHANGES], bool(words[_OVERFLOW]), waits, threads, restless=words[_RESTLESS])
    if words[_LAST]:
        snapshot.last = Wait(0, KINDS[words[_LAST] % len(KINDS)], *words[_LAST + 1 : _LAST + 5])
    for number in range(min(max(words[_GROUP_COUNT], 0), _GROUPS)):
        at = _AT_GROUPS + number * _GROUP
        snapshot.groups[words[at]] = [
            part * _MASK_BITS + bit for part in range(4) for bit in range(_MASK_BITS) if words[at + 1 + part] >> bit & 1
        ]
    for number in range(min(max(words[_SLOT_COUNT], 0), _SLOTS)):
        direction, group, peer, tag, count = words[_AT_SLOTS + number * _SLOT : _AT_SLOTS + (number + 1) * _SLOT]
        snapshot.posted[direction, group, peer, tag] = count
    return snapshot


def clear(memory: mmap.mmap, rank: int) -> None:
    """Forget all that a rank has noted: it starts again."""
    block = _block(memory, rank)
    for at in range(WORDS):
        if block[at] and at != _CHANGES:
            block[at] = 0
    block[_CHANGES] += 1


def changes(memory: mmap.mmap, ranks: int) -> tuple[int, ...]:
    """One number per rank that grows with everything the rank notes: equal tuples mean nothing happened."""
    words = memoryview(memory).cast("q")
    return tuple(words[rank * WORDS + _CHANGES] for rank in range(ranks))

"""The rows that a `Recording`'s readers return. Seconds count from the recorder's start unless they are a duration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StorageInfo:
    """One storage and where it came from.

    `bytes` are those at the instant asked about (at birth, for `allocations`). `born` is False for what existed before
    the recorder saw it. `freed_s` and `freed_event` are None for what outlived the recording. Events count changes of
    memory: of two, the one with the smaller number happened first. `on_card` is True for CUDA memory.
    """

    sid: int
    bytes: int
    category: str
    op: str
    module: str
    phase: str
    born: bool
    name: str
    on_card: bool
    born_s: float
    freed_s: float | None
    born_event: int
    freed_event: int | None


@dataclass(frozen=True)
class OpInfo:
    """One operator that ran; `seconds` is its duration (on CUDA: of its launch)."""

    index: int
    name: str
    phase: str
    module: str
    flops: int
    seconds: float
    start_s: float
    in_backward: bool
    recompute: bool


@dataclass(frozen=True)
class CallInfo:
    """One call of a watched module; `in_backward` tells a recomputation. `seconds` is its duration."""

    module: str
    phase: str
    in_backward: bool
    seconds: float
    start_s: float


@dataclass(frozen=True)
class CommInfo:
    """One collective or message of this rank, or the time it waited for one (kind "wait").

    `payload_bytes` is the size of the full tensor; bytes sent and received by a collective are those of the lectures'
    ring algorithms. `peer` is a global rank. `event` is the number of memory changes before it was posted, `op_index` the
    number of operators before that. `simulated`: it took a modelled wire; `posted_s` is then the call, and `start_s` and
    `end_s` are its first and last moment on the wire (at the receiver, a latency later). Otherwise `posted_s` is `start_s`.
    """

    kind: str
    bytes_sent: int
    bytes_received: int
    payload_bytes: int
    peer: int | None
    group: str
    group_size: int
    asynchronous: bool
    phase: str
    module: str
    start_s: float
    end_s: float
    event: int
    op_index: int
    op: str
    posted_s: float
    simulated: bool


def human_bytes(count: float) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    i = 0
    while abs(count) >= 1023.95 and i < len(units) - 1:
        count, i = count / 1024, i + 1
    return f"{count:.0f} bytes" if i == 0 else f"{count:.1f} {units[i]}".replace(".0 ", " ")

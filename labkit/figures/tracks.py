"""What the lanes need from the recordings of ranks: clocks aligned, spans merged to what can be seen, and the same in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labkit.figures.thin import keep
from labkit.figures.units import human_bytes, human_seconds
from labkit.recorder._code import IN_BACKWARD, OP_MASK, PHASE_MASK, PHASE_SHIFT

Span = tuple[float, float]


@dataclass
class Lane:
    """One rank's time, in seconds since the first recording of the group began.

    compute : kind of work -> spans; sends, receives, collectives : (start, end, text); launches : moments at which a
    real asynchronous message was posted, whose time on the wire nobody knows; marks : (seconds, name)
    """

    rank: int
    end_s: float
    compute: dict[str, list[Span]]
    waits: list[Span]
    sends: list[tuple[float, float, str]] = field(default_factory=list)
    receives: list[tuple[float, float, str]] = field(default_factory=list)
    collectives: list[tuple[float, float, str]] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    memory: tuple[np.ndarray, np.ndarray] = field(default=(np.zeros(0), np.zeros(0)))
    simulated: bool = False
    words: str = ""


def offsets(recordings: Sequence[Any]) -> list[float]:
    """Seconds from the group's start to each recording's: by the clock that the processes of one machine share (exact), or
    by the time of day between machines (as good as their clocks).
    """
    one_machine = len({recording.machine for recording in recordings}) == 1
    starts = [recording.clock_s if one_machine else recording.started for recording in recordings]
    return [start - min(starts) for start in starts]


def lanes_of(recordings: Sequence[Any], columns: int = 900) -> list[Lane]:
    """One lane per recording, in order; None stands for a rank that has none."""
    present = [(rank, recording) for rank, recording in enumerate(recordings) if recording is not None]
    starts = offsets([recording for _, recording in present])
    end = max(start + recording.seconds for start, (_, recording) in zip(starts, present, strict=True))
    return [_lane(rank, recording, start, end / columns) for start, (rank, recording) in zip(starts, present, strict=True)]


def _lane(rank: int, recording: Any, start: float, pixel: float) -> Lane:
    messages = recording.comm()
    waits = _merged([(row.start_s + start, row.end_s + start) for row in messages if row.kind == "wait"], pixel / 4)
    lane = Lane(rank, start + recording.seconds, _compute(recording, start, waits, pixel), waits)
    for number, row in enumerate(messages):
        if row.kind == "wait":
            continue
        lane.simulated |= row.simulated
        begin, end = row.start_s + start, row.end_s + start
        if not row.simulated:
            if row.asynchronous:
                lane.launches.append(begin)
                continue
            # A call that waits has its wait right behind it.
            following = next((later for later in messages[number + 1 :] if later.kind == "wait"), row)
            end = following.end_s + start
        if row.kind == "send":
            lane.sends.append((begin, end, f"to {row.peer}"))
        elif row.kind == "recv":
            lane.receives.append((begin, end, f"from {row.peer}"))
        else:
            lane.collectives.append((begin, end, row.kind))
    lane.marks = [(mark["seconds"] + start, mark["name"]) for mark in recording.marks]
    _, seconds, live = recording.timeline()
    chosen = keep(seconds, live, 400)
    lane.memory = (np.append(seconds[chosen], recording.seconds) + start, np.append(live[chosen], live[-1] if len(live) else 0))
    lane.words = _words(lane, recording)
    return lane


def _compute(recording: Any, start: float, waits: list[Span], pixel: float) -> dict[str, list[Span]]:
    """Kind of work (its phase; else forward or backward) -> spans in which operators ran; waiting is no work."""
    arrays, header = recording.arrays, recording.header
    codes, begins, lengths = arrays["op_code"], arrays["op_start"] + start, arrays["op_seconds"]
    talk = np.array(["c10d" in name for name in header["ops"]])
    own = ~talk[codes & OP_MASK]
    codes, begins, ends = codes[own], begins[own], begins[own] + lengths[own]
    phase, backward = codes >> PHASE_SHIFT & PHASE_MASK, codes & IN_BACKWARD != 0
    result: dict[str, list[Span]] = {}
    for key in np.unique(phase * 2 + (backward & (phase == 0))).tolist():
        name = header["phase_names"][key // 2] or ("backward" if key % 2 else "compute")
        mine = (phase * 2 + (backward & (phase == 0))) == key
        spans = _merged(list(zip(begins[mine].tolist(), ends[mine].tolist(), strict=True)), pixel)
        result[name] = result.get(name, []) + _without(spans, waits)
    return result


def _merged(spans: list[Span], gap: float) -> list[Span]:
    merged: list[list[float]] = []
    for begin, end in sorted(spans):
        if merged and begin - merged[-1][1] <= gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]


def _without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """`spans` minus `holes`; both in order and without overlaps."""
    left, first = [], 0
    for begin, end in spans:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        at = begin
        for hole in holes[first:]:
            if hole[0] >= end:
                break
            if hole[0] > at:
                left.append((at, hole[0]))
            at = max(at, hole[1])
        if at < end:
            left.append((at, end))
    return left


def _words(lane: Lane, recording: Any) -> str:
    worked = sum(end - begin for spans in lane.compute.values() for begin, end in spans)
    waited = sum(end - begin for begin, end in lane.waits)
    traffic = recording.bytes_by_kind()
    parts = [f"rank {lane.rank} computes {human_seconds(worked)}, waits {human_seconds(waited)}"]
    for kind, row in traffic.items():
        moved = row["bytes_received"] if kind == "recv" else row["bytes_sent"]
        parts.append(f"{row['count']} {kind} ({human_bytes(moved)})")
    return ", ".join(parts) + f", peak {human_bytes(recording.peak_bytes)}"

"""What the pictures need from a Recording, thinned to what can be seen, and the same in words."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.figures.colours import STACK
from labkit.figures.thin import keep, phase_strip
from labkit.figures.units import human_bytes, human_seconds


def thinned(recording: Any, columns: int = 900) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(seconds, category -> live bytes) with at most three samples per column; the extremes of the total stay."""
    seconds, by_category = recording.timeline_by_category()
    seconds = np.asarray(seconds, dtype=float)
    values = {name: np.asarray(by_category.get(name, np.zeros(len(seconds))), dtype=float) for name in STACK}
    chosen = keep(seconds, sum(values.values(), np.zeros(len(seconds))), columns)
    seconds, values = seconds[chosen], {name: column[chosen] for name, column in values.items()}
    if len(seconds) and recording.seconds > seconds[-1]:  # a run that allocates nothing to its end is drawn to its end
        seconds = np.append(seconds, recording.seconds)
        values = {name: np.append(column, column[-1]) for name, column in values.items()}
    return seconds, values


def phases_of(recording: Any, cells: int = 240) -> list[tuple[str, float, float]]:
    """Phases as (name, start s, end s), at most about `cells`."""
    phases = [
        (phase["name"], phase["start_s"], recording.seconds if phase["end_s"] is None else phase["end_s"])
        for phase in recording.phases
    ]
    return phase_strip(phases, recording.seconds, cells)


def phase_at(phases: list[tuple[str, float, float]], seconds: float) -> str:
    """The innermost phase at an instant, or ''."""
    around = [(end - start, name) for name, start, end in phases if start <= seconds <= end]
    return min(around)[1] if around else ""


def link_words(*recordings: Any) -> str:
    """"simulated link: 100 MB/s, 1 ms latency" where the recordings' messages took a modelled wire, or ''."""
    link = next((recording.link for recording in recordings if recording.link), None)
    if link is None:
        return ""
    rate, name = link["bandwidth_bytes_s"], "B/s"
    for larger in ("kB/s", "MB/s", "GB/s"):
        if rate >= 1000:
            rate, name = rate / 1000, larger
    shared = " per rank" if link["per"] == "rank" else ""
    return f"simulated link: {rate:.3g} {name}{shared}, {human_seconds(link['latency_s'])} latency"


def describe(recording: Any, title: str = "", budget_bytes: int | None = None) -> str:
    """The picture of a recording in words: peak, when, of what, and the phases."""
    seconds, by_category = thinned(recording)
    if not len(seconds):
        return f"{title or 'Live memory'}: nothing was recorded."
    total = sum(by_category.values(), np.zeros(len(seconds)))
    at = int(total.argmax())
    phase = phase_at(phases_of(recording), float(seconds[at]))
    parts = sorted(((float(by_category[name][at]), name) for name in STACK), reverse=True)
    made = ", ".join(f"{name} {human_bytes(count)}" for count, name in parts if count)
    words = (
        f"{title or 'Live memory'}: peak {human_bytes(float(total[at]))}{f' in {phase}' if phase else ''}, "
        f"{human_seconds(float(seconds[at]))} into {human_seconds(float(seconds[-1]))} ({made}); "
        f"{human_bytes(float(total[-1]))} at the end. Most of the peak: {recording.alive_summary('peak')}."
    )
    if link_words(recording):
        words += f" Messages took a {link_words(recording)}."
    if budget_bytes:
        words += f" Budget {human_bytes(budget_bytes)}."
    if recording.refusals:
        last = recording.refusals[-1]
        op, wanted = last["op"].removeprefix("aten."), human_bytes(last["wanted_bytes"])
        words += f" The budget refused {op} {wanted} more, with {human_bytes(last['live_bytes'])} alive."
    return words


def card_samples(samples: list[dict], most: int = 300) -> list[tuple[float, int, int]]:
    """(seconds, allocated bytes, reserved bytes) of a CUDA card's allocator, at most about `most`, the highest kept."""
    if not samples:
        return []
    rows = np.array([(sample["seconds"], sample["allocated"], sample["reserved"]) for sample in list(samples)])
    chosen = keep(rows[:, 0], rows[:, 1], most // 3)
    return [(float(s), int(a), int(r)) for s, a, r in rows[chosen]]

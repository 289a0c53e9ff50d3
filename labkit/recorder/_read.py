"""From the recorder's buffers to a `Recording`."""

import platform
from functools import cache

import numpy as np

from . import _transit
from ._code import CALL_COLUMNS, CATEGORY_MASK, CATEGORY_SHIFT, EVENT_COLUMNS, OP_COLUMNS
from .recording import Recording


def read_log(recorder) -> Recording:
    """Copy a recorder's buffers (whole rows, under the interpreter lock) into arrays."""
    log = recorder.log
    events = np.frombuffer(bytes(log.events), dtype=EVENT_COLUMNS)
    ops = np.frombuffer(bytes(log.ops), dtype=OP_COLUMNS)
    calls = np.frombuffer(bytes(log.calls), dtype=CALL_COLUMNS)
    _, first = np.unique(events["sid"], return_index=True)
    category = (events["code"][first] >> CATEGORY_SHIFT & CATEGORY_MASK).astype(np.int8)
    names = {"": 0}
    name_of = np.zeros(len(first), dtype=np.int32)
    for sid, label, name in log.labels[:]:
        if sid < len(first):
            category[sid] = label
            name_of[sid] = names.setdefault(name, len(names))
    header = {
        "version": 1,
        "ops": list(log.table.names),
        "phase_names": list(recorder.phase_names),
        "modules": list(recorder.module_names),
        "names": list(names),
        "marks": [dict(m) for m in recorder.marks],
        "phases": [dict(p) for p in recorder.phases],
        "messages": [dict(m) for m in log.messages],
        "refusals": [dict(r) for r in log.refusals],
        "cycles": log.cycles,
        "budget_bytes": log.budget,
        "seconds": recorder._now() if log.active else recorder.seconds,
        "started": recorder.started,
        "clock_s": log.start,
        "machine": machine(),
        "link": _transit.simulated_link,
        "card": log.sampler.card if log.sampler is not None else None,
        "samples": [dict(s) for s in log.samples],
    }
    arrays = {f"event_{name}": events[name].copy() for name, _ in EVENT_COLUMNS}
    arrays |= {f"op_{name}": ops[name].copy() for name, _ in OP_COLUMNS}
    arrays |= {f"call_{name}": calls[name].copy() for name, _ in CALL_COLUMNS}
    arrays |= {"storage_category": category, "storage_name": name_of}
    return Recording(header, arrays)


@cache
def machine() -> str:
    """Tells machines apart, and one machine's starts: within one, `clock_s` counts from the same instant in all processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()

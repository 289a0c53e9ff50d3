"""From the recorder's buffers to a `Recording`."""

from time import perf_counter

import numpy as np

from ._code import CATEGORY_MASK, CATEGORY_SHIFT, EVENT_COLUMNS, FIRST_SEEN, OP_COLUMNS
from .recording import Recording


def read_log(recorder) -> Recording:
    """Copy a recorder's buffers (whole rows, under the interpreter lock) into arrays."""
    log = recorder.log
    events = np.frombuffer(bytes(log.events), dtype=EVENT_COLUMNS)
    ops = np.frombuffer(bytes(log.ops), dtype=OP_COLUMNS)
    first = np.zeros(0, dtype=np.int64)
    if len(events):
        _, first = np.unique(events["sid"], return_index=True)
    births = events[first]
    category = (births["code"] >> CATEGORY_SHIFT & CATEGORY_MASK).astype(np.int8)
    names, name_of = [""], np.zeros(len(births), dtype=np.int32)
    numbers = {"": 0}
    for sid, (label, name) in list(log.labels.items()):
        if sid >= len(births):
            continue
        category[sid] = label
        if name not in numbers:
            numbers[name] = len(names)
            names.append(name)
        name_of[sid] = numbers[name]
    header = {
        "version": 1,
        "ops": log.table.names(),
        "phase_names": list(recorder.phase_names),
        "modules": list(recorder.module_names),
        "names": names,
        "marks": [dict(m) for m in recorder.marks],
        "phases": [dict(p) for p in recorder.phases],
        "messages": list(log.messages),
        "refusals": list(log.refusals),
        "cycles": log.cycles,
        "seconds": perf_counter() - log.start if log.active else recorder.seconds,
    }
    arrays = {
        "event_sid": events["sid"].copy(), "event_delta": events["delta"].copy(), "event_code": events["code"].copy(),
        "event_seconds": events["seconds"].copy(),
        "op_code": ops["code"].copy(), "op_start": ops["start"].copy(), "op_seconds": ops["seconds"].copy(),
        "op_flops": ops["flops"].copy(),
        "storage_bytes": births["delta"].copy(), "storage_code": births["code"].copy(), "storage_category": category,
        "storage_born": (births["code"] & FIRST_SEEN) == 0, "storage_name": name_of,
    }
    return Recording(header, arrays)

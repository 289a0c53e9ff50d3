"""Recordings in files, and the checks on what comes from outside: no reader may fail on parts that passed them."""

import json
import math
import os

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ._code import MODULE_MASK, MODULE_SHIFT, OP_MASK, PHASE_MASK, PHASE_SHIFT
from .categories import CATEGORIES

_ARRAYS = {
    "event_sid": "i8", "event_delta": "i8", "event_code": "i8", "event_seconds": "f8",
    "op_code": "i8", "op_start": "f8", "op_seconds": "f8", "op_flops": "i8",
    "call_code": "i8", "call_start": "f8", "call_seconds": "f8",
    "storage_category": "i1", "storage_name": "i4",
}  # fmt: skip
_MARK = {"name": str, "seconds": float, "event": int}
_PHASE = {"name": str, "number": int, "depth": int, "start_s": float, "first_event": int, "first_op": int}
_PHASE_END = {"end_s": float, "last_event": int, "last_op": int}
_MESSAGE = {
    "kind": str, "op": str, "code": int, "start_s": float, "end_s": float, "event": int, "op_index": int,
    "bytes_sent": int, "bytes_received": int, "payload_bytes": int, "group": str, "group_size": int,
    "asynchronous": bool, "posted_s": float, "simulated": bool,
}  # fmt: skip
_REFUSAL = {"op": str, "wanted_bytes": int, "live_bytes": int, "budget_bytes": int, "event": int, "seconds": float}
_SAMPLE = {"seconds": float, "allocated": int, "reserved": int, "used": int}
_LINK = {"bandwidth_bytes_s": float, "latency_s": float, "per": str}
_KEY = "labkit.recording"


def save(header: dict, arrays: dict[str, np.ndarray], path: str | os.PathLike) -> None:
    """Write a recording as one safetensors file."""
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path, metadata={_KEY: json.dumps(header)})


def load(path: str | os.PathLike) -> tuple[dict, dict[str, np.ndarray]]:
    """Read a recording's parts. Raises ValueError when the file holds none, FileNotFoundError when it is not there."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})[_KEY])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no recording: {error}") from error
    return checked(header, arrays)


def checked(header: dict, arrays: dict[str, np.ndarray]) -> tuple[dict, dict[str, np.ndarray]]:
    """The parts of a recording, which may come from anywhere. Raises ValueError when they do not fit together."""
    _need(isinstance(header, dict) and header.get("version") == 1, "not a recording of version 1")
    for name, kind in _ARRAYS.items():
        value = arrays.get(name)
        fits = isinstance(value, np.ndarray) and value.dtype == np.dtype(kind) and value.ndim == 1
        _need(fits, f"{name} must be a vector of {np.dtype(kind).name}")
        _need(len(value) == len(arrays[next(n for n in _ARRAYS if n[:3] == name[:3])]), f"{name} has the wrong length")
        _need(kind != "f8" or bool(np.isfinite(value).all()), f"{name} must be finite")
    for name in ("ops", "phase_names", "modules", "names"):
        value = header.get(name)
        fits = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
        _need(bool(fits), f"{name} must be a list of strings")
    events, ops = len(arrays["event_sid"]), len(arrays["op_code"])
    sids = np.unique(arrays["event_sid"])
    _need(np.array_equal(sids, np.arange(len(arrays["storage_category"]))), "storages and events do not match")
    _need(_inside(arrays["storage_category"], len(CATEGORIES)), "unknown category")
    _need(_inside(arrays["storage_name"], len(header["names"])), "a storage's name is not there")
    rows = {
        "marks": _MARK, "phases": _PHASE, "messages": _MESSAGE, "refusals": _REFUSAL, "samples": _SAMPLE,
    }  # fmt: skip
    for name, fields in rows.items():
        _need(isinstance(header.get(name), list), f"{name} must be a list")
        for row in header[name]:
            _need(isinstance(row, dict) and _fields(row, fields), f"a row of {name} is malformed")
    for phase in header["phases"]:
        ended = phase.get("end_s") is not None
        _need(not ended or _fields(phase, _PHASE_END), "a row of phases is malformed")
        spans = [(phase["first_event"], phase["last_event"] if ended else events, events)]
        spans.append((phase["first_op"], phase["last_op"] if ended else ops, ops))
        _need(all(0 <= a <= b <= end for a, b, end in spans), "a phase lies outside the recording")
    _need(all(0 <= mark["event"] <= events for mark in header["marks"]), "a mark lies outside the recording")
    for message in header["messages"]:
        _need(set(message) == {*_MESSAGE, "peer"}, "a row of messages is malformed")
        _need(message["peer"] is None or type(message["peer"]) is int, "a row of messages is malformed")
    codes = np.concatenate(
        [arrays["event_code"], arrays["op_code"], arrays["call_code"],
         np.array([m["code"] for m in header["messages"]], dtype=np.int64)]
    )  # fmt: skip
    _need(bool((codes >= 0).all()), "a negative code")
    _need(_inside(codes & OP_MASK, len(header["ops"])), "an operator's name is not there")
    _need(_inside(codes >> PHASE_SHIFT & PHASE_MASK, len(header["phase_names"])), "a phase's name is not there")
    _need(_inside(codes >> MODULE_SHIFT & MODULE_MASK, len(header["modules"])), "a module's name is not there")
    _need(_fields(header, {"cycles": int, "seconds": float, "started": float}), "the header is malformed")
    _need(_fields(header, {"clock_s": float, "machine": str}), "the header is malformed")
    _need(header.get("link") is None or _fields(header["link"], _LINK), "malformed link")
    _need(header.get("card") is None or _fields(header["card"], {"name": str, "total_bytes": int}), "malformed card")
    return header, {name: arrays[name] for name in _ARRAYS}


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"recording: {message}")


def _inside(values: np.ndarray, end: int) -> bool:
    return len(values) == 0 or (int(values.min()) >= 0 and int(values.max()) < end)


def _fields(row: object, fields: dict[str, type]) -> bool:
    return isinstance(row, dict) and all(_is(row.get(name), kind) for name, kind in fields.items())


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind and (kind is not int or -(2**63) <= value < 2**63)

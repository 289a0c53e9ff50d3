"""Recordings in files, and the checks on what comes from outside."""

import json
import os

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .categories import CATEGORIES

_KINDS = {
    "event_sid": "i8", "event_delta": "i8", "event_code": "i8", "event_seconds": "f8",
    "op_code": "i8", "op_start": "f8", "op_seconds": "f8", "op_flops": "i8",
    "storage_bytes": "i8", "storage_code": "i8", "storage_category": "i1", "storage_born": "?", "storage_name": "i4",
}
_KEY = "labkit.recording"


def save(recording, path: str | os.PathLike) -> None:
    """Write a recording as one safetensors file."""
    arrays = {name: np.ascontiguousarray(value) for name, value in recording.arrays.items()}
    save_file(arrays, path, metadata={_KEY: json.dumps(recording.header)})


def load(cls, path: str | os.PathLike):
    """Read a recording. Raises ValueError when the file is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})[_KEY])
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no recording: {error}") from error
    return checked(cls, header, arrays)


def checked(cls, header: dict, arrays: dict[str, np.ndarray]):
    """A recording from parts that may come from anywhere. Raises ValueError when they do not fit together."""
    if not isinstance(header, dict) or header.get("version") != 1:
        raise ValueError("not a recording of version 1")
    for name, kind in _KINDS.items():
        value = arrays.get(name)
        if value is None or value.dtype != np.dtype(kind) or value.ndim != 1:
            raise ValueError(f"recording: {name} must be a vector of {np.dtype(kind).name}")
    storages, sids = len(arrays["storage_bytes"]), arrays["event_sid"]
    if len(sids) and (sids.min() < 0 or sids.max() >= storages):
        raise ValueError("recording: an event names a storage that is not there")
    category = arrays["storage_category"]
    if len(category) and (category.min() < 0 or category.max() >= len(CATEGORIES)):
        raise ValueError("recording: unknown category")
    return cls(header, {name: arrays[name] for name in _KINDS})

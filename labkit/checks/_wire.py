"""What crosses the border between a learner's process and the judge: JSON and named tensors, never pickle.

A message is three parts behind a small header: a JSON object, tensors in safetensors form, and one opaque blob (the candidate on its
way in; it is opened only where it runs). Everything is checked while it is read, because the sender may be hostile.
"""

import json
import math
import struct
from typing import Any

import torch
from safetensors.torch import load as _load_tensors
from safetensors.torch import save as _save_tensors

_HEADER = struct.Struct("<4sQQQ")
_MAGIC = b"LKW1"
MAX_JSON_BYTES = 64 * 2**20


class WireError(ValueError):
    """The bytes are not a message of ours: cut short, not strict JSON, or tensors that do not parse."""


def _plain(value: Any) -> Any:
    """JSON has no nan or infinity: they travel as {"$float": "nan"}, so that both ends can stay strict."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (str, int, float)) or value is None:
        return value
    raise TypeError(f"a {type(value).__name__} cannot travel as JSON: use numbers, text, lists and dicts")


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise WireError("duplicate key in JSON")
    if set(result) == {"$float"}:
        if result["$float"] not in ("nan", "inf", "-inf"):
            raise WireError("not a float")
        return float(result["$float"])
    return result


def _refuse_constant(name: str) -> Any:
    raise WireError(f"{name} is not JSON")


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    """A plain, contiguous CPU copy that shares no storage (safetensors refuses shared ones), whatever subclass was handed over."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(tensor).as_subclass(torch.Tensor).to("cpu", copy=True).contiguous()


def pack(message: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, blob: bytes = b"") -> bytes:
    """One message as bytes. `message` holds only what JSON holds (nan and infinity included); tensors are copied to the CPU."""
    text = json.dumps(_plain(message), allow_nan=False, ensure_ascii=True).encode()
    body = _save_tensors({name: _portable(tensor) for name, tensor in (tensors or {}).items()})
    return _HEADER.pack(_MAGIC, len(text), len(body), len(blob)) + text + body + blob


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor], bytes]:
    """(message, tensors, blob) of `pack`. Raises WireError for anything else."""
    if len(data) < _HEADER.size:
        raise WireError("message cut short")
    magic, text_bytes, body_bytes, blob_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or len(data) != _HEADER.size + text_bytes + body_bytes + blob_bytes:
        raise WireError("not a message, or cut short")
    if text_bytes > MAX_JSON_BYTES:
        raise WireError("message too large")
    start = _HEADER.size
    try:
        text = data[start : start + text_bytes].decode("ascii")
        message = json.loads(text, object_pairs_hook=_pairs, parse_constant=_refuse_constant)
        tensors = _load_tensors(bytes(data[start + text_bytes : start + text_bytes + body_bytes]))
    except WireError:
        raise
    except Exception as error:  # json and safetensors raise several kinds; each means the same here
        raise WireError(f"message does not parse: {error}") from None
    if not isinstance(message, dict):
        raise WireError("message is not an object")
    return message, tensors, bytes(data[start + text_bytes + body_bytes :])

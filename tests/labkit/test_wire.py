"""What crosses the border: everything comes back exact, and anything else is refused."""

import json
import math
import struct

import pytest
import torch

from labkit.checks import _wire


def test_round_trip_is_exact() -> None:
    tensors = {
        "half": torch.tensor([1.1, float("nan"), -0.0], dtype=torch.float16),
        "bf16": torch.randn(3, 4).bfloat16().t(),
        "flag": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
    }
    message = {"nan": float("nan"), "big": 2**70, "text": "\ud7ff é", "list": [1, [2.5, None, True]], "inf": -math.inf}
    back, named, blob = _wire.unpack(_wire.pack(message, tensors, b"\x00candidate"))
    assert blob == b"\x00candidate"
    assert math.isnan(back.pop("nan")) and back == {key: value for key, value in message.items() if key != "nan"}
    for name, tensor in tensors.items():
        assert named[name].dtype == tensor.dtype and named[name].shape == tensor.shape
        assert torch.equal(
            named[name].contiguous().view(torch.uint8) if tensor.ndim else named[name],
            tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor,
        )


def test_shared_storage_and_subclasses_travel_as_plain_copies() -> None:
    class Liar(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return True

    base = torch.arange(6.0)
    liar = torch.Tensor._make_subclass(Liar, base)
    _, named, _ = _wire.unpack(_wire.pack({}, {"a": base, "b": base[2:], "liar": liar, "grad": base.clone().requires_grad_()}))
    assert torch.equal(named["b"], torch.arange(2.0, 6.0)) and type(named["liar"]) is torch.Tensor
    assert torch.equal(named["liar"], base) and not named["grad"].requires_grad


def _framed(text: bytes, body: bytes | None = None) -> bytes:
    body = _wire.pack({})[struct.calcsize("<4sQQQ") + 2 :] if body is None else body
    return struct.pack("<4sQQQ", b"LKW1", len(text), len(body), 0) + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"LKW1",
        _wire.pack({"a": 1})[:-1],
        _wire.pack({"a": 1}) + b"x",
        _framed(b'{"a": 1, "a": 2}'),
        _framed(b'{"a": NaN}'),
        _framed(b'{"a": {"$float": "1e999"}}'),
        _framed(b"[1]"),
        _framed(b"[" * 100_000),
        _framed('{"é": 1}'.encode()),
        _framed(b"{}", b"\x80\x04\x95pickle"),
        _framed(b"{}", struct.pack("<Q", 2**62) + b"{}"),
        _framed(
            b"{}",
            (header := json.dumps({"t": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode())
            and struct.pack("<Q", len(header)) + header + b"abcd",
        ),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(_wire.WireError):
        _wire.unpack(data)


def test_what_json_cannot_hold_is_refused_on_the_way_out() -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        _wire.pack({"module": torch})

"""One rank's side of many answers in a row: the probe's own entry, called again and again in the same processes."""

import json
import struct

import torch.distributed as dist

from labkit.checks import _forbid, _probe


def pack(copies: int, payload: bytes) -> bytes:
    """`payload`, to be answered `copies` times."""
    return struct.pack("<Q", copies) + payload


def _laid_once() -> None:
    """Tripwires stay laid: from the second time on, laying them only forgets what has tripped."""
    lay, laid = _forbid.lay, {}

    def again(forbids: tuple[str, ...]) -> list[str]:
        tripped = laid[forbids] if forbids in laid else laid.setdefault(forbids, lay(forbids))
        tripped.clear()
        return tripped

    _forbid.lay = again


def serve(payload: bytes, rank: int, world_size: int) -> bytes:
    """All the answers. The ranks meet between two of them, so that no message of one is taken for another's."""
    (copies,) = struct.unpack_from("<Q", payload)
    answers = []
    _laid_once()
    for _ in range(copies):
        answers.append(_probe.serve(payload[8:], rank, world_size))
        if dist.is_initialized():
            dist.group.WORLD.barrier().wait()  # the function of that name may be forbidden by now
    return join(answers)


def join(answers: list[bytes]) -> bytes:
    """Their lengths, then they themselves."""
    head = json.dumps([len(answer) for answer in answers]).encode()
    return struct.pack("<Q", len(head)) + head + b"".join(answers)


def unpack(data: bytes) -> list[bytes]:
    """What `join` took."""
    (length,) = struct.unpack_from("<Q", data)
    at, answers = 8 + length, []
    for size in json.loads(data[8:at]):
        answers.append(data[at : at + size])
        at += size
    return answers

"""Length-prefixed frames between the caller, the job's supervisor and the ranks.

A frame is one kind byte, an 8-byte little-endian length and that many bytes. JSON is the only structure inside: nothing
that a rank wrote is ever unpickled on the way.
"""

import json
import os
import socket
import struct
from collections import deque

HEADER = struct.Struct("<cQ")
JSON_LIMIT = 4 << 20


class WireError(Exception):
    """The other side sent something that is no frame, or too large a one."""


def header(kind: bytes, length: int) -> bytes:
    return HEADER.pack(kind, length)


def frame(kind: bytes, payload: bytes) -> bytes:
    return header(kind, len(payload)) + payload


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[: 1 << 20]) :]


def read_exact(sock: socket.socket, length: int) -> bytearray:
    """Read ``length`` bytes; EOFError when the other side closes first."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        received = sock.recv_into(view)
        if received == 0:
            raise EOFError("the other side closed the connection")
        view = view[received:]
    return data


def read_frame(sock: socket.socket, limit: int) -> tuple[bytes, bytearray]:
    kind, length = HEADER.unpack(bytes(read_exact(sock, HEADER.size)))
    if length > limit:
        raise WireError(f"a frame of {length} bytes, where at most {limit} are allowed")
    return kind, read_exact(sock, length)


def dump_json(value: object) -> bytes:
    # Surrogates from odd file names or messages must not make a report unsendable: ASCII escapes carry them.
    return json.dumps(value, ensure_ascii=True).encode("ascii")


def load_json(data: bytes | bytearray) -> object:
    return json.loads(bytes(data))


class FrameReader:
    """Collects frames from a descriptor that a rank writes to, and refuses what is too long before storing it."""

    def __init__(self, limits: dict[bytes, int], streams: set[bytes] | None = None) -> None:
        self.limits = limits
        self.streams = streams or set()  # kinds that may come again and again; the newest few wait in `streamed`
        self.streamed: deque[bytes] = deque(maxlen=64)
        self.frames: dict[bytes, bytes] = {}
        self.broken: str | None = None
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        if self.broken:
            return
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._buffer)
            if kind not in self.limits or kind in self.frames:
                self.broken = "it sent something that is not a report"
            elif length > self.limits[kind]:
                self.broken = f"it sent {length} bytes where at most {self.limits[kind]} are allowed"
            if self.broken:
                self._buffer.clear()
                return
            if len(self._buffer) < HEADER.size + length:
                return
            payload = bytes(self._buffer[HEADER.size : HEADER.size + length])
            if kind in self.streams:
                self.streamed.append(payload)
            else:
                self.frames[kind] = payload
            del self._buffer[: HEADER.size + length]

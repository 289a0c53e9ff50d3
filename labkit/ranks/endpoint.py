"""A mailbox per rank over ZeroMQ: bytes and tensors to any rank, from any rank. Thin and recorded; the protocol is yours.

    here = Endpoint()                                    # in a function that run_ranks runs, also with group=False
    here.send(0, b"push", {"weight": gradient})
    message = here.recv(timeout_s=1.0)                   # Message(sender, life, data, tensors), or None when nothing came
    while here.poll(0.01): ...

What ZeroMQ promises and what not (The ZeroMQ Guide, chapters 1 and 4): messages of one sender arrive whole, once and in order; a send
returns before its message has arrived. Mail for a rank that is killed is lost with it, unless it comes back before the
sender notices; nothing tells the sender. A rank that was restarted has a new address, and mail goes there from then on. Of a
mailbox that was closed with last words, whoever writes to it later finds those in its own.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from labkit.ranks import here, page
from labkit.recorder import note_message

try:
    import zmq
except ImportError:  # pyzmq comes with Jupyter; the core does without
    zmq = None

_GROUP = page.group_key("endpoint")
_LOOK_S = 0.005
_CLOSED = b"closed\n"  # begins the address card of a mailbox that was closed with last words
_PATH_BYTES = 100  # what the system allows as the name of a local socket
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class EndpointError(RuntimeError):
    """A rank cannot be reached, a message cannot be read, or ZeroMQ is not there."""


@dataclass(frozen=True)
class Message:
    """What arrived: from which rank (and in which of its lives, 0 before its first restart), bytes, and tensors by name."""

    sender: int
    life: int
    data: bytes
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    bytes: int = 0  # in all: header, data and tensors


class Endpoint:
    """This rank's mailbox, open for mail as soon as it is made; one per rank, used by one thread at a time.

    transport : "ipc" (a local socket in the job's own folder) or "tcp" (loopback, a port that the system chooses)
    Raises EndpointError where pyzmq is not installed, RuntimeError outside a rank.
    """

    def __init__(self, transport: str = "ipc") -> None:
        if zmq is None:
            raise EndpointError("the endpoint needs ZeroMQ, which comes with Jupyter: pip install pyzmq")
        if transport not in ("ipc", "tcp"):
            raise ValueError(f'transport is "ipc" or "tcp", not {transport!r}')
        seat = here.current()
        self.rank, self.world_size, self.life = seat.rank, seat.world_size, seat.restarts
        self._writer = seat.writer
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set(zmq.RCVHWM, 0)
        self._outboxes: dict[int, tuple[tuple, zmq.Socket]] = {}  # rank -> (its address card's identity, socket)
        self._got = 0
        self._last_words: deque[Message] = deque()  # found at closed mailboxes
        path = here.scratch(f"mail-{self.rank}-{self.life}")
        if transport == "ipc" and len(os.fsencode(path)) < _PATH_BYTES:
            self.address = f"ipc://{path}"
            self._inbox.bind(self.address)
        else:
            self.address = f"tcp://127.0.0.1:{self._inbox.bind_to_random_port('tcp://127.0.0.1')}"
        self._put_up(self.address.encode())

    def _put_up(self, card: bytes) -> None:
        """What others find who look for this rank: whole at once."""
        path = here.scratch(f"address-{self.rank}")
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
            file.write(card)
        os.replace(file.name, path)

    def send(self, to: int, data: bytes = b"", tensors: dict[str, torch.Tensor] | None = None, timeout_s: float = 10.0) -> int:
        """Send bytes and tensors (any shape and dtype, copied to the CPU) to rank `to`; the bytes that go out.

        Returns at once once `to` has opened its endpoint, for which it waits up to `timeout_s`; 0 bytes go to one that was closed
        with last words. Raises EndpointError when none was ever opened, TypeError or ValueError for what cannot be sent.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data is bytes, not {type(data).__name__}")
        start = time.perf_counter()
        here.reached("send")
        frames = _pack(self.rank, self.life, bytes(data), tensors or {})
        outbox = self._outbox(to, timeout_s)
        if isinstance(outbox, bytes):
            self._last_words.append(Message(to, 0, outbox, bytes=len(outbox)))
            return 0
        outbox.send_multipart(frames)
        if self._writer is not None:
            self._writer.post(page.SEND, _GROUP, to, 0)
        size = sum(len(frame) for frame in frames)
        note_message("send", start, bytes_sent=size, peer=to, group="endpoint", group_size=self.world_size, asynchronous=True)
        return size

    def recv(self, timeout_s: float | None = None) -> Message | None:
        """The next message, from whichever rank; None when `timeout_s` seconds went by (None: wait for ever).

        Raises EndpointError for a message that is no endpoint's.
        """
        start = time.perf_counter()
        here.reached("recv")
        if not self._arrives(timeout_s if not self._last_words else 0.0):
            note_message("wait", start)
            return self._last_words.popleft() if self._last_words else None
        message = _unpack(self._inbox.recv_multipart())
        self._got += 1
        if self._writer is not None:
            self._writer.post(page.RECV, _GROUP, page.ANY_PEER, 0)
        note_message("wait", start, peer=message.sender)
        note_message("recv", time.perf_counter(), bytes_received=message.bytes, peer=message.sender, group="endpoint",
                     group_size=self.world_size, asynchronous=True)  # fmt: skip
        return message

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether a message is there, now or within `timeout_s` seconds."""
        return bool(self._last_words) or bool(self._inbox.poll(max(0, round(timeout_s * 1000))))

    def _arrives(self, timeout_s: float | None) -> bool:
        if timeout_s is not None or self._writer is None:
            return bool(self._inbox.poll(None if timeout_s is None else max(0, round(timeout_s * 1000))))
        at = self._writer.begin_wait(page.KINDS.index("recv from any rank"), _GROUP, page.ANY_PEER, 0, self._got + 1)
        try:
            return bool(self._inbox.poll())
        finally:
            self._writer.end_wait(at)

    def _outbox(self, to: int, timeout_s: float) -> zmq.Socket | bytes:
        """The way to a rank, or the last words of its mailbox."""
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < self.world_size:
            raise ValueError(f"there is no rank {to!r} among {self.world_size}")
        card = here.scratch(f"address-{to}")
        end = time.monotonic() + timeout_s
        while True:
            with suppress(FileNotFoundError):
                status = os.stat(card)
                break
            if time.monotonic() >= end:
                raise EndpointError(f"rank {to} has opened no endpoint within {timeout_s:g} s")
            time.sleep(_LOOK_S)
        identity = status.st_ino, status.st_mtime_ns
        known = self._outboxes.get(to)
        if known is not None and known[0] == identity:
            return known[1]
        if known is not None:  # it lives again, elsewhere
            known[1].close(linger=0)
        with open(card, "rb") as file:
            address = file.read()
        if address.startswith(_CLOSED):
            self._outboxes.pop(to, None)
            return address.removeprefix(_CLOSED)
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, 0)
        socket.connect(address.decode())
        self._outboxes[to] = identity, socket
        return socket

    def close(self, linger_s: float = 1.0, last_words: bytes | None = None) -> None:
        """Close the mailbox; what was sent has up to `linger_s` seconds to leave.

        last_words : whoever sends something here from now on, in whichever life, receives these bytes as the answer
        """
        if last_words is not None:
            self._put_up(_CLOSED + last_words)
        for _, socket in self._outboxes.values():
            socket.close(linger=round(linger_s * 1000))
        self._outboxes.clear()
        self._inbox.close(linger=0)
        self._context.term()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pack(sender: int, life: int, data: bytes, tensors: dict[str, torch.Tensor]) -> list[bytes | memoryview]:
    """A JSON header, the data, and one frame of raw bytes per tensor: nothing in it is code."""
    rows, buffers = [], []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise TypeError(f"tensors maps names to dense tensors; {name!r} is {type(tensor).__name__}")
        rows.append([str(name), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)  # a copy: ZeroMQ reads it when it likes
        buffers.append(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    header = {"labkit": 1, "sender": sender, "life": life, "tensors": rows}
    return [json.dumps(header).encode(), data, *buffers]


def _unpack(frames: list[bytes]) -> Message:
    try:
        header = json.loads(frames[0])
        sender, life, rows = header["sender"], header["life"], header["tensors"]
        if header["labkit"] != 1 or len(rows) != len(frames) - 2 or type(sender) is not int or type(life) is not int:
            raise ValueError("the parts do not fit together")
        tensors = {}
        for (name, dtype, shape), buffer in zip(rows, frames[2:], strict=True):
            tensor = torch.frombuffer(bytearray(buffer), dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
            tensors[name] = tensor.view(_DTYPES[dtype]).reshape(shape)
        return Message(sender, life, frames[1], tensors, sum(len(frame) for frame in frames))
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise EndpointError(f"a message that no endpoint sent: {type(error).__name__}: {error}") from None


def available() -> str | None:
    """The version of ZeroMQ for Python, or None."""
    return zmq.__version__ if zmq is not None else None



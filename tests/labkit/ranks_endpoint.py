"""Programs that talk through endpoints."""

import time

import torch

from labkit import ranks
from labkit.ranks import Endpoint, EndpointError


def ping_pong(transport: str):
    with Endpoint(transport) as box:
        peer = 1 - box.rank
        if box.rank == 0:
            sent = box.send(peer, b"ping", {"a": torch.arange(6).reshape(2, 3).t(), "b": torch.tensor(2.5, dtype=torch.bfloat16)})
            answer = box.recv()
            return sent, answer.data, answer.sender, box.address.partition(":")[0]
        message = box.recv()
        box.send(peer, message.data + b" pong", {})
        return message.bytes, message.tensors, message.life, box.poll()


def odd_tensors():
    with Endpoint() as box:
        given = {"empty": torch.empty(0, 3), "bool": torch.tensor([True, False]), "half": torch.ones(3, dtype=torch.float16),
                 "complex": torch.tensor([1 + 2j]), "grad": torch.ones(2, requires_grad=True), "view": torch.arange(10)[3:5]}  # fmt: skip
        if box.rank == 0:
            box.send(1, tensors=given)
            return None
        got = box.recv().tensors
        got["bool"].logical_not_()  # what arrives may be written to
        return {name: (str(value.dtype), value.tolist()) for name, value in got.items()}


def everyone_to_zero(count: int):
    with Endpoint() as box:
        if box.rank:
            for number in range(count):
                box.send(0, str(number).encode())
            return None
        seen: dict[int, list[int]] = {}
        for _ in range(count * (box.world_size - 1)):
            message = box.recv(timeout_s=20)
            seen.setdefault(message.sender, []).append(int(message.data))
        return seen, box.recv(timeout_s=0.05), box.poll(0.01)


def overwritten_after_send():
    with Endpoint() as box:
        if box.rank == 0:
            tensor = torch.ones(1 << 20)
            box.send(1, tensors={"x": tensor})
            tensor.zero_()
            return None
        time.sleep(0.1)
        return box.recv().tensors["x"].unique().tolist()


def server_and_dying_worker(steps: int):
    """Rank 0 answers; the others count up with it. A worker that is killed comes back under a new address."""
    box = Endpoint()
    if box.rank:
        for _ in range(steps):
            box.send(0, b"step")
            while (reply := box.recv(timeout_s=5)) is not None and reply.data != f"{box.rank}.{box.life}".encode():
                pass
            assert reply is not None
        box.send(0, b"done")
        return ranks.restarts()
    done, lives = set(), set()
    # A worker may die after its last word, too, and come back: the server stays until nobody has said anything for a while.
    while len(done) < box.world_size - 1 or box.poll(1.0):
        message = box.recv(timeout_s=10)
        lives.add((message.sender, message.life))
        if message.data == b"done":
            done.add(message.sender)
        else:
            box.send(message.sender, f"{message.sender}.{message.life}".encode())
    return lives


def both_wait():
    Endpoint().recv()


def sends_to_nobody():
    box = Endpoint()
    if box.rank == 0:
        try:
            box.send(1, b"", timeout_s=0.2)
        except EndpointError as error:
            return str(error)
    return None


def no_endpoint_at_one():
    if ranks.rank() == 1:
        time.sleep(1.0)
        return None
    return sends_to_nobody()


def asks_after_the_end():
    box = Endpoint()
    if box.rank == 0:
        assert box.recv(timeout_s=10).data == b"begin"
        box.send(1, b"mail")
        box.close(last_words=b"the end")
        return None
    box.send(0, b"begin")
    heard = [box.recv().data]
    while box.send(0, b"more") > 0:  # until it has closed; what is sent before that is lost
        time.sleep(0.01)
    box.send(0, b"more")
    heard += [box.recv().data, box.poll(), box.recv().data, box.poll(), box.recv(timeout_s=0.01)]
    box.close()
    return heard


def only_the_end():
    box = Endpoint()
    if box.rank == 0:
        box.close(last_words=b"the end")
        return None
    while box.send(0, b"anyone?") > 0:
        time.sleep(0.01)
    message = box.recv()
    box.send(0, b"again")
    box.send(0, b"and again")
    box.send(0, b"and again")
    return box.life, message.data

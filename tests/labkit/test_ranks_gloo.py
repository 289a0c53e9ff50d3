"""What the labs rely on in gloo: sends are strict and read their buffer late, so that wrong code hangs or arrives wrong here, too."""

import time

import pytest
import torch
import torch.distributed as dist

from labkit.ranks import DeadlockError, run_ranks


def send_to_a_late_receiver():
    start = time.monotonic()
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        time.sleep(0.5)
        dist.recv(torch.ones(1), 0)
    return time.monotonic() - start


def test_a_send_returns_when_its_receive_is_posted():
    assert run_ranks(send_to_a_late_receiver, 2).values[0] > 0.3


def tiny_sends_first():
    dist.send(torch.ones(1), 1 - dist.get_rank())
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def test_both_sending_first_hangs_even_with_four_bytes():
    with pytest.raises(DeadlockError):
        run_ranks(tiny_sends_first, 2)


def overwrite_in_flight():
    data = torch.ones(1000)
    if dist.get_rank() == 0:
        work = dist.isend(data, 1)
        data.fill_(7)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.recv(data, 0)
    return data.unique().tolist()


def test_a_buffer_overwritten_in_flight_arrives_overwritten():
    assert run_ranks(overwrite_in_flight, 2).values[1] == [7.0]

"""The ZeroMQ endpoint: whole messages in order, tensors without pickle, every byte in the recording, deaths survived."""

import pytest
import torch

pytest.importorskip("zmq")

from labkit.ranks import DeadlockError, Endpoint, EndpointError, endpoint, faults, run_ranks
from tests.labkit import ranks_endpoint as programs


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_bytes_and_tensors_go_there_and_back_and_into_the_recording(transport):
    result = run_ranks(programs.ping_pong, 2, transport, group=False, record=True)
    (sent, answer, sender, kind), (received, tensors, life, more) = result.values
    assert (answer, sender, life, more, kind) == (b"ping pong", 1, 0, False, transport) and sent == received > 4 + 6 * 8 + 2
    assert torch.equal(tensors["a"], torch.arange(6).reshape(2, 3).t()) and tensors["b"].dtype is torch.bfloat16
    assert tensors["b"].shape == () and tensors["b"].item() == 2.5
    zero, one = ([(row.kind, row.bytes_sent, row.bytes_received, row.peer) for row in recording.comm()] for recording in result.recordings)
    assert zero[0] == ("send", sent, 0, 1) and one[:2] == [("wait", 0, 0, 0), ("recv", 0, received, 0)]
    assert [row[0] for row in zero] == ["send", "wait", "recv"] and one[2][:2] == ("send", zero[2][2])
    assert all(row.group == "endpoint" and row.group_size == 2 for row in result.recordings[0].comm("send"))


def test_every_kind_of_tensor_arrives_as_it_was():
    got = run_ranks(programs.odd_tensors, 2, group=False).values[1]
    assert got == {
        "empty": ("torch.float32", []), "bool": ("torch.bool", [False, True]), "half": ("torch.float16", [1.0] * 3),
        "complex": ("torch.complex64", [1 + 2j]), "grad": ("torch.float32", [1.0, 1.0]), "view": ("torch.int64", [3, 4]),
    }  # fmt: skip


def test_messages_of_each_sender_arrive_once_and_in_order():
    seen, nothing, more = run_ranks(programs.everyone_to_zero, 4, 300, group=False).values[0]
    assert seen == {rank: list(range(300)) for rank in (1, 2, 3)} and nothing is None and more is False


def test_what_is_sent_is_what_it_was_when_it_was_sent():
    assert run_ranks(programs.overwritten_after_send, 2, group=False).values[1] == [1.0]


def test_a_worker_that_dies_and_returns_is_reached_again():
    plan = [faults.restart(1, "send", 4), faults.restart(2, 0.1, after_s=0.05), faults.restart(1, "recv", 3, life=1)]
    result = run_ranks(programs.server_and_dying_worker, 4, 60, group=False, faults=plan)
    assert {(1, 0), (1, 1), (1, 2), (3, 0)} <= result.values[0]
    assert result.values[1] == 2 and result.values[3] == 0


def test_a_group_and_endpoints_live_side_by_side():
    assert run_ranks(programs.everyone_to_zero, 2, 3).values[0][0] == {1: [0, 1, 2]}


def test_ranks_that_all_wait_for_mail_are_stuck():
    with pytest.raises(DeadlockError, match="rank 0 waits in recv from any rank"):
        run_ranks(programs.both_wait, 2, group=False, timeout=60)


def test_a_rank_without_endpoint_is_named():
    assert run_ranks(programs.no_endpoint_at_one, 2, group=False).values[0] == "rank 1 has opened no endpoint within 0.2 s"


def test_who_asks_after_the_end_hears_the_last_words_also_in_its_next_life():
    result = run_ranks(programs.asks_after_the_end, 2, group=False)
    assert result.values[1] == [b"mail", b"the end", True, b"the end", False, None]
    plan = [faults.restart(1, "send", 4)]
    assert run_ranks(programs.only_the_end, 2, group=False, faults=plan).values[1] == (1, b"the end")


def test_what_no_endpoint_sent_is_refused():
    good = endpoint._pack(1, 0, b"x", {"a": torch.ones(2)})
    assert endpoint._unpack([bytes(frame) for frame in good]).tensors["a"].tolist() == [1.0, 1.0]
    renamed = good[0].replace(b"float32", b"system")
    for frames in ([b""], [b"[]", b""], [b"\x80\x04K\x01.", b""], [*good[:2]], [*good[:2], b"123"], [renamed, *good[1:]]):
        with pytest.raises(EndpointError, match="no endpoint sent"):
            endpoint._unpack([bytes(frame) for frame in frames])


def test_only_dense_tensors_and_bytes_are_taken():
    for tensors in ({"a": [1.0]}, {"a": torch.ones(2).to_sparse()}):
        with pytest.raises(TypeError, match="dense tensors"):
            endpoint._pack(0, 0, b"", tensors)


def test_without_zeromq_or_outside_a_rank_it_says_what_to_do(monkeypatch):
    with pytest.raises(RuntimeError, match="this is no rank"):
        Endpoint()
    monkeypatch.setattr(endpoint, "zmq", None)
    with pytest.raises(EndpointError, match="pip install pyzmq"):
        Endpoint()
    assert endpoint.available() is None

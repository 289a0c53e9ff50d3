"""The recorder on two gloo ranks: messages, collectives, DDP, FSDP2."""

import json
import subprocess
import sys

import pytest

from .recorder_ranks import LAYERS, UNIT, WIDTH


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.labkit.recorder_ranks"], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_messages_and_waits(ranks):
    send, recv, wait = ["send", 400, 0], ["recv", 0, 400], ["wait", 0, 0, None, False, 0]
    first, second = (rank["messages"]["messages"] for rank in ranks)
    assert first == [[*send, 1, False, 2], wait, [*recv, 1, True, 2], wait]
    assert second == [[*recv, 0, False, 2], wait, [*send, 0, True, 2], wait]


def test_collectives_count_as_rings_do(ranks):
    both = [["all_reduce", 400, 400], ["all_gather", 400, 400], ["all_gather", 400, 400],
            ["reduce_scatter", 200, 200], ["all_to_all", 200, 200], ["barrier", 0, 0]]  # fmt: skip
    for number, rank in enumerate(ranks):
        seen = rank["messages"]["collectives"]
        assert [row for row in seen if row[0] not in ("broadcast", "reduce")] == both
        rooted = {"broadcast": (0, 400), "reduce": (0, 400)} if number == 0 else {"broadcast": (400, 0), "reduce": (400, 0)}
        assert {row[0]: tuple(row[1:]) for row in seen if row[0] in rooted} == rooted


def test_functional_collectives(ranks):
    for rank in ranks:
        assert rank["messages"]["functional"] == ["all_reduce", "wait"]
        assert rank["messages"]["by_kind"]["all_reduce"] == {"count": 2, "bytes_sent": 800, "bytes_received": 800}
        assert "wait" not in rank["messages"]["by_kind"]


def test_ddp_reduces_every_gradient_once_in_backward(ranks):
    for rank in ranks:
        seen = rank["ddp"]
        gradients = LAYERS * UNIT
        assert seen["kinds"] == {"all_reduce": {"count": 1, "bytes_sent": gradients, "bytes_received": gradients}}
        assert seen["gradients"] == gradients and seen["in_backward"] and seen["recomputed"] == 0


def test_fsdp_frees_what_it_gathers(ranks):
    for rank in ranks:
        seen = rank["fsdp"]
        shards = LAYERS * UNIT // 2
        row = WIDTH * 4  # one activation
        assert seen["start"] == shards
        # After each layer: the shards, this layer's whole weight, one activation per layer so far, and the input. What
        # earlier layers gathered was freed by `UntypedStorage.resize_`, which the dispatcher does not show.
        assert seen["live"] == [shards + UNIT + row * (i + 2) for i in range(LAYERS)]
        assert seen["between"] == shards + row * LAYERS + 4 or seen["between"] < shards + row * (LAYERS + 1) + 8
        assert seen["after"] == 2 * shards + row + 4
        assert seen["peak_forward"] < shards + 3 * UNIT + row * (LAYERS + 2) + 8
        assert seen["peak"] < 2 * shards + 5 * UNIT
        assert seen["categories"]["parameters"] == seen["categories"]["gradients"] == shards
        assert seen["kinds"]["all_gather"]["count"] == 2 * LAYERS
        assert seen["kinds"]["reduce_scatter"] == {"count": LAYERS, "bytes_sent": shards, "bytes_received": shards}
        assert seen["recomputed"] == []


def test_a_mark_waits_until_what_was_sent_is_let_go(ranks):
    for rank in ranks:
        assert rank["late"]["after"] == 40  # the ten numbers that the program keeps; the thousand that a thread held are gone

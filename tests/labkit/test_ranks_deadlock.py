"""Deadlocks are seen and told; slow, loaded and threaded ranks are not taken for one."""

import multiprocessing
import os
import sys
import time

import pytest

from labkit.ranks import DeadlockError, Link, run_ranks, stacks
from labkit.ranks.deadlock import assess
from labkit.ranks.page import COLLECTIVE, RECV, SEND, Snapshot, Wait
from tests.labkit import ranks_deadlocks as programs

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at threads in /proc")


@pytest.mark.parametrize(
    ("program", "ranks", "said"),
    [
        (programs.recv_from_finished, 2, ["rank 1 waits in recv from rank 0, which has finished"]),
        (programs.both_send_first, 2, [f"rank {n} waits in send to rank {1 - n}, which waits in send to rank {n}" for n in (0, 1)]),
        (programs.both_receive_first_async, 2, ["rank 0 waits in recv from rank 1, which waits in recv from rank 0"]),
        (programs.wrong_tag, 2, ["rank 1 waits in recv from rank 0 with tag 3", "(rank 0 has sent with tag 4, this one has tag 3)"]),
        (programs.one_too_many, 2, ["rank 1 waits in recv from rank 0, which has finished"]),
        (programs.left_out_of_barrier, 3, ["rank 0 waits in barrier: rank 2 has not joined and has finished"]),
        (programs.mixed_up, 3, ["rank 1 waits in recv from rank 2, which waits in barrier", "rank 0 waits in all_reduce: rank 1 has not"]),
        (programs.subgroup_misses_one, 3, ["rank 0 waits in all_gather: rank 2 has not joined and has finished"]),
        (programs.group_made_by_one, 2, ["rank 1 waits in new_group: rank 0 has not joined and has finished"]),
        (programs.batch, 2, ["rank 0 waits in recv from rank 1"]),
        (programs.any_source, 2, ["rank 0 waits in recv from any rank"]),
        (programs.ring_of_receives, 4, [f"rank {n} waits in recv from rank {(n - 1) % 4}" for n in range(4)]),
        (programs.objects, 2, ["rank 0 waits in broadcast: rank 1 has not joined", "rank 1 waits in recv from rank 0 with tag 9"]),
        (programs.after_two_messages, 2, [
            "rank 0 waits in barrier: rank 1 has not joined and waits in recv from rank 0; the last that it had done was send to "
            "rank 1, its 2nd of that kind",
        ]),
        pytest.param(programs.ddp_against_barrier, 2, [
            "rank 0 waits in a communication inside backward",
            "rank 1 waits in barrier: rank 0 has not joined and waits in a communication inside backward",
        ], marks=linux),
        pytest.param(programs.joins_a_thread_that_waits, 3, [f"rank {n} waits in recv from rank {(n + 1) % 3}" for n in range(3)],
                     marks=linux),
        pytest.param(programs.functional_alone, 2, ["rank 0 waits in a communication"], marks=linux),
    ],  # fmt: skip
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_deadlock_is_told_with_who_waits_for_whom_and_stacks(program, ranks, said):
    with pytest.raises(DeadlockError) as caught:
        run_ranks(program, ranks, timeout=60)
    text = str(caught.value)
    for words in said:
        assert words in text
    assert f"in {program.__name__}\n" in text and "stood at, " in text and "most recent call first" in text


@linux
@pytest.mark.parametrize("program", [programs.both_send_first, programs.ddp_against_barrier, programs.functional_alone])
def test_a_recorded_deadlock_shows_the_learners_frames_alone(program):
    with pytest.raises(DeadlockError) as caught:
        run_ranks(program, 2, record=True, timeout=60)
    text = str(caught.value)
    assert f"in {program.__name__}\n" in text and "/labkit/ranks/" not in text and "/labkit/recorder/" not in text


@linux
@pytest.mark.parametrize("program", [programs.both_send_first, programs.ddp_against_barrier])
def test_it_is_seen_soon(program):
    """Half a second of stillness, a few looks, the stacks: far from the timeout, also on a busy machine."""
    run_ranks(programs.objects_exchanged, 2)  # the server is up
    start = time.monotonic()
    with pytest.raises(DeadlockError):
        run_ranks(program, 2, timeout=60)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("how", "seconds"),
    [("sleep", 2.8), ("python", 1.2), ("torch", 1.2), ("subprocess", 1.2)],  # 2.8: long enough for the stacks to be asked for
)
def test_a_slow_peer_is_no_deadlock(how, seconds):
    assert run_ranks(programs.slow_peer, 3, how, seconds).values == [0, 1, 2]


def test_a_sleeping_thread_that_will_send_is_no_deadlock():
    assert run_ranks(programs.slow_sender_thread, 2).values == [0, 1]


@pytest.mark.parametrize("program", [
    programs.thread_that_rests_between_messages, programs.thread_starts_a_thread, programs.waits_for_an_alarm,
])  # fmt: skip
def test_threads_that_wait_for_threads_are_no_deadlock(program):
    assert run_ranks(program, 2).values == [0, 1]


def test_a_wait_with_a_timeout_is_no_deadlock():
    assert run_ranks(programs.waits_with_a_timeout, 2).values == ["gave up", 1]


def test_messages_under_way_are_no_deadlock():
    assert run_ranks(programs.waits_on_an_earlier_message, 2).values == [8.0, 0.0]


def _burn(until: float) -> None:
    while time.monotonic() < until:
        pass


@pytest.mark.parametrize(("program", "ranks", "size"), [(programs.chatter, 2, 200), (programs.rings_and_threads, 4, 60)])
@pytest.mark.parametrize("link", [None, Link(2e8, 1e-3)])
def test_a_loaded_machine_is_no_deadlock(program, ranks, size, link):
    context = multiprocessing.get_context("fork")
    burners = [context.Process(target=_burn, args=(time.monotonic() + 8,)) for _ in range(6 * (os.cpu_count() or 1))]
    for burner in burners:
        burner.start()
    try:
        values = run_ranks(program, ranks, size, timeout=60, link=link).values
        chatted = program is programs.chatter
        assert values == [float(sum(range(size))) if chatted else float(size * ((rank - 1) % ranks)) for rank in range(ranks)]
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


WORLD = {7: [0, 1]}


def waiting(kind, peer=-1, tag=0, index=1, posted=None):
    return Snapshot(1, 1, False, [Wait(11, kind, 7, peer, tag, index)], [], WORLD, posted or {})


@pytest.mark.parametrize(
    ("one", "two", "proven"),
    [
        (waiting("recv", 1), waiting("recv", 0), True),
        (waiting("recv", 1), waiting("recv", 0, posted={(SEND, 7, 0, 0): 1}), False),  # on its way
        (waiting("recv", 1, index=2), waiting("recv", 0, posted={(SEND, 7, 0, 0): 1}), True),  # that was the first one
        (waiting("recv", 1, tag=2), waiting("recv", 0, posted={(SEND, 7, 0, 1): 1}), True),
        (waiting("send", 1), waiting("send", 0, posted={(RECV, 7, 0, 0): 1}), False),
        (waiting("send", 1), waiting("send", 0, posted={(RECV, 7, -1, 0): 1}), False),  # a receive from any rank takes it
        (waiting("recv from any rank"), waiting("recv", 0, posted={(SEND, 7, 0, 0): 1}), False),
        (waiting("barrier"), waiting("recv", 0, posted={(COLLECTIVE, 7, 0, 0): 0}), True),
        (waiting("barrier", posted={(COLLECTIVE, 7, 0, 0): 1}), waiting("barrier", posted={(COLLECTIVE, 7, 0, 0): 1}), False),
        (waiting("wait"), waiting("recv", 0), False),  # of what kind is unknown
        (Snapshot(1, 1, True, waiting("recv", 1).waits, []), waiting("recv", 0), False),  # it could not note everything
    ],
)
def test_only_what_the_counts_exclude_is_proven(one, two, proven):
    assert assess([one, two], {}).proven is proven


def test_a_stack_holds_the_learners_frames_and_the_call_they_stand_in():
    torch_file, standard = "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", os.__file__
    dump = f"""Thread 0x1 (most recent call first):
  File "{stacks.__file__}", line 3 in noted
  File "{torch_file}", line 10 in recv
  File "{torch_file}", line 20 in wrapper
  File "/home/me/cell.py", line 2 in inner
  File "{standard}", line 5 in map
  File "/home/me/cell.py", line 7 in outer
  File "{standard}", line 9 in _bootstrap

Thread 0x2 (most recent call first):
  File "{stacks.__file__}", line 3 in noted
  File "{standard}", line 9 in run
"""
    assert stacks.clean(dump).splitlines() == [
        "most recent call first:", f'  File "{torch_file}", line 10, in recv', '  File "/home/me/cell.py", line 2, in inner',
        '  File "/home/me/cell.py", line 7, in outer',
    ]  # fmt: skip
    alone = f'Thread 0x1 (most recent call first):\n  File "{standard}", line 5 in map\n  File "{torch_file}", line 1 in f\n'
    assert len(stacks.clean(alone).splitlines()) == 3


def test_who_waits_for_threads_alone_is_not_stuck_but_a_threads_own_wait_counts():
    alone, one, two = waiting("thread"), waiting("recv", 1), waiting("recv", 0)
    assert assess([alone, two], {}) is None
    one.waits.insert(0, Wait(12, "thread", 0, -1, 0, 0))
    told = assess([one, two], {})
    assert told.proven and told.sentences[0].startswith("rank 0 waits in recv from rank 1, which waits in recv from rank 0")


def test_a_rank_at_work_is_no_situation():
    assert assess([Snapshot(1, 1, False, [], []), waiting("recv", 0)], {}) is None
    assert assess([Snapshot(1, 1, False, [], []), waiting("recv", 0)], {0: "finished"}).proven

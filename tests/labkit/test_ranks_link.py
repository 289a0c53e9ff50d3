"""`Link`: modelled time on plain torch.distributed calls, gloo's semantics kept, every message in the recording."""

import sys
import time

import pytest

from labkit.ranks import DeadlockError, Link, faults, run_ranks
from labkit.ranks.link import seconds_of
from labkit.ranks.link_wires import Wires
from tests.labkit import ranks_deadlocks, ranks_link, test_ranks_gloo

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need fork")

SLOW = Link(bandwidth_bytes_s=1e6, latency_s=0.01)  # 300 kB take 0.3 s
QUICK = Link(bandwidth_bytes_s=1e8, latency_s=1e-3)


def rows(result, rank, *kinds):
    return [row for row in result.recordings[rank].comm() if row.kind in kinds]


def test_messages_of_a_pair_follow_each_other_and_latency_adds():
    result = run_ranks(ranks_link.three_sends, 2, record=True, link=SLOW)
    assert result.values[1] == [[0.0], [1.0], [2.0]] and result.values[0] >= 0.9
    sends, receives = rows(result, 0, "send"), rows(result, 1, "recv")
    for row in sends + receives:
        assert row.end_s - row.start_s == pytest.approx(0.3) and row.simulated and row.group_size == 2
    assert all(later.start_s >= earlier.end_s - 1e-9 for earlier, later in zip(sends, sends[1:], strict=False))
    assert all(row.posted_s < sends[0].end_s for row in sends)  # posted at once, sent in turn
    clocks = [recording.clock_s for recording in result.recordings]
    for sent, got in zip(sends, receives, strict=True):
        assert got.end_s - sent.end_s + (clocks[1] - clocks[0]) == pytest.approx(SLOW.latency_s, abs=1e-6)
    assert [row.bytes_sent for row in sends] == [300_000] * 3 and [row.peer for row in receives] == [0] * 3


def test_pairs_have_wires_of_their_own_and_both_directions():
    for program, ranks in ((ranks_link.to_two_peers, 3), (ranks_link.both_ways, 2)):
        result = run_ranks(program, ranks, record=True, link=SLOW)
        one, two = rows(result, 0, "send", "recv")
        assert max(one.start_s, two.start_s) < min(one.end_s, two.end_s)


def test_per_rank_all_that_a_rank_sends_shares_a_wire():
    result = run_ranks(ranks_link.to_two_peers, 3, record=True, link=Link(1e6, 0.01, per="rank"))
    one, two = sorted(rows(result, 0, "send"), key=lambda row: row.start_s)
    assert two.start_s >= one.end_s - 1e-9


def test_tags_match_out_of_order():
    result = run_ranks(ranks_link.three_sends, 2, (2, 0, 1), link=SLOW)
    assert result.values[1] == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_collectives_are_right_and_take_what_the_model_says(ranks):
    result = run_ranks(ranks_link.collectives, ranks, record=True, link=QUICK) if ranks > 1 else None
    if result is None:
        assert seconds_of(QUICK, "all_reduce", 1000, 1) == (0.0, 0.0)
        return
    for rank, (_, parts, shard) in enumerate(result.values):
        assert parts == [float(part) for part in range(ranks)]
        assert shard == sum(range(ranks)) + ranks * rank
        assert result.values[rank][0] == sum(range(ranks))
    payloads = {"all_reduce": 400_000, "all_gather": ranks * 100_000, "reduce_scatter": ranks * 100_000, "broadcast": 400_000, "barrier": 0}
    for row in rows(result, 0, *payloads):
        assert row.payload_bytes == payloads[row.kind]
        assert row.end_s - row.start_s == pytest.approx(sum(seconds_of(QUICK, row.kind, row.payload_bytes, ranks)))
    reduced = rows(result, 1, "all_reduce")[0]
    assert reduced.bytes_sent == reduced.bytes_received == 2 * (400_000 * (ranks - 1) // ranks)


def test_the_models_formulas():
    link = Link(1000.0, 0.5)
    assert seconds_of(link, "all_reduce", 4000, 4) == (6.0, 3.0)  # 2 (W - 1) steps of a quarter
    assert seconds_of(link, "reduce_scatter", 4000, 4) == seconds_of(link, "all_gather", 4000, 4) == (3.0, 1.5)
    assert seconds_of(link, "broadcast", 1000, 5) == (3.0, 1.5)
    assert seconds_of(link, "barrier", 0, 4) == (0.0, 1.0) and seconds_of(link, "all_reduce", 4000, 1) == (0.0, 0.0)


def test_waiting_for_the_wire_takes_no_processor():
    used = run_ranks(ranks_link.cpu_while_waiting, 2, link=SLOW).values  # a second on the wire
    assert max(used) < 0.3


def test_overlap_shows():
    waited = {}
    for overlapped in (False, True):
        result = run_ranks(ranks_link.compute_and_reduce, 2, overlapped, record=True, link=Link(2e6, 0.001))  # 0.5 s
        assert result.values == [2.0, 2.0]
        waited[overlapped] = sum(row.end_s - row.start_s for row in rows(result, 0, "wait"))
    assert waited[True] < 0.6 * waited[False]


@pytest.mark.parametrize("first", ["large", "small"])
def test_priority_shows(first):
    result = run_ranks(ranks_link.priority, 2, first, record=True, link=Link(2e6))
    by_size = sorted(rows(result, 0, "all_reduce"), key=lambda row: row.payload_bytes)
    small, large = by_size
    assert (small.end_s < large.start_s + 1e-9) == (first == "small")
    assert large.end_s - large.start_s == pytest.approx(0.4)


def test_what_is_overwritten_in_flight_arrives_overwritten_and_nothing_arrives_early():
    assert run_ranks(ranks_link.overwrites_after_isend, 2, link=SLOW).values[1] == [7.0]
    assert run_ranks(ranks_link.reads_before_wait, 2, link=SLOW).values[1] == ([1.0], [0.0])
    # The division is lost under the sum, on every rank, every time.
    assert run_ranks(ranks_link.divides_before_wait, 2, link=SLOW).values == [[16.0], [16.0]]


def test_sizes_and_kinds_that_do_not_fit_are_told():
    with pytest.raises(RuntimeError, match="sends 32 bytes, but this receive has room for 16|has no room for the 32 bytes"):
        run_ranks(ranks_link.too_large, 2, link=QUICK)
    assert run_ranks(ranks_link.smaller, 2, link=QUICK).values == [0.0, 4.0]
    with pytest.raises(RuntimeError, match="called another collective"):
        run_ranks(ranks_link.mismatch, 2, link=QUICK)
    with pytest.raises(RuntimeError, match="called another collective"):  # told through C++ as well
        run_ranks(ranks_deadlocks.ddp_against_barrier, 2, link=QUICK)


@pytest.mark.parametrize(("given", "words"), [
    ((0.0,), "bandwidth_bytes_s"), ((float("inf"),), "bandwidth_bytes_s"), ((1.0, -1.0), "latency_s"), ((1.0, 0.0, "job"), "per is"),
])  # fmt: skip
def test_a_wrong_link_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Link(*given)


def test_every_kind_of_call_and_ddp_and_fsdp2_work():
    assert run_ranks(test_ranks_gloo.tiny_sends_with_receives, 2, link=QUICK).values == [1.0, 0.0]
    first, _, third = run_ranks(test_ranks_gloo.every_kind_of_call, 3, False, link=QUICK).values
    assert first["all_gather"] == [0.0, 1.0, 2.0] and third["shard"] == 6.0 and first["sources"] == [1, 2]
    plain = run_ranks(test_ranks_gloo.train_with, 2, "ddp").values
    for wrapper in ("ddp", "fsdp"):
        assert run_ranks(test_ranks_gloo.train_with, 2, wrapper, link=QUICK).values == pytest.approx(plain, abs=1e-3)


def test_ddp_overlaps_its_buckets_and_gives_gloos_numbers():
    result = run_ranks(ranks_link.ddp_step, 2, record=True, link=Link(2e7, 1e-3))
    assert result.values == run_ranks(ranks_link.ddp_step, 2).values
    buckets = [row for row in rows(result, 0, "all_reduce") if row.payload_bytes > 10_000]
    assert len(buckets) >= 4 and all(row.simulated and row.asynchronous for row in buckets)
    assert sum(row.payload_bytes for row in buckets) == 2 * 4 * (512 * 512 + 512) * 4
    recording = result.recordings[0]
    assert buckets[1].op_index < max(op.index for op in recording.ops() if op.in_backward)
    assert recording.link == {"bandwidth_bytes_s": 2e7, "latency_s": 1e-3, "per": "pair"}


def test_a_receive_from_any_rank_is_recorded_with_the_rank_that_it_met():
    result = run_ranks(ranks_link.from_any, 3, record=True, link=QUICK)
    assert sorted(row.peer for row in rows(result, 0, "recv")) == [1, 2] == result.values[0]


def test_futures_of_collectives_and_messages():
    for done, got, completed in run_ranks(ranks_link.futures, 2, link=QUICK).values:
        assert (done, got, completed) == ([[2.0, 2.0]], 1.0, True)


def test_a_dead_peer_is_told():
    told = run_ranks(ranks_link.peer_dies, 2, link=QUICK, faults=[faults.kill(1, "offered")]).values[0]
    assert told == ["Connection closed by peer: rank 1 has ended"] * 2


@pytest.mark.parametrize("program", [
    ranks_deadlocks.both_send_first, ranks_deadlocks.recv_from_finished, ranks_deadlocks.wrong_tag, ranks_deadlocks.batch,
    ranks_deadlocks.functional_alone,
])  # fmt: skip
def test_deadlocks_are_seen_as_on_gloo(program):
    with pytest.raises(DeadlockError, match=r"rank \d waits in"):
        run_ranks(program, 2, link=QUICK, timeout=60)


def test_a_long_transmission_is_no_deadlock():
    start = time.monotonic()
    assert run_ranks(ranks_link.long_transmission, 2, link=Link(1e5)).values == ["done", "done"]
    assert time.monotonic() - start >= 3.0
    assert run_ranks(ranks_deadlocks.chatter, 2, 60, link=QUICK).values == [float(sum(range(60)))] * 2


def test_what_is_under_way_gives_signs_of_it():
    before, after = run_ranks(ranks_link.signs_of_a_transmission, 2, link=SLOW).values[0]
    assert after >= before + 2


def test_wires_are_booked_one_after_the_other(tmp_path):
    one, two = (Wires(str(tmp_path / "pairs"), Link(1.0), 3) for _ in range(2))
    assert one.book([(0, 1)], 5.0, 2.0) == (5.0, 7.0)
    assert two.book([(0, 1), (1, 2)], 6.0, 1.0) == (7.0, 8.0)
    assert one.book([(1, 0)], 0.0, 1.0) == (0.0, 1.0) and one.book([(1, 2)], 0.0, 1.0) == (8.0, 9.0)
    assert one.book([(2, 2)], 3.0, 1.0) == (3.0, 4.0)
    shared = Wires(str(tmp_path / "ports"), Link(1.0, per="rank"), 3)
    assert shared.book([(0, 1)], 0.0, 1.0) == (0.0, 1.0) and shared.book([(0, 2)], 0.0, 1.0) == (1.0, 2.0)
    assert shared.book([(1, 2)], 0.0, 1.0) == (2.0, 3.0) and shared.book([(2, 0)], 0.0, 1.0) == (0.0, 1.0)

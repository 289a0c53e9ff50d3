"""Lab 06: its checks judge what they should, its reference gets everything, and what nobody wrote gets nothing."""

import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labkit.checks import _allreduce_traffic as traffic
from labkit.checks._allreduce_flight import overlaps
from labkit.checks._allreduce_hints import HINTS
from labkit.checks._allreduce_phases import judge_chunks
from labkit.checks._allreduce_predict import HINTS as PREDICT_HINTS
from labkit.checks._allreduce_predict import seconds
from labkit.checks._allreduce_tree import limit, rounds
from labkit.figures.allreduce import chunk_states, message_lanes, predicted_times
from labkit.figures.allreduce import traffic as traffic_table
from labkit.ranks import Link, run_ranks
from labkit.ranks.link import seconds_of
from tests.labs import corpus
from tests.labs.solutions import solution

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CANDIDATES = {
    "allreduce.naive": "naive_all_reduce",
    "allreduce.reduce-scatter": "ring_reduce_scatter",
    "allreduce.all-gather": "ring_all_gather",
    "allreduce.ring": "ring_all_reduce",
    "allreduce.predict": "predict_time",
    "allreduce.tree": "tree_all_reduce",
}


@pytest.mark.parametrize("check", CANDIDATES)
def test_reference_gets_all_points(check: str) -> None:
    verdict = corpus.examine(getattr(solution("06"), CANDIDATES[check]), check)
    assert verdict.status == "pass", verdict.as_text()


def sums_through_rank_0(x: torch.Tensor) -> None:
    """Right numbers, no technique."""
    flat = x.contiguous()
    rank, part = dist.get_rank(), torch.empty_like(flat)
    if rank:
        dist.send(flat, 0)
        dist.recv(flat, 0)
    else:
        for peer in range(1, dist.get_world_size()):
            dist.recv(part, peer)
            flat += part
        for peer in range(1, dist.get_world_size()):
            dist.send(flat, peer)
    x.copy_(flat)


@pytest.mark.parametrize("check", ["allreduce.ring", "allreduce.tree"])
def test_plain_earns_a_quarter_at_most(check: str) -> None:
    verdict = corpus.examine(sums_through_rank_0, check, strict=False)
    assert 0 < verdict.points <= verdict.max_points / 4, verdict.as_text()


@pytest.mark.parametrize("check", CANDIDATES)
def test_nothing_earns_nothing(check: str) -> None:
    verdict = corpus.examine(lambda *args: None, check, strict=False)
    assert verdict.points == 0, verdict.as_text()


def sent(*rows: list[tuple[int, int]]) -> list[dict]:
    """One dict per rank, as the probe makes them, of (to whom, bytes) for each message."""
    return [{"messages": [["send", peer, count, 0] for peer, count in row], "faults": []} for row in rows]


@pytest.mark.parametrize(
    ("rows", "hint"),
    [
        (sent([(1, 4)], [(2, 4)], [(0, 4)]), None),
        (sent([(2, 4)], [(0, 4)], [(1, 4)]), None),
        (sent([(1, 4)], [], [(0, 4)]), None),  # an empty chunk was left out
        (sent([]), None),
        (sent([(1, 4), (2, 4)], [(0, 4)], [(0, 4)]), "successor"),
        (sent([(1, 4)], [(0, 4)], [(3, 4)], [(2, 4)]), "successor"),  # two rings
        (sent([(2, 4)], [(2, 4)], [(0, 4)]), "successor"),
        (sent([], []), "silent"),
        (sent([(0, 4)]), "alone"),
        ([{"messages": [["all_reduce", None, 6, 6]], "faults": []}] * 2, "collective"),
    ],
)
def test_one_successor(rows: list[dict], hint: str | None) -> None:
    finding = traffic.successor(rows, "somewhere")
    assert finding.passed == (hint is None) and (finding.passed or finding.hint == hint)


@pytest.mark.parametrize(
    ("mine", "hint"),
    [
        ([(1, 4), (1, 8)], None),
        ([(1, 8), (1, 4), (1, 0)], "too-many"),
        ([(1, 4)], "too-few"),
        ([(1, 12), (1, 12)], "whole"),
        ([(1, 6), (1, 6)], "size"),
    ],
)
def test_every_chunk_once_but_one(mine: list[tuple[int, int]], hint: str | None) -> None:
    rows = sent(mine, [(2, 8), (2, 3)], [(0, 4), (0, 3)])
    finding = judge_chunks(rows, [4, 8, 3], [{2}, {0}, {1}], "somewhere")
    assert (finding.passed, finding.hint) == (hint is None, hint)


def test_what_a_sum_is_made_of() -> None:
    parts = [traffic.numbers((40,), torch.float32, 3, rank) for rank in range(3)]
    assert traffic.shares(sum(parts), parts) == [1, 1, 1]
    for mixture, hint in [((0, 1, 0), "nothing"), ((1, 0, 1), "missing"), ((1, 2, 1), "counted-twice"), ((1 / 3,) * 3, "scaled")]:
        found = traffic.shares(sum(times * part for times, part in zip(mixture, parts, strict=True)), parts)
        assert traffic.why_wrong(found, 1) == hint
    assert traffic.shares(torch.randn(40), parts) is None and traffic.why_wrong(None, 0) == "garbage"
    assert traffic.shares(torch.full((40,), float("nan")), parts) is None


def test_sums_may_round_but_integers_may_not() -> None:
    parts = [torch.tensor([2**40 + rank, 7]) for rank in range(3)]
    assert traffic.close(sum(parts), traffic.total(parts), parts)
    assert not traffic.close(sum(parts) + 1, traffic.total(parts), parts)
    real = [traffic.numbers((1000,), torch.float32, 1, rank) for rank in range(4)]
    assert traffic.close(real[3] + real[1] + (real[0] + real[2]), traffic.total(real), real)
    assert not traffic.close(sum(part.bfloat16().float() for part in real), traffic.total(real), real)


def test_overlap_is_exact_for_strided_tensors() -> None:
    x = torch.zeros(6, 4)
    low = x[2].data_ptr()
    assert overlaps(x, low, low + 16) and overlaps(x[:, 1], low, low + 16) and overlaps(x.t(), low, low + 16)
    assert not overlaps(x[::3], low, low + 16) and not overlaps(x[3:], low, low + 16) and not overlaps(x[2], low, low)
    assert not overlaps(x[:, 3], low, low + 12) and overlaps(x[2, 3], low, low + 16)


def test_messages_in_a_row() -> None:
    def to(peer: int) -> list[list]:
        return [["send", peer, 8, 0], ["wait", None, 0, 0]]

    def of(peer: int | None) -> list[list]:
        return [["recv", peer, 0, 8], ["wait", None, 0, 0]]

    def depth(*rows: list[list]) -> float:
        return rounds([{"messages": row} for row in rows])

    assert depth(to(1), of(0)) == 1
    assert depth(of(1) + of(2) + of(3), to(0), to(0), to(0)) == 3  # one at a time
    assert depth(of(None) + of(None), to(0), to(0)) == 2
    assert depth(of(1) + of(2), to(0), of(3) + to(0), to(2)) == 2  # two pairs at once, then one
    assert depth(to(1) + of(1), of(0) + to(0)) == 2
    together = [["send", 1, 8, 0], ["recv", 1, 0, 8], ["wait", None, 0, 0], ["wait", None, 0, 0]]
    assert depth(together, [[k, 0, a, b] for k, _, a, b in together]) == 1
    assert limit(8) < 2 * 7 and limit(6) < 2 * 5


def test_the_model_is_the_link_s() -> None:
    link = Link(1e6, 0.01)
    for ranks in (2, 3, 8):
        assert seconds("ring", ranks, 4000, 0.01, 1e6) == pytest.approx(sum(seconds_of(link, "all_reduce", 4000, ranks)))
        assert seconds("tree", ranks, 4000, 0.01, 1e6) == pytest.approx(2 * sum(seconds_of(link, "broadcast", 4000, ranks)))


def test_the_picture_follows_the_messages() -> None:
    """Three ranks, three chunks of 4, 8 and 12 bytes."""
    order = [[0, 2, 1, 0], [1, 0, 2, 1], [2, 1, 0, 2]]  # which chunk each rank sends, step by step

    def recording(rank: int) -> SimpleNamespace:
        rows = [SimpleNamespace(peer=(rank + 1) % 3, bytes_sent=4 * (chunk + 1)) for chunk in order[rank]]
        return SimpleNamespace(comm=lambda kind: rows)

    states = chunk_states([recording(rank) for rank in range(3)], [4, 8, 12])
    counts = [parts for parts, _ in states]
    assert counts[0] == [[1, 1, 1]] * 3
    assert counts[2][0].count(3) == 1 and sum(count == 3 for row in counts[2] for count in row) == 3
    assert counts[4] == [[3, 3, 3]] * 3
    assert [sum(map(sum, moved)) for _, moved in states] == [0, 3, 3, 3, 3]
    with pytest.raises(ValueError, match="none of the chunks"):
        chunk_states([recording(rank) for rank in range(3)], [4, 8, 16])


def test_pictures_say_what_they_show() -> None:
    assert "rank 1 to rank 0 2 messages, 1.5 KiB" in traffic_table([[[0, 0], [1, 8]], [[2, 1536], [0, 0]]], title="Who sends").alt
    assert traffic_table([[[0, 0]]], title="Alone").alt == "Alone. nobody sends anything."
    times = {"ring": {1000: 0.5}}
    told = predicted_times(times, times, title="Time").alt
    assert "simulated" in told and "500 ms, predicted 500 ms" in told
    message = SimpleNamespace(peer=1, start_s=0.0, end_s=0.5)
    recordings = [SimpleNamespace(clock_s=clock, comm=lambda kind: [message]) for clock in (3.0, 4.0)]
    assert "2 messages, the last one ends after 1.5 s" in message_lanes({"both": recordings}, title="Lanes").alt


def test_a_ring_takes_the_time_that_the_lab_predicts() -> None:
    def ring(count: int) -> None:
        solution_06(torch.ones(count))

    solution_06 = solution("06").ring_all_reduce
    link = Link(5e6, 0.02, per="rank")
    recordings = run_ranks(ring, 3, 150_000, link=link, record=True).recordings
    rows = [row for row in recordings[0].comm("send")]
    predicted = solution("06").predict_time(3, 600_000, link)["ring"]
    on_the_wire = sum(row.end_s - row.start_s + link.latency_s for row in rows)
    assert len(rows) == 4 and on_the_wire == pytest.approx(predicted)


def test_hints_ask() -> None:
    answers = ("isend", "irecv", "tensor_split", "copy_(", "% world")
    for hints in (HINTS, PREDICT_HINTS):
        assert all(hint.rstrip().endswith("?") for hint in hints.values())
        assert not [key for key, hint in hints.items() for answer in answers if answer in hint]

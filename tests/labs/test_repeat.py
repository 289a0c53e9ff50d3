"""`--repeat` finds a verdict that changes, takes the same processes only where that changes nothing, and goes on where it was stopped."""

import os
import sys

import cloudpickle
import pytest
import torch.distributed as dist

from labkit.checks import Verdict
from tests.labs import many, repeat
from tests.labs.references import reference

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def item(candidate: object, check: str = "allreduce.predict", times: int = 4) -> repeat.Item:
    return repeat.Item("reference", "this", check, candidate, True, times, lambda verdict: verdict.status == "pass")


def predicts_nothing_later(ranks: int, nbytes: int, link: object) -> dict | None:
    """Right in the first process that asks, wrong in all others."""
    with open(os.environ["LABKIT_TEST_COUNT"], "a+") as file:
        file.write(f"{os.getpid()}\n")
        file.seek(0)
        first = file.readline()
    if first.strip() != str(os.getpid()):
        return None
    chunk = link.latency_s + nbytes / ranks / link.bandwidth_bytes_s
    whole = link.latency_s + nbytes / link.bandwidth_bytes_s
    steps = 2 * (ranks - 1)
    return {"naive": steps * whole, "ring": steps * chunk, "tree": 2 * (ranks - 1).bit_length() * whole}


def rank_0_alone_returns(x: object) -> None:
    if dist.get_rank():
        dist.recv(x, 0)


@pytest.mark.parametrize("check", ["allreduce.predict", "allreduce.naive"])
def test_a_reference_has_the_same_verdict_in_a_row(check: str) -> None:
    name = {"allreduce.predict": "predict_time", "allreduce.naive": "naive_all_reduce"}[check]
    found, how = repeat.verdicts(item(reference("06", [name]), check))
    assert how == "in a row" and len(found) == 4
    assert {repeat.same(verdict) for verdict in found} == {repeat.same(found[0])} and found[0].status == "pass"


def test_who_stands_still_gets_fresh_processes() -> None:
    found, how = repeat.verdicts(item(rank_0_alone_returns, "allreduce.naive", 3))
    assert how == "fresh" and [verdict.status for verdict in found] == ["deadlock"] * 3


def test_a_verdict_that_changes_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LABKIT_TEST_COUNT", str(tmp_path / "count"))
    row = repeat._judge(item(predicts_nothing_later), fresh=False)
    assert row["different"] == 3 and row["how"] == "fresh" and "at first ('partial'" in row["told"]


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch) -> None:
    judged = []

    def judge(one: repeat.Item, fresh: bool) -> dict:
        judged.append(one.key)
        if len(judged) == 2:
            raise KeyboardInterrupt
        return {"times": one.times, "different": 0, "wanted": True, "how": "fresh", "told": "", "seconds": 0.0}

    monkeypatch.setattr(repeat, "KEPT", tmp_path)
    monkeypatch.setattr(repeat, "_judge", judge)
    monkeypatch.setattr(repeat, "items", lambda topic, times, others: [item(None, name, times) for name in ("a", "b", "c")])
    assert repeat.run(["topic"], 5, None, False) == 130
    assert repeat.run(["topic"], 5, None, False) == 0
    assert [key.split()[1] for key in judged] == ["a", "b", "b", "c"]
    assert repeat.run(["topic"], 9, None, False) == 0 and len(judged) == 7  # more verdicts are asked for


def test_answers_travel() -> None:
    assert many.unpack(many.join([b"one", b"", b"three"])) == [b"one", b"", b"three"]


def test_same_is_of_criteria_too() -> None:
    assert repeat.same(Verdict("a", "pass", 1, 1, [])) != repeat.same(Verdict("a", "partial", 1, 1, []))

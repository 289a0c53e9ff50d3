"""The recorder while it runs: budgets, cycles, nesting, threads, generators, followers, and what it leaves behind."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from labkit.recorder import CATEGORIES, Recorder, note_message


def test_the_budget_refuses_at_the_operator_that_exceeds_it():
    with pytest.raises(torch.OutOfMemoryError) as refused, Recorder(budget_bytes=1000) as rec:
        weights = nn.Parameter(torch.zeros(150))
        rec.watch({"weights": weights})
        torch.ones(20)
        weights * 2
    assert "aten.mul needs 600 bytes more, and 600 bytes of the budget of 1000 bytes" in str(refused.value)
    assert "600 bytes of weights" in str(refused.value)
    r = rec.recording
    (refusal,) = r.refusals
    assert refusal["wanted_bytes"] == 600 and refusal["live_bytes"] == 600 and refusal["op"] == "aten.mul"
    assert refusal["alive"] == [{"sid": 0, "bytes": 600, "category": "parameters", "name": "weights"}]
    assert r.peak_bytes == 680  # what was refused never counts


def test_refusals_count_even_when_caught():
    with Recorder(budget_bytes=100) as rec:
        for _ in range(3):
            try:
                torch.zeros(100)
            except torch.OutOfMemoryError:
                pass
        x = torch.zeros(20)
        with pytest.raises(torch.OutOfMemoryError):
            x.resize_(1000)
        y = torch.zeros(1)
        with pytest.raises(torch.OutOfMemoryError):
            y.untyped_storage().resize_(1000)
        assert y.untyped_storage().nbytes() == 4
    assert len(rec.recording.refusals) == 5


def test_the_budget_holds_in_backward():
    x = torch.ones(100, requires_grad=True)
    with Recorder(budget_bytes=2000) as rec:
        y = x.exp().exp().exp()
        with pytest.raises(torch.OutOfMemoryError):
            y.backward(torch.ones(100))
    assert len(rec.recording.refusals) == 1


def test_what_is_watched_must_fit_the_budget():
    x = torch.zeros(100)
    with pytest.raises(torch.OutOfMemoryError), Recorder(watch=x, budget_bytes=100):
        raise AssertionError("must not start")
    assert gc.isenabled() and torch.zeros(1000).sum() == 0


def make_cycle(n: int) -> None:
    a = [torch.zeros(n)]
    a.append(a)


def test_cycles_die_at_marks_and_are_counted():
    with Recorder() as rec:
        make_cycle(100)
        junk = [[] for _ in range(20000)]  # enough to wake an automatic collection
        del junk
        before = rec.live()["bytes"]
        with rec.phase("next"):
            make_cycle(25)
        rec.mark("end")
    r = rec.recording
    assert before == 400 and r.at("end") == 0 and r.cycles == 500
    assert r.peak("next") == 100


def test_plain_deaths_are_no_cycles():
    with Recorder() as rec:
        x = torch.zeros(100)
        del x
        rec.mark("end")
    assert rec.recording.cycles == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_everything_is_put_back(enabled):
    originals = [
        torch.UntypedStorage.resize_, torch.UntypedStorage.__init__, threading.Thread.start, nn.Module.__call__,
        torch.autograd._engine_run_backward, torch.distributed.Work.wait,
    ]  # fmt: skip
    callbacks, frozen = list(gc.callbacks), gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError), Recorder(), Recorder():
            assert nn.Module.__call__ is not originals[3] and not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert originals == [
        torch.UntypedStorage.resize_, torch.UntypedStorage.__init__, threading.Thread.start, nn.Module.__call__,
        torch.autograd._engine_run_backward, torch.distributed.Work.wait,
    ]  # fmt: skip
    assert gc.callbacks == callbacks and gc.get_freeze_count() == frozen


def test_nested_recorders_both_record():
    model = nn.Linear(4, 4)
    with Recorder(watch=model) as outer:
        x = torch.zeros(10, 4)
        with Recorder(watch=model) as inner:
            with inner.phase("inside"):
                model(x).sum().backward()
            inner.mark("inner")
            x.untyped_storage().resize_(0)
        outer.mark("after")
        y = torch.zeros(5)
    a, b = outer.recording, inner.recording
    assert [s.bytes for s in b.allocations()] == [s.bytes for s in a.allocations()][1:-1]
    assert b.at("inner") == 2 * 80 + 160 and a.at("after") == 2 * 80
    assert a.ops("addmm")[0].module == b.ops("addmm")[0].module == "Linear"
    assert a.phases == [] and len(b.phases) == 1
    del y


def test_new_threads_are_recorded():
    barrier = threading.Barrier(2)
    peaks = []

    class Worker(threading.Thread):
        def run(self):
            x = torch.zeros(100)
            barrier.wait()
            peaks.append(x.sum().item())
            barrier.wait()

    with Recorder() as rec, rec.phase("threads"):
        workers = [Worker() for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda n: torch.zeros(n).numel(), [10, 20])) == [10, 20]
    r = rec.recording
    assert sorted(s.bytes for s in r.allocations("threads") if s.op == "aten.zeros") == [40, 80, 400, 400]
    assert r.peak_bytes >= 800 and r.timeline()[2][-1] == 0


def test_many_threads_lose_nothing():
    def work(n):
        for _ in range(n):
            torch.zeros(8).add(1)

    with Recorder() as rec:
        threads = [threading.Thread(target=work, args=(200,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rec.mark("end")
        assert rec.live()["bytes"] == 0
    r = rec.recording
    assert r.op_counts() == {"aten.zeros": 800, "aten.add": 800}
    assert len(r.allocations()) == 1600 and r.at("end") == 0 and int(r.timeline()[2].min()) >= 0


def test_a_thread_that_outlives_the_recorder_is_left_alone():
    go = threading.Event()
    done = []

    def late():
        go.wait()
        done.append(torch.zeros(10).sum().item())

    with Recorder() as rec:
        thread = threading.Thread(target=late)
        thread.start()
    go.set()
    thread.join()
    assert done == [0.0] and rec.recording.ops() == []


def test_phases_in_generators_may_overlap():
    with Recorder() as rec:

        def batches(name):
            with rec.phase(name):
                yield torch.zeros(10)
                yield torch.zeros(20)

        a, b = batches("a"), batches("b")
        next(a), next(b)
        x = torch.ones(1)
        list(a)  # the outer phase ends first
        y = torch.ones(1)
        list(b)
        z = torch.ones(1)
    ops = rec.recording.ops("ones")
    assert [op.phase for op in ops] == ["b", "b", ""]
    assert [s.bytes for s in rec.recording.allocations("a")] == [40, 40, 4, 80]
    del x, y, z


def test_a_follower_sees_what_the_recording_says():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with Recorder(watch=[model, optimizer]) as rec:
        follower = rec.follow()
        polled, phases = [], []
        for _ in range(4):
            with rec.phase("forward"):
                loss = model(torch.ones(2, 8)).sum()
                answer = follower.poll()
                polled.append(answer)
                phases += [p["name"] for p in answer["phases"]]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rec.mark("end")
        polled.append(follower.poll())
        json.dumps(polled, allow_nan=False)
    r = rec.recording
    last = polled[-1]
    assert {name: last["points"][name][-1] for name in CATEGORIES} == last["by_category"] == r.by_category("end")
    totals = [sum(p) for a in polled for p in zip(*(a["points"][name] for name in CATEGORIES), strict=True)]
    assert totals == r.timeline()[2].tolist()[: len(totals)] and max(totals) == r.peak_bytes == last["peak_bytes"]
    assert polled[0]["phase"] == "forward" and last["marks"] == [{"name": "end", "seconds": last["marks"][0]["seconds"]}]
    assert phases == ["forward"] * 7 and last["phases"] == [] or len(last["phases"]) == 1


def test_a_follower_thins_but_keeps_peak_and_end():
    with Recorder() as rec:
        follower = rec.follow()
        kept = [torch.zeros(n) for n in range(1000)]
        x = torch.zeros(10**6)
        del x
        kept += [torch.zeros(n) for n in range(1000)]
        points = follower.poll(max_points=50)["points"]
    assert len(points["seconds"]) <= 50
    assert max(points["other"]) == rec.recording.peak_bytes and points["other"][-1] == sum(t.nbytes for t in kept)
    assert np.all(np.diff(points["seconds"]) >= 0)


def test_a_follower_in_another_thread():
    stop, answers = threading.Event(), []
    with Recorder() as rec:
        follower = rec.follow()

        def poll():
            while not stop.is_set():
                answers.append(follower.poll())

        thread = threading.Thread(target=poll)
        thread.start()
        for _ in range(2000):
            torch.zeros(10).add(1)
        stop.set()
        thread.join()
        answers.append(follower.poll(max_points=10**6))
        assert answers[-1]["bytes"] == 0
        rec.snapshot()
    assert all(min(a["points"]["other"], default=0) >= 0 for a in answers)
    assert len(rec.recording.ops("zeros")) == 2000


def test_live_and_snapshot():
    with Recorder() as rec:
        with rec.phase("a"):
            x = torch.zeros(10)
            state = rec.live()
            assert state == state | {"bytes": 40, "peak_bytes": 40, "phase": "a", "op": "aten.zeros", "refusals": 0}
            r = rec.snapshot()
            assert r.peak("a") == 40 and r.phases[0]["end_s"] is None and r.by_phase()["a"]["seconds"] > 0
        y = torch.zeros(10)
    assert r.peak_bytes == 40 and rec.recording.peak_bytes == 80
    del x, y


def test_messages_of_other_transports():
    from time import perf_counter

    note_message("send", perf_counter())  # without a recorder: nothing
    with Recorder() as rec, rec.phase("link"):
        note_message("send", perf_counter(), bytes_sent=100, peer=3, group="slow")
    (message,) = rec.recording.comm()
    assert (message.kind, message.bytes_sent, message.peer, message.phase) == ("send", 100, 3, "link")
    assert rec.recording.bytes_by_kind() == {"send": {"count": 1, "bytes_sent": 100, "bytes_received": 0}}


def test_compiled_code_runs_as_it_is_written():
    """torch.compile steps back while a dispatch mode is on, so every operator is seen."""
    model = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: model(x) * 2, backend="eager")
    with Recorder(watch=model) as rec:
        y = compiled(torch.ones(10, 4))
    assert y.shape == (10, 4) and rec.recording.op_counts()["aten.mul"] == 1
    assert rec.recording.flops() == 2 * 10 * 4 * 4 and rec.recording.ops("addmm")[0].module == "Linear"

"""The recorder on training steps: exact bytes, categories, phases, operators, FLOPs, modules."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from labkit.recorder import CATEGORIES, Recorder, Recording

W = 8  # width: a weight is 256 bytes, a bias 32, an activation of 2 rows 64


def make(optimizer: str = "adamw", **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W))
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    return model, kind(model.parameters(), lr=0.1, **kwargs), torch.randn(2, W)


def train(rec: Recorder, model, optimizer, x, steps: int = 1) -> None:
    for _ in range(steps):
        with rec.phase("forward"):
            loss = model(x).sum()
        rec.mark("between")
        with rec.phase("backward"):
            loss.backward()
        rec.mark("after backward")
        with rec.phase("step"):
            optimizer.step()
        rec.mark("after step")
        optimizer.zero_grad()
        del loss


def test_a_training_step_in_exact_bytes():
    model, optimizer, x = make(foreach=False)
    with Recorder(watch=[model, optimizer, x]) as rec:
        train(rec, model, optimizer, x)
    r = rec.recording
    params = 2 * (W * W + W) * 4
    state = 2 * params + 4 * 4  # two moments, and a step count of 4 bytes per parameter
    # Kept for backward: the ReLU's output and the loss. The first Linear's output is not needed: ReLU keeps its own.
    assert r.by_category("between") == {
        "parameters": params, "gradients": 0, "optimizer state": 0, "activations": 2 * W * 4 + 4, "input data": 64, "other": 0,
    }  # fmt: skip
    assert r.by_category("after backward")["gradients"] == params
    assert r.by_category("after backward")["activations"] == 4  # the loss
    assert r.by_category("after step")["optimizer state"] == state
    assert r.at("after step") == 2 * params + state + 64 + 4
    assert r.at("after step", born=True) == params + state + 4
    assert sum(r.by_category().values()) == r.peak_bytes == r.peak("step")
    assert set(r.by_category()) == set(CATEGORIES)


@pytest.mark.parametrize("kwargs", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_every_kind_of_optimizer_keeps_the_same_state(kwargs):
    model, optimizer, x = make(**kwargs)
    with Recorder(watch=[model, optimizer, x]) as rec:
        train(rec, model, optimizer, x, steps=2)
    assert rec.recording.by_category("after step")["optimizer state"] == 4 * (W * W + W) * 4 + 16


@pytest.mark.parametrize("set_to_none, left", [(True, 0), (False, 576)])
def test_zero_grad(set_to_none, left):
    model, optimizer, x = make("sgd")
    with Recorder(watch=[model, optimizer, x]) as rec:
        model(x).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        rec.mark("cleared")
    assert rec.recording.by_category("cleared")["gradients"] == left


def test_gradients_are_labelled_even_when_freed_inside_backward():
    model, optimizer, x = make("sgd")
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Recorder(watch=[model, optimizer, x]) as rec:
        model(x).sum().backward()
    named = {s.name: s.bytes for s in rec.recording.allocations() if s.category == "gradients"}
    assert named == {"0.weight.grad": 256, "0.bias.grad": 32, "2.weight.grad": 256, "2.bias.grad": 32}


def test_several_steps_have_the_same_bytes_and_the_same_recording():
    def record() -> Recording:
        model, optimizer, x = make(foreach=False)
        with Recorder(watch=[model, optimizer, x]) as rec:
            train(rec, model, optimizer, x, steps=3)
        return rec.recording

    first, second = record(), record()
    for name, value in first.arrays.items():
        if "seconds" not in name and "start" not in name:
            assert np.array_equal(value, second.arrays[name]), name
    assert first.at("between") == second.at("between")
    spans = [p for p in first.phases if p["name"] == "forward"]
    assert len(spans) == 3
    live = first.timeline()[2]
    ends = [live[p["last_event"] - 1] for p in spans[1:]]
    assert ends[0] == ends[1]  # the second and third steps stand alike; the first had no optimizer state


def test_the_peak_is_the_allocators(capfd):
    """Against PyTorch's own account of every allocation: the profiler's memory events."""
    model, optimizer, _ = make(foreach=False)
    x = torch.randn(256, W)  # activations dominate: the optimizer's kernels take a few bytes for scalars of their own

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = sorted(
        (e.start_ns(), i, e.nbytes())
        for i, e in enumerate(profile.profiler.kineto_results.events())
        if e.name() == "[memory]"
    )
    peak = int(np.cumsum([n for *_, n in events]).max())
    with Recorder() as rec:
        step()
    assert rec.recording.peak(born=True) == peak


def test_phases_marks_and_readers():
    model, optimizer, x = make("sgd")
    with Recorder(watch={"net": model, "opt": optimizer, "batch": x}) as rec:
        with rec.phase("outer"):
            with rec.phase("inner"):
                a = torch.zeros(100)
            b = torch.zeros(50)
            del a
        rec.mark("peak")  # a mark may be called so: the mark is meant then
        del b
    r = rec.recording
    assert [s.bytes for s in r.allocations("inner")] == [400]
    assert [s.bytes for s in r.allocations("outer")] == [400, 200]
    assert [s.bytes for s in r.allocations(min_bytes=300)] == [400]
    assert r.peak("outer", born=True) == 600 and r.peak("inner", born=True) == 400
    assert r.at("peak", born=True) == 200
    assert r.alive("peak", born=True)[0].bytes == 200
    assert r.by_phase()["outer"] == r.by_phase()["outer"] | {
        "allocated_bytes": 600, "allocations": 2, "ops": 2, "flops": 0, "peak_bytes": 576 + 64 + 600,
    }  # fmt: skip
    assert {s.name for s in r.alive("peak") if not s.born} == {
        "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias", "batch",
    }  # fmt: skip
    first, second = r.allocations()
    assert first.freed_event is not None and second.born_event < first.freed_event
    for wrong in (lambda: r.at("nowhere"), lambda: r.peak("nowhere"), lambda: r.ops(phase="nowhere")):
        with pytest.raises(KeyError, match="nowhere"):
            wrong()


def test_alive_summary_is_for_people():
    with Recorder() as rec, rec.phase("forward"):
        x = torch.ones(2**10, requires_grad=True)
        kept = [torch.relu(x) for _ in range(131)]
        rec.mark("full")
    assert rec.recording.alive_summary("full") == "131 outputs of relu, 524 KiB, born in forward"
    del kept
    with Recorder() as rec:
        pass
    assert rec.recording.alive_summary() == "nothing was alive"
    assert rec.recording.peak_bytes == 0 and rec.recording.by_phase() == {}


def test_alive_summary_tells_the_category_that_holds_most():
    model = torch.nn.Linear(30, 30)
    with Recorder(watch=model) as rec, rec.phase("forward"):
        x = torch.ones(2**8, requires_grad=True)
        kept = [[make(x) for _ in range(5)] for make in (torch.relu, torch.sin, torch.exp)]
        rec.mark("full")
        del kept
    # One kind of storage holds more than any operator's outputs, and activations together hold more than that.
    assert rec.recording.alive_summary("full") == "15 storages of activations, 15 KiB, the most by relu: 5 KiB, born in forward"
    with Recorder(watch=model) as rec:
        pass
    assert rec.recording.alive_summary() == "2 storages of parameters, 3.6 KiB"


def test_flops_and_rates():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    with Recorder() as rec, rec.phase("product"):
        a @ b
        torch.nn.functional.scaled_dot_product_attention(*(torch.ones(1, 2, 4, 8),) * 3)
    r = rec.recording
    assert [op.flops for op in r.ops("mm")] == [2 * 3 * 5 * 7]
    attention = 2 * (2 * 2 * 4 * 4 * 8)  # two products of (heads 2, 4 x 8) by (8 x 4)
    assert r.flops() == r.flops("product") == 210 + attention
    assert r.flops_per_second("product") == pytest.approx(r.flops() / r.by_phase()["product"]["seconds"])
    assert r.mfu(2 * r.flops_per_second()) == pytest.approx(0.5)


def test_flops_agree_with_pytorchs_counter():
    from torch.utils.flop_counter import FlopCounterMode

    model, _, x = make()
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    with Recorder() as rec:
        model(x).sum().backward()
    assert rec.recording.flops() == counter.get_total_flops() > 0


def test_modules_and_their_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(W, W)

        def forward(self, x):
            return self.inner(self.inner(x)) * 2

    model = Twice()
    with Recorder(watch=model) as rec:
        model(torch.ones(2, W))
        with pytest.raises(RuntimeError):
            model(torch.ones(2, W + 1))
        torch.zeros(3)
    r = rec.recording
    assert [op.module for op in r.ops("addmm")] == ["inner", "inner"]
    assert r.ops("mul")[0].module == "Twice" and r.ops("zeros")[0].module == ""
    assert [c.module for c in r.module_calls()] == ["inner", "inner", "Twice", "inner", "Twice"]
    assert len(r.module_calls("inner")) == 3


def test_parameters_made_later_and_swapped():
    with Recorder() as rec:
        model = nn.Linear(W, W)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rec.watch([model, optimizer])
        model(torch.ones(2, W)).sum().backward()
        optimizer.step()
        rec.mark("made")
        model.to(torch.float64)
        rec.mark("doubled")
        model.weight.data = torch.zeros(W, 1)
        rec.mark("shrunk")
    r = rec.recording
    assert r.by_category("made")["parameters"] == 288
    assert r.by_category("made")["optimizer state"] == 288
    assert r.by_category("doubled")["parameters"] == 576
    assert r.by_category("doubled")["gradients"] == 576
    assert r.by_category("shrunk")["parameters"] == 32 + 64


def test_parameters_need_no_watching_to_be_known():
    model = nn.Linear(W, W)
    with Recorder() as rec:
        model(torch.ones(2, W))
        rec.mark("after")
    assert rec.recording.by_category("after")["parameters"] == 288


def test_watching_keeps_nothing_alive():
    model, x = nn.Linear(W, W), torch.zeros(100)
    with Recorder(watch=[model, x]) as rec:
        rec.mark("before")
        del model, x
        rec.mark("gone")
    assert rec.recording.at("before") == 688 and rec.recording.at("gone") == 0


def test_tied_parameters_count_once():
    model = nn.ModuleList([nn.Linear(W, W, bias=False), nn.Linear(W, W, bias=False)])
    model[1].weight = model[0].weight
    with Recorder(watch=model) as rec:
        model[1](model[0](torch.ones(1, W))).sum().backward()
        rec.mark("after")
    r = rec.recording
    assert r.by_category("after")["parameters"] == r.by_category("after")["gradients"] == 256


def test_inference_activations():
    model, _, x = make()
    for mode in (torch.no_grad, torch.inference_mode):
        with Recorder(watch=[model, x]) as rec, mode():
            kept = [model(x)]
            rec.mark("after")
        r = rec.recording
        assert r.by_category("after")["activations"] == 64, mode
        assert r.op_counts() == {"aten.addmm": 2, "aten.relu": 1, "aten.t": 2}, mode  # composites are split
        assert r.flops() == 2 * 2 * 2 * W * W
        del kept


def test_lazy_modules_and_states_of_any_shape():
    class Own:
        """An optimizer of a learner's own, built like PyTorch's."""

        def __init__(self, params):
            self.param_groups = [{"params": list(params)}]
            self.state = {p: {"history": [torch.zeros(10), {"sum": torch.zeros(5)}], "count": 3} for p in params}

    lazy, linear = nn.LazyLinear(W), nn.Linear(W, W, bias=False)
    optimizer = Own([linear.weight])
    with Recorder(watch=[lazy, linear, optimizer]) as rec:
        rec.mark("before")
        lazy(torch.ones(2, W))
        rec.mark("after")
    r = rec.recording
    assert r.by_category("before") == r.by_category("before") | {"parameters": 256, "optimizer state": 60}
    assert r.by_category("after")["parameters"] == 256 + 288


def test_a_formula_that_fails_stops_nothing():
    with Recorder() as rec:
        q, k = torch.ones(1, 2, 4, 8), torch.ones(2, 2, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(q, k, k)  # batches broadcast; the formula wants them equal
    assert rec.recording.flops() >= 0 and rec.recording.peak_bytes > 0


def test_refuses_nonsense():
    with pytest.raises(TypeError, match="not int"):
        Recorder(watch=[3])
    with Recorder() as rec:
        pass
    with pytest.raises(RuntimeError, match="records once"), rec:
        pass
    for late in (lambda: rec.mark("late"), lambda: rec.phase("late").__enter__()):
        with pytest.raises(RuntimeError, match="inside"):
            late()


def test_travels(tmp_path):
    model, optimizer, x = make(foreach=False)
    with Recorder(watch=[model, optimizer, x], budget_bytes=10**6) as rec:
        train(rec, model, optimizer, x)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(10**6)
    r = rec.recording
    header, tensors = r.to_wire()
    copies = [Recording.from_wire(json.loads(json.dumps(header)), tensors)]
    r.save(tmp_path / "step.recording")
    copies.append(Recording.load(tmp_path / "step.recording"))
    for copy in copies:
        assert copy.peak_bytes == r.peak_bytes and copy.by_phase() == r.by_phase()
        assert copy.alive(top=None) == r.alive(top=None) and copy.ops() == r.ops()
        assert copy.refusals == r.refusals and copy.module_calls() == r.module_calls()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Recording.from_wire(header, tensors)

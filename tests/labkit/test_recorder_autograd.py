"""The recorder on backward passes: recomputation, activations, gradients, hooks, double backward."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.recorder import Recorder

WIDTH, ROWS = 16, 8
UNIT = WIDTH * ROWS * 4  # bytes of one activation


def chain(n: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n)))


def record(run, *watch) -> Recorder:
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with Recorder(watch=list(watch)) as rec:
        with rec.phase("forward"):
            loss = run(x).sum()
        rec.mark("between")
        with rec.phase("backward"):
            loss.backward()
        rec.mark("after")
    return rec


class Recompute(torch.autograd.Function):
    """A learner's own checkpoint."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


RUNS = {
    "plain": lambda run, x: run(x),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "not reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "own": Recompute.apply,
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("watched", [True, False])
def test_recomputed_operators(kind, watched):
    model = chain(3)
    rec = record(lambda x: RUNS[kind](model, x), *([model] if watched else []))
    r = rec.recording
    recomputed = [op.name for op in r.recomputed_ops() if op.name != "aten.t"]
    assert recomputed == ([] if kind == "plain" else ["aten.addmm", "aten.tanh"] * 3)
    assert len(r.ops("addmm", phase="backward")) == (0 if kind == "plain" else 3)
    assert all(op.in_backward for op in r.recomputed_ops())
    assert len(r.ops("tanh_backward")) == 3 and not any(op.recompute for op in r.ops("tanh_backward"))
    assert r.at("between", born=True) == (3 * UNIT + 4 if kind == "plain" else 4)
    if watched:
        calls = [c.in_backward for c in r.module_calls("0.0")]
        assert calls == ([False] if kind == "plain" else [False, True])


def test_backward_in_threads_of_pytorchs_own():
    """As on CUDA: beyond 60 backward passes inside each other, autograd goes on in a thread from its pool."""
    threads = set()

    class Note(nn.Module):
        def forward(self, x):
            threads.add(threading.get_ident())
            return x.tanh()

    note = Note()

    def nest(x, depth):
        return checkpoint(nest, x, depth - 1, use_reentrant=True) if depth else note(x)

    rec = record(lambda x: nest(x, 64), note)
    r = rec.recording
    assert len(threads) == 2
    assert [c.in_backward for c in r.module_calls("Note")] == [False] + [True] * 64
    assert {op.module for op in r.ops("tanh")} == {"Note"} and len(r.ops("tanh_backward")) == 1


def test_recomputed_activations_are_activations():
    model = chain(4)
    rec = record(lambda x: RUNS["not reentrant"](model, x), model)
    again = [s for s in rec.recording.allocations("backward") if s.op == "aten.tanh"]
    assert [s.category for s in again] == ["activations"] * 4 and [s.module for s in again] == [f"{i}.1" for i in range(4)]


def test_a_nested_checkpoint_is_recomputed_at_both_levels():
    model = chain(2)

    def outer(x):
        return checkpoint(model[1], checkpoint(model[0], x, use_reentrant=False), use_reentrant=False)

    rec = record(lambda x: checkpoint(outer, x, use_reentrant=False))
    assert len([op for op in rec.recording.recomputed_ops() if op.name == "aten.tanh"]) >= 2


@pytest.mark.parametrize("kind", ["plain", "not reentrant"])
def test_create_graph_is_no_recomputation(kind):
    model = chain(2)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with Recorder() as rec:
        y = RUNS[kind](model, x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        with rec.phase("second"):
            grad.pow(2).sum().backward()
    names = [op.name for op in rec.recording.recomputed_ops()]
    assert names.count("aten.tanh") == (0 if kind == "plain" else names.count("aten.addmm")) < 5
    assert not any("backward" in name or name == "aten.mm" for name in names)
    assert (kind == "plain") == (names == [])


def test_backward_inside_a_module_is_no_recomputation():
    class Inner(nn.Module):
        def forward(self, x):
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad((x * x).tanh().sum(), x)
            return grad

    model = Inner()
    with Recorder(watch=model) as rec:
        model(torch.ones(3))
    assert rec.recording.recomputed_ops() == [] and len(rec.recording.ops("tanh_backward")) == 1


def test_recomputing_without_grad_mode_is_seen_through_the_module():
    """Some recompute under no_grad and apply a formula of their own."""
    layer = nn.Linear(WIDTH, WIDTH)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return layer(x) ** 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return (grad * 2 * layer(x)) @ layer.weight

    rec = record(Square.apply)
    assert [op.name for op in rec.recording.recomputed_ops()] == ["aten.t", "aten.addmm"]


def test_plain_backward_with_hooks_that_allocate():
    model = chain(2)
    kept = []
    model[0][0].weight.register_hook(lambda g: kept.append(g.clone()))
    model.register_full_backward_hook(lambda m, gi, go: kept.append(go[0].clone()))
    rec = record(model, model)
    r = rec.recording
    assert r.recomputed_ops() == []
    params = 2 * (WIDTH * WIDTH + WIDTH) * 4
    assert r.by_category("after")["gradients"] == params + UNIT  # and that of x, a leaf as well
    assert r.by_category("after")["other"] >= WIDTH * WIDTH * 4 + UNIT
    model[0][0].weight._backward_hooks.clear()


def test_saved_tensors_hooks_move_activations():
    model = chain(2)
    with torch.autograd.graph.save_on_cpu():
        rec = record(model, model)
    assert rec.recording.recomputed_ops() == []


def test_retain_graph_keeps_activations():
    model = chain(3)
    x = torch.ones(ROWS, WIDTH)
    with Recorder(watch=[model, x]) as rec:
        loss = model(x).sum()
        rec.mark("between")
        loss.backward(retain_graph=True)
        rec.mark("kept")
        loss.backward()
        rec.mark("freed")
        del loss
    r = rec.recording
    assert r.by_category("kept")["activations"] == r.by_category("between")["activations"] == 3 * UNIT + 4
    assert r.by_category("freed")["activations"] == 4
    assert r.by_category("freed")["gradients"] == r.by_category("kept")["gradients"] == 3 * (WIDTH * WIDTH + WIDTH) * 4


def test_accumulated_gradients_stay_one_set():
    model = chain(1)
    with Recorder(watch=model) as rec:
        for _ in range(3):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        rec.mark("after")
    assert rec.recording.by_category("after")["gradients"] == (WIDTH * WIDTH + WIDTH) * 4


def test_an_exception_in_forward_and_in_backward():
    model = chain(2)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no gradient today")

    with Recorder(watch=model) as rec:
        for _ in range(2):
            with pytest.raises(ValueError, match="today"), rec.phase("failing"):
                Fails.apply(model(torch.ones(ROWS, WIDTH))).sum().backward()
            rec.mark("after failure")
        with pytest.raises(RuntimeError), rec.phase("wrong shapes"):
            model(torch.ones(ROWS, WIDTH + 1))
        with rec.phase("fine"):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
    r = rec.recording
    assert [p["end_s"] is not None for p in r.phases] == [True] * 4
    assert {op.phase for op in r.ops("tanh_backward")} == {"fine"}
    assert r.ops(phase="fine")[0].module.startswith("0") or r.ops(phase="fine")[0].module == ""
    assert r.by_category("after failure")["activations"] == 0


def test_an_exception_ends_the_recording_cleanly():
    with pytest.raises(ZeroDivisionError), Recorder() as rec, rec.phase("broken"):
        x = torch.zeros(10)
        1 / 0  # noqa: B018
    r = rec.recording
    assert r.peak_bytes == 40 and r.phases[0]["end_s"] is not None
    assert torch.zeros(3).sum() == 0 and r is rec.recording and len(r.ops()) == 1
    del x


def test_second_forward_under_recorder_of_an_optimizer_that_raises():
    model = chain(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        raise KeyError("closure")

    with Recorder(watch=[model, optimizer]) as rec:
        with pytest.raises(KeyError), rec.phase("step"):
            optimizer.step(closure)
        model(torch.ones(ROWS, WIDTH))
    assert {s.category for s in rec.recording.allocations() if s.op == "aten.tanh"} == {"activations"}

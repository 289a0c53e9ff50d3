"""Paper scale: the same bytes as real runs, answers where code asks for numbers, clear errors, nothing left behind."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit import Recorder
from labkit.gpt import GPT, GPTConfig, next_token_loss
from labkit.models import linear_layers, relu_blocks
from labkit.paper import PaperScaleError, paper_scale

SMALL = GPTConfig(vocab=64, context=16, layers=2, heads=2, width=32)


def tokens(batch=2):
    return torch.randint(0, SMALL.vocab, (batch, SMALL.context))


# The same code, real and at paper scale


def adam_step(rec, foreach):
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    rec.watch([model, optimizer])
    for step in range(2):
        ids = tokens()
        with rec.phase("step"):
            loss = next_token_loss(model(ids), ids)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        del loss
        rec.mark(f"after {step}")
        optimizer.zero_grad()


def scaled_step(rec):
    model = GPT(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    rec.watch([model, optimizer])
    for _ in range(2):
        ids = tokens()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = next_token_loss(model(ids), ids)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        del loss
        rec.mark("after")


def half_model(rec):
    """Converted after the optimizer has its parameters, as nn.Module does in place; the head stays tied."""
    model = GPT(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rec.watch([model, optimizer])
    model(tokens()).sum().backward()
    model.to(torch.bfloat16)
    assert model.head.weight is model.tokens.weight and model.head.weight.dtype is torch.bfloat16
    assert all(p.dtype is p.grad.dtype is torch.bfloat16 for g in optimizer.param_groups for p in g["params"])
    rec.mark("converted")
    model(tokens()).float().sum().backward()
    optimizer.step()
    rec.mark("after")


class Recompute(torch.autograd.Function):
    """A learner's checkpoint: random state set back for the second run."""

    @staticmethod
    def forward(ctx, fn, x):
        ctx.fn, ctx.state, ctx.autocast = fn, torch.get_rng_state(), torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    def backward(ctx, grad):
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=ctx.autocast):
            torch.set_rng_state(ctx.state)
            out = ctx.fn(leaf)
        torch.autograd.backward(out, grad)
        return None, leaf.grad


CHECKPOINTS = {
    "own": Recompute.apply,
    "reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
    "not reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
}


def checkpointed(rec, kind):
    x = torch.randn(64, 32, requires_grad=True)
    layers = [nn.Sequential(block, nn.Dropout(0.1)) for block in relu_blocks(6, 32)]
    rec.watch([*layers, x])
    h = x
    for i in (0, 2, 4):
        h = CHECKPOINTS[kind](nn.Sequential(*layers[i : i + 2]), h)
    rec.mark("between")
    h.square().mean().backward()
    del h
    rec.mark("after")


def copies(rec):
    model = GPT(SMALL)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    twin = copy.deepcopy(model)
    rec.watch([model, twin])
    rec.mark("copied")
    twin.load_state_dict(kept)
    del kept
    rec.mark("loaded")
    twin(tokens(8)).sum().backward()
    rec.mark("after")


def freed_and_back(rec):
    """As sharded training does: a weight's memory goes, and comes back."""
    layer = nn.Linear(64, 64)
    rec.watch(layer)
    flat = torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])
    layer.weight.untyped_storage().resize_(0)
    rec.mark("freed")
    layer.weight.untyped_storage().resize_(64 * 64 * 4)
    layer.bias.data = torch.empty(0)
    rec.mark("back")
    layer.weight.data, layer.bias.data = flat[:4096].view(64, 64), flat[4096:]
    rec.mark("views")
    layer(torch.randn(8, 64)).sum().backward()
    rec.mark("after")


def views_and_buffers(rec):
    layers = linear_layers([16, 48, 8, 32])
    x = torch.randn(8, 16)
    rec.watch([*layers, x])
    buffers = x.new_empty(2, 8 * 48)
    with torch.no_grad():
        for i, layer in enumerate(layers):
            out = buffers[i % 2, : 8 * layer.out_features].view(8, layer.out_features)
            x = torch.addmm(layer.bias, x, layer.weight.t(), out=out).relu_()
    rec.mark("after")


PROGRAMS = {
    "AdamW": lambda rec: adam_step(rec, foreach=False),
    "AdamW foreach": lambda rec: adam_step(rec, foreach=True),
    "GradScaler": scaled_step,
    "half": half_model,
    "copies": copies,
    "freed and back": freed_and_back,
    "two buffers": views_and_buffers,
    **{f"checkpoint {kind}": lambda rec, kind=kind: checkpointed(rec, kind) for kind in CHECKPOINTS},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_bytes_as_a_real_run(name):
    with Recorder() as real:
        PROGRAMS[name](real)
    with paper_scale(), Recorder() as fake:
        PROGRAMS[name](fake)
    real, fake = real.recording, fake.recording
    assert fake.peak_bytes == real.peak_bytes > 0
    assert {m["name"]: fake.at(m["name"]) for m in fake.marks} == {m["name"]: real.at(m["name"]) for m in real.marks}
    assert fake.by_category() == real.by_category()
    assert fake.flops() == real.flops()


# Answers


def test_numbers_count_as_zero():
    with paper_scale():
        x = torch.randn(3, 4, requires_grad=True)
        loss = x.square().mean()
        assert loss.item() == 0.0 and type(loss.item()) is float and float(loss) == 0.0
        assert x.argmax().item() == 0 and type(int(x.argmax())) is int
        assert not (loss > 0) and bool(loss <= 1) and not bool(x.sum())
        assert torch.equal(x, x + 1) and torch.allclose(x, x + 1)
        assert f"{loss:.2f} and {loss.item():.2f}" == "0.00 and 0.00" and "4" in f"{x}"
        assert [float(row.sum()) for row in x] == [0.0] * 3 and loss.tolist() == 0.0


def test_a_number_that_is_known_is_told():
    with paper_scale():
        scale = torch.tensor(65536.0)
        assert scale.item() == 65536.0 and (scale / 2).item() == 32768.0 and scale.numpy() == 65536.0
        assert scale > 1 and not torch.tensor(False)
        assert [part.tolist() for part in torch.arange(5).tensor_split(2)] == [[0, 1, 2], [3, 4]]
        assert torch.linspace(0, 9, 4).round().int().tolist() == [0, 3, 6, 9] and torch.tensor([3, 4]).sum().item() == 7
        assert nn.Embedding(8, 4)(torch.arange(3)).shape == (3, 4) and torch.arange(10**12).numel() == 10**12


def _accumulated(grads):
    good = torch.tensor(True)
    for grad in grads:
        good &= torch.isfinite(grad).all()
    return good


def _counted(grads):
    bad = torch.zeros(1)
    for grad in grads:
        bad += (~torch.isfinite(grad)).sum()
    return bad.item() == 0


FINITE = {
    "all": lambda grads: all(torch.isfinite(g).all() for g in grads),
    "not any": lambda grads: not any(torch.isinf(g).any() or torch.isnan(g).any() for g in grads),
    "stack": lambda grads: torch.stack([torch.isfinite(g).all() for g in grads]).all().item(),
    "norm": lambda grads: torch.isfinite(torch.stack([g.norm() for g in grads]).norm()),
    "math": lambda grads: math.isfinite(sum(g.abs().sum().item() for g in grads)),
    "accumulated": _accumulated,
    "counted": _counted,
    "sum": lambda grads: all(torch.isfinite(g).sum() == g.numel() for g in grads),
    "itself": lambda grads: not any(g.sum() != g.sum() or g.sum().abs() == float("inf") for g in grads),
    "below": lambda grads: all((g.abs() < float("inf")).all() for g in grads),
    "flags": lambda grads: sum((~torch.isfinite(g)).any().float() for g in grads) == 0,
    "least": lambda grads: torch.stack([torch.isfinite(g).all().float() for g in grads]).min() > 0,
}


@pytest.mark.parametrize("form", FINITE)
def test_gradients_are_finite_in_any_form(form):
    with paper_scale():
        assert FINITE[form]([torch.randn(3, 4), torch.randn(5).half()])


def test_addresses_tell_storages_apart():
    with paper_scale():
        a, b = torch.zeros(4), torch.zeros(4)
        assert a.data_ptr() != b.data_ptr() and a[1:].data_ptr() == a.data_ptr() + 4
        assert a.view(2, 2).untyped_storage().data_ptr() == a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_what_one_block_made_another_can_use():
    with paper_scale():
        model = nn.Linear(4, 4)
    with paper_scale():
        assert model(torch.zeros(2, 4)).shape == (2, 4)


# Real tensors from outside


def test_real_tensors_work_and_stay_as_they_were():
    layer, mask = nn.Linear(4, 4), torch.tensor([True, False, True, True])
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    with paper_scale():
        with Recorder(watch=layer) as rec:
            out = layer(torch.randn(8, 4)) * mask
            out.sum().backward()
            rec.mark("after")
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter -= 0.1 * parameter.grad
        assert mask.sum().item() == 3 and mask.tolist() == [True, False, True, True] and mask.numpy().sum() == 3
    assert rec.recording.by_category("after")["parameters"] == 80  # weights seen once, transposed or not
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    layer(torch.randn(8, 4)).sum().backward()


# What cannot run


CANNOT = {
    "numpy": ("y = x.numpy()", "numpy() needs real numbers"),
    "tolist": ("y = x.tolist()", "tolist() needs real numbers"),
    "mask": ("y = x[x > 0]", "depends on numbers"),
    "nonzero": ("y = x.nonzero()", "aten.nonzero"),
    "tensor of tensors": ("y = torch.tensor([x.sum(), x.sum()])", "reads numbers"),
    "division": ("y = 1 / x.sum().item()", "counts as 0"),
    "log": ("import math; y = math.log(x.mean())", "counts as 0"),
}


@pytest.mark.parametrize("name", CANNOT)
@pytest.mark.parametrize("file, told", [("/tmp/ipykernel_12/34.py", "line 3 of your cell"), ("/home/me/model.py", "line 3 of model.py")])
def test_what_cannot_run_names_the_line(name, file, told):
    source, reason = CANNOT[name]
    code = compile(f"def run(x):\n    if True:\n        {source}\n", file, "exec")
    names = {"torch": torch}
    exec(code, names)
    with pytest.raises(PaperScaleError) as caught, paper_scale():
        names["run"](torch.randn(4, 3))
    assert str(caught.value).startswith(told) and reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_own_line_is_named_inside_backward():
    class Peeks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float(grad.numpy().max())  # this line

    with pytest.raises(PaperScaleError, match="test_paper.py, `return grad .* # this line`: numpy"), paper_scale():
        Peeks.apply(torch.randn(3, requires_grad=True)).sum().backward()


def test_other_errors_stay_what_they_are(capfd):
    with pytest.raises(RuntimeError, match="reduction dim") as caught, paper_scale():
        torch.randn(2, 3) @ torch.randn(2, 3)
    assert capfd.readouterr() == ("", "")
    assert not isinstance(caught.value, PaperScaleError)
    with pytest.raises(NotImplementedError, match="Exercise"), paper_scale():
        raise NotImplementedError("Exercise 2.2: checkpoint")
    with pytest.raises(torch.OutOfMemoryError, match="budget"), paper_scale(), Recorder(budget_bytes=1000):
        torch.zeros(1000)
    with pytest.raises(ZeroDivisionError), paper_scale():
        math.log(0 / 0)


# Everything restored


def _patched():
    from torch._subclasses.fake_tensor import FakeTensor

    owners = (torch.nn.Module, torch.UntypedStorage, FakeTensor, torch.Tensor)
    return [dict(vars(owner)) for owner in owners]


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, Stop])
def test_everything_is_restored(error):
    before = _patched()
    try:
        with paper_scale(ranks=4, rank=1), paper_scale(), Recorder():
            x = torch.randn(3)
            assert torch.distributed.get_rank() == 1
            if error:
                raise error
    except (ValueError, KeyboardInterrupt, Stop):
        pass
    assert _patched() == before
    assert not torch.distributed.is_initialized()
    assert type(torch.ones(1)) is torch.Tensor and torch.ones(1).item() == 1.0 and x.shape == (3,)
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_nesting_keeps_the_outer_tensors():
    with paper_scale():
        x = torch.randn(3)
        with paper_scale(), pytest.raises(ValueError, match="inner"), paper_scale():
            x = x + torch.randn(3)
            raise ValueError("inner")
        assert (x + torch.randn(3)).sum().item() == 0.0
    assert type(torch.ones(1)) is torch.Tensor


def test_ranks_are_checked():
    with pytest.raises(ValueError, match="rank 4 of 4"), paper_scale(ranks=4, rank=4):
        pass
    with paper_scale(ranks=2), pytest.raises(RuntimeError, match="process group already"), paper_scale(ranks=2):
        pass
    assert not torch.distributed.is_initialized()


# Fake ranks


def test_messages_of_one_rank():
    dist = torch.distributed
    with paper_scale(ranks=4, rank=1), Recorder() as rec:
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        x, shard = torch.randn(400), torch.empty(100)
        dist.all_reduce(x)
        dist.reduce_scatter_tensor(shard, x)
        dist.all_gather_into_tensor(x, shard)
        dist.send(x, 2)
        dist.recv(x, 0)
        dist.broadcast(x, 0)
        dist.barrier()
        for work in (dist.isend(x, 2), dist.irecv(x, 0), dist.all_reduce(x, async_op=True)):
            work.wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 2), dist.P2POp(dist.irecv, x, 0)]):
            work.wait()
    bytes_by_kind = rec.recording.bytes_by_kind()
    assert bytes_by_kind["all_reduce"] == {"count": 2, "bytes_sent": 4800, "bytes_received": 4800}
    assert bytes_by_kind["reduce_scatter"]["bytes_sent"] == bytes_by_kind["all_gather"]["bytes_sent"] == 1200
    assert bytes_by_kind["send"] == {"count": 3, "bytes_sent": 4800, "bytes_received": 0}
    assert bytes_by_kind["recv"] == {"count": 3, "bytes_sent": 0, "bytes_received": 4800}


@pytest.mark.parametrize("ranks", [4, 64])
def test_zero_stage_1_holds_its_share(ranks):
    """States per rank: 2 + 2 bytes per parameter, and 12 over the number of ranks."""
    dist = torch.distributed
    with paper_scale(ranks=ranks, rank=ranks - 1):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(64))).half()
        weights = list(model.parameters())
        count = sum(weight.numel() for weight in weights)
        size = count // ranks
        with Recorder(watch=model) as rec:
            own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
            master = torch.cat([weight.detach().flatten() for weight in weights])[own].float()
            optimizer = torch.optim.Adam([master])
            model(torch.randn(8, 512, dtype=torch.float16)).float().square().mean().backward()
            flat = torch.cat([weight.grad.flatten() for weight in weights])
            shard = torch.empty(size, dtype=torch.float16)
            dist.reduce_scatter_tensor(shard, flat, op=dist.ReduceOp.SUM)
            master.grad = shard.float() / ranks
            del flat, shard
            optimizer.step()
            master.grad = None
            whole = torch.empty(count, dtype=torch.float16)
            dist.all_gather_into_tensor(whole, master.half())
            with torch.no_grad():
                for weight, part in zip(weights, whole.split(512 * 512), strict=True):
                    weight.copy_(part.view_as(weight))
            del whole, part
            states = rec.mark("after")
    assert states == 4 * count + 12 * size + 4  # and Adam's step count
    assert rec.recording.bytes_by_kind()["reduce_scatter"]["bytes_sent"] == 2 * count * (ranks - 1) // ranks


# Scale


def test_a_step_of_24_gb_takes_little_memory():
    script = """
import resource, torch
from labkit import Recorder
from labkit.gpt import GPT, GPT2_XL
from labkit.paper import paper_scale
with paper_scale(), Recorder() as recorder:
    model = GPT(GPT2_XL)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = recorder.mark("after")
    count = sum(parameter.numel() for parameter in model.parameters())
print(count, states - 16 * count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert int(told[0]) == 1_557_611_200
    assert 0 <= int(told[1]) < 10_000  # Adam's step counts
    assert int(told[2]) < 2 * 2**20, "KiB of real memory"


# The table


def test_table_rows_at_small_size(capsys):
    from labkit.paper.__main__ import show
    from labkit.paper._headlines import Headline, adapted, gpt_states, layers_in_two_buffers, resnet_best, resnet_sqrt, resnet_without

    small = (1, 1, 1, 1)
    rows = [
        Headline("states", "GB", 1e-3, lambda: gpt_states(SMALL)),
        Headline("layers", "", 2, lambda: layers_in_two_buffers(20, 64)),
        Headline("plain", "GB", 0.1, lambda: resnet_without(small, 2)),
        Headline("sqrt", "GB", 0.1, lambda: resnet_sqrt(small, 2)),
        Headline("best", "GB", 0.1, lambda: resnet_best(small, 2, (3, 5))),
    ]
    for width, shown in ((80, rows), (40, rows[:2])):
        show(shown, width)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert any("16.0" in line and "bytes per parameter" in line for line in lines)
        numbers = next(line for line in lines if "+0.0%" in line).split()
        assert numbers[-4:-2] == ["2", "2"], "two buffers, whatever the depth"
    assert adapted(SMALL, 4)[1] == SMALL.layers * 2 * 2 * SMALL.width * 4
    assert adapted(SMALL, 4)[2] == 2 * adapted(SMALL, 4)[1]
    assert resnet_without(small, 2)[0] > resnet_sqrt(small, 2)[0]


def test_lora_on_gpt3_trains_the_headline_number():
    from labkit.gpt import GPT3
    from labkit.paper._headlines import adapted

    assert adapted(GPT3)[1:] == (18_874_368, 37_748_736)


def test_deep_resnet_has_1001_layers_of_one_tensor():
    from labkit.resnets import LAYERS_200, LAYERS_1001, deep_resnet

    assert [3 * sum(stages) + 2 for stages in (LAYERS_200, LAYERS_1001)] == [200, 1001]
    layers = deep_resnet((1, 2, 1, 1), classes=10, width=8)
    main = [m for layer in layers for name, m in layer.named_modules() if not name.startswith("shortcut")]
    assert sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in main) == 3 * 5 + 2
    x = torch.randn(2, 3, 64, 64)
    for layer in layers:
        x = layer(x)
    assert x.shape == (2, 10) and x.isfinite().all()

"""The recorder on storages that are shared, resized, replaced, reused, foreign or odd: exact bytes."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from labkit.recorder import Recorder


def births(rec: Recorder) -> list[int]:
    return [s.bytes for s in rec.recording.allocations()]


def test_views_allocate_nothing():
    with Recorder() as rec:
        x = torch.zeros(6, 4)
        kept = [x.view(4, 6), x.t(), x[1:3], x.expand(5, 6, 4), x.as_strided((3, 3), (1, 2)), x.detach(), x.unbind(0),
                x.chunk(3), x.unsqueeze(0), x.reshape(24), x.flatten(), x.view(torch.int32), x.narrow(0, 1, 2), x.real]
        rec.mark("views")
        copied = x.t().reshape(24)  # not a view this time
        rec.mark("copied")
    r = rec.recording
    assert r.at("views") == 96 and r.at("copied") == 192 and len(births(rec)) == 2
    del kept, copied


def test_a_view_keeps_its_storage_alive():
    with Recorder() as rec:
        x = torch.zeros(1000)
        y = x[:1]
        del x
        rec.mark("view")
        del y
        rec.mark("none")
    assert rec.recording.at("view") == 4000 and rec.recording.at("none") == 0


def test_in_place_and_out_operators_allocate_nothing():
    x, y = torch.ones(10), torch.ones(10)
    with Recorder(watch={"x": x, "y": y}) as rec:
        x.add_(1).mul_(y).relu_()
        torch.add(x, y, out=y)
        x[2:4] = y[:2]
        x.copy_(y)
        torch._foreach_add_([x, y], 1)
    assert births(rec) == [] and rec.recording.peak_bytes == 80


def test_out_grows_its_argument():
    with Recorder() as rec:
        out = torch.empty(0)
        torch.add(torch.ones(10), 1, out=out)
        rec.mark("grown")
    r = rec.recording
    assert r.at("grown") == 40 and r.peak_bytes == 80
    assert r.alive("grown")[0].sid == r.allocations()[0].sid


def test_resizing_tensors_and_storages():
    with Recorder() as rec:
        x = torch.zeros(10)
        x.resize_(100)
        rec.mark("grown")
        x.resize_(5)  # keeps the storage as it is
        rec.mark("view shrunk")
        x.untyped_storage().resize_(20)
        rec.mark("shrunk")
        x.untyped_storage().resize_(0)
        rec.mark("freed")
        x.untyped_storage().resize_(400)
        rec.mark("back")
        x.resize_as_(torch.zeros(200))
        rec.mark("as")
    r = rec.recording
    assert [r.at(m["name"]) for m in r.marks] == [400, 400, 20, 0, 400, 800]
    assert r.peak_bytes == 400 + 800 or r.peak_bytes == 800 + 800


def test_a_foreign_storage_that_is_resized_is_first_seen():
    x = torch.zeros(100)
    with Recorder() as rec:
        x.untyped_storage().resize_(0)
        rec.mark("freed")
        x.untyped_storage().resize_(800)
        rec.mark("grown")
    r = rec.recording
    assert r.at("freed") == 0 and r.at("grown") == 800 and r.allocations() == []


def test_set_and_data_swap_storages():
    with Recorder() as rec:
        x, y = torch.zeros(10), torch.zeros(20)
        x.set_(y)
        rec.mark("shared")
        del y
        x.data = torch.zeros(30)
        rec.mark("swapped")
        x.set_(torch.UntypedStorage(80))
        rec.mark("foreign")
    r = rec.recording
    assert [r.at(m["name"]) for m in r.marks] == [80, 120, 80]
    assert r.at("foreign", born=True) == 80


def test_what_existed_before_is_first_seen_and_apart():
    x = torch.zeros(100)
    with Recorder() as rec:
        y = x + 1
        rec.mark("both")
        del x
        rec.mark("one")
    r = rec.recording
    assert r.at("both") == 800 and r.at("both", born=True) == 400
    assert r.at("one") == 400 and r.at("one", born=True) == 400
    assert r.peak_bytes == 800 and r.peak(born=True) == 400
    assert [s.born for s in r.alive("both")] == [False, True]
    index, _, live = r.timeline(born=True)
    assert index.tolist() == [1] and live.tolist() == [400]
    del y


def test_what_only_in_place_and_list_operators_touch_is_seen_too():
    x, y, z = torch.zeros(10), torch.zeros(20), torch.zeros(30)
    with Recorder() as rec:
        x.add_(1)
        torch._foreach_mul_([y], 2.0)
        torch.zeros(30, out=z)
        rec.mark("seen")
    assert rec.recording.at("seen") == 240 and births(rec) == []


def test_addresses_and_ids_are_reused():
    with Recorder() as rec:
        for _ in range(50):
            x = torch.zeros(100)
            del x
        rec.mark("end")
    r = rec.recording
    assert births(rec) == [400] * 50 and r.peak_bytes == 400 and r.at("end") == 0
    assert len({s.sid for s in r.allocations()}) == 50


def test_empty_and_scalar_storages():
    with Recorder() as rec:
        kept = torch.empty(0), torch.tensor(1.0), torch.zeros(0, 5), torch.arange(3)
        rec.mark("end")
    assert rec.recording.at("end") == 4 + 24
    del kept


def test_numpy_shares_memory_and_keeps_it():
    with Recorder() as rec:
        x = torch.zeros(100)
        array = x.numpy()
        del x
        rec.mark("array")
        del array
        rec.mark("none")
        y = torch.from_numpy(np.zeros(50)) * 1
        rec.mark("from numpy")
    r = rec.recording
    assert r.at("array") == 400 and r.at("none") == 0 and r.at("from numpy") == 400
    del y


def test_copies_made_in_python_are_born():
    model = nn.Linear(8, 8)
    with Recorder(watch=model) as rec:
        twin = copy.deepcopy(model)
        rec.mark("twin")
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        rec.mark("saved")
        buffer.seek(0)
        loaded = torch.load(buffer)
        rec.mark("loaded")
    r = rec.recording
    assert r.at("twin", born=True) == 288 == r.at("saved", born=True)
    assert r.at("loaded", born=True) == 2 * 288
    del twin, loaded


def test_memory_moved_to_shared_memory_stays_itself():
    with Recorder() as rec:
        x = torch.zeros(100)
        x.share_memory_()
        x += 1
        rec.mark("shared")
    assert rec.recording.at("shared") == 400


class Logged(torch.Tensor):
    """A subclass that only watches functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A subclass that holds its bytes in another tensor and computes by itself, as DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [a.inner if isinstance(a, Wrapped) else a for a in args]
        return Wrapped(func(*plain, **(kwargs or {})))


def test_tensor_subclasses():
    with Recorder() as rec:
        x = torch.ones(10).as_subclass(Logged)
        y = x * 2
        rec.mark("logged")
        del x, y
        z = Wrapped(torch.ones(20))
        w = z + z
        rec.mark("wrapped")
        assert isinstance(w, Wrapped)
    r = rec.recording
    assert r.at("logged") == 80 and r.at("wrapped") == 160
    assert r.op_counts()["aten.add"] == 1


def test_a_watched_wrapper_is_its_inner_tensor():
    z = Wrapped(torch.ones(20))
    with Recorder(watch={"z": z}) as rec:
        rec.mark("start")
    assert rec.recording.by_category("start")["input data"] == 80


def test_sparse_tensors():
    embedding = nn.Embedding(10, 4, sparse=True)
    with Recorder(watch=embedding) as rec:
        embedding(torch.tensor([1, 2, 2])).sum().backward()
        rec.mark("after")
        dense = embedding.weight.grad.to_dense()
    r = rec.recording
    assert r.by_category("after")["gradients"] == 3 * 8 + 3 * 4 * 4  # indices and values
    assert r.allocations()[-1].bytes == 160
    del dense


def test_quantised_csr_and_complex_tensors_do_not_break_it():
    with Recorder() as rec:
        torch.quantize_per_tensor(torch.ones(10), 0.1, 0, torch.qint8).dequantize()
        torch.eye(3).to_sparse_csr().matmul(torch.ones(3, 1))
        torch.fft.fft(torch.ones(8)).abs()
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2
    assert rec.recording.peak_bytes > 0


def test_functions_transformed_by_functorch():
    with Recorder() as rec:
        torch.func.vmap(torch.func.grad(lambda x: (x**2).sum()))(torch.ones(5, 3))
        rec.mark("end")
    assert rec.recording.at("end") == 0


@pytest.mark.parametrize("fake_first", [True, False])
def test_fake_tensors_count_the_same_bytes(fake_first):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def program(rec):
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        rec.watch([model, optimizer])
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        x = torch.zeros(7)
        x.untyped_storage().resize_(0)
        rec.mark("end")
        return model, optimizer

    with Recorder() as real:
        program(real)
    if fake_first:
        with FakeTensorMode(), Recorder() as fake:
            program(fake)
    else:
        with Recorder() as fake, FakeTensorMode():
            program(fake)
    a, b = real.recording, fake.recording
    assert a.peak_bytes == b.peak_bytes and a.by_category("end") == b.by_category("end")
    assert a.flops() == b.flops() > 0 and a.ops("addmm")[0].name == b.ops("addmm")[0].name


def test_fake_tensors_cost_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), Recorder() as rec:
        torch.empty(2**40, dtype=torch.float64) + 1
    assert rec.recording.peak_bytes == 2 * 2**43

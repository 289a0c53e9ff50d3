"""FLOPs of products, whatever operator computes them and wherever it writes."""

import pytest
import torch
import torch.nn.functional as F

from labkit.recorder import Recorder

M, K, N, B = 3, 4, 5, 2
a, b, c = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
batch_a, batch_b, batch_c = torch.randn(B, M, K), torch.randn(B, K, N), torch.randn(B, M, N)
v, y, weight, bias = torch.randn(K), torch.randn(M), torch.randn(N, K), torch.randn(N)
ONE, MANY, VECTOR = 2 * M * K * N, 2 * B * M * K * N, 2 * M * K

PRODUCTS = {
    "mm": (lambda: torch.mm(a, b), ONE),
    "mm, out": (lambda: torch.mm(a, b, out=c), ONE),
    "addmm": (lambda: torch.addmm(c, a, b), ONE),
    "addmm, out": (lambda: torch.addmm(c, a, b, out=c), ONE),
    "addmm_": (lambda: c.addmm_(a, b), ONE),
    "addmm_, scaled": (lambda: c.addmm_(a, b, alpha=-1), ONE),
    "addmm with activation": (lambda: torch._addmm_activation(c, a, b), ONE),
    "matmul, out": (lambda: torch.matmul(a, b, out=c), ONE),
    "linear": (lambda: F.linear(a, weight, bias), ONE),
    "linear, out": (lambda: F.linear(a, weight, bias, out=c), ONE),
    "einsum": (lambda: torch.einsum("mk,kn->mn", a, b), ONE),
    "bmm": (lambda: torch.bmm(batch_a, batch_b), MANY),
    "bmm, out": (lambda: torch.bmm(batch_a, batch_b, out=batch_c), MANY),
    "baddbmm": (lambda: torch.baddbmm(batch_c, batch_a, batch_b), MANY),
    "baddbmm, out": (lambda: torch.baddbmm(batch_c, batch_a, batch_b, out=batch_c), MANY),
    "baddbmm_": (lambda: batch_c.baddbmm_(batch_a, batch_b), MANY),
    "addbmm": (lambda: torch.addbmm(c, batch_a, batch_b), MANY),
    "addbmm, out": (lambda: torch.addbmm(c, batch_a, batch_b, out=c), MANY),
    "addbmm_": (lambda: c.addbmm_(batch_a, batch_b), MANY),
    "mv": (lambda: torch.mv(a, v), VECTOR),
    "mv, out": (lambda: torch.mv(a, v, out=y), VECTOR),
    "addmv": (lambda: torch.addmv(y, a, v), VECTOR),
    "addmv, out": (lambda: torch.addmv(y, a, v, out=y), VECTOR),
    "addmv_": (lambda: y.addmv_(a, v), VECTOR),
    "dot": (lambda: torch.dot(v, v), 2 * K),
    "addr_": (lambda: torch.zeros(M, K).addr_(y, v), VECTOR),
    "no product": (lambda: torch.relu(a).add_(a), 0),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_every_way_to_multiply(name, mode):
    run, wanted = PRODUCTS[name]
    with mode(), Recorder() as rec:
        run()
    assert rec.recording.flops() == wanted


def test_work_done_three_times_counts_three_times():
    with Recorder() as rec:
        c.addmm_(a, b).addmm_(a, b, alpha=-1).addmm_(a, b)
    assert rec.recording.flops() == 3 * ONE

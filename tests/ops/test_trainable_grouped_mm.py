"""The operator trainable_grouped_mm: results, gradients of any strides, opcheck.
Called by pytest; judged by tests/oracle.py.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, grouped_mm, groups, relative_error
from torch.autograd import forward_ad

import thunder_moe.ops.trainable_grouped_mm  # noqa: F401  (registers the operators)

OPS = torch.ops.thunder_moe
BF16 = torch.bfloat16


def make(offsets, n=32, k=48):
    a = torch.randn(int(offsets[-1]), k, dtype=BF16, requires_grad=True)
    weight = torch.randn(4, n, k, dtype=BF16, requires_grad=True)
    return a, weight


def expected_gradients(a, weight, grad, offsets):
    parts = [(e, slice(start, end)) for e, start, end in groups(offsets)]
    dgrad = torch.cat([grad[rows].float() @ weight[e].float() for e, rows in parts])
    wgrad = torch.stack([grad[rows].float().T @ a[rows].float() for _, rows in parts])
    return dgrad, wgrad


@pytest.mark.parametrize("expanded", [False, True])
def test_forward_and_gradients(offsets, expanded):
    a, weight = make(offsets)
    out = OPS.trainable_grouped_mm(a, weight.mT, offsets)
    assert relative_error(out, grouped_mm(a, weight, offsets)) < KERNEL_TOLERANCE[BF16]
    grad = torch.ones((), dtype=BF16).expand(out.shape) if expanded else torch.randn_like(out)
    out.backward(grad)
    for got, exact in zip((a.grad, weight.grad), expected_gradients(a, weight, grad, offsets), strict=True):
        assert relative_error(got, exact) < 2 * KERNEL_TOLERANCE[BF16]
    empty = torch.diff(offsets, prepend=torch.zeros(1, dtype=torch.int32)) == 0
    assert weight.grad[empty].eq(0).all()
    assert weight.grad.is_contiguous()


def test_gradient_of_a_transposed_weight_has_its_layout(offsets):
    a, weight = make(offsets)
    stored = weight.detach().mT.contiguous().requires_grad_()  # (E, K, N)
    out = OPS.trainable_grouped_mm(a, stored, offsets)
    grad = torch.randn_like(out)
    out.backward(grad)
    _, exact = expected_gradients(a, weight, grad, offsets)
    assert relative_error(stored.grad.mT, exact) < 2 * KERNEL_TOLERANCE[BF16]
    assert stored.grad.is_contiguous()


def test_result_is_contiguous_where_torch_pads_it():
    offsets = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    a, weight = make(offsets, n=45)
    assert OPS.trainable_grouped_mm(a, weight.mT, offsets).is_contiguous()


def test_opcheck(opcheck):
    offsets = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    a, weight = make(offsets)
    grad = torch.randn(8, 32, dtype=BF16)
    # The gradient of a trainable weight is not itself differentiable, hence no requires_grad on dgrad's and wgrad's.
    opcheck(OPS.trainable_grouped_mm.default, (a, weight.mT.detach().requires_grad_(), offsets))
    opcheck(OPS.trainable_grouped_mm_dgrad.default, (grad, weight.mT.detach(), offsets))
    opcheck(OPS.trainable_grouped_mm.default, (a, weight.mT.detach().contiguous().requires_grad_(), offsets))
    for row_major in (False, True):
        opcheck(OPS.trainable_grouped_mm_wgrad.default, (a.detach(), grad, offsets, row_major))


def test_a_second_derivative_is_an_error():
    offsets = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    a, weight = make(offsets)
    out = OPS.trainable_grouped_mm(a, weight.mT, offsets)
    (grad,) = torch.autograd.grad(out.float().square().sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        grad.float().sum().backward()


def test_forward_mode_is_refused():
    """The tangents of a custom operator would be zeros."""
    offsets = torch.tensor([1, 3, 8, 8], dtype=torch.int32)
    a, weight = (tensor.detach() for tensor in make(offsets))
    grad = OPS.trainable_grouped_mm(a, weight.mT, offsets)
    for operator, rows, other in (
        (OPS.trainable_grouped_mm, a, weight.mT),
        (OPS.trainable_grouped_mm_dgrad, grad, weight.mT),
        (OPS.trainable_grouped_mm_wgrad, a, grad),
    ):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            operator(forward_ad.make_dual(rows, rows), other, offsets)

"""The operators of training blocks: opcheck of each, and the arithmetic of biases after a 4-bit GEMM.
Called by pytest; judged by fp64 loops.
"""

import pytest
import torch
from fast_cases import others_slow
from oracle import groups, relative_error

import thunder_moe.ops.activation  # noqa: F401  (registers the operators)

OPS = torch.ops.thunder_moe
ENDS = torch.tensor([3, 3, 7], dtype=torch.int32)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offsets", "recipe"),
    [(ENDS.long(), None), *others_slow([(ENDS, None), (ENDS, "fp8"), (ENDS, "mxfp8")], exhaustive=True)],
)
def test_opcheck(opcheck, offsets, recipe):
    x, weight, bias, scale = leaf(9, 8), leaf(3, 6, 8), leaf(3, 6), leaf(9)
    grad, out = torch.randn(9, 6), torch.zeros(9, 6)
    opcheck(OPS.grouped_linear.default, (x, weight, offsets, bias, scale, recipe))
    opcheck(OPS.grouped_linear.default, (x, weight, offsets))
    opcheck(OPS.grouped_bias.default, (out.requires_grad_(), offsets, bias, scale, leaf(9)))
    x, weight, bias, scale, out = (t.detach() for t in (x, weight, bias, scale, out))
    opcheck(OPS.grouped_linear_dgrad.default, (grad, weight, offsets, recipe))
    opcheck(OPS.grouped_linear_wgrad.default, (x, grad, offsets, recipe))
    opcheck(OPS.grouped_bias_grad.default, (grad, offsets, scale))
    opcheck(OPS.grouped_bias_scale_grad.default, (grad, bias, offsets))
    opcheck(OPS.grouped_linear_out.default, (x, weight, offsets, bias, scale, out, recipe))
    opcheck(OPS.grouped_linear_dgrad_out.default, (grad, weight, offsets, torch.zeros(9, 8), recipe))
    opcheck(OPS.grouped_linear_wgrad_out.default, (x, grad, offsets, torch.zeros(3, 6, 8), True, recipe))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swiglu", *others_slow(["srelu"], exhaustive=True)])
def test_opcheck_of_activations(opcheck, kind):
    form = dict(kind=kind, alpha=1.7, limit=2.0, up_shift=1.0, interleave=2) if kind == "swiglu" else dict(kind=kind)
    y, scales, rows = leaf(9, 8), leaf(9), 4 if kind == "swiglu" else 8
    opcheck(OPS.scaled_activation.default, (y, scales, ENDS), form)
    opcheck(OPS.scaled_activation.default, (y,), form)
    opcheck(OPS.activated_grouped_linear.default, (y, leaf(3, 5, rows), ENDS, scales, leaf(3, 5), "fp8"), form)
    plain = y.detach(), scales.detach(), ENDS
    opcheck(OPS.scaled_activation_backward.default, (torch.randn(9, rows), *plain, True, True), form)
    opcheck(OPS.scaled_activation_backward.default, (torch.randn(9, rows), *plain, False, True), form)


def test_grouped_bias():
    y, bias, bias_scale, scales = leaf(9, 6), leaf(3, 6), leaf(9), leaf(9)
    with torch.no_grad():
        for tensor in (y, bias_scale, scales):
            tensor[7:] = float("nan")
    out, grad = OPS.grouped_bias(y, ENDS, bias, bias_scale, scales), torch.randn(9, 6)
    grad[7:] = float("nan")
    out.backward(grad)
    twins = [t.detach().double().nan_to_num().requires_grad_() for t in (y, bias, bias_scale, scales)]
    parts = [(twins[0][a:b] + twins[1][e] * twins[2][a:b, None]) * twins[3][a:b, None] for e, a, b in groups(ENDS)]
    torch.cat(parts).backward(grad[:7].double())
    assert relative_error(out[:7], torch.cat(parts)) < 1e-6
    assert out[7:].eq(0).all()
    for got, exact in zip((y, bias, bias_scale, scales), twins, strict=True):
        assert relative_error(got.grad, exact.grad) < 1e-5
        assert got is bias or got.grad[7:].eq(0).all()


def test_the_bias_gradient_has_a_gradient():
    """Each row gets what its expert's sum gets, rows past the end zeros."""
    grad, scale = torch.randn(6, 4, requires_grad=True), torch.rand(6, requires_grad=True)
    offsets, of_sums = torch.tensor([2, 2, 5], dtype=torch.int32), torch.randn(3, 4)
    sums = torch.ops.thunder_moe.grouped_bias_grad(grad, offsets, scale)
    of_grad, of_scale = torch.autograd.grad((sums * of_sums).sum(), (grad, scale))
    scaled = grad * scale[:, None]
    expected = torch.stack([scaled[a:b].sum(0) for a, b in ((0, 2), (2, 2), (2, 5))])
    wanted = torch.autograd.grad((expected * of_sums).sum(), (grad, scale))
    torch.testing.assert_close((of_grad, of_scale), wanted)
    torch.library.opcheck(torch.ops.thunder_moe.grouped_bias_grad, (grad, offsets, scale))

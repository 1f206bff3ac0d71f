"""The operators of a LoRA adapter beside 4-bit weights: values, and opcheck of each.
Called by pytest; judged by fp64 loops.
"""

import oracle
import pytest
import torch
from oracle import groups, relative_error

import thunder_moe.ops.activation
import thunder_moe.ops.low_rank  # noqa: F401  (registers the operators)
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.routing import gather_rows

OPS = torch.ops.thunder_moe
ENDS = torch.tensor([3, 3, 7], dtype=torch.int32)
N, K, R = 6, 32, 2


@pytest.fixture
def weight():
    """Return a 4-bit weight's operands, and its values."""
    packed = quantize(torch.randn(3, N, K))
    return operands(packed), oracle.dequantize(*packed.tensors()).double()


def by_expert(rows, product):
    """Return the results of `product` in float64 for each expert and its rows, concatenated."""
    return torch.cat([product(expert, rows[begin:end].double(), begin, end) for expert, begin, end in groups(ENDS)])


def test_products(weight):
    packed, exact = weight
    x, inner, b = torch.randn(9, K), torch.randn(9, R), torch.randn(3, N, R)
    out = OPS.grouped_mm_low_rank(x, *packed, ENDS, inner, b)
    wanted = by_expert(x, lambda e, rows, i, j: rows @ exact[e].T + inner[i:j].double() @ b[e].double().T)
    assert relative_error(out[:7], wanted) < 1e-6
    grad, outer, a = torch.randn(9, N), torch.randn(9, R), torch.randn(3, R, K)
    out = OPS.grouped_mm_low_rank_dgrad(grad, *packed, ENDS, outer, a)
    wanted = by_expert(grad, lambda e, rows, i, j: rows @ exact[e] + outer[i:j].double() @ a[e].double())
    assert relative_error(out[:7], wanted) < 1e-6


def test_rows_of_tokens():
    tokens, row_slot, a = torch.randn(5, K), torch.randperm(10).int(), torch.randn(3, R, K)
    for matrix, transposed in ((a, False), (a.mT.contiguous(), True)):
        rows, inner = OPS.moe_gather_low_rank(tokens, row_slot, matrix, ENDS, transposed)
        assert torch.equal(rows[:7], tokens[row_slot.long() // 2][:7])
        wanted = by_expert(rows, lambda e, rows, i, j: rows @ a[e].double().T)
        assert relative_error(inner[:7], wanted) < 1e-6
    grad = torch.randn(10, R)
    out = OPS.moe_gathered_wgrad(tokens, row_slot, grad, ENDS)
    for expert, (begin, end) in enumerate(((0, 3), (3, 3), (3, 7))):
        wanted = grad[begin:end].double().T @ gather_rows(tokens, row_slot)[begin:end].double()
        assert relative_error(out[expert], wanted) < 1e-6 if end > begin else out[expert].eq(0).all()


def test_gradient_and_value_of_the_activation():
    y, grad, scales = torch.randn(9, 8), torch.randn(9, 4), torch.rand(9)
    form = dict(alpha=1.7, limit=2.0, up_shift=1.0)
    for factors, needs in ((scales, True), (scales, False), (None, False)):
        *grads, value = OPS.swiglu_backward_and_value(grad, y, factors, ENDS, needs, **form)
        assert torch.equal(value, OPS.scaled_activation(y, factors, ENDS, **form))
        wanted = OPS.scaled_activation_backward(grad, y, factors, ENDS, True, needs, **form)
        assert all(torch.equal(got, each) for got, each in zip(grads, wanted, strict=True))


def test_opcheck(opcheck, weight):
    packed, _ = weight
    tokens, row_slot, a = torch.randn(5, K), torch.randperm(10).int(), torch.randn(3, R, K)
    basic = dict(test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    rows, grad, narrow = torch.randn(9, K), torch.randn(9, N), torch.randn(9, R)
    opcheck(OPS.grouped_mm_low_rank.default, (rows, *packed, ENDS, narrow, torch.randn(3, N, R)), **basic)
    opcheck(OPS.grouped_mm_low_rank_dgrad.default, (grad, *packed, ENDS, narrow, a), **basic)
    opcheck(OPS.moe_gather_low_rank.default, (tokens, row_slot, a, ENDS), **basic)
    opcheck(OPS.moe_gather_low_rank.default, (tokens, row_slot, a.mT.contiguous(), ENDS, True), **basic)
    opcheck(OPS.moe_gathered_wgrad.default, (tokens, row_slot, torch.randn(10, R), ENDS), **basic)
    y, scales = torch.randn(9, 8), torch.rand(9)
    opcheck(OPS.swiglu_backward_and_value.default, (torch.randn(9, 4), y, scales, ENDS, True), **basic)
    opcheck(OPS.swiglu_backward_and_value.default, (torch.randn(9, 4), y, None, ENDS, False), **basic)

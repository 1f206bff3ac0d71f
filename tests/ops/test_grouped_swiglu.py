"""The operator f16a_nvfp4weight_grouped_swiglu: results, opcheck, gradients and bad input.
Called by pytest; judged by tests/oracle.py.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, grouped_swiglu, relative_error

from thunder_moe import f16a_nvfp4weight_grouped_swiglu as op
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.ops.grouped_mm import operands

DTYPES = list(KERNEL_TOLERANCE)


def make(intermediate=24, k=48):
    gate, up = quantize(torch.randn(4, intermediate, k)), quantize(torch.randn(4, intermediate, k) * 3)
    weight = NVFP4Weight.concatenate(gate, up)
    return operands(weight), dequantize(*weight.tensors())


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_oracle(offsets, dtype):
    packed, exact = make()
    activation = torch.randn(int(offsets[-1]) + 1, 48, dtype=dtype)
    out = op(activation, *packed, offsets)
    assert out.shape == (activation.shape[0], 24)
    assert relative_error(out[: offsets[-1]], grouped_swiglu(activation, exact, offsets)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_the_activation(offsets, dtype):
    packed, exact = make()
    rows = int(offsets[-1])
    activation = torch.randn(rows, 48, dtype=dtype, requires_grad=True)
    grad = torch.randn(rows, 24, dtype=dtype)
    op(activation, *packed, offsets).backward(grad)
    reference = activation.detach().float().requires_grad_()
    grouped_swiglu(reference, exact, offsets).backward(grad.float())
    assert relative_error(activation.grad, reference.grad) < 2 * KERNEL_TOLERANCE[dtype]


def test_opcheck(opcheck):
    packed, _ = make()
    offsets = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    operator = torch.ops.thunder_moe.f16a_nvfp4weight_grouped_swiglu.default
    opcheck(operator, (torch.randn(8, 48, dtype=torch.bfloat16, requires_grad=True), *packed, offsets))


def test_refuses():
    (fp4, scale, global_scale), _ = make()
    offsets = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    odd = operands(quantize(torch.randn(4, 3, 48)))
    with pytest.raises(ValueError, match="fp4_weight: .*wanted an even out_features"):
        op(torch.randn(8, 48), *odd, offsets)
    with pytest.raises(ValueError, match="activation: .*positive multiple of 16"):
        op(torch.randn(8, 40), fp4, scale, global_scale, offsets)
    with pytest.raises(ValueError, match="offsets: got .*never decrease"):
        op(torch.randn(8, 48), fp4, scale, global_scale, offsets.flip(0))
    for row_slot in (torch.tensor(8, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)):
        for device in ("cpu", "meta"):
            args = [tensor.to(device) for tensor in (torch.randn(8, 48), fp4, scale, global_scale, offsets, row_slot)]
            with pytest.raises(ValueError, match=r"row_slot: got .*wanted shape \(top_k \* 8,\)"):
                op(*args)

"""The operators that add a residual and normalize in front of a layer or a router, on a CPU: results, opcheck, errors.
Called by pytest; judged by the sum and the norm in float64, and by the operators behind them.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, relative_error

from thunder_moe import f16a_nvfp4weight_scaled_mm, moe_linear_router
from thunder_moe.formats import mxfp8, nvfp4
from thunder_moe.kernels.select import use_backend
from thunder_moe.ops.add_norm import (
    add_norm_linear_router,
    f16a_mxfp8weight_add_norm_scaled_mm,
    f16a_nvfp4weight_add_norm_scaled_mm,
)
from thunder_moe.ops.scaled_mm import dense_operands

T, N, K, E = 3, 32, 64, 8
FORMATS = {nvfp4: f16a_nvfp4weight_add_norm_scaled_mm, mxfp8: f16a_mxfp8weight_add_norm_scaled_mm}


def operands(dtype=torch.float32):
    return (*torch.randn(2, T, K).to(dtype), torch.randn(K).to(dtype))


def rows_of(total, norm_weight, epsilon):
    wide = total.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * norm_weight.double()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_layers(format, dtype, backend):
    weight, bias = format.quantize(torch.randn(1, N, K)), torch.randn(N)
    x, residual, norm_weight = operands(dtype)
    with use_backend(backend):
        out, total = FORMATS[format](x, residual, norm_weight, *dense_operands(weight), bias, epsilon=0.1)
    assert torch.equal(total, x + residual)
    wanted = rows_of(total, norm_weight, 0.1) @ format.dequantize(weight, torch.float32)[0].double().T + bias
    assert relative_error(out, wanted) < 2 * KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router(dtype):
    x, residual, norm_weight = operands(dtype)
    gate, options = torch.randn(E, K).to(dtype), dict(top_k=2, logits_dtype=torch.float32)
    *results, total, rows = add_norm_linear_router(x, residual, norm_weight, gate, norm_epsilon=0.1, **options)
    assert torch.equal(total, x + residual)
    assert relative_error(rows, rows_of(total, norm_weight, 0.1)) < 2 * KERNEL_TOLERANCE[dtype]
    for result, wanted in zip(results, moe_linear_router(rows, gate, **options), strict=True):
        assert torch.equal(result, wanted)


def test_opcheck(opcheck):
    ops = torch.ops.thunder_moe
    for format in FORMATS:
        packed = dense_operands(format.quantize(torch.randn(1, N, K)))
        run = getattr(ops, FORMATS[format].__name__).default
        opcheck(run, (*operands(), *packed), dict(epsilon=1e-6))
    router = dict(norm_epsilon=1e-6, top_k=2)
    opcheck(ops.add_norm_linear_router.default, (*operands(), torch.randn(E, K)), router)


def test_no_gradient():
    x, residual, norm_weight = operands()
    packed = dense_operands(nvfp4.quantize(torch.randn(1, N, K)))
    out, _ = f16a_nvfp4weight_add_norm_scaled_mm(x.requires_grad_(), residual, norm_weight, *packed, epsilon=1e-6)
    with pytest.raises(RuntimeError, match="add_norm operators have no gradient"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(residual=torch.randn(1, K)), r"residual: got .*wanted shape \(3, 64\), dtype torch.float32"),
        (dict(norm_weight=torch.randn(K).half()), r"norm_weight: got .*wanted shape \(64,\), dtype torch.float32"),
        (dict(first=torch.randn(T, K + 16)), "wanted shape"),
    ],
)
def test_bad_input(change, message):
    x, residual, norm_weight = operands()
    given = dict(first=x, residual=residual, norm_weight=norm_weight) | change
    with pytest.raises(ValueError, match=message):
        add_norm_linear_router(*given.values(), torch.randn(E, K), norm_epsilon=1e-6, top_k=2)
    packed = dense_operands(nvfp4.quantize(torch.randn(1, N, K)))
    with pytest.raises(ValueError, match=message):
        f16a_nvfp4weight_add_norm_scaled_mm(*given.values(), *packed, epsilon=1e-6)


def test_parts_are_the_operators_behind_them():
    x, residual, norm_weight = operands(torch.bfloat16)
    packed = dense_operands(nvfp4.quantize(torch.randn(1, N, K)))
    out, total = f16a_nvfp4weight_add_norm_scaled_mm(x, residual, norm_weight, *packed, epsilon=1e-6)
    rows = (total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * norm_weight
    assert torch.equal(out, f16a_nvfp4weight_scaled_mm(rows, *packed))

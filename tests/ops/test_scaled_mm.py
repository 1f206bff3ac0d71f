"""The operator f16a_nvfp4weight_scaled_mm: results, opcheck, gradients, autocast, compilation and bad input.
Called by pytest; judged by tests/oracle.py.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, relative_error

from thunder_moe import f16a_nvfp4weight_scaled_mm as op
from thunder_moe import use_backend
from thunder_moe.formats.nvfp4 import LAYOUTS, NVFP4Weight, quantize
from thunder_moe.ops.scaled_mm import dense_operands

DTYPES = list(KERNEL_TOLERANCE)


def make(n=32, k=48, *, layout="linear"):
    weight = quantize(torch.randn(1, n, k))
    return dense_operands(weight.to_layout(layout)), dequantize(*weight.tensors())[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_matches_the_oracle(dtype, layout, backend):
    n, k = {"tiled_64x64": (64, 128)}.get(layout, (32, 48))
    packed, exact = make(n, k, layout=layout)
    bias = torch.randn(n)
    for lead in ((), (1,), (5,), (0,), (2, 3), (2, 1, 17)):
        activation = torch.randn(*lead, k, dtype=dtype)
        with use_backend(backend):
            plain, biased = op(activation, *packed, layout=layout), op(activation, *packed, bias, layout=layout)
        assert plain.shape == biased.shape == (*lead, n)
        assert plain.dtype == biased.dtype == dtype
        expected = activation.float() @ exact.T
        assert relative_error(plain, expected) < KERNEL_TOLERANCE[dtype]
        assert relative_error(biased, expected + bias) < KERNEL_TOLERANCE[dtype]


def test_takes_float4_weights_row_scales_and_any_strides():
    weight = quantize(torch.randn(1, 32, 48))
    weight = NVFP4Weight(weight.qdata, weight.scale, torch.rand(1, 32) + 0.5)
    exact = dequantize(*weight.tensors())[0]
    fp4 = weight.qdata[0].view(torch.float4_e2m1fn_x2).t()
    activation = torch.randn(48, 3, 8).permute(2, 1, 0)
    out = op(activation, fp4, weight.scale[0], weight.global_scale[0])
    assert relative_error(out, activation @ exact.T) < 1e-5
    copies = weight.qdata[0].t().contiguous(), weight.scale[0].t().contiguous().t(), weight.global_scale[0]
    assert torch.equal(op(activation, *copies), out)
    row = torch.randn(1, 48).expand(8, 48)
    assert relative_error(op(row, *copies), row @ exact.T) < 1e-5


def test_rounds_the_activation_where_4_bit_products_are_simulated():
    packed, exact = make(64, 128)
    activation = torch.randn(16, 128)
    with use_backend("w4a4"):
        error = relative_error(op(activation, *packed, torch.ones(64)), activation @ exact.T + 1)
    assert 0.05 < error < 0.15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients(dtype, backend):
    packed, exact = make()
    activation = torch.randn(3, 5, 48, dtype=dtype, requires_grad=True)
    bias = torch.randn(32, requires_grad=True)
    grad = torch.randn(3, 5, 32, dtype=dtype)
    with use_backend(backend):
        op(activation, *packed, bias).backward(grad)
    assert relative_error(activation.grad, grad.float() @ exact) < KERNEL_TOLERANCE[dtype]
    assert relative_error(bias.grad, grad.float().sum((0, 1))) < 1e-5
    alone = torch.randn(32, requires_grad=True)
    op(activation.detach(), *packed, alone).sum().backward()
    assert torch.equal(alone.grad, torch.full((32,), 15.0))


def test_gradient_of_an_expanded_output_and_twice():
    packed, exact = make()
    activation = torch.randn(8, 48, requires_grad=True)
    (grad,) = torch.autograd.grad(op(activation, *packed).sum(), activation)
    assert relative_error(grad, exact.sum(0).expand(8, 48)) < 1e-5
    cotangent = torch.randn(8, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(op(activation, *packed), activation, cotangent, create_graph=True)
    direction = torch.randn(8, 48)
    (second,) = torch.autograd.grad(grad, cotangent, direction)
    assert relative_error(second, direction @ exact.T) < 1e-5


def test_refuses_gradients_of_the_weight():
    (fp4, scale, global_scale), _ = make()
    activation = torch.randn(8, 48, requires_grad=True)
    with pytest.raises(ValueError, match="weight_global_scale: got a tensor that requires a gradient"):
        op(activation, fp4, scale, global_scale.clone().requires_grad_())


def test_opcheck(opcheck):
    packed, _ = make()
    ops = torch.ops.thunder_moe
    bias = torch.randn(32, dtype=torch.bfloat16, requires_grad=True)
    for lead, options in (((2, 3), {}), ((), dict(test_utils=("test_schema", "test_faketensor")))):
        rows, grad = (torch.randn(*lead, size, dtype=torch.bfloat16) for size in (48, 32))
        opcheck(ops.f16a_nvfp4weight_scaled_mm.default, (rows, *packed), **options)
        opcheck(ops.f16a_nvfp4weight_scaled_mm.default, (rows.requires_grad_(), *packed, bias), **options)
        opcheck(ops.f16a_nvfp4weight_scaled_mm_dgrad.default, (grad, *packed), **options)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_as_linear(compiled):
    packed, exact = make()
    function = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    activation, bias = torch.randn(4, 48, requires_grad=True), torch.randn(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(activation, *packed, bias)
        assert out.dtype == torch.nn.functional.linear(activation, exact, bias).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert function(activation, *packed, bias).dtype == torch.float32
        with pytest.raises(ValueError, match="activation: .*wanted a dtype of"):
            op(activation.double(), *packed)
        with torch.no_grad():
            assert torch.equal(function(activation.detach(), *packed, bias), out)
            assert torch.equal(function(activation.detach(), *packed, bias, prefetch=True), out)
    assert relative_error(out, activation @ exact.T + bias) < 1e-2
    out.float().sum().backward()
    assert activation.grad.dtype == torch.float32
    assert relative_error(activation.grad, exact.sum(0).expand(4, 48)) < 1e-2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend):
    packed, exact = make()
    compiled = torch.compile(lambda x: op(x, *packed) * 2, fullgraph=True, backend=backend, dynamic=True)
    for rows in (8, 12):
        activation = torch.randn(2, rows, 48, requires_grad=True)
        out = compiled(activation)
        assert relative_error(out, 2 * (activation @ exact.T)) < 1e-5
        out.sum().backward()
        assert activation.grad is not None


@pytest.mark.parametrize("fake", [False, True], ids=["eager", "fake"])
def test_refuses(fake):
    (fp4, scale, global_scale), _ = make()
    good = dict(
        activation=torch.randn(8, 48), fp4=fp4, scale=scale, global_scale=global_scale, bias=torch.randn(32),
        layout="linear",
    )  # fmt: skip
    bad = [
        ("activation", torch.randn(()), r"activation: .*wanted shape \(\.\.\., in_features\)"),
        ("activation", torch.randn(8, 48).double(), "activation: .*wanted a dtype of"),
        ("activation", torch.randn(8, 64), r"activation: .*wanted shape \(\.\.\., 48\), the in_features of fp4_weight"),
        ("fp4", fp4.int(), "fp4_weight: .*wanted a dtype of"),
        ("fp4", fp4[None], r"fp4_weight: .*wanted shape \(in_features // 2, out_features\)"),
        ("fp4", fp4[:20], "fp4_weight: .*in_features a positive multiple of 16"),
        ("scale", scale.float(), "weight_scaling_factor: .*wanted dtype float8_e4m3fn"),
        ("scale", scale[:3], r"weight_scaling_factor: .*wanted shape \(32, 3\)"),
        ("global_scale", global_scale.half(), "weight_global_scale: .*wanted dtype float32"),
        ("global_scale", torch.ones(3), r"weight_global_scale: .*wanted a shape of \(\(\), \(32,\)\)"),
        ("bias", torch.randn(31), r"bias: .*wanted shape \(32,\)"),
        ("bias", torch.ones(32, dtype=torch.int32), "bias: .*wanted a floating-point dtype"),
        ("layout", "swizzled_128x4", r"weight_scaling_factor: .*wanted shape \(128, 4\)"),
        ("layout", "tiled_64x64", "fp4_weight: .*wanted out_features and in_features multiples of 64, not 0 in"),
        ("layout", "rows", "layout: got 'rows'"),
    ]
    if not fake:
        bad += [("scale", scale.to("meta"), "weight_scaling_factor: .*wanted device cpu")]
    mode = torch._subclasses.FakeTensorMode() if fake else None
    for name, value, message in bad:
        arguments = {**good, name: value}
        if fake:
            arguments = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        layout = arguments.pop("layout")
        with pytest.raises(ValueError, match=message):
            op(*arguments.values(), layout=layout)

"""The operator f16a_nvfp4weight_scaled_grouped_mm: results, opcheck, gradients, compilation and bad input; results and
compilation of MXFP8's, too. Called by pytest; judged by tests/oracle.py.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, dequantize_mxfp8, grouped_mm, groups, relative_error

from thunder_moe import f16a_nvfp4weight_scaled_grouped_mm as op
from thunder_moe.formats.block_format import BLOCK_FORMATS
from thunder_moe.formats.layouts import layouts_of
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.formats.registry import FORMATS
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.ops.grouped_mm import operands

DTYPES = list(KERNEL_TOLERANCE)
EVEN = torch.tensor([2, 4, 6, 8], dtype=torch.int32)


def make(n=32, k=48, *, layout="linear", format="nvfp4"):
    weight = FORMATS[format].quantize(torch.randn(4, n, k))
    exact = dequantize(*weight.tensors()) if format == "nvfp4" else dequantize_mxfp8(*weight.tensors())
    return operands(weight.to_layout(layout)), exact


def operator_of(format):
    return getattr(torch.ops.thunder_moe, f"f16a_{format}weight_scaled_grouped_mm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("format", "layout"), [(name, layout) for name in FORMATS for layout in layouts_of(BLOCK_FORMATS[name])]
)
def test_matches_the_oracle(offsets, dtype, format, layout):
    n, k = {"tiled_64x64": (64, 128)}.get(layout, (32, 64 if format == "mxfp8" else 48))
    packed, exact = make(n, k, layout=layout, format=format)
    activation = torch.randn(int(offsets[-1]) + 3, k, dtype=dtype)
    out = operator_of(format)(activation, *packed, offsets, layout=layout)
    assert out.shape == (activation.shape[0], n)
    assert out.dtype == dtype
    assert relative_error(out[: offsets[-1]], grouped_mm(activation, exact, offsets)) < KERNEL_TOLERANCE[dtype]


def test_takes_float4_weights_and_row_scales():
    weight = quantize(torch.randn(4, 32, 48))
    weight = NVFP4Weight(weight.qdata, weight.scale, torch.rand(4, 32) + 0.5)
    fp4 = weight.qdata.view(torch.float4_e2m1fn_x2).transpose(1, 2)
    activation = torch.randn(8, 48)
    out = op(activation, fp4, weight.scale, weight.global_scale, EVEN)
    assert relative_error(out, grouped_mm(activation, dequantize(*weight.tensors()), EVEN)) < 1e-5


def test_takes_any_strides():
    packed, exact = make()
    activation = torch.randn(48, 8).t()
    copies = [t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 3 else t for t in packed]
    expected = grouped_mm(activation, exact, EVEN)
    assert relative_error(op(activation, *copies, EVEN), expected) < 1e-5
    row = torch.randn(1, 48).expand(8, 48)
    assert relative_error(op(row, *packed, EVEN), grouped_mm(row, exact, EVEN)) < 1e-5


def test_cutlass_arguments_are_not_read():
    packed, _ = make()
    activation = torch.randn(8, 48)
    extra = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
    assert torch.equal(op(activation, *packed, EVEN, *extra), op(activation, *packed, EVEN))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_the_activation(offsets, dtype):
    packed, exact = make()
    rows = int(offsets[-1])
    activation = torch.randn(rows, 48, dtype=dtype, requires_grad=True)
    grad = torch.randn(rows, 32, dtype=dtype)
    op(activation, *packed, offsets).backward(grad)
    expected = torch.cat([grad[start:end].float() @ exact[expert] for expert, start, end in groups(offsets)])
    assert relative_error(activation.grad, expected) < KERNEL_TOLERANCE[dtype]


def test_gradient_of_an_expanded_output_and_twice():
    packed, exact = make()
    activation = torch.randn(8, 48, requires_grad=True)
    (grad,) = torch.autograd.grad(op(activation, *packed, EVEN).sum(), activation)
    assert relative_error(grad, exact.repeat_interleave(2, 0).sum(1)) < 1e-5
    # The backward is itself differentiable: d(g . w)/dg is the forward.
    cotangent = torch.randn(8, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(op(activation, *packed, EVEN), activation, cotangent, create_graph=True)
    direction = torch.randn(8, 48)
    (second,) = torch.autograd.grad(grad, cotangent, direction)
    assert relative_error(second, grouped_mm(direction, exact, EVEN)) < 1e-5


def test_opcheck(opcheck):
    packed, _ = make()
    ops = torch.ops.thunder_moe
    for operator, columns in (
        (ops.f16a_nvfp4weight_scaled_grouped_mm, 48),
        (ops.f16a_nvfp4weight_scaled_grouped_mm_dgrad, 32),
    ):
        rows = torch.randn(8, columns, dtype=torch.bfloat16, requires_grad=True)
        opcheck(operator.default, (rows, *packed, EVEN))
        opcheck(operator.default, (rows.detach(), *packed, EVEN))


@pytest.mark.parametrize(("format", "backend"), [("nvfp4", "eager"), ("nvfp4", "aot_eager"), ("mxfp8", "aot_eager")])
def test_compiles_without_a_graph_break(format, backend):
    (packed, exact), operator = make(k=64, format=format), operator_of(format)
    compiled = torch.compile(
        lambda x, offsets: operator(x, *packed, offsets) * 2, fullgraph=True, backend=backend, dynamic=True
    )
    for rows in (8, 12):
        activation = torch.randn(rows, 64, requires_grad=True)
        out = compiled(activation, EVEN)
        assert relative_error(out[:8], 2 * grouped_mm(activation, exact, EVEN)) < 1e-5
        out.sum().backward()
        assert activation.grad is not None


@pytest.mark.parametrize("format", FORMATS)
def test_weight_survives_the_operands(format):
    weight = FORMATS[format].quantize(torch.randn(4, 32, 64))
    back = WeightOperands(*operands(weight), format=weight.format).packed("linear")
    assert torch.equal(back.qdata.view(torch.uint8), weight.qdata.view(torch.uint8))
    assert back.qdata.is_contiguous()


@pytest.mark.parametrize("fake", [False, True], ids=["eager", "fake"])
def test_refuses(fake):
    (fp4, scale, global_scale), _ = make()
    good = dict(
        activation=torch.randn(8, 48), fp4=fp4, scale=scale, global_scale=global_scale, offsets=EVEN, layout="linear"
    )
    bad = [
        ("activation", torch.randn(8), r"activation: .*wanted shape \(rows, in_features\)"),
        ("activation", torch.randn(8, 48).double(), "activation: .*wanted a dtype of"),
        ("activation", torch.randn(8, 40), "activation: .*in_features a positive multiple of 16"),
        ("activation", torch.randn(8, 64), r"fp4_weight: .*in_features // 2 = 32 in dim 1"),
        ("fp4", fp4.int(), "fp4_weight: .*wanted a dtype of"),
        ("fp4", fp4[0], "fp4_weight: .*wanted shape"),
        ("scale", scale.float(), "weight_scaling_factor: .*wanted dtype float8_e4m3fn"),
        ("scale", scale[:3], r"weight_scaling_factor: .*wanted shape \(4, 32, 3\)"),
        ("global_scale", global_scale.half(), "weight_global_scale: .*wanted dtype float32"),
        ("global_scale", global_scale[:3], "weight_global_scale: .*wanted a shape of"),
        ("offsets", EVEN.long(), "offsets: .*wanted dtype int32"),
        ("offsets", EVEN[:3], r"offsets: .*wanted shape \(4,\)"),
        ("layout", "swizzled_128x4", r"weight_scaling_factor: .*wanted shape \(4, 128, 4\)"),
        ("layout", "humming", "layout: got 'humming', wanted one of .*'linear'.*'tiled_64x64'"),
        (
            "layout",
            "tiled_64x64",
            "fp4_weight: .*wanted out_features and in_features multiples of 64, not 0 in",
        ),
        ("layout", "rows", "layout: got 'rows'"),
    ]
    if not fake:
        bad += [
            ("offsets", torch.tensor([2, 1, 6, 8]).int(), r"offsets: got \[2, 1, 6, 8\], wanted .* never decrease"),
            ("offsets", torch.tensor([-1, 1, 6, 8]).int(), "offsets: .*never decrease"),
            ("offsets", torch.tensor([2, 4, 6, 9]).int(), "offsets: got a last row end of 9, wanted at most .* 8 rows"),
            ("scale", scale.to("meta"), "weight_scaling_factor: .*wanted device cpu"),
        ]
    mode = torch._subclasses.FakeTensorMode() if fake else None
    for name, value, message in bad:
        arguments = {**good, name: value}
        if fake:
            arguments = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        layout = arguments.pop("layout")
        with pytest.raises(ValueError, match=message):
            op(*arguments.values(), layout=layout)

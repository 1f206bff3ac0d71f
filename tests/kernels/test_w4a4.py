"""The arithmetic of nvFuser's W4A4 kernels in plain torch, against a search of all codes and fp32 loops.
Called by pytest; judged by tests/oracle.py.
"""

import copy
import inspect

import pytest
import torch
from oracle import (
    KERNEL_TOLERANCE,
    decode_e2m1,
    decode_e4m3,
    dequantize,
    groups,
    relative_error,
)

from thunder_moe import Llama4MoE, Llama4MoEConfig, quantize_
from thunder_moe import f16a_nvfp4weight_scaled_grouped_mm as operator
from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.kernels import reference, w4a4
from thunder_moe.kernels.select import use_backend
from thunder_moe.ops.grouped_mm import operands

E2M1 = sorted((decode_e2m1(code), code) for code in range(8))
E4M3 = sorted((decode_e4m3(bits), bits) for bits in range(127))


def nearest(x: float, table: list[tuple[float, int]]) -> float:
    """Return the value of the nearest code, the even one of two; x beyond the table saturates."""
    return min(table, key=lambda entry: (abs(entry[0] - x), entry[1] % 2))[0]


def float32(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def rounded(rows: torch.Tensor, amax: float | None = None) -> torch.Tensor:
    """Return rows rounded to NVFP4, a block at a time, by nv_grouped_block_quantize's operations in float32."""
    rows = rows.float()
    largest = rows.abs().max() if amax is None else float32(amax)
    encode = float32(2688.0) / largest
    decode = float32(1.0) / encode
    out = torch.empty_like(rows)
    for m in range(rows.shape[0]):
        for start in range(0, rows.shape[1], 16):
            block = rows[m, start : start + 16]
            scale = float32(nearest((block.abs().max() / float32(6.0) * encode).item(), E4M3))
            factor = min(float32(1.0) / (scale * decode), float32(3.4028234663852886e38))
            codes = [nearest(x.item(), E2M1) for x in (block * factor).abs()]
            out[m, start : start + 16] = float32(codes) * block.sign() * scale * decode
    return out


def expected_gemm(rows, exact, offsets):
    return torch.cat([rows[start:end] @ exact[e].T for e, start, end in groups(offsets)])


def make(dtype, rows, n=34, k=48, *, per_row=False):
    weight = quantize(torch.randn(4, n, k))
    if per_row:
        weight = NVFP4Weight(weight.qdata, weight.scale, torch.rand(4, n) + 0.5)
    return torch.randn(rows, k, dtype=dtype), weight, dequantize(*weight.tensors())


@pytest.mark.parametrize("size", [1e-3, 1.0, 3e4])
@pytest.mark.parametrize("amax", [None, 2.3])
def test_rows_are_rounded_as_by_nvfuser(size, amax):
    rows = (torch.randn(5, 64) * size).bfloat16()
    rows[0, :16] = 0  # a block of zeros
    rows[1, :16] *= 1e-4  # a block whose scale is subnormal or 0
    amax = None if amax is None else amax * size
    values, scale, decode = w4a4.quantize_rows(rows, amax)
    assert scale.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 4)
    assert decode.shape == ()
    out = values * scale.float().repeat_interleave(16, -1) * decode
    assert torch.allclose(out, rounded(rows, amax), rtol=1e-6, atol=0)
    assert out[0, :16].eq(0).all()
    # Nothing of the rows' size is lost; what calibration has not seen is cut off.
    assert relative_error(out, rows.float()) < (0.12 if amax is None else 0.2)
    if amax is not None:
        assert out.abs().max() <= amax * 1.0001


def test_ties_go_to_the_even_code():
    rows = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6]])
    values, scale, decode = w4a4.quantize_rows(rows)
    assert values.tolist() == [[6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, -6]]
    assert scale.float().item() == 448
    assert decode.item() == float32(1.0) / float32(448.0)


@pytest.mark.parametrize("rows", [torch.zeros(3, 32), torch.empty(0, 32), torch.full((2, 16), 1e-38)])
def test_rows_without_a_scale_stay_zero(rows):
    values, scale, decode = w4a4.quantize_rows(rows)
    assert torch.isfinite(decode)
    assert (values * scale.float().repeat_interleave(16, -1)).eq(0).all()
    assert values.shape == rows.shape


@pytest.mark.parametrize("dtype", list(KERNEL_TOLERANCE))
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("amax", [None, 2.3])
def test_grouped_mm(offsets, dtype, per_row, amax):
    activation, weight, exact = make(dtype, int(offsets[-1]), per_row=per_row)
    out = w4a4.grouped_mm(activation, weight, offsets, amax=amax)
    assert out.dtype == dtype
    assert out.shape == (activation.shape[0], 34)
    if len(activation):
        expected = expected_gemm(rounded(activation, amax), exact, offsets)
        assert relative_error(out, expected) < KERNEL_TOLERANCE[dtype]
        assert relative_error(out, reference.grouped_mm(activation, weight, offsets)) > 0.02


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_bfloat16_holds_the_rows_before_the_decode_scale(size):
    rows, _ = w4a4._scaled_rows(torch.randn(64, 256) * torch.logspace(-3, 0, 64)[:, None] * size)
    assert rows.any(1).all()
    assert torch.equal(rows.bfloat16().float(), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(KERNEL_TOLERANCE))
def test_gpu_has_the_same_numbers(offsets, dtype):
    activation, weight, _ = make(dtype, int(offsets[-1]), n=128, k=256)
    on_gpu = NVFP4Weight(*(tensor.cuda() for tensor in weight.tensors()))
    out = w4a4.grouped_mm(activation.cuda(), on_gpu, offsets.cuda())
    assert out.dtype == dtype
    if len(activation):
        expected = w4a4.grouped_mm(activation.float(), weight, offsets)
        assert relative_error(out.cpu(), expected) < max(KERNEL_TOLERANCE[dtype], 1e-3)  # of TF32
        one = NVFP4Weight(*(tensor[:1] for tensor in weight.tensors()))
        one_on_gpu = NVFP4Weight(*(tensor[:1] for tensor in on_gpu.tensors()))
        expected = w4a4.mm(activation.float(), one, torch.arange(128.0))
        out = w4a4.mm(activation.cuda(), one_on_gpu, torch.arange(128.0, device="cuda"))
        assert relative_error(out.cpu(), expected) < max(KERNEL_TOLERANCE[dtype], 1e-3)


@pytest.mark.parametrize("dtype", list(KERNEL_TOLERANCE))
def test_grouped_swiglu(offsets, dtype):
    activation, weight, exact = make(dtype, max(int(offsets[-1]), 1))
    out = w4a4.grouped_swiglu(activation, weight, offsets)
    assert out.dtype == dtype
    live = int(offsets[-1])
    gate, up = expected_gemm(rounded(activation), exact, offsets).chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    assert relative_error(out[:live], expected) < 2 * KERNEL_TOLERANCE[dtype]


def test_options_of_the_fused_operators():
    """With gathered rows, scales, biases and other activations, the rows are rounded, and all else equals the
    reference."""
    offsets = torch.tensor([1, 3, 3, 6], dtype=torch.int32)
    tokens, weight, _ = make(torch.float32, 3, n=32)
    row_slot = torch.tensor([3, 0, 5, 1, 2, 4], dtype=torch.int32)
    slot_scale, bias, form = torch.rand(3, 2), torch.randn(4, 32), SwiGLUConfig(alpha=1.7, limit=1.0, up_shift=1.0)
    values = rounded(tokens)
    arguments = (weight, offsets, row_slot, slot_scale, bias, form)
    assert relative_error(w4a4.grouped_swiglu(tokens, *arguments), reference.grouped_swiglu(values, *arguments)) < 1e-5
    rows, _, _ = make(torch.float32, 6)
    slot_row = torch.argsort(row_slot).int().view(3, 2)
    arguments = (weight, offsets, slot_row, torch.rand(3, 2), bias)
    out = w4a4.grouped_mm_combine(rows, *arguments)
    assert relative_error(out, reference.grouped_mm_combine(rounded(rows), *arguments)) < 1e-5


def test_has_the_functions_of_a_backend():
    for name in reference.__all__:
        ours, theirs = (inspect.signature(getattr(module, name)) for module in (w4a4, reference))
        shared = [parameter for parameter in ours.parameters.values() if parameter.name != "amax"]
        wanted = list(theirs.parameters.values())
        for which in (shared, wanted):  # a function may have another one of its backend as a default
            which[:] = [each.replace(default=None) if inspect.isfunction(each.default) else each for each in which]
        assert shared == wanted, name


def test_gradients_ignore_the_rounding(offsets):
    grad, weight, _ = make(torch.float32, int(offsets[-1]), n=32)
    grad = grad[:, :32].contiguous()
    expected = reference.grouped_mm_dgrad(grad, weight, offsets)
    assert torch.equal(w4a4.grouped_mm_dgrad(grad, weight, offsets), expected)


def test_use_backend_simulates_a_model():
    """A model computes what Blackwell would: about 1.4 times the error of 4-bit weights alone."""
    activation, weight, exact = make(torch.bfloat16, 16, n=64, k=64)
    offsets = torch.tensor([4, 8, 12, 16], dtype=torch.int32)
    with use_backend("w4a4"):
        out = operator(activation, *operands(weight), offsets)
    assert relative_error(out, expected_gemm(rounded(activation), exact, offsets)) < KERNEL_TOLERANCE[torch.bfloat16]

    moe = Llama4MoE(Llama4MoEConfig(128, 64, 4, num_shared_experts=0), dtype=torch.bfloat16)
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    expected = moe(x)
    quantized = quantize_(copy.deepcopy(moe))
    weights_alone = relative_error(quantized(x), expected)
    with use_backend("w4a4"):
        both = relative_error(quantized(x), expected)
    assert 1.2 < both / weights_alone < 1.7

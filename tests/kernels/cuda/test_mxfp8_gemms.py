"""CUDA GEMMs of MXFP8 weights in both layouts, run by the emulator and judged by tests/oracle.py.
Called by pytest; emulated launches replace kernels/cuda/launch.py, all else is the backend's own code.

The kernels are NVFP4's but for the decoding, so one configuration of each kernel is enough here.
"""

import pytest
import torch
from emulated_gemms import DTYPES
from emulator.guarded_memory import guarded
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, dequantize_mxfp8, grouped_mm, moe_experts, relative_error

import thunder_moe.ops.experts  # noqa: F401  registers the operators of a layer
from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.mxfp8 import dequantize, quantize
from thunder_moe.formats.weight import MXFP8Weight
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import operators, prefill
from thunder_moe.kernels.cuda.configs import GemmConfig
from thunder_moe.kernels.experts import ExpertsCall
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import OPERATORS
from thunder_moe.routing import gather_rows

LINEAR = {
    "split": GemmConfig("split", 1, 2, 1, 4, 2),
    "staged": GemmConfig("staged", 4, 1, 2, 1, 3),
    "wgmma": GemmConfig("wgmma", 8, 2, 1, 1, 3),
}
TILED = {
    "tiled mma": GemmConfig("tiled_mma", 1, 2, 1, 2, 1),
    "tiled mma, shared": GemmConfig("tiled_mma", 1, 2, 1, 1, 2, True),
    "tiled wgmma": GemmConfig("tiled_wgmma", 6, 2, 1, 1, 2),
    "tiled wgmma, halves": GemmConfig("tiled_wgmma", 16, 1, 3, 1, 1),
}
OFFSETS = (3, 3, 40, 42)


def decoded(weight):
    return dequantize_mxfp8(weight.qdata, weight.scale)


def make(n, k, exponents=(-60, 30)):
    """Return weights of magnitudes that differ by experts, with the extremes of E4M3 in places that count."""
    weight = quantize(torch.randn(4, n, k) * 2.0 ** torch.linspace(*exponents, 4)[:, None, None])
    codes = weight.qdata.view(torch.uint8)
    codes[:, 0, :10] = torch.tensor([0, 1, 7, 8, 0x7E, 0x80, 0x81, 0x87, 0x88, 0xFE], dtype=torch.uint8)
    return weight, decoded(weight)


def errors(out, expected):
    """Return the errors of each expert's rows alone: their magnitudes differ."""
    starts = (0, *OFFSETS[:-1])
    return [relative_error(out[a:b], expected[a:b]) for a, b in zip(starts, OFFSETS, strict=True) if b > a]


@pytest.mark.parametrize(
    ("name", "k"), [("split", 672), ("wgmma", 256), *others_slow([("split", 128), ("staged", 160)], ())]
)
def test_linear(emulated, name, k):
    weight, exact = make(88, k)
    offsets, rows = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(42, k, dtype=torch.bfloat16)
    out = cuda.grouped_mm(rows, weight, offsets, config=LINEAR[name])
    assert max(errors(out, grouped_mm(rows, exact, offsets))) < KERNEL_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", others_slow(TILED, ["tiled mma", "tiled wgmma"]))
def test_tiled(emulated, hopper, name):
    weight, exact = make(192, 256)
    weight = MXFP8Weight(*map(guarded, weight.to_layout("tiled_64x64").tensors()), "tiled_64x64")
    offsets, rows = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(42, 256, dtype=torch.bfloat16)
    out = cuda.grouped_mm(rows, weight, offsets, config=TILED[name])
    assert max(errors(out, grouped_mm(rows, exact, offsets))) < KERNEL_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", others_slow(["split", "tiled mma"], ["split"]))
def test_fp16(emulated, hopper, name):
    """Weights range from float16's subnormals to its largest numbers; scales beyond are Inf or NaN, not numbers."""
    layout = "tiled_64x64" if name in TILED else "linear"
    weight, exact = make(64, 128, (-12, 5))
    offsets, rows = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(42, 128, dtype=torch.float16) * 2.0**-6
    config = TILED.get(name) or LINEAR[name]
    out = cuda.grouped_mm(rows, weight.to_layout(layout), offsets, config=config)
    assert max(errors(out, grouped_mm(rows, exact, offsets))) < KERNEL_TOLERANCE[torch.float16]
    weight.scale.view(torch.uint8)[2, 5, 1] = 127 + 9
    out = cuda.grouped_mm(rows, weight.to_layout(layout), offsets, config=config)
    assert not out[3:40, 5].isfinite().any()
    assert out[:3].isfinite().all()


@pytest.mark.parametrize("name", ["split", "tiled mma"])
def test_scales_out_of_range_give_no_numbers(emulated, hopper, name):
    layout = "tiled_64x64" if name in TILED else "linear"
    weight, _ = make(64, 128)
    weight.scale.view(torch.uint8)[2, 5:8, 1] = torch.tensor([127 + 40, 254, 255], dtype=torch.uint8)
    weight.qdata.view(torch.uint8)[2, 5:8, 32:64] = 0x38
    offsets, rows = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(42, 128, dtype=torch.bfloat16)
    out = cuda.grouped_mm(rows, weight.to_layout(layout), offsets, config=TILED.get(name) or LINEAR[name])
    assert not out[3:40, 5:8].isfinite().any()
    assert out[3:40, 8:].isfinite().all()


@pytest.mark.slow  # of the default configurations: test_prepared.py
@pytest.mark.parametrize("name", ["tiled mma", "tiled wgmma"])
def test_grouped_swiglu(emulated, hopper, name):
    """Tokens are gathered and scaled; biases are added."""
    form, n, k = SwiGLUConfig(1.702, 1.5, 1.0), 64, 128
    weight = quantize(torch.randn(4, 2 * n, k))
    offsets, row_slot = torch.tensor(OFFSETS, dtype=torch.int32), torch.randperm(42).int()
    tokens, scale, bias = torch.randn(21, k, dtype=torch.bfloat16), torch.rand(42), torch.randn(4, 2 * n)
    packed = weight.to_layout("tiled_64x64")
    out = cuda.grouped_swiglu(tokens, packed, offsets, row_slot, scale, bias, form, config=TILED[name])
    rows = gather_rows(tokens, row_slot).float() * scale[row_slot.long()][:, None]
    expert = torch.searchsorted(offsets, torch.arange(42), right=True)
    gate, up = (grouped_mm(rows, decoded(weight), offsets) + bias[expert]).chunk(2, -1)
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    expected = gate * torch.sigmoid(form.alpha * gate) * (up + form.up_shift)
    assert relative_error(out, expected) < 2 * KERNEL_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["linear", "tiled_64x64"])
@pytest.mark.covering(1)
def test_dequantize(emulated, layout, dtype):
    weight, _ = make(64, 128)
    weight.scale.view(torch.uint8)[0, 3, :2] = torch.tensor([0, 166], dtype=torch.uint8)
    weight.qdata.view(torch.uint8)[1, 3, 4] = 0x7F  # NaN
    out = cuda.dequantize(weight.to_layout(layout), dtype)
    torch.testing.assert_close(out, dequantize(weight, dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["linear", "tiled_64x64"])
def test_gradient_of_the_rows(emulated, layout):
    weight, exact = make(64, 128)
    offsets, grad = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(42, 64, dtype=torch.bfloat16)
    out = cuda.grouped_mm_dgrad(grad, weight.to_layout(layout), offsets)
    assert max(errors(out, grouped_mm(grad, exact.mT, offsets))) < KERNEL_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("shape", "rows", "format", "wanted"),
    [
        ((4, 128, 192), 4 * 128 + 1, "mxfp8", prefill.RETILE_FIRST),
        ((4, 128, 192), 4 * 128, "mxfp8", None),
        ((4, 128, 192), 4 * 256, "nvfp4", None),
        ((4, 128, 192), 4 * 256 + 1, "nvfp4", prefill.RETILE_FIRST),
        ((4, 128, 96), 1000, "mxfp8", prefill.DEQUANTIZE_FIRST),
        ((4, 96, 128), 1000, "mxfp8", prefill.DEQUANTIZE_FIRST),
        ((4, 100, 128), 1000, "mxfp8", None),
        ((1, 96, 128), 1000, "mxfp8", None),
        ((1, 128, 128), 256, "mxfp8", None),
        ((1, 128, 128), 257, "mxfp8", prefill.RETILE_FIRST),
        ((1, 128, 128), 2048, "nvfp4", None),
        ((1, 128, 128), 2049, "nvfp4", prefill.RETILE_FIRST),
    ],
)
def test_how_many_rows_are_multiplied(shape, rows, format, wanted):
    assert prefill.strategy("linear", shape, format, rows, (9, 0)) == wanted
    assert prefill.strategy("tiled_64x64", shape, format, rows, (9, 0)) is None
    assert prefill.strategy("linear", shape, format, rows, (8, 0)) is None


def test_many_rows_of_linear_weights_go_by_tiles(emulated, hopper, monkeypatch):
    monkeypatch.setattr(prefill, "_MOST_ROWS", {"mxfp8": 10})
    weight, exact = make(64, 128)
    offsets, rows = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(42, 128, dtype=torch.bfloat16)
    seen, run = [], operators.run
    monkeypatch.setattr(
        operators, "run", lambda *args, layout, **options: seen.append(layout) or run(*args, layout=layout, **options)
    )
    out = cuda.grouped_mm(rows, weight, offsets)
    assert seen == ["tiled_64x64"]
    assert max(errors(out, grouped_mm(rows, exact, offsets))) < KERNEL_TOLERANCE[torch.bfloat16]
    # What is prepared for operands of a kind would run the linear kernel.
    name = "f16a_mxfp8weight_scaled_grouped_mm"
    chain, reason = operators.describe(name, OPERATORS[name].described((rows, *operands(weight), offsets)), {})
    assert chain is None
    assert "so many rows" in reason


def test_many_rows_of_odd_weights_go_in_16_bits(emulated, hopper, monkeypatch):
    monkeypatch.setattr(prefill, "_MOST_ROWS", {"mxfp8": 10})
    monkeypatch.setattr(operators, "plan_gemm", None)
    torch.manual_seed(0)
    gate_up, down = quantize(torch.randn(4, 64, 96) / 10), quantize(torch.randn(4, 96, 32) / 6)
    hidden, ids = torch.randn(24, 96, dtype=torch.bfloat16), torch.rand(24, 4).topk(2).indices
    scores = torch.rand(24, 2)
    args = hidden, ids, scores
    out = cuda.moe_experts(ExpertsCall(*args, gate_up, down))
    expected = moe_experts(*args, decoded(gate_up), decoded(down))
    assert relative_error(out, expected) < 2 * KERNEL_TOLERANCE[torch.bfloat16]
    name = "f16a_mxfp8weight_moe_experts"
    described = OPERATORS[name].described((*args, *operands(gate_up), *operands(down)))
    assert operators.prepare(name, described, {}) is None

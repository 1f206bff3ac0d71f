"""The CUDA backend beside its GEMMs: routing, whole layers, gradients, dequantization; run by the emulator.
Called by pytest; emulated launches replace kernels/cuda/launch.py, all else is the backend's own code.
"""

import re

import pytest
import torch
from emulated_gemms import DTYPES, emulate_device, make
from fast_cases import others_slow
from oracle import dequantize, grouped_mm, moe_experts, relative_error

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats import nvfp4
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import configs as cuda_configs
from thunder_moe.routing import route as plain_route


@pytest.mark.parametrize("dtype", others_slow(DTYPES, DTYPES[:1]))
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantize_bit_for_bit(emulated, dtype, per_row):
    weight, _ = make(4, 24, 80, halves=2 if per_row else 1)
    assert torch.equal(cuda.dequantize(weight, dtype), nvfp4.dequantize(weight, dtype))
    weight, _ = make(4, 128, 192, halves=2 if per_row else 1)
    tiled = weight.to_layout("tiled_64x64")
    assert torch.equal(cuda.dequantize(tiled, dtype), nvfp4.dequantize(weight, dtype))


@pytest.mark.parametrize(("dtype", "capability"), [(torch.bfloat16, (9, 0)), (torch.float16, (8, 0))])
def test_gradient(emulated, monkeypatch, dtype, capability):
    emulate_device(monkeypatch, 3, capability)
    weight, exact = make(4, 24, 80)
    offsets = torch.tensor([3, 3, 7, 9], dtype=torch.int32)
    grad = torch.randn(9, 24, dtype=dtype)
    out = cuda.grouped_mm_dgrad(grad, weight, offsets)
    assert relative_error(out, grouped_mm(grad, exact.transpose(1, 2), offsets)) < 5e-3


def test_every_routing_of_the_shared_table(offsets, layout):
    weight, exact = make(4, 32 if layout == "linear" else 64, 128)
    rows = torch.randn(int(offsets[-1]) + 1, 128, dtype=torch.bfloat16)
    out = cuda.grouped_mm(rows, weight.to_layout(layout), offsets)
    assert relative_error(out[: offsets[-1]], grouped_mm(rows, exact, offsets)) < 5e-3


@pytest.mark.parametrize(("tokens", "weight_on_input"), others_slow([(1, False), (9, True), (70, False)], [1, 9]))
def test_a_whole_layer(layout, tokens, weight_on_input):
    experts, top_k, hidden, inner, dtype = 6, 2, 64, 48 if layout == "linear" else 64, torch.bfloat16
    gate_up, down = quantize(torch.randn(experts, 2 * inner, hidden)), quantize(torch.randn(experts, hidden, inner))
    linear = gate_up, down
    gate_up, down = gate_up.to_layout(layout), down.to_layout(layout)
    biases = torch.randn(experts, 2 * inner, dtype=dtype), torch.randn(experts, hidden)
    x, ids, scores = (
        torch.randn(tokens, hidden, dtype=dtype),
        torch.randint(-1, 7, (tokens, top_k)),
        torch.rand(tokens, top_k),
    )
    row_slot, offsets, slot_row = cuda.route(ids, experts)
    on_input, on_output = (scores, None) if weight_on_input else (None, scores)
    rows = cuda.grouped_swiglu(x, gate_up, offsets, row_slot, on_input, biases[0], SwiGLUConfig(1.702, 1.5, 1.0))
    out = cuda.grouped_mm_combine(rows, down, offsets, slot_row, on_output, biases[1])
    exact = [dequantize(*weight.tensors()) for weight in linear]
    form = dict(alpha=1.702, limit=1.5, up_shift=1.0)
    expected = moe_experts(x, ids, scores, *exact, *biases, weight_on_input=weight_on_input, **form)
    assert relative_error(out, expected) < 7e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (1, 8, 128), (333, 3, 5), (2500, 4, 300)])
def test_route(emulated, tokens, top_k, experts, dtype):
    ids = torch.randint(-1, experts + 1, (tokens, top_k)).to(dtype)
    for actual, expected in zip(cuda.route(ids, experts), plain_route(ids, experts), strict=True):
        assert torch.equal(actual, expected)


def test_tokens_may_lie_unaligned_and_weights_be_shared_by_rows(layout):
    weight, exact = make(4, 32 if layout == "linear" else 64, 128)
    weight = weight.to_layout(layout)
    flat = torch.randn(5 * 128 + 1, dtype=torch.bfloat16)
    rows, offsets = flat[1:].view(5, 128), torch.tensor([1, 2, 4, 5], dtype=torch.int32)
    out = cuda.grouped_mm(rows, weight, offsets)
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3


# They may read before they wait; the emulator hides from them what they have to wait for (`late_result`).
EARLY_READERS = {"mm_tiled_cluster", "mm_tiled_direct", "grouped_mm_tiled_mma", "combine", "decode_attention"}
EARLY_READERS.add("router_linear")


@pytest.mark.parametrize("file", sorted(cuda_configs.COMMON.parent.glob("*.cu")), ids=lambda file: file.stem)
def test_every_kernel_waits_for_the_one_before_it_first(file):
    kernels = re.findall(r"__global__ void [^{;]*?(\w+)\(const[^{;]*\{\s*(.*)", file.read_text())
    assert kernels
    for name, first_line in kernels:
        assert first_line == "await_previous_kernel();" or name in EARLY_READERS


def test_says_why_it_cannot_run():
    if torch.cuda.is_available():
        pytest.skip("it can run here")
    assert cuda.unavailable_reason() == "torch finds no CUDA device"

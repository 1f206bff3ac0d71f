"""Slow paths are warned of, once each, with what to do. Called by pytest."""

import warnings

import pytest
import torch

from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels import reference, slow_paths
from thunder_moe.kernels.cpu import backend as cpu
from thunder_moe.kernels.cuda import backend as cuda

OFFSETS = torch.tensor([1, 2, 4, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(slow_paths, "_warned", set())


def warns_once(call, message):
    with pytest.warns(UserWarning, match=message) as found:
        first = call()
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call(), first)


def rows(k, dtype=torch.bfloat16):
    return torch.randn(5, k, dtype=dtype)


@pytest.mark.parametrize("layout", ["swizzled_128x4", "tiled_64x64"])
def test_a_layout_that_is_converted_at_every_call(emulated, layout):
    weight, x = quantize(torch.randn(4, 128, 128)), rows(128)
    expected = reference.grouped_mm(x, weight, OFFSETS)
    other = weight.to_layout(layout)
    shape = r"one of shape \(4, 128, 128\).*to_layout_\(model\)"
    warns_once(lambda: reference.grouped_mm(x, other, OFFSETS), f"plain torch on cpu.*layout '{layout}'.*{shape}")
    if cpu.unavailable_reason() is None:
        warns_once(lambda: cpu.grouped_mm(x, other, OFFSETS), f"the kernels on cpu.*layout '{layout}'.*{shape}")
    if layout != "tiled_64x64":
        slow_paths._warned.clear()
        warns_once(lambda: cuda.grouped_mm(x, other, OFFSETS), f"the kernels on cpu.*layout '{layout}'.*{shape}")
        warns_once(lambda: cuda.dequantize(other, torch.bfloat16), f"the kernels of gradients.*layout '{layout}'")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(reference.grouped_mm(x, weight, OFFSETS), expected)


def test_float32():
    weight = quantize(torch.randn(4, 128, 64)).to_layout("tiled_64x64")
    wanted = (
        r"no CUDA kernel serves activations in float32 \(got torch.float32 \(5, 64\) and a weight of \(4, 128, 64\)"
    )
    warns_once(lambda: cuda.grouped_mm(rows(64, torch.float32), weight, OFFSETS).mul(0), wanted)


def test_too_many_experts():
    weight, x = quantize(torch.randn(1025, 16, 16)), rows(16)
    offsets = torch.arange(1, 1026).clamp_max(5).int()
    wanted = "no CUDA kernel serves more than 1024 experts.*shard the experts"
    warns_once(lambda: cuda.grouped_mm(x, weight, offsets), wanted)


@pytest.mark.parametrize(
    ("dtype", "n", "message"),
    [
        (torch.float32, 64, "no CUDA kernel serves gradients of activations in float32"),
        (torch.bfloat16, 20, r"out_features no multiple of 8 \(20\) are computed without tensor cores"),
    ],
)
def test_gradients(emulated, dtype, n, message):
    weight, grad = quantize(torch.randn(4, n, 64)), rows(n, dtype)
    warns_once(lambda: cuda.grouped_mm_dgrad(grad, weight, OFFSETS), message)

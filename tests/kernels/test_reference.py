"""The plain-torch kernels against the oracle, and their memory.
Called by pytest; judged by tests/oracle.py.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, grouped_mm, grouped_swiglu, groups, relative_error

from thunder_moe.formats.nvfp4 import NVFP4Weight, dequantize_expert, quantize
from thunder_moe.kernels import reference

DTYPES = list(KERNEL_TOLERANCE)


def make(dtype, rows, n=34, k=48, *, per_row=False, layout="linear"):
    weight = quantize(torch.randn(4, n, k))
    if per_row:
        weight = NVFP4Weight(weight.qdata, weight.scale, torch.rand(4, n) + 0.5)
    return torch.randn(rows, k, dtype=dtype), weight.to_layout(layout), dequantize(*weight.tensors())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_grouped_mm(offsets, dtype, per_row, layout):
    rows = int(offsets[-1])
    activation, weight, exact = make(dtype, rows + 2, per_row=per_row, layout=layout)
    out = reference.grouped_mm(activation, weight, offsets)
    assert out.shape == (rows + 2, 34)
    assert out.dtype == dtype
    assert relative_error(out[:rows], grouped_mm(activation, exact, offsets)) < KERNEL_TOLERANCE[dtype]
    assert out[rows:].eq(0).all()


def test_tiled_layout(offsets):
    activation, weight, exact = make(torch.float32, int(offsets[-1]), 128, 64, per_row=True, layout="tiled_64x64")
    out = reference.grouped_mm(activation, weight, offsets)
    assert relative_error(out, grouped_mm(activation, exact, offsets)) < 1e-5
    back = reference.grouped_mm_dgrad(out, weight, offsets)
    expected = torch.cat([out[start:end] @ exact[expert] for expert, start, end in groups(offsets)])
    assert relative_error(back, expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_swiglu(offsets, dtype):
    activation, weight, exact = make(dtype, int(offsets[-1]))
    out = reference.grouped_swiglu(activation, weight, offsets)
    assert relative_error(out, grouped_swiglu(activation, exact, offsets)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_mm_dgrad(offsets, dtype):
    rows = int(offsets[-1])
    _, weight, exact = make(dtype, rows)
    grad = torch.randn(rows, 34, dtype=dtype)
    expected = torch.cat([grad[start:end].float() @ exact[expert] for expert, start, end in groups(offsets)])
    out = reference.grouped_mm_dgrad(grad, weight, offsets)
    assert relative_error(out, expected) < KERNEL_TOLERANCE[dtype]


def test_only_experts_with_rows_are_dequantized(monkeypatch):
    seen = []

    def spy(weight, expert, out):
        seen.append((expert, out.data_ptr()))
        dequantize_expert(weight, expert, out)

    monkeypatch.setattr(reference, "dequantize_expert", spy)
    activation, weight, _ = make(torch.float32, 5)
    reference.grouped_mm(activation, weight, torch.tensor([0, 2, 2, 5], dtype=torch.int32))
    assert [expert for expert, _ in seen] == [1, 3]
    assert len({address for _, address in seen}) == 1  # into the same buffer

"""CUDA GEMMs of weights in layout "tiled_64x64", run by the emulator and judged by tests/oracle.py.
Called by pytest; emulated launches replace kernels/cuda/launch.py, all else is the backend's own code.
"""

import itertools

import pytest
import torch
from emulated_gemms import DTYPES, FAST, TILED_CONFIGS, TILED_SWIGLU_CONFIGS, make
from fast_cases import one_of_each
from oracle import KERNEL_TOLERANCE, grouped_mm, grouped_swiglu, relative_error
from pairwise import pairwise

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.kernels import reference
from thunder_moe.kernels.cuda import backend as cuda

EDGES = [
    ("tiled mma", 64, DTYPES[0]),
    ("tiled mma, shared", 320, DTYPES[0]),
    ("tiled wgmma, two blocks of rows", 320, DTYPES[0]),
    ("tiled wgmma, odd", 64, DTYPES[1]),
]


@pytest.mark.parametrize(
    ("name", "k", "dtype"), [*EDGES, *one_of_each(pairwise(list(TILED_CONFIGS), [64, 320, 512], DTYPES))]
)
def test_grouped_mm(emulated, hopper, name, k, dtype):
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    for n in (64, 192):
        weight, exact = make(4, n, k)
        rows = torch.randn(44, k).to(dtype)
        out = cuda.grouped_mm(rows, weight.to_layout("tiled_64x64"), offsets, config=TILED_CONFIGS[name])
        assert relative_error(out[:42], grouped_mm(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]


SWIGLU_EDGES = [*((name, DTYPES[0]) for name in FAST[-2:]), ("tiled mma, 32 tokens", DTYPES[1])]


@pytest.mark.parametrize(
    ("name", "dtype"), [*SWIGLU_EDGES, *one_of_each(itertools.product(TILED_SWIGLU_CONFIGS, DTYPES))]
)
def test_grouped_swiglu(emulated, hopper, name, dtype):
    """Tokens are gathered and scaled; gate and up have different global scales."""
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    form, config = SwiGLUConfig(1.702, 1.5, 1.0), TILED_SWIGLU_CONFIGS[name]
    for n, k in ((64, 64), (192, 320)):
        weight, _ = make(4, 2 * n, k, halves=2)
        tokens, row_slot = torch.randn(21, k).to(dtype), torch.randperm(42).int()
        scale, bias = torch.rand(42), torch.randn(4, 2 * n)
        out = cuda.grouped_swiglu(
            tokens, weight.to_layout("tiled_64x64"), offsets, row_slot, scale, bias, form, config=config
        )
        expected = reference.grouped_swiglu(tokens.float(), weight, offsets, row_slot, scale, bias, form)
        assert relative_error(out, expected) < 2 * KERNEL_TOLERANCE[dtype]


def test_grouped_swiglu_where_a_block_has_rows_of_gate_and_up(emulated, hopper):
    offsets = torch.tensor([3, 3, 7, 9], dtype=torch.int32)
    weight, exact = make(4, 192, 64, halves=2)
    rows = torch.randn(9, 64, dtype=torch.bfloat16)
    out = cuda.grouped_swiglu(rows, weight.to_layout("tiled_64x64"), offsets)
    assert relative_error(out, grouped_swiglu(rows, exact, offsets)) < 1e-2


def test_tiles_need_their_device(emulated):
    weight, _ = make(4, 64, 64)
    rows, offsets = torch.randn(4, 64, dtype=torch.bfloat16), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"layout: 'tiled_64x64' is for devices of compute capability \(9, 0\).*\(8, 0\)"
    ):
        cuda.grouped_mm(rows, weight.to_layout("tiled_64x64"), offsets)

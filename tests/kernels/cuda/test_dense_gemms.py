"""CUDA GEMMs of one weight without offsets, run by the emulator and judged by tests/oracle.py.
Called by pytest; emulated launches replace those of kernels/cuda/launch.py, all else is the backend's own code.
"""

import pytest
import torch
from emulated_gemms import CONFIGS, DTYPES, TILED_CONFIGS, make
from oracle import KERNEL_TOLERANCE, relative_error

from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda.configs import GemmConfig

NAMES = ("split 2", "wgmma", "tiled mma, split 2", "tiled mma, shared", "tiled wgmma")
ALL = CONFIGS | TILED_CONFIGS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_mm(emulated, hopper, name, dtype):
    config = ALL[name]
    weight, exact = make(1, 192, 320, halves=2)
    weight, bias = weight.to_layout(config.layout), torch.randn(192)
    for rows in (1, 5, 35):
        x = torch.randn(rows, 320).to(dtype)
        expected = x.float() @ exact[0].T
        plain, biased = cuda.mm(x, weight, config=config), cuda.mm(x, weight, bias, config=config)
        assert relative_error(plain, expected) < KERNEL_TOLERANCE[dtype]
        assert relative_error(biased, expected + bias) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [33, 64])
def test_few_tiles_are_shared_by_blocks_for_more_rows_than_a_tile_has(emulated, hopper, rows):
    config = GemmConfig("tiled_mma", 4, 1, 1, 2, 1, True)
    weight, exact = make(1, 64, 1024)
    x = torch.randn(rows, 1024, dtype=torch.bfloat16)
    out = cuda.mm(x, weight.to_layout("tiled_64x64"), config=config)
    assert relative_error(out, x.float() @ exact[0].T) < 5e-3


def test_no_rows(emulated):
    weight, _ = make(1, 64, 64)
    assert cuda.mm(torch.empty(0, 64, dtype=torch.bfloat16), weight).shape == (0, 64)


def test_float32_runs_on_the_reference(emulated):
    weight, exact = make(1, 64, 64)
    x = torch.randn(3, 64)
    assert relative_error(cuda.mm(x, weight, torch.ones(64)), x @ exact[0].T + 1) < 1e-5

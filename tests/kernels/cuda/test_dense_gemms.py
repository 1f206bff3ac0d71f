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


SHARED = {
    "tiled mma": GemmConfig("tiled_mma", 4, 1, 1, 2, 1, True),
    "tiled wgmma": GemmConfig("tiled_wgmma", 8, 1, 1, 1, 2, True),
    "tiled wgmma, two warpgroups": GemmConfig("tiled_wgmma", 4, 1, 2, 1, 4, True),
    "tiled wgmma, two blocks of rows": GemmConfig("tiled_wgmma", 8, 2, 1, 1, 1, True),
}


@pytest.mark.parametrize("rows", [5, 33, 64, 75])
@pytest.mark.parametrize("config", SHARED.values(), ids=SHARED.keys())
def test_few_tiles_are_shared_by_blocks(emulated, hopper, config, rows):
    """Also where a tile's last rows take fewer tokens than its first, and other tiles have other numbers of them."""
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

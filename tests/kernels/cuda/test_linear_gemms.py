"""CUDA GEMMs of weights in layout "linear", run by the emulator and judged by tests/oracle.py.
Called by pytest; emulated launches replace those of kernels/cuda/launch.py, all else is the backend's own code.
"""

import pytest
import torch
from emulated_gemms import CONFIGS, DTYPES, SWIGLU_CONFIGS, make
from emulator.guarded_memory import guarded
from oracle import KERNEL_TOLERANCE, grouped_mm, grouped_swiglu, relative_error
from pairwise import pairwise

from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.cuda import backend as cuda


@pytest.mark.parametrize(("name", "k", "dtype"), pairwise(list(CONFIGS), [16, 48, 128, 656, 1280], DTYPES))
@pytest.mark.covering(1)
def test_grouped_mm(emulated, name, k, dtype):
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    for n in (16, 88) if k != 48 else (33,):
        weight, exact = make(4, n, k)
        rows = torch.randn(44, k).to(dtype)
        out = cuda.grouped_mm(rows, weight, offsets, config=CONFIGS[name])
        assert relative_error(out[:42], grouped_mm(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", SWIGLU_CONFIGS.values(), ids=SWIGLU_CONFIGS.keys())
def test_grouped_swiglu(emulated, config, dtype):
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    for n, k in ((16, 128), (88, 272)):
        weight, exact = make(4, 2 * n, k, halves=2)
        rows = torch.randn(44, k).to(dtype)
        out = cuda.grouped_swiglu(rows, weight, offsets, config=config)
        assert relative_error(out[:42], grouped_swiglu(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("k", [16, 656])
@pytest.mark.parametrize("config", [*CONFIGS.values(), SWIGLU_CONFIGS["wgmma"]], ids=[*CONFIGS, "wgmma, swiglu"])
def test_reads_nothing_beyond_its_operands(emulated, monkeypatch, config, k):
    weight, exact = make(4, 88, k)
    weight = NVFP4Weight(*map(guarded, weight.tensors()))
    rows, offsets = guarded(torch.randn(42, k, dtype=torch.bfloat16)), torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: guarded(torch.empty(*shape, dtype=self.dtype)))
    kernel, oracle = (cuda.grouped_swiglu, grouped_swiglu) if config.row_blocks == 2 else (cuda.grouped_mm, grouped_mm)
    out = kernel(rows, weight, guarded(offsets), config=config)
    assert relative_error(out, oracle(rows, exact, offsets)) < 5e-3

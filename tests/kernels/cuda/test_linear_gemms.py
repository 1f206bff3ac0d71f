"""CUDA GEMMs of weights in layout "linear", run by the emulator and judged by tests/oracle.py.
Called by pytest; emulated launches replace kernels/cuda/launch.py, all else is the backend's own code.
"""

import pytest
import torch
from emulated_gemms import CONFIGS, DTYPES, SWIGLU_CONFIGS, make
from fast_cases import one_of_each
from oracle import KERNEL_TOLERANCE, grouped_mm, grouped_swiglu, relative_error
from pairwise import pairwise

from thunder_moe.kernels.cuda import backend as cuda

KS = [16, 48, 128, 656, 1280]
EDGES = [("split 8", 16, DTYPES[0]), ("staged", 656, DTYPES[0]), ("wgmma", 48, DTYPES[1])]


@pytest.mark.parametrize(("name", "k", "dtype"), [*EDGES, *one_of_each(pairwise(list(CONFIGS), KS, DTYPES))])
def test_grouped_mm(emulated, name, k, dtype):
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    for n in (16, 88) if k != 48 else (33,):
        weight, exact = make(4, n, k)
        rows = torch.randn(44, k).to(dtype)
        out = cuda.grouped_mm(rows, weight, offsets, config=CONFIGS[name])
        assert relative_error(out[:42], grouped_mm(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]


SWIGLU_EDGES = [("split 4", (88, 272), DTYPES[0]), ("staged", (16, 128), DTYPES[1])]


@pytest.mark.parametrize(
    ("name", "n_k", "dtype"),
    [*SWIGLU_EDGES, *one_of_each(pairwise(list(SWIGLU_CONFIGS), [(16, 128), (88, 272)], DTYPES))],
)
def test_grouped_swiglu(emulated, name, n_k, dtype):
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    n, k = n_k
    weight, exact = make(4, 2 * n, k, halves=2)
    rows = torch.randn(44, k).to(dtype)
    out = cuda.grouped_swiglu(rows, weight, offsets, config=SWIGLU_CONFIGS[name])
    assert relative_error(out[:42], grouped_swiglu(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]

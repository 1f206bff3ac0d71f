"""Barriers and waits of the CUDA GEMMs, against every order of threads and every delay that hardware may choose.
Called by pytest; emulated launches replace kernels/cuda/launch.py, all else is the backend's own code.
"""

import pytest
import torch
from emulated_gemms import CONFIGS, FAST, TILED_CONFIGS, make
from fast_cases import one_of_each
from oracle import grouped_mm, relative_error
from pairwise import pairwise

from thunder_moe.kernels.cuda import backend as cuda

TIMED = ["split 8", "staged", "wgmma", "wgmma, two blocks of rows"]
TIMED_TILES = [
    "tiled mma, shared",
    "tiled mma, split 2",
    "tiled mma, split 4",
    "tiled mma, 16 tokens",
    "tiled wgmma, odd",
    "tiled wgmma, two blocks of rows",
    "tiled wgmma, 128 k",
]


@pytest.mark.parametrize(
    ("name", "order", "late_copies", "late_products"),
    one_of_each(pairwise([*TIMED, *TIMED_TILES], [0, 1, 2, 3], [0, 1], [0, 1]), FAST),
)
def test_waits_and_barriers_hold_against_any_timing(
    emulated, hopper, adversary, monkeypatch, name, order, late_copies, late_products
):
    for field, value in dict(order=order, late_copies=late_copies, late_products=late_products).items():
        monkeypatch.setattr(adversary, field, value)
    # More stages than shared memory holds, so that each is used again.
    n, k, layout = (128, 1024, "tiled_64x64") if name in TIMED_TILES else (88, 656, "linear")
    weight, exact = make(4, n, k)
    rows, offsets = torch.randn(84, k, dtype=torch.bfloat16), torch.tensor([3, 3, 80, 84], dtype=torch.int32)
    out = cuda.grouped_mm(rows, weight.to_layout(layout), offsets, config=(CONFIGS | TILED_CONFIGS)[name])
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3

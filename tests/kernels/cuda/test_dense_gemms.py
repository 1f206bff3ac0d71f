"""CUDA GEMMs of one weight without offsets, run by the emulator and judged by tests/oracle.py.
Called by pytest; emulated launches replace kernels/cuda/launch.py, all else is the backend's own code.
"""

import functools

import pytest
import torch
from emulated_gemms import CONFIGS, DTYPES, FAST, TILED_CONFIGS, make
from emulator.guarded_memory import guarded
from fast_cases import one_of_each, others_slow
from oracle import KERNEL_TOLERANCE, relative_error
from pairwise import pairwise

from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import prepared
from thunder_moe.kernels.cuda.configs import GemmConfig

CLUSTERS = {
    "one block": GemmConfig("tiled_cluster", 2, 1, 1, 1, 1),
    "along N": GemmConfig("tiled_cluster", 8, 1, 2, 1, 2),
    "warpgroups along K": GemmConfig("tiled_cluster", 4, 1, 1, 4, 1),
    "two blocks": GemmConfig("tiled_cluster", 4, 1, 1, 1, 2, splits=2),
    "three blocks, two warpgroups along K": GemmConfig("tiled_cluster", 8, 1, 2, 2, 1, splits=3),
    "more blocks than blocks of tokens": GemmConfig("tiled_cluster", 2, 1, 1, 1, 1, splits=5),
}
ALL = CONFIGS | TILED_CONFIGS | CLUSTERS


@pytest.mark.parametrize("dtype", others_slow(DTYPES, DTYPES[:1], exhaustive=True))
@pytest.mark.parametrize("name", ["split 8", "wgmma", *FAST[-2:], "two blocks"])
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


@pytest.mark.parametrize(("name", "rows"), one_of_each(pairwise(list(SHARED), [5, 33, 64, 75]), ["tiled wgmma"]))
def test_few_tiles_are_shared_by_blocks(emulated, hopper, name, rows):
    """It holds also if a tile's last rows take fewer tokens than its first, and if tiles differ in the number of
    tokens."""
    weight, exact = make(1, 64, 1024)
    x = torch.randn(rows, 1024, dtype=torch.bfloat16)
    out = cuda.mm(x, weight.to_layout("tiled_64x64"), config=SHARED[name])
    assert relative_error(out, x.float() @ exact[0].T) < 5e-3


def test_no_rows(emulated):
    weight, _ = make(1, 64, 64)
    assert cuda.mm(torch.empty(0, 64, dtype=torch.bfloat16), weight).shape == (0, 64)


def test_float32_runs_on_the_reference(emulated):
    weight, exact = make(1, 64, 64)
    x = torch.randn(3, 64)
    assert relative_error(cuda.mm(x, weight, torch.ones(64)), x @ exact[0].T + 1) < 1e-5


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 33, 75])
@pytest.mark.parametrize("name", others_slow(CLUSTERS, ["three blocks, two warpgroups along K"]))
def test_a_cluster_shares_a_tile(emulated, hopper, name, rows):
    weight, exact = make(1, 192, 768, halves=2)
    weight, bias = weight.to_layout("tiled_64x64"), torch.randn(192)
    x = torch.randn(rows, 768, dtype=torch.bfloat16)
    out = cuda.mm(x, weight, bias, config=CLUSTERS[name])
    assert relative_error(out, x.float() @ exact[0].T + bias) < 5e-3


@pytest.mark.parametrize("order", others_slow([1, 3], [3]))
def test_a_cluster_whose_ring_goes_round(emulated, hopper, adversary, monkeypatch, order):
    """K is longer than the stages and does not divide evenly among the blocks, and rows come late."""
    config = GemmConfig("tiled_cluster", 2, 1, 4, 1, 8, splits=2)
    weight, exact = make(1, 320, 3584)
    assert config.stages < 3584 // 512 // 2
    monkeypatch.setattr(prepared, "append_gemm", functools.partial(prepared.append_gemm, after_gemm=True))
    monkeypatch.setattr(adversary, "order", order)
    x = torch.randn(20, 3584, dtype=torch.bfloat16)
    out = cuda.mm(x, weight.to_layout("tiled_64x64"), config=config)
    assert relative_error(out, x.float() @ exact[0].T) < 5e-3


def test_a_cluster_reads_nothing_beyond_its_operands(emulated, hopper, monkeypatch):
    weight, exact = make(1, 192, 896)
    weight = NVFP4Weight(*map(guarded, weight.to_layout("tiled_64x64").tensors()), "tiled_64x64")
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: guarded(torch.empty(*shape, dtype=self.dtype)))
    x = guarded(torch.randn(42, 896, dtype=torch.bfloat16))
    out = cuda.mm(x, weight, config=CLUSTERS["three blocks, two warpgroups along K"])
    assert relative_error(out, x.float() @ exact[0].T) < 5e-3


def test_a_cluster_is_for_one_weight(emulated, hopper):
    weight, _ = make(2, 64, 320)
    rows, offsets = torch.randn(4, 320, dtype=torch.bfloat16), torch.tensor([1, 4], dtype=torch.int32)
    weight, config = weight.to_layout("tiled_64x64"), GemmConfig("tiled_cluster", 4, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="config: .*tiled_cluster.* is for one weight"):
        cuda.grouped_mm(rows, weight, offsets, config=config)

"""Tile schedulers: any number of blocks, stream-K, counters and semaphores that are zero afterwards.
Called by pytest; emulated launches replace kernels/cuda/launch.py, all else is the backend's own code.
"""

from itertools import product

import pytest
import torch
from emulated_gemms import CONFIGS, FAST, TILED_CONFIGS, emulate_device, gemm_with_scratch, make
from fast_cases import one_of_each, others_slow
from oracle import grouped_mm, relative_error

from thunder_moe.kernels import chains
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import plan, workspace
from thunder_moe.kernels.cuda.configs import GemmConfig

SMALL_TILES = GemmConfig("tiled_mma", 1, 1, 1, 1, 1, True)
LARGE_TILES = GemmConfig("tiled_mma", 2, 1, 2, 2, 2, True)
WGMMA_TILES = GemmConfig("tiled_wgmma", 6, 1, 1, 1, 2, True)  # of which seven rows take a third
# Tiles of an expert, stages of their K, and how many of the tiles seven blocks share.
SHARED_TILES = [
    (1, 15, 1), (2, 15, 2), (3, 15, 3), (4, 15, 0), (7, 15, 0), (8, 15, 8), (12, 15, 12), (14, 15, 0), (17, 15, 10),
    (1, 5, 1), (3, 2, 0), (8, 6, 8), (12, 6, 0),
]  # fmt: skip


ENDS = (1, 20, 33, 40), (0, 40, 40, 40)  # the latter leaves blocks without work


@pytest.mark.parametrize(("name", "ends"), one_of_each(product([*CONFIGS, *TILED_CONFIGS], ENDS), FAST))
def test_result_does_not_depend_on_the_number_of_blocks(emulated, hopper, monkeypatch, name, ends):
    config, results = (CONFIGS | TILED_CONFIGS)[name], []
    weight, exact = make(4, 160 if config.layout == "linear" else 192, 320)
    weight, rows = weight.to_layout(config.layout), torch.randn(40, 320, dtype=torch.bfloat16)
    offsets = torch.tensor(ends, dtype=torch.int32)
    for blocks in (3, 7, 1000):
        emulate_device(monkeypatch, blocks)
        results.append(cuda.grouped_mm(rows, weight, offsets, config=config))
        assert torch.equal(results[-1], results[0])
        assert not workspace.semaphore_pool(rows.device).take().any()  # nothing that blocks have counted is left
    assert relative_error(results[0], grouped_mm(rows, exact, offsets)) < 5e-3


@pytest.mark.parametrize(
    ("config", "tiles", "stages", "shared"),
    [
        *((SMALL_TILES, *row) for row in SHARED_TILES[::3]),
        *others_slow((LARGE_TILES, *row) for row in SHARED_TILES[1::6]),
        *others_slow((WGMMA_TILES, *row) for row in SHARED_TILES[2::6]),
        *others_slow(
            (
                (config, *row)
                for first, config in enumerate((SMALL_TILES, LARGE_TILES, WGMMA_TILES))
                for i, row in enumerate(SHARED_TILES)
                if i % (6 if first else 3) != first
            ),
            exhaustive=True,
        ),
    ],
)
def test_blocks_share_tiles(emulated, hopper, monkeypatch, config, tiles, stages, shared):
    """Blocks share tiles if there are few, and the last round's and one more if it leaves blocks without work."""
    k, blocks = stages * 64 * config.warps_k * config.depth, 7
    k -= 64 * (config.warps_k > 1)  # the last is not full
    weight, exact = make(1, tiles * config.tile_features(swiglu=False), k)
    weight, rows, offsets = weight.to_layout("tiled_64x64"), torch.randn(7, k).bfloat16(), torch.tensor([7]).int()
    emulate_device(monkeypatch, blocks)
    out, (sums,) = gemm_with_scratch(rows, weight, offsets, config, fill=float("nan"))
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3
    assert not workspace.semaphore_pool(rows.device).take().any()
    pieces = 0 if shared == 0 else blocks if tiles > blocks else min(blocks // tiles, stages) * tiles
    # Who does not have the end of a tile leaves sums for who has.
    wanted = sum((block + 1) * shared * stages // pieces % stages > 0 for block in range(pieces))
    assert sums.view(torch.float32).view(blocks, -1).isfinite().any(1).sum() == wanted
    assert torch.equal(cuda.grouped_mm(rows, weight, offsets, config=config), out)


@pytest.mark.parametrize(
    "name",
    ["staged", *others_slow(["wgmma"], exhaustive=True), "tiled mma, shared", "tiled wgmma, two blocks of rows"],
)
def test_many_rows_are_multiplied_in_groups(emulated, hopper, monkeypatch, name):
    config = (CONFIGS | TILED_CONFIGS)[name]
    height, (n, k) = 8 * config.token_blocks, (192, 64 * config.warps_k * config.depth)
    weight, exact = make(3, n, k)
    offsets = torch.tensor([9 * height - 3, 9 * height - 2, 16 * height]).int()
    weight, rows = weight.to_layout(config.layout), torch.randn(16 * height, k).bfloat16()
    emulate_device(monkeypatch, 7)
    monkeypatch.setattr(plan, "_ROWS_BYTES", (2 * 2 * height * k, 0))
    plan.plan_gemm.cache_clear()
    out = cuda.grouped_mm(rows, weight, offsets, config=config)
    plan.plan_gemm.cache_clear()
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3


@pytest.mark.parametrize(
    "config", [SMALL_TILES, *others_slow([GemmConfig("tiled_mma", 1, 2, 2, 2, 1, True)], exhaustive=True)]
)
@pytest.mark.parametrize(("tiles", "stages"), [(1, 15), (3, 9), (8, 6)])
def test_blocks_share_tiles_of_one_row(emulated, hopper, monkeypatch, config, tiles, stages):
    """Their sums are semaphores of themselves, also those that are zero; the order of the addition is the same."""
    k, blocks = stages * 64 * config.warps_k * config.depth, 7
    weight, exact = make(3, tiles * config.tile_features(swiglu=False), k)
    weight, rows = weight.to_layout("tiled_64x64"), torch.randn(3, k).bfloat16()
    rows[1] = 0
    emulate_device(monkeypatch, blocks)
    for ends in ([1, 2, 3], [1, 1, 3]):  # all tiles have one row, or some have two
        offsets = torch.tensor(ends).int()
        out = cuda.grouped_mm(rows, weight, offsets, config=config)
        assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3
        assert not workspace.semaphore_pool(rows.device)._zeros.any()
        with monkeypatch.context() as patch:
            patch.setattr(plan, "_FEW_ROWS", 0)
            plan.plan_gemm.cache_clear()
            chains.clear()
            assert torch.equal(cuda.grouped_mm(rows, weight, offsets, config=config), out)
        plan.plan_gemm.cache_clear()
        chains.clear()

"""Launch plans of grouped GEMMs: grid, workspace, gathering, errors. Called by pytest; plans read no tensor."""

import pytest
import torch

from thunder_moe.activations import SWIGLU
from thunder_moe.kernels.cuda.configs import GemmConfig
from thunder_moe.kernels.cuda.plan import CACHE_LINE, plan_gemm
from thunder_moe.kernels.specs import GemmSpec, Target, WeightSpec

H200 = Target(torch.device("cuda", 0), 132, (9, 0))


def plan(rows=64, num_experts=8, n=1024, k=2048, config=None, **given):
    options = dict(swiglu=False, gathered=False, scaled=False, dtype=torch.bfloat16, layout="linear") | given
    spec = GemmSpec(
        rows, num_experts, n, k, options["dtype"], WeightSpec(options["layout"]), H200,
        top_k=1 if options["gathered"] else None, slot_scale=torch.float32 if options["scaled"] else None,
        activation=SWIGLU if options["swiglu"] else None,
    )  # fmt: skip
    return plan_gemm(spec, config)


def test_the_grid_has_a_block_for_each_tile_that_a_routing_may_need():
    config = GemmConfig("split", 1, 1, 4, 2, 4)  # tiles of 8 rows by 64 features
    assert plan(rows=1, config=config).blocks == 16
    assert plan(rows=8, config=config).blocks == 8 * 16  # each on an expert of its own
    assert plan(rows=64, config=config).blocks == (8 + 56 // 8) * 16
    swiglu = GemmConfig("split", 1, 2, 4, 2, 4)
    assert plan(rows=1, config=swiglu, swiglu=True).blocks == 8


def test_kernels_with_a_tile_scheduler_get_a_workspace():
    assert plan(config=GemmConfig("staged", 4, 2, 2, 1, 3)).workspace == 0
    whole = plan(layout="tiled_64x64", config=GemmConfig("tiled_mma", 1, 2, 1, 1, 1))
    assert (whole.workspace, whole.partial_sums) == (CACHE_LINE, 0)
    shared = GemmConfig("tiled_mma", 1, 2, 3, 1, 1, True)
    found = plan(layout="tiled_64x64", config=shared)
    assert found.partial_sums == 132 * 3 * 2 * 512
    assert found.workspace - CACHE_LINE >= 132 * 3 * 4
    assert found.workspace % CACHE_LINE == 0
    assert found.blocks == 132  # and never more than multiprocessors: blocks that are waited for have to run
    too_long = plan(layout="tiled_64x64", k=2**20 + 64, n=64, config=shared)
    assert (too_long.workspace, too_long.partial_sums) == (CACHE_LINE, 0)


def test_clusters_are_whole():
    config = GemmConfig("tiled_cluster", 8, 1, 3, 1, 2, splits=2)
    found = plan(layout="tiled_64x64", rows=100, num_experts=1, n=64 * 14, k=2048, config=config)
    assert found.blocks == 2 * 5 * 2  # two tiles along M, five along N
    assert (found.workspace, found.partial_sums) == (0, 0)


def test_what_is_gathered_beforehand():
    mma, wgmma = GemmConfig("tiled_mma", 1, 2, 1, 1, 1), GemmConfig("tiled_wgmma", 4, 1, 2, 1, 1)
    assert plan(layout="tiled_64x64", config=mma, gathered=True).gather is None
    assert plan(layout="tiled_64x64", config=wgmma).gather is None
    assert plan(layout="tiled_64x64", config=wgmma, gathered=True).gather == ("gather_rows", (64, 2048))
    linear = GemmConfig("wgmma", 8, 1, 2, 1, 3)
    assert plan(config=linear, k=2064).gather == ("order_rows", (64 + 64, 2176))  # a tile, and whole chunks of k


def test_only_weights_that_fit_are_read_once():
    mma = GemmConfig("tiled_mma", 1, 2, 1, 1, 1)
    assert plan(layout="tiled_64x64", rows=1, config=mma).read_once
    assert not plan(layout="tiled_64x64", rows=8, n=16384, k=8192, config=mma).read_once
    assert plan(layout="tiled_64x64", rows=8, n=16384, k=8192, config=GemmConfig("tiled_mma", 2, 2, 1, 1, 1)).read_once


def test_groups_of_rows_fit_l2():
    wgmma = GemmConfig("tiled_wgmma", 32, 1, 2, 1, 1)
    assert plan(layout="tiled_64x64", n=28672, k=4096, config=wgmma).row_tiles * 256 * 4096 * 2 == 16 << 20
    assert plan(layout="tiled_64x64", n=2048, k=4096, config=wgmma).row_tiles * 256 * 4096 * 2 == 8 << 20
    assert plan(layout="tiled_64x64", n=64, k=2**20, config=wgmma).row_tiles == 1


@pytest.mark.parametrize(("rows", "num_experts", "n"), [(2**24, 8, 16384), (2**24, 1024, 16)])
def test_more_tiles_than_an_int32_counts_are_refused(rows, num_experts, n):
    config = GemmConfig("split", 1, 1, 1, 8, 4)
    with pytest.raises(
        ValueError, match=rf"activation: got {rows} rows, {num_experts} experts and {n} output features"
    ):
        plan(rows=rows, num_experts=num_experts, n=n, config=config)

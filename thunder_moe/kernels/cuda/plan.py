"""The launch plan of a grouped GEMM: configuration, kernel, grid and workspace, computed once per shape and device.
Called by prepared.py, low_rank.py, router.py and operators.py; calls configs.py. It reads no tensor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from thunder_moe.kernels.cuda.configs import BLOCK_BYTES, CHUNK, TILED, GemmConfig, choose_config, invariant_parts
from thunder_moe.kernels.specs import GemmSpec

CACHE_LINE = 32  # int32 in a cache line: the tile counter has one of its own, in front of the semaphores
# Loading weights with L2 evict_first saves the time to write back evicted lines. Above so many bytes of weights that
# time is hidden, and the copies themselves are slower, unless the tensor cores are the limit (H200).
_READ_ONCE_BYTES = 300_000_000
# Rows of an expert in a group that stays in L2 (`tile_at`), beside small weights and beside others. Without groups,
# with 8 MiB and with 16, us on an H100: (4096, 14336) times 8192 rows 2086, 1287, 1283; (28672, 4096) times 8192 rows
# of each of 8 experts 22530, 23882, 22730; (5120, 2048) times 8192 rows 278, 247, 277.
_ROWS_BYTES = 8 << 20, 16 << 20
_SMALL_WEIGHT_BYTES = 16 << 20
_FEW_ROWS = 32  # up to so many, no more than there are experts, tiles have one row as a rule


@dataclass(frozen=True)
class GemmPlan:
    """The part of a launch that depends on shapes and dtypes alone.

    Attributes:
        config: the kernel and its template parameters.
        sources: the files of the kernel's source.
        expression: the kernel's C++ name.
        threads: the number of threads of a block.
        shared_bytes: dynamic shared memory of a block.
        blocks: the number of blocks of the grid, before it is limited to blocks that run at once.
        gather: the kernel that gathers the rows beforehand, and the shape of its output; None if the GEMM does.
        workspace: int32 of the tile counter, the semaphores and the sums of single rows; 0 for kernels without a tile
            scheduler.
        row_sums: where the sums of single rows begin in the workspace; 0 for none.
        partial_sums: float32 of workspace for tiles that blocks share; 0 where they share none.
        read_once: True if weights are loaded with L2 evict_first.
        row_tiles: the number of row tiles of an expert in a group, if it has more than three times as many.
    """

    config: GemmConfig
    sources: tuple[Path, ...]
    expression: str
    threads: int
    shared_bytes: int
    blocks: int
    gather: tuple[str, tuple[int, int]] | None
    workspace: int
    row_sums: int
    partial_sums: int
    read_once: bool
    row_tiles: int


@functools.lru_cache(maxsize=4096)
def plan_gemm(spec: GemmSpec, config: GemmConfig | None = None) -> GemmPlan:
    """Return the plan for rows (M, K) and weights (E, N, K).

    Args:
        spec: the spec of the GEMM.
        config: a configuration instead of the choice of `choose_config`.

    Raises:
        ValueError: the layout is not for this device, or there are more tiles than an int32 counts.
    """
    rows, num_experts, n, k, features = spec.rows, spec.num_experts, spec.n, spec.k, spec.features
    swiglu, gathered, scaled = spec.activation is not None, spec.top_k is not None, spec.slot_scale is not None
    multiprocessors, capability = spec.target.multiprocessors, spec.target.capability
    format = spec.weight.format
    config = choose_config(spec) if config is None else replace(config, format=format).fitted(k)
    if config.layout == TILED and capability != (9, 0):
        raise ValueError(
            f"layout: {TILED!r} is for devices of compute capability (9, 0), this one has {capability};"
            " use to_layout_(model) or NVFP4Weight.to_layout('linear')"
        )
    if spec.batch_invariant and config.parts_of_k != (parts := invariant_parts(spec)):
        raise ValueError(f"config: got {config}, wanted parts_of_k = {parts}, as batch_invariant asks for this weight")
    if not config.serves(num_experts, k) or (config.kernel == "tiled_cluster" and (swiglu or gathered or scaled)):
        raise ValueError(f"config: {config} is for one weight without routing or SwiGLU, and for another K than {k}")
    gather = None
    if config.kernel == "wgmma":  # in another order of k, padded to whole chunks and a tile
        gather = "order_rows", (rows + 8 * config.token_blocks, -(-k // CHUNK) * CHUNK)
    elif config.kernel == "tiled_wgmma" and gathered:
        gather = "gather_rows", (rows, k)
    # No routing needs more tiles: every expert that has rows starts one, the other rows fill them.
    live = min(rows, num_experts)
    tiles_m = live + (rows - live) // (8 * config.token_blocks)
    tiles = tiles_m * -(-features // config.tile_features(swiglu))
    # Offsets that decrease may give every expert all rows; the kernels count the tiles of that, too.
    if tiles >= 2**30 or num_experts * -(-rows // (8 * config.token_blocks)) >= 2**31:
        raise ValueError(
            f"activation: got {rows} rows, {num_experts} experts and {features} output features, wanted fewer than"
            " 2**30 tiles of them"
        )
    blocks, workspace, row_sums, partial_sums = tiles, 0, 0, 0
    if config.kernel == "tiled_cluster":
        blocks *= config.splits
    elif config.layout == TILED:
        semaphores = 4 * config.warps_n * multiprocessors if config.stream_k else 0  # one for each warp along N
        workspace = CACHE_LINE + -(-semaphores // CACHE_LINE) * CACHE_LINE
    if config.stream_k:
        partial_sums = multiprocessors * config.partial_sums
        if config.kernel == "tiled_mma" and rows <= _FEW_ROWS and rows <= num_experts:
            row_sums, workspace = workspace, workspace + multiprocessors * config.warps_n * config.row_blocks * 64
        blocks = min(tiles * (k // 64), multiprocessors)
    compute_bound = config.token_blocks > 1
    weight_bytes = n * k * BLOCK_BYTES[format] // 64**2
    few_weights = live * weight_bytes <= _READ_ONCE_BYTES
    rows_bytes = _ROWS_BYTES[weight_bytes > _SMALL_WEIGHT_BYTES]
    return GemmPlan(
        config,
        config.sources,
        config.expression(spec.dtype, swiglu, k, scaled),
        config.threads,
        config.shared_bytes,
        blocks,
        gather,
        workspace,
        row_sums,
        partial_sums,
        read_once=config.kernel == "tiled_mma" and (compute_bound or few_weights),
        row_tiles=max(rows_bytes // (16 * config.token_blocks * max(k, 1)), 1),
    )

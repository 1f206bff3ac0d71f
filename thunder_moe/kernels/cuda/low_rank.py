"""GEMMs of 4-bit weights fused with a LoRA adapter's, if a kernel serves them.
Called by kernels/cuda/training.py; calls operators.py beside it, also for src/gather_low_rank.cu.

Legend: M rows, E experts, N output and K input features, R rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.arguments import pointer
from thunder_moe.kernels.cuda import operators
from thunder_moe.kernels.cuda.arguments import GatherLowRankArguments, LinearArguments
from thunder_moe.kernels.cuda.configs import COMMON, TILED, GemmConfig, most_shared_bytes
from thunder_moe.kernels.cuda.launch import launch
from thunder_moe.kernels.cuda.linear import MAX_EXPERTS, serves_rank
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.operands import aligned, operands_of, target, weight_spec
from thunder_moe.kernels.cuda.plan import plan_gemm
from thunder_moe.kernels.specs import GemmSpec

GATHER = (COMMON, *(COMMON.with_name(name) for name in ("ptx.cuh", "linear.cuh", "gather_low_rank.cu")))
_GEMM = "f16a_nvfp4weight_grouped_mm_low_rank"
_DGRAD_CONFIG = GemmConfig("tiled_wgmma", 24, 1, 3, 1, 1)
_ROWS_IN_REGISTERS = 256  # of an expert, from which on the gradient of the rows transposes weights in registers
_TILE_ROWS, _STAGE_K, _STAGES = 128, 64, (4, 3)  # kTileRows, kStageK; as many as shared memory holds
_TILES_BYTES = 8208  # of `ExpertTiles`, static shared memory
# If registers do not suffice, ptxas serialises the products (its warning C7512): with two blocks of weight rows and
# ten of tokens or more, and at ranks above 48 with more blocks of tokens than these, by warpgroups along N. H200, us of
# such a configuration and of `for_adapter`'s, and of the GEMM alone: Qwen3-235B-A22B's down, 256 rows an expert, rank
# 16, 2749, 646, 698, rank 64 2766, 671, 751; OLMoE's gate and up, 64 rows, 81, 70, 72 and 87, 74, 73; Qwen3-30B-A3B's
# gate and up, 1024 rows, rank 64, 1520, 1419, 1364, the gradient of its rows 1801, 1770.
_MOST_TOKENS, _HIGH_RANK = {3: 22, 4: 10}, 48


def grouped_mm(
    rows: Tensor, weight: NVFP4Weight, offsets: Tensor, inner: Tensor, b: Tensor, *, config: GemmConfig | None = None
) -> Tensor | None:
    """Multiply (M, K), and add inner (M, R) times b (E, N, R): -> (M, N), undefined past the end; None if unserved."""
    (experts, n, k), m, rank = weight.shape, rows.shape[0], inner.shape[1]
    where = target(rows.device)
    served = weight.layout == TILED and where.capability == (9, 0) and experts <= MAX_EXPERTS
    if m == 0 or n == 0 or not (served and serves_rank(rows.dtype, n, k, rank)):
        return None
    plan = plan_gemm(GemmSpec(m, experts, n, k, rows.dtype, weight_spec(weight), where), config)
    if plan.config.kernel != "tiled_wgmma" or plan.config.stream_k:
        return None
    config = config or for_adapter(plan.config, rank)
    rows, inner, b = (aligned(each.detach()) for each in (rows, inner, b))
    return operators.run(_GEMM, rows, operands_of(weight), offsets.contiguous(), inner, b, layout=TILED, config=config)


def dgrad(
    grad: Tensor, weight: NVFP4Weight, offsets: Tensor, outer: Tensor, a: Tensor, *, config: GemmConfig | None = None
) -> Tensor | None:
    """Multiply (M, N), and add outer (M, R) times a (E, R, K): -> (M, K), undefined past the end; None if unserved.

    `config` overrides the choice of the kernel that transposes weights in registers; per-row scales have no kernel.
    """
    (experts, n, k), m, rank = weight.shape, grad.shape[0], outer.shape[1]
    packed = weight_spec(weight)
    served = target(grad.device).capability == (9, 0) and experts <= MAX_EXPERTS and packed.layout in (LINEAR, TILED)
    if m == 0 or k == 0 or not (served and serves_rank(grad.dtype, n, k, rank)):
        return None
    operands = operands_of(weight), offsets.contiguous()
    in_registers = packed.layout == TILED and not packed.per_row_scale and (config or m / experts >= _ROWS_IN_REGISTERS)
    grad, outer, a = (aligned(each.detach()) for each in (grad, outer, a.mT if in_registers else a))
    if in_registers:
        options: dict[str, Any] = dict(layout=TILED, config=config or for_adapter(_DGRAD_CONFIG, rank), transposed=True)
        out: Tensor = operators.run(_GEMM, grad, *operands, outer, a, **options)
    else:
        name = "f16a_nvfp4weight_scaled_grouped_mm_dgrad"
        out = operators.run(name, grad, *operands, outer, a, layout=weight.layout)
    return out


def for_adapter(config: GemmConfig, rank: int) -> GemmConfig:
    """Return the configuration of a GEMM by wgmma, or one like it whose sums leave registers for an adapter."""
    tokens, rows, groups = config.token_blocks, config.row_blocks, config.warps_n
    if rows > 1 and tokens >= 10:
        rows, groups = 1, 4 if tokens <= 12 else 3
    if rank > _HIGH_RANK:
        tokens = min(tokens, _MOST_TOKENS.get(groups, tokens))
    return replace(config, token_blocks=tokens, row_blocks=rows, warps_n=groups)


def gather(tokens: Tensor, row_slot: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Gather tokens (T, K) by row_slot (M,); multiply by (E, R, K): -> rows (M, K), product (M, R), both undefined past
    the end; None if no kernel does both."""
    (count, k), m, (experts, rank, _) = tokens.shape, row_slot.shape[0], weight.shape
    if m == 0 or experts > MAX_EXPERTS or not serves_rank(tokens.dtype, k, k, rank):
        return None
    transposed = not weight.is_contiguous() and weight.mT.is_contiguous()
    tokens, weight = (aligned(each.detach()) for each in (tokens, weight.mT if transposed else weight))
    row_slot, offsets = row_slot.contiguous(), offsets.contiguous()
    rows, out = tokens.new_empty(m, k), tokens.new_empty(m, rank)
    of = LinearArguments(
        *map(pointer, (tokens, weight, offsets, out)), m, 0, experts, rank, k, offsets.dtype == torch.int64, False
    )
    argument = GatherLowRankArguments(of, *map(pointer, (row_slot, rows)), m // count)
    blocks, where = -(-rank // 16), target(tokens.device)
    stage, most = _STAGE_K * 2 * (_TILE_ROWS + 16 * blocks), most_shared_bytes(where.capability) - _TILES_BYTES
    stages = next(stages for stages in _STAGES if stages * stage <= most)
    name = instance("gather_low_rank", tokens.dtype == torch.bfloat16, transposed, blocks, stages)
    live, shared = min(m, experts), stages * stage
    tiles = live + (m - live) // _TILE_ROWS  # the most that a routing can have
    launch(GATHER, name, 256, shared, tiles, argument, tokens.device, where.multiprocessors)
    return rows, out

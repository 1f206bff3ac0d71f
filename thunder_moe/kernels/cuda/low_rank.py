"""GEMMs of 4-bit weights with those of a LoRA adapter in the same kernel, where there is one.
Called by kernels/cuda/training.py; calls prepared.py and backend.py beside it, for src/gather_low_rank.cu too.

Legend: M rows, E experts, N output and K input features, R rank.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.arguments import pointer
from thunder_moe.kernels.cuda import backend
from thunder_moe.kernels.cuda.arguments import GatherLowRankArguments, LinearArguments
from thunder_moe.kernels.cuda.chain import ChainBuilder, launched
from thunder_moe.kernels.cuda.configs import COMMON, TILED, GemmConfig, most_shared_bytes
from thunder_moe.kernels.cuda.launch import launch
from thunder_moe.kernels.cuda.linear import MAX_EXPERTS, serves_rank
from thunder_moe.kernels.cuda.plan import plan_gemm
from thunder_moe.kernels.cuda.prepared import (
    Adapter,
    PreparedGemm,
    append_gemm,
    columns_of,
    prepare_dgrad,
    weight_operands,
)
from thunder_moe.kernels.specs import DgradSpec, GemmSpec

__all__ = ["GATHER", "dgrad", "for_adapter", "gather", "grouped_mm", "prepare_with_adapter"]

GATHER = (COMMON, *(COMMON.with_name(name) for name in ("ptx.cuh", "linear.cuh", "gather_low_rank.cu")))
_DGRAD_CONFIG = GemmConfig("tiled_wgmma", 24, 1, 3, 1, 1)
_ROWS_IN_REGISTERS = 256  # of an expert, from which on the gradient of the rows transposes weights in registers
_TILE_ROWS, _STAGE_K, _STAGES = 128, 64, (4, 3)  # kTileRows, kStageK; as many as shared memory holds
_TILES_BYTES = 8208  # of `ExpertTiles`, static shared memory
# Where registers do not suffice, ptxas serialises the products (its warning C7512): with two blocks of weight rows and
# ten of tokens or more, and at ranks above 48 with more blocks of tokens than these, by warpgroups along N. H200, us of
# such a configuration and of `for_adapter`'s, and of the GEMM alone: Qwen3-235B-A22B's down, 256 rows an expert, rank
# 16, 2749, 646, 698, rank 64 2766, 671, 751; OLMoE's gate and up, 64 rows, 81, 70, 72 and 87, 74, 73; Qwen3-30B-A3B's
# gate and up, 1024 rows, rank 64, 1520, 1419, 1364, the gradient of its rows 1801, 1770.
_MOST_TOKENS, _HIGH_RANK = {3: 22, 4: 10}, 48


@functools.lru_cache(maxsize=4096)
def prepare_with_adapter(spec: GemmSpec, config: GemmConfig, rank: int, transposed: bool) -> PreparedGemm:
    """The chain of a grouped GEMM plus ``inner x b``, whose products end in its sums before they are rounded.

    Args:
        spec: of the GEMM alone; its kernel is "tiled_wgmma", without stream-K.
        config: of the GEMM.
        rank: R, one that `serves_rank` serves.
        transposed: the weight is (E, K, N).
    """
    chain, (rows, experts, n, k) = ChainBuilder(spec.target.device), (spec.rows, spec.num_experts, spec.n, spec.k)
    x = chain.operand((rows, k), spec.dtype)
    weight = weight_operands(chain, experts, *((k, n) if transposed else (n, k)), spec.weight)
    offsets = chain.operand((experts,), torch.int32, align=1)
    inner, b = chain.operand((rows, rank), spec.dtype), chain.operand((experts, n, rank), spec.dtype)
    out, plan = chain.result((rows, columns_of(spec)), spec.dtype), plan_gemm(spec, config)
    append_gemm(chain, spec, plan, x, weight, offsets, out=out, adapter=Adapter(inner, b, rank, transposed))
    return PreparedGemm(chain.build(), plan.config.layout, spec.features)


def grouped_mm(
    rows: Tensor, weight: NVFP4Weight, offsets: Tensor, inner: Tensor, b: Tensor, *, config: GemmConfig | None = None
) -> Tensor | None:
    """(M, K), inner (M, R), b (E, N, R) -> (M, N), rows past the end undefined; None where no kernel does both."""
    (experts, n, k), m, rank = weight.shape, rows.shape[0], inner.shape[1]
    target = backend.target(rows.device)
    served = weight.layout == TILED and target.capability == (9, 0) and experts <= MAX_EXPERTS
    if m == 0 or n == 0 or not (served and serves_rank(rows.dtype, n, k, rank)):
        return None
    spec = GemmSpec(m, experts, n, k, rows.dtype, backend.weight_spec(weight), target)
    plan = plan_gemm(spec, config)
    if plan.config.kernel != "tiled_wgmma" or plan.config.stream_k:
        return None
    run = prepare_with_adapter(spec, config or for_adapter(plan.config, rank), rank, False)
    rows, inner, b = (backend.aligned(each.detach()) for each in (rows, inner, b))
    return run(rows, backend.tensors_of(weight), offsets.contiguous(), inner, b)


def dgrad(
    grad: Tensor, weight: NVFP4Weight, offsets: Tensor, outer: Tensor, a: Tensor, *, config: GemmConfig | None = None
) -> Tensor | None:
    """(M, N), outer (M, R), a (E, R, K) -> (M, K), rows past the end undefined; None where no kernel does both.

    config: of the kernel that transposes weights in registers, in place of the choice; per-row scales have none.
    """
    (experts, n, k), m, rank = weight.shape, grad.shape[0], outer.shape[1]
    target, packed = backend.target(grad.device), backend.weight_spec(weight)
    served = target.capability == (9, 0) and experts <= MAX_EXPERTS and packed.layout in (LINEAR, TILED)
    if m == 0 or k == 0 or not (served and serves_rank(grad.dtype, n, k, rank)):
        return None
    operands = backend.tensors_of(weight)
    if packed.layout == TILED and not packed.per_row_scale and (config or m / experts >= _ROWS_IN_REGISTERS):
        config = config or for_adapter(_DGRAD_CONFIG, rank)
        run = prepare_with_adapter(GemmSpec(m, experts, k, n, grad.dtype, packed, target), config, rank, True)
        grad, outer, b = (backend.aligned(each.detach()) for each in (grad, outer, a.mT))
        return run(grad, operands, offsets.contiguous(), outer, b)
    spec = DgradSpec(m, experts, n, k, grad.dtype, packed, target, rank)
    grad, outer, a = (backend.aligned(each.detach()) for each in (grad, outer, a))
    out: Tensor = launched(prepare_dgrad(spec), grad, *operands, offsets.contiguous(), outer, a)
    return out


def for_adapter(config: GemmConfig, rank: int) -> GemmConfig:
    """The configuration of a GEMM by wgmma, or one like it whose sums leave registers for an adapter."""
    tokens, rows, groups = config.token_blocks, config.row_blocks, config.warps_n
    if rows > 1 and tokens >= 10:
        rows, groups = 1, 4 if tokens <= 12 else 3
    if rank > _HIGH_RANK:
        tokens = min(tokens, _MOST_TOKENS.get(groups, tokens))
    return replace(config, token_blocks=tokens, row_blocks=rows, warps_n=groups)


def gather(tokens: Tensor, row_slot: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Tokens (T, K), row_slot (M,), weight (E, R, K) -> the rows (M, K) and their product (M, R), both undefined past
    the end; None where no kernel does both."""
    (count, k), m, (experts, rank, _) = tokens.shape, row_slot.shape[0], weight.shape
    if m == 0 or experts > MAX_EXPERTS or not serves_rank(tokens.dtype, k, k, rank):
        return None
    transposed = not weight.is_contiguous() and weight.mT.is_contiguous()
    tokens, weight = (backend.aligned(each.detach()) for each in (tokens, weight.mT if transposed else weight))
    row_slot, offsets = row_slot.contiguous(), offsets.contiguous()
    rows, out = tokens.new_empty(m, k), tokens.new_empty(m, rank)
    of = LinearArguments(
        *map(pointer, (tokens, weight, offsets, out)), m, 0, experts, rank, k, offsets.dtype == torch.int64, False
    )
    argument = GatherLowRankArguments(of, *map(pointer, (row_slot, rows)), m // count)
    bf16, blocks = str(tokens.dtype == torch.bfloat16).lower(), -(-rank // 16)
    target = backend.target(tokens.device)
    stage, most = _STAGE_K * 2 * (_TILE_ROWS + 16 * blocks), most_shared_bytes(target.capability) - _TILES_BYTES
    stages = next(stages for stages in _STAGES if stages * stage <= most)
    name = f"gather_low_rank<{bf16}, {str(transposed).lower()}, {blocks}, {stages}>"
    live, shared = min(m, experts), stages * stage
    tiles = live + (m - live) // _TILE_ROWS  # as many as any routing has
    launch(GATHER, name, 256, shared, tiles, argument, tokens.device, target.multiprocessors)
    return rows, out

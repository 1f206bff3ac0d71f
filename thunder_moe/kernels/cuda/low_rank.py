"""GEMMs of 4-bit weights with those of a LoRA adapter in the same kernel, where there is one.
Called by kernels/cuda/training.py; calls prepared.py and backend.py beside it, for src/gather_low_rank.cu too.

Legend: M rows, E experts, N output and K input features, R rank.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.arguments import pointer
from thunder_moe.kernels.cuda import backend, launch
from thunder_moe.kernels.cuda.arguments import GatherLowRankArguments, LinearArguments, LowRankGemmArguments
from thunder_moe.kernels.cuda.configs import COMMON, TILED, GemmConfig, most_shared_bytes
from thunder_moe.kernels.cuda.linear import MAX_EXPERTS, serves_rank
from thunder_moe.kernels.cuda.plan import GemmPlan, plan_gemm
from thunder_moe.kernels.cuda.prepared import GemmLaunch, dgrad_launch

__all__ = ["DGRAD", "GATHER", "LowRankGemmLaunch", "dgrad", "for_adapter", "gather", "grouped_mm"]

GATHER = (COMMON, *(COMMON.with_name(name) for name in ("ptx.cuh", "linear.cuh", "gather_low_rank.cu")))
DGRAD = COMMON.with_name("tiled_dgrad.cu")
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


class LowRankGemmLaunch(GemmLaunch):
    """A grouped GEMM plus ``inner x b``, whose products end in the sums of the GEMM before they are rounded.

    Args:
        plan: of the GEMM alone; its kernel is "tiled_wgmma", without stream-K.
        rows, num_experts, n, k, dtype, per_row, device, facts, config: as of `GemmLaunch`.
        rank: R, one that `serves_rank` serves.
        transposed: the weight is (E, K, N).
    """

    def __init__(
        self, rows: int, num_experts: int, n: int, k: int, rank: int, dtype: torch.dtype, per_row: bool,
        device: torch.device, facts: tuple[int, tuple[int, int]], config: GemmConfig | None, transposed: bool = False,
    ) -> None:  # fmt: skip
        self._rank, self._bf16, self._transposed = rank, str(dtype == torch.bfloat16).lower(), transposed
        super().__init__(rows, num_experts, n, k, None, dtype, TILED, per_row, None, None, None, device, facts, config)

    def _launcher(self, plan: GemmPlan, multiprocessors: int | None) -> launch.Launcher:
        config = plan.config
        numbers = config.token_blocks, config.row_blocks, config.warps_n, config.depth, config.stages
        kernel, sources = "low_rank_tiled_wgmma", plan.sources
        if self._transposed:
            kernel, sources = "low_rank_tiled_dgrad", (*sources, DGRAD)
        name = f"{kernel}<{self._bf16}, {', '.join(map(str, numbers))}, {-(-self._rank // 16)}>"
        return launch.launcher(
            sources, name, plan.threads, plan.shared_bytes, plan.blocks, LowRankGemmArguments, self._index,
            multiprocessors,
        )  # fmt: skip

    def add(
        self, rows: Tensor, weight: tuple[Tensor, Tensor, Tensor | None], offsets: Tensor, inner: Tensor, b: Tensor
    ) -> Tensor:
        """(M, K), inner (M, R), b (E, N, R) -> (M, N); contiguous, inner and b aligned to 16 bytes."""
        index = self._index
        if launch.current_device() != index:
            with torch.cuda.device(index):
                return self.add(rows, weight, offsets, inner, b)
        gemm = self.prepare(rows, *weight, offsets, None, None, None)
        assert self._map_rows is not None
        of_inner = launch.tensor_map(inner.data_ptr(), rows.shape[0], self._rank, self._map_rows[2])
        of_rows, *fields = gemm.fields
        self.launcher(launch.current_stream(index), of_rows, of_inner, *fields, b.data_ptr(), self._rank)
        return gemm.out


low_rank_launch = functools.lru_cache(maxsize=4096)(LowRankGemmLaunch)


def grouped_mm(
    rows: Tensor, weight: NVFP4Weight, offsets: Tensor, inner: Tensor, b: Tensor, *, config: GemmConfig | None = None
) -> Tensor | None:
    """(M, K), inner (M, R), b (E, N, R) -> (M, N), rows past the end undefined; None where no kernel does both."""
    (experts, n, k), m, rank = weight.shape, rows.shape[0], inner.shape[1]
    facts: Any = backend._device_facts(rows.device)
    served = weight.layout == TILED and facts[1] == (9, 0) and experts <= backend.MAX_EXPERTS
    if m == 0 or n == 0 or not (served and serves_rank(rows.dtype, n, k, rank)):
        return None
    plan = plan_gemm(m, experts, n, k, False, False, False, rows.dtype, TILED, *facts, "nvfp4", config)
    if plan.config.kernel != "tiled_wgmma" or plan.config.stream_k:
        return None
    config = config or for_adapter(plan.config, rank)
    per_row = weight.global_scale.ndim == 2
    run = low_rank_launch(m, experts, n, k, rank, rows.dtype, per_row, rows.device, facts, config)
    rows, inner, b = (_aligned(each.detach()) for each in (rows, inner, b))
    return run.add(rows, backend._tensors(weight, TILED), offsets.contiguous(), inner, b)


def dgrad(
    grad: Tensor, weight: NVFP4Weight, offsets: Tensor, outer: Tensor, a: Tensor, *, config: GemmConfig | None = None
) -> Tensor | None:
    """(M, N), outer (M, R), a (E, R, K) -> (M, K), rows past the end undefined; None where no kernel does both.

    config: of the kernel that transposes weights in registers, in place of the choice; per-row scales have none.
    """
    (experts, n, k), m, rank = weight.shape, grad.shape[0], outer.shape[1]
    facts: Any = backend._device_facts(grad.device)
    served = facts[1] == (9, 0) and experts <= backend.MAX_EXPERTS and weight.layout in (LINEAR, TILED)
    if m == 0 or k == 0 or not (served and serves_rank(grad.dtype, n, k, rank)):
        return None
    tiled, per_row = weight.layout == TILED, weight.global_scale.ndim == 2
    if tiled and not per_row and (config or m / experts >= _ROWS_IN_REGISTERS):
        config = config or for_adapter(_DGRAD_CONFIG, rank)
        of_tiles = low_rank_launch(m, experts, k, n, rank, grad.dtype, per_row, grad.device, facts, config, True)
        grad, outer, b = (_aligned(each.detach()) for each in (grad, outer, a.mT))
        return of_tiles.add(grad, backend._tensors(weight, TILED), offsets.contiguous(), outer, b)
    run = dgrad_launch(m, experts, n, k, grad.dtype, tiled, per_row, grad.device, facts, "nvfp4", rank)
    grad, outer, a = (_aligned(each.detach()) for each in (grad, outer, a))
    out: Tensor = run(grad, *backend._tensors(weight, weight.layout), offsets.contiguous(), outer, a)
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
    tokens, weight = _aligned(tokens.detach()), _aligned((weight.mT if transposed else weight).detach())
    row_slot, offsets = row_slot.contiguous(), offsets.contiguous()
    rows, out = tokens.new_empty(m, k), tokens.new_empty(m, rank)
    of = LinearArguments(
        *map(pointer, (tokens, weight, offsets, out)), m, 0, experts, rank, k, offsets.dtype == torch.int64, False
    )
    argument = GatherLowRankArguments(of, *map(pointer, (row_slot, rows)), m // count)
    bf16, blocks = str(tokens.dtype == torch.bfloat16).lower(), -(-rank // 16)
    multiprocessors, capability = backend._device_facts(tokens.device)
    stage, most = _STAGE_K * 2 * (_TILE_ROWS + 16 * blocks), most_shared_bytes(capability) - _TILES_BYTES
    stages = next(stages for stages in _STAGES if stages * stage <= most)
    name = f"gather_low_rank<{bf16}, {str(transposed).lower()}, {blocks}, {stages}>"
    live, shared = min(m, experts), stages * stage
    tiles = live + (m - live) // _TILE_ROWS  # as many as any routing has
    backend._launch(GATHER, name, 256, shared, tiles, argument, tokens.device, multiprocessors)
    return rows, out


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

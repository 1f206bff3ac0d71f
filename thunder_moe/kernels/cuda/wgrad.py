"""The gradient of experts' weights, added to a float32 tensor or written, by the kernels of src/wgrad_*.cu.
Called by kernels/cuda/training.py and recipes.py; calls launch.py and linear.py beside it.

Legend: M rows sorted by expert, E experts, N out_features, K in_features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thunder_moe.kernels.arguments import DTYPE_CODES, pointer
from thunder_moe.kernels.cuda.arguments import (
    RankWgradArguments,
    ScaledWgradArguments,
    TmaWgradArguments,
    WgradArguments,
)
from thunder_moe.kernels.cuda.configs import COMMON, most_shared_bytes
from thunder_moe.kernels.cuda.launch import launch, map_of
from thunder_moe.kernels.cuda.linear import KERNELS, kernel_for, reads_eight
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.operands import aligned, target
from thunder_moe.kernels.slow_paths import warn_once

__all__ = ["KERNELS", "MMA", "RANK", "WGMMA", "rank_wgrad", "scaled_wgrad", "wgrad"]

_PTX, _WGRAD = COMMON.with_name("ptx.cuh"), COMMON.with_name("wgrad.cuh")
_WGMMA = (COMMON.with_name("wgmma.cuh"), COMMON.with_name("wgmma_shared.cuh"))
WGMMA = (COMMON, _PTX, *_WGMMA, _WGRAD, COMMON.with_name("wgrad_wgmma.cu"))
MMA = (COMMON, _PTX, _WGRAD, COMMON.with_name("wgrad_mma.cu"))
RANK = (COMMON, _PTX, _WGRAD, COMMON.with_name("rank_wgrad.cu"))
MAX_EXPERTS = 1024  # kMostExperts
_WGMMA_TILE, _STAGE_ROWS = 128, 64  # kTileN, kStageRows
_STAGES = {256: 4, 192: 5, 128: 6}  # of a tile of so many columns of K
_MMA_TILE, _MMA_SHARED = 128, 4 * 2 * 32 * 128 * 2  # kMmaTile; kMmaStages of both operands
_ANY_TILE = 128
_RANK_STAGES = (4, 3)  # of "rank_wgrad": as many as shared memory holds
_ORDER_BYTES = 12304  # of `ExpertOrder`, static shared memory
_FEW_ROWS = 384  # of an expert
_SCALED_ROWS = 512  # of an expert, from which on tiles of E4M3 have 192 columns


def wgrad(
    x: Tensor, grad: Tensor, offsets: Tensor, out: Tensor, accumulate: bool, *, kernel: str | None = None,
    columns: int | None = None,
) -> None:  # fmt: skip
    """Write each expert's grad.T @ x to out (E, N, K), or add it, rounded once; rows x (M, K), gradient (M, N), offsets
    (E,).

    Args:
        x, grad: of one dtype, float32, bfloat16 or float16; M, N and K positive.
        offsets: int32 or int64 row ends.
        out: contiguous; float32, or the rows' dtype if nothing is added.
        accumulate: True to add. Otherwise `out` is not read, and experts without rows get zeros.
        kernel: one of `KERNELS`, by default the fastest that takes the operands: "wgmma" (SM90) and "mma" take 16-bit
            rows of 16-byte multiples.
        columns: the number of columns of K in a tile of "wgmma": 256, 192 or 128.
    """
    x, grad, offsets = x.detach().contiguous(), grad.detach().to(x.dtype).contiguous(), offsets.contiguous()
    where = target(x.device)
    kernel = kernel or _kernel(x, grad, out, where.capability)
    if kernel != "any":
        x, grad = aligned(x), aligned(grad)
    (rows, k), n = x.shape, grad.shape[1]
    tile_n = tile_k = _ANY_TILE
    bf16, threads, shared = x.dtype == torch.bfloat16, 256, 0
    sources: tuple[Path, ...] = MMA
    name = instance("wgrad_any", DTYPE_CODES[x.dtype])
    if kernel == "wgmma":
        tile_n, tile_k = _WGMMA_TILE, columns or _columns(k, rows / offsets.shape[0], out.dtype)
        stages = _STAGES[tile_k]
        sources, threads, name = WGMMA, 384, instance("wgrad_wgmma", bf16, tile_k, stages)
        shared = 1024 + stages * (tile_n + tile_k) * 2 * _STAGE_ROWS
    elif kernel == "mma":
        tile_n = tile_k = _MMA_TILE
        name, shared = instance("wgrad_mma", bf16), _MMA_SHARED
    for first in range(0, offsets.shape[0], MAX_EXPERTS):
        of_part = out[first : first + MAX_EXPERTS]
        experts = of_part.shape[0]
        argument: Any = WgradArguments(
            *map(pointer, (grad, x, offsets, of_part)), rows, first, experts, n, k, offsets.dtype == torch.int64,
            accumulate, out.dtype != torch.float32,
        )  # fmt: skip
        if kernel == "wgmma":
            maps = (map_of(each, rows, each.shape[1], _STAGE_ROWS) for each in (grad, x))
            argument = TmaWgradArguments(*maps, argument)
        tiles = (min(experts, rows) if accumulate else experts) * -(-n // tile_n) * -(-k // tile_k)
        launch(sources, name, threads, shared, tiles, argument, x.device, where.multiprocessors)


def scaled_wgrad(
    x: Tensor, x_scale: Tensor, grad: Tensor, grad_scale: Tensor, ends: Tensor, out: Tensor, accumulate: bool,
    *, columns: int | None = None,
) -> None:  # fmt: skip
    """Write each expert's product of E4M3 numbers times both scales to out (E, N, K), or add it, as `wgrad`, on compute
    capability 9.0.

    Args:
        x, x_scale: float8_e4m3fn (K, M), transposed, and float32 (E, K); each expert has a multiple of 32 rows.
        grad, grad_scale: float8_e4m3fn (N, M) and float32 (E, N).
        ends: int32 row ends (E,). M is a multiple of 16, N and K of 8.
        out: contiguous; float32, or bfloat16 if nothing is added. Operands and `out` are aligned to 16 bytes.
        accumulate, columns: as of `wgrad`.
    """
    (k, rows), n, experts = x.shape, grad.shape[0], ends.shape[0]
    where, tile = target(x.device), columns or _scaled_columns(k, rows / experts, out.dtype)
    stages = _STAGES[tile]
    name, shared = instance("scaled_wgrad_wgmma", tile, stages), 1024 + stages * (_WGMMA_TILE + tile) * 2 * _STAGE_ROWS
    maps = [map_of(each, each.shape[0], rows // 2, 64) for each in (grad, x)]
    for first in range(0, experts, MAX_EXPERTS):
        of_part = out[first : first + MAX_EXPERTS]
        of = WgradArguments(
            *map(pointer, (grad, x, ends, of_part)), rows, first, of_part.shape[0], n, k, False, accumulate,
            out.dtype != torch.float32,
        )  # fmt: skip
        argument = ScaledWgradArguments(*maps, of, pointer(grad_scale), pointer(x_scale))
        tiles = of_part.shape[0] * -(-n // _WGMMA_TILE) * -(-k // tile)
        launch(WGMMA, name, 384, shared, tiles, argument, x.device, where.multiprocessors)


def rank_wgrad(
    narrow: Tensor, wide: Tensor, offsets: Tensor, wide_first: bool, row_slot: Tensor | None = None
) -> Tensor:
    """Return each expert's narrow.T @ wide (E, R, K) of rows (M, R) and (M, K), or its transpose (E, K, R), in their
    dtype.

    Args:
        narrow, wide: of one dtype of 16 bits; M and K positive, K and R multiples of 8, R at most 64.
        offsets: int32 or int64 row ends.
        row_slot: int32 (M,): `wide` has tokens (T, K), of M // T slots each.
    """
    narrow, wide = aligned(narrow.detach()), aligned(wide.detach())
    offsets = offsets.contiguous()
    (rows, rank), k, experts = narrow.shape, wide.shape[1], offsets.shape[0]
    out = narrow.new_empty(experts, *((k, rank) if wide_first else (rank, k)))
    blocks = -(-rank // 16)
    where = target(wide.device)
    stage, most = 64 * (256 + 32 * blocks), most_shared_bytes(where.capability) - _ORDER_BYTES  # kStageRows, kColumns
    stages = next(stages for stages in _RANK_STAGES if stages * stage <= most)
    name = instance("rank_wgrad", narrow.dtype == torch.bfloat16, wide_first, blocks, row_slot is not None, stages)
    row_slot = None if row_slot is None else row_slot.contiguous()
    for first in range(0, experts, MAX_EXPERTS):
        of_part = out[first : first + MAX_EXPERTS]
        argument = RankWgradArguments(
            WgradArguments(
                *map(pointer, (narrow, wide, offsets, of_part)), rows, first, of_part.shape[0], rank, k,
                offsets.dtype == torch.int64, False, True,
            ), *map(pointer, (row_slot,)), rows // wide.shape[0],
        )  # fmt: skip
        tiles = of_part.shape[0] * -(-k // 128)  # kColumns
        launch(RANK, name, 256, stages * stage, tiles, argument, wide.device, where.multiprocessors)
    return out


def _kernel(x: Tensor, grad: Tensor, out: Tensor, capability: tuple[int, int]) -> str:
    k, n = x.shape[1], grad.shape[1]
    kernel = kernel_for(x.dtype, n, k, capability, out.data_ptr())
    if kernel == "any" and x.dtype != torch.float32:
        what, remedy = "a weight whose main_grad lies at no multiple of 16 bytes", "align it"
        if not reads_eight(x.dtype, n, k):
            what = f"a weight of out_features {n} and in_features {k}, which are not multiples of 8"
            remedy = "pad the weight"
        warn_once(("wgrad", what), f"the gradient of {what}, is added to main_grad many times slower: {remedy}")
    return kernel


def _columns(k: int, rows_per_expert: float, dtype: torch.dtype) -> int:
    """Return the width of a tile: narrow for few rows of a float32 result, else the widest among the least wasteful
    ones.

    H200, adding, in us with 128, 192 and 256 columns. Qwen3 (1536, 2048): 64 rows per expert 1094, 1163, 1243, 256 rows
    1315, 1355, 1374. Mixtral (28672, 4096): 128 rows 2692, 2896, 3006, 1024 rows 5337, 5170, 4851. GPT-OSS (2880,
    2880): 1024 rows 1565, 1376, 1421. Into 16 bits: Qwen3, 8 rows 434, 381, 347.
    """
    if rows_per_expert <= _FEW_ROWS and dtype == torch.float32:
        return 128
    return min((256, 192, 128), key=lambda tile: (-(-k // tile) * tile, -tile))


def _scaled_columns(k: int, rows_per_expert: float, dtype: torch.dtype) -> int:
    """Return the width of a tile of E4M3 numbers.

    H100, bfloat16 results, in us with 128, 192 and 256 columns. Qwen3 (1536, 2048): 64 rows per expert 492, 493, 464,
    256 rows 626, 619, 582. DeepSeek-V3 (4096, 7168): 1024 rows 2643, 2498, 3028. Mixtral (4096, 14336): 4096 rows 4013,
    3727, 4339.
    """
    return 192 if rows_per_expert >= _SCALED_ROWS else _columns(k, rows_per_expert, dtype)

"""Grouped GEMMs of 16-bit and float32 weights, or their transposes, by the kernels of src/linear_*.cu.
Called by kernels/cuda/training.py and prepared.py; calls launch.py beside it.

Legend: M rows sorted by expert, E experts, N columns of the result, K what is summed over.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda import launch
from thunder_moe.kernels.cuda.arguments import (
    LinearArguments,
    LowRankLinearArguments,
    PackedLinearArguments,
    TmaLinearArguments,
)
from thunder_moe.kernels.cuda.configs import COMMON

__all__ = [
    "KERNELS",
    "MMA",
    "PACKED",
    "PACKED_STAGES",
    "STAGES",
    "WGMMA",
    "LinearLaunch",
    "PackedLaunch",
    "kernel_for",
    "linear_launch",
    "packed_is_faster",
    "packed_launch",
    "serves_rank",
    "torch_is_faster",
]

_PTX, _LINEAR = COMMON.with_name("ptx.cuh"), COMMON.with_name("linear.cuh")
_WGMMA = (COMMON.with_name("wgmma.cuh"), COMMON.with_name("wgmma_shared.cuh"))
WGMMA = (COMMON, _PTX, *_WGMMA, _LINEAR, COMMON.with_name("linear_wgmma.cu"))
PACKED = (
    COMMON, _PTX, COMMON.with_name("nvfp4.cuh"), *_WGMMA, _LINEAR, COMMON.with_name("linear_wgmma.cu"),
    COMMON.with_name("packed_wgmma.cu"),
)  # fmt: skip
MMA = (COMMON, _PTX, _LINEAR, COMMON.with_name("linear_mma.cu"))
KERNELS = ("wgmma", "mma", "any")
MAX_EXPERTS = 1024  # kMostExperts
STAGES = {64: 9, 128: 6, 256: 4}  # of "wgmma": rows of a tile -> stages in 227 KiB
ROWS = {"wgmma": tuple(STAGES), "mma": (32, 128), "any": (32, 64, 128)}  # of a tile
PACKED_STAGES = {64: 9, 192: 5}  # likewise of NVFP4 weights in tiles
MAX_RANK = 64  # of the kernels of LoRA adapters
_COLUMNS = 128  # kTileN
# Rows of an expert, from which on torch's grouped GEMM is taken. Gradient of the rows, H200, us, torch's and "wgmma",
# equal shares, shares of 1/i. Qwen3-30B-A3B (1536, 2048): 8 rows 284, 207; 293, 207. 64 rows 275, 227; 324, 254. 256
# rows 343, 367; 471, 451. Mixtral (28672, 4096): 128 rows 510, 490; 789, 634. 1024 rows 2635, 2759; 2977, 3102.
_TORCHS_ROWS = 256
# Rows of an expert, from which on NVFP4 weights in tiles are dequantized first. Gradient of the rows, H200, us,
# dequantized and by `PackedLaunch`: Qwen3-30B-A3B's gate and up, 4 rows 461, 214; 32 rows 481, 217; 128 rows 570, 280;
# 256 rows 699, 567; 512 rows 978, 853; 1024 rows 1539, 1660.
_ROWS_OF_16_BITS = 768


class LinearLaunch:
    """Rows of each expert times its weight, (M, K) -> (M, N), for contiguous operands of one kind.

    Args:
        rows: M, positive.
        num_experts: E, positive.
        n: N, positive.
        k: K, positive.
        dtype: of rows, weight and result.
        transposed: the weight is (E, K, N), not (E, N, K).
        wide_offsets: they are int64, not int32.
        zero_tail: rows past the last end become zeros, instead of staying as they were.
        kernel: of `KERNELS`; "wgmma" and "mma" take 16-bit numbers, N and K that are multiples of 8, operands that are
            aligned to 16 bytes.
        device: where the operands are.
        facts: (multiprocessors, compute capability) of the device.
        tile: rows of a tile, of `ROWS`; by the rows of an expert when None.
        rank: R, of "wgmma": rows (M, R) times b, which lies as the weight does with R in place of K, are added.
    """

    def __init__(
        self, rows: int, num_experts: int, n: int, k: int, dtype: torch.dtype, transposed: bool, wide_offsets: bool,
        zero_tail: bool, kernel: str, device: torch.device, facts: tuple[int, tuple[int, int]], tile: int | None,
        rank: int = 0,
    ) -> None:  # fmt: skip
        assert dtype in DTYPE_CODES
        tile = tile or _tile(kernel, rows / num_experts, transposed)
        bf16, flipped = str(dtype == torch.bfloat16).lower(), str(transposed).lower()
        sources: tuple[Path, ...] = MMA
        argument: type[ctypes.Structure] = LinearArguments
        threads, shared = 256, 0
        if kernel == "wgmma":
            sources, argument, threads = WGMMA, TmaLinearArguments, 384
            stages = STAGES[tile]
            name, shared = f"linear_wgmma<{bf16}, {flipped}, {tile}, {stages}>", 1024 + stages * 128 * (128 + tile)
            if rank:
                argument, name = LowRankLinearArguments, f"low_rank_{name}"
        elif kernel == "mma":
            name, shared = f"linear_mma<{bf16}, {flipped}, {tile}>", 4 * 64 * (tile + _COLUMNS)
        else:
            name = f"linear_any<{DTYPE_CODES[dtype]}, {flipped}, {tile}>"
        live = min(rows, num_experts)
        tiles = (live + (rows - live) // tile) * -(-n // _COLUMNS)  # as many as any routing has
        index: Any = device.index
        self._index = device.index
        self._launcher = launch.launcher(sources, name, threads, shared, tiles, argument, index, facts[0])
        self._maps = _maps(rows, num_experts, n, k, transposed, tile)
        self._rank_maps, self._rank = _maps(rows, num_experts, n, rank, transposed, tile), (rank,) if rank else ()
        self._with_maps = kernel == "wgmma"
        self._parts = []
        for first in range(0, num_experts, MAX_EXPERTS):
            count = min(MAX_EXPERTS, num_experts - first)
            last = first + count == num_experts
            self._parts.append((rows, first, count, n, k, wide_offsets, zero_tail and last))

    def __call__(self, x: int, weight: int, offsets: int, out: int, inner: int = 0, b: int = 0) -> None:
        """Launches the kernel for operands at these addresses, on their device; with `rank` inner (M, R) and b are two
        of them."""
        if launch.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(x, weight, offsets, out, inner, b)
        stream = launch.current_stream(self._index)
        maps: tuple[bytes, ...] = ()
        if self._with_maps:
            maps = _encoded(weight, x, self._maps)
            if self._rank:
                maps += _encoded(b, inner, self._rank_maps)
        for part in self._parts:
            self._launcher(stream, *maps, x, weight, offsets, out, *part, *self._rank)


class PackedLaunch:
    """Rows times NVFP4 weights in tiles, (M, N) x (E, N, K) -> (M, K), on compute capability 9.0.

    Args:
        rows, num_experts: M and E, positive, at most `MAX_EXPERTS` experts.
        n: N.
        k: K.
        dtype: of rows and result, of 16 bits.
        per_row: whether there is a global scale for each row of a weight.
        rank: R, of an adapter: rows (M, R) times b (E, R, K) are added; 0 for none.
        device, facts, tile: as of `LinearLaunch`.
    """

    def __init__(
        self, rows: int, num_experts: int, n: int, k: int, dtype: torch.dtype, per_row: bool, rank: int,
        device: torch.device, facts: tuple[int, tuple[int, int]], tile: int | None,
    ) -> None:  # fmt: skip
        tile = tile or _packed_tile(rows / num_experts)
        bf16, stages = str(dtype == torch.bfloat16).lower(), PACKED_STAGES[tile]
        name = f"packed_linear_wgmma<{bf16}, {str(per_row).lower()}, {tile}, {stages}>"
        live, index = min(rows, num_experts), device.index
        tiles = (live + (rows - live) // tile) * -(-k // _COLUMNS)
        self._index: Any = index
        self._launcher = launch.launcher(
            PACKED, name, 512, 1024 + stages * 128 * (128 + tile), tiles, PackedLinearArguments, self._index, facts[0]
        )
        self._map, self._inner_map, self._rank = (rows, n, tile), (rows, rank, tile), rank
        self._b_map = num_experts * rank, k, 64
        self._part = rows, 0, num_experts, k, n, False, False

    def __call__(
        self, x: int, qdata: int, scale: int, global_scale: int, offsets: int, out: int, inner: int = 0, b: int = 0
    ) -> None:
        """Launches the kernel for operands at these addresses, on the operands' device, which has to be current."""
        maps = launch.tensor_map(x, *self._map)
        of_b, of_inner = maps, maps
        if self._rank:
            of_b, of_inner = launch.tensor_map(b, *self._b_map), launch.tensor_map(inner, *self._inner_map)
        self._launcher(
            launch.current_stream(self._index), maps, of_b, of_inner, x, 0, offsets, out, *self._part, qdata, scale,
            global_scale, self._rank,
        )  # fmt: skip


_Maps = tuple[tuple[int, int, int], tuple[int, int, int]]  # of a weight and of rows: rows, columns, rows of a box


def _maps(rows: int, num_experts: int, n: int, k: int, transposed: bool, tile: int) -> _Maps:
    return (num_experts * (k if transposed else n), n if transposed else k, 64), (rows, k, tile)


def _encoded(weight: int, x: int, maps: _Maps) -> tuple[bytes, ...]:
    of_weight, of_x = maps
    return launch.tensor_map(weight, *of_weight), launch.tensor_map(x, *of_x)


packed_launch = functools.lru_cache(maxsize=4096)(PackedLaunch)
linear_launch = functools.lru_cache(maxsize=4096)(LinearLaunch)


def kernel_for(dtype: torch.dtype, n: int, k: int, capability: tuple[int, int], addresses: int) -> str:
    """The fastest of `KERNELS` that serves operands; addresses: of them all, bits joined by or."""
    if dtype == torch.float32 or n % 8 or k % 8 or addresses % 16:
        return "any"
    return "wgmma" if capability == (9, 0) else "mma"


def serves_rank(dtype: torch.dtype, n: int, k: int, rank: int) -> bool:
    """Whether the kernels of a LoRA adapter take its operands; n and k: of the weight beside it."""
    return dtype != torch.float32 and not (n % 8 or k % 8 or rank % 8) and 0 < rank <= MAX_RANK


def torch_is_faster(
    dtype: torch.dtype, capability: tuple[int, int], rows_per_expert: float, least: float = _TORCHS_ROWS
) -> bool:
    """Whether to take torch's grouped GEMM: where it does not synchronize with the host, and has `least` rows an
    expert, or no kernel by wgmma beside it."""
    if dtype != torch.bfloat16 or capability[0] not in (9, 10):
        return False
    return rows_per_expert >= least or capability != (9, 0)


def packed_is_faster(rows_per_expert: float) -> bool:
    """Than dequantizing and multiplying: rows of NVFP4 weights in tiles."""
    return rows_per_expert < _ROWS_OF_16_BITS


def _packed_tile(rows_per_expert: float) -> int:
    """Rows of a tile. 32 rows, us with 64 and 192: 218, 241; 128 rows 495, 285."""
    return 64 if rows_per_expert <= 64 else 192


def _tile(kernel: str, rows_per_expert: float, transposed: bool) -> int:
    """Rows of a tile. Of "wgmma" more than the mean of an expert's, for shares that differ: GPT-OSS-20B (5760, 2880),
    32 rows, gradient of the rows, H200, us with 32, 64 and 128: 294, 292, 293, with shares of 1/i 343, 321, 295."""
    if kernel == "wgmma":
        return 64 if rows_per_expert <= 16 else 128 if rows_per_expert < 512 else 256
    sizes = ROWS[kernel]
    if kernel == "any" and transposed:  # float32, 256 rows, H200, us with 64 and 128: 6184, 7006, else 6648, 5601
        sizes = sizes[:2]
    return next((size for size in sizes if size >= rows_per_expert), sizes[-1])

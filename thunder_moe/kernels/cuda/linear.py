"""Grouped GEMMs of 16-bit and float32 weights, or their transposes, by the kernels of src/linear_*.cu.
Called by the other modules of kernels/cuda; calls chain.py and launch.py.

Legend: M rows sorted by expert, E experts, N columns of the result, K what is summed over.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thunder_moe.kernels.arguments import DTYPE_CODES, pointer
from thunder_moe.kernels.cuda.arguments import (
    LinearArguments,
    LowRankLinearArguments,
    PackedLinearArguments,
    ScaledLinearArguments,
    TmaLinearArguments,
)
from thunder_moe.kernels.cuda.chain import Address, Chain, ChainBuilder, TensorMap
from thunder_moe.kernels.cuda.configs import COMMON
from thunder_moe.kernels.cuda.launch import launch, map_of
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.operands import target
from thunder_moe.kernels.specs import DgradSpec, LinearSpec

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
# The least rows per expert for torch's grouped GEMM. Gradient of the rows, H200, us, torch's and "wgmma", equal shares,
# shares of 1/i. Qwen3-30B-A3B (1536, 2048): 8 rows 284, 207; 293, 207. 64 rows 275, 227; 324, 254. 256 rows 343, 367;
# 471, 451. Mixtral (28672, 4096): 128 rows 510, 490; 789, 634. 1024 rows 2635, 2759; 2977, 3102.
_TORCHS_ROWS = 256
# The least rows per expert for tiles of 256 E4M3 rows. H100, us with 64, 128 and 256: Qwen3-30B-A3B (1536, 2048): 64
# rows per expert 162, 165, 164; 256 rows 284, 249, 234. DeepSeek-V3 (4096, 7168): 1024 rows 2460, 1843, 1646.
_SCALED_ROWS = 256
# The least rows per expert for dequantizing NVFP4 weights in tiles first. Gradient of the rows, H200, us, dequantized
# and packed: Qwen3-30B-A3B's gate and up, 4 rows 461, 214; 32 rows 481, 217; 128 rows 570, 280; 256 rows 699, 567; 512
# rows 978, 853; 1024 rows 1539, 1660.
_ROWS_OF_16_BITS = 768


def append_linear(
    chain: ChainBuilder, spec: LinearSpec, kernel: str, x: Address, weight: Address, offsets: Address, out: Address,
    adapter: tuple[Any, ...] | None = None, *, tile: int | None = None,
) -> None:  # fmt: skip
    """Append rows of each expert times its weight, (M, K) -> (M, N).

    Args:
        kernel: one of `KERNELS`; "wgmma" and "mma" take 16-bit numbers, N and K that are multiples of 8, operands that
            are aligned to 16 bytes.
        adapter: (inner, b, ...) with the spec's rank, for "wgmma": rows (M, R) times b, which has the weight's layout
            with R in place of K, are added.
        tile: the rows of a tile, one of `ROWS`; None: chosen by the rows of an expert.
    """
    rows, experts, n, k, transposed = spec.rows, spec.num_experts, spec.n, spec.k, spec.transposed
    assert spec.dtype in DTYPE_CODES
    tile = tile or _tile(kernel, rows / experts, transposed)
    bf16 = spec.dtype == torch.bfloat16
    sources: tuple[Path, ...] = MMA
    argument: type[ctypes.Structure] = LinearArguments
    threads, shared = 256, 0
    maps: tuple[TensorMap, ...] = ()
    if kernel == "wgmma":
        sources, argument, threads = WGMMA, TmaLinearArguments, 384
        stages = STAGES[tile]
        name, shared = instance("linear_wgmma", bf16, transposed, tile, stages), 1024 + stages * 128 * (128 + tile)
        maps = _maps(spec, weight, x, k, tile)
        if adapter is not None:
            argument, name = LowRankLinearArguments, f"low_rank_{name}"
            maps += _maps(spec, adapter[1], adapter[0], spec.rank, tile)
    elif kernel == "mma":
        name, shared = instance("linear_mma", bf16, transposed, tile), 4 * 64 * (tile + _COLUMNS)
    else:
        name = instance("linear_any", DTYPE_CODES[spec.dtype], transposed, tile)
    live = min(rows, experts)
    tiles = (live + (rows - live) // tile) * -(-n // _COLUMNS)  # the most that a routing can have
    rank = () if adapter is None else (spec.rank,)
    for first in range(0, experts, MAX_EXPERTS):
        count = min(MAX_EXPERTS, experts - first)
        zeros = spec.zero_tail and first + count == experts
        numbers = rows, first, count, n, k, spec.wide_offsets, zeros
        fields = *maps, x, weight, offsets, out, *numbers, *rank
        chain.launch(sources, name, threads, shared, tiles, argument, fields, spec.target.multiprocessors)


def append_packed_linear(
    chain: ChainBuilder, spec: DgradSpec, x: Address, weight: tuple[Address, Address, Address | None],
    offsets: Address, out: Address, adapter: tuple[Any, ...] | None = None,
) -> None:  # fmt: skip
    """Append rows times NVFP4 weights in tiles, (M, N) x (E, N, K) -> (M, K), on compute capability 9.0.

    The spec has at most `MAX_EXPERTS` experts. An adapter (inner, b, ...) with its rank adds rows (M, R) times b
    (E, R, K).
    """
    rows, experts, n, k, rank = spec.rows, spec.num_experts, spec.n, spec.k, spec.rank
    tile = _packed_tile(rows / experts)
    bf16, stages = spec.dtype == torch.bfloat16, PACKED_STAGES[tile]
    name = instance("packed_linear_wgmma", bf16, spec.weight.per_row_scale, tile, stages)
    live = min(rows, experts)
    tiles, shared = (live + (rows - live) // tile) * -(-k // _COLUMNS), 1024 + stages * 128 * (128 + tile)
    of_x = TensorMap(x, rows, n, tile)
    maps = (of_x, of_x, of_x)
    if adapter is not None:
        maps = of_x, TensorMap(adapter[1], experts * rank, k, 64), TensorMap(adapter[0], rows, rank, tile)
    fields = *maps, x, None, offsets, out, rows, 0, experts, k, n, False, False, *weight, rank
    chain.launch(PACKED, name, 512, shared, tiles, PackedLinearArguments, fields, spec.target.multiprocessors)


def scaled_linear(
    rows: Tensor, row_scale: Tensor, weight: Tensor, column_scale: Tensor, offsets: Tensor, out: Tensor,
    zero_tail: bool, tile: int | None = None,
) -> None:  # fmt: skip
    """Multiply E4M3 rows of each expert by its weight and by both scales, summed in float32 (compute capability 9.0).

    Args:
        rows, row_scale: float8_e4m3fn (M, K) and float32 (M,); M positive.
        weight, column_scale: float8_e4m3fn (E, N, K), N and K positive multiples of 16, and float32 (E, N).
        offsets: int32 or int64 row ends (E,).
        out: bfloat16 (M, N). All tensors are contiguous, codes and `out` aligned to 16 bytes.
        zero_tail: True to write zeros past the last row end; else `out` keeps its values there.
        tile: the rows of a tile, as of "wgmma".
    """
    (m, k), (experts, n) = rows.shape, column_scale.shape
    tile = tile or (256 if m / experts >= _SCALED_ROWS else _tile("wgmma", m / experts, False))
    where, stages = target(rows.device), STAGES[tile]
    name, shared = instance("scaled_linear_wgmma", tile, stages), 1024 + stages * 128 * (128 + tile)
    of_weight, of_rows = map_of(weight, experts * n, k // 2, 64), map_of(rows, m, k // 2, tile)
    live = min(m, experts)
    tiles = (live + (m - live) // tile) * -(-n // _COLUMNS)  # the most that a routing can have
    for first in range(0, experts, MAX_EXPERTS):
        count = min(MAX_EXPERTS, experts - first)
        zeros = zero_tail and first + count == experts
        numbers = m, first, count, n, k // 2, offsets.dtype == torch.int64, zeros
        operands = LinearArguments(*map(pointer, (rows, weight, offsets, out)), *numbers)
        argument = ScaledLinearArguments(of_weight, of_rows, operands, pointer(row_scale), pointer(column_scale))
        launch(WGMMA, name, 384, shared, tiles, argument, rows.device, where.multiprocessors)


def _maps(spec: LinearSpec, weight: Address, x: Address, k: int, tile: int) -> tuple[TensorMap, TensorMap]:
    """Return the maps of a weight and of rows (M, k)."""
    height, width = (k, spec.n) if spec.transposed else (spec.n, k)
    return TensorMap(weight, spec.num_experts * height, width, 64), TensorMap(x, spec.rows, k, tile)


@functools.lru_cache(maxsize=4096)
def prepare_linear(spec: LinearSpec, kernel: str, tile: int | None = None) -> Chain:
    """Return the chain (rows, weight, offsets[, inner (M, R), b][, out]) -> (M, N)."""
    chain = ChainBuilder(spec.target.device)
    align = 1 if kernel == "any" else 16
    experts, rows = spec.num_experts, spec.rows

    def weight_of(k: int) -> Address:
        shape = (experts, k, spec.n) if spec.transposed else (experts, spec.n, k)
        return chain.operand(shape, spec.dtype, align=align)

    x, weight = chain.operand((rows, spec.k), spec.dtype, align=align), weight_of(spec.k)
    offsets = chain.operand((experts,), torch.int64 if spec.wide_offsets else torch.int32, align=1)
    adapter = None
    if spec.rank:
        adapter = chain.operand((rows, spec.rank), spec.dtype), weight_of(spec.rank)
    shape = rows, spec.n
    if spec.into:
        out = chain.result_in(chain.operand(shape, spec.dtype, align=align), shape, spec.dtype)
    else:
        out = chain.result(shape, spec.dtype)
    append_linear(chain, spec, kernel, x, weight, offsets, out, adapter, tile=tile)
    return chain.build()


def kernel_for(dtype: torch.dtype, n: int, k: int, capability: tuple[int, int], addresses: int) -> str:
    """Return the fastest of `KERNELS` that serves operands; `addresses` is the bitwise or of all their addresses."""
    if not reads_eight(dtype, n, k) or addresses % 16:
        return "any"
    return "wgmma" if capability == (9, 0) else "mma"


def reads_eight(dtype: torch.dtype, *sizes: int) -> bool:
    """True if the kernels of 16-bit numbers, which read eight at once, serve operands of these sizes."""
    return dtype != torch.float32 and not any(size % 8 for size in sizes)


def serves_rank(dtype: torch.dtype, n: int, k: int, rank: int) -> bool:
    """True if the kernels of a LoRA adapter take its operands; n and k: of the weight beside it."""
    return reads_eight(dtype, n, k, rank) and 0 < rank <= MAX_RANK


def torch_is_faster(
    dtype: torch.dtype, capability: tuple[int, int], rows_per_expert: float, least: float = _TORCHS_ROWS
) -> bool:
    """True if torch's grouped GEMM is to run: it does not synchronize with the host, and experts have at least `least`
    rows, or no kernel with wgmma serves the device."""
    if dtype != torch.bfloat16 or capability[0] not in (9, 10):
        return False
    return rows_per_expert >= least or capability != (9, 0)


def packed_is_faster(rows_per_expert: float) -> bool:
    """True if the kernel of tiled NVFP4 weights is faster than dequantizing and multiplying."""
    return rows_per_expert < _ROWS_OF_16_BITS


def _packed_tile(rows_per_expert: float) -> int:
    """Return the rows of a tile. 32 rows, us with 64 and 192: 218, 241; 128 rows 495, 285."""
    return 64 if rows_per_expert <= 64 else 192


def _tile(kernel: str, rows_per_expert: float, transposed: bool) -> int:
    """Return the rows of a tile. "wgmma" gets more than the mean rows of an expert, because shares differ: GPT-OSS-20B
    (5760, 2880), 32 rows, gradient of the rows, H200, us with 32, 64 and 128: 294, 292, 293, with shares of 1/i 343,
    321, 295."""
    if kernel == "wgmma":
        return 64 if rows_per_expert <= 16 else 128 if rows_per_expert < 512 else 256
    sizes = ROWS[kernel]
    if kernel == "any" and transposed:  # float32, 256 rows, H200, us with 64 and 128: 6184, 7006, else 6648, 5601
        sizes = sizes[:2]
    return next((size for size in sizes if size >= rows_per_expert), sizes[-1])

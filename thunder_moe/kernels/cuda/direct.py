"""Chooses the launch of src/tiled_direct.cu: a dense layer of up to 8 rows, without a pipeline.
Called by operators.py beside it, compilers/dynamo/add_norm.py and benchmarks/suites/linear.py; calls chain.py.

Legend: M rows, N output and K input features.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda.arguments import DirectArguments
from thunder_moe.kernels.cuda.chain import Address, ChainBuilder
from thunder_moe.kernels.cuda.configs import COMMON, TILED
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.specs import GemmSpec

MOST_ROWS = 8
# More columns take as long by the kernels with a pipeline. Decode step of Qwen3-30B-A3B, H100, us that a layer adds to
# it, by clusters and without a pipeline: (5120, 2048) 6.6 and 5.4, (2048, 4096) 4.8 and 3.6, the head (151936, 2048) 62
# and 63.
_MOST_COLUMNS = 16384
_MOST_WARPS = 16  # of a block
# With more rows a norm takes longer here, where each block computes it for itself, than as a kernel of its own. Decode
# steps of 8 layers of Qwen3-30B-A3B on an H100, steps per second without and with norms in the layers and the routers:
# 1 row 2,370 and 2,550, 2 rows 2,010 and 2,060, 8 rows 1,260 and 1,220.
MOST_NORM_ROWS = 2
_AHEAD = {"nvfp4": 8, "mxfp8": 4}  # blocks of 64 k of a warp


class NormOperands(NamedTuple):
    """The addresses of an RMS norm's operands and of its sum, and epsilon: as in the operators of ops/add_norm.py."""

    residual: Address
    weight: Address
    total: Address
    epsilon: float


def serves_mm(spec: GemmSpec) -> bool:
    """True if the kernel without a pipeline is to run a dense layer; in the batch-invariant mode it never is, since its
    warps share K."""
    tiled = spec.weight.layout == TILED and spec.target.capability == (9, 0)
    few = 0 < spec.rows <= MOST_ROWS and spec.num_experts == 1 and spec.activation is None
    return not spec.batch_invariant and tiled and few and 0 < spec.n <= _MOST_COLUMNS and _warps(spec) <= _MOST_WARPS


def append_mm(
    chain: ChainBuilder,
    spec: GemmSpec,
    x: Address,
    weight: tuple[Address, Address, Address | None],
    bias: Address | None,
    out: Address,
    *,
    prefetch: bool,
    norm: NormOperands | None = None,
) -> None:
    """Append a dense layer that `serves_mm`, (M, K) -> (M, N).

    Args:
        prefetch: the kernel in front of this one does not write the weight, nor the norm's.
        norm: the RMS norm in front of the layer, of x plus a residual.
    """
    fields = (
        x, *weight, None, None, None, bias, out, None, None, None, spec.rows, 1, spec.n, spec.k, 1,
        spec.weight.per_row_scale, 0, 0 if spec.bias is None else DTYPE_CODES[spec.bias], 1.0, -1.0, 0.0,
        None, False, 1, prefetch, *((None, None, None, 0.0) if norm is None else norm),
    )  # fmt: skip
    chain.launch(sources(spec.weight.format), *_launch(spec, norm is not None), DirectArguments, fields)


def explain_mm(spec: GemmSpec) -> str:
    """Return in words what runs a dense layer, which `serves_mm`."""
    name, threads, shared, blocks = _launch(spec)
    return (
        f"{name}\ntiles of {MOST_ROWS} rows x 16 features, {blocks} blocks of {threads} threads,"
        f" {shared} bytes of shared memory"
    )


def sources(format: str) -> tuple[Path, ...]:
    """Return the files of the kernel for weights in a number format."""
    names = "ptx.cuh", f"{format}.cuh", "grouped_mm.cuh", "norm.cuh", "tiled_direct.cu"
    return COMMON, *(COMMON.with_name(name) for name in names)


def _launch(spec: GemmSpec, norm: bool = False) -> tuple[str, int, int, int]:
    """Return the kernel, the threads of a block, its shared memory in bytes, and the number of blocks."""
    ahead, warps = _AHEAD[spec.weight.format], _warps(spec)
    name = instance("mm_tiled_direct", spec.dtype == torch.bfloat16, warps, ahead, norm)
    return name, 32 * warps, warps * spec.rows * 2 * (64 * ahead + 8), spec.n // 16


def _warps(spec: GemmSpec) -> int:
    """Return the warps that share K."""
    return -(-spec.k // (64 * _AHEAD[spec.weight.format]))

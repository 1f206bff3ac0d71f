"""The 8-bit recipes on CUDA: kernels that round operands, and the products of E4M3 codes on compute capability 9.0.
Called by training.py; calls launch.py for src/recipes.cu, linear.py, wgrad.py, backend.py, kernels.recipes and
kernels.rounded_weights.

Nothing synchronizes with the host. Where no kernel multiplies codes, the 16-bit kernels multiply the rounded numbers.

Legend: M rows sorted by expert, E experts, N out_features, K in_features, R rows and C columns of an operand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_moe.kernels.arguments import DTYPE_CODES, pointer
from thunder_moe.kernels.cuda import backend
from thunder_moe.kernels.cuda import linear as linears
from thunder_moe.kernels.cuda import wgrad as wgrads
from thunder_moe.kernels.cuda.arguments import RecipeArguments
from thunder_moe.kernels.cuda.configs import COMMON
from thunder_moe.kernels.cuda.launch import launch
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.operands import aligned, target
from thunder_moe.kernels.recipes import Quantized, QuantizedProducts
from thunder_moe.kernels.rounded_weights import rounded
from thunder_moe.kernels.slow_paths import warn_once

SOURCES = (COMMON, COMMON.with_name("activation.cu"), COMMON.with_name("recipes.cu"))
_THREADS = 256  # kRowThreads
_TILE = 128  # kTile
_MOST_BLOCKS = 2**16
LEAD = 256  # tiles that are measured before a strip's first tile is rounded, more than the strip has: of 32 KiB, in L2


class CudaProducts(QuantizedProducts):
    """`QuantizedProducts` whose "fp8" multiplies codes, where `obstacle` finds nothing against it."""

    def roundings(self, weight: Tensor) -> tuple[tuple[Any, ...], ...]:
        if self._in_16_bits(weight, *weight.shape[1:]):
            return super().roundings(weight)
        return (quantize_codes,), (quantize_column_codes,)

    def grouped_mm(self, rows: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
        if self._in_16_bits(rows, *weight.shape[1:]):
            return super().grouped_mm(rows, weight, offsets, out)
        return self._multiply(quantize_codes(rows), rounded(quantize_codes, weight), offsets, out)

    def dgrad(self, grad: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
        if self._in_16_bits(grad, *weight.shape[1:]):
            return super().dgrad(grad, weight, offsets, out)
        return self._multiply(quantize_codes(grad), rounded(quantize_column_codes, weight)[:2], offsets, out)

    def wgrad(
        self, rows: Tensor, grad: Tensor, offsets: Tensor, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        grad = grad.to(rows.dtype)
        if self._in_16_bits(rows, grad.shape[1], rows.shape[1]):
            return super().wgrad(rows, grad, offsets, out, accumulate)
        a, of_rows, ends = quantize_column_codes(grad, offsets)
        b, of_columns, _ = quantize_column_codes(rows, offsets)
        if out is not None and out.data_ptr() % 16 == 0:
            wgrads.scaled_wgrad(b, of_columns, a, of_rows, ends, out, accumulate)
            return out
        shape = offsets.shape[0], grad.shape[1], rows.shape[1]
        product = rows.new_empty(shape, dtype=rows.dtype if out is None else torch.float32)
        wgrads.scaled_wgrad(b, of_columns, a, of_rows, ends, product, False)
        if out is None:
            return product
        return out.add_(product) if accumulate else out.copy_(product)

    def _multiply(
        self, rows: tuple[Tensor, Tensor], weight: tuple[Any, ...], offsets: Tensor, out: Tensor | None
    ) -> Tensor:
        """Multiply codes (M, K) and (E, N, K) with their scales: -> bfloat16 (M, N), as `grouped_mm`."""
        (a, of_rows), (b, of_columns) = rows, weight
        direct = out is not None and out.data_ptr() % 16 == 0
        product = out if out is not None and direct else of_rows.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        linears.scaled_linear(a, of_rows, b, of_columns, offsets.contiguous(), product, zero_tail=not direct)
        if out is not None and not direct:
            self.kernels.add_bias(product, offsets, out=out)
            return out
        return product

    def _in_16_bits(self, rows: Tensor, n: int, k: int) -> bool:
        """True if products are of rounded numbers, in 16 bits or float32; warn if "fp8" could be faster otherwise."""
        if self.recipe != "fp8" or rows.shape[0] == 0 or n == 0 or k == 0:
            return True
        reason = obstacle(rows, n, k)
        if reason is not None:
            warn_once(
                ("fp8", reason),
                f'recipe "fp8" rounds to 8 bits, but multiplies no 8-bit numbers on {rows.device}, because {reason}:'
                " a step takes longer than without a recipe",
            )
        return reason is not None


def obstacle(rows: Tensor, n: int, k: int) -> str | None:
    """Return why no kernel multiplies E4M3 codes of rows and a weight (E, n, k); None if one does."""
    capability = target(rows.device).capability
    if capability != (9, 0):
        return f"the compute capability is {capability}, not (9, 0)"
    if rows.dtype != torch.bfloat16:
        return f"the rows are {rows.dtype}, not bfloat16"
    if n % 16 or k % 16:
        return f"out_features {n} or in_features {k} is not a multiple of 16"
    return None


def quantize(values: Tensor, recipe: str) -> Quantized:
    """Run `kernels.recipes.quantize`; the numbers are in the values' dtype, exact but for MXFP8 below 2**-116."""
    return _rows(values, recipe, codes=False)


def quantize_columns(values: Tensor, recipe: str, offsets: Tensor | None = None) -> Quantized:
    """Run `kernels.recipes.quantize_columns`, likewise; rows past the last row end are undefined."""
    return _columns(values, recipe, offsets, codes=False)[:2]


def quantize_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round (..., K) along K, by "fp8": -> float8_e4m3fn (..., K), and float32 scales (...)."""
    codes, scales = _rows(values, "fp8", codes=True)
    assert scales is not None
    return codes, scales


def quantize_column_codes(values: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Round (E, R, C) along R, by "fp8": -> float8_e4m3fn (E, C, R), transposed, scales (E, C).

    With offsets it rounds (R, C) along each expert's rows: -> (C, at least R). There each expert has a multiple of 32
    rows, the last ones zeros; the third result has their ends, int32 (E,).
    """
    codes, scales, ends = _columns(values, "fp8", offsets, codes=True)
    assert scales is not None
    return codes, scales, ends


def _rows(values: Tensor, recipe: str, codes: bool) -> Quantized:
    k, mx = values.shape[-1], recipe == "mxfp8"
    values = _padded(values)
    columns = values.shape[-1]
    out = torch.empty_like(values, dtype=torch.float8_e4m3fn if codes else None)
    scales = None if mx else values.new_empty(values.shape[:-1], dtype=torch.float32)
    if out.numel():
        rows, per_row = out.numel() // columns, 32 if mx or columns <= 2048 else 256 if columns <= 8192 else 512
        threads = max(per_row, _THREADS)
        blocks = min(-(-rows * per_row // threads), _MOST_BLOCKS)
        argument = RecipeArguments(
            *map(pointer, (values, None, out, scales, None, None, None)), rows, 0, columns, 0, 0, 0
        )
        name = instance("quantize_rows", DTYPE_CODES[values.dtype], mx, codes, per_row)
        launch(SOURCES, name, threads, 0, blocks, argument, values.device)
    return out[..., :k], scales


def _columns(values: Tensor, recipe: str, offsets: Tensor | None, codes: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    c, mx, dtype = values.shape[-1], recipe == "mxfp8", DTYPE_CODES[values.dtype]
    values = _padded(values)
    rows, columns = values.shape[-2:]
    if offsets is None:
        experts, ends, tiles = values.shape[0], None, values.shape[0] * -(-rows // _TILE)
    else:
        experts = offsets.shape[0]
        ends, tiles = backend.row_starts(offsets.to(torch.int32), rows)[1:], rows // _TILE + experts
    across = -(-columns // _TILE)
    tiles *= across
    shape = values.shape
    if codes:
        shape = torch.Size(
            (experts, columns, rows) if ends is None else (columns, -(-rows // 32) * 32 + 32 * min(rows, experts))
        )
    out = values.new_empty(shape, dtype=torch.float8_e4m3fn if codes else None)
    amax = progress = scales = None
    lead, blocks = 0, tiles
    code_ends = torch.empty(experts, dtype=torch.int32, device=values.device)
    if not mx:
        sizes = experts * columns, 1 + experts * across
        amax, progress = torch.zeros(sum(sizes), dtype=torch.int32, device=values.device).split(sizes)
        scales = values.new_empty(experts, columns, dtype=torch.float32)
        lead = min(-(-rows // _TILE) + LEAD, tiles)
        blocks = lead + 2 * tiles
    if tiles:  # scales of experts without rows are written, too
        pointers = map(pointer, (values, ends, out, scales, amax, progress, code_ends))
        argument = RecipeArguments(*pointers, rows, out.shape[-1], columns, experts, rows, lead)
        launch(SOURCES, instance("quantize_columns", dtype, mx, codes), _THREADS, 0, blocks, argument, values.device)
    return out if codes else out[..., :c], None if scales is None else scales[:, :c], code_ends


def _padded(values: Tensor) -> Tensor:
    """Return values (..., C) contiguous and aligned, with zeros behind them up to a multiple of 8 columns."""
    missing = -values.shape[-1] % 8  # F.pad copies even if there are none
    return aligned(F.pad(values.detach(), (0, missing)) if missing else values.detach())

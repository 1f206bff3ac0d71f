"""The products of an 8-bit recipe: grouped GEMMs and their gradients of operands that are rounded to E4M3.
Called by training_reference and cuda.recipes, and by ops for the names of recipes; calls formats.mxfp8 for its
rounding, routing, rounded_weights, and the 16-bit products that it is given.

A recipe rounds both operands of each product along the dimension that the product sums over:

    grouped_mm  rows (M, K) and weight (E, N, K)    along K
    dgrad       gradient (M, N) and the weight      along N
    wgrad       gradient and rows                   along the rows of each expert, from its first row on

    "mxfp8"     one scale for 32 numbers, the smallest power of two that makes the largest magnitude at most 448; the
                last block may be shorter
    "fp8"       one float32 scale for all numbers that are summed: the largest magnitude (at least 2**-100) / 448

Legend: M rows sorted by expert, E experts, N out_features, K in_features.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_moe.formats.mxfp8 import BLOCK_SIZE, powers_of_two, quantize_rows
from thunder_moe.kernels.rounded_weights import rounded
from thunder_moe.routing import expert_of_row, live_rows, row_groups

RECIPES = ("mxfp8", "fp8")
LEAST_AMAX = 2.0**-100  # in place of smaller magnitudes, so that scales and their inverses are normal floats
Quantized = tuple[Tensor, Tensor | None]


def quantize(values: Tensor, recipe: str) -> Quantized:
    """Round (..., K) along K: -> float32 (..., K), and with "fp8" the scale (...) that multiplies it.

    Rows with NaN or Inf contain NaN, or the scale does.
    """
    if recipe == "mxfp8":
        rows = F.pad(values.float(), (0, -values.shape[-1] % BLOCK_SIZE))
        codes, exponents = quantize_rows(rows.flatten(0, -2))
        factors = powers_of_two(exponents).repeat_interleave(BLOCK_SIZE, -1)
        return (codes.float() * factors).view(rows.shape)[..., : values.shape[-1]], None
    wide = values.float()
    scale = fp8_scale(wide.abs().amax(-1))
    return (wide * (1.0 / scale)[..., None]).to(torch.float8_e4m3fn).float(), scale


def quantize_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round (..., K) along K, by "fp8": -> float8_e4m3fn (..., K), and float32 scales (...)."""
    numbers, scale = quantize(values, "fp8")
    assert scale is not None
    return numbers.to(torch.float8_e4m3fn), scale


def fp8_scale(amax: Tensor) -> Tensor:
    """Return the scale of numbers with a largest magnitude: a multiplication, which rounds alike on all devices."""
    return amax.clamp_min(LEAST_AMAX) * (1.0 / 448.0)


def quantize_columns(values: Tensor, recipe: str, offsets: Tensor | None = None) -> Quantized:
    """Round (E, R, C) along R, or (R, C) along the rows of each expert; "fp8" has scales (E, C).

    Rows past the last row end become zeros.
    """
    if offsets is None:
        codes, scale = quantize(values.mT, recipe)
        return codes.mT, scale
    out = torch.zeros_like(values, dtype=torch.float32)
    scales = out.new_ones(offsets.shape[0], values.shape[1])
    for expert, begin, end in row_groups(offsets, values.shape[0]):
        codes, scale = quantize(values[begin:end].t(), recipe)
        out[begin:end] = codes.t()
        if scale is not None:
            scales[expert] = scale
    return out, scales if recipe == "fp8" else None


class QuantizedProducts:
    """`grouped_mm`, `dgrad` and `wgrad` of the kernels of training, with operands that a recipe rounds.

    Rounded numbers are multiplied by the kernels of 16 bits, or of float32, where they are exact: E4M3 has 4
    significant bits. Scales of "fp8" multiply the product in float32.

    Args:
        kernels: the module of these kernels; `quantize` and `quantize_columns` are its own.
        recipe: one of `RECIPES`.
    """

    def __init__(self, kernels: ModuleType, recipe: str) -> None:
        self.kernels, self.recipe = kernels, recipe

    def roundings(self, weight: Tensor) -> tuple[tuple[Any, ...], ...]:
        """Return the functions that round a weight for `grouped_mm` and `dgrad`, each with its further arguments."""
        return (self.kernels.quantize, self.recipe), (self.kernels.quantize_columns, self.recipe)

    def grouped_mm(self, rows: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
        if not rows.shape[0]:  # a weight is not rounded for nothing
            return rows.new_empty(0, weight.shape[1]) if out is None else out
        a, of_rows = self.kernels.quantize(rows, self.recipe)
        b, of_columns = rounded(self.kernels.quantize, weight, self.recipe)
        product = self.kernels.grouped_mm(a, b, offsets)
        return self._scaled(product, of_rows, of_columns, offsets, rows.dtype, out)

    def dgrad(self, grad: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
        if not grad.shape[0]:
            return grad.new_empty(0, weight.shape[2]) if out is None else out
        a, of_rows = self.kernels.quantize(grad, self.recipe)
        b, of_columns = rounded(self.kernels.quantize_columns, weight, self.recipe)
        product = self.kernels.dgrad(a, b, offsets)
        return self._scaled(product, of_rows, of_columns, offsets, grad.dtype, out)

    def wgrad(
        self, rows: Tensor, grad: Tensor, offsets: Tensor, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        a, of_columns = self.kernels.quantize_columns(rows, self.recipe, offsets)
        b, of_rows = self.kernels.quantize_columns(grad, self.recipe, offsets)
        if of_rows is None or of_columns is None:
            product: Tensor = self.kernels.wgrad(a, b, offsets, out, accumulate)
            return product if out is not None else product.to(rows.dtype)
        wide = rows.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1], dtype=torch.float32)
        self.kernels.wgrad(a, b, offsets, wide, False)
        wide.mul_(of_rows[:, :, None]).mul_(of_columns[:, None, :])
        if out is None:
            return wide.to(rows.dtype)
        return out.add_(wide) if accumulate else out.copy_(wide)

    def _scaled(
        self, product: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, offsets: Tensor, dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return a product (M, N) times the scales of rows (M,) and of columns (E, N), zeros past the end; in `out`
        these rows are not written."""
        if of_rows is not None and of_columns is not None and product.shape[0]:
            rows = product.shape[0]
            factors = of_rows[:, None] * of_columns[expert_of_row(offsets, rows)]
            product = torch.where(live_rows(offsets, rows), product.float() * factors, 0)
        product = product.to(dtype)
        return product if out is None else self.kernels.add_bias(product, offsets, out=out)

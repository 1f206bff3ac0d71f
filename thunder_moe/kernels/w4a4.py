"""nvFuser's W4A4 arithmetic, 4-bit rows times 4-bit weights: what Blackwell computes, on any machine.
Called by kernels.select under `use_backend("w4a4")`, and by compilers.thunder.nvfuser for constants; calls
kernels.reference or, for bfloat16 on a GPU, kernels.cuda for the products, routing and activations.

amax of the experts' rows -> encode scale 2688 / amax -> e4m3 scale per 16 values of a row -> e2m1 values -> GEMM
-> times alpha = the weights' global scale / encode scale -> the activation's dtype. Gradients ignore the rounding.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch

from thunder_moe.activations import SWIGLU, SwiGLUConfig, swiglu
from thunder_moe.formats.nvfp4 import BLOCK_SIZE, E2M1_MAX, E4M3_MAX
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels import add_norm, reference
from thunder_moe.kernels.experts import unfused
from thunder_moe.kernels.reference import (  # noqa: F401  (in __all__)
    decode_attention,
    grouped_mm_dgrad,
    linear_router,
    mm_dgrad,
    route,
    router,
    unavailable_reason,
)
from thunder_moe.kernels.select import runs_on_cuda
from thunder_moe.routing import combine, gather_rows, live_rows, scale_of_rows

__all__ = ["quantize_rows"]
__all__ += reference.__all__

FLOAT_MAX = torch.finfo(torch.float32).max
# Smaller largest magnitudes count as this one, so that 2688 over it is finite; rows of zeros stay zeros.
SMALLEST_AMAX = 1e-30


def quantize_rows(
    activation: torch.Tensor, amax: float | None = None, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize rows to NVFP4 with the arithmetic of nvFuser's nv_grouped_block_quantize.

    It differs from `formats.nvfp4.quantize`, which is for weights: all rows have one global scale, and values are
    multiplied by a rounded reciprocal instead of divided.

    Args:
        activation: (M, K) float32, bfloat16 or float16; K a multiple of 16.
        amax: largest magnitude known from calibration; None: the largest of `activation`. Larger values saturate.
        live: bool (M, 1), the rows that count for the largest magnitude; None: all rows.

    Returns:
        (values of E2M1 as float32 (M, K), block scales float8_e4m3fn (M, K // 16), decode scale float32 0-d): a row is
        ``values * scale * decode``.
    """
    blocks = (
        activation.detach().float().reshape(len(activation), activation.shape[1] // BLOCK_SIZE, BLOCK_SIZE)
    )  # [M, K // 16, 16]
    magnitudes = blocks.abs()
    if amax is not None:
        largest = blocks.new_tensor(amax)
    elif blocks.numel() > 0:
        largest = (magnitudes if live is None else torch.where(live[..., None], magnitudes, 0)).amax()
    else:
        largest = blocks.new_zeros(())
    encode = torch.full_like(largest, E2M1_MAX * E4M3_MAX) / largest.clamp_min(SMALLEST_AMAX)
    decode = encode.reciprocal()
    # Divided by a tensor: torch multiplies by the rounded reciprocal of a scalar on CUDA.
    block_amax = magnitudes.amax(-1)
    scaled_amax = block_amax / torch.full_like(block_amax, E2M1_MAX) * encode
    scale = scaled_amax.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    factor = (scale.float() * decode).reciprocal().clamp_max(FLOAT_MAX)
    return _round_to_e2m1(blocks * factor[..., None]).flatten(-2), scale, decode


def grouped_mm(
    activation: torch.Tensor, weight: PackedWeight, offsets: torch.Tensor, *, amax: float | None = None
) -> torch.Tensor:
    """Multiply (M, K) rows sorted by expert, with offsets (E,) of row ends: -> (M, N) in the activation's dtype."""
    rows, decode = _scaled_rows(activation, amax, live_rows(offsets, activation.shape[0]))
    kernels, rows = _kernels_for(rows, activation.dtype)
    out: torch.Tensor = kernels.grouped_mm(rows, weight, offsets).float() * decode
    return out.to(activation.dtype)


def grouped_swiglu(
    activation: torch.Tensor,
    weight: PackedWeight,
    offsets: torch.Tensor,
    row_slot: torch.Tensor | None = None,
    slot_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    form: SwiGLUConfig = SWIGLU,
    *,
    amax: float | None = None,
) -> torch.Tensor:
    """Return (M, I) of rows (M, K), or of tokens (T, K) with row_slot (M,); weight (E, 2I, K) has gate rows first."""
    gate_up = grouped_mm(gather_rows(activation, row_slot), weight, offsets, amax=amax)
    return swiglu(gate_up, offsets, form, scale_of_rows(slot_scale, row_slot), bias)


def grouped_mm_combine(
    activation: torch.Tensor,
    weight: PackedWeight,
    offsets: torch.Tensor,
    slot_row: torch.Tensor,
    slot_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply (M, K) -> (T, N): each slot's row, plus bias (E, N), times slot_weight (T, A), summed per token."""
    return combine(grouped_mm(activation, weight, offsets), offsets, slot_row, slot_weight, bias)


def mm(activation: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply (M, K) by a weight (1, N, K), plus bias (N,): -> (M, N) in the activation's dtype."""
    rows, decode = _scaled_rows(activation)
    kernels, rows = _kernels_for(rows, activation.dtype)
    out: torch.Tensor = kernels.mm(rows, weight).float() * decode
    return (out if bias is None else out + bias).to(activation.dtype)


def _scaled_rows(
    activation: torch.Tensor, amax: float | None = None, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of `quantize_rows` times their block scales, exact in float32, and the decode scale."""
    values, scale, decode = quantize_rows(activation, amax, live)
    return (values.view(*scale.shape, BLOCK_SIZE) * scale.float()[..., None]).flatten(-2), decode


def _kernels_for(rows: torch.Tensor, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """Return the backend that multiplies rows of `_scaled_rows` for activations of a dtype, and the rows as it takes
    them.

    The rows have 6 significant bits. So bfloat16 holds them, and CUDA kernels for 16-bit rows have the same products;
    their result is rounded to bfloat16 twice, before and after the decode scale.
    """
    if dtype == torch.bfloat16 and runs_on_cuda(rows.device):
        return importlib.import_module("thunder_moe.kernels.cuda.backend"), rows.to(dtype)
    return reference, rows


def _round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code, saturating."""
    magnitude = x.abs().clamp_max(E2M1_MAX)
    # The steps are 0.5 up to 2, 1 up to 4 and 2 up to 6; halves of them round to even codes at every step.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)


moe_experts = functools.partial(unfused, sys.modules[__name__])
add_norm_mm = functools.partial(add_norm.add_norm_mm, mm=mm)
add_norm_linear_router = functools.partial(add_norm.add_norm_linear_router, linear_router=linear_router)

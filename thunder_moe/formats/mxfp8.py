"""The MXFP8 number format: `quantize`, `dequantize`, 8-bit floats (E4M3) with a power-of-two scale per 32 along K.
Called by kernels, ops, checkpoint and the registry; calls plain torch, weight, checks, gptq and what nvfp4 shares.

`weight` has the formula of a value. Legend: E experts, N output features, K input features of the GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.formats.block_format import MXFP8
from thunder_moe.formats.checks import require_type
from thunder_moe.formats.gptq import check_hessian, quantize_with_feedback
from thunder_moe.formats.mxfp8_tiled_64x64 import SCALE_OFFSET
from thunder_moe.formats.nvfp4 import check_amax as check_finite
from thunder_moe.formats.nvfp4 import check_quantizable as check_quantizable_in
from thunder_moe.formats.nvfp4 import decode, expert_amax, require_dense, row_chunks
from thunder_moe.formats.weight import MXFP8Weight

__all__ = [
    "BLOCK_SIZE",
    "E8M0_NAN",
    "MAX_SCALE",
    "MXFP8Weight",
    "check_amax",
    "check_quantizable",
    "dequantize",
    "dequantize_expert",
    "powers_of_two",
    "quantize",
    "quantize_rows",
    "quantize_unchecked",
]

BLOCK_SIZE = MXFP8.block_size
E8M0_NAN = 255
MAX_SCALE = E8M0_NAN - 1 - SCALE_OFFSET  # 2**39: the CUDA kernels decode what is larger to NaN
# The largest E4M3 number is 448 = 1.75 * 2**8. Of a float32 the upper bits are its exponent, the lower 23 its mantissa.
_E4M3_MAX = 448.0
_E4M3_MAX_EXPONENT = 8
_E4M3_MAX_MANTISSA = 0x600000
_MANTISSA_BITS = 23
_FLOAT16_LARGEST = 61440.0  # of E4M3 numbers times a power of two
_FLOAT16_INFINITE = 63488.0  # from here on the nearest E4M3 multiple is 65536


def quantize(weight: Tensor, *, scale_search: str | None = None, hessian: Tensor | None = None) -> MXFP8Weight:
    """Quantizes expert weights to MXFP8, a chunk at a time (little memory beyond the result).

    The ``scale`` of a block of 32 along K is the smallest power of two, at least 2**-127, that makes its largest
    magnitude at most 448; ``code = e4m3(x / scale)``, rounded to nearest even. This is the arithmetic of
    TransformerEngine, cuBLAS and torchao (its mode RCEIL). Like there, a block whose scale is 2**-127 (magnitudes up to
    2.6e-36) becomes zeros, which keep their signs.

    Args:
        weight: (E, N, K), float32, bfloat16 or float16, any strides; K a multiple of 32.
        scale_search: None: MXFP8 has no other scales to try.
        hessian: None, or X^T X of rows X, which rounds by GPTQ, as in `nvfp4.quantize`.

    Returns:
        MXFP8Weight in layout "linear". The relative Frobenius error on normally distributed weights is about 2.6%.

    Raises:
        ValueError: wrong rank, dtype or K, NaN or Inf in the weight, a float16 weight of 63488 or more, which would
            round to infinity, or a scale_search. Or the hessian is an error of `nvfp4.quantize`.
        TypeError: the weight or the hessian is not a tensor.
    """
    require_dense(weight)
    if hessian is not None:
        return _quantize_with_feedback(weight, hessian, scale_search)
    packed, amax = quantize_unchecked(weight, scale_search)
    check_amax(amax, weight.dtype)
    return packed


def _quantize_with_feedback(weight: Tensor, hessian: Tensor, scale_search: str | None) -> MXFP8Weight:
    check_quantizable(weight, scale_search)
    hessian, amax = check_hessian(hessian, weight), expert_amax(weight.detach())
    check_amax(amax, weight.dtype)
    largest = _FLOAT16_LARGEST if weight.dtype == torch.float16 else torch.inf  # errors of earlier columns add up

    def choose_scale(block: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        scale = _block_scale(block)
        return scale, powers_of_two(scale)

    def round_column(column: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
        # The scale fits the block before its first column was rounded: later columns may exceed 448 times it, and not
        # every torch saturates.
        most = (_E4M3_MAX * unit).clamp_max(largest)
        divisor = torch.where(unit < torch.finfo(torch.float32).tiny, 1.0, unit)  # as `_round`: exact, or 0
        codes = (column.clamp(-most, most) / divisor).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), codes.float() * unit

    with torch.autocast(weight.device.type, enabled=False):
        codes, scale = quantize_with_feedback(weight.detach(), hessian, amax, BLOCK_SIZE, choose_scale, round_column)
    return MXFP8Weight(codes.contiguous().view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))


def quantize_unchecked(weight: Tensor, scale_search: str | None = None) -> tuple[MXFP8Weight, Tensor]:
    """Quantize without the check of data; also return the largest magnitude (E,) of each expert, float32.

    If that is NaN or Inf, the expert's codes and scales are arbitrary.
    """
    check_quantizable(weight, scale_search)
    experts, n, k = weight.shape
    weight = weight.detach()
    qdata = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(experts, n, k // BLOCK_SIZE, dtype=torch.uint8, device=weight.device)
    for expert in range(experts):
        for rows in row_chunks(weight):
            qdata[expert, rows], scale[expert, rows] = quantize_rows(weight[expert, rows])
    return MXFP8Weight(qdata, scale.view(torch.float8_e8m0fnu)), expert_amax(weight)


def check_amax(amax: Tensor, dtype: torch.dtype) -> None:
    """Raises the ValueError of `quantize` by the largest magnitude (E,) of each expert. Synchronises."""
    check_finite(amax, dtype)
    infinite = amax >= _FLOAT16_INFINITE
    if dtype == torch.float16 and bool(infinite.any()):
        bad = infinite.nonzero().flatten().tolist()
        raise ValueError(
            f"weight: got a magnitude of {amax.max().item():g} in experts {bad[:8]}, which MXFP8 rounds to 65536, "
            f"beyond float16; wanted magnitudes below {_FLOAT16_INFINITE:g}, bfloat16 weights, or format 'nvfp4'"
        )


def check_quantizable(weight: Tensor, scale_search: str | None) -> None:
    """Raises the errors of `quantize` that do not need the data."""
    if scale_search is not None:
        raise ValueError(f"scale_search: got {scale_search!r}, wanted None: MXFP8 has one scale for a block")
    check_quantizable_in(weight, None, BLOCK_SIZE)


def dequantize(weight: MXFP8Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the dequantized weight, 16-bit or float32.

    ``(e4m3 * 2**(scale - 127)).to(dtype)``, the product in float32.

    Args:
        weight: any layout.
        dtype: float32, bfloat16 or float16.

    Returns:
        (E, N, K) of `dtype`, contiguous, on the weight's device.

    Raises:
        ValueError: another dtype.
        TypeError: weight is no `MXFP8Weight`.
    """
    require_type("weight", weight, MXFP8Weight, "an MXFP8Weight")
    return decode(weight, dtype, dequantize_expert)


def dequantize_expert(weight: MXFP8Weight, expert: int, out: Tensor) -> None:
    """Dequantizes one expert of a "linear" weight into `out` (N, K), a chunk of its rows at a time."""
    scale = weight.scale.view(torch.uint8)
    for rows in row_chunks(weight):
        factor = powers_of_two(scale[expert, rows])  # [R, K // 32]
        blocks = (*factor.shape, BLOCK_SIZE)
        torch.mul(weight.qdata[expert, rows].float().view(blocks), factor[..., None], out=out[rows].view(blocks))


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows (R, K) to float8_e4m3fn (R, K) and uint8 E8M0 scales (R, K // 32), the exponent plus 127."""
    blocks = rows.float().unflatten(-1, (rows.shape[-1] // BLOCK_SIZE, BLOCK_SIZE))  # [R, K // 32, 32]
    scale = _block_scale(blocks)
    return _round(blocks, scale).flatten(-2), scale


def _block_scale(blocks: Tensor) -> Tensor:
    """Return the scales uint8 (..., K // 32) of blocks (..., K // 32, 32) float32."""
    bits = blocks.abs().amax(-1).view(torch.int32)
    above = (bits & (1 << _MANTISSA_BITS) - 1) > _E4M3_MAX_MANTISSA
    return ((bits >> _MANTISSA_BITS) - _E4M3_MAX_EXPONENT + above).clamp_min_(0).to(torch.uint8)


def _round(blocks: Tensor, scale: Tensor) -> Tensor:
    """Round blocks (..., K // 32, 32) by their scales to float8_e4m3fn."""
    # 2**(127 - scale), by its bits; 1 where the scale is the least. Exact: powers of two, and what leaves the normal
    # floats is 0 as E4M3.
    scale = scale.int()
    inverse = torch.where(scale == 0, 127, 254 - scale).int() << _MANTISSA_BITS
    return (blocks * inverse.view(torch.float32)[..., None]).to(torch.float8_e4m3fn)


def powers_of_two(scale: Tensor) -> Tensor:
    """Convert E8M0 bytes to float32: 2**(scale - 127); the least is subnormal, 255 is NaN."""
    values = (scale.int() << _MANTISSA_BITS).view(torch.float32)
    values = torch.where(scale == 0, 2.0**-127, values)
    return torch.where(scale == E8M0_NAN, torch.nan, values)

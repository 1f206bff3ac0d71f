"""The NVFP4 number format: `quantize`, `dequantize`.
Called by registry, mxfp8, kernels, nn, ops, quantization and integrations; calls plain torch, weight, checks and gptq.

`weight` has the formula of a value. Legend: E experts, N output features, K input features of the GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import require, require_type
from thunder_moe.formats.gptq import check_hessian, damping, quantize_with_feedback
from thunder_moe.formats.layouts import BLOCK_SIZE, LAYOUTS, LINEAR, scale_shape
from thunder_moe.formats.weight import NVFP4Weight, PackedWeight

__all__ = [
    "BLOCK_SIZE",
    "E2M1_MAX",
    "E4M3_MAX",
    "LAYOUTS",
    "WEIGHT_DTYPES",
    "NVFP4Weight",
    "check_amax",
    "check_quantizable",
    "decode",
    "dequantize",
    "dequantize_expert",
    "expert_amax",
    "quantize",
    "quantize_unchecked",
    "row_chunks",
    "scale_shape",
]

E2M1_MAX = 6.0
E4M3_MAX = 448.0
SCALE_SEARCHES = ("mse",)

# Weights handled at a time: what fits a CPU's L2 cache; on a GPU, temporaries of at most 0.5 GB.
_CHUNK_WEIGHTS = {"cpu": 2**18, "cuda": 2**24}
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Block scales that "mse" tries, in steps of E4M3 from the usual one: its neighbours, and 3/2 of it, which brings the
# largest weight of the block from 6 to 4, where codes lie closer. On normal weights 20.4 dB become 21.7; all of -8 to
# 11 give 21.8.
_SCALE_STEPS = (-1, 1, 4, 5)


def quantize(weight: Tensor, *, scale_search: str | None = None, hessian: Tensor | None = None) -> NVFP4Weight:
    """Quantizes expert weights to NVFP4, a chunk at a time (little memory beyond the result).

    Per expert ``global = amax / 2688`` (1 if amax is 0); per block of 16 along K
    ``scale = e4m3(blockamax / (6 * global))``; ``code = e2m1(x / (scale * global))``. All roundings are to nearest
    even and saturate; scales are not clamped from below, and a block whose scale rounds to 0 is all zeros. This is
    the arithmetic of TransformerEngine's NVFP4 kernels, with one global scale per expert.

    Args:
        weight: (E, N, K), float32, bfloat16 or float16, any strides; K a multiple of 16.
        scale_search: None, or "mse": tries a few scales for each block and keeps the one of least squared error. Such
            weights are too small in sum, by 0.7 %, all experts alike. So the expert's global scale is then multiplied
            by ``sum(x * x) / sum(x * q)``, q the dequantized weights. Four times slower.
        hessian: None, or X^T X of rows X that the weight multiplies, float32 (E, K, K), or (K, K) for all experts.
            Rounds so that the error of the products with such rows is small. First by GPTQ: column by column, each
            error subtracted from later columns; a block's scale is chosen when it is reached. Then each column twice
            more, with all others as they are (coordinate descent). With "mse" the global scale's factor is
            ``tr(W H W^T) / tr(W H Q^T)``. 1 % of the mean of the Hessian's diagonal is added to the diagonal. A column
            without rows is rounded to nearest, and an identity gives the codes of None. Takes four seconds for 1536 x
            2048 weights on a CPU, and half a gigabyte (eight on a GPU), or 24 * K^2 bytes if that is more.

    Returns:
        NVFP4Weight in layout "linear", global_scale (E,). The relative Frobenius error on normally distributed
        weights is about 9.5%, with "mse" 8.2%.

    Raises:
        ValueError: wrong rank, dtype or K, NaN or Inf in the weight, none on "meta", or an unknown scale_search. Or
            the hessian does not fit the weight, or is not finite, symmetric and positive semidefinite.
        TypeError: the weight or the hessian is not a tensor.
    """
    require_dense(weight)
    if hessian is not None:
        return _quantize_with_feedback(weight, hessian, scale_search)
    packed, amax = quantize_unchecked(weight, scale_search)
    check_amax(amax, weight.dtype)
    return packed


def _quantize_with_feedback(weight: Tensor, hessian: Tensor, scale_search: str | None) -> NVFP4Weight:
    check_quantizable(weight, scale_search)
    hessian, amax = check_hessian(hessian, weight), expert_amax(weight.detach())
    check_amax(amax, weight.dtype)

    def choose_scale(block: Tensor, of_expert: Tensor) -> tuple[Tensor, Tensor]:
        scale = _block_scale(block.abs()[:, :, None], of_expert[..., None], scale_search is not None)[..., 0]
        return scale, scale.float() * of_expert

    edges, all_codes, all_values = _signed_codes(weight.device)

    def round_column(column: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
        # Columns are short, so few operations count. A block whose scale is 0 is all zeros, without signs.
        at = torch.bucketize(column / torch.where(unit > 0, unit, torch.inf), edges, out_int32=True)
        return all_codes[at], all_values[at] * unit

    weight, global_scale = weight.detach(), _global_scale(amax)
    with torch.autocast(weight.device.type, enabled=False):
        codes, scale = quantize_with_feedback(weight, hessian, global_scale, BLOCK_SIZE, choose_scale, round_column)
        packed = NVFP4Weight(codes[..., 0::2] | codes[..., 1::2] << 4, scale, global_scale)
        if scale_search is None:
            return packed
        return replace(
            packed, global_scale=unbiased_scale(global_scale, _products(weight, packed, hessian), weight.dtype)
        )


def _products(weight: Tensor, packed: NVFP4Weight, hessian: Tensor) -> Tensor:
    """Return tr(W H W^T) and tr(W H Q^T) of each expert, float64 (E, 2), with the damping of GPTQ in H."""
    sums = torch.empty(len(weight), 2, dtype=torch.float64, device=weight.device)
    for expert, own in enumerate(hessian):
        exact = weight[expert].float()
        weighted = exact @ own + damping(own) * exact
        rounded = torch.empty_like(exact, memory_format=torch.contiguous_format)
        dequantize_expert(packed, expert, rounded)
        for at, other in enumerate((exact, rounded)):
            sums[expert, at] = (weighted * other).sum(dtype=torch.float64)
    return sums


def quantize_unchecked(weight: Tensor, scale_search: str | None = None) -> tuple[NVFP4Weight, Tensor]:
    """Quantize without the check of data; also return the largest magnitude (E,) of each expert, float32.

    If that is NaN or Inf, the expert's codes and scales are arbitrary.
    """
    check_quantizable(weight, scale_search)
    experts, n, k = weight.shape
    weight = weight.detach()
    amax = expert_amax(weight)
    global_scale = _global_scale(amax)
    qdata = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(experts, n, k // BLOCK_SIZE, dtype=torch.float8_e4m3fn, device=weight.device)
    sums = torch.zeros(experts, 2, dtype=torch.int64, device=weight.device)
    for expert in range(experts):
        for rows in row_chunks(weight):
            qdata[expert, rows], scale[expert, rows], of_rows = _quantize_rows(
                weight[expert, rows], global_scale[expert], scale_search is not None
            )
            sums[expert] += of_rows
    if scale_search is not None:
        global_scale = unbiased_scale(global_scale, sums, weight.dtype)
    return NVFP4Weight(qdata, scale, global_scale), amax


def unbiased_scale(global_scale: Tensor, sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return global scales (E,) that make sum(x * q) equal to sum(x * x), while q stays finite in the weight's dtype.

    Args:
        global_scale: float32 (E,), by which the weights were rounded.
        sums: (E, 2), sum(x * x) and sum(x * q) in squares of it. Rounding has them in int64, each block's part rounded,
            so that they do not depend on the order. The scale of an expert with zeros is not changed.
    """
    squares, products = sums.double().unbind(1)
    most = torch.finfo(dtype).max / (E2M1_MAX * E4M3_MAX)
    return torch.where(products > 0, global_scale * (squares / products), global_scale.double()).clamp_max(most).float()


def _global_scale(amax: Tensor) -> Tensor:
    """Return the global scale (E,) of experts by their largest magnitude (E,)."""
    # Below 2688 * tiny (3e-35) the multiplier would leave the normal floats: hold it there.
    tiny = torch.finfo(torch.float32).tiny
    # The divisor is a tensor because torch multiplies by the rounded reciprocal of a scalar on CUDA.
    return torch.where(amax > 0, (amax / torch.full_like(amax, E2M1_MAX * E4M3_MAX)).clamp_min(tiny), 1.0)


def require_dense(weight: Tensor) -> None:
    """Raises the error of `quantize` for anything but a dense tensor with data."""
    require_type("weight", weight, Tensor, "a tensor (experts, out_features, in_features)")
    dense = weight.layout == torch.strided and not weight.is_meta
    require(dense, "weight", weight, "a dense tensor (torch.strided) that is not on meta")


def check_quantizable(weight: Tensor, scale_search: str | None, block_size: int = BLOCK_SIZE) -> None:
    """Raises the errors of `quantize` that do not need the data."""
    if scale_search is not None and scale_search not in SCALE_SEARCHES:
        raise ValueError(f"scale_search: got {scale_search!r}, wanted None or one of {SCALE_SEARCHES}")
    require(weight.ndim == 3, "weight", weight, "shape (experts, out_features, in_features)")
    require(weight.dtype in WEIGHT_DTYPES, "weight", weight, "dtype float32, bfloat16 or float16")
    experts, _, k = weight.shape
    require(experts > 0, "weight", weight, "at least one expert in dim 0")
    require(k > 0 and k % block_size == 0, "weight", weight, f"in_features a positive multiple of {block_size}")


def expert_amax(weight: Tensor) -> Tensor:
    """Return the largest magnitude (E,) of each expert of (E, N, K), float32; 0 without rows."""
    if weight.shape[1] == 0:
        return torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
    return torch.maximum(-weight.amin((1, 2)), weight.amax((1, 2))).float()


def check_amax(amax: Tensor, dtype: torch.dtype) -> None:
    """Raises the ValueError of `quantize` if the largest magnitude (E,) of an expert is NaN or Inf. Synchronises."""
    if not bool(torch.isfinite(amax).all()):
        bad = (~torch.isfinite(amax)).nonzero().flatten().tolist()
        raise ValueError(f"weight: got NaN or Inf in experts {bad[:8]}, wanted finite values")


def dequantize(weight: NVFP4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the dequantized weight, 16-bit or float32.

    ``(e2m1 * (scale * global_scale)).to(dtype)``, both products in float32.

    Args:
        weight: any layout.
        dtype: float32, bfloat16 or float16.

    Returns:
        (E, N, K) of `dtype`, contiguous, on the weight's device.

    Raises:
        ValueError: another dtype.
        TypeError: weight is no `NVFP4Weight`.
    """
    require_type("weight", weight, NVFP4Weight, "an NVFP4Weight")
    return decode(weight, dtype, dequantize_expert)


def decode(weight: PackedWeight, dtype: torch.dtype, expert_into: Callable[[Any, int, Tensor], None]) -> Tensor:
    """Return a weight (E, N, K) as `dequantize` does, by the function `dequantize_expert` of its format."""
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype: got {dtype}, wanted one of {WEIGHT_DTYPES}")
    weight = weight.to_layout(LINEAR)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for expert in range(0 if out.is_meta else weight.shape[0]):
        expert_into(weight, expert, out[expert])
    return out


def dequantize_expert(weight: NVFP4Weight, expert: int, out: Tensor) -> None:
    """Dequantizes one expert of a "linear" weight into `out` (N, K), a chunk of its rows at a time."""
    global_scale = weight.row_global_scale()
    for rows in row_chunks(weight):
        _dequantize_rows(weight.qdata[expert, rows], weight.scale[expert, rows], global_scale[expert, rows], out[rows])


def _dequantize_rows(qdata: Tensor, scale: Tensor, global_scale: Tensor, out: Tensor) -> None:
    """Dequantizes rows of one expert, (R, K // 2), (R, K // 16) linear and (R,), into a contiguous `out` (R, K)."""
    # One gather fetches two values: as bfloat16 (which holds E2M1 exactly) the pair of a byte is one 32-bit word.
    pairs = _pair_table(out.device).index_select(0, qdata.flatten().int()).view(torch.bfloat16)
    factor = scale.float() * global_scale[:, None]  # [R, K // 16]
    blocks = (*factor.shape, BLOCK_SIZE)
    torch.mul(pairs.view(blocks).float(), factor[..., None], out=out.view(blocks))


def _quantize_rows(rows: Tensor, global_scale: Tensor, search: bool) -> tuple[Tensor, Tensor, Any]:
    """Quantize rows (R, K) with a 0-d global scale to codes uint8 (R, K // 2) and scales float8_e4m3fn (R, K // 16).

    Also return the rows' part of the sums of `unbiased_scale`, (2,) after a search, else 0.
    """
    blocks = rows.float().reshape(len(rows), -1, BLOCK_SIZE)  # [R, K // 16, 16]
    magnitudes = blocks.abs()
    scale = _block_scale(magnitudes, global_scale, search)
    codes, live = _round_magnitudes(magnitudes, scale, global_scale)
    sums: Any = 0
    if search:
        relative = magnitudes / global_scale
        values = _values(codes) * scale.float()[..., None]
        sums = torch.stack([_sum_of_16(relative * each).round().long().sum() for each in (relative, values)])
    codes = codes.to(torch.uint8)
    codes |= (torch.signbit(blocks) & live[..., None]).to(torch.uint8) << 3
    codes = codes.flatten(-2)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale, sums


def _block_scale(magnitudes: Tensor, global_scale: Tensor, search: bool) -> Tensor:
    """Return the scales (..., K // 16) of blocks (..., K // 16, 16); the global scale broadcasts with the scales."""
    scale = (magnitudes.amax(-1) / (E2M1_MAX * global_scale)).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    return _least_error_scale(magnitudes, scale, global_scale) if search else scale


def _signed_codes(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the edges (15,) between codes by their values, for `torch.bucketize`, and the codes and values (16,).

    An edge belongs to the bucket below it. A tie goes to the even code, so some edges move by one float. What is
    rounded to 0 keeps its sign.
    """
    codes = torch.arange(8, device=device)
    values = _values(codes.float())
    edges, even = (values[1:] + values[:-1]) / 2, codes[:-1] % 2 == 0
    upper = torch.where(even, edges, torch.nextafter(edges, torch.zeros_like(edges)))
    lower = -torch.where(even, torch.nextafter(edges, torch.full_like(edges, torch.inf)), edges)
    zero = -torch.full_like(edges[:1], torch.finfo(torch.float32).tiny)
    all_codes = torch.cat([codes.flip(0) + 8, codes]).to(torch.uint8)
    return torch.cat([lower.flip(0), zero, upper]), all_codes, torch.cat([-values.flip(0), values])


def _values(codes: Tensor) -> Tensor:
    """Return the magnitudes of codes 0 to 7, given as floats."""
    # Values against codes are the upper envelope of c / 2, c - 2 and 2 c - 8.
    return torch.maximum(torch.maximum(codes * 0.5, codes - 2), (codes * 2).sub_(8))


def _round_magnitudes(magnitudes: Tensor, scale: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round blocks (R, K // 16, 16) by their scales to codes 0 to 7 as floats; also return which are not zeros."""
    divisor = scale.float() * global_scale
    live = divisor > 0  # a block whose scale is 0 is all zeros, without signs
    scaled = (magnitudes / torch.where(live, divisor, torch.inf)[..., None]).clamp_max_(E2M1_MAX)
    # Codes against magnitudes are the lower envelope of 2 x, x + 2 and x / 2 + 4, each rounded to nearest even.
    # 1.2 ms for 2**18 weights on one Zen 5 core, 5.1 ms with torch.bucketize.
    codes = torch.minimum((scaled * 2).round_(), scaled.round().add_(2))
    return torch.minimum(codes, scaled.mul_(0.5).round_().add_(4)), live


def _least_error_scale(magnitudes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return each block's scale of least squared error among those `_SCALE_STEPS` away; ties keep the first."""
    usual = scale.view(torch.uint8).int()
    relative = magnitudes / global_scale[..., None]  # at most 2688, so that no square leaves the floats
    best, least = scale.view(torch.uint8), torch.full_like(scale, torch.inf, dtype=torch.float32)
    for step in (0, *_SCALE_STEPS):
        bits = (usual + step).clamp_(0, 126).to(torch.uint8)  # 126 is 448, 127 is NaN
        tried = bits.view(torch.float8_e4m3fn)
        codes, _ = _round_magnitudes(magnitudes, tried, global_scale)
        error = _sum_of_16(_values(codes).mul_(tried.float()[..., None]).sub_(relative).square_())
        better = error < least
        best, least = torch.where(better, bits, best), torch.where(better, error, least)
    return best.view(torch.float8_e4m3fn)


def _sum_of_16(values: Tensor) -> Tensor:
    """Sum the last dimension, halves first, so that order and bits are the same on every device."""
    for half in (8, 4, 2, 1):
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


_PAIR_TABLES: dict[torch.device, Tensor] = {}


def _pair_table(device: torch.device) -> Tensor:
    """Return int32 (256,), the two values of each byte as bfloat16, the low nibble first in memory.

    The table is made on the device, because a copy from the host would synchronise. It is kept, but not while a CUDA
    graph is captured, which would own its memory.
    """
    table = _PAIR_TABLES.get(device)
    if table is None:
        byte = torch.arange(256, device=device)
        code = torch.stack([byte & 15, byte >> 4], -1)  # [256, 2]
        exponent, mantissa = (code >> 1) & 3, code & 1
        # In halves: 0 and 1 below the first exponent, then (2 + mantissa) * 2**(exponent - 1).
        halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp_min(0))
        values = torch.where(code >= 8, -0.5, 0.5) * halves
        table = values.bfloat16().view(torch.int32).flatten()
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _PAIR_TABLES[device] = table
    return table


def row_chunks(weight: Tensor | PackedWeight) -> list[slice]:
    """Return slices that cover the N rows of an expert of (E, N, K), of about `_CHUNK_WEIGHTS` weights each."""
    _, n, k = weight.shape
    step = max(1, _CHUNK_WEIGHTS.get(weight.device.type, _CHUNK_WEIGHTS["cuda"]) // k)
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]

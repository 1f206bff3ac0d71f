"""The kernels of training in plain torch: their definition, what a CPU runs, and what tests compare others with.
Called through kernels.select; calls activations, routing, recipes and, for products of 4-bit weights, kernels.select.

Every function takes operands of any strides and gives contiguous results, like the operators' fakes. Rows past the last
row end may hold anything: they contribute nothing. Results are zero there; in a buffer of the caller these rows are not
written. Sums over rows are float32 in a fixed order.

Legend: M rows sorted by expert, E experts, N out_features, K in_features, I intermediate_size; offsets int32 (E,)
row ends.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.batch_invariance import by_rows, is_batch_invariant
from thunder_moe.kernels.recipes import QuantizedProducts, quantize, quantize_codes, quantize_columns
from thunder_moe.kernels.reference import combine
from thunder_moe.kernels.select import select
from thunder_moe.routing import expert_of_row, gather_rows, live_rows, row_groups

__all__ = [
    "add_bias",
    "bias_grad",
    "bias_scale_grad",
    "combine_rows",
    "dgrad",
    "gather_low_rank",
    "gathered_wgrad",
    "grouped_mm",
    "grouped_mm_low_rank",
    "grouped_mm_low_rank_dgrad",
    "quantize",
    "quantize_codes",
    "quantize_columns",
    "quantized_products",
    "scaled_activation",
    "scaled_activation_gradient",
    "swiglu_gradient_and_value",
    "wgrad",
]


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply (M, K) by (E, N, K): -> (M, N) in the rows' dtype, contiguous, and written into `out` if given."""
    m, n = rows.shape[0], weight.shape[1]
    result = rows.new_empty(m, n) if out is None else out
    groups = row_groups(offsets, m)
    for expert, begin, end in groups:
        matrix = weight[expert].t()
        if is_batch_invariant():
            result[begin:end] = by_rows(functools.partial(torch.mm, mat2=matrix), rows[begin:end])
        else:
            torch.mm(rows[begin:end], matrix, out=result[begin:end])
    if out is None:
        result[groups[-1][2] if groups else 0 :].zero_()
    return result


def grouped_mm_low_rank(rows: Tensor, weight: NVFP4Weight, offsets: Tensor, inner: Tensor, b: Tensor) -> Tensor:
    """Compute rows (M, K) x a 4-bit weight (E, N, K) + inner (M, R) x b (E, N, R) -> (M, N), undefined past the end."""
    out: Tensor = select(rows.device).grouped_mm(rows, weight, offsets)
    return out.add_(grouped_mm(inner, b, offsets))


def grouped_mm_low_rank_dgrad(grad: Tensor, weight: NVFP4Weight, offsets: Tensor, outer: Tensor, a: Tensor) -> Tensor:
    """Compute grad (M, N) x a 4-bit weight (E, N, K) + outer (M, R) x a (E, R, K) -> (M, K), undefined past the end."""
    out: Tensor = select(grad.device).grouped_mm_dgrad(grad, weight, offsets)
    return out.add_(grouped_mm(outer, a.mT, offsets))


def gather_low_rank(tokens: Tensor, row_slot: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Gather tokens (T, K) by row_slot (M,); multiply by (E, R, K): -> rows (M, K), product (M, R), both undefined past
    the end."""
    rows = gather_rows(tokens, row_slot)
    return rows, grouped_mm(rows, weight, offsets)


def gathered_wgrad(tokens: Tensor, row_slot: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Return `wgrad` (E, N, K) of rows gathered from tokens (T, K), and their gradient (M, N)."""
    return wgrad(gather_rows(tokens, row_slot), grad, offsets)


def dgrad(grad: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply the gradient (M, N) of the output by (E, N, K): -> gradient (M, K) of the rows."""
    return grouped_mm(grad, weight.transpose(1, 2), offsets, out)


def wgrad(rows: Tensor, grad: Tensor, offsets: Tensor, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """Return the weight's gradient (E, N, K) in the rows' dtype, from rows (M, K) and the output's gradient (M, N).

    Args:
        out: float32 (E, N, K), contiguous: the gradient goes there, float32 from the products on.
        accumulate: it is added to `out`, where experts without rows are not written; otherwise it replaces the contents
            of `out`.
    """
    result = rows.new_zeros(offsets.shape[0], grad.shape[1], rows.shape[1]) if out is None else out
    if out is not None and not accumulate:
        out.zero_()
    for expert, begin, end in row_groups(offsets, rows.shape[0]):
        of_expert, inputs = grad[begin:end].t(), rows[begin:end]
        if out is None:
            torch.mm(of_expert, inputs, out=result[expert])
        else:
            result[expert].addmm_(of_expert.float(), inputs.float())
    return result


def quantized_products(recipe: str) -> QuantizedProducts:
    """Return `grouped_mm`, `dgrad` and `wgrad` of operands that a recipe rounds."""
    return QuantizedProducts(sys.modules[__name__], recipe)


def add_bias(
    y: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``(y + bias[expert] * bias_scale) * scales`` in float32, rounded once: (M, N), bias (E, N), (M,) each ->
    (M, N).

    `out` may be y itself.
    """
    wide = y.float()
    if bias is not None:
        of_row = bias[expert_of_row(offsets, y.shape[0])].float()
        wide = wide + (of_row if bias_scale is None else of_row * bias_scale.float()[:, None])
    if scales is not None:
        wide = wide * scales.float()[:, None]
    live = live_rows(offsets, y.shape[0])
    if out is None:
        return torch.where(live, wide, 0).to(y.dtype).contiguous()
    return out.copy_(torch.where(live, wide.to(out.dtype), out))


def bias_grad(grad: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """Sum each expert's rows of the output's gradient (M, N), times scale (M,): -> float32 (E, N)."""
    result = grad.new_zeros(offsets.shape[0], grad.shape[1], dtype=torch.float32)
    for expert, begin, end in row_groups(offsets, grad.shape[0]):
        of_expert = grad[begin:end].float()
        if scale is not None:
            of_expert = of_expert * scale[begin:end].float()[:, None]
        torch.sum(of_expert, 0, out=result[expert])
    return result


def bias_scale_grad(grad: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each row of the output's gradient (M, N) with its expert's bias (E, N): -> float32 (M,)."""
    of_row = bias[expert_of_row(offsets, grad.shape[0])].float()
    return torch.where(live_rows(offsets, grad.shape[0]), grad.float() * of_row, 0).sum(-1)


def combine_rows(rows: Tensor, offsets: Tensor, slot_row: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum rows (M, N), slot_row int32 (T, A) -> (T, N) in the rows' dtype, contiguous and in `out` if it is given,
    summed in float32; -1: no row."""
    sums = combine(rows, offsets, slot_row, None, None)
    return sums if out is None else out.copy_(sums)


def scaled_activation(
    y: Tensor,
    scales: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    form: SwiGLUConfig | None,
    interleave: int | None = None,
) -> Tensor:
    """Activate (M, 2I) -> (M, I) by a form of SwiGLU, or (M, I) by ``relu(y)**2`` without one, times scales (M,).

    It computes in float32 and rounds once, to y's dtype.

    Args:
        interleave: s, if gate and up alternate every s columns: ``y.view(M, I // s, 2, s)``; None: the gate's I columns
            come first.
        offsets: row ends, past which the result is zero; None: all rows are live.
    """
    out = _activated(y, None) if form is None else by_rows(lambda rows: _activated(rows, form, interleave), y)
    if scales is not None:
        out = out * scales.float()[:, None]
    return _live(out, offsets).to(y.dtype).contiguous()


def scaled_activation_gradient(
    grad: Tensor,
    y: Tensor,
    scales: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    form: SwiGLUConfig | None,
    interleave: int | None = None,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients that `needs` asks for, from (M, I) of `scaled_activation`'s output: of y, in its dtype, and
    of scales (M,), in theirs."""
    wide = grad.float()
    of_y = of_scales = None
    if needs[0]:
        scaled = wide if scales is None else wide * scales.float()[:, None]
        if form is None:
            of_y = 2 * scaled * y.float().relu()
        else:
            of_y = form.gradient(scaled, torch.cat(_gate_up(y, interleave), -1))
            if interleave is not None:
                of_y = of_y.unflatten(-1, (2, -1, interleave)).transpose(1, 2).flatten(1)
        of_y = _live(of_y, offsets).to(y.dtype).contiguous()
    if needs[1] and scales is not None:
        of_scales = _live(wide * _activated(y, form, interleave), offsets).sum(-1).to(scales.dtype)
    return of_y, of_scales


def swiglu_gradient_and_value(
    grad: Tensor, y: Tensor, scales: Tensor | None, offsets: Tensor | None, *, form: SwiGLUConfig, needs_scales: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the results of `scaled_activation_gradient` (for both, or y alone) and of `scaled_activation`."""
    of_y, of_scales = scaled_activation_gradient(grad, y, scales, offsets, form=form, needs=(True, needs_scales))
    assert of_y is not None
    return of_y, of_scales, scaled_activation(y, scales, offsets, form=form)


def _activated(y: Tensor, form: SwiGLUConfig | None, interleave: int | None = None) -> Tensor:
    """Return the activation (M, I) in float32."""
    return y.float().relu().square() if form is None else form(*_gate_up(y, interleave))


def _gate_up(y: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    """Return gate and up (M, I) in float32."""
    wide = y.float()
    if interleave is not None:
        wide = wide.unflatten(-1, (-1, 2, interleave)).transpose(1, 2).flatten(1)
    gate, up = wide.chunk(2, -1)
    return gate, up


def _live(tensor: Tensor, offsets: Tensor | None) -> Tensor:
    return tensor if offsets is None else torch.where(live_rows(offsets, tensor.shape[0]), tensor, 0)

"""The operators of a LoRA adapter beside 4-bit weights, where one kernel does more than one step.
Called by ops.experts_lora; calls kernels.select.

    grouped_mm_low_rank, grouped_mm_low_rank_dgrad   the GEMM of a 4-bit weight plus its adapter's
    moe_gather_low_rank                              rows of tokens, and their product with A or B
    moe_gathered_wgrad                               gradient of A from the tokens, without their rows
    swiglu_backward_and_value                        gradients of the activation, and its value

    y = rows x weight + inner x b                 inner = rows x a, (M, R)
    gradient of rows = grad x weight + outer x a  outer = grad x b, (M, R)

None of them is differentiable. Legend: T tokens, M rows sorted by expert, E experts, N out_features, K in_features, R
rank.
"""

from __future__ import annotations

from torch import Tensor

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels.select import training_kernels
from thunder_moe.ops.grouped_linear import int32_offsets, training_operator


@training_operator(lambda rows, codes, *_: rows.new_empty(rows.shape[0], codes.shape[2]))
def _grouped_mm_low_rank(
    rows: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, offsets: Tensor, inner: Tensor, b: Tensor,
    layout: str = LINEAR,
) -> Tensor:  # fmt: skip
    """Multiply rows (M, K) by the weight, and add inner (M, R) times b (E, N, R): -> (M, N)."""
    weight = WeightOperands(fp4_weight, scale, global_scale).packed(layout)
    ends = int32_offsets(offsets, rows.shape[0])
    return training_kernels(rows.device).grouped_mm_low_rank(rows, weight, ends, inner, b)


@training_operator(lambda grad, codes, *_: grad.new_empty(grad.shape[0], 2 * codes.shape[1]))
def _grouped_mm_low_rank_dgrad(
    grad: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, offsets: Tensor, outer: Tensor, a: Tensor,
    layout: str = LINEAR,
) -> Tensor:  # fmt: skip
    """Multiply grad (M, N) by the weight, and add outer (M, R) times a (E, R, K): -> (M, K)."""
    weight = WeightOperands(fp4_weight, scale, global_scale).packed(layout)
    ends = int32_offsets(offsets, grad.shape[0], "grad")
    return training_kernels(grad.device).grouped_mm_low_rank_dgrad(grad, weight, ends, outer, a)


def _fake_gather(
    tokens: Tensor, row_slot: Tensor, matrix: Tensor, offsets: Tensor, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    rows = row_slot.shape[0]
    return tokens.new_empty(rows, tokens.shape[1]), tokens.new_empty(rows, matrix.shape[2 if transposed else 1])


@training_operator(_fake_gather)
def _moe_gather_low_rank(
    tokens: Tensor, row_slot: Tensor, matrix: Tensor, offsets: Tensor, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Gather tokens (T, K) by row_slot (M,); multiply by (E, R, K), or (E, K, R) if transposed: -> (M, K), (M, R)."""
    ends = int32_offsets(offsets, row_slot.shape[0])
    rows, product = training_kernels(tokens.device).gather_low_rank(
        tokens, row_slot, matrix.mT if transposed else matrix, ends
    )
    return rows, product


@training_operator(
    lambda tokens, row_slot, grad, offsets: tokens.new_empty(offsets.shape[0], grad.shape[1], tokens.shape[1])
)
def _moe_gathered_wgrad(tokens: Tensor, row_slot: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient (E, R, K) of A, from tokens (T, K), row_slot (M,) and the gradient (M, R)."""
    ends = int32_offsets(offsets, row_slot.shape[0])
    return training_kernels(tokens.device).gathered_wgrad(tokens, row_slot, grad, ends)


def _fake_swiglu_backward(
    grad: Tensor, y: Tensor, scales: Tensor | None, offsets: Tensor, needs_scales: bool, *_: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    of_scales = y.new_empty(0) if scales is None or not needs_scales else scales.new_empty(y.shape[0])
    return y.new_empty(y.shape), of_scales, y.new_empty(grad.shape)


@training_operator(_fake_swiglu_backward)
def _swiglu_backward_and_value(
    grad: Tensor, y: Tensor, scales: Tensor | None, offsets: Tensor, needs_scales: bool, alpha: float = 1.0,
    limit: float | None = None, up_shift: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of y (M, 2I) and of scales (empty if not needed), and the value of `scaled_activation`."""
    of_y, of_scales, value = training_kernels(y.device).swiglu_gradient_and_value(
        grad, y, scales, int32_offsets(offsets, y.shape[0], "y"), form=SwiGLUConfig(alpha, limit, up_shift),
        needs_scales=needs_scales,
    )  # fmt: skip
    return of_y, y.new_empty(0) if of_scales is None else of_scales, value

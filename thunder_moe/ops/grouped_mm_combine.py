"""The operator thunder_moe::f16a_nvfp4weight_grouped_mm_combine: the second expert GEMM and the weighted sum per token;
and the same for MXFP8 weights.
Called by users and ops.experts; calls kernels.select and kernels.gradients.

rows (M, K) -> GEMM -> + bias -> times the router's weight -> sum over each token's slots -> (T, N)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import mismatch, require
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels import gradients
from thunder_moe.kernels.select import select
from thunder_moe.ops import grouped_linear  # noqa: F401  (registers grouped_bias_grad)
from thunder_moe.ops.checks import check_index_values, check_offset_values, check_operands, check_optional
from thunder_moe.ops.grouped_mm import gemm_and_dgrad
from thunder_moe.ops.operator import OPERATORS, weight_operator


def _shapes(
    activation: Tensor, weight: WeightOperands, offsets: Tensor, slot_row: Tensor, *_: Any, **__: Any
) -> tuple[tuple[int, int]]:
    return ((slot_row.shape[0], weight.codes.shape[2]),)


def _check(
    activation: Tensor, weight: WeightOperands, offsets: Tensor, slot_row: Tensor, slot_weight: Tensor | None = None,
    bias: Tensor | None = None, *, layout: str = LINEAR,
) -> None:  # fmt: skip
    check_operands(activation, weight, offsets, layout)
    experts, _, features = weight.codes.shape
    require(slot_row.ndim == 2, "slot_row", slot_row, "shape (tokens, top_k)")
    require(slot_row.dtype == torch.int32, "slot_row", slot_row, "dtype int32")
    if slot_row.device != activation.device:
        raise mismatch("slot_row", slot_row, f"device {activation.device}")
    check_optional("slot_weight", slot_weight, tuple(slot_row.shape), activation)
    check_optional("bias", bias, (experts, features), activation)


def _check_values(
    activation: Tensor, weight: WeightOperands, offsets: Tensor, slot_row: Tensor, *_: Any, **__: Any
) -> None:
    check_offset_values(offsets, activation.shape[0])
    if offsets.device.type == "cpu":
        check_index_values("slot_row", slot_row, -1, int(offsets[-1]), "the rows of the experts, or -1 for none")


def _gradient(
    grad: Tensor, activation: Tensor, weight: WeightOperands, offsets: Tensor, slot_row: Tensor,
    *weights: Tensor | None, needs: gradients.Needs, layout: str = LINEAR,
) -> gradients.Gradients:  # fmt: skip
    gemms = gemm_and_dgrad(weight, offsets, layout)
    return gradients.grouped_mm_combine(grad, activation, offsets, slot_row, *weights, gemms=gemms, needs=needs)


@weight_operator(
    shapes=_shapes,
    check=_check,
    check_values=_check_values,
    gradient=_gradient,
    differentiable=("activation", "slot_weight", "bias"),
)
def f16a_nvfp4weight_grouped_mm_combine(
    activation: Tensor,
    weight: WeightOperands,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = LINEAR,
) -> Tensor:
    """Compute ``out[t] = sum over a of slot_weight[t, a] * (activation[slot_row[t, a]] @ w[e].T + bias[e])``.

    The sum is made in float32 and in a fixed order. Differentiable in `activation`, `slot_weight` and `bias`.

    Args:
        activation: (M, K) bfloat16, float16 (or float32), rows sorted by expert.
        fp4_weight: (E, K // 2, N), the transposed view of qdata.
        weight_scaling_factor: float8_e4m3fn block scales, (E, N, K // 16) when linear.
        weight_global_scale: float32 (E,) or (E, N).
        offsets: int32 (E,), cumulative row ENDS.
        slot_row: int32 (T, A), the row of each slot, as `moe_route` gives it; -1 for a slot that counts nothing.
        slot_weight: floating point (T, A), the router's weights; 1 when None.
        bias: floating point (E, N).
        layout: the layout of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.

    Returns:
        (T, N) in the activation's dtype.

    Raises:
        ValueError: as `f16a_nvfp4weight_scaled_grouped_mm`, and for slot_row, slot_weight or bias of a wrong shape,
            dtype or device; on a CPU also for rows in slot_row below -1 or past the experts' rows. Elsewhere slots
            without a row of the activation count nothing.
    """
    kernel = select(activation.device, format=weight.format.name).grouped_mm_combine
    return kernel(activation, weight.packed(layout), offsets, slot_row, slot_weight, bias)


f16a_mxfp8weight_grouped_mm_combine = OPERATORS["f16a_mxfp8weight_grouped_mm_combine"].public

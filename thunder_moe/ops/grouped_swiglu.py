"""The operator thunder_moe::f16a_nvfp4weight_grouped_swiglu: gate and up projection in one GEMM, SwiGLU in the same op;
and the same for MXFP8 weights.
Called by nn, ops.experts and compiled graphs; calls kernels.select and kernels.gradients.

tokens (T, K) -> gather -> rows (M, K) -> GEMM over [gate; up] (E, 2I, K) -> silu(gate) * up -> (M, I)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.activations import SwiGLUConfig
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
    activation: Tensor, weight: WeightOperands, offsets: Tensor, row_slot: Tensor | None = None, *_: Any, **__: Any
) -> tuple[tuple[int, int]]:
    rows = (activation if row_slot is None else row_slot).shape[0]
    return ((rows, weight.codes.shape[2] // 2),)


def _check(
    activation: Tensor, weight: WeightOperands, offsets: Tensor, row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None, bias: Tensor | None = None, *, layout: str = LINEAR, limit: float | None = None,
    **_: Any,
) -> None:  # fmt: skip
    check_operands(activation, weight, offsets, layout)
    codes = weight.codes
    require(codes.shape[2] % 2 == 0, weight.names[0], codes, "an even out_features: gate rows, then up rows")
    check_optional("bias", bias, (codes.shape[0], codes.shape[2]), activation)
    tokens = activation.shape[0]
    if row_slot is None:
        check_optional("slot_scale", slot_scale, (tokens,), activation)
    else:
        require(row_slot.dtype == torch.int32, "row_slot", row_slot, "dtype int32")
        slots = row_slot.numel()
        if row_slot.ndim != 1 or not _token_multiple(slots, tokens):
            raise mismatch("row_slot", row_slot, f"shape (top_k * {tokens},), {tokens} being the activation's rows")
        if row_slot.device != activation.device:
            raise mismatch("row_slot", row_slot, f"device {activation.device}")
        # Without tokens nothing says what top_k is.
        top_k = slot_scale.shape[-1:] if tokens == 0 and slot_scale is not None else (slots // max(tokens, 1),)
        check_optional("slot_scale", slot_scale, (tokens, *top_k), activation)
    if limit is not None and not limit > 0:
        raise ValueError(f"limit: got {limit}, wanted a positive number or None")


def _token_multiple(slots: int, tokens: int) -> bool:
    return slots == 0 if tokens == 0 else slots % tokens == 0


def _check_values(
    activation: Tensor, weight: WeightOperands, offsets: Tensor, row_slot: Tensor | None = None, *_: Any, **__: Any
) -> None:
    if row_slot is None:
        check_offset_values(offsets, activation.shape[0])
    else:
        check_offset_values(offsets, row_slot.shape[0], "row_slot")
        check_index_values("row_slot", row_slot, 0, row_slot.shape[0], "the slots t * A + a")


def _gradient(
    grad: Tensor, activation: Tensor, weight: WeightOperands, offsets: Tensor, *routing: Tensor | None,
    needs: gradients.Needs, layout: str = LINEAR, **form: Any,
) -> gradients.Gradients:  # fmt: skip
    gemms = gemm_and_dgrad(weight, offsets, layout)
    config = SwiGLUConfig(**form)
    return gradients.grouped_swiglu(grad, activation, offsets, *routing, form=config, gemms=gemms, needs=needs)


@weight_operator(
    shapes=_shapes,
    check=_check,
    check_values=_check_values,
    gradient=_gradient,
    differentiable=("activation", "slot_scale", "bias"),
)
def f16a_nvfp4weight_grouped_swiglu(
    activation: Tensor,
    weight: WeightOperands,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = LINEAR,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> Tensor:
    """Compute ``silu(x @ gate[e].T) * (x @ up[e].T)`` for the rows x of each expert e.

    In full, ``y = slot_scale * (x @ w[e].T) + bias[e]`` has the halves g and u; g is clamped to at most `limit`, u to
    [-limit, limit]; the result is ``g * sigmoid(alpha * g) * (u + up_shift)``. The defaults are SwiGLU; GPT-OSS has
    alpha 1.702, limit 7, up_shift 1. Differentiable in `activation`, `slot_scale` and `bias` (the backward recomputes
    y).

    Args:
        activation: (M, K) bfloat16, float16 (or float32), rows sorted by expert; with row_slot (T, K), the tokens.
        fp4_weight: (E, K // 2, 2I), transposed view of qdata whose rows are the I of gate, then the I of up.
        weight_scaling_factor: float8_e4m3fn block scales, (E, 2I, K // 16) when linear.
        weight_global_scale: float32 (E,) or (E, 2I).
        offsets: int32 (E,), cumulative row ENDS.
        row_slot: int32 (M,) with M = T * A, as `moe_route` gives it: row r reads token ``row_slot[r] // A``.
        slot_scale: floating point (T, A) with row_slot, or (M,) without: multiplies the rows.
        bias: floating point (E, 2I).
        layout: the layout of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.
        alpha: factor of the gate in the sigmoid.
        limit: the positive limit of gate and up; None for no limit.
        up_shift: added to up.

    Returns:
        (M, I) in the activation's dtype; rows at or past ``offsets[-1]`` are undefined.

    Raises:
        ValueError: as `f16a_nvfp4weight_scaled_grouped_mm`, for a weight with an odd number of rows, and for row_slot,
            slot_scale, bias or limit that do not fit; on a CPU also for slots in row_slot outside of [0, M). Elsewhere
            the output of their rows is undefined, and their gradients are zero.
    """
    kernel = select(activation.device, format=weight.format.name).grouped_swiglu
    form = SwiGLUConfig(alpha, limit, up_shift)
    return kernel(activation, weight.packed(layout), offsets, row_slot, slot_scale, bias, form)


f16a_mxfp8weight_grouped_swiglu = OPERATORS["f16a_mxfp8weight_grouped_swiglu"].public

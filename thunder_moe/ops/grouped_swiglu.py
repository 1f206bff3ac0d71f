"""The operator thunder_moe::f16a_nvfp4weight_grouped_swiglu: gate and up projection in one GEMM, SwiGLU in the same op.
Called by nn, ops.experts and compiled graphs; calls kernels.select. Its schema mirrors ops.grouped_mm.

tokens (T, K) -> gather -> rows (M, K) -> GEMM over [gate; up] (E, 2I, K) -> silu(gate) * up -> (M, I)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.activations import GLU, pre_activation
from thunder_moe.formats.checks import require
from thunder_moe.kernels.select import select
from thunder_moe.ops.grouped_mm import (
    check_index_values,
    check_offset_values,
    check_operands,
    check_optional,
    refuse_forward_ad,
    refuse_weight_gradients,
    weight_from_operands,
)
from thunder_moe.routing import expert_of_row, gather_rows, live_rows, scale_of_rows

__all__ = ["f16a_nvfp4weight_grouped_swiglu", "swiglu_backward"]


@torch.library.custom_op("thunder_moe::f16a_nvfp4weight_grouped_swiglu", mutates_args=())
def _grouped_swiglu(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = "linear",
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> Tensor:
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    refuse_forward_ad()
    _check(activation, *packed, offsets, row_slot, slot_scale, bias, layout, limit)
    _check_values(activation, offsets, row_slot)
    weight = weight_from_operands(*packed, layout)
    kernel = select(activation.device).grouped_swiglu
    return kernel(activation, weight, offsets, row_slot, slot_scale, bias, GLU(alpha, limit, up_shift))


@_grouped_swiglu.register_fake
def _(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, row_slot=None, slot_scale=None,
      bias=None, *, layout="linear", alpha=1.0, limit=None, up_shift=0.0):  # fmt: skip
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    _check(activation, *packed, offsets, row_slot, slot_scale, bias, layout, limit)
    rows = (activation if row_slot is None else row_slot).shape[0]
    return activation.new_empty(rows, fp4_weight.shape[2] // 2)


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    refuse_weight_gradients(*inputs[1:4])
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _backward(ctx, grad):
    # Trailing arguments that were left out have no entry.
    needs = tuple(any(ctx.needs_input_grad[i : i + 1]) for i in (0, 6, 7))
    of_activation, of_scale, of_bias = _gradients(grad, *ctx.saved_tensors, **ctx.options, needs=needs)
    return of_activation, None, None, None, None, None, of_scale, of_bias


_grouped_swiglu.register_autograd(_backward, setup_context=_setup_context)


def f16a_nvfp4weight_grouped_swiglu(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = "linear",
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> Tensor:
    """``silu(x @ gate[e].T) * (x @ up[e].T)`` for the rows x of each expert e.

    In full: ``y = slot_scale * (x @ w[e].T) + bias[e]``, its halves g and u, g clamped from above by `limit` and u to
    [-limit, limit], then ``g * sigmoid(alpha * g) * (u + up_shift)``. The defaults are SwiGLU; GPT-OSS has alpha
    1.702, limit 7, up_shift 1. Differentiable in `activation`, `slot_scale` and `bias` (the backward recomputes y).

    Args:
        activation: (M, K) bfloat16, float16 (or float32), rows sorted by expert; with row_slot (T, K), the tokens.
        fp4_weight: (E, K // 2, 2I), transposed view of qdata whose rows are the I of gate, then the I of up.
        weight_scaling_factor: float8_e4m3fn block scales, (E, 2I, K // 16) when linear.
        weight_global_scale: float32 (E,) or (E, 2I).
        offsets: int32 (E,), cumulative row ENDS.
        row_slot: int32 (M,) with M = T * A, as `moe_route` gives it: row r reads token ``row_slot[r] // A``.
        slot_scale: floating point (T, A) with row_slot, or (M,) without: multiplies the rows.
        bias: floating point (E, 2I).
        layout: of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.
        alpha: factor of the gate in the sigmoid.
        limit: of gate and up, positive; none when None.
        up_shift: added to up.

    Returns:
        (M, I) in the activation's dtype; rows at or past ``offsets[-1]`` are undefined.

    Raises:
        ValueError: as `f16a_nvfp4weight_scaled_grouped_mm`, when the weight's rows are odd in number, and for
            row_slot, slot_scale, bias or limit that do not fit; on a CPU also for slots in row_slot outside of [0, M).
            Elsewhere the output of their rows is undefined, and their gradients are zero.
    """
    return torch.ops.thunder_moe.f16a_nvfp4weight_grouped_swiglu(
        activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, row_slot, slot_scale, bias,
        layout=layout, alpha=alpha, limit=limit, up_shift=up_shift,
    )  # fmt: skip


def swiglu_backward(
    grad: Tensor,
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = "linear",
    needs: tuple[bool, bool, bool] = (True, False, False),
    **form: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradient (M, I) of `f16a_nvfp4weight_grouped_swiglu`'s output -> those of activation, slot_scale and bias that
    `needs` asks for. Recomputes gate and up, so that nothing of (M, 2I) is kept for it.

    Raises:
        ValueError: as the operator, and for a grad that is not of its output's shape.
    """
    arguments = (activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, row_slot, slot_scale)
    _check(*arguments, bias, layout, form.get("limit"))
    _check_values(activation, offsets, row_slot)
    shape = ((activation if row_slot is None else row_slot).shape[0], fp4_weight.shape[2] // 2)
    require(tuple(grad.shape) == shape, "grad", grad, f"shape {shape}")
    return _gradients(grad, *arguments, bias, layout=layout, needs=needs, **form)


def _gradients(
    grad: Tensor,
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    row_slot: Tensor | None,
    slot_scale: Tensor | None,
    bias: Tensor | None,
    *,
    layout: str,
    needs: tuple[bool, bool, bool],
    **form: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`swiglu_backward` of arguments that the operator has checked. Dead rows have zero gradients."""
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale, offsets)
    activation_form, rows = GLU(**form), grad.shape[0]
    row_scale = scale_of_rows(slot_scale, row_slot)
    forward = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm
    gate_up = forward(gather_rows(activation, row_slot), *packed, layout=layout)
    grad_pre = activation_form.gradient(grad, pre_activation(gate_up, offsets, row_scale, bias))  # [M, 2I]
    # Rows past the last group are undefined, and could be NaN: zero gradients must come of them.
    live = live_rows(offsets, rows)
    if row_slot is not None:
        live = live & ((row_slot >= 0) & (row_slot < rows))[:, None]
    if row_slot is not None or slot_scale is not None or bias is not None:
        grad_pre = torch.where(live, grad_pre, 0)
    grad_activation = grad_scale = grad_bias = None
    if needs[0]:
        scaled = grad_pre if row_scale is None else grad_pre * row_scale[:, None]
        dgrad = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm_dgrad
        grad_activation = dgrad(scaled.to(activation.dtype), *packed, layout=layout)
        if row_slot is not None:
            of_slot = _sum_per_slot(torch.where(live, grad_activation, 0), row_slot)
            tokens, k = activation.shape
            of_slot = of_slot.view(tokens, rows // max(tokens, 1), k)
            grad_activation = of_slot.float().sum(1).to(activation.dtype)
    if needs[1] and slot_scale is not None:
        of_row = torch.where(live, gate_up.float() * grad_pre, 0).sum(-1)
        of_slot = of_row if row_slot is None else _sum_per_slot(of_row, row_slot)
        grad_scale = of_slot.view(slot_scale.shape).to(slot_scale.dtype)
    if needs[2] and bias is not None:
        grad_bias = torch.zeros_like(bias, dtype=torch.float32).index_add(0, expert_of_row(offsets, rows), grad_pre)
        grad_bias = grad_bias.to(bias.dtype)
    return grad_activation, grad_scale, grad_bias


def _sum_per_slot(of_row: Tensor, row_slot: Tensor) -> Tensor:
    """Puts what each row (M, ...) has in its slot; of rows with the same slot the sum."""
    slot = row_slot.clamp(0, max(row_slot.shape[0] - 1, 0))
    return torch.zeros_like(of_row).index_add(0, slot, of_row)


def _check_values(activation: Tensor, offsets: Tensor, row_slot: Tensor | None) -> None:
    """The checks of values, on a CPU."""
    if row_slot is None:
        check_offset_values(offsets, activation.shape[0])
    else:
        check_offset_values(offsets, row_slot.shape[0], "row_slot")
        check_index_values("row_slot", row_slot, 0, row_slot.shape[0], "the slots t * A + a")


def _check(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, row_slot, slot_scale, bias,
           layout, limit) -> None:  # fmt: skip
    check_operands(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout)
    require(fp4_weight.shape[2] % 2 == 0, "fp4_weight", fp4_weight, "an even out_features: gate rows, then up rows")
    check_optional("bias", bias, (fp4_weight.shape[0], fp4_weight.shape[2]), activation)
    tokens = activation.shape[0]
    if row_slot is None:
        check_optional("slot_scale", slot_scale, (tokens,), activation)
    else:
        slots = row_slot.shape[0]
        require(row_slot.dtype == torch.int32, "row_slot", row_slot, "dtype int32")
        wanted = f"shape (top_k * {tokens},), {tokens} being the activation's rows"
        require(row_slot.ndim == 1 and _token_multiple(slots, tokens), "row_slot", row_slot, wanted)
        require(row_slot.device == activation.device, "row_slot", row_slot, f"device {activation.device}")
        # Without tokens nothing says what top_k is.
        top_k = slot_scale.shape[-1:] if tokens == 0 and slot_scale is not None else (slots // max(tokens, 1),)
        check_optional("slot_scale", slot_scale, (tokens, *top_k), activation)
    if limit is not None and not limit > 0:
        raise ValueError(f"limit: got {limit}, wanted a positive number or None")


def _token_multiple(slots: int, tokens: int) -> bool:
    return slots == 0 if tokens == 0 else slots % tokens == 0

"""The operator thunder_moe::f16a_nvfp4weight_grouped_mm_combine: the second expert GEMM and the weighted sum per token.
Called by ops.experts, integrations and compiled graphs; calls kernels.select. Its schema mirrors ops.grouped_mm.

rows (M, K) -> GEMM -> + bias -> times the router's weight -> sum over each token's slots -> (T, N)
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from thunder_moe.routing import expert_of_row, live_rows

__all__ = ["combine_backward", "f16a_nvfp4weight_grouped_mm_combine"]


@torch.library.custom_op("thunder_moe::f16a_nvfp4weight_grouped_mm_combine", mutates_args=())
def _grouped_mm_combine(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = "linear",
) -> Tensor:
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    refuse_forward_ad()
    _check(activation, *packed, offsets, slot_row, slot_weight, bias, layout)
    _check_values(activation, offsets, slot_row)
    kernel = select(activation.device).grouped_mm_combine
    return kernel(activation, weight_from_operands(*packed, layout), offsets, slot_row, slot_weight, bias)


@_grouped_mm_combine.register_fake
def _(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, slot_row, slot_weight=None,
      bias=None, *, layout="linear"):  # fmt: skip
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    _check(activation, *packed, offsets, slot_row, slot_weight, bias, layout)
    return activation.new_empty(slot_row.shape[0], fp4_weight.shape[2])


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    refuse_weight_gradients(*inputs[1:4])
    ctx.save_for_backward(*inputs)
    ctx.layout = keyword_only_inputs["layout"]


def _backward(ctx, grad):
    # Trailing arguments that were left out have no entry.
    needs = tuple(any(ctx.needs_input_grad[i : i + 1]) for i in (0, 6, 7))
    of_activation, of_weight, of_bias = _gradients(grad, *ctx.saved_tensors, layout=ctx.layout, needs=needs)
    return of_activation, None, None, None, None, None, of_weight, of_bias


_grouped_mm_combine.register_autograd(_backward, setup_context=_setup_context)


def f16a_nvfp4weight_grouped_mm_combine(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = "linear",
) -> Tensor:
    """``out[t] = sum over a of slot_weight[t, a] * (activation[slot_row[t, a]] @ w[e].T + bias[e])``.

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
        layout: of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.

    Returns:
        (T, N) in the activation's dtype.

    Raises:
        ValueError: as `f16a_nvfp4weight_scaled_grouped_mm`, and for slot_row, slot_weight or bias of a wrong shape,
            dtype or device; on a CPU also for rows in slot_row below -1 or past the experts' rows. Elsewhere slots
            without a row of the activation count nothing.
    """
    return torch.ops.thunder_moe.f16a_nvfp4weight_grouped_mm_combine(
        activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, slot_row, slot_weight, bias,
        layout=layout,
    )  # fmt: skip


def combine_backward(
    grad: Tensor,
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = "linear",
    needs: tuple[bool, bool, bool] = (True, False, False),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradient (T, N) of `f16a_nvfp4weight_grouped_mm_combine`'s output -> those of activation, slot_weight and bias
    that `needs` asks for. Recomputes the GEMM for the gradient of slot_weight.

    Raises:
        ValueError: as the operator, and for a grad that is not of its output's shape.
    """
    arguments = (activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, slot_row, slot_weight)
    _check(*arguments, bias, layout)
    _check_values(activation, offsets, slot_row)
    shape = (slot_row.shape[0], fp4_weight.shape[2])
    require(tuple(grad.shape) == shape, "grad", grad, f"shape {shape}")
    return _gradients(grad, *arguments, bias, layout=layout, needs=needs)


def _gradients(
    grad: Tensor,
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None,
    bias: Tensor | None,
    *,
    layout: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`combine_backward` of arguments that the operator has checked. Slots without a live row have zero gradients."""
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale, offsets)
    rows, slots = activation.shape[0], slot_row.numel()
    live = ((slot_row >= 0) & (slot_row < offsets[-1].clamp_max(rows))).flatten()
    grad_slot = grad.float()[:, None].expand(*slot_row.shape, -1).flatten(0, 1)  # [T * A, N]
    grad_activation = grad_weight = grad_bias = None
    if needs[0] or needs[2]:
        weighted = grad_slot if slot_weight is None else grad_slot * slot_weight.flatten()[:, None]
        # Added up, not copied: several slots may have the same row. Those without one add zeros anywhere, and there is
        # a row for them if there is no other.
        row = torch.where(live, slot_row.flatten(), torch.arange(slots, device=grad.device) % (rows + 1))
        weighted = torch.where(live[:, None], weighted, 0)
        grad_row = weighted.new_zeros(rows + 1, grad.shape[1]).index_add(0, row, weighted)[:rows]
        if needs[0]:
            dgrad = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm_dgrad
            grad_activation = dgrad(grad_row.to(activation.dtype), *packed, layout=layout)
            grad_activation = torch.where(live_rows(offsets, rows), grad_activation, 0)
        if needs[2] and bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
            grad_bias = grad_bias.index_add(0, expert_of_row(offsets, rows), grad_row).to(bias.dtype)
    if needs[1] and slot_weight is not None:
        out = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, layout=layout).float()
        if bias is not None:
            out = out + bias[expert_of_row(offsets, rows)]
        out = out[torch.where(live, slot_row.flatten(), 0)] if rows else torch.zeros_like(grad_slot)
        grad_weight = torch.where(live, (out * grad_slot).sum(-1), 0).view(slot_row.shape).to(slot_weight.dtype)
    return grad_activation, grad_weight, grad_bias


def _check_values(activation: Tensor, offsets: Tensor, slot_row: Tensor) -> None:
    """The checks of values, on a CPU."""
    check_offset_values(offsets, activation.shape[0])
    if offsets.device.type == "cpu":
        check_index_values("slot_row", slot_row, -1, int(offsets[-1]), "the rows of the experts, or -1 for none")


def _check(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, slot_row, slot_weight, bias,
           layout) -> None:  # fmt: skip
    check_operands(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout)
    require(slot_row.ndim == 2, "slot_row", slot_row, "shape (tokens, top_k)")
    require(slot_row.dtype == torch.int32, "slot_row", slot_row, "dtype int32")
    require(slot_row.device == activation.device, "slot_row", slot_row, f"device {activation.device}")
    check_optional("slot_weight", slot_weight, tuple(slot_row.shape), activation)
    check_optional("bias", bias, (fp4_weight.shape[0], fp4_weight.shape[2]), activation)

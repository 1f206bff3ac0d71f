"""The gradients of the fused expert GEMMs, in plain torch around the two GEMMs of their weight.
Called by ops; calls routing, activations and the GEMMs that it is given.

Legend: T tokens, A = top_k, slot = t * A + a, M rows sorted by expert, E experts, N and I output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thunder_moe.activations import SwiGLUConfig, pre_activation, swiglu
from thunder_moe.routing import expert_of_row, gather_rows, live_rows, scale_of_rows

Gradients = tuple[Tensor | None, ...]
Needs = Sequence[bool]  # which of the gradients are wanted
# rows (M, K) -> (M, N), and the gradient (M, N) of its output -> (M, K); both are differentiable.
Gemms = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def grouped_swiglu(
    grad: Tensor,
    activation: Tensor,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    form: SwiGLUConfig,
    gemms: Gemms,
    needs: Needs,
    gate_up: Tensor | None = None,
) -> Gradients:
    """Return the gradients of activation, slot_scale and bias, from the gradient (M, I) of `grouped_swiglu`'s output.

    It recomputes gate and up (M, 2I) if they are not given, so that the forward need not keep them. Rows of no expert
    have zero gradients.
    """
    (gemm, dgrad), rows = gemms, grad.shape[0]
    row_scale = scale_of_rows(slot_scale, row_slot)
    gate_up = gemm(gather_rows(activation, row_slot)) if gate_up is None else gate_up
    grad_pre = form.gradient(grad, pre_activation(gate_up, offsets, row_scale, bias))  # [M, 2I]
    # Rows past the last group are undefined, and could be NaN: their gradients must be zero.
    live = live_rows(offsets, rows)
    if row_slot is not None:
        live = live & ((row_slot >= 0) & (row_slot < rows))[:, None]
    if row_slot is not None or slot_scale is not None or bias is not None:
        grad_pre = torch.where(live, grad_pre, 0)
    grad_activation = grad_scale = grad_bias = None
    if needs[0]:
        scaled = grad_pre if row_scale is None else grad_pre * row_scale[:, None]
        grad_activation = torch.where(live_rows(offsets, rows), dgrad(scaled.to(activation.dtype)), 0)
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
        grad_bias = bias_grad(grad_pre, offsets).to(bias.dtype)
    return grad_activation, grad_scale, grad_bias


def grouped_mm_combine(
    grad: Tensor,
    activation: Tensor,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gemms: Gemms,
    needs: Needs,
) -> Gradients:
    """Return the gradients of activation, slot_weight and bias, from (T, N) of `grouped_mm_combine`'s output.

    It recomputes the GEMM for the gradient of slot_weight. Slots without a row of an expert have zero gradients.
    """
    (gemm, dgrad), rows, slots = gemms, activation.shape[0], slot_row.numel()
    live = ((slot_row >= 0) & (slot_row < offsets[-1].clamp_max(rows))).flatten()
    grad_slot = grad.float()[:, None].expand(*slot_row.shape, -1).flatten(0, 1)  # [T * A, N]
    grad_activation = grad_weight = grad_bias = None
    if needs[0] or needs[2]:
        weighted = grad_slot if slot_weight is None else grad_slot * slot_weight.flatten()[:, None]
        # Added up, not copied: several slots may have the same row. Slots without a row add zeros to any row; an extra
        # row takes them if there are no others.
        row = torch.where(live, slot_row.flatten(), torch.arange(slots, device=grad.device) % (rows + 1))
        weighted = torch.where(live[:, None], weighted, 0)
        grad_row = weighted.new_zeros(rows + 1, grad.shape[1]).index_add(0, row, weighted)[:rows]
        if needs[0]:
            grad_activation = torch.where(live_rows(offsets, rows), dgrad(grad_row.to(activation.dtype)), 0)
        if needs[2] and bias is not None:
            grad_bias = bias_grad(grad_row, offsets).to(bias.dtype)
    if needs[1] and slot_weight is not None:
        out = gemm(activation).float()
        if bias is not None:
            out = out + bias[expert_of_row(offsets, rows)]
        out = out[torch.where(live, slot_row.flatten(), 0)] if rows else torch.zeros_like(grad_slot)
        grad_weight = torch.where(live, (out * grad_slot).sum(-1), 0).view(slot_row.shape).to(slot_weight.dtype)
    return grad_activation, grad_weight, grad_bias


def bias_grad(grad: Tensor, offsets: Tensor) -> Tensor:
    """Sum each expert's rows of the gradient (M, N) in a fixed order, by the operator: -> float32 (E, N)."""
    return torch.ops.thunder_moe.grouped_bias_grad(grad, offsets)


def moe_experts(
    grad: Tensor,
    hidden_states: Tensor,
    expert_weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    order: tuple[Tensor, Tensor, Tensor],
    *,
    weight_on_input: bool,
    form: SwiGLUConfig,
    gate_up: Gemms,
    down: Gemms,
    needs: Needs,
) -> Gradients:
    """Return the gradients of hidden_states, expert_weights and the biases, from (T, H) of the layer's output.

    It recomputes everything between hidden_states and the down GEMM, so that the forward keeps nothing of (M, 2I) or
    (M, I).
    """
    row_slot, offsets, slot_row = order
    on_input, on_output = (expert_weights, None) if weight_on_input else (None, expert_weights)
    of_hidden, of_weights, of_gate_up_bias, of_down_bias = needs
    needs_first = of_hidden, of_weights and weight_on_input, of_gate_up_bias
    pre = gate_up[0](gather_rows(hidden_states, row_slot))
    rows = swiglu(pre, offsets, form, scale_of_rows(on_input, row_slot), gate_up_bias)
    grad_rows, grad_on_output, grad_down_bias = grouped_mm_combine(
        grad, rows, offsets, slot_row, on_output, down_bias, gemms=down,
        needs=(any(needs_first), of_weights and not weight_on_input, of_down_bias),
    )  # fmt: skip
    grad_hidden = grad_on_input = grad_gate_up_bias = None
    if grad_rows is not None:
        grad_hidden, grad_on_input, grad_gate_up_bias = grouped_swiglu(
            grad_rows, hidden_states, offsets, row_slot, on_input, gate_up_bias, form=form, gemms=gate_up,
            needs=needs_first, gate_up=pre,
        )  # fmt: skip
    return grad_hidden, grad_on_input if weight_on_input else grad_on_output, grad_gate_up_bias, grad_down_bias


def _sum_per_slot(of_row: Tensor, row_slot: Tensor) -> Tensor:
    """Put each row (M, ...) into its slot; rows with the same slot are added."""
    slot = row_slot.clamp(0, max(row_slot.shape[0] - 1, 0))
    return torch.zeros_like(of_row).index_add(0, slot, of_row)

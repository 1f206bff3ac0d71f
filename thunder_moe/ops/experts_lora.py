"""Register thunder_moe::f16a_nvfp4weight_moe_experts_lora: a layer's experts on packed weights plus LoRA adapters.
Its form for MXFP8 weights computes the adapters' products by GEMMs of their own.
Called by integrations.huggingface; calls the operators of ops.grouped_mm, ops.low_rank, ops.grouped_linear,
ops.activation and ops.combine, in both directions.

route -> gather -> gate_up GEMM + (x A^T) B^T -> activation times router's weights -> down GEMM + (h A^T) B^T -> combine

The operator returns gate and up, and the products of rank R, beside the result: its backward reads them. Gradient
checkpointing computes them again where memory is short.

Legend: T tokens, A = top_k, M = T * A rows sorted by expert, E experts, H hidden_size, I intermediate_size, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels.batch_invariance import refuse
from thunder_moe.ops import activation, combine, low_rank, route  # noqa: F401  (registers the operators)
from thunder_moe.ops.experts import check_experts, check_order
from thunder_moe.ops.grouped_mm import gemm_and_dgrad
from thunder_moe.ops.operator import OPERATORS, weight_operator
from thunder_moe.routing import gather_rows, scale_of_rows

LORA_NAMES = ("gate_up_a", "gate_up_b", "down_a", "down_b")


def _check(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: WeightOperands, down: WeightOperands,
    gate_up_a: Tensor | None = None, gate_up_b: Tensor | None = None, down_a: Tensor | None = None,
    down_b: Tensor | None = None, *rest: Tensor | None, **options: Any,
) -> None:  # fmt: skip
    check_experts(hidden_states, expert_ids, expert_weights, gate_up, down, *rest, **options)
    (experts, _, features), hidden_size = gate_up.codes.shape, hidden_states.shape[1]
    sides = (
        ("gate_up", gate_up_a, gate_up_b, features, hidden_size),
        ("down", down_a, down_b, hidden_size, features // 2),
    )
    for side, a, b, n, k in sides:
        if (a is None) != (b is None):
            missing = f"{side}_{'a' if a is None else 'b'}"
            raise ValueError(f"{missing}: got None, wanted both {side}_a and {side}_b, or neither")
        if a is None or b is None:
            continue
        rank = a.shape[1] if a.ndim == 3 else 0
        require(a.shape == (experts, rank, k) and rank > 0, f"{side}_a", a, f"shape ({experts}, rank, {k})")
        require(b.shape == (experts, n, rank), f"{side}_b", b, f"shape {(experts, n, rank)}")
        for name, tensor in ((f"{side}_a", a), (f"{side}_b", b)):
            require(tensor.dtype == hidden_states.dtype, name, tensor, f"{hidden_states.dtype}, as hidden_states has")
            require(tensor.device == hidden_states.device, name, tensor, f"device {hidden_states.device}")


def _check_values(hidden_states: Tensor, expert_ids: Tensor, *arguments: Tensor | None, **_: Any) -> None:
    check_order(expert_ids, (*arguments[9:12], None, None, None)[:3])


def _gemm(
    rows: Tensor, weight: WeightOperands, layout: str, inner: Tensor | None, matrix: Tensor | None, offsets: Tensor,
    backward: bool = False,
) -> Tensor:  # fmt: skip
    """Return the GEMM of rows and a packed weight, plus inner (M, R) times b; in the backward plus inner times a."""
    ops, gemm = torch.ops.thunder_moe, gemm_and_dgrad(weight, offsets, layout)[backward]
    kind = "_dgrad" if backward else ""
    if inner is None or matrix is None:
        out: Tensor = gemm(rows)
    elif weight.format is NVFP4:
        low_rank = getattr(ops, f"grouped_mm_low_rank{kind}")
        out = low_rank(rows, *weight.tensors, offsets, inner, matrix, layout=layout)
    else:
        out = gemm(rows) + getattr(ops, f"grouped_linear{kind}")(inner, matrix, offsets)
    return out


def _gather(
    tokens: Tensor, row_slot: Tensor, matrix: Tensor | None, offsets: Tensor, transposed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the rows (M, K) of tokens; with a matrix (E, R, K), transposed (E, K, R), their product (M, R), too."""
    if matrix is None:
        return gather_rows(tokens, row_slot), None
    rows, product = torch.ops.thunder_moe.moe_gather_low_rank(tokens, row_slot, matrix, offsets, transposed)
    return rows, product


def _gradient(
    grad: Tensor, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: WeightOperands,
    down: WeightOperands, gate_up_a: Tensor | None, gate_up_b: Tensor | None, down_a: Tensor | None,
    down_b: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None, row_slot: Tensor | None,
    offsets: Tensor | None, slot_row: Tensor | None, pre: Tensor, inner: Tensor, of_activated: Tensor, *, needs: Any,
    weight_on_input: bool = False, gate_up_layout: str = LINEAR, down_layout: str = LINEAR, **form: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    ops = torch.ops.thunder_moe
    if row_slot is None or offsets is None or slot_row is None:
        row_slot, offsets, slot_row = ops.moe_route(expert_ids, gate_up.codes.shape[0])
    of_hidden, of_weights, of_gate_up_a, of_gate_up_b, of_down_a, of_down_b, of_gate_up_bias, of_down_bias = needs
    if gate_up_a is None:
        of_gate_up_a = of_gate_up_b = False
    if down_a is None:
        of_down_a = of_down_b = False
    of_rows = scale_of_rows(expert_weights, row_slot)
    assert of_rows is not None
    factors = None if weight_on_input else of_rows
    grad_out, outer = _gather(grad.contiguous(), row_slot, down_b, offsets, True)  # [M, H], [M, R]
    grads: dict[str, Tensor] = {}
    if down_bias is not None and of_down_bias:
        grads["down_bias"] = ops.grouped_bias_grad(grad_out, offsets, factors).to(down_bias.dtype)
    before = of_hidden or of_gate_up_a or of_gate_up_b or of_gate_up_bias or of_weights
    of_factors, activated = of_weights and not weight_on_input, None
    if before:
        grad_rows = _gemm(grad_out, down, down_layout, outer, down_a, offsets, True)
        if of_down_a:
            grad_pre, grad_factors, activated = ops.swiglu_backward_and_value(
                grad_rows, pre, factors, offsets, of_factors, **form
            )
        else:
            grad_pre, grad_factors = ops.scaled_activation_backward(
                grad_rows, pre, factors, offsets, True, of_factors, **form
            )
        del grad_rows
    elif of_down_a:
        activated = ops.scaled_activation(pre, factors, offsets, **form)
    del pre
    if of_down_a:
        grads["down_a"] = ops.grouped_linear_wgrad(activated, outer, offsets)
    if of_down_b:
        grads["down_b"] = ops.grouped_linear_wgrad(of_activated, grad_out, offsets)
    del activated
    if before:
        if of_factors:
            if down_bias is not None:
                grad_factors = grad_factors + ops.grouped_bias_scale_grad(grad_out, down_bias, offsets)
            grads["weights"] = _of_slots(grad_factors, offsets, slot_row).to(expert_weights.dtype)
        del grad_out
        if of_gate_up_bias and gate_up_bias is not None:
            grads["gate_up_bias"] = ops.grouped_bias_grad(grad_pre, offsets).to(gate_up_bias.dtype)
        outer = None if gate_up_b is None else ops.grouped_linear_dgrad(grad_pre, gate_up_b, offsets)
        if of_gate_up_a and weight_on_input:
            rows = gather_rows(hidden_states, row_slot)
            grads["gate_up_a"] = ops.grouped_linear_wgrad((rows * of_rows[:, None]).to(rows.dtype), outer, offsets)
        elif of_gate_up_a:
            grads["gate_up_a"] = ops.moe_gathered_wgrad(hidden_states, row_slot, outer, offsets)
        if of_gate_up_b:
            grads["gate_up_b"] = ops.grouped_linear_wgrad(inner, grad_pre, offsets)
        if of_hidden or (of_weights and weight_on_input):
            grad_rows = _gemm(grad_pre, gate_up, gate_up_layout, outer, gate_up_a, offsets, True)
            if of_weights and weight_on_input:
                of_row = (grad_rows.float() * gather_rows(hidden_states, row_slot).float()).sum(-1)
                grads["weights"] = _of_slots(of_row, offsets, slot_row).to(expert_weights.dtype)
            if weight_on_input:
                grad_rows = (grad_rows * of_rows[:, None]).to(grad_rows.dtype)
            if of_hidden:
                grads["hidden"] = ops.moe_combine(grad_rows, offsets, slot_row)
    names = ("hidden", "weights", *LORA_NAMES, "gate_up_bias", "down_bias")
    return tuple(grads.get(name) for name in names)


def _of_slots(of_row: Tensor, offsets: Tensor, slot_row: Tensor) -> Tensor:
    """Return the value (T, A) of each slot's row, from (M,); 0 for slots without a row."""
    live = (slot_row >= 0) & (slot_row < offsets[-1])
    picked: Tensor = of_row[slot_row.clamp_min(0).long()] if of_row.shape[0] else of_row.new_zeros(slot_row.shape)
    return torch.where(live, picked, 0)


def _shapes(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: WeightOperands, down: WeightOperands,
    gate_up_a: Tensor | None = None, gate_up_b: Tensor | None = None, down_a: Tensor | None = None, *_: Any, **__: Any,
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    rows = expert_ids.shape[0] * expert_ids.shape[1]
    products = ((0, 0) if a is None else (rows, a.shape[1]) for a in (gate_up_a, down_a))
    return tuple(hidden_states.shape), (rows, gate_up.codes.shape[2]), *products


@weight_operator(
    shapes=_shapes,
    check=_check,
    check_values=_check_values,
    gradient=_gradient,
    differentiable=("hidden_states", "expert_weights", *LORA_NAMES, "gate_up_bias", "down_bias"),
    saved_results=slice(1, 4),
)
def f16a_nvfp4weight_moe_experts_lora(
    hidden_states: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: WeightOperands,
    down: WeightOperands,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    row_slot: Tensor | None = None,
    offsets: Tensor | None = None,
    slot_row: Tensor | None = None,
    *,
    weight_on_input: bool = False,
    gate_up_layout: str = LINEAR,
    down_layout: str = LINEAR,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `f16a_nvfp4weight_moe_experts` with a low-rank term beside each weight: ``W x + B (A x)``.

    Differentiable in hidden_states, expert_weights, the adapters and the biases. It takes the arguments of
    `f16a_nvfp4weight_moe_experts`, and:

    Args:
        gate_up_a: (E, R, H) in the dtype of hidden_states; None: no adapter of gate and up.
        gate_up_b: (E, 2I, R), likewise; any scaling is in it.
        down_a: (E, R, I), likewise.
        down_b: (E, H, R), likewise.

    Returns:
        (T, H) in the dtype of hidden_states, and what its backward reads, which has no gradient: gate and up (M, 2I),
        the products of the rows with gate_up_a (M, R) and of the activation with down_a (M, R), (0, 0) without a pair.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device, or one of a pair is missing.
    """
    refuse("LoRA adapters of experts", "merge them: merge_lora_(model)")
    ops = torch.ops.thunder_moe
    if row_slot is None or offsets is None or slot_row is None:
        row_slot, offsets, slot_row = ops.moe_route(expert_ids, gate_up.codes.shape[0])
    factors = scale_of_rows(expert_weights, row_slot)
    assert factors is not None
    rows, inner = _gather(hidden_states, row_slot, None if weight_on_input else gate_up_a, offsets)
    if weight_on_input:
        rows = (rows * factors[:, None]).to(rows.dtype)
        inner = None if gate_up_a is None else ops.grouped_linear(rows, gate_up_a, offsets)
    pre = _gemm(rows, gate_up, gate_up_layout, inner, gate_up_b, offsets)
    del rows
    pre = pre if gate_up_bias is None else ops.grouped_bias(pre, offsets, gate_up_bias)
    after = None if weight_on_input else factors
    activated = ops.scaled_activation(pre, after, offsets, alpha=alpha, limit=limit, up_shift=up_shift)
    of_activated = None if down_a is None else ops.grouped_linear(activated, down_a, offsets)
    out = _gemm(activated, down, down_layout, of_activated, down_b, offsets)
    if down_bias is not None:
        out = ops.grouped_bias(out, offsets, down_bias, after)
    result = ops.moe_combine(out, offsets, slot_row)
    first, second = (result.new_empty(0, 0) if each is None else each for each in (inner, of_activated))
    return result, pre, first, second


f16a_mxfp8weight_moe_experts_lora = OPERATORS["f16a_mxfp8weight_moe_experts_lora"].public

"""`moe_experts`, the experts of a layer on quantized weights, from the router's choice to the weighted sum, and its
operator thunder_moe::f16a_nvfp4weight_moe_experts, which is there for MXFP8 weights, too.
Called by nn, integrations, compiled graphs and users; calls kernels.select and kernels.gradients.

route -> gather, gate_up GEMM, SwiGLU -> down GEMM, weighted combine
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import LAYOUTS, LINEAR
from thunder_moe.formats.weight import PackedWeight, WeightOperands
from thunder_moe.kernels import gradients
from thunder_moe.kernels.experts import ExpertsCall, Order
from thunder_moe.kernels.select import select
from thunder_moe.ops import grouped_mm_combine, grouped_swiglu, route, router  # noqa: F401  (registers the operators)
from thunder_moe.ops.checks import ACTIVATION_DTYPES, check_index_values, check_offset_values, check_optional
from thunder_moe.ops.grouped_mm import gemm_and_dgrad, operands
from thunder_moe.ops.operator import OPERATORS, operator_for, weight_operator

ORDER_NAMES = ("row_slot", "offsets", "slot_row")


def _shapes(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[tuple[int, int]]:
    return ((hidden_states.shape[0], hidden_states.shape[1]),)


def check_experts(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, first: WeightOperands, second: WeightOperands,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, *given: Tensor | None,
    gate_up_layout: str = LINEAR, down_layout: str = LINEAR, limit: float | None = None, expert_ranks: int = 1,
    **_: Any,
) -> None:  # fmt: skip
    """Raise the ValueError of `f16a_nvfp4weight_moe_experts`, as far as that needs no data."""
    for name, layout in (("gate_up_layout", gate_up_layout), ("down_layout", down_layout)):
        if layout not in LAYOUTS:
            raise ValueError(f"{name}: got {layout!r}, wanted one of {LAYOUTS}")
    first.check(gate_up_layout)
    second.check(down_layout)
    gate_up, down, per_byte = first.codes, second.codes, first.format.codes_per_byte
    require(hidden_states.ndim == 2, "hidden_states", hidden_states, "shape (tokens, hidden_size)")
    experts, codes, features = gate_up.shape
    tokens, hidden_size, device = hidden_states.shape[0], per_byte * codes, hidden_states.device
    if hidden_states.shape[1] != hidden_size:
        require(False, "hidden_states", hidden_states, f"{hidden_size} in dim 1, by gate_up")
    if hidden_states.dtype not in ACTIVATION_DTYPES:
        require(False, "hidden_states", hidden_states, f"a dtype of {ACTIVATION_DTYPES}")
    if expert_ids.ndim != 2 or expert_ids.shape[0] != tokens:
        wanted = f"shape ({tokens}, top_k), {tokens} being the tokens of hidden_states"
        require(False, "expert_ids", expert_ids, wanted)
    require(expert_ids.dtype in (torch.int32, torch.int64), "expert_ids", expert_ids, "dtype int32 or int64")
    order = dict(zip(ORDER_NAMES, (*given, None, None, None), strict=False))
    for name, tensor in dict(expert_ids=expert_ids, gate_up=gate_up, down=down, **order).items():
        if tensor is not None and tensor.device != device:
            require(False, name, tensor, f"device {device}, as hidden_states has")
    if expert_weights.shape != expert_ids.shape:
        wanted = f"shape {tuple(expert_ids.shape)}, as expert_ids has"
        require(False, "expert_weights", expert_weights, wanted)
    check_optional("expert_weights", expert_weights, tuple(expert_ids.shape), hidden_states)
    if features % 2:
        got = (experts, features, hidden_size)
        raise ValueError(f"gate_up: got shape {got}, wanted an even out_features: gate rows, then up rows")
    if down.shape != (experts, features // (2 * per_byte), hidden_size) or features % (2 * per_byte):
        by, fits = (experts, features, hidden_size), (experts, hidden_size, features // 2)
        got = (down.shape[0], down.shape[2], per_byte * down.shape[1])
        raise ValueError(f"down: got shape {got}, wanted {fits}, by gate_up of shape {by}")
    check_optional("gate_up_bias", gate_up_bias, (experts, features), hidden_states)
    check_optional("down_bias", down_bias, (experts, hidden_size), hidden_states)
    missing = [name for name, tensor in order.items() if tensor is None]
    if missing and len(missing) < len(order):
        raise ValueError(f"{missing[0]}: got None, wanted all of {ORDER_NAMES} or none of them")
    shapes: tuple[tuple[int, ...], ...] = ((expert_ids.numel(),), (experts,), tuple(expert_ids.shape))
    for (name, tensor), shape in zip(order.items(), shapes, strict=True):
        if tensor is not None and (tensor.dtype != torch.int32 or tensor.shape != shape):
            require(False, name, tensor, f"int32 of shape {shape}, as moe_route gives it")
    if expert_ranks < 1:
        raise ValueError(f"expert_ranks: got {expert_ranks}, wanted at least 1")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit: got {limit}, wanted a positive number or None")


def _check_values(hidden_states: Tensor, expert_ids: Tensor, *arguments: Tensor | None, **_: Any) -> None:
    check_order(expert_ids, (*arguments[5:8], None, None, None)[:3])


def check_order(expert_ids: Tensor, order: tuple[Tensor | None, ...]) -> None:
    """Raise a ValueError for values of row_slot, offsets and slot_row out of range, on a CPU, where they are given."""
    require(expert_ids.numel() < 2**31, "expert_ids", expert_ids, "less than 2**31 ids: rows are int32")
    row_slot, offsets, slot_row = order
    if row_slot is None or offsets is None or slot_row is None or offsets.device.type != "cpu":
        return
    rows = row_slot.shape[0]
    check_offset_values(offsets, rows, "row_slot")
    check_index_values("row_slot", row_slot, 0, rows, "the slots t * A + a")
    check_index_values("slot_row", slot_row, -1, int(offsets[-1]), "the rows of the experts, or -1 for none")


def _gradient(
    grad: Tensor, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: WeightOperands,
    down: WeightOperands, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    row_slot: Tensor | None = None, offsets: Tensor | None = None, slot_row: Tensor | None = None,
    *, needs: gradients.Needs, weight_on_input: bool = False, gate_up_layout: str = LINEAR, down_layout: str = LINEAR,
    expert_ranks: int = 1, **form: Any,
) -> gradients.Gradients:  # fmt: skip
    if row_slot is None or offsets is None or slot_row is None:
        row_slot, offsets, slot_row = torch.ops.thunder_moe.moe_route(expert_ids, gate_up.codes.shape[0])
    return gradients.moe_experts(
        grad, hidden_states, expert_weights, gate_up_bias, down_bias, (row_slot, offsets, slot_row),
        weight_on_input=weight_on_input, form=SwiGLUConfig(**form), needs=needs,
        gate_up=gemm_and_dgrad(gate_up, offsets, gate_up_layout), down=gemm_and_dgrad(down, offsets, down_layout),
    )  # fmt: skip


@weight_operator(
    shapes=_shapes,
    check=check_experts,
    check_values=_check_values,
    gradient=_gradient,
    differentiable=("hidden_states", "expert_weights", "gate_up_bias", "down_bias"),
)
def f16a_nvfp4weight_moe_experts(
    hidden_states: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: WeightOperands,
    down: WeightOperands,
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
    expert_ranks: int = 1,
) -> Tensor:
    """Compute ``sum over a of weight[t, a] * expert_{ids[t, a]}(hidden_states[t])``: a layer's experts in one call.

    The result equals, bit for bit, `moe_route`, `f16a_nvfp4weight_grouped_swiglu` and
    `f16a_nvfp4weight_grouped_mm_combine` one after the other; on a CUDA device their kernels overlap. Differentiable in
    `hidden_states`, `expert_weights` and the biases (the backward recomputes gate, up and the activation).

    Args:
        hidden_states: (T, H) bfloat16, float16 (or float32).
        expert_ids: int32 or int64 (T, A); ids outside [0, E) contribute nothing.
        expert_weights: floating point (T, A).
        gate_up: (E, H // 2, 2I), transposed view of qdata whose rows are the I of gate, then the I of up.
        gate_up_scale: float8_e4m3fn block scales, (E, 2I, H // 16) when linear.
        gate_up_global_scale: float32 (E,) or (E, 2I).
        down: (E, I // 2, H), likewise.
        down_scale: likewise, (E, H, I // 16) when linear.
        down_global_scale: float32 (E,) or (E, H).
        gate_up_bias: floating point (E, 2I).
        down_bias: floating point (E, H).
        row_slot: int32 (M,) with M = T * A; with the next two the order of rows for expert_ids, as `moe_route` gives
            it, if the caller has it already.
        offsets: int32 (E,).
        slot_row: int32 (T, A).
        weight_on_input: expert_weights multiply the experts' input (Llama 4), not their output.
        gate_up_layout: the layout of gate_up, one of `thunder_moe.formats.layouts.LAYOUTS`.
        down_layout: the layout of down.
        alpha: the alpha of the activation, as in `f16a_nvfp4weight_grouped_swiglu`.
        limit: likewise.
        up_shift: likewise.
        expert_ranks: the number of processes that share the experts: about one in so many ids belongs to an expert
            here. Kernels choose their tiles by it; the result does not depend on it.

    Returns:
        (T, H) in the dtype of hidden_states.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device, or a part of the order is missing; on a CPU
            also for an order whose values are out of range. The message names the argument.
    """
    order = None if row_slot is None or offsets is None or slot_row is None else (row_slot, offsets, slot_row)
    call = ExpertsCall(
        hidden_states, expert_ids, expert_weights, gate_up.packed(gate_up_layout), down.packed(down_layout),
        gate_up_bias, down_bias, order, weight_on_input, SwiGLUConfig(alpha, limit, up_shift), expert_ranks,
    )  # fmt: skip
    return select(hidden_states.device, format=gate_up.format.name).moe_experts(call)


f16a_mxfp8weight_moe_experts = OPERATORS["f16a_mxfp8weight_moe_experts"].public


def moe_experts(
    hidden_states: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weight_on_input: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
    order: Order | None = None,
    expert_ranks: int = 1,
) -> Tensor:
    """Run each token through its experts and sum their results, weighted by the router.

    Differentiable in `hidden_states`, `expert_weights` and the biases. Never synchronises with the host on CUDA.

    Args:
        hidden_states: (T, H) bfloat16, float16 (or float32).
        expert_ids: int32 or int64 (T, A), T the tokens of hidden_states; ids outside [0, E) contribute nothing.
        expert_weights: floating point (T, A).
        gate_up: (E, 2I, H), the gate's rows first; `NVFP4Weight` or `MXFP8Weight`.
        down: (E, H, I), in the same number format.
        gate_up_bias: (E, 2I).
        down_bias: (E, H).
        weight_on_input: the weights multiply the experts' input (Llama 4), not their output.
        alpha: the alpha of the activation, as in `f16a_nvfp4weight_grouped_swiglu`.
        limit: likewise.
        up_shift: likewise.
        order: the result of `moe_route` for expert_ids, if it is known, as behind `moe_router`.
        expert_ranks: the number of processes that share the experts; see the operator.

    Returns:
        (T, H) in the dtype of hidden_states.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device.
        TypeError: gate_up or down is not a packed weight, or they are in different formats.
    """
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, PackedWeight):
            raise TypeError(f"{name}: got {type(weight).__name__}, wanted an NVFP4Weight, as `quantize` gives it")
    if type(gate_up) is not type(down):
        raise TypeError(f"down: got {type(down).__name__}, wanted {type(gate_up).__name__}, as gate_up is")
    run = operator_for("f16a_nvfp4weight_moe_experts", gate_up.format)
    return run(
        hidden_states, expert_ids, expert_weights, *operands(gate_up), *operands(down), gate_up_bias, down_bias,
        *(order or (None, None, None)), weight_on_input=weight_on_input, gate_up_layout=gate_up.layout,
        down_layout=down.layout, alpha=alpha, limit=limit, up_shift=up_shift, expert_ranks=expert_ranks,
    )  # fmt: skip

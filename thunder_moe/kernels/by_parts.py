"""The experts of a layer by the functions of a backend that do one step each.
Called by ops.experts for backends without a `moe_experts` of their own, and by kernels.cuda.backend for operands that
no chain serves; calls the backend that it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from thunder_moe.activations import GLU
from thunder_moe.formats.weight import PackedWeight

__all__ = ["Order", "moe_expert_rows", "moe_experts", "of"]

Order = tuple[Tensor, Tensor, Tensor]  # row_slot, offsets and slot_row, as `moe_route` gives them


def of(backend: ModuleType) -> Callable[..., Tensor]:
    """`moe_experts` by the functions of a backend."""
    return functools.partial(moe_experts, backend)


def moe_experts(
    backend: ModuleType,
    hidden_states: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    order: Order | None,
    weight_on_input: bool,
    form: GLU,
) -> Tensor:
    """Tokens (T, H), ids and weights (T, A), gate_up (E, 2I, H), down (E, H, I) -> (T, H).

    The weights multiply the experts' output, or with weight_on_input their input; `order`: that of the ids, if it is
    known.
    """
    row_slot, offsets, slot_row = order or backend.route(expert_ids, gate_up.shape[0])
    on_input, on_output = (expert_weights, None) if weight_on_input else (None, expert_weights)
    rows = backend.grouped_swiglu(hidden_states, gate_up, offsets, row_slot, on_input, gate_up_bias, form)
    out: Tensor = backend.grouped_mm_combine(rows, down, offsets, slot_row, on_output, down_bias)
    return out


def moe_expert_rows(
    backend: ModuleType,
    hidden_states: Tensor,
    expert_weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    order: Order,
) -> Tensor:
    """The rows (M, H) that `moe_experts` with weight_on_input adds up, without biases."""
    row_slot, offsets, _ = order
    rows = backend.grouped_swiglu(hidden_states, gate_up, offsets, row_slot, expert_weights)
    out: Tensor = backend.grouped_mm(rows, down, offsets)
    return out

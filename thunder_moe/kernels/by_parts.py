"""The experts of a layer by the functions of a backend that do one step each.
Called by ops.experts for backends without a `moe_experts` of their own, and by kernels.cuda.layer for operands that its
chain does not serve; calls the backend that it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from thunder_moe.activations import GLU
from thunder_moe.formats.weight import PackedWeight

__all__ = ["Order", "PackedOrder", "moe_expert_rows", "moe_experts", "of"]

Order = tuple[Tensor, Tensor, Tensor]  # row_slot, offsets and slot_row, as `moe_route` gives them


class PackedOrder:
    """An `Order` in one allocation, of which tensors are made only where somebody needs them.

    Args:
        new: any tensor of the device.
        tokens: T.
        top_k: A.
        num_experts: E.

    Attributes:
        num_experts: E.
        addresses: of row_slot (T * A,), offsets (E,) and slot_row (T, A), all int32 and not yet filled.
    """

    def __init__(self, new: Tensor, tokens: int, top_k: int, num_experts: int) -> None:
        slots = tokens * top_k
        self._ends = -(-slots // 4) * 4, -(-num_experts // 4) * 4
        self._shape, self.num_experts = (tokens, top_k), num_experts
        first, second = self._ends
        self._memory = new.new_empty(first + second + slots, dtype=torch.int32)
        base = self._memory.data_ptr()
        self.addresses = base, base + 4 * first, base + 4 * (first + second)

    def tensors(self) -> Order:
        (first, second), (tokens, top_k), memory = self._ends, self._shape, self._memory
        return (
            memory[: tokens * top_k],
            memory[first : first + self.num_experts],
            memory[first + second :].view(tokens, top_k),
        )


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

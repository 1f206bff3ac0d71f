"""`expert_rows`: what the experts of a layer give, before it is summed per token.
Called by parallel.modules; calls the backend that kernels.select chooses.
"""

from __future__ import annotations

from torch import Tensor

from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels import by_parts
from thunder_moe.kernels.select import select

__all__ = ["expert_rows"]


def expert_rows(
    hidden_states: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    order: by_parts.Order,
    expert_ranks: int = 1,
) -> Tensor:
    """The rows (M, H) that `ops.experts.moe_experts` adds up with weight_on_input and without biases; no operator, so
    for plain tensors without gradients alone (`ops.operator.is_plain_eager`).

    Args:
        hidden_states: (T, H).
        expert_ids: int32 (T, A).
        expert_weights: floating point (T, A), multiply the experts' input.
        gate_up: (E, 2I, H).
        down: (E, H, I).
        order: what `moe_route` gives for expert_ids.
        expert_ranks: as in `ops.experts.moe_experts`.
    """
    backend = select(hidden_states.device, format=gate_up.format.name)
    run = getattr(backend, "moe_expert_rows", None)
    if run is None:
        return by_parts.moe_expert_rows(backend, hidden_states, expert_weights, gate_up, down, order)
    live = -(-expert_ids.numel() // expert_ranks)
    out: Tensor = run(hidden_states, expert_ids, expert_weights, gate_up, down, order, live)
    return out

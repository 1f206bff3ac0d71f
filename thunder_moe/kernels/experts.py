"""The experts of a layer: `ExpertsCall`, what they are given, and `unfused`, which computes them step by step.
Called by ops.experts, parallel, integrations.vllm and the backends; calls functions of the backend that it is given.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from thunder_moe.activations import SWIGLU, SwiGLUConfig
from thunder_moe.formats.weight import PackedWeight

Order = tuple[Tensor, Tensor, Tensor]  # row_slot, offsets and slot_row, as `moe_route` gives them


class ExpertsCall(NamedTuple):
    """The operands of a layer's experts. Legend: T tokens, A experts of a token, M = T * A rows.

    Attributes:
        hidden_states, expert_weights: (T, H) and floating point (T, A).
        expert_ids: int32 or int64 (T, A); ids outside [0, E) contribute nothing.
        gate_up, down: (E, 2I, H), the gate's rows first, and (E, H, I); their biases (E, 2I) and (E, H).
        order: the order of the rows, if it is known.
        weight_on_input: the weights multiply the experts' input, not their output.
        form: the form of the activation.
        expert_ranks: about one in so many ids belongs to an expert here; the choice of kernels takes that into account.
        summed: False for the rows (M, H) before the sum per token, which has to be without weights then.
    """

    hidden_states: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    order: Order | None = None
    weight_on_input: bool = False
    form: SwiGLUConfig = SWIGLU
    expert_ranks: int = 1
    summed: bool = True


def unfused(backend: ModuleType, call: ExpertsCall) -> Tensor:
    """Return (T, H), or the rows (M, H), by the functions of a backend that do one step each."""
    row_slot, offsets, slot_row = call.order or backend.route(call.expert_ids, call.gate_up.shape[0])
    weights = call.expert_weights
    on_input, on_output = (weights, None) if call.weight_on_input else (None, weights)
    rows = backend.grouped_swiglu(
        call.hidden_states, call.gate_up, offsets, row_slot, on_input, call.gate_up_bias, call.form
    )
    if not call.summed:
        assert call.weight_on_input
        assert call.down_bias is None
        return backend.grouped_mm(rows, call.down, offsets)
    out = backend.grouped_mm_combine(rows, call.down, offsets, slot_row, on_output, call.down_bias)
    return out

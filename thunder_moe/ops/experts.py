"""`moe_experts`: the experts of a layer on quantised weights, from the router's choice to the weighted sum.
Called by nn, integrations and users; calls the operators moe_route, grouped_swiglu and grouped_mm_combine.

route -> gather, gate_up GEMM, SwiGLU -> down GEMM, weighted combine
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.nvfp4 import NVFP4Weight, require
from thunder_moe.ops import grouped_mm_combine, grouped_swiglu, route  # noqa: F401  (registers the operators)
from thunder_moe.ops.grouped_mm import operands

__all__ = ["moe_experts"]


def moe_experts(
    hidden_states: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: NVFP4Weight,
    down: NVFP4Weight,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weight_on_input: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> Tensor:
    """Runs each token through its experts and sums what they give, weighted by the router.

    Differentiable in `hidden_states`, `expert_weights` and the biases. Never synchronises with the host on CUDA.

    Args:
        hidden_states: (T, H) bfloat16, float16 (or float32).
        expert_ids: int32 or int64 (T, A); ids outside [0, E) contribute nothing.
        expert_weights: floating point (T, A).
        gate_up: (E, 2I, H), the gate's rows first.
        down: (E, H, I).
        gate_up_bias: (E, 2I).
        down_bias: (E, H).
        weight_on_input: the weights multiply the experts' input (Llama 4), not their output.
        alpha, limit, up_shift: of the activation, as in `f16a_nvfp4weight_grouped_swiglu`.

    Returns:
        (T, H) in the dtype of hidden_states.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device.
    """
    ops = torch.ops.thunder_moe
    wanted = f"shape {tuple(expert_ids.shape)}, that of expert_ids"
    require(expert_weights.shape == expert_ids.shape, "expert_weights", expert_weights, wanted)
    row_slot, offsets, slot_row = ops.moe_route(expert_ids, gate_up.shape[0])
    on_input, on_output = (expert_weights, None) if weight_on_input else (None, expert_weights)
    rows = ops.f16a_nvfp4weight_grouped_swiglu(
        hidden_states, *operands(gate_up), offsets, row_slot, on_input, gate_up_bias,
        layout=gate_up.layout, alpha=alpha, limit=limit, up_shift=up_shift,
    )  # fmt: skip
    return ops.f16a_nvfp4weight_grouped_mm_combine(
        rows, *operands(down), offsets, slot_row, on_output, down_bias, layout=down.layout
    )

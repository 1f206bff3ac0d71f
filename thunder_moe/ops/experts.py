"""`moe_experts`: the experts of a layer on quantized weights, from the router's choice to the weighted sum.
Called by nn, integrations and users; calls the operators moe_route, grouped_swiglu and grouped_mm_combine.

route -> gather, gate_up GEMM, SwiGLU -> down GEMM, weighted combine
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.ops import grouped_mm_combine, grouped_swiglu, route, router  # noqa: F401  (registers the operators)
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
    order: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Runs each token through its experts and sums what they give, weighted by the router.

    Differentiable in `hidden_states`, `expert_weights` and the biases. Never synchronises with the host on CUDA.

    Args:
        hidden_states: (T, H) bfloat16, float16 (or float32).
        expert_ids: int32 or int64 (T, A), T the tokens of hidden_states; ids outside [0, E) contribute nothing.
        expert_weights: floating point (T, A).
        gate_up: (E, 2I, H), the gate's rows first.
        down: (E, H, I).
        gate_up_bias: (E, 2I).
        down_bias: (E, H).
        weight_on_input: the weights multiply the experts' input (Llama 4), not their output.
        alpha: of the activation, as in `f16a_nvfp4weight_grouped_swiglu`.
        limit: likewise.
        up_shift: likewise.
        order: what `moe_route` gives for expert_ids, where it is known, as behind `moe_router`.

    Returns:
        (T, H) in the dtype of hidden_states.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device.
    """
    _check(hidden_states, expert_ids, expert_weights, gate_up, down)
    ops = torch.ops.thunder_moe
    row_slot, offsets, slot_row = ops.moe_route(expert_ids, gate_up.shape[0]) if order is None else order
    on_input, on_output = (expert_weights, None) if weight_on_input else (None, expert_weights)
    rows = ops.f16a_nvfp4weight_grouped_swiglu(
        hidden_states, *operands(gate_up), offsets, row_slot, on_input, gate_up_bias,
        layout=gate_up.layout, alpha=alpha, limit=limit, up_shift=up_shift,
    )  # fmt: skip
    out: Tensor = ops.f16a_nvfp4weight_grouped_mm_combine(
        rows, *operands(down), offsets, slot_row, on_output, down_bias, layout=down.layout
    )
    return out


def _check(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: NVFP4Weight, down: NVFP4Weight
) -> None:
    """Checks under the names of `moe_experts` what the operators would report under theirs, or could not see."""
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, NVFP4Weight):
            raise TypeError(f"{name}: got {type(weight).__name__}, wanted an NVFP4Weight, as `quantize` gives it")
    experts, features, hidden_size = gate_up.shape
    require(hidden_states.ndim == 2, "hidden_states", hidden_states, "shape (tokens, hidden_size)")
    tokens, device = hidden_states.shape[0], hidden_states.device
    require(
        hidden_states.shape[1] == hidden_size, "hidden_states", hidden_states, f"{hidden_size} in dim 1, by gate_up"
    )
    # The messages with sizes are made only when needed: a symbolic size in a string would be made a constant, and
    # compiled code compiled again for each number of tokens.
    if expert_ids.ndim != 2 or expert_ids.shape[0] != tokens:
        wanted = f"shape ({tokens}, top_k), {tokens} being the tokens of hidden_states"
        require(False, "expert_ids", expert_ids, wanted)
    require(expert_ids.device == device, "expert_ids", expert_ids, f"device {device}, that of hidden_states")
    if expert_weights.shape != expert_ids.shape:
        require(False, "expert_weights", expert_weights, f"shape {tuple(expert_ids.shape)}, that of expert_ids")
    if features % 2:
        raise ValueError(f"gate_up: got shape {gate_up.shape}, wanted an even out_features: gate rows, then up rows")
    if down.shape != (experts, hidden_size, features // 2):
        wanted = f"{(experts, hidden_size, features // 2)}, by gate_up of shape {gate_up.shape}"
        raise ValueError(f"down: got shape {down.shape}, wanted {wanted}")

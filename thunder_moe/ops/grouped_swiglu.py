"""The operator thunder_moe::f16a_nvfp4weight_grouped_swiglu: gate and up projection in one GEMM, SwiGLU in the same op.
Called by nn and by compiled graphs; calls kernels.select. Its schema mirrors ops.grouped_mm.

rows (M, K) -> GEMM over [gate; up] (E, 2I, K) -> silu(gate) * up -> (M, I)
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.kernels.select import select
from thunder_moe.nvfp4 import require
from thunder_moe.ops.grouped_mm import check_offset_values, check_operands, weight_from_operands

__all__ = ["f16a_nvfp4weight_grouped_swiglu", "swiglu_dgrad"]


@torch.library.custom_op("thunder_moe::f16a_nvfp4weight_grouped_swiglu", mutates_args=())
def _grouped_swiglu(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    *,
    layout: str = "linear",
) -> Tensor:
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    _check(activation, *packed, offsets, layout)
    check_offset_values(offsets, activation.shape[0])
    return select(activation.device).grouped_swiglu(activation, weight_from_operands(*packed, layout), offsets)


@_grouped_swiglu.register_fake
def _(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, *, layout="linear"):
    _check(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout)
    return activation.new_empty(activation.shape[0], fp4_weight.shape[2] // 2)


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    ctx.save_for_backward(*inputs)
    ctx.layout = keyword_only_inputs["layout"]


def _backward(ctx, grad):
    return swiglu_dgrad(grad, *ctx.saved_tensors, layout=ctx.layout), None, None, None, None


_grouped_swiglu.register_autograd(_backward, setup_context=_setup_context)


def f16a_nvfp4weight_grouped_swiglu(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    *,
    layout: str = "linear",
) -> Tensor:
    """``silu(activation @ gate[e].T) * (activation @ up[e].T)`` for the rows of each expert e.

    Differentiable in `activation` (the backward recomputes gate and up).

    Args:
        activation: (M, K) bfloat16, float16 (or float32), rows sorted by expert.
        fp4_weight: (E, K // 2, 2I), transposed view of qdata whose rows are the I of gate, then the I of up.
        weight_scaling_factor: float8_e4m3fn block scales, (E, 2I, K // 16) when linear.
        weight_global_scale: float32 (E,) or (E, 2I).
        offsets: int32 (E,), cumulative row ENDS.
        layout: of the block scales, one of `thunder_moe.nvfp4.LAYOUTS`.

    Returns:
        (M, I) in the activation's dtype; rows at or past ``offsets[-1]`` are undefined.

    Raises:
        ValueError: as `f16a_nvfp4weight_scaled_grouped_mm`, and when the weight's rows are odd in number.
    """
    return torch.ops.thunder_moe.f16a_nvfp4weight_grouped_swiglu(
        activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout=layout
    )


def swiglu_dgrad(
    grad: Tensor,
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    *,
    layout: str = "linear",
) -> Tensor:
    """Gradient (M, I) of `f16a_nvfp4weight_grouped_swiglu`'s output -> gradient (M, K) of its activation."""
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale, offsets)
    gate_up = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, layout=layout)
    gate, up = gate_up.float().chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_gate_up = torch.cat([grad_gate, grad * gate * sigmoid], -1).to(grad.dtype)
    return torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm_dgrad(grad_gate_up, *packed, layout=layout)


def _check(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout) -> None:
    check_operands(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout)
    require(fp4_weight.shape[2] % 2 == 0, "fp4_weight", fp4_weight, "an even out_features: gate rows, then up rows")

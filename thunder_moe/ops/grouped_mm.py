"""The operator thunder_moe::f16a_nvfp4weight_scaled_grouped_mm, and that of its gradient (the same name with _dgrad).
Called by nn, the other operators and compiled graphs; calls kernels.select.

Legend: M rows (tokens * top_k), E experts, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import mismatch, require
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.gradients import Gemms
from thunder_moe.kernels.select import select
from thunder_moe.ops.checks import check_offset_values, check_operands, check_rows_and_weight
from thunder_moe.ops.operator import operator
from thunder_moe.routing import live_rows

__all__ = [
    "f16a_nvfp4weight_scaled_grouped_mm",
    "f16a_nvfp4weight_scaled_grouped_mm_dgrad",
    "gemm_and_dgrad",
    "operands",
    "weight_from_operands",
]


def operands(weight: NVFP4Weight) -> tuple[Tensor, Tensor, Tensor]:
    """(fp4_weight, weight_scaling_factor, weight_global_scale) of a weight, as the operators take them."""
    return weight.qdata.transpose(1, 2), weight.scale, weight.global_scale


def weight_from_operands(
    fp4_weight: Tensor, weight_scaling_factor: Tensor, weight_global_scale: Tensor, layout: str
) -> NVFP4Weight:
    """The inverse of `operands`, for operands that `check_operands` has passed."""
    qdata = fp4_weight.view(torch.uint8).transpose(1, 2)
    return NVFP4Weight.unchecked(qdata, weight_scaling_factor, weight_global_scale, layout)


def gemm_and_dgrad(
    fp4_weight: Tensor, weight_scaling_factor: Tensor, weight_global_scale: Tensor, offsets: Tensor, layout: str
) -> Gemms:
    """The two operators of this file as functions of the rows: (M, K) -> (M, N) and (M, N) -> (M, K)."""
    operators = torch.ops.thunder_moe
    rest = (fp4_weight, weight_scaling_factor, weight_global_scale, offsets)
    return (
        lambda rows: operators.f16a_nvfp4weight_scaled_grouped_mm(rows, *rest, layout=layout),
        lambda grad: operators.f16a_nvfp4weight_scaled_grouped_mm_dgrad(grad, *rest, layout=layout),
    )


def _shapes(activation: Tensor, fp4_weight: Tensor, *_: Any, **__: Any) -> tuple[tuple[int, int]]:
    return ((activation.shape[0], fp4_weight.shape[2]),)


def _check(
    activation: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, offsets: Tensor, *_: Any,
    layout: str = LINEAR,
) -> None:  # fmt: skip
    check_operands(activation, fp4_weight, scale, global_scale, offsets, layout)


def _check_values(
    activation: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, offsets: Tensor, *_: Any, **__: Any
) -> None:
    check_offset_values(offsets, activation.shape[0])


def _gradient(grad: Tensor, *weight_and_offsets: Tensor, needs: Any, layout: str = LINEAR) -> tuple[Tensor]:
    dgrad = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm_dgrad(grad, *weight_and_offsets, layout=layout)
    return (torch.where(live_rows(weight_and_offsets[3], grad.shape[0]), dgrad, 0),)


@operator(
    shapes=_shapes,
    check=_check,
    check_values=_check_values,
    gradient=_gradient,
    differentiable=("activation",),
    saved=slice(1, 5),
)
def f16a_nvfp4weight_scaled_grouped_mm(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    blockscale_offsets: Tensor | None = None,
    problem_sizes: Tensor | None = None,
    *,
    layout: str = LINEAR,
) -> Tensor:
    """Grouped GEMM of 16-bit activations with NVFP4 weights: ``out[rows of e] = activation[rows of e] @ w[e].T``.

    Differentiable in `activation`; the weights are frozen. Never synchronises with the host on CUDA.

    Args:
        activation: (M, K) bfloat16, float16 (or float32), rows sorted by expert.
        fp4_weight: (E, K // 2, N), the transposed view of qdata; uint8 or float4_e2m1fn_x2.
        weight_scaling_factor: float8_e4m3fn block scales, (E, N, K // 16) when linear.
        weight_global_scale: float32 (E,) or (E, N), the multiplier that decodes.
        offsets: int32 (E,), cumulative row ENDS; group 0 starts at row 0. Empty groups are legal.
        blockscale_offsets: read by nvFuser's CUTLASS kernel alone, which derives it when it is missing.
        problem_sizes: likewise.
        layout: of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.

    Returns:
        (M, N) in the activation's dtype; rows at or past ``offsets[-1]`` are undefined.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device; on a CPU also offsets that decrease or
            exceed M. The message names the argument, what it was and what is wanted.
    """
    weight = weight_from_operands(fp4_weight, weight_scaling_factor, weight_global_scale, layout)
    out: Tensor = select(activation.device).grouped_mm(activation, weight, offsets)
    return out


def _dgrad_shapes(grad: Tensor, fp4_weight: Tensor, *_: Any, **__: Any) -> tuple[tuple[int, int]]:
    return ((grad.shape[0], 2 * fp4_weight.shape[1]),)


def _check_dgrad(
    grad: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, offsets: Tensor, *, layout: str = LINEAR
) -> None:
    require(fp4_weight.ndim == 3, "fp4_weight", fp4_weight, "shape (experts, in_features // 2, out_features)")
    n = fp4_weight.shape[2]
    if grad.ndim != 2 or grad.shape[1] != n:
        raise mismatch("grad", grad, f"shape (rows, {n}), by fp4_weight")
    check_rows_and_weight("grad", grad, fp4_weight, scale, global_scale, offsets, layout)


def _check_dgrad_values(
    grad: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, offsets: Tensor, **_: Any
) -> None:
    check_offset_values(offsets, grad.shape[0], "grad")


def _dgrad_gradient(grad: Tensor, *weight_and_offsets: Tensor, needs: Any, layout: str = LINEAR) -> tuple[Tensor]:
    return (torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm(grad, *weight_and_offsets, layout=layout),)


@operator(
    shapes=_dgrad_shapes,
    check=_check_dgrad,
    check_values=_check_dgrad_values,
    gradient=_dgrad_gradient,
    differentiable=("grad",),
    saved=slice(1, 5),
)
def f16a_nvfp4weight_scaled_grouped_mm_dgrad(
    grad: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    *,
    layout: str = LINEAR,
) -> Tensor:
    """Gradient (M, N) of `f16a_nvfp4weight_scaled_grouped_mm`'s output -> gradient (M, K) of its activation.

    The arguments are as there. Differentiable in `grad`.
    """
    weight = weight_from_operands(fp4_weight, weight_scaling_factor, weight_global_scale, layout)
    out: Tensor = select(grad.device).grouped_mm_dgrad(grad, weight, offsets)
    return out

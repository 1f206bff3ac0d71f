"""The operator thunder_moe::f16a_nvfp4weight_scaled_grouped_mm, and its gradient (the same name with _dgrad); both
also exist for MXFP8 weights.
Called by nn, the other operators and compiled graphs; calls kernels.select.

Legend: M rows (tokens * top_k), E experts, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import mismatch
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import PackedWeight, WeightOperands
from thunder_moe.kernels.gradients import Gemms
from thunder_moe.kernels.select import select
from thunder_moe.ops.checks import check_offset_values, check_operands, check_rows_and_weight
from thunder_moe.ops.operator import OPERATORS, op_name_for, weight_operator
from thunder_moe.routing import live_rows


def operands(weight: PackedWeight) -> tuple[Tensor, ...]:
    """Return the tensors of a weight as the operators take them: the codes transposed, (E, K // codes_per_byte, N)."""
    qdata, *others = weight.tensors()
    return qdata.transpose(1, 2), *others


def gemm_and_dgrad(weight: WeightOperands, offsets: Tensor, layout: str) -> Gemms:
    """Return the two operators of this file as functions of the rows: (M, K) -> (M, N) and (M, N) -> (M, K)."""
    names = [op_name_for(name, weight.format) for name in (_NAME, f"{_NAME}_dgrad")]
    gemm, dgrad = (getattr(torch.ops.thunder_moe, name) for name in names)
    rest = *weight.tensors, offsets
    return (lambda rows: gemm(rows, *rest, layout=layout), lambda grad: dgrad(grad, *rest, layout=layout))


_NAME = "f16a_nvfp4weight_scaled_grouped_mm"


def _shapes(activation: Tensor, weight: WeightOperands, *_: Any, **__: Any) -> tuple[tuple[int, int]]:
    return ((activation.shape[0], weight.codes.shape[2]),)


def _check(
    activation: Tensor, weight: WeightOperands, offsets: Tensor, *_: Tensor | None, layout: str = LINEAR
) -> None:
    check_operands(activation, weight, offsets, layout)


def _check_values(activation: Tensor, weight: WeightOperands, offsets: Tensor, *_: Any, **__: Any) -> None:
    check_offset_values(offsets, activation.shape[0])


def _gradient(
    grad: Tensor, weight: WeightOperands, offsets: Tensor, *, needs: Any, layout: str = LINEAR
) -> tuple[Tensor]:
    _, dgrad = gemm_and_dgrad(weight, offsets, layout)
    return (torch.where(live_rows(offsets, grad.shape[0]), dgrad(grad), 0),)


@weight_operator(
    shapes=_shapes,
    check=_check,
    check_values=_check_values,
    gradient=_gradient,
    differentiable=("activation",),
    saved=slice(1, 3),
    of_nvfp4=("blockscale_offsets", "problem_sizes"),
)
def f16a_nvfp4weight_scaled_grouped_mm(
    activation: Tensor,
    weight: WeightOperands,
    offsets: Tensor,
    blockscale_offsets: Tensor | None = None,
    problem_sizes: Tensor | None = None,
    *,
    layout: str = LINEAR,
) -> Tensor:
    """Compute a grouped GEMM with NVFP4 weights: ``out[rows of e] = activation[rows of e] @ w[e].T`` for each expert e.

    Differentiable in `activation`; the weights are frozen. Never synchronises with the host on CUDA.

    Args:
        activation: (M, K) bfloat16, float16 (or float32), rows sorted by expert.
        fp4_weight: (E, K // 2, N), the transposed view of qdata; uint8 or float4_e2m1fn_x2.
        weight_scaling_factor: float8_e4m3fn block scales, (E, N, K // 16) when linear.
        weight_global_scale: float32 (E,) or (E, N), the multiplier that decodes.
        offsets: int32 (E,), cumulative row ENDS; group 0 starts at row 0. Empty groups are legal.
        blockscale_offsets: read by nvFuser's CUTLASS kernel alone, which derives it when it is missing.
        problem_sizes: likewise.
        layout: the layout of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.

    Returns:
        (M, N) in the activation's dtype; rows at or past ``offsets[-1]`` are undefined.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device; on a CPU also offsets that decrease or
            exceed M. The message names the argument, what it was and what is wanted.
    """
    backend = select(activation.device, format=weight.format.name)
    return backend.grouped_mm(activation, weight.packed(layout), offsets)


f16a_mxfp8weight_scaled_grouped_mm = OPERATORS["f16a_mxfp8weight_scaled_grouped_mm"].public


def _dgrad_shapes(grad: Tensor, weight: WeightOperands, *_: Any, **__: Any) -> tuple[tuple[int, int]]:
    return ((grad.shape[0], weight.format.codes_per_byte * weight.codes.shape[1]),)


def _check_dgrad(grad: Tensor, weight: WeightOperands, offsets: Tensor, *, layout: str = LINEAR) -> None:
    name, codes = weight.names[0], weight.codes
    if codes.ndim != 3:
        raise mismatch(name, codes, f"shape (experts, {weight.format.packed_features}, out_features)")
    n = codes.shape[2]
    if grad.ndim != 2 or grad.shape[1] != n:
        raise mismatch("grad", grad, f"shape (rows, {n}), by {name}")
    check_rows_and_weight("grad", grad, weight, offsets, layout)


def _check_dgrad_values(grad: Tensor, weight: WeightOperands, offsets: Tensor, **_: Any) -> None:
    check_offset_values(offsets, grad.shape[0], "grad")


def _dgrad_gradient(
    grad: Tensor, weight: WeightOperands, offsets: Tensor, *, needs: Any, layout: str = LINEAR
) -> tuple[Tensor]:
    gemm, _ = gemm_and_dgrad(weight, offsets, layout)
    return (gemm(grad),)


@weight_operator(
    shapes=_dgrad_shapes,
    check=_check_dgrad,
    check_values=_check_dgrad_values,
    gradient=_dgrad_gradient,
    differentiable=("grad",),
    saved=slice(1, 3),
)
def f16a_nvfp4weight_scaled_grouped_mm_dgrad(
    grad: Tensor, weight: WeightOperands, offsets: Tensor, *, layout: str = LINEAR
) -> Tensor:
    """Return the gradient (M, K) of `f16a_nvfp4weight_scaled_grouped_mm`'s activation, from (M, N) of its output.

    The other arguments are the same as the forward's. Differentiable in `grad`.
    """
    backend = select(grad.device, format=weight.format.name)
    return backend.grouped_mm_dgrad(grad, weight.packed(layout), offsets)


f16a_mxfp8weight_scaled_grouped_mm_dgrad = OPERATORS["f16a_mxfp8weight_scaled_grouped_mm_dgrad"].public

"""The operator thunder_moe::f16a_nvfp4weight_scaled_grouped_mm, and that of its gradient (the same name with _dgrad);
both for MXFP8 weights, too.
Called by nn, the other operators and compiled graphs; calls kernels.select.

Legend: M rows (tokens * top_k), E experts, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.checks import mismatch
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import MXFP8Weight, NVFP4Weight, PackedWeight
from thunder_moe.kernels.gradients import Gemms
from thunder_moe.kernels.select import select
from thunder_moe.ops.checks import check_offset_values, check_operands, check_rows_and_weight
from thunder_moe.ops.operator import in_format, name_in, operator
from thunder_moe.routing import live_rows

__all__ = [
    "f16a_mxfp8weight_scaled_grouped_mm",
    "f16a_mxfp8weight_scaled_grouped_mm_dgrad",
    "f16a_nvfp4weight_scaled_grouped_mm",
    "f16a_nvfp4weight_scaled_grouped_mm_dgrad",
    "gemm_and_dgrad",
    "operands",
    "weight_from_operands",
]


def operands(weight: PackedWeight) -> tuple[Tensor, ...]:
    """The tensors of a weight as the operators take them: the codes transposed, (E, K // codes_per_byte, N)."""
    qdata, *others = weight.tensors()
    return qdata.transpose(1, 2), *others


def weight_from_operands(packed: Tensor, scale: Tensor, global_scale: Tensor | None, layout: str) -> PackedWeight:
    """The inverse of `operands`, for operands that `check_operands` has passed; one with a global scale is NVFP4."""
    if global_scale is None:
        return MXFP8Weight.unchecked(packed.transpose(1, 2), scale, layout)
    return NVFP4Weight.unchecked(packed.view(torch.uint8).transpose(1, 2), scale, global_scale, layout)


def gemm_and_dgrad(
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    offsets: Tensor,
    layout: str,
    format: BlockFormat = NVFP4,
) -> Gemms:
    """The two operators of this file as functions of the rows: (M, K) -> (M, N) and (M, N) -> (M, K)."""
    gemm, dgrad = (getattr(torch.ops.thunder_moe, name_in(name, format)) for name in (_NAME, f"{_NAME}_dgrad"))
    rest = (packed, scale, offsets) if global_scale is None else (packed, scale, global_scale, offsets)
    return (lambda rows: gemm(rows, *rest, layout=layout), lambda grad: dgrad(grad, *rest, layout=layout))


_NAME = "f16a_nvfp4weight_scaled_grouped_mm"


def _shapes(activation: Tensor, fp4_weight: Tensor, *_: Any, **__: Any) -> tuple[tuple[int, int]]:
    return ((activation.shape[0], fp4_weight.shape[2]),)


def _check(
    activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, *_: Any,
    layout: str = LINEAR, format: BlockFormat = NVFP4,
) -> None:  # fmt: skip
    check_operands(activation, packed, scale, global_scale, offsets, layout, format)


def _check_values(
    activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, *_: Any, **__: Any
) -> None:
    check_offset_values(offsets, activation.shape[0])


def _gradient(
    grad: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, *, needs: Any,
    layout: str = LINEAR, format: BlockFormat = NVFP4,
) -> tuple[Tensor]:  # fmt: skip
    _, dgrad = gemm_and_dgrad(packed, scale, global_scale, offsets, layout, format)
    return (torch.where(live_rows(offsets, grad.shape[0]), dgrad(grad), 0),)


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
    out: Tensor = select(activation.device, format=weight.format.name).grouped_mm(activation, weight, offsets)
    return out


f16a_mxfp8weight_scaled_grouped_mm = in_format(f16a_nvfp4weight_scaled_grouped_mm, MXFP8)


def _dgrad_shapes(
    grad: Tensor, packed: Tensor, *_: Any, format: BlockFormat = NVFP4, **__: Any
) -> tuple[tuple[int, int]]:
    return ((grad.shape[0], format.codes_per_byte * packed.shape[1]),)


def _check_dgrad(
    grad: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, *, layout: str = LINEAR,
    format: BlockFormat = NVFP4,
) -> None:  # fmt: skip
    name = format.operands[0]
    if packed.ndim != 3:
        raise mismatch(name, packed, f"shape (experts, {format.packed_features}, out_features)")
    n = packed.shape[2]
    if grad.ndim != 2 or grad.shape[1] != n:
        raise mismatch("grad", grad, f"shape (rows, {n}), by {name}")
    check_rows_and_weight("grad", grad, packed, scale, global_scale, offsets, layout, format)


def _check_dgrad_values(
    grad: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, **_: Any
) -> None:
    check_offset_values(offsets, grad.shape[0], "grad")


def _dgrad_gradient(
    grad: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, *, needs: Any,
    layout: str = LINEAR, format: BlockFormat = NVFP4,
) -> tuple[Tensor]:  # fmt: skip
    gemm, _ = gemm_and_dgrad(packed, scale, global_scale, offsets, layout, format)
    return (gemm(grad),)


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
    out: Tensor = select(grad.device, format=weight.format.name).grouped_mm_dgrad(grad, weight, offsets)
    return out


f16a_mxfp8weight_scaled_grouped_mm_dgrad = in_format(f16a_nvfp4weight_scaled_grouped_mm_dgrad, MXFP8)

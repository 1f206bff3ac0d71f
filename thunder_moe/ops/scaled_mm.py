"""The operator thunder_moe::f16a_nvfp4weight_scaled_mm, a dense layer with one NVFP4 weight, and that of its gradient.
Called by nn.linear and compiled graphs; calls kernels.select.

Legend: ... any leading dimensions, of which there may be none, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import mismatch, require
from thunder_moe.formats.layouts import BLOCK_SIZE, LINEAR, find_layout
from thunder_moe.formats.weight import QDATA_DTYPES, NVFP4Weight
from thunder_moe.kernels.select import select
from thunder_moe.ops.checks import ACTIVATION_DTYPES, check_optional
from thunder_moe.ops.operator import operator

__all__ = ["dense_operands", "f16a_nvfp4weight_scaled_mm", "f16a_nvfp4weight_scaled_mm_dgrad"]


def dense_operands(weight: NVFP4Weight) -> tuple[Tensor, Tensor, Tensor]:
    """(fp4_weight, weight_scaling_factor, weight_global_scale) of a weight (1, N, K), as the operators take them."""
    return weight.qdata[0].t(), weight.scale[0], weight.global_scale[0]


def _weight(fp4_weight: Tensor, weight_scaling_factor: Tensor, weight_global_scale: Tensor, layout: str) -> NVFP4Weight:
    """The inverse of `dense_operands`, for operands that `_check_operands` has passed."""
    qdata = fp4_weight.view(torch.uint8).t()[None]
    return NVFP4Weight.unchecked(qdata, weight_scaling_factor[None], weight_global_scale[None], layout)


def _check_operands(
    name: str, rows: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, layout: str, columns: str
) -> None:
    """Checks everything that can be checked without data; `columns` is what the last dimension of `rows` has to be."""
    known = find_layout(layout)
    require(rows.dtype in ACTIVATION_DTYPES, name, rows, f"a dtype of {ACTIVATION_DTYPES}")
    require(rows.ndim > 0, name, rows, f"shape (..., {columns})")
    require(fp4_weight.dtype in QDATA_DTYPES, "fp4_weight", fp4_weight, f"a dtype of {QDATA_DTYPES}")
    require(fp4_weight.ndim == 2, "fp4_weight", fp4_weight, "shape (in_features // 2, out_features)")
    half, n = fp4_weight.shape
    k = 2 * half
    require(k % BLOCK_SIZE == 0 and k > 0, "fp4_weight", fp4_weight, "in_features a positive multiple of 16")
    needs = known.fits(n, k)
    if needs is not None:
        raise mismatch("fp4_weight", fp4_weight, f"{needs} in layout {layout!r}")
    wanted = {"in_features": k, "out_features": n}[columns]
    if rows.shape[-1] != wanted:
        raise mismatch(name, rows, f"shape (..., {wanted}), the {columns} of fp4_weight {tuple(fp4_weight.shape)}")
    require(scale.dtype == torch.float8_e4m3fn, "weight_scaling_factor", scale, "dtype float8_e4m3fn")
    scales = known.scale_shape(1, n, k)[1:]
    if scale.shape != scales:
        raise mismatch("weight_scaling_factor", scale, f"shape {scales} in layout {layout!r}")
    require(global_scale.dtype == torch.float32, "weight_global_scale", global_scale, "dtype float32")
    if global_scale.shape not in ((), (n,)):
        raise mismatch("weight_global_scale", global_scale, f"a shape of {((), (n,))}")
    for other, tensor in (
        ("fp4_weight", fp4_weight),
        ("weight_scaling_factor", scale),
        ("weight_global_scale", global_scale),
    ):
        if tensor.device != rows.device:
            raise mismatch(other, tensor, f"device {rows.device}, that of {name}")


def _shapes(activation: Tensor, fp4_weight: Tensor, *_: Any, **__: Any) -> tuple[tuple[int, ...]]:
    return ((*activation.shape[:-1], fp4_weight.shape[1]),)


def _check(
    activation: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, *,
    layout: str = LINEAR,
) -> None:  # fmt: skip
    _check_operands("activation", activation, fp4_weight, scale, global_scale, layout, "in_features")
    check_optional("bias", bias, (fp4_weight.shape[1],), activation)


def _gradient(
    grad: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None, *, needs: Any,
    layout: str = LINEAR,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    dgrad = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_mm_dgrad
    of_activation = dgrad(grad, fp4_weight, scale, global_scale, layout=layout) if needs[0] else None
    of_bias = None
    if needs[1] and bias is not None:
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(bias.dtype)
    return of_activation, of_bias


@operator(
    shapes=_shapes,
    check=_check,
    gradient=_gradient,
    differentiable=("activation", "bias"),
    saved=slice(1, 5),
)
def f16a_nvfp4weight_scaled_mm(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    bias: Tensor | None = None,
    *,
    layout: str = LINEAR,
) -> Tensor:
    """`torch.nn.functional.linear` of 16-bit activations with an NVFP4 weight: ``activation @ w.T + bias``.

    Differentiable in `activation` and `bias`; the weight is frozen. Never synchronizes with the host on CUDA. Under
    autocast it computes in autocast's dtype, as ``linear`` does.

    Args:
        activation: (..., K) bfloat16, float16 (or float32), any leading dimensions.
        fp4_weight: (K // 2, N), the transposed view of qdata; uint8 or float4_e2m1fn_x2.
        weight_scaling_factor: float8_e4m3fn block scales, (N, K // 16) when linear.
        weight_global_scale: float32 () or (N,), the multiplier that decodes.
        bias: (N,), floating point of 16 bits or more.
        layout: of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.

    Returns:
        (..., N) in the activation's dtype.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device. The message names the argument, what it was
            and what is wanted.
    """
    weight = _weight(fp4_weight, weight_scaling_factor, weight_global_scale, layout)
    rows = activation.reshape(-1, activation.shape[-1])
    out: Tensor = select(activation.device).mm(rows, weight, bias)
    return out.view(*activation.shape[:-1], out.shape[1])


def _dgrad_shapes(grad: Tensor, fp4_weight: Tensor, *_: Any, **__: Any) -> tuple[tuple[int, ...]]:
    return ((*grad.shape[:-1], 2 * fp4_weight.shape[0]),)


def _check_dgrad(
    grad: Tensor, fp4_weight: Tensor, scale: Tensor, global_scale: Tensor, *, layout: str = LINEAR
) -> None:
    _check_operands("grad", grad, fp4_weight, scale, global_scale, layout, "out_features")


def _dgrad_gradient(grad: Tensor, *weight: Tensor, needs: Any, layout: str = LINEAR) -> tuple[Tensor]:
    return (torch.ops.thunder_moe.f16a_nvfp4weight_scaled_mm(grad, *weight, layout=layout),)


@operator(
    shapes=_dgrad_shapes,
    check=_check_dgrad,
    gradient=_dgrad_gradient,
    differentiable=("grad",),
    saved=slice(1, 4),
)
def f16a_nvfp4weight_scaled_mm_dgrad(
    grad: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    *,
    layout: str = LINEAR,
) -> Tensor:
    """Gradient (..., N) of `f16a_nvfp4weight_scaled_mm`'s output -> gradient (..., K) of its activation.

    The arguments are as there. Differentiable in `grad`.
    """
    weight = _weight(fp4_weight, weight_scaling_factor, weight_global_scale, layout)
    out: Tensor = select(grad.device).mm_dgrad(grad.reshape(-1, grad.shape[-1]), weight)
    return out.view(*grad.shape[:-1], out.shape[1])


# ---- autocast: the activation is cast as torch.nn.functional.linear's is; the weight, its scales and the bias stay


def _register_autocast(device_type: str, key: str) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def autocast(activation: Tensor, *weight_and_bias: Tensor | None, layout: str = LINEAR) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if activation.dtype in ACTIVATION_DTYPES:
                activation = activation.to(torch.get_autocast_dtype(device_type))
            out: Tensor = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_mm(activation, *weight_and_bias, layout=layout)
            return out

    _LIBRARY.impl("f16a_nvfp4weight_scaled_mm", autocast, key)


_LIBRARY = torch.library.Library("thunder_moe", "IMPL")
_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")

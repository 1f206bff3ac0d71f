"""The operator thunder_moe::f16a_nvfp4weight_scaled_mm, a dense layer with one NVFP4 weight, and its gradient; both
also exist for MXFP8 weights.
Called by users, nn.linear, ops.add_norm, integrations.vllm and compiled graphs; calls kernels.select.

Legend: ... any leading dimensions, of which there may be none, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.block_format import MXFP8, NVFP4
from thunder_moe.formats.checks import mismatch, require
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import PackedWeight, WeightOperands
from thunder_moe.kernels.select import select
from thunder_moe.ops.checks import ACTIVATION_DTYPES, check_optional
from thunder_moe.ops.operator import OPERATORS, op_name_for, weight_operator


def dense_operands(weight: PackedWeight) -> tuple[Tensor, ...]:
    """Return the tensors of a weight (1, N, K) for the operators: the codes transposed, (K // codes_per_byte, N)."""
    qdata, *others = weight.tensors()
    return qdata[0].t(), *(tensor[0] for tensor in others)


def _check_operands(name: str, rows: Tensor, weight: WeightOperands, layout: str, columns: str) -> None:
    """Check everything that can be checked without data; `columns` is what the last dimension of `rows` has to be."""
    if weight.codes.device != rows.device:
        raise mismatch(weight.names[0], weight.codes, f"device {rows.device}, as {name} has")
    weight.check(layout, dense=True)
    (codes, n), of_weight = weight.codes.shape, weight.names[0]
    require(rows.dtype in ACTIVATION_DTYPES, name, rows, f"a dtype of {ACTIVATION_DTYPES}")
    require(rows.ndim > 0, name, rows, f"shape (..., {columns})")
    wanted = weight.format.codes_per_byte * codes if columns == "in_features" else n
    if rows.shape[-1] != wanted:
        raise mismatch(name, rows, f"shape (..., {wanted}), the {columns} of {of_weight} {tuple(weight.codes.shape)}")


def _shapes(activation: Tensor, weight: WeightOperands, *_: Any, **__: Any) -> tuple[tuple[int, ...]]:
    return ((*activation.shape[:-1], weight.codes.shape[1]),)


def check_scaled_mm(
    activation: Tensor, weight: WeightOperands, bias: Tensor | None = None, *, layout: str = LINEAR, **_: Any
) -> None:
    """Raise the ValueError of `f16a_nvfp4weight_scaled_mm`, as far as that needs no data."""
    _check_operands("activation", activation, weight, layout, "in_features")
    check_optional("bias", bias, (weight.codes.shape[1],), activation)


def _run(name: str, rows: Tensor, weight: WeightOperands, layout: str) -> Tensor:
    """Calls the operator of a name in the weight's format."""
    operator = getattr(torch.ops.thunder_moe, op_name_for(name, weight.format))
    return operator(rows, *weight.tensors, layout=layout)


def _gradient(
    grad: Tensor, weight: WeightOperands, bias: Tensor | None = None, *, needs: Any, layout: str = LINEAR, **_: Any
) -> tuple[Tensor | None, Tensor | None]:
    of_activation = of_bias = None
    if needs[0]:
        of_activation = _run(f"{_NAME}_dgrad", grad, weight, layout)
    if needs[1] and bias is not None:
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(bias.dtype)
    return of_activation, of_bias


_NAME = "f16a_nvfp4weight_scaled_mm"


@weight_operator(
    shapes=_shapes, check=check_scaled_mm, gradient=_gradient, differentiable=("activation", "bias"), saved=slice(1, 3)
)
def f16a_nvfp4weight_scaled_mm(
    activation: Tensor,
    weight: WeightOperands,
    bias: Tensor | None = None,
    *,
    layout: str = LINEAR,
    prefetch: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.linear` of 16-bit activations with an NVFP4 weight: ``activation @ w.T + bias``.

    Differentiable in `activation` and `bias`; the weight is frozen. Never synchronizes with the host on CUDA. Under
    autocast it computes in autocast's dtype, as ``linear`` does.

    Args:
        activation: (..., K) bfloat16, float16 (or float32), any leading dimensions.
        fp4_weight: (K // 2, N), the transposed view of qdata; uint8 or float4_e2m1fn_x2.
        weight_scaling_factor: float8_e4m3fn block scales, (N, K // 16) when linear.
        weight_global_scale: float32 () or (N,), the multiplier that decodes.
        bias: (N,), floating point of 16 bits or more.
        layout: the layout of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.
        prefetch: on CUDA, the kernel may read the weight before the kernel in front of it has ended. It is right only
            if that kernel does not write the weight; compilers, which know it, set it.

    Returns:
        (..., N) in the activation's dtype.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device. The message names the argument, what it was
            and what is wanted.
    """
    rows = activation.reshape(-1, activation.shape[-1])
    out: Tensor = select(activation.device, format=weight.format.name).mm(rows, weight.packed(layout), bias)
    return out.view(*activation.shape[:-1], out.shape[1])


f16a_mxfp8weight_scaled_mm = OPERATORS["f16a_mxfp8weight_scaled_mm"].public


def _dgrad_shapes(grad: Tensor, weight: WeightOperands, *_: Any, **__: Any) -> tuple[tuple[int, ...]]:
    return ((*grad.shape[:-1], weight.format.codes_per_byte * weight.codes.shape[0]),)


def _check_dgrad(grad: Tensor, weight: WeightOperands, *, layout: str = LINEAR) -> None:
    _check_operands("grad", grad, weight, layout, "out_features")


def _dgrad_gradient(grad: Tensor, weight: WeightOperands, *, needs: Any, layout: str = LINEAR) -> tuple[Tensor]:
    return (_run(_NAME, grad, weight, layout),)


@weight_operator(
    shapes=_dgrad_shapes, check=_check_dgrad, gradient=_dgrad_gradient, differentiable=("grad",), saved=slice(1, 2)
)
def f16a_nvfp4weight_scaled_mm_dgrad(grad: Tensor, weight: WeightOperands, *, layout: str = LINEAR) -> Tensor:
    """Return the gradient (..., K) of the activation, from the gradient (..., N) of the output.

    The other arguments are the same as the forward's. Differentiable in `grad`.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    out: Tensor = select(grad.device, format=weight.format.name).mm_dgrad(rows, weight.packed(layout))
    return out.view(*grad.shape[:-1], out.shape[1])


f16a_mxfp8weight_scaled_mm_dgrad = OPERATORS["f16a_mxfp8weight_scaled_mm_dgrad"].public


# ---- autocast: the activation is cast as torch.nn.functional.linear's is; the weight, its scales and the bias stay


def _register_autocast(name: str, device_type: str, key: str) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    registered = getattr(torch.ops.thunder_moe, name)

    def autocast(activation: Tensor, *weight_and_bias: Tensor | None, **options: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if activation.dtype in ACTIVATION_DTYPES:
                activation = activation.to(torch.get_autocast_dtype(device_type))
            return registered(activation, *weight_and_bias, **options)

    _LIBRARY.impl(name, autocast, key)


_LIBRARY = torch.library.Library("thunder_moe", "IMPL")
for _format in (NVFP4, MXFP8):
    _register_autocast(op_name_for(_NAME, _format), "cpu", "AutocastCPU")
    _register_autocast(op_name_for(_NAME, _format), "cuda", "AutocastCUDA")

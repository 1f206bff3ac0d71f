"""Operators that add a residual and normalize the sum in front of a dense layer or a router:
thunder_moe::f16a_nvfp4weight_add_norm_scaled_mm (also for MXFP8 weights) and thunder_moe::add_norm_linear_router.
Called by compiled graphs (compilers/dynamo/add_norm.py); calls kernels.select, and ops.scaled_mm and ops.router for
checks.

    total = x + residual,  rows = (total / rms(total)) * norm_weight,  then scaled_mm(rows) or moe_linear_router(rows)

Each step is rounded to the dtype of x, as eager PyTorch rounds it. Both are for inference: a backward raises an error.
On CUDA they are one kernel for few rows; compilers call them only where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels.select import select
from thunder_moe.ops import router, scaled_mm
from thunder_moe.ops.operator import OPERATORS, operator, weight_operator
from thunder_moe.routing import RouterConfig


def _check_norm(name: str, x: Tensor, residual: Tensor, norm_weight: Tensor) -> None:
    for other, tensor, shape in (("residual", residual, x.shape), ("norm_weight", norm_weight, x.shape[-1:])):
        ok = tensor.shape == shape and tensor.dtype == x.dtype and tensor.device == x.device
        require(ok, other, tensor, f"shape {tuple(shape)}, dtype {x.dtype}, on {x.device}, by {name}")


def _mm_shapes(
    activation: Tensor, residual: Tensor, norm_weight: Tensor, weight: WeightOperands, *_: Any, **__: Any
) -> tuple[tuple[int, ...], ...]:
    return (*activation.shape[:-1], weight.codes.shape[1]), tuple(activation.shape)


def _check_mm(
    activation: Tensor, residual: Tensor, norm_weight: Tensor, *others: Any, epsilon: float, **options: Any
) -> None:
    scaled_mm.check_scaled_mm(activation, *others, **options)
    _check_norm("activation", activation, residual, norm_weight)


def _no_gradient(*_: Any, **__: Any) -> tuple[()]:
    raise RuntimeError("add_norm operators have no gradient; a sum, a norm, and the layer behind it do")


@weight_operator(shapes=_mm_shapes, check=_check_mm, gradient=_no_gradient, saved=slice(3, 4))
def f16a_nvfp4weight_add_norm_scaled_mm(
    activation: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    weight: WeightOperands,
    bias: Tensor | None = None,
    *,
    epsilon: float,
    layout: str = LINEAR,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``scaled_mm(rms_norm(activation + residual) * norm_weight)``, and the sum, for inference.

    On CUDA devices of compute capability 9.0 it is one kernel for one or two rows of 16 bits, if the layer alone has a
    kernel without a pipeline; elsewhere it runs in plain torch and the layer's kernel.

    Args:
        activation: (..., K) bfloat16, float16 (or float32).
        residual: likewise.
        norm_weight: (K,), likewise.
        weight, weight_scaling_factor, weight_global_scale, bias: as in `f16a_nvfp4weight_scaled_mm`.
        epsilon: added to the mean of squares.
        layout: the layout of the weight.
        prefetch: on CUDA, the kernel may read both weights before the kernel in front of it has ended. It is right only
            if that kernel does not write them; compilers, which know it, set it.

    Returns:
        (..., N), and the sum (..., K), in the activation's dtype.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device.
    """
    kernel = select(activation.device, format=weight.format.name).add_norm_mm
    shape = activation.shape
    out, total = kernel(
        activation.reshape(-1, shape[-1]), residual.reshape(-1, shape[-1]), norm_weight, weight.packed(layout), bias,
        epsilon,
    )  # fmt: skip
    return out.view(*shape[:-1], out.shape[1]), total.view(shape)


f16a_mxfp8weight_add_norm_scaled_mm = OPERATORS["f16a_mxfp8weight_add_norm_scaled_mm"].public


def _router_shapes(
    hidden_states: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, *_: Any, top_k: int, **__: Any
) -> tuple[tuple[int, ...], ...]:
    shape = tuple(hidden_states.shape)
    return *router.linear_shapes(hidden_states, weight, top_k=top_k), shape, shape


def _router_dtypes(*args: Any, **options: Any) -> tuple[torch.dtype | None, ...]:
    return *router.linear_dtypes(*args, **options), None, None


def _check_router(
    hidden_states: Tensor, residual: Tensor, norm_weight: Tensor, *others: Any, norm_epsilon: float, **options: Any
) -> None:
    router.check_linear_router(hidden_states, *others, **options)
    _check_norm("hidden_states", hidden_states, residual, norm_weight)


@operator(
    shapes=_router_shapes,
    dtype=_router_dtypes,
    check=_check_router,
    check_values=router.check_linear_router_values,
    gradient=_no_gradient,
    saved=slice(0),
)
def add_norm_linear_router(
    hidden_states: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm_epsilon: float,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
    epsilon: float = 0.0,
    least_sum: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    mask_to_zero: bool = False,
    logits_dtype: torch.dtype | None = None,
    scores_dtype: torch.dtype | None = None,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute ``moe_linear_router(rms_norm(hidden_states + residual) * norm_weight)``, the sum and the rows.

    On CUDA it is one kernel for up to three tokens of 16 bits; elsewhere it runs in plain torch and the router's
    kernels.

    Args:
        hidden_states: (T, H) bfloat16, float16 or float32.
        residual: (T, H), likewise.
        norm_weight: (H,), likewise.
        norm_epsilon: added to the mean of squares.
        prefetch: on CUDA, the kernel may read `norm_weight` and `weight` before the kernel in front of it has ended. It
            is right only if that kernel does not write them; compilers, which know it, set it.

    The other arguments mean the same as in `moe_linear_router`.

    Returns:
        What `moe_linear_router` returns, then the sum and the normalized rows, (T, H) in the dtype of hidden_states.

    Raises:
        ValueError: a tensor has the wrong rank, shape, dtype or device, or an option is out of its range.
    """
    form = RouterConfig(
        top_k, score, normalize, epsilon, least_sum, scale, num_groups, top_groups, group_best, mask_to_zero
    )
    dtypes = logits_dtype or hidden_states.dtype, scores_dtype or hidden_states.dtype
    kernel = select(hidden_states.device).add_norm_linear_router
    return kernel(hidden_states, residual, norm_weight, norm_epsilon, weight, linear_bias, bias, form, *dtypes)

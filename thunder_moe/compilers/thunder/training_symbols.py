"""The symbols of training blocks in Thunder's traces: expert linears, their biases, scaled activations; and of weights
and results that are spread over ranks.
Called by executor.py, which puts them in the place of the operators, trace.py, sites.py, rewrite.py and
parallel.thunder; calls symbols.py for the grouped GEMM, the operators of ops.grouped_linear and ops.activation, and
torch.distributed.

    grouped_linear            -> moe_grouped_mm (own) -> moe_grouped_bias; with an 8-bit recipe moe_recipe_linear
    activated_grouped_linear  -> moe_scaled_activation -> the same, where the weight is frozen: the rewrite finds it;
                                 moe_activated_linear where it is trained or has a recipe, which recomputes the rows

Legend: M rows, E experts, N out_features, D columns before the activation, I intermediate_size.
"""

from __future__ import annotations

from typing import Any

import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
import torch
import torch.distributed as dist
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_moe.compilers.thunder.symbols import grouped_mm, register
from thunder_moe.formats.gate_up import deinterleave, interleave
from thunder_moe.ops.grouped_linear import check_linear

_OPS = torch.ops.thunder_moe
_linear_dgrad, _linear_wgrad, _bias_grad, _bias_scale_grad, _activation_backward = (
    register(f"moe_{name}", getattr(_OPS, name))
    for name in (
        "grouped_linear_dgrad", "grouped_linear_wgrad", "grouped_bias_grad", "grouped_bias_scale_grad",
        "scaled_activation_backward",
    )
)  # fmt: skip


def _recipe_linear_gradient(x: TensorProxy, weight: TensorProxy, offsets: TensorProxy, *recipe: Any) -> TensorProxy:
    out: TensorProxy = recipe_linear(x, weight, offsets, *recipe)
    grad = get_grad(out)
    put_grad(x, _linear_dgrad(grad, weight, offsets, recipe[-1]))
    put_grad(weight, _linear_wgrad(x, grad, offsets, recipe[-1]))
    return out


def _grouped_bias_gradient(
    y: TensorProxy, offsets: TensorProxy, bias: TensorProxy | None, bias_scale: TensorProxy | None,
    scales: TensorProxy | None,
) -> TensorProxy:  # fmt: skip
    out: TensorProxy = grouped_bias(y, offsets, bias, bias_scale, scales)
    grad = get_grad(out)
    put_grad(y, grouped_bias(grad, offsets, None, None, scales))
    if bias is not None:
        factors = [factor.float() for factor in (bias_scale, scales) if factor is not None]
        both = factors[0] * factors[1] if len(factors) == 2 else factors[0] if factors else None
        put_grad(bias, _bias_grad(grad, offsets, both).to(bias.dtype))
        if bias_scale is not None:
            of_row = _bias_scale_grad(grad, bias, offsets)
            # Past the last row end the product is zero, and the scales may be NaN.
            of_row = of_row if scales is None else ltorch.where(of_row == 0, 0, of_row * scales.float())
            put_grad(bias_scale, of_row.to(bias_scale.dtype))
    if scales is not None:
        unscaled = grouped_bias(y, offsets, bias, bias_scale, None)
        live = grouped_bias(grad, offsets, None, None, None)
        put_grad(scales, (live.float() * unscaled.float()).sum(-1).to(scales.dtype))
    return out


def _gate_up_bias_gradient(bias: TensorProxy, size: int) -> TensorProxy:
    out: TensorProxy = gate_up_bias(bias, size)
    put_grad(bias, _interleaved(get_grad(out), size))
    return out


def _scaled_activation_gradient(
    y: TensorProxy, scales: TensorProxy | None, offsets: TensorProxy | None, **form: Any
) -> TensorProxy:
    out: TensorProxy = scaled_activation(y, scales, offsets, **form)
    of_y, of_scales = _activation_backward(get_grad(out), y, scales, offsets, True, scales is not None, **form)
    put_grad(y, of_y)
    if scales is not None:
        put_grad(scales, of_scales)
    return out


def _activated_linear_gradient(
    y: TensorProxy, weight: TensorProxy, offsets: TensorProxy, scales: TensorProxy | None, bias: TensorProxy | None,
    recipe: str | None, **form: Any,
) -> TensorProxy:  # fmt: skip
    out: TensorProxy = activated_linear(y, weight, offsets, scales, bias, recipe, **form)
    grad = get_grad(out)
    of_rows = _linear_dgrad(grad, weight, offsets, recipe)
    of_y, of_scales = _activation_backward(of_rows, y, scales, offsets, True, scales is not None, **form)
    put_grad(y, of_y)
    put_grad(weight, _linear_wgrad(scaled_activation(y, scales, offsets, **form), grad, offsets, recipe))
    if scales is not None:
        if bias is not None:
            of_scales = (of_scales.float() + _bias_scale_grad(grad, bias, offsets)).to(scales.dtype)
        put_grad(scales, of_scales)
    if bias is not None:
        put_grad(bias, _bias_grad(grad, offsets, scales).to(bias.dtype))
    return out


recipe_linear = register("moe_recipe_linear", _OPS.grouped_linear, _recipe_linear_gradient)
grouped_bias = register("moe_grouped_bias", _OPS.grouped_bias, _grouped_bias_gradient)
gate_up_bias = register("moe_gate_up_bias", deinterleave, _gate_up_bias_gradient)  # (E, 2I), the gate's part first
_interleaved = register("moe_gate_up_bias_grad", interleave)
scaled_activation = register("moe_scaled_activation", _OPS.scaled_activation, _scaled_activation_gradient)
activated_linear = register("moe_activated_linear", _OPS.activated_grouped_linear, _activated_linear_gradient)


# ---- what the operators become in a trace


def _int32(offsets: TensorProxy) -> TensorProxy:
    return offsets if offsets.dtype == dtypes.int32 else ltorch.to(offsets, torch.int32)


def _linear_call(
    x: TensorProxy, weight: TensorProxy, offsets: TensorProxy, bias: TensorProxy | None = None,
    bias_scale: TensorProxy | None = None, recipe: str | None = None,
) -> TensorProxy:  # fmt: skip
    """Trace `grouped_linear`."""
    check_linear(x, weight, offsets, bias, bias_scale, recipe)
    ends = _int32(offsets)
    if recipe is None:
        out = grouped_mm(x, ltorch.transpose(weight, 1, 2), ends, None, True)
    else:
        out = recipe_linear(x, weight, ends, None, None, recipe)
    return out if bias is None else grouped_bias(out, ends, bias, bias_scale, None)


def _activated_linear_call(
    y: TensorProxy, weight: TensorProxy, offsets: TensorProxy, scales: TensorProxy | None = None,
    bias: TensorProxy | None = None, recipe: str | None = None, **form: Any,
) -> TensorProxy:  # fmt: skip
    """Trace `activated_grouped_linear`."""
    ends = _int32(offsets)
    if recipe is not None or (weight.requires_grad and get_compile_data().is_grad_enabled):
        return activated_linear(y, weight, ends, scales, bias, recipe, **form)
    rows = scaled_activation(y, None, ends, **form)
    out = grouped_mm(rows, ltorch.transpose(weight, 1, 2), ends, None, True)
    return out if bias is None and scales is None else grouped_bias(out, ends, bias, None, scales)


def _bias_call(
    y: TensorProxy, offsets: TensorProxy, bias: TensorProxy | None = None, bias_scale: TensorProxy | None = None,
    scales: TensorProxy | None = None,
) -> TensorProxy:  # fmt: skip
    """Trace `grouped_bias`."""
    return grouped_bias(y, _int32(offsets), bias, bias_scale, scales)


def _scaled_activation_call(
    y: TensorProxy, scales: TensorProxy | None = None, offsets: TensorProxy | None = None, **form: Any
) -> TensorProxy:
    """Trace `scaled_activation`."""
    return scaled_activation(y, scales, offsets if offsets is None else _int32(offsets), **form)


# What Thunder traces in the place of the operators of these names.
CALLS = dict(
    grouped_linear=_linear_call,
    activated_grouped_linear=_activated_linear_call,
    grouped_bias=_bias_call,
    scaled_activation=_scaled_activation_call,
)


# ---- the local tensor of a DTensor


def _local_meta(dtensor: Any) -> TensorProxy:
    return TensorProxy(like=dtensor.local_tensor, requires_grad=dtensor.requires_grad)


def _local_gradient(dtensor: Any) -> TensorProxy:
    out: TensorProxy = local_shard(dtensor)
    if dtensor.requires_grad:
        put_grad(dtensor, _to_dtensor(get_grad(out), dtensor))
    return out


def _dtensor_of(local: Tensor, like: Any) -> Any:
    sizes = dict(shape=like.shape, stride=like.stride())
    return type(like).from_local(local, like.device_mesh, like.placements, run_check=False, **sizes)


local_shard = register("moe_local_shard", lambda dtensor: dtensor.to_local(), _local_gradient, meta=_local_meta)
_to_dtensor = register("moe_to_dtensor", _dtensor_of, meta=lambda local, like: type(like)(like=like))


# ---- the sum over the ranks of a process group; a tensor whose gradient is the sum of all ranks' gradients


def _sum(x: Tensor, group: Any) -> Tensor:
    out = x.clone()  # x may be saved for the backward
    dist.all_reduce(out, group=group)
    return out


def _sum_backward(x: TensorProxy, group: Any) -> TensorProxy:
    out: TensorProxy = sum_of_ranks(x, group)
    put_grad(x, get_grad(out))
    return out


def _gradient_backward(x: TensorProxy, group: Any) -> TensorProxy:
    out: TensorProxy = sum_gradient(x, group)
    put_grad(x, sum_of_ranks(get_grad(out), group))
    return out


def _like_first(x: TensorProxy, group: Any) -> TensorProxy:
    return TensorProxy(like=x)


sum_of_ranks = register("moe_sum_of_ranks", _sum, _sum_backward, meta=_like_first)
sum_gradient = register("moe_sum_gradient", lambda x, group: x.view_as(x), _gradient_backward, meta=_like_first)

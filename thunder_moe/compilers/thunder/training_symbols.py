"""The symbols of training blocks in Thunder's traces: expert linears, their biases, scaled activations.
Called by executor.py, which puts them in the place of the operators, sites.py and rewrite.py; calls symbols.py for the
grouped GEMM, and the operators of ops.grouped_linear and ops.activation.

    grouped_linear            -> moe_grouped_mm (own) -> moe_grouped_bias
    activated_grouped_linear  -> moe_scaled_activation -> the same, where the weight is frozen: the rewrite finds it;
                                 moe_activated_linear where it is trained, which recomputes the rows of the GEMM

Legend: M rows, E experts, N out_features, D columns before the activation, I intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thunder_moe.compilers.thunder.compat import import_thunder

import_thunder()

import thunder.core.dtypes as dtypes  # noqa: E402
import thunder.torch as ltorch  # noqa: E402
from thunder.core.compile_data import get_compile_data  # noqa: E402
from thunder.core.prims import get_grad, put_grad  # noqa: E402
from thunder.core.proxies import TensorProxy  # noqa: E402

from thunder_moe.compilers.thunder.symbols import EXECUTOR, grouped_mm  # noqa: E402
from thunder_moe.formats.gate_up import deinterleave, interleave  # noqa: E402
from thunder_moe.ops.activation import ActivationForm  # noqa: E402
from thunder_moe.ops.grouped_linear import check_linear  # noqa: E402

__all__ = [
    "activated_linear",
    "activated_linear_call",
    "bias_call",
    "gate_up_bias",
    "grouped_bias",
    "linear_call",
    "scaled_activation",
    "scaled_activation_call",
]

_OPS = torch.ops.thunder_moe


def _like(position: int) -> Callable[..., TensorProxy]:
    """The meta function of an operator whose result is like its argument at a position."""
    return lambda *args, **form: TensorProxy(like=args[position])


# ---- biases and factors of rows


def _of_bias(grad: Tensor, offsets: Tensor, bias: Tensor, bias_scale: Tensor | None, scales: Tensor | None) -> Tensor:
    factors = [factor.float() for factor in (bias_scale, scales) if factor is not None]
    both = factors[0] * factors[1] if len(factors) == 2 else factors[0] if factors else None
    out: Tensor = _OPS.grouped_bias_grad(grad, offsets, both).to(bias.dtype)
    return out


def _of_bias_scale(grad: Tensor, offsets: Tensor, bias: Tensor, bias_scale: Tensor, scales: Tensor | None) -> Tensor:
    of_row: Tensor = _OPS.grouped_bias_scale_grad(grad, bias, offsets)
    of_row = of_row if scales is None else torch.where(of_row == 0, 0, of_row * scales.float())
    return of_row.to(bias_scale.dtype)


def _of_scales(grad: Tensor, unscaled: Tensor, offsets: Tensor, scales: Tensor) -> Tensor:
    live: Tensor = _OPS.grouped_bias(grad, offsets)
    return (live.float() * unscaled.float()).sum(-1).to(scales.dtype)


grouped_bias = EXECUTOR.register_operator("moe_grouped_bias", meta=_like(0), fn=_OPS.grouped_bias)
_bias_grad = EXECUTOR.register_operator("moe_grouped_bias_grad", meta=_like(2), fn=_of_bias)
_bias_scale_grad = EXECUTOR.register_operator("moe_grouped_bias_scale_grad", meta=_like(3), fn=_of_bias_scale)
_scales_grad = EXECUTOR.register_operator("moe_row_scales_grad", meta=_like(3), fn=_of_scales)


def _grouped_bias_grad(
    y: TensorProxy, offsets: TensorProxy, bias: TensorProxy | None, bias_scale: TensorProxy | None,
    scales: TensorProxy | None,
) -> TensorProxy:  # fmt: skip
    out = grouped_bias(y, offsets, bias, bias_scale, scales)
    grad = get_grad(out)
    put_grad(y, grouped_bias(grad, offsets, None, None, scales))
    if bias is not None:
        put_grad(bias, _bias_grad(grad, offsets, bias, bias_scale, scales))
        if bias_scale is not None:
            put_grad(bias_scale, _bias_scale_grad(grad, offsets, bias, bias_scale, scales))
    if scales is not None:
        put_grad(scales, _scales_grad(grad, grouped_bias(y, offsets, bias, bias_scale, None), offsets, scales))
    return out


# ---- the bias (E, 2I) of interleaved gate and up, the gate's part first


gate_up_bias = EXECUTOR.register_operator("moe_gate_up_bias", meta=_like(0), fn=deinterleave)
_interleaved = EXECUTOR.register_operator("moe_gate_up_bias_grad", meta=_like(0), fn=interleave)


def _gate_up_bias_grad(bias: TensorProxy, size: int) -> TensorProxy:
    out = gate_up_bias(bias, size)
    put_grad(bias, _interleaved(get_grad(out), size))
    return out


# ---- activations


def _activation_meta(
    y: TensorProxy, scales: TensorProxy | None, offsets: TensorProxy | None, **form: Any
) -> TensorProxy:
    form_of = ActivationForm(**form)
    form_of.check(y.shape[1])
    return TensorProxy(like=y, shape=(y.shape[0], form_of.width(y.shape[1])))


def _activation_backward_meta(
    grad: TensorProxy, y: TensorProxy, scales: TensorProxy | None, offsets: TensorProxy | None, **form: Any
) -> tuple[TensorProxy, ...]:
    of_y = TensorProxy(like=y)
    return (of_y,) if scales is None else (of_y, TensorProxy(like=scales))


def _activation_backward(
    grad: Tensor, y: Tensor, scales: Tensor | None, offsets: Tensor | None, **form: Any
) -> tuple[Tensor, ...]:
    grads = _OPS.scaled_activation_backward(grad, y, scales, offsets, True, scales is not None, **form)
    return tuple(grads[:1] if scales is None else grads)


scaled_activation = EXECUTOR.register_operator(
    "moe_scaled_activation", meta=_activation_meta, fn=_OPS.scaled_activation
)
_activation_grad = EXECUTOR.register_operator(
    "moe_scaled_activation_backward", meta=_activation_backward_meta, fn=_activation_backward
)


def _scaled_activation_grad(
    y: TensorProxy, scales: TensorProxy | None, offsets: TensorProxy | None, **form: Any
) -> TensorProxy:
    out = scaled_activation(y, scales, offsets, **form)
    grads = _activation_grad(get_grad(out), y, scales, offsets, **form)
    put_grad(y, grads[0])
    if scales is not None:
        put_grad(scales, grads[1])
    return out


# ---- a trained linear on activated rows


def _activated_meta(
    y: TensorProxy, weight: TensorProxy, offsets: TensorProxy, scales: TensorProxy | None, bias: TensorProxy | None,
    **form: Any,
) -> TensorProxy:  # fmt: skip
    return TensorProxy(like=y, shape=(y.shape[0], weight.shape[1]))


def _dgrad_meta(grad: TensorProxy, weight: TensorProxy, offsets: TensorProxy) -> TensorProxy:
    return TensorProxy(like=grad, shape=(grad.shape[0], weight.shape[2]))


def _wgrad_meta(
    y: TensorProxy, grad: TensorProxy, offsets: TensorProxy, scales: TensorProxy | None, **form: Any
) -> TensorProxy:
    rows = ActivationForm(**form).width(y.shape[1])
    return TensorProxy(like=grad, shape=(offsets.shape[0], grad.shape[1], rows))


def _wgrad_run(y: Tensor, grad: Tensor, offsets: Tensor, scales: Tensor | None, **form: Any) -> Tensor:
    out: Tensor = _OPS.grouped_linear_wgrad(_OPS.scaled_activation(y, scales, offsets, **form), grad, offsets)
    return out


def _scales_run(of_rows: Tensor, grad: Tensor, offsets: Tensor, bias: Tensor, scales: Tensor) -> Tensor:
    of_bias: Tensor = _OPS.grouped_bias_scale_grad(grad, bias, offsets)
    return (of_rows.float() + of_bias).to(scales.dtype)


activated_linear = EXECUTOR.register_operator(
    "moe_activated_linear", meta=_activated_meta, fn=_OPS.activated_grouped_linear
)
_linear_dgrad = EXECUTOR.register_operator("moe_linear_dgrad", meta=_dgrad_meta, fn=_OPS.grouped_linear_dgrad)
_activated_wgrad = EXECUTOR.register_operator("moe_activated_wgrad", meta=_wgrad_meta, fn=_wgrad_run)
_add_bias_to_scales = EXECUTOR.register_operator("moe_activated_scales_grad", meta=_like(4), fn=_scales_run)


def _activated_linear_grad(
    y: TensorProxy, weight: TensorProxy, offsets: TensorProxy, scales: TensorProxy | None, bias: TensorProxy | None,
    **form: Any,
) -> TensorProxy:  # fmt: skip
    out = activated_linear(y, weight, offsets, scales, bias, **form)
    grad = get_grad(out)
    grads = _activation_grad(_linear_dgrad(grad, weight, offsets), y, scales, offsets, **form)
    put_grad(y, grads[0])
    put_grad(weight, _activated_wgrad(y, grad, offsets, scales, **form))
    if scales is not None:
        of_scales = grads[1] if bias is None else _add_bias_to_scales(grads[1], grad, offsets, bias, scales)
        put_grad(scales, of_scales)
    if bias is not None:
        put_grad(bias, _bias_grad(grad, offsets, bias, scales, None))
    return out


for _each, _grad_transform in (
    (grouped_bias, _grouped_bias_grad),
    (_bias_grad, None),
    (_bias_scale_grad, None),
    (_scales_grad, None),
    (gate_up_bias, _gate_up_bias_grad),
    (_interleaved, None),
    (scaled_activation, _scaled_activation_grad),
    (_activation_grad, None),
    (activated_linear, _activated_linear_grad),
    (_linear_dgrad, None),
    (_activated_wgrad, None),
    (_add_bias_to_scales, None),
):
    EXECUTOR.register_implementation(_each, _each, grad_transform=_grad_transform)


# ---- what the operators become in a trace


def _int32(offsets: TensorProxy) -> TensorProxy:
    return offsets if offsets.dtype == dtypes.int32 else ltorch.to(offsets, torch.int32)


def linear_call(
    x: TensorProxy, weight: TensorProxy, offsets: TensorProxy, bias: TensorProxy | None = None,
    bias_scale: TensorProxy | None = None,
) -> TensorProxy:  # fmt: skip
    """`grouped_linear` in a trace."""
    check_linear(x, weight, offsets, bias, bias_scale)
    ends = _int32(offsets)
    out = grouped_mm(x, ltorch.transpose(weight, 1, 2), ends, None, True)
    return out if bias is None else grouped_bias(out, ends, bias, bias_scale, None)


def activated_linear_call(
    y: TensorProxy, weight: TensorProxy, offsets: TensorProxy, scales: TensorProxy | None = None,
    bias: TensorProxy | None = None, **form: Any,
) -> TensorProxy:  # fmt: skip
    """`activated_grouped_linear` in a trace."""
    ends = _int32(offsets)
    if weight.requires_grad and get_compile_data().is_grad_enabled:
        return activated_linear(y, weight, ends, scales, bias, **form)
    rows = scaled_activation(y, None, ends, **form)
    out = grouped_mm(rows, ltorch.transpose(weight, 1, 2), ends, None, True)
    return out if bias is None and scales is None else grouped_bias(out, ends, bias, None, scales)


def bias_call(
    y: TensorProxy, offsets: TensorProxy, bias: TensorProxy | None = None, bias_scale: TensorProxy | None = None,
    scales: TensorProxy | None = None,
) -> TensorProxy:  # fmt: skip
    """`grouped_bias` in a trace."""
    return grouped_bias(y, _int32(offsets), bias, bias_scale, scales)


def scaled_activation_call(
    y: TensorProxy, scales: TensorProxy | None = None, offsets: TensorProxy | None = None, **form: Any
) -> TensorProxy:
    """`scaled_activation` in a trace."""
    return scaled_activation(y, scales, offsets if offsets is None else _int32(offsets), **form)

"""The operator thunder_moe::trainable_grouped_mm: torch's 16-bit grouped GEMM with a gradient that takes any strides.
Called by the graphs that compilers.dynamo rewrites, its plain functions by compilers.thunder_symbols; calls torch.

torch's own backward fails with "Invalid strides" on expanded gradients (of a sum, say); this one does not.

Legend: a (M, K) rows sorted by expert, b (E, K, N), offsets int32 (E,) row ends, grad (M, N).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dgrad", "forward", "wgrad"]


def _readable(tensor: Tensor) -> Tensor:
    """The tensor in strides that torch._grouped_mm takes."""
    return tensor if 0 not in tensor.stride() and 1 in tensor.stride()[-2:] else _contiguous(tensor)


def _contiguous(tensor: Tensor) -> Tensor:
    # An empty tensor counts as contiguous whatever its strides, but torch._grouped_mm looks at them.
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)


def forward(a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """(M, K) x (E, K, N) -> (M, N), contiguous."""
    # Where N is no multiple of 16 bytes torch pads the rows of the result; graphs promise contiguous ones.
    return torch._grouped_mm(_readable(a), _readable(b), offs=offsets, out_dtype=out_dtype).contiguous()


def dgrad(grad: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Gradient (M, N) of the output -> gradient (M, K) of the rows."""
    return torch._grouped_mm(_contiguous(grad), _readable(b).transpose(-1, -2), offs=offsets)


def wgrad(a: Tensor, grad: Tensor, offsets: Tensor, row_major: bool = False) -> Tensor:
    """Rows and gradient (M, N) of the output -> gradient (E, K, N) of the weight; zero for experts without rows.

    Contiguous when row_major. Otherwise it is computed as (N, M) x (M, K), and contiguous as (E, N, K), the layout of
    the usual parameter.
    """
    a, grad = _contiguous(a), _contiguous(grad)
    if row_major:
        return torch._grouped_mm(a.t(), grad, offs=offsets)
    return torch._grouped_mm(grad.t(), a, offs=offsets).transpose(-1, -2)


@torch.library.custom_op("thunder_moe::trainable_grouped_mm", mutates_args=())
def _forward(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return forward(a, b, offsets)


@_forward.register_fake
def _(a, b, offsets):
    return a.new_empty(a.shape[0], b.shape[2])


@torch.library.custom_op("thunder_moe::trainable_grouped_mm_dgrad", mutates_args=())
def _dgrad(grad: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return dgrad(grad, b, offsets).contiguous()


@_dgrad.register_fake
def _(grad, b, offsets):
    return grad.new_empty(grad.shape[0], b.shape[1])


@torch.library.custom_op("thunder_moe::trainable_grouped_mm_wgrad", mutates_args=())
def _wgrad(a: Tensor, grad: Tensor, offsets: Tensor, row_major: bool = False) -> Tensor:
    # Where a dimension is no multiple of 16 bytes torch pads the rows of the result.
    weight_grad = wgrad(a, grad, offsets, row_major)
    return weight_grad.contiguous() if row_major else weight_grad.mT.contiguous().mT


@_wgrad.register_fake
def _(a, grad, offsets, row_major=False):
    e, k, n = offsets.shape[0], a.shape[1], grad.shape[1]
    return a.new_empty(e, k, n) if row_major else a.new_empty(e, n, k).transpose(-1, -2)


def _setup_context(ctx, inputs, output) -> None:
    # No more than torch keeps: what is not kept may change in place before the backward.
    a, b, offsets = inputs
    needs_a, needs_b = ctx.needs_input_grad[:2]
    # The gradient of a weight has the weight's layout, as torch's has: torch.cond compares that of its branches.
    ctx.row_major = b.stride(-1) == 1 and b.stride(-2) != 1
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None, offsets)


def _backward(ctx, grad):
    a, b, offsets = ctx.saved_tensors
    ops, needs = torch.ops.thunder_moe, ctx.needs_input_grad
    grad_a = ops.trainable_grouped_mm_dgrad(grad, b, offsets) if needs[0] else None
    grad_b = ops.trainable_grouped_mm_wgrad(a, grad, offsets, ctx.row_major) if needs[1] else None
    return grad_a, grad_b, None


_forward.register_autograd(_backward, setup_context=_setup_context)

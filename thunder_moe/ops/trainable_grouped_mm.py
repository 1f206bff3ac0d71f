"""The operator thunder_moe::trainable_grouped_mm: torch's 16-bit grouped GEMM with a gradient that takes any strides.
Called by the graphs that compilers.dynamo rewrites; calls kernels.trainable_grouped_mm.

Legend: a (M, K) rows sorted by expert, b (E, K, N), offsets int32 (E,) row ends, grad (M, N).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.kernels import trainable_grouped_mm as kernels
from thunder_moe.ops.checks import refuse_forward_ad
from thunder_moe.ops.grouped_linear import training_operator


@training_operator(lambda grad, b, offsets: grad.new_empty(grad.shape[0], b.shape[1]))
def _trainable_grouped_mm_dgrad(grad: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    refuse_forward_ad()
    return kernels.dgrad(grad, b, offsets).contiguous()


def _fake_wgrad(a: Tensor, grad: Tensor, offsets: Tensor, row_major: bool = False) -> Tensor:
    e, k, n = offsets.shape[0], a.shape[1], grad.shape[1]
    return a.new_empty(e, k, n) if row_major else a.new_empty(e, n, k).transpose(-1, -2)


@training_operator(_fake_wgrad)
def _trainable_grouped_mm_wgrad(a: Tensor, grad: Tensor, offsets: Tensor, row_major: bool = False) -> Tensor:
    refuse_forward_ad()
    # If a dimension is not a multiple of 16 bytes, torch pads the rows of the result.
    weight_grad = kernels.wgrad(a, grad, offsets, row_major)
    return weight_grad.contiguous() if row_major else weight_grad.mT.contiguous().mT


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Keep no more than torch does: tensors that are not kept may change in place before the backward.
    a, b, offsets = inputs
    needs_a, needs_b = ctx.needs_input_grad[:2]
    # The gradient of a weight has the weight's layout, like torch's: torch.cond compares the layouts of its branches.
    ctx.row_major = b.stride(-1) == 1 and b.stride(-2) != 1
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, offsets = ctx.saved_tensors
    ops, needs = torch.ops.thunder_moe, ctx.needs_input_grad
    grad_a = ops.trainable_grouped_mm_dgrad(grad, b, offsets) if needs[0] else None
    grad_b = ops.trainable_grouped_mm_wgrad(a, grad, offsets, ctx.row_major) if needs[1] else None
    return grad_a, grad_b, None


@training_operator(
    lambda a, b, offsets: a.new_empty(a.shape[0], b.shape[2]), backward=_backward, setup_context=_setup_context
)
def _trainable_grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    refuse_forward_ad()
    return kernels.forward(a, b, offsets)

"""A residual and an RMS norm in front of a dense layer or a router, in plain torch.
Called by the backends (reference, cpu, cuda, w4a4) with their own dense layer or router; calls nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_norm_linear_router", "add_norm_mm"]


def add_norm_mm(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Any,
    bias: Tensor | None,
    epsilon: float,
    *,
    mm: Callable[..., Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute ops.add_norm.f16a_nvfp4weight_add_norm_scaled_mm of rows (M, K) by a backend's `mm`."""
    total, rows = _add_norm(x, residual, norm_weight, epsilon)
    return mm(rows, weight, bias), total


def add_norm_linear_router(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    *operands: Any,
    linear_router: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Compute ops.add_norm.add_norm_linear_router by a backend's `linear_router`."""
    total, rows = _add_norm(x, residual, norm_weight, epsilon)
    return *linear_router(rows, *operands), total, rows


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x + residual, and its RMS norm, which is rounded before the product with the weight, as Llama's is."""
    total = x + residual
    wide = total.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return total, (wide * factor).to(x.dtype) * weight

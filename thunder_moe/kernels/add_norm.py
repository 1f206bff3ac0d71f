"""A residual and an RMS norm in front of a dense layer or a router, in plain torch.
Called by the backends (reference, cpu, cuda, w4a4) with their own dense layer or router; calls batch_invariance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_moe.kernels.batch_invariance import by_rows, is_batch_invariant


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
    # rms_norm has one block of threads per row; the blocks of `mean` depend on the number of rows.
    if is_batch_invariant() and not x.is_cpu:
        return total, F.rms_norm(total, total.shape[-1:], eps=epsilon) * weight

    def normalize(rows: Tensor) -> Tensor:
        wide = rows.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)

    return total, by_rows(normalize, total) * weight

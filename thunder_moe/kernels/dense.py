"""Whether a dense layer is faster with a 4-bit weight than in 16 bits on a device: a rule from measurements.
Called by dense_linears; calls kernels.select.
"""

from __future__ import annotations

import torch

from thunder_moe.kernels.select import BACKENDS, select

__all__ = ["why_slower"]

# Weights (out_features * in_features) from which a layer is faster at few rows. Times faster than bf16, calls in a row,
# on an H200, at 1 / 8 / 16 rows: 512 x 2048 0.98 / 0.93 / 0.81, 2048 x 2048 0.99 / 0.94 / 0.82, 2048 x 4096 1.33 / 1.32
# / 1.22. On a Zen 5, one thread, at 1 / 8 rows: 512 x 512 0.67 / 0.86, 1024 x 1024 1.99 / 1.45.
_LEAST_WEIGHTS = {"cuda": 1 << 23, "cpu": 1 << 20}
_KERNELS = tuple(module for name, module in (("cpu", "cpu"), ("cuda", "cuda")) if name in BACKENDS)


def why_slower(device: torch.device, dtype: torch.dtype, n: int, k: int) -> str | None:
    """Why a layer with a weight (n, k) would be slower in 4 bits, None when it would not.

    Args:
        device: of the weight.
        dtype: of the weight, which that of the activations is taken to be.
        n: out_features, of all linears that are computed at once.
        k: in_features.
    """
    kind = device.type
    if kind not in _KERNELS or select(device).__name__.endswith(".reference"):
        return f"no kernel multiplies by 4-bit weights on {device}"
    if kind == "cuda" and dtype == torch.float32:
        return "no CUDA kernel takes activations in float32"
    if n * k < _LEAST_WEIGHTS[kind]:
        return (
            f"it is too small to be faster in 4 bits on a {kind!r} device, which takes {_LEAST_WEIGHTS[kind]} weights"
        )
    return None

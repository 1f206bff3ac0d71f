"""Tells up to how many rows a dense layer is faster quantized than in 16 bits on a device, from measurements.
Called by dense_linears; calls kernels.select.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from thunder_moe.formats.block_format import MXFP8, NVFP4
from thunder_moe.formats.layouts import TILED_64X64
from thunder_moe.kernels.select import preferred_layout, select

# A quantized layer with at least so many weights (out_features * in_features) is faster at few rows; by the layout that
# its device prefers, or by the device. Times faster than bf16, calls in a row, on an H200 at 8 / 32 / 64 rows: 1024 x
# 2048 1.73 / 1.60 / 1.33, 2048 x 2048 1.68 / 1.59 / 1.38; without clusters of blocks, as on other devices, 2048 x 2048
# 0.94 at 8 rows, 2048 x 4096 1.32. On a Zen 5, one thread, at 1 / 8 rows: 512 x 512 0.67 / 0.86, 1024 x 1024 1.99 /
# 1.45.
_LEAST_WEIGHTS = {TILED_64X64: 1 << 21, "cuda": 1 << 23, "cpu": 1 << 20}


class SlowerFrom(NamedTuple):
    """The limit from which a quantized layer may be slower than in 16 bits.

    Attributes:
        rows: the least number of rows of the activation with which it may be slower.
        percent: the largest slowdown, in percent of the time in 16 bits.
    """

    rows: int
    percent: int


# The most weights of a class of layers, and where its layers were slower than bf16 on an H200
# (benchmarks/results/linear_cuda.json and linear_mxfp8_cuda.json, which a test compares with this; and 5120 x 2048 in
# NVFP4 by 12 % at 1,024 rows). CPUs were measured at few rows only.
_SLOWER_FROM = {
    (NVFP4.name, TILED_64X64): ((1 << 24, SlowerFrom(128, 12)), (1 << 62, SlowerFrom(256, 9))),
    (MXFP8.name, TILED_64X64): ((1 << 24, SlowerFrom(128, 17)), (1 << 62, SlowerFrom(128, 16))),
}


def why_slower(device: torch.device, dtype: torch.dtype, n: int, k: int) -> str | None:
    """Return why a layer with a weight (n, k) would be slower in 4 bits; None if it would not.

    Args:
        device: the device of the weight.
        dtype: the dtype of the weight, assumed to be the activations' dtype, too.
        n: out_features of all linears that are computed at once.
        k: in_features.
    """
    kind = device.type
    if kind not in _LEAST_WEIGHTS or select(device).__name__.endswith(".reference"):
        return f"no kernel multiplies by 4-bit weights on {device}"
    if kind == "cuda" and dtype == torch.float32:
        return "no CUDA kernel takes activations in float32"
    layout = preferred_layout(device, n, k)
    least = _LEAST_WEIGHTS.get(layout, _LEAST_WEIGHTS[kind])
    if n * k < least:
        return f"it is too small to be faster in 4 bits on a {kind!r} device, which takes {least} weights"
    return None


def slower_from(layout: str, n: int, k: int, format: str = NVFP4.name) -> SlowerFrom | None:
    """Return the number of rows from which a quantized layer may be slower than in 16 bits; None if not measured.

    Args:
        layout: the weight's layout on its device, such as `preferred_layout` gives.
        n: out_features of all linears that are computed at once.
        k: in_features.
        format: the weight's number format.
    """
    classes = _SLOWER_FROM.get((format, layout), ())
    return next((slower for most, slower in classes if n * k <= most), None)

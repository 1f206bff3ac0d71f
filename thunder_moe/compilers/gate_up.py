"""The pattern of SwiGLU in one GEMM's output: which of its columns are gate and which are up.
Called by dynamo/sites.py, dynamo/dense_experts.py and thunder/sites.py; calls nothing.

    gate, up = y.chunk(2, -1)            "low" and "high": halves of the columns
    gate, up = y[..., ::2], y[..., 1::2] "even" and "odd": interleaved columns, as GPT-OSS has them
"""

from __future__ import annotations

from typing import Any

__all__ = ["column_part", "is_interleaved"]


def column_part(width: Any, start: Any, stop: Any, step: Any) -> str:
    """Which part of `width` columns a slice takes: "low", "high", "even", "odd"; "" for any other."""
    half = width // 2
    parts = {(0, half, 1): "low", (half, width, 1): "high", (0, width, 2): "even", (1, width, 2): "odd"}
    return "" if width % 2 else parts.get((start, stop, step), "")


def is_interleaved(gate: str, up: str) -> bool | None:
    """Whether two parts are interleaved gate and up rather than their halves; None when they are neither."""
    return {("low", "high"): False, ("even", "odd"): True}.get((gate, up))

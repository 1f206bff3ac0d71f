"""The two orders of the rows of a fused gate and up projection: interleaved, or all of gate before all of up.
Called by weight_cache, checkpoint, nn and integrations.huggingface; calls torch alone.

GPT-OSS interleaves; our kernels and everything else of the package have the gate's rows first.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["deinterleave", "interleave"]


def deinterleave(rows: Tensor, size: int = 1) -> Tensor:
    """(E, 2I, ...), gate and up in turns of `size` rows, the gate's first -> the gate's rows first."""
    experts, both, *rest = rows.shape
    return rows.reshape(experts, both // (2 * size), 2, size, *rest).transpose(1, 2).reshape(rows.shape)


def interleave(rows: Tensor, size: int = 1) -> Tensor:
    """The inverse of `deinterleave`."""
    experts, both, *rest = rows.shape
    return rows.reshape(experts, 2, both // (2 * size), size, *rest).transpose(1, 2).reshape(rows.shape)

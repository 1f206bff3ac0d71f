"""The two orders of the rows of a fused gate and up projection: interleaved, or all of gate before all of up.
Called by weight_cache, checkpoint and integrations.huggingface; calls torch alone.

GPT-OSS interleaves; our kernels and everything else of the package have the gate's rows first.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["deinterleave", "interleave"]


def deinterleave(rows: Tensor) -> Tensor:
    """(E, 2I, ...), gate in the even rows and up in the odd ones -> the same with the gate's rows first."""
    experts, both, *rest = rows.shape
    return rows.reshape(experts, both // 2, 2, *rest).transpose(1, 2).reshape(rows.shape)


def interleave(rows: Tensor) -> Tensor:
    """The inverse of `deinterleave`."""
    experts, both, *rest = rows.shape
    return rows.reshape(experts, 2, both // 2, *rest).transpose(1, 2).reshape(rows.shape)

"""Converts between the two orders of the rows of a fused gate and up projection: interleaved, or gate's rows first.
Called by weight_cache, checkpoint, compilers.thunder and integrations.huggingface; calls torch alone.

GPT-OSS interleaves; our kernels and everything else of the package have the gate's rows first.
"""

from __future__ import annotations

from torch import Tensor


def deinterleave(rows: Tensor, size: int = 1) -> Tensor:
    """Sort rows (E, 2I, ...) that alternate in blocks of `size` rows, gate first, into gate's rows, then up's."""
    experts, both, *rest = rows.shape
    return rows.reshape(experts, both // (2 * size), 2, size, *rest).transpose(1, 2).reshape(rows.shape)


def interleave(rows: Tensor, size: int = 1) -> Tensor:
    """Undo `deinterleave`."""
    experts, both, *rest = rows.shape
    return rows.reshape(experts, 2, both // (2 * size), size, *rest).transpose(1, 2).reshape(rows.shape)

"""torch's 16-bit grouped GEMM and its two gradients, for operands of any strides.
Called by ops.trainable_grouped_mm and compilers.thunder.symbols; calls torch._grouped_mm.

torch's own backward fails with "Invalid strides" on expanded gradients (of a sum, say); these do not.

Legend: a (M, K) rows sorted by expert, b (E, K, N), offsets int32 (E,) row ends, grad (M, N).
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.kernels.batch_invariance import refuse


def _readable(tensor: Tensor) -> Tensor:
    """Return the tensor in strides that torch._grouped_mm takes."""
    return tensor if 0 not in tensor.stride() and 1 in tensor.stride()[-2:] else _contiguous(tensor)


def _contiguous(tensor: Tensor) -> Tensor:
    # An empty tensor counts as contiguous with any strides, but torch._grouped_mm looks at them.
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)


def forward(a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply (M, K) x (E, K, N) -> (M, N), contiguous."""
    refuse("torch's grouped GEMM of 16-bit experts", "quantize them, or use GroupedMLP")
    # If N is not a multiple of 16 bytes, torch pads the rows of the result; graphs promise contiguous ones.
    return torch._grouped_mm(_readable(a), _readable(b), offs=offsets, out_dtype=out_dtype).contiguous()


def dgrad(grad: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient (M, K) of the rows, from the gradient (M, N) of the output."""
    return torch._grouped_mm(_contiguous(grad), _readable(b).transpose(-1, -2), offs=offsets)


def wgrad(a: Tensor, grad: Tensor, offsets: Tensor, row_major: bool = False) -> Tensor:
    """Return the gradient (E, K, N) of the weight, from rows and the output's gradient (M, N); 0 for experts without
    rows.

    Contiguous when row_major. Otherwise it is computed as (N, M) x (M, K), and contiguous as (E, N, K), the layout of
    the usual parameter.
    """
    a, grad = _contiguous(a), _contiguous(grad)
    if row_major:
        return torch._grouped_mm(a.t(), grad, offs=offsets)
    return torch._grouped_mm(grad.t(), a, offs=offsets).transpose(-1, -2)

"""Quantizes weights on a CUDA device, byte for byte as the modules of the formats do, at about the speed of its memory.
Called by kernels.select; calls kernels.cuda.backend's launches of src/quantize.cu, which tests run on a CPU, too.

NVFP4: largest magnitude of each expert -> codes and scales; the weight is read twice. MXFP8: both in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thunder_moe.formats import mxfp8, nvfp4
from thunder_moe.formats.nvfp4 import BLOCK_SIZE, NVFP4Weight
from thunder_moe.formats.weight import MXFP8Weight
from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda import backend
from thunder_moe.kernels.cuda.operands import aligned

__all__ = ["quantize", "quantize_mxfp8", "quantize_mxfp8_unchecked", "quantize_unchecked", "to_tiled"]

_COPY_BYTES = 2**28  # of a weight that is not contiguous, copied at a time
to_tiled = backend.to_tiled


def quantize(weight: Tensor, *, scale_search: str | None = None) -> NVFP4Weight:
    """Run `formats.nvfp4.quantize` on a weight on a CUDA device.

    Args:
        weight: (E, N, K), float32, bfloat16 or float16, any strides; K a multiple of 16.
        scale_search: None or "mse".

    Raises:
        ValueError: as `formats.nvfp4.quantize`.
    """
    packed, amax = quantize_unchecked(weight, scale_search)
    nvfp4.check_finite(amax)
    return packed


def quantize_unchecked(weight: Tensor, scale_search: str | None = None) -> tuple[NVFP4Weight, Tensor]:
    """Run `formats.nvfp4.quantize_unchecked` on a weight on a CUDA device. Does not synchronise."""
    nvfp4.check_quantizable(weight, scale_search)
    weight = weight.detach()
    experts, n, k = weight.shape
    search = str(scale_search is not None).lower()
    amax = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    qdata = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(experts, n, k // BLOCK_SIZE, dtype=torch.float8_e4m3fn, device=weight.device)
    global_scale = torch.ones(experts, dtype=torch.float32, device=weight.device)
    dtype = DTYPE_CODES[weight.dtype]
    kernels = f"largest_magnitude<{dtype}>", f"quantize<{dtype}, {search}>"
    for part in _parts(weight):
        rows = aligned(weight[part])
        tensors = (rows, None, None, None, amax[part], qdata[part], scale[part], global_scale[part])
        backend.launch_per_block(kernels, tensors, tuple(rows.shape), BLOCK_SIZE)
    return NVFP4Weight(qdata, scale, global_scale), amax.view(torch.float32)


def quantize_mxfp8(weight: Tensor) -> MXFP8Weight:
    """Run `formats.mxfp8.quantize` on a weight on a CUDA device.

    Args:
        weight: (E, N, K), float32, bfloat16 or float16, any strides; K a multiple of 32.

    Raises:
        ValueError: as `formats.mxfp8.quantize`.
    """
    packed, amax = quantize_mxfp8_unchecked(weight)
    mxfp8.check_amax(amax, weight.dtype)
    return packed


def quantize_mxfp8_unchecked(weight: Tensor) -> tuple[MXFP8Weight, Tensor]:
    """Run `formats.mxfp8.quantize_unchecked` on a weight on a CUDA device. Does not synchronise."""
    mxfp8.check_quantizable(weight, None)
    weight = weight.detach()
    experts, n, k = weight.shape
    amax = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    qdata = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(experts, n, k // mxfp8.BLOCK_SIZE, dtype=torch.float8_e8m0fnu, device=weight.device)
    kernel = f"quantize_mxfp8<{DTYPE_CODES[weight.dtype]}>"
    for part in _parts(weight):
        rows = aligned(weight[part])
        tensors = (rows, None, None, None, amax[part], qdata[part], scale[part], None)
        backend.launch_per_block((kernel,), tensors, tuple(rows.shape), mxfp8.BLOCK_SIZE)
    return MXFP8Weight(qdata, scale), amax.view(torch.float32)


def _parts(weight: Tensor) -> Iterator[slice]:
    """Yield slices of experts to quantize at a time: all experts, or some if the weight has to be copied first."""
    experts, n, k = weight.shape
    contiguous = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    step = experts if contiguous else max(1, _COPY_BYTES // max(n * k * weight.element_size(), 1))
    for first in range(0, experts if n else 0, step):
        yield slice(first, first + step)

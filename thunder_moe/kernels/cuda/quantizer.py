"""Quantizes weights on a CUDA device, byte for byte as the modules of the formats do, at about the speed of its memory.
Called by kernels.select; calls kernels.cuda.backend's launches of src/quantize.cu, which tests run on a CPU, too.

NVFP4: largest magnitude of each expert -> codes and scales; the weight is read twice. MXFP8: both in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from thunder_moe.formats import mxfp8, nvfp4
from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.nvfp4 import BLOCK_SIZE, NVFP4Weight
from thunder_moe.formats.tiled_64x64 import scale_table
from thunder_moe.formats.weight import MXFP8Weight, PackedWeight
from thunder_moe.kernels.arguments import DTYPE_CODES, pointer
from thunder_moe.kernels.cuda import backend
from thunder_moe.kernels.cuda.arguments import QuantizeArguments
from thunder_moe.kernels.cuda.configs import COMMON, TILED

__all__ = ["quantize", "quantize_mxfp8", "quantize_mxfp8_unchecked", "quantize_unchecked", "to_tiled"]

_SOURCES = (COMMON, COMMON.with_name("dequantize.cu"), COMMON.with_name("quantize.cu"))
_COPY_BYTES = 2**28  # of a weight that is not contiguous, copied at a time
_THREADS = 256
_BLOCKS = 16384  # of a launch, about
Weight = TypeVar("Weight", bound=PackedWeight)


def quantize(weight: Tensor, *, scale_search: str | None = None) -> NVFP4Weight:
    """`formats.nvfp4.quantize` of a weight on a CUDA device.

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
    """`formats.nvfp4.quantize_unchecked` of a weight on a CUDA device. Does not synchronise."""
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
        rows = backend._aligned(weight[part])
        tensors = (rows, None, None, None, amax[part], qdata[part], scale[part], global_scale[part])
        _launch(kernels, tensors, tuple(rows.shape), BLOCK_SIZE)
    return NVFP4Weight(qdata, scale, global_scale), amax.view(torch.float32)


def quantize_mxfp8(weight: Tensor) -> MXFP8Weight:
    """`formats.mxfp8.quantize` of a weight on a CUDA device.

    Args:
        weight: (E, N, K), float32, bfloat16 or float16, any strides; K a multiple of 32.

    Raises:
        ValueError: as `formats.mxfp8.quantize`.
    """
    packed, amax = quantize_mxfp8_unchecked(weight)
    mxfp8.check_amax(amax, weight.dtype)
    return packed


def quantize_mxfp8_unchecked(weight: Tensor) -> tuple[MXFP8Weight, Tensor]:
    """`formats.mxfp8.quantize_unchecked` of a weight on a CUDA device. Does not synchronise."""
    mxfp8.check_quantizable(weight, None)
    weight = weight.detach()
    experts, n, k = weight.shape
    amax = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    qdata = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(experts, n, k // mxfp8.BLOCK_SIZE, dtype=torch.float8_e8m0fnu, device=weight.device)
    kernel = f"quantize_mxfp8<{DTYPE_CODES[weight.dtype]}>"
    for part in _parts(weight):
        rows = backend._aligned(weight[part])
        tensors = (rows, None, None, None, amax[part], qdata[part], scale[part], None)
        _launch((kernel,), tensors, tuple(rows.shape), mxfp8.BLOCK_SIZE)
    return MXFP8Weight(qdata, scale), amax.view(torch.float32)


def _parts(weight: Tensor) -> Iterator[slice]:
    """Experts at a time: all, or of a weight that is copied first only some."""
    experts, n, k = weight.shape
    contiguous = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    step = experts if contiguous else max(1, _COPY_BYTES // max(n * k * weight.element_size(), 1))
    for first in range(0, experts if n else 0, step):
        yield slice(first, first + step)


def to_tiled(weight: Weight) -> Weight:
    """A weight in layout "linear" in layout "tiled_64x64", as `PackedWeight.to_layout` gives it.

    The callers have checked that the layout fits.
    """
    codes, scales = backend._aligned(weight.qdata), backend._aligned(weight.scale)
    qdata, scale = torch.empty_like(codes), torch.empty_like(scales)
    of_nvfp4 = weight.format is NVFP4
    table = scale_table(weight.device) if of_nvfp4 else None
    tensors = (None, codes, scales, table, None, qdata, scale, None)
    kernel = "write_tiled" if of_nvfp4 else "write_tiled_mxfp8"
    _launch((kernel,), tensors, weight.shape, weight.format.block_size)
    tiled: Any = weight
    return cast("Weight", replace(tiled, qdata=qdata, scale=scale, layout=TILED))


def _launch(
    kernels: tuple[str, ...], tensors: tuple[Tensor | None, ...], shape: tuple[int, ...], block_size: int
) -> None:
    """Launches kernels one after the other on the tensors of a weight (E, N, K), a thread for each block of weights."""
    experts, n, k = shape
    (device,) = {tensor.device for tensor in tensors if tensor is not None}
    threads = n * (k // block_size)  # of an expert
    per_expert = max(1, min(-(-threads // _THREADS), _BLOCKS // experts))
    argument = QuantizeArguments(*map(pointer, tensors), n, k, per_expert)
    for kernel in kernels:
        backend._launch(_SOURCES, kernel, _THREADS, 0, experts * per_expert, argument, device)

"""Quantizes weights on a CUDA device, byte for byte as the modules of the formats do, at about the speed of its memory.
Called by kernels.select; calls kernels.cuda.backend's launches of src/quantize.cu, which tests run on a CPU, too.

NVFP4: largest magnitude of each expert -> codes and scales; the weight is read twice. MXFP8: both in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from thunder_moe.formats import nvfp4
from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4
from thunder_moe.formats.registry import FORMATS
from thunder_moe.formats.weight import WEIGHTS, PackedWeight
from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda import backend
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.operands import aligned

_COPY_BYTES = 2**28  # of a weight that is not contiguous, copied at a time
to_layout = backend.to_layout


def quantize(weight: Tensor, format: str = NVFP4.name, *, scale_search: str | None = None) -> PackedWeight:
    """Run `quantize` of a format's module on a weight on a CUDA device.

    Args:
        weight: (E, N, K), float32, bfloat16 or float16, any strides; K a multiple of the format's block size.
        format: the name of the number format.
        scale_search: as in the format's `quantize`.

    Raises:
        ValueError: as there.
    """
    packed, amax = quantize_unchecked(weight, format, scale_search)
    FORMATS[format].check_amax(amax, weight.dtype)
    return packed


def quantize_unchecked(
    weight: Tensor, format: str = NVFP4.name, scale_search: str | None = None
) -> tuple[PackedWeight, Tensor]:
    """Run `quantize_unchecked` of a format's module on a weight on a CUDA device. Does not synchronise."""
    FORMATS[format].check_quantizable(weight, scale_search)
    weight, known, dtype = weight.detach(), BLOCK_FORMATS[format], DTYPE_CODES[weight.dtype]
    (experts, n, k), empty = weight.shape, partial(torch.empty, device=weight.device)
    amax = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    made = [
        empty(experts, n, k // known.codes_per_byte, dtype=known.code_dtypes[0]),
        empty(experts, n, k // known.block_size, dtype=known.scale_dtype),
    ]
    sums: Tensor | None = None
    kernels: tuple[str, ...] = (f"quantize_mxfp8<{dtype}>",)
    if known is NVFP4:
        made.append(torch.ones(experts, dtype=torch.float32, device=weight.device))
        kernels = f"largest_magnitude<{dtype}>", instance("quantize", dtype, scale_search is not None)
        sums = torch.zeros(experts, 2, dtype=torch.int64, device=weight.device) if scale_search is not None else None
    for part in _parts(weight):
        rows = aligned(weight[part])
        qdata, scale, global_scale = (*(tensor[part] for tensor in made), None)[:3]
        tensors = (rows, None, None, None, amax[part], qdata, scale, global_scale, None if sums is None else sums[part])
        backend.launch_per_block(kernels, tensors, tuple(rows.shape), known.block_size)
    if sums is not None:
        made[2] = nvfp4.unbiased_scale(made[2], sums, weight.dtype)
    return WEIGHTS[format](*made), amax.view(torch.float32)


def _parts(weight: Tensor) -> Iterator[slice]:
    """Yield slices of experts to quantize at a time: all experts, or some if the weight has to be copied first."""
    experts, n, k = weight.shape
    contiguous = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    step = experts if contiguous else max(1, _COPY_BYTES // max(n * k * weight.element_size(), 1))
    for first in range(0, experts if n else 0, step):
        yield slice(first, first + step)

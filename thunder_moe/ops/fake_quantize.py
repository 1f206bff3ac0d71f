"""The operators thunder_moe::nvfp4_fake_quantize and mxfp8_fake_quantize: a weight rounded to a format and back, with a
straight-through gradient.
Called by nvfp4.fake_quantize, mxfp8.fake_quantize, qat and compiled graphs; calls kernels.select.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thunder_moe.formats import mxfp8, nvfp4
from thunder_moe.formats.block_format import MXFP8
from thunder_moe.kernels import select
from thunder_moe.ops.operator import operator


def _shapes(weight: Tensor, **_: Any) -> tuple[tuple[int, ...]]:
    return (tuple(weight.shape),)


def _check(weight: Tensor, scale_search: str | None = None) -> None:
    nvfp4.check_quantizable(weight, scale_search)


def _gradient(grad: Tensor, *, needs: Any, scale_search: str | None = None) -> tuple[Tensor]:
    return (grad,)


@operator(shapes=_shapes, check=_check, gradient=_gradient, differentiable=("weight",), saved=slice(0))
def nvfp4_fake_quantize(weight: Tensor, *, scale_search: str | None = None) -> Tensor:
    """Run the operator behind `fake_quantize`."""
    return select.fake_quantize(weight, scale_search)


def _check_mxfp8(weight: Tensor) -> None:
    mxfp8.check_quantizable(weight, None)


@operator(shapes=_shapes, check=_check_mxfp8, gradient=_gradient, differentiable=("weight",), saved=slice(0))
def mxfp8_fake_quantize(weight: Tensor) -> Tensor:
    """Run the operator behind `fake_quantize_mxfp8`."""
    return select.fake_quantize(weight, format=MXFP8.name)


def fake_quantize_mxfp8(weight: Tensor) -> Tensor:
    """Return a weight rounded to MXFP8, like `fake_quantize`; in_features are a multiple of 32."""
    return mxfp8_fake_quantize(weight)


def fake_quantize(weight: Tensor, *, scale_search: str | None = None) -> Tensor:
    """Return a weight rounded to NVFP4: ``dequantize(quantize(weight), weight.dtype)``, bit for bit.

    The weight gets the result's gradient unchanged ("straight through"), so that training through it finds weights that
    are good in 4 bits. It compiles to one operator, never synchronises on CUDA, and can be captured in a CUDA graph.
    `thunder_moe.prepare_qat_` makes it a parametrization of modules.

    Args:
        weight: (E, N, K), float32, bfloat16 or float16, any strides; K a multiple of 16.
        scale_search: as in `quantize`.

    Returns:
        (E, N, K), contiguous, in the weight's dtype. Experts with NaN or Inf are all NaN: `quantize`, which can tell,
        raises an error.

    Raises:
        ValueError: wrong rank, dtype or K, or an unknown scale_search.
    """
    return nvfp4_fake_quantize(weight, scale_search=scale_search)

"""The number formats that weights can be quantized to, by name.
Called by selection and all code that takes a format by name, from checkpoint to tools; calls the formats' modules.

A new format is one entry of `FORMATS`. MXFP4 has no entry: mxfp4 converts the MXFP4 of checkpoints to NVFP4, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats import mxfp8, nvfp4
from thunder_moe.formats.block_format import MXFP8, NVFP4
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import PackedWeight


@dataclass(frozen=True)
class NumberFormat:
    """A block-scaled format of weights (E, N, K).

    Attributes:
        name: of the format.
        quantize: (E, N, K) of 16 or 32 bits -> the packed weight; also takes scale_search and hessian.
        quantize_unchecked: the same without the check for NaN and Inf, and the largest magnitude (E,) of each expert.
        check_quantizable: raises the ValueError of `quantize` for what can be seen without data.
        check_amax: raises its ValueError for the largest magnitudes of the experts, and the dtype of the weight.
        dequantize: the inverse; also takes the dtype of the result.
        dequantize_expert: (weight in layout "linear", expert, out): one expert into `out` (N, K).
        block_size: weights along K that share a scale.
        bits_per_weight: with its share of the block scale.
    """

    name: str
    quantize: Callable[..., Any]
    quantize_unchecked: Callable[..., tuple[Any, Tensor]]
    check_quantizable: Callable[[Tensor, str | None], None]
    check_amax: Callable[[Tensor, torch.dtype], None]
    dequantize: Callable[..., Tensor]
    dequantize_expert: Callable[[Any, int, Tensor], None]
    block_size: int
    bits_per_weight: float


FORMATS = {
    block.name: NumberFormat(
        block.name, module.quantize, module.quantize_unchecked, module.check_quantizable, module.check_amax,
        module.dequantize, module.dequantize_expert, block.block_size, block.bits_per_weight,
    )
    for block, module in ((NVFP4, nvfp4), (MXFP8, mxfp8))
}  # fmt: skip


def check_scale_search(scale_search: str | None, formats: Collection[str]) -> None:
    """Raises the ValueError of `quantize` for a scale_search that there is not, or that no format of weights has.

    Args:
        scale_search: as in the formats' `quantize`.
        formats: names of the formats of the weights; empty where they are not known yet.
    """
    known = FORMATS["nvfp4" if "nvfp4" in formats or not formats else min(formats)]
    known.check_quantizable(torch.zeros(1, 1, known.block_size, dtype=torch.float32, device="cpu"), scale_search)


def find_format(name: str) -> NumberFormat:
    """Return the number format of a name, in lower or upper case.

    Raises:
        ValueError: there is none.
    """
    found = FORMATS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"format: got {name!r}, wanted one of {tuple(FORMATS)}")
    return found


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the 16-bit (or float32) weight (E, N, K) that a packed weight of any format stands for."""
    return FORMATS[weight.format.name].dequantize(weight, dtype)


def dequantize_expert(weight: PackedWeight, expert: int, out: Tensor) -> None:
    """Dequantizes one expert of a "linear" weight of any format into `out` (N, K)."""
    assert weight.layout == LINEAR
    FORMATS[weight.format.name].dequantize_expert(weight, expert, out)

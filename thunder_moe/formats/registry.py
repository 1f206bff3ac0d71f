"""The number formats that weights can be quantized to, by name.
Called by benchmarks; calls the modules of the formats.

A new format is one entry of `FORMATS`. MXFP4, which checkpoints hold, is none: mxfp4 makes NVFP4 of it, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from thunder_moe.formats import nvfp4
from thunder_moe.formats.weight import NVFP4Weight

__all__ = ["FORMATS", "NumberFormat"]


@dataclass(frozen=True)
class NumberFormat:
    """A block-scaled format of weights (E, N, K).

    Attributes:
        name: of the format.
        quantize: (E, N, K) of 16 or 32 bits -> the packed weight.
        dequantize: the inverse; also takes the dtype of the result.
        block_size: weights along K that share a scale.
        bits_per_weight: with its share of the block scale.
    """

    name: str
    quantize: Callable[..., NVFP4Weight]
    dequantize: Callable[..., Tensor]
    block_size: int
    bits_per_weight: float


FORMATS = {
    format.name: format
    for format in (NumberFormat("nvfp4", nvfp4.quantize, nvfp4.dequantize, nvfp4.BLOCK_SIZE, 4 + 8 / nvfp4.BLOCK_SIZE),)
}

"""The NVFP4 format for users: quantize, dequantize, fake_quantize, the weight.
Called by users; calls formats and ops.fake_quantize. `thunder_moe.mxfp8` is the same of MXFP8.
"""

from thunder_moe.formats.layouts import BLOCK_SIZE, LAYOUTS, scale_shape
from thunder_moe.formats.nvfp4 import WEIGHT_DTYPES, dequantize, quantize
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.ops.fake_quantize import fake_quantize

__all__ = [
    "BLOCK_SIZE",
    "LAYOUTS",
    "WEIGHT_DTYPES",
    "NVFP4Weight",
    "dequantize",
    "fake_quantize",
    "quantize",
    "scale_shape",
]

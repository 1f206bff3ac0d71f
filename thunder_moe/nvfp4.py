"""The name that `thunder_moe.formats` had in version 0.1; it stays valid.
Called by users; calls formats alone.
"""

from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import BLOCK_SIZE, LAYOUTS, scale_shape
from thunder_moe.formats.nvfp4 import WEIGHT_DTYPES, dequantize, quantize
from thunder_moe.formats.weight import NVFP4Weight

__all__ = ["BLOCK_SIZE", "LAYOUTS", "WEIGHT_DTYPES", "NVFP4Weight", "dequantize", "quantize", "require", "scale_shape"]

"""The MXFP8 format for users: quantize, dequantize, fake_quantize, the weight.
Called by users; calls formats and ops.fake_quantize. `thunder_moe.nvfp4` is the same of NVFP4.
"""

from thunder_moe.formats.mxfp8 import BLOCK_SIZE, dequantize, quantize
from thunder_moe.formats.weight import MXFP8Weight
from thunder_moe.ops.fake_quantize import fake_quantize_mxfp8 as fake_quantize

__all__ = ["BLOCK_SIZE", "MXFP8Weight", "dequantize", "fake_quantize", "quantize"]

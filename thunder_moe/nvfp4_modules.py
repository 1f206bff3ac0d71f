"""The name of nn.quantized in version 0.1, for pickles of whole models.
Called by unpickling; calls nn.quantized alone.
"""

from thunder_moe.nn.quantized import NVFP4GroupedLinear, NVFP4GroupedSwiGLU

__all__ = ["NVFP4GroupedLinear", "NVFP4GroupedSwiGLU"]

"""The name of nn.quantized in version 0.1, for pickles of whole models and for users.
Called by unpickling and users; calls nn.quantized alone.
"""

from thunder_moe.nn.quantized import (
    MODULE_LAYOUTS,
    NVFP4GroupedLinear,
    NVFP4GroupedSwiGLU,
    calls_only_its_class,
    weights_to_fuse,
)

__all__ = ["MODULE_LAYOUTS", "NVFP4GroupedLinear", "NVFP4GroupedSwiGLU", "calls_only_its_class", "weights_to_fuse"]

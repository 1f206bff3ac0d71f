"""Mixture-of-Experts modules and their 4-bit forms. Called by users and quantize; calls the operators."""

from thunder_moe.nn.llama4 import GroupedLinear, GroupedSwiGLU, Llama4MoE, Llama4MoEConfig, SwiGLU
from thunder_moe.nn.quantized import MODULE_LAYOUTS, NVFP4GroupedLinear, NVFP4GroupedSwiGLU

__all__ = [
    "MODULE_LAYOUTS",
    "GroupedLinear",
    "GroupedSwiGLU",
    "Llama4MoE",
    "Llama4MoEConfig",
    "NVFP4GroupedLinear",
    "NVFP4GroupedSwiGLU",
    "SwiGLU",
]

"""Mixture-of-Experts modules and their 4-bit forms; re-exports alone.
Called by users, quantization and integrations; calls the operators."""

from thunder_moe.nn.grouped_linear import GroupedLinear, per_expert_state_dict
from thunder_moe.nn.linear import NVFP4Linear
from thunder_moe.nn.llama4 import Llama4MoE, Llama4MoEConfig
from thunder_moe.nn.quantized import MODULE_LAYOUTS, NVFP4GroupedLinear, NVFP4GroupedSwiGLU
from thunder_moe.nn.swiglu import GroupedSwiGLU, SwiGLU

__all__ = [
    "MODULE_LAYOUTS",
    "GroupedLinear",
    "GroupedSwiGLU",
    "Llama4MoE",
    "Llama4MoEConfig",
    "NVFP4GroupedLinear",
    "NVFP4GroupedSwiGLU",
    "NVFP4Linear",
    "SwiGLU",
    "per_expert_state_dict",
]

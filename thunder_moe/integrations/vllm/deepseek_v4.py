"""Extend vLLM's configuration of DeepSeek-V4 by our method for its MXFP4 experts; FP8 layers are vLLM's.
Called by configs for checkpoints that it claims, since an import of vLLM's class imports the model; calls mxfp4.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from thunder_moe.integrations.vllm.mxfp4 import mxfp4_method

_Vllms: Any = get_quantization_config("deepseek_v4_fp8")  # another class on CUDA than on a CPU


class ThunderDeepseekV4Config(_Vllms):  # type: ignore[misc]
    """Read DeepSeek-V4 with expert_dtype "fp4"."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        skipped = dict(ignored_layers=self.ignored_layers, fused_mapping=self.packed_modules_mapping)
        if isinstance(layer, RoutedExperts) and not is_layer_skipped(prefix, **skipped):
            return mxfp4_method(layer.moe_config, Mxfp4MoEMethod)
        return super().get_quant_method(layer, prefix)

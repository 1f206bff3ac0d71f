"""vLLM's configurations of NVFP4 and MXFP8 checkpoints (ModelOpt, its mixed ones, compressed-tensors) with our experts.
Called by plugin and, through vLLM's registry, by vLLM; calls methods. They are pickled, so they are at module level.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptMxFp8Config,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from thunder_moe.integrations.vllm.linears import (
    compressed_tensors_mxfp8_scheme,
    compressed_tensors_scheme,
    register_linear_methods,
)
from thunder_moe.integrations.vllm.methods import (
    compressed_tensors_method,
    compressed_tensors_mxfp8_method,
    modelopt_method,
    mxfp8_method,
)

__all__ = [
    "ThunderCompressedTensorsConfig",
    "ThunderModelOptMixedPrecisionConfig",
    "ThunderModelOptMxFp8Config",
    "ThunderModelOptNvFp4Config",
    "register_configs",
]


class ThunderModelOptNvFp4Config(ModelOptNvFp4Config):  # type: ignore[misc]
    """NVFP4 and W4A16_NVFP4."""

    FusedMoEMethodCls = staticmethod(modelopt_method)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return _with_float32(super().get_supported_act_dtypes())

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return super().get_quant_method(layer, _name_of_head(layer, prefix))


class ThunderModelOptMxFp8Config(ModelOptMxFp8Config):  # type: ignore[misc]
    """MXFP8."""

    FusedMoEMethodCls = staticmethod(mxfp8_method)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return _with_float32(super().get_supported_act_dtypes())

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return super().get_quant_method(layer, _name_of_head(layer, prefix))


class ThunderModelOptMixedPrecisionConfig(ModelOptMixedPrecisionConfig):  # type: ignore[misc]
    """MIXED_PRECISION: an algorithm for each layer."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return _with_float32(super().get_supported_act_dtypes())

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        prefix = _name_of_head(layer, prefix)
        if isinstance(layer, RoutedExperts) and not self.is_layer_excluded(prefix):
            nvfp4 = {"NVFP4": self.nvfp4_config, "W4A16_NVFP4": self.w4a16_nvfp4_config}
            algorithm = self._resolve_quant_algo(prefix) or ""
            if algorithm in nvfp4:
                return modelopt_method(nvfp4[algorithm], layer.moe_config)
            if algorithm == "MXFP8":
                return mxfp8_method(self.mxfp8_config, layer.moe_config)
        return super().get_quant_method(layer, prefix)


class ThunderCompressedTensorsConfig(CompressedTensorsConfig):  # type: ignore[misc]
    """nvfp4-pack-quantized and mxfp8-quantized among the formats of compressed-tensors."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
            first = schemes[0] or {}
            weights = first.get("weights")
            if weights is not None and schemes.count(schemes[0]) == len(schemes):
                own = None
                if type(layer).weight_loader is not RoutedExperts.weight_loader:  # GPT-OSS
                    own = f"the loader of {type(layer).__name__} knows vLLM's classes by name"
                if self._is_nvfp4_format(weights):
                    inputs = first.get("input_activations")
                    return compressed_tensors_method(layer.moe_config, prefix, inputs, own)
                if self._is_mxfp8(weights):
                    return compressed_tensors_mxfp8_method(layer.moe_config, own)
        return super().get_quant_method(layer, prefix)

    def _get_scheme_from_parts(
        self, weight_quant: Any, input_quant: Any, output_quant: Any = None, format: Any = None, layer_name: Any = None
    ) -> Any:
        if self._is_nvfp4_format(weight_quant) and (input_quant is None or self._is_nvfp4_format(input_quant)):
            scheme = compressed_tensors_scheme(input_quant, layer_name)
            if scheme is not None:
                return scheme
        elif self._is_mxfp8(weight_quant):
            scheme = compressed_tensors_mxfp8_scheme(layer_name)
            if scheme is not None:
                return scheme
        return super()._get_scheme_from_parts(weight_quant, input_quant, output_quant, format, layer_name)


def _name_of_head(layer: torch.nn.Module, prefix: str) -> str:
    """The name under which checkpoints list a head that stays 16-bit; some models of vLLM build theirs without one."""
    return "lm_head" if isinstance(layer, ParallelLMHead) and not prefix else prefix


def _with_float32(dtypes: list[torch.dtype]) -> list[torch.dtype]:
    """On a CPU our kernels take float32, too; compared in it, two programs' tokens are equal but for ties."""
    return [*dtypes, torch.float32] if current_platform.is_cpu() else dtypes


def register_configs() -> None:
    """Puts them in the place of vLLM's own; what is not ours they leave to the classes that they extend."""
    register_quantization_config("modelopt_fp4")(ThunderModelOptNvFp4Config)
    for name in ("modelopt_mxfp8", "mxfp8"):  # the second is what MiniMax's releases say of the same form
        register_quantization_config(name)(ThunderModelOptMxFp8Config)
    register_quantization_config("modelopt_mixed")(ThunderModelOptMixedPrecisionConfig)
    register_quantization_config("compressed-tensors")(ThunderCompressedTensorsConfig)
    register_linear_methods()

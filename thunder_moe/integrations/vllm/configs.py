"""Claim NVFP4, MXFP8 and MXFP4 checkpoints for the method "thunder_moe" and make configurations, 16-bit ones too.
Called by vLLM after plugin has registered it; calls methods and linears for the layers that our kernels run.

vLLM asks every method of its registry whether it claims a checkpoint, plugins' methods before its own. A configuration
here extends vLLM's for the same form and keeps its `get_name()`, which vLLM's models read; vLLM's own classes stay in
the registry, for checkpoints that are not claimed. Configurations are pickled, so they are at module level.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptMxFp8Config,
    ModelOptNvFp4Config,
    ModelOptQuantConfigBase,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.utils.config_utils import find_matching_patterns
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.integrations.vllm.experts import ThunderExperts
from thunder_moe.integrations.vllm.linears import (
    ThunderOnlineLinearMethod,
    compressed_tensors_scheme,
    modelopt_linear_method,
)
from thunder_moe.integrations.vllm.methods import compressed_tensors_method, modelopt_method, mxfp8_method
from thunder_moe.integrations.vllm.mxfp4 import mxfp4_method
from thunder_moe.integrations.vllm.online import ThunderOnlineMoEMethod
from thunder_moe.selection import without_numbers

NAME = "thunder_moe"
# Models of vLLM that `Thunder...` of these modules extends by a reader of fused experts.
MODELS = {
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4_images",
}

# Classes of vLLM 0.32 whose head is in 16 bits, also if the checkpoint's is not.
_16_BIT_HEADS = (
    "FalconH1ForCausalLM", "JambaForCausalLM", "Plamo3ForCausalLM", "Qwen3NextForCausalLM", "Step3TextForCausalLM",
)  # fmt: skip
_ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of their names in vLLM

logger = init_logger("vllm.thunder_moe")


class _Dtypes:
    """Extension of vLLM's configurations by a dtype."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return vLLM's dtypes, and on a CPU float32: it makes two programs' tokens equal but for ties."""
        dtypes: list[torch.dtype] = super().get_supported_act_dtypes()  # type: ignore[misc]
        return [*dtypes, torch.float32] if current_platform.is_cpu() else dtypes


class _ModelOpt(_Dtypes):
    """Extension of vLLM's class for any of ModelOpt's three forms."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, ParallelLMHead):  # some models of vLLM give their head no name
            prefix = prefix or "lm_head"
        return modelopt_linear_method(super().get_quant_method(layer, prefix))  # type: ignore[misc]


class ThunderModelOptNvFp4Config(_ModelOpt, ModelOptNvFp4Config):  # type: ignore[misc]
    """Read NVFP4 and W4A16_NVFP4."""

    FusedMoEMethodCls = staticmethod(modelopt_method)


class ThunderModelOptMxFp8Config(_ModelOpt, ModelOptMxFp8Config):  # type: ignore[misc]
    """Read MXFP8."""

    FusedMoEMethodCls = staticmethod(mxfp8_method)


class ThunderModelOptMixedPrecisionConfig(_ModelOpt, ModelOptMixedPrecisionConfig):  # type: ignore[misc]
    """Read MIXED_PRECISION, which names an algorithm for each layer."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts) and not self.is_layer_excluded(prefix):
            nvfp4 = {"NVFP4": self.nvfp4_config, "W4A16_NVFP4": self.w4a16_nvfp4_config}
            algorithm = self._resolve_quant_algo(prefix) or ""
            if algorithm in nvfp4:
                return modelopt_method(nvfp4[algorithm], layer.moe_config)
            if algorithm == "MXFP8":
                return mxfp8_method(self.mxfp8_config, layer.moe_config)
        return super().get_quant_method(layer, prefix)


class ThunderCompressedTensorsConfig(CompressedTensorsConfig):  # type: ignore[misc]
    """Read compressed-tensors; layers in formats other than NVFP4 and MXFP8 are vLLM's."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
            format = _format((schemes[0] or {}).get("weights"))
            if format is not None and schemes.count(schemes[0]) == len(schemes):
                reason = None
                if type(layer).weight_loader is not RoutedExperts.weight_loader:  # GPT-OSS
                    reason = f"the loader of {type(layer).__name__} knows vLLM's classes by name"
                method = compressed_tensors_method(format, layer.moe_config, reason)
                if method is not None:
                    return method
        return super().get_quant_method(layer, prefix)

    def _get_scheme_from_parts(
        self, weight_quant: Any, input_quant: Any, output_quant: Any = None, format: Any = None, layer_name: Any = None
    ) -> Any:
        weights = _format(weight_quant)
        if weights is MXFP8 or (weights is NVFP4 and (input_quant is None or _format(input_quant) is NVFP4)):
            scheme = compressed_tensors_scheme(weights, input_quant, layer_name or "")
            if scheme is not None:
                return scheme
        return super()._get_scheme_from_parts(weight_quant, input_quant, output_quant, format, layer_name)


class ThunderGptOssMxfp4Config(_Dtypes, GptOssMxfp4Config):  # type: ignore[misc]
    """Read GPT-OSS as OpenAI released it, with experts in MXFP4 and all else in 16 bits."""

    def _make_moe_method(self, moe: Any) -> Any:
        return mxfp4_method(moe, GptOssMxfp4MoEMethod)


def _format(args: QuantizationArgs | None) -> BlockFormat | None:
    """Return our number format for compressed-tensors' description of a quantization; None for other ones."""
    if args is not None and CompressedTensorsConfig._is_nvfp4_format(args):
        return NVFP4
    return MXFP8 if args is not None and CompressedTensorsConfig._is_mxfp8(args) else None


class ThunderOnlineConfig(_Dtypes, OnlineQuantizationConfig):  # type: ignore[misc]
    """Quantize the experts of a 16-bit checkpoint to NVFP4 while vLLM loads them; other layers stay in 16 bits.

    Args:
        linears: patterns of dense layers that become NVFP4, too, in vLLM's or the checkpoint's names.
    """

    def __init__(self, linears: Sequence[str] = ()) -> None:
        nvfp4 = QuantSpec(weight=kNvfp4Static)
        super().__init__(QuantizationConfigArgs(moe=nvfp4, linear=nvfp4 if linears else None))
        self.linears = linears
        self._dense: list[str] = []  # names of the model's dense layers
        self._has_experts = False

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        self._has_experts |= isinstance(layer, RoutedExperts)
        method = super().get_quant_method(layer, prefix)
        in_16_bits = isinstance(method, UnquantizedLinearMethod)
        # One layer suffices. Some models of vLLM treat layers with its own class specially.
        return _Checked() if in_16_bits and self._dense == [prefix] else method

    def resolve_quant_method_cls(self, layer_cls: type, prefix: str) -> Any:
        if issubclass(layer_cls, LinearBase):
            self._dense.append(prefix)
            fused = self.packed_modules_mapping
            named = should_ignore_layer(prefix, ignore=self.linears, fused_mapping=fused, use_fnmatch=True)
            if not named or prefix.rpartition(".")[2] in _ROUTERS:
                return None
        return super().resolve_quant_method_cls(layer_cls, prefix)

    def require_matches(self) -> None:
        """Raise a ValueError if a pattern fits no dense layer of the model, or if there is nothing to quantize; methods
        call it when vLLM has made all layers.

        With pipeline parallelism it is a warning: a rank has some of the layers.
        """
        for problem in self._problems():
            if get_pp_group().world_size == 1:
                raise ValueError(problem)
            logger.warning_once("%s (of this pipeline stage)", problem)

    def _problems(self) -> Iterator[str]:
        if not (self._has_experts or self.linears):
            yield f"--quantization {NAME}: found no experts to quantize in the model, and no patterns of dense layers"
        for pattern in self.linears:
            options = dict(fused_mapping=self.packed_modules_mapping, use_fnmatch=True)
            if any(any(find_matching_patterns(name, [pattern], **options)) for name in self._dense):
                continue
            kinds = dict.fromkeys(map(without_numbers, self._dense))
            close = get_close_matches(without_numbers(pattern), kinds, n=3, cutoff=0)
            yield f"linears: {pattern!r} fits no dense layer of the model; close names are {close}"

    def _get_method_cls(self, spec: QuantSpec | None, table: Any, layer_cls: type) -> type | None:
        if spec is None:
            return None
        return ThunderOnlineLinearMethod if issubclass(layer_cls, LinearBase) else ThunderOnlineMoEMethod


class _Checked(UnquantizedLinearMethod):  # type: ignore[misc]
    """vLLM's method for 16-bit dense layers; it also checks the patterns, if no layer has a method of ours."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.quant_config.require_matches()
        super().process_weights_after_loading(layer)


class ThunderQuantizationConfig(ModelOptQuantConfigBase):  # type: ignore[misc]
    """The entry in vLLM's registry; because of its base class vLLM passes `--quantization-config` to `from_config`.

    For a checkpoint without a quantization_config and without a file of `get_config_filenames`, vLLM calls the class.
    It then gets the configuration for 16-bit checkpoints."""

    def __new__(cls) -> Any:
        return ThunderOnlineConfig()

    @classmethod
    def from_config_dict_json(cls, options: str) -> ThunderOnlineConfig:
        """Return the configuration for a 16-bit checkpoint with `quantization_config_dict_json` of `--hf-overrides`.

        Raises:
            ValueError: It is not a dictionary with the key "linears" alone, a list of patterns.
        """
        asked = json.loads(options)
        linears = asked.get("linears") if isinstance(asked, dict) and set(asked) == {"linears"} else None
        if not isinstance(linears, list) or not all(isinstance(pattern, str) for pattern in linears):
            raise ValueError(
                f'quantization_config_dict_json: got {options}, wanted {{"linears": [patterns of dense layers]}}'
            )
        return ThunderOnlineConfig(linears)

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no names: vLLM has read ModelOpt's file into the model's configuration before."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim a checkpoint with NVFP4, MXFP8 or MXFP4 layers; the log says why such a checkpoint is not claimed.

        Claimed checkpoints of `MODELS` get our model class by its name in `architectures`. GPT-OSS in NVFP4 or MXFP8 is
        claimed also on devices where vLLM's kernels would run it, since vLLM's model silently drops biases: our class
        raises there.

        Args:
            hf_quant_cfg: quantization_config of the checkpoint.
            user_quant: the user's `--quantization`; another name than ours selects vLLM's own kernels.
            hf_config: of the model; its `architectures` are changed.

        Returns:
            Our name; None lets vLLM ask the next method.

        Raises:
            ValueError: The user gave our name for a checkpoint that our kernels do not run, or vLLM's model class
                cannot load the checkpoint's head.
        """
        config_class = _config_class(hf_quant_cfg) if _is_known_model(hf_quant_cfg, hf_config) else None
        architectures = getattr(hf_config, "architectures", None) or []
        gpt_oss = any("GptOssFor" in name for name in architectures)
        drops_biases = gpt_oss and config_class is not ThunderGptOssMxfp4Config
        reason = None
        if config_class is None:
            reason = "the checkpoint has no NVFP4 or MXFP8 layers, and is no GPT-OSS or DeepSeek-V4 with MXFP4 experts"
        elif user_quant not in (None, NAME):
            reason = f"--quantization {user_quant} was asked for"
            if drops_biases and config_class is not ThunderCompressedTensorsConfig:
                reason += ", which leaves out the biases of GPT-OSS's experts"
        elif not drops_biases and not ThunderExperts._supports_current_device():
            reason = "the device is neither a CPU nor a CUDA GPU of compute capability 8.0 to 9.0"
        elif config_class is ThunderModelOptMixedPrecisionConfig and not _quantized_layers(hf_quant_cfg):
            reason = "quantization_config in config.json has no quantized_layers"
        if reason is None:
            unable = [name for name in architectures if name in _16_BIT_HEADS]
            if unable and not getattr(hf_config, "tie_word_embeddings", False) and _has_quantized_head(hf_quant_cfg):
                raise ValueError(
                    f"lm_head: got a quantized head, wanted one in 16 bits, which vLLM's {unable[0]} has: quantize the"
                    " model without lm_head (`python -m thunder_moe convert` leaves it out)"
                )
            if architectures:
                hf_config.architectures = [f"Thunder{name}" if name in MODELS else name for name in architectures]
            return NAME
        if user_quant == NAME:
            raise ValueError(f"--quantization {NAME}: {reason}; leave it out for vLLM's own kernels")
        if config_class is not None:
            logger.warning_once(
                "NVFP4, MXFP8 and MXFP4 layers do not run on the kernels of thunder_moe, but on vLLM's own: %s.", reason
            )
        return None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Return the configuration for the form of a claimed checkpoint."""
        config_class = _config_class(config)
        assert config_class is not None
        return config_class.from_config(config)


# Methods in config.json and as vLLM renames them.
_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")
_FP8 = ("fp8", "deepseek_v4_fp8")
_ALGORITHMS = {
    "NVFP4": ThunderModelOptNvFp4Config,
    "W4A16_NVFP4": ThunderModelOptNvFp4Config,
    "MXFP8": ThunderModelOptMxFp8Config,
}


def _config_class(config: dict[str, Any]) -> type[QuantizationConfig] | None:
    """Return our class for a quantization_config; None if it has no NVFP4, MXFP8 and MXFP4 layers."""
    if config.get("quant_method") == "compressed-tensors":
        groups = (group.get("weights") for group in config.get("config_groups", {}).values())
        ours = any(_format(QuantizationArgs.model_validate(group)) for group in groups if group)
        return ThunderCompressedTensorsConfig if ours else None
    if config.get("quant_method") == "mxfp8":  # MiniMax's name of ModelOpt's form
        return ThunderModelOptMxFp8Config
    if config.get("quant_method") in _MXFP4:
        return ThunderGptOssMxfp4Config
    if config.get("quant_method") in _FP8:
        from thunder_moe.integrations.vllm.deepseek_v4 import ThunderDeepseekV4Config

        return ThunderDeepseekV4Config
    algorithm = ModelOptQuantConfigBase._extract_modelopt_quant_algo(config)
    if algorithm == "MIXED_PRECISION":
        algorithms = {layer.get("quant_algo", "").upper() for layer in _quantized_layers(config).values()}
        return ThunderModelOptMixedPrecisionConfig if not algorithms or algorithms & set(_ALGORITHMS) else None
    return _ALGORITHMS.get(algorithm)


def _is_known_model(config: dict[str, Any], hf_config: Any) -> bool:
    """True unless a quantization_config is claimed for some models alone, and the model is not one of them.

    These are "mxfp4" for GPT-OSS, and "fp8" for DeepSeek-V4 and its draft models, whose experts are in MXFP4 then."""
    architectures = getattr(hf_config, "architectures", None) or []
    if config.get("quant_method") in _MXFP4:
        return any(name.endswith("GptOssForCausalLM") for name in architectures)  # ours, too, of a loaded configuration
    if config.get("quant_method") in _FP8:
        deepseek_v4 = any(name.lower().startswith("deepseekv4") for name in architectures)
        mxfp4 = getattr(hf_config, "expert_dtype", "fp4") == "fp4" and not config.get("moe_quant_algo")
        return deepseek_v4 and mxfp4
    return True


def _quantized_layers(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the layers of MIXED_PRECISION; older checkpoints have them in hf_quant_config.json alone."""
    return config.get("quantization", config).get("quantized_layers") or {}


def _has_quantized_head(config: dict[str, Any]) -> bool:
    """True if a checkpoint of ModelOpt has a head that is not in 16 bits."""
    config_class = _config_class(config)
    if config_class is None or not issubclass(config_class, ModelOptQuantConfigBase):
        return False
    if config_class is ThunderModelOptMixedPrecisionConfig:
        return "lm_head" in _quantized_layers(config)
    return not config_class.from_config(config).is_layer_excluded("lm_head")


def register_configs() -> None:
    """Add our method to vLLM's registry."""
    register_quantization_config(NAME)(ThunderQuantizationConfig)

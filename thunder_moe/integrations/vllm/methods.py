"""vLLM's methods for the experts of NVFP4 and MXFP8 checkpoints, with our kernels on the parameters that vLLM loads.
Called by configs; calls experts to run, and vLLM's own method if `experts.unsupported_reason` returns a reason.

Legend: E experts of this rank, I intermediate_size of this rank, H hidden_size.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
    fp8_w8a16_moe_quant_config,
    nvfp4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod as CompressedTensorsNvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8 import (  # noqa: E501
    CompressedTensorsW8A8Mxfp8MoEMethod as CompressedTensorsMxFp8MoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMxFp8Config,
    ModelOptMxFp8FusedMoE,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.platforms import current_platform

from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.weight import MXFP8Weight, NVFP4Weight, PackedWeight, joined
from thunder_moe.integrations.vllm.batched import ThunderBatchedExperts
from thunder_moe.integrations.vllm.experts import FIELDS, ThunderExperts, unsupported_reason
from thunder_moe.integrations.vllm.graphs import record_choice
from thunder_moe.integrations.vllm.loading import (
    mark_unloaded,
    refuse_reload,
    replace,
    require_decoded_scales,
    require_loaded,
)
from thunder_moe.integrations.vllm.lora import adapters_unsupported_reason, experts_class
from thunder_moe.kernels.select import lay_out

__all__ = [
    "CompressedTensorsThunderMoEMethod",
    "CompressedTensorsThunderMxFp8MoEMethod",
    "ModelOptThunderMoEMethod",
    "ModelOptThunderMxFp8MoEMethod",
    "compressed_tensors_method",
    "compressed_tensors_mxfp8_method",
    "modelopt_method",
    "mxfp8_method",
]

# vLLM's log, where users look for what runs their experts.
logger = init_logger("vllm.thunder_moe")


def modelopt_method(quant_config: ModelOptNvFp4Config, moe_config: FusedMoEConfig) -> FusedMoEMethodBase:
    """Return our method for the experts of a ModelOpt checkpoint in NVFP4, or vLLM's if ours cannot run them."""
    reason = _unsupported_reason(moe_config)
    if reason is None and quant_config.moe_activation_override is not None:
        reason = "4-bit activations are asked for by quantization_config.moe.activation"
    if _decide_and_log(reason):
        return ModelOptThunderMoEMethod(quant_config, moe_config)
    return ModelOptNvFp4FusedMoE(quant_config=quant_config, moe_config=moe_config)


def mxfp8_method(quant_config: ModelOptMxFp8Config, moe_config: FusedMoEConfig) -> FusedMoEMethodBase:
    """Return our method for the experts of a ModelOpt checkpoint in MXFP8, or vLLM's if ours cannot run them."""
    if _decide_and_log(_unsupported_reason(moe_config, MXFP8), MXFP8):
        return ModelOptThunderMxFp8MoEMethod(quant_config, moe_config)
    return ModelOptMxFp8FusedMoE(quant_config=quant_config, moe_config=moe_config)


def compressed_tensors_method(
    moe_config: FusedMoEConfig, layer_name: str, inputs: Any, reason: str | None = None
) -> FusedMoEMethodBase:
    """Return our method for the experts of compressed-tensors in NVFP4, or vLLM's if ours cannot run them.

    Args:
        moe_config: vLLM's, of the layer.
        layer_name: for vLLM's method.
        inputs: the checkpoint's quantization of activations, or None.
        reason: why our method cannot load the checkpoint; None if it can.
    """
    if _decide_and_log(reason or _unsupported_reason(moe_config)):
        return CompressedTensorsThunderMoEMethod(moe_config)
    return CompressedTensorsNvfp4MoEMethod(moe_config, layer_name, use_a16=inputs is None)


def compressed_tensors_mxfp8_method(moe_config: FusedMoEConfig, reason: str | None = None) -> FusedMoEMethodBase:
    """Return our method for the experts of compressed-tensors in MXFP8, or vLLM's if ours cannot run them."""
    if _decide_and_log(reason or _unsupported_reason(moe_config, MXFP8), MXFP8):
        return CompressedTensorsThunderMxFp8MoEMethod(moe_config)
    return CompressedTensorsMxFp8MoEMethod(moe_config)


def _unsupported_reason(moe_config: FusedMoEConfig, format: BlockFormat = NVFP4) -> str | None:
    reason = unsupported_reason(moe_config, _experts_class(moe_config), format)
    return adapters_unsupported_reason(moe_config) if reason is None else reason


def _experts_class(moe_config: FusedMoEConfig) -> type[ThunderExperts]:
    batched = moe_config.moe_parallel_config.use_batched_activation_format
    return ThunderBatchedExperts if batched else experts_class(moe_config)


def _decide_and_log(reason: str | None, format: BlockFormat = NVFP4) -> bool:
    """True if there is no reason against our kernels; logs the decision and its reason."""
    name = format.name.upper()
    record_choice("experts", format, reason is None)
    if reason is None:
        logger.info_once("%s experts run on the kernels of thunder_moe (THUNDER_MOE_VLLM=0 turns them off).", name)
    else:
        logger.warning_once("%s experts do not run on the kernels of thunder_moe, but on vLLM's own: %s.", name, reason)
    return reason is None


class _ThunderMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The base of the methods, which makes experts of loaded tensors."""

    supports_pre_processed_weights = False
    uses_weight_scale_2 = False
    experts_cls = ThunderExperts
    use_global_sf = False
    moe: FusedMoEConfig
    moe_kernel: Any
    _one_scale = False
    _format = NVFP4

    @property
    def supports_eplb(self) -> bool:
        """Return True: tensors are expert-major, and the kernels read the parameters that EPLB overwrites."""
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        return nvfp4_w4a16_moe_quant_config(
            g1_alphas=layer.w13_weight_scale_2,
            g2_alphas=layer.w2_weight_scale_2,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )

    @property
    def _biases(self) -> tuple[str, ...]:
        return ("w13_bias", "w2_bias") if self.moe.has_bias else ()

    def _create_biases(self, layer: Any, dtype: torch.dtype, **attributes: Any) -> None:
        """Register w13_bias (E, 2I) and w2_bias (E, H), which vLLM's NVFP4 and MXFP8 methods lack."""
        for name in self._biases:
            experts, features = getattr(layer, f"{name.removesuffix('bias')}weight_scale").shape[:2]
            bias = torch.nn.Parameter(torch.full((experts, features), torch.nan, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, bias)
            set_weight_attrs(bias, attributes)

    def _build(self, layer: Any, gate_up_scale: Tensor | None, down_scale: Tensor | None) -> None:
        """Converts the weights to the layout of the device's kernels, and makes the experts.

        Args:
            layer: vLLM's RoutedExperts, whose w13_weight, w13_weight_scale, w2_weight and w2_weight_scale are loaded.
            gate_up_scale: decode scales (E, 2) of gate and up; None in MXFP8.
            down_scale: decode scales (E,); None in MXFP8.
        """
        if self.moe.activation == MoEActivation.SWIGLUOAI:
            for name in ("weight", "weight_scale", *(["bias"] if self.moe.has_bias else [])):
                rows = getattr(layer, f"w13_{name}").data
                replace(layer, layer.layer_name, f"w13_{name}", _gate_then_up(rows))
        if self.moe.has_bias and self.moe.tp_rank > 0:  # ranks' outputs are added
            layer.w2_bias.data.zero_()
        layouts = []
        if gate_up_scale is not None:
            gate_up_scale = self._row_scales(layer, gate_up_scale)
        for name, global_scale in (("w13", gate_up_scale), ("w2", down_scale)):
            qdata, scale = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
            weight: PackedWeight
            if global_scale is None:
                weight = MXFP8Weight(qdata, scale.view(MXFP8.scale_dtype))
            else:
                weight = NVFP4Weight(qdata, scale, global_scale.float().contiguous())
            weight = lay_out(weight, "auto")
            layouts.append(weight.layout)
            for field, tensor in zip(FIELDS[self._format], weight.tensors(), strict=True):
                like = getattr(layer, f"{name}_{field}", tensor)  # vLLM has E8M0 as bytes
                bits = tensor.view(like.dtype) if tensor.itemsize == 1 else tensor
                replace(layer, layer.layer_name, f"{name}_{field}", bits)
        for name in self._biases:
            replace(layer, layer.layer_name, name, getattr(layer, name).data)
        if self.moe_kernel is not None:
            return  # a reload: vLLM copies these parameters into the first ones and restores those
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_finalize = maybe_make_prepare_finalize(
            moe=self.moe, quant_config=self.moe_quant_config, routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True, use_monolithic=False,
        )  # fmt: skip
        experts = self._make_experts(prepare_finalize)
        gate_up_layout, down_layout = layouts
        experts.take_weights(layer, gate_up_layout, down_layout, self._format)
        self.moe_kernel = mk.FusedMoEKernel(prepare_finalize, experts)
        if self.moe.is_lora_enabled:
            refuse_reload(layer, "--enable-lora")
        elif self.moe.moe_parallel_config.enable_eplb:
            refuse_reload(layer, "--enable-eplb")

    def _make_experts(self, prepare_finalize: Any) -> ThunderExperts:
        kind = _experts_class(self.moe)
        options = dict(moe_config=self.moe, quant_config=self.moe_quant_config)
        if issubclass(kind, ThunderBatchedExperts):
            options["max_num_tokens"] = prepare_finalize.max_num_tokens_per_rank()
            options["num_dispatchers"] = prepare_finalize.num_dispatchers()
        return kind(**options)

    def maybe_roundup_sizes(self, hidden_size: int, *args: Any) -> tuple[int, int]:
        """Raise a ValueError if an exchange of tokens needs padded sizes: vLLM would not load padded weights."""
        rounded: tuple[int, int] = super().maybe_roundup_sizes(hidden_size, *args)
        if rounded != (hidden_size, args[0]):
            backend = self.moe.moe_parallel_config.all2all_backend
            raise ValueError(
                f"--all2all-backend {backend}: got hidden_size {hidden_size}, wanted {rounded[0]}; take another backend"
            )
        return rounded

    def _row_scales(self, layer: Any, scales: Tensor) -> Tensor:
        """Return the decode scales (E, 2) of gate and up as (E,) if each expert's are equal, else as (E, 2I).

        The shape must not depend on the values with EPLB, which moves experts between ranks, nor in a reload, which
        writes into the memory of the first load.
        """
        equal = bool((scales[:, 0] == scales[:, 1]).all())
        if self.moe_kernel is None:
            self._one_scale = equal and not self.moe.moe_parallel_config.enable_eplb
        elif self._one_scale and not equal:
            raise ValueError(
                f"w13_weight_scale_2 of {layer.layer_name!r}: got global scales of gate and up that differ, after"
                " weights whose scales were the same; give both one scale, or start vLLM with these weights"
            )
        if self._one_scale:
            return scales[:, 0]
        return scales.repeat_interleave(layer.w13_weight.shape[1] // 2, 1)


def _gate_then_up(rows: Tensor) -> Tensor:
    """Sort alternating rows of gate and up (E, 2I, ...) into gate's rows, then up's."""
    return joined((rows[:, ::2], rows[:, 1::2]), 1)


class ModelOptThunderMoEMethod(_ThunderMethod, ModelOptNvFp4FusedMoE):  # type: ignore[misc]
    """The method for ModelOpt's checkpoints in NVFP4. vLLM's loaders look for "ModelOpt" in the name of this class."""

    _PARAMETERS = (
        "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_weight_scale_2", "w2_weight_scale_2",
    )  # fmt: skip

    def __init__(self, quant_config: ModelOptNvFp4Config, moe_config: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)
        self.quant_config = quant_config

    def create_weights(self, layer: Any, *args: Any, **options: Any) -> None:
        super().create_weights(layer, *args, **options)
        self._create_biases(layer, layer.params_dtype, weight_loader=options.get("weight_loader"))
        mark_unloaded(layer, *self._PARAMETERS)

    def process_weights_after_loading(self, layer: Any) -> None:
        require_loaded(layer, layer.layer_name, "experts", *self._PARAMETERS, *self._biases)
        for name in ("w13_input_scale", "w2_input_scale"):  # scales of 4-bit activations, which are not used
            replace_parameter(layer, name, None)
        self._build(layer, layer.w13_weight_scale_2.data, layer.w2_weight_scale_2.data)


class _MxFp8Method(_ThunderMethod):
    """The base of the methods in MXFP8, E4M3 codes without NaN and E8M0 scales for blocks of 32.

    ModelOpt and compressed-tensors have the same names for them."""

    _format = MXFP8
    _PARAMETERS = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")

    def create_weights(self, layer: Any, *args: Any, **options: Any) -> None:
        super().create_weights(layer, *args, **options)
        self._create_biases(layer, options["params_dtype"], weight_loader=options.get("weight_loader"))
        mark_unloaded(layer, *self._PARAMETERS)

    def process_weights_after_loading(self, layer: Any) -> None:
        require_loaded(layer, layer.layer_name, "experts", *self._PARAMETERS, *self._biases)
        if current_platform.is_cuda():
            require_decoded_scales(layer, layer.layer_name, "w13_weight_scale", "w2_weight_scale")
        self._build(layer, None, None)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        return fp8_w8a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            block_shape=[1, MXFP8.block_size],
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )


class ModelOptThunderMxFp8MoEMethod(_MxFp8Method, ModelOptMxFp8FusedMoE):  # type: ignore[misc]
    """The method for ModelOpt's checkpoints in MXFP8. vLLM's loaders look for "ModelOpt" in the name of this class."""

    def __init__(self, quant_config: ModelOptMxFp8Config, moe_config: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)
        self.quant_config = quant_config


class CompressedTensorsThunderMxFp8MoEMethod(_MxFp8Method, CompressedTensorsMxFp8MoEMethod):  # type: ignore[misc]
    """The method for compressed-tensors in MXFP8."""

    def __init__(self, moe_config: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)


class CompressedTensorsThunderMoEMethod(_ThunderMethod, CompressedTensorsNvfp4MoEMethod):  # type: ignore[misc]
    """The method for compressed-tensors in NVFP4, whose global scales encode: their inverse multiplies."""

    _PARAMETERS = (
        "w13_weight_packed", "w2_weight_packed", "w13_weight_scale", "w2_weight_scale", "w13_weight_global_scale",
        "w2_weight_global_scale",
    )  # fmt: skip

    def __init__(self, moe_config: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)
        self.group_size = 16

    def create_weights(self, layer: Any, *args: Any, **options: Any) -> None:
        super().create_weights(layer, *args, **options)
        self._create_biases(layer, layer.params_dtype, weight_loader=options.get("weight_loader"))
        mark_unloaded(layer, *self._PARAMETERS)

    def process_weights_after_loading(self, layer: Any) -> None:
        require_loaded(layer, layer.layer_name, "experts", *self._PARAMETERS, *self._biases)
        scales = [1 / getattr(layer, f"{name}_weight_global_scale").data for name in ("w13", "w2")]
        for name in ("w13", "w2"):
            weight = torch.nn.Parameter(getattr(layer, f"{name}_weight_packed").data, requires_grad=False)
            setattr(layer, f"{name}_weight", weight)
            for old in ("weight_packed", "weight_global_scale", "input_global_scale"):
                delattr(layer, f"{name}_{old}")
        self._build(layer, *scales)

"""vLLM's methods for the experts of NVFP4 and MXFP8 checkpoints, with our kernels on the parameters that vLLM loads.
Called by configs; calls experts to run, and vLLM's own method if `experts.unsupported_reason` returns a reason.

Legend: E experts of this rank, I intermediate_size of this rank, H hidden_size.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8 import (  # noqa: E501
    CompressedTensorsW8A8Mxfp8MoEMethod,
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
from thunder_moe.formats.weight import WEIGHTS, joined
from thunder_moe.integrations.vllm.batched import ThunderBatchedExperts
from thunder_moe.integrations.vllm.experts import FIELDS, ThunderExperts, unsupported_reason
from thunder_moe.integrations.vllm.graphs import decide
from thunder_moe.integrations.vllm.loading import (
    mark_unloaded,
    refuse_reload,
    replace,
    require_decoded_scales,
    require_loaded,
)
from thunder_moe.integrations.vllm.lora import ThunderLoRAExperts
from thunder_moe.kernels.select import lay_out


def modelopt_method(quant_config: ModelOptNvFp4Config, moe_config: FusedMoEConfig) -> FusedMoEMethodBase:
    """Return our method for the experts of a ModelOpt checkpoint in NVFP4, or vLLM's if ours cannot run them."""
    reason = unsupported_reason(moe_config, experts_class(moe_config), NVFP4)
    if reason is None and quant_config.moe_activation_override is not None:
        reason = "4-bit activations are asked for by quantization_config.moe.activation"
    kind = ModelOptThunderMoEMethod if decide("experts", NVFP4.name, reason) else ModelOptNvFp4FusedMoE
    return kind(quant_config=quant_config, moe_config=moe_config)


def mxfp8_method(quant_config: ModelOptMxFp8Config, moe_config: FusedMoEConfig) -> FusedMoEMethodBase:
    """Return our method for the experts of a ModelOpt checkpoint in MXFP8, or vLLM's if ours cannot run them."""
    ours = decide("experts", MXFP8.name, unsupported_reason(moe_config, experts_class(moe_config), MXFP8))
    kind = ModelOptThunderMxFp8MoEMethod if ours else ModelOptMxFp8FusedMoE
    return kind(quant_config=quant_config, moe_config=moe_config)


def compressed_tensors_method(
    format: BlockFormat, moe_config: FusedMoEConfig, reason: str | None = None
) -> FusedMoEMethodBase | None:
    """Return our method for the experts of compressed-tensors, or None if vLLM runs them. `reason` says why our method
    cannot load the checkpoint; None if it can."""
    if not decide("experts", format.name, reason or unsupported_reason(moe_config, experts_class(moe_config), format)):
        return None
    kind = CompressedTensorsThunderMoEMethod if format is NVFP4 else CompressedTensorsThunderMxFp8MoEMethod
    return kind(moe_config)


def experts_class(moe_config: FusedMoEConfig) -> type[ThunderExperts]:
    """Return the experts class for a layer."""
    if moe_config.moe_parallel_config.use_batched_activation_format:
        return ThunderBatchedExperts
    return ThunderLoRAExperts if moe_config.is_lora_enabled else ThunderExperts


class ThunderMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The base of the methods, which makes experts of loaded tensors."""

    supports_pre_processed_weights = False
    supports_eplb = True  # tensors are expert-major, and the kernels read the parameters that EPLB overwrites
    experts_cls = ThunderExperts
    use_global_sf = False
    group_size = 16
    moe: FusedMoEConfig
    moe_kernel: Any
    _format = NVFP4
    _fields = FIELDS[NVFP4]  # the names of the checkpoint's tensors

    def __init__(self, moe_config: FusedMoEConfig, quant_config: Any = None) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)
        self._one_scale: set[str] = set()  # w13 or w2, if its experts have one global scale each
        self.quant_config = quant_config

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """Return the activation's settings; the experts look up the layer's scales themselves."""
        return FusedMoEQuantConfig.make(
            weight_dtype=self._format.name,
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )

    @property
    def _biases(self) -> tuple[str, ...]:
        return ("w13_bias", "w2_bias") if self.moe.has_bias else ()

    @property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(f"{name}_{field}" for field in self._fields for name in ("w13", "w2"))

    def create_weights(self, layer: Any, **options: Any) -> None:
        """Register vLLM's parameters, and w13_bias (E, 2I) and w2_bias (E, H), which vLLM's methods lack."""
        super().create_weights(layer, **options)
        for name in self._biases:
            shape = getattr(layer, f"{name.removesuffix('bias')}weight_scale").shape[:2]
            data = torch.full(shape, torch.nan, dtype=options["params_dtype"])
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
            set_weight_attrs(getattr(layer, name), {"weight_loader": options.get("weight_loader")})
        mark_unloaded(layer, *self._parameters)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Converts the loaded weights to the layout of the device's kernels, and makes the experts."""
        require_loaded(layer, layer.layer_name, "experts", *self._parameters, *self._biases)
        scales = self._global_scales(layer)
        if self.moe.activation == MoEActivation.SWIGLUOAI:
            for name in ("weight", "weight_scale", *(["bias"] if self.moe.has_bias else [])):
                rows = getattr(layer, f"w13_{name}").data
                replace(layer, layer.layer_name, f"w13_{name}", gate_then_up(rows))
        if self.moe.has_bias and self.moe.tp_rank > 0:  # ranks' outputs are added
            layer.w2_bias.data.zero_()
        layouts = {}
        for name in ("w13", "w2"):
            qdata, scale = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
            tensors = (qdata, scale.view(self._format.scale_dtype), *([scales[name]] if scales else []))
            weight = lay_out(WEIGHTS[self._format.name](*tensors), "auto")
            layouts[name] = weight.layout
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
        options: dict[str, Any] = dict(moe_config=self.moe, quant_config=self.moe_quant_config)
        kind = experts_class(self.moe)
        if kind is ThunderBatchedExperts:
            options["max_num_tokens"] = prepare_finalize.max_num_tokens_per_rank()
            options["num_dispatchers"] = prepare_finalize.num_dispatchers()
        experts = kind(**options)
        experts.take_weights(layer, layouts, self._format)
        self.moe_kernel = mk.FusedMoEKernel(prepare_finalize, experts)
        if self.moe.is_lora_enabled:
            refuse_reload(layer, "--enable-lora")
        elif self.moe.moe_parallel_config.enable_eplb:
            refuse_reload(layer, "--enable-eplb")

    def _global_scales(self, layer: Any) -> dict[str, Tensor]:
        """Return the decode scales of w13, (E,) or one for each of its rows, and of w2, (E,); empty in MXFP8."""
        first, second = layer.w13_weight_scale_2.data.float(), layer.w2_weight_scale_2.data
        rows = first.repeat_interleave(layer.w13_weight.shape[1] // first.shape[1], 1)
        return {"w13": self._row_scales(layer, "w13", rows), "w2": second.float().contiguous()}

    def maybe_roundup_sizes(self, hidden_size: int, *args: Any) -> tuple[int, int]:
        """Raise a ValueError if an exchange of tokens needs padded sizes: vLLM would not load padded weights."""
        # Not super(): Mxfp4MoEMethod pads for vLLM's kernels.
        rounded: tuple[int, int] = FusedMoEMethodBase.maybe_roundup_sizes(self, hidden_size, *args)
        if rounded != (hidden_size, args[0]):
            backend = self.moe.moe_parallel_config.all2all_backend
            raise ValueError(
                f"--all2all-backend {backend}: got hidden_size {hidden_size}, wanted {rounded[0]}; take another backend"
            )
        return rounded

    def _row_scales(self, layer: Any, name: str, scales: Tensor) -> Tensor:
        """Return the decode scales (E, N) of the rows of w13 or w2, as (E,) if each expert's are equal.

        The shape must not depend on the values with EPLB, which moves experts between ranks, nor in a reload, which
        writes into the memory of the first load.
        """
        equal = bool((scales[:, :1] == scales).all())
        if self.moe_kernel is None and equal and not self.moe.moe_parallel_config.enable_eplb:
            self._one_scale.add(name)
        elif name in self._one_scale and not equal:
            raise ValueError(
                f"{name}_weight_scale_2 of {layer.layer_name!r}: got rows of an expert with global scales that differ"
                " (in w13 the scales of gate and up), after weights whose scales were the same; start vLLM with these"
                " weights, or give gate and up one scale"
            )
        return (scales[:, 0] if name in self._one_scale else scales).contiguous()


def gate_then_up(rows: Tensor) -> Tensor:
    """Return alternating rows of gate and up (E, 2I, ...) as gate's rows, then up's."""
    return joined((rows[:, ::2], rows[:, 1::2]), 1)


class ModelOptThunderMoEMethod(ThunderMethod, ModelOptNvFp4FusedMoE):  # type: ignore[misc]
    """The method for ModelOpt's checkpoints in NVFP4. vLLM's loaders look for "ModelOpt" in the name of this class."""

    def _global_scales(self, layer: Any) -> dict[str, Tensor]:
        for name in ("w13_input_scale", "w2_input_scale"):  # scales of 4-bit activations, which are not used
            replace_parameter(layer, name, None)
        return super()._global_scales(layer)


class CompressedTensorsThunderMoEMethod(ThunderMethod, CompressedTensorsW4A4Nvfp4MoEMethod):  # type: ignore[misc]
    """The method for compressed-tensors in NVFP4, whose global scales encode: their inverse multiplies."""

    _fields = ("weight_packed", "weight_scale", "weight_global_scale")

    def _global_scales(self, layer: Any) -> dict[str, Tensor]:
        """Give the parameters ModelOpt's names and decode scales."""
        for name in ("w13", "w2"):
            packed, encode = getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_global_scale")
            for field, data in (("weight", packed.data), ("weight_scale_2", 1 / encode.data)):
                setattr(layer, f"{name}_{field}", torch.nn.Parameter(data, requires_grad=False))
            for old in ("weight_packed", "weight_global_scale", "input_global_scale"):
                delattr(layer, f"{name}_{old}")
        return super()._global_scales(layer)


class _MxFp8Method(ThunderMethod):
    """The base of the methods in MXFP8, E4M3 codes without NaN and E8M0 scales for blocks of 32.

    ModelOpt and compressed-tensors have the same names for them."""

    _format = MXFP8
    _fields = FIELDS[MXFP8]

    def _global_scales(self, layer: Any) -> dict[str, Tensor]:
        if current_platform.is_cuda():
            require_decoded_scales(layer, layer.layer_name, "w13_weight_scale", "w2_weight_scale")
        return {}


class ModelOptThunderMxFp8MoEMethod(_MxFp8Method, ModelOptMxFp8FusedMoE):  # type: ignore[misc]
    """The method for ModelOpt's checkpoints in MXFP8. vLLM's loaders look for "ModelOpt" in the name of this class."""


class CompressedTensorsThunderMxFp8MoEMethod(_MxFp8Method, CompressedTensorsW8A8Mxfp8MoEMethod):  # type: ignore[misc]
    """The method for compressed-tensors in MXFP8."""

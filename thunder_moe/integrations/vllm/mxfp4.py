"""vLLM's method for MXFP4 experts, which become NVFP4 of the same values when vLLM has loaded a layer.
Called by configs, gpt_oss and deepseek_v4; calls formats.mxfp4 to convert, methods for everything after it.

The codes stay where vLLM has loaded them. Each scale is loaded twice, for the two blocks of 16 that share it, and then
overwritten. So a tensor-parallel rank may also get half of a block of 32.

Legend: E experts of this rank, N rows, K columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.model_executor.utils import set_weight_attrs

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.mxfp4 import E8M0_BIAS, E8M0_NAN, NVFP4_BYTES, mxfp4_to_nvfp4
from thunder_moe.integrations.vllm.experts import unsupported_reason
from thunder_moe.integrations.vllm.graphs import decide
from thunder_moe.integrations.vllm.loading import mark_unloaded
from thunder_moe.integrations.vllm.methods import ThunderMethod, experts_class, gate_then_up


def mxfp4_method(moe_config: FusedMoEConfig, vllms: type[FusedMoEMethodBase]) -> FusedMoEMethodBase:
    """Return our method for MXFP4 experts, or vLLM's, an instance of `vllms`, if ours cannot run them."""
    ours = decide("experts", "mxfp4", unsupported_reason(moe_config, experts_class(moe_config), NVFP4))
    return (ThunderMxfp4MoEMethod if ours else vllms)(moe_config)


class ThunderMxfp4MoEMethod(ThunderMethod, Mxfp4MoEMethod):  # type: ignore[misc]
    """The method for MXFP4, E2M1 codes and E8M0 scales for blocks of 32 along K."""

    _fields = ("weight", "weight_scale")
    weight_dtype = "mxfp4"  # by it vLLM's loader of GPT-OSS knows packed codes
    mxfp4_backend = Mxfp4MoeBackend.NONE

    def create_weights(self, layer: Any, **options: Any) -> None:
        """Register vLLM's parameters, with scales (E, N, K // 16)."""
        super().create_weights(layer, **options)
        loader = self.get_scale_weight_loader(_for_both_halves(options["weight_loader"]))
        for name in ("w13", "w2"):
            codes = getattr(layer, f"{name}_weight")
            data = codes.data.new_empty(*codes.shape[:2], codes.shape[2] // NVFP4_BYTES)
            scale = torch.nn.Parameter(data, requires_grad=False)
            set_weight_attrs(scale, {"weight_loader": loader, "quant_method": "block"})
            layer.register_parameter(f"{name}_weight_scale", scale)
        mark_unloaded(layer, *self._parameters)

    def _global_scales(self, layer: Any) -> dict[str, Tensor]:
        """Convert the block scales where they are; return the global scales, (E,) or (E, N)."""
        scales = {}
        for name in ("w13", "w2"):
            codes, exponents = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
            exponents.masked_fill_(exponents == E8M0_NAN, E8M0_BIAS)  # of --load-format dummy, others were refused
            rows = []
            for expert, blocks in enumerate(codes.unflatten(-1, (-1, NVFP4_BYTES))):  # one by one to save memory
                try:
                    exact = mxfp4_to_nvfp4(blocks[None], exponents[expert, None])
                except ValueError as error:
                    raise ValueError(
                        f"{name}_weight of {layer.layer_name!r}, expert {expert} (of this rank), cannot become NVFP4:"
                        f" {error}; THUNDER_MOE_VLLM=0 has vLLM's own kernels run it"
                    ) from error
                exponents[expert] = exact.scale[0].view(torch.uint8)
                rows.append(exact.row_global_scale())
            scales[name] = torch.cat(rows)
        if self.moe.activation == MoEActivation.SWIGLUOAI:
            scales["w13"] = gate_then_up(scales["w13"])
        return {name: self._row_scales(layer, name, scale) for name, scale in scales.items()}


def _for_both_halves(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that takes scales for blocks of 32 and loads each twice, for two blocks of 16."""

    def weight_loader(param: Tensor, loaded_weight: Tensor, *args: Any, **options: Any) -> Any:
        return load(param, loaded_weight.repeat_interleave(2, -1), *args, **options)

    return weight_loader

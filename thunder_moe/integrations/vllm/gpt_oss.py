"""Extend vLLM's GPT-OSS by a reader of NVFP4, MXFP8 and MXFP4 experts, expert by expert.
Called by vLLM for checkpoints that configs claims: configs puts the name of this class into their `architectures`.

A checkpoint in the form of ModelOpt, which vLLM's own class cannot read, has all experts of a projection in one tensor,
K before N, with alternating rows of gate and up. The tensors are `experts.gate_up_proj` with `_weight_scale`, in NVFP4
`_weight_scale_2`, and `_bias`, and the same for `down_proj`. In MXFP4, as OpenAI released the model, N comes first,
then blocks of K. The tensors have the fields `_blocks`, `_scales` and `_bias`.

vLLM 0.32 copies attention's sinks without the loaders of parameters, so that a reload would keep the old ones, or after
a sleep of level 2 uninitialized memory. Here they go to the loader.

Legend: E experts, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE, ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

from thunder_moe.formats.block_format import MXFP8
from thunder_moe.integrations.vllm.experts import SWIGLUOAI_FORM
from thunder_moe.integrations.vllm.methods import ModelOptThunderMoEMethod, ModelOptThunderMxFp8MoEMethod
from thunder_moe.integrations.vllm.mxfp4 import ThunderMxfp4MoEMethod

_METHODS = (ModelOptThunderMoEMethod, ModelOptThunderMxFp8MoEMethod, ThunderMxfp4MoEMethod)
_VLLM_METHODS = (ModelOptNvFp4FusedMoE, ModelOptMxFp8FusedMoE)
_SINKS = re.compile(r"^(.*)\.self_attn\.sinks$")
_EXPERTS = re.compile(r"^(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<field>\w*)$")
_PARAMETERS = {"gate_up_proj": "w13", "down_proj": "w2"}
_FIELDS = {"": "weight", "_weight_scale": "weight_scale", "_bias": "bias"}
_MXFP4_FIELDS = {"_blocks": "weight", "_scales": "weight_scale", "_bias": "bias"}
_SHARDS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class ThunderGptOssForCausalLM(GptOssForCausalLM):  # type: ignore[misc]
    """vLLM's model that passes tensors of experts on our kernels to vLLM's loader expert by expert."""

    lm_head: Any

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        self.config: Any = copy.copy(vllm_config.model_config.hf_config)
        self.config.architectures = ["GptOssForCausalLM"]  # by it vLLM alternates adapters' rows of gate and up
        name, quant_config = maybe_prefix(prefix, "lm_head"), vllm_config.quant_config
        method = quant_config.get_quant_method(self.lm_head, name)  # vLLM's class has no quantized head
        if method is not None and not isinstance(method, UnquantizedLinearMethod):
            sizes = self.config.vocab_size, self.config.hidden_size
            self.lm_head = ParallelLMHead(*sizes, quant_config=quant_config, prefix=name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self._refuse_vllm_methods()
        experts = {
            name.removesuffix(".routed_experts"): module
            for name, module in self.named_modules()
            if isinstance(getattr(module, "quant_method", None), _METHODS)
        }
        if experts:
            self._check_activation()
        loaded: set[str] = set()
        weights = self._without_sinks(weights, loaded)
        names: set[str] = super().load_weights(self._per_expert(weights, experts, loaded))
        return names | loaded

    def _refuse_vllm_methods(self) -> None:
        """Raise a ValueError if vLLM's own methods are to run NVFP4 or MXFP8 experts.

        They make no parameters for biases, and vLLM's loader silently drops biases and scales."""
        for name, module in self.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, _VLLM_METHODS) and not isinstance(method, _METHODS):
                raise ValueError(
                    f"{name}: vLLM's own {type(method).__name__} would leave out the biases of GPT-OSS; the log says"
                    " why the kernels of thunder_moe do not run these experts"
                )

    def _without_sinks(self, weights: Iterable[tuple[str, Tensor]], loaded: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Load this rank's heads of attention's sinks, and yield all other names and tensors."""
        parameters, rank = dict(self.named_parameters()), get_tensor_model_parallel_rank()
        for name, tensor in weights:
            match = _SINKS.match(name)
            own = f"{match[1]}.attn.sinks" if match else ""
            if own not in parameters:  # no sinks, or sinks of another pipeline stage
                yield name, tensor
                continue
            heads = parameters[own].shape[0]
            loader = getattr(parameters[own], "weight_loader", default_weight_loader)
            loader(parameters[own], tensor.narrow(0, rank * heads, heads))
            loaded.add(own)

    def _check_activation(self) -> None:
        config = self.config
        for name, wanted in (("swiglu_limit", SWIGLUOAI_FORM.limit), ("swiglu_alpha", SWIGLUOAI_FORM.alpha)):
            found = getattr(config, name, wanted)
            if found != wanted:
                raise ValueError(
                    f"{name}: got {found} in config.json, wanted {wanted}, which vLLM's GPT-OSS has for it"
                )

    def _per_expert(
        self, weights: Iterable[tuple[str, Tensor]], experts: dict[str, Any], loaded: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors for vLLM's loader, with an expert at a time of a tensor of all experts."""
        for name, tensor in weights:
            match = _EXPERTS.match(name)
            layer = None if match is None else experts.get(match["experts"])
            if match is None or layer is None:
                yield name, tensor
                continue
            path, projection, field = match.groups()
            parameter = _PARAMETERS[projection]
            fields = _MXFP4_FIELDS if isinstance(layer.quant_method, ThunderMxfp4MoEMethod) else _FIELDS
            if field == "_weight_scale" and isinstance(layer.quant_method, ModelOptThunderMxFp8MoEMethod):
                _check_blocks(name, tensor, getattr(layer, f"{parameter}_weight"), parameter)
            if field in fields:
                for expert, part in enumerate(tensor.unbind()):
                    yield f"{path}.{expert}.{parameter}_{fields[field]}", part
            elif field == "_weight_scale_2" and isinstance(layer.quant_method, ModelOptThunderMoEMethod):
                target = getattr(layer, f"{parameter}_weight_scale_2")  # vLLM's loader of this model drops it
                for expert, part in enumerate(tensor.expand(layer.global_num_experts).unbind()):
                    for shard in _SHARDS[projection]:
                        target.weight_loader(
                            param=target, loaded_weight=part, weight_name=f"{path}.{parameter}_weight_scale_2",
                            shard_id=shard, expert_id=expert, return_success=True,
                        )  # fmt: skip
                loaded.add(f"{path}.routed_experts.{parameter}_weight_scale_2")
            elif field != "_input_scale":  # the scale of 4-bit activations, which are not used
                raise ValueError(
                    f"{name}: wanted {', '.join(map(repr, fields))} (NVFP4: also '_weight_scale_2') after {projection}"
                )


def _check_blocks(name: str, scale: Tensor, weight: Tensor, parameter: str) -> None:
    """Raise a ValueError if the blocks of MXFP8 scales (E, K / 32, N) lie along N.

    nvidia-modelopt 0.47 writes such scales for fused experts. `weight` is this rank's (E, N, K); the ranks share I,
    which is gate_up's N."""
    along_k = scale.shape[1] * MXFP8.block_size == weight.shape[2]
    if not (along_k if parameter == "w13" else scale.shape[2] == weight.shape[1]):
        raise ValueError(
            f"{name}: got shape {tuple(scale.shape)}, wanted a scale for each {MXFP8.block_size} along in_features, as"
            " `python -m thunder_moe convert` writes them from the 16-bit model"
        )

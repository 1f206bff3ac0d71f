"""Extend vLLM's GPT-OSS by a reader of NVFP4 and MXFP8 experts, which vLLM's own lacks.
Called by vLLM for checkpoints that configs claims: configs puts the name of this class into their `architectures`.

A checkpoint in the form of ModelOpt has all experts of a projection in one tensor, K before N, gate and up in turns:
`experts.gate_up_proj`, `_weight_scale`, in NVFP4 `_weight_scale_2`, and `_bias`, and those of `down_proj`.

vLLM 0.32 copies attention's sinks past the loaders of parameters, so that a reload would leave the old ones, or after a
sleep of level 2 nothing: they go to the loader here.

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
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE, ModelOptNvFp4FusedMoE
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

from thunder_moe.formats.block_format import MXFP8
from thunder_moe.integrations.vllm.experts import SWIGLUOAI_FORM
from thunder_moe.integrations.vllm.methods import ModelOptThunderMoEMethod, ModelOptThunderMxFp8MoEMethod

__all__ = ["ThunderGptOssForCausalLM"]

_METHODS = (ModelOptThunderMoEMethod, ModelOptThunderMxFp8MoEMethod)
_VLLMS = (ModelOptNvFp4FusedMoE, ModelOptMxFp8FusedMoE)
_SINKS = re.compile(r"^(.*)\.self_attn\.sinks$")
_EXPERTS = re.compile(r"^(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<field>\w*)$")
_PARAMETERS = {"gate_up_proj": "w13", "down_proj": "w2"}
_FIELDS = {"": "weight", "_weight_scale": "weight_scale", "_bias": "bias"}
_SHARDS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class ThunderGptOssForCausalLM(GptOssForCausalLM):  # type: ignore[misc]
    """Hand tensors of experts that run on our kernels to vLLM's loader one expert at a time."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        self.config: Any = copy.copy(vllm_config.model_config.hf_config)
        self.config.architectures = ["GptOssForCausalLM"]  # vLLM's adapters have rows of gate and up in turns for it

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self._refuse_vllms_methods()
        experts = {
            name.removesuffix(".routed_experts"): module
            for name, module in self.named_modules()
            if isinstance(getattr(module, "quant_method", None), _METHODS)
        }
        if experts:
            self._check_activation()
        loaded: set[str] = set()
        weights = self._without_sinks(weights, loaded)
        names: set[str] = super().load_weights(self._one_by_one(weights, experts, loaded))
        return names | loaded

    def _refuse_vllms_methods(self) -> None:
        """Raise a ValueError where vLLM's own methods were to run NVFP4 or MXFP8 experts: they make no biases, and its
        loader drops those, and scales, without a word."""
        for name, module in self.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, _VLLMS) and not isinstance(method, _METHODS):
                raise ValueError(
                    f"{name}: vLLM's own {type(method).__name__} would leave out the biases of GPT-OSS; the log says"
                    " why the kernels of thunder_moe do not run these experts"
                )

    def _without_sinks(self, weights: Iterable[tuple[str, Tensor]], loaded: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Load this rank's heads of attention's sinks and yield the rest of the names and tensors."""
        parameters, rank = dict(self.named_parameters()), get_tensor_model_parallel_rank()
        for name, tensor in weights:
            found = _SINKS.match(name)
            own = f"{found[1]}.attn.sinks" if found else ""
            if own not in parameters:  # those of another pipeline stage, too
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

    def _one_by_one(
        self, weights: Iterable[tuple[str, Tensor]], experts: dict[str, Any], loaded: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors for vLLM's loader: experts (K, N) for a tensor of all (E, K, N)."""
        for name, tensor in weights:
            found = _EXPERTS.match(name)
            layer = None if found is None else experts.get(found["experts"])
            if found is None or layer is None:
                yield name, tensor
                continue
            path, projection, field = found.groups()
            parameter = _PARAMETERS[projection]
            if field == "_weight_scale" and isinstance(layer.quant_method, ModelOptThunderMxFp8MoEMethod):
                _check_blocks(name, tensor, getattr(layer, f"{parameter}_weight"), parameter)
            if field in _FIELDS:
                for expert, part in enumerate(tensor.unbind()):
                    yield f"{path}.{expert}.{parameter}_{_FIELDS[field]}", part
            elif field == "_weight_scale_2" and isinstance(layer.quant_method, ModelOptThunderMoEMethod):
                target = getattr(layer, f"{parameter}_weight_scale_2")  # vLLM's loader of this model drops it
                for expert, part in enumerate(tensor.expand(layer.global_num_experts).unbind()):
                    for shard in _SHARDS[projection]:
                        target.weight_loader(
                            param=target, loaded_weight=part, weight_name=f"{path}.{parameter}_weight_scale_2",
                            shard_id=shard, expert_id=expert, return_success=True,
                        )  # fmt: skip
                loaded.add(f"{path}.routed_experts.{parameter}_weight_scale_2")
            elif field != "_input_scale":  # of 4-bit activations, which there are none of
                raise ValueError(
                    f"{name}: wanted the fields of NVFP4 or MXFP8 experts, '', {', '.join(_FIELDS)[2:]} or"
                    " _weight_scale_2"
                )


def _check_blocks(name: str, scale: Tensor, weight: Tensor, parameter: str) -> None:
    """Raise a ValueError where the blocks of an MXFP8 weight's scales (E, K / 32, N) lie along N, as nvidia-modelopt
    0.47 writes those of fused experts. `weight`: this rank's (E, N, K); the ranks share I, which is gate_up's N."""
    along_k = scale.shape[1] * MXFP8.block_size == weight.shape[2]
    if not (along_k if parameter == "w13" else scale.shape[2] == weight.shape[1]):
        raise ValueError(
            f"{name}: got shape {tuple(scale.shape)}, wanted a scale for each {MXFP8.block_size} along in_features, as"
            " `python -m thunder_moe convert` writes them from the 16-bit model"
        )

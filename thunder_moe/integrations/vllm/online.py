"""vLLM's method for the experts of 16-bit checkpoints, which are quantized to NVFP4 whenever vLLM has loaded a layer.
Called by configs, and by linears to quantize; calls kernels.select to quantize, methods for everything after it.

vLLM's `OnlineMoEMethodBase` makes the 16-bit memory of a layer when all of its tensors have arrived, at the first load
and at each reload, and vLLM copies the results of a reload into the parameters of the first load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_moe_weight_quant
from vllm.model_executor.utils import replace_parameter

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.nvfp4 import expert_amax
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.integrations.vllm.experts import unsupported_reason
from thunder_moe.integrations.vllm.graphs import decide
from thunder_moe.integrations.vllm.methods import ThunderMethod, experts_class
from thunder_moe.kernels.select import quantize


class ThunderOnlineMoEMethod(ThunderMethod, OnlineMoEMethodBase):  # type: ignore[misc]
    """The method for experts of a 16-bit checkpoint, with the bytes of `thunder_moe.quantize_`.

    Raises:
        ValueError: Our kernels cannot run the experts, or cannot load them again.
    """

    _fields = ("weight",)

    def __init__(self, *, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        reason = unsupported_reason(moe, experts_class(moe), NVFP4)
        if moe.has_bias:
            reason = "biases of experts are untested"
        elif moe.is_lora_enabled or moe.moe_parallel_config.enable_eplb:
            reason = "--enable-lora and --enable-eplb do not go together with loading weights again"
        if reason is not None:
            raise ValueError(
                f"--quantization thunder_moe with a 16-bit checkpoint: its experts cannot become NVFP4: {reason}; leave"
                " it out for 16-bit experts"
            )
        decide("experts", NVFP4.name, None)

    def create_weights(self, layer: Any, **options: Any) -> None:
        """Register vLLM's 16-bit parameters, on meta until a layer is loaded. All experts of a projection are loaded by
        one call: vLLM calls its loader for each expert."""
        options["weight_loader"] = _of_all_experts(options["weight_loader"])
        OnlineMoEMethodBase.create_weights(self, layer, **options)
        layer.load_weights = partial(_load_weights, layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantizes a layer; vLLM calls it when the layer is loaded, and again after the first load of all."""
        layer.quant_config.require_matches()
        if not getattr(layer, "_already_called_process_weights_after_loading", False):
            super().process_weights_after_loading(layer)
            layer._already_called_process_weights_after_loading = True

    def _global_scales(self, layer: Any) -> dict[str, Tensor]:
        """Put codes and block scales into the places of a checkpoint's; return the global scales, (E,)."""
        scales, ranks = {}, self.moe.tp_size
        largest = partial(amax_for_moe_weight_quant, moe_tp_size=ranks) if ranks > 1 else None
        for name in ("w13", "w2"):
            packed = quantize_part(getattr(layer, f"{name}_weight").data, largest)
            replace_parameter(layer, f"{name}_weight", packed.qdata)
            replace_parameter(layer, f"{name}_weight_scale", packed.scale)
            scales[name] = packed.global_scale
        return scales


def _of_all_experts(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's loader of an expert's weight, which also loads a projection of all experts of this rank: a tensor
    of the parameter's shape, or a list of each expert's tensor."""

    @wraps(loader)
    def load(param: Tensor, loaded_weight: Any, weight_name: str, shard_id: str, *args: Any, **options: Any) -> Any:
        experts = param.data
        if isinstance(loaded_weight, list):
            rows = loaded_weight[0].shape[0]
            experts = experts[:, -rows:] if shard_id == "w3" else experts[:, :rows]
            if experts.is_meta:
                experts.copy_(experts)  # vLLM counts the values that copy_ writes
            else:
                for expert, tensor in zip(experts, loaded_weight, strict=True):
                    expert.copy_(tensor.detach())
        elif loaded_weight.shape == experts.shape:
            experts.copy_(loaded_weight)
        else:
            return loader(param, loaded_weight, weight_name, shard_id, *args, **options)
        return True

    return load


def _load_weights(layer: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Load what `RoutedExperts.load_weights` loads, and return the same names.

    A projection is loaded by one call if the whole weights of this rank's experts come together, without padding: as
    one tensor (E, N, K), or as one tensor per expert. vLLM loads the rest.

    Raises:
        ValueError: an expert's tensor comes twice.
    """
    loaded: list[str] = []
    rest = _load_projections(layer, weights, loaded)
    for first in rest:  # vLLM's call indexes the names of all experts
        yield from type(layer).load_weights(layer, chain((first,), rest))
    yield from loaded


def _load_projections(
    layer: Any, weights: Iterable[tuple[str, Tensor]], loaded: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Load projections that have come whole, add their parameters' names to `loaded`, and return the other tensors."""
    destinations: dict[str, tuple[str, int, str]] = {}
    for target, source, expert, shard in layer.get_expert_mapping(include_fused=True):
        suffix = "weight" if target.endswith("_") else ""  # of a tensor of one expert
        name = f"{source}{suffix}".partition(".")[2]
        destinations[name] = f"{target}{suffix}".partition(".")[2], expert, shard
    waiting: dict[tuple[str, str], dict[int, tuple[str, Tensor]]] = {}
    complete = set()
    for name, tensor in weights:
        target, expert, shard = destinations.get(name, ("", 0, ""))
        parameter = getattr(layer, target, None) if target else None
        if parameter is None:
            yield name, tensor
            continue
        count, rows, columns = parameter.shape
        halves = 2 if target == "w13_weight" and layer.moe_config.is_act_and_mul else 1
        if tensor.shape == parameter.shape and not layer.is_fused_checkpoint_transposed:
            parameter.weight_loader(parameter, tensor, target, shard, expert_id=0)
            loaded.append(target)
        elif tensor.shape != (rows // halves, columns):
            yield name, tensor
        elif (index := layer._map_global_expert_id_to_local_expert_id(expert)) >= 0:
            experts = waiting.setdefault((target, shard), {})
            if index in experts or (target, shard) in complete:
                raise ValueError(f"{name} of {layer.layer_name!r}: got two tensors, wanted one")
            experts[index] = name, tensor
            if len(experts) == count:
                tensors = [experts[index][1] for index in range(count)]
                parameter.weight_loader(parameter, tensors, target, shard, expert_id=0)
                loaded.append(target)
                complete.add((target, shard))
                experts.clear()
    for experts in waiting.values():
        yield from experts.values()


def quantize_part(weight: Tensor, largest: Callable[[Tensor], Tensor] | None = None) -> NVFP4Weight:
    """Quantize (E, N, K) with the global scale of each whole weight, also if this rank has only a part of it.

    Args:
        weight: (E, N, K), 16-bit or float32.
        largest: takes the largest magnitudes (E,) of this rank and returns the largest of all ranks; None for one rank.
    """
    if largest is None:
        return quantize(weight)
    amax = largest(expert_amax(weight)).to(weight.dtype)  # exact
    rows = amax[:, None, None].expand(-1, 1, weight.shape[2])  # another row for the largest value of all ranks
    packed = quantize(torch.cat((weight, rows), 1))
    return NVFP4Weight(packed.qdata[:, :-1].contiguous(), packed.scale[:, :-1].contiguous(), packed.global_scale)

"""`load_by_checkpoint_names`: a state dict by the names of a checkpoint, or of a shard, into a 4-bit model.
Called by saving, for a `Trainer` that resumes; calls checkpoint_names, and thunder_moe.checkpoint to decode.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from thunder_moe.checkpoint.decode import decode_dense, decode_experts
from thunder_moe.checkpoint.experts import ExpertsLayout, ExpertWeights
from thunder_moe.checkpoint.files import TensorInfo
from thunder_moe.checkpoint.formats.modelopt import MODELOPT
from thunder_moe.checkpoint.modules import sort_modules
from thunder_moe.finetune.lora import stored_adapters
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.mxfp8 import MAX_SCALE
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.integrations.huggingface.checkpoint_names import ModelNames, expert_sources, linear_source
from thunder_moe.integrations.huggingface.experts import NVFP4Experts
from thunder_moe.integrations.huggingface.sharding import refuse_part
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack
from thunder_moe.nn.packed import PackedModule

_DTYPES = {
    torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.float64: "F64",
}  # fmt: skip


def load_by_checkpoint_names(
    model: Any, state_dict: Mapping[str, Any], prepared: Mapping[str, str]
) -> Mapping[str, Any]:
    """Set the weights of 4-bit modules that a state dict has by their names in checkpoints of the model.

    Args:
        model: a transformers model with 4-bit modules.
        state_dict: by the model's own names (returned unchanged), or by the names of its checkpoints, all of them or
            some (a shard). The given part of a 4-bit weight replaces that part of it.
        prepared: plain name -> own name of parameters that `prepare_qat_` has prepared.

    Returns:
        A state dict by the model's own names; unknown names stay. Another dtype or shape is a ValueError.
    """
    everything = {"remove_duplicate": False}
    own = dict(chain(model.named_parameters(**everything), model.named_buffers(**everything)))
    own |= stored_adapters(model)  # with the records, which are neither
    if all(name in own or name.endswith(".lora_merged") for name in state_dict):
        return state_dict
    left = {name: tensor for name, tensor in state_dict.items() if name not in own}
    new: dict[str, Any] = {}
    sources = expert_sources(model)
    refuse_part(model, "whose layers are whole, as a checkpoint has them")
    for name, module in model.named_modules():
        if isinstance(module, NVFP4Experts):
            new |= _experts(name, module, *sources[name], left)
        elif isinstance(module, NVFP4LinearStack):
            new |= _stack(model, name, module, left)
        elif isinstance(module, NVFP4Linear):
            given = _dense(linear_source(model, name), module.packed_weight, module.bias, left)
            new |= {} if given is None else _set(name, module, *given)
    others = _others(model, left, own | {name: own[key] for name, key in prepared.items()})
    new |= {prepared.get(name, name): tensor for name, tensor in others.items()}
    new |= {name: tensor for name, tensor in state_dict.items() if name in own}
    for name, source in model.all_tied_weights_keys.items():
        if name in own and name not in new and source in new:
            new[name] = new[source]
    return new


def _experts(
    name: str, module: NVFP4Experts, source: str, layout: ExpertsLayout, left: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the state dict of a block of experts with the tensors that `left` has of it; empty if it has none."""
    biases = (None if bias is None else bias.detach() for bias in (module.gate_up_bias, module.down_bias))
    gate_up, down = (lay_out(each.packed_weight, LINEAR) for each in (module.gate_up_proj, module.down_proj))
    weights = ExpertWeights(gate_up, down, *biases)
    tensors = _InMemory.overlaid(dict(MODELOPT.encode(source, weights, layout, warns=False)), left)
    if tensors is None:
        return {}
    weights = decode_experts(tensors, sort_modules(tensors).experts[source], layout.interleaved)  # type: ignore[arg-type]
    new = _set(f"{name}.gate_up_proj", module.gate_up_proj, weights.gate_up)
    new |= _set(f"{name}.down_proj", module.down_proj, weights.down)
    for key, bias in (("gate_up_bias", weights.gate_up_bias), ("down_bias", weights.down_bias)):
        if bias is not None:
            new[f"{name}.{key}"] = bias
    return new


def _stack(model: Any, name: str, stack: NVFP4LinearStack, left: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of stacked linears with the tensors that `left` has of them; empty if it has none."""
    parent, _, _ = name.rpartition(".")
    parts = [
        (f"{parent}.{key}" if parent else key, part)
        for key, part in model.get_submodule(parent)._modules.items()
        if isinstance(part, NVFP4LinearPart) and part.stack is stack
    ]
    parts.sort(key=lambda item: item[1].index)
    found = [_dense(linear_source(model, path), part.packed_weight, part.bias, left) for path, part in parts]
    if all(given is None for given in found):
        return {}
    weights, biases = [], []
    for given, (_, part) in zip(found, parts, strict=True):
        weight, bias = given or (part.packed_weight, part.bias)
        weights.append(weight.to("cpu").to_layout("linear"))
        biases.append(None if bias is None else bias.detach().cpu())
    joined = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
    return _set(name, stack, PackedWeight.concatenate(*weights).share_global_scale(), joined)


def _dense(
    source: str, weight: PackedWeight, bias: Tensor | None, left: dict[str, Tensor]
) -> tuple[PackedWeight, Tensor | None] | None:
    """Return the weight (1, N, K) and bias of a dense layer with the tensors of `left`; None if `left` has none."""
    encoded = dict(MODELOPT.encode_dense(source, lay_out(weight, LINEAR)))
    if bias is not None:
        encoded[f"{source}.bias"] = bias.detach()
    if (tensors := _InMemory.overlaid(encoded, left)) is None:
        return None
    module = sort_modules(tensors).dense[source]  # type: ignore[arg-type]
    return decode_dense(tensors, module), tensors.tensors.get(f"{source}.bias")  # type: ignore[arg-type]


def _set(name: str, module: PackedModule, weight: PackedWeight, bias: Tensor | None = None) -> dict[str, Any]:
    """Give a module its weight, whose global scale may have another shape than before; return its state dict."""
    weight = weight.to(module.qdata.device)
    module.set_weight(lay_out(weight, "auto" if module.auto_layout else module.layout))
    state: dict[str, Any] = module.state_dict(prefix=f"{name}.")
    return state | ({} if bias is None else {f"{name}.bias": bias})


def _others(model: Any, left: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are not 4-bit, renamed and merged by transformers' conversions. Where a merged tensor is
    given in part (16-bit experts of a shard), the rest is the model's own."""
    names = ModelNames(model, dict.fromkeys(own))
    converters = {pattern: converter for converter in names.converters for pattern in converter.source_patterns}
    new: dict[str, Tensor] = {}
    merged: dict[str, dict[str, Tensor]] = {}
    for key, tensor in left.items():
        name, pattern = names.parameter(key)
        if pattern is None or name not in own:
            new[name if name in own else key] = tensor
        else:
            merged.setdefault(name, {})[key] = tensor
    for name, given in merged.items():
        converter: Any = copy.deepcopy(converters[str(names.parameter(next(iter(given)))[1])])
        if any("*" in pattern for pattern in converter.source_patterns):
            given = revert_weight_conversion(model, {name: own[name].detach()}) | given
        for key in sorted(given, key=dot_natural_key):  # by the numbers of experts
            converter.add_tensor(name, key, names.parameter(key)[1], given[key])
        for target, tensors in converter.convert(name, model=model, config=model.config).items():
            new[target] = tensors[0] if isinstance(tensors, list) else tensors
    return new


def _valid(name: str, tensor: Tensor) -> Tensor:
    """Make a tensor of the model valid to decode: it may hold anything while it waits for another shard."""
    if tensor.dtype == torch.float8_e4m3fn:
        values = tensor.float().nan_to_num()
        return (values.abs() if name.endswith("_scale") else values).to(tensor.dtype)
    if name.endswith("_scale") and tensor.dtype == torch.uint8:
        return tensor.clamp_max(MAX_SCALE)
    if name.endswith("_scale_2") and not bool((tensor.isfinite() & (tensor > 0)).all()):
        return torch.ones_like(tensor)
    return tensor


@dataclass
class _InMemory:
    """Tensors for a decoder, which reads `TensorFiles` otherwise."""

    tensors: dict[str, Tensor]
    infos: dict[str, TensorInfo] = field(init=False)

    def __post_init__(self) -> None:
        where = Path("state_dict")
        self.infos = {
            name: TensorInfo(name, where, _DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape))
            for name, t in self.tensors.items()
        }

    @classmethod
    def overlaid(cls, own: dict[str, Tensor], left: dict[str, Tensor]) -> _InMemory | None:
        """Replace a module's own tensors by given ones, which `left` loses; return None if it has none."""
        given = {name: left.pop(name) for name in own if name in left}
        if not given:
            return None
        return cls(
            {name: (given[name] if name in given else _valid(name, tensor)).cpu() for name, tensor in own.items()}
        )

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        return self.tensors[name] if index is None else self.tensors[name][index]

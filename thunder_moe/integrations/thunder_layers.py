"""`from_thunder`: the layers of Lightning Thunder's inference benchmark as this package's modules.
Called by users; calls nn, and formats.nvf_cutlass for 4-bit weights. It knows Thunder's classes by name, and does not
import Thunder.

Legend: E experts, N out_features, K in_features, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.formats.nvf_cutlass import from_nvf_cutlass
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn import (
    GroupedLinear,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    NVFP4GroupedLinear,
    NVFP4GroupedSwiGLU,
    NVFP4Linear,
    SwiGLU,
)
from thunder_moe.quantization.replaceable import has_own_forward, instance_customization

_HOME = "layers_for_inference_benchmark"  # a module of Thunder's, which nvFuser's benchmarks have a copy of


def from_thunder(module: nn.Module) -> nn.Module:
    """Convert a layer of Lightning Thunder's inference benchmark, exactly.

    The classes are defined in ``thunder.benchmarks.layers_for_inference_benchmark`` of release 0.2.6 and later, and in
    the copy in nvFuser's benchmarks:

    - ``GroupedLinear``, ``GroupedSwiGLU``, ``SwiGLU`` and ``Llama4MoE`` become the classes of the same name here, which
      hold the same parameters, not copies;
    - ``NVFP4InferenceGroupedLinear``, ``NVFP4InferenceGroupedSwiGLU`` and ``NVFP4InferenceLinear`` become
      `NVFP4GroupedLinear`, `NVFP4GroupedSwiGLU` and `NVFP4Linear`, alone or inside of the others.

    Codes and block scales keep their values. Thunder's quantizer multiplies by its global scale and its operators
    divide by it, so it is read as an encode scale, also in ``NVFP4InferenceGroupedLinear``, where it is the largest
    magnitude of an expert. Our multiplier is its float32 reciprocal.

    Offsets are row ends here. The result has no router logits. The sigmoid of the router is taken in float32.

    Thunder's quantizer of experts makes zeros of weights below ``2**-8 / amax``, because it clamps block scales at
    2**-6. To keep them, convert the 16-bit layer, then call `quantize_`.

    Args:
        module: an instance of one of these classes, on any device.

    Raises:
        TypeError: module, or a part of it, is of another class.
        ValueError: it has hooks, a replaced forward or sharded tensors; Thunder has cut block scales off, because
            out_features is not a multiple of 128 or in_features of 64; a global scale is 0, as of an expert of zeros;
            sizes that do not match.
    """
    converted: nn.Module = _convert(module, "module", *(kind for kind in _CONVERTERS if kind != "Linear"))
    return converted.train(module.training)


def _convert(module: Any, path: str, *kinds: str) -> Any:
    """Return a layer of Thunder's as ours; `kinds` are the names of the classes that it may have."""
    cls = type(module)
    if cls.__name__ not in kinds or (cls is not nn.Linear and cls.__module__.rpartition(".")[2] != _HOME):
        got = f"{cls.__module__}.{cls.__qualname__}"
        raise TypeError(f"{path}: got {got}, wanted Thunder's {' or '.join(kinds)}; convert layers one by one")
    reason = instance_customization(module) or (None if has_own_forward(module) else "its forward was replaced")
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if type(tensor) not in (nn.Parameter, Tensor):
            reason = reason or f"it holds a {type(tensor).__name__}, not a plain tensor"
    if reason is not None:
        raise ValueError(f"{path}: {reason}; wanted a layer as its class makes it, whose replacement loses nothing")
    return _CONVERTERS[cls.__name__](module, path)


def _linear(module: Any, path: str) -> nn.Linear:
    linear = nn.Linear(module.in_features, module.out_features, device="meta")
    linear.weight, linear.bias = module.weight, module.bias
    return linear


def _packed_linear(module: Any, path: str) -> NVFP4Linear:
    tensors = module.fp4_weight.mT, module.weight_scaling_factor, module.weight_global_scale
    weight = from_nvf_cutlass(*(tensor[None] for tensor in tensors))
    return NVFP4Linear(lay_out(weight, "auto"), module.bias, auto_layout=True)


def _grouped_linear(module: Any, path: str) -> GroupedLinear:
    experts, n, k = module.weight.shape
    linear = GroupedLinear(experts, k, n, device="meta")
    linear.weight = module.weight
    return linear


def _packed_grouped_linear(module: Any, path: str, *stacked: Any) -> NVFP4GroupedLinear:
    """Return one 4-bit linear of a module's rows, and of further ones'."""
    weights = []
    for each in (module, *stacked):
        # Release 0.2.6 has (E, N, K // 2) and strides, later ones have (E, K // 2, N).
        codes = each.fp4_weight.mT if hasattr(each, "ab_strides") else each.fp4_weight
        weights.append(from_nvf_cutlass(codes, each.weight_scaling_factor, each.weight_global_scale))
    return NVFP4GroupedLinear(
        lay_out(PackedWeight.concatenate(*weights), "auto"),
        weight_dtype=[torch.bfloat16] * len(weights),
        weight_requires_grad=[False] * len(weights),
        auto_layout=True,
    )


def _grouped_swiglu(module: Any, path: str) -> nn.Module:
    packed = type(module.down_proj).__name__ == _PACKED
    gate, up, down = _projections(module, path, _PACKED if packed else "GroupedLinear")
    if packed:
        return NVFP4GroupedSwiGLU(_packed_grouped_linear(module.gate_proj, path, module.up_proj), down)
    block = GroupedSwiGLU(down.num_experts, down.out_features, down.in_features, device="meta")
    block.gate_proj, block.up_proj, block.down_proj = gate, up, down
    return block


def _swiglu(module: Any, path: str) -> SwiGLU:
    gate, up, down = _projections(module, path, "Linear", "NVFP4InferenceLinear")
    block = SwiGLU(down.out_features, down.in_features, device="meta")
    block.gate_proj, block.up_proj, block.down_proj = gate, up, down
    return block


def _projections(module: Any, path: str, *kinds: str) -> list[Any]:
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (_convert(getattr(module, name), f"{path}.{name}", *kinds) for name in names)
    sizes = [(each.out_features, each.in_features) for each in (gate, up, down)]
    if not sizes[0] == sizes[1] == sizes[2][::-1]:
        raise ValueError(f"{path}: got (out_features, in_features) {sizes} of {', '.join(names)}, which do not match")
    return [gate, up, down]


def _llama4_moe(module: Any, path: str) -> Llama4MoE:
    router = _convert(module.gate, f"{path}.gate", "Linear", "NVFP4InferenceLinear")
    routed = _convert(module.routed_experts, f"{path}.routed_experts", "GroupedSwiGLU", "NVFP4InferenceGroupedSwiGLU")
    shared = _convert(module.shared_experts, f"{path}.shared_experts", "SwiGLU")
    experts, intermediate = routed.down_proj.num_experts, routed.down_proj.in_features
    number, rest = divmod(shared.down_proj.in_features, intermediate)
    hidden = {router.in_features, routed.down_proj.out_features, shared.down_proj.out_features}
    if rest or len(hidden) > 1 or router.out_features != experts:
        raise ValueError(f"{path}: got gate, routed_experts and shared_experts of sizes that do not match: {module}")
    config = Llama4MoEConfig(router.in_features, intermediate, experts, num_shared_experts=number)
    moe = Llama4MoE(config, device="meta")
    moe.router, moe.routed_experts, moe.shared_expert = router, routed, shared
    return moe


_PACKED = "NVFP4InferenceGroupedLinear"
_CONVERTERS = {
    "Linear": _linear,
    "GroupedLinear": _grouped_linear,
    "GroupedSwiGLU": _grouped_swiglu,
    "Llama4MoE": _llama4_moe,
    _PACKED: _packed_grouped_linear,
    "NVFP4InferenceGroupedSwiGLU": _grouped_swiglu,
    "NVFP4InferenceLinear": _packed_linear,
    "SwiGLU": _swiglu,
}

"""Checks that vLLM has loaded the parameters of a layer for our kernels, and refuses reloads that would be wrong.
Called by methods and linears; calls vLLM's parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.utils import replace_parameter

from thunder_moe.formats.mxfp8 import E8M0_NAN, MAX_SCALE

# Marks the beginning of unloaded rows of 4-bit codes, which have no NaN. Loaded rows have it with probability 2**-64.
_NO_CODES = 0x5A3C96E1D70B482F
_CHECKED = 2**26  # values that are checked together; each takes a byte of memory or two
_NO_CHECKPOINTS = ("sharded_state", "runai_streamer_sharded")


def mark_unloaded(layer: Any, *names: str) -> None:
    """Fills parameters with NaN, and 4-bit codes with a pattern, so that `require_loaded` finds missing ones.

    vLLM makes them of uninitialized memory, and does not check that a checkpoint has all of a quantized model's."""
    for name in names:
        data = getattr(layer, name).data
        if data.dtype == torch.float8_e4m3fn:
            data.view(torch.uint8).fill_(0x7F)
        elif data.dtype == torch.uint8 and _is_scale(name):
            data.fill_(E8M0_NAN)
        elif data.dtype == torch.uint8:
            data.view(torch.int64).fill_(_NO_CODES)
        else:
            data.fill_(torch.nan)


def require_loaded(layer: Any, layer_name: str, what: str, *names: str) -> None:
    """Raises a ValueError if parameters have NaN or invalid scales, or are missing in the checkpoint.

    Weights of --load-format dummy are not checked. Weights of sharded_state are refused: vLLM saves them in the layout
    of the kernels, and processes them a second time after loading.

    `layer_name` and `what`, a word for dim 0 of the parameters, are for the message.
    """
    require_whole_layer(layer, layer_name)
    if get_layerwise_info(layer).kernel_tensors is None:
        format = _load_format()
        if format in _NO_CHECKPOINTS:
            raise ValueError(
                f"--load-format {format}: got weights of {layer_name!r} in the layout of the kernels, wanted a"
                " checkpoint: start vLLM with the one that they were made of"
            )
        if format == "dummy":
            return
    for name in names:
        data = getattr(layer, name).data
        step = max(1, _CHECKED * len(data) // data.numel())
        wrong = torch.cat([_is_invalid(name, part).view(len(part), -1).any(1) for part in data.split(step)])
        if bool(wrong.any()):
            which = wrong.nonzero().flatten().tolist()
            listed = f"{which[:8]} and {len(which) - 8} more" if len(which) > 8 else str(which)
            raise ValueError(
                f"{name}: {_invalid_values(name, data)}missing in the checkpoint for {what} {listed} (of this rank) of"
                f" {layer_name!r}"
            )


def _load_format() -> str:
    config = get_current_vllm_config_or_none()
    return "" if config is None else str(config.load_config.load_format)


def _is_scale(name: str) -> bool:
    return name.endswith(("scale", "scale_2"))


def _invalid_values(name: str, data: Tensor) -> str:
    """Return the kinds of invalid values of a parameter, as the beginning of a list."""
    if _is_scale(name) and data.dtype != torch.uint8:
        return "NaN, negative or " if data.dtype == torch.float8_e4m3fn else "NaN, infinite, zero, negative or "
    return "" if data.dtype == torch.uint8 and not _is_scale(name) else "NaN or "


def _is_invalid(name: str, data: Tensor) -> Tensor:
    if data.dtype == torch.uint8:
        return data == E8M0_NAN if _is_scale(name) else data.view(torch.int64)[..., :1] == _NO_CODES
    if data.dtype == torch.float8_e4m3fn:
        bits = data.view(torch.uint8)
        return bits >= 0x7F if _is_scale(name) else (bits & 0x7F) == 0x7F
    if _is_scale(name):
        return ~(data.isfinite() & data.reciprocal().isfinite() & (data > 0))
    return torch.isnan(data)


def require_decoded_scales(layer: Any, layer_name: str, *names: str) -> None:
    """Raises a ValueError for E8M0 scales that the CUDA kernels, which decode weights times 2**-32, read as NaN."""
    for name in names:
        largest = int(getattr(layer, name).data.view(torch.uint8).max())
        if largest > MAX_SCALE:
            raise ValueError(
                f"{name} of {layer_name!r}: got a scale of 2**{largest - 127}, the CUDA kernels of thunder_moe"
                f" take those up to 2**{MAX_SCALE - 127}; THUNDER_MOE_VLLM=0 has vLLM's own run them"
            )


def require_whole_layer(layer: Any, layer_name: str) -> None:
    """Raises a ValueError if a reload, or the first load of a layer that is quantized then, has brought a part of it.

    vLLM loads into uninitialized memory."""
    info = get_layerwise_info(layer)
    if not info.can_load():  # a first load into marked memory, which `require_loaded` checks
        return
    if info.kernel_tensors is None and _load_format() == "dummy":
        return
    loaded = {name for name, _ in info.loaded_weights}
    head = getattr(layer, "shard_indices", None)  # vLLM pads the rows of a head
    padding = 0 if head is None else layer.num_embeddings_per_partition - head.num_org_elements
    # vLLM loads some tensors in place: biases of linears and of the router. Many checkpoints lack the scales of 4-bit
    # activations.
    wanted = sum(
        parameter.numel() - padding * (parameter.shape[1] if parameter.ndim > 1 else 0)
        for name, parameter in layer._parameters.items()
        if parameter is not None
        and (name in loaded or not (name in SKIP_TENSORS or name.startswith("input") or "_input_" in name))
    )
    if info.load_numel < wanted:
        raise ValueError(
            f"{layer_name!r}: got {info.load_numel} of {wanted} elements to load, wanted all tensors of a layer"
        )


_NO_RELOAD = {
    "--enable-lora": "loads no experts then, and would go on with the old ones, or with what sleep of level 2 has left",
    "--enable-eplb": "loads experts where they were first, and would route to where EPLB has moved them",
}


class _RefusedReload(LayerReloadingInfo):  # type: ignore[misc]
    """vLLM's record of a layer, which vLLM asks when a reload begins, and which refuses it."""

    option = ""

    def can_load(self) -> bool:
        raise ValueError(
            f"reload_weights with {self.option}: vLLM 0.32 {_NO_RELOAD[self.option]}; start vLLM with the weights, or"
            f" without {self.option}"
        )


def refuse_reload(layer: Any, option: str) -> None:
    """Makes a reload of this layer's experts with `option`, a key of `_NO_RELOAD`, an error.

    vLLM would compute with wrong weights. With adapters it looks for `base_layer.` in the names of a checkpoint's
    tensors, and does not process the loaded ones. With EPLB nothing tells which experts have moved.
    """
    info = get_layerwise_info(layer)
    LAYERWISE_INFO[layer] = _RefusedReload(info.restore_metadata, info.restore_device)
    LAYERWISE_INFO[layer].option = option


def replace(layer: Any, layer_name: str, name: str, tensor: Tensor) -> None:
    """Replaces a loaded parameter by a tensor in the layout of our kernels, or adds a parameter.

    vLLM's reload_weights loads into parameters of the original form, has them processed again and copies the result
    into the replaced ones. Loading into these directly is an error: they have another layout, or another shape.
    """
    if tensor is not getattr(getattr(layer, name, None), "data", None):
        replace_parameter(layer, name, tensor)

    def weight_loader(*args: Any, **options: Any) -> bool:
        # vLLM has a layer processed when this rank's experts are loaded, and still offers other ranks' experts.
        expert = options.get("expert_id")
        if expert is not None and layer.expert_map is not None and int(layer.expert_map[expert]) < 0:
            return False
        raise RuntimeError(
            f"{name} of {layer_name!r} is in the layout of the kernels by now: load weights with vLLM's reload_weights,"
            " not with load_weights"
        )

    getattr(layer, name).weight_loader = weight_loader

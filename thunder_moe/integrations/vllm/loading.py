"""Parameters of vLLM's layers between its loaders and our kernels: were they loaded, and may they be loaded again.
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

__all__ = ["mark_unloaded", "refuse_reload", "replace", "require_decoded_scales", "require_loaded"]


# What rows of 4-bit codes, which have no NaN, begin with while nothing is loaded; others by a chance of 2**-64.
_NO_CODES = 0x5A3C96E1D70B482F
_NO_CHECKPOINTS = ("sharded_state", "runai_streamer_sharded")


def mark_unloaded(layer: Any, *names: str) -> None:
    """Fills parameters with NaN, and 4-bit codes with a pattern: vLLM makes them of uninitialized memory and does not
    check for quantized models whether a checkpoint has them all."""
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
    """Raises a ValueError where parameters hold NaN or what no scale can be, or are not in the checkpoint.

    Weights of --load-format dummy are taken as they are, and those of sharded_state are refused: vLLM saves what is in
    memory, in the layout of the kernels, and has it processed once more after loading.

    Args:
        layer: vLLM's layer.
        layer_name: for the message.
        what: its dim 0, for the message.
        names: of parameters.
    """
    require_whole_reload(layer, layer_name)
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
        # Experts one at a time, for which memory is enough.
        wrong = torch.stack([_is_wrong(name, each).any() for each in data]) if data.ndim > 2 else _is_wrong(name, data)
        if wrong.ndim > 1:
            wrong = wrong.any(1)
        if bool(wrong.any()):
            which = wrong.nonzero().flatten().tolist()
            listed = f"{which[:8]} and {len(which) - 8} more" if len(which) > 8 else str(which)
            raise ValueError(
                f"{name}: {_how(name, data)}missing in the checkpoint for {what} {listed} (of this rank) of"
                f" {layer_name!r}"
            )


def _load_format() -> str:
    config = get_current_vllm_config_or_none()
    return "" if config is None else str(config.load_config.load_format)


def _is_scale(name: str) -> bool:
    return name.endswith(("scale", "scale_2"))


def _how(name: str, data: Tensor) -> str:
    """What values of a parameter may be, to be wrong; the beginning of a list."""
    if _is_scale(name) and data.dtype != torch.uint8:
        return "NaN, negative or " if data.dtype == torch.float8_e4m3fn else "NaN, infinite, zero, negative or "
    return "" if data.dtype == torch.uint8 and not _is_scale(name) else "NaN or "


def _is_wrong(name: str, data: Tensor) -> Tensor:
    if data.dtype == torch.uint8:
        return data == E8M0_NAN if _is_scale(name) else data.view(torch.int64)[..., :1] == _NO_CODES
    if data.dtype == torch.float8_e4m3fn:
        bits = data.view(torch.uint8)
        return bits >= 0x7F if _is_scale(name) else (bits & 0x7F) == 0x7F
    if _is_scale(name):
        return ~(data.isfinite() & data.reciprocal().isfinite() & (data > 0))
    return torch.isnan(data)


def require_decoded_scales(layer: Any, layer_name: str, *names: str) -> None:
    """Raises a ValueError for E8M0 scales that the CUDA kernels read as NaN: they decode weights times 2**-32."""
    for name in names:
        largest = int(getattr(layer, name).data.view(torch.uint8).max())
        if largest > MAX_SCALE:
            raise ValueError(
                f"{name} of {layer_name!r}: got a scale of 2**{largest - 127}, the CUDA kernels of thunder_moe"
                f" take those up to 2**{MAX_SCALE - 127}; THUNDER_MOE_VLLM=0 has vLLM's own run them"
            )


def require_whole_reload(layer: Any, layer_name: str) -> None:
    """Raises a ValueError where a reload has brought a part of a layer: vLLM loads into uninitialized memory."""
    info = get_layerwise_info(layer)
    if info.kernel_tensors is None:  # the first load, of which `require_loaded` knows
        return
    came = {name for name, _ in info.loaded_weights}
    # vLLM loads some tensors into the memory that they have: biases of linears, of the router. Many checkpoints have no
    # scales of 4-bit activations.
    wanted = sum(
        parameter.numel()
        for name, parameter in layer._parameters.items()
        if parameter is not None
        and (name in came or not (name in SKIP_TENSORS or name.startswith("input") or "_input_" in name))
    )
    if info.load_numel < wanted:
        raise ValueError(
            f"{layer_name!r}: got {info.load_numel} of {wanted} elements to load again, wanted all tensors of a layer"
        )


NO_RELOAD = {
    "--enable-lora": "loads no experts then, and would go on with the old ones, or with what sleep of level 2 has left",
    "--enable-eplb": "loads experts where they were first, and would route to where EPLB has moved them",
}


class _NotReloaded(LayerReloadingInfo):  # type: ignore[misc]
    """What vLLM knows of a layer, so that it asks here when a reload begins."""

    option = ""

    def can_load(self) -> bool:
        raise ValueError(
            f"reload_weights with {self.option}: vLLM 0.32 {NO_RELOAD[self.option]}; start vLLM with the weights, or"
            f" without {self.option}"
        )


def refuse_reload(layer: Any, option: str) -> None:
    """Makes a reload of this layer's experts an error: vLLM would compute with wrong weights.

    With adapters it looks for `base_layer.` in the names of a checkpoint's tensors, and does not process what has been
    loaded. With EPLB it loads experts where they were first, and nothing here tells which of them are on their way.

    Args:
        layer: vLLM's layer.
        option: of vLLM, a key of `NO_RELOAD`.
    """
    info = get_layerwise_info(layer)
    refusing = _NotReloaded(restore_metadata=info.restore_metadata, restore_device=info.restore_device)
    refusing.option = option
    LAYERWISE_INFO[layer] = refusing


def replace(layer: Any, layer_name: str, name: str, tensor: Tensor) -> None:
    """Puts a tensor in the form of our kernels where a loaded parameter was, or in a new one.

    vLLM's reload_weights loads into parameters as they were made, has them processed again and copies the result into
    these. Loading into these is an error: they have another layout, or another shape.
    """
    if tensor is not getattr(getattr(layer, name, None), "data", None):
        replace_parameter(layer, name, tensor)

    def weight_loader(*args: Any, **options: Any) -> None:
        raise RuntimeError(
            f"{name} of {layer_name!r} is in the layout of the kernels by now: load weights with vLLM's reload_weights,"
            " not with load_weights"
        )

    getattr(layer, name).weight_loader = weight_loader

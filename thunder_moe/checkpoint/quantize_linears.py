"""Groups and quantizes the 16-bit or FP8 dense layers of a checkpoint; in NVFP4 a group shares one global scale.
Called by convert; calls dense_names to recognize layers, float_weights to read, quantize_experts for the error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder_moe.checkpoint.float_weights import FloatWeights
from thunder_moe.checkpoint.modules import Module
from thunder_moe.checkpoint.quantize_experts import Noise, quantize_tensor
from thunder_moe.dense_names import READ_TOGETHER, is_encoder, is_linear
from thunder_moe.formats.registry import FORMATS, NumberFormat
from thunder_moe.formats.weight import PackedWeight

__all__ = ["linear_groups", "quantize_linears"]


def linear_groups(
    modules: dict[str, Module], linears: bool | Callable[[str], bool], format_of: Callable[[str], str | None]
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the modules to quantize, in groups that read the same rows: first path -> number format, all paths.

    Args:
        modules: path -> matrix; neither experts nor routers.
        linears: True: the decoder's layers of attention, dense MLPs and shared experts, by their names, whose
            in_features are whole blocks of their format. Or a function of a path that returns True for those to take.
        format_of: a path -> the name of a format, or None for a module that stays 16-bit.
    """
    paths: dict[str, tuple[str, int]] = {}
    for path, module in modules.items():
        info = module.fields["weight"]
        known = is_linear(path) and not is_encoder(path) and 0 not in info.shape
        if not (linears(path) if callable(linears) else known):
            continue
        format = format_of(path)
        if format is not None and (callable(linears) or info.shape[1] % FORMATS[format].block_size == 0):
            paths[path] = format, info.shape[1]
    groups: dict[str, tuple[str, tuple[str, ...]]] = {}
    grouped: set[str] = set()
    for path, alike in paths.items():
        if path in grouped:
            continue
        parent, dot, own = path.rpartition(".")
        members = [path]
        for together in READ_TOGETHER:
            siblings = [f"{parent}{dot}{sibling}" for sibling in together]
            if own in together:
                members = [sibling for sibling in siblings if paths.get(sibling) == alike]
        groups[members[0]] = alike[0], tuple(members)
        grouped.update(members)
    return groups


def quantize_linears(
    floats: FloatWeights,
    modules: dict[str, Module],
    number_format: NumberFormat,
    device: torch.device | str,
    scale_search: str | None,
) -> list[tuple[str, PackedWeight, float]]:
    """Quantize modules, in NVFP4 with one global scale.

    Returns:
        (path, weight (1, N, K) on the CPU, signal to noise in decibels) of each.

    Raises:
        ValueError: a weight cannot be quantized; names file and tensor.
    """
    infos = [floats.info(module) for module in modules.values()]
    weights = [floats.read(module, device) for module in modules.values()]
    dtype = weights[0].dtype if len({weight.dtype for weight in weights}) == 1 else torch.float32
    packed = quantize_tensor(
        torch.cat([weight.to(dtype) for weight in weights])[None], infos, number_format, scale_search
    )
    results, begin = [], 0
    for path, weight in zip(modules, weights, strict=True):
        part = packed.rows(slice(begin, begin := begin + weight.shape[0]))
        noise = Noise()
        noise.add(weight[None], part)
        results.append((path, part.to("cpu"), noise.decibels()))
    return results

"""Decodes FP8 weights to float32 for conversions, with the scales that a checkpoint's config describes.
Called by registry, compressed_tensors and reader; calls modules and files.

Legend: E experts, N and K dimensions of a weight as the file has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.checkpoint.formats.interface import FLOATS, subdict, wrong_values
from thunder_moe.checkpoint.modules import FP8_SCALE_FIELDS, Module

# compressed-tensors' names of formats with FP8 weights.
COMPRESSED_TENSORS_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class FP8:
    """The scaling of a checkpoint's FP8 weights."""

    # The allowed units of a scale: "tensor", "channel" (a row), or a block of (rows, columns)
    scalings: frozenset[str | tuple[int, int]]
    alone: bool  # True if no weight of the checkpoint is 4-bit, by its config

    def infos(self, module: Module) -> tuple[TensorInfo, TensorInfo]:
        """Return the weight and its scale, after a check of their dtypes and shapes."""
        field = next((field for field in FP8_SCALE_FIELDS if field in module.fields), "weight_scale")
        weight, scale = module.require("weight", field)
        weight.require(("F8_E4M3",), None)
        scale.require((*FLOATS, "F8_E8M0"), None)
        grids = self._grids(weight)
        if scale.shape not in grids:
            wanted = " or ".join(map(str, grids))
            raise scale.error(f"has shape {scale.shape}, wanted {wanted} for {weight.name!r} of shape {weight.shape}")
        return weight, scale

    def read(self, files: TensorFiles, module: Module, device: torch.device | str) -> torch.Tensor:
        """Return the decoded weight, float32, in the shape that the file has.

        NaN, or a scale that is not finite and positive, is a ValueError.
        """
        weight_info, scale_info = self.infos(module)
        weight, scale = files.read(weight_info.name), files.read(scale_info.name).float()
        for info, tensor in ((weight_info, weight), (scale_info, scale)):
            if (wrong := wrong_values(tensor, is_scale=info is scale_info)) is not None:
                raise info.error(wrong)
        values, scale = weight.to(device).float(), scale.to(device)
        if scale.ndim != values.ndim:  # a scale for the whole tensor, or for each expert
            scale = scale.reshape(-1, *(1,) * (values.ndim - 1))
        for dim, size in zip((-2, -1), self._grids(weight_info)[scale_info.shape], strict=True):
            if scale.shape[dim] > 1:
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
        return values.mul_(scale)

    def _grids(self, weight: TensorInfo) -> dict[tuple[int, ...], tuple[int, int]]:
        """Return the shapes of a scale that fit a weight, with the rows and columns that each number scales."""
        if len(weight.shape) not in (2, 3):
            raise weight.error(f"has shape {weight.shape}, wanted 2 dimensions, or 3 for all experts")
        *experts, n, k = weight.shape
        grids: dict[tuple[int, ...], tuple[int, int]] = {}
        for scaling in sorted(self.scalings, key=str):
            if scaling == "tensor":
                shapes = [(), (1,), (1,) * len(weight.shape), *([(*experts,), (*experts, 1, 1)] if experts else [])]
                grids |= dict.fromkeys(shapes, (n, k))
            elif scaling == "channel":
                grids |= {(*experts, n, 1): (1, k)}
            elif isinstance(scaling, tuple):
                rows, columns = scaling
                grids |= {(*experts, -(-n // rows), -(-k // columns)): scaling}
        return grids


def find_fp8(quantization: dict[str, Any]) -> FP8 | None:
    """Return the scaling of a checkpoint's FP8 weights; None if its config does not have FP8.

    Knows DeepSeek's "fp8" (a scale per block of 128 x 128, or per tensor), compressed-tensors' FP8 (a scale per tensor,
    row or block), and ModelOpt's (a scale per tensor). FP8 of another kind is a ValueError.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        return FP8(frozenset([_of_deepseek(quantization)]), True)
    if method == "compressed-tensors":
        return _of_compressed_tensors(quantization)
    if method == "modelopt":
        algo = str(quantization.get("quant_algo")).upper()
        return FP8(frozenset(["tensor"]), algo == "FP8") if algo in ("FP8", "MIXED_PRECISION") else None
    return None


def _of_deepseek(quantization: dict[str, Any]) -> str | tuple[int, int]:
    for key, wanted in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if quantization.get(key) not in (None, wanted):
            raise ValueError(f"{key}: got {quantization[key]!r}, wanted {wanted!r}")
    block = quantization.get("weight_block_size")
    return "tensor" if block is None else _block(block, "weight_block_size")


def _of_compressed_tensors(quantization: dict[str, Any]) -> FP8 | None:
    formats = group_formats(quantization)
    scalings: set[str | tuple[int, int]] = set()
    fp8 = [name for name, form in formats.items() if form in COMPRESSED_TENSORS_FORMATS]
    for name in fp8:
        weights = subdict(quantization["config_groups"][name], "weights")
        if (weights.get("num_bits"), weights.get("type"), weights.get("symmetric", True)) != (8, "float", True):
            raise ValueError(f"weights: got {weights} in {name!r}, wanted symmetric ones of 8 bits and type 'float'")
        strategy = weights.get("strategy")
        if strategy == "block":
            scalings.add(_block(weights.get("block_structure"), "block_structure"))
        elif strategy in ("tensor", "channel"):
            scalings.add(strategy)
        else:
            raise ValueError(f"strategy: got {strategy!r} in {name!r}, wanted 'tensor', 'channel' or 'block'")
    return FP8(frozenset(scalings), len(fp8) == len(formats)) if fp8 else None


def group_formats(quantization: dict[str, Any]) -> dict[str, Any]:
    """Return the format of each group of a config of compressed-tensors by its name."""
    groups = subdict(quantization, "config_groups")
    return {name: subdict(groups, name).get("format") or quantization.get("format") for name in groups}


def _block(value: Any, name: str) -> tuple[int, int]:
    if isinstance(value, str):  # "128x128", as older versions of compressed-tensors write it
        value = [int(part) if part.isdigit() else part for part in value.split("x")]
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
        raise ValueError(f"{name}: got {value!r}, wanted two positive numbers")
    return value[0], value[1]

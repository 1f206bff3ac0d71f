"""Reads compressed-tensors' nvfp4-pack-quantized: codes in weight_packed, and a global scale that encodes (it divides).
It also checks configs of mxfp8-quantized, whose tensors `mxfp8` reads.
Called by registry and integrations.huggingface; calls interface.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_moe.checkpoint.formats.fp8 import COMPRESSED_TENSORS_FORMATS, group_formats
from thunder_moe.checkpoint.formats.interface import CheckpointFormat, check_group_size, subdict

FORMAT = "nvfp4-pack-quantized"
MXFP8_FORMAT = "mxfp8-quantized"
_MXFP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


class CompressedTensors(CheckpointFormat):
    """The checkpoints of llm-compressor: NVFP4 and MXFP8, and FP8 layers beside them."""

    method = "compressed-tensors"
    marker = "weight_packed"
    fields = ("weight_packed", "weight_scale", "weight_global_scale")

    def check(self, quantization: dict[str, Any]) -> None:
        groups = subdict(quantization, "config_groups")
        for name, form in group_formats(quantization).items():
            if form not in (FORMAT, MXFP8_FORMAT, *COMPRESSED_TENSORS_FORMATS):
                raise ValueError(f"format: got {form!r} in {name!r}, wanted {FORMAT!r} or {MXFP8_FORMAT!r}")
            weights = subdict(groups[name], "weights")
            if form == FORMAT:
                check_group_size(weights.get("group_size"))
            for key, wanted in _MXFP8_WEIGHTS.items() if form == MXFP8_FORMAT else ():
                if weights.get(key, wanted) != wanted:
                    raise ValueError(f"{key}: got {weights[key]!r} in {name!r}, wanted {wanted!r} in {MXFP8_FORMAT!r}")
        if not groups:
            raise ValueError("config_groups: got none, wanted the groups of a compressed-tensors checkpoint")
        sparsity = subdict(quantization, "sparsity_config").get("format")
        if sparsity not in (None, "dense"):
            raise ValueError(f"sparsity_config: got the format {sparsity!r}, wanted 'dense'")
        transforms = subdict(subdict(quantization, "transform_config"), "config_groups")
        for name in transforms:
            for apply in subdict(transforms, name).get("apply") or []:
                location = apply.get("location") if isinstance(apply, dict) else apply
                if not str(location).startswith("weight_"):
                    words = "wanted none that the model would have to compute"
                    raise ValueError(f"transform_config: got {name!r} at {location!r}, {words}")

    def is_read(self, quantization: dict[str, Any]) -> bool:
        """True if a group of a config is NVFP4 or MXFP8."""
        return not {FORMAT, MXFP8_FORMAT}.isdisjoint(group_formats(quantization).values())

    def has_mxfp8(self, quantization: dict[str, Any]) -> bool:
        return MXFP8_FORMAT in group_formats(quantization).values()

    def decode_scale(self, global_scale: torch.Tensor) -> torch.Tensor:
        return global_scale.reciprocal()


COMPRESSED_TENSORS = CompressedTensors()

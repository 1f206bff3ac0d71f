"""compressed-tensors' nvfp4-pack-quantized: codes in weight_packed, and a global scale that encodes (it divides).
Called by registry and integrations.huggingface; calls interface.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_moe.checkpoint.formats.fp8 import COMPRESSED_TENSORS_FORMATS
from thunder_moe.checkpoint.formats.interface import NVFP4Format, check_group_size, subdict

__all__ = ["CompressedTensors", "is_compressed_tensors_nvfp4"]

FORMAT = "nvfp4-pack-quantized"


class CompressedTensors(NVFP4Format):
    """What llm-compressor writes: NVFP4, and FP8 layers beside it."""

    method = "compressed-tensors"
    marker = "weight_packed"
    fields = ("weight_packed", "weight_scale", "weight_global_scale")

    def check(self, quantization: dict[str, Any]) -> None:
        groups = subdict(quantization, "config_groups")
        for name in groups:
            form = subdict(groups, name).get("format") or quantization.get("format")
            if form not in (FORMAT, *COMPRESSED_TENSORS_FORMATS):
                raise ValueError(f"format: got {form!r} in {name!r}, wanted {FORMAT!r}")
            if form == FORMAT:
                check_group_size(subdict(groups[name], "weights").get("group_size"))
        if not groups:
            raise ValueError("config_groups: got none, wanted those of a compressed-tensors checkpoint")
        sparsity = subdict(quantization, "sparsity_config").get("format")
        if sparsity not in (None, "dense"):
            raise ValueError(f"sparsity_config: got the format {sparsity!r}, wanted 'dense'")
        transforms = subdict(subdict(quantization, "transform_config"), "config_groups")
        for name in transforms:
            for apply in transforms[name].get("apply") or []:
                if not str(apply.get("location")).startswith("weight_"):
                    raise ValueError(
                        f"transform_config: got {name!r} at {apply.get('location')!r}, wanted none that the model would"
                        " have to compute"
                    )

    def decode_scale(self, global_scale: torch.Tensor) -> torch.Tensor:
        return global_scale.reciprocal()


def is_compressed_tensors_nvfp4(quantization: dict[str, Any]) -> bool:
    """Whether a group of a compressed-tensors config is NVFP4."""
    groups = subdict(quantization, "config_groups")
    return any((subdict(groups, name).get("format") or quantization.get("format")) == FORMAT for name in groups)

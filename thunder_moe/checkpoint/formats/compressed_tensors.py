"""compressed-tensors' nvfp4-pack-quantized: codes in weight_packed, and a global scale that encodes (it divides).
Called by registry and integrations.huggingface; calls interface.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_moe.checkpoint.formats.interface import NVFP4Format, check_group_size

__all__ = ["CompressedTensors", "is_compressed_tensors_nvfp4"]

FORMAT = "nvfp4-pack-quantized"


class CompressedTensors(NVFP4Format):
    """What llm-compressor writes."""

    method = "compressed-tensors"
    marker = "weight_packed"
    fields = ("weight_packed", "weight_scale", "weight_global_scale")

    def check(self, quantization: dict[str, Any]) -> None:
        for name, group in quantization.get("config_groups", {}).items():
            form = group.get("format") or quantization.get("format")
            if form != FORMAT:
                raise ValueError(f"format: got {form!r} in {name!r}, wanted {FORMAT!r}")
            check_group_size((group.get("weights") or {}).get("group_size"))
        if not quantization.get("config_groups"):
            raise ValueError("config_groups: got none, wanted those of a compressed-tensors checkpoint")

    def decode_scale(self, global_scale: torch.Tensor) -> torch.Tensor:
        return global_scale.reciprocal()


def is_compressed_tensors_nvfp4(quantization: dict[str, Any]) -> bool:
    """Whether all groups of a compressed-tensors config are NVFP4."""
    groups = quantization.get("config_groups", {}).values()
    return bool(groups) and all((g.get("format") or quantization.get("format")) == FORMAT for g in groups)

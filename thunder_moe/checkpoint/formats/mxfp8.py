"""Reads MXFP8 weights of ModelOpt, compressed-tensors, MiniMax and transformers: E4M3 codes with an E8M0 scale for each
32 along K. It also checks the configs of the last two. Called by registry; calls interface.
"""

from __future__ import annotations

from typing import Any

from thunder_moe.checkpoint.formats.interface import CheckpointFormat
from thunder_moe.checkpoint.modules import Module
from thunder_moe.formats.block_format import MXFP8

# Key of a config of MXFP8 alone that affects the weights -> its allowed values.
_CONFIG: dict[str, list[Any]] = {
    "weight_block_size": [[1, MXFP8.block_size]],
    "scale_fmt": ["ue8m0"],
    "fmt": ["e4m3", "float8_e4m3fn"],
    "expert_dtype": ["fp8", "mxfp8"],
    "moe_quant_algo": ["MXFP8"],
}


class _MXFP8Modules(CheckpointFormat):
    """A weight float8_e4m3fn (N, K) and its weight_scale (N, K // 32), uint8 or float8_e8m0fnu, per module.

    MiniMax and transformers call the scales weight_scale_inv; they multiply, too.

    The tensors of all experts of a layer are (E, N, K) and (E, N, K // 32), or both with K ahead of N. This package
    writes the latter for architectures whose checkpoints have only fused experts (GPT-OSS).
    """

    method = "mxfp8"
    marker = "weight"
    dtypes = (("F8_E4M3",), ("U8", "F8_E8M0"))
    number_format = MXFP8
    block = MXFP8.block_size

    def check(self, quantization: dict[str, Any]) -> None:
        for key, wanted in _CONFIG.items():
            value = quantization.get(key)
            if value is not None and value not in wanted:
                raise ValueError(f"{key}: got {value!r} in a config of MXFP8, wanted {wanted[0]!r}")

    def has_mxfp8(self, quantization: dict[str, Any]) -> bool:
        """True if a config says "mxfp8" (MiniMax), or "fp8" with MXFP8's blocks: the dtype of the scales then tells."""
        method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
        return method == self.method or (method == "fp8" and block == [1, self.block])

    def is_named(self, quantization: dict[str, Any]) -> bool:
        """True if a config is of MXFP8 alone; transformers says "fp8" with MXFP8's blocks and scales."""
        named = quantization.get("quant_method") == self.method or quantization.get("scale_fmt") == "ue8m0"
        return named and self.has_mxfp8(quantization)

    def _fields(self, module: Module) -> tuple[str, ...]:
        return "weight", module.mxfp8_scale_field


MXFP8_MODULES = _MXFP8Modules()

"""Reads MXFP8 weights of ModelOpt, compressed-tensors, MiniMax and transformers: E4M3 codes with an E8M0 scale for each
32 along K. It also checks the configs of the last two. Called by registry; calls interface.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.checkpoint.formats.interface import CheckpointFormat, has_e4m3_nan
from thunder_moe.checkpoint.modules import Module
from thunder_moe.checkpoint.part import SlicedFiles
from thunder_moe.formats.block_format import MXFP8
from thunder_moe.formats.mxfp8 import E8M0_NAN, MAX_SCALE

__all__ = ["MXFP8_MODULES"]

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
    block = MXFP8.block_size
    number_format = MXFP8

    def check(self, quantization: dict[str, Any]) -> None:
        for key, wanted in _CONFIG.items():
            value = quantization.get(key)
            if value is not None and value not in wanted:
                raise ValueError(f"{key}: got {value!r} in a config of MXFP8, wanted {wanted[0]!r}")

    def is_named(self, quantization: dict[str, Any]) -> bool:
        """True if a quantization_config is of MXFP8 alone.

        MiniMax says "mxfp8", transformers "fp8" with MXFP8's blocks and scales."""
        if quantization.get("quant_method") == self.method:
            return True
        return self.is_allowed(quantization) and quantization.get("scale_fmt") == "ue8m0"

    def is_allowed(self, quantization: dict[str, Any]) -> bool:
        """True if a quantization_config says "fp8" with blocks of MXFP8; the dtype of the scales then tells which."""
        block = quantization.get("weight_block_size")
        return quantization.get("quant_method") == "fp8" and block == [1, self.block]

    def infos(self, module: Module, rank: int) -> list[TensorInfo]:
        weight, scale = infos = module.require("weight", module.mxfp8_scale_field)
        weight.require(("F8_E4M3",), None)
        scale.require(("U8", "F8_E8M0"), None)
        fits = []
        if len(weight.shape) == rank:
            *experts, n, k = weight.shape
            fits = [(*experts, n, k // self.block)] * (k % self.block == 0)
            fits += [(*experts, n // self.block, k)] * (rank == 3 and n % self.block == 0)
        if scale.shape not in fits:
            words = f"one scale for every {self.block} along in_features of {weight.name!r}, which has {weight.shape}"
            raise scale.error(f"has shape {scale.shape}, wanted {words}")
        return infos

    def sizes(self, infos: list[TensorInfo], rank: int) -> tuple[int, int, bool]:
        codes, scales = infos[0].shape, infos[1].shape
        k_first = rank == 3 and codes[1] == self.block * scales[1]
        return (codes[2], codes[1], True) if k_first else (codes[-2], codes[-1], False)

    def read(
        self, files: TensorFiles | SlicedFiles, infos: list[TensorInfo]
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        codes, bits = (files.read(info.name).view(torch.uint8) for info in infos)
        # The CUDA kernels would decode a NaN as 480.
        if has_e4m3_nan(codes):
            raise infos[0].error("has NaN, wanted finite values")
        if bits.numel() and int(bits.max()) == E8M0_NAN:
            raise infos[1].error(f"has the byte {E8M0_NAN}, which is NaN, wanted scales that are finite")
        if bits.numel() and int(bits.max()) > MAX_SCALE:
            found = int(bits.max())
            raise infos[1].error(
                f"has the byte {found}, a scale of 2**{found - 127}, wanted at most {MAX_SCALE} (2**{MAX_SCALE - 127}):"
                " the CUDA kernels decode no larger one"
            )
        return codes, bits, None


MXFP8_MODULES = _MXFP8Modules()

"""Reads the weights that a conversion quantizes or writes in 16 bits: 16-bit weights unchanged, FP8 weights decoded.
Called by reader, quantize_experts and quantize_linears; calls formats.fp8 and files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.checkpoint.formats.fp8 import FP8
from thunder_moe.checkpoint.formats.interface import FLOATS
from thunder_moe.checkpoint.modules import Module

__all__ = ["FloatWeights"]


@dataclass(frozen=True)
class FloatWeights:
    """Reads the weights of modules that are not 4-bit.

    Attributes:
        files: where the tensors are.
        fp8: the scaling of FP8 weights; None: there are none.
    """

    files: TensorFiles
    fp8: FP8 | None

    def info(self, module: Module) -> TensorInfo:
        """Return the weight's tensor, after a check that its module is complete and has the right dtypes.

        Raises:
            ValueError: names file and tensor.
        """
        if module.is_fp8:
            return self._fp8(module).infos(module)[0]
        (info,) = module.require("weight")
        info.require(FLOATS, None)
        return info

    def read(self, module: Module, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the weight in the file's dtype, or decoded to float32 if it is FP8; may be a view of the mapped file.

        Raises:
            ValueError: a tensor is missing, has the wrong dtype or shape, or NaN in FP8; names file and tensor.
        """
        if module.is_fp8:
            return self._fp8(module).read(self.files, module, device)
        return self.files.read(self.info(module).name).to(device)

    def _fp8(self, module: Module) -> FP8:
        if self.fp8 is None:
            raise module.fields["weight"].error("is FP8, which the quantization_config does not say")
        return self.fp8

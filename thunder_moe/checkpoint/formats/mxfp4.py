"""GPT-OSS's MXFP4: blocks of 32 codes with a power-of-two scale, of fused experts only; converted to NVFP4 exactly.
Called by registry; calls interface and formats.mxfp4.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_moe.checkpoint.files import TensorInfo
from thunder_moe.checkpoint.formats.interface import CheckpointFormat, Read
from thunder_moe.checkpoint.modules import Module
from thunder_moe.formats.mxfp4 import mxfp4_to_nvfp4


class MXFP4(CheckpointFormat):
    """The format of OpenAI's GPT-OSS checkpoints."""

    method = "mxfp4"
    marker = "blocks"
    block = 32

    def check(self, quantization: dict[str, Any]) -> None:
        """Accept every config, because MXFP4's has no options."""

    def infos(self, module: Module, rank: int) -> list[TensorInfo]:
        blocks, scales = infos = module.require("blocks", "scales")
        blocks.require(("U8",), (*scales.shape, 16))
        scales.require(("U8", "F8_E8M0"), blocks.shape[:rank])
        return infos

    def sizes(self, infos: list[TensorInfo], rank: int) -> tuple[int, int, bool]:
        n, blocks = infos[1].shape[-2:]
        return n, self.block * blocks, False

    def read(self, read: Read, infos: list[TensorInfo]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks, scales = (read(info.name) for info in infos)
        try:
            exact = mxfp4_to_nvfp4(blocks, scales.view(torch.uint8))
        except ValueError as error:
            raise infos[1].error(f"cannot become NVFP4: {error}") from error
        return exact.qdata, exact.scale.view(torch.uint8), exact.global_scale

"""`BlockFormat`, the description of a block-scaled number format; `NVFP4` and `MXFP8`.
Called by weight, layouts, the formats' modules, and the code that serves several formats; calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockFormat:
    """A number format in which blocks of weights along K share a scale.

    Attributes:
        name: the value of the option `format` of `quantize_` and of the compilers.
        block_size: number of weights along K that share a scale.
        codes_per_byte: number of codes in an element of qdata, which is one byte.
        code_dtypes: of qdata; packed weights have the first, operators take all.
        scale_dtype: of the block scales.
        fields: the names of a packed weight's tensors.
        operands: the operators' names of these tensors.
    """

    name: str
    block_size: int
    codes_per_byte: int
    code_dtypes: tuple[torch.dtype, ...]
    scale_dtype: torch.dtype
    fields: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def bytes_of_scale(self) -> int:
        """Return the number of bytes of codes that share one byte of scale."""
        return self.block_size // self.codes_per_byte

    def operand_names(self, argument: str) -> tuple[str, ...]:
        """Return an operator's names of the tensors of a weight argument: `operands` for the argument "weight"."""
        return self.operands if argument == "weight" else (argument, *(f"{argument}_{n}" for n in self.fields[1:]))

    @property
    def packed_features(self) -> str:
        """Return the last dimension of qdata in words, for messages."""
        return "in_features" if self.codes_per_byte == 1 else f"in_features // {self.codes_per_byte}"

    @property
    def bits_per_weight(self) -> float:
        """Return the bits of a weight, with its share of the block scale."""
        return 8 / self.codes_per_byte + 8 / self.block_size


NVFP4 = BlockFormat(
    "nvfp4", 16, 2, (torch.uint8, torch.float4_e2m1fn_x2), torch.float8_e4m3fn, ("qdata", "scale", "global_scale"),
    ("fp4_weight", "weight_scaling_factor", "weight_global_scale"),
)  # fmt: skip
MXFP8 = BlockFormat(
    "mxfp8", 32, 1, (torch.float8_e4m3fn,), torch.float8_e8m0fnu, ("qdata", "scale"),
    ("fp8_weight", "weight_scaling_factor"),
)  # fmt: skip
BLOCK_FORMATS = {known.name: known for known in (NVFP4, MXFP8)}

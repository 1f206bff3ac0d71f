"""`CheckpointFormat`, the interface of a format of quantized checkpoints; `NVFP4Format`, the base of NVFP4 formats.
Called by modelopt, compressed_tensors and mxfp4, which are formats, and by registry; calls modules, files and formats.

Legend: E experts, N output features, K input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.checkpoint.modules import Module
from thunder_moe.checkpoint.part import SlicedFiles
from thunder_moe.formats.block_format import NVFP4, BlockFormat
from thunder_moe.formats.layouts import BLOCK_SIZE
from thunder_moe.formats.registry import dequantize
from thunder_moe.formats.weight import WEIGHTS, PackedWeight

__all__ = [
    "FLOATS",
    "CheckpointFormat",
    "NVFP4Format",
    "check_group_size",
    "has_e4m3_nan",
    "has_invalid_global_scales",
    "has_invalid_scales",
    "subdict",
]

FLOATS = ("F32", "BF16", "F16")
_E4M3_NAN = 0x7F


class CheckpointFormat(ABC):
    """A form of checkpoints: how its config names the quantization, and how it stores packed weights.

    Attributes:
        method: the quant_method of its config.
        marker: the field that shows that a module is of this format.
        block: weights that share a scale.
        number_format: of the weights that are read.
    """

    method: str
    marker: str
    block: int = BLOCK_SIZE
    number_format: BlockFormat = NVFP4

    @abstractmethod
    def check(self, quantization: dict[str, Any]) -> None:
        """Raises a ValueError for a quantization_config whose weights are not read here."""

    @abstractmethod
    def infos(self, module: Module, rank: int) -> list[TensorInfo]:
        """Return the tensors of a weight, the codes first, after a check of their dtypes and shapes.

        Args:
            module: of this format.
            rank: 2 for the weight of one module, 3 for the weight of all experts.

        Raises:
            ValueError: a tensor is missing or does not fit the others; names file and tensor.
        """

    @abstractmethod
    def sizes(self, infos: list[TensorInfo], rank: int) -> tuple[int, int, bool]:
        """Return (N, K, True if K comes ahead of N) of the weight of `infos`."""

    def slice_files(
        self,
        files: TensorFiles,
        infos: list[TensorInfo],
        experts: slice | None,
        rows: list[slice],
        columns: slice,
    ) -> SlicedFiles:
        """Return files that read only slices of a weight's codes and block scales.

        Args:
            files: the files.
            infos: of the weight.
            experts: the slice of the experts, for a weight of all experts; None for the weight of one module.
            rows: slices of its output features, to concatenate.
            columns: slice of its input features; whole blocks.
        """
        ahead = () if experts is None else (experts,)
        _, k, k_first = self.sizes(infos, 2 + len(ahead))
        slices = {}
        for info in infos[:2]:
            each = k // info.shape[len(ahead) + (not k_first)]  # input features of one number
            own = slice(columns.start // each, columns.stop // each)
            pairs = [(own, part) if k_first else (part, own) for part in rows]
            slices[info.name] = [(*ahead, *pair) for pair in pairs], len(ahead) + k_first
        return SlicedFiles(files, slices)

    @abstractmethod
    def read(
        self, files: TensorFiles | SlicedFiles, infos: list[TensorInfo]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (codes, bits of the block scales, float32 decode scale), as views of the file where possible.

        The codes are uint8 (N, K // 2), or for all experts (E, N, K // 2) or (E, K // 2, N); the scales have an eighth
        of that along K. The decode scale is (), or for all experts (), (E,) or (E, N), or any shape of as many numbers.
        In MXFP8 the codes are uint8 (N, K), or (E, N, K) or (E, K, N), the scales have a 32nd of that along K, and the
        decode scale is None.

        Raises:
            ValueError: a value that the format does not allow; names file and tensor.
        """

    def weight(self, codes: torch.Tensor, bits: torch.Tensor, global_scale: torch.Tensor | None) -> PackedWeight:
        """Return the weight (E, N, K) with these bytes (E, N, ...) of layout "linear"."""
        form = self.number_format
        others = () if global_scale is None else (global_scale,)
        weight: PackedWeight = WEIGHTS[form.name](codes.view(form.code_dtypes[0]), bits.view(form.scale_dtype), *others)
        return weight

    def read_dense_weight(
        self, files: TensorFiles, module: Module, part: tuple[int, int, int] | None = None
    ) -> PackedWeight:
        """Return the weight (1, N, K) of a packed module that is not an expert, as views of the file where possible.

        Args:
            files: the files.
            module: its tensors.
            part: (dim, index, count): one of `count` equal parts along dim 1 or 2.
        """
        infos = self.infos(module, 2)
        if part is not None:
            (n, k, _), (dim, index, count) = self.sizes(infos, 2), part
            size = (n if dim == 1 else k) // count
            if dim == 2 and size % self.block:
                raise infos[0].error(f"is shared by {count} processes, wanted shares of blocks of {self.block}")
            own, all_rows, all_columns = slice(index * size, (index + 1) * size), slice(0, n), slice(0, k)
            rows, columns = (own, all_columns) if dim == 1 else (all_rows, own)
            qdata, bits, global_scale = self.read(self.slice_files(files, infos, None, [rows], columns), infos)
        else:
            qdata, bits, global_scale = self.read(files, infos)
        return self.weight(qdata[None], bits[None], None if global_scale is None else global_scale.reshape(1))

    def read_dense(
        self, files: TensorFiles, module: Module, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Return the dequantized weight (N, K) of a module that is not an expert."""
        return dequantize(self.read_dense_weight(files, module).to(device), dtype)[0]


class NVFP4Format(CheckpointFormat):
    """E2M1 codes, E4M3 block scales and a scale of the whole tensor.

    Attributes:
        fields: the names of these three.
    """

    fields: tuple[str, str, str]

    def infos(self, module: Module, rank: int) -> list[TensorInfo]:
        weight, scale, global_scale = infos = module.require(*self.fields)
        weight.require(("U8",), None)
        scale.require(("F8_E4M3",), None)
        global_scale.require(FLOATS, None if rank == 3 else (1,) * len(global_scale.shape))
        fits = []
        if len(weight.shape) == rank:
            *experts, n, k = weight.shape
            fits = [(*experts, n, k // 8)] * (k % 8 == 0) + [(*experts, n // 8, k)] * (rank == 3 and n % 8 == 0)
        if scale.shape not in fits:
            words = f"one scale for every 8 bytes of {weight.name!r}, which has shape {weight.shape}"
            raise scale.error(f"has shape {scale.shape}, wanted {words}")
        return infos

    def sizes(self, infos: list[TensorInfo], rank: int) -> tuple[int, int, bool]:
        codes, scales = infos[0].shape, infos[1].shape
        k_first = rank == 3 and codes[1] == 8 * scales[1]  # the scales are an eighth along K
        return (codes[2], 2 * codes[1], True) if k_first else (codes[-2], 2 * codes[-1], False)

    def read(
        self, files: TensorFiles | SlicedFiles, infos: list[TensorInfo]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight, scale, global_scale = (files.read(info.name) for info in infos)
        bits = scale.view(torch.uint8)
        if has_invalid_scales(bits):
            raise infos[1].error("has NaN or negative numbers, wanted scales that are finite and not negative")
        decode_scale = self.decode_scale(global_scale.float())
        if has_invalid_global_scales(decode_scale):
            raise infos[2].error("is not finite and positive, wanted the scale of a whole tensor")
        return weight, bits, decode_scale

    def decode_scale(self, global_scale: torch.Tensor) -> torch.Tensor:
        """Return the decode scale, a multiplier, from the global scale in the file."""
        return global_scale


def has_e4m3_nan(codes: torch.Tensor) -> bool:
    """True if uint8 codes of E4M3 have NaN: 0x7F or 0xFF.

    These are the largest signed and unsigned byte; the maximum is found 50 times faster than a mask (12 GB/s)."""
    return codes.numel() > 0 and (int(codes.view(torch.int8).max()) == _E4M3_NAN or int(codes.max()) == 0xFF)


def has_invalid_scales(bits: torch.Tensor) -> bool:
    """True if bytes of E4M3 scales have NaN or negative numbers: from 0x7F on."""
    return bits.numel() > 0 and int(bits.max()) >= _E4M3_NAN


def has_invalid_global_scales(scale: torch.Tensor) -> bool:
    """True if a number is not finite or not positive."""
    return not bool((torch.isfinite(scale) & (scale > 0)).all())


def check_group_size(size: Any, wanted: int = BLOCK_SIZE) -> None:
    """Raises a ValueError if a config gives a block size, as a number or its digits, other than the wanted one."""
    if size is not None and str(size) != str(wanted):
        raise ValueError(f"group_size: got {size!r}, wanted {wanted}")


def subdict(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a dictionary in a config; empty if the key is missing or None.

    Raises:
        ValueError: it is something else.
    """
    value = config.get(key)
    if not (value is None or isinstance(value, dict)):
        raise ValueError(f"{key}: got {value!r}, wanted a JSON object")
    return value or {}

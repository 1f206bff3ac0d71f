"""`CheckpointFormat`, the interface of formats of quantized checkpoints: a table of tensors, and how they are read.
Called by modelopt, compressed_tensors, mxfp8 and mxfp4, which are formats, and by decode; calls modules and formats.

Legend: E experts, N output features, K input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.checkpoint.modules import Module
from thunder_moe.formats.block_format import NVFP4, BlockFormat
from thunder_moe.formats.layouts import BLOCK_SIZE
from thunder_moe.formats.mxfp8 import MAX_SCALE
from thunder_moe.formats.weight import WEIGHTS, PackedWeight, joined

FLOATS = ("F32", "BF16", "F16")
_E4M3_NAN = 0x7F
Read = Callable[[str], torch.Tensor]


class CheckpointFormat(ABC):
    """A form of checkpoints: how its config names the quantization, and how it stores packed weights."""

    method: str  # the quant_method of its config
    marker: str  # the field that shows that a module is of this format
    fields: tuple[str, ...]  # the names of codes, block scales and, in NVFP4, the scale of a whole tensor
    dtypes: tuple[tuple[str, ...], ...] = (("U8",), ("F8_E4M3",), FLOATS)  # their dtypes in the file
    number_format: BlockFormat = NVFP4  # of the weights that are read
    block: int = BLOCK_SIZE  # weights that share a scale in the file

    @abstractmethod
    def check(self, quantization: dict[str, Any]) -> None:
        """Raise a ValueError for a quantization_config whose weights are not read here."""

    def has_mxfp8(self, quantization: dict[str, Any]) -> bool:
        """True if a quantization_config says that there are MXFP8 weights, or allows for them."""
        return False

    def infos(self, module: Module, rank: int) -> list[TensorInfo]:
        """Return the tensors of a weight, the codes first, after a check of their dtypes and shapes.

        The `rank` is 2 for the weight of one module, 3 for the weight of all experts. A ValueError names file and
        tensor.
        """
        weight, scale, *global_scale = infos = module.require(*self._fields(module))
        for info, dtypes in zip(infos, self.dtypes, strict=True):
            info.require(dtypes, (1,) * len(info.shape) if rank == 2 and info in global_scale else None)
        size, fits = self.number_format.bytes_of_scale, []
        if len(weight.shape) == rank:
            *experts, n, k = weight.shape
            fits = [(*experts, n, k // size)] * (k % size == 0)
            fits += [(*experts, n // size, k)] * (rank == 3 and n % size == 0)
        if scale.shape not in fits:
            words = f"one scale for every {size} bytes of {weight.name!r}, which has shape {weight.shape}"
            raise scale.error(f"has shape {scale.shape}, wanted {words}")
        return infos

    def _fields(self, module: Module) -> tuple[str, ...]:
        """Return `fields`, or the names that a module has for them."""
        return self.fields

    def sizes(self, infos: list[TensorInfo], rank: int) -> tuple[int, int, bool]:
        """Return (N, K, True if K comes ahead of N) of the weight of `infos`."""
        codes, scales, form = infos[0].shape, infos[1].shape, self.number_format
        if rank == 3 and codes[1] == form.bytes_of_scale * scales[1]:
            return codes[2], form.codes_per_byte * codes[1], True
        return codes[-2], form.codes_per_byte * codes[-1], False

    def sliced(
        self, files: TensorFiles, infos: list[TensorInfo], experts: slice | None, rows: list[slice], columns: slice
    ) -> Read:
        """Return a function that reads tensors by name, of the codes and block scales of `infos` only slices.

        Args:
            experts: the slice of the experts, for a weight of all experts; None for the weight of one module.
            rows: slices of its output features, to concatenate.
            columns: slice of its input features; whole blocks.
        """
        ahead = () if experts is None else (experts,)
        _, k, k_first = self.sizes(infos, 2 + len(ahead))
        slices: dict[str, list[tuple[slice, ...]]] = {}
        for info in infos[:2]:
            each = k // info.shape[len(ahead) + (not k_first)]  # input features of one number
            own = slice(columns.start // each, columns.stop // each)
            slices[info.name] = [(*ahead, own, part) if k_first else (*ahead, part, own) for part in rows]

        def read(name: str) -> torch.Tensor:
            if name not in slices:
                return files.read(name)
            pieces = [files.read(name, index) for index in slices[name]]
            return pieces[0] if len(pieces) == 1 else joined(pieces, len(ahead) + k_first)

        return read

    def read(self, read: Read, infos: list[TensorInfo]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (codes, bits of the block scales, float32 decode scale), as views of the file where possible.

        The codes are uint8 (N, K // 2), or for all experts (E, N, K // 2) or (E, K // 2, N); the scales have an eighth
        of that along K. The decode scale is (), or for all experts (), (E,) or (E, N), or any shape of as many numbers.
        In MXFP8 the codes are uint8 (N, K), or (E, N, K) or (E, K, N), the scales have a 32nd of that along K, and the
        decode scale is None. A value that the format does not allow is a ValueError.
        """
        codes, scale, *others = (read(info.name) for info in infos)
        global_scale = self.decode_scale(others[0].float()) if others else None
        for info, tensor in zip(infos, (codes, scale, global_scale), strict=False):
            if tensor is not None and (wrong := wrong_values(tensor, is_scale=info is not infos[0])) is not None:
                raise info.error(wrong)
        return codes.view(torch.uint8), scale.view(torch.uint8), global_scale

    def decode_scale(self, global_scale: torch.Tensor) -> torch.Tensor:
        """Return the decode scale, a multiplier, from the global scale in the file."""
        return global_scale

    def weight(self, codes: torch.Tensor, bits: torch.Tensor, global_scale: torch.Tensor | None) -> PackedWeight:
        """Return the weight (E, N, K) with these bytes (E, N, ...) of layout "linear"."""
        form = self.number_format
        others = () if global_scale is None else (global_scale,)
        weight: PackedWeight = WEIGHTS[form.name](codes.view(form.code_dtypes[0]), bits.view(form.scale_dtype), *others)
        return weight


def wrong_values(tensor: torch.Tensor, is_scale: bool) -> str | None:
    """Return why no reader accepts the values of a tensor of a packed or FP8 weight; None if all do.

    The tensor has codes, or if `is_scale` block scales (E8M0 also as uint8) or scales in float32.
    """
    if tensor.itemsize > 1:
        good = bool((torch.isfinite(tensor) & (tensor > 0)).all())
        return None if good else "is not finite and positive, wanted scales that are"
    bits = tensor.view(torch.uint8)
    if tensor.dtype == torch.float8_e4m3fn and not is_scale:
        # The CUDA kernels would decode a NaN as 480.
        return "has NaN, wanted finite values" if has_e4m3_nan(bits) else None
    largest = int(bits.max()) if is_scale and bits.numel() else 0
    if tensor.dtype == torch.float8_e4m3fn:
        wanted = "wanted scales that are finite and not negative"
        return f"has NaN or negative numbers, {wanted}" if largest >= _E4M3_NAN else None
    if largest <= MAX_SCALE:
        return None
    found = "which is NaN" if largest == 255 else f"a scale of 2**{largest - 127}"
    limit = f"at most {MAX_SCALE} (2**{MAX_SCALE - 127}): the CUDA kernels decode no larger one"
    return f"has the byte {largest}, {found}, wanted {limit}"


def has_e4m3_nan(codes: torch.Tensor) -> bool:
    """True if uint8 codes of E4M3 have NaN: 0x7F or 0xFF.

    These are the largest signed and unsigned byte; the maximum is found 50 times faster than a mask (12 GB/s)."""
    return codes.numel() > 0 and (int(codes.view(torch.int8).max()) == _E4M3_NAN or int(codes.max()) == 0xFF)


def check_group_size(size: Any, wanted: int = BLOCK_SIZE) -> None:
    """Raise a ValueError if a config gives a block size, as a number or its digits, other than the wanted one."""
    if size is not None and str(size) != str(wanted):
        raise ValueError(f"group_size: got {size!r}, wanted {wanted}")


def subdict(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a dictionary in a config; empty if the key is missing or None. Anything else is a ValueError."""
    value = config.get(key)
    if not (value is None or isinstance(value, dict)):
        raise ValueError(f"{key}: got {value!r}, wanted a JSON object")
    return value or {}

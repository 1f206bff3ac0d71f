"""The packed weights of experts, `NVFP4Weight` and `MXFP8Weight`, with the operations that need no decoding.
Called by the formats' modules, kernels, ops, nn, checkpoint and integrations; calls block_format, layouts and checks.

Values are ``w[e, n, k] = e2m1(qdata) * scale[e, n, k // 16] * global_scale[e]`` in NVFP4, 4-bit floats (E2M1) in blocks
of 16 along K with one E4M3 scale per block and one float32 multiplier per expert (or per row of an expert); and
``w[e, n, k] = e4m3(qdata) * 2**(scale[e, n, k // 32] - 127)`` in MXFP8, 8-bit floats (E4M3) in blocks of 32.

Legend: E experts, N output features, K input features of the GEMM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.checks import mismatch, require
from thunder_moe.formats.layouts import LINEAR, TILED_64X64, block_shapes, find_layout

if TYPE_CHECKING:
    from typing_extensions import Self


class PackedWeight:
    """A packed weight (E, N, K) of any number format.

    Attributes:
        format: the number format, by class.
        qdata: the codes.
        scale: the block scales.
        global_scale: a float32 multiplier, or None if the format has none.
        layout: the order of `qdata` and `scale` in memory, a name of `layouts.REGISTRY`.
    """

    format: ClassVar[BlockFormat]
    qdata: Tensor
    scale: Tensor
    global_scale: Tensor | None
    layout: str

    def __post_init__(self) -> None:
        for name, tensor in zip(self.format.fields, self.tensors(), strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: got {type(tensor).__name__}, wanted a tensor")
        check_weight(self.qdata, self.scale, self.global_scale, self.layout, format=self.format)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K), the shape of the 16-bit weight."""
        experts, n, codes = self.qdata.shape
        return experts, n, self.format.codes_per_byte * codes

    @property
    def device(self) -> torch.device:
        return self.qdata.device

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors, in the order of `format.fields`."""
        raise NotImplementedError

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Return a weight in the same layout with other tensors, in the order of `format.fields`."""
        weight: Any = self
        return replace(weight, **dict(zip(self.format.fields, tensors, strict=True)))

    @cached_property
    def blocks(self) -> tuple[Tensor, ...]:
        """Return the tensors in the shapes that tell their layout (`layouts.block_shapes`), always the same objects."""
        if self.layout == LINEAR:
            return self.tensors()
        codes, scales = block_shapes(*self.shape, self.layout, self.format)
        return self.qdata.reshape(codes), self.scale.reshape(scales), *self.tensors()[2:]

    @cached_property
    def dense_blocks(self) -> tuple[Tensor, ...]:
        """Return `blocks` of a single weight (1, N, K) without the dimension of experts, always the same objects."""
        return tuple(tensor[0].detach() for tensor in self.blocks)

    def to(self, device: torch.device | str) -> Self:
        """Return the weight on another device."""
        return self.with_tensors(tensor.to(device) for tensor in self.tensors())

    def to_layout(self, layout: str) -> Self:
        """Return the weight in another layout, exactly.

        "tiled_64x64" clears codes of NVFP4 whose block scale is 0, because their value is 0.

        Raises:
            ValueError: the layout is unknown, or its kernels cannot take this shape.
        """
        if layout == self.layout:
            return self
        target, (_, n, k) = find_layout(layout, self.format), self.shape
        needs = target.fits(n, k)
        if needs is not None:
            raise ValueError(f"layout: got {layout!r} for a weight of shape {self.shape}, which needs {needs}")
        weight: Any = self
        if self.qdata.is_meta and {layout, self.layout} == {LINEAR, TILED_64X64}:  # of the same shapes, without numbers
            return replace(weight, layout=layout)
        linear = find_layout(self.layout, self.format).to_linear(self.qdata, self.scale, n, k)
        qdata, scale = target.from_linear(*linear)
        return replace(weight, qdata=qdata, scale=scale, layout=layout)

    def rows(self, rows: slice) -> Self:
        """Return some of the rows of a "linear" weight, of all experts: (E, those rows, K), views."""
        assert self.layout == LINEAR
        return self.with_tensors(tensor[:, rows] for tensor in self.tensors())

    def share_global_scale(self) -> Self:
        """Return the weight with one global scale per expert if all rows of each expert have the same, else itself.

        Reads the global scales; call it where a synchronization with the host does no harm.
        """
        return self

    @staticmethod
    def concatenate(*weights: Weight) -> Weight:
        """Stacks the rows of "linear" weights of one format, exactly.

        Weights (E, N1, K), (E, N2, K), ... become (E, N1 + N2 + ..., K). The global scales of NVFP4 become one per row,
        because each weight has its own. One weight alone stays unchanged.

        Raises:
            TypeError: one of them is not a packed weight of the first one's format.
            ValueError: there are none, a layout is not "linear", or the experts or in_features differ.
        """
        if not weights:
            raise ValueError("weights: got none, wanted one NVFP4Weight or more")
        first = weights[0]
        wanted = type(first) if isinstance(first, PackedWeight) else NVFP4Weight
        for position, weight in enumerate(weights):
            if not isinstance(weight, wanted):
                kind = type(weight).__name__
                raise TypeError(f"weights: got a {kind} at position {position}, wanted {wanted.__name__}")
        experts, _, k = first.shape
        for weight in weights:
            if weight.layout != LINEAR:
                raise ValueError(f"weights: got layout {weight.layout!r}, wanted 'linear'; use to_layout('linear')")
            if (weight.shape[0], weight.shape[2]) != (experts, k):
                raise ValueError(f"weights: got shape {weight.shape}, wanted experts and in_features of {first.shape}")
        if len(weights) == 1:
            return first
        tensors = zip(*(weight._per_row() for weight in weights), strict=True)
        return first.with_tensors(joined(each, 1) for each in tensors)

    def _per_row(self) -> tuple[Tensor, ...]:
        """Return the tensors of a "linear" weight, each with the rows in dim 1."""
        return self.tensors()


@dataclass(frozen=True, eq=False)
class NVFP4Weight(PackedWeight):
    """The 4-bit weights of E experts.

    Attributes:
        qdata: uint8 (E, N, K // 2); two E2M1 codes a byte, the low nibble is the even k ("tiled_64x64": the same
            bits in another order).
        scale: float8_e4m3fn block scales (E, N, K // 16); "swizzled_128x4": (E, N padded to 128, K // 16 padded to 4);
            "tiled_64x64": the bytes have another code than E4M3.
        global_scale: float32 (E,) or (E, N), the multiplier that decodes (its inverse is the encode scale).
        layout: the order of `qdata` and `scale` in memory, a name of `layouts.REGISTRY`.

    Raises:
        TypeError: one of the three is not a tensor.
        ValueError: a tensor has the wrong rank, shape, dtype or device, or the layout is unknown or not for the shape.
    """

    format: ClassVar[BlockFormat] = NVFP4
    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    layout: str = LINEAR

    @classmethod
    def unchecked(cls, qdata: Tensor, scale: Tensor, global_scale: Tensor, layout: str) -> NVFP4Weight:
        """Return a weight without the checks, for callers that have made them: the operators do so at every call."""
        weight = object.__new__(cls)
        # One by one, because dynamo of torch 2.10 does not trace an update of __dict__.
        object.__setattr__(weight, "qdata", qdata)
        object.__setattr__(weight, "scale", scale)
        object.__setattr__(weight, "global_scale", global_scale)
        object.__setattr__(weight, "layout", layout)
        return weight

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (qdata, scale, global_scale)."""
        return self.qdata, self.scale, self.global_scale

    def rows(self, rows: slice) -> NVFP4Weight:
        """Return some of the rows of a "linear" weight, of all experts: (E, those rows, K), views."""
        assert self.layout == LINEAR
        of_rows = self.global_scale if self.global_scale.ndim == 1 else self.global_scale[:, rows]
        return NVFP4Weight(self.qdata[:, rows], self.scale[:, rows], of_rows)

    def row_global_scale(self) -> Tensor:
        """Return the global scale as (E, N), a view."""
        experts, n, _ = self.shape
        return (self.global_scale[:, None] if self.global_scale.ndim == 1 else self.global_scale).expand(experts, n)

    def share_global_scale(self) -> NVFP4Weight:
        scales = self.global_scale
        if scales.ndim == 1 or not bool((scales == scales[:, :1]).all()):
            return self
        return replace(self, global_scale=scales[:, 0].clone())

    def _per_row(self) -> tuple[Tensor, ...]:
        return self.qdata, self.scale, self.row_global_scale()


@dataclass(frozen=True, eq=False)
class MXFP8Weight(PackedWeight):
    """The 8-bit weights of E experts.

    Attributes:
        qdata: float8_e4m3fn (E, N, K).
        scale: float8_e8m0fnu block scales (E, N, K // 32), powers of two.
        layout: their order in memory, a name of `layouts.REGISTRY`.

    Raises:
        TypeError: one of the two is not a tensor.
        ValueError: a tensor has the wrong rank, shape, dtype or device, or the layout is unknown or not for the shape.
    """

    format: ClassVar[BlockFormat] = MXFP8
    global_scale: ClassVar[None] = None  # type: ignore[misc]
    qdata: Tensor
    scale: Tensor
    layout: str = LINEAR

    @classmethod
    def unchecked(cls, qdata: Tensor, scale: Tensor, layout: str) -> MXFP8Weight:
        """Return a weight without the checks, for callers that have made them: the operators do so at every call."""
        weight = object.__new__(cls)
        object.__setattr__(weight, "qdata", qdata)
        object.__setattr__(weight, "scale", scale)
        object.__setattr__(weight, "layout", layout)
        return weight

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return (qdata, scale)."""
        return self.qdata, self.scale


Weight = TypeVar("Weight", bound=PackedWeight)
WEIGHTS: dict[str, Any] = {NVFP4.name: NVFP4Weight, MXFP8.name: MXFP8Weight}


class WeightOperands(NamedTuple):
    """The arguments of an operator that are the tensors of one packed weight, unchecked.

    Attributes:
        codes: qdata transposed, (E, K // codes_per_byte, N). A dense layer's tensors have no dimension E.
        scale: as in the packed weight.
        global_scale: as in the packed weight; None if the format has none.
        format: the number format.
        names: of the arguments, for messages.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None = None
    format: BlockFormat = NVFP4
    names: tuple[str, ...] = NVFP4.operands

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the arguments, in the order of `format.fields`."""
        codes, scale, global_scale, *_ = self
        return (codes, scale) if global_scale is None else (codes, scale, global_scale)

    def check(self, layout: str, *, dense: bool = False) -> None:
        """Check the tensors, as `check_weight` does."""
        codes, scale, global_scale, format, names = self
        check_weight(codes, scale, global_scale, layout, format=format, names=names, transposed=True, dense=dense)

    def packed(self, layout: str) -> Any:
        """Return the packed weight (E, N, K) after checks have passed; E is 1 for a dense layer."""
        tensors, dtype = self.tensors, self.format.code_dtypes[0]
        if self.codes.ndim == 2:
            tensors = tuple(tensor[None] for tensor in tensors)
        qdata = tensors[0].mT
        qdata = qdata if qdata.dtype == dtype else qdata.view(dtype)
        return WEIGHTS[self.format.name].unchecked(qdata, *tensors[1:], layout)


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors of one dtype along a dimension; 8-bit floats as bytes, which every device supports."""
    first = tensors[0]
    if first.itemsize > 1 or not first.is_floating_point():
        return torch.cat(list(tensors), dim)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim).view(first.dtype)


def check_weight(
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor | None = None,
    layout: str = LINEAR,
    *,
    format: BlockFormat = NVFP4,
    names: Sequence[str] | None = None,
    transposed: bool = False,
    dense: bool = False,
) -> None:
    """Checks the rank, dtypes, shapes, layout and devices of a weight's tensors, without their data.

    Args:
        qdata: (E, N, K // codes_per_byte) of the format's first dtype. When transposed, an operator's argument
            (E, K // codes_per_byte, N) of any of the format's dtypes.
        scale: as in the weight.
        global_scale: as in the weight; None if the format has none.
        layout: of the weight.
        format: of the weight.
        names: of the tensors, for the message; None: the names of the weight's attributes.
        transposed: see qdata.
        dense: True if the tensors of the one weight of a dense layer lack the dimension of experts.

    Raises:
        ValueError: names the tensor, its value and the wanted one.
    """
    # Messages are formatted only after a check has failed, because the operators run this at every call.
    known, (name, scale_name, *global_name) = find_layout(layout, format), names or format.fields
    dtypes = format.code_dtypes
    if transposed and qdata.dtype not in dtypes:
        raise mismatch(name, qdata, f"a dtype of {dtypes}")
    if not transposed and qdata.dtype != dtypes[0]:
        raise mismatch(name, qdata, f"dtype {_plain(dtypes[0])}")
    leading = 0 if dense else 1
    if qdata.ndim != leading + 2:
        sizes = ["out_features", format.packed_features]
        shape = ", ".join([*["experts"] * leading, *(sizes[::-1] if transposed else sizes)])
        raise mismatch(name, qdata, f"shape ({shape})")
    experts, (n, codes) = tuple(qdata.shape[:leading]), qdata.shape[leading:]
    if transposed:
        n, codes = codes, n
    k = format.codes_per_byte * codes
    require(dense or experts[0] > 0, name, qdata, "at least one expert in dim 0")
    if k % format.block_size or k == 0:
        raise mismatch(name, qdata, f"in_features a positive multiple of {format.block_size}")
    needs = known.fits(n, k)
    if needs is not None:
        raise mismatch(name, qdata, f"{needs} in layout {layout!r}")
    if scale.dtype != format.scale_dtype:
        raise mismatch(scale_name, scale, f"dtype {_plain(format.scale_dtype)}")
    wanted = known.scale_shape(1 if dense else experts[0], n, k)[1 - leading :]
    if scale.shape != wanted:
        raise mismatch(scale_name, scale, f"shape {wanted} in layout {layout!r}")
    if scale.device != qdata.device:
        raise mismatch(scale_name, scale, f"device {qdata.device}, as {name} has")
    if global_scale is None:
        assert not global_name
        return
    (other,) = global_name
    require(global_scale.dtype == torch.float32, other, global_scale, "dtype float32")
    if global_scale.shape != experts and global_scale.shape != (*experts, n):
        raise mismatch(other, global_scale, f"a shape of {(experts, (*experts, n))}")
    if global_scale.device != qdata.device:
        raise mismatch(other, global_scale, f"device {qdata.device}, as {name} has")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

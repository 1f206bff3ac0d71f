"""`NVFP4Weight`: the packed weight of experts, its layout, and what can be done to it without decoding.
Called by nvfp4, kernels, ops, nn, checkpoint and integrations; calls layouts and checks.

A weight value is ``w[e, n, k] = e2m1(qdata) * scale[e, n, k // 16] * global_scale[e]``: 4-bit floats (E2M1) in
blocks of 16 along K, one E4M3 scale per block, one float32 multiplier per expert (or per row of an expert).

Legend: E experts, N output features, K input features of the GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from thunder_moe.formats.checks import mismatch, require
from thunder_moe.formats.layouts import BLOCK_SIZE, LINEAR, block_shapes, find_layout

__all__ = ["NVFP4Weight", "check_weight"]


@dataclass(frozen=True, eq=False)
class NVFP4Weight:
    """The 4-bit weights of E experts.

    Attributes:
        qdata: uint8 (E, N, K // 2); two E2M1 codes a byte, the low nibble is the even k ("tiled_64x64": the same
            bits in another order).
        scale: float8_e4m3fn block scales (E, N, K // 16); "swizzled_128x4": (E, N padded to 128, K // 16 padded to 4);
            "tiled_64x64": the bytes are of another code than E4M3.
        global_scale: float32 (E,) or (E, N), the multiplier that decodes (its inverse is the encode scale).
        layout: how `qdata` and `scale` lie in memory, a name of `layouts.REGISTRY`.

    Raises:
        TypeError: one of the three is no tensor.
        ValueError: a tensor has the wrong rank, shape, dtype or device, or the layout is unknown or not for the shape.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    layout: str = LINEAR

    def __post_init__(self) -> None:
        for name, tensor in zip(("qdata", "scale", "global_scale"), self.tensors(), strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: got {type(tensor).__name__}, wanted a tensor")
        check_weight(self.qdata, self.scale, self.global_scale, self.layout)

    @classmethod
    def unchecked(cls, qdata: Tensor, scale: Tensor, global_scale: Tensor, layout: str) -> NVFP4Weight:
        """A weight without the checks, for callers that have made them: the operators do so at every call."""
        weight = object.__new__(cls)
        # One by one: dynamo of torch 2.10 traces no update of __dict__.
        object.__setattr__(weight, "qdata", qdata)
        object.__setattr__(weight, "scale", scale)
        object.__setattr__(weight, "global_scale", global_scale)
        object.__setattr__(weight, "layout", layout)
        return weight

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K), the shape of the 16-bit weight."""
        experts, n, half = self.qdata.shape
        return experts, n, 2 * half

    @property
    def device(self) -> torch.device:
        return self.qdata.device

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.qdata.nbytes + self.scale.nbytes + self.global_scale.nbytes

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """(qdata, scale, global_scale)."""
        return self.qdata, self.scale, self.global_scale

    @cached_property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors in the shapes that tell their layout (`layouts.block_shapes`), always the same objects."""
        if self.layout == LINEAR:
            return self.tensors()
        codes, scales = block_shapes(*self.shape, self.layout)
        return self.qdata.reshape(codes), self.scale.reshape(scales), self.global_scale

    @cached_property
    def dense_blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """`blocks` of a single weight (1, N, K) without the dimension of experts, always the same objects."""
        qdata, scale, global_scale = (tensor[0].detach() for tensor in self.blocks)
        return qdata, scale, global_scale

    def to(self, device: torch.device | str) -> NVFP4Weight:
        """The same weight on another device."""
        qdata, scale, global_scale = (tensor.to(device) for tensor in self.tensors())
        return replace(self, qdata=qdata, scale=scale, global_scale=global_scale)

    def to_layout(self, layout: str) -> NVFP4Weight:
        """The same weight in another layout, exact both ways ("tiled_64x64" clears codes whose block scale is 0: they
        have the value 0 whatever they are).

        Raises:
            ValueError: the layout is unknown, or its kernels cannot take this shape.
        """
        if layout == self.layout:
            return self
        target, (_, n, k) = find_layout(layout), self.shape
        needs = target.fits(n, k)
        if needs is not None:
            raise ValueError(f"layout: got {layout!r} for a weight of shape {self.shape}, which needs {needs}")
        linear = find_layout(self.layout).to_linear(self.qdata, self.scale, n, k)
        qdata, scale = target.from_linear(*linear)
        return replace(self, qdata=qdata, scale=scale, layout=layout)

    @staticmethod
    def concatenate(*weights: NVFP4Weight) -> NVFP4Weight:
        """Stacks the rows of "linear" weights, exactly: (E, N1, K), (E, N2, K), ... -> (E, N1 + N2 + ..., K).

        The global scales become one per row, since each weight has its own. One weight alone comes back as it is.

        Raises:
            TypeError: one of them is no `NVFP4Weight`.
            ValueError: there are none, a layout is not "linear", or the experts or in_features differ.
        """
        if not weights:
            raise ValueError("weights: got none, wanted one NVFP4Weight or more")
        for position, weight in enumerate(weights):
            if not isinstance(weight, NVFP4Weight):
                kind = type(weight).__name__
                raise TypeError(f"weights: got a {kind} at position {position}, wanted NVFP4Weight")
        experts, _, k = weights[0].shape
        for weight in weights:
            if weight.layout != LINEAR:
                raise ValueError(f"weights: got layout {weight.layout!r}, wanted 'linear'; use to_layout('linear')")
            if (weight.shape[0], weight.shape[2]) != (experts, k):
                raise ValueError(
                    f"weights: got shape {weight.shape}, wanted experts and in_features of {weights[0].shape}"
                )
        if len(weights) == 1:
            return weights[0]
        qdata = torch.cat([weight.qdata for weight in weights], 1)
        scale = torch.cat([weight.scale.view(torch.uint8) for weight in weights], 1).view(torch.float8_e4m3fn)
        return NVFP4Weight(qdata, scale, torch.cat([weight.row_global_scale() for weight in weights], 1))

    def row_global_scale(self) -> Tensor:
        """The global scale as (E, N), a view."""
        experts, n, _ = self.shape
        return (self.global_scale[:, None] if self.global_scale.ndim == 1 else self.global_scale).expand(experts, n)


QDATA_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)


def check_weight(
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    layout: str,
    *,
    names: Sequence[str] = ("qdata", "scale", "global_scale"),
    transposed: bool = False,
) -> None:
    """Checks the tensors of a weight: rank, dtypes, shapes, layout and devices, nothing that needs their data.

    Args:
        qdata: uint8 (E, N, K // 2); when transposed uint8 or float4_e2m1fn_x2 (E, K // 2, N), as operators take it.
        scale, global_scale: as in `NVFP4Weight`.
        layout: of the three.
        names: of the tensors, for the message.
        transposed: see qdata.

    Raises:
        ValueError: names the tensor, what it was and what is wanted.
    """
    # No message is formatted before a check has failed: the operators run this at every call.
    known, (name, scale_name, global_name) = find_layout(layout), names
    if transposed:
        require(qdata.dtype in QDATA_DTYPES, name, qdata, "a dtype of (torch.uint8, torch.float4_e2m1fn_x2)")
        require(qdata.ndim == 3, name, qdata, "shape (experts, in_features // 2, out_features)")
        experts, half, n = qdata.shape
    else:
        require(qdata.dtype == torch.uint8, name, qdata, "dtype uint8")
        require(qdata.ndim == 3, name, qdata, "shape (experts, out_features, in_features // 2)")
        experts, n, half = qdata.shape
    k = 2 * half
    require(experts > 0, name, qdata, "at least one expert in dim 0")
    require(k % BLOCK_SIZE == 0 and k > 0, name, qdata, "in_features a positive multiple of 16")
    needs = known.fits(n, k)
    if needs is not None:
        raise mismatch(name, qdata, f"{needs} in layout {layout!r}")
    require(scale.dtype == torch.float8_e4m3fn, scale_name, scale, "dtype float8_e4m3fn")
    wanted = known.scale_shape(experts, n, k)
    if scale.shape != wanted:
        raise mismatch(scale_name, scale, f"shape {wanted} in layout {layout!r}")
    require(global_scale.dtype == torch.float32, global_name, global_scale, "dtype float32")
    if global_scale.shape != (experts,) and global_scale.shape != (experts, n):
        raise mismatch(global_name, global_scale, f"a shape of {((experts,), (experts, n))}")
    for other, tensor in ((scale_name, scale), (global_name, global_scale)):
        if tensor.device != qdata.device:
            raise mismatch(other, tensor, f"device {qdata.device}, that of {name}")

"""The checks that operators of packed weights share: operands, values of offsets and indices, absent gradients.
Called by the other files of ops, by parallel, compilers and integrations.vllm; calls formats.

Legend: M rows (tokens * top_k), E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from thunder_moe.formats.checks import mismatch, require
from thunder_moe.formats.weight import WeightOperands

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_operands(activation: Tensor, weight: WeightOperands, offsets: Tensor, layout: str) -> None:
    """Raise a ValueError that names an operand that does not fit, as far as that needs no data."""
    require(activation.ndim == 2, "activation", activation, "shape (rows, in_features)")
    k, format, codes, name = activation.shape[1], weight.format, weight.codes, weight.names[0]
    if k % format.block_size or k == 0:
        raise mismatch("activation", activation, f"in_features a positive multiple of {format.block_size}")
    if codes.ndim != 3:
        raise mismatch(name, codes, f"shape (experts, {format.packed_features}, out_features)")
    if format.codes_per_byte * codes.shape[1] != k:
        wanted = f"{format.packed_features} = {k // format.codes_per_byte} in dim 1, by the activation"
        raise mismatch(name, codes, wanted)
    check_rows_and_weight("activation", activation, weight, offsets, layout)


def check_rows_and_weight(name: str, rows: Tensor, weight: WeightOperands, offsets: Tensor, layout: str) -> None:
    """Run `check_operands` except for the columns of the rows; `name` is what the operator calls the rows."""
    if rows.dtype not in ACTIVATION_DTYPES:
        raise mismatch(name, rows, f"a dtype of {ACTIVATION_DTYPES}")
    weight.check(layout)
    experts = weight.codes.shape[0]
    require(offsets.dtype == torch.int32, "offsets", offsets, "dtype int32")
    if offsets.shape != (experts,):
        raise mismatch("offsets", offsets, f"shape ({experts},), one row end per expert")
    for other, tensor in ((weight.names[0], weight.codes), ("offsets", offsets)):
        if tensor.device != rows.device:
            raise mismatch(other, tensor, f"device {rows.device}, as {name} has")


def check_optional(name: str, tensor: Tensor | None, shape: tuple[int, ...], activation: Tensor) -> None:
    """Raise a ValueError unless an optional operand is None, or floating-point, of a shape and on a device."""
    if tensor is None:
        return
    if tensor.shape != shape:
        raise mismatch(name, tensor, f"shape {shape}")
    ok = tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 2
    require(ok, name, tensor, "a floating-point dtype of 16 bits or more")
    if tensor.device != activation.device:
        raise mismatch(name, tensor, f"device {activation.device}, as activation has")


def check_offset_values(offsets: Tensor, rows: int, of: str = "activation") -> None:
    """Raise ValueError on a CPU when the offsets decrease, are negative or exceed the rows of the argument `of`.
    On other devices the check would have to synchronise: kernels ignore rows outside of the activation. It takes 0.5 us
    for 8 experts, 8 us for 512.
    """
    if offsets.device.type != "cpu":
        return
    ends = offsets.tolist()
    if ends[0] < 0 or ends != sorted(ends):
        raise ValueError(f"offsets: got {ends}, wanted cumulative row ends, at least 0, that never decrease")
    if ends[-1] > rows:
        raise ValueError(f"offsets: got a last row end of {ends[-1]}, wanted at most the {rows} rows of {of}")


def check_index_values(name: str, index: Tensor, least: int, end: int, of: str) -> None:
    """Raise ValueError on a CPU when a value is outside of [least, end). Check nothing on other devices, like
    `check_offset_values`. It takes 2 us for 8 values, 4 us for 65536."""
    if index.device.type != "cpu" or not index.numel():
        return
    low, high = (int(value) for value in torch.aminmax(index))
    if low < least or high >= end:
        bad = low if low < least else high
        raise ValueError(f"{name}: got a value of {bad}, wanted values from {least} to {end - 1}, {of}")


def refuse_forward_ad() -> None:
    """Raise NotImplementedError inside forward-mode differentiation: torch would silently drop the tangents of a custom
    operator, or take them for zeros."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "operators of experts have no forward-mode derivative (dual_level, torch.func.jvp, jacfwd);"
            " use reverse mode"
        )


def refuse_transformed_gradients() -> None:
    """Raise NotImplementedError for a gradient inside a transform of torch.func, whose own error names no remedy."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "operators of packed weights have no gradient inside transforms of torch.func (grad, vjp, jacrev, vmap of"
            " what requires a gradient); use torch.autograd.grad, or torch.no_grad() under vmap"
        )


def refuse_weight_gradients(packed: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError when a tensor of a weight, which comes with its name, requires a gradient: it would get none."""
    for name, tensor in packed:
        if tensor.requires_grad:
            raise ValueError(f"{name}: got a tensor that requires a gradient, wanted a frozen one; use detach()")

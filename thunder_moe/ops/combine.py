"""The operator thunder_moe::moe_combine: rows of experts -> the sum of each token's rows, in float32, in a fixed order.
Called by ops.experts_lora, parallel and integrations; calls kernels.select.

Legend: T tokens, A = top_k, M rows sorted by expert, E experts, N features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.kernels.select import training_kernels
from thunder_moe.ops.checks import check_index_values, check_offset_values
from thunder_moe.ops.operator import operator


def _shapes(rows: Tensor, offsets: Tensor, slot_row: Tensor) -> tuple[tuple[int, int]]:
    return ((slot_row.shape[0], rows.shape[1]),)


def _check(rows: Tensor, offsets: Tensor, slot_row: Tensor) -> None:
    require(rows.ndim == 2 and rows.dtype.is_floating_point, "rows", rows, "shape (rows, features), floating point")
    require(offsets.ndim == 1 and offsets.dtype == torch.int32, "offsets", offsets, "int32 of shape (experts,)")
    require(
        slot_row.ndim == 2 and slot_row.dtype == torch.int32, "slot_row", slot_row, "int32 of shape (tokens, top_k)"
    )
    for name, tensor in (("offsets", offsets), ("slot_row", slot_row)):
        require(tensor.device == rows.device, name, tensor, f"device {rows.device}, as rows has")


def _check_values(rows: Tensor, offsets: Tensor, slot_row: Tensor) -> None:
    check_offset_values(offsets, rows.shape[0], "rows")
    if offsets.device.type == "cpu":
        check_index_values("slot_row", slot_row, -1, int(offsets[-1]), "the rows of the experts, or -1 for none")


def _gradient(grad: Tensor, rows: Tensor, offsets: Tensor, slot_row: Tensor, *, needs: Any) -> tuple[Tensor]:
    (count, n), (tokens, top_k) = rows.shape, slot_row.shape
    # The token of each row; rows without a slot get `tokens` (a row of zeros), slots without a row go past the end.
    live = (slot_row >= 0) & (slot_row < offsets[-1])
    at = torch.where(live, slot_row.long(), count).flatten()
    token = torch.arange(tokens, device=grad.device).repeat_interleave(top_k)
    token_of_row = torch.full((count + 1,), tokens, device=grad.device).scatter(0, at, token)[:count]
    padded = torch.cat([grad, grad.new_zeros(1, n)])
    return (padded.index_select(0, token_of_row).to(rows.dtype),)


@operator(shapes=_shapes, check=_check, check_values=_check_values, gradient=_gradient, differentiable=("rows",))
def moe_combine(rows: Tensor, offsets: Tensor, slot_row: Tensor) -> Tensor:
    """Compute ``out[t] = sum over a of rows[slot_row[t, a]]``, added in float32 in the order of a, rounded once.

    Args:
        rows: floating point (M, N), sorted by expert; those at or past ``offsets[-1]`` may hold anything.
        offsets: int32 (E,), cumulative row ENDS.
        slot_row: int32 (T, A), the row of each slot, each row once at most, as `moe_route` gives it; -1 for a slot that
            counts nothing.

    Returns:
        (T, N) in the dtype of rows.

    Raises:
        ValueError: an operand has the wrong rank, dtype or device; on a CPU also rows in slot_row below -1 or past the
            experts' rows.
    """
    return training_kernels(rows.device).combine_rows(rows, offsets, slot_row)

"""Routing in plain torch: sort slots by expert, gather the rows of tokens, sum the rows of each token.
Called by kernels, activations, nn and integrations.huggingface; calls torch alone.

Legend: T tokens, A = top_k, slot = t * A + a, M rows sorted by expert, E experts, N and I output features.
Only `row_groups` synchronises with the host. Indices out of range read another row, or contribute nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "combine",
    "expert_of_row",
    "gather_rows",
    "invert",
    "live_rows",
    "route",
    "row_groups",
    "scale_of_rows",
    "sort_by_expert",
    "token_of_slot",
]


def sort_by_expert(ids_M: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts slots by expert, stably, in operations that Thunder and torch.compile trace.

    Args:
        ids_M: int64 (M,), the expert of each slot, in [0, E).
        num_experts: E.

    Returns:
        (order, offsets): int64 (M,), the slot of each row; int32 (E,) row ends.
    """
    order_M = torch.argsort(ids_M, stable=True)
    ones_M = torch.ones_like(ids_M, dtype=torch.int32)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=ids_M.device).scatter_add(0, ids_M, ones_M)
    return order_M, torch.cumsum(counts_E, 0, dtype=torch.int32)


def route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ops.route.moe_route: (T, A) -> row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
    ids = expert_ids.flatten().long()
    known = (ids >= 0) & (ids < num_experts)
    # Ids outside of [0, E) go to expert number E, past the end of `offsets`.
    order, ends = sort_by_expert(torch.where(known, ids, num_experts), num_experts + 1)
    slot_row = torch.where(known, invert(order).int(), -1).view(expert_ids.shape)
    return order.int(), ends[:-1], slot_row


def invert(order_M: Tensor) -> Tensor:
    """The inverse of a permutation, int64 (M,): by a scatter, one kernel, where a second sort is several."""
    return torch.zeros_like(order_M).scatter(0, order_M, torch.arange(order_M.shape[0], device=order_M.device))


def token_of_slot(slot: Tensor, slots: int, tokens: int) -> Tensor:
    """The token of each slot, when `tokens` tokens have `slots` slots in all."""
    return slot // (slots // max(tokens, 1)) if slots else slot


def gather_rows(activation: Tensor, row_slot: Tensor | None) -> Tensor:
    """(T, K) -> (M, K): the token of each row; the activation itself where it holds rows already."""
    if row_slot is None:
        return activation
    slots = row_slot.shape[0]
    return activation.index_select(0, token_of_slot(_within(row_slot, slots), slots, activation.shape[0]))


def scale_of_rows(slot_scale: Tensor | None, row_slot: Tensor | None) -> Tensor | None:
    """The scale of each row, float32 (M,), from one per slot (T, A), or per row (M,) where row_slot is None."""
    if slot_scale is None:
        return None
    flat = slot_scale.float().flatten()
    return flat if row_slot is None else flat[_within(row_slot, row_slot.shape[0])]


def _within(index: Tensor, size: int) -> Tensor:
    return index.clamp(0, max(size - 1, 0))


def combine(rows: Tensor, offsets: Tensor, slot_row: Tensor, slot_weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(M, N) -> (T, N) in the rows' dtype: each token's rows, plus bias (E, N), times their weights, summed in fp32.

    Slots without a row contribute nothing: those with -1 or another number outside of the experts' rows.
    """
    (tokens, top_k), (count, n) = slot_row.shape, rows.shape
    out = rows.new_empty(tokens, n)
    if count == 0:
        return out.zero_()
    end = offsets[-1].clamp_max(count)
    experts = expert_of_row(offsets, count) if bias is not None else None
    for part in _parts(tokens, top_k * n, rows.device):
        row = slot_row[part].flatten()
        at = _within(row, count)
        values = rows.index_select(0, at).float()  # [T * A, N]
        if bias is not None and experts is not None:
            values += bias[experts[at]]
        if slot_weight is not None:
            values *= slot_weight[part].flatten()[:, None]
        values.masked_fill_(((row < 0) | (row >= end))[:, None], 0)
        out[part] = values.view(slot_row[part].shape[0], top_k, n).sum(1)
    return out


# Float32 values handled at a time on a CPU, so that they stay in its L2 cache.
_PART = 2**18


def _parts(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Slices that cover `rows`, small enough for a CPU's cache; one slice on other devices."""
    step = max(1, _PART // max(columns, 1)) if device.type == "cpu" else max(rows, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def expert_of_row(offsets: Tensor, rows: int) -> Tensor:
    """int64 (M,): the expert of each row; the last one for rows past ``offsets[-1]``."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets, row, right=True).clamp_max(offsets.shape[0] - 1)


def live_rows(offsets: Tensor, rows: int) -> Tensor:
    """bool (M, 1): whether the row belongs to an expert."""
    return (torch.arange(rows, dtype=torch.int32, device=offsets.device) < offsets[-1])[:, None]


def row_groups(offsets: Tensor, rows: int) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of each expert that has rows, among `rows` rows whatever the offsets are."""
    ends = [min(max(end, 0), rows) for end in offsets.tolist()]
    groups = zip(range(len(ends)), [0, *ends], ends, strict=False)
    return [(expert, begin, end) for expert, begin, end in groups if end > begin]

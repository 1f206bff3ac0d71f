"""What surrounds the expert GEMMs of a layer, in plain torch: routing, gather of rows, SwiGLU, weighted combine.
Called by kernels.reference and others around their GEMMs, and by the gradients in ops. Calls torch alone.

Legend: T tokens, A = top_k, slot = t * A + a, M rows sorted by expert, E experts, N and I output features.
Nothing here synchronises with the host, except `row_groups`. Indices out of range read another row, or count nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "PLAIN_SWIGLU",
    "SwiGLU",
    "combine",
    "expert_of_row",
    "gather_rows",
    "invert",
    "live_rows",
    "pre_activation",
    "route",
    "row_groups",
    "scale_of_rows",
    "sort_by_expert",
    "swiglu",
    "token_of_slot",
]


@dataclass(frozen=True)
class SwiGLU:
    """``g * sigmoid(alpha * g) * (u + up_shift)`` with g = min(gate, limit), u = clamp(up, -limit, limit).

    The defaults are SwiGLU, ``silu(gate) * up``; GPT-OSS has alpha 1.702, limit 7 and up_shift 1.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0

    def clamp(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if self.limit is None:
            return gate, up
        return gate.clamp_max(self.limit), up.clamp(-self.limit, self.limit)

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = self.clamp(gate, up)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.up_shift)


PLAIN_SWIGLU = SwiGLU()


def route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ops.route.moe_route: (T, A) -> row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
    ids = expert_ids.flatten().long()
    known = (ids >= 0) & (ids < num_experts)
    ids = torch.where(known, ids, num_experts)
    row_slot = torch.argsort(ids, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts = counts.scatter_add(0, ids, torch.ones_like(ids, dtype=torch.int32))
    rows = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    slot_row = torch.empty_like(rows).scatter(0, row_slot, rows)
    slot_row = torch.where(known, slot_row, -1).view(expert_ids.shape)
    return row_slot.int(), counts[:-1].cumsum(0, dtype=torch.int32), slot_row


def sort_by_expert(ids_M: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """`moe_route` in what Thunder and torch.compile trace of torch itself, for 16-bit experts.

    Args:
        ids_M: int64 (M,), the expert of each slot.
        num_experts: E.

    Returns:
        (order, offsets): the slot of each row, sorted by expert, stably; int32 (E,) row ends.
    """
    order_M = torch.argsort(ids_M, stable=True)
    ones_M = torch.ones_like(ids_M, dtype=torch.int32)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=ids_M.device).scatter_add(0, ids_M, ones_M)
    return order_M, torch.cumsum(counts_E, 0, dtype=torch.int32)


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
    """float32 (M,) of a scale per slot (T, A), or per row (M,) where row_slot is None."""
    if slot_scale is None:
        return None
    flat = slot_scale.float().flatten()
    return flat if row_slot is None else flat[_within(row_slot, row_slot.shape[0])]


def _within(index: Tensor, size: int) -> Tensor:
    return index.clamp(0, max(size - 1, 0))


def swiglu(
    gate_up: Tensor, offsets: Tensor, form: SwiGLU, row_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """(M, 2I) -> (M, I) in the same dtype: times row_scale (M,), plus bias (E, 2I), then the activation, in float32."""
    return form(*pre_activation(gate_up, offsets, row_scale, bias).chunk(2, -1)).to(gate_up.dtype)


def pre_activation(gate_up: Tensor, offsets: Tensor, row_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """(M, 2I) -> float32 (M, 2I), times row_scale (M,), plus bias (E, 2I)."""
    gate_up = gate_up.float()
    if row_scale is not None:
        gate_up = gate_up * row_scale[:, None]
    if bias is not None:
        gate_up = gate_up + bias[expert_of_row(offsets, gate_up.shape[0])]
    return gate_up


def combine(rows: Tensor, offsets: Tensor, slot_row: Tensor, slot_weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(M, N) -> (T, N) in the rows' dtype: each token's rows, plus bias (E, N), times their weights, summed in fp32.

    Slots without a row count nothing: those of -1, or any other number outside of the experts' rows.
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


# Numbers handled at a time on a CPU: what its L2 cache holds of float32.
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

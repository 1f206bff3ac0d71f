"""The reference backend in plain torch: every device, every dtype, never the fastest.
Called by kernels.select and the other backends; calls formats, routing, activations and torch's matrix products.

dequantize one expert -> GEMM over its rows -> (gate half, up half -> SwiGLU). On a CPU only experts that have rows are
dequantized, one at a time, so the extra memory is one expert. On other devices the offsets stay on the device (no
host synchronisation, CUDA-graph capturable): each expert's GEMM runs over all rows and a mask keeps its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thunder_moe import routing
from thunder_moe.activations import SWIGLU, SwiGLUConfig, pre_activation
from thunder_moe.formats.registry import FORMATS as NUMBER_FORMATS
from thunder_moe.formats.registry import dequantize_expert
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels import add_norm
from thunder_moe.kernels.attention import decode_attention
from thunder_moe.kernels.batch_invariance import by_rows, is_batch_invariant, refuse_plain_torch
from thunder_moe.kernels.experts import unfused
from thunder_moe.kernels.slow_paths import to_linear
from thunder_moe.routing import RouterConfig, gather_rows, route, row_groups, scale_of_rows

__all__ = [
    "add_norm_linear_router",
    "add_norm_mm",
    "decode_attention",
    "grouped_mm",
    "grouped_mm_combine",
    "grouped_mm_dgrad",
    "grouped_swiglu",
    "linear_router",
    "mm",
    "mm_dgrad",
    "moe_experts",
    "route",
    "router",
    "unavailable_reason",
]

FORMATS = tuple(NUMBER_FORMATS)  # of weights that it takes


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """Return None: the reference runs on every device of torch."""
    return None


def grouped_mm(activation: torch.Tensor, weight: PackedWeight, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply (M, K) rows sorted by expert, with offsets (E,) of row ends: -> (M, N) in the activation's dtype."""
    return _per_expert(activation, weight, offsets, weight.shape[1], lambda rows, expert: rows @ expert.t())


def grouped_mm_dgrad(grad: torch.Tensor, weight: PackedWeight, offsets: torch.Tensor) -> torch.Tensor:
    """Return the gradient (M, K) of `grouped_mm`'s activation, from the gradient (M, N) of its output."""
    return _per_expert(grad, weight, offsets, weight.shape[2], lambda rows, expert: rows @ expert)


def grouped_swiglu(
    activation: torch.Tensor,
    weight: PackedWeight,
    offsets: torch.Tensor,
    row_slot: torch.Tensor | None = None,
    slot_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    form: SwiGLUConfig = SWIGLU,
) -> torch.Tensor:
    """Return (M, I) of rows (M, K), or of tokens (T, K) with row_slot (M,); weight (E, 2I, K) has gate rows first."""
    gate_up = grouped_mm(gather_rows(activation, row_slot), weight, offsets)
    pre = pre_activation(gate_up, offsets, scale_of_rows(slot_scale, row_slot), bias)
    activated: torch.Tensor = by_rows(lambda rows: form(*rows.chunk(2, -1)), pre)
    return activated.to(gate_up.dtype)


def grouped_mm_combine(
    activation: torch.Tensor,
    weight: PackedWeight,
    offsets: torch.Tensor,
    slot_row: torch.Tensor,
    slot_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply (M, K) -> (T, N): each slot's row, plus bias (E, N), times slot_weight (T, A), summed per token."""
    return combine(grouped_mm(activation, weight, offsets), offsets, slot_row, slot_weight, bias)


def mm(activation: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply (M, K) by a weight (1, N, K), plus bias (N,): -> (M, N) in the activation's dtype."""
    (matrix,) = _experts(weight, activation.dtype, range(1))
    with torch.autocast(activation.device.type, enabled=False):
        out: torch.Tensor = by_rows(lambda rows: rows @ matrix.t(), activation)
    return out if bias is None else (out + bias).to(out.dtype)


def mm_dgrad(grad: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return the gradient (M, K) of `mm`'s activation, from the gradient (M, N) of its output."""
    (matrix,) = _experts(weight, grad.dtype, range(1))
    with torch.autocast(grad.device.type, enabled=False):
        return grad @ matrix


def _per_expert(
    rows: torch.Tensor,
    weight: PackedWeight,
    offsets: torch.Tensor,
    columns: int,
    gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run `gemm(rows of the expert, dequantized (N, K) expert)` for each expert; rows past the last group are 0.

    It computes in the dtype of the rows, also under autocast: a backend's result depends on its operands alone.
    """
    if rows.device.type != "cpu":
        refuse_plain_torch(rows)
    out = rows.new_zeros(rows.shape[0], columns)
    with torch.autocast(rows.device.type, enabled=False):
        if rows.device.type == "cpu":
            groups = row_groups(offsets, rows.shape[0])
            matrices = _experts(weight, rows.dtype, [expert for expert, _, _ in groups])
            for (_, begin, end), matrix in zip(groups, matrices, strict=True):
                out[begin:end] = by_rows(lambda some, matrix=matrix: gemm(some, matrix), rows[begin:end])
            return out
        row_expert = torch.searchsorted(
            offsets.contiguous(), torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32), right=True
        )
        for expert, matrix in enumerate(_experts(weight, rows.dtype, range(weight.shape[0]))):
            out = torch.where((row_expert == expert)[:, None], gemm(rows, matrix), out)
        return out


def _experts(weight: PackedWeight, dtype: torch.dtype, experts: list[int] | range) -> Iterator[torch.Tensor]:
    """Yield the dequantized (N, K) matrix of each expert, in one buffer that the next expert overwrites."""
    weight = to_linear(weight, "plain torch")
    _, n, k = weight.shape
    matrix = torch.empty(n, k, dtype=dtype, device=weight.device)
    for expert in experts:
        dequantize_expert(weight, expert, matrix)
        yield matrix


def combine(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    slot_row: torch.Tensor,
    slot_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Sum each token's rows, (M, N) -> (T, N), as `routing.combine`."""
    slots = (slot_row,) if slot_weight is None else (slot_row, slot_weight)
    return by_rows(lambda row, weight=None: routing.combine(rows, offsets, row, weight, bias), *slots)


def router(
    logits: torch.Tensor, bias: torch.Tensor | None, form: RouterConfig, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route (T, E), (E,) -> scores (T, A) in a dtype, int64 ids (T, A), row_slot, offsets, slot_row (`moe_router`)."""
    if not is_batch_invariant():
        return routing.router(logits, bias, form, dtype)
    scores, ids = by_rows(lambda rows: routing.router(rows, bias, form, dtype)[:2], logits)
    return scores, ids, *route(ids, logits.shape[1])


def _router_logits(hidden: torch.Tensor, *linear: Any) -> torch.Tensor:
    return by_rows(lambda rows: routing.router_logits(rows, *linear), hidden)


linear_router = functools.partial(routing.linear_router, choose=router, logits_of=_router_logits)
moe_experts = functools.partial(unfused, sys.modules[__name__])
add_norm_mm = functools.partial(add_norm.add_norm_mm, mm=mm)
add_norm_linear_router = functools.partial(add_norm.add_norm_linear_router, linear_router=linear_router)

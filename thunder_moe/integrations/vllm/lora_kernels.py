"""Triton kernels for the adapters of few tokens: a program for each (token, expert), with fewer launches than GEMMs.
Called by lora; calls Triton, which vLLM has on CUDA. Nothing here synchronises with the host.

    shrink          (T or M, K), A (S, E, R, K) -> inner, float32 (P, T * A, R)
    expand_rows     adds B (S, E, N, R) times inner to rows (M, P * N)
    expand_tokens   adds B (S, E, N, R) times inner, times the router's weights, to (T, N)

Legend: T tokens, A = top_k, slot = t * A + a, M rows sorted by expert, E experts, S adapters, R rank, P parts (gate and
up).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def _width(ranks: int) -> int:
    """Return the columns of A that 8 warps read at a time, as many as their registers hold."""
    return min(1024, max(32, 16384 // ranks))


def _columns(ranks: int) -> int:
    """Return the rows of B that a program of 4 warps reads, as many as their registers hold."""
    return min(128, max(16, 8192 // ranks))


@triton.jit
def _shrink(
    x, slot_row, ids, adapters, first, second, out, loaded, of_adapter, of_expert, k, rank, slots,
    TOP_K: tl.constexpr, BY_ROW: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    slot, part = tl.program_id(0), tl.program_id(1)
    token = slot // TOP_K
    expert = tl.load(ids + slot).to(tl.int64)
    adapter = tl.load(adapters + token).to(tl.int64)
    if (expert >= 0) & (adapter >= 0) & (adapter < loaded):
        row = token.to(tl.int64)
        if BY_ROW:
            row = tl.load(slot_row + slot).to(tl.int64)
        at = adapter * of_adapter + expert * of_expert
        r = tl.arange(0, RANKS)
        total = tl.zeros((RANKS,), tl.float32)
        for begin in range(0, k, WIDTH):
            column = begin + tl.arange(0, WIDTH)
            values = tl.load(x + row * k + column, mask=column < k, other=0.0).to(tl.float32)
            inside = (r < rank)[:, None] & (column < k)[None, :]
            place = at + r[:, None] * k + column[None, :]
            if part == 0:
                a = tl.load(first + place, mask=inside, other=0.0)
            else:
                a = tl.load(second + place, mask=inside, other=0.0)
            total += tl.sum(a.to(tl.float32) * values[None, :], 1)
        tl.store(out + (part * slots + slot) * rank + r, total, mask=r < rank)


@triton.jit
def _expand_rows(
    inner, slot_row, ids, adapters, first, second, out, loaded, of_adapter, of_expert, of_row, n, rank, slots, width,
    TOP_K: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    slot, part = tl.program_id(0), tl.program_id(2)
    expert = tl.load(ids + slot).to(tl.int64)
    adapter = tl.load(adapters + slot // TOP_K).to(tl.int64)
    if (expert >= 0) & (adapter >= 0) & (adapter < loaded):
        r = tl.arange(0, RANKS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        values = tl.load(inner + (part * slots + slot) * rank + r, mask=r < rank, other=0.0)
        inside = (column < n)[:, None] & (r < rank)[None, :]
        place = adapter * of_adapter + expert * of_expert + column[:, None] * of_row + r[None, :]
        if part == 0:
            b = tl.load(first + place, mask=inside, other=0.0)
        else:
            b = tl.load(second + place, mask=inside, other=0.0)
        change = tl.sum(b.to(tl.float32) * values[None, :], 1)
        target = out + tl.load(slot_row + slot).to(tl.int64) * width + part * n + column
        before = tl.load(target, mask=column < n, other=0.0)
        tl.store(target, (before.to(tl.float32) + change).to(before.dtype), mask=column < n)


@triton.jit
def _expand_tokens(
    inner, weights, ids, adapters, b, out, loaded, of_adapter, of_expert, n, rank, width,
    TOP_K: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    adapter = tl.load(adapters + token).to(tl.int64)
    if (adapter >= 0) & (adapter < loaded):
        r = tl.arange(0, RANKS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (column < n)[:, None] & (r < rank)[None, :]
        total = tl.zeros((COLUMNS,), tl.float32)
        for a in tl.static_range(TOP_K):  # no branches, so that the loads of all overlap
            slot = token * TOP_K + a
            expert = tl.load(ids + slot).to(tl.int64)
            weight = tl.load(weights + slot).to(tl.float32)
            values = tl.load(inner + slot * rank + r, mask=r < rank, other=0.0)
            values = tl.where(expert >= 0, values * weight, 0.0)  # without an expert they are uninitialized
            place = adapter * of_adapter + tl.maximum(expert, 0) * of_expert + column[:, None] * rank + r[None, :]
            each = tl.load(b + place, mask=inside, other=0.0)
            total += tl.sum(each.to(tl.float32) * values[None, :], 1)
        target = out + token.to(tl.int64) * width + column
        before = tl.load(target, mask=column < n, other=0.0)
        tl.store(target, (before.to(tl.float32) + total).to(before.dtype), mask=column < n)


def shrink(x: Tensor, slot_row: Tensor | None, ids: Tensor, adapters: Tensor, a: tuple[Tensor, ...]) -> Tensor:
    """Multiply x by A of each slot's adapter and expert -> float32 (P, T * A, R); other slots stay uninitialized.

    Args:
        x: (T, K), or with slot_row (M, K), contiguous.
        slot_row: int32 (T, A), or None.
        ids: int32 (T, A), -1 for none.
        adapters: int32 or int64 (T,); numbers outside of [0, S) mean none.
        a: P tensors (S, E or 1, R, K), contiguous.
    """
    (loaded, _, rank, k), (tokens, top_k) = a[0].shape, ids.shape
    out, ranks = x.new_empty(len(a), tokens * top_k, rank, dtype=torch.float32), triton.next_power_of_2(rank)
    _shrink[(tokens * top_k, len(a))](
        x, ids if slot_row is None else slot_row, ids, adapters, a[0], a[-1], out, loaded, *strides(a[0]), k,
        rank, tokens * top_k, TOP_K=top_k, BY_ROW=slot_row is not None, RANKS=ranks, WIDTH=_width(ranks),
        num_warps=8,
    )  # fmt: skip
    return out


def expand_rows(
    out: Tensor, inner: Tensor, slot_row: Tensor, ids: Tensor, adapters: Tensor, b: tuple[Tensor, ...]
) -> None:
    """Adds B times `inner` to the rows (M, P * N) of the slots, in place; B may have every second row of a tensor.

    The other arguments are as in `shrink`."""
    (loaded, _, n, rank), (tokens, top_k) = b[0].shape, ids.shape
    ranks = triton.next_power_of_2(rank)
    _expand_rows[(tokens * top_k, triton.cdiv(n, _columns(ranks)), len(b))](
        inner, slot_row, ids, adapters, b[0], b[-1], out, loaded, *strides(b[0]), b[0].stride(2), n, rank,
        tokens * top_k, out.shape[1], TOP_K=top_k, RANKS=ranks, COLUMNS=_columns(ranks),
    )  # fmt: skip


def expand_tokens(out: Tensor, inner: Tensor, weights: Tensor, ids: Tensor, adapters: Tensor, b: Tensor) -> None:
    """Adds the sum over each token's slots of weights (T, A) times B times `inner` to out (T, N), in place.

    `out` may have columns of a wider tensor."""
    (loaded, _, n, rank), (tokens, top_k) = b.shape, ids.shape
    ranks = triton.next_power_of_2(rank)
    _expand_tokens[(tokens, triton.cdiv(n, _columns(ranks)))](
        inner, weights, ids, adapters, b, out, loaded, *strides(b), n, rank, out.stride(0),
        TOP_K=top_k, RANKS=ranks, COLUMNS=_columns(ranks),
    )  # fmt: skip


def strides(weight: Tensor) -> tuple[int, int]:
    """Return the strides of an adapter and of an expert, 0 if the experts share one matrix."""
    return weight.stride(0), weight.stride(1) if weight.shape[1] > 1 else 0

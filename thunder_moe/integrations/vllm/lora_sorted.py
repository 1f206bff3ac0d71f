"""Triton kernels for the adapters of many tokens: tensor-core products of rows sorted by (adapter, expert).
Called by lora; calls lora_kernels and Triton, which vLLM has on CUDA. Nothing here synchronises with the host.

    blocks          ends of the pairs' rows -> the pair and the first row of each block of rows
    shrink          (T or M, K), A (S, E, R, K) -> inner, (P, M, R)
    expand_rows     adds B (S, E, N, R) times inner to rows (M, P * N) that are sorted by expert
    expand          B (S, E, N, R) times inner, times the router's weights -> (M, N)

The rows of a block have one adapter and one expert, whose matrices are read once for all of them.

Legend: T tokens, A = top_k, slot = t * A + a, M rows sorted by pair, E experts, S adapters, R rank, P parts (gate and
up).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thunder_moe.integrations.vllm.lora_kernels import strides

_ROWS = 32  # of a block
_WIDTH = 128  # columns of A at a time
_COLUMNS = 128  # rows of B of a program


class Blocks(NamedTuple):
    """Rows by blocks.

    Attributes:
        pair: int32 (B,), adapter * E + expert; S * E for a block without rows.
        row: int32 (B,), the first row.
        ends: int32 (S * E,), row ends of the pairs.
        row_slot: int32 (M,), the slot of each row.
        experts: E.
    """

    pair: Tensor
    row: Tensor
    ends: Tensor
    row_slot: Tensor
    experts: int


def blocks(ends: Tensor, row_slot: Tensor, experts: int) -> Blocks:
    """Return the blocks of rows, as many as the worst routing needs, so that the host knows their number.

    Args:
        ends: int32 (S * E,), cumulative row ends.
        row_slot: int32 (M,).
        experts: E.
    """
    pairs = ends.shape[0]
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    counts = (ends - starts + (_ROWS - 1)) // _ROWS
    last = counts.cumsum(0)
    block = torch.arange(triton.cdiv(row_slot.shape[0], _ROWS) + pairs, device=ends.device)
    pair = torch.searchsorted(last, block, right=True)
    inside = pair.clamp_max(pairs - 1)
    row = starts[inside] + (block - last[inside] + counts[inside]) * _ROWS
    return Blocks(pair.to(torch.int32), row.to(torch.int32), ends, row_slot, experts)


@triton.jit
def _shrink(
    x, pair_of_block, row_of_block, ends, row_slot, slot_row, first, second, out, pairs, experts, of_adapter,
    of_expert, k, rank, rows, TOP_K: tl.constexpr, BY_ROW: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    pair = tl.load(pair_of_block + block)
    if pair < pairs:
        row = tl.load(row_of_block + block) + tl.arange(0, ROWS)
        there = row < tl.load(ends + pair)
        slot = tl.load(row_slot + row, mask=there, other=0)
        source = (slot // TOP_K).to(tl.int64)
        if BY_ROW:
            source = tl.load(slot_row + slot, mask=there, other=0).to(tl.int64)
        at = (pair // experts).to(tl.int64) * of_adapter + (pair % experts).to(tl.int64) * of_expert
        r = tl.arange(0, RANKS)
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for begin in range(0, k, WIDTH):
            column = begin + tl.arange(0, WIDTH)
            values = tl.load(
                x + source[:, None] * k + column[None, :], mask=there[:, None] & (column < k)[None, :], other=0.0
            )
            inside = (column < k)[:, None] & (r < rank)[None, :]
            place = at + r[None, :] * k + column[:, None]
            if part == 0:
                a = tl.load(first + place, mask=inside, other=0.0)
            else:
                a = tl.load(second + place, mask=inside, other=0.0)
            total = tl.dot(values.to(a.dtype), a, total, input_precision="ieee")
        target = out + (part * rows + row.to(tl.int64))[:, None] * rank + r[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=there[:, None] & (r < rank)[None, :])


@triton.jit
def _expand(
    inner, weights, pair_of_block, row_of_block, ends, row_slot, slot_row, first, second, out, pairs, experts,
    of_adapter, of_expert, of_row, n, rank, rows, width, ADD: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(2)
    pair = tl.load(pair_of_block + block)
    if pair < pairs:
        row = tl.load(row_of_block + block) + tl.arange(0, ROWS)
        there = row < tl.load(ends + pair)
        slot = tl.load(row_slot + row, mask=there, other=0)
        at = (pair // experts).to(tl.int64) * of_adapter + (pair % experts).to(tl.int64) * of_expert
        r = tl.arange(0, RANKS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        values = tl.load(
            inner + (part * rows + row.to(tl.int64))[:, None] * rank + r[None, :],
            mask=there[:, None] & (r < rank)[None, :], other=0.0,
        )  # fmt: skip
        inside = (r < rank)[:, None] & (column < n)[None, :]
        place = at + column[None, :] * of_row + r[:, None]
        if part == 0:
            b = tl.load(first + place, mask=inside, other=0.0)
        else:
            b = tl.load(second + place, mask=inside, other=0.0)
        change = tl.dot(values, b, input_precision="ieee")
        mask = there[:, None] & (column < n)[None, :]
        if ADD:
            to = tl.load(slot_row + slot, mask=there, other=0).to(tl.int64)
            target = out + to[:, None] * width + part * n + column[None, :]
            change += tl.load(target, mask=mask, other=0.0).to(tl.float32)
        else:
            target = out + row.to(tl.int64)[:, None] * width + column[None, :]
            change *= tl.load(weights + slot, mask=there, other=0.0).to(tl.float32)[:, None]
        tl.store(target, change.to(out.dtype.element_ty), mask=mask)


def shrink(x: Tensor, where: Blocks, top_k: int, slot_row: Tensor | None, a: tuple[Tensor, ...]) -> Tensor:
    """Multiply x by A of each row's pair -> (P, M, R) of A's dtype; rows without a pair stay uninitialized.

    Args:
        x: (T, K), or with slot_row (M, K), contiguous.
        where: the blocks.
        top_k: A.
        slot_row: int32 (T, A), the row of x of each slot, or None.
        a: P tensors (S, E or 1, R, K), contiguous.
    """
    (_, _, rank, k), rows = a[0].shape, where.row_slot.shape[0]
    out = a[0].new_empty(len(a), rows, rank)
    _shrink[(where.pair.shape[0], len(a))](
        x, where.pair, where.row, where.ends, where.row_slot,
        where.row_slot if slot_row is None else slot_row, a[0], a[-1], out, where.ends.shape[0],
        where.experts, *strides(a[0]), k, rank, rows, TOP_K=top_k, BY_ROW=slot_row is not None, ROWS=_ROWS,
        RANKS=_ranks(rank), WIDTH=_WIDTH, num_warps=4,
    )  # fmt: skip
    return out


def expand_rows(out: Tensor, inner: Tensor, where: Blocks, slot_row: Tensor, b: tuple[Tensor, ...]) -> None:
    """Adds B times `inner` to the rows (M, P * N) of the slots, in place.

    `b` are P tensors (S, E or 1, N, R); each may have every second row of a tensor."""
    _launch(out, inner, where, inner, slot_row, b, True)


def expand(inner: Tensor, where: Blocks, weights: Tensor, b: Tensor) -> Tensor:
    """Multiply `inner` (1, M, R) by B (S, E or 1, N, R) and the slots' weights (T, A) -> (M, N) of B's dtype."""
    out = b.new_empty(inner.shape[1], b.shape[2])
    _launch(out, inner, where, weights, where.row_slot, (b,), False)
    return out


def _launch(
    out: Tensor, inner: Tensor, where: Blocks, weights: Tensor, slot_row: Tensor, b: tuple[Tensor, ...], add: bool
) -> None:
    _, _, n, rank = b[0].shape
    _expand[(where.pair.shape[0], triton.cdiv(n, _COLUMNS), len(b))](
        inner, weights, where.pair, where.row, where.ends, where.row_slot, slot_row, b[0], b[-1], out,
        where.ends.shape[0], where.experts, *strides(b[0]), b[0].stride(2), n, rank, inner.shape[1], out.shape[1],
        ADD=add, ROWS=_ROWS, RANKS=_ranks(rank), COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


def _ranks(rank: int) -> int:
    """Return the padded rank of a tensor core's product, which is at least 16."""
    return max(16, int(triton.next_power_of_2(rank)))

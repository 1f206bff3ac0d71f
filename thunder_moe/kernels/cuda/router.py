"""A router's launches, prepared once for logits of one kind: which kernels of src/router.cu, of which sizes.
Called by kernels/cuda/backend.py, and through its `PREPARED` by the operator; calls launch.py beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.by_parts import PackedOrder
from thunder_moe.kernels.cuda import launch
from thunder_moe.kernels.cuda.arguments import RouterArguments, RouterLinearArguments
from thunder_moe.kernels.cuda.configs import COMMON
from thunder_moe.kernels.cuda.plan import CACHE_LINE
from thunder_moe.kernels.cuda.workspace import semaphore_pool
from thunder_moe.routing import RouterForm

__all__ = [
    "SOURCES",
    "LinearRouterLaunch",
    "RouterLaunch",
    "linear_router_launch",
    "router_launch",
    "serves_linear",
    "unserved_reason",
]

SOURCES = (COMMON, COMMON.with_name("router.cu"))
MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 512, 32, 32
PER_LANE = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # experts of a lane
BY_BITS, BY_LOGIT, BY_SCORE = range(3)  # what is compared: kByBits, kByLogit, kByScore
# Up to so many tokens, a block of so many threads does it all; against two kernels on an H200: Qwen3, 16 tokens 3.8 and
# 4.9 us, 32 tokens (256 slots) 6.4 and 4.8; Mixtral and GPT-OSS, 32 tokens 2.8 and 4.3, 3.6 and 4.4.
_ONE_BLOCK = ((16, 512), (32, 1024))
_ONE_BLOCK_SLOTS = 128
# Of router_linear. For one token of Qwen3 it takes 5.0 us behind a norm, where a linear layer of torch and
# router_one_block take 7.6; in a row of calls, for 2 and 3 tokens 4.6 and 5.2 instead of 6.9 and 7.0 (H200).
_LINEAR_TOKENS, _LINEAR_THREADS = 3, 256
_SCATTER_THREADS = 512  # kThreads
_CHOOSE = ((1024, 512), (2**31, 1024))  # up to so many tokens, blocks of so many threads choose (2048: 11.8 and 7.2 us)
_BLOCKS = ((8192, 128), (2**31, 256))  # and about so many blocks (Qwen3, 65536 tokens: 102 us by 128, 62 by 256)

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def unserved_reason(experts: int, form: RouterForm) -> str | None:
    """What the kernels do not serve; None when they do."""
    for value, most, what in (
        (experts, MAX_EXPERTS, "experts"),
        (form.top_k, MAX_TOP_K, "experts per token"),
        (form.num_groups if form.grouped else 1, MAX_GROUPS, "groups"),
    ):
        if value > most:
            return f"more than {most} {what}"
    return None


class RouterLaunch:
    """The choice of experts and the sort of slots by expert.

    Args:
        shape: (T, E) of the logits, both positive and without `unserved_reason`.
        form: of the router.
        dtype: of the logits.
        bias: the dtype of that operand; None for no operand.
        scores: the dtype of the scores.
        device: where the operands are.
    """

    def __init__(
        self, shape: tuple[int, int], form: RouterForm, dtype: torch.dtype, bias: torch.dtype | None,
        scores: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        (tokens, experts), slots = shape, shape[0] * form.top_k
        self._index, self._experts, self._of_slots = device.index, experts, (tokens, form.top_k)
        self._empty, self._results = launch.allocator(device), _results(tokens, experts, form.top_k, scores)
        per_lane, by = _kind_of_kernel(experts, form, dtype, bias)
        fits = slots <= _ONE_BLOCK_SLOTS
        one_block = next((threads for most, threads in _ONE_BLOCK if fits and tokens <= most), None)
        per_block, blocks = tokens, 1
        if one_block is not None:
            kernels = [(f"router_one_block<{per_lane}, {by}, {one_block}>", one_block, 0)]
        else:
            threads = next(threads for most, threads in _CHOOSE if tokens <= most)
            wanted = next(blocks for most, blocks in _BLOCKS if tokens <= most)
            at_once = threads // 32
            per_block = -(-tokens // (wanted * at_once)) * at_once
            blocks = -(-tokens // per_block)
            kernels = [
                (f"router_choose<{per_lane}, {by}, {threads}>", threads, 0),
                (f"router_scatter<{per_lane}>", _SCATTER_THREADS, 4 * _SCATTER_THREADS // 32 * experts),
            ]
        self._counts = 0 if one_block is not None else blocks * experts
        self._launchers = [
            launch.launcher(SOURCES, name, threads, shared_bytes, blocks, RouterArguments, self._index)
            for name, threads, shared_bytes in kernels
        ]
        self._numbers = _numbers(shape, form, per_block, dtype, bias, scores)

    def __call__(self, logits: Tensor, bias: Tensor | None) -> Results:
        """Contiguous logits (T, E) and bias (E,) -> scores, expert_ids, row_slot, offsets, slot_row."""
        index = self._index
        if launch.current_device() != index:
            with torch.cuda.device(index):
                return self(logits, bias)
        empty = self._empty
        scores, expert_ids, row_slot, offsets, slot_row = [empty(*result) for result in self._results]
        counts = 0
        if self._counts:
            workspace = empty((self._counts,), (1,), torch.int32)
            counts = workspace.data_ptr()
        stream = launch.current_stream(index)
        for launcher in self._launchers:
            launcher(
                stream, logits.data_ptr(), 0 if bias is None else bias.data_ptr(), scores.data_ptr(),
                expert_ids.data_ptr(), counts, row_slot.data_ptr(), offsets.data_ptr(), slot_row.data_ptr(),
                *self._numbers,
            )  # fmt: skip
        return scores, expert_ids, row_slot, offsets, slot_row

    def packed(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, PackedOrder] | None:
        """The same as scores, expert_ids and the rest in one allocation; None on another device than the current."""
        index, (tokens, top_k) = self._index, self._of_slots
        if launch.current_device() != index:
            return None
        empty = self._empty
        scores, expert_ids = empty(*self._results[0]), empty(*self._results[1])
        order = PackedOrder(logits, tokens, top_k, self._experts)
        row_slot, offsets, slot_row = order.addresses
        counts = 0
        if self._counts:
            workspace = empty((self._counts,), (1,), torch.int32)
            counts = workspace.data_ptr()
        stream = launch.current_stream(index)
        for launcher in self._launchers:
            launcher(
                stream, logits.data_ptr(), 0 if bias is None else bias.data_ptr(), scores.data_ptr(),
                expert_ids.data_ptr(), counts, row_slot, offsets, slot_row, *self._numbers,
            )  # fmt: skip
        return scores, expert_ids, order


def serves_linear(shape: tuple[int, int], hidden_size: int, form: RouterForm, dtype: torch.dtype) -> bool:
    """Whether one kernel is to compute the logits (T, E) of rows (T, H) of a dtype, too."""
    tokens, _ = shape
    few = 0 < tokens <= _LINEAR_TOKENS and tokens * form.top_k <= _LINEAR_THREADS
    return few and hidden_size % 8 == 0 and dtype != torch.float32 and unserved_reason(shape[1], form) is None


class LinearRouterLaunch:
    """A router's linear layer, the choice of experts and the sort of slots by expert.

    Args:
        shape: (T, E) of the logits; `serves_linear`.
        hidden_size: H.
        form: of the router.
        dtype: of rows and weight.
        linear_bias: whether there is that operand.
        bias: the dtype of that operand; None for no operand.
        logits: the dtype of the logits, that of the rows or float32.
        scores: the dtype of the scores.
        device: where the operands are.
    """

    def __init__(
        self, shape: tuple[int, int], hidden_size: int, form: RouterForm, dtype: torch.dtype, linear_bias: bool,
        bias: torch.dtype | None, logits: torch.dtype, scores: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        (tokens, experts), threads = shape, _LINEAR_THREADS
        self._device, self._index, self._of_slots, self._experts = device, device.index, (tokens, form.top_k), experts
        self._empty, self._logits = launch.allocator(device), (shape, (experts, 1), logits)
        self._results = _results(tokens, experts, form.top_k, scores)
        per_lane, by = _kind_of_kernel(experts, form, logits, bias)
        flags = f"{str(dtype == torch.bfloat16).lower()}, {per_lane}, {by}, {threads}, {tokens}"
        self._launcher = launch.launcher(
            SOURCES, f"router_linear<{flags}>", threads, 0, -(-experts // (threads // 32)), RouterLinearArguments,
            self._index,
        )  # fmt: skip
        self._numbers, self._hidden_size = _numbers(shape, form, tokens, logits, bias, scores), hidden_size
        self._words = -(-tokens * experts // CACHE_LINE) * CACHE_LINE

    def __call__(
        self, hidden: Tensor, weight: Tensor, linear_bias: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Contiguous rows (T, H) and weight (E, H) -> what `RouterLaunch` gives, and the logits."""
        index = self._index
        if launch.current_device() != index:
            with torch.cuda.device(index):
                return self(hidden, weight, linear_bias, bias)
        if (hidden.data_ptr() | weight.data_ptr()) & 15:  # the kernel loads 16 bytes at a time
            hidden, weight = hidden.clone(), weight.clone()
        empty = self._empty
        logits = empty(*self._logits)
        scores, expert_ids, row_slot, offsets, slot_row = [empty(*result) for result in self._results]
        words = semaphore_pool(self._device).take(self._words)
        self._launcher(
            launch.current_stream(index), logits.data_ptr(), 0 if bias is None else bias.data_ptr(), scores.data_ptr(),
            expert_ids.data_ptr(), 0, row_slot.data_ptr(), offsets.data_ptr(), slot_row.data_ptr(), *self._numbers,
            hidden.data_ptr(), weight.data_ptr(), 0 if linear_bias is None else linear_bias.data_ptr(),
            words.data_ptr(), self._hidden_size,
        )  # fmt: skip
        return scores, expert_ids, row_slot, offsets, slot_row, logits

    def packed(
        self, hidden: Tensor, weight: Tensor, linear_bias: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, PackedOrder, Tensor] | None:
        """The same as scores, expert_ids, the order in one allocation, and logits; None on another device than the
        current, or for operands at odd addresses."""
        x, w, index = hidden.data_ptr(), weight.data_ptr(), self._index
        if launch.current_device() != index or (x | w) & 15:
            return None
        empty = self._empty
        logits, scores, expert_ids = empty(*self._logits), empty(*self._results[0]), empty(*self._results[1])
        order = PackedOrder(hidden, *self._of_slots, self._experts)
        row_slot, offsets, slot_row = order.addresses
        words = semaphore_pool(self._device).take(self._words)
        self._launcher(
            launch.current_stream(index), logits.data_ptr(), 0 if bias is None else bias.data_ptr(), scores.data_ptr(),
            expert_ids.data_ptr(), 0, row_slot, offsets, slot_row, *self._numbers, x, w,
            0 if linear_bias is None else linear_bias.data_ptr(), words.data_ptr(), self._hidden_size,
        )  # fmt: skip
        return scores, expert_ids, order, logits


def _results(
    tokens: int, experts: int, top_k: int, scores: torch.dtype
) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Shapes, strides and dtypes of scores, expert_ids, row_slot, offsets and slot_row."""
    slots, strides = (tokens, top_k), (top_k, 1)
    vectors = [((length,), (1,), torch.int32) for length in (tokens * top_k, experts)]
    return [(slots, strides, scores), (slots, strides, torch.int64), *vectors, (slots, strides, torch.int32)]


def _kind_of_kernel(experts: int, form: RouterForm, dtype: torch.dtype, bias: torch.dtype | None) -> tuple[int, int]:
    """PER_LANE and BY of the kernels for logits of a dtype."""
    by = BY_LOGIT if dtype == torch.float32 else BY_BITS
    if bias is not None or form.grouped:
        by = BY_SCORE
    return next(count for count in PER_LANE if experts <= 32 * count), by


def _numbers(
    shape: tuple[int, int], form: RouterForm, per_block: int, dtype: torch.dtype, bias: torch.dtype | None,
    scores: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """The fields of RouterArguments behind the pointers."""
    tokens, experts = shape
    # Groups of whole lanes, a power of two of them, have a shorter way.
    per_lane, _ = _kind_of_kernel(experts, form, dtype, bias)
    lanes, rest = divmod(experts // form.num_groups, per_lane)
    whole = form.grouped and rest == 0 and form.group_best <= 2 and lanes & (lanes - 1) == 0
    return (
        tokens, experts, form.top_k, per_block,
        DTYPE_CODES[dtype], 0 if bias is None else DTYPE_CODES[bias], DTYPE_CODES[scores],
        form.score == "sigmoid", form.normalize, form.num_groups, form.top_groups, form.group_best,
        form.mask_to_zero, lanes if whole else 0, form.epsilon, form.least_sum, form.scale,
    )  # fmt: skip


router_launch = functools.lru_cache(maxsize=4096)(RouterLaunch)
linear_router_launch = functools.lru_cache(maxsize=4096)(LinearRouterLaunch)

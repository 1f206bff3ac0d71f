"""A router's launches, prepared once for logits of one kind: which kernels of src/router.cu, and of which sizes.
Called by kernels/cuda/backend.py; calls launch.py.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda import launch
from thunder_moe.kernels.cuda.arguments import RouterArguments
from thunder_moe.kernels.cuda.configs import COMMON
from thunder_moe.routing import RouterForm

__all__ = ["SOURCES", "RouterLaunch", "router_launch", "unserved_reason"]

SOURCES = (COMMON, COMMON.with_name("router.cu"))
MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 512, 32, 32
_ONE_BLOCK_TOKENS = 64
_ONE_BLOCK_SLOTS = 4096
_THREADS = 512  # kScatterThreads
_TOKENS = _THREADS // 32  # of a block at once
_BLOCKS = 128  # of a launch, about

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
    """The kernels that make scores, expert ids and the order of rows of a router's logits.

    Args:
        shape: (T, E) of the logits, both positive.
        form: of the router, one that `unserved_reason` has no reason against.
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
        self._index, self._scores = device.index, scores
        self._slots, self._experts, self._of_slots = slots, experts, (tokens, form.top_k)
        one_block = tokens <= _ONE_BLOCK_TOKENS and slots <= _ONE_BLOCK_SLOTS
        per_block = tokens if one_block else max(_TOKENS, -(-tokens // (_BLOCKS * _TOKENS)) * _TOKENS)
        blocks = -(-tokens // per_block)
        self._counts = None if one_block else (blocks, experts)
        self._numbers = (
            tokens, experts, form.top_k, per_block,
            DTYPE_CODES[dtype], 0 if bias is None else DTYPE_CODES[bias], DTYPE_CODES[scores],
            form.score == "sigmoid", form.normalize, form.num_groups, form.top_groups, form.group_best,
            form.mask_to_zero, form.epsilon, form.least_sum, form.scale,
        )  # fmt: skip
        per_lane = next(count for count in (1, 2, 4, 8, 16) if experts <= 32 * count)
        by_score = str(bias is not None or form.grouped).lower()
        if one_block:
            threads = 256 if tokens <= 8 else 1024
            shared = 4 * (slots + threads // 32 * experts)
            kernels = [(f"router_one_block<{per_lane}, {by_score}, {threads}>", threads, shared)]
        else:
            kernels = [
                (f"router_choose<{per_lane}, {by_score}>", _THREADS, 0),
                (f"router_scatter<{per_lane}>", _THREADS, 4 * _THREADS // 32 * experts),
            ]
        self._launchers = [
            launch.launcher(SOURCES, name, threads, shared, blocks, RouterArguments, self._index)
            for name, threads, shared in kernels
        ]

    def __call__(self, logits: Tensor, bias: Tensor | None) -> Results:
        """Contiguous logits (T, E) and bias (E,) -> scores, expert_ids, row_slot, offsets, slot_row."""
        index = self._index
        if launch.current_device() != index:
            with torch.cuda.device(index):
                return self(logits, bias)
        scores = logits.new_empty(self._of_slots, dtype=self._scores)
        expert_ids = logits.new_empty(self._of_slots, dtype=torch.int64)
        row_slot = logits.new_empty(self._slots, dtype=torch.int32)
        offsets = logits.new_empty(self._experts, dtype=torch.int32)
        slot_row = logits.new_empty(self._of_slots, dtype=torch.int32)
        counts = 0
        if self._counts is not None:
            of_blocks = logits.new_empty(self._counts, dtype=torch.int32)  # lives until the launches
            counts = of_blocks.data_ptr()
        stream = launch.current_stream(index)
        for launcher in self._launchers:
            launcher(
                stream, logits.data_ptr(), 0 if bias is None else bias.data_ptr(), scores.data_ptr(),
                expert_ids.data_ptr(), counts, row_slot.data_ptr(), offsets.data_ptr(), slot_row.data_ptr(),
                *self._numbers,
            )  # fmt: skip
        return scores, expert_ids, row_slot, offsets, slot_row


router_launch = functools.lru_cache(maxsize=4096)(RouterLaunch)

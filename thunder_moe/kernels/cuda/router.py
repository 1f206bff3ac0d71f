"""Plans a router's launches: which kernels of src/router.cu, of which sizes, and the tensors that they write.
Called by kernels/cuda/backend.py, which launches them; calls torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.kernels.arguments import dtype_code, pointer
from thunder_moe.kernels.cuda.arguments import RouterArguments
from thunder_moe.kernels.cuda.configs import COMMON
from thunder_moe.routing import RouterForm

__all__ = ["SOURCES", "Launch", "plan", "unserved_reason"]

SOURCES = (COMMON, COMMON.with_name("router.cu"))
MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 512, 32, 32
_ONE_BLOCK_TOKENS = 64
_ONE_BLOCK_SLOTS = 4096
_THREADS = 512  # kScatterThreads
_TOKENS = _THREADS // 32  # of a block at once
_BLOCKS = 128  # of a launch, about

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Launch = tuple[str, int, int, int, RouterArguments]  # expression, threads, shared bytes, blocks, argument


def unserved_reason(logits: Tensor, form: RouterForm) -> str | None:
    """What the kernels do not serve; None when they do."""
    for value, most, what in (
        (logits.shape[1], MAX_EXPERTS, "experts"),
        (form.top_k, MAX_TOP_K, "experts per token"),
        (form.num_groups if form.grouped else 1, MAX_GROUPS, "groups"),
    ):
        if value > most:
            return f"more than {most} {what}"
    return None


def plan(logits: Tensor, bias: Tensor | None, form: RouterForm, dtype: torch.dtype) -> tuple[Results, list[Launch]]:
    """The results, not yet written, and the launches that write them."""
    tokens, experts = logits.shape
    device, slots = logits.device, tokens * form.top_k
    logits = logits.detach().contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    scores = torch.empty(tokens, form.top_k, dtype=dtype, device=device)
    expert_ids = torch.empty(tokens, form.top_k, dtype=torch.int64, device=device)
    row_slot = torch.empty(slots, dtype=torch.int32, device=device)
    offsets = torch.empty(experts, dtype=torch.int32, device=device)
    slot_row = torch.empty(tokens, form.top_k, dtype=torch.int32, device=device)
    one_block = tokens <= _ONE_BLOCK_TOKENS and slots <= _ONE_BLOCK_SLOTS
    per_block = tokens if one_block else max(_TOKENS, -(-tokens // (_BLOCKS * _TOKENS)) * _TOKENS)
    blocks = -(-tokens // per_block)
    counts = None if one_block else torch.empty(blocks, experts, dtype=torch.int32, device=device)
    tensors = (logits, bias, scores, expert_ids, counts, row_slot, offsets, slot_row)
    argument = RouterArguments(
        *map(pointer, tensors), tokens, experts, form.top_k, per_block,
        dtype_code(logits), dtype_code(bias), dtype_code(scores),
        form.score == "sigmoid", form.normalize, form.num_groups, form.top_groups, form.group_best, form.mask_to_zero,
        form.epsilon, form.least_sum, form.scale,
    )  # fmt: skip
    argument.tensors = tensors  # what it points to lives until the launches
    per_lane = next(count for count in (1, 2, 4, 8, 16) if experts <= 32 * count)
    by_score = str(bias is not None or form.grouped).lower()
    results = scores, expert_ids, row_slot, offsets, slot_row
    if one_block:
        threads = 256 if tokens <= 8 else 1024
        shared = 4 * (slots + threads // 32 * experts)
        return results, [(f"router_one_block<{per_lane}, {by_score}, {threads}>", threads, shared, 1, argument)]
    return results, [
        (f"router_choose<{per_lane}, {by_score}>", _THREADS, 0, blocks, argument),
        (f"router_scatter<{per_lane}>", _THREADS, 4 * _THREADS // 32 * experts, blocks, argument),
    ]

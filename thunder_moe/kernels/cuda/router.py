"""Chooses the launches of a router: the kernels of src/router.cu, and the sizes of their grids.
Called by operators.py and backend.py beside it, and by compilers/routers.py and compilers/dynamo/add_norm.py
(`unserved_reason`); calls chain.py.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_moe import routing
from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda.arguments import RouterArguments, RouterLinearArguments
from thunder_moe.kernels.cuda.chain import Address, ChainBuilder
from thunder_moe.kernels.cuda.configs import COMMON
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.plan import CACHE_LINE
from thunder_moe.kernels.specs import RouterSpec
from thunder_moe.routing import RouterConfig

SOURCES = (COMMON, COMMON.with_name("norm.cuh"), COMMON.with_name("router.cu"))
MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 512, 32, 32
PER_LANE = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # experts of a lane
BY_BITS, BY_LOGIT, BY_SCORE = range(3)  # what is compared: kByBits, kByLogit, kByScore
# Up to so many tokens, a block of so many threads does it all; against two kernels on an H200: Qwen3, 16 tokens 3.8 and
# 4.9 us, 32 tokens (256 slots) 6.4 and 4.8; Mixtral and GPT-OSS, 32 tokens 2.8 and 4.3, 3.6 and 4.4.
_ONE_BLOCK = ((16, 512), (32, 1024))
_ONE_BLOCK_SLOTS = 128
_LINEAR_THREADS = 256  # of router_linear
_SCATTER_THREADS = 512  # kThreads
_CHOOSE = ((1024, 512), (2**31, 1024))  # up to so many tokens, blocks of so many threads choose (2048: 11.8 and 7.2 us)
_BLOCKS = ((8192, 128), (2**31, 256))  # and about so many blocks (Qwen3, 65536 tokens: 102 us by 128, 62 by 256)


def unserved_reason(experts: int, form: RouterConfig) -> str | None:
    """Return why the kernels do not serve a router; None if they do."""
    for value, most, what in (
        (experts, MAX_EXPERTS, "experts"),
        (form.top_k, MAX_TOP_K, "experts per token"),
        (form.num_groups if form.grouped else 1, MAX_GROUPS, "groups"),
    ):
        if value > most:
            return f"more than {most} {what}"
    return None


def append_router(chain: ChainBuilder, spec: RouterSpec, logits: Address, bias: Address | None) -> tuple[Address, ...]:
    """Append the choice of experts and the sort of assignments by expert, and declare their results.

    The spec has no `unserved_reason`, and at least one token. Returns scores, expert_ids, row_slot, offsets and
    slot_row.
    """
    tokens, experts, form = spec.tokens, spec.num_experts, spec.form
    slots = tokens * form.top_k
    per_lane, by = _kind_of_kernel(spec)
    fits = slots <= _ONE_BLOCK_SLOTS
    one_block = next((threads for most, threads in _ONE_BLOCK if fits and tokens <= most), None)
    per_block, blocks, counts = tokens, 1, None
    if one_block is not None:
        kernels = [(f"router_one_block<{per_lane}, {by}, {one_block}>", one_block, 0)]
    else:
        threads = next(threads for most, threads in _CHOOSE if tokens <= most)
        wanted = next(blocks for most, blocks in _BLOCKS if tokens <= most)
        at_once = threads // 32
        per_block = -(-tokens // (wanted * at_once)) * at_once
        blocks = -(-tokens // per_block)
        counts = chain.scratch(4 * blocks * experts)
        kernels = [
            (f"router_choose<{per_lane}, {by}, {threads}>", threads, 0),
            (f"router_scatter<{per_lane}>", _SCATTER_THREADS, 4 * _SCATTER_THREADS // 32 * experts),
        ]
    results = _results(chain, spec)
    scores, ids, row_slot, offsets, slot_row = results
    fields = logits, bias, scores, ids, counts, row_slot, offsets, slot_row, *_numbers(spec, per_block)
    for name, threads, shared_bytes in kernels:
        chain.launch(SOURCES, name, threads, shared_bytes, blocks, RouterArguments, fields)
    return results


def serves_linear(shape: tuple[int, int], hidden_size: int, form: RouterConfig, dtype: torch.dtype) -> bool:
    """True if one kernel is to compute the logits (T, E) of rows (T, H) of a dtype, too."""
    tokens, _ = shape
    few = 0 < tokens <= routing.LINEAR_ROUTER_TOKENS and tokens * form.top_k <= _LINEAR_THREADS
    return few and hidden_size % 8 == 0 and dtype != torch.float32 and unserved_reason(shape[1], form) is None


def append_linear_router(
    chain: ChainBuilder,
    spec: RouterSpec,
    x: Address,
    weight: Address,
    linear_bias: Address | None,
    bias: Address | None,
    *,
    prefetch: bool,
    norm: tuple[Address, Address, float] | None = None,
) -> None:
    """Append a router's linear layer, the choice of experts and the sort of assignments by expert, and declare their
    results: scores, expert_ids, row_slot, offsets, slot_row and logits; with a norm the total and the normalized rows.

    Args:
        spec: the spec of the router, with a hidden size; `serves_linear` is True for it.
        linear_bias: (E,), of the linear layer.
        bias: (E,), of the choice.
        prefetch: the kernel in front of this one does not write the weight, nor the norm's.
        norm: residual (T, H), weight (H,) and epsilon of the RMS norm in front, of x plus the residual.
    """
    tokens, experts, threads = spec.tokens, spec.num_experts, _LINEAR_THREADS
    assert spec.hidden_size is not None
    assert spec.hidden is not None
    per_lane, by = _kind_of_kernel(spec)
    bf16 = spec.hidden == torch.bfloat16
    name = instance("router_linear", bf16, per_lane, by, threads, tokens, norm is not None)
    scores, ids, row_slot, offsets, slot_row = _results(chain, spec)
    logits = chain.result((tokens, experts), spec.logits)
    normed: tuple[Any, ...] = (None, None, None, None, 0.0)
    if norm is not None:
        total, normalized = (chain.result((tokens, spec.hidden_size), spec.hidden) for _ in range(2))
        normed = (*norm[:2], total, normalized, norm[2])
    words = chain.semaphores(-(-tokens * experts // CACHE_LINE) * CACHE_LINE)
    fields = (
        logits, bias, scores, ids, None, row_slot, offsets, slot_row, *_numbers(spec, tokens),
        x, weight, linear_bias, words, spec.hidden_size, prefetch, *normed,
    )  # fmt: skip
    blocks = -(-experts // (threads // 32))
    shared = 0 if norm is None else 2 * tokens * spec.hidden_size
    chain.launch(SOURCES, name, threads, shared, blocks, RouterLinearArguments, fields)


def _results(chain: ChainBuilder, spec: RouterSpec) -> tuple[Address, Address, Address, Address, Address]:
    """Declare scores, expert_ids, row_slot, offsets and slot_row."""
    slots = spec.tokens, spec.form.top_k
    return (
        chain.result(slots, spec.scores),
        chain.result(slots, torch.int64),
        chain.result((slots[0] * slots[1],), torch.int32),
        chain.result((spec.num_experts,), torch.int32),
        chain.result(slots, torch.int32),
    )


def _kind_of_kernel(spec: RouterSpec) -> tuple[int, int]:
    """Return PER_LANE and BY of the kernels for a router."""
    by = BY_LOGIT if spec.logits == torch.float32 else BY_BITS
    if spec.bias is not None or spec.form.grouped:
        by = BY_SCORE
    return next(count for count in PER_LANE if spec.num_experts <= 32 * count), by


def _numbers(spec: RouterSpec, per_block: int) -> tuple[Any, ...]:
    """Return the fields of RouterArguments behind the pointers."""
    form, experts = spec.form, spec.num_experts
    # Groups of whole lanes, a power of two of them, have a shorter way.
    per_lane, _ = _kind_of_kernel(spec)
    lanes, rest = divmod(experts // form.num_groups, per_lane)
    whole = form.grouped and rest == 0 and form.group_best <= 2 and lanes & (lanes - 1) == 0
    return (
        spec.tokens, experts, form.top_k, per_block,
        DTYPE_CODES[spec.logits], 0 if spec.bias is None else DTYPE_CODES[spec.bias], DTYPE_CODES[spec.scores],
        form.score == "sigmoid", form.normalize, form.num_groups, form.top_groups, form.group_best,
        form.mask_to_zero, lanes if whole else 0, form.epsilon, form.least_sum, form.scale,
    )  # fmt: skip

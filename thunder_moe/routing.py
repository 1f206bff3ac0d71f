"""Routing in plain torch: choose experts by logits, sort slots by expert, gather tokens to rows, sum each token's rows.
Called by kernels, ops, activations, nn and integrations.huggingface; calls torch and formats.checks.

Legend: T tokens, A = top_k, slot = t * A + a, M rows sorted by expert, E experts, N and I output features.
A slot is an assignment of a token to an expert; row_slot and slot_row are the permutation and its inverse.
Only `row_groups` synchronises with the host. Indices out of range read another row, or contribute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_moe.formats.checks import require_type

__all__ = [
    "LINEAR_ROUTER_TOKENS", "RouterConfig", "choose_experts", "combine", "expert_of_row", "gather_rows", "invert",
    "linear_router", "live_rows", "offsets_from_splits", "route", "router", "router_gradient", "router_logits",
    "row_groups", "scale_of_rows", "sort_by_expert",
]  # fmt: skip

_MAX_INT32 = 2**31 - 1
# Up to this number of tokens one CUDA kernel computes a router's linear layer, too. For one token of Qwen3 it takes
# 5.0 us behind a norm, where a linear layer of torch and the router's kernel take 7.6 us; in a row of calls, for 2 and
# 3 tokens it takes 4.6 and 5.2 us instead of 6.9 and 7.0 us (H200).
LINEAR_ROUTER_TOKENS = 3


@dataclass(frozen=True)
class RouterConfig:
    """The computation of scores and choice from a router's logits; the options of `ops.router.moe_router`."""

    top_k: int  # A, the number of experts of a token
    score: str = "softmax"  # "softmax" over all experts, or "sigmoid"
    normalize: bool = True  # scores are divided by their sum over the token's experts
    epsilon: float = 0.0  # added to that sum
    least_sum: float = 0.0  # lower bound of the divisor
    scale: float = 1.0  # multiplies the scores at the end
    num_groups: int = 1  # number of groups of consecutive experts
    top_groups: int = 1  # number of groups whose experts can be chosen
    group_best: int = 2  # a group's score is the sum of that many of its best experts
    mask_to_zero: bool = False  # experts of other groups compete with 0; else they are chosen last

    @property
    def grouped(self) -> bool:
        """True if the groups exclude any expert."""
        return self.top_groups < self.num_groups

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores (T, E) of logits (T, E) of any floating-point dtype, in float32 or float64."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return wide.softmax(-1) if self.score == "softmax" else wide.sigmoid()

    def choice(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Return the values (T, E) whose largest are chosen, for scores (T, E) and bias (E,)."""
        values = scores if bias is None else scores + bias
        return _mask_groups(values, self) if self.grouped else values

    def weigh(self, chosen: Tensor) -> Tensor:
        """Return the scores (T, A) of the chosen experts, normalized and scaled."""
        if self.normalize:
            chosen = chosen / self._divisor(chosen)
        return chosen if self.scale == 1.0 else chosen * self.scale

    def weigh_gradient(self, grad: Tensor, chosen: Tensor) -> Tensor:
        """Return the gradient (T, A) of the argument of `weigh`, for the gradient of its result."""
        grad = grad * self.scale
        if not self.normalize:
            return grad
        divisor = self._divisor(chosen)
        grad_divisor = -(grad * chosen).sum(-1, keepdim=True) / divisor**2
        sums = chosen.sum(-1, keepdim=True) + self.epsilon
        return grad / divisor + torch.where(sums < self.least_sum, 0, grad_divisor)

    def _divisor(self, chosen: Tensor) -> Tensor:
        sums = chosen.sum(-1, keepdim=True)
        sums = sums + self.epsilon if self.epsilon else sums
        return sums.clamp_min(self.least_sum) if self.least_sum else sums


def choose_experts(logits: Tensor, bias: Tensor | None, form: RouterConfig) -> tuple[Tensor, Tensor]:
    """Choose experts by logits (T, E) and bias (E,) -> scores (T, A) before `RouterConfig.weigh`, int64 ids (T, A).

    The best come first, of equal experts the lower index. NaN is above all numbers.
    """
    scores = form.scores(logits)
    # Logits have the same order as their scores, without ties by rounding.
    choice = form.choice(scores, bias) if form.grouped or bias is not None else logits
    ids = _top_indices(choice.detach(), form.top_k).contiguous()
    return scores.gather(-1, ids), ids


def _mask_groups(choice: Tensor, form: RouterConfig) -> Tensor:
    """Mask the experts outside of the best groups in the choice (T, E)."""
    groups = choice.unflatten(-1, (form.num_groups, -1))
    group_scores = groups.gather(-1, _top_indices(groups, form.group_best)).sum(-1)  # [T, G]
    allowed = torch.zeros_like(group_scores, dtype=torch.bool)
    allowed = allowed.scatter(-1, _top_indices(group_scores, form.top_groups), True)
    masked: Tensor = groups.masked_fill(~allowed[..., None], 0.0 if form.mask_to_zero else -torch.inf)
    return masked.flatten(-2)


def _top_indices(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values along the last dimension; stable, unlike torch.topk."""
    order: Tensor = torch.sort(values, dim=-1, descending=True, stable=True).indices
    return order[..., :count]


def router(
    logits: Tensor, bias: Tensor | None, form: RouterConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute ops.router.moe_router: scores (T, A) in a dtype, ids int64 (T, A), row_slot, offsets and slot_row."""
    chosen, ids = choose_experts(logits, bias, form)
    return form.weigh(chosen).to(dtype), ids, *route(ids, logits.shape[-1])


def router_logits(hidden: Tensor, weight: Tensor, linear_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return logits (T, E) of hidden (T, H) and weight (E, H), rounded once to a dtype: `hidden`'s, or float32."""
    if dtype == hidden.dtype:
        return F.linear(hidden, weight, linear_bias)
    if hidden.is_cuda and linear_bias is None:
        return torch.mm(hidden, weight.t(), out_dtype=dtype)  # without copies in float32
    return F.linear(hidden.to(dtype), weight.to(dtype), None if linear_bias is None else linear_bias.to(dtype))


def linear_router(
    hidden: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    bias: Tensor | None,
    form: RouterConfig,
    logits_dtype: torch.dtype,
    dtype: torch.dtype,
    *,
    choose: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = router,
    logits_of: Callable[..., Tensor] = router_logits,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute ops.router.moe_linear_router: the results of `router`, or of a kernel for it, and the logits."""
    logits = logits_of(hidden, weight, linear_bias, logits_dtype)
    return *choose(logits, bias, form, dtype), logits


def router_gradient(grad: Tensor, logits: Tensor, expert_ids: Tensor, form: RouterConfig) -> Tensor:
    """Return the gradient (T, E) of `router`'s logits, for the gradient (T, A) of its scores."""
    scores = form.scores(logits)
    grad_chosen = form.weigh_gradient(grad.to(scores.dtype), scores.gather(-1, expert_ids))
    out = torch.zeros_like(scores).scatter(-1, expert_ids, grad_chosen)
    if form.score == "softmax":
        out = scores * (out - (scores * out).sum(-1, keepdim=True))
    else:
        out = out * scores * (1 - scores)
    return out.to(logits.dtype)


def sort_by_expert(ids_M: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort slots by expert, int64 (M,) in [0, E), stably -> int64 (M,), the slot of each row; int32 (E,) row ends.

    Thunder and torch.compile trace these operations.
    """
    order_M = torch.argsort(ids_M, stable=True)
    ones_M = torch.ones_like(ids_M, dtype=torch.int32)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=ids_M.device).scatter_add(0, ids_M, ones_M)
    return order_M, torch.cumsum(counts_E, 0, dtype=torch.int32)


def route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ops.route.moe_route of ids (T, A): row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
    ids = expert_ids.flatten().long()
    known = (ids >= 0) & (ids < num_experts)
    # Ids outside of [0, E) go to expert number E, past the end of `offsets`.
    order, ends = sort_by_expert(torch.where(known, ids, num_experts), num_experts + 1)
    slot_row = torch.where(known, invert(order).int(), -1).view(expert_ids.shape)
    return order.int(), ends[:-1], slot_row


def invert(order_M: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 (M,), by a scatter: one kernel, where a second sort takes several."""
    return torch.zeros_like(order_M).scatter(0, order_M, torch.arange(order_M.shape[0], device=order_M.device))


def gather_rows(activation: Tensor, row_slot: Tensor | None) -> Tensor:
    """Gather tokens (T, K) to rows (M, K); without row_slot the activation has the rows already."""
    if row_slot is None:
        return activation
    slots = row_slot.shape[0]
    slot = _within(row_slot, slots)
    return activation.index_select(0, slot // (slots // max(activation.shape[0], 1)) if slots else slot)


def scale_of_rows(slot_scale: Tensor | None, row_slot: Tensor | None) -> Tensor | None:
    """Return the scale of each row, float32 (M,), from scales of slots (T, A), or of rows (M,) without row_slot."""
    if slot_scale is None:
        return None
    flat = slot_scale.float().flatten()
    return flat if row_slot is None else flat[_within(row_slot, row_slot.shape[0])]


def _within(index: Tensor, size: int) -> Tensor:
    return index.clamp(0, max(size - 1, 0))


def combine(rows: Tensor, offsets: Tensor, slot_row: Tensor, slot_weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Sum each token's rows, plus bias (E, N), times their weights, in float32: (M, N) -> (T, N) in the rows' dtype.

    Slots whose row is -1, or another number outside of the experts' rows, contribute nothing.
    """
    (tokens, top_k), (count, n) = slot_row.shape, rows.shape
    out = rows.new_empty(tokens, n)
    if count == 0:
        return out.zero_()
    end = offsets[-1].clamp_max(count)
    experts = expert_of_row(offsets, count) if bias is not None else None
    for chunk in _chunks(tokens, top_k * n, rows.device):
        row = slot_row[chunk].flatten()
        at = _within(row, count)
        values = rows.index_select(0, at).float()  # [T * A, N]
        if bias is not None and experts is not None:
            values += bias[experts[at]]
        if slot_weight is not None:
            values *= slot_weight[chunk].flatten()[:, None]
        values.masked_fill_(((row < 0) | (row >= end))[:, None], 0)
        out[chunk] = values.view(slot_row[chunk].shape[0], top_k, n).sum(1)
    return out


# Float32 values in a chunk on a CPU, so that they stay in its L2 cache.
_CHUNK_VALUES = 2**18


def _chunks(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Return slices that cover `rows`, small enough for a CPU's cache; one slice on other devices."""
    step = max(1, _CHUNK_VALUES // max(columns, 1)) if device.type == "cpu" else max(rows, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def expert_of_row(offsets: Tensor, rows: int) -> Tensor:
    """Return the expert of each row, int64 (M,); the last expert for rows past ``offsets[-1]``."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets.contiguous(), row, right=True).clamp_max(offsets.shape[0] - 1)


def live_rows(offsets: Tensor, rows: int) -> Tensor:
    """Return bool (M, 1), True for rows that belong to an expert."""
    return (torch.arange(rows, dtype=torch.int32, device=offsets.device) < offsets[-1])[:, None]


def offsets_from_splits(splits: Sequence[int] | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """Return the row ends int32 (E,), for the argument `offsets` of modules and operators, from the rows per expert.

    Args:
        splits: integers, a sequence or a tensor (E,). There is no synchronisation with another device than a CPU.
        device: of the result; None: the device of the splits, or torch's default.

    Raises:
        TypeError: the splits are neither a tensor nor a sequence.
        ValueError: the splits are not one-dimensional, empty or fractional; on a CPU also if one is negative, or an end
            exceeds int32.
    """
    if isinstance(splits, Tensor):
        whole = not (splits.dtype.is_floating_point or splits.dtype.is_complex or splits.dtype == torch.bool)
        if splits.ndim != 1 or not splits.shape[0] or not whole:
            raise ValueError(
                f"splits: got {splits.dtype} {tuple(splits.shape)}, wanted integers (num_experts,), rows per expert"
            )
        if splits.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_splits(splits.tolist())
        return splits.to(device=device or splits.device).cumsum(0, dtype=torch.int64).to(torch.int32)
    require_type("splits", splits, Iterable, "a tensor or a sequence of integers, rows per expert")
    values = list(splits)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise ValueError(f"splits: got {value!r} among them, wanted integers, rows per expert")
    _check_splits(values)
    return torch.tensor(list(accumulate(map(index, values))), dtype=torch.int32, device=device)


def _check_splits(values: list[int]) -> None:
    if not values:
        raise ValueError("splits: got none, wanted one per expert")
    if min(values) < 0:
        raise ValueError(f"splits: got {min(values)} among them, wanted rows per expert, at least 0")
    if sum(values) > _MAX_INT32:
        raise ValueError(f"splits: got a sum of {sum(values)}, wanted at most {_MAX_INT32}, the largest int32")


def row_groups(offsets: Tensor, rows: int) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end row) of each expert that has rows; offsets are clamped to 0 to `rows`."""
    ends = [min(max(end, 0), rows) for end in offsets.tolist()]
    groups = zip(range(len(ends)), [0, *ends], ends, strict=False)
    return [(expert, begin, end) for expert, begin, end in groups if end > begin]

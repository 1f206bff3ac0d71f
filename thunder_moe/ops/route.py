"""The operator thunder_moe::moe_route: the top-k expert ids of tokens -> the order of rows for grouped GEMMs.
Called by users, ops.experts, ops.experts_lora, parallel and compiled graphs; calls kernels.select.

Legend: T tokens, A = top_k, slot = t * A + a, M = T * A rows, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.kernels.select import select
from thunder_moe.ops.operator import operator


def _shapes(expert_ids: Tensor, num_experts: int) -> tuple[tuple[int, ...], ...]:
    tokens, top_k = expert_ids.shape
    return (tokens * top_k,), (num_experts,), (tokens, top_k)


def _check(expert_ids: Tensor, num_experts: int) -> None:
    require(expert_ids.ndim == 2, "expert_ids", expert_ids, "shape (tokens, top_k)")
    require(expert_ids.dtype in (torch.int32, torch.int64), "expert_ids", expert_ids, "dtype int32 or int64")
    if num_experts < 1:
        raise ValueError(f"num_experts: got {num_experts}, wanted at least 1")


def _check_values(expert_ids: Tensor, num_experts: int) -> None:
    require(expert_ids.numel() < 2**31, "expert_ids", expert_ids, "less than 2**31 ids: rows are int32")


@operator(shapes=_shapes, check=_check, check_values=_check_values, dtype=torch.int32)
def moe_route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots of tokens by expert, as grouped GEMMs need them. Not differentiable.

    The sort is stable, so the order of rows is unique. Ids outside [0, E), such as expert parallelism's sentinels,
    go behind all others: their rows lie past ``offsets[-1]``. Never synchronises with the host on CUDA.

    Args:
        expert_ids: int32 or int64 (T, A), the experts of each token.
        num_experts: E.

    Returns:
        row_slot: int32 (M,), the slot ``t * A + a`` of each row.
        offsets: int32 (E,), cumulative row ENDS.
        slot_row: int32 (T, A), the row of each slot; -1 where the id is outside [0, E).

    Raises:
        ValueError: expert_ids has the wrong rank or dtype, or num_experts is not positive.
    """
    return select(expert_ids.device).route(expert_ids, num_experts)

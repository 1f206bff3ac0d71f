"""Maps experts of all ranks to experts of this rank, by one small kernel on a GPU, where torch takes several.
Called by experts; calls Triton, which a CUDA build of vLLM brings along.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

_BLOCK = 1024


def local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Return the experts of this rank, int32 (T, A), -1 for experts of other ranks.

    Args:
        topk_ids: (T, A), experts of all ranks, or -1 for none.
        expert_map: (experts of all ranks,) -> experts of this rank, -1 for experts of others; None for one rank.
    """
    if expert_map is None:
        return topk_ids.to(torch.int32)
    if not topk_ids.is_cuda:  # an index of -1 would be the last expert
        return torch.where(topk_ids >= 0, expert_map[topk_ids.clamp_min(0).long()], -1).to(torch.int32)
    topk_ids = topk_ids.contiguous()
    out = torch.empty_like(topk_ids, dtype=torch.int32)
    if out.numel():
        blocks = -(-out.numel() // _BLOCK)
        _look_up[(blocks,)](topk_ids, expert_map, out, out.numel(), BLOCK=_BLOCK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _look_up(ids, expert_map, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads them
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + at, mask=at < count, other=-1)
    tl.store(out + at, tl.load(expert_map + chosen, mask=chosen >= 0, other=-1).to(tl.int32), mask=at < count)

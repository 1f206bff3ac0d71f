"""`expert_load`: the number of tokens that each expert of an expert-parallel model got in the last steps.
Called by users and parallel.modules, which record; calls torch alone.

Legend: S steps, L experts of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_moe.formats.checks import require_module

_RECENT, _DROPPED = "_recent_load", "_dropped_tokens"


@dataclass(frozen=True)
class ExpertLoad:
    """The load of one layer.

    Attributes:
        tokens: int64 (S, experts), the rows of each expert in the last steps, oldest first; -1 before the first step.
            The experts are this rank's, or all. A forward that torch.utils.checkpoint repeats is not a step of its own,
            except in a compiled layer.
        first_expert: the global id of the first of these experts.
        dropped: int64 scalar, how often a token of this rank, or of any, found no room on a rank with one of its
            experts, since the model was parallelized. This only happens with a `capacity` below the worst case.
    """

    tokens: Tensor
    first_expert: int
    dropped: Tensor


def expert_load(model: nn.Module, *, all_ranks: bool = False) -> dict[str, ExpertLoad]:
    """Return the load of the expert-parallel layers of a model, as copies on their device, without synchronisation.

    Args:
        model: a model with modules that `ExpertParallel` was applied to.
        all_ranks: True collects the experts of all ranks, in order. It is a collective, which every rank has to call.

    Returns:
        The load of each layer by the module's name.

    Raises:
        ValueError: no module of the model is expert-parallel and records its load.
    """
    require_module(model)
    loads = {}
    for name, module in model.named_modules():
        if _RECENT not in module._buffers:
            continue
        exchange: Any = module.exchange
        ends, dropped, first = module.get_buffer(_RECENT), module.get_buffer(_DROPPED).clone(), exchange.first
        tokens = torch.where(ends < 0, -1, torch.diff(ends, dim=1, prepend=ends.new_zeros(ends.shape[0], 1))).long()
        if all_ranks:
            parts = [torch.empty_like(tokens) for _ in range(exchange.ranks)]
            dist.all_gather(parts, tokens, group=exchange.mesh.get_group())
            dist.all_reduce(dropped, group=exchange.mesh.get_group())
            tokens, first = torch.cat(parts, 1), 0
        loads[name] = ExpertLoad(tokens, first, dropped)
    if not loads:
        raise ValueError(
            f"model: got a {type(model).__name__} without a module that records its load, wanted one that"
            " parallelize_module applied ExpertParallel(load_steps=...) to"
        )
    return loads


def add_buffers(module: nn.Module, steps: int, experts: int, device: torch.device) -> None:
    """Adds the buffers of the load to a module: row ends and a count. They are not part of its state dict."""
    ends = torch.full((steps, experts), -1, dtype=torch.int32, device=device)
    module.register_buffer(_RECENT, ends, persistent=False)
    module.register_buffer(_DROPPED, torch.zeros((), dtype=torch.int64, device=device), persistent=False)


def load_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers that `add_buffers` has added to a module."""
    return [buffer for name, buffer in module._buffers.items() if name in (_RECENT, _DROPPED) and buffer is not None]


@torch.no_grad()
def record(module: nn.Module, offsets: Tensor, overflow: Tensor | None) -> None:
    """Records a step without synchronisation, in a CUDA graph at each replay.

    A forward inside of a backward is not recorded: torch.utils.checkpoint repeats it.

    Args:
        module: one with `add_buffers`.
        offsets: int32 (L,), row ends of this rank's experts.
        overflow: the number of tokens that found no room; None: all did.
    """
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        return
    if overflow is not None:
        module.get_buffer(_DROPPED).add_(overflow)
    recent = module.get_buffer(_RECENT)
    if recent.shape[0]:
        recent.copy_(torch.cat([recent[1:], offsets[None]]))

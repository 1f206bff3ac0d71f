"""Whole layers of a model that several processes share, for saving: all of them call this, and get the layer that each
has a part of.
Called by checkpoint and saving; calls torch.distributed.

One layer's experts at a time are whole in a process; what is no 4-bit weight is collected on the CPU of the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_moe.checkpoint import ExpertWeights
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import NVFP4Weight, PackedWeight
from thunder_moe.integrations.huggingface.experts import NVFP4Experts
from thunder_moe.nn.linear import NVFP4Linear

__all__ = ["by_first", "is_shared", "whole_experts", "whole_linear", "whole_state"]


def is_shared(model: nn.Module) -> bool:
    """Whether transformers has shared a model among processes, of which this one has parts of some layers."""
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return False
    parts = any(
        (isinstance(module, NVFP4Experts) and not module.part.is_unsharded)
        or (isinstance(module, NVFP4Linear) and module.process_part is not None)
        for module in model.modules()
    )
    return parts or any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def by_first(work: Callable[[], Any], others: Callable[[], Any]) -> Any:
    """Does some work in the first process alone, which all leave together.

    Args:
        work: of the first process.
        others: what all take part in, to its end; the first process comes to it behind `work`, which may have failed.

    Raises:
        RuntimeError: it has failed, in a process that is not the first, which raises what `work` raises.
    """
    done, problem = None, None
    if dist.get_rank() == 0:
        try:
            done = work()
        except Exception as error:
            problem = error
    others()
    device = torch.accelerator.current_accelerator() if "nccl" in dist.get_backend() else None
    failed = torch.tensor([problem is not None], dtype=torch.int32, device=device or "cpu")
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if problem is not None:
        raise problem
    if bool(failed):
        raise RuntimeError("the first process could not save the model: its error says why")
    return done


def whole_experts(experts: NVFP4Experts) -> ExpertWeights:
    """The experts of a layer, on the device of this process' part."""
    part, form = experts.part, experts.form
    biases = [None if bias is None else _full(bias.detach()) for bias in (experts.gate_up_bias, experts.down_bias)]
    weights = experts.gate_up_proj.packed_weight, experts.down_proj.packed_weight
    if part.is_unsharded:
        return ExpertWeights(*weights, *biases)
    mesh, halves = experts.part_mesh, 2 if form.gated else 1
    if part.expert_ranks > 1:
        first, second = (None if bias is None else _joined(bias, mesh, 0) for bias in biases)
        return ExpertWeights(_whole(weights[0], mesh, 0), _whole(weights[1], mesh, 0), first, second)
    gate_up, down = _whole(weights[0], mesh, 1, halves), _whole(weights[1], mesh, 2)
    first, second = biases
    if first is not None:
        first = _joined(first, mesh, 1, halves)
    if second is not None:  # the other processes have zeros
        second = second.clone()
        dist.all_reduce(second, group=mesh.get_group())
    return ExpertWeights(gate_up, down, first, second)


def whole_linear(linear: Any) -> PackedWeight:
    """The weight (1, N, K) of a 4-bit dense layer."""
    weight: PackedWeight = linear.packed_weight
    if getattr(linear, "process_part", None) is None:
        return weight
    return _whole(weight, linear.process_mesh, linear.process_part[0])


def whole_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are no 4-bit weights: in the first process whole and on its CPU, elsewhere none."""
    first, whole = dist.get_rank() == 0, {}
    for name, tensor in state.items():
        full = _full(tensor)
        if first:
            whole[name] = full.cpu()
    return whole


def _full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def _whole(weight: PackedWeight, mesh: Any, dim: int, parts: int = 1) -> PackedWeight:
    """Joins the parts of a weight along a dimension of (E, N, K), along which `parts` weights are stacked."""
    weight = weight.to_layout(LINEAR)
    qdata, scale = (_joined(tensor.view(torch.uint8), mesh, dim, parts) for tensor in (weight.qdata, weight.scale))
    qdata, scale = qdata.view(weight.qdata.dtype), scale.view(weight.scale.dtype)
    if not isinstance(weight, NVFP4Weight):
        return weight.with_tensors((qdata, scale))
    # One per row: which of the two shapes it has may differ between processes.
    global_scale = weight.row_global_scale().contiguous()
    if dim < 2:
        global_scale = _joined(global_scale, mesh, dim, parts)
    if bool((global_scale == global_scale[:, :1]).all()):
        global_scale = global_scale[:, 0].clone()
    return NVFP4Weight(qdata, scale, global_scale)


def _joined(tensor: Tensor, mesh: Any, dim: int, parts: int = 1) -> Tensor:
    pieces = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
    dist.all_gather(pieces, tensor.contiguous(), group=mesh.get_group())
    return torch.cat([piece.chunk(parts, dim)[part] for part in range(parts) for piece in pieces], dim)

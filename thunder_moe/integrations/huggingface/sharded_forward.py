"""`Sharding`: how transformers shares the experts of a layer among processes, read from the forward that it has put
around them, and that forward for another module.
Called by forms, experts, families and on_load; calls transformers' parallel styles.

Transformers replaces the forward of a sharded module by a function that knows its style and its mesh; nothing else of a
module names them. The parameters are DTensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.checkpoint.part import ExpertsPart
from thunder_moe.formats.weight import PackedWeight

Dispatched: Any
Shared: Any
Registry: Any
try:
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel as Dispatched
    from transformers.distributed.expert_parallel import EPImplementationInterface as Registry
    from transformers.distributed.tensor_parallel import MoeExpertsParallel as Shared
except ImportError:  # transformers < 5.23
    Registry = Dispatched = Shared = None


__all__ = ["Sharding", "local_of", "sharding_of"]


@dataclass(frozen=True)
class Sharding:
    """What a process has of the experts of a layer, and with whom.

    Attributes:
        part: what it has.
        mesh: the processes that share the experts.
        install: gives another module with this part the forward that exchanges tokens or sums results.
    """

    part: ExpertsPart
    mesh: Any
    install: Callable[[nn.Module], Any]

    def problem_on_any_rank(self, problem: str | None) -> str | None:
        """What keeps a process from going on, if anything keeps any: all of them call it, and none goes on alone."""
        flag = torch.tensor([problem is not None], dtype=torch.int32, device=self.mesh.device_type)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.mesh.get_group())
        if problem is None and bool(flag):
            return "another process cannot quantize its part of the experts"
        return problem

    def pack(self, weight: Tensor, pack: Callable[[Tensor], PackedWeight]) -> PackedWeight:
        """Quantizes this process's part of a weight to the codes and scales that the whole would have.

        The global scale follows from the largest weight of an expert, wherever that is: a row with it is quantized
        along.
        """
        if self.part.feature_ranks == 1:
            return pack(weight)
        amax = torch.maximum(-weight.amin((1, 2)), weight.amax((1, 2)))  # [E]
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=self.mesh.get_group())
        experts, n, k = weight.shape
        row = torch.zeros(experts, 1, k, dtype=weight.dtype, device=weight.device)
        row[:, 0, 0] = amax
        packed = pack(torch.cat([weight, row], 1))
        qdata, scale, *others = packed.tensors()
        return packed.with_tensors((qdata[:, :n].contiguous(), scale[:, :n].contiguous(), *others))


def sharding_of(module: nn.Module) -> Sharding | None:
    """How transformers shares a module of 16-bit experts; None for one that it does not."""
    forward = vars(module).get("forward")
    if Dispatched is None or not inspect.isfunction(forward):
        return None
    known = inspect.getclosurevars(forward).nonlocals
    style: Any = known.get("self")
    mesh = known.get("ep_mesh", known.get("mesh"))
    if known.get("module") is not module or mesh is None:
        return None
    rank, size = mesh.get_local_rank(), mesh.size()
    if isinstance(style, Shared):
        part = ExpertsPart(feature_rank=rank, feature_ranks=size)
        return Sharding(part, mesh, lambda other: style.install_forward(other, mesh))
    implementation = known.get("implementation")
    if not isinstance(style, Dispatched) or implementation is None:
        return None
    registry = Registry()
    name = next((name for name in registry if registry[name] is type(implementation)), None)
    if name is None:
        return None

    def install(other: nn.Module) -> Any:
        return style.install_forward(other, mesh, tp_mesh=implementation.tp_mesh, ep_implementation=name)

    return Sharding(ExpertsPart(expert_rank=rank, expert_ranks=size), mesh, install)


def local_of(parameter: Any) -> Any:
    """What a process has of a parameter: itself, or its part of a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter

"""`Sharding`: how transformers shares the experts of a layer among processes, and the same forward for another module.
Called by forms, experts, families and on_load; calls transformers' parallel styles.

It is read from the closure of the forward that transformers has set on the module, since no contract says it. The
module's parameters are DTensors, which tell the mesh and the part. The implementation of expert parallelism, and the
mesh of the processes that have the same batch, are known to that forward alone: a module does not know its model, whose
config and plans say the same. docs/changes.md lists the names that are read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.checkpoint.experts import ExpertsPart
from thunder_moe.formats.weight import PackedWeight

AllReduce: Any
Dispatched: Any
Registry: Any
Shared: Any
by_layer: Any
try:
    from transformers.distributed.expert_parallel import AllReduceEP as AllReduce
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel as Dispatched
    from transformers.distributed.expert_parallel import EPImplementationInterface as Registry
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard as by_layer
    from transformers.distributed.tensor_parallel import MoeExpertsParallel as Shared
except ImportError:  # transformers < 5.23
    AllReduce = Dispatched = Registry = Shared = by_layer = None


@dataclass(frozen=True)
class Sharding:
    """Describe the part of a layer's experts that a process has, and the mesh of processes that share them.

    `install` gives another module with this part the forward that exchanges tokens or sums results.
    """

    part: ExpertsPart
    mesh: Any
    install: Callable[[nn.Module], Any]

    def problem_on_any_rank(self, problem: str | None) -> str | None:
        """Return what keeps this process, or any other one, from going on; all of them call this."""
        flag = torch.tensor([problem is not None], dtype=torch.int32, device=self.mesh.device_type)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.mesh.get_group())
        if problem is None and bool(flag):
            return "another process cannot quantize its part of the experts"
        return problem

    def pack(self, weight: Tensor, pack: Callable[[Tensor], PackedWeight]) -> PackedWeight:
        """Quantize this process's part of a weight to the codes and scales that the whole would have.

        The global scale follows from the largest weight of an expert in any process: a row with it is quantized along.
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
    """Return how transformers shares a module of 16-bit experts; None for a module that it does not share."""
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
    """Return what a process has of a parameter: the parameter, or its part of a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter

"""`ExpertParallel` and `TensorParallel`, the styles that torch's parallelize_module applies to this package's experts.
Called by users; calls parallel.shards for the weights and parallel.modules for the forwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from thunder_moe.nn import Llama4MoE, NVFP4GroupedSwiGLU
from thunder_moe.parallel.exchange import EXCHANGES, Exchange
from thunder_moe.parallel.load import add_buffers
from thunder_moe.parallel.modules import EXPERT_PARALLEL, EXPERT_TENSOR_PARALLEL, TENSOR_PARALLEL
from thunder_moe.parallel.shards import Cut, check_cut, cut_
from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP
from thunder_moe.training.grouped_mlp import own_form

__all__ = ["ExpertParallel", "TensorParallel"]


class ExpertParallel(ParallelStyle):
    """Spreads the experts of a `Llama4MoE`, `GroupedSwiGLU` or `GroupedMLP`, 16-bit or packed (NVFP4, MXFP8), over the
    ranks of a mesh.

    Each rank keeps equally many consecutive experts and calls the module with tokens of its own; they travel to their
    experts and back. Router and shared expert stay whole on every rank; the shared expert runs while tokens travel.
    ``parallelize_module(model, mesh, ExpertParallel())`` applies it to a module. The mesh has one dimension, or two
    with names: the first spreads experts, the second the intermediate features of each as `TensorParallel` does, and
    its ranks are called with the same tokens.

    16-bit weights become DTensors with ``Shard(0)``, and train: an expert's gradient is the sum over the tokens of all
    ranks. Packed weights stay plain buffers in their layout; the state dict has DTensors of them in layout "linear".

    Args:
        exchange: "all_to_all": a token goes once to each rank that has one of its experts; "all_gather": all tokens to
            all ranks, by an all-gather and a reduce-scatter (`Llama4MoE` alone). "symmetric_memory": likewise, by
            copies between GPUs that can read each other's memory (CUDA, inference). Or a subclass of `Exchange`.
        capacity: None: buffers have the exact sizes, for which the host waits once in each call. A number: there is
            room for that many tokens between each two ranks, the same number on all ranks; the host waits for nothing,
            CUDA graphs can be captured, and rows that nobody needs are computed as padding. As large as the most tokens
            that any rank is called with, all have room; with fewer ("all_to_all" alone), a token that finds none
            misses that rank's experts, and `expert_load` counts it.
        chunks: of a `Llama4MoE`'s tokens: while the experts run one, the next is on its way, and so is what the last
            one gave. The same number on all ranks. On two H200s it gained nothing (docs/distributed.md).
        load_steps: steps that `expert_load` tells about; with several chunks, each of them is one.

    Raises:
        ValueError: an argument has another value; `parallelize_module`: a mesh of more than two dimensions, or of two
            without names; experts or features that it does not divide. All are raised before ranks communicate.
    """

    def __init__(
        self,
        *,
        exchange: str | type[Exchange] = "all_to_all",
        capacity: int | None = None,
        chunks: int = 1,
        load_steps: int = 16,
    ) -> None:
        super().__init__()
        known = issubclass(exchange, Exchange) if isinstance(exchange, type) else exchange in tuple(EXCHANGES)
        if not known:
            raise ValueError(f"exchange: got {exchange!r}, wanted one of {tuple(EXCHANGES)} or a subclass of Exchange")
        for name, value, least in (("capacity", capacity, 1), ("chunks", chunks, 1), ("load_steps", load_steps, 0)):
            exact = name == "capacity" and value is None
            if not exact and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name}: got {value!r}, wanted an integer of at least {least}")
        self.exchange, self.capacity, self.chunks, self.load_steps = exchange, capacity, chunks, load_steps

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        both = device_mesh.ndim == 2
        cls = _parallel_class(
            module, EXPERT_TENSOR_PARALLEL if both else EXPERT_PARALLEL, "ExpertParallel", device_mesh, 2
        )  # fmt: skip
        experts: Any = module.routed_experts if isinstance(module, Llama4MoE) else module
        for name, value, plain in (("exchange", self.exchange, "all_to_all"), ("chunks", self.chunks, 1)):
            if value != plain and experts is module:
                raise ValueError(
                    f"{name}: got {value!r} for a {type(module).__name__}, whose rows are sorted; wanted {plain!r}"
                )
        mesh, features = _dimensions(device_mesh) if both else (device_mesh, None)
        cuts = _feature_cuts(module, device_mesh) if both else _expert_cuts(experts, device_mesh)
        for name, linear, cut in cuts:
            check_cut(name, linear, cut)
        num_experts = next(iter(_linears(experts).values())).num_experts // mesh.size()
        for _, linear, cut in cuts:
            cut_(linear, cut, self.src_data_rank)
        module.__class__ = cls
        made: Any = module
        room = None if self.capacity is None else -(-self.capacity // self.chunks)
        make = EXCHANGES[self.exchange] if isinstance(self.exchange, str) else self.exchange
        made.exchange, made.chunks = make(mesh, num_experts, room), self.chunks
        if features is not None:
            made.mesh = features
        add_buffers(module, self.load_steps, num_experts, _device(module))
        return module


class TensorParallel(ParallelStyle):
    """Spreads the intermediate features of each expert of a `Llama4MoE`, `GroupedSwiGLU` or `GroupedMLP`, 16-bit or
    packed (NVFP4, MXFP8), over the ranks of a mesh.

    Every rank is called with the same tokens. It has equally many columns of gate and of up, and the rows of down
    that follow; the sum over the ranks is the result. Of a `Llama4MoE` the shared expert is cut too.
    ``parallelize_module(model, mesh, TensorParallel())`` applies it to a module; the mesh has one dimension.

    Weights are DTensors as with `ExpertParallel`; gate and up that are stacked in one weight are plain tensors of the
    rank, whose state dict has DTensors of two pieces.

    Raises:
        ValueError: `parallelize_module`: a mesh of several dimensions; intermediate features that it does not divide
            into multiples of 16 (MXFP8: 32), or of a tile of the weights' layout; a bias of the down projection.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cls = _parallel_class(module, TENSOR_PARALLEL, "TensorParallel", device_mesh, 1)
        cuts = _feature_cuts(module, device_mesh)
        for name, linear, cut in cuts:
            check_cut(name, linear, cut)
        for _, linear, cut in cuts:
            cut_(linear, cut, self.src_data_rank)
        module.__class__ = cls
        made: Any = module
        made.mesh = device_mesh
        return module


def _expert_cuts(experts: nn.Module, mesh: DeviceMesh) -> list[tuple[str, Any, Cut]]:
    """The linears of experts, and how they are cut."""
    return [(name, linear, Cut(mesh, (0,))) for name, linear in _linears(experts).items()]


def _feature_cuts(module: nn.Module, mesh: DeviceMesh) -> list[tuple[str, Any, Cut]]:
    """The linears of experts and shared expert, and how their features are cut by the last dimension of a mesh, their
    experts by the one before, if there is one."""
    groups: list[Any] = [module]
    if isinstance(module, Llama4MoE):
        groups = [module.routed_experts, *([] if module.shared_expert is None else [module.shared_expert])]
    first = (0,) * (mesh.ndim - 1)
    return [
        (
            name,
            linear,
            Cut(mesh, (*first, 2 if name == "down_proj" else 1), _parts(group, name, mesh.size(mesh.ndim - 1))),
        )
        for group in groups
        for name, linear in _linears(group).items()
    ]


def _dimensions(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """The two dimensions of a mesh.

    Raises:
        ValueError: they have no names.
    """
    if mesh.mesh_dim_names is None:
        raise ValueError("device_mesh: got two dimensions without names, wanted mesh_dim_names=, such as ('ep', 'tp')")
    first, second = mesh.mesh_dim_names
    return mesh[first], mesh[second]


def _parallel_class(
    module: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]], style: str, mesh: DeviceMesh, most: int
) -> type[nn.Module]:
    """The class that a module becomes.

    Raises:
        TypeError: the module is of a class that the style does not know.
        ValueError: the mesh has more than `most` dimensions.
    """
    cls = classes.get(type(module))
    if cls is None:
        known = ", ".join(cls.__name__ for cls in classes)
        raise TypeError(f"module: got a {type(module).__name__}, wanted one of {known} for {style}")
    if mesh.ndim > most:
        wanted = ("one", "one or two")[most - 1]
        raise ValueError(f"device_mesh: got {mesh.ndim} dimensions, wanted {wanted}, as mesh['name'] gives it")
    return cls


def _linears(group: nn.Module) -> dict[str, Any]:
    return {name: child for name, child in group.named_children() if name.endswith("_proj")}


def _parts(group: nn.Module, name: str, ranks: int) -> int:
    """Return the number of weights that are stacked, not interleaved, in the out_features of a linear.

    Raises:
        ValueError: columns that belong together would come to different ranks.
    """
    if isinstance(group, NVFP4GroupedSwiGLU):
        return 2 if name == "gate_up_proj" else 1
    if not isinstance(group, GroupedMLP | NVFP4GroupedMLP) or name != "gate_up_proj":
        return 1
    form = own_form(group.activation)
    if form is None:
        raise ValueError(
            f"activation: got a {type(group.activation).__name__}, whose columns nobody knows; wanted a ScaledSwiGLU or"
            " a ScaledSReLU under TensorParallel"
        )
    if form.kind != "swiglu":
        return 1
    if form.interleave is None:
        return 2
    pair, columns = 2 * form.interleave, group.gate_up_proj.out_features
    if columns % (pair * ranks):
        raise ValueError(
            f"{name}: it has out_features={columns} in pairs of {pair}, wanted a multiple of {pair * ranks}"
        )
    return 1


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device

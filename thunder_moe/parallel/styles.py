"""`ExpertParallel` and `TensorParallel`, the styles that torch's parallelize_module applies to this package's experts.
Called by users; calls parallel.shards for the weights and parallel.modules for the forwards.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from thunder_moe.nn import Llama4MoE, NVFP4GroupedSwiGLU
from thunder_moe.nn.grouped_linear import require_at_least
from thunder_moe.parallel.exchange import AllGather, AllToAll, Exchange, SymmetricMemory
from thunder_moe.parallel.load import add_buffers
from thunder_moe.parallel.modules import PARALLEL, make_parallel
from thunder_moe.parallel.rows_in_8_bits import AllToAll8Bit
from thunder_moe.parallel.shards import WeightSharding, check_sharding, shard_weight_
from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP
from thunder_moe.training.grouped_mlp import own_form

EXCHANGES: dict[str, type[Exchange]] = {
    "all_to_all": AllToAll,
    "all_to_all_8bit": AllToAll8Bit,
    "all_gather": AllGather,
    "symmetric_memory": SymmetricMemory,
}


class ExpertParallel(ParallelStyle):
    """Spreads the experts of a `Llama4MoE`, `GroupedSwiGLU` or `GroupedMLP`, 16-bit or packed (NVFP4, MXFP8), over the
    ranks of a mesh.

    Each rank keeps equally many consecutive experts and calls the module with its own tokens, which travel to their
    experts and back. Router and shared expert stay whole on every rank; the shared expert runs while tokens travel.
    ``parallelize_module(model, mesh, ExpertParallel())`` applies it to a module. The mesh has one dimension, or two
    with names: the first spreads experts, the second the intermediate features of each as `TensorParallel` does, and
    its ranks are called with the same tokens.

    16-bit weights become DTensors with ``Shard(0)``, and train: an expert's gradient is the sum over the tokens of all
    ranks. Packed weights stay plain buffers in their layout; the state dict has DTensors of them in layout "linear".

    Args:
        exchange: "all_to_all": a token goes once to each rank that has one of its experts. "all_to_all_8bit": the same,
            where tokens travel in the numbers of the experts' 8-bit recipe, and in the backward the gradients of the
            results do; without a recipe as "all_to_all". "all_gather": all tokens go to all ranks, by an all-gather and
            a reduce-scatter (`Llama4MoE` alone). "symmetric_memory": all tokens go to all ranks, by copies between GPUs
            that can read each other's memory (CUDA, inference, `Llama4MoE` alone). Or a subclass of `Exchange`.
        capacity: None: buffers have the exact sizes, for which the host waits once in each call. A number, the same on
            all ranks: buffers hold that many tokens for each pair of ranks. The host never waits, CUDA graphs can be
            captured, and unused rows are computed as padding. No token is dropped if the capacity is at least the
            largest number of tokens that any rank is called with. With a smaller one ("all_to_all" alone), a token
            that finds no room misses that rank's experts, and `expert_load` counts it.
        chunks: number of chunks of a `Llama4MoE`'s tokens, the same on all ranks. While the experts run a chunk, the
            next one and the results of the last one travel. On two H200s it gained nothing (docs/distributed.md).
        load_steps: number of steps that `expert_load` returns; each chunk counts as a step.

    Raises:
        ValueError: an argument has another value. `parallelize_module`: the mesh has more than two dimensions, or two
            without names, or does not divide the experts or features. All are raised before ranks communicate.
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
        if not (issubclass(exchange, Exchange) if isinstance(exchange, type) else exchange in tuple(EXCHANGES)):
            raise ValueError(f"exchange: got {exchange!r}, wanted one of {tuple(EXCHANGES)} or a subclass of Exchange")
        if capacity is not None:
            require_at_least(1, "capacity", capacity)
        require_at_least(1, "chunks", chunks)
        require_at_least(0, "load_steps", load_steps)
        self.exchange, self.capacity, self.chunks, self.load_steps = exchange, capacity, chunks, load_steps

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        both = device_mesh.ndim == 2
        _check_module(module, "ExpertParallel", device_mesh, 2)
        experts: Any = module.routed_experts if isinstance(module, Llama4MoE) else module
        known = ("all_to_all", "all_to_all_8bit")
        for name, value, plain in (("exchange", self.exchange, known), ("chunks", self.chunks, (1,))):
            if value not in plain and experts is module:
                wanted = " or ".join(map(repr, plain))
                raise ValueError(
                    f"{name}: got {value!r} for a {type(module).__name__}, whose rows are sorted; wanted {wanted}"
                )
        mesh, features = device_mesh, None
        if both:
            if device_mesh.mesh_dim_names is None:
                raise ValueError(
                    "device_mesh: got two dimensions without names, wanted mesh_dim_names=, such as ('ep', 'tp')"
                )
            mesh, features = (device_mesh[name] for name in device_mesh.mesh_dim_names)
            shardings = _feature_shardings(module, device_mesh)
        else:
            shardings = [(name, linear, WeightSharding(mesh, (0,))) for name, linear in _linears(experts).items()]
        for name, linear, sharding in shardings:
            check_sharding(name, linear, sharding)
        num_experts = experts.down_proj.num_experts // mesh.size()
        for _, linear, sharding in shardings:
            shard_weight_(linear, sharding, self.src_data_rank)
        room = None if self.capacity is None else -(-self.capacity // self.chunks)
        make = EXCHANGES[self.exchange] if isinstance(self.exchange, str) else self.exchange
        make_parallel(module, make(mesh, num_experts, room), self.chunks, features)
        add_buffers(module, self.load_steps, num_experts, next(chain(module.parameters(), module.buffers())).device)
        return module


class TensorParallel(ParallelStyle):
    """Spreads the intermediate features of each expert of a `Llama4MoE`, `GroupedSwiGLU` or `GroupedMLP`, 16-bit or
    packed (NVFP4, MXFP8), over the ranks of a mesh.

    Every rank is called with the same tokens. It has equally many columns of gate and of up, and the corresponding rows
    of down; the result is the sum over the ranks. The shared expert of a `Llama4MoE` is sharded, too.
    ``parallelize_module(model, mesh, TensorParallel())`` applies it to a module; the mesh has one dimension.

    Weights are DTensors as with `ExpertParallel`. Gate and up that are stacked in one weight are a plain tensor on each
    rank; the state dict has it as a DTensor of two slices.

    Raises:
        ValueError: `parallelize_module`: the mesh has several dimensions, or does not divide the intermediate features
            into multiples of 16 (MXFP8: 32), or of a tile of the weights' layout; the down projection has a bias.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_module(module, "TensorParallel", device_mesh, 1)
        shardings = _feature_shardings(module, device_mesh)
        for name, linear, sharding in shardings:
            check_sharding(name, linear, sharding)
        for _, linear, sharding in shardings:
            shard_weight_(linear, sharding, self.src_data_rank)
        make_parallel(module, None, 1, device_mesh)
        return module


def _feature_shardings(module: nn.Module, mesh: DeviceMesh) -> list[tuple[str, Any, WeightSharding]]:
    """Return the linears of experts and shared expert, with shardings of their features.

    The last dimension of the mesh shards the features; the one before, if there is one, the experts."""
    groups: list[Any] = [module]
    if isinstance(module, Llama4MoE):
        groups = [module.routed_experts, *([] if module.shared_expert is None else [module.shared_expert])]
    found = []
    for group in groups:
        for name, linear in _linears(group).items():
            dims = *(0,) * (mesh.ndim - 1), 2 if name == "down_proj" else 1
            stacked = _stacked_weights(group, name, mesh.size(mesh.ndim - 1))
            found.append((name, linear, WeightSharding(mesh, dims, stacked)))
    return found


def _check_module(module: nn.Module, style: str, mesh: DeviceMesh, max_dims: int) -> None:
    """Check the class and the forward of a module, and the dimensions of the mesh.

    Raises:
        TypeError: the styles do not know the module's class.
        ValueError: the module has a forward of its own, or the mesh has more than `max_dims` dimensions.
    """
    if type(module) not in PARALLEL:
        known = ", ".join(cls.__name__ for cls in PARALLEL)
        raise TypeError(f"module: got a {type(module).__name__}, wanted one of {known} for {style}")
    if "forward" in vars(module):
        name = type(module).__name__
        raise ValueError(f"module: got a {name} that is parallel already or has another forward, wanted a plain one")
    if mesh.ndim > max_dims:
        wanted = ("one", "one or two")[max_dims - 1]
        raise ValueError(f"device_mesh: got {mesh.ndim} dimensions, wanted {wanted}, as mesh['name'] gives it")


def _linears(group: nn.Module) -> dict[str, Any]:
    return {name: child for name, child in group.named_children() if name.endswith("_proj")}


def _stacked_weights(group: nn.Module, name: str, ranks: int) -> int:
    """Return the number of weights that are stacked, not interleaved, in the out_features of a linear.

    Raises:
        ValueError: columns that belong together would be on different ranks.
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

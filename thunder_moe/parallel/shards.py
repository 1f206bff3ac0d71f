"""Shards the weights of experts over ranks: 16-bit parameters become DTensors; packed modules keep the shard of their
rank, and their state dicts have DTensors, which torch.distributed.checkpoint reshards.
Called by parallel.styles and parallel.modules; calls torch.distributed.tensor and the modules of nn.

Legend: R ranks. Dim 0 counts experts, 1 out_features, 2 in_features; dense layers lack the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.nn.utils.parametrize import is_parametrized

from thunder_moe.formats.weight import joined
from thunder_moe.nn import GroupedLinear, NVFP4GroupedLinear
from thunder_moe.nn.grouped_linear import local_part
from thunder_moe.nn.lora import LoRALinear
from thunder_moe.nn.packed import PackedModule

# For each dimension of a mesh: the dimension of a tensor that it shards; None: replicated.
Dims = tuple[int | None, ...]
_SIZES = ("num_experts", "out_features", "in_features")


@dataclass(frozen=True)
class WeightSharding:
    """The sharding of a weight over a mesh.

    Attributes:
        mesh: its ranks have the shards in order.
        dims: for each dimension of the mesh, the dimension of the weight that it shards, as in the legend.
        stacked: number of weights that are stacked along the last of dims and sharded separately: 2 for gate and up in
            one, else 1.
    """

    mesh: DeviceMesh
    dims: tuple[int, ...]
    stacked: int = 1

    def shards(self) -> list[tuple[int, int, int, int]]:
        """Return (dim, index of this rank's shard, number of ranks, stacked weights) for each dimension of the mesh."""
        counts = [1] * (len(self.dims) - 1) + [self.stacked]
        return [
            (dim, self.mesh.get_local_rank(at), self.mesh.size(at), stacked)
            for at, (dim, stacked) in enumerate(zip(self.dims, counts, strict=True))
        ]

    def local_shard(self, whole: Tensor, dims: Dims) -> Tensor:
        """Return this rank's shard of a whole tensor."""
        for dim, (_, rank, ranks, stacked) in zip(dims, self.shards(), strict=True):
            if dim is not None:
                whole = whole.unflatten(dim, (stacked, ranks, -1)).select(dim + 1, rank).flatten(dim, dim + 1)
        return whole.clone(memory_format=torch.contiguous_format)

    def placements(self, dims: Dims) -> list[Placement]:
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def is_stacked(self, dims: Dims) -> bool:
        """True if this rank has several slices of the whole tensor, one of each stacked weight."""
        return self.stacked > 1 and dims[-1] is not None

    def to_dtensor(self, own: Tensor, dims: Dims) -> DTensor:
        """Return the DTensor along `dims` whose local tensor on this rank is `own`."""
        placements, last = self.placements(dims), dims[-1]
        if not self.is_stacked(dims) or last is None:
            return DTensor.from_local(own, self.mesh, placements, run_check=False)
        # No placement of torch describes several slices of the whole to torch.distributed.checkpoint.
        shape, offset = list(own.shape), [0] * own.ndim
        for dim, (_, rank, ranks, _) in zip(dims[:-1], self.shards()[:-1], strict=True):
            if dim is not None:
                offset[dim], shape[dim] = rank * own.shape[dim], ranks * own.shape[dim]
        *_, (_, rank, ranks, _) = self.shards()
        size = own.shape[last] // self.stacked
        shape[last] *= ranks
        offsets = [
            (*offset[:last], (part * ranks + rank) * size, *offset[last + 1 :]) for part in range(self.stacked)
        ]  # fmt: skip
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), own.dtype)
        # Each slice is a view of this rank's tensor, so that loading into the slice fills the tensor.
        wrapper = LocalShardsWrapper(list(own.chunk(self.stacked, last)), offsets)
        make: Any = DTensor
        return make(wrapper, DTensorSpec(self.mesh, tuple(placements), meta), requires_grad=False)

    def local_state_dict(self, linear: nn.Module, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return a state dict with the tensors that `load_state_dict` loads into a linear of this rank.

        Packed buffers get this rank's shards, parameters that are DTensors get DTensors."""
        state_dict = dict(state_dict)
        for name, tensor in _state_tensors(linear).items():
            key = f"{prefix}{name}"
            given = state_dict.get(key)
            if not isinstance(given, Tensor):
                continue
            dims = _sharded_dims(linear, self, given)
            if not isinstance(tensor, DTensor):
                state_dict[key] = self.local_from_state_dict(key, given, dims)
            elif not isinstance(given, DTensor):
                state_dict[key] = self.to_dtensor(self.local_from_state_dict(key, given, dims), dims)
        return state_dict

    def local_from_state_dict(self, key: str, given: Tensor, dims: Dims) -> Tensor:
        """Return this rank's shard of an entry of a state dict: a DTensor of this sharding, or the whole tensor.

        Raises:
            ValueError: a DTensor of another sharding; a whole tensor of a size that the ranks do not divide.
        """
        if not isinstance(given, DTensor):
            for dim, (_, _, ranks, stacked) in zip(dims, self.shards(), strict=True):
                if dim is not None and given.shape[dim] % (stacked * ranks):
                    raise ValueError(f"{key}: got {tuple(given.shape)}, of which {ranks} ranks have no equal parts")
            return given if not any(dim is not None for dim in dims) else self.local_shard(given, dims)
        placements = tuple(self.placements(dims))
        if given.device_mesh != self.mesh or given.placements != placements:
            raise ValueError(
                f"{key}: got a DTensor with {given.placements} on {given.device_mesh}, wanted {placements} on"
                f" {self.mesh}, as in this module's state_dict, or the whole tensor"
            )
        local: Tensor = given._local_tensor  # to_local() does not take several slices
        if isinstance(local, LocalShardsWrapper):
            assert dims[-1] is not None
            return joined(local.local_shards(), dims[-1])
        return local


def check_sharding(name: str, linear: nn.Module, sharding: WeightSharding) -> None:
    """Checks that a linear can be sharded, before any rank communicates.

    Raises:
        ValueError: the ranks do not divide its sizes; it is sharded already; it has adapters, a parametrization,
            options of training or a bias, which sharded linears do not support.
        TypeError: it is a module of another class.
    """
    if not isinstance(linear, GroupedLinear | PackedModule | nn.Linear):
        raise TypeError(f"{name}: got a {type(linear).__name__}, wanted a linear of this package or torch's")
    bias = linear._parameters.get("bias")
    if weight_sharding_of(linear) is not None or any(
        isinstance(tensor, DTensor) for tensor in linear._parameters.values()
    ):
        raise ValueError(f"{name}: its weight is cut over ranks already, wanted a whole one")
    if isinstance(linear, LoRALinear):
        raise ValueError(f"{name}: got adapters {list(linear.lora_specs)}, which are not cut; wanted a linear without")
    if is_parametrized(linear):
        raise ValueError(f"{name}: got a parametrized weight (finish_qat_ before), wanted a plain parameter")
    if isinstance(linear, nn.Linear) and (type(linear) is not nn.Linear or "forward" in vars(linear)):
        raise TypeError(f"{name}: got a {type(linear).__name__}, whose forward would be lost; wanted torch's nn.Linear")
    if bias is not None and 2 in sharding.dims:
        raise ValueError(f"{name}: got a bias, which each rank would add; wanted bias=False under TensorParallel")
    for option in ("accumulate_into_main_grad", "delay_wgrad"):
        if getattr(linear, option, False):
            raise ValueError(f"{name}: got {option}=True, which sharded parameters do not have; wanted False")
    for dim, _, ranks, stacked in sharding.shards():
        if dim == 0 and not _has_experts_dim(linear):
            continue
        if isinstance(linear, PackedModule):
            reason = linear.obstacle_to_narrow(dim, ranks, stacked)
        else:
            size = getattr(linear, _SIZES[dim])
            even = size % (stacked * ranks) == 0
            reason = None if even else f"it has {_SIZES[dim]}={size}, wanted a multiple of {stacked * ranks}"
        if reason is not None:
            raise ValueError(f"{name}: {reason}, for {ranks} ranks")


def weight_sharding_of(linear: nn.Module) -> WeightSharding | None:
    """Return the sharding of a linear's weight; None if it is not sharded."""
    return vars(linear).get("_sharding")


def shard_weight_(linear: nn.Module, sharding: WeightSharding, source: int | None) -> None:
    """Replaces the weight of a linear by this rank's shard.

    Args:
        linear: one that `check_sharding` accepts.
        source: the rank whose weights are distributed; None: each rank shards its own, without communication.
    """
    linear.__dict__["_sharding"] = sharding
    for name, parameter in list(linear._parameters.items()):
        if parameter is None:
            continue
        dims = _sharded_dims(linear, sharding, parameter)
        if not sharding.is_stacked(dims):
            sharded: Tensor = distribute_tensor(
                parameter.data, sharding.mesh, sharding.placements(dims), src_data_rank=source
            )
        else:
            _broadcast(parameter.data, sharding.mesh, source)
            sharded = sharding.local_shard(parameter.data, dims)
        linear._parameters[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    if isinstance(linear, PackedModule):
        for buffer in linear.buffers():
            _broadcast(buffer, sharding.mesh, source)
        for dim, rank, ranks, stacked in sharding.shards():
            if dim != 0 or _has_experts_dim(linear):
                linear.narrow_(dim, rank, ranks, stacked)
    else:  # packed linears call `local_state_dict` themselves
        linear.register_load_state_dict_pre_hook(_load_local)
    if _has_experts_dim(linear):
        linear._sharded = sharding.stacked == 1
    if isinstance(linear, nn.Linear):
        set_forward(linear, _local_linear)
    linear.register_state_dict_post_hook(_save_dtensors)


def set_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Make calls of a module return ``forward(module, ...)``, and calls of its shallow copies a ValueError."""
    # A bound method of another function cannot be pickled.
    vars(module)["forward"] = partial(forward, module)
    module.register_forward_pre_hook(partial(_refuse_copy, module))


def _refuse_copy(original: nn.Module, module: nn.Module, _: Any) -> None:
    if module is not original:
        raise ValueError(
            f"module: got a shallow copy of a parallel {type(module).__name__}, whose forward reads the original's"
            " weights; wanted copy.deepcopy of it"
        )


def _local_linear(linear: Any, x: Tensor) -> Tensor:
    """Multiply by this rank's shard of the weight, as the forward of torch's linear."""
    return nn.functional.linear(x, local_part(linear.weight, True), local_part(linear.bias, True))


def _broadcast(tensor: Tensor, mesh: DeviceMesh, source: int | None) -> None:
    if source is not None and not tensor.is_meta:
        bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        for at in range(mesh.ndim):
            dist.broadcast(bits, group=mesh.get_group(at), group_src=source)


def _has_experts_dim(linear: nn.Module) -> TypeGuard[GroupedLinear | NVFP4GroupedLinear]:
    return isinstance(linear, GroupedLinear | NVFP4GroupedLinear)


def _sharded_dims(linear: nn.Module, sharding: WeightSharding, tensor: Tensor) -> Dims:
    """Return the sharded dimension of a linear's tensor for each dimension of the mesh; None: replicated."""
    own = [dim if _has_experts_dim(linear) else dim - 1 for dim in sharding.dims]
    return tuple(dim if 0 <= dim < tensor.ndim else None for dim in own)


def _state_tensors(linear: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a linear that its state dict has, by name."""
    buffers = linear._buffers if isinstance(linear, PackedModule) else {}
    both = {**linear._parameters, **buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _save_dtensors(linear: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replaces the tensors of a linear in `state_dict` by DTensors."""
    sharding = weight_sharding_of(linear)
    assert sharding is not None
    for name in _state_tensors(linear):
        tensor = state_dict.get(f"{prefix}{name}")
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
            state_dict[f"{prefix}{name}"] = sharding.to_dtensor(
                tensor.detach(), _sharded_dims(linear, sharding, tensor)
            )


def _load_local(linear: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replaces the tensors of a 16-bit linear in `state_dict` by DTensors of this rank's shards."""
    sharding = weight_sharding_of(linear)
    assert sharding is not None
    state_dict.update(sharding.local_state_dict(linear, state_dict, prefix))

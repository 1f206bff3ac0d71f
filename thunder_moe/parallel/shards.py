"""Cuts the weights of experts into one part per rank: 16-bit parameters become DTensors; packed modules keep their
rank's part, and their state dicts have DTensors, which torch.distributed.checkpoint reshards.
Called by parallel.styles; calls torch.distributed.tensor and the modules of nn.

Legend: R ranks. Dim 0 is that of experts, 1 of out_features, 2 of in_features; dense layers lack the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from thunder_moe.nn.lora import LoRALinear
from thunder_moe.nn.packed import PackedModule

__all__ = ["Cut", "LocalLinear", "check_cut", "cut_"]

Dims = tuple[int | None, ...]  # of a tensor, for each dimension of a mesh: the dimension that is cut
_SIZES = ("num_experts", "out_features", "in_features")


class LocalLinear(nn.Linear):
    """torch's linear with a sharded weight: a rank multiplies by its own part."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        bias: Any = self.bias
        return nn.functional.linear(x, weight.to_local(), None if bias is None else bias.to_local())


@dataclass(frozen=True)
class Cut:
    """The way a weight is cut.

    Attributes:
        mesh: its ranks have the parts in order.
        dims: what each dimension of the mesh cuts, as in the legend.
        parts: weights stacked along the last of dims, each of which is cut: 2 of gate and up in one, else 1.
    """

    mesh: DeviceMesh
    dims: tuple[int, ...]
    parts: int = 1

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """(dim, this rank's part, the ranks, stacked weights) of each dimension of the mesh."""
        stacked = [1] * (len(self.dims) - 1) + [self.parts]
        return [
            (dim, self.mesh.get_local_rank(at), self.mesh.size(at), parts)
            for at, (dim, parts) in enumerate(zip(self.dims, stacked, strict=True))
        ]

    def own(self, whole: Tensor, dims: Dims) -> Tensor:
        """This rank's part of a tensor."""
        for dim, (_, rank, ranks, parts) in zip(dims, self.pieces(), strict=True):
            if dim is not None:
                whole = whole.unflatten(dim, (parts, ranks, -1)).select(dim + 1, rank).flatten(dim, dim + 1)
        return whole.clone(memory_format=torch.contiguous_format)

    def placements(self, dims: Dims) -> list[Placement]:
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def stacks(self, dims: Dims) -> bool:
        """True if this rank has several pieces of the whole."""
        return self.parts > 1 and dims[-1] is not None

    def distributed(self, own: Tensor, dims: Dims) -> DTensor:
        """The DTensor of which this rank has `own`, cut along `dims`; None: ranks have the same."""
        placements, last = self.placements(dims), dims[-1]
        if not self.stacks(dims) or last is None:
            return DTensor.from_local(own, self.mesh, placements, run_check=False)
        # Several pieces of the whole, which no placement of torch's describes to torch.distributed.checkpoint.
        shape, offset = list(own.shape), [0] * own.ndim
        for dim, (_, rank, ranks, _) in zip(dims[:-1], self.pieces()[:-1], strict=True):
            if dim is not None:
                offset[dim], shape[dim] = rank * own.shape[dim], ranks * own.shape[dim]
        *_, (_, rank, ranks, _) = self.pieces()
        size = own.shape[last] // self.parts
        shape[last] *= ranks
        offsets = [
            (*offset[:last], (part * ranks + rank) * size, *offset[last + 1 :]) for part in range(self.parts)
        ]  # fmt: skip
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), own.dtype)
        # A piece is a view of this rank's tensor: what is read into it arrives there.
        wrapper = LocalShardsWrapper(list(own.chunk(self.parts, last)), offsets)
        make: Any = DTensor
        result: DTensor = make(wrapper, DTensorSpec(self.mesh, tuple(placements), meta), requires_grad=False)
        return result

    def own_parts(self, linear: nn.Module, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
        """A state dict that has of a linear what `load_state_dict` loads: this rank's parts, and DTensors where its
        parameters are such."""
        state_dict = dict(state_dict)
        for name, tensor in _tensors(linear).items():
            key = f"{prefix}{name}"
            given = state_dict.get(key)
            if not isinstance(given, Tensor):
                continue
            dims = _dims(linear, self, given)
            if not isinstance(tensor, DTensor):
                state_dict[key] = self.loaded(key, given, dims)
            elif not isinstance(given, DTensor):
                state_dict[key] = self.distributed(self.loaded(key, given, dims), dims)
        return state_dict

    def loaded(self, key: str, given: Tensor, dims: Dims) -> Tensor:
        """This rank's part of what a state dict has: a DTensor of this cut, or the whole tensor.

        Raises:
            ValueError: a DTensor that is cut otherwise; a whole tensor of a size that the ranks do not divide.
        """
        if not isinstance(given, DTensor):
            for dim, (_, _, ranks, parts) in zip(dims, self.pieces(), strict=True):
                if dim is not None and given.shape[dim] % (parts * ranks):
                    raise ValueError(f"{key}: got {tuple(given.shape)}, of which {ranks} ranks have no equal parts")
            return given if not any(dim is not None for dim in dims) else self.own(given, dims)
        placements = tuple(self.placements(dims))
        if given.device_mesh != self.mesh or given.placements != placements:
            raise ValueError(
                f"{key}: got a DTensor with {given.placements} on {given.device_mesh}, wanted {placements} on"
                f" {self.mesh}, as in this module's state_dict, or the whole tensor"
            )
        local: Tensor = given._local_tensor  # several pieces have no to_local()
        if isinstance(local, LocalShardsWrapper):
            assert dims[-1] is not None
            return joined(local.local_shards(), dims[-1])
        return local


def check_cut(name: str, linear: nn.Module, cut: Cut) -> None:
    """Checks that a linear can be cut, before any rank communicates.

    Raises:
        ValueError: sizes that the ranks do not divide; a linear that is cut already; adapters, a parametrization,
            options of training or a bias that a cut does not have.
        TypeError: a module of another class.
    """
    if not isinstance(linear, GroupedLinear | NVFP4GroupedLinear | nn.Linear) and not isinstance(linear, PackedModule):
        raise TypeError(f"{name}: got a {type(linear).__name__}, wanted a linear of this package or torch's")
    bias = linear._parameters.get("bias")
    if cut_of(linear) is not None or any(isinstance(tensor, DTensor) for tensor in linear._parameters.values()):
        raise ValueError(f"{name}: its weight is cut over ranks already, wanted a whole one")
    if isinstance(linear, LoRALinear):
        raise ValueError(f"{name}: got adapters {list(linear.lora_specs)}, which are not cut; wanted a linear without")
    if is_parametrized(linear):
        raise ValueError(f"{name}: got a parametrized weight (finish_qat_ before), wanted a plain parameter")
    if isinstance(linear, nn.Linear) and type(linear) is not nn.Linear:
        raise TypeError(f"{name}: got a {type(linear).__name__}, whose forward would be lost; wanted torch's nn.Linear")
    if bias is not None and 2 in cut.dims:
        raise ValueError(f"{name}: got a bias, which each rank would add; wanted bias=False under TensorParallel")
    for option in ("accumulate_into_main_grad", "delay_wgrad"):
        if getattr(linear, option, False):
            raise ValueError(f"{name}: got {option}=True, which sharded parameters do not have; wanted False")
    for dim, _, ranks, parts in cut.pieces():
        if dim == 0 and not _of_experts(linear):
            continue
        if isinstance(linear, PackedModule):
            obstacle = linear.obstacle_to_narrow(dim, ranks, parts)
        else:
            size = getattr(linear, _SIZES[dim])
            even = size % (parts * ranks) == 0
            obstacle = None if even else f"it has {_SIZES[dim]}={size}, wanted a multiple of {parts * ranks}"
        if obstacle is not None:
            raise ValueError(f"{name}: {obstacle}, for {ranks} ranks")


def cut_of(linear: nn.Module) -> Cut | None:
    """Return the way a linear's weight was cut; None if it was not."""
    cut: Cut | None = vars(linear).get("_cut")
    return cut


def cut_(linear: nn.Module, cut: Cut, source: int | None) -> None:
    """Leaves a linear this rank's part of its weight.

    Args:
        linear: that `check_cut` has passed.
        cut: how.
        source: the rank whose weights all get parts of; None: each cuts its own, without communication.
    """
    linear.__dict__["_cut"] = cut
    packed = isinstance(linear, PackedModule)
    for name, parameter in list(linear._parameters.items()):
        if parameter is None:
            continue
        dims = _dims(linear, cut, parameter)
        if not cut.stacks(dims):
            placements = cut.placements(dims)
            cut_tensor: Tensor = distribute_tensor(parameter.data, cut.mesh, placements, src_data_rank=source)
        else:
            _broadcast(parameter.data, cut.mesh, source)
            cut_tensor = cut.own(parameter.data, dims)
        linear._parameters[name] = nn.Parameter(cut_tensor, requires_grad=parameter.requires_grad)
    if isinstance(linear, PackedModule):
        for buffer in linear.buffers():
            _broadcast(buffer, cut.mesh, source)
        for dim, rank, ranks, parts in cut.pieces():
            if dim != 0 or _of_experts(linear):
                linear.narrow_(dim, rank, ranks, parts)
    if isinstance(linear, GroupedLinear | NVFP4GroupedLinear):
        linear._sharded = cut.parts == 1
    if isinstance(linear, nn.Linear):
        linear.__class__ = LocalLinear
    linear.register_state_dict_post_hook(_distribute)
    if not packed:  # 4-bit linears do so by themselves
        linear.register_load_state_dict_pre_hook(_localize)


def _broadcast(tensor: Tensor, mesh: DeviceMesh, source: int | None) -> None:
    if source is not None and not tensor.is_meta:
        bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        for at in range(mesh.ndim):
            dist.broadcast(bits, group=mesh.get_group(at), group_src=source)


def _of_experts(linear: nn.Module) -> bool:
    return isinstance(linear, GroupedLinear | NVFP4GroupedLinear)


def _dims(linear: nn.Module, cut: Cut, tensor: Tensor) -> Dims:
    """The dimensions of a linear's tensor that are cut; None where ranks have it whole."""
    own = [dim if _of_experts(linear) else dim - 1 for dim in cut.dims]
    return tuple(dim if 0 <= dim < tensor.ndim else None for dim in own)


def _tensors(linear: nn.Module) -> dict[str, Tensor]:
    """The tensors of a linear's state dict."""
    buffers = linear._buffers if isinstance(linear, PackedModule) else {}
    both = {**linear._parameters, **buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _distribute(linear: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Makes DTensors of what `state_dict` has got of a linear."""
    cut = cut_of(linear)
    assert cut is not None
    for name in _tensors(linear):
        tensor = state_dict.get(f"{prefix}{name}")
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
            state_dict[f"{prefix}{name}"] = cut.distributed(tensor.detach(), _dims(linear, cut, tensor))


def _localize(linear: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Leaves `load_state_dict` this rank's parts; of 16-bit linears: 4-bit ones call `own_parts`."""
    cut = cut_of(linear)
    assert cut is not None
    state_dict.update(cut.own_parts(linear, state_dict, prefix))

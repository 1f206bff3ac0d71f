"""refresh_(model) quantizes again after 16-bit weights changed: those whose 4-bit copies compiled graphs keep, or those
that `quantize_` replaced, which a trainer hands over.
Called by users; calls weight_cache for the copies; quantize_ and dequantize_ for a copy of one layer at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.checks import require_module
from thunder_moe.formats.registry import check_scale_search
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn.linear import NVFP4LinearPart
from thunder_moe.nn.packed import PackedModule
from thunder_moe.progress import progress_bar
from thunder_moe.quantization.dense_linears import DenseLinears
from thunder_moe.quantization.families import ExpertFamily, families_of
from thunder_moe.quantization.layer_chain import numbered_layers
from thunder_moe.quantization.plan import PROGRESS_WEIGHTS, exclusive
from thunder_moe.quantization.quantize import dequantize_, quantize_
from thunder_moe.quantization.replaceable import has_hook
from thunder_moe.selection import shortened
from thunder_moe.weight_cache import refresh

Model = TypeVar("Model", bound=nn.Module)


@torch.inference_mode(False)
@torch.no_grad()
def refresh_(model: Model, weights: Mapping[str, Tensor] | None = None, *, scale_search: str | None = None) -> Model:
    """Quantize a model's weights again, in place, after a change.

    Without `weights`: compiled graphs keep a 4-bit copy beside each frozen 16-bit weight, and make it again when they
    detect a change of the weight. Writes through ``parameter.data`` or NumPy, and collectives of torch.distributed,
    cannot be detected: call this after them. docs/weights.md lists the changes that are detected.

    With `weights`: the model was quantized by `quantize_`, and holds no 16-bit experts any more. It takes the weights
    of a trainer, which are quantized layer by layer, and all its other parameters and buffers. The result has the bits
    of `quantize_` of the trained model. Beyond the model's own memory this needs one layer in 16 and in 4 bits.

    In both cases the quantized tensors keep their addresses, so compiled graphs and captured CUDA graphs read them.

    Args:
        model: a module, compiled by torch.compile or not; of thunder.jit the module that was compiled. Without
            `weights`, the copies of its parameters and buffers, and of all tensors that share their storage, are made
            again.
        weights: state dict of the 16-bit model, as before `quantize_`, on any device. Tensors are cast to the dtypes
            that the weights had. A DTensor (FSDP2) is gathered when its layer is quantized: all processes of its mesh
            call this.
        scale_search: as in `quantize_`, for `weights`; give the same value as there.

    Returns:
        The same model.

    Raises:
        TypeError: model is not a module, or weights is not a mapping of tensors.
        ValueError: a weight holds NaN or Inf. Or with `weights`: the model holds nothing quantized, experts that are
            sharded over processes, or customized modules that cannot be replaced; names are missing or unknown; a
            scale_search that is unknown, or for MXFP8 alone; another thread converts the model.
        RuntimeError: a tensor has another shape, as in `load_state_dict`.

    All these leave the model unchanged, but for NaN or Inf. An error in a layer (these, or out of memory) leaves that
    layer and those behind it unchanged, and the layers before it new.
    """
    require_module(model)
    module: nn.Module = getattr(model, "_orig_mod", model)  # of a compiled model
    if weights is not None:
        _take(module, weights, scale_search)
    elif scale_search is not None:
        raise ValueError(f"scale_search: got {scale_search!r} without weights, wanted weights to quantize")
    refresh(itertools.chain(module.parameters(), module.buffers()))
    return model


def _take(model: nn.Module, weights: Mapping[str, Tensor], scale_search: str | None) -> None:
    """Give a quantized model the weights of a trainer."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: got {type(weights).__name__}, wanted a state dict: a mapping of names and tensors")
    with exclusive(model):
        families: list[ExpertFamily] = [*families_of(model), DenseLinears()]
        units = _units(model, families)
        check_scale_search(
            scale_search, {part.format_name for part in model.modules() if isinstance(part, PackedModule)}
        )
        others: dict[str, Tensor] = {}  # without units, whose packed weights would be converted to layout "linear"
        for name, module in model.named_modules(remove_duplicate=False):
            if not any(_is_below(f"{name}.", unit) for unit in units):
                module._save_to_state_dict(others, name and f"{name}.", keep_vars=True)
        _check(units, others, weights, families)
        quick = sum(tensor.numel() for tensor in weights.values()) < PROGRESS_WEIGHTS
        for name in progress_bar(units, desc="refreshing", unit="layer", disable=quick):
            _refresh_unit(units[name], name, _below(weights, name), families, scale_search)
        for name, tensor in others.items():
            tensor.copy_(whole_tensor(weights[name]))


def _units(model: nn.Module, families: list[ExpertFamily]) -> dict[str, nn.Module]:
    """Return the parts of a model that are refreshed one after the other, by name: its layers with quantized modules.

    A layer is the module in a list that holds them, else their parent, or a dense layer itself."""
    blocks: dict[str, str] = {}  # quantized modules by name, and their parent, or a dense layer itself
    for name, module in model.named_modules(remove_duplicate=False):
        if any(_is_below(name, block) for block in blocks) or not _is_quantized(module, families):
            continue
        for part in module.modules():
            if isinstance(part, PackedModule) and (part.process_part is not None or part._sharding is not None):
                raise ValueError(f"model: {name} has a part of weights that processes share, wanted whole weights")
        alone = isinstance(module, PackedModule) and not isinstance(module, NVFP4LinearPart)
        blocks[name] = name if alone else name.rpartition(".")[0]
    names = {*(blocks | numbered_layers(blocks)).values()}
    if not names:
        raise ValueError(f"model: found nothing quantized in {type(model).__name__}, wanted a model of `quantize_`")
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name in names and not any(_is_below(name, other) for other in names - {name})
    }


def _is_quantized(module: nn.Module, families: list[ExpertFamily]) -> bool:
    return any(family.match_quantized(module) for family in families)


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")


def _below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a part of a model, by their names in it."""
    start = len(prefix) + 1 if prefix else 0
    return {name[start:]: tensor for name, tensor in weights.items() if _is_below(name, prefix)}


def _check(
    units: Mapping[str, nn.Module],
    others: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    families: list[ExpertFamily],
) -> None:
    """Raise the errors of `refresh_` for weights that do not fit the units and the other tensors, and for units."""
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"weights: {name}: got {type(tensor).__name__}, wanted a tensor")
    missing = [name for name in others if name not in weights]
    unknown = [name for name in weights if name not in others and not any(_is_below(name, unit) for unit in units)]
    for name, unit in units.items():
        copy, _ = _copy_of(unit, families, of_packed=False)
        part = _dequantized(copy, name)
        shapes = {key: torch.empty(tensor.shape, device="meta") for key, tensor in _below(weights, name).items()}
        try:
            keys = part.load_state_dict(shapes, strict=False, assign=True)
        except RuntimeError as error:
            raise RuntimeError(f"weights: {name or 'the model'}: {error}") from error
        missing += [f"{name}.{key}" if name else key for key in keys.missing_keys]
        unknown += [f"{name}.{key}" if name else key for key in keys.unexpected_keys]
    if missing or unknown:
        raise ValueError(
            f"weights: missing {shortened(missing) or 'none'}; unknown {shortened(unknown) or 'none'}; wanted the names"
            " before `quantize_`, without what wrappers add ('_orig_mod.' of torch.compile, 'module.' of DDP)"
        )
    for name, tensor in others.items():
        if weights[name].shape != tensor.shape:
            shape = tuple(weights[name].shape)
            raise RuntimeError(f"weights: {name}: got shape {shape}, wanted {tuple(tensor.shape)}")


def _copy_of(unit: nn.Module, families: list[ExpertFamily], of_packed: bool) -> tuple[nn.Module, dict[str, str]]:
    """Return a parent with a copy of a part of the model, "unit", and the formats of its quantized modules by name.

    All tensors are on "meta"; `of_packed`: the packed weights alone, since they are replaced.
    """
    memo: dict[int, Any] = {}  # what deepcopy takes for copies
    if not any(map(has_hook, unit.modules())):  # of accelerate, to which "meta" stands for offloaded weights
        packed = {id(buffer) for part in unit.modules() for buffer in _packed_tensors(part)}
        for _, tensor in _tensors(unit):
            if id(tensor) in packed or not of_packed:
                memo[id(tensor)] = _like(tensor, "meta")
    copy = nn.Module()  # a parent, for a part that is itself quantized
    copy.add_module("unit", deepcopy(unit, memo))
    formats: dict[str, str] = {}
    for where, module in copy.named_modules():
        if _is_quantized(module, families) and not any(_is_below(where, block) for block in formats):
            holder = module.stack if isinstance(module, NVFP4LinearPart) else module
            formats[where] = next(part.format_name for part in holder.modules() if isinstance(part, PackedModule))
    return copy, formats


def _packed_tensors(module: nn.Module) -> list[Tensor]:
    return [getattr(module, field) for field in module.format.fields] if isinstance(module, PackedModule) else []


def _like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return an uninitialized tensor, or parameter, of the same kind on a device."""
    new = torch.empty_like(tensor, device=device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _dequantized(copy: nn.Module, name: str) -> nn.Module:
    """Return the "unit" of a copy of the part `name`, in 16 bits."""
    try:
        dequantize_(copy)
        if left := [where for where, part in copy.named_modules() if isinstance(part, PackedModule)]:
            raise ValueError(f"cannot replace {left}, which are customized")
    except ValueError as error:
        raise ValueError(f"{name or 'the model'}: {error}") from error
    return copy.get_submodule("unit")


def _refresh_unit(
    unit: nn.Module, name: str, weights: dict[str, Tensor], families: list[ExpertFamily], scale_search: str | None
) -> None:
    """Quantize the weights of a part of the model in a copy of it, then copy the result into the part."""
    copy, formats = _copy_of(unit, families, of_packed=True)
    part = _dequantized(copy, name)
    home = next(tensor.device for module in unit.modules() for tensor in _packed_tensors(module))
    made: dict[Tensor, Any] = {}  # tied weights stay tied
    for module in () if any(map(has_hook, part.modules())) else part.modules():
        for key, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                module._parameters[key] = made.setdefault(weight, _like(weight, home))
    try:
        part.load_state_dict({key: whole_tensor(tensor) for key, tensor in weights.items()})
        quantize_(
            copy,
            lambda module, where: formats[where],
            filter=lambda module, where: where in formats,
            linears=lambda module, where: where in formats,
            scale_search=scale_search if NVFP4.name in formats.values() else None,
        )
    except (RuntimeError, ValueError) as error:
        raise type(error)(f"{name or 'the model'}: {error}") from error
    modules = dict(copy.named_modules())
    for where, old in unit.named_modules(prefix="unit"):
        new = modules.get(where)
        if isinstance(old, PackedModule) and isinstance(new, PackedModule) and new.layout != old.layout:
            new.set_weight(lay_out(new.packed_weight, old.layout))
    fresh = dict(_tensors(copy.get_submodule("unit")))
    old_tensors = list(_tensors(unit))
    for key, tensor in old_tensors:
        if key not in fresh or fresh[key].shape != tensor.shape or fresh[key].dtype != tensor.dtype:
            raise ValueError(f"model: {name}: {key} is quantized in another way than `quantize_` does it")
    for key, tensor in old_tensors:
        tensor.copy_(fresh[key])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def whole_tensor(tensor: Any) -> Tensor:
    """Return a tensor, a DTensor gathered."""
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result

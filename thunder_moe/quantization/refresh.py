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
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn.linear import NVFP4LinearPart
from thunder_moe.nn.packed import PackedModule
from thunder_moe.progress import progress_bar
from thunder_moe.quantization.dense_linears import DenseLinears
from thunder_moe.quantization.families import ExpertFamily, families_of
from thunder_moe.quantization.plan import PROGRESS_WEIGHTS, exclusive
from thunder_moe.quantization.quantize import dequantize_, quantize_
from thunder_moe.weight_cache import refresh

__all__ = ["refresh_"]

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
        model: a module, compiled or not. Without `weights`, the copies of its parameters and buffers, and of all
            tensors that share their storage, are made again.
        weights: state dict of the 16-bit model, as before `quantize_`, on any device. Tensors are cast to the dtypes
            that the weights had. A DTensor (FSDP2) is gathered when its layer is quantized: all processes of its mesh
            call this.
        scale_search: as in `quantize_`, for `weights`; give the same value as there.

    Returns:
        The same model.

    Raises:
        TypeError: model is not a module, or weights is not a mapping.
        ValueError: a weight holds NaN or Inf. Or with `weights`: the model holds nothing quantized, experts that are
            sharded over processes, or customized modules that cannot be replaced; names are missing or unknown (the
            model is unchanged then); another thread converts the model.
        RuntimeError: a tensor has another shape, as in `load_state_dict`.

    An error in a layer leaves that layer and those behind it unchanged, and the layers before it new.
    """
    require_module(model)
    if weights is None:
        if scale_search is not None:
            raise ValueError(f"scale_search: got {scale_search!r} without weights, wanted weights to quantize")
        refresh(itertools.chain(model.parameters(), model.buffers()))
        return model
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: got {type(weights).__name__}, wanted a state dict: a mapping of names and tensors")
    module: nn.Module = getattr(model, "_orig_mod", model)  # of a compiled model
    with exclusive(module):
        families: list[ExpertFamily] = [*families_of(module), DenseLinears()]
        units = _units(module, families)
        others = _others(module, units, weights)
        quick = sum(tensor.numel() for tensor in weights.values()) < PROGRESS_WEIGHTS
        for name in progress_bar(units, desc="refreshing", unit="layer", disable=quick):
            _refresh_unit(units[name], name, _below(weights, name), families, scale_search)
        for name, tensor in others.items():
            tensor.copy_(_whole(weights[name]))
    return model


def _units(model: nn.Module, families: list[ExpertFamily]) -> dict[str, nn.Module]:
    """Return the parts of a model that are refreshed one after the other, by name: its layers with quantized modules.

    A layer is the module in a list that holds them, else their parent, or a dense layer itself."""
    names: set[str] = set()
    blocks: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(_is_below(name, block) for block in blocks) or not _is_quantized(module, families):
            continue
        blocks.append(name)
        for part in module.modules():
            if isinstance(part, PackedModule) and (part.process_part is not None or part._sharding is not None):
                raise ValueError(f"model: {name} has a part of weights that processes share, wanted whole weights")
        parts = name.split(".")
        numbers = [position for position, part in enumerate(parts) if part.isdecimal()]
        if numbers:
            parts = parts[: numbers[0] + 1]
        elif isinstance(module, NVFP4LinearPart) or not isinstance(module, PackedModule):
            parts = parts[:-1]
        names.add(".".join(parts))
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


def _others(model: nn.Module, units: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters and buffers outside of the units, by name; raise a ValueError for names that do not fit."""
    outside = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not any(_is_below(name, unit) for unit in units)
    }
    missing = [name for name in outside if name not in weights]
    missing += [f"{unit}.*" for unit in units if not _below(weights, unit)]
    unknown = [name for name in weights if name not in outside and not any(_is_below(name, unit) for unit in units)]
    if missing or unknown:
        raise ValueError(f"weights: {missing} are missing, {unknown} are unknown, wanted the names before `quantize_`")
    for name, tensor in outside.items():
        if weights[name].shape != tensor.shape:
            shape = tuple(weights[name].shape)
            raise RuntimeError(f"weights: {name}: got shape {shape}, wanted {tuple(tensor.shape)}")
    return outside


def _refresh_unit(
    unit: nn.Module, name: str, weights: dict[str, Tensor], families: list[ExpertFamily], scale_search: str | None
) -> None:
    """Quantize the weights of a part of the model in a copy of it, then copy the result into the part."""
    copy = nn.Module()  # a parent, for a part that is itself quantized
    copy.add_module("unit", deepcopy(unit))
    formats: dict[str, str] = {}
    for where, module in copy.named_modules():
        if _is_quantized(module, families) and not any(_is_below(where, block) for block in formats):
            holder = module.stack if isinstance(module, NVFP4LinearPart) else module
            formats[where] = next(part.format_name for part in holder.modules() if isinstance(part, PackedModule))
    try:
        dequantize_(copy)
        left = [where for where, part in copy.named_modules() if isinstance(part, PackedModule)]
        if left:
            raise ValueError(f"cannot replace {left}, which are customized")
        copy.get_submodule("unit").load_state_dict({key: _whole(tensor) for key, tensor in weights.items()})
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


def _whole(tensor: Any) -> Tensor:
    """Return a tensor, a DTensor gathered."""
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result

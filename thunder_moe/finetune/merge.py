"""Merge LoRA adapters of experts, quantized or not, and of quantized dense layers: in place, or into 16-bit modules.
Called by users and integrations.huggingface.lora_tuner; calls lora for the adapters, quantize to merge into 16 bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.finetune.lora import (
    ADAPTER_ATTRIBUTES,
    Model,
    is_adaptable,
    refuse_merged,
    require_lora,
    require_names,
    restore_base_class,
    weight_of,
)
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.registry import dequantize
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.select import lay_out, quantize_to
from thunder_moe.nn import GroupedLinear
from thunder_moe.nn.linear import NVFP4LinearPart
from thunder_moe.nn.lora import LoRADense, LoRAGroupedLinear, LoRALinear, NVFP4LoRAGroupedLinear
from thunder_moe.quantization.quantize import dequantize_with_
from thunder_moe.quantization.replaceable import set_class

_LOGGER = logging.getLogger("thunder_moe")


@torch.no_grad()
def merge_lora_(
    model: nn.Module, adapters: str | Sequence[str] | None = None, *, dequantize: bool = False
) -> dict[str, float]:
    """Merge adapters into the weights, in place, so that they cost nothing any more.

    A quantized weight is decoded, added to in float32 and rounded to its format again. This second rounding may be
    larger than what an adapter adds. `unmerge_lora_` restores the earlier weights, bit for bit; until then both are in
    memory. Meanwhile a state dict has the merged weights without the merged adapters, and none can be loaded.

    Args:
        model: a model with adapters.
        adapters: names; None: the active ones. The others are inactive afterwards, in every linear; with `dequantize`
            they are removed.
        dequantize: all 4-bit modules of the model become 16-bit ones, as by `dequantize_`, with the sum rounded once to
            the original dtype of the weight. This cannot be undone.

    Returns:
        Qualified name of each merged linear -> the relative error of its weight: the distance to the exact sum, divided
        by the size of what the adapters add (Frobenius norms). At 1 the rounding is as large as the adapters.

    Raises:
        TypeError: the model is not a module, or `adapters` is of another type.
        ValueError: the model has no adapters; a name is unknown or given twice; adapters are merged already; an
            adapter, or a sum in the weight's dtype, has NaN or Inf; with `dequantize`, a linear with adapters cannot be
            replaced (it has hooks, for example). The model is unchanged then.
    """
    linears = require_lora(model)
    wanted = require_names(linears, adapters)
    refuse_merged(linears)
    chosen = {
        name: tuple(a for a in (linear.lora_active if adapters is None else wanted) if a in linear.lora_specs)
        for name, linear in linears.items()
    }
    if not any(chosen.values()):
        raise ValueError("adapters: got none, and none is active, wanted names of adapters")
    _refuse_tied(model, linears)
    errors: dict[str, float] = {}
    packed: dict[str, nn.Module] = {}
    dense: dict[str, Tensor] = {}
    before = [
        (linear, type(linear), {name: getattr(linear, name) for name in ADAPTER_ATTRIBUTES})
        for linear in linears.values()
    ]
    try:
        for name, linear in linears.items():
            if dequantize and not isinstance(linear, GroupedLinear):
                packed[name] = linear
                errors[name] = _prepare_to_dequantize(linear, chosen[name], name, dense)
            elif chosen[name]:
                errors[name] = _merge_adapters(linear, chosen[name])
            elif not dequantize:
                linear.lora_active = ()
            if not math.isfinite(errors.get(name, 0)):
                raise ValueError(
                    f"adapters: the weight of {name} plus {list(chosen[name])} has NaN or Inf in its dtype, wanted"
                    " finite values"
                )
        if packed:
            dequantize_with_(model, packed)
        for name, total in dense.items():
            restored: Any = model.get_submodule(name)
            restored.weight.copy_(total[0])
        for linear in linears.values() if dequantize else ():
            if isinstance(linear, LoRAGroupedLinear):
                restore_base_class(linear)
    except BaseException:
        for linear, lora, attributes in before:
            _undo(linear, lora, attributes)
        raise
    for name, error in errors.items():
        _LOGGER.info("merged %s of %s: the rounding is %.2g times what they add", chosen[name], name, error)
    return errors


@torch.no_grad()
def unmerge_lora_(model: Model) -> Model:
    """Undo `merge_lora_` (without `dequantize`): restore the earlier weights exactly, and make the adapters active.

    Raises:
        ValueError: nothing is merged.
    """
    linears = {name: linear for name, linear in require_lora(model).items() if linear.lora_merged}
    if not linears:
        raise ValueError("model: has no merged adapters, nothing to unmerge")
    for linear in linears.values():
        _unmerge(linear)
    return model


def _refuse_tied(model: nn.Module, linears: dict[str, Any]) -> None:
    """Raise a ValueError if a weight with adapters is tied to another module, which would change with it."""
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        if is_adaptable(module) and not isinstance(module, NVFP4LinearPart):  # the parts of a stack share its weight
            other = owners.setdefault(weight_of(module).data_ptr(), name)
            if other != name and (name in linears or other in linears):
                raise ValueError(f"model: {other} and {name} share a weight, wanted weights of their own to merge into")


def _merged_weight(linear: Any, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Return the sum of the weight and the named adapters, and the adapters' share of it: float32 (E, N, K)."""
    if not isinstance(linear, GroupedLinear):
        weight = dequantize(lay_out(linear.packed_weight, LINEAR), torch.float32)
    else:
        weight = linear.weight.detach().float()
    delta = linear.lora_delta(names) if names else torch.zeros_like(weight)
    return weight + delta, delta


def _merge_adapters(linear: Any, names: tuple[str, ...]) -> float:
    """Merge adapters, and return the relative error; infinity, without a change, where the sum has NaN or Inf."""
    total, delta = _merged_weight(linear, names)
    if not total.isfinite().all():
        return math.inf
    packed = None if isinstance(linear, GroupedLinear) else lay_out(linear.packed_weight, LINEAR)
    if packed is None:
        before = linear.weight.detach().clone()
    else:
        # Detached aliases keep the old bytes, because `set_weight` gives the module's tensors other memory. The tensors
        # of a part are views of its stack's memory, and copied.
        aliases = (tensor.detach() for tensor in packed.tensors())
        is_part = isinstance(linear, NVFP4LinearPart)
        before = packed.with_tensors((tensor.clone() for tensor in aliases) if is_part else aliases)
    # They are merged before the weight changes, so that `_unmerge` undoes an interrupted merge.
    linear.lora_unmerged, linear.lora_merged, linear.lora_active = before, names, ()
    if packed is None:
        _set_weight(linear, total)
        total -= linear.weight.float()
    else:
        parts = total.chunk(len(linear.weight_dtypes), 1)
        merged = PackedWeight.concatenate(*(quantize_to(packed.format.name, part.contiguous()) for part in parts))
        _set_weight(linear, merged)
        total -= dequantize(merged, torch.float32)
    return _relative_error(total, delta)


def _unmerge(linear: Any) -> None:
    _set_weight(linear, linear.lora_unmerged)
    linear.lora_active, linear.lora_merged, linear.lora_unmerged = linear.lora_merged, (), None


def _undo(linear: Any, lora: type, attributes: dict[str, Any]) -> None:
    """Restore the class, weight and adapters of a linear from before a merge."""
    if not isinstance(linear, LoRALinear):
        set_class(linear, lora)
    elif linear.lora_merged:
        _unmerge(linear)
    for name, value in attributes.items():
        setattr(linear, name, value)
    if isinstance(linear, NVFP4LoRAGroupedLinear):
        linear.lora_to_restore = False


def _prepare_to_dequantize(linear: Any, names: tuple[str, ...], where: str, dense: dict[str, Tensor]) -> float:
    """Have `dequantize_` restore the sum of a 4-bit linear of experts and its adapters; return the relative error.

    A dense linear loses its adapters, and the sum, float32 (1, N, K), is added to `dense`.
    """
    (total, delta), dtypes = _merged_weight(linear, names), linear.weight_dtypes
    parts = zip(total.chunk(len(dtypes), 1), dtypes, strict=True)
    error = _relative_error(total - torch.cat([part.to(dtype).float() for part, dtype in parts], 1), delta)
    if isinstance(linear, LoRADense):
        dense[where] = total
        restore_base_class(linear)
    else:
        linear.lora_active, linear.lora_to_restore = names, True
    return error


def _set_weight(linear: Any, weight: Any) -> None:
    """Set the weight of a linear, if it is packed from one in layout "linear"; for a part, its rows of the stack's."""
    if isinstance(linear, GroupedLinear):
        linear.weight.copy_(weight)
        return
    owner = linear.stack if isinstance(linear, NVFP4LinearPart) else linear
    weight = weight.to(owner.qdata.device)
    if owner is not linear:
        whole, own = lay_out(owner.packed_weight, LINEAR), linear._rows
        pieces = slice(0, own.start), own, slice(own.stop, whole.shape[1])
        parts = (weight if rows == own else whole.rows(rows) for rows in pieces if rows.start < rows.stop)
        weight = PackedWeight.concatenate(*parts).share_global_scale()
    owner.set_weight(lay_out(weight, "auto" if owner.auto_layout else owner.layout))


def _relative_error(error: Tensor, delta: Tensor) -> float:
    size = float(delta.norm())
    return float(error.norm()) / size if size else 0.0

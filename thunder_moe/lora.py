"""LoRA on experts, quantized or not, and quantized dense layers: add_lora_(model) -> train -> merge_lora_ or keep
beside; use_lora_ switches adapters.
Called by users and integrations.huggingface.lora; calls nn.lora for the modules, quantize to merge into 16 bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thunder_moe.formats.checks import require_module
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.registry import dequantize
from thunder_moe.formats.weight import NVFP4Weight, PackedWeight
from thunder_moe.kernels.select import lay_out, quantize_to
from thunder_moe.nn import (
    GroupedLinear,
    GroupedMLP,
    NVFP4GroupedLinear,
    NVFP4GroupedMLP,
    NVFP4GroupedSwiGLU,
    ScaledSwiGLU,
)
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack
from thunder_moe.nn.lora import (
    LoRADense,
    LoRAGroupedLinear,
    LoRALinear,
    LoRASpec,
    NVFP4LoRAGroupedLinear,
    NVFP4LoRALinear,
    NVFP4LoRALinearPart,
)
from thunder_moe.quantize import Filter, dequantize_with_
from thunder_moe.replaceable import has_hook, has_own_forward, impure

__all__ = [
    "add_lora_",
    "is_dense",
    "lora_linears",
    "lora_parameters",
    "merge_lora_",
    "refuse_merged",
    "remove_lora_",
    "unmerge_lora_",
    "use_lora_",
]

Model = TypeVar("Model", bound=nn.Module)
_LOGGER = logging.getLogger("thunder_moe")
_WITH_LORA: dict[type[nn.Module], type[LoRALinear]] = {
    GroupedLinear: LoRAGroupedLinear,
    NVFP4GroupedLinear: NVFP4LoRAGroupedLinear,
    NVFP4Linear: NVFP4LoRALinear,
    NVFP4LinearPart: NVFP4LoRALinearPart,
}
_BASE = {lora: base for base, lora in _WITH_LORA.items()}
_STATE = ("lora_A", "lora_B", "lora_specs", "lora_joined", "lora_merged", "lora_unmerged")
_SHARES = (None, "A", "B")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
def add_lora_(
    model: Model,
    rank: int,
    alpha: float,
    *,
    dropout: float = 0.0,
    filter: Filter | None = None,
    linears: bool | Filter = False,
    rslora: bool = False,
    share: str | None = None,
    split_gate_up: bool = False,
    dtype: torch.dtype = torch.float32,
    adapter: str = "default",
    freeze: bool = True,
) -> Model:
    """Adds a LoRA adapter to the linears of experts, in place: per expert A (r, K) and B (N, r) = 0 beside the weight.

    Each `NVFP4GroupedLinear` and `GroupedLinear` gets one, wherever it is: in this package's modules, and in experts of
    transformers' models once `quantize_` has been called. It becomes a `NVFP4LoRAGroupedLinear` or
    `LoRAGroupedLinear`, whose parameters ``lora_A.<adapter>`` (E, r, K) and ``lora_B.<adapter>`` (E, N, r) are in the
    state dict. The products run as grouped GEMMs in the dtype of the activations. Compile afterwards.

    Args:
        model: any module that holds such linears.
        rank: r.
        alpha: B (A x) is multiplied by alpha / rank.
        dropout: of A's input in training.
        filter: called with each linear of experts and its qualified name; False leaves it without an adapter.
        linears: 4-bit dense layers (of ``quantize_(linears=...)``) get adapters too, A (1, r, K) and B (1, N, r): all
            of them, or those for which a function of the layer and its qualified name is True.
        rslora: the factor is alpha / sqrt(rank) instead.
        share: "A" or "B": the experts of a linear have one in common, (1, r, K) or (1, N, r).
        split_gate_up: where one weight has the rows of gate and up, each has an adapter of its own: A (E, 2r, K), of
            which B's upper half has the first r and its lower half the others.
        dtype: of the parameters.
        adapter: a name; the new adapter becomes the only active one.
        freeze: parameters that are no adapter's get ``requires_grad=False``. PEFT's adapters (names with "lora_", and
            "modules_to_save") stay as they are.

    Returns:
        The same model.

    Raises:
        ValueError: no such linears, or all declined; a rank, alpha, dropout, share, dtype or adapter name that is not
            valid, a name that is taken, a weight on the "meta" device, adapters that are merged anywhere in the model.
            The model is unchanged then.
        TypeError: `filter` or `linears` is neither a function nor one of the other values that it may have.
    """
    require_module(model)
    _check_options(rank, alpha, dropout, share, dtype, adapter)
    for name, choice, values in (("filter", filter, (None,)), ("linears", linears, (True, False))):
        if not callable(choice) and choice not in values:
            raise TypeError(f"{name}: got {choice!r}, wanted a function of a module and its name, or one of {values}")
    refuse_merged(lora_linears(model))
    chosen: dict[str, Any] = {}
    left: list[str] = []
    for name, module in model.named_modules():
        if not is_adaptable(module):
            continue
        wanted: bool | Filter | None = linears if is_dense(module) else filter
        if wanted is False or (callable(wanted) and not wanted(module, name)):
            continue
        reason = _obstacle(module)
        if reason is not None:
            left.append(f"{name}: {reason}")
            continue
        if isinstance(module, LoRALinear) and adapter in module.lora_specs:
            raise ValueError(f"adapter: got {adapter!r}, which {name!r} has, wanted another name")
        if share is not None and getattr(module, "process_part", None) is not None:
            raise ValueError(f"share: got {share!r} at {name!r}, whose experts several processes share, wanted None")
        chosen[name] = module
    if not chosen:
        why = (
            "; ".join(left) or "none there, all declined by the filter, or 16-bit experts of transformers: quantize_ it"
        )
        raise ValueError(f"model: found no linear of experts for an adapter in {type(model).__name__} ({why})")
    for reason in left:
        _LOGGER.warning("no adapter: %s", reason)
    scaling = alpha / math.sqrt(rank) if rslora else alpha / rank
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for module in chosen.values():
        parts = 2 if split_gate_up and _is_gate_up(parents.get(id(module)), module) else 1
        _add(module, LoRASpec(rank, scaling, dropout, parts), share, dtype, adapter)
    for linear in lora_linears(model).values():
        linear.lora_active = (adapter,) if adapter in linear.lora_specs else ()
    if freeze:
        for name, parameter in model.named_parameters():
            if "lora_" not in name and "modules_to_save" not in name:
                parameter.requires_grad_(False)
    return model


def use_lora_(model: Model, adapters: str | Sequence[str] | None) -> Model:
    """Sets the active adapters of a model's experts: one, several at once (their terms are added), or None.

    Linears that lack a named adapter run without it. Compiled models compile again.

    Raises:
        ValueError: a name that no linear has or that is there twice, or merged adapters; the model is unchanged then.
    """
    wanted = (adapters,) if isinstance(adapters, str) else tuple(adapters or ())
    linears = _require_lora(model)
    _require_names(linears, wanted)
    refuse_merged(linears)
    for linear in linears.values():
        linear.lora_active = tuple(name for name in wanted if name in linear.lora_specs)
    return model


def is_adaptable(module: nn.Module) -> bool:
    """Whether it is a linear for which there are adapters."""
    return isinstance(module, GroupedLinear | NVFP4GroupedLinear) or is_dense(module)


def is_dense(module: nn.Module) -> bool:
    """Whether it is a 4-bit dense layer, or a part of a stack of them."""
    whole = isinstance(module, NVFP4Linear) and not isinstance(module, NVFP4LinearStack)
    return whole or isinstance(module, NVFP4LinearPart)


def lora_linears(model: nn.Module) -> dict[str, Any]:
    """The linears of experts, and the 4-bit dense layers, that have adapters, by qualified name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def lora_parameters(model: nn.Module, adapter: str | None = None) -> Iterator[nn.Parameter]:
    """The parameters of an adapter of the experts, of all adapters when None."""
    for linear in lora_linears(model).values():
        for name in linear.lora_specs:
            if adapter in (None, name):
                yield from (linear.lora_A[name], linear.lora_B[name])


@torch.no_grad()
def remove_lora_(model: Model, adapter: str | None = None) -> Model:
    """Removes an adapter of the experts, all of them when None; linears without any have their own class again.

    What is merged stays in the weights when all are removed.

    Raises:
        ValueError: no adapters, or none of that name; one adapter is to go while any is merged.
    """
    linears = _require_lora(model)
    if adapter is not None:
        _require_names(linears, (adapter,))
        refuse_merged(linears)
    for linear in linears.values():
        for name in list(linear.lora_specs) if adapter is None else [adapter]:
            if name in linear.lora_specs:
                del linear.lora_specs[name], linear.lora_A[name], linear.lora_B[name]
        linear.lora_active = tuple(name for name in linear.lora_active if name in linear.lora_specs)
        if not linear.lora_specs:
            _strip(linear)
    return model


@torch.no_grad()
def merge_lora_(
    model: nn.Module, adapters: str | Sequence[str] | None = None, *, dequantize: bool = False
) -> dict[str, float]:
    """Puts adapters into the weights of the experts, in place, so that they cost nothing any more.

    A quantized weight is decoded, added to in float32 and rounded to its format again: the rounding is new, and may be
    larger than what an adapter adds. `unmerge_lora_` gives back the weights from before, bit for bit; until then both
    stay. Meanwhile a state dict has the merged weights without the merged adapters, and none can be loaded.

    Args:
        model: one with adapters.
        adapters: names; the active ones when None. With `dequantize` the others are removed.
        dequantize: 4-bit modules become 16-bit ones with the sum, as by `dequantize_` (all of the model): rounded once,
            to the dtype that the weight had. This cannot be undone.

    Returns:
        For each linear by qualified name the error of the merged weight: its distance to the exact sum divided by the
        size of what the adapters add (Frobenius norms). At 1 the rounding is as large as the adapters.

    Raises:
        ValueError: no adapters, a name that is unknown or there twice, adapters that are merged already, NaN or Inf in
            an adapter or in a sum in the weight's dtype; with `dequantize`, a linear with adapters that cannot be
            replaced (it has hooks, say). The model is unchanged then.
    """
    linears = _require_lora(model)
    wanted = (adapters,) if isinstance(adapters, str) else None if adapters is None else tuple(adapters)
    _require_names(linears, wanted or ())
    refuse_merged(linears)
    chosen = {
        name: tuple(each for each in (linear.lora_active if wanted is None else wanted) if each in linear.lora_specs)
        for name, linear in linears.items()
    }
    if not any(chosen.values()):
        raise ValueError("adapters: got none, and none is active, wanted names of adapters")
    _refuse_tied(model, linears)
    errors: dict[str, float] = {}
    undo = [_undo_of(linear) for linear in linears.values()]
    try:
        dense = _ready_to_restore(linears, chosen, errors) if dequantize else {}
        for name, linear in linears.items():
            if chosen[name] and (isinstance(linear, GroupedLinear) or not dequantize):
                errors[name] = _merge(linear, chosen[name], name)
        for name, error in errors.items():
            if not math.isfinite(error):
                raise _not_finite(name, chosen[name])
        if dequantize:
            packed = {name: linear for name, linear in linears.items() if not isinstance(linear, GroupedLinear)}
            if packed:
                dequantize_with_(model, packed)
            for name, total in dense.items():
                restored: Any = model.get_submodule(name)
                restored.weight.copy_(total[0])
            for linear in linears.values():
                if isinstance(linear, LoRAGroupedLinear):
                    _strip(linear)
    except BaseException:
        for back in undo:
            back()
        raise
    for name, error in errors.items():
        _LOGGER.info("merged %s of %s: the rounding is %.2g times what they add", chosen[name], name, error)
    return errors


@torch.no_grad()
def unmerge_lora_(model: Model) -> Model:
    """The inverse of `merge_lora_` without `dequantize`: the weights from before, exactly, and the adapters active.

    Raises:
        ValueError: nothing is merged.
    """
    linears = {name: linear for name, linear in _require_lora(model).items() if linear.lora_merged}
    if not linears:
        raise ValueError("model: has no merged adapters, nothing to unmerge")
    for linear in linears.values():
        _unmerge(linear)
    return model


def _check_options(rank: Any, alpha: Any, dropout: Any, share: Any, dtype: Any, adapter: Any) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank: got {rank!r}, wanted a positive integer")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"alpha: got {alpha!r}, wanted a finite number")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout: got {dropout!r}, wanted at least 0 and less than 1")
    if share not in _SHARES:
        raise ValueError(f"share: got {share!r}, wanted one of {_SHARES}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, wanted one of {_DTYPES}")
    if not isinstance(adapter, str) or not adapter or "." in adapter or hasattr(nn.ParameterDict, adapter):
        raise ValueError(
            f"adapter: got {adapter!r}, wanted a name without '.' that no attribute of a ParameterDict has"
        )


def _obstacle(module: Any) -> str | None:
    """Why a linear can get no adapter; None when it can."""
    if type(module) not in (*_WITH_LORA, *_BASE):
        return f"it is a {type(module).__name__}"
    if vars(module).get("_cut") is not None:  # parallel.shards
        return "parallelize_module has cut its weight over ranks, where adapters are not supported"
    reason = impure(module)
    if reason is None and not has_own_forward(module):
        reason = "its forward is wrapped or replaced"
    if reason is None and (getattr(module, "process_part", None) or (0,))[0]:
        reason = "processes share its features: adapters are for whole linears, or whole experts of each process"
    tensor = _tensor(module)
    if reason is None and tensor.device.type == "meta":
        reason = "its weight is on the meta device (offloaded, or not loaded yet)"
    return reason


def _tensor(module: Any) -> Tensor:
    """One of the weight's; of a part that of its stack."""
    if isinstance(module, NVFP4LinearPart):
        return module.stack.qdata
    tensor: Tensor = module.weight if isinstance(module, GroupedLinear) else module.qdata
    return tensor


def _is_gate_up(parent: nn.Module | None, module: Any) -> bool:
    """Whether the rows of a linear's weight are those of gate, then those of up."""
    if parent is None or parent._modules.get("gate_up_proj") is not module:
        return False
    if isinstance(parent, NVFP4GroupedSwiGLU):
        return True
    if isinstance(parent, GroupedMLP | NVFP4GroupedMLP):
        activation: nn.Module = parent.activation
        return isinstance(activation, ScaledSwiGLU) and activation.form.interleave is None
    return bool(getattr(getattr(parent, "form", None), "gated", False))  # NVFP4Experts of transformers


def _add(module: Any, spec: LoRASpec, share: str | None, dtype: torch.dtype, adapter: str) -> None:
    if not isinstance(module, LoRALinear):
        _set_class(module, _WITH_LORA[type(module)])
        module.lora_A, module.lora_B = nn.ParameterDict(), nn.ParameterDict()
        module.lora_specs, module.lora_active, module.lora_merged, module.lora_unmerged = {}, (), (), None
    experts, n, k, rank = module.num_experts, module.out_features, module.in_features, spec.rank
    tensor = _tensor(module)
    options: dict[str, Any] = dict(dtype=dtype, device=tensor.device)
    a = torch.empty(1 if share == "A" else experts, spec.parts * rank, k, **options).uniform_(-(k**-0.5), k**-0.5)
    b = torch.zeros(1 if share == "B" else experts, n, rank, **options)
    module.lora_A[adapter], module.lora_B[adapter] = nn.Parameter(a), nn.Parameter(b)
    module.lora_specs[adapter] = spec


def _strip(linear: Any) -> None:
    """Makes a linear one of its base class again."""
    base = _BASE[type(linear)]
    for name in _STATE:
        delattr(linear, name)
    _set_class(linear, base)


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    if not has_hook(module):
        module.__class__ = cls
        return
    from thunder_moe.integrations.huggingface.accelerate_hooks import unhooked

    with unhooked(module):
        module.__class__ = cls


def _require_lora(model: nn.Module) -> dict[str, Any]:
    require_module(model)
    linears = lora_linears(model)
    if not linears:
        raise ValueError(f"model: {type(model).__name__} has no LoRA adapters of experts, wanted add_lora_ before")
    return linears


def _require_names(linears: dict[str, Any], wanted: Sequence[str]) -> None:
    known = {name for linear in linears.values() for name in linear.lora_specs}
    for name in wanted:
        if name not in known:
            raise ValueError(f"adapters: got {name!r}, wanted some of {sorted(known)}")
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"adapters: got {list(wanted)}, wanted each name once")


def refuse_merged(linears: dict[str, Any]) -> None:
    """ValueError where a linear of `lora_linears` has merged adapters."""
    for name, linear in linears.items():
        if linear.lora_merged:
            raise ValueError(f"model: {list(linear.lora_merged)} are merged in {name}, wanted unmerge_lora_ before")


def _refuse_tied(model: nn.Module, linears: dict[str, Any]) -> None:
    """ValueError where a weight is another module's too, which would change with it."""
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        if is_adaptable(module) and not isinstance(module, NVFP4LinearPart):  # those share one by intent
            other = owners.setdefault(_tensor(module).data_ptr(), name)
            if other != name and (name in linears or other in linears):
                raise ValueError(f"model: {other} and {name} share a weight, wanted weights of their own to merge into")


def _sum(linear: Any, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """float32 (E, N, K): the weight plus some adapters, and what these add."""
    if not isinstance(linear, GroupedLinear):
        weight = dequantize(linear.packed_weight.to_layout(LINEAR), torch.float32)
    else:
        weight = linear.weight.detach().float()
    delta = linear.lora_delta(names) if names else torch.zeros_like(weight)
    return weight + delta, delta


def _merge(linear: Any, names: tuple[str, ...], where: str) -> float:
    total, delta = _sum(linear, names)
    if not total.isfinite().all():
        raise _not_finite(where, names)
    if not isinstance(linear, GroupedLinear):
        weight = linear.packed_weight.to_layout(LINEAR)
        # Aliases: the module's own tensors are going to have the merged bytes. A part's are the stack's, which stay.
        own = (tensor.detach() for tensor in weight.tensors())
        copied = (tensor.clone() for tensor in own) if isinstance(linear, NVFP4LinearPart) else own
        linear.lora_unmerged = weight.with_tensors(copied)
        parts = 1 if isinstance(linear, LoRADense) else len(linear.weight_dtypes)
        format = weight.format.name
        rounded = (quantize_to(format, part.contiguous()) for part in total.chunk(parts, 1))
        merged = PackedWeight.concatenate(*rounded)
        _set_weight(linear, merged)
        total -= dequantize(merged, torch.float32)
    else:
        linear.lora_unmerged = linear.weight.detach().clone()
        linear.weight.copy_(total)
        total -= linear.weight.float()
    linear.lora_active, linear.lora_merged = (), names
    return _ratio(total, delta)


def _not_finite(where: str, names: tuple[str, ...]) -> ValueError:
    return ValueError(
        f"adapters: the weight of {where} plus {list(names)} has NaN or Inf in its dtype, wanted finite values"
    )


def _unmerge(linear: Any) -> None:
    before = linear.lora_unmerged
    if not isinstance(linear, GroupedLinear):
        _set_weight(linear, before)
    else:
        linear.weight.copy_(before)
    linear.lora_active, linear.lora_merged, linear.lora_unmerged = linear.lora_merged, (), None


def _undo_of(linear: Any) -> Callable[[], None]:
    """Gives a linear, nothing of which is merged, its class, weight and adapters back."""
    lora, active = type(linear), linear.lora_active
    known = {name: getattr(linear, name) for name in _STATE}

    def undo() -> None:
        if isinstance(linear, LoRALinear):
            if linear.lora_merged:
                _unmerge(linear)
        else:
            _set_class(linear, lora)
            for name, value in known.items():
                setattr(linear, name, value)
        linear.lora_active = active
        if isinstance(linear, NVFP4LoRAGroupedLinear):
            linear.lora_to_restore = False

    return undo


def _ready_to_restore(
    linears: dict[str, Any], chosen: dict[str, tuple[str, ...]], errors: dict[str, float]
) -> dict[str, Tensor]:
    """Makes 4-bit linears ready for `dequantize_`; the float32 sums of dense ones, whose adapters it takes."""
    dense = {}
    for name, linear in linears.items():
        if isinstance(linear, LoRADense):
            dense[name], delta = _sum(linear, chosen[name])
            _strip(linear)
            errors[name] = _ratio(dense[name] - dense[name].to(_dtype_of(linear)).float(), delta)
        elif isinstance(linear, NVFP4LoRAGroupedLinear):
            linear.lora_active, linear.lora_to_restore = chosen[name], True
            errors[name] = _restore_error(linear)
    return dense


def _set_weight(linear: Any, weight: PackedWeight) -> None:
    """Gives a quantized linear another weight in layout "linear"; a part its rows of the stack's."""
    owner = linear.stack if isinstance(linear, NVFP4LinearPart) else linear
    weight = weight.to(owner.qdata.device)
    if owner is not linear:
        whole, rows = owner.packed_weight.to_layout(LINEAR), linear._rows
        qdata, bits = (tensor.view(torch.uint8).clone() for tensor in (whole.qdata, whole.scale))
        qdata[:, rows], bits[:, rows] = weight.qdata.view(torch.uint8), weight.scale.view(torch.uint8)
        tensors = [qdata.view(whole.qdata.dtype), bits.view(whole.scale.dtype)]
        if isinstance(whole, NVFP4Weight) and isinstance(weight, NVFP4Weight):
            scales = whole.row_global_scale().clone()
            scales[:, rows] = weight.row_global_scale()
            alike = bool((scales == scales[:, :1]).all())
            tensors.append(scales[:, 0].clone() if alike else scales)
        weight = whole.with_tensors(tensors)
    owner.set_weight(lay_out(weight, "auto" if owner.auto_layout else owner.layout))


def _dtype_of(linear: Any) -> torch.dtype:
    """Of the 16-bit weight that a dense layer stands for."""
    dtypes = (linear.stack if isinstance(linear, NVFP4LinearPart) else linear).weight_dtypes
    dtype: torch.dtype = dtypes[linear.index if isinstance(linear, NVFP4LinearPart) else 0]
    return dtype


def _restore_error(linear: Any) -> float:
    total, delta = _sum(linear, linear.lora_active)
    parts = zip(total.chunk(len(linear.weight_dtypes), 1), linear.weight_dtypes, strict=True)
    rounded = torch.cat([part.to(dtype).float() for part, dtype in parts], 1)
    return _ratio(total - rounded, delta)


def _ratio(error: Tensor, delta: Tensor) -> float:
    size = float(delta.norm())
    return float(error.norm()) / size if size else 0.0

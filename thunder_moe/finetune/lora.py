"""Add LoRA adapters to experts, quantized or not, and to quantized dense layers; switch and remove them.
Called by users, merge and integrations.huggingface; calls nn.lora for the modules.

add_lora_(model) -> train -> merge.merge_lora_, or keep the adapters beside the weights
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from thunder_moe.formats.checks import require_module, require_type
from thunder_moe.nn import GroupedLinear, NVFP4GroupedLinear, NVFP4GroupedSwiGLU
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, is_packed_dense
from thunder_moe.nn.lora import (
    LoRAGroupedLinear,
    LoRALinear,
    LoRASpec,
    NVFP4LoRAGroupedLinear,
    NVFP4LoRALinear,
    NVFP4LoRALinearPart,
    read_record,
)
from thunder_moe.quantization.replaceable import has_own_forward, instance_customization, set_class
from thunder_moe.selection import Names, Selection, Selector, require_matches, select
from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP, ScaledSwiGLU

Model = TypeVar("Model", bound=nn.Module)
_LOGGER = logging.getLogger("thunder_moe")
_WITH_LORA: dict[type[nn.Module], type[LoRALinear]] = {
    GroupedLinear: LoRAGroupedLinear,
    NVFP4GroupedLinear: NVFP4LoRAGroupedLinear,
    NVFP4Linear: NVFP4LoRALinear,
    NVFP4LinearPart: NVFP4LoRALinearPart,
}
_BASE = {lora: base for base, lora in _WITH_LORA.items()}
ADAPTER_ATTRIBUTES = ("lora_A", "lora_B", "lora_specs", "lora_joined", "lora_by_peft", "lora_merged", "lora_unmerged")
_SELECTION_HINT = "filter and linears (of dense layers), patterns or functions of a module and its name"
# PEFT's name of an argument -> the name of ours, or what replaces it.
_PEFT_NAMES = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_rslora": "rslora", "adapter_name": "adapter",
    "target_modules": _SELECTION_HINT, "target_parameters": _SELECTION_HINT,
}  # fmt: skip
ADAPTER_NAME = re.compile(r"\.lora_([AB]\.[^.]+|specs)$")  # end of a name of `stored_adapters`
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
def add_lora_(
    model: Model,
    rank: int,
    alpha: float,
    *,
    dropout: float = 0.0,
    filter: Selection | None = None,
    linears: bool | Selection = False,
    rslora: bool = False,
    share: str | None = None,
    split_gate_up: bool = False,
    dtype: torch.dtype = torch.float32,
    adapter: str = "default",
    freeze: bool = True,
    **unknown: NoReturn,
) -> Model:
    """Add a LoRA adapter to the linears of experts, in place: per expert A (r, K) and B (N, r) = 0 beside the weight.

    Each `NVFP4GroupedLinear` and `GroupedLinear` gets one, in this package's modules, and in experts of transformers'
    models once `quantize_` has been called. It becomes a `NVFP4LoRAGroupedLinear` or `LoRAGroupedLinear`, whose
    parameters ``lora_A.<adapter>`` (E, r, K) and ``lora_B.<adapter>`` (E, N, r) are in the state dict. The products
    run as grouped GEMMs in the dtype of the activations. Compile afterwards.

    Args:
        model: any module that holds such linears.
        rank: r.
        alpha: B (A x) is multiplied by alpha / rank. Not 0: the adapter would add nothing and learn nothing.
        dropout: of A's input in training.
        filter: the linears of experts, and the dense layers of `linears`, that get an adapter; None: all. A pattern, a
            list of patterns, or a function of a linear and its name, as in `quantize_`.
        linears: True: 4-bit dense layers (of ``quantize_(linears=...)``) get adapters too, A (1, r, K) and B (1, N, r).
            Patterns or a function: the dense layers that they name.
        rslora: the factor is alpha / sqrt(rank) instead.
        share: "A" or "B": the experts of a linear share this matrix, (1, r, K) or (1, N, r).
        split_gate_up: gate and up get separate adapters where one weight has the rows of both: A (E, 2r, K). The first
            r rows of A belong to B's upper half, the others to its lower half.
        dtype: of the parameters.
        adapter: a name; the new adapter becomes the only active one.
        freeze: all other parameters get ``requires_grad=False``. PEFT's adapters (names with "lora_", and
            "modules_to_save") stay unchanged.

    Returns:
        The same model.

    Raises:
        ValueError: no such linears, or all declined; a rank, alpha, dropout, share, dtype or adapter name that is not
            valid, a name that is taken, a weight on the "meta" device, adapters that are merged anywhere in the model.
            The model is unchanged then.
        TypeError: `filter` or `linears` is of another type, or an argument is unknown. The message translates PEFT's
            names.
    """
    for name in unknown:
        remedy = _PEFT_NAMES.get(name, "an argument of its signature")
        raise TypeError(f"add_lora_: got the argument {name!r}, wanted {remedy}, or get_peft_model for a LoraConfig")
    require_module(model)
    scaling = scaling_of(rank, alpha, rslora)
    names = Names.of_model(model)
    takes = Selector(names, filter, None)
    dense = linears if isinstance(linears, bool) else select("linears", linears, names)
    if adaptable := [name for name, module in model.named_modules(remove_duplicate=False) if is_adaptable(module)]:
        require_matches("filter", filter, names, adaptable, "linear for an adapter")
        require_matches("linears", linears, names, adaptable, "linear for an adapter")
    chosen: dict[str, Any] = {}
    skipped: list[str] = []
    for name, module in model.named_modules():
        declines = is_packed_dense(module) and not (dense(module, name) if callable(dense) else dense)
        if not is_adaptable(module) or declines or takes.declined(module, name) is not None:
            continue
        if (reason := _adapter_blocker(module)) is None:
            chosen[name] = module
        else:
            skipped.append(f"{name}: {reason}")
    if not chosen:
        why = (
            "; ".join(skipped)
            or "none there, all declined by the filter, or 16-bit experts of transformers: quantize_ it"
        )
        raise ValueError(f"model: found no linear of experts for an adapter in {type(model).__name__} ({why})")
    for reason in skipped:
        _LOGGER.warning("no adapter: %s", reason)
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    specs = {
        name: LoRASpec(rank, scaling, dropout, 1 + (split_gate_up and _is_gate_up(parents.get(id(module)), module)))
        for name, module in chosen.items()
    }
    add_by_name_(model, specs, adapter, share, dtype)
    if freeze:
        freeze_others_(model)
    return model


@torch.no_grad()
def add_by_name_(
    model: nn.Module, specs: Mapping[str, LoRASpec], adapter: str, share: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Add an adapter to the named linears, and make it the model's only active one. An error adds it to none of them.

    A linear that can get no adapter or has one of that name, merged adapters and an option that is not valid are a
    ValueError.
    """
    refuse_merged(lora_linears(model))
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in specs}
    for name, linear in linears.items():
        _check_options(specs[name].dropout, share, dtype, adapter)
        if (reason := _adapter_blocker(linear)) is not None:
            raise ValueError(f"model: {name} can get no adapter: {reason}")
        if isinstance(linear, LoRALinear) and adapter in linear.lora_specs:
            raise ValueError(f"adapter: got {adapter!r}, which {name!r} has, wanted another name")
        if share is not None and getattr(linear, "process_part", None) is not None:
            raise ValueError(f"share: got {share!r} at {name!r}, whose experts several processes share, wanted None")
    try:
        for name, linear in linears.items():
            options: Any = dict(dtype=dtype, device=weight_of(linear).device)
            shapes = zip("AB", shapes_of(linear, specs[name]), strict=True)
            of_a, of_b = ((1, *shape[1:]) if side == share else shape for side, shape in shapes)
            bound = linear.in_features**-0.5
            a, b = torch.empty(of_a, **options).uniform_(-bound, bound), torch.zeros(of_b, **options)
            _attach_adapter(linear, adapter, specs[name], a, b)
    except BaseException:  # no memory, or an interruption
        for linear in linears.values():  # others may have an earlier adapter of that name
            if isinstance(linear, LoRALinear):
                _remove_adapter(linear, adapter)
        raise
    for linear in lora_linears(model).values():
        linear.lora_active = (adapter,) if adapter in linear.lora_specs else ()


def freeze_others_(model: nn.Module) -> None:
    """Make all parameters untrainable but adapters' parameters, PEFT's too."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name and "modules_to_save" not in name:
            parameter.requires_grad_(False)


def use_lora_(model: Model, adapters: str | Sequence[str] | None) -> Model:
    """Set the active adapters of a model's experts: one, several at once (their terms are added), or None.

    Linears that lack a named adapter run without it. Compiled models compile again.

    Raises:
        TypeError: the model is not a module, or `adapters` is of another type.
        ValueError: no linear has the name, a name is given twice, or adapters are merged; the model is unchanged then.
    """
    linears = require_lora(model)
    wanted = require_names(linears, adapters)
    refuse_merged(linears)
    for linear in linears.values():
        linear.lora_active = tuple(name for name in wanted if name in linear.lora_specs)
    return model


def is_adaptable(module: nn.Module) -> bool:
    """True for a linear that can have adapters by its class."""
    return isinstance(module, GroupedLinear | NVFP4GroupedLinear) or is_packed_dense(module)


def lora_linears(model: nn.Module) -> dict[str, Any]:
    """Return the linears of experts and the 4-bit dense layers with adapters, by qualified name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def lora_parameters(model: nn.Module, adapter: str | None = None) -> Iterator[nn.Parameter]:
    """Yield the parameters of an adapter; of all adapters if `adapter` is None."""
    for linear in lora_linears(model).values():
        for name in linear.lora_specs:
            if adapter in (None, name):
                yield from (linear.lora_A[name], linear.lora_B[name])


@torch.no_grad()
def remove_lora_(model: Model, adapter: str | None = None) -> Model:
    """Remove an adapter, or all if `adapter` is None. Linears without adapters get their base class back.

    Merged adapters stay in the weights when all are removed.

    Raises:
        TypeError: the model is not a module, or `adapter` is neither a name nor None.
        ValueError: the model has no adapters, or none of that name; one adapter is removed while any is merged.
    """
    linears = require_lora(model)
    require_type("adapter", adapter, (str, type(None)), "a name or None")
    if adapter is not None:
        require_names(linears, adapter, "adapter")
        refuse_merged(linears)
    for linear in linears.values():
        for name in list(linear.lora_specs) if adapter is None else [adapter]:
            _remove_adapter(linear, name)
    return model


def _remove_adapter(linear: Any, name: str) -> None:
    """Remove an adapter from a linear; the last one gives it its base class back."""
    linear.lora_active = tuple(other for other in linear.lora_active if other != name)
    if linear.lora_specs.pop(name, None) is not None:
        del linear.lora_A[name], linear.lora_B[name]
    if not linear.lora_specs:
        restore_base_class(linear)


def scaling_of(rank: Any, alpha: Any, rslora: bool) -> float:
    """Return the factor of an adapter; raise a ValueError for a rank or alpha that is not valid."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank: got {rank!r}, wanted a positive integer")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or alpha == 0:
        raise ValueError(f"alpha: got {alpha!r}, wanted a finite number that is not 0")
    return alpha / (math.sqrt(rank) if rslora else rank)


def _check_options(dropout: Any, share: Any, dtype: Any, adapter: Any) -> None:
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout: got {dropout!r}, wanted at least 0 and less than 1")
    if share not in (None, "A", "B"):
        raise ValueError(f"share: got {share!r}, wanted one of (None, 'A', 'B')")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, wanted one of {DTYPES}")
    if not isinstance(adapter, str) or not adapter or "." in adapter or hasattr(nn.ParameterDict, adapter):
        raise ValueError(
            f"adapter: got {adapter!r}, wanted a name without '.' that no attribute of a ParameterDict has"
        )


def _adapter_blocker(module: Any) -> str | None:
    """Return why a linear cannot get an adapter; None if it can."""
    if type(module) not in (*_WITH_LORA, *_BASE):
        return f"it is a {type(module).__name__}"
    if vars(module).get("_sharding") is not None:  # parallel.shards
        return "parallelize_module has cut its weight over ranks, where adapters are not supported"
    if (reason := instance_customization(module)) is not None:
        return reason
    if not has_own_forward(module):
        return "its forward is wrapped or replaced"
    if (getattr(module, "process_part", None) or (0,))[0]:
        return "processes share its features: adapters are for whole linears, or whole experts of each process"
    return "its weight is on the meta device (offloaded, or not loaded yet)" if weight_of(module).is_meta else None


def weight_of(module: Any) -> Tensor:
    """Return a tensor of a linear's weight; for a part of a stack, one of the stack's."""
    if isinstance(module, NVFP4LinearPart):
        return module.stack.qdata
    tensor: Tensor = module.weight if isinstance(module, GroupedLinear) else module.qdata
    return tensor


def _is_gate_up(parent: nn.Module | None, module: Any) -> bool:
    """True if the rows of a linear's weight are gate's, then up's."""
    if parent is None or parent._modules.get("gate_up_proj") is not module:
        return False
    if isinstance(parent, NVFP4GroupedSwiGLU):
        return True
    if isinstance(parent, GroupedMLP | NVFP4GroupedMLP):
        activation: nn.Module = parent.activation
        return isinstance(activation, ScaledSwiGLU) and activation.form.interleave is None
    return bool(getattr(getattr(parent, "form", None), "gated", False))  # NVFP4Experts of transformers


def shapes_of(linear: Any, spec: LoRASpec) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of A (E, P r, K) and B (E, N, r) of an adapter; a dense layer is one expert."""
    experts = getattr(linear, "num_experts", 1)
    return (experts, spec.parts * spec.rank, linear.in_features), (experts, linear.out_features, spec.rank)


def _attach_adapter(module: Any, adapter: str, spec: LoRASpec, a: Tensor, b: Tensor) -> None:
    """Give an adaptable linear an inactive adapter with these tensors."""
    if not isinstance(module, LoRALinear):
        module.lora_A, module.lora_B = nn.ParameterDict(), nn.ParameterDict()
        module.lora_specs, module.lora_joined, module.lora_by_peft = {}, "", False
        module.lora_merged, module.lora_unmerged = (), None
        set_class(module, _WITH_LORA[type(module)])  # last: after an interruption the linear still works
    module.lora_A[adapter], module.lora_B[adapter] = nn.Parameter(a), nn.Parameter(b)
    module.lora_specs[adapter] = spec


def stored_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's adapters and the `lora_record`s for a checkpoint, by qualified name.

    Merged adapters are left out, because the weights contain them.
    """
    stored: dict[str, Tensor] = {}
    for path, linear in model.named_modules(remove_duplicate=False):
        if not isinstance(linear, LoRALinear) or (record := linear.lora_record()) is None:
            continue
        for name in linear.lora_specs.keys() - {*linear.lora_merged}:
            stored[f"{path}.lora_A.{name}"] = linear.lora_A[name].detach()
            stored[f"{path}.lora_B.{name}"] = linear.lora_B[name].detach()
        stored[f"{path}.lora_specs"] = record
    return stored


@torch.no_grad()
def restore_adapters_(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Add the adapters of `stored_adapters` to the linears of the same names, and freeze all other parameters.

    An adapter is active again if it was active when it was stored. A linear that is missing or cannot get an adapter,
    and a tensor that is missing, has another shape or lacks its record, are a ValueError.
    """
    remaining, modules = dict(stored), dict(model.named_modules(remove_duplicate=False))
    for key in [key for key in stored if key.endswith(".lora_specs")]:
        path = key.removesuffix(".lora_specs")
        linear = modules.get(path)
        del remaining[key]
        try:
            specs, active = read_record(stored, f"{path}.") or ({}, ())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        reason: str | None = "it is not a 4-bit layer here, wanted linears=True, and a checkpoint that has it in 4 bits"
        if linear is not None and is_adaptable(linear):
            reason = _adapter_blocker(linear)
        if reason is not None:
            raise ValueError(f"{path}: has adapters {list(specs)}, which cannot be loaded: {reason}")
        for name, spec in specs.items():
            pair = []
            for side, shape in zip("AB", shapes_of(linear, spec), strict=True):
                place = f"{path}.lora_{side}.{name}"
                tensor = remaining.pop(place, None)
                if tensor is None or tensor.shape not in (shape, (1, *shape[1:])) or tensor.dtype not in DTYPES:
                    got = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                    raise ValueError(f"{place}: got {got}, wanted one of {DTYPES} of shape {shape}, by lora_specs")
                pair.append(tensor.to(weight_of(linear).device))
            _attach_adapter(linear, name, spec, *pair)
        cast("LoRALinear", linear).lora_active = active
    if remaining:
        raise ValueError(
            f"{next(iter(remaining))}: has no lora_specs beside it, which say its rank and alpha; wanted a model that"
            " was saved together with them"
        )
    freeze_others_(model)


def restore_base_class(linear: Any) -> None:
    """Give a linear its base class back, and delete its adapters."""
    set_class(linear, _BASE[type(linear)])  # first: after an interruption the linear still works
    for name in ADAPTER_ATTRIBUTES:
        delattr(linear, name)


def require_lora(model: nn.Module) -> dict[str, Any]:
    """Return `lora_linears(model)`; raise a ValueError for a model without adapters."""
    require_module(model)
    linears = lora_linears(model)
    if not linears:
        raise ValueError(f"model: {type(model).__name__} has no LoRA adapters of experts, wanted add_lora_ before")
    return linears


def require_names(linears: dict[str, Any], adapters: Any, argument: str = "adapters") -> tuple[str, ...]:
    """Return the names in an argument: one name, several, or None.

    Raises:
        TypeError: it is something else.
        ValueError: none of the linears has an adapter of a name, or a name is given twice.
    """
    words = "a name, a list of names or None"
    require_type(argument, adapters, (Iterable, type(None)), words)
    wanted = (adapters,) if isinstance(adapters, str) else () if adapters is None else tuple(adapters)
    known = {name for linear in linears.values() for name in linear.lora_specs}
    for name in wanted:
        require_type(argument, name, str, words)
        if name not in known:
            raise ValueError(f"{argument}: got {name!r}, wanted some of {sorted(known)}")
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"{argument}: got {list(wanted)}, wanted each name once")
    return wanted


def refuse_merged(linears: dict[str, Any]) -> None:
    """Raise a ValueError if a linear of `lora_linears` has merged adapters."""
    for name, linear in linears.items():
        if linear.lora_merged:
            raise ValueError(f"model: {list(linear.lora_merged)} are merged in {name}, wanted unmerge_lora_ before")

"""Add LoRA adapters to experts, quantized or not, and to quantized dense layers; switch and remove them.
Called by users, lora_merge and integrations.huggingface.lora; calls nn.lora for the modules.

add_lora_(model) -> train -> lora_merge.merge_lora_, or keep the adapters beside the weights
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from thunder_moe.formats.checks import require_module
from thunder_moe.nn import GroupedLinear, NVFP4GroupedLinear, NVFP4GroupedSwiGLU
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack
from thunder_moe.nn.lora import (
    LoRAGroupedLinear,
    LoRALinear,
    LoRASpec,
    NVFP4LoRAGroupedLinear,
    NVFP4LoRALinear,
    NVFP4LoRALinearPart,
    read_record,
)
from thunder_moe.quantization.replaceable import has_hook, has_own_forward, instance_customization
from thunder_moe.selection import Names, Selection, Selector, require_matches, select
from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP, ScaledSwiGLU

__all__ = [
    "DTYPES",
    "STATE",
    "Model",
    "add_by_name_",
    "add_lora_",
    "freeze_others_",
    "is_adaptable",
    "is_dense",
    "lora_linears",
    "lora_parameters",
    "refuse_merged",
    "remove_lora_",
    "require_lora",
    "require_names",
    "restore_adapters_",
    "scaling_of",
    "set_class",
    "stored_adapters",
    "strip",
    "use_lora_",
    "weight_of",
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
STATE = ("lora_A", "lora_B", "lora_specs", "lora_joined", "lora_by_peft", "lora_merged", "lora_unmerged")
_CHOOSE = "filter and linears (of dense layers), patterns or functions of a module and its name"
# PEFT's name of an argument -> ours.
_NAMES = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_rslora": "rslora", "adapter_name": "adapter",
    "target_modules": _CHOOSE, "target_parameters": _CHOOSE,
}  # fmt: skip
_SHARES = (None, "A", "B")
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

    Each `NVFP4GroupedLinear` and `GroupedLinear` gets one, wherever it is: in this package's modules, and in experts of
    transformers' models once `quantize_` has been called. It becomes a `NVFP4LoRAGroupedLinear` or
    `LoRAGroupedLinear`, whose parameters ``lora_A.<adapter>`` (E, r, K) and ``lora_B.<adapter>`` (E, N, r) are in the
    state dict. The products run as grouped GEMMs in the dtype of the activations. Compile afterwards.

    Args:
        model: any module that holds such linears.
        rank: r.
        alpha: B (A x) is multiplied by alpha / rank; not 0, with which an adapter would add nothing and learn nothing.
        dropout: of A's input in training.
        filter: which linears of experts, and which of the dense layers of `linears`, get an adapter; None: all. A
            pattern, a list of patterns, or a function of a linear and its name, as in `quantize_`.
        linears: 4-bit dense layers (of ``quantize_(linears=...)``) get adapters too, A (1, r, K) and B (1, N, r): all
            of them, or those that patterns or a function name.
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
        TypeError: `filter` or `linears` is of another type; an argument that there is not, which the message translates
            from PEFT's name.
    """
    for name in unknown:
        remedy = f"{_NAMES[name]}, " if name in _NAMES else ""
        raise TypeError(f"add_lora_: got the argument {name!r}, wanted {remedy}or get_peft_model for a LoraConfig")
    require_module(model)
    scaling = scaling_of(rank, alpha, rslora)
    names = Names.of_model(model)
    takes = Selector(names, filter, None)
    dense = linears if isinstance(linears, bool) else select("linears", linears, names)
    adaptable = [name for name, module in model.named_modules(remove_duplicate=False) if is_adaptable(module)]
    if adaptable:
        require_matches("filter", filter, names, adaptable, "linear for an adapter")
        require_matches("linears", linears, names, adaptable, "linear for an adapter")
    chosen: dict[str, Any] = {}
    left: list[str] = []
    for name, module in model.named_modules():
        if not is_adaptable(module):
            continue
        if is_dense(module) and not (dense(module, name) if callable(dense) else dense):
            continue
        if takes.declined(module, name) is not None:
            continue
        reason = _obstacle(module)
        if reason is not None:
            left.append(f"{name}: {reason}")
            continue
        chosen[name] = module
    if not chosen:
        why = (
            "; ".join(left) or "none there, all declined by the filter, or 16-bit experts of transformers: quantize_ it"
        )
        raise ValueError(f"model: found no linear of experts for an adapter in {type(model).__name__} ({why})")
    for reason in left:
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
    """Add an adapter to the linears of these names, to all or to none; it becomes the only active one of the model.

    Raises:
        ValueError: a linear can get no adapter, or has one of that name; adapters are merged; an option is not valid.
    """
    refuse_merged(lora_linears(model))
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in specs}
    for name, linear in linears.items():
        _check_options(specs[name].dropout, share, dtype, adapter)
        if (reason := _obstacle(linear)) is not None:
            raise ValueError(f"model: {name} can get no adapter: {reason}")
        if isinstance(linear, LoRALinear) and adapter in linear.lora_specs:
            raise ValueError(f"adapter: got {adapter!r}, which {name!r} has, wanted another name")
        if share is not None and getattr(linear, "process_part", None) is not None:
            raise ValueError(f"share: got {share!r} at {name!r}, whose experts several processes share, wanted None")
    try:
        for name, linear in linears.items():
            _add(linear, specs[name], share, dtype, adapter)
    except BaseException:  # no memory, or an interruption
        for linear in lora_linears(model).values():
            _drop(linear, adapter)
        raise
    for linear in lora_linears(model).values():
        linear.lora_active = (adapter,) if adapter in linear.lora_specs else ()


def freeze_others_(model: nn.Module) -> None:
    """Make all parameters but those of adapters, of PEFT's too, untrainable."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name and "modules_to_save" not in name:
            parameter.requires_grad_(False)


def use_lora_(model: Model, adapters: str | Sequence[str] | None) -> Model:
    """Set the active adapters of a model's experts: one, several at once (their terms are added), or None.

    Linears that lack a named adapter run without it. Compiled models compile again.

    Raises:
        ValueError: a name that no linear has or that is there twice, or merged adapters; the model is unchanged then.
    """
    wanted = (adapters,) if isinstance(adapters, str) else tuple(adapters or ())
    linears = require_lora(model)
    require_names(linears, wanted)
    refuse_merged(linears)
    for linear in linears.values():
        linear.lora_active = tuple(name for name in wanted if name in linear.lora_specs)
    return model


def is_adaptable(module: nn.Module) -> bool:
    """Return whether it is a linear for which there are adapters."""
    return isinstance(module, GroupedLinear | NVFP4GroupedLinear) or is_dense(module)


def is_dense(module: nn.Module) -> bool:
    """Return whether it is a 4-bit dense layer, or a part of a stack of them."""
    whole = isinstance(module, NVFP4Linear) and not isinstance(module, NVFP4LinearStack)
    return whole or isinstance(module, NVFP4LinearPart)


def lora_linears(model: nn.Module) -> dict[str, Any]:
    """Return the linears of experts, and the 4-bit dense layers, that have adapters, by qualified name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def lora_parameters(model: nn.Module, adapter: str | None = None) -> Iterator[nn.Parameter]:
    """Yield the parameters of an adapter, of all adapters when None."""
    for linear in lora_linears(model).values():
        for name in linear.lora_specs:
            if adapter in (None, name):
                yield from (linear.lora_A[name], linear.lora_B[name])


@torch.no_grad()
def remove_lora_(model: Model, adapter: str | None = None) -> Model:
    """Remove an adapter, all adapters when None; linears without any have their own class again.

    What is merged stays in the weights when all are removed.

    Raises:
        ValueError: no adapters, or none of that name; one adapter is to go while any is merged.
    """
    linears = require_lora(model)
    if adapter is not None:
        require_names(linears, (adapter,))
        refuse_merged(linears)
    for linear in linears.values():
        for name in list(linear.lora_specs) if adapter is None else [adapter]:
            _drop(linear, name)
    return model


def _drop(linear: Any, name: str) -> None:
    """Remove an adapter from a linear, which without any has its base class again."""
    linear.lora_active = tuple(each for each in linear.lora_active if each != name)
    if linear.lora_specs.pop(name, None) is not None:
        del linear.lora_A[name], linear.lora_B[name]
    if not linear.lora_specs:
        strip(linear)


def scaling_of(rank: Any, alpha: Any, rslora: bool) -> float:
    """Return the factor of an adapter; ValueError for a rank or alpha that is not valid."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank: got {rank!r}, wanted a positive integer")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or alpha == 0:
        raise ValueError(f"alpha: got {alpha!r}, wanted a finite number that is not 0")
    return alpha / (math.sqrt(rank) if rslora else rank)


def _check_options(dropout: Any, share: Any, dtype: Any, adapter: Any) -> None:
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout: got {dropout!r}, wanted at least 0 and less than 1")
    if share not in _SHARES:
        raise ValueError(f"share: got {share!r}, wanted one of {_SHARES}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, wanted one of {DTYPES}")
    if not isinstance(adapter, str) or not adapter or "." in adapter or hasattr(nn.ParameterDict, adapter):
        raise ValueError(
            f"adapter: got {adapter!r}, wanted a name without '.' that no attribute of a ParameterDict has"
        )


def _obstacle(module: Any) -> str | None:
    """Return why a linear can get no adapter; None when it can."""
    if type(module) not in (*_WITH_LORA, *_BASE):
        return f"it is a {type(module).__name__}"
    if vars(module).get("_cut") is not None:  # parallel.shards
        return "parallelize_module has cut its weight over ranks, where adapters are not supported"
    reason = instance_customization(module)
    if reason is None and not has_own_forward(module):
        reason = "its forward is wrapped or replaced"
    if reason is None and (getattr(module, "process_part", None) or (0,))[0]:
        reason = "processes share its features: adapters are for whole linears, or whole experts of each process"
    tensor = weight_of(module)
    if reason is None and tensor.device.type == "meta":
        reason = "its weight is on the meta device (offloaded, or not loaded yet)"
    return reason


def weight_of(module: Any) -> Tensor:
    """Return a tensor of a linear's weight; for a part of a stack, one of the stack's."""
    if isinstance(module, NVFP4LinearPart):
        return module.stack.qdata
    tensor: Tensor = module.weight if isinstance(module, GroupedLinear) else module.qdata
    return tensor


def _is_gate_up(parent: nn.Module | None, module: Any) -> bool:
    """Return whether the rows of a linear's weight are gate's, then up's."""
    if parent is None or parent._modules.get("gate_up_proj") is not module:
        return False
    if isinstance(parent, NVFP4GroupedSwiGLU):
        return True
    if isinstance(parent, GroupedMLP | NVFP4GroupedMLP):
        activation: nn.Module = parent.activation
        return isinstance(activation, ScaledSwiGLU) and activation.form.interleave is None
    return bool(getattr(getattr(parent, "form", None), "gated", False))  # NVFP4Experts of transformers


def _add(module: Any, spec: LoRASpec, share: str | None, dtype: torch.dtype, adapter: str) -> None:
    experts = getattr(module, "num_experts", 1)  # a dense layer is one expert
    n, k, rank = module.out_features, module.in_features, spec.rank
    options: dict[str, Any] = dict(dtype=dtype, device=weight_of(module).device)
    a = torch.empty(1 if share == "A" else experts, spec.parts * rank, k, **options).uniform_(-(k**-0.5), k**-0.5)
    _put_adapter(module, adapter, spec, a, torch.zeros(1 if share == "B" else experts, n, rank, **options))


def _put_adapter(module: Any, adapter: str, spec: LoRASpec, a: Tensor, b: Tensor) -> None:
    """Give a linear that is adaptable an adapter with these tensors; it is not active."""
    if not isinstance(module, LoRALinear):
        module.lora_A, module.lora_B = nn.ParameterDict(), nn.ParameterDict()
        module.lora_specs, module.lora_joined, module.lora_by_peft = {}, "", False
        module.lora_merged, module.lora_unmerged = (), None
        set_class(module, _WITH_LORA[type(module)])  # last: an interruption leaves a linear that works
    module.lora_A[adapter], module.lora_B[adapter] = nn.Parameter(a), nn.Parameter(b)
    module.lora_specs[adapter] = spec


def stored_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a model's adapters, by qualified name: the tensors and the `lora_record`s.

    Merged adapters are left out, because the weights have them.
    """
    found: dict[str, Tensor] = {}
    for path, linear in model.named_modules(remove_duplicate=False):
        if not isinstance(linear, LoRALinear) or (record := linear.lora_record()) is None:
            continue
        for name in linear.lora_specs.keys() - {*linear.lora_merged}:
            found[f"{path}.lora_A.{name}"] = linear.lora_A[name].detach()
            found[f"{path}.lora_B.{name}"] = linear.lora_B[name].detach()
        found[f"{path}.lora_specs"] = record
    return found


@torch.no_grad()
def restore_adapters_(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Add the adapters of `stored_adapters` to the linears of the same names, active or not as they were, and freeze
    all else as `add_lora_` does.

    Raises:
        ValueError: there is no such linear, or it can get no adapter; a tensor lacks its record, has another shape, or
            is missing.
    """
    left, modules = dict(stored), dict(model.named_modules(remove_duplicate=False))
    for key in [key for key in stored if key.endswith(".lora_specs")]:
        path = key.removesuffix(".lora_specs")
        linear = modules.get(path)
        try:
            start = f"{path}.lora_A."
            names = (name.removeprefix(start) for name in stored if name.startswith(start))
            specs, active = read_record(left.pop(key), names)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        reason: str | None = "it is not a 4-bit layer here, wanted linears=True, and a checkpoint that has it in 4 bits"
        if linear is not None and is_adaptable(linear):
            reason = _obstacle(linear)
        if reason is not None:
            raise ValueError(f"{path}: has adapters {list(specs)}, which cannot be loaded: {reason}")
        for name, spec in specs.items():
            _restore(linear, path, name, spec, *(left.pop(f"{path}.lora_{each}.{name}", None) for each in "AB"))
        cast("LoRALinear", linear).lora_active = active
    if left:
        raise ValueError(
            f"{next(iter(left))}: has no lora_specs beside it, which say its rank and alpha; wanted a model that was"
            " saved together with them"
        )
    freeze_others_(model)


def _restore(linear: Any, path: str, name: str, spec: LoRASpec, a: Tensor | None, b: Tensor | None) -> None:
    experts = getattr(linear, "num_experts", 1)
    wanted = dict(A=(spec.parts * spec.rank, linear.in_features), B=(linear.out_features, spec.rank))
    for each, tensor in (("A", a), ("B", b)):
        shapes = [(count, *wanted[each]) for count in (experts, 1)]
        if tensor is None or tensor.shape not in shapes or tensor.dtype not in DTYPES:
            got = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(
                f"{path}.lora_{each}.{name}: got {got}, wanted one of {DTYPES} of shape {shapes[0]}, by lora_specs"
            )
    device = weight_of(linear).device
    _put_adapter(linear, name, spec, *(tensor.to(device) for tensor in (a, b) if tensor is not None))


def strip(linear: Any) -> None:
    """Give a linear its base class again."""
    set_class(linear, _BASE[type(linear)])  # first: an interruption leaves a linear that works
    for name in STATE:
        delattr(linear, name)


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module another class, and its hooks of accelerate the forward of that class.

    The module stays the same object, as in torch's `register_parametrization` and `fully_shard`: the model itself may
    be a linear, a stack knows its parts, and callers hold linears whose adapters come, merge and go.
    """
    if not has_hook(module):
        module.__class__ = cls
        return
    from thunder_moe.quantization.accelerate_hooks import unhooked

    with unhooked(module):
        module.__class__ = cls


def require_lora(model: nn.Module) -> dict[str, Any]:
    """Return `lora_linears`; ValueError where there are none."""
    require_module(model)
    linears = lora_linears(model)
    if not linears:
        raise ValueError(f"model: {type(model).__name__} has no LoRA adapters of experts, wanted add_lora_ before")
    return linears


def require_names(linears: dict[str, Any], wanted: Sequence[str]) -> None:
    """Raise a ValueError for a name of an adapter that none of the linears has, or that is there twice."""
    known = {name for linear in linears.values() for name in linear.lora_specs}
    for name in wanted:
        if name not in known:
            raise ValueError(f"adapters: got {name!r}, wanted some of {sorted(known)}")
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"adapters: got {list(wanted)}, wanted each name once")


def refuse_merged(linears: dict[str, Any]) -> None:
    """Raise a ValueError where a linear of `lora_linears` has merged adapters."""
    for name, linear in linears.items():
        if linear.lora_merged:
            raise ValueError(f"model: {list(linear.lora_merged)} are merged in {name}, wanted unmerge_lora_ before")

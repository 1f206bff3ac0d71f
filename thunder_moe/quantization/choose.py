"""Chooses the modules that a conversion of a model replaces, by the options, and checks them ahead of any change.
Called by quantize, calibrate, finetune, tools and integrations.huggingface.on_load; loops over families and
dense_linears; calls selection for the options, replaceable for what wraps modules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4, BlockFormat
from thunder_moe.formats.checks import require_module
from thunder_moe.formats.layouts import layout_fits
from thunder_moe.formats.nvfp4 import WEIGHT_DTYPES
from thunder_moe.formats.registry import FORMATS, check_scale_search, find_format
from thunder_moe.kernels.select import quantize, quantize_to
from thunder_moe.nn import MODULE_LAYOUTS
from thunder_moe.quantization.dense_linears import DenseLinears, is_dense_layer
from thunder_moe.quantization.families import ExpertFamily, Quantization, families_of
from thunder_moe.quantization.plan import QuantizationPlan, Skipped, Target, Targets
from thunder_moe.quantization.replaceable import wrapped_modules
from thunder_moe.selection import Format, Names, Patterns, Selection, Selector, check_patterns, format_function, select

Model = TypeVar("Model", bound=nn.Module)
_LOGGER = logging.getLogger("thunder_moe")
_LAYOUTS = ("auto", *MODULE_LAYOUTS)


def choose_modules(
    model: Model,
    format: Format = "nvfp4",
    *,
    filter: Selection | None = None,
    ignore: Patterns | None = None,
    linears: bool | Selection = False,
    scale_search: str | None = None,
    layout: str = "auto",
    device_of: Callable[[nn.Module], torch.device] | None = None,
    required: bool = True,
) -> QuantizationPlan[Model]:
    """Finds the modules that `quantize_` replaces, and checks them; nothing is changed.

    Args:
        model: as in `quantize_`, like the options that are not listed.
        device_of: returns the device that the weights of a module will be on, for a model on "meta" whose weights are
            still to be loaded. Nothing is logged then.
        required: True if it is an error that nothing is chosen, or that a pattern fits nothing.

    Raises:
        ValueError, TypeError: as `quantize_`.
    """
    require_module(model)
    names = Names.of_model(model)
    selector, format_of = Selector(names, filter, ignore), format_function(format, names)
    takes = linears if isinstance(linears, bool) else select("linears", linears, names)
    packs: dict[str, Callable[[Tensor], Any]] = {name: partial(quantize_to, name) for name in FORMATS}
    pack = packs[NVFP4.name] = partial(quantize, scale_search=scale_search)
    check_scale_search(scale_search, [find_format(format).name] if isinstance(format, str) else [])
    require_layout(layout)
    families: list[ExpertFamily] = families_of(model)
    if required:
        every = dict(model.named_modules(remove_duplicate=False))
        candidates = [name for name in every if linears is not False and is_dense_layer(name, every[name])]
        experts = [name for name in every if any(family.match(every[name]) for family in families)]
        check_patterns(names, experts, candidates, filter=filter, ignore=ignore, linears=linears, format=format)
    dense = DenseLinears()
    if takes is not False:
        dense.choose(model, takes, selector.declined, device_of, format_of)
        families.append(dense)
    chosen, skipped, declined = _classify(model, selector, families, format_of)
    if chosen or skipped or required:
        _check_choice(model, chosen, skipped, families, loaded=device_of is None, required=required)
    if required:
        check_scale_search(scale_search, {target.format for target in chosen.values()})
    formats = {module: packs[target.format] for module, target in chosen.items() if target.format != NVFP4.name}
    run = Quantization(pack, layout, packs=WeakKeyDictionary(formats))
    for family in families:
        family.prepare((module for module, target in chosen.items() if target.family is family), run)
    for module, (name, family, number_format) in chosen.items():
        for n, k in family.sizes(module, run) if layout != "auto" else ():  # "auto" fits every size
            require_fit(layout, name, n, k, BLOCK_FORMATS[number_format])
    choose_again = partial(
        choose_modules, model, format, filter=filter, ignore=ignore, linears=linears, scale_search=scale_search,
        layout=layout,
    )  # fmt: skip
    return QuantizationPlan(model, run, chosen, skipped | declined | dense.skipped, linears, choose_again)


def _classify(
    model: nn.Module,
    selector: Selector,
    families: list[ExpertFamily],
    format_of: Callable[[nn.Module, str], str | None],
) -> tuple[Targets, Skipped, Skipped]:
    """Returns the modules to convert, those that cannot be converted, and those that the options leave unchanged."""
    chosen: Targets = {}
    skipped: Skipped = {}
    wrapped = wrapped_modules(model)
    declined: Skipped = {}

    def visit(module: nn.Module, name: str) -> bool:
        if (family := next((family for family in families if family.match(module)), None)) is None:
            return False
        if isinstance(family, DenseLinears):
            choose_or_skip(module, Target(name, family, family.format_of(module)), wrapped, chosen, skipped)
            return True
        reason = selector.declined(module, name) or ignored_part(module, name)
        format = format_of(module, name) if reason is None else None
        if format is None:
            declined[module] = name, reason or "format is None for it"
            return False
        choose_or_skip(module, Target(name, family, format), wrapped, chosen, skipped)
        return True

    def ignored_part(block: nn.Module, name: str) -> str | None:
        for key, part in block.named_modules(prefix=name):
            pattern = selector.ignored(key) if part is not block else None
            if pattern is not None and any(family.match(part) for family in families):
                return f"ignore has {pattern!r}, a part of it"
            if pattern is not None and [*part.parameters()]:
                whole = f"a part of {name!r}, which is converted as one, wanted the whole"
                raise ValueError(f"ignore: got {pattern!r}, {whole}")
        return None

    walk(model, visit)
    for block, (name, *_) in chosen.items():
        for module in block.modules():
            if module in declined:
                raise ValueError(f"filter: took {name!r} but not {declined[module][0]!r}, which is a part of it")
    return chosen, skipped, declined


def walk(
    module: nn.Module, visit: Callable[[nn.Module, str], bool], name: str = "", seen: set[nn.Module] | None = None
) -> None:
    """Calls `visit(module, name)` once for each module, and for its children unless that returned True.

    A part of a block that is elsewhere in the model, too, may therefore be visited before its block."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    if not visit(module, name):
        for child_name, child in module._modules.items():
            if child is not None:
                walk(child, visit, f"{name}.{child_name}" if name else child_name, seen)


def choose_or_skip(
    module: nn.Module, target: Target, wrapped: dict[nn.Module, str], chosen: Targets, skipped: Skipped
) -> None:
    """Adds the module to `chosen`, or to `skipped` when a wrapper around it or a customization prevents replacement."""
    reason = wrapped.get(module) or target.family.blocker(module)
    if reason is None:
        chosen[module] = target
    else:
        skipped[module] = target.name, reason


def report_skipped(model: nn.Module, chosen: Targets, skipped: Skipped, bits: str, required: bool = True) -> None:
    """Log the modules that are not replaced; a ValueError if nothing is chosen and `required` is True."""
    reasons = [f"{name or 'the model'} ({type(module).__name__}): {why}" for module, (name, why) in skipped.items()]
    if not chosen and required:
        raise ValueError(f"model: nothing in {type(model).__name__} can be replaced; {'; '.join(reasons)}")
    for reason in reasons:
        _LOGGER.warning("stays %s: %s", bits, reason)


def _check_choice(
    model: nn.Module, chosen: Targets, skipped: Skipped, families: list[ExpertFamily], *, loaded: bool, required: bool
) -> None:
    if not chosen and not skipped:
        experts = ", or ".join(dict.fromkeys(family.description for family in families))
        unknown = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Experts")})
        others = f"; it has {', '.join(unknown)}" if unknown else ""
        raise ValueError(
            f"model: found no {experts} to quantize in {type(model).__name__}"
            f" (none there, quantized already, or all declined by the filter or ignored{others})"
        )
    refuse_root(model, chosen)
    names: dict[nn.Parameter, str] = {}
    formats: dict[nn.Parameter, str] = {}
    for module, (name, family, format) in chosen.items():
        weights = family.weights(module)
        for parameter, _ in weights:
            if formats.setdefault(parameter, format) != format:
                tied = f"which is tied to {names[parameter]!r} in {formats[parameter]!r}"
                raise ValueError(f"format: got {format!r} for {name!r}, {tied}")
            names[parameter] = name
        problems = (_problem_of(*weight, loaded, BLOCK_FORMATS[format]) for weight in weights)
        problem = next(filter(None, problems), None)
        problem = family.problem_on_any_rank(module, problem) if loaded else problem
        if problem is not None:
            raise ValueError(f"model: {name!r} {problem}")
        devices = sorted({str(weight.device) for _, weight in weights})
        if len(devices) > 1:
            raise ValueError(f"model: {name!r} has weights on {' and '.join(devices)}, wanted them on one device")
    covered = {inner for module in chosen for inner in module.modules()}
    why = {inner: reason for module, (_, reason) in skipped.items() for inner in module.modules()}
    for module, (name, *_) in chosen.items():
        if module in why:
            raise ValueError(f"model: {name!r} is a part of a block that has to stay 16-bit: {why[module]}")
    for name, module in model.named_modules():
        for parameter in () if module in covered else module.parameters(recurse=False):
            if parameter not in names:
                continue
            if module in why:
                raise ValueError(
                    f"model: {name!r} is tied to {names[parameter]!r} and has to stay 16-bit: {why[module]}"
                )
            raise ValueError(f"filter: took {names[parameter]!r} but not {name!r}, which is tied to its weight")
        for child in module.children():
            if child in chosen:
                chosen[child].family.check_parent(module, child)
    if loaded or not chosen:
        report_skipped(model, chosen, skipped, "16-bit", required)


def _problem_of(parameter: Tensor, weight: Tensor, loaded: bool, format: BlockFormat) -> str | None:
    """Return why a weight (E, N, K) cannot be quantized, in words that follow its name; None if it can."""
    if weight.ndim != 3:
        return f"has a weight of shape {tuple(weight.shape)}, wanted three dimensions"
    if weight.dtype not in WEIGHT_DTYPES:
        return f"has a weight of {weight.dtype}, wanted one of {WEIGHT_DTYPES}"
    if weight.is_meta and loaded:
        return "is on the meta device: load its weights, then quantize"
    if weight.shape[-1] % format.block_size:
        return f"has in_features {weight.shape[-1]}, wanted a multiple of {format.block_size}"
    return non_finite_problem(weight, all_experts=not hasattr(parameter, "device_mesh")) if loaded else None


def non_finite_problem(weight: Tensor, *, all_experts: bool = True) -> str | None:
    """Return which experts of a weight have NaN or Inf, in words that follow its name; None if all values are finite.

    The weight is (E, N, K) of experts, or (N, K), (1, N, K) of a dense layer; its indices are the numbers of the
    experts if it has `all_experts` of its block.
    """
    if bool(torch.isfinite(torch.stack([weight.amin(), weight.amax()])).all()):
        return None
    bad = [expert for expert, own in enumerate(weight) if not bool(own.isfinite().all())] if weight.ndim == 3 else []
    experts = f" of experts {bad[:8]}" if all_experts and len(weight) > 1 and bad else ""
    return f"has NaN or Inf in a weight{experts}, wanted finite values"


def require_layout(layout: str) -> None:
    if layout not in _LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, wanted one of {_LAYOUTS}")


def require_fit(layout: str, name: str, n: int, k: int, format: BlockFormat = NVFP4) -> None:
    if (needs := layout_fits(n, k, layout, format)) is not None:
        raise ValueError(
            f"layout: got {layout!r} for {name!r}, which has a weight of out_features {n} and in_features {k},"
            f" wanted {needs}"
        )


def refuse_root(model: nn.Module, chosen: Targets) -> None:
    if model in chosen:
        raise ValueError(
            f"model: got a bare {type(model).__name__}, which cannot be replaced in place: pass a module that holds it"
        )

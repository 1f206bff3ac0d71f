"""quantize_(model) and dequantize_(model): swap experts and dense layers for their packed forms in place, and back;
to_layout_.
Called by users; loops over the families of thunder_moe.families and dense_linears, which know the kinds of modules;
calls replaceable for what wraps them, kernels.select to quantize and lay out.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from thunder_moe import grouped_experts
from thunder_moe.dense_linears import DenseLinears
from thunder_moe.families import ExpertFamily, Quantization, families_of, register
from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4, BlockFormat
from thunder_moe.formats.checks import require_module
from thunder_moe.formats.layouts import layout_fits
from thunder_moe.formats.nvfp4 import WEIGHT_DTYPES
from thunder_moe.formats.registry import FORMATS, find_format
from thunder_moe.kernels.select import lay_out, quantize, quantize_to, resolve_layout
from thunder_moe.nn import MODULE_LAYOUTS
from thunder_moe.nn.packed import NVFP4Module
from thunder_moe.progress import progress_bar
from thunder_moe.replaceable import has_hook, wrapped

__all__ = [
    "NOT_FINITE",
    "Chosen",
    "Place",
    "choose_experts",
    "choose_modules",
    "dequantize_",
    "dequantize_with_",
    "is_finite",
    "quantize_",
    "quantize_modules",
    "replace_module",
    "to_layout_",
]

Filter = Callable[[nn.Module, str], bool]
Format = str | Callable[[str, nn.Module], str | None]
_FormatOf = Callable[[str, nn.Module], str | None]
Model = TypeVar("Model", bound=nn.Module)
register(grouped_experts.__name__)
_LOGGER = logging.getLogger("thunder_moe")
_LAYOUTS = ("auto", *MODULE_LAYOUTS)
# Models with more expert weights than this (a few seconds' work) show a progress bar.
_PROGRESS_WEIGHTS = 2**28


class Place(NamedTuple):
    """Qualified name and family of a module that is replaced, and the number format of its weights."""

    name: str
    family: ExpertFamily
    format: str = NVFP4.name


Chosen = dict[nn.Module, Place]
_Left = dict[nn.Module, tuple[str, str]]  # what is not replaced, its qualified name and why


@torch.inference_mode(False)  # buffers of an inference mode could not be loaded into outside of it
@torch.no_grad()
def quantize_(
    model: Model,
    *,
    filter: Filter | None = None,
    linears: bool | Filter = False,
    format: Format = "nvfp4",
    scale_search: str | None = None,
    layout: str = "auto",
) -> Model:
    """Replaces the experts of a model with their NVFP4 (or MXFP8) form, in place, and where asked to its dense layers.

    Knows `GroupedMLP`, `GroupedSwiGLU` and `GroupedLinear`, whose biases stay as they are, and the experts modules of
    transformers' models (`integrations.huggingface.experts.expert_blocks` lists them). The 16-bit weights are freed
    module by module. Modules and weights that are tied stay tied. The NVFP4 tensors are buffers: in the state dict,
    frozen, moved by ``model.to``. The logger "thunder_moe" lists each replaced module at level INFO.

    Replaces only modules without customization. A customized module stays 16-bit as a whole, and the logger says at
    level WARNING which and why: a subclass, a forward or another method replaced on the instance, hooks of torch
    (accelerate's on transformers' experts are kept), a parametrization, other children, parameters or buffers than its
    class has (LoRA), a parameter of another type than ``nn.Parameter`` (DTensor, but for experts that transformers 5.23
    has shared among processes by expert or tensor parallelism: each process quantizes its part, and all of them call
    this), a ``module.compile()``, a wrapper around it that would keep using the 16-bit module (PEFT's, torch.compile of
    the module itself, thunder.jit of a module that holds it). Of transformers' experts, subclasses are replaced when
    they have the forward of transformers' interface; their own gate function is kept. With a `filter` that declines
    such a `GroupedSwiGLU` and takes its projections, those without customization are replaced one by one.

    With `linears` each `nn.Linear` becomes a `NVFP4Linear`: attention's projections, shared experts, dense MLPs, head.
    Those that the source of their parent's forward calls with the same tensor (q, k and v; gate and up) are computed at
    once: their weights are stacked in a child "qkv_proj" or "gate_up_proj" of their parent, and in their places are
    modules that take their part of its result. Routers and gates are never replaced. A head that is tied to the
    embedding stays 16-bit, as does any weight that another module has, too, or that its parent reads itself. The logger
    says at level INFO which stay and why.

    Args:
        model: any module that holds experts, or with `linears` dense layers.
        filter: called with each candidate and its qualified name; False leaves it 16-bit. When it declines a
            `GroupedSwiGLU` it is asked about each of its three projections.
        linears: whether dense layers become 4-bit, too. True: those that are faster then at 1 to 64 rows on the device
            where the weights are (by their size), but for encoders of images and sound. Or a function that is called
            with each `nn.Linear` and its qualified name; False leaves it 16-bit, True takes it however small it is.
            From how many rows on the layers taken are slower, by measurements, the logger says at level INFO.
        format: the number format of the weights: "nvfp4" (4.5 bits a weight), or "mxfp8" (8.25 bits, nearly lossless).
            Or a function that is called with the qualified name of each candidate and the module, and names the format
            of its weights; None leaves it 16-bit, as a `filter` does. What is then asked about, the projections of a
            `GroupedSwiGLU`, is the same. Dense layers that read the same rows are stacked if they have one format.
        scale_search: as in `nvfp4.quantize`: "mse" tries a few scales per block for about 1 dB less noise; of the
            weights in NVFP4.
        layout: of the weights in memory. "auto": for each the one that the default kernels of its device prefer,
            "tiled_64x64" on a CUDA device of compute capability 9.0 if out_features (of gate and up together) and
            in_features are multiples of 64, else "linear". Or one of these for all. State dicts are the same.

    Returns:
        The same model.

    Raises:
        ValueError: nothing to quantize, or nothing that can be (the message names what there is, and why not), an
            unknown format, in_features that are no multiple of 16 (of 32 for MXFP8), a dtype other than bfloat16,
            float16 and float32, NaN or Inf, no data (the "meta" device), gate and up on several devices, two tied
            weights of which only one is taken or can be, or that are to have two formats, an unknown layout, or one
            that a weight's shape does not fit. The model is unchanged then.
        TypeError: the parent of transformers' experts is not the layer that calls them, or `linears` is neither a bool
            nor a function; unchanged likewise.

    Everything that can be checked is, before the first module is replaced. An error that cannot be foreseen (out of
    memory, an interrupt) leaves the first modules quantized and the others 16-bit: the model still computes, and
    another call quantizes the rest.
    """
    run, chosen = choose_modules(
        model, filter=filter, linears=linears, format=format, scale_search=scale_search, layout=layout
    )
    quantize_modules(model, chosen, run, "quantizing experts" if linears is False else "quantizing")
    return model


def choose_modules(
    model: nn.Module,
    *,
    filter: Filter | None = None,
    linears: bool | Filter = False,
    format: Format = "nvfp4",
    scale_search: str | None = None,
    layout: str = "auto",
    kept_linears: Filter | None = None,
    device_of: Callable[[nn.Module], torch.device] | None = None,
    required: bool = True,
) -> tuple[Quantization, Chosen]:
    """What `quantize_` does ahead of any change: finds the modules that it is going to replace, and checks them.

    Args:
        model: as in `quantize_`, whose options the next five are.
        filter: see there.
        linears: see there.
        format: see there.
        scale_search: see there.
        layout: see there.
        kept_linears: says which dense layers stay 16-bit, of those that `linears` takes.
        device_of: of a model on "meta" whose weights are still to be loaded: where those of a module are going to be.
            Nothing is logged then.
        required: whether it is an error that nothing is chosen.

    Returns:
        What the conversions need, and the modules with their places.

    Raises:
        ValueError: as `quantize_`.
        TypeError: as `quantize_`.
    """
    require_module(model)
    format_of = _format_of(format)
    packs: dict[str, Callable[[Tensor], Any]] = {name: partial(quantize_to, name) for name in FORMATS}
    pack = packs[NVFP4.name] = partial(quantize, scale_search=scale_search)
    # A wrong name is an error before any change.
    pack(torch.zeros(1, 1, NVFP4.block_size, dtype=torch.float32, device="cpu"))
    if isinstance(format, str) and scale_search is not None:
        FORMATS[format].check_quantizable(torch.zeros(1, 1, FORMATS[format].block_size), scale_search)
    _require_layout(layout)
    if not (isinstance(linears, bool) or callable(linears)):
        raise TypeError(f"linears: got {linears!r}, wanted a bool, or a function of a module and its name")
    families: list[ExpertFamily] = families_of(model)
    if linears is not False:
        families.append(DenseLinears(model, linears, device_of, kept_linears, format_of))
    chosen, left = _choose(model, filter, families, format_of)
    if chosen or left or required:
        _check_choice(model, chosen, left, families, loaded=device_of is None, required=required)
    formats = {module: packs[place.format] for module, place in chosen.items() if place.format != NVFP4.name}
    run = Quantization(pack, layout, packs=WeakKeyDictionary(formats))
    for family in families:
        family.prepare((module for module, place in chosen.items() if place.family is family), run)
    _check_layout(layout, chosen, run)
    return run, chosen


@torch.inference_mode(False)
@torch.no_grad()
def quantize_modules(model: nn.Module, chosen: Chosen, run: Quantization, label: str) -> None:
    """Replaces what `choose_modules` has found; `chosen` is empty afterwards."""
    try:
        _swap(model, chosen, lambda module, family: family.convert(module, run.of(module)), label)
    finally:  # what was replaced before an interrupt is saved as such, too
        for family in families_of(model):
            family.finish(model)


def dequantize_(model: Model) -> Model:
    """The inverse of `quantize_`: 16-bit modules with the dequantized weights (the rounding to 4 bits remains).

    Each weight has the dtype (or that of a later ``model.to(dtype)``) and the requires_grad that it had. Modules that
    have anything of their own (hooks, wrapped projections, ..., as in `quantize_`) stay 4-bit, which is logged, and so
    do those that are offloaded.

    Raises:
        ValueError: the model holds no NVFP4 modules, or none that can be replaced; it is unchanged then.
    """
    return dequantize_with_(model, {})


@torch.inference_mode(False)
@torch.no_grad()
def dequantize_with_(model: Model, needed: Mapping[str, nn.Module], *, only: bool = False) -> Model:
    """`dequantize_`, and a ValueError, which leaves the model unchanged, where one of `needed` (4-bit linears, by
    name) would stay as it is. With `only` all other modules stay as they are."""
    require_module(model)
    families: list[ExpertFamily] = [*families_of(model), DenseLinears()]
    chosen: Chosen = {}
    left: _Left = {}
    outside = wrapped(model)

    def take(module: nn.Module, name: str) -> bool:
        family = next((family for family in families if family.match_quantized(module)), None)
        if family is not None and only and module not in needed.values():
            return False
        if family is not None:
            _sort(module, Place(name, family), outside, chosen, left)
        return family is not None

    _walk(model, take)
    for module in list(chosen):
        if has_hook(module) and any(buffer.is_meta for buffer in module.buffers()):
            left[module] = chosen.pop(module).name, "its weights are offloaded"
    for whole, (where, reason) in list(left.items()):
        for module in whole.modules():
            if module in chosen:
                left[module] = chosen.pop(module).name, f"it is a part of {where!r}, which stays 4-bit: {reason}"
    if not chosen and not left:
        raise ValueError(f"model: found no NVFP4 modules in {type(model).__name__}, nothing to dequantize")
    _refuse_root(model, chosen)
    replaced = {part for module in chosen for part in module.modules()}
    for name, linear in needed.items():
        if linear not in replaced:
            why = next((reason for whole, (_, reason) in left.items() if linear in whole.modules()), "it is unknown")
            raise ValueError(f"model: {name} cannot be replaced by a 16-bit module: {why}")
    _report(model, chosen, left, "4-bit")
    memo: dict[Any, Any] = {}
    _swap(model, chosen, lambda module, family: family.restore(module, memo), "dequantizing")
    for family in families:
        family.finish(model)
    return model


@torch.inference_mode(False)
@torch.no_grad()
def to_layout_(model: Model, layout: str = "auto") -> Model:
    """Lays the weights of a quantized model out for other kernels, exactly, in place.

    For quantized models that are to run on other kernels, or that were quantized with a layout of their own and have
    moved to another device (those of layout "auto" lay themselves out). The modules get other memory: compiled models
    compile again, state dicts that were taken before keep their own, CUDA graphs have to be captured again. The buffers
    tell their layout by their shapes, so nothing reads one layout as another.

    Args:
        model: a module that holds NVFP4 modules.
        layout: as in `quantize_`: "auto" (from now on, wherever it moves), "linear" or "tiled_64x64".

    Returns:
        The same model.

    Raises:
        ValueError: an unknown layout, or one that a weight's shape does not fit, or the model holds no NVFP4 modules.
            The model is unchanged then.
    """
    require_module(model)
    _require_layout(layout)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Module)}
    if not linears:
        raise ValueError(f"model: found no NVFP4 modules in {type(model).__name__}, nothing to lay out")
    wanted = {}
    for name, module in linears.items():
        n, k = module.out_features, module.in_features
        wanted[module] = resolve_layout(layout, module.qdata.device, n, k, module.format)
        _require_fit(wanted[module], name, n, k, module.format)
    # Modules that share memory, even through different buffers, share the new memory. All keep the old until the first
    # is converted.
    shared: dict[tuple[Any, ...], list[NVFP4Module]] = defaultdict(list)
    for module, own in wanted.items():
        module.auto_layout = layout == "auto"
        if module.layout != own:
            shared[tuple(_memory(buffer) for buffer in module.buffers(recurse=False))].append(module)
    for modules in shared.values():
        weight = lay_out(modules[0].packed_weight, wanted[modules[0]])
        for module in modules:
            module.set_weight(weight)
    return model


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Identifies the memory of a living tensor."""
    if tensor.is_meta:
        return (id(tensor),)
    return tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def choose_experts(
    model: nn.Module, filter: Filter | None, families: list[ExpertFamily]
) -> dict[nn.Module, ExpertFamily]:
    """The modules that `quantize_` would replace, with their families.

    Raises:
        ValueError: as `quantize_`.
    """
    require_module(model)
    chosen, left = _choose(model, filter, families)
    _check_choice(model, chosen, left, families)
    return {module: place.family for module, place in chosen.items()}


def _format_of(format: Format) -> _FormatOf:
    """The option `format` as a function that names only formats that there are.

    Raises:
        ValueError: it is a name of none; the function raises it likewise.
        TypeError: it is neither a name nor a function.
    """
    if isinstance(format, str):
        name = find_format(format).name
        return lambda *_: name
    if not callable(format):
        raise TypeError(f"format: got {format!r}, wanted one of {tuple(FORMATS)}, or a function of a name and a module")

    def checked(name: str, module: nn.Module) -> str | None:
        found = format(name, module)
        if found is not None and not (isinstance(found, str) and found in FORMATS):
            raise ValueError(f"format: got {found!r} for {name!r}, wanted one of {tuple(FORMATS)}, or None")
        return found

    return checked


def _in_nvfp4(name: str, module: nn.Module) -> str | None:
    return NVFP4.name


def _choose(
    model: nn.Module, filter: Filter | None, families: list[ExpertFamily], format_of: _FormatOf = _in_nvfp4
) -> tuple[Chosen, _Left]:
    """The blocks to convert and the linears outside of them, and those that have to stay as they are."""
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: got {filter!r}, wanted a function of a module and its name")
    chosen: Chosen = {}
    left: _Left = {}
    outside = wrapped(model)
    declined: dict[nn.Module, str] = {}

    def take(module: nn.Module, name: str) -> bool:
        family = next((family for family in families if family.match(module)), None)
        if family is None:
            return False
        if isinstance(family, DenseLinears):
            format: str | None = family.format_of(module)
        else:
            format = format_of(name, module) if filter is None or filter(module, name) else None
        if format is None:
            declined[module] = name
            return False
        _sort(module, Place(name, family, format), outside, chosen, left)
        return True

    _walk(model, take)
    for block, (name, *_) in chosen.items():
        for module in block.modules():
            if module in declined:
                raise ValueError(f"filter: took {name!r} but not {declined[module]!r}, which is a part of it")
    return chosen, left


def _walk(
    module: nn.Module, take: Callable[[nn.Module, str], bool], name: str = "", seen: set[nn.Module] | None = None
) -> None:
    """Calls `take(module, name)` for each module once, and for what is in it unless that returned True. So it meets the
    parts of a block that are elsewhere in the model, too, wherever they come first."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    if not take(module, name):
        for child_name, child in module._modules.items():
            if child is not None:
                _walk(child, take, f"{name}.{child_name}" if name else child_name, seen)


def _sort(module: nn.Module, place: Place, outside: dict[nn.Module, str], chosen: Chosen, left: _Left) -> None:
    """Adds the module to `chosen`, or to `left` when a wrapper around it or a customization prevents replacement."""
    reason = outside.get(module) or place.family.obstacle(module)
    if reason is None:
        chosen[module] = place
    else:
        left[module] = place.name, reason


def _report(model: nn.Module, chosen: Chosen, left: _Left, bits: str, required: bool = True) -> None:
    """Logs the modules that are not replaced.

    Raises:
        ValueError: that is all there is, and something is `required`.
    """
    reasons = [f"{name or 'the model'} ({type(module).__name__}): {why}" for module, (name, why) in left.items()]
    if not chosen and required:
        raise ValueError(f"model: nothing in {type(model).__name__} can be replaced; {'; '.join(reasons)}")
    for reason in reasons:
        _LOGGER.warning("stays %s: %s", bits, reason)


def _check_choice(
    model: nn.Module,
    chosen: Chosen,
    left: _Left,
    families: list[ExpertFamily],
    *,
    loaded: bool = True,
    required: bool = True,
) -> None:
    if not chosen and not left:
        experts = ", or ".join(dict.fromkeys(family.description for family in families))
        unknown = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Experts")})
        others = f"; it has {', '.join(unknown)}" if unknown else ""
        raise ValueError(
            f"model: found no {experts} to quantize in {type(model).__name__}"
            f" (none there, quantized already, or all declined by the filter{others})"
        )
    _refuse_root(model, chosen)
    names: dict[nn.Parameter, str] = {}
    formats: dict[nn.Parameter, str] = {}
    for module, (name, family, format) in chosen.items():
        weights = family.weights(module)
        for parameter, _ in weights:
            if formats.setdefault(parameter, format) != format:
                tied = f"which is tied to {names[parameter]!r} in {formats[parameter]!r}"
                raise ValueError(f"format: got {format!r} for {name!r}, {tied}")
            names[parameter] = name
        problems = (_problem_of(weight, loaded, BLOCK_FORMATS[format]) for _, weight in weights)
        problem = next(filter(None, problems), None)
        problem = family.agree(module, problem) if loaded else problem
        if problem is not None:
            raise ValueError(f"model: {name!r} {problem}")
        devices = sorted({str(weight.device) for _, weight in weights})
        if len(devices) > 1:
            raise ValueError(f"model: {name!r} has weights on {' and '.join(devices)}, wanted them on one device")
    covered = {inner for module in chosen for inner in module.modules()}
    why = {inner: reason for module, (_, reason) in left.items() for inner in module.modules()}
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
                chosen[child].family.check_place(module, child)
    if loaded or not chosen:
        _report(model, chosen, left, "16-bit", required)


def _problem_of(weight: Tensor, loaded: bool, format: BlockFormat) -> str | None:
    """What keeps a weight (E, N, K) from being quantized."""
    if weight.ndim != 3:
        return f"has a weight of shape {tuple(weight.shape)}, wanted three dimensions"
    if weight.dtype not in WEIGHT_DTYPES:
        return f"has a weight of {weight.dtype}, wanted one of {WEIGHT_DTYPES}"
    if weight.is_meta and loaded:
        return "is on the meta device: load its weights, then quantize"
    if weight.shape[-1] % format.block_size:
        return f"has in_features {weight.shape[-1]}, wanted a multiple of {format.block_size}"
    return None if not loaded or is_finite(weight) else NOT_FINITE


NOT_FINITE = "has NaN or Inf in a weight, wanted finite values"


def is_finite(weight: Tensor) -> bool:
    """Whether a weight has neither NaN nor Inf."""
    return bool(torch.isfinite(torch.stack([weight.amin(), weight.amax()])).all())


def _check_layout(layout: str, chosen: Chosen, run: Quantization) -> None:
    for module, (name, family, format) in chosen.items():
        for n, k in family.sizes(module, run):
            if layout != "auto":  # which fits all
                _require_fit(layout, name, n, k, BLOCK_FORMATS[format])


def _require_layout(layout: str) -> None:
    if layout not in _LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, wanted one of {_LAYOUTS}")


def _require_fit(layout: str, name: str, n: int, k: int, format: BlockFormat = NVFP4) -> None:
    needs = layout_fits(n, k, layout, format)
    if needs is not None:
        raise ValueError(
            f"layout: got {layout!r} for {name!r}, which has a weight of out_features {n} and in_features {k},"
            f" wanted {needs}"
        )


def _refuse_root(model: nn.Module, chosen: Chosen) -> None:
    if model in chosen:
        raise ValueError(
            f"model: got a bare {type(model).__name__}, which cannot be replaced in place: pass a module that holds it"
        )


def _swap(
    model: nn.Module, chosen: Chosen, replace: Callable[[nn.Module, ExpertFamily], nn.Module], label: str
) -> None:
    """Puts `replace(module, family)` into every parent of each module, and frees the old one at once; a bar on big
    models."""
    places = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children gives a child of two names once
            if child is not None and child in chosen:  # others would keep the blocks above them alive
                places[child].append((parent, name))
    weights = sum(tensor.numel() for module in chosen for tensor in _tensors(module))
    modules = _blocks_first(chosen)
    chosen.clear()
    modules.reverse()
    bar = progress_bar(
        total=len(modules), desc=label, unit="module", disable=len(modules) == 1 or weights < _PROGRESS_WEIGHTS
    )
    with bar:
        while modules:
            module, place = modules.pop()
            replace_module(module, place, places.pop(module), replace, label)
            del module
            bar.update()


def replace_module(
    module: nn.Module,
    place: Place,
    parents: Iterable[tuple[nn.Module, str]],
    replace: Callable[[nn.Module, ExpertFamily], nn.Module],
    label: str,
) -> nn.Module:
    """Puts `replace(module, family)` into each of the parents, and logs its sizes.

    Args:
        module: what is replaced.
        place: its qualified name and family.
        parents: of the module, each with its name there.
        replace: makes the new module.
        label: of the line in the log.

    Returns:
        The new module.
    """
    where, family, _ = place
    before, kind = sum(tensor.nbytes for tensor in _tensors(module)), type(module).__name__
    new = replace(module, family)
    for parent, name in parents:
        family.put(parent, name, new)
    after = sum(tensor.nbytes for tensor in _tensors(new))
    sizes = f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB"
    detail = f"({new.extra_repr()})" if new.extra_repr() else ""
    _LOGGER.info("%s: %s %s -> %s%s, %s", label, where, kind, new._get_name(), detail, sizes)
    return new


def _blocks_first(chosen: Chosen) -> list[tuple[nn.Module, Place]]:
    """Those that are parts of others come last: a block is converted while its parts are what it knows."""
    parts = {part for module in chosen for part in module.modules() if part is not module}
    return sorted(chosen.items(), key=lambda item: item[0] in parts)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]

"""quantize_(model) and dequantize_(model): swap expert modules for their NVFP4 forms in place, and back; to_layout_.
Called by users; calls nn's modules, nvfp4, kernels.select for the layout, and integrations.transformers where the model
holds modules of its.
"""

from __future__ import annotations

import importlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from thunder_moe.kernels.select import lay_out, resolve_layout
from thunder_moe.nn import MODULE_LAYOUTS, GroupedLinear, GroupedSwiGLU, NVFP4GroupedLinear, NVFP4GroupedSwiGLU
from thunder_moe.nvfp4 import BLOCK_SIZE, NVFP4Weight, dequantize, quantize
from thunder_moe.nvfp4_layouts import layout_fits

__all__ = ["dequantize_", "quantize_", "to_layout_"]

Filter = Callable[[nn.Module, str], bool]
Model = TypeVar("Model", bound=nn.Module)
_LOGGER = logging.getLogger("thunder_moe")
# Packages of Hugging Face models: transformers, and transformers_modules for the code that comes with a checkpoint.
_FOREIGN = ("transformers", "thunder_moe.integrations.transformers")
_LAYOUTS = ("auto", *MODULE_LAYOUTS)
# Models with more expert weights than this (a few seconds' work) show a progress bar.
_PROGRESS_WEIGHTS = 2**28


@torch.no_grad()
def quantize_(
    model: Model, *, filter: Filter | None = None, scale_search: str | None = None, layout: str = "auto"
) -> Model:
    """Replaces the experts of a model by their NVFP4 form, in place.

    Knows `GroupedSwiGLU` and `GroupedLinear`, and the experts modules of transformers' models
    (`integrations.transformers.expert_blocks` lists them). The 16-bit weights are freed module by module. Modules and
    weights that are tied stay tied. The NVFP4 tensors are buffers: in the state dict, frozen, moved by ``model.to``.
    The logger "thunder_moe" tells at level INFO what became of each layer.

    Args:
        model: any module that holds experts.
        filter: called with each candidate and its qualified name; False leaves it 16-bit. When it declines a
            `GroupedSwiGLU` it is asked about each of its three projections.
        scale_search: as in `nvfp4.quantize`: "mse" tries a few scales per block for about 1 dB less noise.
        layout: how the weights lie in memory. "auto": each as the default kernels read it best where it is now,
            "tiled_64x64" on a CUDA device of compute capability 9.0 if out_features (of gate and up together) and
            in_features are multiples of 64, else "linear". Or one of these for all, or "humming" for the kernels of
            humming-kernels (CUDA), which wants out_features of a multiple of 128 and in_features of 32. State dicts
            are the same.

    Returns:
        The same model.

    Raises:
        ValueError: nothing to quantise, in_features that are no multiple of 16, NaN or Inf, no data (the "meta"
            device), a filter that takes one of two tied weights, an unknown layout, or one that a weight's shape does
            not fit. The model is unchanged then.
        TypeError: experts of transformers hang in a layer that does not call them as its own do; unchanged likewise.
    """
    pack = partial(quantize, scale_search=scale_search)
    pack(torch.zeros(1, 1, BLOCK_SIZE))  # a wrong name is an error before any change
    _require_layout(layout)
    foreign = _integration(model)
    chosen = dict(_choose(model, filter, foreign))
    _check_choice(model, chosen, foreign)
    fusible = _fusible(chosen)
    _check_layout(layout, chosen, fusible, foreign)
    packed: dict[tuple[int, ...], NVFP4Weight] = {}
    memo: dict[int, Any] = {}

    def convert(*linears: GroupedLinear) -> NVFP4GroupedLinear:
        # All weights live when the first is converted, so an id names one weight for the whole run.
        key = tuple(id(linear.weight) for linear in linears)
        if key not in packed:
            stacked = NVFP4Weight.concatenate(*(pack(linear.weight) for linear in linears))
            packed[key] = lay_out(stacked, layout)
        weight = linears[0].weight
        module = NVFP4GroupedLinear(packed[key], weight_dtype=weight.dtype, weight_requires_grad=weight.requires_grad)
        return module.train(linears[0].training)

    def replace(module: nn.Module) -> nn.Module:
        if isinstance(module, GroupedLinear):
            return convert(module)
        if not isinstance(module, GroupedSwiGLU):
            assert foreign is not None
            return foreign.quantized_experts(module, memo, pack, layout)
        if module in fusible:
            gate_up = convert(module.gate_proj, module.up_proj)
            return NVFP4GroupedSwiGLU(gate_up, convert(module.down_proj)).train(module.training)
        for name, linear in _projections(module):
            setattr(module, name, convert(linear))
        return module

    _swap(model, chosen, replace, "quantising experts", foreign)
    return model


@torch.no_grad()
def dequantize_(model: Model) -> Model:
    """The inverse of `quantize_`: 16-bit modules with the dequantised weights (the rounding to 4 bits remains).

    Raises:
        ValueError: the model holds no NVFP4 modules.
    """
    foreign = _integration(model)
    kinds = (NVFP4GroupedSwiGLU, NVFP4GroupedLinear, *((foreign.NVFP4Experts,) if foreign is not None else ()))
    chosen: dict[nn.Module, str] = {}
    inner: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, kinds) and module not in inner:
            chosen[module] = name
            inner.update(module.modules())
    if not chosen:
        raise ValueError(f"model: found no NVFP4 modules in {type(model).__name__}, nothing to dequantise")
    _refuse_root(model, chosen)
    parameters: dict[tuple[int, int], list[nn.Parameter]] = {}
    memo: dict[int, nn.Parameter] = {}

    def convert(module: NVFP4GroupedLinear, parts: int) -> list[GroupedLinear]:
        key = (id(module.qdata), parts)
        if key not in parameters:
            rows = dequantize(module.nvfp4_weight, module.weight_dtype).chunk(parts, 1)
            parameters[key] = [
                nn.Parameter(part.contiguous(), requires_grad=module.weight_requires_grad) for part in rows
            ]
        linears = []
        for parameter in parameters[key]:
            experts, n, k = parameter.shape
            linear = GroupedLinear(experts, k, n, device="meta", dtype=module.weight_dtype)
            linear.weight = parameter
            linears.append(linear.train(module.training))
        return linears

    def replace(module: nn.Module) -> nn.Module:
        if isinstance(module, NVFP4GroupedLinear):
            return convert(module, 1)[0]
        if foreign is not None and isinstance(module, foreign.NVFP4Experts):
            return module.dequantized(memo)
        assert isinstance(module, NVFP4GroupedSwiGLU)
        gate, up = convert(module.gate_up_proj, 2)
        (down,) = convert(module.down_proj, 1)
        block = GroupedSwiGLU(
            gate.num_experts, gate.in_features, gate.out_features, device="meta", dtype=gate.weight.dtype
        )
        block.gate_proj, block.up_proj, block.down_proj = gate, up, down
        return block.train(module.training)

    _swap(model, chosen, replace, "dequantising experts", foreign)
    return model


@torch.no_grad()
def to_layout_(model: Model, layout: str = "auto") -> Model:
    """Lays the weights of a quantised model out for other kernels, exactly, in place and at the same addresses.

    For quantised models that have moved to another device, or are to run on other kernels. Compiled models compile
    again; CUDA graphs have to be captured again, they would read the new order in the old way.

    Args:
        model: a module that holds NVFP4 modules.
        layout: as in `quantize_`: "auto", "linear", "humming" or "tiled_64x64".

    Returns:
        The same model.

    Raises:
        ValueError: an unknown layout, or one that a weight's shape does not fit, or the model holds no NVFP4 modules.
            The model is unchanged then.
    """
    _require_layout(layout)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, NVFP4GroupedLinear)}
    if not linears:
        raise ValueError(f"model: found no NVFP4 modules in {type(model).__name__}, nothing to lay out")
    wanted = {}
    for name, module in linears.items():
        n, k = module.out_features, module.in_features
        wanted[module] = resolve_layout(layout, module.qdata.device, n, k)
        _require_fit(wanted[module], name, n, k)
    done: set[int] = set()  # tied modules share their tensors
    for module, own in wanted.items():
        if module.layout != own and id(module.qdata) not in done:
            done.add(id(module.qdata))
            weight = module.nvfp4_weight.to_layout(own)
            module.qdata.copy_(weight.qdata)
            module.scale.copy_(weight.scale)
        module.layout = own
    return model


def _integration(model: nn.Module) -> ModuleType | None:
    """integrations.transformers, if anything in the model comes from there or from code written for it."""
    if not any(type(module).__module__.startswith(_FOREIGN) for module in model.modules()):
        return None
    return importlib.import_module("thunder_moe.integrations.transformers")


def _choose(model: nn.Module, filter: Filter | None, foreign: ModuleType | None) -> Iterator[tuple[nn.Module, str]]:
    """(module, name) of all blocks to convert, and of the linears outside of them."""
    covered: set[nn.Module] = set()
    blocks = set(foreign.expert_blocks(model).values()) if foreign is not None else set()
    for name, module in model.named_modules():
        if module in covered or not (isinstance(module, GroupedSwiGLU | GroupedLinear) or module in blocks):
            continue
        if filter is None or filter(module, name):
            covered.update(module.modules())
            yield module, name


def _check_choice(model: nn.Module, chosen: dict[nn.Module, str], foreign: ModuleType | None) -> None:
    if not chosen:
        experts = "experts of transformers" if foreign is not None else "GroupedLinear or GroupedSwiGLU"
        unknown = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Experts")})
        others = f"; it has {', '.join(unknown)}" if unknown else ""
        raise ValueError(
            f"model: found no {experts} to quantise in {type(model).__name__}"
            f" (none there, quantised already, or all declined by the filter{others})"
        )
    _refuse_root(model, chosen)
    names: dict[nn.Parameter, str] = {}
    for module, name in chosen.items():
        for parameter, weight in _weights(module, foreign):
            names[parameter] = name
            if weight.is_meta:
                raise ValueError(f"model: {name!r} is on the meta device: load its weights, then quantise")
            if weight.shape[-1] % BLOCK_SIZE:
                k = weight.shape[-1]
                raise ValueError(f"model: {name!r} has in_features {k}, wanted a multiple of {BLOCK_SIZE}")
            if not bool(torch.isfinite(torch.stack([weight.amin(), weight.amax()])).all()):
                raise ValueError(f"model: {name!r} has NaN or Inf in a weight, wanted finite values")
    covered = {inner for module in chosen for inner in module.modules()}
    for name, module in model.named_modules():
        for parameter in () if module in covered else module.parameters(recurse=False):
            if parameter in names:
                raise ValueError(f"filter: took {names[parameter]!r} but not {name!r}, which is tied to its weight")
        if foreign is not None:
            for child in module.children():
                if child in chosen and not isinstance(child, GroupedSwiGLU | GroupedLinear):
                    foreign.check_place(module, child)


def _check_layout(
    layout: str, chosen: dict[nn.Module, str], fusible: set[nn.Module], foreign: ModuleType | None
) -> None:
    for module, name in chosen.items():
        for parameter, weight in _weights(module, foreign):
            _, n, k = weight.shape
            if isinstance(module, GroupedSwiGLU) and module in fusible and parameter is not module.down_proj.weight:
                n *= 2  # gate and up become one
            _require_fit(layout, name, n, k)  # "auto" fits all


def _require_layout(layout: str) -> None:
    if layout not in _LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, wanted one of {_LAYOUTS}")


def _require_fit(layout: str, name: str, n: int, k: int) -> None:
    needs = layout_fits(n, k, layout)
    if needs is not None:
        raise ValueError(
            f"layout: got {layout!r} for {name!r}, which has a weight of out_features {n} and in_features {k},"
            f" wanted {needs}"
        )


def _refuse_root(model: nn.Module, modules: dict[nn.Module, str]) -> None:
    if model in modules:
        raise ValueError(
            f"model: got a bare {type(model).__name__}, which cannot be replaced in place: pass a module that holds it"
        )


def _fusible(chosen: dict[nn.Module, str]) -> set[nn.Module]:
    """The blocks whose gate and up projections can become one: neither weight is tied to another place alone."""
    partners: dict[nn.Parameter, set[tuple[int, ...]]] = defaultdict(set)
    for module in chosen:
        for linear in _linears(module):
            key: tuple[int, ...] = (id(linear.weight),)
            if isinstance(module, GroupedSwiGLU) and linear is not module.down_proj:
                key = (id(module.gate_proj.weight), id(module.up_proj.weight))
            partners[linear.weight].add(key)
    blocks = (module for module in chosen if isinstance(module, GroupedSwiGLU))
    return {b for b in blocks if len(partners[b.gate_proj.weight]) == len(partners[b.up_proj.weight]) == 1}


def _projections(block: GroupedSwiGLU) -> list[tuple[str, GroupedLinear]]:
    return [("gate_proj", block.gate_proj), ("up_proj", block.up_proj), ("down_proj", block.down_proj)]


def _linears(module: nn.Module) -> list[GroupedLinear]:
    return [child for child in module.modules() if isinstance(child, GroupedLinear)]


def _weights(module: nn.Module, foreign: ModuleType | None) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters to quantise, each with its view as (E, N, K)."""
    if isinstance(module, GroupedSwiGLU | GroupedLinear):
        return [(linear.weight, linear.weight) for linear in _linears(module)]
    assert foreign is not None
    return foreign.expert_weights(module)


def _swap(
    model: nn.Module,
    chosen: dict[nn.Module, str],
    replace: Callable[[Any], nn.Module],
    label: str,
    foreign: ModuleType | None,
) -> None:
    """Puts `replace(module)` wherever the module hangs, dropping the old one at once; a bar on big models."""
    put = foreign.put_experts if foreign is not None else setattr
    places = defaultdict(list)
    for parent in model.modules():
        for name, child in parent.named_children():
            places[child].append((parent, name))
    weights = sum(tensor.numel() for module in chosen for tensor in _tensors(module))
    modules = [*chosen.items()]
    chosen.clear()
    modules.reverse()
    bar = tqdm(total=len(modules), desc=label, unit="module", disable=len(modules) == 1 or weights < _PROGRESS_WEIGHTS)
    with bar:
        while modules:
            module, where = modules.pop()
            before, kind = sum(tensor.nbytes for tensor in _tensors(module)), type(module).__name__
            new = replace(module)
            for parent, name in places.pop(module):
                put(parent, name, new)
            after = sum(tensor.nbytes for tensor in _tensors(new))
            sizes = f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB"
            detail = f"({new.extra_repr()})" if new.extra_repr() else ""
            _LOGGER.info("%s: %s %s -> %s%s, %s", label, where, kind, type(new).__name__, detail, sizes)
            del module, new
            bar.update()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]

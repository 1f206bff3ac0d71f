"""quantize_(model) and dequantize_(model): swap grouped modules for their NVFP4 forms in place, and back.
Called by users; calls nn's modules and nvfp4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from tqdm import tqdm

from thunder_moe.nn import GroupedLinear, GroupedSwiGLU, NVFP4GroupedLinear, NVFP4GroupedSwiGLU
from thunder_moe.nvfp4 import BLOCK_SIZE, NVFP4Weight, dequantize, quantize

__all__ = ["dequantize_", "quantize_"]

Filter = Callable[[nn.Module, str], bool]
Model = TypeVar("Model", bound=nn.Module)
# Models with more expert weights than this (a few seconds' work) show a progress bar.
_PROGRESS_WEIGHTS = 2**28


@torch.no_grad()
def quantize_(model: Model, *, filter: Filter | None = None) -> Model:
    """Replaces every `GroupedSwiGLU` and `GroupedLinear` in a model by its NVFP4 form, in place.

    The 16-bit weights are freed module by module. Modules and weights that are tied stay tied. The NVFP4 tensors are
    buffers: in the state dict, frozen, moved by ``model.to``.

    Args:
        model: any module that holds grouped modules.
        filter: called with each candidate and its qualified name; False leaves it 16-bit. When it declines a
            `GroupedSwiGLU` it is asked about each of its three projections.

    Returns:
        The same model.

    Raises:
        ValueError: nothing to quantise, in_features that are no multiple of 16, NaN or Inf, or a filter that takes
            one of two tied weights. The model is unchanged then.
    """
    chosen = dict(_choose(model, filter))
    _check_choice(model, chosen)
    fusible = _fusible(chosen)
    packed: dict[tuple[int, ...], NVFP4Weight] = {}

    def convert(*linears: GroupedLinear) -> NVFP4GroupedLinear:
        # All weights live when the first is converted, so an id names one weight for the whole run.
        key = tuple(id(linear.weight) for linear in linears)
        if key not in packed:
            packed[key] = NVFP4Weight.concatenate(*(quantize(linear.weight) for linear in linears))
        weight = linears[0].weight
        module = NVFP4GroupedLinear(packed[key], weight_dtype=weight.dtype, weight_requires_grad=weight.requires_grad)
        return module.train(linears[0].training)

    def replace(module: nn.Module) -> nn.Module:
        if isinstance(module, GroupedLinear):
            return convert(module)
        assert isinstance(module, GroupedSwiGLU)
        if module in fusible:
            gate_up = convert(module.gate_proj, module.up_proj)
            return NVFP4GroupedSwiGLU(gate_up, convert(module.down_proj)).train(module.training)
        for name, linear in _projections(module):
            setattr(module, name, convert(linear))
        return module

    _swap(model, list(chosen), replace, "quantising experts")
    return model


@torch.no_grad()
def dequantize_(model: Model) -> Model:
    """The inverse of `quantize_`: 16-bit modules with the dequantised weights (the rounding to 4 bits remains).

    Raises:
        ValueError: the model holds no NVFP4 modules.
    """
    blocks = [module for module in model.modules() if isinstance(module, NVFP4GroupedSwiGLU)]
    inner = {linear for block in blocks for linear in (block.gate_up_proj, block.down_proj)}
    singles = [m for m in model.modules() if isinstance(m, NVFP4GroupedLinear) and m not in inner]
    if not blocks and not singles:
        raise ValueError(f"model: found no NVFP4 modules in {type(model).__name__}, nothing to dequantise")
    _refuse_root(model, [*blocks, *singles])
    parameters: dict[tuple[int, int], list[nn.Parameter]] = {}

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
        assert isinstance(module, NVFP4GroupedSwiGLU)
        gate, up = convert(module.gate_up_proj, 2)
        (down,) = convert(module.down_proj, 1)
        block = GroupedSwiGLU(
            gate.num_experts, gate.in_features, gate.out_features, device="meta", dtype=gate.weight.dtype
        )
        block.gate_proj, block.up_proj, block.down_proj = gate, up, down
        return block.train(module.training)

    _swap(model, [*blocks, *singles], replace, "dequantising experts")
    return model


def _choose(model: nn.Module, filter: Filter | None) -> Iterator[tuple[nn.Module, str]]:
    """(module, name) of all blocks to convert, and of the linears outside of them."""
    covered: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in covered or not isinstance(module, GroupedSwiGLU | GroupedLinear):
            continue
        if filter is None or filter(module, name):
            covered.update(module.modules())
            yield module, name


def _check_choice(model: nn.Module, chosen: dict[nn.Module, str]) -> None:
    if not chosen:
        raise ValueError(
            f"model: found no GroupedLinear or GroupedSwiGLU to quantise in {type(model).__name__}"
            " (none there, quantised already, or all declined by the filter)"
        )
    _refuse_root(model, chosen)
    weights = {linear.weight: name for module, name in chosen.items() for linear in _linears(module)}
    covered = {linear for module in chosen for linear in _linears(module)}
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear) and module not in covered and module.weight in weights:
            raise ValueError(f"filter: took {weights[module.weight]!r} but not {name!r}, which is tied to its weight")
    for weight, name in weights.items():
        if weight.shape[-1] % BLOCK_SIZE:
            raise ValueError(f"model: {name!r} has in_features {weight.shape[-1]}, wanted a multiple of {BLOCK_SIZE}")
        if not bool(torch.isfinite(torch.stack([weight.amin(), weight.amax()])).all()):
            raise ValueError(f"model: {name!r} has NaN or Inf in a weight, wanted finite values")


def _refuse_root(model: nn.Module, modules: dict[nn.Module, str] | list[nn.Module]) -> None:
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


def _swap(model: nn.Module, modules: list[nn.Module], replace: Callable[[nn.Module], nn.Module], label: str) -> None:
    """Puts `replace(module)` wherever the module hangs, dropping the old one at once; a bar on big models."""
    places = defaultdict(list)
    for parent in model.modules():
        for name, child in parent.named_children():
            places[child].append((parent, name))
    weights = sum(module.out_features * module.in_features * module.num_experts for module in modules
                  for module in module.modules() if isinstance(module, GroupedLinear | NVFP4GroupedLinear))  # fmt: skip
    modules.reverse()
    bar = tqdm(total=len(modules), desc=label, unit="module", disable=len(modules) == 1 or weights < _PROGRESS_WEIGHTS)
    with bar:
        while modules:
            module = modules.pop()
            new = replace(module)
            for parent, name in places.pop(module):
                setattr(parent, name, new)
            bar.update()

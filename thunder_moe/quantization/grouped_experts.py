"""The expert family of this package's own modules: GroupedMLP, GroupedSwiGLU and GroupedLinear, to NVFP4 and back.
Called by quantization through families; calls nn, replaceable for what may be replaced, and kernels.select for the
layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn import GroupedLinear, GroupedSwiGLU, NVFP4GroupedLinear, NVFP4GroupedSwiGLU
from thunder_moe.quantization.families import ExpertFamily, Quantization, weight_key
from thunder_moe.quantization.replaceable import customization
from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP

_OPTIONS = ("accumulate_into_main_grad", "delay_wgrad", "recipe")


class GroupedExperts(ExpertFamily):
    """`GroupedSwiGLU`, whose gate and up projections become one 4-bit weight, `GroupedMLP` and `GroupedLinear`."""

    description = "GroupedLinear, GroupedMLP or GroupedSwiGLU"

    def match(self, module: nn.Module) -> bool:
        return isinstance(module, GroupedSwiGLU | GroupedMLP | GroupedLinear)

    def match_quantized(self, module: nn.Module) -> bool:
        return isinstance(module, NVFP4GroupedSwiGLU | NVFP4GroupedMLP | NVFP4GroupedLinear)

    def blocker(self, module: nn.Module) -> str | None:
        if isinstance(module, NVFP4GroupedLinear) and len(module.weight_dtypes) > 1:
            return "it stands for gate and up together, which no GroupedLinear does"
        return customization(module)

    def weights(self, module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        return [(linear.weight, linear.weight) for linear in _linears(module)]

    def prepare(self, modules: Iterable[nn.Module], run: Quantization) -> None:
        run.memo[self] = _fusible(modules)

    def sizes(self, module: nn.Module, run: Quantization) -> list[tuple[int, int]]:
        fused: tuple[GroupedLinear, ...] = ()
        if isinstance(module, GroupedSwiGLU) and module in run.memo[self]:
            fused = module.gate_proj, module.up_proj
        return [
            (linear.out_features * (2 if linear in fused else 1), linear.in_features) for linear in _linears(module)
        ]

    def obstacle_to_recipe(self, module: nn.Module) -> str | None:
        own = [type(each).__name__ for each in _linears(module) if type(each).forward is not GroupedLinear.forward]
        return f"{own[0]} has a forward of its own, which may not read it" if own else None

    def set_recipe(self, module: nn.Module, recipe: str | None) -> None:
        for linear in _linears(module):
            linear.recipe = recipe

    def recipe(self, module: nn.Module) -> str | None:
        return module.recipe if isinstance(module, GroupedLinear) else None

    def convert(self, module: nn.Module, run: Quantization) -> nn.Module:
        if isinstance(module, GroupedLinear):
            return _quantized(run, module)
        if isinstance(module, GroupedMLP):
            gate_up, down = _quantized(run, module.gate_up_proj), _quantized(run, module.down_proj)
            return NVFP4GroupedMLP(gate_up, module.activation, down).train(module.training)
        assert isinstance(module, GroupedSwiGLU)
        if module in run.memo[self]:
            gate_up, down = _quantized(run, module.gate_proj, module.up_proj), _quantized(run, module.down_proj)
            return NVFP4GroupedSwiGLU(gate_up, down).train(module.training)
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(module, name, _quantized(run, getattr(module, name)))
        return module

    def restore(self, module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
        if isinstance(module, NVFP4GroupedLinear):
            (linear,) = _dequantized(module, memo)
            return linear
        if isinstance(module, NVFP4GroupedMLP):
            (gate_up,), (down,) = (_dequantized(linear, memo) for linear in (module.gate_up_proj, module.down_proj))
            sizes = gate_up.num_experts, gate_up.in_features, down.in_features
            mlp = GroupedMLP(*sizes, activation=module.activation, device="meta")
            mlp.gate_up_proj, mlp.down_proj = gate_up, down
            return mlp.train(module.training)
        assert isinstance(module, NVFP4GroupedSwiGLU)
        gate, up = _dequantized(module.gate_up_proj, memo)
        (down,) = _dequantized(module.down_proj, memo)
        block = GroupedSwiGLU(
            gate.num_experts, gate.in_features, gate.out_features, device="meta", dtype=gate.weight.dtype
        )
        block.gate_proj, block.up_proj, block.down_proj = gate, up, down
        return block.train(module.training)


def _quantized(run: Quantization, *linears: GroupedLinear) -> NVFP4GroupedLinear:
    """Return one 4-bit linear of the stacked rows of these."""
    # All parameters are alive when the first is converted, so an id identifies one of them for the whole run.
    weights = [linear.weight for linear in linears]
    key = weight_key(*weights)
    if key not in run.memo:
        run.memo[key] = lay_out(PackedWeight.concatenate(*map(run.pack, weights)), run.layout)
    bias = linears[0].bias if len(linears) == 1 else None
    module = NVFP4GroupedLinear(
        run.memo[key],
        bias,
        weight_dtype=[weight.dtype for weight in weights],
        weight_requires_grad=[weight.requires_grad for weight in weights],
        auto_layout=run.layout == "auto",
    )
    if len(linears) == 1:
        module.options_of_training = tuple((name, getattr(linears[0], name)) for name in _OPTIONS)
    return module.train(linears[0].training)


def _dequantized(module: NVFP4GroupedLinear, memo: dict[Any, Any]) -> list[GroupedLinear]:
    """Return the 16-bit linears that a 4-bit one was made of."""
    key = weight_key(module.qdata)  # all are alive when the first is converted
    if key not in memo:
        weights = zip(module.dequantized(), module.weights_require_grad, strict=True)
        memo[key] = [nn.Parameter(weight, requires_grad=requires_grad) for weight, requires_grad in weights]
    linears = []
    for parameter in memo[key]:
        experts, n, k = parameter.shape
        linear = GroupedLinear(experts, k, n, device="meta", dtype=parameter.dtype)
        linear.weight, linear.bias = parameter, module.bias
        for name, value in module.options_of_training:
            setattr(linear, name, value)
        linears.append(linear.train(module.training))
    return linears


def _linears(module: nn.Module) -> list[GroupedLinear]:
    return [child for child in module.modules() if isinstance(child, GroupedLinear)]


def _fusible(modules: Iterable[nn.Module]) -> WeakSet[nn.Module]:
    """Return the blocks whose gate and up can be fused: neither weight is tied to another module without the other."""
    modules = list(modules)
    partners: dict[nn.Parameter, set[tuple[int, ...]]] = defaultdict(set)
    for module in modules:
        for linear in _linears(module):
            key: tuple[int, ...] = (id(linear.weight),)
            if isinstance(module, GroupedSwiGLU) and linear is not module.down_proj:
                key = (id(module.gate_proj.weight), id(module.up_proj.weight))
            partners[linear.weight].add(key)
    blocks = (module for module in modules if isinstance(module, GroupedSwiGLU))
    return WeakSet(b for b in blocks if len(partners[b.gate_proj.weight]) == len(partners[b.up_proj.weight]) == 1)


FAMILIES = (GroupedExperts(),)

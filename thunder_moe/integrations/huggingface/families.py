"""The expert families of transformers' models: the experts interface, and Llama 4, whose layer is made to route.
Called by quantization through its families, and by quantizer and on_load; calls experts and forms, and llama4
where needed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from thunder_moe.integrations.huggingface import forms
from thunder_moe.integrations.huggingface.experts import NVFP4Experts, expert_weights, quantized_experts
from thunder_moe.integrations.huggingface.routers import RowOrders, fuse_routers, restore_routers
from thunder_moe.integrations.huggingface.saving import mark_quantized
from thunder_moe.integrations.huggingface.sharded_forward import sharding_of
from thunder_moe.kernels.recipes import RECIPES
from thunder_moe.quantization.families import ExpertFamily, Quantization

_LLAMA4 = "transformers.models.llama4.modeling_llama4", "Llama4TextExperts"


class TransformersExperts(ExpertFamily):
    """Modules of transformers' experts interface, or with the same weight layout, and `NVFP4Experts`."""

    description = "experts of transformers"

    def match(self, module: nn.Module) -> bool:
        return forms.has_experts(module)

    def match_quantized(self, module: nn.Module) -> bool:
        return isinstance(module, NVFP4Experts)

    def blocker(self, module: nn.Module) -> str | None:
        return forms.not_plain_experts(module) or _of_no_part(module)

    def problem_on_any_rank(self, module: nn.Module, problem: str | None) -> str | None:
        sharding = sharding_of(module)
        return problem if sharding is None else sharding.problem_on_any_rank(problem)

    def weights(self, module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        return expert_weights(module)

    def put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        super().put(parent, name, module)
        if not isinstance(module, NVFP4Experts):
            restore_routers(parent)
            return
        orders = module.row_orders or RowOrders()
        if fuse_routers(parent, orders):
            module.row_orders = orders

    def convert(self, module: nn.Module, run: Quantization) -> nn.Module:
        return quantized_experts(module, run.memo, run.pack, run.layout)

    def restore(self, module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
        assert isinstance(module, NVFP4Experts)
        return module.dequantized(memo)

    def obstacle_to_recipe(self, module: nn.Module) -> str | None:
        if not forms.has_interface(module):
            return f"{type(module).__name__} does not have transformers' experts interface"
        forward: Any = type(module).forward
        if getattr(forward, "__globals__", {}).get("__name__") != "transformers.integrations.moe":
            return f"{type(module).__name__} has a forward of its own, which does not ask for an experts implementation"
        if parametrize.is_parametrized(module):
            return "its weights are parametrized; call prepare_8bit_training_ before prepare_qat_"
        if any(hasattr(parameter, "device_mesh") for parameter, _ in self.weights(module)):
            return "processes share its weights, wanted whole ones; call fully_shard afterwards"
        return None

    def set_recipe(self, module: nn.Module, recipe: str | None) -> None:
        config: Any = module.config  # one for all layers
        config._experts_implementation = "grouped_mm" if recipe is None else f"thunder_moe_{recipe}"

    def recipe(self, module: nn.Module) -> str | None:
        if self.obstacle_to_recipe(module) is not None:
            return None
        config: Any = module.config
        return next((name for name in RECIPES if config._experts_implementation == f"thunder_moe_{name}"), None)

    def finish(self, model: nn.Module) -> None:
        mark_quantized(model)


class Llama4Experts(TransformersExperts):
    """The experts of Llama 4, whose layer runs all of them on all tokens: with 4-bit ones it is made to route."""

    def match(self, module: nn.Module) -> bool:
        return _is_llama4(type(module))

    def match_quantized(self, module: nn.Module) -> bool:
        return isinstance(module, NVFP4Experts) and _is_llama4(module.experts_class)

    def check_parent(self, parent: nn.Module, module: nn.Module) -> None:
        from thunder_moe.integrations.huggingface.llama4 import check_layer

        check_layer(parent)

    def put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        from thunder_moe.integrations.huggingface.llama4 import check_layer, restore_layer, route_layer

        check_layer(parent)
        if isinstance(module, NVFP4Experts):
            module.row_orders = module.row_orders or RowOrders()
            route_layer(parent, module.row_orders)
        else:
            restore_layer(parent)
        setattr(parent, name, module)


FAMILIES = (Llama4Experts(), TransformersExperts())


def put_experts(parent: nn.Module, name: str, experts: nn.Module) -> None:
    """Make an experts module (`NVFP4Experts`, or the 16-bit one again) a child of the layer that calls it.

    The same as ``setattr(parent, name, experts)``, but for Llama 4: its layer runs all experts on all tokens, and is
    made to route here. Another parent of such experts is a TypeError.
    """
    family = next((each for each in FAMILIES if each.match(experts) or each.match_quantized(experts)), ExpertFamily())
    family.put(parent, name, experts)


def _of_no_part(module: nn.Module) -> str | None:
    """Return why 4-bit weights cannot have this process' part of 16-bit experts; None if they can, or it has all."""
    sharding, form = sharding_of(module), forms.form_of(module)
    if sharding is None or form is None:
        return None
    first, down, *biases = forms.stored_weights(module, form).items()
    if sharding.part.expert_ranks > 1:
        wanted = {name: (0, 1) for name, _ in (first, down, *biases)}
    else:
        if biases or form.interleaved or form.post_norm or (form.gated and form.swiglu is None):
            return f"processes share its features, and it is of the form {form}: use expert parallelism"
        wanted = {first[0]: (1 + form.transposed, 1 + form.gated), down[0]: (2 - form.transposed, 1)}
    for name, parameter in (first, down, *biases):
        placements = [*getattr(parameter, "placements", ())]
        dims = [(placement.dim % parameter.ndim, getattr(placement, "split_factor", 1)) for placement in placements]
        if dims != [wanted[name]]:
            return f"its {name} is shared by processes as {placements}, which is not known for {form}"
    try:
        sharding.part.features(down[1].shape[2 - form.transposed])
    except ValueError as error:
        return str(error)
    return None


def _is_llama4(experts_class: type) -> bool:
    return any((base.__module__, base.__name__) == _LLAMA4 for base in experts_class.__mro__)

"""prepare_8bit_training_ gives the experts of a model an 8-bit recipe for their products, or takes it away.
round_weights_once rounds the weights of a recipe once for all microbatches.
Called by users; calls the families of the model's experts, kernels.select and kernels.rounded_weights.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thunder_moe.formats.checks import require_module
from thunder_moe.kernels.rounded_weights import drop, keep
from thunder_moe.kernels.select import training_products
from thunder_moe.ops.grouped_linear import check_recipe
from thunder_moe.quantization.families import ExpertFamily, families_of
from thunder_moe.weight_cache import local_data

Model = TypeVar("Model", bound=nn.Module)


def prepare_8bit_training_(model: Model, recipe: str | None) -> Model:
    """Lets the experts of a model multiply in 8 bits, forward and backward, in place. Its parameters do not change.

    Modules of this package get the `recipe` of `GroupedLinear`. In a model of transformers, all experts of a
    configuration get the experts implementation "thunder_moe_mxfp8" or "thunder_moe_fp8". Compile afterwards.

    Args:
        model: with `GroupedLinear`, `GroupedMLP` or `GroupedSwiGLU`, or with transformers' experts interface.
        recipe: "mxfp8" or "fp8" (docs/training.md defines them); None for products in 16 bits again. Models of
            transformers then get the experts implementation "grouped_mm".

    Returns:
        The same model.

    Raises:
        ValueError: no such recipe; the model has no 16-bit experts, or experts that cannot have a recipe: of another
            dtype than bfloat16 and float32, a subclass of `GroupedLinear` with its own forward, and in models of
            transformers shared by processes, parametrized (`prepare_qat_`), or without transformers' experts
            interface. The model is unchanged then.
    """
    require_module(model)
    found = {}
    for path, module, family in _experts(model):
        if (reason := family.obstacle_to_recipe(module)) is not None:
            raise ValueError(f"model: {path!r} cannot have an 8-bit recipe: {reason}")
        for parameter, _ in family.weights(module):
            check_recipe(recipe, parameter.dtype)
        found[module] = family
    if not found:
        wanted = ", or ".join(dict.fromkeys(family.description for family in families_of(model)))
        raise ValueError(f"model: found no experts in 16 bits in {type(model).__name__}, wanted {wanted}")
    for module, family in found.items():
        family.set_recipe(module, recipe)
    return model


@contextlib.contextmanager
def round_weights_once(model: nn.Module) -> Iterator[None]:
    """Round the weights that multiply by an 8-bit recipe once, on entry, for every forward and backward inside.

    It is for gradient accumulation: the microbatches belong inside of the ``with`` block, the optimizer's step after
    it. Results have the same bits as without it. It serves all threads, in eager code and in functions that were
    compiled inside or outside. A product after the block rounds its weight again, also in the backward of a forward
    inside. A block inside of another one of the same model adds nothing. docs/training.md says how much memory it
    takes.

    Args:
        model: with experts that have a recipe, `prepare_8bit_training_`.

    Raises:
        ValueError: no experts of the model have a recipe; fully_shard has wrapped a part of it; weights were made under
            ``torch.inference_mode()``; or a compiler traces the block.
        RuntimeError: by a product inside, if its weight was changed in place, and by the step of an optimizer of
            ``torch.optim`` that has a gradient for one of the weights.
    """
    require_module(model)
    if torch.compiler.is_compiling():
        raise ValueError("round_weights_once: got it inside of a compiled function, wanted it around the call")
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # no module is wrapped before it is imported
    wrappers = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    wrapped = next((path for path, module in model.named_modules() if isinstance(module, wrappers)), None)
    if wrapped is not None:
        raise ValueError(
            f"model: {wrapped!r} is sharded by FSDP, which gathers new weights for each forward; wanted a part of the"
            " model without it"
        )
    weights = []
    for _, module, family in _experts(model):
        if (recipe := family.recipe(module)) is not None:
            weights += [(parameter, local_data(view), recipe) for parameter, view in family.weights(module)]
    if not weights:
        raise ValueError(f"model: found no experts with a recipe in {type(model).__name__}, see prepare_8bit_training_")
    if any(each.is_inference() for parameter, weight, _ in weights for each in (parameter, weight)):
        raise ValueError(
            "model: got weights made under torch.inference_mode(), which do not count their changes; wanted others"
        )
    keys, memories = [], {weight.untyped_storage().data_ptr() for _, weight, _ in weights}
    hook = register_optimizer_step_pre_hook(partial(_refuse_step, memories))
    try:
        with torch.no_grad():
            for parameter, weight, recipe in weights:
                for function, *options in training_products(weight.device, recipe).roundings(weight):
                    keys.append(keep(parameter, weight, function, *options))
        yield
    finally:
        hook.remove()
        for key in filter(None, keys):
            drop(key)


def _refuse_step(memories: set[int], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise RuntimeError if an optimizer is going to change a weight: fused ones do so without a new version number."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and _memory(parameter) in memories:
                raise RuntimeError(
                    f"round_weights_once: {type(optimizer).__name__}.step() would change a weight of shape"
                    f" {tuple(parameter.shape)} inside of the block, wanted the step after its end"
                )


def _memory(parameter: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; None for sparse tensors and subclasses that have none of their own."""
    try:
        address: int = local_data(parameter).untyped_storage().data_ptr()
    except RuntimeError:
        return None
    return address


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertFamily]]:
    """Yield the modules of experts in 16 bits, with their paths and families."""
    families = families_of(model)
    for path, module in model.named_modules():
        if (family := next((each for each in families if each.match(module)), None)) is not None:
            yield path, module, family

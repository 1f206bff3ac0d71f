"""prepare_8bit_training_: gives the experts of a model an 8-bit recipe for their products, or takes it away.
Called by users; calls the families of the model's experts.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from thunder_moe.formats.checks import require_module
from thunder_moe.ops.grouped_linear import check_recipe
from thunder_moe.quantization import choose  # noqa: F401  (registers the family of this package's modules)
from thunder_moe.quantization.families import families_of

__all__ = ["prepare_8bit_training_"]

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
    families = families_of(model)
    found = {}
    for path, module in model.named_modules():
        family = next((each for each in families if each.match(module)), None)
        if family is None:
            continue
        if (reason := family.obstacle_to_recipe(module)) is not None:
            raise ValueError(f"model: {path!r} cannot have an 8-bit recipe: {reason}")
        for parameter, _ in family.weights(module):
            check_recipe(recipe, parameter.dtype)
        found[module] = family
    if not found:
        wanted = ", or ".join(dict.fromkeys(family.description for family in families))
        raise ValueError(f"model: found no experts in 16 bits in {type(model).__name__}, wanted {wanted}")
    for module, family in found.items():
        family.set_recipe(module, recipe)
    return model

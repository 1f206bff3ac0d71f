"""Quantization-aware training: prepare_qat_ lets experts train with the values of a format, finish_qat_ ends it.
Called by users; calls choose for which modules there are, torch.nn.utils.parametrize, and ops.fake_quantize.

prepare_qat_(model) -> train -> finish_qat_(model) -> quantize_(model): the numbers of the quantized model are those
that training saw, bit for bit.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thunder_moe.formats.checks import require_module
from thunder_moe.formats.registry import find_format
from thunder_moe.ops.fake_quantize import fake_quantize, fake_quantize_mxfp8
from thunder_moe.quantization.choose import choose_experts
from thunder_moe.quantization.families import families_of
from thunder_moe.selection import Patterns, Selection

__all__ = ["FakeQuantize", "finish_qat_", "prepare_qat_"]

Model = TypeVar("Model", bound=nn.Module)


class FakeQuantize(nn.Module):
    """`nvfp4.fake_quantize` as a parametrization: ``parametrize.register_parametrization(linear, "weight", ...)``.

    Args:
        transposed: the parameter is (E, K, N), as GPT-OSS has it; else (E, N, K).
        scale_search: as in `nvfp4.quantize`.
        format: "nvfp4", or "mxfp8" for `mxfp8.fake_quantize`, which has no scale_search.
    """

    def __init__(self, *, transposed: bool = False, scale_search: str | None = None, format: str = "nvfp4") -> None:
        super().__init__()
        self.transposed, self.scale_search, self.format = transposed, scale_search, format

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with its values in the format, in its shape and dtype."""
        if not self.transposed:
            return self._rounded(weight)
        return self._rounded(weight.transpose(1, 2)).transpose(1, 2)

    def _rounded(self, weight: Tensor) -> Tensor:
        if self.format == "mxfp8":
            return fake_quantize_mxfp8(weight)
        return fake_quantize(weight, scale_search=self.scale_search)

    def extra_repr(self) -> str:
        return f"{self.format}, transposed={self.transposed}, scale_search={self.scale_search!r}"


@torch.no_grad()
def prepare_qat_(
    model: Model,
    *,
    filter: Selection | None = None,
    ignore: Patterns | None = None,
    scale_search: str | None = None,
    format: str = "nvfp4",
) -> Model:
    """Lets the experts of a model train with the values that `quantize_` will give them, in place.

    Each weight that `quantize_` would quantize becomes a `torch.nn.utils.parametrize` parametrization: reading it gives
    `nvfp4.fake_quantize` (or `mxfp8.fake_quantize`) of the 16-bit (or float32) parameter, which stays the one that the
    optimizer updates, the same object. Compile afterwards; under FSDP, `fully_shard` afterwards too, one block of
    experts each. A module that reads its weight several times in a forward rounds it each time, unless
    ``with parametrize.cached():`` is around the step.

    Args:
        model: as in `quantize_`.
        filter: as in `quantize_`.
        ignore: as in `quantize_`.
        scale_search: that of the later `quantize_`.
        format: that of the later `quantize_`, "nvfp4" or "mxfp8", of all weights.

    Returns:
        The same model. Until `finish_qat_`, its state dict has the weights under "parametrizations.<name>.original".

    Raises:
        ValueError: as `quantize_`, also for a model that is prepared already, an unknown format, and in_features
            that the format does not take; it is unchanged then.
    """
    require_module(model)
    known = find_format(format)
    known.check_quantizable(torch.zeros(1, 1, known.block_size, device="cpu"), scale_search)
    families = families_of(model)
    chosen = choose_experts(model, filter, ignore, families)
    for module, family in chosen.items():
        for _, view in family.weights(module):
            known.check_quantizable(view.detach(), scale_search)
    prepared: list[tuple[nn.Module, str]] = []
    try:
        for module, family in chosen.items():
            views = dict(family.weights(module))
            for owner in list(module.modules()):  # without the parametrizations that are added here
                for name, parameter in list(owner.named_parameters(recurse=False)):
                    if parameter not in views or parametrize.is_parametrized(owner, name):
                        continue
                    # A transposed view shares the parameter's memory in another order of dimensions.
                    transposed = views[parameter] is not parameter
                    rounding = FakeQuantize(transposed=transposed, scale_search=scale_search, format=known.name)
                    parametrize.register_parametrization(owner, name, rounding)
                    prepared.append((owner, name))
    except BaseException:  # no memory, or an interruption
        for owner, name in prepared:
            parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
        raise
    for family in families:
        family.finish(model)
    return model


@torch.no_grad()
def finish_qat_(model: Model) -> Model:
    """Ends `prepare_qat_`: the parameters are plain again, with the 16-bit values behind those that training saw.

    `quantize_` of the result, with the same `scale_search` and `format`, gives exactly the numbers that training saw.
    The 16-bit model itself computes with other numbers, those before rounding.

    Returns:
        The same model.

    Raises:
        ValueError: nothing in the model is prepared, or a prepared weight has another parametrization, too.
    """
    require_module(model)
    found = [
        (place, module, name)
        for place, module in model.named_modules()
        if parametrize.is_parametrized(module)
        for name, steps in module.parametrizations.items()
        if any(isinstance(step, FakeQuantize) for step in steps)
    ]
    if not found:
        raise ValueError(f"model: found nothing in {type(model).__name__} that prepare_qat_ has prepared")
    for place, module, name in found:
        if len(module.parametrizations[name]) > 1:
            raise ValueError(f"model: the {name} of {place!r} has another parametrization: remove that one first")
    for _, module, name in found:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    for family in families_of(model):
        family.finish(model)
    return model

"""Quantization-aware training: prepare_qat_ lets experts train with the values of a format, finish_qat_ ends it.
Called by users and huggingface.saving; calls choose for the experts of a model, torch.nn.utils.parametrize, and
ops.fake_quantize.

prepare_qat_(model) -> train -> finish_qat_(model) -> quantize_(model): the weights of the quantized model are bit for
bit the weights that training computed with.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thunder_moe.formats.checks import require_module
from thunder_moe.formats.registry import find_format
from thunder_moe.ops.fake_quantize import fake_quantize, fake_quantize_mxfp8
from thunder_moe.quantization.choose import choose_modules
from thunder_moe.quantization.families import families_of
from thunder_moe.selection import Patterns, Selection

Model = TypeVar("Model", bound=nn.Module)


class FakeQuantize(nn.Module):
    """A parametrization: `nvfp4.fake_quantize`, for ``parametrize.register_parametrization(linear, "weight", ...)``.

    Args:
        transposed: the parameter is (E, K, N), like GPT-OSS's; else (E, N, K).
        scale_search: as in `nvfp4.quantize`.
        format: "nvfp4", or "mxfp8" for `mxfp8.fake_quantize`, which has no scale_search.
    """

    def __init__(self, *, transposed: bool = False, scale_search: str | None = None, format: str = "nvfp4") -> None:
        super().__init__()
        self.transposed, self.scale_search, self.format = transposed, scale_search, format

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight rounded to the values of the format, in its own shape and dtype."""
        rows = weight.transpose(1, 2) if self.transposed else weight
        if self.format == "mxfp8":
            rows = fake_quantize_mxfp8(rows)
        else:
            rows = fake_quantize(rows, scale_search=self.scale_search)
        return rows.transpose(1, 2) if self.transposed else rows

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
    `nvfp4.fake_quantize` (or `mxfp8.fake_quantize`) of the 16-bit (or float32) parameter. The optimizer updates that
    parameter, the same object as before. Compile afterwards; under FSDP, `fully_shard` afterwards too, one block of
    experts each. A module that reads its weight several times in a forward rounds it each time, unless
    ``with parametrize.cached():`` is around the step.

    Args:
        model: as in `quantize_`.
        filter: as in `quantize_`.
        ignore: as in `quantize_`.
        scale_search: as in the later `quantize_`.
        format: as in the later `quantize_`, "nvfp4" or "mxfp8", for all weights.

    Returns:
        The same model. Until `finish_qat_`, its state dict has the weights under "parametrizations.<name>.original".

    Raises:
        ValueError: as `quantize_`; also for a model that is prepared already, or whose weights processes share
            (tp_size, ep_size). The model is unchanged then.
    """
    number_format = find_format(format).name
    chosen = choose_modules(model, number_format, filter=filter, ignore=ignore, scale_search=scale_search).chosen
    families = families_of(model)  # before parametrizations give modules other classes
    for module, (path, family, _) in chosen.items():
        # `fake_quantize` has no sharding strategy for DTensors.
        if any(hasattr(parameter, "device_mesh") for parameter, _ in family.weights(module)):
            raise ValueError(
                f"model: processes share the weights of {path!r}, wanted whole weights: without a distributed_config"
                " or tp_plan; call fully_shard after prepare_qat_"
            )
    prepared: list[tuple[nn.Module, str]] = []
    try:
        for module, (_, family, _) in chosen.items():
            views = dict(family.weights(module))
            for owner in list(module.modules()):  # a list, because parametrizations add modules
                for name, parameter in list(owner.named_parameters(recurse=False)):
                    if parameter not in views or parametrize.is_parametrized(owner, name):
                        continue
                    # A transposed view shares the parameter's memory in another order of dimensions.
                    transposed = views[parameter] is not parameter
                    rounding = FakeQuantize(transposed=transposed, scale_search=scale_search, format=number_format)
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
    """Ends `prepare_qat_`: makes the parameters plain again, with the unrounded values that the optimizer updated.

    `quantize_` of the result, with the same `scale_search` and `format`, gives exactly the weights that training
    computed with. The 16-bit model itself computes with the values before rounding.

    Returns:
        The same model.

    Raises:
        ValueError: no weight of the model is prepared, or a prepared weight has another parametrization, too.
    """
    require_module(model)
    prepared = prepared_weights(model)
    if not prepared:
        raise ValueError(f"model: found nothing in {type(model).__name__} that prepare_qat_ has prepared")
    for path, module, name in prepared:
        if len(module.parametrizations[name]) > 1:
            raise ValueError(f"model: the {name} of {path!r} has another parametrization: remove that one first")
    for _, module, name in prepared:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    for family in families_of(model):
        family.finish(model)
    return model


def prepared_weights(model: nn.Module) -> list[tuple[str, Any, str]]:
    """Return path, module and name of each parameter that `prepare_qat_` has prepared."""
    return [
        (path, module, name)
        for path, module in model.named_modules()
        if parametrize.is_parametrized(module)
        for name, steps in module.parametrizations.items()
        if any(isinstance(step, FakeQuantize) for step in steps)
    ]

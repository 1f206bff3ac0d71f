"""Where the checkpoints of an architecture have the experts of a layer, by what transformers makes of one tiny expert.
Called by checkpoint to write and quantizer to read; calls transformers' conversions of weights.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from thunder_moe.checkpoint import ExpertsLayout
from thunder_moe.checkpoint.modules import PROJECTIONS
from thunder_moe.integrations.huggingface.forms import ExpertsForm

try:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion
except ImportError as error:
    raise ImportError(
        "thunder_moe.integrations needs transformers >= 5.7: pip install 'thunder_moe[transformers]'"
    ) from error

__all__ = ["expert_source"]

_ONE_EXPERT = re.compile(rf"(.+)\.\d+\.({'|'.join(PROJECTIONS)})\.weight")


def expert_source(model: PreTrainedModel, name: str, form: ExpertsForm) -> tuple[str, ExpertsLayout]:
    """(path, layout) of a block of experts in the checkpoints of a model's architecture.

    Fused experts are at the path that their tensors have in common, or at "experts" below it (Granite, Step3p7), where
    engines look for those of one expert. A block whose names transformers cannot tell, because they are mixed with
    those of other blocks (ERNIE 4.5 VL), is at its path in the model.

    Args:
        model: with 16-bit or 4-bit experts, on any device.
        name: of the block in the model.
        form: of its experts.
    """
    layout = ExpertsLayout(fused=form.interleaved, interleaved=form.interleaved)
    first, rows = ("gate_up_proj", 2) if form.gated else ("up_proj", 1)
    up, down = torch.zeros(1, rows, 1), torch.zeros(1, 1, 1)
    tiny = {f"{name}.{first}": up.mT if form.transposed else up, f"{name}.down_proj": down}
    stand_in: Any = _WithParameters(model, tiny)
    try:
        names = list(revert_weight_conversion(stand_in, tiny))
    except ValueError:
        return name, layout
    single = [_ONE_EXPERT.fullmatch(key) for key in names]
    found = {match.group(1): None for match in single if match is not None}
    if len(found) == 1 and None not in single:
        own = {PROJECTIONS[match.group(2)]: match.group(2) for match in single if match is not None}
        gate, up_name, down_name = (own.get(part, f"{part}_proj") for part in ("gate", "up", "down"))
        return next(iter(found)), ExpertsLayout(projections=(gate, up_name, down_name))
    stems = {key.removesuffix(".weight").rpartition(".")[0] for key in names}
    if len(stems) != 1:
        return name, layout
    (stem,) = stems
    return (stem if stem.rpartition(".")[2] == "experts" else f"{stem}.experts"), layout


class _WithParameters:
    """A model that has these parameters as well: transformers' conversions ask for the shapes of 16-bit experts."""

    def __init__(self, model: PreTrainedModel, parameters: dict[str, Tensor]) -> None:
        self._model, self._parameters = model, parameters

    def get_parameter(self, name: str) -> Tensor:
        return self._parameters[name] if name in self._parameters else self._model.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

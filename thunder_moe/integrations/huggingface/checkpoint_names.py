"""Translates names of experts and linears: from a model to checkpoints of its architecture, and back.
Called by writing, lora_files and state_dicts, and by quantizer to read; calls transformers' conversions of weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from thunder_moe.checkpoint import ExpertsLayout
from thunder_moe.checkpoint.modules import PROJECTIONS
from thunder_moe.integrations.huggingface.experts import NVFP4Experts, expert_blocks
from thunder_moe.integrations.huggingface.forms import ExpertsForm, require_form

_ONE_EXPERT = re.compile(rf"(.+)\.\d+\.({'|'.join(PROJECTIONS)})\.weight")


def expert_source(model: PreTrainedModel, name: str, form: ExpertsForm) -> tuple[str, ExpertsLayout]:
    """Return (path, layout) of a block of experts, by its name, in the checkpoints of a model's architecture.

    They follow from what transformers makes of one tiny expert. Fused experts are at the path that their tensors have
    in common, or at "experts" below it (Granite, Step3p7), where engines look for the tensors of one expert.
    transformers cannot tell the names of a block that are mixed with other blocks' (ERNIE 4.5 VL): its path is the
    model's own. The model may have 16-bit or 4-bit experts, on any device.
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


def expert_sources(model: PreTrainedModel) -> dict[str, tuple[str, ExpertsLayout]]:
    """Return the path of each block of 4-bit experts in the model -> its path and layout in the checkpoint that it was
    loaded from, or in checkpoints of its architecture. A block that layers share has several paths."""
    loaded = getattr(getattr(model, "hf_quantizer", None), "layouts", {})  # of NVFP4CheckpointQuantizer
    return {
        name: loaded.get(name) or expert_source(model, name, module.form)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, NVFP4Experts)
    }


def linear_source(model: PreTrainedModel, name: str) -> str:
    """Return the path of a dense layer in a checkpoint of the model's architecture."""
    names = list(revert_weight_conversion(model, {f"{name}.weight": torch.zeros(1, 1)}))
    if len(names) != 1 or not names[0].endswith(".weight"):
        raise ValueError(f"model: checkpoints of {type(model).__name__} keep {name} as {names}, wanted one weight")
    path: str = names[0].removesuffix(".weight")
    return path


class ModelNames:
    """Find what a name in a checkpoint means in a model, by transformers' own renaming of weights.

    The `names` are the names of its tensors, its state dict if None. A value of None keeps the base model's prefix from
    being added or removed.
    """

    def __init__(self, model: Any, names: Mapping[str, Any] | None = None) -> None:
        conversions = getattr(model, "_weight_conversions", None)
        conversions = get_model_conversion_mapping(model) if conversions is None else conversions
        self.blocks = expert_blocks(model)
        # Of weights that are merged or split.
        self.converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._names: Any = model.state_dict() if names is None else names
        self._model = model

    def experts(self, source: str) -> str | None:
        """Return the name of a block of experts; None if the model has none, a ValueError if its kind is unknown."""
        suffixes = ("gate_up_proj", "up_proj", "0.up_proj.weight", "0.w3.weight")
        keys = [self.parameter(f"{source}.{suffix}")[0] for suffix in suffixes]
        for key in keys:
            for name in self.blocks:
                if key.startswith(f"{name}."):
                    return name
        for name, module in self.blocks.items():
            if expert_source(self._model, name, require_form(module))[0] == source:
                return name
        for key in keys:
            if key in self._names:
                raise ValueError(f"model: {key} is of experts that are not known here, cannot load {source} into them")
        return None

    def dense(self, source: str) -> str | None:
        """Return the name of another module than experts; None if the model lacks it, a ValueError if it is merged."""
        renamed, converted = self.parameter(f"{source}.weight")
        if renamed not in self._names:
            return None
        if converted is not None:
            raise ValueError(
                f"model: merges the packed weight of {source} into {renamed}, which is not supported;"
                " thunder_moe.checkpoint.convert(source, destination, linears=False) makes it 16-bit"
            )
        return renamed.removesuffix(".weight")

    def parameter(self, source: str) -> tuple[str, str | None]:
        """Return the parameter that a tensor becomes, or a part of, and the pattern of its converter, if it has one."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(source, self._renamings, self.converters, prefix, self._names)
        return name, pattern


class _WithParameters:
    """A model that has these parameters as well: transformers' conversions ask for the shapes of 16-bit experts."""

    def __init__(self, model: PreTrainedModel, parameters: dict[str, Tensor]) -> None:
        self._model, self._parameters = model, parameters

    def get_parameter(self, name: str) -> Tensor:
        return self._parameters[name] if name in self._parameters else self._model.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

"""What PEFT's LoraModel does with adapters of 4-bit experts: switching, disabling, deleting, merging, refusing.
Called by PeftModels of huggingface.lora, whose methods call the LoraModel's, and by saving; calls thunder_moe.lora and
lora_merge.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from thunder_moe.integrations.huggingface.lora_files import is_named, targets
from thunder_moe.lora import lora_linears, lora_parameters, refuse_merged, remove_lora_, use_lora_
from thunder_moe.lora_merge import merge_lora_

__all__ = ["TunerWithExperts", "kept_", "names_of", "refuse_changed", "refuse_left_out", "use"]

_LOGGER = logging.getLogger("thunder_moe")


class TunerWithExperts:
    """What the LoraModel in such a PeftModel does besides; a PeftModel's own methods call these."""

    experts_disabled = False
    of_experts: frozenset[str] = frozenset()  # the adapters that 4-bit layers have got

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """As PEFT's; the experts switch, too."""
        tuner: Any = self
        refuse_changed(tuner)
        parent: Any = super()
        parent.set_adapter(adapter_name, inference_mode)
        use(tuner.model, adapter_name, not inference_mode)
        if self.experts_disabled and lora_linears(tuner.model):
            use_lora_(tuner.model, None)

    def delete_adapter(self, adapter_name: str) -> None:
        """As PEFT's; the experts lose theirs, too."""
        tuner: Any = self
        refuse_merged(lora_linears(tuner.model))
        before, trainable = tuner.active_adapters, any(p.requires_grad for p in tuner.model.parameters())
        parent: Any = super()
        parent.delete_adapter(adapter_name)
        if adapter_name in names_of(tuner.model):
            remove_lora_(tuner.model, adapter_name)
        self.of_experts -= {adapter_name}
        if not tuner.active_adapters:  # PEFT has none of its own adapters left to choose from
            tuner.active_adapter = [each for each in before if each != adapter_name] or list(tuner.peft_config)[:1]
        if tuner.active_adapters != before and lora_linears(tuner.model):
            use(tuner.model, tuner.active_adapters, trainable)

    def disable_adapter_layers(self) -> None:
        """As PEFT's; those of experts, too."""
        tuner: Any = self
        refuse_changed(tuner)
        parent: Any = super()
        parent.disable_adapter_layers()
        self.experts_disabled = True
        if lora_linears(tuner.model):
            use_lora_(tuner.model, None)

    def enable_adapter_layers(self) -> None:
        """As PEFT's; those of experts, too."""
        tuner: Any = self
        refuse_changed(tuner)
        parent: Any = super()
        parent.enable_adapter_layers()
        self.experts_disabled = False
        known = names_of(tuner.model)
        if known:
            use_lora_(tuner.model, [each for each in tuner.active_adapters if each in known])

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """As PEFT's; those of experts, too."""
        parent: Any = super()
        parent.set_requires_grad(adapter_names, requires_grad)
        tuner: Any = self
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        for linear in lora_linears(tuner.model).values():
            for name in set(names) & linear.lora_specs.keys():
                linear.lora_A[name].requires_grad_(requires_grad)
                linear.lora_B[name].requires_grad_(requires_grad)

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refused: experts would be without the new adapter."""
        raise ValueError(
            "add_weighted_adapter: adapters of experts cannot be combined, wanted set_adapter or add_adapter"
        )

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """As PEFT's, for what is PEFT's; adapters of experts stay beside, which gives the same numbers.

        Raises:
            ValueError: names of adapters that are not active.
        """
        tuner: Any = self
        if adapter_names is not None and set(adapter_names) != set(tuner.active_adapters):
            raise ValueError(
                f"adapter_names: got {adapter_names}, wanted None or the active {tuner.active_adapters}, which the"
                " experts compute with"
            )
        parent: Any = super()
        parent.merge_adapter(adapter_names, safe_merge)

    def _unload_and_optionally_merge(
        self, merge: bool = True, progressbar: bool = False, safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:  # fmt: skip
        """As PEFT's `merge_and_unload` and `unload`; adapters of experts are merged into their 4-bit weights, or go."""
        tuner: Any = self
        if merge:
            refuse_merged(lora_linears(tuner.model))
        else:
            refuse_changed(tuner)
        if not merge and lora_linears(tuner.model):
            merged = [name for name, each in tuner.model.named_modules() if getattr(each, "merged_adapters", None)]
            if merged:
                raise ValueError(
                    f"unload: got {merged[0]!r} with its adapters merged, while those of experts would go; wanted"
                    " merge_and_unload, or unmerge_adapter first"
                )
        names = [each for each in adapter_names or tuner.active_adapters if each in names_of(tuner.model)]
        if merge and names:
            errors = merge_lora_(tuner.model, names)
            _LOGGER.warning(
                "merged %s into quantized weights, whose rounding is up to %.2g times what they add;"
                " merge_lora_(model, dequantize=True) merges into 16 bits", names, max(errors.values()),
            )  # fmt: skip
        if lora_linears(tuner.model):
            remove_lora_(tuner.model)
        parent: Any = super()
        return parent._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        tuner: Any = self
        if kwargs.get("adapter_names") is not None and lora_linears(tuner.model):
            raise ValueError(
                "adapter_names: experts have one for all rows of a batch, wanted set_adapter and a call for each"
            )
        parent: Any = super()
        with parent._enable_peft_forward_hooks(*args, **kwargs):
            yield


@contextmanager
def kept_(tuner: Any, trainable: bool = False) -> Iterator[None]:
    """Which adapters are active, and which of their parameters are trainable, stays so when adapters come; new ones are
    trainable if they are to be and are active."""
    before = {id(parameter): parameter.requires_grad for parameter in lora_parameters(tuner.model)}
    try:
        yield
    finally:
        tuner.of_experts |= names_of(tuner.model)
        use(tuner.model, tuner.active_adapters, trainable)
        if tuner.experts_disabled and lora_linears(tuner.model):
            use_lora_(tuner.model, None)
        for parameter in lora_parameters(tuner.model):
            parameter.requires_grad_(before.get(id(parameter), parameter.requires_grad))


def refuse_left_out(model: Any, configs: Mapping[str, Any]) -> None:
    """Raises where stock PEFT has left out 4-bit layers that its configuration means: experts that are among its
    target_parameters, or dense layers where it has adapted each 16-bit one, as for "all-linear".

    PEFT's layers are taken out of the model again; its parameters stay frozen.

    Raises:
        ValueError: names a layer, and `thunder_moe.get_peft_model`.
    """
    wrapped = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    if not wrapped or lora_linears(model) or all(hasattr(each, "left_out_on_purpose") for each in configs.values()):
        return
    named = [name for config in configs.values() for name in getattr(config, "target_parameters", None) or ()]
    packed = targets(model)
    left = [target.name for target in packed if target.experts and is_named(target.name, named)]
    head, inside = model.get_output_embeddings(), tuple(f"{name}." for name in wrapped)
    others = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    if all(name.startswith(inside) for name in others):
        left += [target.name for target in packed if not target.experts and target.linear is not head]
    if not left:
        return
    for name, module in wrapped.items():
        while hasattr(module, "base_layer"):
            module = module.base_layer
        if not name.endswith(".base_layer"):
            model.set_submodule(name, module)
    model._hf_peft_config_loaded = False  # transformers' add_adapter has set it, and save_pretrained would read it
    raise ValueError(
        f"peft: got {len(left)} 4-bit layers, {left[0]} and others, which PEFT does not know and leaves without"
        f" adapters, beside {next(iter(wrapped))}; wanted thunder_moe.get_peft_model(model, LoraConfig(...)) with a new"
        " configuration, or load_peft_model(model, path) for files"
    )


def refuse_changed(tuner: Any) -> None:
    """ValueError where adapters of 4-bit layers are merged, or gone since PEFT has wrapped the model."""
    refuse_merged(lora_linears(tuner.model))
    if gone := sorted(tuner.of_experts - names_of(tuner.model)):
        raise ValueError(
            f"model: the part of {gone} in experts and 4-bit layers is gone, by merge_lora_(dequantize=True) or"
            " remove_lora_, and what PEFT has left of it is not the adapter; wanted merge_and_unload(), which gives the"
            " merged model to save, or delete_adapter"
        )


def names_of(model: nn.Module) -> set[str]:
    """Of the adapters that experts have."""
    return {name for linear in lora_linears(model).values() for name in linear.lora_specs}


def use(model: nn.Module, adapters: str | Sequence[str], trainable: bool = True) -> None:
    """Makes adapters the only active ones, whose parameters alone require gradients, if at all, as PEFT's do."""
    linears, known = lora_linears(model), names_of(model)
    wanted = [adapters] if isinstance(adapters, str) else adapters
    if linears:
        use_lora_(model, [name for name in wanted if name in known])
    for linear in linears.values():
        linear.lora_by_peft = True
        for name in linear.lora_specs:
            for parameters in (linear.lora_A, linear.lora_B):
                parameters[name].requires_grad_(trainable and name in wanted)

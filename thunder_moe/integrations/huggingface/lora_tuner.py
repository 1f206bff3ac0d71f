"""Switch, disable, delete, merge or refuse adapters of 4-bit layers when PEFT does so to its own.
Called by PeftModels of huggingface.lora, whose methods call the LoraModel's; calls finetune.lora and finetune.merge.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import LoraModel
from torch import nn

from thunder_moe.finetune.lora import lora_linears, lora_parameters, refuse_merged, remove_lora_, use_lora_
from thunder_moe.finetune.merge import merge_lora_

_LOGGER = logging.getLogger("thunder_moe")


class TunerWithExperts(LoraModel):
    """A LoraModel that does to the adapters of 4-bit layers what it does to PEFT's.

    It takes over the state of a LoraModel: PEFT has made it, and knows no other class for it. It knows whether adapters
    are disabled, and the names of those that 4-bit layers have got.
    """

    def __init__(self, tuner: LoraModel) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(tuner))
        self.experts_disabled = False
        self.of_experts = frozenset(names_of(self.model))

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Switch adapters, in 4-bit layers, too."""
        refuse_changed(self)
        super().set_adapter(adapter_name, inference_mode)
        self.use(not inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter, in 4-bit layers, too."""
        refuse_merged(lora_linears(self.model))
        before, trainable = self.active_adapters, any(p.requires_grad for p in self.model.parameters())
        super().delete_adapter(adapter_name)
        if adapter_name in names_of(self.model):
            remove_lora_(self.model, adapter_name)
        self.of_experts -= {adapter_name}
        if not self.active_adapters:  # PEFT has none of its own adapters left to choose from
            self.active_adapter = [each for each in before if each != adapter_name] or list(self.peft_config)[:1]
        if self.active_adapters != before:
            self.use(trainable)

    def disable_adapter_layers(self) -> None:
        """Disable all adapters, in 4-bit layers, too."""
        refuse_changed(self)
        super().disable_adapter_layers()
        self.experts_disabled = True
        self._activate()

    def enable_adapter_layers(self) -> None:
        """Enable the active adapters, in 4-bit layers, too."""
        refuse_changed(self)
        super().enable_adapter_layers()
        self.experts_disabled = False
        self._activate()

    def _activate(self) -> None:
        """Make the active adapters active in 4-bit layers, or none while adapters are disabled."""
        if known := names_of(self.model):
            wanted = [] if self.experts_disabled else self.active_adapters
            use_lora_(self.model, [name for name in wanted if name in known])

    def use(self, trainable: bool = True) -> None:
        """Make the active adapters the only active ones in 4-bit layers, too.

        Their parameters alone require gradients, if `trainable`.
        """
        self._activate()
        for linear in lora_linears(self.model).values():
            linear.lora_by_peft = True
        for name in names_of(self.model):
            for parameter in lora_parameters(self.model, name):
                parameter.requires_grad_(trainable and name in self.active_adapters)

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Make parameters of adapters trainable or not, in 4-bit layers, too."""
        super().set_requires_grad(adapter_names, requires_grad)
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        for parameter in (each for name in names for each in lora_parameters(self.model, name)):
            parameter.requires_grad_(requires_grad)

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Raise a ValueError: experts would be without the new adapter."""
        raise ValueError(
            "add_weighted_adapter: adapters of experts cannot be combined, wanted set_adapter or add_adapter"
        )

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merge PEFT's adapters; adapters of 4-bit layers stay beside their weights, which gives the same numbers.

        Raises:
            ValueError: names of adapters that are not active.
        """
        if adapter_names is not None and set(adapter_names) != set(self.active_adapters):
            raise ValueError(
                f"adapter_names: got {adapter_names}, wanted None or the active {self.active_adapters}, which the"
                " experts compute with"
            )
        super().merge_adapter(adapter_names, safe_merge)

    def _unload_and_optionally_merge(
        self, merge: bool = True, progressbar: bool = False, safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:  # fmt: skip
        """Run `merge_and_unload` or `unload`: adapters of 4-bit layers are merged into their weights, or removed."""
        linears = lora_linears(self.model)
        if merge:
            refuse_merged(linears)
        else:
            refuse_changed(self)
            merged = [name for name, each in self.model.named_modules() if getattr(each, "merged_adapters", None)]
            if linears and merged:
                raise ValueError(
                    f"unload: got {merged[0]!r} with its adapters merged, while the adapters of experts would go;"
                    " wanted merge_and_unload, or unmerge_adapter first"
                )
        names = [each for each in adapter_names or self.active_adapters if each in names_of(self.model)]
        if merge and names:
            errors = merge_lora_(self.model, names)
            _LOGGER.warning(
                "merged %s into quantized weights, whose rounding is up to %.2g times what they add;"
                " merge_lora_(model, dequantize=True) merges into 16 bits", names, max(errors.values()),
            )  # fmt: skip
        if linears:
            remove_lora_(self.model)
        return super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        if kwargs.get("adapter_names") is not None and lora_linears(self.model):
            raise ValueError(
                "adapter_names: experts have one for all rows of a batch, wanted set_adapter and a call for each"
            )
        with super()._enable_peft_forward_hooks(*args, **kwargs):
            yield


@contextmanager
def kept_(tuner: Any, trainable: bool = False) -> Iterator[None]:
    """Keep active adapters active and trainable parameters trainable while adapters are added.

    New adapters are trainable if `trainable` and if they are active.
    """
    before = {id(parameter): parameter.requires_grad for parameter in lora_parameters(tuner.model)}
    try:
        yield
    finally:
        tuner.of_experts |= names_of(tuner.model)
        tuner.use(trainable)
        for parameter in lora_parameters(tuner.model):
            parameter.requires_grad_(before.get(id(parameter), parameter.requires_grad))


def refuse_changed(tuner: Any) -> None:
    """Raise a ValueError where adapters of 4-bit layers are merged, or gone since PEFT has wrapped the model."""
    refuse_merged(lora_linears(tuner.model))
    if gone := sorted(tuner.of_experts - names_of(tuner.model)):
        raise ValueError(
            f"model: the part of {gone} in experts and 4-bit layers is gone, by merge_lora_(dequantize=True) or"
            " remove_lora_, and what PEFT has left of it is not the adapter; wanted merge_and_unload(), which gives the"
            " merged model to save, or delete_adapter"
        )


def names_of(model: nn.Module) -> set[str]:
    """Return the names of the adapters that 4-bit layers have."""
    return {name for linear in lora_linears(model).values() for name in linear.lora_specs}

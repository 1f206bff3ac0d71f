"""Tells transformers of this package, whichever of the two is imported first, and imports neither early.
Called by thunder_moe on import; calls implementation.py once transformers has its registry of experts functions,
thunder_llama4.py and thunder_outputs.py with Thunder's executor, and quantizer.py when transformers meets the first
NVFP4 checkpoint.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from thunder_moe.import_hooks import after_import

__all__ = ["StandIn", "install"]

_REGISTRY = "transformers.quantizers.auto"
_EXPERTS = "transformers.integrations.moe"
_LLAMA4 = "transformers.models.llama4.modeling_llama4"
_OUTPUTS = "transformers.utils.output_capturing"
_EXECUTOR = "thunder_moe.compilers.thunder.executor"


def install() -> None:
    """Makes ``from_pretrained`` load NVFP4 checkpoints of ModelOpt and compressed-tensors, and know
    ``experts_implementation="thunder_moe"``; lets moe_executor route Llama 4's layers. Once is enough."""
    after_import(_REGISTRY, _add_stand_ins)
    after_import(_EXPERTS, _register_experts)
    after_import(_EXECUTOR, _add_lookasides)


def _register_experts(_: ModuleType) -> None:
    _import("implementation")


def _add_lookasides(_: ModuleType) -> None:
    after_import(_LLAMA4, lambda _: _import("thunder_llama4"))
    after_import(_OUTPUTS, lambda _: _import("thunder_outputs"))


def _import(name: str) -> None:
    importlib.import_module(f"thunder_moe.integrations.huggingface.{name}")


def _add_stand_ins(registry: Any) -> None:
    """Puts a `StandIn` where hf_quantizer is going to register, unless it has done so."""
    if "thunder_moe.integrations.huggingface.quantizer" in sys.modules:
        return
    mapping = registry.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method in ("modelopt", "compressed-tensors"):
        if not isinstance(mapping.get(method), StandIn):
            mapping[method] = StandIn(mapping, method, mapping.get(method))


class StandIn:
    """In the place of a quantization config class of transformers: imports hf_quantizer when a checkpoint is met."""

    def __init__(self, mapping: dict[str, Any], method: str, original: Any) -> None:
        self.mapping, self.method, self.original = mapping, method, original

    def from_dict(self, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        importlib.import_module("thunder_moe.integrations.huggingface.quantizer")  # registers, and so withdraws this
        return self.mapping[self.method].from_dict(config_dict, **kwargs)

    def withdraw(self) -> None:
        """Puts back what was there."""
        if self.original is None:
            del self.mapping[self.method]
        else:
            self.mapping[self.method] = self.original

"""Tells transformers of this package, whichever of the two is imported first, and imports neither early.
Called by thunder_moe on import; calls experts_function once transformers has its registry of experts functions,
thunder_llama4 with Thunder's executor, and hf_quantizer when transformers meets the first NVFP4 checkpoint.
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
_EXECUTOR = "thunder_moe.compilers.thunder.executor"


def install() -> None:
    """Makes ``from_pretrained`` load NVFP4 checkpoints of ModelOpt and compressed-tensors, and know
    ``experts_implementation="thunder_moe"``; makes Thunder route Llama 4's layers. Once is enough."""
    after_import(_REGISTRY, _add_stand_ins)
    after_import(_EXPERTS, _register_experts)
    after_import(_EXECUTOR, lambda _: after_import(_LLAMA4, _register_llama4))


def _register_experts(_: ModuleType) -> None:
    importlib.import_module("thunder_moe.integrations.huggingface.implementation")


def _register_llama4(_: ModuleType) -> None:
    importlib.import_module("thunder_moe.integrations.huggingface.thunder_llama4")


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

"""Tells transformers of this package, whichever of the two is imported first, and imports neither early.
Called by thunder_moe on import; has imported: implementation, once transformers has its registry of experts functions;
attention, once it has that of attention functions;
thunder_llama4, thunder_outputs and thunder_cache, with Thunder's executor; quantizer, at the first NVFP4 checkpoint.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from thunder_moe.import_hooks import after_import

__all__ = ["install"]

_REGISTRY = "transformers.quantizers.auto"
_EXPERTS = "transformers.integrations.moe"
_ATTENTION = "transformers.modeling_utils"
_LLAMA4 = "transformers.models.llama4.modeling_llama4"
_OUTPUTS = "transformers.utils.output_capturing"
_CACHE = "transformers.cache_utils"
_QUANTIZER = "thunder_moe.integrations.huggingface.quantizer"
_EXECUTOR = "thunder_moe.compilers.thunder.executor"


def install() -> None:
    """Makes ``from_pretrained`` load NVFP4 checkpoints of ModelOpt and compressed-tensors, and know
    ``experts_implementation="thunder_moe"`` and ``attn_implementation="thunder_moe_sdpa"``; lets moe_executor route
    Llama 4's layers. Once is enough."""
    after_import(_REGISTRY, _add_stand_ins)
    after_import(_EXPERTS, _register_experts)
    after_import(_ATTENTION, _register_attention)
    after_import(_EXECUTOR, _add_lookasides)


def _register_experts(_: ModuleType) -> None:
    importlib.import_module("thunder_moe.integrations.huggingface.implementation")


def _register_attention(_: ModuleType) -> None:
    importlib.import_module("thunder_moe.integrations.huggingface.attention")


def _add_lookasides(_: ModuleType) -> None:
    after_import(_LLAMA4, _route_llama4)
    after_import(_OUTPUTS, _trace_outputs)
    after_import(_CACHE, _check_caches)


def _route_llama4(_: ModuleType) -> None:
    importlib.import_module("thunder_moe.integrations.huggingface.thunder_llama4")


def _trace_outputs(_: ModuleType) -> None:
    importlib.import_module("thunder_moe.integrations.huggingface.thunder_outputs")


def _check_caches(_: ModuleType) -> None:
    importlib.import_module("thunder_moe.integrations.huggingface.thunder_cache")


def _add_stand_ins(registry: Any) -> None:
    """Puts a `StandIn` where quantizer is going to register, unless it has done so."""
    from thunder_moe.integrations.huggingface.stand_in import StandIn

    if _QUANTIZER in sys.modules:
        return
    mapping = registry.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method in ("modelopt", "compressed-tensors", "thunder_moe", "thunder_moe_on_load"):
        if not isinstance(mapping.get(method), StandIn):
            mapping[method] = StandIn(mapping, method, _load_quantizer)


def _load_quantizer() -> None:
    importlib.import_module(_QUANTIZER)  # registers, and withdraws the stand-ins

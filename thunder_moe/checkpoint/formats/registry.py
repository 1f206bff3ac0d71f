"""The registry of formats of quantized checkpoints; finds the format that a config names, and the format of a module.
Called by reader, decode and integrations.huggingface; calls the formats.
"""

from __future__ import annotations

from typing import Any

from thunder_moe.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from thunder_moe.checkpoint.formats.fp8 import find_fp8
from thunder_moe.checkpoint.formats.interface import CheckpointFormat, subdict
from thunder_moe.checkpoint.formats.modelopt import MODELOPT
from thunder_moe.checkpoint.formats.mxfp4 import MXFP4
from thunder_moe.checkpoint.formats.mxfp8 import MXFP8_MODULES
from thunder_moe.checkpoint.modules import Module

_FORMATS: tuple[CheckpointFormat, ...] = (MODELOPT, COMPRESSED_TENSORS, MXFP8_MODULES, MXFP4())
FORMATS: dict[str, CheckpointFormat] = {form.method: form for form in _FORMATS}


def format_of(module: Module) -> CheckpointFormat:
    """Return the format of a quantized module by its fields; by default ModelOpt's, which names missing fields."""
    if module.is_mxfp8:
        return MXFP8_MODULES
    others = (form for form in FORMATS.values() if form not in (MODELOPT, MXFP8_MODULES))
    return next((form for form in others if form.marker in module.fields), MODELOPT)


def find_quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config in the content of config.json, None when it has none."""
    key = "quantization_config"
    return subdict(config, key) or subdict(subdict(config, "text_config"), key) or None


def check_quantization(quantization: dict[str, Any]) -> str:
    """Return the method that made a checkpoint's packed weights, a key of `FORMATS`, from its quantization_config.

    A method, algorithm, format or block size that this package does not read is a ValueError.
    """
    method = MXFP8_MODULES.method if MXFP8_MODULES.is_named(quantization) else quantization.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        *most, last = map(repr, FORMATS)
        raise ValueError(f"quant_method: got {method!r}, wanted {', '.join(most)} or {last}{_remedy(quantization)}")
    if remedy := _remedy(quantization):
        raise ValueError(f"quantization_config: got FP8 weights, wanted 4-bit ones{remedy}")
    FORMATS[method].check(quantization)
    return method


def is_fp8_alone(quantization: dict[str, Any]) -> bool:
    """True if the weights of a checkpoint are FP8 and none of them packed, by its quantization_config."""
    fp8 = find_fp8(quantization)
    return fp8 is not None and fp8.alone and not MXFP8_MODULES.is_named(quantization)


def has_mxfp8(quantization: dict[str, Any]) -> bool:
    """True if the quantization_config of a checkpoint says that it has MXFP8 weights, or allows for them."""
    form = FORMATS.get(str(quantization.get("quant_method")), MXFP8_MODULES)
    return form.has_mxfp8(quantization) or MXFP8_MODULES.has_mxfp8(quantization)


def _remedy(quantization: dict[str, Any]) -> str:
    """Return the remedy for a checkpoint in FP8, as text; empty for others."""
    words = "; `python -m thunder_moe convert SOURCE DESTINATION` makes it NVFP4"
    return words if is_fp8_alone(quantization) else ""

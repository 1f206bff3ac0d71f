"""The formats of quantized checkpoints that are read: which one a config names, and which one a module is of.
Called by reader, decode and integrations.huggingface; calls the formats.
"""

from __future__ import annotations

from typing import Any

from thunder_moe.checkpoint.formats.compressed_tensors import CompressedTensors
from thunder_moe.checkpoint.formats.interface import CheckpointFormat
from thunder_moe.checkpoint.formats.modelopt import MODELOPT
from thunder_moe.checkpoint.formats.mxfp4 import MXFP4
from thunder_moe.checkpoint.modules import Module

__all__ = ["FORMATS", "check_quantization", "find_quantization", "format_of"]

FORMATS: dict[str, CheckpointFormat] = {form.method: form for form in (MODELOPT, CompressedTensors(), MXFP4())}


def format_of(module: Module) -> CheckpointFormat:
    """The format of a quantized module, by its fields; by default ModelOpt's, whose errors name what is missing."""
    others = (form for form in FORMATS.values() if form is not MODELOPT)
    return next((form for form in others if form.marker in module.fields), MODELOPT)


def find_quantization(config: dict[str, Any], hf_quant_config: dict[str, Any] | None) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint, None when it has none.

    Args:
        config: config.json.
        hf_quant_config: hf_quant_config.json, the only place where older versions of ModelOpt write it.
    """
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if found is None and hf_quant_config is not None:
        found = {"quant_method": "modelopt", **hf_quant_config.get("quantization", {})}
    return found


def check_quantization(quantization: dict[str, Any]) -> str:
    """The method that quantized a checkpoint, a key of `FORMATS`.

    Args:
        quantization: its quantization_config.

    Raises:
        ValueError: another method, algorithm, format or block size than those that are read here.
    """
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        *most, last = map(repr, FORMATS)
        raise ValueError(f"quant_method: got {method!r}, wanted {', '.join(most)} or {last}")
    FORMATS[method].check(quantization)
    return method

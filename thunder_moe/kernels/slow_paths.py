"""Warns of slow paths, each once per process: what is slow, for what operands, and what to do.
Called by kernels, nn, weight_cache, compilers.dynamo and integrations.huggingface; calls formats.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import TypeVar

from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import PackedWeight

Weight = TypeVar("Weight", bound=PackedWeight)
_warned: set[Hashable] = set()


def warn_once(cause: Hashable, message: str) -> None:
    """Warn, unless this process has been warned of the cause."""
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(f"thunder_moe: {message}", stacklevel=3)


def to_linear(weight: Weight, reader: str = "the kernels") -> Weight:
    """Return a weight in layout "linear", for a backend that reads no other; warn of the `reader` if it is converted,
    which costs far more than a GEMM."""
    if weight.layout == LINEAR:
        return weight
    warn_once(
        ("layout", weight.layout, weight.device.type, reader),
        f"{reader} on {weight.device} read no weights in layout {weight.layout!r}: one of shape {weight.shape}, and any"
        " other, is converted to 'linear' at every call; convert it once, by to_layout_(model) or"
        f" {type(weight).__name__}.to_layout('linear'), or quantize with layout='auto'",
    )
    return weight.to_layout(LINEAR)

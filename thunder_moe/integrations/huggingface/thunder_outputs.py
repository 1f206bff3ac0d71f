"""Lookasides of moe_executor that let Thunder trace whole models of transformers.
Imported by compilers/thunder/lookasides.py once transformers' output capturing is imported; calls nothing.

Models keep what they collect (``output_hidden_states=True``) in a context variable, which takes a global instead while
torch.compile traces. Thunder 0.2.6 traces that branch and fails on the change of the global. The lookasides are the
variable's own methods: they set and reset it while Thunder traces, and leave nothing in the trace.
"""

from __future__ import annotations

from typing import Any

from transformers.utils.output_capturing import CompileableContextVar as _Variable

__all__ = ["LOOKASIDES"]

LOOKASIDES: dict[Any, Any] = {method: method for method in (_Variable.get, _Variable.set, _Variable.reset)}

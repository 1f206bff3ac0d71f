"""Lookasides of moe_executor by which Thunder can trace whole models of transformers.
Imported by registration.py once both Thunder's executor and transformers' output capturing are imported; calls nothing.

Models keep what they collect (``output_hidden_states=True``) in a context variable, which takes a global instead while
torch.compile traces. Thunder 0.2.6 traces that branch and fails on the change of the global; called as it is, the
variable is set and reset while Thunder traces, and nothing of it is part of the trace.
"""

from __future__ import annotations

from transformers.utils import output_capturing

from thunder_moe.compilers.thunder.executor import moe_executor

__all__: list[str] = []

_variable = getattr(output_capturing, "CompileableContextVar", None)
for _method in (getattr(_variable, name, None) for name in ("get", "set", "reset")):
    if _method is not None:
        moe_executor._lookasides[_method] = _method

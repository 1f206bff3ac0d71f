"""Lookasides of moe_executor for functions of transformers and of thunder_moe.parallel, and for Thunder's operator of
packed weights: which modules have them, and what they are written with.
Called by symbols.py (`LateLookasides` is the base of its executor) and these modules; calls these modules and Thunder's
interpreter.

`thunder.jit` reads an executor's lookasides when it is called, and by then the model's own modules are imported.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from thunder.core.interpreter import _interpret_call, wrap_const
from thunder.extend import OperatorExecutor

from thunder_moe.compilers import nvf_cutlass

# A module -> the module that has `LOOKASIDES` for it. By name: neither is imported early.
_MODULES = {
    "thunder_moe.parallel.modules": "thunder_moe.parallel.thunder",
    "transformers.models.llama4.modeling_llama4": "thunder_moe.integrations.huggingface.thunder_llama4",
    "transformers.utils.output_capturing": "thunder_moe.integrations.huggingface.thunder_models",
    "transformers.cache_utils": "thunder_moe.integrations.huggingface.thunder_models",
}


class LateLookasides(OperatorExecutor):
    """An operator executor whose `_lookasides` are completed whenever Thunder reads them."""

    _added: dict[Any, Callable[..., Any]]

    @property
    def _lookasides(self) -> dict[Any, Callable[..., Any]]:
        for theirs, ours in _MODULES.items():
            if theirs in sys.modules:
                self._added.update(importlib.import_module(ours).LOOKASIDES)
        operator, own = nvf_cutlass.theirs(), self._added.get(getattr(torch.ops.thunder_moe, nvf_cutlass.NAME))
        if operator is not None and own is not None:
            self._added[operator] = lambda *args, **options: own(*nvf_cutlass.positional(*args, **options))
        return self._added

    @_lookasides.setter
    def _lookasides(self, lookasides: dict[Any, Callable[..., Any]]) -> None:
        self._added = lookasides


def same_code(function: Any) -> types.FunctionType:
    """Return another function with the code of a given one, which the lookaside for that one does not meet."""
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have Thunder's interpreter go on with a function, and return what it returns.

    Lookasides get the values behind the interpreter's wrappers, which `wrap_const` finds again. They know where an
    object comes from, so that its tensors become arguments of the trace."""
    wrapped = [wrap_const(argument) for argument in args]
    return _interpret_call(function, *wrapped, **{name: wrap_const(argument) for name, argument in kwargs.items()})

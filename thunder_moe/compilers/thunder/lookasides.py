"""Lookasides of moe_executor that look at their arguments, then have Thunder trace the original function or another.
Called by the thunder_* modules of integrations.huggingface; calls Thunder's interpreter.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from thunder.core.interpreter import _interpret_call, wrap_const

__all__ = ["same_code", "trace"]


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

"""Shows operators of packed weights with the arguments that callers give, in place of the description's.
Called by mkdocs through griffe, which reads the source: there each weight is one argument, `WeightOperands`.
"""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from thunder_moe.ops.operator import OPERATORS


class OperatorSignatures(griffe.Extension):
    """Gives functions that `weight_operator` decorates the signature of the operator."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any("weight_operator" in str(each.value) for each in func.decorators):
            return
        __import__(func.module.path)
        func.parameters = griffe.Parameters(*[
            griffe.Parameter(
                each.name,
                annotation=str(each.annotation),
                kind=getattr(griffe.ParameterKind, each.kind.name.lower()),
                default=None if each.default is inspect.Parameter.empty else repr(each.default),
            )
            for each in OPERATORS[func.name].signature.parameters.values()
        ])  # fmt: skip

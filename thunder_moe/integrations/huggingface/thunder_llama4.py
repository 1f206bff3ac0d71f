"""A lookaside of moe_executor: Llama 4's stock layer is routed while Thunder traces it, so that its expert GEMMs can be
rewritten. Imported by registration.py once both Thunder's executor and transformers' Llama 4 are imported; calls
run_routed of llama4.py.

Only functions compiled with moe_executor among their executors see it: eager execution, torch.compile and Thunder with
other executors run `Llama4TextMoe.forward` as transformers has it.
"""

from __future__ import annotations

import types
from typing import Any

from thunder.core.interpreter import _interpret_call, wrap_const
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextExperts, Llama4TextMoe

from thunder_moe.compilers.thunder.executor import moe_executor
from thunder_moe.integrations.huggingface.llama4 import run_routed
from thunder_moe.nn.quantized import calls_only_its_class

__all__: list[str] = []

_forward: Any = Llama4TextMoe.forward
# The same code as another function: the lookaside for `_forward` would meet itself.
_stock_forward = types.FunctionType(
    _forward.__code__, _forward.__globals__, _forward.__name__, _forward.__defaults__, _forward.__closure__
)


def _traced_forward(layer: Llama4TextMoe, *args: Any, **kwargs: Any) -> Any:
    """Has Thunder's interpreter go on with `run_routed`, or with the stock code.

    Lookasides get the values behind the interpreter's wrappers, which `wrap_const` finds again: they know where the
    layer comes from, so that its parameters become arguments of the trace."""
    # Others' routers and experts, and hooks on them, may do anything; quantize_'s experts have a layer of their own.
    plain = calls_only_its_class(layer.router, Llama4Router) and calls_only_its_class(layer.experts, Llama4TextExperts)
    wrapped = [wrap_const(argument) for argument in (layer, *args)]
    named = {name: wrap_const(argument) for name, argument in kwargs.items()}
    return _interpret_call(run_routed if plain else _stock_forward, *wrapped, **named)


moe_executor._lookasides[_forward] = _traced_forward

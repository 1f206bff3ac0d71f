"""A lookaside of moe_executor: Llama 4's stock layer is routed while Thunder traces it, so that its expert GEMMs can be
rewritten. Imported by registration.py once both Thunder's executor and transformers' Llama 4 are imported, maybe while
llama4.py imports the latter, so it imports nothing of llama4.py. Calls routing and torch's grouped GEMM.

Only functions compiled with moe_executor among their executors see it: eager execution, torch.compile and Thunder with
other executors run `Llama4TextMoe.forward` as transformers has it.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core.interpreter import _interpret_call, wrap_const
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextExperts, Llama4TextMoe

from thunder_moe.compilers.thunder.executor import moe_executor
from thunder_moe.nn.quantized import calls_only_its_class
from thunder_moe.routing import invert, sort_by_expert

__all__ = ["run_routed"]

_forward: Any = Llama4TextMoe.forward
# The same code as another function: the lookaside for `_forward` would meet itself.
_stock_forward = types.FunctionType(
    _forward.__code__, _forward.__globals__, _forward.__name__, _forward.__defaults__, _forward.__closure__
)


def run_routed(layer: Llama4TextMoe, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """What a stock layer computes, each token by its own experts in 16-bit grouped GEMMs, which compilers rewrite.

    Args:
        layer: with transformers' own router and experts.
        hidden_states: (B, S, H) or (T, H).

    Returns:
        (T, H), and the router's logits (T, E).
    """
    tokens = hidden_states.reshape(-1, layer.hidden_dim)
    logits = F.linear(tokens, layer.router.weight)
    values, ids = torch.topk(logits, layer.top_k, dim=1)
    order, offsets = sort_by_expert(ids.reshape(-1), layer.num_experts)
    weights = torch.sigmoid(values.float()).to(tokens.dtype).reshape(-1)[order]
    rows = tokens[order // layer.top_k] * weights[:, None]
    gate, up = F.grouped_mm(rows, layer.experts.gate_up_proj, offs=offsets).chunk(2, dim=-1)
    rows = F.grouped_mm(up * layer.experts.act_fn(gate), layer.experts.down_proj, offs=offsets)
    routed = rows[invert(order)].reshape(-1, layer.top_k, layer.hidden_dim).sum(1)
    return layer.shared_expert(tokens) + routed, logits


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

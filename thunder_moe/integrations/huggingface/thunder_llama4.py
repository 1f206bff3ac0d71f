"""A lookaside of moe_executor: Llama 4's stock layer is routed while Thunder traces it, so that its expert GEMMs can be
rewritten. Imported by compilers/thunder/lookasides.py when Thunder reads lookasides and transformers' Llama 4 is
imported; calls routing and torch's grouped GEMM.

Only functions compiled with moe_executor among their executors see it: eager execution, torch.compile and Thunder with
other executors run transformers' own `Llama4TextMoe.forward`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextExperts, Llama4TextMoe

from thunder_moe.compilers.thunder.lookasides import same_code, trace
from thunder_moe.nn.quantized import calls_only_its_class
from thunder_moe.routing import invert, sort_by_expert

_forward: Any = Llama4TextMoe.forward
_stock_forward = same_code(_forward)


def run_routed(layer: Llama4TextMoe, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what a stock layer does, each token by its own experts in 16-bit grouped GEMMs. Compilers rewrite these.

    Maps (B, S, H) or (T, H) -> (T, H), and the router's logits (T, E).
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
    """Have Thunder's interpreter go on with `run_routed`, or with the stock code."""
    # Others' routers and experts, and hooks on them, may do anything; quantize_'s experts have a layer of their own.
    plain = calls_only_its_class(layer.router, Llama4Router) and calls_only_its_class(layer.experts, Llama4TextExperts)
    return trace(run_routed if plain else _stock_forward, layer, *args, **kwargs)


LOOKASIDES = {_forward: _traced_forward}

"""Makes moe_executor route Llama 4's stock layer while Thunder traces it, so that its expert GEMMs can be rewritten.
Called by hf_plugin once both Thunder's executor and transformers' Llama 4 are imported; calls integrations.llama4.

The layer's forward asks whether it is being traced, which the executor answers; outside of it nothing changes.
"""

from __future__ import annotations

import functools

from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextExperts, Llama4TextMoe

from thunder_moe.compilers.thunder.executor import moe_executor
from thunder_moe.integrations.huggingface.llama4 import run_routed
from thunder_moe.nn.quantized import calls_only_its_class

__all__: list[str] = []

_stock_forward = Llama4TextMoe.forward


def _traced_by_moe_executor() -> bool:
    return False


@functools.wraps(_stock_forward)
def _forward(self: Llama4TextMoe, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    # Others' routers and experts, and hooks on them, may do anything; quantize_'s experts have a layer of their own.
    plain = calls_only_its_class(self.router, Llama4Router) and calls_only_its_class(self.experts, Llama4TextExperts)
    if plain and _traced_by_moe_executor():
        return run_routed(self, hidden_states)
    return _stock_forward(self, hidden_states)


Llama4TextMoe.forward = _forward  # type: ignore[method-assign]
moe_executor._lookasides[_traced_by_moe_executor] = lambda: True

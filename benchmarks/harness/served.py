"""The routed MoE layers and the kernels that are compared inside of vLLM. Imports nothing of it.
Called by suites/serving.py and harness/vllm_layers.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["COLUMNS", "LAYERS", "ServedLayer"]

# Column -> vLLM's --moe-backend, and whether the experts are 4-bit.
COLUMNS = {
    "thunder_moe": ("auto", True),
    "vLLM Marlin": ("marlin", True),
    "vLLM Humming": ("humming", True),
    "vLLM bf16": ("auto", False),
}


@dataclass(frozen=True)
class ServedLayer:
    """A model's routed MoE layer on one GPU.

    Attributes:
        name: of the model; ``/ep8`` is the first of 8 expert-parallel ranks, each of which gets all tokens.
        hidden_size: H.
        intermediate_size: I of one expert.
        num_experts: of all ranks.
        top_k: A.
        ranks: expert-parallel ones.
        routing: what the model gives vLLM's layer beside the sizes.
        corrected: the choice of experts has a correction (a bias of the router).
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ranks: int = 1
    routing: dict[str, Any] = field(default_factory=dict)
    corrected: bool = False

    @property
    def local_experts(self) -> int:
        """E"""
        return self.num_experts // self.ranks


_DEEPSEEK: dict[str, Any] = dict(
    use_grouped_topk=True, num_expert_group=8, topk_group=4, scoring_func="sigmoid", routed_scaling_factor=2.5
)


def _llama4(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Routes like vLLM's Llama 4: returns weights (T, 1) and experts (T, 1)."""
    scores, ids = gating_output.max(-1, keepdim=True)
    return scores.float().sigmoid(), ids.to(torch.int32)


_LLAMA4: dict[str, Any] = dict(custom_routing_function=_llama4, renormalize=False, apply_router_weight_on_input=True)
LAYERS = {
    layer.name: layer
    for layer in (
        ServedLayer("qwen3-30b-a3b", 2048, 768, 128, 8),
        ServedLayer("mixtral-8x7b", 4096, 14336, 8, 2),
        ServedLayer("llama4-scout", 5120, 8192, 16, 1, routing=_LLAMA4),
        ServedLayer("deepseek-v3/ep8", 7168, 2048, 256, 8, ranks=8, routing=_DEEPSEEK, corrected=True),
    )
}

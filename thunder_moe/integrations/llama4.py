"""Llama 4's Mixture-of-Experts layer with routing: stock transformers runs all of its experts on all tokens.
Called by integrations.transformers; imports transformers' modelling file of Llama 4.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

__all__ = ["Llama4TextMoe", "RoutedLlama4TextMoe", "check_layer"]


class RoutedLlama4TextMoe(Llama4TextMoe):
    """`Llama4TextMoe` that calls its experts as other models do: with (T, H), top_k_index and top_k_weights (T, A)."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, H) or (T, H) -> (T, H), and the router's logits (T, E)."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_scores, router_logits = self.router(hidden_states)  # a sigmoid at the chosen experts, elsewhere 0
        top_k_weights, top_k_index = torch.topk(router_scores, self.top_k, dim=-1)
        routed = self.experts(hidden_states, top_k_index, top_k_weights)
        return self.shared_expert(hidden_states) + routed, router_logits


def check_layer(layer: nn.Module) -> None:
    """TypeError when Llama 4's experts hang in another layer than its own, whose routing is not known."""
    if type(layer) not in (Llama4TextMoe, RoutedLlama4TextMoe):
        raise TypeError(f"model: Llama 4's experts hang in a {type(layer).__name__}, wanted Llama4TextMoe")

"""Llama 4's Mixture-of-Experts layer with routing (stock transformers runs all experts on all tokens), and its copy as
a `Llama4MoE`. Called by families and nn.llama4; calls nn, and imports transformers' file of Llama 4.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextMoe

from thunder_moe.integrations.huggingface.class_swap import OtherMethods
from thunder_moe.integrations.huggingface.forms import alpha_of
from thunder_moe.integrations.huggingface.routers import RowOrders
from thunder_moe.nn import Llama4MoE, Llama4MoEConfig
from thunder_moe.nn.linear_router import is_one_operator
from thunder_moe.nn.quantized import calls_only_its_class
from thunder_moe.ops import router as _router  # noqa: F401  (registers the operator)
from thunder_moe.quantization.replaceable import has_hook, has_own_forward

Moe = TypeVar("Moe", bound=Llama4MoE)


class RoutedLlama4Router(OtherMethods, Llama4Router):
    """`Llama4Router` with a method for a `RoutedLlama4TextMoe`: its choice, or all of it, is one operator."""

    own_class, added = Llama4Router, ("row_orders",)
    row_orders: RowOrders

    def choose(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (T, H) -> scores (T, A) of the chosen experts, logits (T, E), ids int64 (T, A)."""
        options: dict[str, Any] = dict(top_k=self.top_k, score="sigmoid", normalize=False)
        if is_one_operator(hidden_states, self.weight):
            scores, ids, row_slot, offsets, slot_row, logits = torch.ops.thunder_moe.moe_linear_router(
                hidden_states, self.weight, self.bias, **options
            )
        else:
            logits = F.linear(hidden_states, self.weight, self.bias)
            scores, ids, row_slot, offsets, slot_row = torch.ops.thunder_moe.moe_router(logits, **options)
        self.row_orders.put(ids, (row_slot, offsets, slot_row), self)
        return scores, logits, ids


class RoutedLlama4TextMoe(OtherMethods, Llama4TextMoe):
    """`Llama4TextMoe` that calls its experts as other models do: with (T, H), top_k_index and top_k_weights (T, A)."""

    own_class = Llama4TextMoe

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Map (B, S, H) or (T, H) -> (T, H), and the router's logits (T, E)."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router: nn.Module = self.router
        if calls_only_its_class(router, RoutedLlama4Router):
            top_k_weights, router_logits, top_k_index = router.choose(hidden_states)
        else:
            router_scores, router_logits = router(hidden_states)  # a sigmoid at the chosen experts, elsewhere 0
            top_k_weights, top_k_index = torch.topk(router_scores, self.top_k, dim=-1)
        routed = self.experts(hidden_states, top_k_index, top_k_weights)
        return self.shared_expert(hidden_states) + routed, router_logits


def check_layer(layer: nn.Module) -> None:
    """Raise a TypeError unless the parent of Llama 4's experts is Llama 4's own layer, whose routing is known."""
    if type(layer) not in (Llama4TextMoe, RoutedLlama4TextMoe):
        raise TypeError(f"model: the parent of Llama 4's experts is a {type(layer).__name__}, wanted Llama4TextMoe")
    if not has_own_forward(layer):
        raise TypeError("model: the forward of a Llama4TextMoe was replaced, wanted its own, which routing replaces")


def route_layer(layer: nn.Module, orders: RowOrders) -> None:
    """Make a `Llama4TextMoe`, checked by `check_layer`, route its tokens, and its router leave the order of rows."""
    RoutedLlama4TextMoe.put_on(layer)
    router: Any = layer.router
    plain = type(router) is Llama4Router and has_own_forward(router) and not has_hook(router)
    if plain or RoutedLlama4Router.is_on(router):
        RoutedLlama4Router.put_on(router, row_orders=orders)


def restore_layer(layer: nn.Module) -> None:
    """Undo `route_layer`."""
    RoutedLlama4TextMoe.take_off(layer)
    RoutedLlama4Router.take_off(layer.get_submodule("router"))


def copy_llama4_moe(module: nn.Module, moe_class: type[Moe]) -> Moe:
    """Do what `Llama4MoE.from_transformers` documents, for `Llama4MoE` or a subclass."""
    if type(module) is not Llama4TextMoe:
        raise TypeError(f"module: got {type(module).__name__}, wanted transformers' Llama4TextMoe")
    for name, part in (("module", module), *((f"module.{name}", part) for name, part in module.named_children())):
        if not has_own_forward(part):
            raise ValueError(f"{name}: its forward was replaced, wanted the forward of {type(part).__name__}")
    for name, act_fn in (
        ("experts.act_fn", module.experts.act_fn),
        ("shared_expert.activation_fn", module.shared_expert.activation_fn),
    ):
        if alpha_of(act_fn) != 1.0:
            raise ValueError(f"module.{name}: got {act_fn}, wanted SiLU")
    gate_up, down = module.experts.gate_up_proj, module.experts.down_proj  # (E, H, 2I), (E, I, H)
    experts, intermediate, hidden = down.shape
    config = Llama4MoEConfig(hidden, intermediate, experts, top_k=module.top_k)
    moe = moe_class(config, dtype=down.dtype, device=down.device)
    gate, up = gate_up.chunk(2, -1)
    state = {f"shared_expert.{name}": tensor for name, tensor in module.shared_expert.state_dict().items()}
    state |= {"router.weight": module.router.weight, "routed_experts.down_proj.weight": down.mT}
    state |= {"routed_experts.gate_proj.weight": gate.mT, "routed_experts.up_proj.weight": up.mT}
    moe.load_state_dict(state)
    moe.requires_grad_(down.requires_grad)
    return moe.train(module.training)

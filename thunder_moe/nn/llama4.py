"""`Llama4MoE`: the Mixture-of-Experts block of Llama 4, with a router, routed experts and a shared expert.
Called by users; calls nn.swiglu and routing, or ops.experts once the routed experts are quantized.

Legend: T tokens, A = top_k, M = T * A rows sorted by expert, E experts, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thunder_moe.formats.checks import require_type
from thunder_moe.nn.autocast import autocast_rows
from thunder_moe.nn.grouped_linear import require_at_least
from thunder_moe.nn.linear_router import is_one_operator
from thunder_moe.nn.quantized import calls_only_its_class, weights_to_fuse
from thunder_moe.nn.swiglu import GroupedSwiGLU, SwiGLU
from thunder_moe.ops.experts import moe_experts
from thunder_moe.routing import invert, sort_by_expert

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, init=False)
class Llama4MoEConfig:
    """Sizes of a `Llama4MoE`.

    Attributes:
        hidden_size: H.
        intermediate_size: I of each routed expert, and of each shared one.
        num_experts: E, the routed experts. `num_routed_experts`, its name in Thunder's configuration, is a keyword of
            the constructor and an attribute, too; `dataclasses.replace` takes num_experts alone.
        num_shared_experts: experts that see every token, run as one of num_shared_experts * I; 0 for none.
        top_k: routed experts per token.

    Raises:
        TypeError: num_experts is missing.
        ValueError: a size is not positive, top_k exceeds num_experts, or num_experts is given by both names.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_shared_experts: int = 1
    top_k: int = 1

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int | None = None,
        num_shared_experts: int = 1,
        top_k: int = 1,
        *,
        num_routed_experts: int | None = None,
    ) -> None:
        if num_experts is not None and num_routed_experts is not None:
            raise ValueError(
                f"num_experts: got {num_experts} and num_routed_experts={num_routed_experts}, wanted num_experts alone:"
                " num_routed_experts is another name for it"
            )
        experts = num_routed_experts if num_experts is None else num_experts
        if experts is None:
            raise TypeError("num_experts: got none, wanted the number of routed experts")
        sizes = (hidden_size, intermediate_size, experts, num_shared_experts, top_k)
        for field, size in zip(fields(self), sizes, strict=True):
            require_at_least(int(field.name != "num_shared_experts"), field.name, size)
            object.__setattr__(self, field.name, size)
        if top_k > experts:
            raise ValueError(f"top_k: got {top_k}, wanted at most num_experts = {experts}")

    @property
    def num_routed_experts(self) -> int:
        """Return `num_experts`, by its name in Thunder's configuration."""
        return self.num_experts


class Llama4MoE(nn.Module):
    """The Mixture-of-Experts feed-forward block of Llama 4.

    router -> top_k -> rows sorted by expert, times sigmoid(router logit) -> routed experts -> sum per token; plus the
    shared expert

    Traceable by Thunder and by ``torch.compile(fullgraph=True)``; never synchronises with the host.

    Args:
        config: the sizes.
        dtype: the dtype of the weights, torch's default when None.
        device: the device of the weights.
    """

    def __init__(
        self,
        config: Llama4MoEConfig,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_type("config", config, Llama4MoEConfig, "a Llama4MoEConfig")
        self.config = config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.num_experts, self.top_k = config.num_experts, config.top_k
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.router = nn.Linear(hidden, self.num_experts, bias=False, **options)
        self.routed_experts = GroupedSwiGLU(self.num_experts, hidden, intermediate, **options)
        shared = config.num_shared_experts
        self.shared_expert: SwiGLU | None = SwiGLU(hidden, shared * intermediate, **options) if shared else None

    @classmethod
    def from_transformers(cls, module: nn.Module) -> Self:
        """Copy the weights of a transformers `Llama4TextMoe` exactly.

        Raises:
            TypeError: module is not exactly a `Llama4TextMoe`.
            ValueError: its activation is not SiLU, or its forward or the forward of one of its parts was replaced.
            ImportError: transformers is missing.
        """
        # The only import upwards of nn, made lazily: this constructor is public, its code knows transformers' classes.
        from thunder_moe.integrations.huggingface.llama4 import copy_llama4_moe

        return copy_llama4_moe(module, cls)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run the layer: (B, S, H) -> (B, S, H).

        Raises:
            ValueError: hidden_states has the wrong rank or hidden size.
        """
        x_TH = self.tokens_of(hidden_states)
        out_TH = self.run_routed_experts(x_TH)
        if self.shared_expert is not None:
            out_TH = out_TH + self.shared_expert(x_TH)
        return out_TH.reshape(hidden_states.shape)

    def tokens_of(self, hidden_states: Tensor) -> Tensor:
        """Return (B, S, H) as (T, H), after a check of the shape."""
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.config.hidden_size:
            shape = tuple(hidden_states.shape)
            raise ValueError(f"hidden_states: got shape {shape}, wanted (batch, sequence, {self.config.hidden_size})")
        return hidden_states.reshape(-1, hidden_states.shape[-1])

    def run_routed_experts(self, x_TH: Tensor) -> Tensor:
        """Run the routed experts without the shared one, weighted by the router: (T, H) -> (T, H)."""
        weights, router = weights_to_fuse(self.routed_experts), self.router
        plain = calls_only_its_class(router, nn.Linear)
        if weights is None or not plain or not is_one_operator(x_TH, router.weight):
            return self.run_experts_by(self.router(x_TH), x_TH)
        options: dict[str, Any] = dict(top_k=self.top_k, score="sigmoid", normalize=False, scores_dtype=torch.float32)
        scores_TA, ids_TA, *order, _ = torch.ops.thunder_moe.moe_linear_router(
            x_TH, router.weight, router.bias, **options
        )
        return moe_experts(x_TH, ids_TA, scores_TA, *weights, weight_on_input=True, order=tuple(order))

    def run_experts_by(self, logits_TE: Tensor, x_TH: Tensor) -> Tensor:
        """Run `run_routed_experts` with the router's logits."""
        weights = weights_to_fuse(self.routed_experts)
        if weights is not None:
            scores_TA, ids_TA, *order = torch.ops.thunder_moe.moe_router(
                logits_TE, top_k=self.top_k, score="sigmoid", normalize=False, scores_dtype=torch.float32
            )
            return moe_experts(
                autocast_rows(x_TH), ids_TA, scores_TA, *weights, weight_on_input=True, order=tuple(order)
            )
        logits_TA, ids_TA = logits_TE.topk(self.top_k, dim=-1)  # A = top_k
        order_M, offsets_E = sort_by_expert(ids_TA.reshape(-1), self.num_experts)
        weight_M = torch.sigmoid(logits_TA.float()).to(x_TH.dtype).reshape(-1)[order_M]
        rows_MH = x_TH[order_M // self.top_k] * weight_M[:, None]
        inverse_M = invert(order_M)
        out_MH: Tensor = self.routed_experts(rows_MH, offsets_E)[inverse_M]
        return out_MH if self.top_k == 1 else out_MH.reshape(-1, self.top_k, x_TH.shape[-1]).sum(1)

"""`ThunderBatchedExperts`: the experts for exchanges that deliver a block of rows for each expert (DeepEP low latency).
Called by methods and vLLM's FusedMoEKernel; extends experts.

Legend: E experts of this rank, R rows of an expert's block, H hidden_size.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

from thunder_moe.integrations.vllm.experts import ThunderExperts


class ThunderBatchedExperts(ThunderExperts):
    """`ThunderExperts` of (E, R, H) with the rows in use of each expert; the exchange applies the router's weights.

    All E * R rows go through `moe_route` as tokens of one expert. Rows that are not in use have no expert; their
    outputs are 0.
    """

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Return False, because vLLM's exchanges of this format raise otherwise; they send 16 bits anyway."""
        return False

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return bool(moe_parallel_config.use_batched_activation_format)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceDelegate:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        """Return no workspaces but the output (E, R, H)."""
        return (0,), (0,), (local_num_experts, M, K)

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Return (E, R, 2I, H, A)."""
        return w1.shape[0], a1.shape[1], w1.shape[1], a1.shape[2], topk_ids.shape[1]

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: MoEActivation, global_num_experts: int, expert_map: Tensor | None, a1q_scale: Tensor | None,
        a2_scale: Tensor | None, workspace13: Tensor, workspace2: Tensor, expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Run like `ThunderExperts.apply`, (E, R, H) into (E, R, H); `expert_tokens_meta` has the rows in use."""
        experts, rows, width = hidden_states.shape
        device = hidden_states.device
        used = expert_tokens_meta.expert_num_tokens[:experts, None]
        expert = torch.arange(experts, dtype=torch.int32, device=device)[:, None]
        ids = torch.where(torch.arange(rows, device=device) < used, expert, -1).view(-1, 1)  # [E * R, 1]
        ones = torch.ones(ids.shape, device=device)
        output.copy_(self.run(hidden_states.reshape(-1, width), ids, ones, activation).view_as(output))

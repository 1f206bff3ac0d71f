"""`ThunderLoRAExperts`: the experts of the plugin with an adapter for each token, for `vllm serve --enable-lora`.
Called by methods and vLLM's FusedMoEKernel, whose FusedMoEWithLoRA holds the adapters; calls experts, ops and
lora_kernels.

route, gather -> gate_up GEMM + (x A^T) B^T -> activation -> down GEMM, weighted sum + that of (h A^T) B^T

The 4-bit GEMMs have their rows sorted by expert. Those of adapters have them sorted by (adapter, expert): a group of
rows for each pair, so that one grouped GEMM serves all adapters of a batch. On CUDA the kernels of lora_kernels (few
tokens) and lora_sorted (many) add them. Nothing synchronises with the host on CUDA.

With --fully-sharded-loras each tensor-parallel rank has a share of the rank of gate's and up's A, and of down's B the
rows of a share of H: what their A's made is gathered, or summed, between the ranks, and down's adapters add to that
share of H alone.

Legend: T tokens, A = top_k, M = T * A rows, E experts of this rank, S adapters that are loaded, H hidden_size,
I intermediate_size of this rank, R rank of the adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.triton_utils import HAS_TRITON

from thunder_moe.integrations.vllm.expert_map import local_ids
from thunder_moe.integrations.vllm.experts import FUSED, ThunderExperts, grouped
from thunder_moe.ops import combine, grouped_linear  # noqa: F401  (registers the operators)
from thunder_moe.routing import gather_rows, scale_of_rows

# Rows of a batch. Qwen3-30B-A3B's experts, rank 16, 4 adapters in a batch, H200, us per slot and sorted: 8 tokens 97
# and 162, 128 tokens 210 and 280, 512 tokens 383 and 347 (one adapter: 400 and 318).
_FEW = 2048

__all__ = ["ThunderLoRAExperts", "experts_class", "why_no_adapters"]


def experts_class(moe_config: FusedMoEConfig) -> type[ThunderExperts]:
    """The class of the experts of a layer."""
    return ThunderLoRAExperts if moe_config.is_lora_enabled else ThunderExperts


def why_no_adapters(moe_config: FusedMoEConfig) -> str | None:
    """Why a layer of a server with --enable-lora cannot run on `ThunderLoRAExperts`; None where it can."""
    parallel = moe_config.moe_parallel_config
    if not moe_config.is_lora_enabled:
        return None
    if parallel.dp_size > 1:
        # prepare_tensors of its LoRAKernelMeta returns early and the exchange of tokens sends what it left.
        return "LoRA with data parallelism: ranks without adapters in a batch send the others those of an older batch"
    if parallel.enable_eplb:
        return "LoRA with EPLB: experts would move, and their adapters would not"
    return None


@dataclass
class _Batch:
    """What both ways to add adapters need.

    Attributes:
        context: vLLM's, with the adapters.
        ids: int32 (T, A), experts of this rank, or -1.
        adapters: integers (T,), anything outside of [0, S) for none.
        weights: (T, A), the router's.
        row_slot: int32 (M,), slot_row: int32 (T, A), the order of the 4-bit GEMMs' rows.
        activation: of the layer.
    """

    context: MoELoRAContext
    ids: Tensor
    adapters: Tensor
    weights: Tensor
    row_slot: Tensor
    slot_row: Tensor
    activation: MoEActivation

    def __post_init__(self) -> None:
        self.sharded = self.context.fully_sharded and self.context.tp_size > 1
        # One adapter of gate and up (FusedMoE3DWithLoRA) has the rows of B in the checkpoint's order.
        self.in_turns = self.activation == MoEActivation.SWIGLUOAI and self.context.w13_num_slices == 1

    def gathered(self, inner: Tensor) -> Tensor:
        """What gate's or up's A made (..., R), of the shares of R that the ranks have."""
        return tensor_model_parallel_all_gather(inner.contiguous()) if self.sharded else inner

    def summed(self, inner: Tensor) -> Tensor:
        """What down's A made (..., R), of the shares of I that the ranks have. Without shares of B, which each rank
        multiplies by then, its outputs are summed instead."""
        return tensor_model_parallel_all_reduce(inner.contiguous()) if self.sharded else inner

    def own_share(self, out: Tensor) -> Tensor:
        """The columns of the output (T, H) that this rank's B of down adds to."""
        if not self.sharded:
            return out
        columns = self.context.w2_lora_b_stacked[0].shape[2]
        return out.narrow(1, self.context.tp_rank * columns, columns)


class _PerSlot(_Batch):
    """A program of a kernel for each slot: few launches, but each reads the adapter by itself."""

    def add_to_rows(self, gate_up: Tensor, hidden_states: Tensor) -> None:
        """Adds what the adapters make of (T, H) to gate and up (M, 2I), in place."""
        from thunder_moe.integrations.vllm.lora_kernels import expand_rows, shrink

        inner = shrink(hidden_states, None, self.ids, self.adapters, self.context.w13_lora_a_stacked)
        inner, b = self.gathered(inner), self.context.w13_lora_b_stacked
        if self.in_turns:
            inner, b = inner.expand(2, -1, -1).contiguous(), (b[0][:, :, ::2], b[0][:, :, 1::2])
        expand_rows(gate_up, inner, self.slot_row, self.ids, self.adapters, b)

    def add_to_tokens(self, out: Tensor, gated: Tensor) -> None:
        """Adds the weighted sums of what they make of (M, I) to the output (T, H), in place."""
        from thunder_moe.integrations.vllm.lora_kernels import expand_tokens, shrink

        inner = shrink(gated, self.slot_row, self.ids, self.adapters, self.context.w2_lora_a_stacked)
        out, inner, b = self.own_share(out), self.summed(inner), self.context.w2_lora_b_stacked[0]
        expand_tokens(out, inner, self.weights, self.ids, self.adapters, b)


class _Grouped(_Batch):
    """Grouped GEMMs of rows sorted by (adapter, expert); their ends are int32 (S * E,)."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        loaded, self.experts = self.context.w13_lora_b_stacked[0].shape[:2]
        known = (self.ids >= 0) & ((self.adapters >= 0) & (self.adapters < loaded))[:, None]
        pairs = torch.where(known, self.adapters[:, None].to(torch.int32) * self.experts + self.ids, -1)
        routed = torch.ops.thunder_moe.moe_route(pairs, loaded * self.experts)
        self.own_row_slot, self.ends, self.own_slot_row = routed

    def add_to_rows(self, gate_up: Tensor, hidden_states: Tensor) -> None:
        """As `_PerSlot.add_to_rows`."""
        x = gather_rows(hidden_states, self.own_row_slot)  # [M, H]
        pairs = zip(self.context.w13_lora_a_stacked, self.context.w13_lora_b_stacked, strict=True)
        parts = [self._linear(self._exchanged(self._linear(x, a), self.gathered), b) for a, b in pairs]
        if self.in_turns:
            parts = [parts[0][:, ::2], parts[0][:, 1::2]]
        change = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        at = self.own_slot_row.flatten()[self.row_slot.clamp(0, self.row_slot.shape[0] - 1).long()]
        of_row = change.index_select(0, at.clamp_min(0).long()).masked_fill_((at < 0)[:, None], 0)
        gate_up.add_(of_row)

    def add_to_tokens(self, out: Tensor, gated: Tensor) -> None:
        """As `_PerSlot.add_to_tokens`."""
        at = self.slot_row.flatten()[self.own_row_slot.clamp(0, self.own_row_slot.shape[0] - 1).long()]
        x = gated.index_select(0, at.clamp_min(0).long())  # [M, I]
        inner = self._exchanged(self._linear(x, self.context.w2_lora_a_stacked[0]), self.summed)
        scale = scale_of_rows(self.weights, self.own_row_slot)
        assert scale is not None
        change = self._linear((inner * scale[:, None]).to(inner.dtype), self.context.w2_lora_b_stacked[0])
        self.own_share(out).add_(torch.ops.thunder_moe.moe_combine(change, self.ends, self.own_slot_row))

    def _exchanged(self, inner: Tensor, exchange: Callable[[Tensor], Tensor]) -> Tensor:
        """`gathered` or `summed` of rows (M, R), in the order of slots on the way: another rank may have the same
        adapters in other places, so other rows in the same order (vLLM fills places in the order of a set of names)."""
        if not self.sharded:
            return inner
        at = self.own_slot_row.flatten().long()
        by_slot = inner.index_select(0, at.clamp_min(0)).masked_fill_((at < 0)[:, None], 0)
        every = exchange(by_slot)
        return every.index_select(0, self.own_row_slot.clamp(0, at.shape[0] - 1).long())

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (M, K) times the weight (S, E, N, K) of each row's pair, or (S, 1, N, K) of its adapter -> (M, N); zeros
        past the last end."""
        ends = self.ends
        if weight.shape[1] != self.experts:
            ends = ends[self.experts - 1 :: self.experts].contiguous()
        out: Tensor = torch.ops.thunder_moe.grouped_linear(x.to(weight.dtype), weight.flatten(0, 1), ends)
        return out


class _Sorted(_Grouped):
    """As `_Grouped`, by kernels that read the rows where they are and write the sums of gate and up in place. Each rank
    has whole adapters."""

    def __init__(self, *fields: Any) -> None:
        from thunder_moe.integrations.vllm.lora_sorted import blocks

        super().__init__(*fields)
        self.blocks = blocks(self.ends, self.own_row_slot, self.experts)

    def add_to_rows(self, gate_up: Tensor, hidden_states: Tensor) -> None:
        """As `_PerSlot.add_to_rows`."""
        from thunder_moe.integrations.vllm.lora_sorted import expand_rows, shrink

        inner = shrink(hidden_states, self.blocks, self.ids.shape[1], None, self.context.w13_lora_a_stacked)
        b = self.context.w13_lora_b_stacked
        if self.in_turns:
            inner, b = inner.expand(2, -1, -1).contiguous(), (b[0][:, :, ::2], b[0][:, :, 1::2])
        expand_rows(gate_up, inner, self.blocks, self.slot_row, b)

    def add_to_tokens(self, out: Tensor, gated: Tensor) -> None:
        """As `_PerSlot.add_to_tokens`."""
        from thunder_moe.integrations.vllm.lora_sorted import expand, shrink

        inner = shrink(gated, self.blocks, self.ids.shape[1], self.slot_row, self.context.w2_lora_a_stacked)
        change = expand(inner, self.blocks, self.weights, self.context.w2_lora_b_stacked[0])
        out.add_(torch.ops.thunder_moe.moe_combine(change, self.ends, self.own_slot_row))


class ThunderLoRAExperts(LoRAExpertsMixin, ThunderExperts):  # type: ignore[misc]
    """`ThunderExperts` plus the adapter of each token, or none, by what vLLM sets as `_lora_context`."""

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: MoEActivation, global_num_experts: int, expert_map: Tensor | None, a1q_scale: Tensor | None,
        a2_scale: Tensor | None, workspace13: Tensor, workspace2: Tensor, expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """As `ThunderExperts.apply`, with the adapters that the batch has."""
        context = self._lora_context
        adapters = None if context is None else adapter_of_token(context, hidden_states.shape[0])
        if adapters is None:
            super().apply(
                output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
                a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
            )  # fmt: skip
            return
        ids = local_ids(topk_ids, expert_map)
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        output.copy_(self._with_adapters(hidden_states, ids, weights, adapters, activation))

    def _with_adapters(
        self, hidden_states: Tensor, ids: Tensor, weights: Tensor, adapters: Tensor, activation: MoEActivation
    ) -> Tensor:
        ops, first, second = torch.ops.thunder_moe, self.gate_up, self.down
        assert self._lora_context is not None
        row_slot, offsets, slot_row = ops.moe_route(ids, first.shape[0])
        kind = _kind(ids, self._lora_context)
        ids, weights, hidden_states = ids.contiguous(), weights.contiguous(), hidden_states.contiguous()
        batch = kind(self._lora_context, ids, adapters, weights, row_slot, slot_row, activation)
        rows = gather_rows(hidden_states, row_slot)  # [M, H]
        gate_up = grouped("f16a_nvfp4weight_scaled_grouped_mm", rows, first, offsets)
        del rows
        biases = self.biases
        if biases:
            gate_up = ops.grouped_bias(gate_up, offsets, biases["gate_up_bias"])
        batch.add_to_rows(gate_up, hidden_states)
        gated = self._activate(gate_up, offsets, activation)  # [M, I]
        del gate_up
        name, more = "f16a_nvfp4weight_grouped_mm_combine", (slot_row, weights, biases.get("down_bias"))
        out = grouped(name, gated, second, offsets, *more)
        batch.add_to_tokens(out, gated)
        return out

    def _activate(self, gate_up: Tensor, offsets: Tensor, activation: MoEActivation) -> Tensor:
        """(M, 2I) -> (M, I); rows past the last end may hold anything."""
        if activation in FUSED:
            form = self._form(activation)
            out: Tensor = torch.ops.thunder_moe.scaled_activation(
                gate_up, None, offsets, alpha=form.alpha, limit=form.limit, up_shift=form.up_shift
            )
            return out
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self.activation(activation, gated, gate_up)
        return gated


def _kind(ids: Tensor, context: MoELoRAContext) -> type[_PerSlot | _Grouped]:
    """How the adapters of the rows of these experts (T, A) are added."""
    if not HAS_TRITON or not ids.is_cuda:
        return _Grouped
    if ids.numel() <= _FEW:
        return _PerSlot
    return _Grouped if context.fully_sharded and context.tp_size > 1 else _Sorted


def adapter_of_token(context: Any, tokens: int) -> Tensor | None:
    """The adapter of each token, integers (T,), numbers below 0 for none; None where no token of the batch has one.

    Args:
        context: vLLM's MoELoRAContext.
        tokens: T, of which the last ones may be padding of a CUDA graph.
    """
    wrapper = context.punica_wrapper
    meta = getattr(wrapper, "token_mapping_meta", None)
    if meta is not None:  # CUDA: the flag is on the host; while it is set, the mapping is that of an older batch
        return None if bool(meta.no_lora_flag_cpu) else meta.token_lora_mapping[:tokens]
    found: Tensor = wrapper.token_lora_indices
    if found.shape[0] != tokens:
        raise ValueError(f"token_lora_indices: got those of {found.shape[0]} tokens, wanted {tokens}")
    return found if bool((found >= 0).any()) else None

"""`ThunderLoRAExperts`: the experts of the plugin with an adapter for each token, for `vllm serve --enable-lora`.
Called by methods and vLLM's FusedMoEKernel, whose FusedMoEWithLoRA holds the adapters; calls experts, ops and
lora_kernels.

route, gather -> gate_up GEMM + (x A^T) B^T -> activation -> down GEMM + (h A^T) B^T, weighted sum

The 4-bit GEMMs have their rows sorted by expert. The GEMMs of adapters have them sorted by (adapter, expert): a group
of rows for each pair, so that one grouped GEMM serves all adapters of a batch. On CUDA the kernels of lora_kernels (few
tokens) and lora_sorted (many) add the adapters. Nothing synchronises with the host on CUDA.

With --fully-sharded-loras the tensor-parallel ranks share the adapter's rank of gate's and up's A, and the rows of
down's B. The products with gate's and up's A are gathered from the ranks, the products with down's A are summed. Each
rank then adds down's adapters to its share of H.

Legend: T tokens, A = top_k, M = T * A rows, E experts of this rank, S adapters that are loaded, H hidden_size,
I intermediate_size of this rank, R rank of the adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.triton_utils import HAS_TRITON

from thunder_moe.integrations.vllm.experts import ThunderExperts
from thunder_moe.ops import combine, grouped_linear  # noqa: F401  (registers the operators)
from thunder_moe.routing import gather_rows, scale_of_rows

# Up to this number of rows `_PerSlot` is faster. Qwen3-30B-A3B's experts, rank 16, 4 adapters in a batch, H200, us per
# slot and sorted: 8 tokens 97 and 162, 128 tokens 210 and 280, 512 tokens 383 and 347 (one adapter: 400 and 318).
_PER_SLOT_ROWS = 2048


@dataclass
class _Batch:
    """The adapters and the routing of a batch, and the exchanges between ranks.

    Attributes:
        context: vLLM's object with the adapters.
        ids: int32 (T, A), experts of this rank, or -1.
        adapters: integers (T,); numbers outside of [0, S) mean none.
        weights: (T, A), the router's.
        activation: of the layer.
        row_slot: int32 (M,), the slot of each row of the 4-bit GEMMs.
        slot_row: int32 (T, A), the row of each slot.
    """

    context: MoELoRAContext
    ids: Tensor
    adapters: Tensor
    weights: Tensor
    activation: MoEActivation
    row_slot: Tensor
    slot_row: Tensor

    def __post_init__(self) -> None:
        self.sharded = self.context.fully_sharded and self.context.tp_size > 1
        # A common adapter of gate and up (FusedMoE3DWithLoRA) has the rows of B in the checkpoint's order.
        self.alternates = self.activation == MoEActivation.SWIGLUOAI and self.context.w13_num_slices == 1

    def gathered(self, inner: Tensor) -> Tensor:
        """Gather the products with gate's or up's A (..., R) from the ranks that share R."""
        return tensor_model_parallel_all_gather(inner.contiguous()) if self.sharded else inner

    def summed(self, inner: Tensor) -> Tensor:
        """Sum the products with down's A (..., R) over the ranks, which share I, if they share B's rows.

        Otherwise each rank multiplies by the whole B, and vLLM sums the outputs."""
        return tensor_model_parallel_all_reduce(inner.contiguous()) if self.sharded else inner

    def own_share(self, out: Tensor) -> Tensor:
        """Return the columns of the output (T, H) that this rank's B of down adds to."""
        if not self.sharded:
            return out
        columns = self.context.w2_lora_b_stacked[0].shape[2]
        return out.narrow(1, self.context.tp_rank * columns, columns)


class _PerSlot(_Batch):
    """Adds adapters with one program of a kernel per slot: few launches, but each slot reads its adapter separately."""

    def add_to_rows(self, gate_up: Tensor, hidden_states: Tensor) -> None:
        """Adds the adapters' outputs for (T, H) to gate and up (M, 2I), in place."""
        from thunder_moe.integrations.vllm.lora_kernels import expand_rows, shrink

        inner = shrink(hidden_states, None, self.ids, self.adapters, self.context.w13_lora_a_stacked)
        inner, b = self.gathered(inner), self.context.w13_lora_b_stacked
        if self.alternates:
            inner, b = inner.expand(2, -1, -1).contiguous(), (b[0][:, :, ::2], b[0][:, :, 1::2])
        expand_rows(gate_up, inner, self.slot_row, self.ids, self.adapters, b)

    def add_to_tokens(self, out: Tensor, gated: Tensor) -> None:
        """Adds the weighted sums of the adapters' outputs for (M, I) to the output (T, H), in place."""
        from thunder_moe.integrations.vllm.lora_kernels import expand_tokens, shrink

        inner = shrink(gated, self.slot_row, self.ids, self.adapters, self.context.w2_lora_a_stacked)
        out, inner, b = self.own_share(out), self.summed(inner), self.context.w2_lora_b_stacked[0]
        expand_tokens(out, inner, self.weights, self.ids, self.adapters, b)


class _Grouped(_Batch):
    """Adds adapters by grouped GEMMs of rows sorted by (adapter, expert), with row ends int32 (S * E,)."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        loaded, self.experts = self.context.w13_lora_b_stacked[0].shape[:2]
        known = (self.ids >= 0) & ((self.adapters >= 0) & (self.adapters < loaded))[:, None]
        pairs = torch.where(known, self.adapters[:, None].to(torch.int32) * self.experts + self.ids, -1)
        routed = torch.ops.thunder_moe.moe_route(pairs, loaded * self.experts)
        self.pair_row_slot, self.ends, self.pair_slot_row = routed

    def add_to_rows(self, gate_up: Tensor, hidden_states: Tensor) -> None:
        """Adds like `_PerSlot.add_to_rows`."""
        x = gather_rows(hidden_states, self.pair_row_slot)  # [M, H]
        pairs = zip(self.context.w13_lora_a_stacked, self.context.w13_lora_b_stacked, strict=True)
        parts = [self._linear(self._exchanged(self._linear(x, a), self.gathered), b) for a, b in pairs]
        if self.alternates:
            parts = [parts[0][:, ::2], parts[0][:, 1::2]]
        change = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        at = self.pair_slot_row.flatten()[self.row_slot.clamp(0, self.row_slot.shape[0] - 1).long()]
        of_row = change.index_select(0, at.clamp_min(0).long()).masked_fill_((at < 0)[:, None], 0)
        gate_up.add_(of_row)

    def add_to_tokens(self, out: Tensor, gated: Tensor) -> None:
        """Adds like `_PerSlot.add_to_tokens`."""
        at = self.slot_row.flatten()[self.pair_row_slot.clamp(0, self.pair_row_slot.shape[0] - 1).long()]
        x = gated.index_select(0, at.clamp_min(0).long())  # [M, I]
        inner = self._exchanged(self._linear(x, self.context.w2_lora_a_stacked[0]), self.summed)
        scale = scale_of_rows(self.weights, self.pair_row_slot)
        assert scale is not None
        change = self._linear((inner * scale[:, None]).to(inner.dtype), self.context.w2_lora_b_stacked[0])
        self.own_share(out).add_(torch.ops.thunder_moe.moe_combine(change, self.ends, self.pair_slot_row))

    def _exchanged(self, inner: Tensor, exchange: Callable[[Tensor], Tensor]) -> Tensor:
        """Run `gathered` or `summed` on rows (M, R), in the order of slots.

        Another rank may have the same adapters at other indices, and so its rows in another order: vLLM assigns indices
        in the order of a set of names."""
        if not self.sharded:
            return inner
        at = self.pair_slot_row.flatten().long()
        by_slot = inner.index_select(0, at.clamp_min(0)).masked_fill_((at < 0)[:, None], 0)
        exchanged = exchange(by_slot)
        return exchanged.index_select(0, self.pair_row_slot.clamp(0, at.shape[0] - 1).long())

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x (M, K) by the weight of each row's pair (S, E, N, K), or of its adapter (S, 1, N, K) -> (M, N).

        Rows past the last end are zeros."""
        ends = self.ends
        if weight.shape[1] != self.experts:
            ends = ends[self.experts - 1 :: self.experts].contiguous()
        return torch.ops.thunder_moe.grouped_linear(x.to(weight.dtype), weight.flatten(0, 1), ends)


class _Sorted(_Grouped):
    """`_Grouped` with kernels that gather rows themselves and add to gate and up in place; for unsharded adapters."""

    def __init__(self, *fields: Any) -> None:
        from thunder_moe.integrations.vllm.lora_sorted import blocks

        super().__init__(*fields)
        self.blocks = blocks(self.ends, self.pair_row_slot, self.experts)

    def add_to_rows(self, gate_up: Tensor, hidden_states: Tensor) -> None:
        """Adds like `_PerSlot.add_to_rows`."""
        from thunder_moe.integrations.vllm.lora_sorted import expand_rows, shrink

        inner = shrink(hidden_states, self.blocks, self.ids.shape[1], None, self.context.w13_lora_a_stacked)
        b = self.context.w13_lora_b_stacked
        if self.alternates:
            inner, b = inner.expand(2, -1, -1).contiguous(), (b[0][:, :, ::2], b[0][:, :, 1::2])
        expand_rows(gate_up, inner, self.blocks, self.slot_row, b)

    def add_to_tokens(self, out: Tensor, gated: Tensor) -> None:
        """Adds like `_PerSlot.add_to_tokens`."""
        from thunder_moe.integrations.vllm.lora_sorted import expand, shrink

        inner = shrink(gated, self.blocks, self.ids.shape[1], self.slot_row, self.context.w2_lora_a_stacked)
        change = expand(inner, self.blocks, self.weights, self.context.w2_lora_b_stacked[0])
        out.add_(torch.ops.thunder_moe.moe_combine(change, self.ends, self.pair_slot_row))


class ThunderLoRAExperts(LoRAExpertsMixin, ThunderExperts):  # type: ignore[misc]
    """`ThunderExperts` plus each token's adapter, if it has one; vLLM sets the adapters as `_lora_context`."""

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return False

    def _run_into(
        self, output: Tensor, hidden_states: Tensor, ids: Tensor, weights: Tensor, activation: MoEActivation, ranks: int
    ) -> None:
        context = self._lora_context
        adapters = None if context is None else adapter_of_token(context, hidden_states.shape[0])
        if context is None or adapters is None:
            super()._run_into(output, hidden_states, ids, weights, activation, ranks)
            return
        hidden_states, ids, weights = hidden_states.contiguous(), ids.contiguous(), weights.contiguous()
        batch = partial(_strategy(ids, context), context, ids, adapters, weights, activation)
        output.copy_(self._run_by_steps(hidden_states, ids, weights, activation, batch))


def _strategy(ids: Tensor, context: MoELoRAContext) -> type[_PerSlot | _Grouped]:
    """Return the class that adds the adapters of a batch with these experts (T, A)."""
    if not HAS_TRITON or not ids.is_cuda:
        return _Grouped
    if ids.numel() <= _PER_SLOT_ROWS:
        return _PerSlot
    return _Grouped if context.fully_sharded and context.tp_size > 1 else _Sorted


def adapter_of_token(context: Any, tokens: int) -> Tensor | None:
    """Return the adapter of each token, integers (T,), negative for none; None if no token of the batch has one.

    The last of the T tokens may be padding of a CUDA graph.
    """
    wrapper = context.punica_wrapper
    meta = getattr(wrapper, "token_mapping_meta", None)
    if meta is not None:  # CUDA: the flag is on the host; while it is set, the mapping belongs to an older batch
        return None if bool(meta.no_lora_flag_cpu) else meta.token_lora_mapping[:tokens]
    found: Tensor = wrapper.token_lora_indices
    if found.shape[0] != tokens:
        raise ValueError(f"token_lora_indices: got one for {found.shape[0]} tokens each, wanted {tokens}")
    return found if bool((found >= 0).any()) else None

"""The forwards of modules whose experts are spread over ranks, as subclasses; parallel.styles changes modules to them.
Called by users through those modules; calls parallel.exchange and load, nn, and the operators that route and combine.

Expert parallel:  start the exchange -> shared expert meanwhile -> this rank's experts -> sums back
Tensor parallel:  each rank's columns of gate and up, its rows of down -> sum over the ranks
Both:             expert parallel over one dimension of the mesh, then a sum over the other

Legend: T tokens, A = top_k, M rows sorted by expert, E experts, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from thunder_moe.kernels.experts import ExpertsCall
from thunder_moe.kernels.select import select
from thunder_moe.nn import GroupedSwiGLU, Llama4MoE, NVFP4GroupedSwiGLU
from thunder_moe.nn.autocast import autocast_rows
from thunder_moe.nn.quantized import weights_to_fuse
from thunder_moe.ops import route, router  # noqa: F401  (registers the operators)
from thunder_moe.ops.checks import check_offset_values
from thunder_moe.ops.experts import moe_experts
from thunder_moe.ops.operator import is_plain_eager
from thunder_moe.parallel.exchange import Exchange, Sent, wait
from thunder_moe.parallel.load import load_buffers, record
from thunder_moe.parallel.shards import weight_sharding_of
from thunder_moe.routing import expert_of_row, live_rows
from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP

__all__ = ["EXPERT_PARALLEL", "EXPERT_TENSOR_PARALLEL", "TENSOR_PARALLEL"]


class _ExpertParallelRows(nn.Module):
    """Expert-parallel experts that take rows (M, H) sorted by expert and the row ends of all E experts.

    The rows are this rank's. The result is (M, H), with zeros past the last row end."""

    exchange: Exchange

    def forward(self, x: Tensor, offsets: Tensor, scales: Tensor | None = None, **buffers: Any) -> Tensor:
        if buffers:
            raise ValueError(f"{' and '.join(buffers)}: got it with experts on several ranks, wanted none of it")
        wanted = self.exchange.ranks * self.exchange.experts
        if offsets.shape != (wanted,):
            raise ValueError(f"offsets: got shape {tuple(offsets.shape)}, wanted ({wanted},), one end per expert")
        if not torch.compiler.is_compiling():
            check_offset_values(offsets, x.shape[0], "x")
        _refuse_broadcast(self, self.exchange.mesh)
        expert_M = torch.where(live_rows(offsets, x.shape[0])[:, 0], expert_of_row(offsets, x.shape[0]), -1)
        sent = self.exchange.start(x, expert_M[:, None], None if scales is None else scales[:, None])
        ids, weights = sent.receive_routing()
        row_slot, ends, slot_row = torch.ops.thunder_moe.moe_route(ids, self.exchange.experts)
        record(self, ends, sent.overflow)
        rows, order = sent.receive_rows(), row_slot.long()
        base: Any = super()
        if scales is None or weights is None:
            out = base.forward(rows.index_select(0, order), ends)
        else:
            own_scales = weights[:, 0].index_select(0, order).to(scales.dtype)
            out = base.forward(rows.index_select(0, order), ends, own_scales)
        sums: Tensor = self.exchange.combine(torch.ops.thunder_moe.moe_combine(out, ends, slot_row), sent)
        return sums


class ExpertParallelGroupedSwiGLU(_ExpertParallelRows, GroupedSwiGLU):
    """`GroupedSwiGLU` with a part of the experts on each rank."""


class ExpertParallelGroupedMLP(_ExpertParallelRows, GroupedMLP):
    """`GroupedMLP` with a part of the experts on each rank."""


class ExpertParallelNVFP4GroupedSwiGLU(_ExpertParallelRows, NVFP4GroupedSwiGLU):
    """`NVFP4GroupedSwiGLU` with a part of the experts on each rank."""


class ExpertParallelNVFP4GroupedMLP(_ExpertParallelRows, NVFP4GroupedMLP):
    """`NVFP4GroupedMLP` with a part of the experts on each rank."""


class ExpertParallelLlama4MoE(Llama4MoE):
    """`Llama4MoE` with a part of the routed experts on each rank, and router and shared expert on all."""

    exchange: Exchange
    chunks: int

    def forward(self, hidden_states: Tensor) -> Tensor:
        x_TH = self.tokens_of(hidden_states)
        return self.run_expert_parallel(x_TH, lambda: self.router(x_TH)).reshape(hidden_states.shape)

    def run_expert_parallel(self, x_TH: Tensor, logits: Callable[[], Tensor]) -> Tensor:
        """Run routed experts and shared expert, (T, H) -> (T, H); `logits` returns the router's logits (T, E)."""
        _refuse_broadcast(self, self.exchange.mesh)
        rows = autocast_rows(x_TH).tensor_split(self.chunks)
        early = [self.exchange.send(part) for part in rows]  # these collectives run while the router chooses
        scores_TA, ids_TA, *_ = torch.ops.thunder_moe.moe_router(
            logits(), top_k=self.top_k, score="sigmoid", normalize=False, scores_dtype=torch.float32
        )
        chosen = (t.tensor_split(self.chunks) for t in (ids_TA, scores_TA))
        all_sent = [self.exchange.start(*part) for part in zip(rows, *chosen, early, strict=True)]
        shared_TH = None if self.shared_expert is None else self.shared_expert(x_TH)
        # The experts of a chunk run while the next chunk and the sums of the last one travel.
        returned = [self._send_back(sent) for sent in all_sent]
        outs = [self.exchange.finish(back, sent) for back, sent in zip(returned, all_sent, strict=True)]
        out_TH = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out_TH if shared_TH is None else out_TH + shared_TH

    def _send_back(self, sent: Sent) -> Any:
        """Runs this rank's experts on the received tokens (T', H), and starts to send their weighted sums back.

        Returns the argument `returned` of `Exchange.finish`."""
        ids, weights = sent.receive_routing()
        assert weights is not None
        row_slot, ends, slot_row = torch.ops.thunder_moe.moe_route(ids, self.exchange.experts)
        record(self, ends, sent.overflow)
        rows = sent.receive_rows()
        fused = weights_to_fuse(self.routed_experts)
        if fused is not None:
            order = row_slot, ends, slot_row
            ranks = self.exchange.expert_ranks(self.top_k)
            # Only with one chunk: the exchanges of two chunks would wait for the other ranks by the same signals.
            if self.exchange.sums_rows and self.chunks == 1 and is_plain_eager(rows):
                call = ExpertsCall(
                    rows, ids, weights, *fused, order=order, weight_on_input=True, expert_ranks=ranks, summed=False
                )
                out = select(rows.device, format=fused[0].format.name).moe_experts(call)
                return self.exchange.send_rows_back(out, ends, slot_row)
            sums = moe_experts(rows, ids, weights, *fused, weight_on_input=True, order=order, expert_ranks=ranks)
            return self.exchange.send_back(sums, sent)
        slot = row_slot.long()
        weight_M = weights.flatten().index_select(0, slot).to(rows.dtype)
        own = rows.index_select(0, slot // self.top_k) * weight_M[:, None]
        sums = torch.ops.thunder_moe.moe_combine(self.routed_experts(own, ends), ends, slot_row)
        return self.exchange.send_back(sums, sent)


class _TensorParallelRows(nn.Module):
    """Experts with a part of the intermediate features on each rank; the result is the sum over the ranks."""

    mesh: DeviceMesh

    def forward(self, x: Tensor, offsets: Tensor, scales: Tensor | None = None, **buffers: Any) -> Tensor:
        if buffers:
            raise ValueError(f"{' and '.join(buffers)}: got it with experts on several ranks, wanted none of it")
        _refuse_broadcast(self, self.mesh)
        base: Any = super()
        x = _sum_gradient(x, self.mesh)
        given = () if scales is None else (_sum_gradient(scales, self.mesh),)
        return _sum_of_ranks(base.forward(x, offsets, *given), self.mesh)


class TensorParallelGroupedSwiGLU(_TensorParallelRows, GroupedSwiGLU):
    """`GroupedSwiGLU` with a part of the intermediate features on each rank."""


class TensorParallelGroupedMLP(_TensorParallelRows, GroupedMLP):
    """`GroupedMLP` with a part of the intermediate features on each rank."""


class TensorParallelNVFP4GroupedSwiGLU(_TensorParallelRows, NVFP4GroupedSwiGLU):
    """`NVFP4GroupedSwiGLU` with a part of the intermediate features on each rank."""


class TensorParallelNVFP4GroupedMLP(_TensorParallelRows, NVFP4GroupedMLP):
    """`NVFP4GroupedMLP` with a part of the intermediate features on each rank."""


class TensorParallelLlama4MoE(Llama4MoE):
    """`Llama4MoE` with a part of the intermediate features of routed and shared experts on each rank.

    One sum over the ranks serves both."""

    mesh: DeviceMesh

    def forward(self, hidden_states: Tensor) -> Tensor:
        x_TH = self.tokens_of(hidden_states)
        _refuse_broadcast(self, self.mesh)
        # The router is whole on each rank; its logits and the tokens get the summed gradients of all ranks.
        logits_TE, x_TH = _sum_gradient(self.router(x_TH), self.mesh), _sum_gradient(x_TH, self.mesh)
        out_TH = self.run_experts_by(logits_TE, x_TH)
        if self.shared_expert is not None:
            out_TH = out_TH + self.shared_expert(x_TH)
        return _sum_of_ranks(out_TH, self.mesh).reshape(hidden_states.shape)


class ExpertTensorParallelLlama4MoE(ExpertParallelLlama4MoE):
    """`Llama4MoE` that is expert-parallel over one dimension of a mesh and tensor-parallel over the other.

    The second dimension shards the intermediate features of routed and shared experts; one sum over it serves both."""

    mesh: DeviceMesh

    def forward(self, hidden_states: Tensor) -> Tensor:
        x_TH = self.tokens_of(hidden_states)
        _refuse_broadcast(self, self.mesh)
        logits_TE, x_TH = _sum_gradient(self.router(x_TH), self.mesh), _sum_gradient(x_TH, self.mesh)
        return _sum_of_ranks(self.run_expert_parallel(x_TH, lambda: logits_TE), self.mesh).reshape(hidden_states.shape)


class ExpertTensorParallelGroupedSwiGLU(_TensorParallelRows, ExpertParallelGroupedSwiGLU):
    """`GroupedSwiGLU` with a part of experts and of intermediate features on each rank."""


class ExpertTensorParallelGroupedMLP(_TensorParallelRows, ExpertParallelGroupedMLP):
    """`GroupedMLP` with a part of experts and of intermediate features on each rank."""


class ExpertTensorParallelNVFP4GroupedSwiGLU(_TensorParallelRows, ExpertParallelNVFP4GroupedSwiGLU):
    """`NVFP4GroupedSwiGLU` with a part of experts and of intermediate features on each rank."""


class ExpertTensorParallelNVFP4GroupedMLP(_TensorParallelRows, ExpertParallelNVFP4GroupedMLP):
    """`NVFP4GroupedMLP` with a part of experts and of intermediate features on each rank."""


def _refuse_broadcast(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raises a ValueError if torch's DistributedDataParallel has given all ranks the first one's buffers.

    Packed weights are buffers. It broadcasts them silently when it wraps a model (nccl; gloo does not support 8-bit
    floats)."""
    if torch.compiler.is_compiling():
        return
    ddp: Any = DistributedDataParallel._get_active_ddp_module()
    if ddp is None:
        return
    known = vars(ddp).setdefault("_thunder_moe_known", set())  # ids stay valid: ddp keeps the modules alive
    if (id(module), id(mesh)) in known:
        return
    groups = (dist.get_process_group_ranks(group) for group in (ddp.process_group, mesh.get_group()))
    if len(set.intersection(*map(set, groups))) > 1:
        parts = [child.buffers(recurse=False) for child in module.modules() if weight_sharding_of(child) is not None]
        own = {id(buffer) for buffer in chain(load_buffers(module), *parts)}
        if any(id(buffer) in own for buffer in ddp.modules_buffers):
            raise ValueError(
                f"model: DistributedDataParallel has put the first rank's experts into the {type(module).__name__} of"
                " every rank, wanted their parameters and buffers left out when the model is wrapped:"
                " DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)"
            )
    known.add((id(module), id(mesh)))


def _sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tensor, with a gradient that is the sum of all ranks' gradients."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _sum_of_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over the ranks, computed in place for plain tensors; x gets the gradient of the sum."""
    if is_plain_eager(x):  # a functional collective copies x first: 16 us with 8192 tokens of 2048 features (H200)
        x = x.contiguous()
        dist.all_reduce(x, group=mesh.get_group())
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return (
            DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
        )
    return wait(collectives.all_reduce(x, "sum", mesh.get_group()))


EXPERT_PARALLEL: dict[type[nn.Module], type[nn.Module]] = {
    Llama4MoE: ExpertParallelLlama4MoE,
    GroupedSwiGLU: ExpertParallelGroupedSwiGLU,
    GroupedMLP: ExpertParallelGroupedMLP,
    NVFP4GroupedSwiGLU: ExpertParallelNVFP4GroupedSwiGLU,
    NVFP4GroupedMLP: ExpertParallelNVFP4GroupedMLP,
}
TENSOR_PARALLEL: dict[type[nn.Module], type[nn.Module]] = {
    Llama4MoE: TensorParallelLlama4MoE,
    GroupedSwiGLU: TensorParallelGroupedSwiGLU,
    GroupedMLP: TensorParallelGroupedMLP,
    NVFP4GroupedSwiGLU: TensorParallelNVFP4GroupedSwiGLU,
    NVFP4GroupedMLP: TensorParallelNVFP4GroupedMLP,
}
EXPERT_TENSOR_PARALLEL: dict[type[nn.Module], type[nn.Module]] = {
    Llama4MoE: ExpertTensorParallelLlama4MoE,
    GroupedSwiGLU: ExpertTensorParallelGroupedSwiGLU,
    GroupedMLP: ExpertTensorParallelGroupedMLP,
    NVFP4GroupedSwiGLU: ExpertTensorParallelNVFP4GroupedSwiGLU,
    NVFP4GroupedMLP: ExpertTensorParallelNVFP4GroupedMLP,
}

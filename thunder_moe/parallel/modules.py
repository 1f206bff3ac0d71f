"""The forwards of modules whose experts are spread over ranks: `make_parallel` gives a module its own.
Called by parallel.styles, and by users who call the modules; calls parallel.exchange and load, nn, and the operators
that route and combine.

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
from thunder_moe.parallel.shards import set_forward, weight_sharding_of
from thunder_moe.routing import expert_of_row, live_rows
from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP

PARALLEL = (Llama4MoE, GroupedSwiGLU, GroupedMLP, NVFP4GroupedSwiGLU, NVFP4GroupedMLP)


def make_parallel(module: nn.Module, exchange: Exchange | None, chunks: int, mesh: DeviceMesh | None) -> None:
    """Give a module of `PARALLEL` the forward of a module whose weights are spread over ranks.

    The module stays the same object of the same class, because parallelize_module ignores what a style returns for a
    part of a model.

    Args:
        module: one whose weights `shard_weight_` has sharded.
        exchange: sends tokens to the ranks of their experts; None if each rank has all experts.
        chunks: number of chunks of a `Llama4MoE`'s tokens.
        mesh: the ranks that share the intermediate features; None if each rank has all features.
    """
    made: Any = module
    made.exchange, made.chunks, made.mesh = exchange, chunks, mesh
    set_forward(module, _layer_forward if isinstance(module, Llama4MoE) else _rows_forward)


def _rows_forward(experts: Any, x: Tensor, offsets: Tensor, scales: Tensor | None = None, **buffers: Any) -> Tensor:
    """Run experts that take rows (M, H) sorted by expert and the row ends of all E experts.

    The rows are this rank's, and the same on the ranks of `mesh`. The result is (M, H)."""
    if buffers:
        raise ValueError(f"{' and '.join(buffers)}: got it with experts on several ranks, wanted none of it")
    exchange, mesh = experts.exchange, experts.mesh
    if mesh is not None:
        _refuse_broadcast(experts, mesh)
        x, scales = sum_gradient(x, mesh), None if scales is None else sum_gradient(scales, mesh)
    run = _run_rows if exchange is None else exchange_rows
    out = run(experts, x, offsets, scales)
    return out if mesh is None else sum_of_ranks(out, mesh)


def _run_rows(experts: Any, x: Tensor, offsets: Tensor, scales: Tensor | None) -> Tensor:
    return type(experts).forward(experts, x, offsets, *(() if scales is None else (scales,)))


def exchange_rows(experts: Any, x: Tensor, offsets: Tensor, scales: Tensor | None) -> Tensor:
    """Run experts on all ranks' rows; the result has zeros past the last row end."""
    exchange: Exchange = experts.exchange
    wanted = exchange.ranks * exchange.experts
    if offsets.shape != (wanted,):
        raise ValueError(f"offsets: got shape {tuple(offsets.shape)}, wanted ({wanted},), one end per expert")
    if not torch.compiler.is_compiling():
        check_offset_values(offsets, x.shape[0], "x")
    _refuse_broadcast(experts, exchange.mesh)
    expert_M = torch.where(live_rows(offsets, x.shape[0])[:, 0], expert_of_row(offsets, x.shape[0]), -1)
    sent = _start(exchange, experts, x, expert_M[:, None], None if scales is None else scales[:, None])
    ids, weights = sent.receive_routing()
    row_slot, ends, slot_row = torch.ops.thunder_moe.moe_route(ids, exchange.experts)
    record(experts, ends, sent.overflow)
    rows, order = sent.receive_rows(), row_slot.long()
    if scales is not None:
        assert weights is not None
        scales = weights[:, 0].index_select(0, order).to(scales.dtype)
    out = _run_rows(experts, rows.index_select(0, order), ends, scales)
    return exchange.combine(torch.ops.thunder_moe.moe_combine(out, ends, slot_row), sent)


def _start(exchange: Exchange, experts: nn.Module, *args: Any) -> Sent:
    """Start an exchange, with the 8-bit recipes of the experts' first and last products if it takes them."""
    if not exchange.takes_recipes:
        return exchange.start(*args)
    of_linear = {name: getattr(part, "recipe", None) for name, part in experts.named_children() if "_proj" in name}
    last = of_linear.pop("down_proj")
    first = set(of_linear.values())
    takes: Any = exchange
    sent: Sent = takes.start(*args, recipes=(first.pop() if len(first) == 1 else None, last))
    return sent


def _layer_forward(moe: Any, hidden_states: Tensor) -> Tensor:
    """Run a `Llama4MoE`: (B, S, H) -> (B, S, H)."""
    x_TH, mesh = moe.tokens_of(hidden_states), moe.mesh
    if mesh is None:
        return exchange_layer(moe, x_TH, lambda: moe.router(x_TH)).reshape(hidden_states.shape)
    _refuse_broadcast(moe, mesh)
    # The router is whole on each rank; its logits and the tokens get the summed gradients of all ranks.
    logits_TE, x_TH = sum_gradient(moe.router(x_TH), mesh), sum_gradient(x_TH, mesh)
    if moe.exchange is not None:
        out_TH = exchange_layer(moe, x_TH, lambda: logits_TE)
    else:
        out_TH = moe.run_experts_by(logits_TE, x_TH)
        if moe.shared_expert is not None:
            out_TH = out_TH + moe.shared_expert(x_TH)
    return sum_of_ranks(out_TH, mesh).reshape(hidden_states.shape)  # one sum for routed and shared experts


def exchange_layer(moe: Any, x_TH: Tensor, logits: Callable[[], Tensor]) -> Tensor:
    """Run routed experts and shared expert, (T, H) -> (T, H); `logits` returns the router's logits (T, E)."""
    exchange: Exchange = moe.exchange
    _refuse_broadcast(moe, exchange.mesh)
    rows = autocast_rows(x_TH).tensor_split(moe.chunks)
    early = [exchange.send(part) for part in rows]  # these collectives run while the router chooses
    scores_TA, ids_TA, *_ = torch.ops.thunder_moe.moe_router(
        logits(), top_k=moe.top_k, score="sigmoid", normalize=False, scores_dtype=torch.float32
    )
    chosen = (t.tensor_split(moe.chunks) for t in (ids_TA, scores_TA))
    all_sent = [_start(exchange, moe.routed_experts, *part) for part in zip(rows, *chosen, early, strict=True)]
    shared_TH = None if moe.shared_expert is None else moe.shared_expert(x_TH)
    # The experts of a chunk run while the next chunk and the sums of the last one travel.
    returned = [_send_back(moe, exchange, sent) for sent in all_sent]
    outs = [exchange.finish(back, sent) for back, sent in zip(returned, all_sent, strict=True)]
    out_TH = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out_TH if shared_TH is None else out_TH + shared_TH


def _send_back(moe: Any, exchange: Exchange, sent: Sent) -> Any:
    """Run this rank's experts on the received tokens (T', H), and start to send their weighted sums back.

    Returns the argument `returned` of `Exchange.finish`."""
    ids, weights = sent.receive_routing()
    assert weights is not None
    row_slot, ends, slot_row = order = torch.ops.thunder_moe.moe_route(ids, exchange.experts)
    record(moe, ends, sent.overflow)
    rows = sent.receive_rows()
    fused = weights_to_fuse(moe.routed_experts)
    if fused is None:
        slot = row_slot.long()
        weight_M = weights.flatten().index_select(0, slot).to(rows.dtype)
        own = rows.index_select(0, slot // moe.top_k) * weight_M[:, None]
        sums = torch.ops.thunder_moe.moe_combine(moe.routed_experts(own, ends), ends, slot_row)
        return exchange.send_back(sums, sent)
    options: dict[str, Any] = dict(weight_on_input=True, order=order, expert_ranks=exchange.expert_ranks(moe.top_k))
    # Only with one chunk: the exchanges of two chunks would wait for the other ranks by the same signals.
    if exchange.sums_rows and moe.chunks == 1 and is_plain_eager(rows):
        call = ExpertsCall(rows, ids, weights, *fused, summed=False, **options)
        out = select(rows.device, format=fused[0].format.name).moe_experts(call)
        return exchange.send_rows_back(out, ends, slot_row)
    return exchange.send_back(moe_experts(rows, ids, weights, *fused, **options), sent)


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


def sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tensor, with a gradient that is the sum of all ranks' gradients."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_of_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
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

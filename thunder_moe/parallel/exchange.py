"""The exchange of tokens between expert-parallel ranks, by collectives of torch.distributed.
Called by parallel.modules and the inference benchmark; calls torch.distributed, its functional collectives and
ops.combine.

    send     tokens (T, H) -> collectives that start before the router has chosen
    start    the same tokens, global expert ids (T, A) -> running collectives
    receive  -> local expert ids (T', A), then the tokens (T', H) of all ranks that have an expert on this rank
    combine  the sums (T', H) of this rank's experts -> (T, H), each token's sums of all ranks added. With `sums_rows`
             it takes the rows of the experts, and adds up one rank's tokens while the sums of the last one travel

A token goes once to each rank that has one of its experts ("all_to_all"), or to all ("all_gather").

Legend: T tokens, A = top_k, R ranks, L experts of a rank, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thunder_moe.formats.checks import require
from thunder_moe.kernels.select import training_kernels
from thunder_moe.ops import combine, route  # noqa: F401  (registers the operators)
from thunder_moe.ops.operator import is_plain_eager

Recipes = tuple[str | None, str | None]


@dataclass
class Sent:
    """The collectives that `Exchange.start` has begun.

    Attributes:
        rows: (T', H), the received tokens; may be a running collective, for `wait`.
        routing: float32 (T', A or 2A), their expert ids, then their weights; may be a running collective, too.
        top_k: A.
        weighted: True if `routing` has weights.
        tokens: T.
        first: the global id of this rank's first expert.
        overflow: int64 scalar, tokens that a rank had no room for; None if there always is room.
        back: the exchange's own data, for `finish`.
        recipes: of the products that read the rows, and the gradients of the sums.
    """

    rows: Any
    routing: Any
    top_k: int
    weighted: bool
    tokens: int
    first: int
    overflow: Tensor | None
    back: tuple[Any, ...]
    recipes: Recipes = (None, None)

    def receive_routing(self) -> tuple[Tensor, Tensor | None]:
        """Waits for the routing; returns int32 local expert ids (T', A) and float32 weights (T', A).

        An id outside of [0, L) is an expert of another rank."""
        routing = wait(self.routing)
        ids = (routing[:, : self.top_k].detach() - self.first).to(torch.int32)
        return ids, routing[:, self.top_k :].contiguous() if self.weighted else None

    def receive_rows(self) -> Tensor:
        """Waits for the tokens, and returns them (T', H). They may travel while the caller sorts the ids."""
        return wait(self.rows)


class Exchange:
    """Sends tokens to the ranks of their experts, and sums back.

    A subclass implements `start`, `send_back` and `finish`; ``ExpertParallel(exchange=...)`` takes it, so that the
    dispatch and combine of another library can be called.

    Args:
        mesh: one-dimensional; rank r has the experts r * L to (r + 1) * L - 1.
        experts: L.
        capacity: None: buffers have the exact sizes, for which the host waits once a call. A number: buffers of that
            many tokens for each pair of ranks, the same on all ranks, and no synchronisation.
    """

    sums_rows = False  # True if the class implements `send_rows_back`
    takes_recipes = False  # True if `start` has the argument `recipes`

    def __init__(self, mesh: DeviceMesh, experts: int, capacity: int | None = None) -> None:
        self.mesh, self.experts, self.capacity = mesh, experts, capacity
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()

    def send(self, x: Tensor) -> Any:
        """Starts to send tokens (T, H) if that does not need their expert ids; returns the argument `early` of `start`.

        Raises:
            ValueError: "all_gather" with more tokens than its capacity.
        """
        return None

    def start(self, x: Tensor, ids: Tensor, weights: Tensor | None = None, early: Any = None) -> Sent:
        """Starts to send tokens and their routing.

        Args:
            x: (T, H).
            ids: integers (T, A), global expert ids; ids outside of [0, R * L) are ignored.
            weights: floating point (T, A), sent along; or None.
            early: the result of `send` for the tokens, if it was called.

        Raises:
            ValueError: "all_gather" with more tokens than its capacity.
        """
        raise NotImplementedError

    def send_back(self, sums: Tensor, sent: Sent) -> Any:
        """Starts to send the sums (T', H) of this rank's experts; returns the argument `returned` of `finish`."""
        raise NotImplementedError

    def send_rows_back(self, rows: Tensor, offsets: Tensor, slot_row: Tensor) -> Tensor:
        """Adds up the rows of each token and sends the sums, like `send_back`; for plain tensors without gradients.

        Args:
            rows: (M, H), the results of the experts.
            offsets: int32 (L,), their row ends.
            slot_row: int32 (T', A), the rows of each token.
        """
        raise NotImplementedError

    def finish(self, returned: Any, sent: Sent) -> Tensor:
        """Waits for the sums of this rank's tokens, and returns them (T, H)."""
        raise NotImplementedError

    def combine(self, sums: Tensor, sent: Sent) -> Tensor:
        """Sends the sums (T', H) back, and returns the sums of this rank's tokens (T, H)."""
        return self.finish(self.send_back(sums, sent), sent)

    @property
    def first(self) -> int:
        """Return the global id of this rank's first expert."""
        return self.rank * self.experts

    def expert_ranks(self, top_k: int) -> int:
        """Return n where about one in n of the ids of `Sent.receive_routing` is an expert of this rank."""
        return self.ranks

    @property
    def _group(self) -> Any:
        return self.mesh.get_group()

    def _routing(self, ids: Tensor, weights: Tensor | None) -> Tensor:
        """Return ids and weights as one float32 tensor (T, A or 2A), for one collective; exact for ids below 2**24."""
        return ids.float() if weights is None else torch.cat([ids.float(), weights.float()], 1)


class AllToAll(Exchange):
    """The exchange that sends a token once to each rank that has one of its experts."""

    def expert_ranks(self, top_k: int) -> int:
        if self.capacity is not None:
            return self.ranks
        # Only tokens with an expert on this rank arrive: with evenly chosen experts, this share of all tokens.
        return round(self.ranks * (1 - (1 - 1 / self.ranks) ** top_k))

    def start(
        self, x: Tensor, ids: Tensor, weights: Tensor | None = None, early: Any = None, recipes: Recipes = (None, None)
    ) -> Sent:
        tokens, top_k = ids.shape
        ranks_R = torch.arange(self.ranks, device=ids.device)
        rank_TR = torch.where(((ids // self.experts)[..., None] == ranks_R).any(1), ranks_R, -1)
        # moe_route sorts rows by rank here, with the ranks in place of experts; slot = t * R + r.
        row_slot, ends_R, slot_row = torch.ops.thunder_moe.moe_route(rank_TR, self.ranks)
        counts_R = ends_R - F.pad(ends_R[:-1], (1, 0))
        rows, routing, overflow = x, self._routing(ids, weights), None
        if self.capacity is None:
            one_each = [1] * self.ranks
            to_come_R = wait(all_to_all(counts_R, one_each, one_each, self._group))
            sending, coming = _host_sizes(torch.stack([counts_R, to_come_R]))
            total = sum(sending)
            torch._check(total <= row_slot.shape[0])
            token = row_slot.narrow(0, 0, total) // self.ranks
            rows, routing = rows.index_select(0, token), routing.index_select(0, token)
        else:
            room, starts_R = self.capacity, ends_R - counts_R
            sending = coming = [room] * self.ranks
            place_C, overflow = torch.arange(room, device=ids.device), (counts_R - room).clamp_min(0).sum()
            if tokens:
                at = (starts_R[:, None] + place_C).clamp_max(row_slot.shape[0] - 1).flatten()
                token = row_slot.index_select(0, at) // self.ranks
                filled = (place_C < counts_R[:, None]).flatten()
                rows, routing = rows.index_select(0, token), routing.index_select(0, token)
                routing = torch.where(filled[:, None], routing, -1.0)
            else:  # padding keeps x in the autograd graph: the backward has collectives, too
                rows, routing = (F.pad(t, (0, 0, 0, room * self.ranks), value=-1.0) for t in (rows, routing))
            position_TR = slot_row - starts_R
            fits_TR = (slot_row >= 0) & (position_TR < room)
            slot_row = torch.where(fits_TR, position_TR + ranks_R * room, -1).int()
            ends_R = (ranks_R + 1).int() * room
        # The routing goes first: ids are sorted while the tokens travel.
        routing = all_to_all(routing, coming, sending, self._group)
        sent = self.send_rows(rows, coming, sending, recipes[0])
        back = (slot_row, ends_R, coming, sending)
        return Sent(sent, routing, top_k, weights is not None, tokens, self.first, overflow, back, recipes)

    def send_rows(self, rows: Tensor, coming: list[int], sending: list[int], recipe: str | None) -> Any:
        """Starts to send rows; returns what `wait` takes."""
        return all_to_all(rows, coming, sending, self._group)

    def send_back(self, sums: Tensor, sent: Sent) -> Any:
        *_, coming, sending = sent.back
        return all_to_all(sums, sending, coming, self._group)

    def finish(self, returned: Any, sent: Sent) -> Tensor:
        slot_row, ends, *_ = sent.back
        return torch.ops.thunder_moe.moe_combine(wait(returned), ends, slot_row)


class AllGather(Exchange):
    """The exchange that sends all tokens to all ranks and reduces the sums, for few ranks or a large top_k."""

    def start(self, x: Tensor, ids: Tensor, weights: Tensor | None = None, early: Any = None) -> Sent:
        tokens, top_k = ids.shape
        routing = self._routing(ids, weights)
        if early is None:
            room = self._room(x)
            x, routing = _padded(x, room), _padded(routing, room, -1.0)
            rows, all_routing = self._gather(x, routing)
        else:
            rows, x = early
            routing = _padded(routing, x.shape[0], -1.0)
            all_routing = all_gather(routing, self._group)
        # x and routing are kept alive: another stream reads their memory until the wait.
        return Sent(rows, all_routing, top_k, weights is not None, tokens, self.first, None, (x, routing))

    def _room(self, x: Tensor) -> int:
        """Return the number of tokens that are gathered from each rank."""
        if self.capacity is None:
            count = torch.tensor([x.shape[0]], device=x.device)
            (counts,) = _host_sizes(wait(all_gather(count, self._group))[None])
            return max(counts)
        require(x.shape[0] <= self.capacity, "hidden_states", x, f"at most capacity = {self.capacity} tokens")
        return self.capacity

    def send_back(self, sums: Tensor, sent: Sent) -> Any:
        return self._reduce_scatter(sums)

    def finish(self, returned: Any, sent: Sent) -> Tensor:
        return wait(returned)[: sent.tokens]

    def _gather(self, x: Tensor, routing: Tensor) -> tuple[Any, Any]:
        gradients = torch.is_grad_enabled() and (x.requires_grad or routing.requires_grad)
        if x.is_cuda and not gradients:  # one kernel of NCCL's
            run: Any = _collective(collectives, "all_gather_into_tensor_coalesced")
            rows, all_routing = run([x, routing], self._group)
            return rows, all_routing
        return all_gather(x, self._group), all_gather(routing, self._group)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return _reduce_scatter(x, self._group)


class SymmetricMemory(AllGather):
    """`AllGather` by copies between GPUs that can read each other's memory; for inference.

    The copies leave the multiprocessors to the experts. Tokens travel while the router chooses, and the sums of one
    rank's tokens while the next rank's are added up."""

    sums_rows = True

    def send(self, x: Tensor) -> Any:
        if not x.is_cuda:
            raise ValueError(f"hidden_states: got {x.device}, wanted CUDA devices for exchange='symmetric_memory'")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("exchange: got 'symmetric_memory', which has no gradients; wanted torch.no_grad()")
        x = _padded(x, self._room(x))
        name = self._group.group_name
        if torch.compiler.is_compiling():
            return torch.ops.thunder_moe.symmetric_all_gather(x, self.ranks, name), x
        return collectives.AsyncCollectiveTensor(_start_symmetric(x, self.ranks, name)), x

    def start(self, x: Tensor, ids: Tensor, weights: Tensor | None = None, early: Any = None) -> Sent:
        early = self.send(x) if early is None else early
        if torch.is_grad_enabled() and weights is not None and weights.requires_grad:
            raise ValueError("exchange: got 'symmetric_memory', which has no gradients; wanted torch.no_grad()")
        return super().start(x, ids, weights, early)

    def send_rows_back(self, rows: Tensor, offsets: Tensor, slot_row: Tensor) -> Tensor:
        tokens = slot_row.shape[0] // self.ranks
        parts = rows.new_empty(slot_row.shape[0], rows.shape[1])
        combine_rows = training_kernels(rows.device).combine_rows

        def add_up(rank: int, out: Tensor) -> None:
            combine_rows(rows, offsets, slot_row[rank * tokens : (rank + 1) * tokens], out)

        symmetric_memory._pipelined_produce_and_all2all(add_up, parts, self._group.group_name)
        if self.ranks == 2:  # half the time of a sum over a dimension
            return torch.add(parts[:tokens], parts[tokens:])
        return parts.unflatten(0, (self.ranks, tokens)).sum(0)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return _async_tensor(torch.ops.symm_mem._low_contention_reduce_scatter(x, "sum", self._group.group_name))


def _start_symmetric(x: Tensor, ranks: int, group_name: Any) -> Tensor:
    # The workspace has to be large enough for the sums before other ranks read it: growing it allocates a new one.
    symmetric_memory.get_symm_mem_workspace(group_name, ranks * x.nbytes)
    return torch.ops.symm_mem._low_contention_all_gather(x, group_name)


@torch.library.custom_op("thunder_moe::symmetric_all_gather", mutates_args=())
def _symmetric_all_gather(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Gather (T, H) -> (ranks * T, H), for graphs: torch's compiler cannot trace the allocation of the workspace."""
    return collectives.wait_tensor(_start_symmetric(x, ranks, group_name))


def _empty_of_all(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return x.new_empty(ranks * x.shape[0], *x.shape[1:])


_symmetric_all_gather.register_fake(_empty_of_all)


def _host_sizes(sizes: Tensor) -> list[list[int]]:
    """Copy sizes (N, R) to the host, which is the only synchronisation of a call."""
    known: list[list[int]] = sizes.tolist()
    for size in (size for row in known for size in row):
        torch._check(size >= 0)
    return known


def _padded(x: Tensor, rows: int, value: float = 0.0) -> Tensor:
    """Pad a tensor (T, ...) to a number of rows; the result is contiguous."""
    return (x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]), value=value)).contiguous()


def wait(tensor: Any) -> Tensor:
    """Wait for a collective, and return its plain tensor. A result with a gradient waits at its first use instead."""
    is_plain = isinstance(tensor, Tensor) and not isinstance(tensor, collectives.AsyncCollectiveTensor)
    if is_plain or (isinstance(tensor, Tensor) and tensor.requires_grad):
        return tensor
    waited: Tensor = tensor.wait()
    return waited


def _async_tensor(tensor: Tensor) -> Tensor:
    """Wrap the result of an asynchronous operator like the result of a functional collective."""
    if torch.compiler.is_compiling():
        return collectives.wait_tensor(tensor)
    return collectives.AsyncCollectiveTensor(tensor)


@dataclass
class _RunningCollective:
    """The output of a non-functional collective that may still run."""

    tensor: Tensor
    work: Any

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


def all_to_all(x: Tensor, coming: list[int], sending: list[int], group: Any) -> Any:
    """Start to exchange rows; `wait` for the result."""
    if is_plain_eager(x):  # takes a third of the host time of a functional collective
        out = x.new_empty(sum(coming), *x.shape[1:])
        return _RunningCollective(
            out, dist.all_to_all_single(out, x.contiguous(), coming, sending, group, async_op=True)
        )
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    run: Any = collectives.all_to_all_single_autograd if needs_gradient else collectives.all_to_all_single
    return run(x.contiguous(), coming, sending, group)


def all_gather(x: Tensor, group: Any) -> Any:
    """Start to gather the rows of all ranks, (T, ...) -> (R * T, ...); `wait` for the result."""
    x, ranks = x.contiguous(), dist.get_world_size(group)
    if is_plain_eager(x):
        out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        return _RunningCollective(out, _collective(dist, "all_gather_into_tensor")(out, x, group, async_op=True))
    if x.device.type == "cpu":
        # Two functional all-gathers that end at once on gloo can end the process (docs/distributed.md, "On CPUs").
        return torch.ops.thunder_moe.cpu_all_gather(x, ranks, group.group_name)
    return _functional("all_gather_tensor", x)(x, 0, group)


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    if x.device.type == "cpu" and torch.is_grad_enabled() and x.requires_grad:  # its backward is an all-gather
        return torch.ops.thunder_moe.cpu_reduce_scatter(x, dist.get_world_size(group), group.group_name)
    return _functional("reduce_scatter_tensor", x)(x, "sum", 0, group)


@torch.library.custom_op("thunder_moe::cpu_all_gather", mutates_args=(), device_types="cpu")
def _cpu_all_gather(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Return the rows of all ranks, (T, ...) -> (ranks * T, ...); differentiable."""
    out = _empty_of_all(x, ranks, group_name)
    _collective(dist, "all_gather_into_tensor")(out, x, process_group(group_name))
    return out


@torch.library.custom_op("thunder_moe::cpu_reduce_scatter", mutates_args=(), device_types="cpu")
def _cpu_reduce_scatter(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Return this rank's rows of the sum over the ranks, (ranks * T, ...) -> (T, ...); differentiable."""
    out = _empty_of_one(x, ranks, group_name)
    _collective(dist, "reduce_scatter_tensor")(out, x, group=process_group(group_name))
    return out


def _empty_of_one(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return x.new_empty(x.shape[0] // ranks, *x.shape[1:])


def process_group(name: str) -> Any:
    """Return the group of a name."""
    private: Any = dist.distributed_c10d
    return private._resolve_process_group(name)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.ranks, ctx.group_name = inputs


def _backward_of_all_gather(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.thunder_moe.cpu_reduce_scatter(grad.contiguous(), ctx.ranks, ctx.group_name), None, None


def _backward_of_reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.thunder_moe.cpu_all_gather(grad.contiguous(), ctx.ranks, ctx.group_name), None, None


_cpu_all_gather.register_fake(_empty_of_all)
_cpu_reduce_scatter.register_fake(_empty_of_one)
_cpu_all_gather.register_autograd(_backward_of_all_gather, setup_context=_setup_context)
_cpu_reduce_scatter.register_autograd(_backward_of_reduce_scatter, setup_context=_setup_context)


# The older name of each collective -> its name since torch 2.13.
_SINCE_2_13 = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_gather_tensor": "all_gather_single",
    "all_gather_into_tensor_coalesced": "all_gather_single_coalesced",
}


def _collective(module: Any, name: str, suffix: str = "") -> Any:
    """Return a collective of a module by its name in this version of torch."""
    newer = _SINCE_2_13[name]  # keyed by the name alone: torch 2.11 does not trace a look-up by module
    return getattr(module, (newer if hasattr(module, newer) else name) + suffix)


def _functional(name: str, x: Tensor) -> Any:
    """Return a functional collective, with a gradient if x needs one."""
    return _collective(collectives, name, "_autograd" if torch.is_grad_enabled() and x.requires_grad else "")

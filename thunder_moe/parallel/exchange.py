"""The exchange of tokens between expert-parallel ranks, by collectives of torch.distributed.
Called by parallel.modules; calls torch.distributed, its functional collectives and ops.combine.

    send     tokens (T, H) -> what can travel before the router has chosen
    start    the same tokens, global expert ids (T, A) -> collectives that run by themselves
    receive  -> ids of its own experts (T', A), then the tokens of all ranks that this one has an expert for, (T', H)
    combine  the sums (T', H) of this rank's experts -> (T, H), a token's sums of all ranks added; where `sums_rows`,
             the rows of the experts, of which it adds up one rank's tokens while the last one's sums travel

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

__all__ = ["EXCHANGES", "AllGather", "AllToAll", "Exchange", "Sent", "wait"]


@dataclass
class Sent:
    """The collectives that `Exchange.start` has begun.

    Attributes:
        rows: (T', H), the tokens of others; a collective that may still run, for `wait`.
        routing: float32 (T', A or 2A), their expert ids, then their weights; likewise.
        top_k: A.
        weighted: whether there are weights.
        tokens: T.
        first: what the numbers of this rank's experts begin with in `routing`.
        overflow: int64 scalar, tokens that a rank had no room for; None where there always is.
        back: what `combine` needs to bring the sums back.
    """

    rows: Any
    routing: Any
    top_k: int
    weighted: bool
    tokens: int
    first: int
    overflow: Tensor | None
    back: tuple[Any, ...]

    def receive_routing(self) -> tuple[Tensor, Tensor | None]:
        """Waits for the collective: int32 ids (T', A) among this rank's experts, outside of [0, L) where the expert is
        elsewhere, and float32 weights (T', A)."""
        routing = wait(self.routing)
        ids = (routing[:, : self.top_k].detach() - self.first).to(torch.int32)
        return ids, routing[:, self.top_k :].contiguous() if self.weighted else None

    def receive_rows(self) -> Tensor:
        """Waits for the tokens (T', H), which may travel while the ids are sorted."""
        return wait(self.rows)


class Exchange:
    """Brings tokens to the ranks of their experts, and sums back. A subclass has `start`, `send_back` and `finish`;
    ``ExpertParallel(exchange=...)`` takes it, so that the dispatch and combine of another library can be called.

    Args:
        mesh: one-dimensional, of the ranks; rank r has the experts r * L to (r + 1) * L - 1.
        experts: L.
        capacity: None: buffers of the exact sizes, which the host waits for once a call. A number: buffers of that
            many tokens for each pair of ranks, the same on all ranks, and no synchronisation.
    """

    sums_rows = False  # whether there is a `send_rows_back`

    def __init__(self, mesh: DeviceMesh, experts: int, capacity: int | None = None) -> None:
        self.mesh, self.experts, self.capacity = mesh, experts, capacity
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()

    def send(self, x: Tensor) -> Any:
        """Sends tokens (T, H) off where that does not depend on their experts -> what `start` takes as `early`.

        Raises:
            ValueError: "all_gather" with more tokens than its capacity.
        """
        return None

    def start(self, x: Tensor, ids: Tensor, weights: Tensor | None = None, early: Any = None) -> Sent:
        """Sends tokens off.

        Args:
            x: (T, H).
            ids: integers (T, A), of all experts; one outside of [0, R * L) is of none.
            weights: floating point (T, A), go along; or None.
            early: what `send` gave of the tokens, if it was called.

        Raises:
            ValueError: "all_gather" with more tokens than its capacity.
        """
        raise NotImplementedError

    def send_back(self, sums: Tensor, sent: Sent) -> Any:
        """Sends the sums (T', H) of this rank's experts off, for `finish`; a collective that may still run."""
        raise NotImplementedError

    def send_rows_back(self, rows: Tensor, offsets: Tensor, slot_row: Tensor) -> Tensor:
        """The same with rows (M, H) of the experts, their ends (L,), and the rows int32 (T', A) of each token, for
        plain tensors without gradients."""
        raise NotImplementedError

    def finish(self, returned: Any, sent: Sent) -> Tensor:
        """Waits for what comes back, -> (T, H)."""
        raise NotImplementedError

    def combine(self, sums: Tensor, sent: Sent) -> Tensor:
        """(T', H) -> (T, H)."""
        return self.finish(self.send_back(sums, sent), sent)

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return self.rank * self.experts

    def sharers(self, top_k: int) -> int:
        """One in about so many of the ids that `Sent.receive_routing` gives is of an expert of this rank."""
        return self.ranks

    @property
    def _group(self) -> Any:
        return self.mesh.get_group()

    def _routing(self, ids: Tensor, weights: Tensor | None) -> Tensor:
        """Ids and weights as one float32 tensor (T, A or 2A), for one collective; floats hold ids below 2**24."""
        return ids.float() if weights is None else torch.cat([ids.float(), weights.float()], 1)


class AllToAll(Exchange):
    """A token goes once to each rank that has one of its experts."""

    def sharers(self, top_k: int) -> int:
        if self.capacity is not None:
            return self.ranks
        # Only tokens with an expert here come: of experts that are spread evenly, so many have one.
        return round(self.ranks * (1 - (1 - 1 / self.ranks) ** top_k))

    def start(self, x: Tensor, ids: Tensor, weights: Tensor | None = None, early: Any = None) -> Sent:
        tokens, top_k = ids.shape
        ranks_R = torch.arange(self.ranks, device=ids.device)
        wanted_TR = ((ids // self.experts)[..., None] == ranks_R).any(1)
        # Rows are sorted by rank as those of experts are sorted by expert; a slot is t * R + r.
        row_slot, ends_R, slot_row = torch.ops.thunder_moe.moe_route(
            torch.where(wanted_TR, ranks_R, -1), self.ranks
        )  # fmt: skip
        counts_R = ends_R - F.pad(ends_R[:-1], (1, 0))
        rows, routing, overflow = x, self._routing(ids, weights), None
        if self.capacity is None:
            one_each = [1] * self.ranks
            to_come_R = wait(_all_to_all(counts_R, one_each, one_each, self._group))
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
            else:  # still in the graph of gradients: the backward has collectives, too
                rows, routing = (F.pad(t, (0, 0, 0, room * self.ranks), value=-1.0) for t in (rows, routing))
            position_TR = slot_row - starts_R
            fits_TR = (slot_row >= 0) & (position_TR < room)
            slot_row = torch.where(fits_TR, position_TR + ranks_R * room, -1).int()
            ends_R = (ranks_R + 1).int() * room
        # In this order: the ids are sorted while the tokens travel.
        routing = _all_to_all(routing, coming, sending, self._group)
        sent = _all_to_all(rows, coming, sending, self._group)
        back = (slot_row, ends_R, coming, sending)
        return Sent(sent, routing, top_k, weights is not None, tokens, self.first, overflow, back)

    def send_back(self, sums: Tensor, sent: Sent) -> Any:
        *_, coming, sending = sent.back
        return _all_to_all(sums, sending, coming, self._group)

    def finish(self, returned: Any, sent: Sent) -> Tensor:
        slot_row, ends, *_ = sent.back
        out: Tensor = torch.ops.thunder_moe.moe_combine(wait(returned), ends, slot_row)
        return out


class AllGather(Exchange):
    """All tokens go to all ranks, and the sums come back added: the least overhead where ranks are few or top_k is
    large."""

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
            all_routing = _all_gather(routing, self._group)
        # The memory of x and routing is read by another stream until the wait.
        return Sent(rows, all_routing, top_k, weights is not None, tokens, self.first, None, (x, routing))

    def _room(self, x: Tensor) -> int:
        """Return the number of tokens that are gathered from each rank."""
        if self.capacity is None:
            count = torch.tensor([x.shape[0]], device=x.device)
            (counts,) = _host_sizes(wait(_all_gather(count, self._group))[None])
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
            run: Any = _named(collectives, "all_gather_into_tensor_coalesced")
            rows, all_routing = run([x, routing], self._group)
            return rows, all_routing
        return _all_gather(x, self._group), _all_gather(routing, self._group)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return _reduce_scatter(x, self._group)


class SymmetricMemory(AllGather):
    """`AllGather` by copies between GPUs that can read each other's memory, which leave the multiprocessors to the
    experts; for inference. Tokens travel while the router chooses, sums of one rank's tokens while the next ones are
    added up."""

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
        total: Tensor = parts.unflatten(0, (self.ranks, tokens)).sum(0)
        return total

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return _pending(torch.ops.symm_mem._low_contention_reduce_scatter(x, "sum", self._group.group_name))


def _start_symmetric(x: Tensor, ranks: int, group_name: Any) -> Tensor:
    # The workspace has to have its size for the sums before others read it: growing makes a new one.
    symmetric_memory.get_symm_mem_workspace(group_name, ranks * x.nbytes)
    rows: Tensor = torch.ops.symm_mem._low_contention_all_gather(x, group_name)
    return rows


@torch.library.custom_op("thunder_moe::symmetric_all_gather", mutates_args=())
def _symmetric_all_gather(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """(T, H) -> (ranks * T, H), for graphs: torch's compiler cannot trace what gives the workspace its size."""
    rows: Tensor = collectives.wait_tensor(_start_symmetric(x, ranks, group_name))
    return rows


@_symmetric_all_gather.register_fake
def _(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return x.new_empty(ranks * x.shape[0], x.shape[1])


EXCHANGES: dict[str, type[Exchange]] = {
    "all_to_all": AllToAll,
    "all_gather": AllGather,
    "symmetric_memory": SymmetricMemory,
}


def _host_sizes(sizes: Tensor) -> list[list[int]]:
    """Sizes (N, R) on the host: the one synchronisation of a call."""
    known: list[list[int]] = sizes.tolist()
    for size in (size for row in known for size in row):
        torch._check(size >= 0)
    return known


def _padded(x: Tensor, rows: int, value: float = 0.0) -> Tensor:
    """(T, ...) with so many rows, contiguous."""
    return (x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]), value=value)).contiguous()


def wait(tensor: Any) -> Tensor:
    """The plain tensor that a collective gives. One with a gradient waits by itself where it is first read."""
    if isinstance(tensor, _UnderWay):
        return tensor.wait()
    if isinstance(tensor, collectives.AsyncCollectiveTensor) and not tensor.requires_grad:
        waited: Tensor = tensor.wait()
        return waited
    plain: Tensor = tensor
    return plain


def _pending(tensor: Tensor) -> Tensor:
    """What an operator gives whose work still runs, as the functional collectives give it."""
    if torch.compiler.is_compiling():
        waited: Tensor = collectives.wait_tensor(tensor)
        return waited
    return collectives.AsyncCollectiveTensor(tensor)


@dataclass
class _UnderWay:
    """A tensor that a collective of plain calls fills."""

    tensor: Tensor
    work: Any

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


def _all_to_all(x: Tensor, coming: list[int], sending: list[int], group: Any) -> Any:
    if is_plain_eager(x):  # a third of the host's time for a functional collective
        out = x.new_empty(sum(coming), *x.shape[1:])
        return _UnderWay(out, dist.all_to_all_single(out, x.contiguous(), coming, sending, group, async_op=True))
    of_gradients = torch.is_grad_enabled() and x.requires_grad
    run: Any = collectives.all_to_all_single_autograd if of_gradients else collectives.all_to_all_single
    return run(x.contiguous(), coming, sending, group)


def _all_gather(x: Tensor, group: Any) -> Any:
    x, ranks = x.contiguous(), dist.get_world_size(group)
    if is_plain_eager(x):
        out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        return _UnderWay(out, _named(dist, "all_gather_into_tensor")(out, x, group, async_op=True))
    if x.device.type == "cpu":
        # Two functional all-gathers that end at once on gloo can end the process (docs/distributed.md, "On CPUs").
        return torch.ops.thunder_moe.cpu_all_gather(x, ranks, group.group_name)
    return _functional("all_gather_tensor", x)(x, 0, group)


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    if x.device.type == "cpu" and torch.is_grad_enabled() and x.requires_grad:  # its backward is an all-gather
        summed: Tensor = torch.ops.thunder_moe.cpu_reduce_scatter(x, dist.get_world_size(group), group.group_name)
        return summed
    out: Tensor = _functional("reduce_scatter_tensor", x)(x, "sum", 0, group)
    return out


@torch.library.custom_op("thunder_moe::cpu_all_gather", mutates_args=(), device_types="cpu")
def _cpu_all_gather(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Return the rows of all ranks, (T, ...) -> (ranks * T, ...); differentiable."""
    out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    _named(dist, "all_gather_into_tensor")(out, x, _group_named(group_name))
    return out


@torch.library.custom_op("thunder_moe::cpu_reduce_scatter", mutates_args=(), device_types="cpu")
def _cpu_reduce_scatter(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Return this rank's part of the sum over the ranks, (ranks * T, ...) -> (T, ...); differentiable."""
    out = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    _named(dist, "reduce_scatter_tensor")(out, x, group=_group_named(group_name))
    return out


@_cpu_all_gather.register_fake
def _(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return x.new_empty(ranks * x.shape[0], *x.shape[1:])


@_cpu_reduce_scatter.register_fake
def _(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return x.new_empty(x.shape[0] // ranks, *x.shape[1:])


def _group_named(name: str) -> Any:
    private: Any = dist.distributed_c10d
    return private._resolve_process_group(name)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.ranks, ctx.group_name = inputs


def _backward_of_all_gather(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.thunder_moe.cpu_reduce_scatter(grad.contiguous(), ctx.ranks, ctx.group_name), None, None


def _backward_of_reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.thunder_moe.cpu_all_gather(grad.contiguous(), ctx.ranks, ctx.group_name), None, None


_cpu_all_gather.register_autograd(_backward_of_all_gather, setup_context=_setup_context)
_cpu_reduce_scatter.register_autograd(_backward_of_reduce_scatter, setup_context=_setup_context)


# The older name of each collective -> its name since torch 2.13.
_NEWER = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_gather_tensor": "all_gather_single",
    "all_gather_into_tensor_coalesced": "all_gather_single_coalesced",
}


def _named(module: Any, name: str, suffix: str = "") -> Any:
    """Return a collective of a module by the name that this version of torch has for it."""
    newer = _NEWER[name]  # no key has the module in it: torch 2.11 does not trace the look-up of one
    return getattr(module, (newer if hasattr(module, newer) else name) + suffix)


def _functional(name: str, x: Tensor) -> Any:
    """Return a functional collective; the one with a gradient where x needs one."""
    return _named(collectives, name, "_autograd" if torch.is_grad_enabled() and x.requires_grad else "")

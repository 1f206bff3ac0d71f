"""Analysis of a Thunder computation trace: views, storages and readers of each tensor, and the steps of `safety`.
Called by sites.py, routers.py and rewrite.py; calls safety.py and eligibility.py.

A trace is functional but for `prims.copy_`: every in-place operation ends in one. The new names that Thunder gives a
tensor at in-place operations (`prims.update_aliases`) count as one tensor here. A composite (``ltorch.chunk``) holds
its parts as subsymbols; symbols without any are the leaves, and views are followed through them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
import torch
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.torch.experimental.dtensor_proxy import is_dtensor_proxy

from thunder_moe.compilers.eligibility import swaps_last_dims
from thunder_moe.compilers.safety import Program, Step
from thunder_moe.compilers.spellings import SYMBOLS, TARGETS, Spelling
from thunder_moe.compilers.thunder.symbols import EXECUTOR
from thunder_moe.compilers.thunder.training_symbols import local_shard, scaled_activation

# The memory of all arguments of a computation: they may share it with each other at run time.
_ARGUMENTS = "the arguments"


def _broadcast(tensor: torch.Tensor, shape: tuple[int, ...], dims: tuple[int, ...]) -> torch.Tensor:
    for dim in range(len(shape)):
        tensor = tensor if dim in dims else tensor.unsqueeze(dim)
    return tensor.expand(*shape)


def _sliced(tensor: torch.Tensor, starts: list[int], ends: list[int], strides: list[int] | None = None) -> torch.Tensor:
    return tensor[tuple(map(slice, starts, ends, strides or [1] * tensor.ndim))]


# Leaves that may return a view of their first argument, with the torch function that computes it.
_VIEWS: dict[Hashable, Callable[..., torch.Tensor]] = {
    PrimIDs.BROADCAST_IN_DIM: _broadcast,
    PrimIDs.CONVERT_ELEMENT_TYPE: lambda tensor, dtype: tensor.to(dtypes.to_torch_dtype(dtype)),
    PrimIDs.RESHAPE: torch.reshape,
    PrimIDs.SHALLOW_COPY: lambda tensor: tensor,
    PrimIDs.SLICE: _sliced,
    PrimIDs.SQUEEZE: torch.squeeze,
    PrimIDs.STRIDE_ORDER: lambda tensor, order: tensor.contiguous(),
    PrimIDs.TRANSPOSE: torch.permute,
    PrimIDs.VIEW: torch.reshape,
}
# Other prims whose output shares memory with their arguments; symbols that are not prims may do so, too.
_ALIASES = {*_VIEWS, PrimIDs.BITCAST, PrimIDs.COPY_, PrimIDs.DEVICE_PUT, PrimIDs.IMAG, PrimIDs.REAL, PrimIDs.SINK}
_ALIASES |= {PrimIDs.UNFOLD, PrimIDs.UPDATE_ALIASES}
# Symbols that Thunder inserts, without a grad mode of their own.
_WITHOUT_MODE = {PrimIDs.UNPACK_TRIVIAL, PrimIDs.UPDATE_ALIASES}


# Some of Thunder's functions dispatch to a symbol and are found by their names, others are in its map alone.
_SPELLINGS: dict[Hashable, Spelling] = {
    symbol.id: SYMBOLS[symbol.name]
    for symbol in (*(getattr(ltorch, name, None) for name in SYMBOLS), *ltorch._torch_to_thunder_function_map.values())
    if isinstance(symbol, Symbol) and symbol.name in SYMBOLS
}
_SPELLINGS[PrimIDs.CONVERT_ELEMENT_TYPE] = SYMBOLS["to"]
_SPELLINGS[scaled_activation.id] = TARGETS[torch.ops.thunder_moe.scaled_activation]


class Computation:
    """One pass over a computation trace, before autodiff. A position is an index of `bound_symbols`."""

    def __init__(self, trace: TraceCtx) -> None:
        self.bound_symbols: list[BoundSymbol] = list(trace.bound_symbols)
        # By the names of proxies:
        self.arguments: dict[str, Any] = {arg.name: arg for arg in trace.args if isinstance(arg, Proxy)}
        self.readers: dict[str, set[int]] = {}  # positions of the symbols that read it, the trace's output among them
        self.position: dict[str, int] = {}  # of the symbol that makes it
        self.leaf: dict[str, BoundSymbol] = {}  # the leaf that makes it; none for an argument
        self._root: dict[str, str] = {}
        for position, bsym in enumerate(self.bound_symbols):
            if bsym.sym.id == PrimIDs.UNPACK_TRIVIAL:
                continue
            for name in names_read(bsym):
                self.readers.setdefault(name, set()).add(position)
            for proxy in bsym.flat_proxy_outs:
                self.position.setdefault(proxy.name, position)
            for leaf in leaves(bsym):
                self._add(leaf)
        self._argument_storages = {self.storage(name) for name in self.arguments}
        self.program = Program([self._step(bsym) for bsym in self.bound_symbols])
        self.has_gradients = any(step.grad_enabled for step in self.program.steps)

    def storage(self, name: str) -> str:
        """Return a key for the memory of a tensor: the same for all tensors that may share it."""
        while name in self._root:
            name = self._root[name]
        return name

    def reason_against_fusing(
        self,
        replaced: Collection[int],
        read: Mapping[str, TensorProxy],
        made: Mapping[str, Iterable[int]],
        saved: Collection[str] = (),
        differentiated: Collection[int] | None = None,
    ) -> str | None:
        """Return `Program.reason_against_fusing` of the symbols at some positions.

        By the name for the report, `read` has the tensors that the operator reads in their stead (those in `saved` in
        its backward, too), and `made` the positions whose results they hand to each other.
        """
        names: dict[Hashable, str] = {self.storage(proxy.name): name for name, proxy in read.items()}
        kept: dict[Hashable, str] = {self.storage(read[name].name): name for name in saved}
        if not self._argument_storages.isdisjoint(names):
            names[_ARGUMENTS] = f"what may share memory with {' or '.join(read)}"
        for name, positions in made.items():
            outs = (proxy for at in positions for proxy in self.bound_symbols[at].flat_proxy_outs)
            names |= {self.storage(proxy.name): name for proxy in outs}
        return self.program.reason_against_fusing(replaced, names, kept, differentiated)

    def same(self, name: str, renamed_by: Sequence[PrimIDs] = (PrimIDs.UPDATE_ALIASES, PrimIDs.COPY_)) -> str:
        """Return the first name of a tensor that in-place operations have renamed."""
        leaf = self.leaf.get(name)
        while leaf is not None and leaf.sym.id in renamed_by:
            name = _source(leaf, name)
            leaf = self.leaf.get(name)
        return name

    def argument_behind(self, name: str) -> tuple[TensorProxy, bool] | None:
        """Return the argument that a tensor views as `eligibility` wants, and True if its last two dims are swapped.

        The argument is a DTensor's local tensor, under the DTensor's name, where the trace reads that."""
        name, chain = self._origin(name)
        if name not in self.arguments:
            return None
        argument = self.arguments[name]
        if chain and chain[-1].sym.id == local_shard.id:
            argument = _local(argument)
            chain.pop()
        if not isinstance(argument, TensorProxy) or is_dtensor_proxy(argument):
            return None
        whole = torch.empty(tuple(argument.shape), dtype=dtypes.to_torch_dtype(argument.dtype), device="meta")
        view = whole
        for leaf in reversed(chain):
            result = _replay(leaf, view)
            if result is None or result.untyped_storage()._cdata != whole.untyped_storage()._cdata:
                return None
            view = result
        swapped = swaps_last_dims(whole, view)
        return None if swapped is None else (argument, swapped)

    def origin(self, name: str) -> str:
        """Return the name of the argument, or of the first tensor, that a tensor is made of by first operands."""
        return self._origin(name)[0]

    def _origin(self, name: str) -> tuple[str, list[BoundSymbol]]:
        chain = []
        while name not in self.arguments:
            leaf = self.leaf.get(name)
            if leaf is None or not leaf.flat_proxy_args:
                break
            name = _source(leaf, name)
            chain.append(leaf)
        return name, chain

    def written_arguments(self) -> list[TensorProxy]:
        """Return the arguments whose memory the computation changes."""
        written = frozenset[Hashable]().union(*(step.writes for step in self.program.steps))
        return [arg for name, arg in self.arguments.items() if self.storage(name) in written]

    def _add(self, leaf: BoundSymbol) -> None:
        known = {proxy.name for proxy in leaf.flat_proxy_args} | self.arguments.keys()
        for proxy in leaf.flat_proxy_outs:
            if isinstance(proxy, TensorProxy) and proxy.name not in known:
                self.leaf.setdefault(proxy.name, leaf)
                if leaf.sym.id in (PrimIDs.UPDATE_ALIASES, PrimIDs.COPY_):
                    self._join(proxy.name, _source(leaf, proxy.name))
                elif leaf.sym.id in _ALIASES or not (isinstance(leaf.sym.id, PrimIDs) or _is_ours(leaf)):
                    for source in leaf.flat_proxy_args:
                        self._join(proxy.name, source.name)

    def _join(self, first: str, second: str) -> None:
        first, second = self.storage(first), self.storage(second)
        if first != second:
            self._root[first] = second

    def _step(self, bsym: BoundSymbol) -> Step:
        written = {self.storage(proxy.name) for proxy in _written(bsym)}
        if written & self._argument_storages:
            written.add(_ARGUMENTS)
        outs = [] if bsym.sym.id in _WITHOUT_MODE else bsym.flat_proxy_outs
        return Step(
            bsym.sym.name,
            reads=frozenset(map(self.storage, names_read(bsym))),
            writes=frozenset(written),
            grad_enabled=bool(outs) and not any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in out.tags for out in outs),
            opaque=any(map(_is_opaque, leaves(bsym))),
        )


def _local(dtensor: Any) -> Any:
    """Return a proxy of the local tensor of a DTensor, which has a name of its own, under the DTensor's name."""
    local = copy.copy(dtensor.local_tensor)
    local._name, local._requires_grad, local._tags = dtensor.name, dtensor.requires_grad, dtensor.tags
    return local


def spelled(bsym: BoundSymbol) -> tuple[str, dict[str, Any]]:
    """Return the kind of operation and the arguments by name; ("", {}) for what the table of spellings lacks."""
    row = _SPELLINGS.get(bsym.sym.id)
    named = None if row is None else row.named(bsym.args, bsym.kwargs)
    return (row.kind, named) if row is not None and named is not None else ("", {})


def leaves(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """Yield the symbols without subsymbols that a symbol is made of."""
    if not bsym.subsymbols:
        yield bsym
    for sub in bsym.subsymbols:
        yield from leaves(sub)


def is_view(bsym: BoundSymbol) -> bool:
    """True if a symbol whose outputs nothing reads can go: a view, or another function of torch without effects."""
    return all(
        leaf.sym.id in _VIEWS or leaf.sym.id == local_shard.id or _has_tag(leaf, OpTags.AUTO_REGISTERED)
        for leaf in leaves(bsym)
    )


def names_read(bsym: BoundSymbol) -> set[str]:
    """Return the names of the proxies that a symbol needs."""
    if bsym.sym.id == PrimIDs.UNPACK_TRIVIAL:
        return set()
    proxies = bsym.flat_proxy_args
    if bsym.sym.id == PrimIDs.RETURN and bsym.args and isinstance(bsym.args[0], dict):
        # flat_args, beside the output, lists every argument without needing it.
        proxies = [leaf for leaf in tree_iter(bsym.args[0]["output"]) if isinstance(leaf, Proxy)]
    return {proxy.name for proxy in proxies}


def _source(leaf: BoundSymbol, name: str) -> str:
    """Return the tensor that a leaf makes `name` of: the first operand, except for renamings and copies."""
    if leaf.sym.id == PrimIDs.UPDATE_ALIASES:
        position = next(i for i, proxy in enumerate(leaf.flat_proxy_outs) if proxy.name == name)
    else:
        position = 1 if leaf.sym.id == PrimIDs.COPY_ else 0
    return str(leaf.flat_proxy_args[position].name)


def _replay(leaf: BoundSymbol, tensor: torch.Tensor) -> torch.Tensor | None:
    """Run a leaf on a meta tensor instead of its first operand; None if the leaf is not a view."""
    if leaf.sym.id in (PrimIDs.UPDATE_ALIASES, PrimIDs.COPY_):
        return tensor
    function = _VIEWS.get(leaf.sym.id)
    # swapdims, detach, bfloat16, ...; the result of as_strided depends on the strides, which proxies do not have.
    if function is None and _has_tag(leaf, OpTags.AUTO_REGISTERED) and leaf.sym.name != "as_strided":
        function = getattr(torch.Tensor, leaf.sym.name, None)
    if function is None or len(leaf.flat_proxy_args) != 1 or leaf.args[0] is not leaf.flat_proxy_args[0]:
        return None
    try:
        result = function(tensor, *leaf.args[1:], **leaf.kwargs)
    except (RuntimeError, TypeError):  # a function of the same name as a method, with other arguments
        return None
    return result if isinstance(result, torch.Tensor) else None


def _written(bsym: BoundSymbol) -> Iterator[Proxy]:
    """Yield the proxies that a symbol changes in place."""
    name = bsym.sym.name
    if bsym.sym.id == PrimIDs.COPY_:
        yield bsym.flat_proxy_args[1]
    elif _has_tag(bsym, OpTags.IN_PLACE) or (name.endswith("_") and not name.endswith("__")):
        yield from bsym.flat_proxy_args[:1]
    yield from (leaf for leaf in tree_iter(bsym.kwargs.get("out")) if isinstance(leaf, Proxy))
    for sub in bsym.subsymbols:
        yield from _written(sub)


def _is_opaque(leaf: BoundSymbol) -> bool:
    """True for a leaf that Thunder does not know and that returns neither tensors nor a number: it is called for its
    effect. (`is_floating_point`, for example, returns a number.)"""
    known = isinstance(leaf.sym.id, PrimIDs) or _is_ours(leaf) or _has_tag(leaf, OpTags.CTX_MANAGER_ENTER_EXIT_OP)
    return not known and not leaf.flat_proxy_outs and not isinstance(leaf.output, (int, float))


def _is_ours(leaf: BoundSymbol) -> bool:
    return leaf.sym.executor is EXECUTOR


def _has_tag(bsym: BoundSymbol, tag: OpTags) -> bool:
    return bsym.sym.tags is not None and tag in bsym.sym.tags

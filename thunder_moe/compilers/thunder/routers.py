"""Finds routers written in torch's operations in a computation trace, and the symbols that become one moe_router.
Called by rewrite.py; calls routers.py for what they look like, trace.py for storages and readers, and symbols.py.

A trace is functional: an operation in place gives a tensor another name. `prims.update_aliases` gives the same tensor
another name too; here those count as one. Legend: T tokens, E experts, A = top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import thunder.core.dtypes as dtypes
from thunder.core import prims
from thunder.core.devices import to_torch_device
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_moe.compilers.report import RouterEntry
from thunder_moe.compilers.routers import RouterMatch, match_router, reason_against_kernels
from thunder_moe.compilers.spellings import keeps_order
from thunder_moe.compilers.thunder.symbols import moe_route, moe_router
from thunder_moe.compilers.thunder.trace import Computation, spelled


class _Graph:
    """A computation as a `RouterGraph`: operations are positions, tensors proxies under their first names."""

    def __init__(self, computation: Computation) -> None:
        self.computation, self.bound_symbols = computation, computation.bound_symbols
        made = [proxy for bsym in self.bound_symbols for proxy in bsym.flat_proxy_outs]
        self.proxies: dict[str, Any] = {proxy.name: proxy for proxy in reversed(made)} | computation.arguments
        self._readers: dict[str, set[int]] = {}
        for name, positions in computation.readers.items():
            reading = {at for at in positions if self.bound_symbols[at].sym.id != PrimIDs.UPDATE_ALIASES}
            self._readers.setdefault(self.first(name), set()).update(reading)

    def first(self, name: str) -> str:
        return self.computation.same(name, (PrimIDs.UPDATE_ALIASES,))

    def tensor(self, proxy: Any) -> Any:
        return self.proxies[self.first(proxy.name)] if isinstance(proxy, TensorProxy) else proxy

    def made_at(self, position: int) -> set[str]:
        """Return the first names of the tensors that an operation gives."""
        return {self.first(proxy.name) for proxy in self.bound_symbols[position].flat_proxy_outs}

    def maker(self, tensor: Any) -> Any:
        return None if tensor.name in self.computation.arguments else self.computation.position.get(tensor.name)

    def kind(self, operation: Any) -> str:
        kind, named = ("", {}) if operation is None else spelled(self.bound_symbols[operation])
        return "view" if keeps_order(kind, named) else kind

    def given(self, operation: Any) -> dict[str, Any]:
        named = {} if operation is None else spelled(self.bound_symbols[operation])[1]
        return {name: self.tensor(value) for name, value in named.items()}

    def result(self, operation: Any, index: int = 0) -> Any:
        output = self.bound_symbols[operation].output
        if isinstance(output, (tuple, list)):
            output = output[index] if index < len(output) else None
        if not isinstance(output, TensorProxy) or not self.readers(self.tensor(output)):
            return None
        return self.tensor(output)

    def readers(self, tensor: Any) -> set[Any]:
        return self._readers.get(tensor.name, set())

    def example(self, tensor: Any) -> Any:
        if not isinstance(tensor, TensorProxy):
            return None
        return SimpleNamespace(
            shape=tuple(tensor.shape),
            ndim=tensor.ndim,
            dtype=dtypes.to_torch_dtype(tensor.dtype),
            device=to_torch_device(tensor.device),
        )


@dataclass(eq=False)
class Router:
    """A router of a trace that becomes one symbol."""

    match: RouterMatch  # its operations and options
    place: int  # position of the symbol that moe_router replaces
    replaced: set[int]  # positions of the removed symbols, `place` among them
    ids: TensorProxy  # proxy of the chosen experts
    route: int | None = None  # position of a moe_route of its ids, whose results moe_router gives; None without one


def find_routers(computation: Computation) -> tuple[list[Router], list[RouterEntry]]:
    """Return the routers of a trace that can be one symbol, and the report's entries of all."""
    graph, routers, entries = _Graph(computation), list[Router](), []
    for position in range(len(graph.bound_symbols)):
        match = match_router(graph, position) if graph.kind(position) == "topk" else None
        if match is not None:
            found = _router(computation, graph, match)
            routers += [found] if isinstance(found, Router) else []
            entries.append(match.entry(graph, None if isinstance(found, Router) else found))
    return routers, entries


def _router(computation: Computation, graph: _Graph, match: RouterMatch) -> Router | str:
    """Return the router, or why it is not rewritten. The checks run in this order."""
    symbols = graph.bound_symbols
    reason = reason_against_kernels(graph, match)
    if reason is not None:
        return reason
    modes = [step.grad_enabled for step in computation.program.steps]
    ids: TensorProxy = symbols[match.top_k].output[1]
    kept = {match.scores.name, graph.first(ids.name)}
    replaced = _unread(graph, match, kept)
    if not {match.top_k, match.takes, graph.maker(match.scores)} <= replaced:
        return "a part of it is read elsewhere"
    place = match.top_k if modes[match.top_k] == modes[match.takes] else match.takes
    if place is not match.top_k and any(reader < place for reader in graph.readers(graph.tensor(ids))):
        return "its ids are read before its scores, in another grad mode"
    renamed = _renamings(graph, set[str]().union(*map(graph.made_at, replaced)) - kept)
    if renamed is None:
        return "a part of it shares its memory with what is read elsewhere"
    operations = set(match.operations)
    read = {"the logits": match.logits} | ({} if match.bias is None else {"the bias": match.bias})
    saved = ["the logits"] if modes[match.takes] and match.logits.requires_grad else []
    reason = computation.reason_against_fusing(
        operations | renamed, read, {"the scores": operations}, saved, differentiated=operations - match.choosing
    )
    route = _route_of(graph, ids, int(match.logits.shape[1]))
    return Router(match, place, replaced | renamed, ids, route) if reason is None else reason


def _unread(graph: _Graph, match: RouterMatch, kept: set[str]) -> set[int]:
    """Return the operations of a router that nothing reads once moe_router gives scores and ids, which are `kept`."""
    replaced = set(match.operations)
    while True:
        read = {
            at
            for at in replaced
            if any(not graph.readers(graph.proxies[name]) <= replaced for name in graph.made_at(at) - kept)
        }
        if not read:
            return replaced
        replaced -= read


def _renamings(graph: _Graph, own: set[str]) -> set[int] | None:
    """Return the symbols that give new names to a router's own tensors.

    None if one of them also renames other tensors: these share the memory, so they would see in-place changes."""
    found = set()
    for position, bsym in enumerate(graph.bound_symbols):
        names = {graph.first(proxy.name) for proxy in bsym.flat_proxy_args}
        if bsym.sym.id == PrimIDs.UPDATE_ALIASES and names & own:
            if not names <= own:
                return None
            found.add(position)
    return found


def _route_of(graph: _Graph, ids: TensorProxy, experts: int) -> int | None:
    for position, bsym in enumerate(graph.bound_symbols):
        routes = bsym.sym.id == moe_route.id and len(bsym.args) == 2 and bsym.args[1] == experts
        if routes and graph.tensor(bsym.args[0]) is graph.tensor(ids):
            return position
    return None


def fuse_router(router: Router, computation: Computation) -> dict[int, list[BoundSymbol]]:
    """Return what takes the place of the symbol at each position. Runs under the trace that will hold these."""
    match, symbols = router.match, computation.bound_symbols
    calls, bias = [], match.bias
    if bias is not None and bias.ndim == 2:
        flat = TensorProxy(like=bias, shape=(bias.shape[1],))
        calls.append(prims.reshape.bind(bias, (bias.shape[1],), output=flat))
        bias = flat
    options = {**match.options, "scores_dtype": dtypes.to_torch_dtype(match.scores.dtype)}
    _, _, *order = moe_router.meta(match.logits, bias, **options)
    replacements: dict[int, list[BoundSymbol]] = {position: [] for position in router.replaced}
    if router.route is not None:
        order = symbols[router.route].output
        replacements[router.route] = []
    ids, after = router.ids, []
    if router.place is not match.top_k:  # made without gradients; a symbol with such a result has none
        ids = TensorProxy(like=ids, tags=set())
        after = [prims.shallow_copy.bind(ids, output=router.ids)]
    call = moe_router.bind(match.logits, bias, **options, output=(match.scores, ids, *order))
    replacements[router.place] = [*calls, call, *after]
    return replacements

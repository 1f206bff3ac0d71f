"""Finds routers written in torch's operations in a computation trace, and the symbols that become one moe_router.
Called by rewrite.py; calls routers.py for what they look like, trace.py for storages and readers, and symbols.py.

A trace is functional: an operation in place gives a tensor another name. `prims.update_aliases` gives the same tensor
another name too; here those count as one. Legend: T tokens, E experts, A = top_k.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from thunder_moe.compilers.thunder.compat import import_thunder

import_thunder()

import thunder.core.dtypes as dtypes  # noqa: E402
import thunder.torch as ltorch  # noqa: E402
from thunder.core import prims  # noqa: E402
from thunder.core.devices import to_torch_device  # noqa: E402
from thunder.core.prims import PrimIDs  # noqa: E402
from thunder.core.proxies import Proxy, TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol, Symbol  # noqa: E402

from thunder_moe.compilers.report import RouterEntry  # noqa: E402
from thunder_moe.compilers.routers import (  # noqa: E402
    ROUTER_DTYPES,
    RouterMatch,
    limits_of_kernels,
    match_router,
)
from thunder_moe.compilers.thunder.symbols import moe_route, moe_router  # noqa: E402
from thunder_moe.compilers.thunder.trace import ARGUMENTS, Computation  # noqa: E402

__all__ = ["Router", "find_routers", "fuse_router"]

# Kind of a symbol (see `routers.RouterGraph`) -> the names of its arguments by position, and the names of Thunder's
# symbols of it.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "softmax": (("input", "dim", "dtype"), ("_softmax",)),
    "sigmoid": (("input",), ("sigmoid",)),
    "topk": (("input", "k", "dim", "largest", "sorted"), ("topk",)),
    "max": (("input", "dim", "keepdim"), ("amax", "torch_max")),
    "sum": (("input", "dim", "keepdim", "dtype"), ("sum",)),
    "add": (("input", "other"), ("add", "add_")),
    "div": (("input", "other"), ("div", "div_", "true_divide", "true_divide_")),
    "mul": (("input", "other"), ("mul", "mul_")),
    "gather": (("input", "dim", "index"), ("gather",)),
    "scatter": (("input", "dim", "index", "value"), ("scatter", "scatter_")),
    "zeros": (("input",), ("zeros_like", "zeros", "new_zeros")),
    "masked_fill": (("input", "mask", "value"), ("masked_fill", "masked_fill_")),
    "where": (("condition", "input", "other"), ("where",)),
    "not": (("input",), ("bitwise_not", "logical_not")),
    "nonzero": (("input", "other"), ("gt", "ne")),
    "repeat_interleave": (("input", "repeats", "dim"), ("repeat_interleave",)),
    "clamp": (("input", "min", "max"), ("clamp", "clamp_min")),
    "detach": (("input",), ("detach",)),
    "cast": (("input",), ("to", "torch_type", "type_as", "float", "half", "bfloat16", "bool")),
    "view": (
        ("input",), ("view", "reshape", "unsqueeze", "flatten", "unflatten", "contiguous", "getitem")
    ),
    "expand": (("input",), ("expand", "expand_as")),
}  # fmt: skip
_KIND_OF_NAME = {name: kind for kind, (_, names) in _KINDS.items() for name in names}
# Some of Thunder's functions dispatch to a symbol and are found by their names, others are in its map alone.
_SYMBOLS = {
    symbol.id: _KIND_OF_NAME[symbol.name]
    for symbol in [
        *(getattr(ltorch, name, None) for name in _KIND_OF_NAME),
        *ltorch._torch_to_thunder_function_map.values(),
    ]
    if isinstance(symbol, Symbol) and symbol.name in _KIND_OF_NAME
}
_SYMBOLS[PrimIDs.CONVERT_ELEMENT_TYPE] = "cast"
_BY_RESULT = ("cast", "view", "expand", "zeros")  # judged by their results, whatever else they are given
_NAMES = {"a": "input", "self": "input", "b": "other", "pred": "condition", "src": "value"}
_DEFAULTS = {"alpha": 1}


class _Graph:
    """A computation as a `RouterGraph`: operations are positions, tensors proxies under their first names."""

    def __init__(self, computation: Computation) -> None:
        self.bound_symbols = computation.bound_symbols
        self.proxies: dict[str, TensorProxy] = {}
        self._first: dict[str, str] = {}
        self._made: dict[str, int] = {}
        self._readers: dict[str, set[int]] = {}
        for position, bsym in enumerate(self.bound_symbols):
            if bsym.sym.id == PrimIDs.UNPACK_TRIVIAL:
                continue
            for proxy in bsym.flat_proxy_args:
                self._add(proxy)
            renames = bsym.sym.id == PrimIDs.UPDATE_ALIASES
            for place, proxy in enumerate(bsym.flat_proxy_outs):
                if renames:
                    self._first[proxy.name] = self.first(bsym.flat_proxy_args[place].name)
                else:
                    self._add(proxy)
                    if proxy.name not in computation.arguments:
                        self._made.setdefault(proxy.name, position)
        for name, positions in computation.readers.items():
            reading = {at for at in positions if self.bound_symbols[at].sym.id != PrimIDs.UPDATE_ALIASES}
            self._readers.setdefault(self.first(name), set()).update(reading)

    def _add(self, proxy: Any) -> None:
        if isinstance(proxy, TensorProxy):
            self.proxies.setdefault(proxy.name, proxy)

    def first(self, name: str) -> str:
        return self._first.get(name, name)

    def tensor(self, proxy: Any) -> Any:
        return self.proxies[self.first(proxy.name)] if isinstance(proxy, TensorProxy) else proxy

    def maker(self, tensor: Any) -> Any:
        return self._made.get(tensor.name)

    def kind(self, operation: Any) -> str:
        if operation is None or self._named(operation) is None:
            return ""
        return _SYMBOLS[self.bound_symbols[operation].sym.id]

    def _named(self, position: int) -> dict[str, Any] | None:
        """The arguments of a symbol by name, but for those that are None; None where there are others than its kind
        has."""
        bsym = self.bound_symbols[position]
        kind = _SYMBOLS.get(bsym.sym.id)
        if kind is None or not bsym.args:
            return None
        names = _KINDS[kind][0]
        if bsym.sym.name == "getitem" and not _inserts_dims(bsym.args[1]):
            return None
        if kind in _BY_RESULT:
            return {"input": bsym.args[0]}
        if len(bsym.args) > len(names) and any(value is not None for value in bsym.args[len(names) :]):
            return None
        named = {name: value for name, value in zip(names, bsym.args, strict=False) if value is not None}
        for name, value in bsym.kwargs.items():
            if value is not None and (isinstance(value, Proxy) or value != _DEFAULTS.get(name)):
                named[_NAMES.get(name, name)] = value
        return named if named.keys() <= set(names) else None

    def given(self, operation: Any) -> dict[str, Any]:
        named = self._named(operation) if self.kind(operation) else None
        return {name: self.tensor(value) for name, value in (named or {}).items()}

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


def _inserts_dims(index: Any) -> bool:
    """Whether an index takes all of a tensor: ``x[:, None]``."""
    each = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is ... or (isinstance(one, slice) and one == slice(None)) for one in each)


@dataclass(eq=False)
class Router:
    """A router of a trace.

    Attributes:
        match: what it consists of.
        place: position of the symbol in whose place moe_router goes.
        replaced: positions of the symbols that go, `place` among them.
        ids: proxy of the chosen experts.
        route: position of a moe_route of its ids, whose results moe_router gives; None without one.
    """

    match: RouterMatch
    place: int
    replaced: set[int]
    ids: TensorProxy
    route: int | None = None


def find_routers(computation: Computation) -> list[tuple[Router | None, RouterEntry]]:
    """The routers of a trace; None for those that stay as they are."""
    graph, found = _Graph(computation), []
    for position in range(len(graph.bound_symbols)):
        match = match_router(graph, position) if graph.kind(position) == "topk" else None
        if match is None:
            continue
        router, reason = _router(computation, graph, match)
        logits = graph.example(match.logits)
        decision = ("moe_router", match.summary) if reason is None else ("as written", reason)
        entry = RouterEntry(0, int(logits.shape[1]), match.options["top_k"], int(logits.shape[0]), *decision)
        found.append((router if reason is None else None, entry))
    return found


def _router(computation: Computation, graph: _Graph, match: RouterMatch) -> tuple[Router, str | None]:
    """(the router, why it stays as it is or None). The gates, in order."""
    program, symbols = computation.program, graph.bound_symbols
    modes = [step.grad_enabled for step in program.steps]
    place = match.top_k if modes[match.top_k] == modes[match.takes] else match.takes
    ids: TensorProxy = symbols[match.top_k].output[1]
    router = Router(match, place, _goes(graph, match), ids)
    logits, scores = graph.example(match.logits), graph.example(match.scores)
    if logits.dtype not in ROUTER_DTYPES or logits.device.type not in ("cpu", "cuda"):
        return router, "its logits are no tensor of 16 or 32 bits on a CPU or CUDA device"
    if scores.dtype not in ROUTER_DTYPES:
        return router, f"its scores are {scores.dtype}"
    reason = limits_of_kernels(logits, match.options)
    if reason is not None:
        return router, reason
    if not {match.top_k, match.takes, graph.maker(match.scores)} <= router.replaced:
        return router, "a part of it is read elsewhere"
    if place is not match.top_k and any(reader < place for reader in graph.readers(graph.tensor(ids))):
        return router, "its ids are read before its scores, in another grad mode"
    renamed = _renamings(graph, match, router.replaced)
    if renamed is None:
        return router, "a part of it shares its memory with what is read elsewhere"
    operations = set(match.operations)
    names = [proxy.name for at in operations for proxy in symbols[at].flat_proxy_outs]
    read: dict[Hashable, str] = {computation.storage(match.logits.name): "the logits"}
    storages = dict(read)
    if match.bias is not None:
        storages[computation.storage(match.bias.name)] = "the bias"
    inputs = [match.logits.name] + ([] if match.bias is None else [match.bias.name])
    if any(ARGUMENTS in computation.memory(name) for name in inputs):
        storages[ARGUMENTS] = "what may share memory with the logits or the bias"
    storages |= {computation.storage(name): "the scores" for name in names}
    kept = read if modes[match.takes] and match.logits.requires_grad else None
    reason = program.reason_against_fusing(
        operations | renamed, storages, kept, differentiated=operations - match.choosing
    )
    router.replaced |= renamed
    router.route = _route_of(graph, router, int(logits.shape[1]))
    return router, reason


def _goes(graph: _Graph, match: RouterMatch) -> set[int]:
    """The operations of a router that nobody reads once moe_router gives scores and ids."""
    replaced = set(match.operations)
    kept = {match.scores.name, graph.tensor(graph.bound_symbols[match.top_k].output[1]).name}
    while True:
        outs = {at: [graph.tensor(out).name for out in graph.bound_symbols[at].flat_proxy_outs] for at in replaced}
        stay = {
            at
            for at, names in outs.items()
            if any(name not in kept and not graph.readers(graph.proxies[name]) <= replaced for name in names)
        }
        if not stay:
            return replaced
        replaced -= stay


def _renamings(graph: _Graph, match: RouterMatch, replaced: set[int]) -> set[int] | None:
    """The symbols that give new names to tensors of a router alone; None where one renames others with them, which
    share their memory, so that what the router does in place would be seen in them."""
    kept = {match.scores.name, graph.tensor(graph.bound_symbols[match.top_k].output[1]).name}
    own = {graph.tensor(out).name for at in replaced for out in graph.bound_symbols[at].flat_proxy_outs} - kept
    found = set()
    for position, bsym in enumerate(graph.bound_symbols):
        if bsym.sym.id != PrimIDs.UPDATE_ALIASES:
            continue
        names = {graph.tensor(proxy).name for proxy in bsym.flat_proxy_args}
        if names & own:
            if not names <= own:
                return None
            found.add(position)
    return found


def _route_of(graph: _Graph, router: Router, experts: int) -> int | None:
    for position, bsym in enumerate(graph.bound_symbols):
        routes = bsym.sym.id == moe_route.id and len(bsym.args) == 2 and bsym.args[1] == experts
        if routes and graph.tensor(bsym.args[0]) is graph.tensor(router.ids):
            return position
    return None


def fuse_router(router: Router, computation: Computation) -> dict[int, list[BoundSymbol]]:
    """Position -> what takes the place of the symbol at it. Under the trace that is going to hold these."""
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

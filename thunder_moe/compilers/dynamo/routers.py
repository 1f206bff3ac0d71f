"""Finds routers written in torch's operations, and puts `moe_router` in their place.
Called by rewrite.py; calls compilers/routers.py for what they look like, replace.py, scopes.py, and safety.py for the
operations between.

    values, ids = softmax(logits, float32).topk(A);  values / values.sum(-1, keepdim=True)
    = scores, ids, _, _, _ = moe_router(logits, top_k=A, ...)

torch.topk is two launches, and no compiler fuses it with its surroundings. The choice is the same, except that
torch.topk may take any of several equal probabilities. Legend: T tokens, E experts, A = top_k.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe.compilers.dynamo.effects import is_wrapped, storages_of
from thunder_moe.compilers.dynamo.nodes import (
    calls,
    given,
    is_in_place,
    kind_of,
    operator_of,
    source_of,
    user_line,
    value_of,
)
from thunder_moe.compilers.dynamo.replace import erase
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.eligibility import QUANTIZED
from thunder_moe.compilers.report import RouterEntry
from thunder_moe.compilers.routers import RouterMatch, match_router, reason_against_kernels
from thunder_moe.compilers.safety import Program
from thunder_moe.compilers.spellings import keeps_order
from thunder_moe.ops.router import moe_router  # noqa: F401  (registers the operator; replace.py registers the others)

_OPS = torch.ops.thunder_moe
_EXPERTS = {getattr(_OPS, name) for name in QUANTIZED if name.endswith("moe_experts")}


class _Graph:
    """A graph of dynamo as a `RouterGraph`: operations and tensors are its nodes."""

    def __init__(self, scope: Scope) -> None:
        self.positions = scope.positions

    def maker(self, tensor: Any) -> Any:
        return given(tensor)["input"] if self._is_result(tensor) else tensor

    def _is_result(self, node: Any) -> bool:
        named = given(node) if calls(node, "getitem") else {"index": None}
        return isinstance(named["index"], int) and kind_of(named["input"]) in ("topk", "max")

    def kind(self, operation: Any) -> str:
        kind = kind_of(operation)
        return "view" if keeps_order(kind, given(operation)) else kind

    def given(self, operation: Any) -> dict[str, Any]:
        return {name: self._as_read(value, operation) for name, value in given(operation).items()}

    def _as_read(self, value: Any, reader: fx.Node) -> Any:
        """Return the node that last wrote a tensor before `reader` reads it, also in place."""
        if not isinstance(value, fx.Node):
            return value
        before = self.positions.get(reader, -1)
        writers = [
            user
            for user in value.users
            if is_in_place(user) and user.args[0] is value and self.positions.get(user, before) < before
            if kind_of(user) != "setitem"  # gives no tensor
        ]
        if writers:
            return self._as_read(max(writers, key=self.positions.__getitem__), reader)
        if self._is_result(value):
            source, index = given(value).values()
            return self.result(source, index) or value
        return value

    def result(self, operation: Any, index: int = 0) -> Any:
        if self.kind(operation) not in ("topk", "max") or isinstance(value_of(operation), Tensor):
            return operation
        if not all(calls(user, "getitem") for user in operation.users):
            return None
        return next((user for user in operation.users if given(user)["index"] == index), None)

    def readers(self, tensor: Any) -> set[Any]:
        same = [tensor]
        if self._is_result(tensor):
            same = [user for user in given(tensor)["input"].users if given(user) == given(tensor)]
        return {user for node in same for user in node.users}

    def example(self, tensor: Any) -> Any:
        value = value_of(tensor)
        return value if isinstance(value, Tensor) else None


@dataclass(eq=False)
class Router:
    """A router of a graph."""

    match: RouterMatch  # its operations and options
    scope: Scope  # the graph that it is in
    place: fx.Node  # the node that `moe_router` is inserted before
    nodes: list[Any]  # the nodes that it replaces, in order


def find_routers(scope: Scope) -> list[tuple[Router, RouterEntry]]:
    """Return the routers of a graph with example values, and their entries, which say which are to be fused."""
    found = []
    graph = _Graph(scope)
    for node in scope.graph.nodes:
        if not calls(node, "topk") or (graph.result(node, 1) is None and graph.result(node) is None):
            continue
        match = match_router(graph, node)
        if match is None:
            continue
        router = _router(scope, match)
        found.append((router, match.entry(graph, scope.refusal or _reason(scope, graph, router), user_line(node))))
    return found


def _router(scope: Scope, match: RouterMatch) -> Router:
    nodes = {*match.operations}
    for node in match.operations:  # tensors that are parts of a result
        if kind_of(node) in ("topk", "max"):
            nodes |= {user for user in node.users if calls(user, "getitem")}
    place = match.top_k
    if scope.modes[place] != scope.modes[match.takes]:  # the choice alone is made without gradients
        place = match.takes
    return Router(match, scope, place, sorted(nodes, key=scope.positions.__getitem__))


def fuse_router(router: Router) -> None:
    """Put `moe_router` in the place of one of `find_routers`."""
    match, graph = router.match, router.place.graph
    with graph.inserting_before(router.place):
        bias = match.bias
        if bias is not None and value_of(bias).ndim == 2:
            bias = graph.call_method("squeeze", (bias, 0))
        options = match.options | dict(scores_dtype=value_of(match.scores).dtype)
        call = graph.call_function(_OPS.moe_router.default, (match.logits, bias), options)
        scores, ids = (graph.call_function(operator.getitem, (call, part)) for part in range(2))
    chosen = [user for user in match.top_k.users if user.args[1] == 1]
    for old, new in ((match.scores, scores), *((part, ids) for part in chosen)):
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
    for node in reversed(router.nodes):
        erase(router.scope, node)


def share_orders(graph: fx.Graph, program: Program) -> None:
    """Let calls of `moe_route`, and experts that sort by themselves, read the order of rows of the `moe_router` whose
    ids they are given. It comes behind all other rewrites; `program` is the program of the graph before them."""
    for node in list(graph.nodes):
        called, count = operator_of(node), len(node.args)
        experts_sort = called in _EXPERTS and count in (12, 14) and node.args[-3:] == (None, None, None)
        routes = called is _OPS.moe_route and count == 2 and all(calls(user, "getitem") for user in node.users)
        if not experts_sort and not routes:
            continue
        ids, experts = node.args[1] if experts_sort else node.args[0], node.args[1]
        if experts_sort:
            experts = value_of(node.args[3]).shape[0]
        source = _source_of_ids(ids, experts)
        call: Any = given(source)["input"] if calls(source, "getitem") and given(source)["index"] == 1 else None
        logits = value_of(call.args[0]) if operator_of(call) is _OPS.moe_router else None
        storages = storages_of(value_of(source))
        if logits is None or logits.shape[1] != experts or not storages or program.writer(storages) is not None:
            continue
        with graph.inserting_before(node):
            order = [graph.call_function(operator.getitem, (call, part)) for part in (2, 3, 4)]
            if source is not ids:  # slot_row has the shape of the ids
                order[2] = graph.call_method("view_as", (order[2], ids))
        if experts_sort:
            node.args = (*node.args[:-3], *order)
            continue
        for user in list(node.users):
            order[user.args[1]].meta = dict(user.meta)
            user.replace_all_uses_with(order[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        for part in reversed(order):
            if not part.users:
                graph.erase_node(part)


def _source_of_ids(ids: Any, experts: Any) -> Any:
    """Return the node whose numbers these are, in the same order, when it has ids of so many experts."""
    while True:
        named = given(ids)
        within = calls(ids, "clamp") and (named.get("min"), named.get("max")) == (0, experts - 1)
        source = named["input"] if within else source_of(ids, "order")
        if source is None:
            return ids
        ids = source


def _reason(scope: Scope, graph: _Graph, router: Router) -> str | None:
    """Return why a router is not rewritten; None if it is. The checks run in this order."""
    match, positions, program = router.match, scope.positions, scope.program
    logits = value_of(match.logits)
    if is_wrapped(logits):
        return "its logits are of a function transform or a subclass of Tensor"
    reason = reason_against_kernels(graph, match)
    if reason is not None:
        return reason
    own = set(router.nodes)
    for node in own:
        if is_in_place(node) and not set(node.args[0].users) <= own:
            return f"{node.args[0].name}, which it changes in place, is read elsewhere"
    if router.place is not match.top_k:
        ids = [user for part in match.top_k.users if part.args[1] == 1 for user in part.users]
        if any(positions[user] < positions[router.place] for user in ids):
            return "its ids are read before its scores, in another grad mode"
    replaced = {positions[node] for node in own}
    of_gradient = {positions[node] for node in own & set(match.operations) if node not in match.choosing}
    read = dict.fromkeys(storages_of(logits), "the logits")
    later = dict(read)
    if match.bias is not None:
        read |= dict.fromkeys(storages_of(value_of(match.bias)), "the bias")
    handed_on = dict.fromkeys(storages_of([value_of(node) for node in own]), "the scores")
    differentiable = scope.modes[match.takes] and logits.requires_grad
    return program.reason_against_fusing(
        replaced, handed_on | read, later if differentiable else None, differentiated=of_gradient
    )

"""Finds blocks that run all experts on all tokens, as transformers' Llama 4 does, though its router chose a few.
Called by rewrite.py; calls sites.py, and safety.py for the operations between the products.

    scores = sigmoid(full(-inf).scatter(1, indices, values))               (T, E): 0 where the router did not choose,
    rows = (tokens.repeat(E, 1) * scores.T.reshape(-1, 1)).view(E, T, H)   so those rows are exactly 0,
    y = bmm(silu(gate) * up, down), [gate | up] = bmm(rows, gate_up)       and stay 0: no bias, and silu(0) * 0 = 0,
    y.view(E, T, H).sum(0)                                                 and add nothing here.

What the router chose is all that counts: A rows of each token instead of E.
Legend: T tokens, A = top_k, E experts, H hidden_size.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from thunder_moe.compilers.dynamo.effects import is_in_a_function_transform, storages_of
from thunder_moe.compilers.dynamo.scopes import Scope, value_of
from thunder_moe.compilers.dynamo.sites import MUL, SILU, TRANSPOSE, Site, Weights, calls, part_of, site_of
from thunder_moe.compilers.gate_up import is_interleaved

__all__ = ["DenseExperts", "Routing", "find_dense_experts"]

aten = torch.ops.aten
_BMM = {torch.bmm, aten.bmm.default, "bmm"}
_VIEW = {torch.reshape, aten.view.default, aten.reshape.default, "view", "reshape"}
_REPEAT = {aten.repeat.default, "repeat"}
_T = {torch.t, aten.t.default, "t"}
_SIGMOID = {torch.sigmoid, F.sigmoid, aten.sigmoid.default, "sigmoid"}
_CAST = {"float", "half", "bfloat16", "to", aten._to_copy.default}
_SCATTER = {torch.scatter, aten.scatter.src, "scatter", "scatter_"}
_FULL_LIKE = {torch.full_like, aten.full_like.default}
_TOPK = {torch.topk, aten.topk.default, "topk"}
_SUM = {torch.sum, aten.sum.dim_IntList, "sum"}
_SCATTER_ARGUMENTS = ("input", "dim", "index", "src")
_DENSE = "a batched product over all experts"


@dataclass(frozen=True, eq=False)
class Routing:
    """The nodes of a router and of the gather and sum around its experts, from which routed GEMMs take their operands.

    Attributes:
        repeated: ``tokens.repeat(E, 1)``.
        scatter: what scatters the router's values to the experts that it chose.
        scores: the nodes that make the values the rows' factors, in order: casts and a sigmoid.
        rows: ``repeated * scores``, before which all of the above are there.
        total: (T, H), the sum over the experts.
    """

    repeated: fx.Node
    scatter: fx.Node
    scores: tuple[fx.Node, ...]
    rows: fx.Node
    total: fx.Node

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        """tokens (T, H), indices (T, A) and values (T, A) as they are now: a rewrite elsewhere in the graph may have
        replaced them."""
        given = _named(self.scatter, *_SCATTER_ARGUMENTS)
        return self.repeated.args[0], given["index"], given["src"]


@dataclass(frozen=True, eq=False)
class DenseExperts:
    """The batched GEMMs of gate_up and down; or one batched GEMM with a parameter that belongs to no such block.

    `routing` is None where they stay as they are, and `reason` says why.
    """

    sites: tuple[Site, ...]
    routing: Routing | None
    reason: str | None


class _MismatchError(Exception):
    """The graph differs from the pattern; the message says where."""


def find_dense_experts(scope: Scope, weights: Weights) -> list[DenseExperts]:
    """All batched GEMMs whose weight is a parameter or buffer, in a graph as dynamo gives it to a backend."""
    sites: dict[fx.Node, Site] = {}
    for node in scope.graph.nodes:
        if not calls(node, _BMM) or len(node.args) != 2 or node.kwargs:
            continue
        rows, weight = map(value_of, node.args)
        if rows is None or weight is None or weight.ndim != 3 or is_in_a_function_transform(weight):
            continue
        if weights.behind(scope, node.args[1], weight)[0] is not None:
            sites[node] = site_of(node, scope, node.args[1], weight, rows, None, weights)
    blocks, covered = [], set()
    for second in sites.values():
        try:
            first, between = _swiglu(second, sites)
        except _MismatchError:
            continue
        covered |= {first.node, second.node}
        reasons = [f"{site.gemm.weight}: {site.reason}" for site in (first, second) if site.reason is not None]
        if reasons:
            blocks.append(DenseExperts((first, second), None, reasons[0]))
            continue
        try:
            blocks.append(DenseExperts((first, second), _routing(first, second, between), None))
        except _MismatchError as difference:
            blocks.append(DenseExperts((first, second), None, f"{_DENSE}: {difference}"))
    alone = [DenseExperts((site,), None, f"{_DENSE}, without a SwiGLU") for site in sites.values()]
    return blocks + [single for single in alone if single.sites[0].node not in covered]


def _swiglu(second: Site, sites: dict[fx.Node, Site]) -> tuple[Site, set[fx.Node]]:
    """The GEMM of gate and up whose SwiGLU the second one reads, and the nodes between the two."""
    product: Any = second.node.args[0]
    for silu, up in _pairs(product, MUL):
        if not calls(silu, SILU) or not silu.args or any(silu.args[1:]) or silu.kwargs.get("inplace"):
            continue
        gate: Any = silu.args[0]
        (whole, low), (other, high) = part_of(gate), part_of(up)
        if whole is not None and whole is other and whole in sites and is_interleaved(low, high) is False:
            return sites[whole], {product, silu, gate, up, gate.args[0], up.args[0]}
    raise _MismatchError


def _routing(first: Site, second: Site, between: set[fx.Node]) -> Routing:
    experts, hidden = first.gemm.experts, first.gemm.in_features
    batched: Any = first.node.args[0]
    rows, views = _behind_views(batched, experts, hidden)
    repeated, scores, used = _tokens_times_scores(rows, experts)
    tokens = _argument(repeated)
    chain, scatter = _score_nodes(scores)
    indices, values = _scattered(scatter, experts)
    total, summed = _sum_over_experts(second, experts)
    inner = between | summed | {first.node, second.node}
    for node in inner:
        _require(set(node.users) <= inner | {total}, f"{node.name} is read elsewhere")
    _require(_tensor(tokens, 2).dtype == _tensor(batched, 3).dtype, "tokens and rows differ in dtype")
    for node in (indices, values):
        _require(_same(_tensor(node, 2).shape[0], _tensor(tokens, 2).shape[0]), f"{node.name} is not of all tokens")
    routing = Routing(repeated, scatter, tuple(chain), rows, total)
    reason = _reason_against_routing(
        first.scope, routing, {repeated, scatter, rows, total, *chain, *views, *used, *inner}
    )
    _require(reason is None, str(reason))
    return routing


def _reason_against_routing(scope: Scope, routing: Routing, replaced: set[fx.Node]) -> str | None:
    """Why routed GEMMs, which read tokens, experts and values at `routing.rows`, may not replace some nodes."""
    program, position = scope.program, scope.positions
    tokens, indices, values = routing.operands
    positions = {position[node] for node in replaced}

    def change(first: int, last: int, operand: Any, name: str) -> str | None:
        names = dict.fromkeys(storages_of(value_of(operand)), name)
        return program.reason_against_reading_later(first, last, names, positions)

    place, end = position[routing.rows], len(program.steps)
    handed_on = storages_of([value_of(node) for node in replaced - {routing.total}])
    # The backward computes the products again, of the tokens.
    differentiable = any(scope.modes[node] and value_of(node).requires_grad for node in (tokens, values))
    return (
        program.reason_against_fusing(positions, dict.fromkeys(handed_on, "an intermediate"))
        or change(position[routing.repeated], place, tokens, "the tokens")
        or change(position[routing.scatter], place, values, "the router's choice")
        # Of k different experts, as a top-k gives them.
        or change(position[indices.args[0]], place, indices, "the experts")
        or (change(place, end, tokens, "the tokens") if differentiable else None)
    )


def _behind_views(node: Any, experts: int, last: int) -> tuple[Any, set[fx.Node]]:
    """What (E, T, H) is a view of, and the views."""
    shape, views = _tensor(node, 3).shape, set()
    _require(shape[0] == experts and shape[2] == last, "its rows are not (experts, tokens, features)")
    while calls(node, _VIEW):
        views.add(node)
        node = _argument(node)
    return node, views


def _tokens_times_scores(rows: Any, experts: int) -> tuple[fx.Node, fx.Node, set[fx.Node]]:
    """(repeated, scores (T, E), nodes between) of ``tokens.repeat(E, 1) * scores.T.reshape(-1, 1)``."""
    for repeated, column in _pairs(rows, MUL):
        if not calls(repeated, _REPEAT) or not calls(column, _VIEW) or _tensor(column, 2).shape[1] != 1:
            continue
        times, swapped = _flat(repeated.args[1:]), _argument(column)
        dims = _flat(swapped.args[1:]) if calls(swapped, TRANSPOSE) else ()
        if times == (experts, 1) and (calls(swapped, _T) or dims in ((0, 1), (1, 0), (-1, -2), (-2, -1), (0, -1))):
            scores = _argument(swapped)
            _require(_tensor(scores, 2).shape[1] == experts, "its scores are not per expert")
            return repeated, scores, {repeated, column, swapped, scores}
    raise _MismatchError("its rows are not tokens times scores")


def _score_nodes(node: Any) -> tuple[list[fx.Node], fx.Node]:
    """The casts and the sigmoid that lead from the scattered values to the scores, in order; the scattering node."""
    chain: list[fx.Node] = []
    while calls(node, _CAST | _SIGMOID):
        _require(_tensor(node, 2).dtype.is_floating_point, "its scores are not floating point")
        chain.insert(0, node)
        node = _argument(node)
    _require(sum(calls(step, _SIGMOID) for step in chain) == 1, "its scores are not a sigmoid, 0 at -inf")
    _require(calls(node, _SCATTER), "its scores are not a router's choice scattered into -inf")
    return chain, node


def _scattered(scatter: fx.Node, experts: int) -> tuple[fx.Node, fx.Node]:
    """(indices, values) of a top-k scattered into a (T, E) of -inf, along the experts."""
    given = _named(scatter, *_SCATTER_ARGUMENTS)
    along = given.keys() == set(_SCATTER_ARGUMENTS) and given["dim"] in (1, -1)
    _require(along, "its scores are not scattered along the experts")
    full, indices, values = given["input"], given["index"], given["src"]
    filled = calls(full, _FULL_LIKE) and _named(full, "input", "fill_value").get("fill_value") == float("-inf")
    _require(filled and set(full.users) == {scatter}, "its scores are not scattered into -inf alone")
    _require(_tensor(full, 2).shape[1] == experts, "its scores are not per expert")
    top = indices.args[0] if calls(indices, {operator.getitem}) and indices.args[1] == 1 else None
    # The k largest are k different experts, so that no two values meet at one.
    dim = _named(top, "input", "k", "dim").get("dim", -1) if calls(top, _TOPK) else None
    _require(dim in (1, -1), "the experts do not come from a top-k")
    _require(_tensor(indices, 2).shape[1] == _tensor(values, 2).shape[1], "values and experts differ in number")
    return indices, values


def _sum_over_experts(second: Site, experts: int) -> tuple[fx.Node, set[fx.Node]]:
    """The sum over the experts of the second GEMM's output, and the views between."""
    node, views = second.node, set()
    while len(node.users) == 1:
        source, (node,) = node, node.users
        if calls(node, _VIEW):
            views.add(node)
            continue
        given = _named(node, "input", "dim") if calls(node, _SUM) else {}
        if given.keys() == {"input", "dim"} and given["dim"] in (0, -3, [0], (0,), [-3], (-3,)):
            shape = _tensor(source, 3).shape
            _require(shape[0] == experts and shape[2] == second.gemm.out_features, "its result is not summed per token")
            return node, views
        break
    raise _MismatchError("its result is not summed over the experts")


def _pairs(node: Any, targets: Set[Any]) -> list[tuple[Any, Any]]:
    """The two arguments of a commutative call, in both orders."""
    binary = calls(node, targets) and len(node.args) == 2 and not node.kwargs
    return [tuple(node.args), tuple(node.args[::-1])] if binary else []


def _flat(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call that takes sizes or dims one by one or as a sequence."""
    return tuple(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else tuple(arguments)


def _named(node: Any, *names: str) -> dict[str, Any]:
    """The arguments of a call by name; those behind the last name by their positions."""
    return {**{names[i] if i < len(names) else str(i): value for i, value in enumerate(node.args)}, **node.kwargs}


def _argument(node: Any) -> Any:
    """The first argument of a call, which is a tensor given by position."""
    _require(bool(node.args) and isinstance(node.args[0], fx.Node), f"{node.name} has unusual arguments")
    return node.args[0]


def _tensor(node: Any, ndim: int) -> torch.Tensor:
    """The example value of a node that is a tensor of so many dims."""
    value = value_of(node)
    if isinstance(value, torch.Tensor) and value.ndim == ndim:
        return value
    raise _MismatchError(f"{node} is not a tensor of {ndim} dims")


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _require(ok: bool, otherwise: str) -> None:
    if not ok:
        raise _MismatchError(otherwise)

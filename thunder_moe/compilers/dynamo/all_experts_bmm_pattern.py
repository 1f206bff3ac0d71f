"""Finds blocks that run all experts on all tokens, as transformers' Llama 4 does, though its router chose a few.
Called by rewrite.py; calls sites.py, and scopes.py for the operations between the products.

    scores = sigmoid(full(-inf).scatter(1, indices, values))               (T, E): 0 where the router did not choose,
    rows = (tokens.repeat(E, 1) * scores.T.reshape(-1, 1)).view(E, T, H)   so those rows are exactly 0,
    y = bmm(silu(gate) * up, down), [gate | up] = bmm(rows, gate_up)       and stay 0: no bias, and silu(0) * 0 = 0,
    y.view(E, T, H).sum(0)                                                 and add nothing here.

So A rows of each token are enough, instead of E: the rows of the experts that the router chose.
Legend: T tokens, A = top_k, E experts, H hidden_size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from thunder_moe.compilers.dynamo.effects import is_in_a_function_transform, storages_of
from thunder_moe.compilers.dynamo.fused_moe_pattern import FusedMoE
from thunder_moe.compilers.dynamo.nodes import (
    behind,
    calls,
    given,
    in_both_orders,
    kind_of,
    part_of_result,
    sole_user,
    tensor,
    value_of,
)
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.dynamo.sites import Site, Weights, find_swiglu, site_of
from thunder_moe.compilers.spellings import MismatchError, require
from thunder_moe.compilers.swiglu import SwiGLU

_DENSE = "a batched product over all experts"


def find_all_experts_bmm(scope: Scope, weights: Weights) -> tuple[list[FusedMoE], list[Site]]:
    """Return (layers to rewrite, all batched GEMMs whose weight is a parameter or buffer) of dynamo's graph."""
    sites: dict[fx.Node, Site] = {}
    for node in scope.graph.nodes:
        if not calls(node, "bmm"):
            continue
        source = given(node)["mat2"]
        rows, weight = value_of(given(node)["input"]), value_of(source)
        if rows is None or weight is None or weight.ndim != 3 or is_in_a_function_transform(weight):
            continue
        if weights.behind(scope, source, weight)[0] is not None:
            sites[node] = site_of(node, scope, source, weight, rows, weights)
    layers: list[FusedMoE] = []
    reasons: dict[fx.Node, str | None] = dict.fromkeys(sites, f"{_DENSE}, without a SwiGLU")
    swiglus = {swiglu.product: swiglu for swiglu in find_swiglu(scope, sites.values())}
    for second in sites.values():
        swiglu = swiglus.get(given(second.node)["input"])
        if swiglu is None or len(swiglu.sites) > 1 or swiglu.interleaved:
            continue
        (first,) = swiglu.sites
        declined = (f"{site.gemm.weight}: {site.reason}" for site in (first, second) if site.reason is not None)
        reason = next(declined, None)
        if reason is None:
            try:
                layers.append(_layer(scope, swiglu, second))
            except MismatchError as difference:
                reason = f"{_DENSE}: {difference}"
        reasons |= dict.fromkeys((first.node, second.node), reason)
    return layers, [replace(site, reason=reasons[node]) if reasons[node] else site for node, site in sites.items()]


def _layer(scope: Scope, swiglu: SwiGLU, second: Site) -> FusedMoE:
    (first,) = swiglu.sites
    experts, hidden, nodes = first.gemm.experts, first.gemm.in_features, {second.node, *swiglu.replaced}
    require(
        second.gemm.out_features == hidden, f"its results have {second.gemm.out_features} columns, its rows {hidden}"
    )
    total, inner = _sum_over_experts(second, nodes)
    for node in inner:
        require(set(node.users) <= inner | {total}, f"{node.name} is read elsewhere")
    batched = given(first.node)["input"]
    dtype = tensor(batched, 3, experts, None, hidden).dtype
    rows = behind(batched, "view", passed=nodes)
    repeated, scores = _tokens_times_scores(rows, experts, nodes)
    tokens = tensor(given(repeated)["input"], 2)
    require(tokens.dtype == dtype, "tokens and rows differ in dtype")
    chain, scatter = _score_nodes(scores)
    indices, values = _scattered(scatter, experts)
    top_k = tensor(indices, 2, tokens.shape[0]).shape[1]
    weights = tensor(values, 2, tokens.shape[0], top_k)
    nodes |= {repeated, scatter, rows, total, *chain, *inner}
    # The values belong to k different experts, like a top-k's.
    chosen, scattered = scope.positions[given(indices)["input"]], scope.positions[scatter]
    names = dict.fromkeys(storages_of(value_of(indices)), "the experts")
    reason = scope.program.reason_against_reading_later(chosen, scattered, names) or scope.reason_against_fusing(
        nodes,
        total,
        {"the tokens": given(repeated)["input"], "the experts": indices, "the router's choice": values},
        again=tokens.requires_grad or weights.requires_grad,
    )
    require(reason is None, str(reason))
    return FusedMoE(swiglu, second, repeated, scatter, scatter, top_k, True, total, nodes, tuple(chain))


def _tokens_times_scores(rows: Any, experts: int, passed: set[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """Return (repeated, scores (T, E)) of ``tokens.repeat(E, 1) * scores.T.reshape(-1, 1)``; `passed` gets the rest."""
    for repeated, column in in_both_orders(rows, "mul"):
        if not calls(repeated, "repeat") or not calls(column, "view"):
            continue
        tokens, swapped = given(repeated)["input"], given(column)["input"]
        count, hidden = tensor(tokens, 2).shape
        tensor(repeated, 2, experts * count, hidden)
        tensor(column, 2, None, 1)
        dims = list(given(swapped).values())[1:] if calls(swapped, "transpose") else []
        if calls(swapped, "t") or {dim % 2 for dim in dims} == {0, 1}:
            scores = given(swapped)["input"]
            tensor(scores, 2, None, experts)
            passed |= {column, swapped, scores}
            return repeated, scores
    raise MismatchError("its rows are not tokens times scores")


def _score_nodes(node: Any) -> tuple[list[fx.Node], fx.Node]:
    """Return the casts and the sigmoid from the scattered values to the scores, in order; then the scattering node."""
    chain: list[fx.Node] = []
    while calls(node, "cast", "sigmoid"):
        require(node.args and tensor(node, 2).dtype.is_floating_point, "its scores are not floating point")
        chain.insert(0, node)
        node = given(node)["input"]
    require(sum(calls(step, "sigmoid") for step in chain) == 1, "its scores are not a sigmoid, 0 at -inf")
    return chain, node


def _scattered(scatter: Any, experts: int) -> tuple[fx.Node, fx.Node]:
    """Return (indices, values) of a top-k scattered into a (T, E) of -inf, along the experts."""
    along = kind_of(scatter) == "scatter" and given(scatter)["dim"] in (1, -1)
    require(along, "its scores are not scattered along the experts")
    full, _, indices, values = given(scatter).values()
    filled = calls(full, "full_like") and given(full)["fill_value"] == float("-inf")
    require(filled and set(full.users) == {scatter}, "its scores are not scattered into -inf alone")
    tensor(full, 2, None, experts)
    # The k largest are k different experts, so that no two values meet at one.
    top_k = part_of_result(indices, "topk", 1)
    chosen = top_k is not None and given(top_k).get("dim", -1) in (1, -1)
    require(chosen, "the experts do not come from a top-k")
    return indices, values


def _sum_over_experts(second: Site, between: set[fx.Node]) -> tuple[fx.Node, set[fx.Node]]:
    """Return the sum over the experts of the second GEMM's output; and `between` with the views before it."""
    node, inner, otherwise = second.node, {*between}, "its result is not summed over the experts"
    while calls(total := sole_user(node, otherwise), "view"):
        node = total
        inner.add(node)
    summed = calls(total, "sum") and given(total).keys() == {"input", "dim"}
    require(summed and given(total)["dim"] in (0, -3, [0], (0,), [-3], (-3,)), otherwise)
    tensor(node, 3, second.gemm.experts, None, second.gemm.out_features)
    return total, inner

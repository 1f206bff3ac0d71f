"""Finds layers whose experts are all in a graph, from the rows of tokens to their weighted sum: one operator runs them.
Called by rewrite.py with the GEMMs that are to be rewritten; calls sites.py, expert_ids.py, and effects.py for the
operations between.

    order = argsort(ids.flatten()); offsets = cumsum(histc(ids)) or scatter_add, bincount
    rows = tokens[order // A] [* weights[order]]                             = moe_experts(tokens, ids, weights, ...)
    y = grouped_mm(silu(gate) * up, down, offsets), [gate | up] = grouped_mm(rows, gate_up, offsets)
    (y [* weights[order]])[inverse of order].view(T, A, H).sum(1)

and the same with batched products of repeated tokens (gathered_bmm_pattern.py), where no order is needed.
Legend: T tokens, A = top_k, M = T * A rows, E experts, H hidden_size.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe.compilers.dynamo.effects import storages_of
from thunder_moe.compilers.dynamo.expert_ids import reason_against_ids
from thunder_moe.compilers.dynamo.gathered_bmm_pattern import GatheredBmmSite
from thunder_moe.compilers.dynamo.nodes import (
    arguments,
    behind,
    calls,
    given,
    is_in_place,
    kind_of,
    part_of_result,
    same,
    sole_user,
    source_of,
    tensor,
    value_of,
)  # fmt: skip
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.dynamo.sites import Site
from thunder_moe.compilers.spellings import MismatchError, require
from thunder_moe.compilers.swiglu import SwiGLU

_INTEGERS = (torch.int32, torch.int64)


@dataclass(eq=False)
class FusedMoE:
    """The experts of a layer."""

    first: SwiGLU  # gate and up with their SwiGLU
    down: Site  # the last product
    tokens: Any = None  # node whose input are the tokens (T, H)
    ids: Any = None  # node whose index or else input are the experts (M,) of the slots t * A + a
    weights: Any = None  # node whose value or else input are the weights of the slots (M,)
    top_k: int = 0  # A
    on_input: bool = False  # the weights multiply the rows of tokens, not the results
    total: Any = None  # node of (T, H), which the operator replaces
    nodes: set[fx.Node] = field(default_factory=set)  # all nodes that it consists of
    scores: tuple[fx.Node, ...] = ()  # the nodes that make these weights of what `weights` has, in order

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        """Return the current nodes of tokens, ids and weights, which another rewrite may have replaced."""
        tokens, ids, weights = map(given, (self.tokens, self.ids, self.weights))
        return tokens.get("input"), ids.get("index", ids.get("input")), weights.get("value", weights.get("input"))


def find_fused_moe(scope: Scope, blocks: list[SwiGLU], sites: list[Site]) -> list[FusedMoE]:
    """Return the layers whose experts are all in a graph, given the SwiGLUs and grouped GEMMs that are to be
    rewritten."""
    downs = {behind(site.operands[0], "cast"): site for site in sites if _is_plain(site)}
    found = []
    for block in blocks:
        down: Any = block.down or downs.get(block.product)
        plain = all(map(_is_plain, block.sites))
        with contextlib.suppress(MismatchError):
            if isinstance(down, GatheredBmmSite):
                found.append(_Matcher(scope, block, down).match_gathered())
            elif down is not block.down and plain and not block.form and block.scales is None:
                found.append(_Matcher(scope, block, down).match_grouped())
    return found


def _is_plain(site: Site) -> bool:
    """True if a site is a GEMM alone. GroupedLinear zero-fills rows past the last offset; here no such rows exist."""
    added = (site.arguments.get(name) for name in ("bias", "bias_scale", "scales"))
    return not calls(site.node, "activated") and all(each is None for each in added)


class _Matcher:
    def __init__(self, scope: Scope, block: SwiGLU, down: Site) -> None:
        self.scope = scope
        self.found = FusedMoE(block, down)
        self.order: Any = None
        first = block.sites[0].gemm
        self.experts, self.hidden = first.experts, first.in_features
        require(down.gemm.out_features == self.hidden and down.gemm.experts == self.experts)
        self.found.nodes |= {block.product, down.node}

    def match_grouped(self) -> FusedMoE:
        found, sites = self.found, (*self.found.first.sites, self.found.down)
        rows, _, offsets = sites[0].operands
        require(all(site.operands[2] is offsets for site in sites))
        activated = {found.first.product}
        behind(found.down.operands[0], "cast", passed=activated)
        require(all(len(node.users) == 1 for node in activated))
        found.nodes |= activated | {site.node for site in sites}
        rows, column = behind(rows, "cast", passed=found.nodes), None
        if calls(rows, "mul"):
            first, second = self.take(rows, "mul").values()
            rows, column = (first, second) if _is_gather(first) else (second, first)
        _, index = self.gather(rows)
        found.tokens = rows
        self.find_order(index)
        self.check_offsets(offsets)
        if column is not None:
            found.on_input, found.weights = True, self.of_slots(self.behind_column(column))
        self.find_total()
        return self.checked()

    def match_gathered(self) -> FusedMoE:
        found = self.found
        first, down = found.first.sites[0], found.first.down
        found.nodes |= first.nodes | down.nodes
        rows, found.ids, _ = first.operands
        rows = behind(rows, "cast", passed=found.nodes)
        repeats = self.take(rows, "repeat_interleave")
        require(repeats.get("dim") in (0, -2) and isinstance(repeats["repeats"], int))
        found.tokens, found.top_k = rows, repeats["repeats"]
        self.find_total()
        return self.checked()

    def take(self, node: Any, *kinds: str) -> dict[str, Any]:
        """Add a call of one of some kinds, and return its arguments."""
        named = arguments(node, *kinds)
        self.found.nodes.add(node)
        return named

    # ---- rows

    def gather(self, node: Any) -> tuple[Any, Any]:
        """Return (source, index) of rows of a tensor."""
        require(_is_gather(node))
        named = self.take(node, "getitem", "index_select")
        require(named.get("dim", 0) == 0 and tensor(named["index"], 1).dtype in _INTEGERS)
        return named["input"], named["index"]

    def find_order(self, index: Any) -> None:
        """Set the order of the slots, sorted by expert; ``order // A`` are the tokens of the rows."""
        found = self.found
        found.top_k = 1
        if calls(index, "floor_divide"):
            index, found.top_k = self.take(index, "floor_divide").values()
            require(type(found.top_k) is int and found.top_k > 0)
        self.order, sort = index, index
        if not calls(index, "argsort"):
            sort = part_of_result(index, "sort", 1)
            found.nodes.add(index)
        named = self.take(sort, "sort", "argsort")
        require(named.get("dim", -1) in (0, -1) and named.get("descending", False) is False)
        tensor(named["input"], 1)
        found.ids = sort

    def check_offsets(self, offsets: Any) -> None:
        """Require offsets that are the row ends of the experts."""
        named = self.take(offsets, "cumsum")
        require(named.get("dim") in (0, -1) and value_of(offsets).dtype == torch.int32)
        counts = named["input"]
        named = self.take(counts, "histc", "bincount", "scatter_add")
        source = named["input"]
        if calls(counts, "histc"):
            limits = (named.get("bins"), named.get("min"), named.get("max"))
            require(limits == (self.experts, 0, self.experts - 1))
            while calls(source, "cast"):
                require(value_of(source).dtype in (torch.float32, torch.float64, *_INTEGERS))
                source = self.take(source, "cast")["input"]
        elif calls(counts, "bincount"):
            require(named.keys() == {"input", "minlength"} and named["minlength"] == self.experts)
        else:
            zeros, source, ones = named["input"], named["index"], named["value"]
            require(named["dim"] in (0, -1) and set(zeros.users) == {counts})
            self.take(zeros, "zeros")
            self.take(ones, "ones")
            dtype = tensor(zeros, 1, self.experts).dtype
            require(value_of(ones).dtype == dtype and dtype in (*_INTEGERS, torch.float32))
        sort = part_of_result(source, "sort", 0)
        if sort is not None:
            self.found.nodes.add(source)
            source = self.take(sort, "sort")["input"]
        require(source is self.found.operands[1])

    # ---- weights and sum

    def of_slots(self, column: Any) -> Any:
        """Return the node whose input are the weights in the order of the slots; a column's is in the rows' order."""
        gathered = given(column)["input"]
        weights, index = self.gather(gathered)
        tensor(weights, 1)
        require(index is self.order)
        return gathered

    def behind_column(self, column: Any) -> Any:
        """Return a column (M, 1) that is a view of numbers (M,)."""
        tensor(column, 2, None, 1)
        source = source_of(column, "order")
        tensor(source, 1)
        self.found.nodes.add(column)
        return column

    def find_total(self) -> None:
        """Follow the last product to the sum of each token's rows."""
        found, source, sorted_ = self.found, self.found.down.node, self.order is not None
        while True:
            node = sole_user(source)
            found.nodes.add(node)
            if calls(node, "mul") and found.weights is None:
                first, second = given(node).values()
                column = self.behind_column(first if second is source else second)
                found.weights = self.of_slots(column) if sorted_ else column
            elif sorted_:
                rows, index = self.gather(node)
                require(rows is source)
                self.check_inverse(index)
                sorted_ = False
                if found.top_k == 1 and not self.is_viewed(node):
                    break
            else:
                require(calls(node, "view"))
                tensor(node, 3, None, found.top_k, self.hidden)
                node = sole_user(node)
                named = self.take(node, "sum")
                require(named.keys() == {"input", "dim"} and named["dim"] in (1, -2, [1], (1,), [-2], (-2,)))
                break
            source = node
        require(found.weights is not None)
        dtype = value_of(found.operands[0]).dtype
        if value_of(node).dtype != dtype:  # of float32 weights
            node = sole_user(node)
            self.take(node, "cast")
        require(tensor(node, 2).dtype == dtype)
        found.total = node

    def is_viewed(self, node: fx.Node) -> bool:
        users = list(node.users)
        return len(users) == 1 and calls(users[0], "view") and value_of(users[0]).ndim == 3

    def check_inverse(self, index: Any) -> None:
        """Require the inverse of the order."""
        if calls(index, "argsort"):
            named = self.take(index, "argsort")
            require(named["input"] is self.order and named.keys() <= {"input", "stable"})
            return
        writer = index
        if kind_of(index) != "scatter":
            writers = [user for user in index.users if kind_of(user) == "setitem"]
            writer = writers[0] if len(writers) == 1 else None
        named = self.take(writer, "scatter", "setitem")
        require(named.get("dim", 0) in (0, -1) and named["index"] is self.order)
        self.take(named["input"], "empty", "zeros")
        self.take(named["value"], "arange")
        self.found.nodes.add(index)
        (count,) = value_of(self.order).shape
        tensor(named["input"], 1, count)
        tensor(named["value"], 1, count)

    # ---- whether the rewrite is safe

    def checked(self) -> FusedMoE:
        found, scope = self.found, self.scope
        tokens, ids, weights = map(value_of, found.operands)
        require(isinstance(tokens, Tensor) and tokens.ndim == 2 and weights.ndim == 1)
        require(same(tokens.shape[0], value_of(found.total).shape[0]))
        require(same(ids.shape[0], tokens.shape[0] * found.top_k))
        require(same(weights.shape[0], ids.shape[0]))
        require(tokens.dtype == found.down.gemm.activation_dtype and ids.dtype in _INTEGERS)
        require(weights.dtype in (torch.bfloat16, torch.float16, torch.float32))
        require(reason_against_ids(scope, found.operands[1], found.ids, self.experts) is None)
        found.nodes |= found.first.replaced
        in_place: list[Any] = [node for node in found.nodes if is_in_place(node)]
        require(all(set(node.args[0].users) <= found.nodes for node in in_place))
        reason = scope.reason_against_fusing(
            found.nodes,
            found.total,
            dict(zip(("the tokens", "the ids", "the weights of the experts"), found.operands, strict=True)),
            ignored=storages_of([value_of(site.operands[1]) for site in (*found.first.sites, found.down)]),
            again=tokens.requires_grad or weights.requires_grad,
        )
        require(reason is None)
        return found


def _is_gather(node: Any) -> bool:
    return calls(node, "index_select") or (calls(node, "getitem") and isinstance(given(node)["index"], fx.Node))

"""Finds layers whose experts are all in a graph, from the rows of tokens to their weighted sum: one operator runs them.
Called by rewrite.py with the GEMMs that are to be rewritten; calls sites.py, expert_ids.py, and safety.py for the
operations between.

    order = argsort(ids.flatten()); offsets = cumsum(histc(ids)) or scatter_add, bincount
    rows = tokens[order // A] [* weights[order]]                             = moe_experts(tokens, ids, weights, ...)
    y = grouped_mm(silu(gate) * up, down, offsets), [gate | up] = grouped_mm(rows, gate_up, offsets)
    (y [* weights[order]])[inverse of order].view(T, A, H).sum(1)

and the same with batched products of repeated tokens (selected_experts.py), where no order is needed.
Legend: T tokens, A = top_k, M = T * A rows, E experts, H hidden_size.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from thunder_moe.compilers.dynamo.effects import storages_of
from thunder_moe.compilers.dynamo.expert_ids import reason_against_ids
from thunder_moe.compilers.dynamo.scopes import Scope, value_of
from thunder_moe.compilers.dynamo.selected_experts import SelectedExperts
from thunder_moe.compilers.dynamo.sites import ACTIVATED, MUL, Site, SwiGLUNodes, calls

__all__ = ["WholeExperts", "find_whole_experts", "whole_selected_experts"]

aten = torch.ops.aten
_VIEW = {torch.reshape, aten.view.default, aten.reshape.default, "view", "reshape", "flatten", "contiguous"}
_UNSQUEEZE = {torch.unsqueeze, aten.unsqueeze.default, "unsqueeze"}
_CAST = {"to", "type", "float", "half", "bfloat16", "int", "long", "double", aten._to_copy.default}
_SORT = {torch.sort, aten.sort.default, aten.sort.stable, "sort"}
_ARGSORT = {torch.argsort, aten.argsort.default, aten.argsort.stable, "argsort"}
_FLOOR = {operator.floordiv, torch.floor_divide, aten.floor_divide.default, "floor_divide"}
_SELECT = {torch.index_select, aten.index_select.default, "index_select"}
_CUMSUM = {torch.cumsum, aten.cumsum.default, "cumsum"}
_HISTC = {torch.histc, aten.histc.default, "histc"}
_BINCOUNT = {torch.bincount, aten.bincount.default, "bincount"}
_SCATTER_ADD = {torch.scatter_add, aten.scatter_add.default, "scatter_add", "scatter_add_"}
_SCATTER = {torch.scatter, aten.scatter.src, "scatter", "scatter_"}
_ZEROS = {torch.zeros, torch.zeros_like, "new_zeros"}
_EMPTY = _ZEROS | {torch.empty_like, torch.empty, "new_empty"}
_ONES = {torch.ones, torch.ones_like, "new_ones"}
_SUM = {torch.sum, aten.sum.dim_IntList, "sum"}
_REPEAT = {torch.repeat_interleave, aten.repeat_interleave.self_int, "repeat_interleave"}


_Operand = tuple[Any, int]  # a node, and the position among its arguments of another one


@dataclass(eq=False)
class WholeExperts:
    """The experts of a layer.

    Attributes:
        first: gate and up with their SwiGLU.
        down: the last product.
        tokens: (T, H).
        ids: the experts (M,) of the slots t * A + a.
        weights: of the slots (M,).
        top_k: A.
        on_input: the weights multiply the rows of tokens, not the results.
        total: node of (T, H), which the operator replaces.
        nodes: all nodes that it consists of.
    """

    first: SwiGLUNodes
    down: Site
    tokens: _Operand | None = None
    ids: _Operand | None = None
    weights: _Operand | None = None
    top_k: int = 0
    on_input: bool = False
    total: Any = None
    nodes: set[fx.Node] = field(default_factory=set)

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        """The nodes of tokens, ids and weights as they are now: a rewrite elsewhere in the graph may have replaced
        them."""
        tokens, ids, weights = (
            None if each is None else each[0].args[each[1]] for each in (self.tokens, self.ids, self.weights)
        )
        return tokens, ids, weights


class _MismatchError(Exception):
    """The graph differs from the pattern."""


def find_whole_experts(scope: Scope, blocks: list[SwiGLUNodes], sites: list[Site]) -> list[WholeExperts]:
    """The layers whose experts are grouped GEMMs.

    Args:
        scope: of a graph as dynamo gives it to a backend.
        blocks: SwiGLUs whose GEMMs are rewritten.
        sites: all GEMMs that are.
    """
    found = []
    for block in blocks:
        if block.down is not None or block.form or block.scales is not None or not all(map(_is_plain, block.sites)):
            continue
        readers = {site.node: site for site in sites if site not in block.sites and _is_plain(site)}
        try:
            last = _behind_product(block, set(readers))
            found.append(_Matcher(scope, block, readers[last]).match_grouped())
        except _MismatchError:
            continue
    return found


def _is_plain(site: Site) -> bool:
    """Whether a site is a GEMM alone. Those of GroupedLinear give zeros past the last row end, but here are no rows."""
    added = (site.arguments.get(name) for name in ("bias", "bias_scale", "scales"))
    return getattr(site.node.target, "default", site.node.target) is not ACTIVATED and all(a is None for a in added)


def whole_selected_experts(scope: Scope, products: SelectedExperts) -> WholeExperts | None:
    """The layer whose experts are batched products with the weights of each row's expert; None for others."""
    if products.swiglu is None:
        return None
    try:
        return _Matcher(scope, products.swiglu, products.sites[-1]).match_selected(products)
    except _MismatchError:
        return None


def _require(ok: Any) -> None:
    if not ok:
        raise _MismatchError


def _behind_product(block: SwiGLUNodes, gemms: set[fx.Node]) -> fx.Node:
    """The GEMM that alone reads a SwiGLU."""
    node = block.product
    while True:
        _require(len(node.users) == 1)
        source, (node,) = node, node.users
        if node in gemms:
            return node
        _require(calls(node, _CAST) and value_of(node).dtype == value_of(source).dtype)


class _Matcher:
    def __init__(self, scope: Scope, block: SwiGLUNodes, down: Site) -> None:
        self.scope = scope
        self.found = WholeExperts(block, down)
        self.order: Any = None
        first = block.sites[0].gemm
        self.experts, self.hidden = first.experts, first.in_features
        _require(down.gemm.out_features == self.hidden and down.gemm.experts == self.experts)
        self.found.nodes |= {block.product, down.node}

    def match_grouped(self) -> WholeExperts:
        found, sites = self.found, (*self.found.first.sites, self.found.down)
        rows, _, offsets = sites[0].operands
        _require(all(site.operands[2] is offsets for site in sites))
        source, _, _ = found.down.operands
        _require(self.behind_casts(source) is found.first.product)
        found.nodes |= {site.node for site in sites}
        rows = self.behind_casts(rows)
        column = None
        if calls(rows, MUL) and len(rows.args) == 2:
            found.nodes.add(rows)
            for gathered, other in (rows.args, rows.args[::-1]):
                if isinstance(gathered, fx.Node) and self.is_gather(gathered):
                    rows, column = gathered, other
                    break
        _, index = self.gather(rows)
        found.tokens = (rows, 0)
        self.find_order(index)
        self.check_offsets(offsets)
        if column is not None:
            found.on_input, found.weights = True, self.of_slots(*self.behind_column(column))
        self.find_total()
        return self.checked()

    def match_selected(self, products: SelectedExperts) -> WholeExperts:
        found = self.found
        for site in products.sites:
            found.nodes |= site.nodes
        rows, selected, _ = products.sites[0].operands
        found.ids = (selected, 1)
        rows = self.behind_casts(rows)
        _require(calls(rows, _REPEAT))
        named = {**dict(zip(("input", "repeats", "dim"), rows.args, strict=False)), **rows.kwargs}
        named["input"] = named.pop("self", named.get("input"))
        _require(named.keys() <= {"input", "repeats", "dim"} and named.get("dim") in (0, -2))
        _require(isinstance(named.get("repeats"), int) and rows.args)
        found.tokens, found.top_k = (rows, 0), named["repeats"]
        found.nodes.add(rows)
        self.find_total()
        return self.checked()

    # ---- rows

    def is_gather(self, node: fx.Node) -> bool:
        indexes = calls(node, {operator.getitem}) and isinstance(node.args[1], fx.Node)
        return (indexes and isinstance(value_of(node.args[0]), Tensor)) or calls(node, _SELECT)

    def gather(self, node: Any) -> tuple[Any, Any]:
        """(source, index) of rows of a tensor."""
        _require(isinstance(node, fx.Node) and self.is_gather(node) and not node.kwargs)
        self.found.nodes.add(node)
        source, *dim, index = node.args
        of_index = value_of(index)
        _require(dim in ([], [0]) and isinstance(of_index, Tensor) and of_index.ndim == 1)
        _require(of_index.dtype in (torch.int32, torch.int64))
        return source, index

    def find_order(self, index: Any) -> None:
        """Sets the order of the slots by their experts, of which the rows are ``order // A``."""
        found = self.found
        found.top_k = 1
        if calls(index, _FLOOR):
            _require(len(index.args) == 2 and not index.kwargs and type(index.args[1]) is int and index.args[1] > 0)
            found.nodes.add(index)
            index, found.top_k = index.args
        self.order = index
        if calls(index, {operator.getitem}) and calls(index.args[0], _SORT):
            _require(index.args[1] == 1)
            found.nodes.add(index)
            index = index.args[0]
        else:
            _require(calls(index, _ARGSORT))
        named = {**dict(zip(("input", "dim", "descending"), index.args, strict=False)), **index.kwargs}
        _require(isinstance(index.target, str) or len(index.args) == 1)
        _require(len(index.args) <= 2 and named.keys() <= {"input", "dim", "descending", "stable"})
        _require(named.get("dim", -1) in (0, -1) and named.get("descending", False) is False)
        found.ids = (index, 0)
        found.nodes.add(index)
        _require(bool(index.args) and value_of(index.args[0]).ndim == 1)

    def check_offsets(self, offsets: Any) -> None:
        """Requires that offsets are the row ends of the experts."""
        found = self.found
        _require(calls(offsets, _CUMSUM))
        named = {**dict(zip(("input", "dim"), offsets.args, strict=False)), **offsets.kwargs}
        _require(named.keys() <= {"input", "dim", "dtype"} and named.get("dim") in (0, -1))
        _require(value_of(offsets).dtype == torch.int32)
        counts: Any = named["input"]
        found.nodes |= {offsets, counts}
        if calls(counts, _HISTC):
            named = {**dict(zip(("input", "bins", "min", "max"), counts.args, strict=False)), **counts.kwargs}
            _require((named.get("bins"), named.get("min"), named.get("max")) == (self.experts, 0, self.experts - 1))
            source: Any = named["input"]
            while calls(source, _CAST):
                _require(value_of(source).dtype in (torch.float32, torch.float64, torch.int32, torch.int64))
                found.nodes.add(source)
                source = source.args[0]
            self.check_same_ids(source)
        elif calls(counts, _BINCOUNT):
            _require(counts.kwargs == dict(minlength=self.experts) and len(counts.args) == 1)
            self.check_same_ids(counts.args[0])
        else:
            _require(calls(counts, _SCATTER_ADD) and len(counts.args) == 4 and counts.args[1] in (0, -1))
            zeros, _, index, ones = counts.args
            _require(calls(zeros, _ZEROS) and calls(ones, _ONES) and set(zeros.users) == {counts})
            _require(value_of(zeros).shape == (self.experts,) and value_of(ones).dtype == value_of(zeros).dtype)
            _require(value_of(ones).dtype in (torch.int32, torch.int64, torch.float32))
            found.nodes |= {zeros, ones}
            self.check_same_ids(index)

    def check_same_ids(self, node: Any) -> None:
        """Requires the ids, maybe sorted."""
        if calls(node, {operator.getitem}) and calls(node.args[0], _SORT) and node.args[1] == 0:
            self.found.nodes |= {node, node.args[0]}
            node = node.args[0].args[0]
        _require(node is self.found.operands[1])

    # ---- weights and sum

    def of_slots(self, node: Any, position: int) -> _Operand:
        """The weights of the slots of which an operand has those of the rows."""
        gathered: Any = node.args[position]
        weights, index = self.gather(gathered)
        _require(index is self.order and value_of(weights).ndim == 1)
        return gathered, 0

    def behind_column(self, column: Any) -> _Operand:
        """The numbers (M,) that a column (M, 1) is a view of."""
        value = value_of(column)
        _require(isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == 1)
        inserts = calls(column, {operator.getitem}) and column.args[1] in (
            (slice(None), None), (..., None),
        )  # fmt: skip
        _require(calls(column, _UNSQUEEZE | _VIEW) or inserts)
        self.found.nodes.add(column)
        _require(value_of(column.args[0]).ndim == 1)
        return column, 0

    def find_total(self) -> None:
        """Follows the last product to the sum of each token's rows."""
        found, node = self.found, self.found.down.node
        sorted_ = self.order is not None
        while True:
            _require(len(node.users) == 1)
            source, (node,) = node, node.users
            found.nodes.add(node)
            if calls(node, MUL) and found.weights is None and len(node.args) == 2:
                column = self.behind_column(node.args[0] if node.args[1] is source else node.args[1])
                found.weights = self.of_slots(*column) if sorted_ else column
            elif sorted_:
                rows, index = self.gather(node)
                _require(rows is source)
                self.check_inverse(index)
                sorted_ = False
                if found.top_k == 1 and not self.is_viewed(node):
                    break
            else:
                _require(calls(node, _VIEW))
                shape = tuple(value_of(node).shape)
                _require(len(shape) == 3 and shape[1:] == (found.top_k, self.hidden) and len(node.users) == 1)
                (node,) = node.users
                given = {**dict(zip(("input", "dim"), node.args, strict=False)), **node.kwargs}
                _require(calls(node, _SUM) and given.keys() == {"input", "dim"})
                _require(given["dim"] in (1, -2, [1], (1,), [-2], (-2,)))
                found.nodes.add(node)
                break
        _require(found.weights is not None)
        dtype = value_of(found.operands[0]).dtype
        if value_of(node).dtype != dtype:  # of float32 weights
            _require(len(node.users) == 1 and calls(next(iter(node.users)), _CAST))
            (node,) = node.users
            found.nodes.add(node)
        value = value_of(node)
        _require(value.dtype == dtype and value.ndim == 2)
        found.total = node

    def is_viewed(self, node: fx.Node) -> bool:
        users = list(node.users)
        return len(users) == 1 and calls(users[0], _VIEW) and value_of(users[0]).ndim == 3

    def check_inverse(self, index: Any) -> None:
        """Requires the inverse of the order."""
        found = self.found
        if calls(index, _ARGSORT):
            _require(index.args == (self.order,) and not set(index.kwargs) - {"stable"})
            found.nodes.add(index)
            return
        if calls(index, _SCATTER):
            _require(len(index.args) == 4 and index.args[1] in (0, -1) and not index.kwargs)
            start, _, order, numbers = index.args
            writer = index
        else:
            writers = [user for user in index.users if calls(user, {operator.setitem})]
            _require(len(writers) == 1)
            start, (writer,) = index, writers
            _, order, numbers = writer.args
        _require(calls(start, _EMPTY) and calls(numbers, {torch.arange, aten.arange.default}) and order is self.order)
        _require(len(numbers.args) == 1 and set(numbers.kwargs) <= {"device", "dtype"})
        _require(
            self.same_size(value_of(start), value_of(order)) and self.same_size(value_of(numbers), value_of(order))
        )
        found.nodes |= {start, writer, index, numbers}

    @staticmethod
    def same_size(first: Any, second: Any) -> bool:
        return first.ndim == second.ndim == 1 and statically_known_true(first.shape[0] == second.shape[0])

    # ---- whether it may be

    def checked(self) -> WholeExperts:
        found, scope = self.found, self.scope
        tokens, total, weights, ids = (
            value_of(node) for node in (found.operands[0], found.total, found.operands[2], found.operands[1])
        )  # fmt: skip
        _require(isinstance(tokens, Tensor) and tokens.ndim == 2 and weights.ndim == 1)
        _require(statically_known_true(tokens.shape[0] == total.shape[0]))
        _require(statically_known_true(ids.shape[0] == tokens.shape[0] * found.top_k))
        _require(statically_known_true(weights.shape[0] == ids.shape[0]))
        _require(tokens.dtype == found.down.gemm.activation_dtype and ids.dtype in (torch.int32, torch.int64))
        _require(weights.dtype in (torch.bfloat16, torch.float16, torch.float32))
        sorter: Any = found.ids
        _require(reason_against_ids(scope, found.operands[1], sorter[0], self.experts) is None)
        product: Any = found.first.product
        found.nodes |= self.between(product)
        members: list[Any] = list(found.nodes)
        for node in members:  # in place: seen by nobody else
            if calls(node, {operator.setitem}) or str(node.target).endswith("_"):
                _require(set(node.args[0].users) <= found.nodes)
        weight_storages = storages_of([value_of(site.operands[1]) for site in (*found.first.sites, found.down)])
        read = dict.fromkeys(storages_of(tokens), "the tokens")
        read |= dict.fromkeys(storages_of(weights), "the weights of the experts")
        read |= dict.fromkeys(storages_of(ids), "the ids")
        handed = dict.fromkeys(storages_of([value_of(n) for n in found.nodes - {found.total}]), "an intermediate")
        storages = {key: name for key, name in {**handed, **read}.items() if key not in weight_storages}
        differentiable = scope.modes[found.total] and (tokens.requires_grad or weights.requires_grad)
        positions = {scope.positions[node] for node in found.nodes}
        reason = scope.program.reason_against_fusing(positions, storages, read if differentiable else None)
        _require(reason is None)
        return found

    def between(self, product: fx.Node) -> set[fx.Node]:
        """The nodes of the SwiGLU, and the casts behind it."""
        found, inner = self.found, {product}
        for argument in product.args:
            node: Any = argument
            while isinstance(node, fx.Node) and node not in {site.node for site in found.first.sites}:
                inner.add(node)
                node = node.args[0]
        return inner

    def behind_casts(self, node: Any) -> Any:
        """What a tensor is before casts that change nothing."""
        while calls(node, _CAST) and value_of(node).dtype == value_of(node.args[0]).dtype:
            self.found.nodes.add(node)
            node = node.args[0]
        return node

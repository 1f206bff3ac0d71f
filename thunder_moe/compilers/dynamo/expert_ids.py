"""Proves that expert ids come from a top-k, and removes masks for out-of-range ids, which a top-k cannot produce.
Called by rewrite.py, gathered_bmm_pattern.py and fused_moe_pattern.py; calls scopes.py and effects.py.

    ids = topk(scores, A)[1].reshape(-1)           scores (T, E): 0 <= ids < E while nothing changes them in place
    sorted_ids = sort(ids)[0];  mask = (sorted_ids >= E).unsqueeze(-1)                            false throughout
    sorted_ids.clamp_(max=E - 1);  rows.masked_fill_(mask, 0);  y = y.masked_fill(mask, 0)    do nothing: erased

transformers 5.17 masks the rows of experts that another process has in this way. Ids of a shared model do not come from
a top-k alone, and the source of ids that are inputs of a graph is unknown: such masks stay.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe.compilers.dynamo.effects import is_wrapped, storages_of
from thunder_moe.compilers.dynamo.nodes import (
    calls,
    given,
    is_in_place,
    kind_of,
    part_of_result,
    same,
    source_of,
    value_of,
)  # fmt: skip
from thunder_moe.compilers.dynamo.scopes import Scope


def reason_against_ids(scope: Scope, ids: Any, reader: fx.Node, experts: int) -> str | None:
    """Return why rows may not be sorted by the ids that a node reads: an index may be negative, and may be an error."""
    if _bound(scope, ids, reader) != experts:
        return "a batched product with the weights of each row's expert, which no top-k over all experts chose"
    return None


def remove_noop_masks(scope: Scope) -> bool:
    """Erase masks and upper bounds of ids that change nothing; True if there were any. Then the scope has to be made
    anew."""
    if scope.refusal is not None:
        return False
    *nodes, output = scope.graph.nodes
    shared = scope.input_storages | storages_of([*map(scope.value_of, output.all_input_nodes)])
    idle = [node for node in nodes if _bounds_nothing(scope, node) or _masks_nothing(scope, node, shared)]
    for node in idle:
        node.replace_all_uses_with(given(node)["input"])
        scope.graph.erase_node(node)
    return bool(idle)


def _bound(scope: Scope, ids: Any, reader: fx.Node) -> int | None:
    """Return n where 0 <= ids < n is sure for the ids that a node reads, else None."""
    while _is_unchanged(scope, ids, reader) and value_of(ids).dtype in (torch.int32, torch.int64):
        named = given(ids)
        if calls(ids, "clamp"):
            lowest, highest = named.get("min"), named.get("max")
            return highest + 1 if lowest == 0 and type(highest) is int and highest >= 0 else None
        if (top_k := part_of_result(ids, "topk", 1)) is not None:
            scores, dim = value_of(given(top_k)["input"]), given(top_k).get("dim", -1)
            whole = isinstance(scores, Tensor) and scores.ndim > 0 and dim in (-1, scores.ndim - 1)
            return scores.shape[-1] if whole and type(scores.shape[-1]) is int else None
        sort = part_of_result(ids, "sort", 0)
        source = source_of(ids, "view", "cast") if sort is None else given(sort)["input"]
        ids, reader = source, ids
    return None


def _is_unchanged(scope: Scope, node: Any, reader: fx.Node) -> bool:
    """True if nothing writes the tensor that a node made before `reader` reads it."""
    if not isinstance(value_of(node), Tensor):
        return False
    made, storages = node.args[0] if calls(node, "getitem") else node, storages_of(value_of(node))
    between = scope.program.steps[scope.positions[made] + 1 : scope.positions[reader]]
    return not any(step.changes(storages) for step in between)


def _bounds_nothing(scope: Scope, node: fx.Node) -> bool:
    """True if a node is ``ids.clamp_(max=n - 1)`` of ids below n."""
    named = given(node)
    if kind_of(node) != "clamp" or not is_in_place(node) or "min" in named or type(named.get("max")) is not int:
        return False
    bound = _bound(scope, named["input"], node)
    return bound is not None and bool(named["max"] >= bound - 1)


def _masks_nothing(scope: Scope, node: fx.Node, shared: Set[int]) -> bool:
    """True if a node masks nothing, and what it is given may stand for its result."""
    named = given(node)
    if kind_of(node) != "masked_fill" or type(named.get("value")) not in (int, float):
        return False
    unseen = is_in_place(node) or _is_same(scope, named["input"], node, shared)
    return _is_false(scope, named["mask"], node) and unseen


def _is_false(scope: Scope, mask: Any, reader: fx.Node) -> bool:
    """True if a mask that a node reads is false throughout."""
    if not _is_unchanged(scope, mask, reader):
        return False
    named = given(mask)
    if calls(mask, "unsqueeze"):
        return _is_false(scope, named["input"], mask)
    if not calls(mask, "at_least") or type(named["other"]) is not int:
        return False
    bound = _bound(scope, named["input"], mask)
    return bound is not None and bool(named["other"] >= bound)


def _is_same(scope: Scope, source: Any, node: fx.Node, shared: Set[int]) -> bool:
    """True if replacing a copy by its source is unobservable: both alike, nothing reads the source later, or
    changes the copy, and neither is among the tensors that the graph shares with its caller."""
    old, new = value_of(source), value_of(node)
    if not isinstance(old, Tensor) or is_wrapped(old):
        return False
    if (old.dtype, old.requires_grad, old.ndim) != (new.dtype, new.requires_grad, new.ndim):
        return False
    if not same((*old.shape, *old.stride()), (*new.shape, *new.stride())):
        return False
    olds, news = storages_of(old), storages_of(new)
    later = scope.program.steps[scope.positions[node] + 1 :]
    return not ((olds | news) & shared or any(olds & step.reads or step.changes(news) for step in later))

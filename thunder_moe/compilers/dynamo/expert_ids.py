"""Proves that ids of experts are those of a top-k, and erases masks of ids past the last expert, as there are none.
Called by rewrite.py, selected_experts.py and whole_experts.py; calls scopes.py and effects.py.

    ids = topk(scores, A)[1].reshape(-1)           scores (T, E): 0 <= ids < E while nothing changes them in place
    sorted_ids = sort(ids)[0];  mask = (sorted_ids >= E).unsqueeze(-1)                            false throughout
    sorted_ids.clamp_(max=E - 1);  rows.masked_fill_(mask, 0);  y = y.masked_fill(mask, 0)    do nothing: erased

So transformers 5.17 masks the rows of experts that another process has. The ids of those are not a top-k's alone, and
ids that a graph is given are anybody's: such masks stay.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_moe.compilers.dynamo.effects import is_in_a_function_transform, storages_of
from thunder_moe.compilers.dynamo.scopes import Scope, value_of
from thunder_moe.compilers.dynamo.sites import calls

__all__ = ["erase_idle_masks", "reason_against_ids"]

aten = torch.ops.aten
_SAME_IDS = {torch.reshape, aten.view.default, aten.reshape.default, "view", "reshape", "flatten", "contiguous", "long"}
_CLAMP = {torch.clamp, aten.clamp.default, "clamp"}
_CLAMP_IN_PLACE = {aten.clamp_.default, "clamp_"}
_TOPK = {torch.topk, aten.topk.default, "topk"}
_SORT = {torch.sort, aten.sort.default, aten.sort.stable, "sort"}
_AT_LEAST = {operator.ge, torch.ge, aten.ge.Scalar, "ge"}
_UNSQUEEZE = {torch.unsqueeze, aten.unsqueeze.default, "unsqueeze"}
_MASK = {torch.masked_fill, aten.masked_fill.Scalar, "masked_fill"}
_MASK_IN_PLACE = {aten.masked_fill_.Scalar, "masked_fill_"}


def reason_against_ids(scope: Scope, ids: Any, reader: fx.Node, experts: int) -> str | None:
    """Why rows may not be sorted by the ids that a node reads: an index may be negative, and may be an error."""
    if _bound(scope, ids, reader) != experts:
        return "a batched product with the weights of each row's expert, which no top-k over all experts chose"
    return None


def erase_idle_masks(scope: Scope) -> bool:
    """Erases masks and upper bounds of ids that change nothing, and says whether there were any. The scope is to be
    made anew then."""
    if scope.refusal is not None:
        return False
    *nodes, output = scope.graph.nodes
    ends = [*(node for node in nodes if node.op in ("placeholder", "get_attr")), *output.all_input_nodes]
    shared = storages_of([*map(scope.value_of, ends)])
    idle = [node for node in nodes if _bounds_nothing(scope, node) or _masks_nothing(scope, node, shared)]
    for node in idle:
        node.replace_all_uses_with(node.all_input_nodes[0])
        scope.graph.erase_node(node)
    return bool(idle)


def _bound(scope: Scope, ids: Any, reader: fx.Node) -> int | None:
    """n where 0 <= ids < n is sure for the ids that a node reads, else None."""
    dtype = getattr(value_of(ids), "dtype", None)
    while _is_unchanged(scope, ids, reader) and value_of(ids).dtype == dtype in (torch.int32, torch.int64):
        source: Any = ids.args[0] if ids.args else None
        if calls(ids, _CLAMP):
            lowest, highest = _limits(ids)
            return highest + 1 if lowest == 0 and type(highest) is int and highest >= 0 else None
        if calls(ids, {operator.getitem}) and calls(source, _TOPK) and ids.args[1] == 1:
            return _choices(source)
        if calls(ids, {operator.getitem}) and calls(source, _SORT) and ids.args[1] == 0:
            source = source.args[0] if source.args else None
        elif not calls(ids, _SAME_IDS):
            return None
        ids, reader = source, ids
    return None


def _limits(clamp: fx.Node) -> tuple[Any, Any]:
    given = {**dict(zip(("input", "min", "max"), clamp.args, strict=False)), **clamp.kwargs}
    return given.get("min"), given.get("max")


def _choices(topk: fx.Node) -> int | None:
    """The number of scores that a top-k over the last dim chooses from."""
    scores = value_of(topk.args[0]) if topk.args else None
    if not isinstance(scores, Tensor) or scores.ndim == 0 or type(scores.shape[-1]) is not int:
        return None
    dim = {**dict(zip(("input", "k", "dim"), topk.args, strict=False)), **topk.kwargs}.get("dim", -1)
    return scores.shape[-1] if dim in (-1, scores.ndim - 1) else None


def _is_unchanged(scope: Scope, node: Any, reader: fx.Node) -> bool:
    """Whether another node reads the tensor that a node made as it was made."""
    if not isinstance(value_of(node), Tensor):
        return False
    made, storages = node.args[0] if calls(node, {operator.getitem}) else node, storages_of(value_of(node))
    between = scope.program.steps[scope.positions[made] + 1 : scope.positions[reader]]
    return not any(step.changes(storages) for step in between)


def _bounds_nothing(scope: Scope, node: fx.Node) -> bool:
    """Whether a node is ``ids.clamp_(max=n - 1)`` of ids below n."""
    if not calls(node, _CLAMP_IN_PLACE):
        return False
    lowest, highest = _limits(node)
    bound = _bound(scope, node.args[0], node) if lowest is None and type(highest) is int else None
    return bound is not None and highest >= bound - 1


def _masks_nothing(scope: Scope, node: fx.Node, shared: Set[int]) -> bool:
    """Whether a node masks nothing, and what it is given may stand for its result."""
    if not calls(node, _MASK | _MASK_IN_PLACE) or len(node.args) != 3 or type(node.args[2]) not in (int, float):
        return False
    source, mask, _ = node.args
    return _is_false(scope, mask, node) and (calls(node, _MASK_IN_PLACE) or _is_same(scope, source, node, shared))


def _is_false(scope: Scope, mask: Any, reader: fx.Node) -> bool:
    """Whether a mask that a node reads is false throughout."""
    if not _is_unchanged(scope, mask, reader):
        return False
    if calls(mask, _UNSQUEEZE):
        return _is_false(scope, mask.args[0], mask)
    if not calls(mask, _AT_LEAST) or len(mask.args) != 2 or type(mask.args[1]) is not int:
        return False
    bound = _bound(scope, mask.args[0], mask)
    return bound is not None and mask.args[1] >= bound


def _is_same(scope: Scope, source: Any, node: fx.Node, shared: Set[int]) -> bool:
    """Whether nobody can tell a tensor from the copy that a node makes of it: both alike, nobody reads it later, or
    changes the copy, and neither is among the tensors that the graph shares with its caller."""
    old, new = value_of(source), value_of(node)
    if not isinstance(old, Tensor) or is_traceable_wrapper_subclass(old) or is_in_a_function_transform(old):
        return False
    if (old.dtype, old.requires_grad, old.ndim) != (new.dtype, new.requires_grad, new.ndim):
        return False
    sizes = zip((*old.shape, *old.stride()), (*new.shape, *new.stride()), strict=True)
    if not all(statically_known_true(before == after) for before, after in sizes):
        return False
    olds, news = storages_of(old), storages_of(new)
    later = scope.program.steps[scope.positions[node] + 1 :]
    return not ((olds | news) & shared or any(olds & step.reads or step.changes(news) for step in later))

"""Proves that ids of experts are those of a top-k over all of them, which nothing has changed in place.
Called by selected_experts.py and whole_experts.py; calls scopes.py and effects.py.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe.compilers.dynamo.effects import storages_of
from thunder_moe.compilers.dynamo.scopes import Scope, value_of
from thunder_moe.compilers.dynamo.sites import calls

__all__ = ["reason_against_ids"]

aten = torch.ops.aten
_SAME_IDS = {torch.reshape, aten.view.default, aten.reshape.default, "view", "reshape", "flatten", "contiguous", "long"}
_CLAMP = {torch.clamp, aten.clamp.default, "clamp"}
_TOPK = {torch.topk, aten.topk.default, "topk"}
_SORT = {torch.sort, aten.sort.default, aten.sort.stable, "sort"}


def reason_against_ids(scope: Scope, ids: Any, reader: fx.Node, experts: int) -> str | None:
    """Why rows may not be sorted by the ids that a node reads: an index may be negative, and may be an error."""
    if _bound(scope, ids, reader) != experts:
        return "a batched product with the weights of each row's expert, which no top-k over all experts chose"
    return None


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

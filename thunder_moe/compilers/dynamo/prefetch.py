"""Lets kernels of a graph read their weights, or a cache, before the kernel in front of them has ended.
Called by rewrite.py and huggingface/generation.py; calls scopes.py.

A CUDA kernel whose operator is called with prefetch=True starts with what the graph does not change, while the kernel
in front of it still runs. So that kernel must not write it. Two things are required of a graph:

- No step of it changes the weight, which is an input. For a cache, no step but the operator itself.
- A kernel of the graph runs in front of the operator's. It waits for all kernels in front of the graph, because one of
  them may have written the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.types import py_sym_types

from thunder_moe.compilers.dynamo.effects import storages_of
from thunder_moe.compilers.dynamo.nodes import calls, given, kind_of, operator_of, value_of
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.formats.block_format import BLOCK_FORMATS
from thunder_moe.ops import add_norm, decode_attention, router, scaled_mm  # noqa: F401  (register the operators)

_OPS = torch.ops.thunder_moe
# The positions of the operands that are read early, by operator.
_READ_EARLY: dict[Any, slice] = {
    _OPS.decode_attention: slice(3, 5),
    _OPS.moe_linear_router: slice(1, 2),
    _OPS.add_norm_linear_router: slice(2, 4),
}
for _name, _known in BLOCK_FORMATS.items():
    _READ_EARLY[getattr(_OPS, f"f16a_{_name}weight_scaled_mm")] = slice(1, 1 + len(_known.fields))
    _READ_EARLY[getattr(_OPS, f"f16a_{_name}weight_add_norm_scaled_mm")] = slice(2, 3 + len(_known.fields))


def prefetch_operands(scopes: Sequence[Scope]) -> None:
    """Set `prefetch` of the operators of the root that may read an operand early; nested graphs stay unchanged."""
    root = scopes[0]
    vary: set[fx.Node] = set()  # the nodes whose numbers depend on the inputs', which no compiler computes beforehand
    behind: set[fx.Node] = set()  # the nodes behind a kernel
    for node in root.graph.nodes:
        numbers = _numbers_of(node)
        if node.op == "placeholder" or not vary.isdisjoint(numbers):
            vary.add(node)
        if any(source in behind or (source in vary and _launches(source)) for source in numbers):
            behind.add(node)
        elif overwritten := _overwritten(node):  # a compiler does not run what made the earlier numbers
            written = storages_of([value_of(each) for each in overwritten])
            earlier = {each for each in vary | behind if written & storages_of(value_of(each))}
            vary, behind = vary - earlier, behind - earlier
        places = _READ_EARLY.get(operator_of(node))
        if places is not None and node in behind and _is_settled(root, node, places):
            node.kwargs = {**node.kwargs, "prefetch": True}


def _numbers_of(node: fx.Node) -> list[Any]:
    """Return the nodes whose numbers a node reads. A compiler does not run a node for its size or dtype alone, as y in
    x.expand_as(y)."""
    kind, read = kind_of(node), node.all_input_nodes
    if kind in ("zeros", "empty", "ones", "full", "full_like"):
        return []
    if kind == "cast":
        read = [given(node)["input"]]
    elif overwritten := _overwritten(node):
        read = [each for each in read if each not in overwritten]
    elif kind == "getitem" and isinstance(value_of(given(node)["input"]), (list, tuple)):
        read = [*given(node)["input"].all_input_nodes, *read]  # one of several views, as of torch.broadcast_tensors
    viewed = [each for each in read if storages_of(value_of(each)) & storages_of(value_of(node))]
    return viewed[:1] or [each for each in read if not isinstance(value_of(each), (*py_sym_types, torch.Size))]


def _overwritten(node: fx.Node) -> list[Any]:
    """Return the tensors that a node writes, in whole or in part, without need of what stood there before."""
    if kind_of(node) == "setitem" or (node.op == "call_method" and node.target in ("copy_", "fill_", "zero_")):
        return [node.args[0]]
    out = node.kwargs.get("out")
    return list(out) if isinstance(out, (list, tuple)) else [] if out is None else [out]


def _launches(node: fx.Node) -> bool:
    """True if a node launches a kernel under every compiler."""
    ours = str(node.target).startswith("thunder_moe.")
    return node.op == "call_function" and (ours or node.target is F.embedding or calls(node, "rsqrt", "attention"))


def _is_settled(root: Scope, node: fx.Node, places: slice) -> bool:
    """True if operands, given by position, are inputs of the graph that no other step of it changes."""
    operands = node.args[places]
    storages = storages_of([value_of(operand) for operand in operands])
    known = len(node.args) >= places.stop
    known = known and all(value_of(operand) is not None for operand in operands if operand is not None)
    known = known and storages <= root.input_storages
    return known and root.program.writer(storages, besides=root.positions[node]) is None

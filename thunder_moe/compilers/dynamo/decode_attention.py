"""Finds the attention of one new token behind a static cache, and replaces it by the operator `decode_attention`.
Called by rewrite.py and huggingface/generation.py; calls scopes.py, add_norm.py for norms, and
kernels/cuda/decode_attention.py for what is served.

    q, k, v = heads of the projections                               (B, 1, heads, D)
    q, k = norm(q) * weight, norm(k) * weight                        RMS norm of each head; may be missing
    q, k = rotate(q^T), rotate(k^T)                                  x * cos + rotate_half(x) * sin; may be missing
    key_cache.index_copy_(2, position, k), value_cache.index_copy_(2, position, v^T)
    sdpa(q, key_cache, value_cache, mask)                            with or without repeated heads

Legend: B texts, Hq query heads, Hkv key heads, D numbers of a head, L tokens that the cache holds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from thunder_moe.compilers.dynamo.add_norm import norm_of
from thunder_moe.compilers.dynamo.attention import behind_repeat
from thunder_moe.compilers.dynamo.effects import is_wrapped, storages_of
from thunder_moe.compilers.dynamo.nodes import (
    arguments,
    behind,
    calls,
    given,
    in_both_orders,
    is_in_place,
    same,
    source_of,
    user_line,
    value_of,
)
from thunder_moe.compilers.dynamo.nodes import tensor as tensor_of
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.report import AttentionEntry
from thunder_moe.compilers.spellings import MismatchError, is_number, require
from thunder_moe.kernels.cuda.decode_attention import unserved_reason
from thunder_moe.ops import decode_attention  # noqa: F401  (registers the operator)


@dataclass(eq=False)
class _Heads:
    """Heads (B, 1, heads, D) of a projection, and what becomes of them before they are attended to."""

    source: Any  # the projection
    norm: tuple[Any, float] | None = None  # the weight (D,) of the norm, and epsilon
    angles: tuple[Any, Any] | None = None  # cos and sin (B or 1, 1, 1, D) of a rotary embedding
    nodes: set[Any] = field(default_factory=set)  # the nodes behind the projection


def fuse_decode_attention(scopes: Sequence[Scope], *, on_any_device: bool = False) -> list[AttentionEntry]:
    """Replace the attention of new tokens where a kernel serves it, or `on_any_device`; return the report's entries.

    The scopes are out of date if there are any."""
    found = []
    for scope in scopes:
        once: dict[fx.Node, fx.Node] = {}
        for node in [node for node in scope.graph.nodes if calls(node, "attention")]:
            with contextlib.suppress(MismatchError):
                found.append(_fuse(scope, node, on_any_device, once))
        if found:
            scope.module.recompile()
    return found


def _fuse(scope: Scope, node: fx.Node, on_any_device: bool, once: dict[fx.Node, fx.Node]) -> AttentionEntry:
    """Replace the attention at a node; `once` has the results of `_computed_once` in the graph."""
    named = given(node)
    require(scope.refusal is None and set(named) <= _KNOWN)
    require(not named.get("is_causal", False) and named.get("dropout_p", 0.0) == 0)
    repeats = [behind_repeat(named[name]) for name in ("key", "value")]
    key_cache, value_cache = (
        named[name] if repeat is None else repeat.source for name, repeat in zip(("key", "value"), repeats, strict=True)
    )
    (_, key_heads, length, width), dtype = tensor_of(key_cache, 4).shape, value_of(key_cache).dtype
    writes = [_write(scope, cache, node) for cache in (key_cache, value_cache)]
    position = given(writes[0])["index"]
    require(given(writes[1])["index"] is position and tensor_of(position, 1, 1).dtype == torch.int64)
    query = _heads_behind(behind(named["query"], "order"))
    key, value = (_heads_behind(given(write)["value"]) for write in writes)
    texts, _, heads, _ = tensor_of(query.source, 4, None, 1, None, width).shape
    require(all(isinstance(size, int) for size in (heads, key_heads, width)) and heads % key_heads == 0)
    result = value_of(node)  # autocast may have changed its dtype, and broadcasting its heads
    layouts = (texts, heads, 1, width), (texts, key_heads, heads // key_heads, width)
    require(result.dtype == dtype and any(same(result.shape, layout) for layout in layouts))
    scale = named.get("scale", 1 / math.sqrt(width))
    require(is_number(scale))
    for each in (key, value):
        tensor_of(each.source, 4, texts, 1, key_heads, width)
    for cache in (key_cache, value_cache):
        tensor_of(cache, 4, texts, key_heads, length, width)
    require(all(value_of(each.source).dtype == dtype for each in (query, key, value)))
    require(value.norm is None and value.angles is None and query.angles == key.angles)
    require((query.norm is None) == (key.norm is None))
    epsilon = 0.0
    if query.norm is not None and key.norm is not None:
        epsilon = query.norm[1]
        require(key.norm[1] == epsilon)
    _require_served(scope, node, heads, key_heads, on_any_device)
    mask = named.get("attn_mask")
    if mask is not None:
        rows = tensor_of(mask, 4, None, 1, 1, length)
        require((same(rows.shape[0], 1) or same(rows.shape[0], texts)) and rows.dtype in (torch.bool, dtype))
    if query.angles is not None:
        angles = [tensor_of(each, 4, None, 1, 1, width) for each in query.angles]
        require(same(angles[0].shape, angles[1].shape) and all(each.dtype == dtype for each in angles))
        require(same(angles[0].shape[0], 1) or same(angles[0].shape[0], texts))

    weights = [None if each.norm is None else each.norm[0] for each in (query, key)]
    cos, sin = query.angles or (None, None)
    reads = {"the query": query.source, "the key": key.source, "the value": value.source, "the mask": mask}
    reads |= {"the position": position, "cos": cos, "sin": sin, "the norm": weights[0], "the norm of keys": weights[1]}
    others = storages_of([value_of(each) for each in reads.values()])
    caches = [storages_of(value_of(cache)) for cache in (key_cache, value_cache)]
    # The operator writes the caches while it reads.
    require(not caches[0] & caches[1] and not others & caches[0].union(caches[1]))
    reads |= {"the keys": key_cache, "the values": value_cache}
    nodes = query.nodes | key.nodes | value.nodes | {node, *writes}
    nodes = nodes.union(*(repeat.nodes for repeat in repeats if repeat is not None))
    read = {name: each for name, each in reads.items() if each is not None}
    require(scope.reason_against_fusing(nodes, node, read) is None)
    _require_unread(scope, (key_cache, value_cache), nodes, writes, node)

    graph = scope.graph
    with graph.inserting_before(node):

        def of_one_token(source: Any) -> Any:
            return graph.call_method("__getitem__", (source, (slice(None), 0)))

        operands = (
            *(of_one_token(each.source) for each in (query, key, value)), key_cache, value_cache, position,
            *(each and _computed_once(graph, each, once) for each in (mask, cos, sin)), *weights,
        )  # fmt: skip
        options: dict[str, Any] = dict(epsilon=epsilon, scale=float(scale))
        out = graph.call_function(_OPERATOR, operands, options)
        out.meta["example_value"] = result.new_empty((texts, heads, width))
        grouped = not same(result.shape[1], heads)  # the heads of a group as rows of the query
        last = (
            graph.call_method("unflatten", (out, 1, (key_heads, heads // key_heads)))
            if grouped
            else graph.call_method("unsqueeze", (out, 2))
        )
        last.meta["example_value"] = result
    node.replace_all_uses_with(last)
    for write in writes:
        graph.erase_node(write)
    for left in sorted(nodes - set(writes), key=scope.positions.__getitem__, reverse=True):
        if not left.users:
            graph.erase_node(left)
    keys = length if isinstance(length, int) else None
    parts = ["norms"] * bool(query.norm) + ["rotary embedding"] * bool(query.angles) + ["cache"]
    reason = f"{', '.join(parts)} and attention are one kernel"
    return AttentionEntry(0, heads, key_heads, width, keys, "fused", reason, where=user_line(node))


_KNOWN = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
_OPERATOR: Any = torch.ops.thunder_moe.decode_attention.default


def _computed_once(graph: fx.Graph, node: fx.Node, once: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a mask or angles in a form that inductor computes once; what it can fuse, it computes again in each layer.

    inductor gives the source of as_strided a buffer of its own.
    """
    source = source_of(node, "unsqueeze")
    if source is not None and value_of(source).ndim > 1 and same(value_of(source).shape[0], value_of(node).shape[0]):
        node = source  # (B or 1, 1, D) angles, which each layer unsqueezes for itself
    value = value_of(node)
    sizes = (*value.shape, *value.stride())
    if not value.is_contiguous() or not all(isinstance(size, int) for size in sizes):
        return node
    if node not in once:
        once[node] = graph.call_function(torch.as_strided, (node, tuple(value.shape), tuple(value.stride())))
    return once[node]


def _require_served(scope: Scope, node: fx.Node, heads: int, key_heads: int, on_any_device: bool) -> None:
    """Require that the operator's kernel serves the call, and that it needs no gradient."""
    query = value_of(given(node)["query"])
    require(not is_wrapped(query) and not (scope.modes[node] and value_of(node).requires_grad))
    if not on_any_device:
        require(query.device.type == "cuda")
        require(unserved_reason(query.device, query.dtype, heads, key_heads, query.shape[3]) is None)


def _write(scope: Scope, cache: fx.Node, before: fx.Node) -> fx.Node:
    """Return the only write to a cache in front of a node: of one token, at a position."""
    positions = scope.positions
    writes = [user for user in cache.users if is_in_place(user) and positions[user] < positions[before]]
    require(len(writes) == 1 and not writes[0].users)
    named = arguments(writes[0], "index_copy")
    require(named["input"] is cache and named["dim"] in (2, -2))
    return writes[0]


def _require_unread(
    scope: Scope, caches: Sequence[fx.Node], nodes: set[fx.Node], writes: Sequence[fx.Node], last: fx.Node
) -> None:
    """Require that nobody else reads the caches between the writes, which the operator does later, and `last`."""
    storages = storages_of([value_of(cache) for cache in caches])
    own = {scope.positions[node] for node in nodes}
    for at in range(min(scope.positions[write] for write in writes), scope.positions[last]):
        require(at in own or not scope.program.steps[at].reads & storages)


def _heads_behind(node: Any) -> _Heads:
    """Match heads (B, heads, 1, D), back to their projection (B, 1, heads, D)."""
    heads = _Heads(node)
    _take_rotary(heads)
    transposed = given(heads.source) if calls(heads.source, "transpose") else {}
    require({transposed.get("dim0"), transposed.get("dim1")} in ({1, 2}, {-2, -3}, {1, -2}, {-3, 2}))
    heads.nodes.add(heads.source)
    heads.source = transposed["input"]
    norm = norm_of(heads.source)
    if norm is not None:
        heads.source, heads.norm = norm.source, (norm.weight, norm.epsilon)
        heads.nodes |= norm.nodes
    return heads


def _take_rotary(heads: _Heads) -> None:
    """Match x * cos + cat(-x[..., D / 2:], x[..., :D / 2]) * sin; leave `heads` unchanged for other nodes."""
    node = heads.source
    for plain, rotated in in_both_orders(node, "add"):
        for x, cos in in_both_orders(plain, "mul"):
            for turned, sin in in_both_orders(rotated, "mul"):
                parts = given(turned).get("input") if calls(turned, "cat") else None
                if not isinstance(parts, (tuple, list)) or len(parts) != 2 or given(turned).get("dim") not in (-1, 3):
                    continue
                negative, low = parts
                high = given(negative).get("input") if calls(negative, "neg") else None
                half = value_of(x).shape[3] // 2 if value_of(x) is not None and value_of(x).ndim == 4 else 0
                if _is_slice(low, x, (None, half)) and _is_slice(high, x, (half, None)):
                    heads.nodes |= {node, plain, rotated, turned, negative, low, high}
                    heads.source, heads.angles = x, (cos, sin)
                    return


def _is_slice(node: Any, source: Any, ends: tuple[Any, Any]) -> bool:
    """True if a node is source[..., start:stop]."""
    named = given(node) if calls(node, "getitem") else {}
    return named.get("input") is source and named.get("index") == (Ellipsis, slice(*ends, None))

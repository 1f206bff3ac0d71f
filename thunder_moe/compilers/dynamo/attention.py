"""Takes causal masks from attention, and finds masked attention that repeats keys and values for heads that share them.
Called by rewrite.py and decode_attention.py; calls scopes.py, effects.py, replace.py and kernels/attention.py.

    sdpa(q, keys, values, mask) = sdpa(q, keys, values, is_causal=True)       if the mask hides later keys alone

    keys = k[:, :, None].expand(B, Hkv, G, L, D).reshape(B, Hkv * G, L, D)    or k.repeat_interleave(G, 1)
    sdpa(q, keys, values, mask)                                               q (B, Hkv * G, Q, D)
    = sdpa(q, k, v, mask, enable_gqa=True)                                    if cuDNN runs this call;
    = sdpa(q as (B, Hkv, G, D), k, v, mask).reshape(B, Hkv * G, 1, D)         elsewhere, for one new token: Q = 1

Each key is read once instead of written and read G times.
Legend: B batch, Hkv key heads, G query heads that share one, Q new tokens, L keys, D width of a head.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thunder_moe.compilers.dynamo.effects import grad_modes, is_in_a_function_transform, program_of, storages_of
from thunder_moe.compilers.dynamo.nodes import calls, given, same, source_of, user_line, value_of
from thunder_moe.compilers.dynamo.replace import replace_node
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.report import AttentionEntry
from thunder_moe.compilers.spellings import keeps_order
from thunder_moe.kernels.attention import cudnn_groups_heads_of


@dataclass(frozen=True, eq=False)
class _Repeat:
    """`source` (B, Hkv, L, D), whose heads are repeated G times each, and the nodes that do so."""

    source: fx.Node
    nodes: frozenset[fx.Node]


def take_causal_masks(scope: Scope, *, on_any_device: bool) -> None:
    """Replace masks that are causal in every call by ``is_causal=True`` (half the time) on CUDA, or `on_any_device`."""
    causal: dict[fx.Node, bool] = {}
    for node in scope.graph.nodes if scope.refusal is None else ():
        named = given(node) if calls(node, "attention") else {}
        query, key = value_of(named.get("query")), value_of(named.get("key"))
        mask = named.pop("attn_mask", None)
        if not (isinstance(mask, fx.Node) and isinstance(query, Tensor) and isinstance(key, Tensor)):
            continue
        if named.get("is_causal", False) is not False or named.get("dropout_p", 0.0) != 0:
            continue
        if not same(query.shape[-2], key.shape[-2]) or not (on_any_device or query.device.type == "cuda"):
            continue
        if mask not in causal:
            causal[mask] = _is_causal_mask(mask)
        if causal[mask]:
            node.args = tuple(named.pop(name) for name in ("query", "key", "value"))
            node.kwargs = {**named, "is_causal": True}


# What masks are made of: same inputs, same numbers. All functions are torch's or the operators of Python.
_PURE = {
    "add", "and_", "arange", "cumsum", "diff", "eq", "expand", "floordiv", "ge", "getitem", "gt", "le", "lt", "ne",
    "new_ones", "ones", "or_", "reshape", "sub", "to", "tril", "unsqueeze", "view", "zeros",
}  # fmt: skip
_MOST = 2**30  # elements of the mask: a few GB of memory while the graph is compiled


def _is_causal_mask(mask: fx.Node) -> bool:
    """True if a mask is (B, H, Q, L), bool, and lets query i read the keys 0 to i alone, in all calls of the graph.

    A mask that is computed from sizes alone is the same in all calls: it is computed here, once. So transformers asks
    of each prompt without a cache where other texts begin in its `position_ids`, although it has made them by arange
    itself."""
    value = value_of(mask)
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.ndim != 4 or value.device.type == "meta":
        return False
    nodes = _made_from_sizes(mask)
    if nodes is None or value.numel() > _MOST:
        return False
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[mask])
    with unset_fake_temporarily(), torch.no_grad():
        made = fx.Interpreter(fx.GraphModule({}, graph)).run()
        causal = torch.ones(made.shape[2:], dtype=torch.bool, device=made.device).tril()
        return torch.equal(made, causal.expand_as(made))


def _made_from_sizes(mask: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that compute a mask, in order; None if it depends on an input, or if any node changes it."""
    needed, waiting = set[fx.Node](), [mask]
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        value, target = value_of(node), node.target
        name = str(target if node.op == "call_method" else getattr(target, "__name__", ""))
        known = node.op == "call_method" or target in (getattr(torch, name, None), getattr(operator, name, None))
        if name not in _PURE or not known or not isinstance(value, Tensor):
            return None
        needed.add(node)
        waiting += node.all_input_nodes
    storages = storages_of([value_of(node) for node in needed])
    program = program_of(mask.graph, grad_modes(mask.graph, True), value_of, {})
    if program.writer(storages) is not None:
        return None
    return [node for node in mask.graph.nodes if node in needed]


def find_repeated_attention(
    scope: Scope, *, on_any_device: bool
) -> Sequence[tuple[AttentionEntry, Callable[[], None] | None]]:
    """Return (entry, what groups its heads, if it is to) of each attention of a graph that repeats keys and values.

    It is grouped on CUDA, or `on_any_device`."""
    found = []
    for node in scope.graph.nodes:
        if not calls(node, "attention"):
            continue
        named = given(node)
        query, keys, values = (value_of(named.get(name)) for name in ("query", "key", "value"))
        if not all(isinstance(value, Tensor) and value.ndim == 4 for value in (query, keys, values)):
            continue
        key, value = behind_repeat(named["key"]), behind_repeat(named["value"])
        if key is None or value is None or is_in_a_function_transform(query):
            continue
        by_cudnn = _groups_by_cudnn(scope, node, key, value)
        reason = scope.refusal or _reason(scope, node, key, value, by_cudnn=by_cudnn)
        if reason is None and not on_any_device and query.device.type != "cuda":
            reason = f"it runs on {query.device.type}"
        heads, key_heads = int(keys.shape[1]), int(value_of(key.source).shape[1])
        grouped = None if reason is not None else partial(_group_heads, scope, node, key, value, by_cudnn)
        decision = ("repeated", reason) if reason else ("grouped", f"{heads // key_heads} heads read the same keys")
        length = keys.shape[2] if isinstance(keys.shape[2], int) else None
        entry = AttentionEntry(0, heads, key_heads, int(keys.shape[3]), length, *decision, where=user_line(node))
        found.append((entry, grouped))
    return found


def _group_heads(scope: Scope, node: fx.Node, key: _Repeat, value: _Repeat, by_cudnn: bool) -> None:
    """Replace attention by attention to keys and values that are not repeated."""
    graph, named = scope.graph, given(node)
    key_heads, heads = (int(value_of(each).shape[1]) for each in (key.source, named["key"]))
    options: dict[str, Any] = {name: named[name] for name in ("attn_mask", "dropout_p", "scale") if name in named}

    def method(name: str, *arguments: Any) -> fx.Node:
        return graph.call_method(name, arguments)

    def rows_of_groups(source: fx.Node) -> fx.Node:
        """Return (B, Hkv * G, 1, X) -> (B, Hkv, G, X)"""
        return method("squeeze", method("unflatten", source, 1, (key_heads, heads // key_heads)), 3)

    with graph.inserting_before(node):
        query, mask = named["query"], options.get("attn_mask")
        if by_cudnn:
            options["enable_gqa"] = True
        else:
            query = rows_of_groups(query)
            if mask is not None and value_of(mask).shape[1] != 1:
                options["attn_mask"] = rows_of_groups(mask)
        out = graph.call_function(F.scaled_dot_product_attention, (query, key.source, value.source), options)
        if not by_cudnn:
            out = method("unsqueeze", method("flatten", out, 1, 2), 2)
    replace_node(scope, node, out)


def behind_repeat(node: Any) -> _Repeat | None:
    """Return what a node repeats for the heads of a group; None if it repeats nothing."""
    if calls(node, "repeat_interleave"):
        source, repeats, dim = (*given(node).values(), None)[:3]
        right = dim in (1, -3) and isinstance(repeats, int) and _repeats(source, node) == repeats
        return _Repeat(source, frozenset({node})) if right else None
    expanded = source_of(node, "view")
    unsqueezed: Any = given(expanded)["input"] if calls(expanded, "expand") else None
    if not calls(unsqueezed, "unsqueeze", "getitem"):
        return None
    source, place = given(unsqueezed).values()
    if calls(unsqueezed, "unsqueeze"):
        inserts = place in (2, -3)
    else:
        leading = place[:3] if isinstance(place, tuple) else ()
        inserts = leading == (slice(None), slice(None), None) and None not in place[3:]
        inserts = inserts and keeps_order("getitem", given(unsqueezed))
    group, wide = _repeats(source, node), value_of(expanded)
    if not inserts or group is None or wide is None:
        return None
    # The reshape joins dims 1 and 2 alone.
    batch, heads, length, width = value_of(source).shape
    whole = same(wide.shape, (batch, heads, group, length, width))
    return _Repeat(source, frozenset({node, expanded, unsqueezed})) if whole else None


def _repeats(source: Any, repeated: fx.Node) -> int | None:
    """Return how often the heads of (B, Hkv, L, D) are in (B, Hkv * G, L, D); None if the other sizes differ."""
    few, many = value_of(source), value_of(repeated)
    if few is None or many is None or few.ndim != 4 or many.ndim != 4:
        return None
    heads, key_heads = many.shape[1], few.shape[1]
    if not isinstance(heads, int) or not isinstance(key_heads, int) or key_heads == 0 or heads % key_heads:
        return None
    others = same((few.shape[0], *few.shape[2:]), (many.shape[0], *many.shape[2:]))
    return heads // key_heads if others and heads > key_heads else None


def _groups_by_cudnn(scope: Scope, node: fx.Node, key: _Repeat, value: _Repeat) -> bool:
    """True if cuDNN groups the heads of a call without gradients."""
    named = given(node)
    query, keys, values = value_of(named["query"]), value_of(key.source), value_of(value.source)
    mask = value_of(named.get("attn_mask"))
    if mask is None or query.device.type != "cuda" or not all(isinstance(size, int) for size in query.shape[1::2]):
        return False
    if scope.modes[node] and value_of(node).requires_grad:
        return False
    return cudnn_groups_heads_of(
        str(query.device), query.dtype, mask.dtype, query.shape[1], keys.shape[1], query.shape[3], values.shape[3],
        queries=1 if same(query.shape[2], 1) else 2,
    )  # fmt: skip


def _reason(scope: Scope, node: fx.Node, key: _Repeat, value: _Repeat, *, by_cudnn: bool) -> str | None:
    """Return why attention is not rewritten; None if it is. The checks run in this order."""
    named = given(node)
    query, keys, values = value_of(named["query"]), value_of(key.source), value_of(value.source)
    heads = int(value_of(named["key"]).shape[1])
    if named.get("enable_gqa", False) is not False:
        return "it groups heads itself"
    if named.get("is_causal", False) is not False:
        return "it is causal, without a mask"
    if named.get("dropout_p", 0.0) != 0:
        return "it drops probabilities at random"
    if keys.shape[1] != values.shape[1] or not same(query.shape[:2], (keys.shape[0], heads)):
        return "query, keys and values differ in batch or heads"
    if not by_cudnn and not same(query.shape[2], 1):
        return "it has more than one new token, and is not cuDNN's"
    if named.get("attn_mask") is not None:
        mask = value_of(named["attn_mask"])
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] not in (1, heads):
            return "its mask is not (batch, 1 or heads, queries, keys)"
        if mask.dtype not in (torch.bool, query.dtype):
            return f"its mask is {mask.dtype}, the query {query.dtype}"
    nodes, read = {node, *key.nodes, *value.nodes}, {"the keys": key.source, "the values": value.source}
    return scope.reason_against_fusing(
        nodes, node, read, handed_on="the repeated keys", again=value_of(node).requires_grad
    )

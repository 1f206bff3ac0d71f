"""Moves a residual's sum and its RMS norm into the dense layer or the router behind them, in graphs of few tokens.
Called by rewrite.py, huggingface/generation.py, and decode_attention.py, which asks for norms; calls kernels/cuda for
what is served.

    total = x + residual
    rows = norm(total) * weight
    scaled_mm(rows, ...)           -> f16a_nvfp4weight_add_norm_scaled_mm: the result, and total
    moe_linear_router(rows, ...)   -> add_norm_linear_router: the results, total and rows
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe.compilers.dynamo.effects import is_wrapped
from thunder_moe.compilers.dynamo.nodes import behind, calls, given, in_both_orders, operator_of, same, value_of
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.spellings import MismatchError, is_number, require
from thunder_moe.formats.block_format import BLOCK_FORMATS, BlockFormat
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.kernels.cuda import direct, router
from thunder_moe.kernels.cuda.operands import target
from thunder_moe.kernels.specs import GemmSpec, WeightSpec
from thunder_moe.ops import add_norm  # noqa: F401  (registers the operators)
from thunder_moe.routing import RouterConfig

_OPS: Any = torch.ops.thunder_moe
_LAYERS: dict[Any, BlockFormat] = {
    getattr(_OPS, f"f16a_{name}weight_scaled_mm"): known for name, known in BLOCK_FORMATS.items()
}


def fuse_add_norms(scopes: Sequence[Scope], *, on_any_device: bool = False) -> int:
    """Rewrite a graph; return the number of norms that became a part of the kernel behind them, as one kernel of the
    device or `on_any_device`. The scopes are out of date if it is not 0."""
    count = 0
    for scope in scopes:
        _ = scope.program  # as the graph is before it is rewritten
        for node in list(scope.graph.nodes):
            if _is_router(node) or operator_of(node) in _LAYERS:
                with contextlib.suppress(MismatchError):
                    _fuse(scope, node, on_any_device)
                    count += 1
    return count


def _fuse(scope: Scope, node: fx.Node, on_any_device: bool) -> None:
    """Replace a sum, a norm and the layer or router at a node."""
    require(len(node.args) > 1)  # somebody who passes rows or weight by name gets kernels of their own
    views: set[fx.Node] = set()
    rows = node.args[0]
    normalized = behind(rows, "order", passed=views)
    norm = norm_of(normalized)
    require(norm is not None and scope.refusal is None)
    assert norm is not None
    total, is_router = norm.source, _is_router(node)
    require(calls(total, "add"))
    x, residual = given(total)["input"], given(total)["other"]
    value, shape = value_of(total), value_of(rows).shape
    require(isinstance(value, Tensor) and all(isinstance(value_of(each), Tensor) for each in (x, residual)))
    for each in (x, residual):
        found = value_of(each)
        require(same(found.shape, value.shape) and found.dtype == value.dtype and found.is_contiguous())
    require(all(isinstance(size, int) for size in (*value.shape, *shape)) and shape[-1] == value.shape[-1])
    differentiated = (value_of(each) for each in (rows, total, *node.all_input_nodes))
    require(not (scope.modes[node] and any(isinstance(one, Tensor) and one.requires_grad for one in differentiated)))
    require(is_router or value_of(node).dtype == value.dtype)  # autocast casts the rows of a layer
    require(not is_wrapped(value))
    require(on_any_device or _is_one_kernel(node, value, norm, shape))
    # Everybody else reads the sum, and behind a router the rows, later than the operator that returns them.
    own = norm.nodes | views | {node}
    require({total, *own}.isdisjoint((*node.args[1:], *node.kwargs.values())))
    position = scope.positions[node]
    for each in own - {node}:
        others = [user for user in each.users if user not in own]
        require(not others or (is_router and each in (rows, normalized)))
        require(all(scope.positions.get(user, -1) > position for user in others))
    require(all(user in own or scope.positions.get(user, -1) > position for user in total.users))
    reads = {"the rows": x, "the residual": residual, "the norm": norm.weight}
    require(scope.reason_against_fusing(own | {total}, node, reads) is None)
    _replace(scope.graph, node, norm, normalized, (x, residual), own)
    for left in sorted(own | {total}, key=scope.positions.__getitem__, reverse=True):
        if not left.users:
            scope.graph.erase_node(left)


def _is_router(node: fx.Node) -> bool:
    return operator_of(node) is _OPS.moe_linear_router


def _is_one_kernel(node: fx.Node, value: Tensor, norm: Norm, shape: Sequence[int]) -> bool:
    """True if one kernel of the device computes the sum, the norm and the node; `shape` is the shape of its rows."""
    if value.device.type != "cuda" or value.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not value_of(norm.weight).is_contiguous():
        return False
    weight = value_of(node.args[1])
    if _is_router(node):
        options: dict[str, Any] = {
            name: node.kwargs[name] for name in RouterConfig.__dataclass_fields__ if name in node.kwargs
        }
        return router.serves_linear((shape[0], weight.shape[0]), shape[1], RouterConfig(**options), value.dtype)
    known, count = _LAYERS[operator_of(node)], math.prod(shape[:-1])
    spec = GemmSpec(
        count, 1, weight.shape[1], known.codes_per_byte * weight.shape[0], value.dtype,
        WeightSpec(str(node.kwargs.get("layout", LINEAR)), known.name), target(value.device),
    )  # fmt: skip
    return count <= direct.MOST_NORM_ROWS and direct.serves_mm(spec)


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    norm: Norm,
    normalized: fx.Node,
    summands: tuple[fx.Node, fx.Node],
    own: Collection[fx.Node],
) -> None:
    """Replace the uses of the node, the sum and the normalized rows by others than `own` by one operator's results."""
    rows: Any = node.args[0]
    value, of_rows, whole = value_of(node), value_of(rows), value_of(norm.source)

    def in_shape(source: Any, shape: Any) -> Any:
        if same(value_of(source).shape, shape):
            return source
        view = graph.call_method("reshape", (source, tuple(shape)))
        view.meta["example_value"] = value_of(source).reshape(shape)
        return view

    def part(result: fx.Node, index: int, example: Tensor) -> fx.Node:
        found = graph.call_method("__getitem__", (result, index))
        found.meta["example_value"] = example
        return found

    with graph.inserting_before(node):
        x, residual = (in_shape(each, of_rows.shape) for each in summands)
        operands = x, residual, norm.weight, *node.args[1:]
        if _is_router(node):
            result = graph.call_function(
                _OPS.add_norm_linear_router, operands, {**node.kwargs, "norm_epsilon": norm.epsilon}
            )
            examples = (*value, whole.reshape(of_rows.shape), of_rows)
        else:
            name = f"f16a_{_LAYERS[operator_of(node)].name}weight_add_norm_scaled_mm"
            result = graph.call_function(getattr(_OPS, name), operands, {**node.kwargs, "epsilon": norm.epsilon})
            examples = value, whole.reshape(of_rows.shape)
        result.meta.update({**node.meta, "example_value": examples})
        if _is_router(node):
            total = in_shape(part(result, 6, examples[6]), whole.shape)
            last = part(result, 7, of_rows)
            for old in dict.fromkeys((rows, normalized)):
                new = in_shape(last, value_of(old).shape)
                old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in own)
            node.replace_all_uses_with(result)
        else:
            total = in_shape(part(result, 1, examples[1]), whole.shape)
            node.replace_all_uses_with(part(result, 0, value))
    norm.source.replace_all_uses_with(total, delete_user_cb=lambda user: user not in own)


@dataclass(frozen=True)
class Norm:
    """weight * (x.float() / rms(x)).to(dtype), over the last dimension."""

    source: Any  # x
    weight: Any  # of the last dimension's size, in the dtype of x
    epsilon: float  # added to the mean of squares
    nodes: frozenset[Any]  # the nodes from behind x to the product


def norm_of(node: Any) -> Norm | None:
    """Return the norm whose result a node is; None for other nodes."""
    for weight, scaled in in_both_orders(node, "mul"):
        value = value_of(weight)
        if not isinstance(value, Tensor) or not calls(scaled, "cast"):
            continue
        product = given(scaled)["input"]
        for wide, factor in in_both_orders(product, "mul"):
            if not calls(wide, "cast") or not calls(factor, "rsqrt"):
                continue
            total = given(factor)["input"]
            summed = given(total) if calls(total, "add") else {}
            mean = summed.get("input")
            square = given(mean).get("input") if calls(mean, "mean") else None
            named = given(square) if calls(square, "pow") else {}
            source = given(wide)["input"]
            right = named.get("input") is wide and named.get("exponent") == 2
            right = right and given(mean).get("dim") in (-1, [-1], (-1,)) and given(mean).get("keepdim") is True
            right = right and same(value.shape, value_of(source).shape[-1:])
            same_dtype = value_of(scaled).dtype == value_of(source).dtype == value.dtype
            right = right and value_of(wide).dtype == value_of(factor).dtype == torch.float32
            if right and same_dtype and is_number(summed.get("other")):
                nodes = frozenset({node, scaled, product, wide, factor, total, mean, square})
                return Norm(source, weight, float(summed["other"]), nodes)
    return None

"""Puts NVFP4 operators in the place of experts' GEMMs, SwiGLUs and whole layers, and erases what these alone used.
Called by rewrite.py with what the finders found, by routers.py and attention.py; changes graphs and decides nothing.

    grouped_mm(x, w.mT, offs)                -> NVFP4 GEMM
    grouped_linear(x, w, offs, bias, scale)  -> NVFP4 GEMM -> grouped_bias
    activated_grouped_linear(y, w, ...)      -> scaled_activation -> NVFP4 GEMM -> grouped_bias with scales
    grouped_linear, then the activated one   -> NVFP4 GEMM with SwiGLU -> NVFP4 GEMM -> grouped_bias with scales
    the experts of a layer                   -> moe_experts
    all experts on all tokens                -> moe_experts on the experts that the router chose
    batched products of each row's expert    -> moe_route -> NVFP4 GEMM with SwiGLU -> NVFP4 GEMM, in the rows' order

The results of GroupedLinear and GroupedMLP are zero past the last row end; NVFP4 operators leave those rows undefined.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from thunder_moe.compilers.dynamo.effects import storages_of
from thunder_moe.compilers.dynamo.fused_moe_pattern import FusedMoE
from thunder_moe.compilers.dynamo.inputs import WeightInput
from thunder_moe.compilers.dynamo.nodes import calls, is_in_place, kind_of, static_example, value_of
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.dynamo.sites import Site, read_live_rows_alone
from thunder_moe.compilers.swiglu import SwiGLU
from thunder_moe.ops import experts, grouped_mm, grouped_swiglu, route, trainable_grouped_mm  # noqa: F401  (registers)

_OPS = torch.ops.thunder_moe
_FORM = ("kind", "alpha", "limit", "up_shift", "interleave")
_PARTS = ("weight", "scale", "global_scale")


def add_inputs(graph: fx.Graph, stem: str, tensors: Sequence[torch.Tensor]) -> tuple[fx.Node, ...]:
    """Add placeholders behind the graph's, marked as dynamo marks parameters: static, of fixed size."""
    nodes = []
    for part, tensor in zip(_PARTS, tensors, strict=False):
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            node = graph.placeholder(f"{stem}_{part}")
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        node.meta["example_value"], node._dynamo_source = static_example(tensor, f"{stem}_{part}")
        nodes.append(node)
    return tuple(nodes)


# ---- GEMMs and SwiGLUs


def take_our_gradient(site: Site) -> None:
    """Replace torch's grouped GEMM by the one whose gradient may have any strides."""
    with site.scope.graph.inserting_before(site.node):
        new = site.scope.graph.call_function(_OPS.trainable_grouped_mm.default, site.operands)
    replace_node(site.scope, site.node, new)


def replace_gemm(site: Site, weight: WeightInput) -> None:
    """Replace a grouped GEMM."""
    graph, node, arguments = site.scope.graph, site.node, site.arguments
    rows, _, offsets = site.operands
    with graph.inserting_before(node):
        ends = _int32(graph, offsets)
        if calls(node, "activated"):
            form = {name: arguments[name] for name in _FORM if name in arguments}
            rows = graph.call_function(_OPS.scaled_activation.default, (rows, None, offsets), form)
        out = graph.call_function(weight.operator("scaled_grouped_mm"), (rows, *weight.nodes, ends), weight.options)
        if site.is_thunder_moe_op:
            added = (arguments.get(name) for name in ("bias", "bias_scale", "scales"))
            out = _finished(graph, out, offsets, *added)
    replace_node(site.scope, node, out)


def replace_swiglu(block: SwiGLU, gate_up: WeightInput, down: WeightInput | None = None) -> None:
    """Replace a SwiGLU and its GEMMs; with `down` the `activated_grouped_linear` that it is a part of."""
    scope, node = block.sites[0].scope, block.product
    graph, (rows, _, offsets) = scope.graph, block.sites[0].operands
    with graph.inserting_before(node):
        ends = _int32(graph, offsets)
        bias = _bias_of(graph, block)
        options = gate_up.options | block.form
        more = () if bias is None else (None, None, bias)
        out = graph.call_function(gate_up.operator("grouped_swiglu"), (rows, *gate_up.nodes, ends, *more), options)
        if down is not None:
            out = graph.call_function(down.operator("scaled_grouped_mm"), (out, *down.nodes, ends), down.options)
            out = _finished(graph, out, offsets, block.down.arguments.get("bias"), None, block.scales)
        elif block.sites[0].is_thunder_moe_op and (block.scales is not None or not read_live_rows_alone(node, offsets)):
            out = _finished(graph, out, offsets, None, None, block.scales)
    replace_node(scope, node, out)


def _bias_of(graph: fx.Graph, block: SwiGLU) -> fx.Node | None:
    """Return the bias (E, 2I) of gate and up, the gate's part first."""
    biases: list[fx.Node | None] = [site.arguments.get("bias") for site in block.sites]
    if biases[0] is None:
        return None
    if len(biases) == 2:
        return graph.call_function(torch.cat, (biases, 1))
    if not block.interleaved:
        return biases[0]
    turns = graph.call_method("unflatten", (biases[0], 1, (-1, 2, block.interleaved)))
    return graph.call_method("flatten", (graph.call_method("transpose", (turns, 1, 2)), 1))


def _finished(graph: fx.Graph, out: fx.Node, offsets: fx.Node, bias: Any, bias_scale: Any, scales: Any) -> fx.Node:
    """Add zeros past the last row end, and bias and factors if there are any."""
    if bias is not None or scales is not None:
        return graph.call_function(_OPS.grouped_bias.default, (out, offsets, bias, bias_scale, scales))
    # Written with torch's functions, so that inductor fuses it into the kernel that reads the result.
    count = graph.call_method("size", (out, 0))
    options = dict(device=value_of(offsets).device, dtype=torch.int32)
    positions = graph.call_function(torch.arange, (count,), options)
    before = graph.call_function(torch.lt, (positions, graph.call_method("select", (offsets, 0, -1))))
    return graph.call_function(torch.where, (graph.call_method("unsqueeze", (before, 1)), out, 0))


def _int32(graph: fx.Graph, offsets: fx.Node) -> fx.Node:
    return offsets if value_of(offsets).dtype == torch.int32 else graph.call_method("to", (offsets, torch.int32))


# ---- layers


def replace_fused_moe(layer: FusedMoE, gate_up: WeightInput, down: WeightInput) -> None:
    """Replace a layer's experts by one operator, without biases and an order of rows."""
    scope, graph = layer.down.scope, layer.down.scope.graph
    tokens, ids, weights = layer.operands
    options: dict[str, Any] = dict(gate_up_layout=gate_up.layout, down_layout=down.layout)
    options = dict(weight_on_input=True, **options) if layer.on_input else options
    with graph.inserting_before(layer.total):
        for step in layer.scores:
            value = value_of(weights)
            weights = graph.create_node(step.op, step.target, (weights, *step.args[1:]), step.kwargs)
            weights.meta["example_value"] = value.new_empty(value.shape, dtype=value_of(step).dtype)
        ids, weights = (graph.call_method("view", (node, (-1, layer.top_k))) for node in (ids, weights))
        arguments = (tokens, ids, weights, *gate_up.nodes, *down.nodes, *(None,) * 5)
        out = graph.call_function(gate_up.operator("moe_experts"), arguments, options)
    replace_node(scope, layer.total, out)
    for node in sorted(layer.nodes, key=scope.positions.__getitem__, reverse=True):
        erase(scope, node)


def replace_gathered_bmm(orders: dict[fx.Node, list[fx.Node]], call: Site | SwiGLU, *packed: WeightInput) -> None:
    """Replace batched products with the weights of each row's expert, one or two around a SwiGLU, by grouped GEMMs.

    `orders` has the orders that earlier calls have made of the ids: rows' slots, offsets, slots' rows.
    """
    first, last = (call, call) if isinstance(call, Site) else (call.sites[0], call.down)
    rows, _, ids = first.operands
    graph = first.scope.graph
    with graph.inserting_before(last.node):
        if ids not in orders:
            order = graph.call_function(
                _OPS.moe_route.default, (graph.call_method("unsqueeze", (ids, 1)), first.gemm.experts)
            )
            orders[ids] = [graph.call_function(operator.getitem, (order, part)) for part in range(3)]
        row_slot, offsets, slot_row = orders[ids]
        if isinstance(call, Site):
            rows = graph.call_function(torch.index_select, (rows, 0, row_slot))
        else:
            arguments = (rows, *packed[0].nodes, offsets, row_slot)
            rows = graph.call_function(packed[0].operator("grouped_swiglu"), arguments, packed[0].options)
        arguments = (rows, *packed[-1].nodes, offsets, slot_row)
        out = graph.call_function(packed[-1].operator("grouped_mm_combine"), arguments, packed[-1].options)
    replace_node(last.scope, last.node, out)


# ---- nodes


def replace_node(scope: Scope, old: fx.Node, new: fx.Node) -> None:
    """Put a node in the place of another one, and erase that with what it alone used."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    erase(scope, old)


def erase(scope: Scope, node: fx.Node) -> None:
    """Erase a node that nothing reads, then the nodes that only it read. Graph-wide dead code elimination would erase
    in-place methods."""
    if node._erased or node.users or node.op == "placeholder" or _is_seen_elsewhere(scope, node):
        return
    inputs = node.all_input_nodes
    scope.graph.erase_node(node)
    for source in inputs:
        erase(scope, source)


def _is_seen_elsewhere(scope: Scope, node: fx.Node) -> bool:
    """True if a node changes a tensor that is an input, or that another node reads later."""
    if node not in scope.positions or (kind_of(node) and not is_in_place(node)):
        return False
    position, steps = scope.positions[node], scope.program.steps
    changed = {storage for storage in steps[position].reads if steps[position].changes((storage,))}
    if not changed.isdisjoint(scope.input_storages):
        return True
    for other in scope.graph.nodes if changed else ():
        at = scope.positions.get(other)
        if at is not None and (at <= position or changed.isdisjoint(steps[at].reads)):
            continue
        for source in other.all_input_nodes:
            touches = not changed.isdisjoint(storages_of(scope.value_of(source)))
            if touches and not _views_new_node(scope, source):
                return True
    return False


def _views_new_node(scope: Scope, node: fx.Node) -> bool:
    """True if a node is one of ours or a view of one: it has the example value of the memory that ours replaced."""
    if node not in scope.positions:
        return True
    storages = storages_of(scope.value_of(node))
    sources = (source for source in node.all_input_nodes if storages & storages_of(scope.value_of(source)))
    return any(_views_new_node(scope, source) for source in sources)

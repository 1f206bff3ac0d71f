"""Puts NVFP4 operators in the place of grouped GEMMs and SwiGLUs: torch's, and those of GroupedLinear and GroupedMLP.
Called by rewrite.py; calls sites.py for what is replaced.

    grouped_mm(x, w.mT, offs)                -> NVFP4 GEMM
    grouped_linear(x, w, offs, bias, scale)  -> NVFP4 GEMM -> grouped_bias
    activated_grouped_linear(y, w, ...)      -> scaled_activation -> NVFP4 GEMM -> grouped_bias with scales
    both, one after the other                -> NVFP4 GEMM with SwiGLU -> NVFP4 GEMM -> grouped_bias with scales

The results of the latter are zero past the last row end, where those of the NVFP4 operators are undefined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from thunder_moe.compilers.dynamo.nodes import calls, value_of
from thunder_moe.compilers.dynamo.sites import Site, read_live_rows_alone
from thunder_moe.compilers.swiglu import SwiGLU
from thunder_moe.formats.block_format import NVFP4
from thunder_moe.ops import grouped_mm, grouped_swiglu  # noqa: F401  (registers the operators)

__all__ = ["Packed", "replace_gemm", "replace_swiglu"]

_OPS = torch.ops.thunder_moe
_FORM = ("kind", "alpha", "limit", "up_shift", "interleave")


@dataclass(frozen=True)
class Packed:
    """A packed weight in the root graph: the operators' weight arguments, their keyword argument, its format's name."""

    nodes: list[fx.Node]
    options: dict[str, Any]
    format: str = NVFP4.name

    def operator(self, stem: str) -> Any:
        """The operator that takes the weight, by the end of its name."""
        return getattr(_OPS, f"f16a_{self.format}weight_{stem}").default


def replace_gemm(site: Site, weight: Packed) -> None:
    """Replaces the uses of a grouped GEMM; the node stays, without users."""
    graph, node, arguments = site.scope.graph, site.node, site.arguments
    rows, _, offsets = site.operands
    with graph.inserting_before(node):
        ends = _int32(graph, offsets)
        if calls(node, "activated"):
            form = {name: arguments[name] for name in _FORM if name in arguments}
            rows = graph.call_function(_OPS.scaled_activation.default, (rows, None, offsets), form)
        out = graph.call_function(weight.operator("scaled_grouped_mm"), (rows, *weight.nodes, ends), weight.options)
        if site.own:
            added = (arguments.get(name) for name in ("bias", "bias_scale", "scales"))
            out = _finished(graph, out, rows, offsets, *added)
    _hand_over(node, out)


def replace_swiglu(block: SwiGLU, gate_up: Packed, down: Packed | None = None) -> None:
    """Replaces the uses of a SwiGLU and its GEMMs, with `down` those of the `activated_grouped_linear` that it is a
    part of; the node stays, without users."""
    graph, node = block.sites[0].scope.graph, block.product
    rows, _, offsets = block.sites[0].operands
    with graph.inserting_before(node):
        ends = _int32(graph, offsets)
        bias = _bias_of(graph, block)
        options = gate_up.options | block.form
        more = () if bias is None else (None, None, bias)
        out = graph.call_function(gate_up.operator("grouped_swiglu"), (rows, *gate_up.nodes, ends, *more), options)
        if down is not None and block.down is not None:
            out = graph.call_function(down.operator("scaled_grouped_mm"), (out, *down.nodes, ends), down.options)
            out = _finished(graph, out, rows, offsets, block.down.arguments.get("bias"), None, block.scales)
        elif block.sites[0].own and (block.scales is not None or not read_live_rows_alone(node, offsets)):
            out = _finished(graph, out, rows, offsets, None, None, block.scales)
    _hand_over(node, out)


def _bias_of(graph: fx.Graph, block: SwiGLU) -> fx.Node | None:
    """The bias (E, 2I) of gate and up, the gate's part first."""
    biases: list[fx.Node | None] = [site.arguments.get("bias") for site in block.sites]
    if biases[0] is None:
        return None
    if len(biases) == 2:
        return graph.call_function(torch.cat, (biases, 1))
    if not block.interleaved:
        return biases[0]
    turns = graph.call_method("unflatten", (biases[0], 1, (-1, 2, block.interleaved)))
    return graph.call_method("flatten", (graph.call_method("transpose", (turns, 1, 2)), 1))


def _finished(
    graph: fx.Graph, out: fx.Node, rows: fx.Node, offsets: fx.Node, bias: Any, bias_scale: Any, scales: Any
) -> fx.Node:
    """Zeros past the last row end; bias and factors, if there are any."""
    if bias is not None or scales is not None:
        return graph.call_function(_OPS.grouped_bias.default, (out, offsets, bias, bias_scale, scales))
    return _zeros_past_the_end(graph, out, offsets)[-1]


def _zeros_past_the_end(graph: fx.Graph, out: fx.Node, offsets: fx.Node) -> list[fx.Node]:
    """Nodes of torch's functions, which inductor makes a part of the kernel that reads the last one."""
    count = graph.call_method("size", (out, 0))
    options = dict(device=value_of(offsets).device, dtype=torch.int32)
    positions = graph.call_function(torch.arange, (count,), options)
    end = graph.call_method("select", (offsets, 0, -1))
    before = graph.call_function(torch.lt, (positions, end))
    live = graph.call_method("unsqueeze", (before, 1))
    return [count, positions, end, before, live, graph.call_function(torch.where, (live, out, 0))]


def _int32(graph: fx.Graph, offsets: fx.Node) -> fx.Node:
    return offsets if value_of(offsets).dtype == torch.int32 else graph.call_method("to", (offsets, torch.int32))


def _hand_over(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)

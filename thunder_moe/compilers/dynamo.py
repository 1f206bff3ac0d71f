"""The torch.compile backend: ``torch.compile(model, backend="thunder_moe")``.
Called by torch.compile through the entry point `torch_dynamo_backends`; calls fx_sites, the weight cache and an inner
compiler, inductor unless ``options={"thunder_moe.inner": ...}`` names another.

graph of dynamo -> find grouped GEMMs -> replace a frozen weight by three inputs (its packed form), its GEMM by the
operator, gate + up + SwiGLU by the fused one, experts that run on all tokens by routed ones -> inner compiler. The
layout of the packed weights is that which the kernels of their device read best, an argument of the operator. At each
call the packed weights come from the cache, so one graph serves all layers that share it, changed and replaced weights
are seen, and addresses stay (CUDA graphs).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe.compilers.eligibility import Decision, describe
from thunder_moe.compilers.fx_dense_experts import Routing, find_dense_experts
from thunder_moe.compilers.fx_sites import (
    Site,
    SwiGLU,
    find_sites,
    find_swiglu,
    positional_grouped_mm,
    quantized_gemm,
    traced_frame,
)
from thunder_moe.compilers.report import RewriteEntry, record, record_later, rewrite_report
from thunder_moe.compilers.weight_cache import WEIGHT_CACHE, stacked_layout
from thunder_moe.ops import experts, trainable_grouped_mm  # noqa: F401  (registers the operators)

__all__ = ["thunder_moe_backend"]

_OPS = torch.ops.thunder_moe
_PARTS = ("fp4_weight", "scale", "global_scale")
_GROUPED_MM = _OPS.f16a_nvfp4weight_scaled_grouped_mm.default
_GROUPED_SWIGLU = _OPS.f16a_nvfp4weight_grouped_swiglu.default
_COMBINE = _OPS.f16a_nvfp4weight_grouped_mm_combine.default
_QUANTIZED = {_GROUPED_MM: "nvfp4", _GROUPED_SWIGLU: "nvfp4 + swiglu", _COMBINE: "nvfp4"}


@dataclass(frozen=True, eq=False)
class _Pack:
    """Which weights one set of packed inputs is made of: positions among the graph's inputs, or tensors it holds.
    `layout`: of the packed inputs."""

    names: str
    weights: tuple[int | Tensor, ...]
    transposed: bool
    interleaved: bool
    layout: str

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The operators' three weight arguments."""
        weights = [inputs[weight] if isinstance(weight, int) else weight for weight in self.weights]
        try:
            return WEIGHT_CACHE.operands(
                *weights, transposed=self.transposed, interleaved=self.interleaved, layout=self.layout
            )
        except ValueError as error:
            raise ValueError(f"cannot quantise {self.names}: {error}") from error


def thunder_moe_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable:
    """A backend of torch.compile that runs frozen expert GEMMs with NVFP4 weights.

    Args:
        gm: dynamo's graph.
        example_inputs: its inputs; parameters are the real ones.
        mode: as inductor's ("reduce-overhead", "max-autotune", ...).
        options: as inductor's, and ``"thunder_moe.inner"``: "inductor" (the default), "thunder", "eager", "aot_eager"
            or any other backend's name.
        dynamic: as inductor's.

    Returns:
        What runs in place of the graph.

    Raises:
        ValueError: an unknown ``thunder_moe.`` option.
    """
    options = dict(options or {})
    inner = options.pop("thunder_moe.inner", "inductor")
    unknown = [name for name in options if name.startswith("thunder_moe.")]
    if unknown:
        raise ValueError(f"options: got {unknown[0]!r}, the only one of thunder_moe is 'thunder_moe.inner'")
    owner = _owner(sys._getframe(1))
    if inner not in ("inductor", "thunder"):
        torch._dynamo.lookup_backend(inner)  # an unknown name fails here
    if inner == "thunder":
        return _compile_with_thunder(gm, example_inputs, owner)
    gm = _copy(gm)
    rewritten = _rewrite(gm, example_inputs, owner)
    gm.recompile()
    compiled = _compile(inner, gm, rewritten.inputs(example_inputs), mode, options, dynamic)
    return rewritten.runner(compiled) if rewritten.packs else compiled


@dataclass(frozen=True)
class _Packed:
    """A packed weight in the graph: the operators' three weight arguments, and their keyword argument."""

    nodes: list[fx.Node]
    options: dict[str, Any]


@dataclass(frozen=True)
class _Rewritten:
    """How the inputs of dynamo's graph become those of the rewritten one: some stay, then come the packed weights."""

    kept: list[int]
    packs: list[_Pack]

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        packed = [tensor for pack in self.packs for tensor in pack(given)]
        return [given[position] for position in self.kept] + packed

    def runner(self, compiled: Callable) -> Callable:
        def run(*given: Any) -> Any:
            return compiled(*self.inputs(given))

        return run


def _rewrite(gm: fx.GraphModule, example_inputs: Sequence[Any], owner: Any) -> _Rewritten:
    """Rewrites the graph in place and records what was decided on each of its grouped GEMMs."""
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    tensors = dict(zip(placeholders, example_inputs, strict=True))
    tensors |= {node: _attribute(gm, node.target) for node in graph.find_nodes(op="get_attr")}
    tensors = {node: value for node, value in tensors.items() if isinstance(value, Tensor)}
    sites = find_sites(graph, tensors, grad_enabled=torch.is_grad_enabled())
    eligible = [site for site in sites if site.reason is None]
    blocks = find_swiglu(graph, eligible)
    fused = {id(site) for block in blocks for site in block.sites}
    decisions = [
        describe(site.gemm, site.reason, requires_grad=_requires_grad(site, tensors), fused=id(site) in fused)
        for site in sites
    ]
    dense = find_dense_experts(graph, tensors, grad_enabled=torch.is_grad_enabled())
    decisions += [
        describe(
            site.gemm, block.reason, requires_grad=_requires_grad(site, tensors), fused=site is not block.sites[-1]
        )
        for block in dense
        for site in block.sites
    ]
    record(owner, decisions + _quantized_before(graph), traced_frame(graph))
    for site in sites:
        if site.reason is not None and _trains(site):
            _replace(graph, site.node, _OPS.trainable_grouped_mm.default, site.operands)
    packs: dict[tuple, _Pack] = {}
    packed: dict[tuple, _Packed] = {}

    def packed_inputs(call: Site | SwiGLU) -> _Packed:
        pack = _pack(call, tensors, placeholders)
        key = (pack.names, pack.transposed, pack.interleaved, *map(id, pack.weights))
        if key not in packs:
            packs[key] = pack
            nodes = _add_inputs(graph, f"nvfp4_{len(packs)}", pack(example_inputs))
            packed[key] = _Packed(nodes, dict(layout=pack.layout))
        return packed[key]

    calls: list[Site | SwiGLU] = [*blocks, *(site for site in eligible if id(site) not in fused)]
    for call in calls:
        weight = packed_inputs(call)
        if isinstance(call, Site):
            rows, _, offsets = call.operands
            _replace(graph, call.node, _GROUPED_MM, (rows, *weight.nodes, offsets), weight.options)
        else:
            rows, _, offsets = call.sites[0].operands
            _replace(graph, call.product, _GROUPED_SWIGLU, (rows, *weight.nodes, offsets), weight.options)
    for block in dense:
        if block.routing is not None:
            gate_up, down = map(packed_inputs, block.sites)
            _route(graph, block.routing, block.sites[0].gemm.experts, gate_up, down)
    packed_away = {weight for pack in packs.values() for weight in pack.weights if isinstance(weight, int)}
    dropped = {position for position in packed_away if not placeholders[position].users}
    for position in dropped:
        graph.erase_node(placeholders[position])
    return _Rewritten([i for i in range(len(placeholders)) if i not in dropped], list(packs.values()))


def _compile(
    inner: str, gm: fx.GraphModule, inputs: list[Any], mode: str | None, options: dict, dynamic: bool | None
) -> Callable:
    if inner == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)(gm, inputs)
    given = {name: value for name, value in (("mode", mode), ("options", options)) if value}
    return torch._dynamo.lookup_backend(inner)(gm, inputs, **given)


def _compile_with_thunder(gm: fx.GraphModule, inputs: Sequence[Any], owner: Any) -> Callable:
    """Hands the graph to thunderfx with moe_executor, which does the rewrite by the same predicate."""
    from thunder_moe.compilers.compat import thunderfx_compile
    from thunder_moe.compilers.thunder_executor import moe_executor

    positional_grouped_mm(gm)
    compiler, compiled = thunderfx_compile(gm, inputs, moe_executor)

    def entries() -> list[RewriteEntry]:
        functions = [fn for info in compiler.subgraph_infos for fn in info.thunder_compiled_fns]
        return [entry for fn in functions for entry in rewrite_report(fn)]

    record_later(owner, entries, traced_frame(gm.graph))
    return compiled


def _owner(frame: Any) -> Any:
    """The wrapper with which torch.compile calls its backend: one per torch.compile, so it stands for the function."""
    caller = frame.f_locals.get("self")
    return caller if isinstance(caller, torch._TorchCompileWrapper) else None


def _requires_grad(site: Site, tensors: dict[fx.Node, Tensor]) -> bool:
    return site.weight is not None and tensors[site.weight].requires_grad


def _quantized_before(graph: fx.Graph) -> list[Decision]:
    """The NVFP4 operators of modules that quantize_ had swapped in already."""
    found = []
    for node in graph.nodes:
        target = getattr(node.target, "default", node.target) if node.op == "call_function" else None
        if target in _QUANTIZED:
            gemm = quantized_gemm(node)
            found.append((gemm, _QUANTIZED[target], "quantised beforehand"))
    return found


def _trains(site: Site) -> bool:
    """Whether a GEMM that stays 16-bit is to get our gradient, which takes any strides."""
    gemm = site.gemm
    return (
        gemm.needs_grad and gemm.weight_dtype == gemm.activation_dtype and gemm.out_dtype in (None, gemm.weight_dtype)
    )


def _pack(call: Site | SwiGLU, tensors: dict[fx.Node, Tensor], placeholders: list[fx.Node]) -> _Pack:
    sites = (call,) if isinstance(call, Site) else call.sites
    nodes = [site.weight for site in sites if site.weight is not None]
    transposed = sites[0].transposed
    return _Pack(
        " and ".join(str(site.gemm.weight) for site in sites),
        tuple(placeholders.index(node) if node.op == "placeholder" else tensors[node] for node in nodes),
        transposed,
        isinstance(call, SwiGLU) and call.interleaved,
        stacked_layout(*(tensors[node] for node in nodes), transposed=transposed),
    )


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module of the same parameters, with a graph of its own and all that dynamo says about its inputs:
    dynamo goes on using its own graph after the backend returns."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node in gm.graph.find_nodes(op="placeholder"):
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
    new = fx.GraphModule(gm, graph)
    new.meta = gm.meta
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(gm, name):
            setattr(new, name, getattr(gm, name))
    return new


def _add_inputs(graph: fx.Graph, stem: str, tensors: Sequence[Tensor]) -> list[fx.Node]:
    """New placeholders at the end of the graph's, marked as dynamo marks parameters: static, of fixed size."""
    from torch._dynamo.source import ConstantSource

    fake_mode = torch._guards.detect_fake_mode()
    assert fake_mode is not None, "dynamo compiles under a fake mode"
    nodes = []
    for part, tensor in zip(_PARTS, tensors, strict=True):
        last = graph.find_nodes(op="placeholder")[-1]
        source = ConstantSource(f"{stem}_{part}")
        with graph.inserting_after(last):
            node = graph.placeholder(f"{stem}_{part}")
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        node.meta["example_value"] = fake_mode.from_tensor(tensor, static_shapes=True, source=source)
        node._dynamo_source = source
        nodes.append(node)
    return nodes


def _replace(
    graph: fx.Graph, old: fx.Node, operator: Any, arguments: tuple, options: dict[str, Any] | None = None
) -> None:
    """Puts a call in the place of a node, and erases the node with what it alone used."""
    with graph.inserting_before(old):
        new = graph.call_function(operator, arguments, options)
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    _erase(graph, old)


def _route(graph: fx.Graph, routing: Routing, num_experts: int, gate_up: _Packed, down: _Packed) -> None:
    """Puts routing, gather and the two fused operators in the place of batched GEMMs over all experts."""
    tokens, indices, scale = routing.operands
    with graph.inserting_before(routing.rows):
        for node in routing.scores:
            scale = graph.create_node(node.op, node.target, (scale, *node.args[1:]), node.kwargs)
        route = graph.call_function(_OPS.moe_route.default, (indices, num_experts))
        row_slot, offsets, slot_row = (graph.call_function(operator.getitem, (route, part)) for part in range(3))
        arguments = (tokens, *gate_up.nodes, offsets, row_slot, scale)
        rows = graph.call_function(_GROUPED_SWIGLU, arguments, gate_up.options)
    _replace(graph, routing.total, _COMBINE, (rows, *down.nodes, offsets, slot_row), down.options)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    # Node by node from the rewritten call up: graph-wide dead code elimination takes in-place methods for dead.
    if node.users or node.op == "placeholder":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for source in inputs:
        _erase(graph, source)


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for name in target.split("."):
        value = getattr(value, name)
    return value

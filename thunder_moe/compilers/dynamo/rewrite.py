"""The rewrite of dynamo's graphs: frozen expert GEMMs -> NVFP4 operators, their packed weights further inputs.
Called by compiled_graph.py; calls scopes.py and the finders, which decide; then replace.py, which changes the graph.

replace Thunder's operator of packed weights -> take causal masks from attention, remove masks that do nothing ->
replace the attention of one new token by its operator -> find grouped GEMMs, also in nested graphs -> replace a frozen
weight by its packed inputs, its GEMM by the operator, gate + up + SwiGLU by the fused operator, experts that run on all
tokens by routed experts, GEMMs that train by the operator whose gradient accepts any strides -> mark operands that
kernels may read early -> report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe.compilers.dynamo.add_norm import fuse_add_norms
from thunder_moe.compilers.dynamo.all_experts_bmm_pattern import find_all_experts_bmm
from thunder_moe.compilers.dynamo.attention import find_repeated_attention, take_causal_masks
from thunder_moe.compilers.dynamo.decode_attention import fuse_decode_attention
from thunder_moe.compilers.dynamo.expert_ids import remove_noop_masks
from thunder_moe.compilers.dynamo.fused_moe_pattern import FusedMoE, find_fused_moe
from thunder_moe.compilers.dynamo.gathered_bmm_pattern import find_gathered_bmm
from thunder_moe.compilers.dynamo.inputs import Rewritten, WeightInput, memory_of_inputs
from thunder_moe.compilers.dynamo.nodes import operator_of, value_of
from thunder_moe.compilers.dynamo.prefetch import prefetch_operands
from thunder_moe.compilers.dynamo.replace import (
    add_inputs,
    replace_fused_moe,
    replace_gathered_bmm,
    replace_gemm,
    replace_swiglu,
    take_our_gradient,
)
from thunder_moe.compilers.dynamo.routers import find_routers, fuse_router, share_orders
from thunder_moe.compilers.dynamo.scopes import Scope, attribute, scopes_of
from thunder_moe.compilers.dynamo.sites import Site, Weights, find_sites, find_swiglu, quantized_gemm
from thunder_moe.compilers.eligibility import QUANTIZED, Decision, common_format, describe
from thunder_moe.compilers.nvf_cutlass import replace_calls
from thunder_moe.compilers.report import Others
from thunder_moe.compilers.swiglu import SwiGLU
from thunder_moe.formats.block_format import BLOCK_FORMATS
from thunder_moe.ops import experts_lora  # noqa: F401  (registers its operators)
from thunder_moe.weight_cache import local_data, stacked_layout

_OPS = torch.ops.thunder_moe
_QUANTIZED = {getattr(_OPS, name): decisions for name, decisions in QUANTIZED.items()}


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    attention: bool | None = None,
    local: frozenset[int] = frozenset(),
) -> tuple[Rewritten, list[Decision], list[Others]]:
    """Rewrite dynamo's graph and its nested graphs, in place; return what it takes now, and what was decided on each
    GEMM, and on attention and routers.

    With attention=None attention is rewritten on CUDA alone; False leaves attention, norms and the order of reads to
    the compiler. `local` are the positions of DTensors in example_inputs whose local tensors the graph takes.
    """
    replace_calls(gm)
    scopes, weights = _scopes_and_weights(gm, example_inputs)
    for scope in scopes if attention is not False else ():
        take_causal_masks(scope, on_any_device=attention is True)
    if sum(remove_noop_masks(scope) for scope in scopes):
        scopes, weights = _scopes_and_weights(gm, example_inputs)
    fused = [] if attention is False else fuse_decode_attention(scopes, on_any_device=attention is True)
    if fused:
        scopes, weights = _scopes_and_weights(gm, example_inputs)
    root = scopes[0]
    packing = _Packing(root, weights, example_inputs, local)
    plans = [_plan(scope, weights) for scope in scopes]
    quantized = [found for scope in scopes for found in _quantized(scope, weights)]
    decisions = [decision for plan in plans for decision in plan.decisions]
    decisions += [decision for _, decision in quantized]
    told_by = _telling_weight(plans, [weight for weight, _ in quantized], weights)
    repeated = [
        found
        for scope in scopes
        for found in ([] if attention is False else find_repeated_attention(scope, on_any_device=attention is True))
    ]
    programs = [scope.program for scope in scopes]  # before anything is replaced
    memory = memory_of_inputs(root, weights) if any(plan.rewrites for plan in plans) else {}
    for plan in plans:
        for layer in plan.routed:
            replace_fused_moe(layer, *packing.inputs_of(layer.first, layer.down))
    # After this, the router of experts that ran on all tokens looks like any other.
    seen = (scope.after_rewrite() if plan.routed else scope for scope, plan in zip(scopes, plans, strict=True))
    routers = [found for scope in seen for found in find_routers(scope)]
    for plan in plans:
        for put, calls in plan.replacements:
            put(*packing.inputs_of(*calls))
    for _, group_heads in repeated:
        if group_heads is not None:
            group_heads()
    for router, entry in routers:
        if entry.decision == "moe_router":
            fuse_router(router)
    for scope, program in zip(scopes, programs, strict=True):
        share_orders(scope.graph, program)
    sites = [site for plan in plans for site in plan.sites if site.weight is not None]
    rewritten = packing.finish(sites, memory, told_by)
    if attention is not False:  # Thunder orders kernels anew, and has no symbols for the operators with norms
        fuse_add_norms(scopes_of(gm, torch.is_grad_enabled()))
        prefetch_operands(scopes_of(gm, torch.is_grad_enabled()))
    for scope in scopes:
        scope.module.recompile()
    return rewritten, decisions, [*fused, *(entry for entry, _ in repeated), *(entry for _, entry in routers)]


class _Packing:
    """The packed weights of a graph; each becomes an input of the graph when it is first asked for."""

    def __init__(self, root: Scope, weights: Weights, example_inputs: Sequence[Any], local: frozenset[int]) -> None:
        self.local = local
        self.root = root
        self.weights = weights
        self.example_inputs = example_inputs
        self.placeholders = root.graph.find_nodes(op="placeholder")
        self.packs: dict[tuple[Any, ...], WeightInput] = {}

    def inputs_of(self, *calls: Site | SwiGLU) -> list[WeightInput]:
        """Return the packed weight of each call."""
        return [self._inputs_of(call) for call in calls]

    def _inputs_of(self, call: Site | SwiGLU) -> WeightInput:
        sites, interleaved = (call.sites, call.interleaved) if isinstance(call, SwiGLU) else ((call,), 0)
        nodes = [site.weight for site in sites if site.weight is not None]
        transposed, format = sites[0].transposed, common_format(*(site.gemm for site in sites))
        key = (transposed, interleaved, *nodes)
        if key not in self.packs:
            tensors = (local_data(self.weights.tensors[node]) for node in nodes)
            layout = stacked_layout(*tensors, transposed=transposed, format=BLOCK_FORMATS[format])
            names = " and ".join(str(site.gemm.weight) for site in sites)
            pack = WeightInput(names, tuple(map(self.weights.handle, nodes)), transposed, interleaved, layout, format)
            stem = f"{format}_{len(self.packs)}"
            inputs = add_inputs(self.root.graph, stem, pack.example(self.example_inputs))
            self.packs[key] = replace(pack, nodes=inputs)
        packed, scope = self.packs[key], sites[0].scope
        return replace(packed, nodes=tuple(map(scope.thread_into_subgraph, packed.nodes)))

    def finish(self, sites: list[Site], memory: dict[str, Any], told_by: int | Tensor | None) -> Rewritten:
        """Erase 16-bit inputs without readers, and return the graph's new inputs; `sites`: all GEMMs that have a
        weight."""
        packed = dict.fromkeys(weight for key in self.packs for weight in key[2:])
        dropped = {node for node in packed if node.op == "placeholder" and not node.users}
        for node in dropped:
            self.root.graph.erase_node(node)

        def handles(nodes: Iterator[fx.Node | None]) -> tuple[int | Tensor, ...]:
            return tuple(self.weights.handle(node) for node in dict.fromkeys(nodes) if node is not None)

        tensors = self.weights.tensors
        watched = {site.weight for site in sites if site.weight is not None and tensors[site.weight].requires_grad}
        enabled = any(site.scope.modes[site.node] for site in sites if site.weight in packed)
        return Rewritten(
            kept=[position for position, node in enumerate(self.placeholders) if node not in dropped],
            packs=[replace(pack, nodes=()) for pack in self.packs.values()],
            trained=handles(site.weight for site in sites if site.gemm.needs_grad),
            watched=handles(site.weight for site in sites if site.weight in watched),
            frozen=handles(node for node in packed if node not in watched),
            enables_grad=enabled and not torch.is_grad_enabled(),
            told_by=told_by,
            local=self.local,
            **memory,
        )


def _telling_weight(plans: list[_Plan], packed: list[fx.Node | None], weights: Weights) -> int | Tensor | None:
    """Return the first weight of a GEMM, else the first parameter or buffer: a position among the graph's inputs, or a
    tensor that it holds."""
    sites = [site.weight for plan in plans for site in plan.sites]
    static = [node for node in weights.tensors if weights.is_static(node)]
    node = next((node for node in (*sites, *packed, *static) if node is not None), None)
    return None if node is None else weights.handle(node)


def _scopes_and_weights(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[list[Scope], Weights]:
    scopes = scopes_of(gm, torch.is_grad_enabled())
    tensors = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    tensors |= {node: attribute(gm, node.target) for node in gm.graph.find_nodes(op="get_attr")}
    return scopes, Weights(scopes, {node: value for node, value in tensors.items() if isinstance(value, Tensor)})


# Changes a graph, given the packed weights of some calls.
_Replacement = tuple[Callable[..., None], tuple[Site | SwiGLU, ...]]


@dataclass(frozen=True)
class _Plan:
    """The decisions on one graph; `routed` are replaced before the others."""

    sites: list[Site]
    routed: list[FusedMoE]
    replacements: list[_Replacement]
    decisions: list[Decision]

    @property
    def rewrites(self) -> bool:
        return bool(self.routed or any(calls for _, calls in self.replacements))


def _plan(scope: Scope, weights: Weights) -> _Plan:
    sites = find_sites(scope, weights)
    eligible = [site for site in sites if site.reason is None]
    swiglus = find_swiglu(scope, eligible)
    blocks = [block for block in swiglus if block.reason is None]
    unfused = {site: block.reason for block in swiglus for site in block.sites}
    routed, dense = find_all_experts_bmm(scope, weights)
    around, selected, products = find_gathered_bmm(scope, weights)
    whole = find_fused_moe(scope, [*blocks, *around], eligible)
    layers = [(*layer.first.sites, layer.down) for layer in (*whole, *routed)]
    for experts in layers:
        common_format(*(site.gemm for site in experts))
    in_layers = {site for experts in layers for site in experts}
    trained = [site for site in sites if site.reason is not None and _trains(site)]
    swiglus = [*blocks, *around, *(layer.first for layer in routed)]
    first = {site for block in swiglus for site in block.sites}
    blocks, around = ([block for block in each if block.sites[0] not in in_layers] for each in (blocks, around))
    fused = {site for block in blocks for site in (*block.sites, block.down)}
    alone = [site for site in eligible if site not in fused | in_layers]
    orders: dict[fx.Node, list[fx.Node]] = {}
    replacements: list[_Replacement] = [
        *((partial(take_our_gradient, site), ()) for site in trained),
        *((partial(replace_swiglu, block), _packed_by(block)) for block in blocks),
        *((partial(replace_gemm, site), (site,)) for site in alone),
        *((partial(replace_fused_moe, layer), (layer.first, layer.down)) for layer in whole),
        *((partial(replace_gathered_bmm, orders, block), _packed_by(block)) for block in around),
        *((partial(replace_gathered_bmm, orders, site), (site,)) for site in selected),
    ]

    sites += [*dense, *products]
    decisions = [
        describe(
            site.gemm, site.reason, fused=site in first, unfused=unfused.get(site), whole=site in in_layers,
            requires_grad=site.weight is not None and weights.tensors[site.weight].requires_grad,
        )
        for site in sites
    ]  # fmt: skip
    return _Plan(sites, routed, replacements, decisions)


def _packed_by(call: Site | SwiGLU) -> tuple[Site | SwiGLU, ...]:
    """Return the parts of a call that have a packed weight each."""
    return (call, call.down) if isinstance(call, SwiGLU) and call.down is not None else (call,)


def _quantized(scope: Scope, weights: Weights) -> Iterator[tuple[fx.Node | None, Decision]]:
    """Yield (weight, decision) of each packed weight of the modules that quantize_ had swapped in already."""
    for node in scope.graph.nodes:
        for position, to in _QUANTIZED.get(operator_of(node), ()):
            gemm = quantized_gemm(node, weights, position)
            yield weights.sharing(value_of(node.args[position])), (gemm, to, "quantized beforehand")


def _trains(site: Site) -> bool:
    """True if a GEMM that stays 16-bit is to get our gradient, which takes any strides."""
    gemm = site.gemm
    same = gemm.weight_dtype == gemm.activation_dtype and gemm.out_dtype in (None, gemm.weight_dtype)
    return gemm.needs_grad and same and site.scope.refusal is None and not site.is_thunder_moe_op

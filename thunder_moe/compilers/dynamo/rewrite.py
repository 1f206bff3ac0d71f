"""The rewrite of dynamo's graphs: frozen expert GEMMs -> NVFP4 operators, their packed weights further inputs.
Called by backend.py; calls scopes.py, sites.py and dense_experts.py for what there is to rewrite, and weight_cache.py.

erase masks that do nothing -> find grouped GEMMs, in nested graphs too -> replace a frozen weight by three inputs (its
packed form), its GEMM by the operator, gate + up + SwiGLU by the fused one, experts that run on all tokens by routed
ones; GEMMs that train by those whose gradient takes any strides -> report. All is decided before the first node is
replaced.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe.compilers.dynamo.attention import find_repeated_attention, group_heads
from thunder_moe.compilers.dynamo.dense_experts import DenseExperts, Routing, find_dense_experts
from thunder_moe.compilers.dynamo.effects import storages_of
from thunder_moe.compilers.dynamo.expert_ids import erase_idle_masks
from thunder_moe.compilers.dynamo.expert_linears import Packed, replace_gemm, replace_swiglu
from thunder_moe.compilers.dynamo.nodes import kind_of, value_of
from thunder_moe.compilers.dynamo.routers import (
    Router,
    call_router,
    dense_router,
    find_routers,
    fuse_router,
    share_orders,
)
from thunder_moe.compilers.dynamo.scopes import Scope, attribute, scopes_of
from thunder_moe.compilers.dynamo.selected_experts import SelectedExperts, find_selected_experts
from thunder_moe.compilers.dynamo.sites import (
    Site,
    Weights,
    find_sites,
    find_swiglu,
    quantized_gemm,
)
from thunder_moe.compilers.dynamo.whole_experts import WholeExperts, find_whole_experts, whole_selected_experts
from thunder_moe.compilers.eligibility import EXPERTS, QUANTIZED, Decision, common_format, describe
from thunder_moe.compilers.report import Others, RouterEntry
from thunder_moe.compilers.swiglu import SwiGLU
from thunder_moe.formats.block_format import BLOCK_FORMATS
from thunder_moe.kernels.slow_paths import warn_once
from thunder_moe.ops import experts, experts_lora, trainable_grouped_mm  # noqa: F401  (registers the operators)
from thunder_moe.weight_cache import WEIGHT_CACHE, stacked_layout

__all__ = ["Rewritten", "rewrite"]

_OPS = torch.ops.thunder_moe
_PARTS = ("weight", "scale", "global_scale")
# The positions of the weights among an operator's arguments, and the decision on each.
_QUANTIZED: dict[Any, tuple[tuple[int, str], ...]] = {
    getattr(_OPS, name).default: ((1, decision),) for name, decision in QUANTIZED.items()
}
_QUANTIZED |= {getattr(_OPS, name).default: decisions for name, decisions in EXPERTS.items()}
for _format, _known in BLOCK_FORMATS.items():
    for _with_lora in (f"f16a_{_format}weight_moe_experts_lora", f"f16a_{_format}weight_moe_experts_lora_kept"):
        _QUANTIZED[getattr(_OPS, _with_lora).default] = ((3, _format), (3 + len(_known.fields), _format))


@dataclass(frozen=True, eq=False)
class _Pack:
    """The weights that one packed weight is made of: positions among the graph's inputs, or tensors that it holds.
    `layout` and `format`: of the packed weight."""

    names: str
    weights: tuple[int | Tensor, ...]
    transposed: bool
    interleaved: int
    layout: str
    format: str

    def example(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The operators' weight arguments; of zeros where the weights hold NaN or Inf, because not loaded yet."""
        with contextlib.suppress(ValueError):
            return self(inputs)
        zeros = [torch.zeros_like(weight) for weight in _given(self.weights, inputs)]
        return replace(self, weights=tuple(zeros))(())

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The operators' weight arguments."""
        weights = _given(self.weights, inputs)
        try:
            return WEIGHT_CACHE.operands(
                *weights,
                transposed=self.transposed,
                interleaved=self.interleaved,
                layout=self.layout,
                format=self.format,
            )
        except ValueError as error:
            raise ValueError(f"cannot quantize {self.names}: {error}") from error


@dataclass(frozen=True, eq=False)
class Rewritten:
    """Maps the inputs of dynamo's graph to those of the rewritten one: the inputs that stay, then the packed weights.

    Attributes:
        kept: positions of the inputs that stay.
        packs: the packed weights.
        trained: weights that stay 16-bit because they are being trained.
        watched: all weights that require a gradient; they are being trained where a forward hides its grad mode.
        frozen: packed weights that require no gradient.
        written: positions of the inputs that the graph changes in place.
        compared: those, and positions of the inputs that may share memory with them: all but parameters and buffers.
        aliases: pairs of these that shared their memory when the graph was analysed, the lower position first.
        enables_grad: gradients are disabled outside of the graph and enabled at the GEMM of a packed weight.
        told_by: the weight that tells whose call it is, of the models that share the graph; None: there is none.
    """

    kept: list[int]
    packs: list[_Pack]
    trained: tuple[int | Tensor, ...]
    watched: tuple[int | Tensor, ...]
    frozen: tuple[int | Tensor, ...]
    written: frozenset[int] = frozenset()
    compared: tuple[int, ...] = ()
    aliases: frozenset[tuple[int, int]] = frozenset()
    enables_grad: bool = False
    told_by: int | Tensor | None = None

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        packed = [tensor for pack in self.packs for tensor in pack(given)]
        return [given[position] for position in self.kept] + packed

    def example_inputs(self, given: Sequence[Any]) -> list[Any]:
        packed = [tensor for pack in self.packs for tensor in pack.example(given)]
        return [given[position] for position in self.kept] + packed

    def writes_read(self, given: Sequence[Any]) -> bool:
        """Whether an input that the graph changes in place shares its memory with a packed weight, whose packed form is
        out of date then, or with another input where it did not when the graph was analysed. Dynamo guards on neither.

        Args:
            given: inputs of dynamo's graph.
        """
        owners: dict[int, list[int]] = {}
        for position in self.compared:
            for storage in _storages_of(given[position]):
                others = owners.setdefault(storage, [])
                for other in others:
                    if (other, position) not in self.aliases and not self.written.isdisjoint((other, position)):
                        return True
                others.append(position)
        weights = (weight for pack in self.packs for weight in _given(pack.weights, given))
        return any(not self.written.isdisjoint(owners.get(weight.untyped_storage()._cdata, ())) for weight in weights)

    @staticmethod
    def declare_shared() -> None:
        """Warns of what `writes_read` found."""
        warn_once(
            "shared",
            "an input that a compiled graph changes in place shares its memory with a packed weight, or with another"
            " input where it did not when the graph was compiled: such calls run in 16 bits",
        )

    def is_thawed(self, given: Sequence[Any]) -> bool:
        """Whether a packed weight that was frozen requires a gradient now. Dynamo before torch 2.13 does not look at
        parameters again while their module has the same ones."""
        return True in [weight.requires_grad for weight in _given(self.frozen, given)]

    def declare_thawed(self, given: Sequence[Any]) -> None:
        """`declare_trained` for these weights."""
        warn_once(
            "thawed",
            "a weight that was frozen when its graph was compiled requires a gradient now, and this torch does not"
            " compile the graph again: it runs in 16 bits; torch._dynamo.reset() has it compiled anew",
        )
        WEIGHT_CACHE.changed(*(weight for weight in _given(self.frozen, given) if weight.requires_grad))

    def declare_trained(self, given: Sequence[Any], *, hidden: bool = False) -> None:
        """Tells the cache of weights that what follows this forward may change.

        Args:
            given: inputs of dynamo's graph.
            hidden: whether `safety.is_hidden_training_forward`.
        """
        weights = self.watched if hidden else self.trained
        if weights:
            WEIGHT_CACHE.changed(*_given(weights, given))


def rewrite(
    gm: fx.GraphModule, example_inputs: Sequence[Any], attention: bool | None = None
) -> tuple[Rewritten, list[Decision], list[Others]]:
    """Rewrites dynamo's graph and those nested in it, in place.

    Args:
        gm: dynamo's graph.
        example_inputs: its inputs.
        attention: whether attention that repeats keys and values is rewritten; None: on CUDA.

    Returns:
        What the graph takes now; what was decided on each GEMM, and on such attention and routers.
    """
    scopes, weights = _scopes_and_weights(gm, example_inputs)
    erased = [erase_idle_masks(scope) for scope in scopes]
    if any(erased):
        scopes, weights = _scopes_and_weights(gm, example_inputs)
    root = scopes[0]
    placeholders = root.graph.find_nodes(op="placeholder")
    told_by = _telling_weight(scopes, weights)
    plans = [_plan(scope, weights) for scope in scopes]
    decisions = [decision for plan in plans for decision in plan.decisions]
    decisions += [decision for scope in scopes for decision in _quantized_before(scope, weights)]
    repeated = [
        found
        for scope in scopes
        for found in ([] if attention is False else find_repeated_attention(scope, on_any_device=attention is True))
    ]
    routers = [found for scope in scopes for found in find_routers(scope)]
    dense_routers = {
        block: router_of_block
        for plan in plans
        for block in plan.dense
        if block.routing is not None
        if (router_of_block := dense_router(block.sites[0].scope, block.routing)) is not None
    }
    programs = [scope.program for scope in scopes]
    rewrites = any(plan.calls or plan.whole or plan.dense or plan.selected for plan in plans)
    memory = _memory_of_inputs(root, weights) if rewrites else {}

    def handle(node: fx.Node) -> int | Tensor:
        return placeholders.index(node) if node.op == "placeholder" else weights.tensors[node]

    packs: dict[tuple[Any, ...], _Pack] = {}
    packed: dict[tuple[Any, ...], Packed] = {}

    def packed_inputs(call: Site | SwiGLU) -> Packed:
        sites = (call,) if isinstance(call, Site) else call.sites
        nodes = [site.weight for site in sites if site.weight is not None]
        transposed, interleaved = sites[0].transposed, call.interleaved if isinstance(call, SwiGLU) else 0
        format = common_format(*(site.gemm for site in sites))
        key = (transposed, interleaved, *nodes)
        if key not in packs:
            tensors = (weights.tensors[node] for node in nodes)
            layout = stacked_layout(*tensors, transposed=transposed, format=BLOCK_FORMATS[format])
            names = " and ".join(str(site.gemm.weight) for site in sites)
            packs[key] = _Pack(names, tuple(map(handle, nodes)), transposed, interleaved, layout, format)
            inputs = _add_inputs(root.graph, f"{format}_{len(packs) - 1}", packs[key].example(example_inputs))
            packed[key] = Packed(inputs, dict(layout=layout), format)
        scope = sites[0].scope
        return replace(packed[key], nodes=[scope.bring(node) for node in packed[key].nodes])

    for plan in plans:
        for site in plan.to_train:
            _replace(site.scope, site.node, _OPS.trainable_grouped_mm.default, site.operands)
        for call in plan.calls:
            if isinstance(call, Site):
                replace_gemm(call, packed_inputs(call))
                _erase(call.scope, call.node)
            else:
                down = [] if call.down is None else [packed_inputs(call.down)]
                replace_swiglu(call, packed_inputs(call), *down)
                _erase(call.sites[0].scope, call.product)
        for whole in plan.whole:
            common_format(*(site.gemm for site in (*whole.first.sites, whole.down)))
            _run_whole(whole, packed_inputs(whole.first), packed_inputs(whole.down))
        for block in plan.dense:
            if block.routing is not None:
                common_format(*(site.gemm for site in block.sites))
                _route(block, block.routing, dense_routers.get(block), *map(packed_inputs, block.sites))
        routes: dict[fx.Node, list[fx.Node]] = {}
        for products in plan.selected:
            gate_up = [] if products.swiglu is None else [packed_inputs(products.swiglu)]
            _sort(products, routes, *gate_up, packed_inputs(products.sites[-1]))
    for found in repeated:
        if found.entry.decision == "grouped":
            group_heads(found)
            _erase(found.scope, found.node)
    for router, entry in routers:
        if entry.decision == "moe_router":
            fuse_router(router)
    for scope, program in zip(scopes, programs, strict=True):
        share_orders(scope.graph, program)
    packed_weights = dict.fromkeys(weight for key in packs for weight in key[2:])
    dropped = {node for node in packed_weights if node.op == "placeholder" and not node.users}
    for node in dropped:
        root.graph.erase_node(node)
    for scope in scopes:
        scope.module.recompile()
    sites = [(site.weight, site.gemm) for plan in plans for site in plan.sites if site.weight is not None]
    watched = dict.fromkeys(weight for weight, _ in sites if weights.tensors[weight].requires_grad)
    rewritten = Rewritten(
        kept=[position for position, node in enumerate(placeholders) if node not in dropped],
        packs=list(packs.values()),
        trained=tuple(map(handle, dict.fromkeys(weight for weight, gemm in sites if gemm.needs_grad))),
        watched=tuple(map(handle, watched)),
        frozen=tuple(map(handle, (node for node in packed_weights if node not in watched))),
        enables_grad=not torch.is_grad_enabled()
        and any(site.scope.modes[site.node] for plan in plans for site in plan.sites if site.weight in packed_weights),
        told_by=told_by,
        **memory,
    )
    return (
        rewritten,
        decisions,
        [*(found.entry for found in repeated), *(entry for _, entry in (*routers, *dense_routers.values()))],
    )


def _memory_of_inputs(root: Scope, weights: Weights) -> dict[str, Any]:
    """`Rewritten`'s written, compared and aliases: what the graph or one nested in it changes."""
    inputs = list(enumerate(root.graph.find_nodes(op="placeholder")))
    storages = {position: storages_of(root.value_of(node)) for position, node in inputs if node in weights.tensors}
    steps = root.program.steps
    written = frozenset(at for at, own in storages.items() if any(step.changes(own) for step in steps))
    static = {position for position, node in inputs if node in weights.tensors and weights.is_static(node)}
    compared = tuple(at for at in storages if at in written or at not in static)
    aliases = frozenset((a, b) for a, b in combinations(compared, 2) if storages[a] & storages[b])
    return dict(written=written, compared=compared, aliases=aliases)


def _telling_weight(scopes: list[Scope], weights: Weights) -> int | Tensor | None:
    """The first weight of a grouped GEMM, else the first parameter or buffer: a position among the graph's inputs, or a
    tensor that it holds."""
    sites = [site.weight for scope in scopes for site in find_sites(scope, weights)]
    operands = [
        weights.sharing(value_of(node.args[position]))
        for scope in scopes
        for node, position, _ in _quantized_calls(scope)
    ]
    static = [node for node in weights.tensors if weights.is_static(node)]
    node = next((node for node in (*sites, *operands, *static) if node is not None), None)
    if node is None or node.op != "placeholder":
        return None if node is None else weights.tensors[node]
    return scopes[0].graph.find_nodes(op="placeholder").index(node)


def _scopes_and_weights(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[list[Scope], Weights]:
    scopes = scopes_of(gm, torch.is_grad_enabled())
    tensors = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    tensors |= {node: attribute(gm, node.target) for node in gm.graph.find_nodes(op="get_attr")}
    return scopes, Weights(scopes, {node: value for node, value in tensors.items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class _Plan:
    """The decisions on one graph: `calls`, `whole`, `dense` and `selected` are rewritten, `to_train` get our
    gradient."""

    sites: list[Site]
    calls: list[Site | SwiGLU]
    whole: list[WholeExperts]
    dense: list[DenseExperts]
    selected: list[SelectedExperts]
    to_train: list[Site]
    decisions: list[Decision]


def _plan(scope: Scope, weights: Weights) -> _Plan:
    sites = find_sites(scope, weights)
    eligible = [site for site in sites if site.reason is None]
    swiglus = find_swiglu(scope, eligible)
    blocks = [block for block in swiglus if block.reason is None]
    unfused = {site: block.reason for block in swiglus for site in block.sites}
    fused = {site for block in blocks for site in block.sites}
    downs = {block.down for block in blocks if block.down is not None}
    dense = find_dense_experts(scope, weights)
    whole = find_whole_experts(scope, blocks, eligible)
    selected, products = find_selected_experts(scope, weights)
    layers = {block: layer for block in selected if (layer := whole_selected_experts(scope, block)) is not None}
    selected = [block for block in selected if block not in layers]
    whole += layers.values()
    in_layers = {site for layer in whole for site in (*layer.first.sites, layer.down)}
    in_layers |= {site for block in dense if block.routing is not None and _keeps_width(block) for site in block.sites}

    def decision(site: Site, reason: str | None, *, is_fused: bool) -> Decision:
        requires_grad = site.weight is not None and weights.tensors[site.weight].requires_grad
        return describe(
            site.gemm, reason, requires_grad=requires_grad, fused=is_fused, unfused=unfused.get(site),
            whole=site in in_layers,
        )  # fmt: skip

    decisions = [decision(site, site.reason, is_fused=site in fused) for site in sites]
    for block in dense:
        decisions += [decision(site, block.reason, is_fused=site is not block.sites[-1]) for site in block.sites]
    fused_products = {block.sites[0] for block in (*selected, *layers) if block.swiglu is not None}
    decisions += [decision(site, site.reason, is_fused=site in fused_products) for site in products]
    return _Plan(
        [*sites, *products, *(site for block in dense for site in block.sites)],
        [
            *(block for block in blocks if block.sites[0] not in in_layers),
            *(site for site in eligible if site not in fused | downs | in_layers),
        ],
        whole,
        dense,
        selected,
        [site for site in sites if site.reason is not None and _trains(site)],
        decisions,
    )


def _quantized_before(scope: Scope, weights: Weights) -> list[Decision]:
    """The NVFP4 operators of modules that quantize_ had swapped in already."""
    return [
        (quantized_gemm(node, weights, position), decision, "quantized beforehand")
        for node, position, decision in _quantized_calls(scope)
    ]


def _quantized_calls(scope: Scope) -> list[tuple[fx.Node, int, str]]:
    """(call, position of a weight among its arguments, decision on it) of these operators."""
    found = []
    for node in scope.graph.nodes:
        target = getattr(node.target, "default", node.target) if node.op == "call_function" else None
        found += [(node, position, decision) for position, decision in _QUANTIZED.get(target, ())]
    return found


def _trains(site: Site) -> bool:
    """Whether a GEMM that stays 16-bit is to get our gradient, which takes any strides."""
    gemm = site.gemm
    same = gemm.weight_dtype == gemm.activation_dtype and gemm.out_dtype in (None, gemm.weight_dtype)
    return gemm.needs_grad and same and site.scope.refusal is None and not site.own


def _storages_of(value: Any) -> Collection[int]:
    """`storages_of`, at every call: 5 times faster for plain tensors."""
    if type(value) in (Tensor, torch.nn.Parameter):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            return (value.untyped_storage()._cdata,)
    return storages_of(value)


def _given(weights: Sequence[int | Tensor], inputs: Sequence[Any]) -> list[Tensor]:
    return [inputs[weight] if isinstance(weight, int) else weight for weight in weights]


def _add_inputs(graph: fx.Graph, stem: str, tensors: Sequence[Tensor]) -> list[fx.Node]:
    """New placeholders at the end of the graph's, marked as dynamo marks parameters: static, of fixed size."""
    from torch._dynamo.source import ConstantSource

    fake_mode = torch._guards.detect_fake_mode()
    assert fake_mode is not None, "dynamo compiles under a fake mode"
    nodes = []
    for part, tensor in zip(_PARTS, tensors, strict=False):
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
    scope: Scope, old: fx.Node, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any] | None = None
) -> None:
    """Puts a call in the place of a node, and erases the node with what it alone used."""
    with scope.graph.inserting_before(old):
        new = scope.graph.call_function(operation, arguments, options)
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    _erase(scope, old)


def _run_whole(layer: WholeExperts, gate_up: Packed, down: Packed) -> None:
    """Puts one operator in the place of a layer's experts."""
    scope, graph = layer.down.scope, layer.down.scope.graph
    tokens, *of_slots = layer.operands
    with graph.inserting_before(layer.total):
        ids, weights = (graph.call_method("view", (node, (-1, layer.top_k))) for node in of_slots)
    arguments = (tokens, ids, weights, *gate_up.nodes, *down.nodes, *_NO_BIAS_OR_ORDER)
    options = _options_of_experts(gate_up, down, on_input=layer.on_input)
    _replace(scope, layer.total, gate_up.operator("moe_experts"), arguments, options)
    nodes: list[Any] = sorted(layer.nodes, key=scope.positions.__getitem__, reverse=True)
    for node in nodes:
        if node._erased or node.users:
            continue
        if kind_of(node) != "setitem":
            _erase(scope, node)
        elif set(node.args[0].users) == {node}:
            graph.erase_node(node)


_NO_BIAS_OR_ORDER = (None,) * 5


def _options_of_experts(gate_up: Packed, down: Packed, *, on_input: bool) -> dict[str, Any]:
    layouts = dict(gate_up_layout=gate_up.options["layout"], down_layout=down.options["layout"])
    return dict(weight_on_input=True, **layouts) if on_input else layouts


def _route(
    block: DenseExperts, routing: Routing, router: tuple[Router, RouterEntry] | None, gate_up: Packed, down: Packed
) -> None:
    """Puts routed experts in the place of batched GEMMs over all experts, and maybe one operator of their router."""
    first = block.sites[0]
    tokens, indices, scale = routing.operands
    graph = first.scope.graph
    if router is not None:
        scale, indices = call_router(router[0])
        scale.meta.clear()  # of the scores of all experts
    with graph.inserting_before(routing.rows):
        for node in routing.scores if router is None else ():
            scale = graph.create_node(node.op, node.target, (scale, *node.args[1:]), node.kwargs)
        if _keeps_width(block):
            arguments = (tokens, indices, scale, *gate_up.nodes, *down.nodes, *_NO_BIAS_OR_ORDER)
            call, options = gate_up.operator("moe_experts"), _options_of_experts(gate_up, down, on_input=True)
        else:
            route = graph.call_function(_OPS.moe_route.default, (indices, first.gemm.experts))
            row_slot, offsets, slot_row = (graph.call_function(operator.getitem, (route, part)) for part in range(3))
            of_rows = (tokens, *gate_up.nodes, offsets, row_slot, scale)
            rows = graph.call_function(gate_up.operator("grouped_swiglu"), of_rows, gate_up.options)
            call, options = down.operator("grouped_mm_combine"), down.options
            arguments = (rows, *down.nodes, offsets, slot_row)
        out = graph.call_function(call, arguments, options)
    out.meta = dict(routing.total.meta)
    routing.total.replace_all_uses_with(out)
    _erase(first.scope, routing.total)


def _keeps_width(block: DenseExperts) -> bool:
    """Whether the experts give as many features as tokens have."""
    return block.sites[0].gemm.in_features == block.sites[-1].gemm.out_features


def _sort(block: SelectedExperts, routes: dict[fx.Node, list[fx.Node]], *packed: Packed) -> None:
    """Puts routing and grouped GEMMs in the place of batched ones with the weights of each row's expert.

    Args:
        block: the products.
        routes: what blocks before have made of the ids: rows' slots, offsets, slots' rows.
        *packed: of gate and up if there is a SwiGLU, and of the last product.
    """
    first, last = block.sites[0], block.sites[-1]
    graph = first.scope.graph
    rows, _, ids = first.operands
    with graph.inserting_before(last.node):
        if ids not in routes:
            slots = graph.call_method("unsqueeze", (ids, 1))
            route = graph.call_function(_OPS.moe_route.default, (slots, first.gemm.experts))
            routes[ids] = [graph.call_function(operator.getitem, (route, part)) for part in range(3)]
        row_slot, offsets, slot_row = routes[ids]
        if block.swiglu is None:
            rows = graph.call_function(torch.index_select, (rows, 0, row_slot))
        else:
            of_rows = (rows, *packed[0].nodes, offsets, row_slot)
            rows = graph.call_function(packed[0].operator("grouped_swiglu"), of_rows, packed[0].options)
    arguments = (rows, *packed[-1].nodes, offsets, slot_row)
    _replace(last.scope, last.node, packed[-1].operator("grouped_mm_combine"), arguments, packed[-1].options)


def _erase(scope: Scope, node: fx.Node) -> None:
    """Erases a node that nobody reads, then those that only it read. Graph-wide dead code elimination takes in-place
    methods for dead."""
    if node._erased or node.users or node.op == "placeholder" or _is_seen_elsewhere(scope, node):
        return
    inputs = node.all_input_nodes
    scope.graph.erase_node(node)
    for source in inputs:
        _erase(scope, source)


def _is_seen_elsewhere(scope: Scope, node: fx.Node) -> bool:
    """Whether a node changes a tensor that is an input, or that another node reads."""
    if node not in scope.positions:
        return False
    step = scope.program.steps[scope.positions[node]]
    changed = {storage for storage in step.reads if step.changes((storage,))}
    if not changed:
        return False
    others = [other for other in scope.graph.nodes if other is not node and other in scope.positions]
    return any(
        not changed.isdisjoint(
            storages_of(scope.value_of(other))
            if other.op in ("placeholder", "get_attr")
            else scope.program.steps[scope.positions[other]].reads
        )
        for other in others
    )

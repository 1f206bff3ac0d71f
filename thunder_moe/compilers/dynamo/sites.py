"""Finds the grouped GEMMs of an FX graph, the parameters behind them, and the SwiGLUs that consume them.
Called by rewrite.py and the finders of experts; calls eligibility.py and safety.py for the decision on each GEMM,
scopes.py for the graph around it, and nodes.py.

    y = grouped_mm(x, w.transpose(-2, -1), offs)                            -> Site
    y = grouped_linear(x, w, offs, bias)                                    -> Site, of GroupedLinear
    y = activated_grouped_linear(y, w, offs, scales, bias)                  -> Site, of GroupedMLP
    silu(grouped_mm(x, gate)) * grouped_mm(x, up)                           -> SwiGLUNodes of two sites
    y = grouped_mm(x, gate_up); gate, up = y.chunk(2, -1); silu(gate) * up  -> SwiGLUNodes of one site
    scaled_activation(grouped_linear(x, gate_up, offs, bias), scales)       -> SwiGLUNodes of one site
    activated_grouped_linear(grouped_linear(x, gate_up, offs), down, offs)  -> SwiGLUNodes of one site, and its down
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_moe.compilers.dynamo.effects import is_in_a_function_transform, storages_of
from thunder_moe.compilers.dynamo.nodes import calls, factors, given, kind_of, only_user, user_line, value_of
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.eligibility import GroupedGemm, decline_reason, in_chosen_format, swaps_last_dims
from thunder_moe.compilers.safety import is_hidden_training_forward
from thunder_moe.compilers.spellings import column_part, is_interleaved
from thunder_moe.formats.block_format import BLOCK_FORMATS

__all__ = [
    "Site",
    "SwiGLUNodes",
    "Weights",
    "find_sites",
    "find_swiglu",
    "products_with_silu",
    "quantized_gemm",
    "read_live_rows_alone",
    "site_of",
]

_OWN = ("linear", "activated")  # kinds of GEMMs of this package's, whose weight is (E, N, K)


@dataclass(frozen=True, eq=False)
class Site:
    """A grouped GEMM of the graph.

    Attributes:
        node: its call.
        scope: the graph that it is in.
        gemm: names and sizes.
        weight: the root's placeholder or get_attr node of the weight, None when there is none behind mat_b.
        transposed: the weight is (E, K, N), not (E, N, K).
        reason: why it stays 16-bit, None when it is rewritten.
    """

    node: fx.Node
    scope: Scope
    gemm: GroupedGemm
    weight: fx.Node | None
    transposed: bool
    reason: str | None

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """(mat_a, mat_b, offs) as they are now: a rewrite elsewhere in the graph may have replaced them."""
        rows, weight, offsets, *_ = self.arguments.values()
        return rows, weight, offsets

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the call by name."""
        return given(self.node)

    @property
    def own(self) -> bool:
        """Whether this is an operator of ours, whose result is zero past the last row end."""
        return calls(self.node, *_OWN)


@dataclass(frozen=True, eq=False)
class SwiGLUNodes:
    """``silu(gate) * up``, whose multiplication `product` the fused operator replaces.

    `sites` are the GEMMs of gate and up, or one GEMM of both; then `interleaved` tells by how many columns gate and up
    take turns, 0 where they are its halves. `form`: the keywords of the activation where it is not SwiGLU. `scales`: a
    factor of the rows of the product. `down`: where the product is a GEMM of ours on activated rows, that.
    """

    sites: tuple[Site, ...]
    product: fx.Node
    interleaved: int = 0
    form: dict[str, Any] = field(default_factory=dict)
    scales: fx.Node | None = None
    down: Site | None = None

    @property
    def nodes(self) -> set[fx.Node]:
        """All of its nodes, those of its GEMMs among them, before anything is rewritten."""
        found = {self.product, *(site.node for site in self.sites)}
        for node, _ in factors(self.product):
            while node not in found:
                found.add(node)
                node = given(node)["input"]
        return found


class Weights:
    """The parameters and buffers among the inputs of a graph and of those nested in it."""

    def __init__(self, scopes: list[Scope], tensors: dict[fx.Node, torch.Tensor]) -> None:
        """
        Args:
            scopes: of dynamo's graph, the root first.
            tensors: the real tensor of each placeholder and get_attr node of the root that has one.
        """
        self._scopes = scopes
        self.tensors = tensors
        self._by_storage: dict[int, list[fx.Node]] = {}
        for node, real in tensors.items():
            if _is_static(node, real):
                for storage in storages_of(scopes[0].value_of(node)):
                    self._by_storage.setdefault(storage, []).append(node)

    def is_static(self, node: fx.Node) -> bool:
        """Whether an input is a parameter or buffer."""
        return _is_static(node, self.tensors[node])

    def behind(self, scope: Scope, source: Any, mat_b: torch.Tensor) -> tuple[fx.Node | None, bool]:
        """(node, transposed): the weight that mat_b (E, K, N), a view of a node of a scope, is a view of, and whether
        it lies as mat_b does. Inputs that share their memory now need not share it at the next call: the weight is the
        one that the graph reads, except in a scope whose GEMMs stay as they are."""
        nodes = [node for storage in storages_of(mat_b) for node in self._by_storage.get(storage, ())]
        if nodes and scope.refusal is None:
            origin = scope.origin(source)
            nodes = [node for node in nodes if node is origin]
        for node in nodes:
            swapped = swaps_last_dims(self._scopes[0].value_of(node), mat_b)
            if swapped is not None:
                return node, not swapped
        return None, True

    def sharing(self, tensor: torch.Tensor) -> fx.Node | None:
        """The weight whose memory a tensor is of, in whatever shape."""
        return next((node for storage in storages_of(tensor) for node in self._by_storage.get(storage, ())), None)

    def reason_against_packing(self, weight: fx.Node) -> str | None:
        if self.tensors[weight].is_meta:
            return "the weight is on the meta device, which holds no numbers"
        storages = storages_of(self._scopes[0].value_of(weight))
        # From the inside out: the innermost knows the name of the operation.
        reasons = (scope.program.reason_against_packing(storages) for scope in reversed(self._scopes))
        return next((reason for reason in reasons if reason is not None), None)


def find_sites(scope: Scope, weights: Weights) -> list[Site]:
    """The grouped GEMMs of 2-D rows and 3-D weights in a graph as dynamo gives it to a backend, with example values."""
    sites = []
    for node in scope.graph.nodes:
        if not calls(node, "grouped_mm", *_OWN):
            continue
        named, own = given(node), calls(node, *_OWN)
        source = named["weight" if own else "mat_b"]
        rows, weight = value_of(named["mat_a"]), value_of(source)
        if rows is None or weight is None:
            continue
        if not own and (rows.ndim != 2 or weight.ndim != 3 or "offs" not in named or "bias" in named):
            continue
        sites.append(site_of(node, scope, source, weight.mT if own else weight, rows, rows.shape[0], weights))
    return sites


def site_of(
    node: fx.Node,
    scope: Scope,
    source: Any,
    mat_b: torch.Tensor,
    activation: torch.Tensor,
    rows: Any,
    weights: Weights,
) -> Site:
    """The site of a GEMM with the weight mat_b (E, K, N), a view of the node `source`, and the decision on it."""
    assert scope.program.steps  # made before anything is rewritten
    experts, k, n = mat_b.shape
    out_dtype = value_of(node).dtype  # asked for, or autocast's
    transformed = is_in_a_function_transform(mat_b) or is_in_a_function_transform(activation)
    weight, transposed = (None, True) if is_in_a_function_transform(mat_b) else weights.behind(scope, source, mat_b)
    requires_grad = mat_b.requires_grad or (weight is not None and weights.tensors[weight].requires_grad)
    gemm = GroupedGemm(
        weight=None if weight is None else qualified_name(weight),
        experts=int(experts),
        out_features=int(n),
        in_features=int(k),
        rows=rows if isinstance(rows, int) else None,
        weight_dtype=mat_b.dtype,
        activation_dtype=activation.dtype,
        needs_grad=requires_grad and scope.modes[node] and not scope.differentiates_itself,
        out_dtype=None if out_dtype == activation.dtype else out_dtype,
        where=user_line(node),
        hidden_training=requires_grad and (scope.differentiates_itself or is_hidden_training_forward()),
        changed=None if weight is None else weights.reason_against_packing(weight),
    )
    gemm = in_chosen_format(gemm)
    reason = decline_reason(gemm) or scope.refusal
    return Site(node, scope, gemm, weight, transposed, "it is inside a torch.func transform" if transformed else reason)


def find_swiglu(scope: Scope, sites: list[Site]) -> tuple[list[SwiGLUNodes], dict[Site, str]]:
    """The SwiGLUs whose GEMMs are all among the sites, each of them in one at most; and why others are not fused."""
    by_node = {site.node: site for site in sites}
    found: list[SwiGLUNodes] = []
    unfused: dict[Site, str] = {}
    for product in scope.graph.nodes:
        blocks = [_own_activation(by_node, product)]
        for silu, gate, up in products_with_silu(product):
            if only_user(silu, product) and only_user(gate, silu) and only_user(up, product):
                blocks += [_two_gemms(by_node, gate, up, product), _one_gemm(by_node, gate, up, product)]
        block = next((block for block in blocks if block is not None), None)
        reason = None if block is None else _reason_against_fusing(scope, block)
        if block is not None and reason is None:
            found.append(block)
        elif block is not None:
            unfused |= dict.fromkeys(block.sites, str(reason))
    return found, unfused


def products_with_silu(product: Any) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """(silu, gate, up) of ``silu(gate) * up``, as often as a node is one: both factors may be a silu."""
    pairs = [pair for pair in factors(product) if all(isinstance(factor, fx.Node) for factor in pair)]
    return [
        (silu, given(silu)["input"], up) for silu, up in pairs if calls(silu, "silu") and not given(silu).get("inplace")
    ]


def _reason_against_fusing(scope: Scope, block: SwiGLUNodes) -> str | None:
    replaced = block.nodes
    rows, _, offsets = block.sites[0].operands
    read = dict.fromkeys(storages_of(value_of(rows)), "the rows")
    read |= dict.fromkeys(storages_of(value_of(offsets)), "the offsets")
    handed_on = dict.fromkeys(storages_of([value_of(node) for node in replaced - {block.product}]), "a projection")
    # The fused operator's backward computes gate and up again.
    differentiable = scope.modes[block.product] and value_of(rows).requires_grad
    positions = {scope.positions[node] for node in replaced}
    return scope.program.reason_against_fusing(positions, handed_on | read, read if differentiable else None)


def quantized_gemm(node: Any, weights: Weights, position: int = 1) -> GroupedGemm:
    """Names and sizes of a GEMM of one of the package's NVFP4 operators, whose arguments begin with rows or tokens;
    `position` is that of the GEMM's weight among them."""
    rows, packed = value_of(node.args[0]), value_of(node.args[position])
    format = next(known for known in BLOCK_FORMATS.values() if packed.dtype in known.code_dtypes)
    experts, codes, n = packed.shape
    source = weights.sharing(packed)
    name = qualified_name(source) if source is not None else None
    k, m = format.codes_per_byte * int(codes), rows.shape[0] if isinstance(rows.shape[0], int) else None
    sizes = (int(experts), int(n), k, m)
    return GroupedGemm(name, *sizes, rows.dtype, rows.dtype, False, where=user_line(node), format=format.name)


def read_live_rows_alone(node: fx.Node, offsets: fx.Node) -> bool:
    """Whether grouped GEMMs of the same rows alone read what becomes of a node by functions that keep rows apart."""

    def is_careful(user: fx.Node) -> bool:
        if calls(user, "grouped_mm", *_OWN):
            named = given(user)
            return named["mat_a"] is node and named.get("offs") is offsets
        keeps_rows_apart = calls(user, "silu", "mul", "chunk") or part_of(user)[0] is not None
        return keeps_rows_apart and read_live_rows_alone(user, offsets)

    return bool(node.users) and all(map(is_careful, node.users))


def _two_gemms(by_node: dict[fx.Node, Site], gate: fx.Node, up: fx.Node, product: fx.Node) -> SwiGLUNodes | None:
    first, second = by_node.get(gate), by_node.get(up)
    if first is None or second is None or first.own != second.own or "activated" in map(kind_of, (gate, up)):
        return None
    biases = [site.arguments.get("bias") for site in (first, second)]
    if (biases[0] is None) != (biases[1] is None) or _has_scaled_bias(first) or _has_scaled_bias(second):
        return None
    (rows, _, offsets), (up_rows, _, up_offsets) = first.operands, second.operands
    same = rows is up_rows and offsets is up_offsets and first.transposed == second.transposed
    if not same or first.gemm.out_features != second.gemm.out_features:
        return None
    return SwiGLUNodes((first, second), product)


def _one_gemm(by_node: dict[fx.Node, Site], gate: Any, up: Any, product: fx.Node) -> SwiGLUNodes | None:
    """gate and up are the two parts of one GEMM's output, and the only ones who read it."""
    (first, gate_part), (second, up_part) = part_of(gate), part_of(up)
    site = by_node.get(first) if first is not None and first is second else None
    interleaved = is_interleaved(gate_part, up_part)
    if site is None or interleaved is None or calls(site.node, "activated") or _has_scaled_bias(site):
        return None
    readers = {gate, up, *(given(part)["input"] for part in (gate, up))} - {site.node}
    if not set(site.node.users) <= readers or any(set(r.users) - {gate, up} for r in readers - {gate, up}):
        return None
    return SwiGLUNodes((site,), product, interleaved=int(interleaved))


def _own_activation(by_node: dict[fx.Node, Site], product: fx.Node) -> SwiGLUNodes | None:
    """SwiGLU as our operators have it, alone or before the GEMM of the down projection."""
    if not calls(product, "activation", "activated"):
        return None
    named, activated = given(product), calls(product, "activated")
    y, offsets = named["mat_a"], named.get("offs")
    site, down = by_node.get(y), by_node.get(product) if activated else None
    if named.get("kind", "swiglu") != "swiglu" or site is None or not calls(y, "linear") or _has_scaled_bias(site):
        return None
    if not only_user(y, product) or (activated and down is None):
        return None
    if site.operands[2] is not offsets and (activated or offsets is not None):
        return None
    form: dict[str, Any] = {name: named[name] for name in ("alpha", "limit", "up_shift") if name in named}
    return SwiGLUNodes((site,), product, named.get("interleave", 0), form, named.get("scales"), down)


def _has_scaled_bias(site: Site) -> bool:
    return site.arguments.get("bias_scale") is not None


def part_of(node: Any) -> tuple[fx.Node | None, str]:
    """(whole, part): which of the two parts of the last dim of `whole` a node is: low, high, even or odd."""
    if not calls(node, "getitem"):
        return None, ""
    whole, index = given(node).values()
    if isinstance(index, int) and calls(whole, "chunk", "split"):
        source, parts, dim = (*given(whole).values(), 0)[:3]
        value = value_of(source)
        if value is None or dim not in (-1, value.ndim - 1) or not isinstance(parts, int) or value.shape[-1] % 2:
            return None, ""
        halves = parts == (2 if calls(whole, "chunk") else value.shape[-1] // 2)
        return (source, ("low", "high")[index]) if halves else (None, "")
    size = value_of(whole)
    if not isinstance(index, tuple) or size is None or not isinstance(index[-1], slice):
        return None, ""
    if index[:-1] not in ((...,), (slice(None),) * (size.ndim - 1)):
        return None, ""
    width, columns = size.shape[-1], index[-1]
    stop = width if columns.stop is None else columns.stop
    part = column_part(width, columns.start or 0, stop, columns.step or 1)
    return (whole, part) if part else (None, "")


def _is_static(node: fx.Node, real: torch.Tensor) -> bool:
    """Whether an input is a parameter or buffer with data that can be quantized ahead of the call."""
    if isinstance(real, FakeTensor) or is_traceable_wrapper_subclass(real):
        return False
    marked = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    return node.op == "get_attr" or isinstance(real, torch.nn.Parameter) or marked


def qualified_name(node: fx.Node) -> str:
    """``layers.0.weight`` from dynamo's ``L['self']._modules['layers']._modules['0']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    parts = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", name or "")
    return ".".join(parts) if parts else str(node.target)

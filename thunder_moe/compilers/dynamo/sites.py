"""Finds the grouped GEMMs of an FX graph, the parameters behind them, and the SwiGLUs that consume them.
Called by rewrite.py and the finders of experts; calls eligibility.py and safety.py for the decision on each GEMM,
swiglu.py for what a SwiGLU looks like, scopes.py for the graph around it, and nodes.py.

    y = grouped_mm(x, w.transpose(-2, -1), offs)               torch's, the weight behind views
    y = grouped_linear(x, w, offs, bias)                       of GroupedLinear
    y = activated_grouped_linear(y, w, offs, scales, bias)     of GroupedMLP
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_moe.compilers import swiglu
from thunder_moe.compilers.dynamo.effects import is_in_a_function_transform, storages_of
from thunder_moe.compilers.dynamo.nodes import calls, given, is_in_place, kind_of, user_line, value_of
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.eligibility import GroupedGemm, decline_reason, in_chosen_format, swaps_last_dims
from thunder_moe.compilers.safety import is_hidden_training_forward
from thunder_moe.compilers.spellings import column_part
from thunder_moe.compilers.swiglu import Gemm, SwiGLU
from thunder_moe.formats.block_format import BLOCK_FORMATS
from thunder_moe.weight_cache import local_data

_OWN = ("linear", "activated")  # kinds of GEMMs of this package's, whose weight is (E, N, K)


@dataclass(frozen=True, eq=False)
class Site:
    """A grouped GEMM of the graph."""

    node: fx.Node  # its call
    scope: Scope  # the graph that it is in
    gemm: GroupedGemm  # names and sizes
    weight: fx.Node | None  # the root's placeholder or get_attr node of the weight, None if there is none behind mat_b
    transposed: bool  # the weight is (E, K, N), not (E, N, K)
    reason: str | None  # why it stays 16-bit, None if it is rewritten

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        """Return the current nodes of (mat_a, mat_b, offs or None), which another rewrite may have replaced."""
        rows, weight, offsets, *_ = (*self.arguments.values(), None)
        return rows, weight, offsets

    @property
    def arguments(self) -> dict[str, Any]:
        """Return all arguments of the call by name."""
        return given(self.node)

    @property
    def is_thunder_moe_op(self) -> bool:
        """True if this is an operator of ours, whose result is zero past the last row end."""
        return calls(self.node, *_OWN)


class Weights:
    """The parameters and buffers among the inputs of a graph and of its nested graphs."""

    def __init__(self, scopes: list[Scope], tensors: dict[fx.Node, torch.Tensor]) -> None:
        self._scopes = scopes
        self.tensors = tensors  # the real tensor of each placeholder and get_attr node of the root that has one
        self._positions = {node: at for at, node in enumerate(scopes[0].graph.find_nodes(op="placeholder"))}
        self._by_storage: dict[int, list[fx.Node]] = {}
        for node in tensors:
            if self.is_static(node):
                for storage in storages_of(scopes[0].value_of(node)):
                    self._by_storage.setdefault(storage, []).append(node)

    def handle(self, node: fx.Node) -> int | torch.Tensor:
        """Return the position of an input among the graph's, or the tensor that the graph holds."""
        return self._positions.get(node, self.tensors[node])

    def is_static(self, node: fx.Node) -> bool:
        """True if an input is a parameter or buffer with data that can be quantized ahead of the call."""
        real = self.tensors[node]
        value = self._scopes[0].value_of(node)  # the local tensor of a DTensor, where the graph takes it
        if isinstance(real, FakeTensor) or is_traceable_wrapper_subclass(value):
            return False
        marked = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
        return node.op == "get_attr" or isinstance(real, torch.nn.Parameter) or marked

    def behind(self, scope: Scope, source: Any, mat_b: torch.Tensor) -> tuple[fx.Node | None, bool]:
        """Return (node, transposed): the weight that mat_b (E, K, N) is a view of, and True if both have one layout.

        Inputs that share their memory now need not share it at the next call. So the weight is the node that the graph
        reads, except in a scope whose GEMMs are not rewritten."""
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
        """Return the weight that a tensor of any shape shares its memory with; None without one."""
        return next((node for storage in storages_of(tensor) for node in self._by_storage.get(storage, ())), None)

    def reason_against_packing(self, weight: fx.Node) -> str | None:
        if self.tensors[weight].is_meta:
            return "the weight is on the meta device, which holds no numbers"
        storages = storages_of(self._scopes[0].value_of(weight))
        # Ask from the inside out: the innermost scope knows the name of the operation.
        reasons = (scope.program.reason_against_packing(storages) for scope in reversed(self._scopes))
        return next((reason for reason in reasons if reason is not None), None)


def find_sites(scope: Scope, weights: Weights) -> list[Site]:
    """Return the grouped GEMMs of 2-D rows and 3-D weights in a graph with example values."""
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
        sites.append(site_of(node, scope, source, weight.mT if own else weight, rows, weights))
    return sites


def site_of(
    node: fx.Node, scope: Scope, source: Any, mat_b: torch.Tensor, activation: torch.Tensor, weights: Weights
) -> Site:
    """Return the site of a GEMM with the weight mat_b (E, K, N), a view of the node `source`, with its decision.

    The activation is (M, K) for a grouped GEMM, and for a batched one (E, M, K)."""
    assert scope.program.steps  # made before anything is rewritten
    experts, k, n = mat_b.shape
    rows = activation.shape[0] if activation.ndim == 2 else None
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
        distributed=local_data(mat_b) is not mat_b,
        recipe=given(node).get("recipe"),
    )
    gemm = in_chosen_format(gemm)
    reason = decline_reason(gemm) or scope.refusal
    return Site(node, scope, gemm, weight, transposed, "it is inside a torch.func transform" if transformed else reason)


class _Graph:
    """A graph as a `SwiGLUGraph`: operations and tensors are its nodes."""

    def __init__(self, scope: Scope, sites: Iterable[Site]) -> None:
        self.scope = scope
        self.operations = scope.graph.nodes
        self.sites = {site.node: site for site in sites}

    def maker(self, tensor: Any) -> Any:
        return tensor

    def kind(self, operation: Any) -> str:
        return "" if is_in_place(operation) else kind_of(operation)

    def given(self, operation: Any) -> dict[str, Any]:
        return given(operation)

    def readers(self, operation: Any) -> set[Any]:
        return set(operation.users)

    def same(self, first: Any, second: Any) -> bool:
        return first is second

    def gemm(self, tensor: Any) -> Gemm | None:
        site = self.sites.get(tensor) if isinstance(tensor, fx.Node) else None
        if site is None or calls(tensor, "activated") or site.arguments.get("bias_scale") is not None:
            return None
        return Gemm(site, site.arguments.get("bias"), frozenset({tensor}))

    def part_of(self, tensor: Any) -> tuple[Any, str, set[Any]]:
        whole, part = part_of(tensor)
        return whole, part, set() if whole is None else {tensor, given(tensor)["input"]} - {whole}

    def reason_against_fusing(self, block: SwiGLU) -> str | None:
        rows, _, offsets = block.sites[0].operands
        read, again = {"the rows": rows, "the offsets": offsets}, value_of(rows).requires_grad
        # The fused operator's backward computes gate and up again.
        return self.scope.reason_against_fusing(
            block.replaced, block.product, read, handed_on="a projection", again=again
        )


def find_swiglu(scope: Scope, sites: Iterable[Site]) -> list[SwiGLU]:
    """Return the SwiGLUs of a graph whose GEMMs are all among the sites; one with a reason is not rewritten."""
    return swiglu.find_swiglu(_Graph(scope, sites))


def quantized_gemm(node: Any, weights: Weights, position: int) -> GroupedGemm:
    """Return names and sizes of the GEMM of an operator with packed weights, by the position of one of them."""
    rows, packed = value_of(node.args[0]), value_of(node.args[position])
    format = next(known for known in BLOCK_FORMATS.values() if packed.dtype in known.code_dtypes)
    experts, codes, n = packed.shape
    source = weights.sharing(packed)
    name = qualified_name(source) if source is not None else None
    k, m = format.codes_per_byte * int(codes), rows.shape[0] if isinstance(rows.shape[0], int) else None
    sizes = (int(experts), int(n), k, m)
    return GroupedGemm(name, *sizes, rows.dtype, rows.dtype, False, where=user_line(node), format=format.name)


def read_live_rows_alone(node: fx.Node, offsets: fx.Node) -> bool:
    """True if grouped GEMMs of the same rows alone read what becomes of a node by functions that keep rows apart."""

    def is_careful(user: fx.Node) -> bool:
        if calls(user, "grouped_mm", *_OWN):
            named = given(user)
            return named["mat_a"] is node and named.get("offs") is offsets
        keeps_rows_apart = calls(user, "silu", "mul", "chunk") or part_of(user)[0] is not None
        return keeps_rows_apart and read_live_rows_alone(user, offsets)

    return bool(node.users) and all(map(is_careful, node.users))


def part_of(node: Any) -> tuple[fx.Node | None, str]:
    """Return (whole, part): which of the two parts of the last dim of `whole` a node is: low, high, even or odd."""
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


def qualified_name(node: fx.Node) -> str:
    """Return ``layers.0.weight`` from dynamo's ``L['self']._modules['layers']._modules['0']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    parts = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", name or "")
    return ".".join(parts) if parts else str(node.target)

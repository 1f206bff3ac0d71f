"""Finds the grouped GEMMs of an FX graph, the parameters behind them, and the SwiGLUs that consume them.
Called by compilers.dynamo; calls eligibility for the decision on each GEMM.

    y = grouped_mm(x, w.transpose(-2, -1), offs)                          -> Site
    silu(grouped_mm(x, gate)) * grouped_mm(x, up)                         -> SwiGLU of two sites
    y = grouped_mm(x, gate_up); gate, up = y.chunk(2, -1); silu(gate) * up -> SwiGLU of one site, halves or interleaved
"""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from thunder_moe.compilers.eligibility import GroupedGemm, decline_reason

__all__ = [
    "MUL",
    "SILU",
    "TRANSPOSE",
    "Site",
    "SwiGLU",
    "calls",
    "find_sites",
    "find_swiglu",
    "is_mutated",
    "only_user",
    "part_of",
    "positional_grouped_mm",
    "quantized_gemm",
    "site_of",
    "traced_frame",
    "value_of",
]

aten = torch.ops.aten
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_GROUPED_MM = {torch._grouped_mm, F.grouped_mm, aten._grouped_mm, aten._grouped_mm.default}
TRANSPOSE = {torch.transpose, torch.swapaxes, torch.swapdims, aten.transpose.int, "transpose", "swapaxes", "swapdims"}
_PERMUTE = {torch.permute, aten.permute.default, "permute"}
_MT = {aten.mT, aten.mT.default}  # what Tensor.mT is traced to from torch 2.14 on
SILU = {F.silu, aten.silu.default}
MUL = {operator.mul, torch.mul, aten.mul.Tensor, "mul"}
_CHUNK = {torch.chunk, aten.chunk.default, "chunk"}
_SPLIT = {torch.split, aten.split.Tensor, "split"}
_IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem}


@dataclass(frozen=True, eq=False)
class Site:
    """A grouped GEMM of the graph.

    Attributes:
        node: its call.
        gemm: names and sizes.
        weight: the placeholder or get_attr node of the weight, None when there is none behind mat_b.
        transposed: the weight is (E, K, N), not (E, N, K).
        reason: why it stays 16-bit, None when it is rewritten.
    """

    node: fx.Node
    gemm: GroupedGemm
    weight: fx.Node | None
    transposed: bool
    reason: str | None

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """(mat_a, mat_b, offs) as they are now: a rewrite elsewhere in the graph may have replaced them."""
        arguments = _arguments(self.node)
        return arguments["mat_a"], arguments["mat_b"], arguments["offs"]


@dataclass(frozen=True, eq=False)
class SwiGLU:
    """``silu(gate) * up``, whose multiplication `product` the fused operator replaces.

    `sites` are the GEMMs of gate and up, or one GEMM of both; then `interleaved` tells whether gate and up are its
    even and odd columns rather than its halves.
    """

    sites: tuple[Site, ...]
    product: fx.Node
    interleaved: bool = False


def find_sites(graph: fx.Graph, tensors: dict[fx.Node, torch.Tensor], *, grad_enabled: bool) -> list[Site]:
    """The grouped GEMMs of 2-D rows and 3-D weights.

    Args:
        graph: as dynamo gives it to a backend, with example values.
        tensors: the real tensor of each placeholder and get_attr node that has one.
        grad_enabled: whether weights that require a gradient are being trained.
    """
    sites = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _GROUPED_MM:
            continue
        arguments = _arguments(node)
        rows, mat_b, offsets = arguments.get("mat_a"), arguments.get("mat_b"), arguments.get("offs")
        a, b = value_of(rows), value_of(mat_b)
        if a is None or b is None or a.ndim != 2 or b.ndim != 3 or offsets is None or arguments.get("bias") is not None:
            continue
        sites.append(site_of(node, mat_b, a, a.shape[0], tensors, grad_enabled, arguments.get("out_dtype")))
    return sites


def site_of(
    node: fx.Node,
    mat_b: Any,
    activation: torch.Tensor,
    rows: Any,
    tensors: dict[fx.Node, torch.Tensor],
    grad_enabled: bool,
    out_dtype: torch.dtype | None = None,
) -> Site:
    """The site of a GEMM with the weight mat_b (E, K, N), and the decision on it."""
    b = value_of(mat_b)
    source, transposed = weight_behind(mat_b)
    real = tensors.get(source) if source is not None else None
    weight = source if is_static(source, real) and not is_mutated(source) else None
    experts, k, n = b.shape
    gemm = GroupedGemm(
        weight=None if weight is None else qualified_name(weight),
        experts=int(experts),
        out_features=int(n),
        in_features=int(k),
        rows=rows if isinstance(rows, int) else None,
        weight_dtype=b.dtype,
        activation_dtype=activation.dtype,
        needs_grad=real is not None and real.requires_grad and grad_enabled,
        out_dtype=out_dtype,
        where=user_line(node),
    )
    return Site(node, gemm, weight, transposed, decline_reason(gemm))


def find_swiglu(graph: fx.Graph, sites: list[Site]) -> list[SwiGLU]:
    """The SwiGLUs whose GEMMs are all among the sites; each site is in one at most."""
    by_node = {site.node: site for site in sites}
    found = []
    for product in graph.nodes:
        if not calls(product, MUL) or len(product.args) != 2:
            continue
        for silu, up in (product.args, product.args[::-1]):
            if not (isinstance(silu, fx.Node) and isinstance(up, fx.Node) and calls(silu, SILU)):
                continue
            if not silu.args or silu.kwargs.get("inplace") or any(silu.args[1:]) or not only_user(silu, product):
                continue
            gate: Any = silu.args[0]
            if not only_user(gate, silu) or not only_user(up, product):
                continue
            block = _two_gemms(by_node, gate, up, product) or _one_gemm(by_node, gate, up, product)
            if block is not None:
                found.append(block)
                break
    return found


def quantized_gemm(node: Any) -> GroupedGemm:
    """Names and sizes of a call of one of the package's NVFP4 operators."""
    rows, fp4_weight = (value_of(argument) for argument in node.args[:2])
    experts, half, n = fp4_weight.shape
    source, _ = weight_behind(node.args[1])
    name = qualified_name(source) if source is not None else None
    sizes = (int(experts), int(n), 2 * int(half), rows.shape[0] if isinstance(rows.shape[0], int) else None)
    return GroupedGemm(name, *sizes, rows.dtype, rows.dtype, False, where=user_line(node))


def positional_grouped_mm(gm: fx.GraphModule) -> None:
    """Rewrites calls to ``torch._grouped_mm(mat_a, mat_b, offs)``: thunderfx in Thunder 0.2.6 names its arguments
    otherwise, and leaves calls with keywords to inductor without a word."""
    for node in gm.graph.find_nodes(op="call_function", target=torch._grouped_mm):
        arguments = _arguments(node)
        if arguments.get("bias") is None and arguments.get("out_dtype") is None and arguments.get("offs") is not None:
            node.args, node.kwargs = (arguments["mat_a"], arguments["mat_b"], arguments["offs"]), {}
    gm.recompile()


def _arguments(node: Any) -> dict[str, Any]:
    """The arguments of a grouped GEMM by name."""
    return dict(zip(("mat_a", "mat_b", "offs", "bias", "out_dtype"), node.args, strict=False)) | node.kwargs


def _two_gemms(by_node: dict[fx.Node, Site], gate: fx.Node, up: fx.Node, product: fx.Node) -> SwiGLU | None:
    first, second = by_node.get(gate), by_node.get(up)
    if first is None or second is None:
        return None
    (rows, _, offsets), (up_rows, _, up_offsets) = first.operands, second.operands
    same = rows is up_rows and offsets is up_offsets and first.transposed == second.transposed
    if not same or first.gemm.out_features != second.gemm.out_features:
        return None
    return SwiGLU((first, second), product)


def _one_gemm(by_node: dict[fx.Node, Site], gate: Any, up: Any, product: fx.Node) -> SwiGLU | None:
    """gate and up are the two parts of one GEMM's output, and the only ones who read it."""
    (first, gate_part), (second, up_part) = part_of(gate), part_of(up)
    site = by_node.get(first) if first is not None and first is second else None
    if site is None or (gate_part, up_part) not in (("low", "high"), ("even", "odd")):
        return None
    readers = {gate, up, *(part.args[0] for part in (gate, up))} - {site.node}
    if not set(site.node.users) <= readers or any(set(r.users) - {gate, up} for r in readers - {gate, up}):
        return None
    return SwiGLU((site,), product, interleaved=gate_part == "even")


def part_of(node: Any) -> tuple[fx.Node | None, str]:
    """(whole, part): which of the two parts of the last dim of `whole` a node is: low, high, even or odd."""
    if not calls(node, {operator.getitem}):
        return None, ""
    whole, index = node.args
    size = value_of(whole)
    if isinstance(index, int) and calls(whole, _CHUNK | _SPLIT):
        source, parts, dim = (*whole.args, *whole.kwargs.values(), 0)[:3]
        value = value_of(source)
        if value is None or dim not in (-1, value.ndim - 1) or not isinstance(parts, int) or value.shape[-1] % 2:
            return None, ""
        if parts != (2 if calls(whole, _CHUNK) else value.shape[-1] // 2):
            return None, ""
        return source, ("low", "high")[index]
    if not isinstance(index, tuple) or size is None or not isinstance(index[-1], slice):
        return None, ""
    leading = index[:-1]
    if not (leading == (...,) or leading == (slice(None),) * (size.ndim - 1)):
        return None, ""
    width = size.shape[-1]
    if width % 2:
        return None, ""
    start, stop, step = index[-1].start or 0, index[-1].stop, index[-1].step or 1
    stop = width if stop is None else stop
    parts = {
        (0, width // 2, 1): "low",
        (width // 2, width, 1): "high",
        (0, width, 2): "even",
        (1, width, 2): "odd",
    }
    part = parts.get((start, stop, step), "")
    return (whole, part) if part else (None, "")


def weight_behind(node: Any) -> tuple[fx.Node | None, bool]:
    """(source, transposed): the placeholder or attribute behind swaps of the last two dims of mat_b (E, K, N), and
    whether it lies as mat_b does."""
    transposed = True
    while isinstance(node, fx.Node):
        if node.op in ("placeholder", "get_attr"):
            return node, transposed
        source = _swapped(node)
        if source is None:
            return None, transposed
        node, transposed = source, not transposed
    return None, transposed


def _swapped(node: Any) -> Any:
    """What a node swaps the last two of three dims of, None when it does something else."""
    if calls(node, _MT) or (calls(node, {getattr}) and node.args[1] == "mT"):
        return node.args[0]
    source, *dims = (*node.args, *node.kwargs.values()) or (None,)
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = list(dims[0])
    if not all(isinstance(dim, int) for dim in dims):
        return None
    dims = [dim % 3 for dim in dims]
    if (calls(node, TRANSPOSE) and set(dims) == {1, 2}) or (calls(node, _PERMUTE) and dims == [0, 2, 1]):
        return source
    return None


def calls(node: Any, targets: set) -> bool:
    """Whether a node calls one of some functions, or a method of one of some names."""
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in targets


def only_user(node: fx.Node, user: fx.Node) -> bool:
    return set(node.users) == {user}


def value_of(node: Any) -> Any:
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None


def is_static(node: fx.Node | None, real: torch.Tensor | None) -> bool:
    """Whether a node is a parameter or buffer with data that can be quantised ahead of the call."""
    if node is None or real is None or isinstance(real, FakeTensor):
        return False
    marked = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    return node.op == "get_attr" or isinstance(real, torch.nn.Parameter) or marked


def is_mutated(node: Any) -> bool:
    """Whether the graph itself changes a tensor in place: what was packed before the call would be out of date."""
    users = list(node.users)
    for user in users:
        name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        name = name.removesuffix(".default").removesuffix(".Tensor")
        in_place = name.endswith("_") and not name.endswith("__")
        if user.args and user.args[0] is node and (in_place or user.target in _IN_PLACE_OPERATORS):
            return True
        if _swapped(user) is node and is_mutated(user):
            return True
    return False


def qualified_name(node: fx.Node) -> str:
    """``layers.0.weight`` from dynamo's ``L['self']._modules['layers']._modules['0']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    parts = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", name or "")
    return ".".join(parts) if parts else str(node.target)


def traced_frame(graph: fx.Graph) -> tuple[str, int] | None:
    """File and line of the code that dynamo traced the graph from, as its first node tells."""
    traces = (_frames(node) for node in graph.nodes)
    return next((frames[0] for frames in traces if frames), None)


def user_line(node: fx.Node) -> str | None:
    """file:line of the innermost frame outside of torch and of this package."""
    for path, line in reversed(_frames(node)):
        if not path.startswith((torch.__path__[0], _PACKAGE)):
            inside = path.startswith(os.getcwd() + os.sep)
            return f"{os.path.relpath(path) if inside else path}:{line}"
    return None


def _frames(node: fx.Node) -> list[tuple[str, int]]:
    """(file, line) of each frame of a node's stack, the outermost first."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return [(path, int(line)) for path, line in found]

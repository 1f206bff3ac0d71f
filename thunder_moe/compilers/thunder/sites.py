"""Finds the grouped GEMMs of a computation trace, the parameters behind them, and the SwiGLUs that consume them.
Called by rewrite.py; calls trace.py for views and storages, eligibility.py for the decision on each GEMM, and
swiglu.py for what a SwiGLU looks like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import thunder.core.dtypes as dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.torch.experimental.dtensor_proxy import is_dtensor_proxy

from thunder_moe.compilers import swiglu
from thunder_moe.compilers.eligibility import QUANTIZED, GroupedGemm, decline_reason, in_chosen_format
from thunder_moe.compilers.safety import is_hidden_training_forward
from thunder_moe.compilers.spellings import column_part
from thunder_moe.compilers.swiglu import Gemm, SwiGLU
from thunder_moe.compilers.thunder import nvfuser
from thunder_moe.compilers.thunder.symbols import grouped_mm
from thunder_moe.compilers.thunder.trace import Computation, spelled
from thunder_moe.compilers.thunder.training_symbols import activated_linear, grouped_bias
from thunder_moe.ops.operator import OPERATORS


@dataclass(frozen=True, eq=False)
class Site:
    """A grouped GEMM of the trace."""

    bsym: BoundSymbol  # its symbol
    position: int  # the position in the trace of the symbol, or of the symbol that contains it
    gemm: GroupedGemm  # names and sizes
    weight: TensorProxy | None  # the computation's argument that holds the weight, None if none does
    transposed: bool  # that argument is (E, K, N), not (E, N, K)
    reason: str | None  # why it stays 16-bit, None if it is rewritten
    grad_enabled: bool  # the grad mode in force at the GEMM
    # True for GroupedLinear and GroupedMLP, whose results are zero past the last row end
    is_thunder_moe_op: bool = False

    @property
    def operands(self) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
        """Return (rows, weight, offsets)."""
        rows, weight, offsets = self.bsym.args[:3]
        return rows, weight, offsets

    @property
    def requires_grad(self) -> bool:
        """True if the weight requires a gradient, in any grad mode."""
        return self.weight is not None and self.weight.requires_grad


def find_sites(prologue: TraceCtx, computation: Computation) -> list[Site]:
    """Return the grouped GEMMs of a trace, also those inside of other symbols."""
    names, sites = _qualified_names(prologue), []
    for position, bsym in enumerate(computation.bound_symbols):
        for call in _grouped_mms(bsym):
            inside = None if call is bsym else bsym.sym.name
            sites.append(_site(computation, names, call, position, inside))
    return sites


def _grouped_mms(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    if bsym.sym.id in (grouped_mm.id, activated_linear.id):
        yield bsym
    for sub in bsym.subsymbols:
        yield from _grouped_mms(sub)


def _site(
    computation: Computation, names: dict[str, str], bsym: BoundSymbol, position: int, inside: str | None
) -> Site:
    a, b = bsym.args[:2]
    behind = computation.argument_behind(b.name)
    weight = behind[0] if behind is not None and _is_static(behind[0]) else None
    trained = bsym.sym.id == activated_linear.id  # its weight is (E, N, K), and it stays as it is
    program, (experts, *sizes) = computation.program, b.shape
    n, k = sizes if trained else sizes[::-1]
    grad_enabled = program.steps[position].grad_enabled
    requires_grad = weight is not None and weight.requires_grad
    gemm = GroupedGemm(
        weight=None if weight is None else names.get(weight.name, weight.name),
        experts=experts,
        out_features=n,
        in_features=k,
        rows=a.shape[0],
        weight_dtype=dtypes.to_torch_dtype(b.dtype),
        activation_dtype=dtypes.to_torch_dtype(a.dtype),
        needs_grad=requires_grad and grad_enabled,
        out_dtype=None if trained else bsym.args[3] if len(bsym.args) > 3 else bsym.kwargs.get("out_dtype"),
        hidden_training=requires_grad and is_hidden_training_forward(),
        changed=None if weight is None else program.reason_against_packing([computation.storage(weight.name)]),
        distributed=is_dtensor_proxy(b),
        recipe=bsym.args[5] if trained and len(bsym.args) > 5 else None,
    )
    gemm = in_chosen_format(gemm)
    reason = decline_reason(gemm)
    if reason is None and inside is not None:
        reason = f"it is a part of {inside}, which has a backward of its own"
    if trained and reason is None:
        reason = "the weight is trainable, or a copy of one that is"
    own = trained or (len(bsym.args) > 4 and bool(bsym.args[4]))
    return Site(bsym, position, gemm, weight, behind is None or not behind[1], reason, grad_enabled, own)


def trained_weights(computation: Computation) -> list[TensorProxy]:
    """Return the weights of experts that the computation reads in a training forward."""
    reads = [step.reads for step in computation.program.steps if step.grad_enabled or is_hidden_training_forward()]
    read = frozenset[object]().union(*reads)
    return [
        arg
        for name, arg in computation.arguments.items()
        if _is_static(arg) and arg.requires_grad and arg.ndim == 3 and computation.storage(name) in read
    ]


class _Graph:
    """A computation as a `SwiGLUGraph`: operations are positions, tensors its proxies."""

    def __init__(self, computation: Computation, sites: Iterable[Site]) -> None:
        self.computation = computation
        self.symbols = computation.bound_symbols
        self.operations = range(len(self.symbols))
        self.sites: dict[Any, Site] = {site.bsym.output.name: site for site in sites}

    def maker(self, tensor: Any) -> int | None:
        return self.computation.position.get(tensor.name) if isinstance(tensor, TensorProxy) else None

    def kind(self, operation: Any) -> str:
        bsym = None if operation is None else self.symbols[operation]
        return "" if bsym is None or bsym.sym.name == "mul_" else spelled(bsym)[0]

    def given(self, operation: Any) -> dict[str, Any]:
        return spelled(self.symbols[operation])[1]

    def readers(self, operation: Any) -> set[int]:
        readers = self.computation.readers
        return set().union(*(readers.get(proxy.name, ()) for proxy in self.symbols[operation].flat_proxy_outs))

    def same(self, first: Any, second: Any) -> bool:
        names = [None if each is None else self.computation.same(each.name) for each in (first, second)]
        return names[0] == names[1]

    def gemm(self, tensor: Any) -> Gemm | None:
        bias, operations, at = None, set[int](), self.maker(tensor)
        if at is not None and self.symbols[at].sym.id == grouped_bias.id:
            tensor, _, bias, bias_scale, factor = self.symbols[at].args
            operations.add(at)
            if bias is None or bias_scale is not None or factor is not None:
                return None
        site = self.sites.get(tensor.name) if isinstance(tensor, TensorProxy) else None
        return None if site is None else Gemm(site, bias, frozenset({*operations, site.position}))

    def part_of(self, tensor: Any) -> tuple[Any, str, set[Any]]:
        leaf = self.computation.leaf.get(tensor.name) if isinstance(tensor, TensorProxy) else None
        if leaf is None or leaf.sym.id != PrimIDs.SLICE:
            return None, "", set()
        whole, starts, ends, *strides = leaf.args
        shape, steps = tuple(whole.shape), strides[0] if strides and strides[0] else [1] * whole.ndim
        if any(start != 0 for start in starts[:-1]) or tuple(ends[:-1]) != shape[:-1] or set(steps[:-1]) > {1}:
            return None, "", set()
        return whole, column_part(shape[-1], starts[-1], ends[-1], steps[-1]), {self.maker(tensor)}

    def reason_against_fusing(self, block: SwiGLU) -> str | None:
        rows, _, offsets = block.sites[0].operands
        read = {"the tensor of rows": rows, "the tensor of offsets": offsets}
        made = {"the output of a GEMM": block.replaced - {block.product}}
        saved = read if self.computation.program.steps[block.product].grad_enabled else ()
        return self.computation.reason_against_fusing(block.replaced, read, made, saved)


def find_swiglu(computation: Computation, sites: list[Site]) -> list[SwiGLU]:
    """Return the SwiGLUs of a trace whose GEMMs are all among the sites; each site is in one at most."""
    graph = _Graph(computation, sites)
    biased = {at for at, bsym in enumerate(graph.symbols) if bsym.sym.id == grouped_bias.id}
    # For GEMMs with a bias, only our activation is fused.
    found = swiglu.find_swiglu(graph)
    return [block for block in found if graph.kind(block.product) != "mul" or not biased & block.replaced]


@dataclass(frozen=True, eq=False)
class Quantized:
    """A packed weight of a module that quantize_ had swapped in already."""

    position: int
    bsym: BoundSymbol
    gemm: GroupedGemm
    decision: str


def find_quantized(prologue: TraceCtx, computation: Computation) -> list[Quantized]:
    """Return the weights of a trace that are packed already."""
    names, found = _qualified_names(prologue), []
    for at, bsym in enumerate(computation.bound_symbols):
        for argument, decision in QUANTIZED.get(bsym.sym.name, ()):
            rows, packed, format = bsym.args[0], bsym.args[argument], OPERATORS[bsym.sym.name].format
            (experts, codes, n), dtype = packed.shape, dtypes.to_torch_dtype(rows.dtype)
            # Behind the views of a module's buffer in another layout than "linear".
            name = names.get(origin := computation.origin(packed.name), origin)
            sizes = experts, n, format.codes_per_byte * codes, rows.shape[0]
            gemm = GroupedGemm(name, *sizes, dtype, dtype, False, format=format.name)
            found.append(Quantized(at, bsym, gemm, decision))
    return found


def linear_buffers(computation: Computation, bsym: BoundSymbol) -> tuple[TensorProxy, ...] | None:
    """Return qdata, scale and global_scale of a call of an NVFP4 operator, if they are unchanged parameters or buffers
    in layout "linear"; None otherwise."""
    qdata, swapped = computation.argument_behind(bsym.args[1].name) or (None, False)
    if not swapped or not nvfuser.is_plain(bsym.sym, *bsym.args, **bsym.kwargs):
        return None
    buffers = (qdata, *bsym.args[2:4])
    fixed = all(proxy.name in computation.arguments and _is_static(proxy) for proxy in buffers)
    changed = computation.program.reason_against_packing([computation.storage(proxy.name) for proxy in buffers])
    return buffers if fixed and changed is None else None


def _is_static(proxy: TensorProxy) -> bool:
    """True if an argument is a parameter or buffer, with data that can be quantized ahead of the call."""
    return isinstance(proxy, TensorProxy) and ProxyTag.STATIC_MEMORY_LOCATION in proxy.tags


def _qualified_names(prologue: TraceCtx) -> dict[str, str]:
    """Return a dict: proxy name -> the name of the parameter or buffer that the prologue fetches into it."""
    fetches = (PrimIDs.UNPACK_PARAMETER, PrimIDs.UNPACK_BUFFER)
    return {bsym.output.name: bsym.args[1] for bsym in prologue.bound_symbols if bsym.sym.id in fetches}

"""Recognizes the SwiGLUs that consume grouped GEMMs, in the programs of both compilers.
Called by dynamo/sites.py and thunder/sites.py, each with its program as a `SwiGLUGraph`; calls spellings.py.

    silu(gate GEMM) * up GEMM                               a SwiGLU of two sites
    gate, up = y.chunk(2, -1); silu(gate) * up              a SwiGLU of one site, the GEMM y
    scaled_activation(y, scales)                            a SwiGLU of one site
    activated_grouped_linear(y, down, offsets)              a SwiGLU of one site, and its down projection
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from thunder_moe.compilers.spellings import Operations, is_interleaved


class Gemm(NamedTuple):
    """A site with the bias that is added to its result, and the operations of both."""

    site: Any
    bias: Any
    operations: frozenset[Any]


class SwiGLUGraph(Operations, Protocol):
    """A program, with the GEMMs that may be fused. Operations in place have the kind ""."""

    @property
    def operations(self) -> Iterable[Any]:
        """Return all operations, in order."""

    @property
    def sites(self) -> Mapping[Any, Any]:
        """Return the GEMMs that may be fused, by their results."""

    def readers(self, operation: Any) -> set[Any]:
        """Return the operations that read a result of one."""

    def same(self, first: Any, second: Any) -> bool:
        """True if two tensors are one, or both are None."""

    def gemm(self, tensor: Any) -> Gemm | None:
        """Return the GEMM that makes a tensor; None for others, and where its bias is scaled or its rows activated."""

    def part_of(self, tensor: Any) -> tuple[Any, str, set[Any]]:
        """Return (whole, part, operations): which part of the last dim of `whole` a tensor is, low, high, even or odd,
        and what takes it; (None, "", set()) for other tensors."""

    def reason_against_fusing(self, block: SwiGLU) -> str | None:
        """Return why the operations of a SwiGLU may not run as one where its product is; None: they may."""


@dataclass(frozen=True, eq=False)
class SwiGLU:
    """``silu(gate) * up``, whose last operation the fused operator replaces."""

    sites: tuple[Any, ...]  # the GEMMs of gate and up, or one GEMM of both
    product: Any  # the operation that makes the result
    replaced: frozenset[Any]  # all of its operations, with `product` and the GEMMs
    interleaved: int = 0  # for one GEMM: the number of columns by which gate and up alternate, 0 if they are its halves
    bias: Any = None  # for one GEMM: its bias (E, 2I)
    form: dict[str, Any] = field(default_factory=dict)  # the keywords of the activation where it is not SwiGLU
    scales: Any = None  # a factor of the rows of the product
    down: Any = None  # the site of the product, where it is a GEMM of ours on activated rows
    reason: str | None = None  # why these operations cannot be one operator, None if they become it


def find_swiglu(graph: SwiGLUGraph) -> list[SwiGLU]:
    """Return the SwiGLUs whose GEMMs are all among a graph's sites; each site is in one at most."""
    found: list[SwiGLU] = []
    for product in graph.operations if graph.sites else ():
        kind = graph.kind(product)
        written = _as_written(graph, product) if kind == "mul" else ()
        blocks = _of_operator(graph, product, kind) if kind in ("activation", "activated") else written
        whole = (block for block in blocks if _is_read_inside_alone(graph, block))
        found += [replace(block, reason=graph.reason_against_fusing(block)) for block in whole][:1]
    return found


def _of_operator(graph: SwiGLUGraph, product: Any, kind: str) -> Iterator[SwiGLU]:
    """Yield the SwiGLU that an operator of ours computes, alone or before the GEMM of the down projection."""
    named = graph.given(product)
    if named.get("kind", "swiglu") != "swiglu":
        return
    gemm, down, offsets = graph.gemm(named["mat_a"]), graph.sites.get(product), named.get("offs")
    if gemm is None or not gemm.site.is_thunder_moe_op or (kind == "activated" and down is None):
        return
    if offsets is not None and not graph.same(gemm.site.operands[2], offsets):
        return
    form: dict[str, Any] = {name: named[name] for name in ("alpha", "limit", "up_shift") if name in named}
    replaced, interleaved = gemm.operations | {product}, named.get("interleave", 0)
    yield SwiGLU((gemm.site,), product, replaced, interleaved, gemm.bias, form, named.get("scales"), down)


def _as_written(graph: SwiGLUGraph, product: Any) -> Iterator[SwiGLU]:
    """Yield the SwiGLUs that a product may be: of two GEMMs, of the parts of one, and in both orders."""
    factors = tuple(graph.given(product).values())
    for activated, up in (factors, factors[::-1]) if len(factors) == 2 else ():
        silu = graph.maker(activated)
        if graph.kind(silu) != "silu" or graph.given(silu).get("inplace"):
            continue
        gate = graph.given(silu)["input"]
        first, second = graph.gemm(gate), graph.gemm(up)
        if first is not None and second is not None and _can_be_stacked(graph, first, second):
            replaced = first.operations | second.operations | {silu, product}
            yield SwiGLU((first.site, second.site), product, replaced)
        (whole, low, takes_low), (other, high, takes_high) = graph.part_of(gate), graph.part_of(up)
        interleaved = is_interleaved(low, high)
        gemm = graph.gemm(whole) if interleaved is not None and graph.same(whole, other) else None
        if gemm is not None:
            replaced = gemm.operations | takes_low | takes_high | {silu, product}
            yield SwiGLU((gemm.site,), product, replaced, int(bool(interleaved)), gemm.bias)


def _can_be_stacked(graph: SwiGLUGraph, gate: Gemm, up: Gemm) -> bool:
    """True if one GEMM with both weights gives what two of them do."""
    first, second = gate.site, up.site
    alike = (first.is_thunder_moe_op, first.transposed, first.gemm.out_features, gate.bias is None) == (
        second.is_thunder_moe_op, second.transposed, second.gemm.out_features, up.bias is None,
    )  # fmt: skip
    (rows, _, offsets), (other_rows, _, other_offsets) = first.operands, second.operands
    return alike and first is not second and graph.same(rows, other_rows) and graph.same(offsets, other_offsets)


def _is_read_inside_alone(graph: SwiGLUGraph, block: SwiGLU) -> bool:
    """True if no operation outside of a SwiGLU reads its intermediate results."""
    return all(graph.readers(operation) <= block.replaced for operation in block.replaced - {block.product})

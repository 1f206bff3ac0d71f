"""The rewrite of Thunder's traces: frozen expert GEMMs -> NVFP4 symbols, their weights packed in the prologue.
Called by Thunder (thunder_executor attaches it while tracing); calls eligibility, thunder_symbols and report.

find grouped GEMMs -> decide on each -> pair gate and up with their SwiGLU -> pack weights in the prologue -> rewrite
the computation -> record what was done. It runs before autodiff, so the backward is made from the rewritten trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thunder_moe.compilers.compat import import_thunder

import_thunder()

import thunder.core.dtypes as dtypes  # noqa: E402
import thunder.torch as ltorch  # noqa: E402
from thunder.core import prims, utils  # noqa: E402
from thunder.core.compile_data import get_compile_data  # noqa: E402
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy  # noqa: E402
from thunder.core.pytree import tree_iter  # noqa: E402
from thunder.core.symbol import BoundSymbol  # noqa: E402
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx  # noqa: E402
from thunder.core.transform_common import Transform  # noqa: E402

from thunder_moe.compilers.eligibility import Decision, GroupedGemm, decline_reason, describe  # noqa: E402
from thunder_moe.compilers.report import record  # noqa: E402
from thunder_moe.compilers.thunder_symbols import (  # noqa: E402
    grouped_mm,
    nvfp4_grouped_mm,
    nvfp4_grouped_swiglu,
    nvfp4_pack,
    pack_meta,
)

__all__ = ["NVFP4Rewrite"]


@dataclass(frozen=True, eq=False)
class _Site:
    """A grouped GEMM of the trace. `weight` is the computation's argument that holds the weight, None if none does;
    `transposed`: that argument is (E, K, N)."""

    bsym: BoundSymbol
    gemm: GroupedGemm
    weight: TensorProxy | None  # set where reason is None
    transposed: bool
    reason: str | None


@dataclass(frozen=True, eq=False)
class _SwiGLU:
    """``silu(gate GEMM) * up GEMM``; `product` is the multiplication that the fused symbol replaces."""

    gate: _Site
    up: _Site
    silu: BoundSymbol
    product: BoundSymbol


class NVFP4Rewrite(Transform):
    """Rewrites what `eligibility.decline_reason` lets through. It keeps no state: one instance serves all traces."""

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        sites = list(_find_sites(prologue_trace, computation_trace))
        blocks = _find_swiglu(computation_trace, [site for site in sites if site.reason is None])
        fused = {id(site) for block in blocks for site in (block.gate, block.up)}
        decisions = [
            describe(
                site.gemm,
                site.reason,
                requires_grad=site.weight is not None and site.weight.requires_grad,
                fused=id(site) in fused,
            )
            for site in sites
        ]
        record(get_compile_data(), decisions + _quantized_before(computation_trace, prologue_trace))
        singles = [site for site in sites if site.reason is None and id(site) not in fused]
        if not singles and not blocks:
            return prologue_trace, computation_trace, epilogue_trace
        packs: dict[tuple, _Pack] = {}
        replacements: dict[int, BoundSymbol | None] = {}
        trace = from_trace(computation_trace)
        with tracectx(trace):
            for site in singles:
                a, _, offsets = site.bsym.args[:3]
                packed = _pack(packs, site)
                replacements[id(site.bsym)] = nvfp4_grouped_mm.bind(a, *packed, offsets, output=site.bsym.output)
            for block in blocks:
                a, _, offsets = block.gate.bsym.args[:3]
                packed = _pack(packs, block.gate, block.up)
                new = nvfp4_grouped_swiglu.bind(a, *packed, offsets, output=block.product.output)
                replacements[id(block.product)] = new
                replacements |= {id(dead): None for dead in (block.gate.bsym, block.up.bsym, block.silu)}
        arguments = _fill_computation(trace, computation_trace, replacements, list(packs.values()))
        return _rewrite_prologue(prologue_trace, list(packs.values()), arguments), trace, epilogue_trace


@dataclass(frozen=True, eq=False)
class _Pack:
    """One call of nvfp4_pack in the prologue: 16-bit weights in, the operators' three weight arguments out."""

    names: str
    weights: tuple[TensorProxy, ...]
    transposed: bool
    packed: tuple[TensorProxy, ...]


def _pack(packs: dict[tuple, _Pack], *sites: _Site) -> tuple[TensorProxy, ...]:
    """The packed form of the sites' weights, stacked along their rows; made once and kept in `packs`."""
    weights = tuple(site.weight for site in sites if site.weight is not None)
    transposed = sites[0].transposed
    key = (transposed, *(weight.name for weight in weights))
    if key not in packs:
        stem = "_and_".join(weight.name for weight in weights)
        likes = pack_meta(*weights, transposed=transposed)
        options = dict(device=weights[0].device, requires_grad=False, tags={ProxyTag.STATIC_MEMORY_LOCATION})
        packed = tuple(
            TensorProxy(name=f"{stem}_{part}", shape=like.shape, dtype=like.dtype, **options)
            for part, like in zip(("fp4", "scale", "global_scale"), likes, strict=True)
        )
        packs[key] = _Pack(" and ".join(str(site.gemm.weight) for site in sites), weights, transposed, packed)
    return packs[key].packed


def _find_sites(prologue: TraceCtx, computation: TraceCtx) -> Iterator[_Site]:
    producers = utils.producers(computation)
    arguments = {arg.name for arg in computation.args}
    names = _qualified_names(prologue)
    grad_enabled = get_compile_data().is_grad_enabled
    for bsym in computation.bound_symbols:
        if bsym.sym.id != grouped_mm.id:
            continue
        a, b = bsym.args[:2]
        out_dtype = bsym.args[3] if len(bsym.args) > 3 else bsym.kwargs.get("out_dtype")
        source, transposed = b, True
        producer = producers.get(b, None)
        if producer is not None and _swaps_last_dims(producer):
            source, transposed = producer.flat_proxy_args[0], False
        static = source.name in arguments and ProxyTag.STATIC_MEMORY_LOCATION in source.tags
        experts, k, n = b.shape
        gemm = GroupedGemm(
            weight=names.get(source.name, source.name) if static else None,
            experts=experts,
            out_features=n,
            in_features=k,
            rows=a.shape[0],
            weight_dtype=dtypes.to_torch_dtype(b.dtype),
            activation_dtype=dtypes.to_torch_dtype(a.dtype),
            needs_grad=bool(source.requires_grad and grad_enabled),
            out_dtype=out_dtype,
        )
        yield _Site(bsym, gemm, source if static else None, transposed, decline_reason(gemm))


def _find_swiglu(computation: TraceCtx, sites: list[_Site]) -> list[_SwiGLU]:
    consumers = utils.consumers(computation)
    producers = utils.producers(computation)
    by_output = {site.bsym.output.name: site for site in sites}
    blocks = []
    for product in computation.bound_symbols:
        if product.sym.id != ltorch.mul.id or len(product.flat_proxy_args) != 2:
            continue
        for activated, other in (product.args, product.args[::-1]):
            silu = producers.get(activated, None)
            if silu is None or silu.sym.id != ltorch.silu.id or any(silu.args[1:]):  # not in place
                continue
            gate, up = by_output.get(silu.args[0].name), by_output.get(other.name)
            if gate is None or up is None or gate is up or not _same_operands(gate, up):
                continue
            intermediates = (gate.bsym.output, up.bsym.output, activated)
            if all(len(consumers[proxy]) == 1 for proxy in intermediates):
                blocks.append(_SwiGLU(gate, up, silu, product))
                break
    return blocks


def _same_operands(gate: _Site, up: _Site) -> bool:
    """Whether two GEMMs have the same rows and offsets, and weights that can be stacked."""
    same_rows, same_offsets = (gate.bsym.args[i].name == up.bsym.args[i].name for i in (0, 2))
    same_form = gate.transposed == up.transposed and gate.gemm.out_features == up.gemm.out_features
    return same_rows and same_offsets and same_form


def _quantized_before(computation: TraceCtx, prologue: TraceCtx) -> list[Decision]:
    """The NVFP4 symbols of modules that quantize_ had swapped in already."""
    names, producers = _qualified_names(prologue), utils.producers(computation)
    found = []
    for bsym in computation.bound_symbols:
        if bsym.sym.id not in (nvfp4_grouped_mm.id, nvfp4_grouped_swiglu.id):
            continue
        a, fp4_weight = bsym.args[:2]
        producer = producers.get(fp4_weight, None)
        source = fp4_weight if producer is None or not producer.flat_proxy_args else producer.flat_proxy_args[0]
        dtype = dtypes.to_torch_dtype(a.dtype)
        experts, half, n = fp4_weight.shape
        gemm = GroupedGemm(names.get(source.name, source.name), experts, n, 2 * half, a.shape[0], dtype, dtype, False)
        found.append(
            (gemm, "nvfp4" if bsym.sym.id == nvfp4_grouped_mm.id else "nvfp4 + swiglu", "quantised beforehand")
        )
    return found


def _fill_computation(
    new: TraceCtx, old: TraceCtx, replacements: dict[int, BoundSymbol | None], packs: list[_Pack]
) -> list[Any]:
    """Writes the rewritten computation into `new` and returns its arguments: the packed weights take the places of
    those 16-bit weights that nothing reads any more."""
    replaced = (replacements.get(id(bsym), bsym) for bsym in old.bound_symbols)
    body = [bsym for bsym in replaced if bsym is not None]
    unread = {weight.name for pack in packs for weight in pack.weights}
    # A transpose whose result nobody reads is dead; it would keep its weight alive.
    read = _names_read(body)
    body = [bsym for bsym in body if not (_swaps_last_dims(bsym) and bsym.output.name not in read)]
    unread -= _names_read(body)
    proxies = [proxy for pack in packs for proxy in pack.packed]
    arguments = [arg for arg in old.args if arg.name not in unread] + proxies
    new.args = tuple(arguments)
    new._siginfo.args = [(arg.name, None) for arg in arguments]
    out = [prims.unpack_trivial.bind(proxy, output=proxy, name=proxy.name) for proxy in proxies]
    for bsym in body:
        if bsym.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and bsym.output.name in unread:
            continue
        if bsym.sym.id == prims.PrimIDs.RETURN and isinstance(bsym.args[0], dict):
            # Thunder hands flat_args to autograd beside the computation's arguments: they have to agree.
            bsym = bsym.from_bsym(args=({**bsym.args[0], "flat_args": arguments},))
        out.append(bsym)
    new.bound_symbols = out
    new.set_provenance(TraceProvenance("NVFP4 rewrite of expert GEMMs (thunder_moe)"))
    return arguments


def _rewrite_prologue(old: TraceCtx, packs: list[_Pack], arguments: list[Any]) -> TraceCtx:
    """Packs the weights at the end of the prologue, where the parameters are checked and at hand."""
    new = from_trace(old)
    for proxy in (proxy for pack in packs for proxy in pack.packed):
        new.add_name(proxy.name)
    with tracectx(new):
        calls = [
            nvfp4_pack.bind(*pack.weights, transposed=pack.transposed, names=pack.names, output=pack.packed)
            for pack in packs
        ]
    *body, result = old.bound_symbols
    _, to_epilogue = result.args[0]
    new.bound_symbols = [*body, *calls, result.from_bsym(args=((tuple(arguments), to_epilogue),))]
    new.set_provenance(TraceProvenance("NVFP4 weights packed (thunder_moe)"))
    return new


def _names_read(body: list[BoundSymbol]) -> set[str]:
    """Names of the proxies that the computation needs: read by a symbol, or part of its output."""
    names: set[str] = set()
    for bsym in body:
        proxies = bsym.flat_proxy_args
        if bsym.sym.id == prims.PrimIDs.UNPACK_TRIVIAL:
            continue
        if bsym.sym.id == prims.PrimIDs.RETURN and isinstance(bsym.args[0], dict):
            # flat_args, beside the output, lists every argument without needing it.
            proxies = [leaf for leaf in tree_iter(bsym.args[0]["output"]) if isinstance(leaf, Proxy)]
        names.update(proxy.name for proxy in proxies)
    return names


def _swaps_last_dims(bsym: BoundSymbol) -> bool:
    """Whether a symbol (transpose, permute, mT, ...) is one swap of the last two of three dims, and nothing more."""
    leaves = list(_leaves(bsym))
    if len(leaves) != 1 or leaves[0].sym.id != prims.PrimIDs.TRANSPOSE:
        return False
    return tuple(leaves[0].args[1]) == (0, 2, 1)


def _leaves(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    if not bsym.subsymbols:
        yield bsym
    for sub in bsym.subsymbols:
        yield from _leaves(sub)


def _qualified_names(prologue: TraceCtx) -> dict[str, str]:
    """Proxy name -> the name of the parameter or buffer that the prologue fetches into it."""
    fetches = (prims.PrimIDs.UNPACK_PARAMETER, prims.PrimIDs.UNPACK_BUFFER)
    return {bsym.output.name: bsym.args[1] for bsym in prologue.bound_symbols if bsym.sym.id in fetches}

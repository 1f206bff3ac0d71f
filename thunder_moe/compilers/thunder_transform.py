"""The rewrite of Thunder's traces: frozen expert GEMMs -> NVFP4 symbols, their weights packed in the prologue.
Called by Thunder (thunder_executor attaches it while tracing); calls eligibility, thunder_symbols, nvfuser and report.

find grouped GEMMs -> decide on each -> pair gate and up with their SwiGLU -> pack weights in the prologue, as nvFuser
takes them where it runs the GEMM, else as our kernels read them best -> rewrite the computation -> record what was
done. It runs before autodiff, so the backward is made from the rewritten trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from thunder_moe.compilers.compat import import_thunder

import_thunder()

import thunder.core.dtypes as dtypes  # noqa: E402
import thunder.torch as ltorch  # noqa: E402
from thunder.core import prims, utils  # noqa: E402
from thunder.core.compile_data import get_compile_data, get_compile_option  # noqa: E402
from thunder.core.devices import to_torch_device  # noqa: E402
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy  # noqa: E402
from thunder.core.pytree import tree_iter  # noqa: E402
from thunder.core.symbol import BoundSymbol, Symbol  # noqa: E402
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx  # noqa: E402
from thunder.core.transform_common import Transform  # noqa: E402

from thunder_moe.compilers import nvfuser  # noqa: E402
from thunder_moe.compilers.eligibility import Decision, GroupedGemm, decline_reason, describe  # noqa: E402
from thunder_moe.compilers.report import record  # noqa: E402
from thunder_moe.compilers.thunder_symbols import (  # noqa: E402
    grouped_mm,
    nvfp4_combine,
    nvfp4_grouped_mm,
    nvfp4_grouped_swiglu,
    nvfp4_pack,
    nvfp4_swizzle,
)
from thunder_moe.compilers.weight_cache import stacked_layout  # noqa: E402

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
        singles = [site for site in sites if site.reason is None and id(site) not in fused]
        before = _find_quantized(prologue_trace, computation_trace)
        packs: dict[tuple, _Pack] = {}
        replacements: dict[int, list[BoundSymbol]] = {}
        routes: dict[int, str] = {}
        trace = from_trace(computation_trace)
        with tracectx(trace):
            for site in singles:
                replacements[id(site.bsym)], routes[id(site)] = _replace(packs, nvfp4_grouped_mm, site.bsym, site)
            for block in blocks:
                new, route = _replace(packs, nvfp4_grouped_swiglu, block.product, block.gate, block.up)
                replacements[id(block.product)] = new
                replacements |= {id(dead): [] for dead in (block.gate.bsym, block.up.bsym, block.silu)}
                routes |= {id(site): route for site in (block.gate, block.up)}
            for quantized in before:
                new, routes[id(quantized)] = _replace_quantized(packs, quantized)
                replacements |= {id(quantized.bsym): new} if new else {}
        decisions = [_describe(site, fused=id(site) in fused, route=routes.get(id(site), "")) for site in sites]
        decisions += [(q.gemm, q.decision, f"quantised beforehand{routes[id(q)]}") for q in before]
        record(get_compile_data(), decisions)
        if not replacements:
            return prologue_trace, computation_trace, epilogue_trace
        arguments = _fill_computation(trace, computation_trace, replacements, list(packs.values()))
        return _rewrite_prologue(prologue_trace, list(packs.values()), arguments), trace, epilogue_trace


def _describe(site: _Site, *, fused: bool, route: str) -> Decision:
    requires_grad = site.weight is not None and site.weight.requires_grad
    gemm, decision, reason = describe(site.gemm, site.reason, requires_grad=requires_grad, fused=fused)
    return gemm, decision, reason + route


@dataclass(frozen=True, eq=False)
class _Pack:
    """A call of nvfp4_pack or nvfp4_swizzle in the prologue: weights in, the operators' three weight arguments out."""

    symbol: Symbol
    weights: tuple[TensorProxy, ...]
    options: dict[str, Any]
    packed: tuple[TensorProxy, ...] = ()  # once it is part of the prologue


def _replace(
    packs: dict[tuple, _Pack], symbol: Symbol, replaced: BoundSymbol, *sites: _Site
) -> tuple[list[BoundSymbol], str]:
    """(what computes the output of `replaced` in NVFP4, what the report adds on its kernel)."""
    a, _, offsets = sites[0].bsym.args[:3]
    weights = tuple(site.weight for site in sites if site.weight is not None)
    transposed = sites[0].transposed
    options = dict(transposed=transposed, names=" and ".join(str(site.gemm.weight) for site in sites))
    swizzled = _Pack(nvfp4_pack, weights, options | dict(layout=nvfuser.LAYOUT))
    calls, route = _by_nvfuser(packs, swizzled, symbol, a, offsets, replaced.output, sites[0].gemm)
    if not calls:
        layout = stacked_layout(*weights, transposed=transposed, device=to_torch_device(weights[0].device))
        packed = _pack(packs, _Pack(nvfp4_pack, weights, options | dict(layout=layout)))
        calls = [symbol.bind(a, *packed, offsets, layout=layout, output=replaced.output)]
    return calls, route


def _replace_quantized(packs: dict[tuple, _Pack], quantized: _Quantized) -> tuple[list[BoundSymbol], str]:
    """The same for a call whose weight is in NVFP4 already: it stays as it is where nvFuser declines."""
    bsym = quantized.bsym
    if quantized.tensors is not None:
        parts = 2 if bsym.sym.id == nvfp4_grouped_swiglu.id else 1
        swizzled = _Pack(nvfp4_swizzle, quantized.tensors, dict(parts=parts))
        return _by_nvfuser(packs, swizzled, bsym.sym, bsym.args[0], bsym.args[4], bsym.output, quantized.gemm)
    if not nvfuser.is_listed(get_compile_data().executors_list):
        return [], ""
    return [], _route(nvfuser.refusal(bsym.sym, *bsym.args, **bsym.kwargs))


def _by_nvfuser(
    packs: dict[tuple, _Pack],
    pack: _Pack,
    symbol: Symbol,
    a: TensorProxy,
    offsets: TensorProxy,
    out: TensorProxy,
    gemm: GroupedGemm,
) -> tuple[list[BoundSymbol], str]:
    """(the calls in the form that nvFuser runs, none where it declines; what the report adds)."""
    if not nvfuser.is_listed(get_compile_data().executors_list):
        return [], ""
    options = dict(layout=nvfuser.LAYOUT, activation_amax=_activation_amax(gemm))
    reason = nvfuser.refusal(symbol, a, *pack.symbol.meta(*pack.weights, **pack.options), offsets, **options)
    if reason is not None:
        return [], _route(reason)
    packed = _pack(packs, pack)
    wide = symbol.meta(a, *packed, offsets, **options)
    if tuple(wide.shape) == tuple(out.shape):
        return [symbol.bind(a, *packed, offsets, **options, output=out)], _route(None)
    calls = [  # the rows of the weight are padded
        symbol.bind(a, *packed, offsets, **options, output=wide),
        prims.slice_prim.bind(wide, [0, 0], list(out.shape), [1, 1], output=out),
    ]
    return calls, _route(None)


def _route(refusal: str | None) -> str:
    return "; by nvFuser, rows in NVFP4 too" if refusal is None else f"; not by nvFuser: {refusal}"


def _activation_amax(gemm: GroupedGemm) -> float | None:
    """The largest magnitude of a GEMM's rows, where the user has given it by the weight's name."""
    known = get_compile_option(
        "nvfp4_activation_amax",
        "dict of a weight's qualified name (the gate's for gate and up) to its rows' largest magnitude",
    )
    amax = None if known is None else known.get(gemm.weight)
    if amax is not None and not 0 < amax < float("inf"):
        raise ValueError(f"nvfp4_activation_amax: got {amax!r} for {gemm.weight!r}, wanted a positive number")
    return amax


def _pack(packs: dict[tuple, _Pack], pack: _Pack) -> tuple[TensorProxy, ...]:
    """The operators' three weight arguments, made once of the same weights and kept in `packs`."""
    symbol, weights = pack.symbol, pack.weights
    key = (symbol.name, *pack.options.items(), *(weight.name for weight in weights))
    if key not in packs:
        stem = weights[0].name if symbol is nvfp4_swizzle else "_and_".join(weight.name for weight in weights)
        likes = symbol.meta(*weights, **pack.options)
        stem += "" if likes[0].dtype == dtypes.uint8 else "_swizzled"
        traits = dict(device=weights[0].device, requires_grad=False, tags={ProxyTag.STATIC_MEMORY_LOCATION})
        packed = tuple(
            TensorProxy(name=f"{stem}_{part}", shape=like.shape, dtype=like.dtype, **traits)
            for part, like in zip(("fp4", "scale", "global_scale"), likes, strict=True)
        )
        packs[key] = replace(pack, packed=packed)
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


@dataclass(frozen=True, eq=False)
class _Quantized:
    """An NVFP4 symbol of a module that quantize_ had swapped in already. `tensors`: qdata, scale and global_scale where
    they are arguments of the computation, in layout "linear"; None otherwise."""

    bsym: BoundSymbol
    gemm: GroupedGemm
    decision: str
    tensors: tuple[TensorProxy, ...] | None


_NVFP4_DECISIONS = {
    nvfp4_grouped_mm.id: "nvfp4",
    nvfp4_grouped_swiglu.id: "nvfp4 + swiglu",
    nvfp4_combine.id: "nvfp4",
}


def _find_quantized(prologue: TraceCtx, computation: TraceCtx) -> list[_Quantized]:
    names, producers = _qualified_names(prologue), utils.producers(computation)
    static = {arg.name for arg in computation.args if ProxyTag.STATIC_MEMORY_LOCATION in getattr(arg, "tags", ())}
    found = []
    for bsym in computation.bound_symbols:
        if bsym.sym.id not in _NVFP4_DECISIONS:
            continue
        a, fp4_weight, *scales = bsym.args[:4]
        producer = producers.get(fp4_weight, None)
        source = fp4_weight if producer is None or not producer.flat_proxy_args else producer.flat_proxy_args[0]
        dtype = dtypes.to_torch_dtype(a.dtype)
        experts, half, n = fp4_weight.shape
        buffer = source  # behind the views of a module's in another layout than "linear"
        while buffer.name not in names and (view := producers.get(buffer, None)) and view.flat_proxy_args:
            buffer = view.flat_proxy_args[0]
        gemm = GroupedGemm(names.get(buffer.name, source.name), experts, n, 2 * half, a.shape[0], dtype, dtype, False)
        plain = nvfuser.is_plain(bsym.sym, *bsym.args, **bsym.kwargs)
        buffers = (
            producer is not None
            and _swaps_last_dims(producer)
            and static.issuperset(proxy.name for proxy in (source, *scales))
        )
        tensors = (source, *scales) if plain and buffers else None
        found.append(_Quantized(bsym, gemm, _NVFP4_DECISIONS[bsym.sym.id], tensors))
    return found


def _fill_computation(
    new: TraceCtx, old: TraceCtx, replacements: dict[int, list[BoundSymbol]], packs: list[_Pack]
) -> list[Any]:
    """Writes the rewritten computation into `new` and returns its arguments: the packed weights take the places of
    those 16-bit weights that nothing reads any more."""
    body = [new for bsym in old.bound_symbols for new in replacements.get(id(bsym), [bsym])]
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
        calls = [pack.symbol.bind(*pack.weights, **pack.options, output=pack.packed) for pack in packs]
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

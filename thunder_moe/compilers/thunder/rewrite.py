"""The rewrite of Thunder's traces: frozen expert GEMMs -> NVFP4 symbols, their weights packed in the prologue.
Called by Thunder, among a compilation's transforms (executor.py puts it there); calls sites.py for what
there is to rewrite, symbols.py for what takes its place and for the report, routers.py and nvfuser.py.

find grouped GEMMs -> decide on each -> pair gate and up with their SwiGLU -> pack weights in the prologue, as nvFuser
takes them where it runs the GEMM, else as our kernels read them best -> rewrite the computation -> record what was
done. It runs before autodiff, so the backward is made from the rewritten trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import thunder.core.dtypes as dtypes
import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.compile_data import get_compile_data, get_compile_option
from thunder.core.devices import to_torch_device
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, from_trace, get_tracectx, tracectx
from thunder.core.transform_common import Transform

from thunder_moe.compilers.eligibility import GroupedGemm, choosing_format, common_format, describe
from thunder_moe.compilers.safety import is_hidden_training_forward
from thunder_moe.compilers.swiglu import SwiGLU
from thunder_moe.compilers.thunder import nvfuser, symbols
from thunder_moe.compilers.thunder.routers import find_routers, fuse_router
from thunder_moe.compilers.thunder.sites import (
    Quantized,
    Site,
    find_quantized,
    find_sites,
    find_swiglu,
    linear_buffers,
    trained_weights,
)
from thunder_moe.compilers.thunder.symbols import SYMBOLS
from thunder_moe.compilers.thunder.trace import Computation, is_view, names_read
from thunder_moe.compilers.thunder.training_symbols import (
    activated_linear,
    gate_up_bias,
    grouped_bias,
    scaled_activation,
)
from thunder_moe.compilers.thunder_compat import refuse_changes_in_graphs, refuse_delayed_changes, without_gradient
from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4
from thunder_moe.weight_cache import pad_rows, stacked_layout

_PARTS = ("packed", "scale", "global_scale")
_OPTION_SAYS = (
    "number format of expert weights, 'nvfp4' (default) or 'mxfp8', or a function of a weight's name and GEMM"
)


class NVFP4Rewrite(Transform):
    """Rewrites the GEMMs that `eligibility.decline_reason` lets through. It keeps no state: one instance serves all
    traces."""

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        computation = Computation(computation_trace)
        refuse_changes_in_graphs(get_compile_data().transforms, computation.written_arguments())
        with choosing_format(symbols.OPTION, get_compile_option(symbols.OPTION, _OPTION_SAYS)):
            sites = find_sites(prologue_trace, computation)
        eligible = [site for site in sites if site.reason is None]
        swiglu = find_swiglu(computation, eligible)
        blocks = [block for block in swiglu if block.reason is None]
        unfused = {site: block.reason for block in swiglu for site in block.sites}
        fused = {site for block in blocks for site in block.sites}
        before = find_quantized(prologue_trace, computation)
        routers, router_entries = find_routers(computation)
        packs: dict[tuple[Any, ...], _PackStep] = {}
        replacements: dict[int, list[BoundSymbol]] = {}  # by the position of what they replace
        routes: dict[Site | Quantized, str] = {}
        trace = from_trace(computation_trace)
        with tracectx(trace):
            calls: list[Site | SwiGLU] = [*blocks, *(site for site in eligible if site not in fused)]
            for call in calls:
                replaced = sorted(call.replaced) if isinstance(call, SwiGLU) else [call.position]
                new, route = _replace(packs, call, computation, replaced[-1])
                replacements |= {at: [] for at in replaced} | {replaced[-1]: new}
                routes |= dict.fromkeys(call.sites if isinstance(call, SwiGLU) else (call,), route)
            for quantized in before:
                new, routes[quantized] = _replace_quantized(packs, quantized, computation)
                replacements |= {quantized.position: new} if new else {}
            for site in sites:
                if site.reason is not None and site.bsym is computation.bound_symbols[site.position]:
                    operands, clones = _saved(computation, site, *site.bsym.args[:3])
                    if clones:
                        more = dict(site.bsym.kwargs, output=site.bsym.output)
                        gemm = site.bsym.sym.bind(*operands, *site.bsym.args[3:], **more)
                        replacements[site.position] = [*clones, gemm]
            for router in routers:
                replacements |= fuse_router(router, computation)
        decisions = []
        for site in sites:
            gemm, decision, reason = describe(
                site.gemm, site.reason, requires_grad=site.requires_grad, fused=site in fused, unfused=unfused.get(site)
            )
            decisions.append((gemm, decision, reason + routes.get(site, "")))
        decisions += [(q.gemm, q.decision, f"quantized beforehand{routes[q]}") for q in before]
        symbols.EXECUTOR.record(get_compile_data(), decisions, router_entries)
        checks, declarations = _conditions(prologue_trace, computation, sites, before, list(packs.values()))
        arguments = computation_trace.args
        if replacements or computation.written_arguments():
            arguments = _fill_computation(trace, computation, computation_trace, replacements, list(packs.values()))
            computation_trace = trace
        if replacements or checks or declarations:
            prologue_trace = _rewrite_prologue(prologue_trace, list(packs.values()), arguments, checks, declarations)
        return prologue_trace, computation_trace, epilogue_trace

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        if TraceTag.BACKWARD in computation_trace.tags:
            refuse_delayed_changes(computation_trace)
        return computation_trace


@dataclass(frozen=True, eq=False)
class _PackStep:
    """A call of nvfp4_pack or nvfp4_swizzle in the prologue: weights in, the operators' three weight arguments out."""

    symbol: Symbol
    weights: tuple[TensorProxy, ...]
    options: dict[str, Any]
    packed: tuple[TensorProxy, ...] = ()  # once it is part of the prologue


def _replace(
    packs: dict[tuple[Any, ...], _PackStep], call: Site | SwiGLU, computation: Computation, position: int
) -> tuple[list[BoundSymbol], str]:
    """Return the calls that compute the output of a symbol in 4 or 8 bits, and the report's words on their kernel."""
    output = computation.bound_symbols[position].output
    sites, interleaved = (call.sites, call.interleaved) if isinstance(call, SwiGLU) else ((call,), 0)
    format = common_format(*(site.gemm for site in sites))
    symbol = SYMBOLS[format]["grouped_swiglu" if isinstance(call, SwiGLU) else "scaled_grouped_mm"]
    # In-place operations rename tensors: the operator runs last, and gets the names of the last GEMM's arguments.
    last = max(sites, key=lambda site: site.position)
    a, _, offsets = last.bsym.args[:3]
    (offsets,), clones = _saved(computation, last, offsets)
    weights = tuple(site.weight for site in sites if site.weight is not None)
    transposed = sites[0].transposed
    options = dict(
        transposed=transposed, interleaved=interleaved, names=" and ".join(str(site.gemm.weight) for site in sites)
    )
    swizzled = _PackStep(symbols.nvfp4_pack, weights, options | dict(layout=nvfuser.LAYOUT))
    more: tuple[Any, ...] = ()
    form: dict[str, Any] = {}
    scales, calls = None, list[BoundSymbol]()
    if isinstance(call, SwiGLU):
        form, scales = call.form, call.scales
        more = () if call.bias is None else (None, None, _gate_up_bias(call, clones))
    finish = (
        sites[0].is_thunder_moe_op
        and output.shape[0] > 0
        and (scales is not None or not _reads_live_rows_alone(computation, output, offsets))
    )
    out = TensorProxy(like=output) if finish else output
    if not nvfuser.is_listed(get_compile_data().executors_list):
        route = ""
    elif format != NVFP4.name:
        route = _route(f"it takes no {format} weights")
    elif more or form:
        route = _route("it has a bias, or another form of SwiGLU")
    else:
        calls, route = _by_nvfuser(packs, swizzled, symbol, a, offsets, out, sites[0].gemm)
    if not calls:
        device = to_torch_device(weights[0].device)
        layout = stacked_layout(*weights, transposed=transposed, device=device, format=BLOCK_FORMATS[format])
        packed = _pack(packs, _PackStep(symbols.nvfp4_pack, weights, options | dict(layout=layout, format=format)))
        calls = [symbol.bind(a, *packed, offsets, *more, layout=layout, **form, output=out)]
    if finish and scales is not None:
        calls = [*calls, grouped_bias.bind(out, offsets, None, None, scales, output=output)]
    elif finish:
        calls = [*calls, *_zeros_past_the_end(out, offsets, output)]
    return [*clones, *calls], route


def _zeros_past_the_end(out: TensorProxy, offsets: TensorProxy, output: TensorProxy) -> list[BoundSymbol]:
    """Return symbols that make `output` of `out`, by torch's functions, so that they fuse with its readers."""
    calls: list[BoundSymbol] = []
    trace = get_tracectx()
    trace.push_scope(calls)
    try:
        positions = ltorch.arange(out.shape[0], device=out.device, dtype=torch.int32)
        live = ltorch.unsqueeze(positions < offsets[-1], 1)
        zeroed = ltorch.where(live, out, 0)
    finally:
        trace.pop_scope()
    return [call.from_bsym_swap_proxies({variableify(zeroed): output}) for call in calls]


def _gate_up_bias(call: SwiGLU, before: list[BoundSymbol]) -> TensorProxy:
    """Return the bias of a SwiGLU with the gate's part first; append the symbol that sorts it to `before`."""
    assert call.bias is not None
    if not call.interleaved:
        return call.bias
    bias = TensorProxy(like=call.bias)
    before.append(gate_up_bias.bind(call.bias, call.interleaved, output=bias))
    return bias


def _reads_live_rows_alone(computation: Computation, output: TensorProxy, offsets: TensorProxy) -> bool:
    """True if no reader of the result of a GEMM of GroupedLinear reads a row past the last row end."""

    def is_careful(reader: BoundSymbol) -> bool:
        operands = {symbols.grouped_mm.id: 2, grouped_bias.id: 1, scaled_activation.id: 2, activated_linear.id: 2}
        position = operands.get(reader.sym.id)
        if position is None or reader.args[0].name != output.name or reader.args[position] is None:
            return False
        return bool(reader.args[position].name == offsets.name)

    readers = computation.readers.get(output.name, set())
    return all(is_careful(computation.bound_symbols[position]) for position in readers)


def _saved(computation: Computation, site: Site, *operands: TensorProxy) -> tuple[list[TensorProxy], list[BoundSymbol]]:
    """Return operands of a GEMM that its backward may save, and the symbols that copy operands which change later.

    Eager autograd refuses the backward then; Thunder would go on with the changed values."""
    program, saved, clones = computation.program, [], []
    for operand in operands:
        reason = site.grad_enabled and program.reason_against_reading_later(
            site.position, len(program.steps), {computation.storage(operand.name): "an operand"}
        )
        saved.append(TensorProxy(like=operand) if reason else operand)
        if reason:
            clones.append(prims.clone.bind(operand, output=saved[-1]))
    return saved, clones


def _replace_quantized(
    packs: dict[tuple[Any, ...], _PackStep], quantized: Quantized, computation: Computation
) -> tuple[list[BoundSymbol], str]:
    """Replace a call whose weight is in NVFP4 already by nvFuser's; leave it unchanged if nvFuser declines."""
    bsym, listed = quantized.bsym, nvfuser.is_listed(get_compile_data().executors_list)
    if not listed or bsym.sym not in SYMBOLS[NVFP4.name].values():
        return [], ""
    buffers = linear_buffers(computation, bsym)
    if buffers is None:
        return [], _route(nvfuser.refusal(bsym.sym, *bsym.args, **bsym.kwargs))
    parts = 2 if bsym.sym.id == symbols.nvfp4_grouped_swiglu.id else 1
    swizzled = _PackStep(symbols.nvfp4_swizzle, buffers, dict(parts=parts))
    return _by_nvfuser(packs, swizzled, bsym.sym, bsym.args[0], bsym.args[4], bsym.output, quantized.gemm)


def _by_nvfuser(
    packs: dict[tuple[Any, ...], _PackStep],
    pack: _PackStep,
    symbol: Symbol,
    a: TensorProxy,
    offsets: TensorProxy,
    out: TensorProxy,
    gemm: GroupedGemm,
) -> tuple[list[BoundSymbol], str]:
    """Return the calls that nvFuser runs, none where it declines, and what the report says of it."""
    options = dict(layout=nvfuser.LAYOUT, activation_amax=_activation_amax(gemm))
    reason = nvfuser.refusal(symbol, a, *pack.symbol.meta(*pack.weights, **pack.options), offsets, **options)
    n = pack.weights[0].shape[2 if pack.options.get("transposed") else 1]
    stacked = symbol is symbols.nvfp4_grouped_swiglu and pack.symbol is symbols.nvfp4_pack and len(pack.weights) == 1
    if stacked and n != pad_rows(n):
        reason = f"gate and up are one weight of {n} rows, which are padded together"
    if reason is not None:
        return [], _route(reason)
    packed = _pack(packs, pack)
    wide = symbol.meta(a, *packed, offsets, **options)
    padded = tuple(wide.shape) != tuple(out.shape)
    calls = [symbol.bind(a, *packed, offsets, **options, output=wide if padded else out)]
    if padded:
        calls.append(prims.slice_prim.bind(wide, [0, 0], list(out.shape), [1, 1], output=out))
    return calls, _route(None)


def _route(refusal: str | None) -> str:
    return "; by nvFuser, rows in NVFP4 too" if refusal is None else f"; not by nvFuser: {refusal}"


def _activation_amax(gemm: GroupedGemm) -> float | None:
    """Return the largest magnitude of a GEMM's rows, where the user has given it by the weight's name."""
    known = get_compile_option(
        "nvfp4_activation_amax",
        "dict of a weight's qualified name (the gate's for gate and up) to its rows' largest magnitude",
    )
    amax = None if known is None else known.get(gemm.weight)
    if amax is not None and not 0 < amax < float("inf"):
        raise ValueError(f"nvfp4_activation_amax: got {amax!r} for {gemm.weight!r}, wanted a positive number")
    return amax


def _pack(packs: dict[tuple[Any, ...], _PackStep], pack: _PackStep) -> tuple[TensorProxy, ...]:
    """Return the operators' weight arguments, which the same weights have once; `packs` keeps them."""
    symbol, weights = pack.symbol, pack.weights
    key = (symbol.name, *pack.options.items(), *(weight.name for weight in weights))
    if key not in packs:
        stem = weights[0].name if symbol is symbols.nvfp4_swizzle else "_and_".join(weight.name for weight in weights)
        likes = symbol.meta(*weights, **pack.options)
        stem += "_swizzled" if likes[0].dtype == dtypes.float4_e2m1fn_x2 else ""
        # The name is taken if a weight is packed both in its own layout and transposed, or if another argument has this
        # name.
        while any(get_tracectx().has_name(f"{stem}_{part}") for part in _PARTS):
            stem += f"_{len(packs)}"
        traits = dict(device=weights[0].device, requires_grad=False, tags={ProxyTag.STATIC_MEMORY_LOCATION})
        packed = tuple(
            TensorProxy(name=f"{stem}_{part}", shape=like.shape, dtype=like.dtype, **traits)
            for part, like in zip(_PARTS, likes, strict=False)
        )
        packs[key] = replace(pack, packed=packed)
    return packs[key].packed


def _conditions(
    prologue: TraceCtx, computation: Computation, sites: list[Site], quantized: list[Quantized], packs: list[_PackStep]
) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """Return what the prologue checks at every call before it packs the weights, and what it declares afterwards."""
    checks, declarations = [], []
    # `is_hidden_training_forward` says whether these are being trained; Thunder does not guard it.
    off = (site.weight for site in sites if site.requires_grad and not site.grad_enabled)
    by_mode = {weight.name: weight for weight in off if weight is not None}
    if by_mode:
        hidden = is_hidden_training_forward()
        checks.append(symbols.check_grad_mode.bind(*by_mode.values(), hidden_training=hidden, output=None))
    packed = {weight.name: weight for pack in packs for weight in pack.weights}
    written = computation.written_arguments()
    if packed and written:
        checks.append(symbols.check_memory.bind(*packed.values(), *written, packed=len(packed), output=None))
    read = {computation.origin(proxy.name) for call in quantized for proxy in call.bsym.flat_proxy_args} | packed.keys()
    kinds = (prims.PrimIDs.UNPACK_PARAMETER, prims.PrimIDs.UNPACK_BUFFER)
    fetches = [bsym for bsym in prologue.bound_symbols if bsym.sym.id in kinds and bsym.output.name in read]
    # Transforms of modules (DDP's, for example) replace the model's parameters in Thunder's module.
    if fetches and all(type(t).transform_module is Transform.transform_module for t in get_compile_data().transforms):
        held = [proxy for bsym in fetches for proxy in (bsym.args[0], bsym.output)]
        paths = tuple(tuple(bsym.args[1].split(".")) for bsym in fetches)
        checks.append(symbols.check_replaced.bind(*held, paths=paths, output=None))
    trained = trained_weights(computation)
    if trained:
        declarations.append(symbols.declare_changed.bind(*trained, output=None))
    return checks, declarations


def _fill_computation(
    new: TraceCtx,
    computation: Computation,
    old: TraceCtx,
    replacements: dict[int, list[BoundSymbol]],
    packs: list[_PackStep],
) -> list[Any]:
    """Write the rewritten computation into `new` and return its arguments: the packed weights take the places of
    16-bit weights that nothing reads any more."""
    body: list[BoundSymbol] = []
    read: set[str] = set()
    calls = [call for at, bsym in enumerate(old.bound_symbols) for call in replacements.get(at, [bsym])]
    for bsym in reversed(calls):
        # A view that nothing reads is dead; it would keep its weight alive.
        if not is_view(bsym) or any(proxy.name in read for proxy in bsym.flat_proxy_outs):
            read |= names_read(bsym)
            body.append(bsym)
    unread = {weight.name for pack in packs for weight in pack.weights} - read
    proxies = [proxy for pack in packs for proxy in pack.packed]
    arguments = [arg for arg in old.args if arg.name not in unread] + proxies
    # Thunder decides by the arguments whether there is a backward. It might move in-place changes there.
    new.args = tuple(arguments if computation.has_gradients else map(without_gradient, arguments))
    new._siginfo.args = [(arg.name, None) for arg in arguments]
    out = [prims.unpack_trivial.bind(proxy, output=proxy, name=proxy.name) for proxy in proxies]
    for bsym in reversed(body):
        if bsym.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and bsym.output.name in unread:
            continue
        if bsym.sym.id == prims.PrimIDs.RETURN and isinstance(bsym.args[0], dict):
            # Thunder hands flat_args to autograd beside the computation's arguments: they have to agree.
            with tracectx(new):
                flat_args, renamed = _flat_args(computation, bsym.args[0]["flat_args"], unread)
            out += [prims.shallow_copy.bind(arg, output=alias) for alias, arg in renamed]
            flat_args += [*proxies, *(alias for alias, _ in renamed)]
            bsym = bsym.from_bsym(args=({**bsym.args[0], "flat_args": flat_args},))
        out.append(bsym)
    new.bound_symbols = out
    new.set_provenance(TraceProvenance("NVFP4 rewrite of expert GEMMs (thunder_moe)"))
    return arguments


def _flat_args(
    computation: Computation, given: list[Any], unread: set[str]
) -> tuple[list[Any], list[tuple[TensorProxy, TensorProxy]]]:
    """Return the arguments that autograd has to get, and (alias, renamed argument) of each that is changed.

    Thunder 0.2.6 has arguments that are changed in place by their new names here, which loses their gradients. The new
    names still have to be there, without a gradient, or the changes would be made in the backward."""
    pairs = [pair for pair in zip(computation.arguments.values(), given, strict=True) if pair[0].name not in unread]
    if not computation.has_gradients:
        return [new for _, new in pairs], []
    traits: dict[str, Any] = dict(requires_grad=False, tags={ProxyTag.DETACHED_AUTOGRAD_GRAPH})
    aliases = [(TensorProxy(like=new, **traits), new) for arg, new in pairs if new.name != arg.name]
    return [arg for arg, _ in pairs], aliases


def _rewrite_prologue(
    old: TraceCtx,
    packs: list[_PackStep],
    arguments: Sequence[Any],
    checks: list[BoundSymbol],
    declarations: list[BoundSymbol],
) -> TraceCtx:
    """Pack the weights at the end of the prologue, where the parameters are checked and at hand."""
    new = from_trace(old)
    for proxy in (proxy for pack in packs for proxy in pack.packed):
        new.add_name(proxy.name)
    with tracectx(new):
        calls = [pack.symbol.bind(*pack.weights, **pack.options, output=pack.packed) for pack in packs]
    *body, result = old.bound_symbols
    _, to_epilogue = result.args[0]
    result = result.from_bsym(args=((tuple(arguments), to_epilogue),))
    new.bound_symbols = [*body, *checks, *calls, *declarations, result]
    new.set_provenance(TraceProvenance("NVFP4 weights packed (thunder_moe)"))
    return new

"""The symbols that moe_executor puts into Thunder's traces: meta, implementation and gradient of each.
Called by rewrite.py and executor.py; calls the operators of ops and weight_cache.py.

16-bit:  moe_grouped_mm, with the dgrad and wgrad that Thunder 0.2.6 lacks.
Packed:  f16a_nvfp4weight_scaled_grouped_mm, f16a_nvfp4weight_grouped_swiglu, f16a_nvfp4weight_grouped_mm_combine,
f16a_nvfp4weight_scaled_mm, the same of MXFP8, and moe_route, moe_router, moe_linear_router: the operators that
`ops.operator.OPERATORS` describes.
Prologue: nvfp4_pack, which quantizes a weight once and hands out the cached result; nvfp4_swizzle, which lays a
quantized one out as nvFuser takes it, once; check_grad_mode, check_memory and declare_changed.

Legend: M rows, E experts, N out_features, K in_features, I intermediate_size.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thunder_moe.compilers.thunder.compat import import_thunder

import_thunder()

import thunder.core.dtypes as dtypes  # noqa: E402
from thunder.core.compile_data import get_compile_data  # noqa: E402
from thunder.core.prims import OpTags, get_grad, put_grad  # noqa: E402
from thunder.core.proxies import TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol, Symbol  # noqa: E402

from thunder_moe import __version__  # noqa: E402
from thunder_moe.compilers.eligibility import Decision, GroupedGemm  # noqa: E402
from thunder_moe.compilers.report import Others, record  # noqa: E402
from thunder_moe.compilers.safety import is_hidden_training_forward  # noqa: E402
from thunder_moe.compilers.thunder.late_lookasides import LateLookasides  # noqa: E402
from thunder_moe.formats.block_format import BLOCK_FORMATS, MXFP8, NVFP4, BlockFormat  # noqa: E402
from thunder_moe.formats.layouts import LINEAR, SWIZZLED_128X4, scale_shape  # noqa: E402
from thunder_moe.kernels import trainable_grouped_mm  # noqa: E402
from thunder_moe.ops import activation as _activation  # noqa: E402, F401  (registers the operators)
from thunder_moe.ops import experts as _experts  # noqa: E402, F401  (registers the operators)
from thunder_moe.ops import experts_lora as _experts_lora  # noqa: E402, F401
from thunder_moe.ops import fake_quantize as _fake_quantize  # noqa: E402, F401  (likewise)
from thunder_moe.ops import scaled_mm as _scaled_mm  # noqa: E402, F401  (likewise)
from thunder_moe.ops.operator import OPERATORS, Operator, name_in  # noqa: E402
from thunder_moe.routing import RouterForm, live_rows, router_gradient  # noqa: E402
from thunder_moe.weight_cache import WEIGHT_CACHE, pad_rows  # noqa: E402

__all__ = [
    "EXECUTOR",
    "EXPERTS_LORA",
    "OPTION",
    "SYMBOLS",
    "check_grad_mode",
    "check_memory",
    "decided_before",
    "declare_changed",
    "grouped_mm",
    "moe_combine",
    "moe_linear_router",
    "moe_of_format",
    "moe_route",
    "moe_router",
    "mxfp8_fake_quantize",
    "nvfp4_combine",
    "nvfp4_fake_quantize",
    "nvfp4_grouped_mm",
    "nvfp4_grouped_swiglu",
    "nvfp4_mm",
    "nvfp4_pack",
    "nvfp4_swizzle",
]


OPTION = "moe_format"  # of thunder.jit


def decided_before(gemm: GroupedGemm, name: str) -> None:
    """Leave a GEMM as it is: the value of `OPTION` for graphs that have been rewritten and reported already."""


class MoEExecutor(LateLookasides):
    """An operator executor that notices compilations in which no grouped GEMM was traced."""

    def __init__(self) -> None:
        super().__init__("thunder_moe", version=__version__)
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def record(self, data: Any, decisions: list[Decision], others: Sequence[Others] = ()) -> None:
        """Records what was decided in a compilation, unless that has happened before it."""
        self._seen.add(data)
        if data.compile_options.get(OPTION) is not decided_before:
            record(data, decisions, others=others)

    def can_execute(self, bsym: BoundSymbol) -> bool:
        # Thunder asks about every symbol of a computation; by the first one, the tracing is over.
        data = get_compile_data()
        if data is not None and data not in self._seen:
            self.record(data, [])
        return bool(super().can_execute(bsym))


EXECUTOR = MoEExecutor()
_OPS = torch.ops.thunder_moe

# ---- 16-bit grouped GEMM: a (M, K), b (E, K, N), offsets int32 (E,) row ends


def _grouped_mm_meta(
    a: TensorProxy, b: TensorProxy, offsets: TensorProxy, out_dtype: Any = None, own: bool = False
) -> TensorProxy:
    if offsets.dtype != dtypes.int32 or tuple(offsets.shape) != (b.shape[0],):
        raise ValueError(f"offs: got {offsets.dtype} {tuple(offsets.shape)}, wanted int32 ({b.shape[0]},)")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"mat_a: got shape {tuple(a.shape)}, wanted (rows, {b.shape[1]}) by mat_b's {tuple(b.shape)}")
    dtype = a.dtype if out_dtype is None else dtypes.to_dtype(out_dtype)
    return TensorProxy(like=a, shape=(a.shape[0], b.shape[2]), dtype=dtype)


def _dgrad_meta(grad: TensorProxy, b: TensorProxy, offsets: TensorProxy, own: bool = False) -> TensorProxy:
    return TensorProxy(like=grad, shape=(grad.shape[0], b.shape[1]))


def _wgrad_meta(a: TensorProxy, grad: TensorProxy, offsets: TensorProxy, own: bool = False) -> TensorProxy:
    return TensorProxy(like=a, shape=(offsets.shape[0], a.shape[1], grad.shape[1]))


def _grouped_mm_run(
    a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None, own: bool = False
) -> Tensor:
    out: Tensor = (
        _OPS.grouped_linear(a, b.mT, offsets) if own else trainable_grouped_mm.forward(a, b, offsets, out_dtype)
    )
    return out


def _dgrad_run(grad: Tensor, b: Tensor, offsets: Tensor, own: bool = False) -> Tensor:
    out: Tensor = (
        _OPS.grouped_linear_dgrad(grad, b.mT, offsets) if own else trainable_grouped_mm.dgrad(grad, b, offsets)
    )
    return out


def _wgrad_run(a: Tensor, grad: Tensor, offsets: Tensor, own: bool = False) -> Tensor:
    out: Tensor = (
        _OPS.grouped_linear_wgrad(a, grad, offsets).mT if own else trainable_grouped_mm.wgrad(a, grad, offsets)
    )
    return out


# `own`: of GroupedLinear, whose result is zero past the last row end, in sizes and dtypes that torch's GEMM lacks.
grouped_mm = EXECUTOR.register_operator("moe_grouped_mm", meta=_grouped_mm_meta, fn=_grouped_mm_run)
_dgrad = EXECUTOR.register_operator("moe_grouped_mm_dgrad", meta=_dgrad_meta, fn=_dgrad_run)
_wgrad = EXECUTOR.register_operator("moe_grouped_mm_wgrad", meta=_wgrad_meta, fn=_wgrad_run)


def _grouped_mm_grad(
    a: TensorProxy, b: TensorProxy, offsets: TensorProxy, out_dtype: Any = None, own: bool = False
) -> TensorProxy:
    out = grouped_mm(a, b, offsets, out_dtype, own)
    grad = get_grad(out).to(a.dtype)
    put_grad(a, _dgrad(grad, b, offsets, own))
    put_grad(b, _wgrad(a, grad, offsets, own))
    return out


# ---- NVFP4: the operators, as ops.operator describes them
# activation_amax, which the operators do not have, is for nvFuser's translators: our kernels keep the rows 16-bit.

_AMAX = inspect.Parameter("activation_amax", inspect.Parameter.KEYWORD_ONLY, default=None)


def _meta(operator: Operator, *more: inspect.Parameter) -> Callable[..., Any]:
    """Proxies of an operator's results, under its own signature (Thunder fills in defaults by that) and `more`."""

    def meta(*args: Any, activation_amax: float | None = None, **options: Any) -> Any:
        shapes, like = operator.shapes(*args, **options), args[0]
        if len(shapes) == 1:
            return TensorProxy(like=like, shape=shapes[0])
        return tuple(
            TensorProxy(like=like, shape=shape, dtype=dtypes.to_dtype(dtype), requires_grad=False)
            for shape, dtype in zip(shapes, operator.dtypes(*args, **options), strict=True)
        )

    parameters = [*operator.signature.parameters.values(), *more]
    meta.__signature__ = operator.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return meta


def _symbol(name: str, *more: inspect.Parameter) -> Symbol:
    """The symbol of an operator; a call of it drops the arguments that the operator does not have."""
    registered = getattr(torch.ops.thunder_moe, name)

    def run(*args: Any, activation_amax: float | None = None, **options: Any) -> Any:
        return registered(*args, **options)

    return EXECUTOR.register_operator(name, meta=_meta(OPERATORS[name], *more), fn=run if more else registered)


def _backward_symbol(operator: Operator) -> Symbol:
    """The symbol of an operator's `backward`: gradients of the differentiable arguments that are given."""

    def meta(grad: TensorProxy, *args: Any, **options: Any) -> tuple[TensorProxy, ...]:
        return tuple(TensorProxy(like=argument) for argument in _differentiable(operator, args))

    def run(grad: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(
            of_argument for of_argument in operator.backward(grad, *args, **options) if of_argument is not None
        )

    return EXECUTOR.register_operator(f"{operator.name}_backward", meta=meta, fn=run)


def _differentiable(operator: Operator, args: Sequence[Any]) -> list[Any]:
    """The arguments that get a gradient, without those that are None or left out."""
    found = (args[position] for position in operator.positions if position < len(args))
    return [argument for argument in found if argument is not None]


_NAME, _SWIGLU_NAME = "f16a_nvfp4weight_scaled_grouped_mm", "f16a_nvfp4weight_grouped_swiglu"
_COMBINE_NAME, _DENSE_NAME = "f16a_nvfp4weight_grouped_mm_combine", "f16a_nvfp4weight_scaled_mm"
nvfp4_grouped_mm = _symbol(_NAME, _AMAX)


def _dgrad_symbol(format: BlockFormat) -> Symbol:
    """The symbol of the gradient of the format's grouped GEMM, with zeros past the last row end."""
    name = name_in(f"{_NAME}_dgrad", format)
    registered = getattr(_OPS, name)

    def run(grad: Tensor, *args: Any, **options: Any) -> Tensor:
        out = registered(grad, *args, **options)
        return torch.where(live_rows(args[-1], grad.shape[0]), out, 0)

    return EXECUTOR.register_operator(name, meta=_meta(OPERATORS[name]), fn=run)


_nvfp4_dgrad = _dgrad_symbol(NVFP4)
nvfp4_grouped_swiglu = _symbol(_SWIGLU_NAME, _AMAX)
nvfp4_combine = _symbol(_COMBINE_NAME)
nvfp4_mm = _symbol(_DENSE_NAME)
_LORA_NAME, _SUM_NAME = "f16a_nvfp4weight_moe_experts_lora", "moe_combine"
_nvfp4_experts_lora = _symbol(_LORA_NAME)
moe_combine = _symbol(_SUM_NAME)
moe_route = _symbol("moe_route")
nvfp4_fake_quantize = _symbol("nvfp4_fake_quantize")
_swiglu_backward, _combine_backward, _dense_backward, _lora_backward, _sum_backward = (
    _backward_symbol(OPERATORS[name]) for name in (_SWIGLU_NAME, _COMBINE_NAME, _DENSE_NAME, _LORA_NAME, _SUM_NAME)
)


def _fake_quantize_gradient(symbol: Symbol) -> Callable[..., TensorProxy]:
    def gradient(weight: TensorProxy, **options: Any) -> TensorProxy:
        out: TensorProxy = symbol(weight, **options)
        put_grad(weight, get_grad(out))
        return out

    return gradient


def _gemm_gradient(symbol: Symbol, dgrad: Symbol, operands: int) -> Callable[..., TensorProxy]:
    """The gradient of a grouped GEMM; `operands`: how many there are behind the activation."""

    def gradient(a: TensorProxy, *args: Any, **options: Any) -> TensorProxy:
        out: TensorProxy = symbol(a, *args, **options)
        put_grad(a, dgrad(get_grad(out), *args[:operands], layout=options["layout"]))
        return out

    return gradient


def moe_of_format(format: str) -> Callable[..., TensorProxy]:
    """The operator moe_experts of a number format in a trace: its parts, which reports show and nvFuser may take."""
    operator, symbols = OPERATORS[f"f16a_{format}weight_moe_experts"], SYMBOLS[format]

    def experts(*given: Any, **options: Any) -> TensorProxy:
        call = operator.signature.bind(*given, **options)
        call.apply_defaults()
        hidden_states, expert_ids, expert_weights, gate_up, down, *rest = operator.described(call.args)
        gate_up_bias, down_bias, row_slot, offsets, slot_row = rest
        form = dict(call.kwargs)
        on_input, gate_up_layout, down_layout = (
            form.pop(name) for name in ("weight_on_input", "gate_up_layout", "down_layout")
        )
        form.pop("expert_ranks")  # for kernels of the whole chain
        if row_slot is None or offsets is None or slot_row is None:
            row_slot, offsets, slot_row = moe_route(expert_ids, gate_up.codes.shape[0])
        of_input, of_output = (expert_weights, None) if on_input else (None, expert_weights)
        rows = symbols["grouped_swiglu"](
            hidden_states, *gate_up.tensors, offsets, row_slot, of_input, gate_up_bias, layout=gate_up_layout, **form
        )
        out: TensorProxy = symbols["grouped_mm_combine"](
            rows, *down.tensors, offsets, slot_row, of_output, down_bias, layout=down_layout
        )
        return out

    return experts


def _gradient(symbol: Symbol, backward: Symbol) -> Callable[..., TensorProxy]:
    operator = OPERATORS[symbol.name]

    def gradient(*args: Any, activation_amax: float | None = None, **options: Any) -> TensorProxy:
        more = {} if activation_amax is None else dict(activation_amax=activation_amax)
        out = symbol(*args, **options, **more)
        grads = backward(get_grad(out), *args, **options)
        for argument, grad in zip(_differentiable(operator, args), grads, strict=True):
            put_grad(argument, grad)
        return out

    return gradient


def _router_backward_meta(grad: TensorProxy, logits: TensorProxy, ids: TensorProxy, **options: Any) -> TensorProxy:
    return TensorProxy(like=logits)


def _router_backward_run(grad: Tensor, logits: Tensor, ids: Tensor, **options: Any) -> Tensor:
    return router_gradient(grad, logits, ids, RouterForm(**options))


mxfp8_grouped_mm, mxfp8_grouped_swiglu, mxfp8_combine, mxfp8_mm = (
    _symbol(name_in(name, MXFP8)) for name in (_NAME, _SWIGLU_NAME, _COMBINE_NAME, _DENSE_NAME)
)
mxfp8_fake_quantize = _symbol("mxfp8_fake_quantize")
_mxfp8_experts_lora = _symbol(name_in(_LORA_NAME, MXFP8))
_mxfp8_dgrad = _dgrad_symbol(MXFP8)
_MXFP8_BACKWARD = [
    (symbol, _backward_symbol(OPERATORS[symbol.name]))
    for symbol in (mxfp8_grouped_swiglu, mxfp8_combine, mxfp8_mm, _mxfp8_experts_lora)
]
EXPERTS_LORA = {NVFP4.name: _nvfp4_experts_lora, MXFP8.name: _mxfp8_experts_lora}
# By number format and the end of the operator's name.
SYMBOLS: dict[str, dict[str, Symbol]] = {
    format: dict(scaled_grouped_mm=gemm, grouped_swiglu=swiglu, grouped_mm_combine=combine, scaled_mm=dense)
    for format, gemm, swiglu, combine, dense in (
        (NVFP4.name, nvfp4_grouped_mm, nvfp4_grouped_swiglu, nvfp4_combine, nvfp4_mm),
        (MXFP8.name, mxfp8_grouped_mm, mxfp8_grouped_swiglu, mxfp8_combine, mxfp8_mm),
    )
}
moe_router = _symbol("moe_router")
moe_linear_router = _symbol("moe_linear_router")
_router_backward = EXECUTOR.register_operator(
    "moe_router_backward", meta=_router_backward_meta, fn=_router_backward_run
)


def _router_grad(logits: TensorProxy, bias: TensorProxy | None = None, **options: Any) -> tuple[TensorProxy, ...]:
    results: tuple[TensorProxy, ...] = moe_router(logits, bias, **options)
    form = {name: value for name, value in options.items() if name != "scores_dtype"}
    put_grad(logits, _router_backward(get_grad(results[0]), logits, results[1], **form))
    return results


# ---- the prologue: weights are packed, and what their copies rely on is checked and declared


def pack_meta(
    *weights: TensorProxy,
    transposed: bool = False,
    interleaved: bool = False,
    layout: str = LINEAR,
    names: str = "",
    format: str = NVFP4.name,
) -> tuple[TensorProxy, ...]:
    """Proxies of the operators' weight arguments for weights (E, N, K), or (E, K, N) when transposed.

    In layout "swizzled_128x4" they are as nvFuser takes them, see `WeightCache.operands`.
    """
    experts, n, k = weights[0].shape
    if transposed:
        n, k = k, n
    if layout == SWIZZLED_128X4:
        return _swizzled(weights[0], experts, len(weights) * pad_rows(n), k, (experts,))
    n *= len(weights)
    global_shape = (experts,) if len(weights) == 1 else (experts, n)
    known = BLOCK_FORMATS[format]
    codes, scale = (dtypes.to_dtype(dtype) for dtype in (known.code_dtypes[0], known.scale_dtype))
    shapes = (experts, k // known.codes_per_byte, n), (experts, n, k // known.block_size), global_shape
    return _proxies(weights[0], (codes, scale, dtypes.float32)[: len(known.fields)], *shapes[: len(known.fields)])


def swizzle_meta(
    qdata: TensorProxy, scale: TensorProxy, global_scale: TensorProxy, *, parts: int
) -> tuple[TensorProxy, ...]:
    """Proxies of what `WeightCache.swizzled` makes of the tensors of an `NVFP4Weight`."""
    experts, n, half = qdata.shape
    return _swizzled(qdata, experts, parts * pad_rows(n // parts), 2 * half, tuple(global_scale.shape))


def _swizzled(
    like: TensorProxy, experts: int, n: int, k: int, global_shape: tuple[int, ...]
) -> tuple[TensorProxy, ...]:
    scales = scale_shape(experts, n, k, SWIZZLED_128X4)
    kinds = dtypes.float4_e2m1fn_x2, dtypes.float8_e4m3fn, dtypes.float32
    return _proxies(like, kinds, (experts, k // 2, n), scales, global_shape)


def _proxies(like: TensorProxy, kinds: Sequence[dtypes.dtype], *shapes: tuple[int, ...]) -> tuple[TensorProxy, ...]:
    return tuple(
        TensorProxy(like=like, shape=shape, dtype=dtype, requires_grad=False)
        for shape, dtype in zip(shapes, kinds, strict=True)
    )


def _pack_impl(*weights: Tensor, names: str = "", **form: Any) -> tuple[Tensor, ...]:
    try:
        return WEIGHT_CACHE.operands(*weights, **form)
    except ValueError as error:
        raise ValueError(f"cannot quantize {names}: {error}") from error


def _swizzle_impl(qdata: Tensor, scale: Tensor, global_scale: Tensor, *, parts: int) -> tuple[Tensor, ...]:
    return WEIGHT_CACHE.swizzled(qdata, scale, global_scale, parts=parts)


def _check_grad_mode(*weights: Tensor, hidden_training: bool) -> None:
    # Thunder tries its next compilation when a prologue raises.
    if is_hidden_training_forward() != hidden_training:
        raise RuntimeError("compiled inside of an autograd.Function's forward, and called outside, or the reverse")


def _check_memory(*tensors: Tensor, packed: int) -> None:
    addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    shared = set(addresses[:packed]).intersection(addresses[packed:]) - {0}
    if shared:
        shapes = " and ".join(str(tuple(tensors[addresses.index(address)].shape)) for address in shared)
        raise ValueError(
            f"a frozen expert weight of shape {shapes} shares its memory with a tensor that the compiled function "
            "changes in place, so its 4-bit copy would be out of date during the call: pass a copy of that tensor"
        )


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None


nvfp4_swizzle = EXECUTOR.register_operator("nvfp4_swizzle", meta=swizzle_meta, fn=_swizzle_impl)
nvfp4_pack = EXECUTOR.register_operator("nvfp4_pack", meta=pack_meta, fn=_pack_impl)
check_grad_mode, check_memory, declare_changed = (
    EXECUTOR.register_operator(name, meta=_returns_nothing, fn=function, tags=[OpTags.DONT_DCE])
    for name, function in (
        ("check_grad_mode", _check_grad_mode),
        ("check_memory", _check_memory),
        ("declare_changed", WEIGHT_CACHE.changed),
    )
)

for _each, _grad_transform in (
    (grouped_mm, _grouped_mm_grad),
    (_dgrad, None),
    (_wgrad, None),
    (nvfp4_grouped_mm, _gemm_gradient(nvfp4_grouped_mm, _nvfp4_dgrad, 4)),
    (_nvfp4_dgrad, None),
    (mxfp8_grouped_mm, _gemm_gradient(mxfp8_grouped_mm, _mxfp8_dgrad, 3)),
    (_mxfp8_dgrad, None),
    *((symbol, _gradient(symbol, backward)) for symbol, backward in _MXFP8_BACKWARD),
    *((backward, None) for _, backward in _MXFP8_BACKWARD),
    (mxfp8_fake_quantize, _fake_quantize_gradient(mxfp8_fake_quantize)),
    (nvfp4_grouped_swiglu, _gradient(nvfp4_grouped_swiglu, _swiglu_backward)),
    (_swiglu_backward, None),
    (nvfp4_combine, _gradient(nvfp4_combine, _combine_backward)),
    (_combine_backward, None),
    (nvfp4_mm, _gradient(nvfp4_mm, _dense_backward)),
    (_dense_backward, None),
    (_nvfp4_experts_lora, _gradient(_nvfp4_experts_lora, _lora_backward)),
    (_lora_backward, None),
    (moe_combine, _gradient(moe_combine, _sum_backward)),
    (_sum_backward, None),
    (moe_route, None),
    (nvfp4_fake_quantize, _fake_quantize_gradient(nvfp4_fake_quantize)),
    (moe_router, _router_grad),
    (moe_linear_router, None),
    (_router_backward, None),
):
    EXECUTOR.register_implementation(_each, _each, grad_transform=_grad_transform)

"""The symbols that moe_executor puts into Thunder's traces: meta, implementation and gradient of each.
Called by the other modules of this folder; calls the operators of ops and weight_cache.py.

16-bit:  moe_grouped_mm, with the dgrad and wgrad that Thunder 0.2.6 lacks.
Packed:  every operator that `ops.operator.OPERATORS` describes, by its own name, and its gradient with "_backward".
Prologue: nvfp4_pack, which quantizes a weight once and hands out the cached result; nvfp4_swizzle, which lays a
quantized one out as nvFuser takes it, once; check_grad_mode, check_memory, check_replaced and declare_changed.

Legend: M rows, E experts, N out_features, K in_features.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import thunder.core.dtypes as dtypes
import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.module import ThunderModule
from thunder.core.prims import OpTags, get_grad, put_grad
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from torch import Tensor

from thunder_moe import __version__, weight_cache
from thunder_moe.compilers import nvf_cutlass as _nvf_cutlass  # noqa: F401  (registers its operator)
from thunder_moe.compilers.eligibility import Decision, GroupedGemm
from thunder_moe.compilers.report import Others, record
from thunder_moe.compilers.safety import is_hidden_training_forward
from thunder_moe.compilers.thunder.lookasides import LateLookasides
from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4, BlockFormat
from thunder_moe.formats.layouts import LINEAR, SWIZZLED_128X4, scale_shape
from thunder_moe.kernels import trainable_grouped_mm
from thunder_moe.ops import activation, experts_lora, fake_quantize, scaled_mm  # noqa: F401  (registers the operators)
from thunder_moe.ops.operator import OPERATORS, Operator, op_name_for
from thunder_moe.weight_cache import pad_rows

OPTION = "moe_format"  # of thunder.jit


def decided_before(gemm: GroupedGemm, name: str) -> None:
    """Leave a GEMM unchanged: the value of `OPTION` for graphs that have been rewritten and reported already."""


class MoEExecutor(LateLookasides):
    """An operator executor that notices compilations in which no grouped GEMM was traced."""

    def __init__(self) -> None:
        super().__init__("thunder_moe", version=__version__)
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def record(self, data: Any, decisions: list[Decision], others: Sequence[Others] = ()) -> None:
        """Record what was decided in a compilation, unless its graph was reported before."""
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


def register(
    name: str,
    run: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    *,
    meta: Callable[..., Any] | None = None,
) -> Symbol:
    """Register a symbol of the executor, which `run` computes from tensors.

    Without a gradient (Thunder's grad transform), autodiff takes the results for constants. Without a meta function,
    which makes the proxies of the results, `run` runs on tensors without data.
    """
    symbol = EXECUTOR.register_operator(name, meta=meta or _meta(run), fn=run)
    EXECUTOR.register_implementation(symbol, symbol, grad_transform=gradient)
    return symbol


def _meta(run: Callable[..., Any], signature: inspect.Signature | None = None) -> Callable[..., Any]:
    """Return the meta function of a torch function; Thunder fills in defaults by the signature."""

    def meta(*args: Any, **options: Any) -> Any:
        results = run(*map(_without_data, args), **options)
        proxies = tuple(
            TensorProxy(like=args[0], shape=tuple(result.shape), dtype=dtypes.to_dtype(result.dtype))
            for result in (results if isinstance(results, tuple) else (results,))
        )
        return proxies if isinstance(results, tuple) else proxies[0]

    if signature is not None:
        meta.__signature__ = signature  # type: ignore[attr-defined]
    return meta


def _without_data(argument: Any) -> Any:
    if not isinstance(argument, TensorProxy):
        return argument
    return torch.empty(tuple(argument.shape), dtype=dtypes.to_torch_dtype(argument.dtype), device="meta")


# ---- 16-bit grouped GEMM: a (M, K), b (E, K, N), offsets int32 (E,) row ends
# `own`: True for GroupedLinear, whose result is zero past the last row end, also in sizes and dtypes that torch's GEMM
# lacks.


def _grouped_mm_meta(
    a: TensorProxy, b: TensorProxy, offsets: TensorProxy, out_dtype: Any = None, own: bool = False
) -> TensorProxy:
    if offsets.dtype != dtypes.int32 or tuple(offsets.shape) != (b.shape[0],):
        raise ValueError(f"offs: got {offsets.dtype} {tuple(offsets.shape)}, wanted int32 ({b.shape[0]},)")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"mat_a: got shape {tuple(a.shape)}, wanted (rows, {b.shape[1]}) by mat_b's {tuple(b.shape)}")
    dtype = a.dtype if out_dtype is None else dtypes.to_dtype(out_dtype)
    return TensorProxy(like=a, shape=(a.shape[0], b.shape[2]), dtype=dtype)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None, own: bool = False) -> Any:
    return _OPS.grouped_linear(a, b.mT, offsets) if own else trainable_grouped_mm.forward(a, b, offsets, out_dtype)


def _dgrad(grad: Tensor, b: Tensor, offsets: Tensor, own: bool) -> Any:
    run = _OPS.grouped_linear_dgrad if own else _OPS.trainable_grouped_mm_dgrad
    return run(grad, b.mT if own else b, offsets)


def _wgrad(a: Tensor, grad: Tensor, offsets: Tensor, own: bool) -> Any:
    return _OPS.grouped_linear_wgrad(a, grad, offsets).mT if own else _OPS.trainable_grouped_mm_wgrad(a, grad, offsets)


def _grouped_mm_gradient(
    a: TensorProxy, b: TensorProxy, offsets: TensorProxy, out_dtype: Any = None, own: bool = False
) -> TensorProxy:
    out: TensorProxy = grouped_mm(a, b, offsets, out_dtype, own)
    grad = get_grad(out).to(a.dtype)
    put_grad(a, _grouped_mm_dgrad(grad, b, offsets, own))
    put_grad(b, _grouped_mm_wgrad(a, grad, offsets, own))
    return out


grouped_mm = register("moe_grouped_mm", _grouped_mm, _grouped_mm_gradient, meta=_grouped_mm_meta)
_grouped_mm_dgrad = register("moe_grouped_mm_dgrad", _dgrad)
_grouped_mm_wgrad = register("moe_grouped_mm_wgrad", _wgrad)


# ---- the operators, as ops.operator describes them

_GEMM, _SWIGLU = "f16a_nvfp4weight_scaled_grouped_mm", "f16a_nvfp4weight_grouped_swiglu"
_AMAX = inspect.Parameter("activation_amax", inspect.Parameter.KEYWORD_ONLY, default=None)


def _of_operator(operator: Operator) -> Symbol:
    """Register the symbol of an operator and, where it has a gradient, the symbol of its backward.

    `activation_amax`, which the operators do not have, is for nvFuser's translators: our kernels keep rows in 16 bits.
    """
    run: Callable[..., Any] = operator  # leaves torch's dispatcher out where it can
    meta = _meta(operator, operator.signature)
    if operator.name in (_GEMM, _SWIGLU):

        def run(*args: Any, activation_amax: float | None = None, **options: Any) -> Any:
            return operator(*args, **options)

        meta = _meta(run, operator.signature.replace(parameters=[*operator.signature.parameters.values(), _AMAX]))
    if not operator.differentiable:
        return register(operator.name, run, meta=meta)

    def run_backward(grad: Tensor, *saved: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(of for of in operator.gradients(grad, saved, **options) if of is not None)

    def gradient(*args: Any, activation_amax: float | None = None, **options: Any) -> Any:
        calibrated = {} if activation_amax is None else dict(activation_amax=activation_amax)
        out = symbol(*args, **options, **calibrated)
        results = out if isinstance(out, tuple) else (out,)
        grads = backward(get_grad(results[0]), *operator.saved(args, results), **options)
        differentiable = [args[position] for position in operator.positions if args[position] is not None]
        for argument, grad in zip(differentiable, grads, strict=True):
            put_grad(argument, grad)
        return out

    backward = register(f"{operator.name}_backward", run_backward)
    symbol = register(operator.name, run, gradient, meta=meta)
    return symbol


_COMPOSED = [op_name_for("f16a_nvfp4weight_moe_experts", format) for format in BLOCK_FORMATS.values()]
OPERATOR_SYMBOLS = {
    name: _of_operator(operator)
    for name, operator in OPERATORS.items()
    if name not in _COMPOSED and not operator.mutates  # Thunder's symbols change nothing
}
moe_route, moe_router = OPERATOR_SYMBOLS["moe_route"], OPERATOR_SYMBOLS["moe_router"]
nvfp4_grouped_mm, nvfp4_grouped_swiglu = OPERATOR_SYMBOLS[_GEMM], OPERATOR_SYMBOLS[_SWIGLU]
_STEMS = ("scaled_grouped_mm", "grouped_swiglu", "grouped_mm_combine", "scaled_mm")
# Symbols by number format and the end of the operator's name.
SYMBOLS = {
    format.name: {stem: OPERATOR_SYMBOLS[op_name_for(f"f16a_nvfp4weight_{stem}", format)] for stem in _STEMS}
    for format in BLOCK_FORMATS.values()
}


def moe_experts(format: str) -> Callable[..., TensorProxy]:
    """Return the operator moe_experts of a number format in a trace: its parts, which nvFuser may take."""
    operator, symbols = OPERATORS[f"f16a_{format}weight_moe_experts"], SYMBOLS[format]

    def parts(*given: Any, **options: Any) -> TensorProxy:
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

    return parts


# ---- the prologue: weights are packed, and what their copies rely on is checked and declared


def _pack_meta(
    *weights: TensorProxy,
    transposed: bool = False,
    interleaved: bool = False,
    layout: str = LINEAR,
    names: str = "",
    format: str = NVFP4.name,
) -> tuple[TensorProxy, ...]:
    """Return proxies of what `weight_cache.operands` makes of weights (E, N, K), or (E, K, N) when transposed."""
    experts, n, k = weights[0].shape
    n, k = (k, n) if transposed else (n, k)
    swizzled = layout == SWIZZLED_128X4
    n = len(weights) * (pad_rows(n) if swizzled else n)
    global_shape = (experts,) if swizzled or len(weights) == 1 else (experts, n)
    return _operands(weights[0], n, k, global_shape, layout, BLOCK_FORMATS[format])


def _swizzle_meta(qdata: TensorProxy, scale: TensorProxy, global_scale: TensorProxy, *, parts: int) -> Any:
    """Return proxies of what `weight_cache.swizzled` makes of the tensors of an `NVFP4Weight`."""
    _, n, half = qdata.shape
    return _operands(qdata, parts * pad_rows(n // parts), 2 * half, tuple(global_scale.shape), SWIZZLED_128X4, NVFP4)


def _operands(
    like: TensorProxy, n: int, k: int, global_shape: tuple[int, ...], layout: str, format: BlockFormat
) -> tuple[TensorProxy, ...]:
    """Return proxies of a weight's tensors as operators take them; the codes are float4 where nvFuser reads them."""
    experts, codes = like.shape[0], format.code_dtypes[-1 if layout == SWIZZLED_128X4 else 0]
    tensors = (
        ((experts, k // format.codes_per_byte, n), codes),
        (scale_shape(experts, n, k, layout, format), format.scale_dtype),
        (global_shape, torch.float32),
    )
    return tuple(
        TensorProxy(like=like, shape=shape, dtype=dtypes.to_dtype(dtype), requires_grad=False)
        for shape, dtype in tensors[: len(format.fields)]
    )


def _check_grad_mode(*weights: Tensor, hidden_training: bool) -> None:
    # Thunder tries its next compilation when a prologue raises.
    if is_hidden_training_forward() != hidden_training:
        raise RuntimeError("compiled inside of an autograd.Function's forward, and called outside, or the reverse")


def _check_memory(*tensors: Tensor, packed: int) -> None:
    addresses = [weight_cache.local_data(tensor).untyped_storage().data_ptr() for tensor in tensors]
    shared = set(addresses[:packed]).intersection(addresses[packed:]) - {0}
    if shared:
        shapes = " and ".join(str(tuple(tensors[addresses.index(address)].shape)) for address in shared)
        raise ValueError(
            f"a frozen expert weight of shape {shapes} shares its memory with a tensor that the compiled function "
            "changes in place, so its 4-bit copy would be out of date during the call: pass a copy of that tensor"
        )


def _check_replaced(*modules_and_weights: Any, paths: tuple[tuple[str, ...], ...]) -> None:
    for module, weight, path in zip(modules_and_weights[::2], modules_and_weights[1::2], paths, strict=True):
        if not isinstance(module, ThunderModule):  # Thunder looks such a one's parameters up at every call
            continue
        owner = module._modules["_model"]
        for name in path[:-1]:
            owner = owner._modules.get(name)
            if owner is None:
                break
        if owner is None or owner._parameters.get(path[-1], owner._buffers.get(path[-1])) is not weight:
            raise ValueError(
                f"{'.'.join(path)}: it, or a module that holds it, was replaced after thunder.jit, and Thunder goes on "
                "with its own: call thunder.jit again, or keep the tensor and assign its .data. (module.to() replaces "
                "buffers; load_state_dict(assign=True) of the compiled module replaces the tensors of Thunder alone)"
            )


nvfp4_pack = EXECUTOR.register_operator("nvfp4_pack", meta=_pack_meta, fn=weight_cache.operands)
nvfp4_swizzle = EXECUTOR.register_operator("nvfp4_swizzle", meta=_swizzle_meta, fn=weight_cache.swizzled)
check_grad_mode, check_memory, check_replaced, declare_changed = (
    EXECUTOR.register_operator(name, meta=lambda *args, **options: None, fn=function, tags=[OpTags.DONT_DCE])
    for name, function in (
        ("check_grad_mode", _check_grad_mode),
        ("check_memory", _check_memory),
        ("check_replaced", _check_replaced),
        ("declare_changed", weight_cache.changed),
    )
)

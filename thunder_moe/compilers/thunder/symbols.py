"""The symbols that moe_executor puts into Thunder's traces: meta, implementation and gradient of each.
Called by rewrite.py and executor.py; calls the operators of ops and weight_cache.py.

16-bit:  moe_grouped_mm, with the dgrad and wgrad that Thunder 0.2.6 lacks.
NVFP4:   f16a_nvfp4weight_scaled_grouped_mm, f16a_nvfp4weight_grouped_swiglu, f16a_nvfp4weight_grouped_mm_combine and
moe_route, arguments as the operators'.
Prologue: nvfp4_pack, which quantizes a weight once and hands out the cached result; nvfp4_swizzle, which lays a
quantized one out as nvFuser takes it, once; check_grad_mode, check_memory and declare_changed.

Legend: M rows, E experts, N out_features, K in_features, I intermediate_size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thunder_moe.compilers.thunder.compat import import_thunder

import_thunder()

import thunder.core.dtypes as dtypes  # noqa: E402
from thunder.core.compile_data import get_compile_data  # noqa: E402
from thunder.core.prims import OpTags, get_grad, put_grad  # noqa: E402
from thunder.core.proxies import TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol  # noqa: E402
from thunder.extend import OperatorExecutor  # noqa: E402

from thunder_moe import __version__  # noqa: E402
from thunder_moe.compilers.report import record  # noqa: E402
from thunder_moe.compilers.safety import is_hidden_training_forward  # noqa: E402
from thunder_moe.formats.layouts import BLOCK_SIZE, scale_shape  # noqa: E402
from thunder_moe.ops import grouped_mm_combine as _grouped_mm_combine  # noqa: E402
from thunder_moe.ops import grouped_swiglu as _grouped_swiglu  # noqa: E402
from thunder_moe.ops import route as _route  # noqa: E402, F401  (registers the operator)
from thunder_moe.ops import trainable_grouped_mm  # noqa: E402
from thunder_moe.weight_cache import WEIGHT_CACHE, pad_rows  # noqa: E402

__all__ = [
    "EXECUTOR",
    "check_grad_mode",
    "check_memory",
    "declare_changed",
    "grouped_mm",
    "moe_route",
    "nvfp4_combine",
    "nvfp4_grouped_mm",
    "nvfp4_grouped_swiglu",
    "nvfp4_pack",
    "nvfp4_swizzle",
]


class MoEExecutor(OperatorExecutor):  # type: ignore[misc]  # Any to mypy, which skips Thunder
    """An operator executor that notices compilations in which no grouped GEMM was traced."""

    def __init__(self) -> None:
        super().__init__("thunder_moe", version=__version__)
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def recorded(self, compile_data: Any) -> None:
        """The rewrite is a part of this compilation and records what it does."""
        self._seen.add(compile_data)

    def can_execute(self, bsym: BoundSymbol) -> bool:
        # Thunder asks about every symbol of a computation; by the first one, the tracing is over.
        data = get_compile_data()
        if data is not None and data not in self._seen:
            self._seen.add(data)
            record(data, [])
        return bool(super().can_execute(bsym))


EXECUTOR = MoEExecutor()

# ---- 16-bit grouped GEMM: a (M, K), b (E, K, N), offsets int32 (E,) row ends


def _grouped_mm_meta(a: TensorProxy, b: TensorProxy, offsets: TensorProxy, out_dtype: Any = None) -> TensorProxy:
    if offsets.dtype != dtypes.int32 or tuple(offsets.shape) != (b.shape[0],):
        raise ValueError(f"offs: got {offsets.dtype} {tuple(offsets.shape)}, wanted int32 ({b.shape[0]},)")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"mat_a: got shape {tuple(a.shape)}, wanted (rows, {b.shape[1]}) by mat_b's {tuple(b.shape)}")
    dtype = a.dtype if out_dtype is None else dtypes.to_dtype(out_dtype)
    return TensorProxy(like=a, shape=(a.shape[0], b.shape[2]), dtype=dtype)


def _dgrad_meta(grad: TensorProxy, b: TensorProxy, offsets: TensorProxy) -> TensorProxy:
    return TensorProxy(like=grad, shape=(grad.shape[0], b.shape[1]))


def _wgrad_meta(a: TensorProxy, grad: TensorProxy, offsets: TensorProxy) -> TensorProxy:
    return TensorProxy(like=a, shape=(offsets.shape[0], a.shape[1], grad.shape[1]))


grouped_mm = EXECUTOR.register_operator("moe_grouped_mm", meta=_grouped_mm_meta, fn=trainable_grouped_mm.forward)
_dgrad = EXECUTOR.register_operator("moe_grouped_mm_dgrad", meta=_dgrad_meta, fn=trainable_grouped_mm.dgrad)
_wgrad = EXECUTOR.register_operator("moe_grouped_mm_wgrad", meta=_wgrad_meta, fn=trainable_grouped_mm.wgrad)


def _grouped_mm_grad(a: TensorProxy, b: TensorProxy, offsets: TensorProxy, out_dtype: Any = None) -> TensorProxy:
    out = grouped_mm(a, b, offsets, out_dtype)
    grad = get_grad(out).to(a.dtype)
    put_grad(a, _dgrad(grad, b, offsets))
    put_grad(b, _wgrad(a, grad, offsets))
    return out


# ---- NVFP4: a (M, K), fp4_weight (E, K // 2, N), scale (E, N, K // 16), global_scale (E,) or (E, N)
# activation_amax, which the operators do not have, is for nvFuser's translators: our kernels keep the rows 16-bit.


def _nvfp4_meta(
    a: TensorProxy,
    fp4_weight: TensorProxy,
    scale: TensorProxy,
    global_scale: TensorProxy,
    offsets: TensorProxy,
    blockscale_offsets: TensorProxy | None = None,
    problem_sizes: TensorProxy | None = None,
    *,
    layout: str = "linear",
    activation_amax: float | None = None,
) -> TensorProxy:
    return TensorProxy(like=a, shape=(a.shape[0], fp4_weight.shape[2]))


def _nvfp4_dgrad_meta(
    grad: TensorProxy,
    fp4_weight: TensorProxy,
    scale: TensorProxy,
    global_scale: TensorProxy,
    offsets: TensorProxy,
    *,
    layout: str = "linear",
) -> TensorProxy:
    return TensorProxy(like=grad, shape=(grad.shape[0], 2 * fp4_weight.shape[1]))


def _swiglu_meta(
    a: TensorProxy,
    fp4_weight: TensorProxy,
    scale: TensorProxy,
    global_scale: TensorProxy,
    offsets: TensorProxy,
    row_slot: TensorProxy | None = None,
    slot_scale: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    *,
    layout: str = "linear",
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
    activation_amax: float | None = None,
) -> TensorProxy:
    rows = (a if row_slot is None else row_slot).shape[0]
    return TensorProxy(like=a, shape=(rows, fp4_weight.shape[2] // 2))


def _combine_meta(
    a: TensorProxy,
    fp4_weight: TensorProxy,
    scale: TensorProxy,
    global_scale: TensorProxy,
    offsets: TensorProxy,
    slot_row: TensorProxy,
    slot_weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    *,
    layout: str = "linear",
) -> TensorProxy:
    return TensorProxy(like=a, shape=(slot_row.shape[0], fp4_weight.shape[2]))


def _backward_meta(
    grad: TensorProxy,
    a: TensorProxy,
    fp4_weight: TensorProxy,
    scale: TensorProxy,
    global_scale: TensorProxy,
    offsets: TensorProxy,
    slots: TensorProxy | None = None,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    **options: Any,
) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=tensor) for tensor in (a, weight, bias) if tensor is not None)


def _backward_impl(function: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """All gradients that there are, without the places of arguments that are None."""

    def run(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        grads = function(*args, **options, needs=(True, True, True))
        return tuple(grad for grad in grads if grad is not None)

    return run


def _route_meta(expert_ids: TensorProxy, num_experts: int) -> tuple[TensorProxy, ...]:
    slots = expert_ids.shape[0] * expert_ids.shape[1]
    shapes = ((slots,), (num_experts,), tuple(expert_ids.shape))
    return tuple(TensorProxy(like=expert_ids, shape=shape, dtype=dtypes.int32, requires_grad=False) for shape in shapes)


def _without_amax(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, activation_amax: float | None = None, **kwargs: Any) -> Tensor:
        return operator(*args, **kwargs)

    return run


_OPS = torch.ops.thunder_moe
_NAME, _SWIGLU_NAME = "f16a_nvfp4weight_scaled_grouped_mm", "f16a_nvfp4weight_grouped_swiglu"
_COMBINE_NAME = "f16a_nvfp4weight_grouped_mm_combine"
nvfp4_grouped_mm = EXECUTOR.register_operator(_NAME, meta=_nvfp4_meta, fn=_without_amax(getattr(_OPS, _NAME)))
_nvfp4_dgrad = EXECUTOR.register_operator(f"{_NAME}_dgrad", meta=_nvfp4_dgrad_meta, fn=getattr(_OPS, f"{_NAME}_dgrad"))
nvfp4_grouped_swiglu = EXECUTOR.register_operator(
    _SWIGLU_NAME, meta=_swiglu_meta, fn=_without_amax(getattr(_OPS, _SWIGLU_NAME))
)
_swiglu_backward = EXECUTOR.register_operator(
    f"{_SWIGLU_NAME}_backward", meta=_backward_meta, fn=_backward_impl(_grouped_swiglu.swiglu_backward)
)
nvfp4_combine = EXECUTOR.register_operator(_COMBINE_NAME, meta=_combine_meta, fn=getattr(_OPS, _COMBINE_NAME))
_combine_backward = EXECUTOR.register_operator(
    f"{_COMBINE_NAME}_backward", meta=_backward_meta, fn=_backward_impl(_grouped_mm_combine.combine_backward)
)
moe_route = EXECUTOR.register_operator("moe_route", meta=_route_meta, fn=_OPS.moe_route)


def _nvfp4_grad(
    a: TensorProxy,
    fp4_weight: TensorProxy,
    scale: TensorProxy,
    global_scale: TensorProxy,
    offsets: TensorProxy,
    blockscale_offsets: TensorProxy | None = None,
    problem_sizes: TensorProxy | None = None,
    *,
    layout: str = "linear",
    activation_amax: float | None = None,
) -> TensorProxy:
    packed = (fp4_weight, scale, global_scale, offsets)
    options = dict(layout=layout, activation_amax=activation_amax)
    out = nvfp4_grouped_mm(a, *packed, blockscale_offsets, problem_sizes, **options)
    put_grad(a, _nvfp4_dgrad(get_grad(out), *packed, layout=layout))
    return out


def _swiglu_grad(
    a: TensorProxy,
    fp4_weight: TensorProxy,
    scale: TensorProxy,
    global_scale: TensorProxy,
    offsets: TensorProxy,
    row_slot: TensorProxy | None = None,
    slot_scale: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    *,
    activation_amax: float | None = None,
    **options: Any,
) -> TensorProxy:
    args = (a, fp4_weight, scale, global_scale, offsets, row_slot, slot_scale, bias)
    out = nvfp4_grouped_swiglu(*args, **options, activation_amax=activation_amax)
    _put_grads(_swiglu_backward(get_grad(out), *args, **options), a, slot_scale, bias)
    return out


def _combine_grad(
    a: TensorProxy,
    fp4_weight: TensorProxy,
    scale: TensorProxy,
    global_scale: TensorProxy,
    offsets: TensorProxy,
    slot_row: TensorProxy,
    slot_weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    *,
    layout: str = "linear",
) -> TensorProxy:
    args = (a, fp4_weight, scale, global_scale, offsets, slot_row, slot_weight, bias)
    out = nvfp4_combine(*args, layout=layout)
    _put_grads(_combine_backward(get_grad(out), *args, layout=layout), a, slot_weight, bias)
    return out


def _put_grads(grads: tuple[TensorProxy, ...], *arguments: TensorProxy | None) -> None:
    given = (argument for argument in arguments if argument is not None)
    for argument, grad in zip(given, grads, strict=True):
        put_grad(argument, grad)


# ---- the prologue: weights are packed, and what their copies rely on is checked and declared


def pack_meta(
    *weights: TensorProxy,
    transposed: bool = False,
    interleaved: bool = False,
    layout: str = "linear",
    names: str = "",
) -> tuple[TensorProxy, ...]:
    """Proxies of the operators' three weight arguments for weights (E, N, K), or (E, K, N) when transposed.

    In layout "swizzled_128x4" they are as nvFuser takes them, see `WeightCache.operands`.
    """
    experts, n, k = weights[0].shape
    if transposed:
        n, k = k, n
    if layout == "swizzled_128x4":
        return _swizzled(weights[0], experts, len(weights) * pad_rows(n), k, (experts,))
    n *= len(weights)
    global_shape = (experts,) if len(weights) == 1 else (experts, n)
    return _proxies(weights[0], dtypes.uint8, (experts, k // 2, n), (experts, n, k // BLOCK_SIZE), global_shape)


def swizzle_meta(
    qdata: TensorProxy, scale: TensorProxy, global_scale: TensorProxy, *, parts: int
) -> tuple[TensorProxy, ...]:
    """Proxies of what `WeightCache.swizzled` makes of the tensors of an `NVFP4Weight`."""
    experts, n, half = qdata.shape
    return _swizzled(qdata, experts, parts * pad_rows(n // parts), 2 * half, tuple(global_scale.shape))


def _swizzled(
    like: TensorProxy, experts: int, n: int, k: int, global_shape: tuple[int, ...]
) -> tuple[TensorProxy, ...]:
    scales = scale_shape(experts, n, k, "swizzled_128x4")
    return _proxies(like, dtypes.float4_e2m1fn_x2, (experts, k // 2, n), scales, global_shape)


def _proxies(like: TensorProxy, fp4: dtypes.dtype, *shapes: tuple[int, ...]) -> tuple[TensorProxy, ...]:
    return tuple(
        TensorProxy(like=like, shape=shape, dtype=dtype, requires_grad=False)
        for shape, dtype in zip(shapes, (fp4, dtypes.float8_e4m3fn, dtypes.float32), strict=True)
    )


def _pack_impl(*weights: Tensor, names: str = "", **form: Any) -> tuple[Tensor, Tensor, Tensor]:
    try:
        return WEIGHT_CACHE.operands(*weights, **form)
    except ValueError as error:
        raise ValueError(f"cannot quantize {names}: {error}") from error


def _swizzle_impl(qdata: Tensor, scale: Tensor, global_scale: Tensor, *, parts: int) -> tuple[Tensor, Tensor, Tensor]:
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

for _symbol, _gradient in (
    (grouped_mm, _grouped_mm_grad),
    (_dgrad, None),
    (_wgrad, None),
    (nvfp4_grouped_mm, _nvfp4_grad),
    (_nvfp4_dgrad, None),
    (nvfp4_grouped_swiglu, _swiglu_grad),
    (_swiglu_backward, None),
    (nvfp4_combine, _combine_grad),
    (_combine_backward, None),
    (moe_route, None),
):
    EXECUTOR.register_implementation(_symbol, _symbol, grad_transform=_gradient)

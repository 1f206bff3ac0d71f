"""nvFuser's own NVFP4 kernels on Blackwell (SM 10.0): checkers and translators of the package's two operators.
Called by executor.py (`register`), rewrite.py and sites.py (`refusal`), and nvFuser's fusion pass; calls nvFuser.

row ends -> row starts, block-scale starts, problem sizes -> quantize the rows -> CUTLASS grouped GEMM (-> SwiGLU), all
inside the fusion, once for the GEMMs that share it. The kernel is W4A4: it multiplies 4-bit rows by 4-bit weights;
kernels/w4a4.py computes the same in plain torch.

Legend: M rows, E experts, N output features, K input features, I intermediate_size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import thunder.core.dtypes as dtypes
import torch
from looseversion import LooseVersion
from thunder.core.devices import DeviceType
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.executors.nvfuserex import nvfuser_version, nvfuserex

from thunder_moe.compilers.thunder.symbols import nvfp4_grouped_mm, nvfp4_grouped_swiglu
from thunder_moe.formats.layouts import LINEAR, SWIZZLED_128X4
from thunder_moe.formats.nvfp4 import BLOCK_SIZE, E2M1_MAX, E4M3_MAX
from thunder_moe.kernels.w4a4 import SMALLEST_AMAX
from thunder_moe.ops.operator import OPERATORS

LAYOUT = SWIZZLED_128X4  # of the weights' block scales
SM100 = (10, 0)
FIRST_VERSION = LooseVersion("0.2.36")  # the first with nv_grouped_block_quantize
K_MULTIPLE, N_MULTIPLE, MOST_EXPERTS = 64, 128, 1024


def register() -> None:
    """Tell nvFuser's executor about the two operators; nothing to do where nvFuser is not installed."""
    if nvfuserex is None:
        return
    from thunder.executors import nvfuserex_impl

    nvfuserex_impl.register_supported(nvfp4_grouped_mm, _translate_grouped_mm, _checker(nvfp4_grouped_mm))
    nvfuserex_impl.register_supported(nvfp4_grouped_swiglu, _translate_grouped_swiglu, _checker(nvfp4_grouped_swiglu))


def is_listed(executors: Sequence[Any]) -> bool:
    """True if nvFuser is among the executors of a compilation."""
    return nvfuserex is not None and nvfuserex in executors


def is_plain(symbol: Symbol, *args: Any, **kwargs: Any) -> bool:
    """True if a call has operands in layout "linear" and nothing else that makes a difference."""
    call = _Call(symbol, args, kwargs)
    return call.unknown is None and call.layout == LINEAR and len(call.tensors) == len(OPERANDS)


def _checker(symbol: Symbol) -> Callable[..., bool]:
    return lambda *args, **kwargs: refusal(symbol, *args, **kwargs) is None


def refusal(symbol: Symbol, *args: Any, **kwargs: Any) -> str | None:
    """Return why nvFuser does not run a call of one of the two operators; None if it does. The checks, in order:

    - no argument but the operands, layout and activation_amax differs from its default;
    - everything on one CUDA device, of compute capability exactly 10.0, the only one that the kernel is built for;
    - nvFuser 0.2.36 or newer;
    - layout "swizzled_128x4", fp4_weight float4_e2m1fn_x2 (nvFuser has no uint8), block scales e4m3;
    - activation bfloat16 or float16 (M, K), one float32 global scale per expert;
    - offsets (and blockscale_offsets, problem_sizes, where given) int32, which CUTLASS does not check;
    - K a multiple of 64, N of 128, at most 1024 experts, at least one row.
    """
    call = _Call(symbol, args, kwargs)
    if call.unknown is not None:
        return f"its kernel has no {call.unknown}"
    for name, tensor in call.tensors.items():
        if not isinstance(tensor, TensorProxy):
            return f"{name} is {tensor!r}, not a tensor"
    return _device_refusal(call) or _operand_refusal(call)


def _device_refusal(call: _Call) -> str | None:
    device = call.activation.device
    for name, tensor in call.tensors.items():
        if tensor.device.devicetype is not DeviceType.CUDA or tensor.device != device:
            return f"{name} is on {tensor.device.device_str()}, wanted all on one CUDA device"
    capability = torch.cuda.get_device_capability(device.index)
    if capability != SM100:
        return f"the compute capability is {capability[0]}.{capability[1]}, its NVFP4 kernel runs on 10.0 alone"
    version = nvfuser_version()
    if version is None or version < FIRST_VERSION:
        return f"nvFuser is {version}, wanted {FIRST_VERSION} or newer"
    return None


def _operand_refusal(call: _Call) -> str | None:
    if call.layout != LAYOUT:
        return f"layout is {call.layout!r}, wanted {LAYOUT!r}, which is made of buffers in layout 'linear'"
    for name, rank in dict(activation=2, fp4_weight=3, weight_scaling_factor=3).items():
        if call.tensors[name].ndim != rank:
            return f"{name} has {call.tensors[name].ndim} dims, wanted {rank}"
    experts, half, n = call.fp4_weight.shape
    m, k = call.activation.shape
    wanted: dict[str, tuple[tuple[dtypes.dtype, ...], tuple[int, ...]]] = dict(
        activation=((dtypes.bfloat16, dtypes.float16), (m, 2 * half)),
        fp4_weight=((dtypes.float4_e2m1fn_x2,), (experts, half, n)),
        weight_scaling_factor=((dtypes.float8_e4m3fn,), (experts, n, k // BLOCK_SIZE)),
        weight_global_scale=((dtypes.float32,), (experts,)),
        offsets=((dtypes.int32,), (experts,)),
        blockscale_offsets=((dtypes.int32,), (experts,)),
        problem_sizes=((dtypes.int32,), (experts, 3)),
    )
    for what, size, multiple in (("in_features", k, K_MULTIPLE), ("out_features", n, N_MULTIPLE)):
        if size % multiple:
            return f"{what} {size} is not a multiple of {multiple}"
    for name, tensor in call.tensors.items():
        allowed, shape = wanted[name]
        if dtypes.to_strong_dtype(tensor.dtype) not in allowed:
            wanted_dtypes = " or ".join(str(dtypes.to_torch_dtype(dtype)) for dtype in allowed)
            return f"{name} is {dtypes.to_torch_dtype(tensor.dtype)}, wanted {wanted_dtypes}"
        if tuple(tensor.shape) != shape:
            why = ", one scale per expert" if name == "weight_global_scale" else ""
            return f"{name} has shape {tuple(tensor.shape)}, wanted {shape}{why}"
    if experts > MOST_EXPERTS:
        return f"{experts} experts, at most {MOST_EXPERTS}"
    if m == 0:
        return "there are no rows"
    return None


# The arguments that the translators read; the optional ones are derived where they are None.
OPERANDS = ("activation", "fp4_weight", "weight_scaling_factor", "weight_global_scale", "offsets")
OPTIONAL = ("blockscale_offsets", "problem_sizes")
KNOWN = (*OPERANDS, *OPTIONAL, "layout", "activation_amax")


class _Call:
    """The arguments of a call of either operator, by the names of the operator's schema."""

    def __init__(self, symbol: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        defaults = {value.name: value.default for value in OPERATORS[symbol.name].signature.parameters.values()}
        given = dict(zip(defaults, args, strict=False)) | kwargs
        self.tensors: dict[str, Any] = {name: given[name] for name in OPERANDS}
        self.tensors |= {name: given[name] for name in OPTIONAL if given.get(name) is not None}
        self.activation, self.fp4_weight, _, _, self.offsets = (given[name] for name in OPERANDS)
        self.layout: str = given.get("layout", LINEAR)
        self.activation_amax: float | None = given.get("activation_amax")  # known from calibration
        # The first argument that the translators do not read, and that differs from its default.
        others = (name for name in given if name not in KNOWN)
        self.unknown = next((name for name in others if not _same(given[name], defaults.get(name))), None)


def _same(value: Any, default: Any) -> bool:
    # `==` of a proxy would be traced.
    return value is default if isinstance(value, TensorProxy) else value == default


# ---- the translators


def _translate_grouped_mm(*args: Any, fd: Any, lc_to_nv_map: Any, **kwargs: Any) -> Any:
    return _gemm(_Call(nvfp4_grouped_mm, args, kwargs), _Definition(fd, lc_to_nv_map))


def _translate_grouped_swiglu(*args: Any, fd: Any, lc_to_nv_map: Any, **kwargs: Any) -> Any:
    call, definition = _Call(nvfp4_grouped_swiglu, args, kwargs), _Definition(fd, lc_to_nv_map)
    gate_up = fd.ops.cast(_gemm(call, definition), definition.types.Float)  # [M, 2I]
    m, two_i = call.activation.shape[0], call.fp4_weight.shape[2]
    gate = fd.ops.slice(gate_up, [0, 0], [m, two_i // 2])
    up = fd.ops.slice(gate_up, [0, two_i // 2], [m, two_i])
    return fd.ops.cast(fd.ops.mul(fd.ops.silu(gate), up), definition.dtype(call.activation))


def _gemm(call: _Call, definition: _Definition) -> Any:
    """Return the fusion's GEMM of a call: (M, N) in the activation's dtype."""
    fd, tensors, offsets = definition.fd, call.tensors, call.offsets
    fp4_weight, scale, global_scale = (definition.get(tensors[name]) for name in OPERANDS[1:4])
    experts, half, n = call.fp4_weight.shape
    places = tensors.get("blockscale_offsets")
    sizes = tensors.get("problem_sizes")
    sizes = definition.problem_sizes(offsets, n, 2 * half) if sizes is None else definition.get(sizes)
    rows = definition.quantized(call.activation, call.activation_amax, offsets, places)
    quantized, row_scale, decode_scale, starts, scale_starts = rows
    alpha = fd.ops.mul(global_scale, fd.ops.broadcast_in_dim(decode_scale, [experts], []))
    return fd.ops.cutlass_nvfp4_grouped_mm(
        quantized, fp4_weight, row_scale, scale, alpha, sizes, starts, scale_starts, definition.dtype(call.activation)
    )


# Values that the GEMMs of a fusion share, by the proxies that they are made of. They live as long as Thunder's map of
# proxies.
_SHARED: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of `_Definition`: a fusion has its result once, for the same proxies and numbers."""

    def made(self: _Definition, *args: Any) -> Any:
        key = make.__name__, *(arg.name if isinstance(arg, TensorProxy) else arg for arg in args)
        if key not in self.shared:
            self.shared[key] = make(self, *args)
        return self.shared[key]

    return made


class _Definition:
    """A fusion under construction: looks up proxies, and makes what several GEMMs need once."""

    def __init__(self, fd: Any, lc_to_nv_map: Any) -> None:
        from thunder.executors import nvfuserex_impl

        self.fd, self._map, self._impl = fd, lc_to_nv_map, nvfuserex_impl
        self.types = nvfuserex_impl.DataType
        self.shared = _SHARED.setdefault(lc_to_nv_map, {})

    def get(self, proxy: TensorProxy) -> Any:
        return self._impl.getnv(proxy, self.fd, self._map)

    def dtype(self, proxy: TensorProxy) -> Any:
        return self._impl.lcdtype_to_nvdtype(proxy.dtype)

    def _int32(self, value: int) -> Any:
        return self.fd.define_scalar(value, self.types.Int32)

    def _float(self, value: float) -> Any:
        return self.fd.define_scalar(value, self.types.Float)

    @_once
    def starts_and_rows(self, offsets: TensorProxy) -> Any:
        """Return int32 (E,) each: the first row of every expert, and its number of rows."""
        ops, ends = self.fd.ops, self.get(offsets)
        starts = ops.slice(ops.pad(ends, [1, 0], self._int32(0)), [0], [offsets.shape[0]])
        return starts, ops.sub(ends, starts)

    @_once
    def scale_starts(self, offsets: TensorProxy) -> Any:
        """Return int32 (E,): the first row of every expert's block scales, each at a multiple of 128 rows."""
        ops, (_, rows) = self.fd.ops, self.starts_and_rows(offsets)
        padded = ops.bitwise_and(ops.add(rows, self._int32(127)), self._int32(-128))
        # CUTLASS reads these as int32 without a check: make sure that cumsum has not widened them.
        return ops.cast(ops.sub(ops.cumsum(padded, 0), padded), self.types.Int32)

    @_once
    def problem_sizes(self, offsets: TensorProxy, n: int, k: int) -> Any:
        """Return int32 (E, 3): the (rows, N, K) of every expert's GEMM."""
        ops, column, (_, rows) = self.fd.ops, [offsets.shape[0], 1], self.starts_and_rows(offsets)
        sizes = [ops.full(column, self._int32(size), self.types.Int32) for size in (n, k)]
        return ops.cat([ops.broadcast_in_dim(rows, column, [0]), *sizes], 1)

    @_once
    def quantized(
        self, proxy: TensorProxy, amax: float | None, offsets: TensorProxy, places: TensorProxy | None
    ) -> tuple[Any, ...]:
        """Return the rows as the kernel reads them: fp4 (M, K), e4m3 block scales swizzled and padded by expert, the
        0-d factor that decodes both, the experts' first rows, and the first rows of their scales (`places`, if given).
        """
        a, (starts, _) = self.get(proxy), self.starts_and_rows(offsets)
        scale_starts = self.scale_starts(offsets) if places is None else self.get(places)
        encode = self._encode_scale(proxy, a, amax, offsets)
        fp4, scale = self.fd.ops.nv_grouped_block_quantize(
            a, starts, scale_starts, encode, BLOCK_SIZE, self.types.Float4_e2m1fn
        )
        return fp4, scale, self.fd.ops.reciprocal(encode), starts, scale_starts

    def _encode_scale(self, proxy: TensorProxy, a: Any, amax: float | None, offsets: TensorProxy) -> Any:
        """Return 2688 (0-d) over the largest magnitude of the experts' rows, or over the one from calibration."""
        ops = self.fd.ops
        if amax is not None:
            return ops.full([], self._float(E2M1_MAX * E4M3_MAX / max(amax, SMALLEST_AMAX)), self.types.Float)
        # Rows past the last group are undefined: they do not count.
        (m, k), experts = proxy.shape, offsets.shape[0]
        end = ops.squeeze(ops.slice(self.get(offsets), [experts - 1], [experts]), [0])
        live = ops.lt(ops.iota(self._int32(m), dtype=self.types.Int32), ops.broadcast_in_dim(end, [m], []))
        magnitudes = ops.abs(ops.cast(a, self.types.Float))
        magnitudes = ops.where(ops.broadcast_in_dim(live, [m, k], [0]), magnitudes, self._float(0.0))
        largest = ops.max(magnitudes, [0, 1])
        return ops.div(self._float(E2M1_MAX * E4M3_MAX), ops.maximum(largest, self._float(SMALLEST_AMAX)))

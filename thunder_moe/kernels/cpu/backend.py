"""The compiled CPU backend: grouped GEMM with packed weights, fp32/bf16/fp16 activations.
Called through kernels/select.py with validated operands; `unavailable_reason()` says why it cannot run, if so.
Calls src/*.cpp through ctypes, compiled on first use by a C++ compiler and kept by kernels/code_cache.py.

Shapes: activation (M, K), rows sorted by expert; weight (E, N, K); offsets int32 (E,), cumulative row ends. On the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thunder_moe.activations import SWIGLU, SwiGLUConfig
from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels import add_norm, code_cache, host_code, reference
from thunder_moe.kernels.arguments import DTYPE_CODES, as_kernel_float, dtype_code, pointer
from thunder_moe.kernels.attention import decode_attention  # noqa: F401  (in reference.__all__)
from thunder_moe.kernels.batch_invariance import is_batch_invariant
from thunder_moe.kernels.cpu.crossover import NEVER, ROWS, Limits, forced_limits, limits_for
from thunder_moe.kernels.experts import unfused
from thunder_moe.kernels.forks import ForkLock
from thunder_moe.kernels.slow_paths import to_linear
from thunder_moe.routing import RouterConfig, gather_rows, row_groups, scale_of_rows

__all__ = ["dequantize"]
__all__ += reference.__all__

FORMATS = (NVFP4.name, MXFP8.name)  # of weights; a format's place is its number in src/numbers.h

_SOURCE = Path(__file__).with_name("src")
_SOURCES = tuple(_SOURCE / name for name in ("grouped_mm.cpp", "dgrad.cpp", "swiglu_combine.cpp", "router.cpp"))
_HEADERS = tuple(
    _SOURCE / name
    for name in ("decode.h", "exact.h", "exp.h", "gemv.h", "numbers.h", "panels.h", "register_tiles.h", "tiles.h")
)
# Without the last flag GCC keeps branches in the loops of swiglu_combine.cpp, because float operations might trap.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-trapping-math")

_lock = ForkLock()


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """Build and load the extension once per process.

    Returns:
        None if the backend can run, else a sentence that says why not. Never raises.
    """
    return _loaded()[1]


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the bits of `dequantize` of the format's module: (E, N, K)."""
    out = torch.empty(weight.shape, dtype=dtype)
    _dequantize_into(out, _linear(weight))
    return out


def grouped_mm(activation: Tensor, weight: PackedWeight, offsets: Tensor) -> Tensor:
    """Multiply each expert's rows by its weight: out[m] = activation[m] @ w[e].T, accumulated in fp32.

    Products are exact: a weight without its global scale is a bf16 number, the global scale multiplies the fp32 sum.
    Weights are decoded a slice at a time, of experts that have rows. The number of threads does not change the result.
    In the batch-invariant mode other rows do not change it either. The slice kernel adds the products of a lane of a
    vector in the order of k, within 4 KiB of a row. Then it adds the lanes, pairwise, then such parts of K in their
    order. The number of rows that share a register tile changes none of these orders.

    Returns:
        (M, N) in activation's dtype; rows at or past offsets[-1] are zero.
    """
    operand = _linear(weight)
    activation, offsets = activation.detach().contiguous(), offsets.contiguous()
    out = activation.new_empty(activation.shape[0], weight.shape[1])
    limits = _limits(activation.dtype, operand.format)
    _grouped_mm_into(out, activation, operand, offsets, limits)
    if limits.mm != NEVER:
        _mm_experts(activation, operand, offsets, out, limits.mm)
    out[max(int(offsets[-1]), 0) :].zero_()
    return out


def grouped_swiglu(
    activation: Tensor,
    weight: PackedWeight,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    form: SwiGLUConfig = SWIGLU,
) -> Tensor:
    """Return (M, I) of rows (M, K), or of tokens (T, K) with row_slot (M,); weight (E, 2I, K) has gate rows first."""
    offsets = offsets.contiguous()
    gate_up = grouped_mm(gather_rows(activation, row_slot), weight, offsets)
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    row_scale, (bias, *of_bias) = as_kernel_float(scale_of_rows(slot_scale, row_slot)), _bias(bias, offsets)
    numbers = (form.alpha, math.inf if form.limit is None else form.limit, form.up_shift)
    shape = (DTYPE_CODES[gate_up.dtype], rows, inner)
    _extension().thunder_moe_swiglu(
        gate_up.data_ptr(), *shape, pointer(row_scale), pointer(bias), *of_bias, *numbers, out.data_ptr()
    )
    return out


def grouped_mm_combine(
    activation: Tensor,
    weight: PackedWeight,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Multiply (M, K) -> (T, N): each slot's row, plus bias (E, N), times slot_weight (T, A), summed per token."""
    offsets = offsets.contiguous()
    rows = grouped_mm(activation, weight, offsets)
    (tokens, top_k), n = slot_row.shape, rows.shape[1]
    out = rows.new_empty(tokens, n)
    slot_row, (bias, *of_bias) = slot_row.contiguous(), _bias(bias, offsets)
    slot_weight = None if slot_weight is None else slot_weight.detach().float().contiguous()
    of_rows = (rows.data_ptr(), DTYPE_CODES[rows.dtype], rows.shape[0])
    slots = (slot_row.data_ptr(), pointer(slot_weight), tokens, top_k, n)
    _extension().thunder_moe_combine(*of_rows, *slots, pointer(bias), *of_bias, out.data_ptr())
    return out


def _bias(bias: Tensor | None, offsets: Tensor) -> tuple[Tensor | None, int, int, int]:
    """Return (bias, its dtype, the pointer of the row ends, num_experts) for the kernels of swiglu_combine.cpp."""
    bias = as_kernel_float(bias)
    return bias, dtype_code(bias), offsets.data_ptr(), offsets.shape[0]


def grouped_mm_dgrad(grad: Tensor, weight: PackedWeight, offsets: Tensor) -> Tensor:
    """Multiply each expert's rows of the output gradient by its weight: (M, N) -> (M, K), out[m] = grad[m] @ w[e].

    16-bit gradients are multiplied by panels of decoded weights where the CPU has that kernel. Otherwise one
    expert at a time is decoded and given to torch.mm. For fp16 that is torch.mm in fp32, which is far faster (64 rows,
    N=768, K=2048, one thread: 218 ms in fp16, 2.0 ms in fp32, 0.5 ms in bf16).

    Returns:
        (M, K) in grad's dtype; rows at or past offsets[-1] are zero.
    """
    operand = _linear(weight)
    grad, offsets = grad.detach().contiguous(), offsets.contiguous()
    num_experts, n, k = weight.shape
    out = grad.new_empty(grad.shape[0], k)
    if _gradient_by_panels(grad.dtype):
        shape = (offsets.data_ptr(), num_experts, n, k, DTYPE_CODES[grad.dtype], operand.number)
        rows = (grad.data_ptr(), grad.shape[0])
        _check(_extension().thunder_moe_grouped_mm_dgrad(*rows, *operand.pointers, *shape, out.data_ptr()))
    else:
        _mm_experts(grad, operand, offsets, out)
    out[max(int(offsets[-1]), 0) :].zero_()
    return out


def mm(activation: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply (M, K) by a weight (1, N, K), plus bias (N,): -> (M, N) in the activation's dtype, as one group."""
    out = grouped_mm(activation, weight, torch.tensor([activation.shape[0]], dtype=torch.int32))
    return out if bias is None else out.add_(bias.detach())


def mm_dgrad(grad: Tensor, weight: PackedWeight) -> Tensor:
    """Return the gradient (M, K) of `mm`'s activation, from the gradient (M, N) of its output."""
    return grouped_mm_dgrad(grad, weight, torch.tensor([grad.shape[0]], dtype=torch.int32))


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A weight in layout "linear", contiguous, as the kernels read it; global_scale is None if there is none."""

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor | None
    format: BlockFormat

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        experts, n, codes = self.qdata.shape
        return experts, n, codes * self.format.codes_per_byte

    @property
    def pointers(self) -> tuple[int, int, int | None, int]:
        tensors = self.qdata, self.scale, self.global_scale
        assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
        per_column = self.global_scale is not None and self.global_scale.dim() == 2
        return self.qdata.data_ptr(), self.scale.data_ptr(), pointer(self.global_scale), per_column

    @property
    def number(self) -> int:
        """Return the format's number in src/numbers.h."""
        return FORMATS.index(self.format.name)

    def expert(self, index: int) -> _Linear:
        """Return the weight of one expert."""
        one = slice(index, index + 1)
        global_scale = None if self.global_scale is None else self.global_scale[one]
        return _Linear(self.qdata[one], self.scale[one], global_scale, self.format)


def _linear(weight: PackedWeight) -> _Linear:
    """Return a linear, contiguous weight: a copy only if it is not already."""
    qdata, scale, *rest = (tensor.contiguous() for tensor in to_linear(weight).tensors())
    return _Linear(qdata, scale, rest[0] if rest else None, weight.format)


def _grouped_mm_into(out: Tensor, activation: Tensor, weight: _Linear, offsets: Tensor, limits: Limits) -> None:
    """Multiply the rows of experts with fewer than limits.mm rows; all tensors are contiguous."""
    rows = (activation.data_ptr(), activation.shape[0])
    shape = (offsets.data_ptr(), *weight.shape, DTYPE_CODES[activation.dtype], weight.number)
    kernels = (limits.mm - 1, limits.gemv, limits.tiles, limits.panel, limits.fma, limits.fp32_slices)
    _check(_extension().thunder_moe_grouped_mm(*rows, *weight.pointers, *shape, *kernels, out.data_ptr()))


def _mm_experts(rows: Tensor, weight: _Linear, offsets: Tensor, out: Tensor, min_rows: int = 0) -> None:
    """Decode one expert at a time and multiply: rows @ w; with `min_rows` rows @ w.T of experts with that many rows."""
    dtype = torch.float32 if rows.dtype == torch.float16 else rows.dtype
    buffer: Tensor | None = None
    with torch.autocast("cpu", enabled=False):
        for expert, begin, end in row_groups(offsets, rows.shape[0]):
            if end - begin < min_rows:
                continue
            if buffer is None:
                buffer = torch.empty(1, *weight.shape[1:], dtype=dtype)
            _dequantize_into(buffer, weight.expert(expert))
            matrix = buffer[0].t() if min_rows else buffer[0]
            if dtype == rows.dtype:
                torch.mm(rows[begin:end], matrix, out=out[begin:end])
            else:
                out[begin:end] = torch.mm(rows[begin:end].to(dtype), matrix)


def _dequantize_into(out: Tensor, weight: _Linear) -> None:
    num_experts, n, k = weight.shape
    shape = (num_experts * n, n, k, DTYPE_CODES[out.dtype], weight.number)
    _check(_extension().thunder_moe_dequantize(*weight.pointers, *shape, out.data_ptr()))


def route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort slots by expert: (T, A) -> row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
    expert_ids = expert_ids.contiguous()
    slots, wide = expert_ids.numel(), expert_ids.dtype == torch.int64
    row_slot, offsets = (torch.empty(size, dtype=torch.int32) for size in (slots, num_experts))
    order = row_slot, offsets, torch.empty(expert_ids.shape, dtype=torch.int32)
    _check(_extension().thunder_moe_route(expert_ids.data_ptr(), wide, slots, num_experts, *map(pointer, order)))
    return order


def router(
    logits: Tensor, bias: Tensor | None, form: RouterConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Route (T, E), (E,) -> scores (T, A) in a dtype, int64 ids (T, A), row_slot, offsets, slot_row (`moe_router`)."""
    bias = None if bias is None else bias.detach().float().contiguous()
    run = _router_of(tuple(logits.shape), form, logits.dtype, dtype)
    return run(logits.detach().contiguous(), bias)


linear_router = functools.partial(reference.linear_router, choose=router)
add_norm_linear_router = functools.partial(add_norm.add_norm_linear_router, linear_router=linear_router)
moe_experts = functools.partial(unfused, sys.modules[__name__])
add_norm_mm = functools.partial(add_norm.add_norm_mm, mm=mm)


@functools.lru_cache(maxsize=4096)
def _router_of(shape: tuple[int, int], form: RouterConfig, dtype: torch.dtype, scores_dtype: torch.dtype) -> Any:
    """Return the function that runs a router on contiguous logits (T, E) and a float32 bias; None without one."""
    (tokens, experts), of_slots = shape, (shape[0], form.top_k)
    run = _extension().thunder_moe_router
    numbers = (
        tokens, experts, form.top_k, form.score == "sigmoid", form.normalize, form.num_groups, form.top_groups,
        form.group_best, form.mask_to_zero, form.epsilon, form.least_sum, form.scale,
    )  # fmt: skip
    codes, empty = (DTYPE_CODES[dtype], DTYPE_CODES[scores_dtype]), torch.empty

    def choose(logits: Tensor, bias: Tensor | None = None, **_: Any) -> tuple[Tensor, ...]:
        scores, ids = empty(of_slots, dtype=scores_dtype), empty(of_slots, dtype=torch.int64)
        row_slot, offsets = empty(tokens * form.top_k, dtype=torch.int32), empty(experts, dtype=torch.int32)
        slot_row = empty(of_slots, dtype=torch.int32)
        status = run(
            logits.data_ptr(), codes[0], None if bias is None else bias.data_ptr(), *numbers, scores.data_ptr(),
            codes[1], ids.data_ptr(), row_slot.data_ptr(), offsets.data_ptr(), slot_row.data_ptr(),
        )  # fmt: skip
        if status != 0:
            _check(status)
        return scores, ids, row_slot, offsets, slot_row

    return choose


def _check(status: int) -> None:
    if status == 1:
        raise MemoryError("the CPU kernel for grouped GEMM ran out of memory")
    if status != 0:
        raise RuntimeError(f"the CPU kernel for grouped GEMM failed: {_extension().thunder_moe_error().decode()}")


def _extension() -> ctypes.CDLL:
    library, reason = _loaded()
    if library is None:
        raise RuntimeError(reason)
    return library


# ---- which kernel for how many rows ----

_DOTS, _PANELS, _FMA, _TILES = 1, 2, 4, 8  # of thunder_moe_kernels()
# Kernels are timed with experts of (N, K), 0.3 MB each, that take turns. An L2 cache does not hold so many, as it does
# not hold a model's experts. With weights in L2, tiles were the faster kernel where they are the slower one in a model.
_MEASURED, _EXPERTS = (256, 2048), 48


def _limits(dtype: torch.dtype, format: BlockFormat = NVFP4) -> Limits:
    """Return which kernel serves how many rows, among the kernels that this CPU, the dtype and torch's flags allow.

    In the batch-invariant mode slices serve all rows.
    """
    if is_batch_invariant():
        return Limits()
    onednn = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags(enabled=False)
    limits = forced_limits()
    if limits is None:
        return _measured_limits(dtype, onednn, format)
    return limits if "panel" in _kernels(dtype, onednn, format) else dataclasses.replace(limits, panel=NEVER)


@functools.cache
def _measured_limits(dtype: torch.dtype, onednn: bool, format: BlockFormat) -> Limits:
    directory = code_cache.folder() or Path(os.devnull)  # where no file can be kept, limits are measured again
    file = directory / f"{host_code.key_of(_parts())[:32]}.crossover.json"
    seconds, kernels = functools.partial(_seconds, format=format), _kernels(dtype, onednn, format)
    try:
        return limits_for(dtype, kernels, seconds, file, _cpu_name(), "" if format is NVFP4 else format.name)
    finally:
        _operands.cache_clear()  # 14 MB


def _gradient_by_panels(dtype: torch.dtype) -> bool:
    """True if panels serve the gradient: if this CPU runs them, for any number of rows, unless `limits_are` forbids."""
    limits = forced_limits() or Limits(panel=1)
    return limits.panel != NEVER and "panel" in _kernels(dtype, torch._C._get_mkldnn_enabled())


@functools.cache
def _kernels(dtype: torch.dtype, onednn: bool, format: BlockFormat = NVFP4) -> dict[str, Limits]:
    """Return a dict: kernel name -> limits that give it all rows; `onednn` says if torch may use oneDNN."""
    kernels, built = {"slice": Limits()}, int(_extension().thunder_moe_kernels())
    if dtype != torch.float32 and built & _DOTS:
        kernels["dots"] = Limits(gemv=NEVER)
    if dtype == torch.bfloat16 and built & _DOTS:
        kernels["slice_fp32"] = Limits(fp32_slices=True)
    if built & _FMA:
        kernels["fma"] = Limits(gemv=NEVER, fma=True)
    if format is NVFP4 and dtype != torch.float32 and onednn and built & _TILES:
        kernels["tiles"] = Limits(tiles=NEVER)
    if dtype != torch.float32 and onednn and built & _PANELS and _seconds(dtype, 1, Limits(panel=1), format) < math.inf:
        kernels["panel"] = Limits(panel=1)
    elif dtype == torch.bfloat16 and "bf16" in _cpu_flags():  # Arm's BFMMLA, which the kernels do not use
        kernels["mm"] = Limits(mm=1)
    return kernels


def _seconds(dtype: torch.dtype, rows: int, limits: Limits, format: BlockFormat = NVFP4) -> float:
    """Time one product of an expert with `rows` rows in this thread alone; infinite if oneDNN has no such kernel."""
    library, (activation, out, weights) = _extension(), _operands(dtype, format)
    weight = weights.expert(next(_turns) % _EXPERTS)
    offsets = torch.tensor([rows], dtype=torch.int32)
    library.thunder_moe_set_workers(1)
    try:
        start = time.perf_counter()
        _grouped_mm_into(out[:rows], activation[:rows], weight, offsets, limits)
        if limits.mm != NEVER:
            _mm_experts(activation[:rows], weight, offsets, out[:rows], limits.mm)
        return time.perf_counter() - start
    except RuntimeError:
        return math.inf
    finally:
        library.thunder_moe_set_workers(0)


_turns = itertools.count()


@functools.lru_cache(maxsize=1)
def _operands(dtype: torch.dtype, format: BlockFormat) -> tuple[Tensor, Tensor, _Linear]:
    """Make activation, output and weight to be timed; without a random number, whose generator belongs to the user."""
    n, k = _MEASURED
    codes = (torch.arange(n * k // format.codes_per_byte) * 167 % 127).to(torch.uint8)  # 127 would be NaN in E4M3
    scale = torch.ones(1, n, k // format.block_size).to(format.scale_dtype).repeat(_EXPERTS, 1, 1)
    global_scale = torch.ones(_EXPERTS) if "global_scale" in format.fields else None
    weight = _Linear(codes.view(1, n, -1).repeat(_EXPERTS, 1, 1), scale, global_scale, format)
    activation = (torch.arange(max(ROWS) * k) % 31 - 15).to(dtype).view(-1, k)
    return activation, activation.new_empty(max(ROWS), n), weight


# ---- build and load ----


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this CPU as Linux lists them, or what `platform` says elsewhere."""
    words = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for key, _, value in (line.partition(":") for line in lines):
            if key.strip() in ("flags", "Features", "CPU part", "isa"):
                words.update(value.split())
    return frozenset(words)


@functools.cache
def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        words = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        names = [words[key] for key in ("model name", "cpu family", "model", "CPU part") if key in words]
        if names:
            return " / ".join(names)
    return platform.processor() or platform.machine()


def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    with _lock:
        return _load_once()


@functools.cache
def _load_once() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return _load(), None
    except Exception as error:  # the message of the compiler, the file system or torch's builder is the reason
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return None, "the CPU kernel cannot run: " + "\n".join(lines[:1] + lines[1:][-12:])


def _load() -> ctypes.CDLL:
    if sys.platform == "win32":
        raise RuntimeError("the CPU backend is not built on Windows: its source needs GCC or clang")
    what = "the CPU kernels (about 20 s, once)"
    return host_code.load(what, _parts(), _compile, lambda path: _declare(ctypes.CDLL(path)))


@functools.cache
def _parts() -> tuple[str, ...]:
    """Return everything that the library depends on beside the compiler: sources, flags, CPU and torch."""
    texts = [file.read_text() for file in (*_SOURCES, *_HEADERS)]
    return (*texts, *_FLAGS, torch.__version__, *sorted(_cpu_flags()))


def _compile() -> bytes:
    native, is_clang = _native_flag(host_code.compiler())
    openmp = ["-fopenmp"] if torch.backends.openmp.is_available() and sys.platform != "darwin" else []
    root = Path(torch.__file__).parent
    options = [*_FLAGS, *native, *openmp, "-isystem", str(root / "include")]
    # GCC's OpenMP calls resolve to the runtime that torch has loaded: one pool, and torch.set_num_threads holds.
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", *(openmp if is_clang else [])]
    return host_code.compile_library(_SOURCES, options, libraries)


def _native_flag(compiler: list[str]) -> tuple[list[str], bool]:
    """Return the flag, if any, that lets a compiler use all instructions of this CPU, and True for a clang."""
    for flag in ("-march=native", "-mcpu=native"):
        probe = [*compiler, flag, "-x", "c++", "-dM", "-E", os.devnull]
        run = subprocess.run(probe, capture_output=True, text=True, errors="replace", check=False)
        if run.returncode == 0:
            return [flag], "__clang__" in run.stdout
    return [], False


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, i32, i64, f32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
    weight: list[Any] = [pointer, pointer, pointer, i32]  # qdata, scale, global_scale, whether that is (E, N)
    library.thunder_moe_dequantize.argtypes = [*weight, i64, i64, i64, i32, i32, pointer]
    grouped: list[Any] = [pointer, i64, *weight, pointer, i64, i64, i64, i32, i32]
    library.thunder_moe_grouped_mm.argtypes = [*grouped, i64, i64, i64, i64, i32, i32, pointer]
    library.thunder_moe_grouped_mm_dgrad.argtypes = [*grouped, pointer]
    bias: list[Any] = [pointer, i32, pointer, i64]  # bias, its dtype, offsets, num_experts
    library.thunder_moe_swiglu.argtypes = [pointer, i32, i64, i64, pointer, *bias, f32, f32, f32, pointer]
    library.thunder_moe_combine.argtypes = [pointer, i32, i64, pointer, pointer, i64, i64, i64, *bias, pointer]
    order: list[Any] = [pointer] * 3  # row_slot, offsets, slot_row
    library.thunder_moe_route.argtypes = [pointer, i32, i64, i64, *order]
    form: list[Any] = [i64, i32, i32, i64, i64, i64, i32, f32, f32, f32]
    library.thunder_moe_router.argtypes = [pointer, i32, pointer, i64, i64, *form, pointer, i32, pointer, *order]
    library.thunder_moe_set_workers.argtypes, library.thunder_moe_error.restype = [i32], ctypes.c_char_p
    library.thunder_moe_set_workers.restype = None
    library.thunder_moe_swiglu.restype = library.thunder_moe_combine.restype = None
    return library

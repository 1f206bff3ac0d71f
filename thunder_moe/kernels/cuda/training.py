"""The kernels of training on CUDA: grouped GEMMs with zeros past the end and their gradients, biases, activations.
Called through kernels/select.py, with the functions of kernels/training_reference.py; calls launch.py
for src/activation.cu and src/bias.cu, backend.py, linear.py, low_rank.py, recipes.py and wgrad.py beside it, and
torch._grouped_mm.

Nothing synchronizes with the host. torch's grouped GEMM does so in float16 and float32, and on some devices: it is not
called there. Nothing is added by atomics. Operands may have any strides and alignment: operands that kernels cannot
read are copied. Offsets are not trusted.

Legend: M rows sorted by expert, E experts, N out_features, K in_features, I features of an activation's output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.checks import require
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels import training_reference
from thunder_moe.kernels.arguments import DTYPE_CODES, as_kernel_float, dtype_code, pointer
from thunder_moe.kernels.batch_invariance import is_batch_invariant
from thunder_moe.kernels.cuda import backend, low_rank
from thunder_moe.kernels.cuda import linear as linears
from thunder_moe.kernels.cuda import wgrad as wgrads
from thunder_moe.kernels.cuda.arguments import ActivationArguments, BiasArguments
from thunder_moe.kernels.cuda.chain import launched
from thunder_moe.kernels.cuda.configs import COMMON
from thunder_moe.kernels.cuda.launch import launch
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.operands import aligned, target
from thunder_moe.kernels.cuda.recipes import CudaProducts, quantize, quantize_codes, quantize_columns  # noqa: F401  (in __all__)
from thunder_moe.kernels.select import select
from thunder_moe.kernels.specs import LinearSpec
from thunder_moe.routing import gather_rows

__all__ = ["zero_past_end"]
__all__ += training_reference.__all__

ACTIVATION = (COMMON, COMMON.with_name("activation.cu"))
BIAS = (*ACTIVATION, COMMON.with_name("bias.cu"))
_THREADS = 256  # kRowThreads
_CHUNK_ROWS, _COLUMNS = 128, 256  # kChunkRows, kColumns
_BLOCK_FEATURES = 4096  # from so many on, a block computes a row, and a warp below
_MOST_BLOCKS = 2**16
# The least rows per expert for torch's grouped GEMM, for the gradient of a bfloat16 weight whose K is a multiple of
# 256; for other weights it always is. H200, us, torch's, "wgmma", equal shares. Qwen3-30B-A3B (1536, 2048): 8 rows 356,
# 347; 64 rows 358, 337; 256 rows 494, 514. Mixtral (28672, 4096): 128 rows 766, 914. GPT-OSS-20B (5760, 2880): 32 rows
# 412, 440.
_TORCHS_ROWS_OF_WGRAD = 96
_MANY_COLUMNS = 2**17  # of all experts, from which on a block of bias_grad_reduce takes more than 32


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply (M, K) by (E, N, K): -> (M, N) in the rows' dtype, contiguous, and written into `out` if given."""
    (m, k), n, experts = rows.shape, weight.shape[1], offsets.shape[0]
    _check_dtype(rows)
    fits = weight.dtype == rows.dtype and (weight.shape[0], weight.shape[2]) == (experts, k)
    require(fits, "weight", weight, f"{rows.dtype} ({experts}, {n}, {k}), for rows {tuple(rows.shape)}")
    if out is not None:
        fits = out.dtype == rows.dtype and tuple(out.shape) == (m, n) and out.is_contiguous()
        require(fits, "out", out, f"contiguous {rows.dtype} ({m}, {n})")
    if m == 0 or n == 0 or k == 0 or experts == 0:
        return rows.new_zeros(m, n) if out is None else out
    rows, weight, offsets = rows.detach(), weight.detach(), offsets.contiguous()
    padded = rows.dtype != torch.float32 and not linears.reads_eight(rows.dtype, n, k)
    if padded:
        rows, weight = F.pad(rows, (0, -k % 8)), F.pad(weight, (0, -k % 8, 0, -n % 8))
    few = linears.serves_rank(rows.dtype, n, k, n)
    own = few or is_batch_invariant()  # each sums in the order of k, for any rows of a tile
    if not own and linears.torch_is_faster(rows.dtype, target(rows.device).capability, m / experts):
        product = _multiply(rows, weight, offsets)
    else:
        # At an odd address `out` is written behind the GEMM, whose kernels of 16 bits store several numbers at once.
        odd = out is not None and rows.dtype != torch.float32 and out.data_ptr() % 16 != 0
        given = None if padded or odd else out
        product = _linear(rows, weight, offsets, given)
        if not padded and given is out:
            return product
    product = product[:, :n]
    return add_bias(product, offsets, out=out) if out is not None else zero_past_end(product, offsets)


def grouped_mm_low_rank(rows: Tensor, weight: NVFP4Weight, offsets: Tensor, inner: Tensor, b: Tensor) -> Tensor:
    """Compute rows (M, K) x a 4-bit weight (E, N, K) + inner (M, R) x b (E, N, R) -> (M, N), undefined past the end."""
    kernels = select(rows.device)
    out = low_rank.grouped_mm(rows, weight, offsets, inner, b) if kernels is backend else None
    return kernels.grouped_mm(rows, weight, offsets).add_(grouped_mm(inner, b, offsets)) if out is None else out


def grouped_mm_low_rank_dgrad(grad: Tensor, weight: NVFP4Weight, offsets: Tensor, outer: Tensor, a: Tensor) -> Tensor:
    """Compute grad (M, N) x a 4-bit weight (E, N, K) + outer (M, R) x a (E, R, K) -> (M, K), undefined past the end."""
    kernels = select(grad.device)
    out = low_rank.dgrad(grad, weight, offsets, outer, a) if kernels is backend else None
    if out is None:
        out = kernels.grouped_mm_dgrad(grad, weight, offsets).add_(grouped_mm(outer, a.mT, offsets))
    return out


def gather_low_rank(tokens: Tensor, row_slot: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Gather tokens (T, K) by row_slot (M,); multiply by (E, R, K): -> rows (M, K), product (M, R), both undefined past
    the end."""
    both = low_rank.gather(tokens, row_slot, weight, offsets)
    if both is not None:
        return both
    rows = gather_rows(tokens, row_slot)
    return rows, grouped_mm(rows, weight, offsets)


def gathered_wgrad(tokens: Tensor, row_slot: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Return `wgrad` (E, N, K) of rows gathered from tokens (T, K), and their gradient (M, N)."""
    k, n = tokens.shape[1], grad.shape[1]
    if row_slot.shape[0] and k and linears.serves_rank(tokens.dtype, k, k, n):
        return wgrads.rank_wgrad(grad.to(tokens.dtype), tokens, offsets, False, row_slot)
    return wgrad(gather_rows(tokens, row_slot), grad, offsets)


def dgrad(grad: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply the gradient (M, N) of the output by (E, N, K): -> gradient (M, K) of the rows."""
    return grouped_mm(grad, weight.transpose(1, 2), offsets, out)


def wgrad(rows: Tensor, grad: Tensor, offsets: Tensor, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """Return the weight's gradient (E, N, K) in the rows' dtype, from rows (M, K) and the output's gradient (M, N).

    Args:
        out: float32 (E, N, K), contiguous: the gradient goes there, float32 from the products on.
        accumulate: it is added to `out`, where experts without rows are not written; otherwise it replaces the contents
            of `out`.
    """
    (m, k), n, experts = rows.shape, grad.shape[1], offsets.shape[0]
    _check_dtype(rows)
    require(grad.shape[0] == m, "grad", grad, f"{m} rows, as x has")
    if out is not None:
        if m == 0 or out.numel() == 0:
            return out if accumulate else out.zero_()
        wgrads.wgrad(rows, grad, offsets, out, accumulate)
        return out
    if m == 0 or n == 0 or k == 0:
        return rows.new_zeros(experts, n, k)
    rows, grad = rows.detach(), grad.detach().to(rows.dtype)
    if linears.serves_rank(rows.dtype, n, k, n):
        return wgrads.rank_wgrad(grad, rows, offsets, False)
    if linears.serves_rank(rows.dtype, n, k, k):
        return wgrads.rank_wgrad(rows, grad, offsets, True)
    if rows.dtype != torch.float32 and not linears.reads_eight(rows.dtype, n, k):
        rows, grad = (F.pad(each, (0, -each.shape[1] % 8)) for each in (rows, grad))
    capability = target(rows.device).capability
    least = _TORCHS_ROWS_OF_WGRAD if k % 256 == 0 else 0
    if linears.torch_is_faster(rows.dtype, capability, m / experts, least):
        result = torch._grouped_mm(aligned(grad).t(), aligned(rows), offs=_ends(offsets, m))
    else:
        result = rows.new_empty(experts, grad.shape[1], rows.shape[1])
        wgrads.wgrad(rows, grad, offsets, result, False)
    return result if result.shape[1:] == (n, k) else result[:, :n, :k].contiguous()


def quantized_products(recipe: str) -> CudaProducts:
    """Return `grouped_mm`, `dgrad` and `wgrad` of operands that a recipe rounds."""
    return CudaProducts(sys.modules[__name__], recipe)


def add_bias(
    y: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``(y + bias[expert] * bias_scale) * scales`` in float32, rounded once: (M, N), bias (E, N), (M,) each ->
    (M, N).

    Rows past the end are zeros; in `out` they are not written. `out` may be y itself.
    """
    (rows, n), experts = y.shape, offsets.shape[0]
    result = torch.empty_like(y, memory_format=torch.contiguous_format) if out is None else out
    if result.numel() == 0 or experts == 0:
        return result if out is not None else result.zero_()
    y, offsets, bias = y.detach().contiguous(), offsets.contiguous(), as_kernel_float(bias)
    bias_scale, scales = as_kernel_float(bias_scale), as_kernel_float(scales)
    argument = BiasArguments(
        *map(pointer, (y, offsets, bias_scale, bias, None, result, scales)), rows, experts, n, _is_wide(offsets),
        dtype_code(bias_scale), dtype_code(scales), out is not None,
    )  # fmt: skip
    of_bias, vectors = -1 if bias is None else dtype_code(bias), _vectors(n, y, bias, result)
    kernel = instance("add_bias", DTYPE_CODES[y.dtype], of_bias, vectors)
    _by_rows(BIAS, kernel, rows, argument, y.device)
    return result


def bias_grad(grad: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """Sum each expert's rows of the output's gradient (M, N), times scale (M,): -> float32 (E, N).

    The order of each sum depends on the offsets alone: the same bits in each run. Rows past the end are not read.
    """
    (rows, n), experts = grad.shape, offsets.shape[0]
    out = torch.empty(experts, n, dtype=torch.float32, device=grad.device)
    if rows == 0 or out.numel() == 0:
        return out.zero_()
    grad, offsets, scale = grad.detach().contiguous(), offsets.contiguous(), as_kernel_float(scale)
    chunks = rows // _CHUNK_ROWS + min(experts, rows)
    columns = _COLUMNS if experts * n >= _MANY_COLUMNS else 32
    partial_sums = torch.empty(chunks, n, dtype=torch.float32, device=grad.device)
    argument = BiasArguments(
        *map(pointer, (grad, offsets, scale, None, partial_sums, out, None)), rows, experts, n, _is_wide(offsets),
        dtype_code(scale), 0, 0, columns,
    )  # fmt: skip
    for kernel, blocks in (
        (instance("bias_grad_chunks", DTYPE_CODES[grad.dtype], _vectors(n, grad)), chunks * -(-n // _COLUMNS)),
        ("bias_grad_reduce", experts * -(-n // columns)),
    ):
        launch(BIAS, kernel, _THREADS, 0, blocks, argument, grad.device)
    return out


def bias_scale_grad(grad: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each row of the output's gradient (M, N) with its expert's bias (E, N): -> float32 (M,)."""
    (rows, n), experts = grad.shape, offsets.shape[0]
    out = torch.empty(rows, dtype=torch.float32, device=grad.device)
    if rows == 0 or n == 0 or experts == 0:
        return out.zero_()
    grad, offsets, bias = grad.detach().contiguous(), offsets.contiguous(), as_kernel_float(bias)
    argument = BiasArguments(
        *map(pointer, (grad, offsets, None, bias, None, out, None)), rows, experts, n, _is_wide(offsets)
    )
    kernel = instance("bias_scale_grad", DTYPE_CODES[grad.dtype], dtype_code(bias), _vectors(n, grad, bias))
    _by_rows(BIAS, kernel, rows, argument, grad.device)
    return out


def combine_rows(rows: Tensor, offsets: Tensor, slot_row: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum rows (M, N), slot_row int32 (T, A) -> (T, N), like `training_reference.combine_rows`, which serves other
    dtypes than bfloat16 and float16."""
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return training_reference.combine_rows(rows, offsets, slot_row, out)
    return backend.combine(rows, slot_row, None, out=out)


def scaled_activation(
    y: Tensor,
    scales: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    form: SwiGLUConfig | None,
    interleave: int | None = None,
) -> Tensor:
    """Activate (M, 2I) -> (M, I) by a form of SwiGLU, or (M, I) by ``relu(y)**2`` without one, times scales (M,).

    It computes in float32 and rounds once, to y's dtype.
    """
    out = y.new_empty(y.shape[0], _features(y, form))
    if out.numel() > 0:
        _activation("activation_forward", y, scales, offsets, form, interleave, out)
    return out


def scaled_activation_gradient(
    grad: Tensor,
    y: Tensor,
    scales: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    form: SwiGLUConfig | None,
    interleave: int | None = None,
    needs: tuple[bool, bool] = (True, True),
    value: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients that `needs` asks for, from (M, I) of `scaled_activation`'s output: of y, in its dtype, and
    of scales (M,), in theirs: sums in an order that depends on I alone. `value` gets the output, if it is given."""
    out = y.new_empty(y.shape) if needs[0] else None
    of_scales = torch.zeros(len(y), dtype=scales.dtype, device=y.device) if needs[1] and scales is not None else None
    if y.numel() > 0 and (out is not None or of_scales is not None):
        grad = grad.to(y.dtype)
        _activation("activation_backward", y, scales, offsets, form, interleave, out, grad, of_scales, value)
    return out, of_scales


def swiglu_gradient_and_value(
    grad: Tensor, y: Tensor, scales: Tensor | None, offsets: Tensor | None, *, form: SwiGLUConfig, needs_scales: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the results of `scaled_activation_gradient` (for both, or y alone) and of `scaled_activation`, in one
    pass."""
    value = torch.empty_like(grad, dtype=y.dtype, memory_format=torch.contiguous_format)
    needs = True, needs_scales
    of_y, of_scales = scaled_activation_gradient(grad, y, scales, offsets, form=form, needs=needs, value=value)
    assert of_y is not None
    return of_y, of_scales, value


def _check_dtype(rows: Tensor) -> None:
    require(rows.dtype in DTYPE_CODES, "x", rows, "dtype float32, bfloat16 or float16 on a CUDA device")


def _linear(rows: Tensor, weight: Tensor, offsets: Tensor, out: Tensor | None) -> Tensor:
    """Multiply (M, K) x (E, N, K) -> (M, N) by the kernels of linear.py; zeros past the last row end, but in `out`."""
    rows = rows.contiguous()
    transposed = not weight.is_contiguous() and weight.mT.is_contiguous()
    weight = weight.mT if transposed else weight.contiguous()
    (m, k), experts, n = rows.shape, offsets.shape[0], weight.shape[2 if transposed else 1]
    if linears.reads_eight(rows.dtype, n, k):
        rows, weight = aligned(rows), aligned(weight)
    addresses = rows.data_ptr() | weight.data_ptr() | (0 if out is None else out.data_ptr())
    where, wide = target(rows.device), _is_wide(offsets)
    kernel = linears.kernel_for(rows.dtype, n, k, where.capability, addresses)
    into = () if out is None else (out,)
    spec = LinearSpec(m, experts, n, k, rows.dtype, where, transposed, wide, zero_tail=not into, into=bool(into))
    return launched(linears.prepare_linear(spec, kernel), rows, weight, offsets, *into)


def _multiply(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply (M, K) x (E, N, K) -> (M, N) by torch, with rows of a multiple of 16 bytes; undefined past the end."""
    if weight.stride(2) != 1 and weight.stride(1) != 1:
        weight = weight.contiguous()
    ends = _ends(offsets, rows.shape[0])
    return torch._grouped_mm(aligned(rows), weight.transpose(1, 2), offs=ends)


def zero_past_end(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the rows (M, N), contiguous, with zeros past the last row end."""
    rows, offsets = rows.contiguous(), offsets.contiguous()
    argument = BiasArguments(
        *map(pointer, (None, offsets, None, None, None, rows, None)), rows.shape[0], offsets.shape[0], rows.shape[1],
        _is_wide(offsets),
    )  # fmt: skip
    kernel = f"zero_past_end<{DTYPE_CODES[rows.dtype]}>"
    launch(BIAS, kernel, _THREADS, 0, min(rows.shape[0], 1024), argument, rows.device)
    return rows


def _ends(offsets: Tensor, rows: int) -> Tensor:
    """Return row ends that torch's grouped GEMM may trust: int32, none decreases or exceeds the rows."""
    return backend.row_starts(offsets.to(torch.int32), rows)[1:]


def _features(y: Tensor, form: SwiGLUConfig | None) -> int:
    """Return I."""
    return y.shape[1] // (1 if form is None else 2)


def _activation(
    kernel: str, y: Tensor, scales: Tensor | None, offsets: Tensor | None, form: SwiGLUConfig | None,
    interleave: int | None, out: Tensor | None, grad: Tensor | None = None, of_scales: Tensor | None = None,
    value: Tensor | None = None,
) -> None:  # fmt: skip
    y, scales, features = y.detach().contiguous(), as_kernel_float(scales), _features(y, form)
    offsets = None if offsets is None else offsets.contiguous()
    grad = None if grad is None else grad.detach().contiguous()
    run = interleave if form is not None and interleave else features
    pack = -1  # see load_gate_up
    if _vectors(features, y, grad, out, value):
        pack = run if form is not None and run in (1, 2, 4) else 0 if form is None or run % 8 == 0 else -1
    per_row = _THREADS if features >= _BLOCK_FEATURES else 32
    form_numbers = (1.0, -1.0, 0.0) if form is None else (form.alpha, form.limit or -1.0, form.up_shift)
    argument = ActivationArguments(
        *map(pointer, (y, scales, offsets, grad, out, of_scales, value)), y.shape[0], features,
        0 if offsets is None else offsets.shape[0], offsets is not None and _is_wide(offsets), dtype_code(scales),
        run, *form_numbers,
    )  # fmt: skip
    name = instance(kernel, DTYPE_CODES[y.dtype], form is not None, pack, per_row)
    blocks = min(-(-y.shape[0] // (_THREADS // per_row)), _MOST_BLOCKS)
    launch(ACTIVATION, name, _THREADS, 0, blocks, argument, y.device)


def _by_rows(sources: tuple[Path, ...], kernel: str, rows: int, argument: BiasArguments, device: torch.device) -> None:
    """Launch a kernel whose warps take a row each."""
    blocks = min(-(-rows // (_THREADS // 32)), _MOST_BLOCKS)
    launch(sources, kernel, _THREADS, 0, blocks, argument, device)


def _is_wide(offsets: Tensor) -> bool:
    return offsets.dtype == torch.int64


def _vectors(features: int, *tensors: Tensor | None) -> bool:
    """True if 8 numbers can be loaded at a time: rows of a multiple of 8, aligned to 16 bytes."""
    return features % 8 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor is not None)

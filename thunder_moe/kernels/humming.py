"""The Humming backend: GEMMs of the package humming-kernels, compiled by it on first use, of weights in its own layout.
Called through kernels.select with validated operands; calls humming, and kernels.cuda for what surrounds the GEMMs.

Its grouped GEMM takes rows and offsets as ours do and knows one global scale per expert; where a weight has one per
row, the largest is applied there and the quotients behind it. Float32 rows run on kernels.reference, gradients on
decoded weights. Nothing synchronises with the host.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.nvfp4 import BLOCK_SIZE, NVFP4Weight
from thunder_moe.kernels import reference
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda.workspace import zeros_of
from thunder_moe.routing import PLAIN_SWIGLU, SwiGLU, expert_of_row, gather_rows

__all__ = [
    "grouped_mm",
    "grouped_mm_combine",
    "grouped_mm_dgrad",
    "grouped_swiglu",
    "route",
    "unavailable_reason",
]

LAYOUT = "humming"
_ANY_EXPERTS = 1 << 31  # no limit is known
_COMPUTE = dict(gemm_type="grouped_contiguous")

route = cuda.route
grouped_mm_dgrad = cuda.grouped_mm_dgrad  # decodes weights of any layout


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """None when the backend can run on a device (by default the current one), else a sentence that says why not."""
    reason = cuda.unavailable_reason(device)
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability >= (10, 0):
        return f"for compute capability {capability} Humming orders weights otherwise than up to (9, 0), as here"
    if importlib.util.find_spec("humming") is None:
        return "humming-kernels is not installed: pip install 'thunder_moe[cuda]'"
    return None


def grouped_mm(activation: Tensor, weight: NVFP4Weight, offsets: Tensor) -> Tensor:
    """(M, K) rows sorted by expert, offsets (E,) row ends -> (M, N) in the activation's dtype."""
    if cuda.runs_on_reference(activation, weight, _ANY_EXPERTS):
        return reference.grouped_mm(activation, weight.to_layout("linear"), offsets)
    out, applied = _gemm(activation, weight, offsets)
    if applied is None:
        return out
    quotient = weight.global_scale / applied[:, None]
    return (out.float() * quotient[expert_of_row(offsets, out.shape[0])]).to(out.dtype)


def grouped_swiglu(
    activation: Tensor,
    weight: NVFP4Weight,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    form: SwiGLU = PLAIN_SWIGLU,
) -> Tensor:
    """Rows (M, K), or tokens (T, K) with row_slot (M,); weight (E, 2I, K) with the gate's rows first -> (M, I)."""
    if cuda.runs_on_reference(activation, weight, _ANY_EXPERTS):
        return reference.grouped_swiglu(
            activation, weight.to_layout("linear"), offsets, row_slot, slot_scale, bias, form
        )
    gate_up, applied = _gemm(gather_rows(activation, row_slot), weight, offsets)
    scales = dict(global_scale=weight.global_scale.contiguous(), applied=applied) if applied is not None else {}
    return cuda.swiglu(gate_up, offsets, row_slot, slot_scale, bias, form, **scales)


def grouped_mm_combine(
    activation: Tensor,
    weight: NVFP4Weight,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """(M, K) -> (T, N): each slot's row, plus bias (E, N), times slot_weight (T, A), summed per token."""
    if cuda.runs_on_reference(activation, weight, _ANY_EXPERTS):
        return reference.grouped_mm_combine(
            activation, weight.to_layout("linear"), offsets, slot_row, slot_weight, bias
        )
    rows = grouped_mm(activation, weight, offsets)
    if bias is not None:
        rows = (rows.float() + bias[expert_of_row(offsets, rows.shape[0])]).to(rows.dtype)
    return cuda.combine(rows, slot_row, slot_weight)


def _gemm(activation: Tensor, weight: NVFP4Weight, offsets: Tensor) -> tuple[Tensor, Tensor | None]:
    """The product and, where each row of the weight has a global scale, what was applied (E,) in its place."""
    from humming import ops

    if weight.layout != LAYOUT:
        raise ValueError(
            f"backend: 'humming' reads weights in layout {LAYOUT!r}, got {weight.layout!r};"
            f" use quantize_(model, layout={LAYOUT!r}) or NVFP4Weight.to_layout"
        )
    experts, n, k = weight.shape
    rows, device = activation.shape[0], activation.device
    out = activation.new_empty(rows, n)
    applied = weight.global_scale.amax(1) if weight.global_scale.ndim == 2 else None
    if out.numel() > 0:
        zeros = zeros_of(device)
        ops.launch_kernel(
            configs=_kernel_for(experts, n, k, activation.dtype, device, rows),
            inputs=activation.detach().contiguous(),
            weight=weight.qdata.contiguous().view(torch.int32).view(experts, k // BLOCK_SIZE, 2 * n),
            weight_scale=weight.scale.contiguous().view(experts, k // BLOCK_SIZE, n),
            weight_scale_2=weight.global_scale.contiguous() if applied is None else applied,
            outputs=out,
            expert_layout=cuda.row_starts(offsets, rows),
            locks=zeros.row(),
            valid_shape_m=rows,
        )
    return out, applied


def _kernel_for(experts: int, n: int, k: int, dtype: torch.dtype, device: torch.device, rows: int) -> Tensor:
    """What Humming's launcher takes for a kernel: the one that its heuristics choose for so many rows."""
    intervals = _intervals(experts, n, k, dtype, device)
    number = next(i for i, (low, high, _) in enumerate(intervals) if low < rows <= high or i == len(intervals) - 1)
    return _kernel(experts, n, k, dtype, device, number)


@functools.cache
def _layer(experts: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Humming's description of (E, N, K) NVFP4 weights: E2M1, E4M3 scales of 16 along K, a float32 one per expert."""
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config

    schema = HummingWeightSchema(
        b_dtype="float4e2m1",
        bs_dtype="float8e4m3",
        weight_scale_group_size=BLOCK_SIZE,
        weight_scale_type="group",
        weight_scale_2_type="tensor",
    )
    return prepare_layer_config(n, k, schema, num_experts=experts, torch_dtype=dtype, device=device)


@functools.cache
def _intervals(
    experts: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[int, int, dict[str, Any]]]:
    """(rows more than, rows at most, kernel) of every kernel that Humming's heuristics choose for a shape."""
    from humming.tune import get_heuristics_config

    return get_heuristics_config(_layer(experts, n, k, dtype, device), **_COMPUTE, device=device)


@functools.cache
def _kernel(experts: int, n: int, k: int, dtype: torch.dtype, device: torch.device, number: int) -> Tensor:
    from humming.kernel.humming import HummingKernel

    low, high, tuning = _intervals(experts, n, k, dtype, device)[number]
    message = "compiling Humming's kernel for %d to %d rows and a weight of %s (some seconds, once)"
    logging.getLogger("thunder_moe").info(message, low + 1, high, (experts, n, k))
    layer = _layer(experts, n, k, dtype, device)
    return HummingKernel.prepare_kernels(layer.to_str(), _COMPUTE, tuning, device)

"""The CUDA backend: grouped GEMMs of 16-bit rows and NVFP4 weights on SM80 and newer, compiled on first use.
Called through kernels/select.py with validated operands; calls plan.py, workspace.py and nvrtc.py beside it, which
compiles src/*.cu.

Float32 rows run on kernels/reference.py, with a warning. The gradient of bf16 rows is torch's grouped GEMM with
dequantized weights (SM90 and newer; elsewhere, and in fp16, the reference). Nothing synchronizes with the host.
Offsets, row_slot and slot_row are not trusted: nothing out of range is read or written (`row_end` of grouped_mm.cuh,
`slot_of_row` of common.cuh), and the results of such rows are undefined.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from thunder_moe.activations import GLU, SWIGLU
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels import reference
from thunder_moe.kernels.arguments import dtype_code, floats, pointer
from thunder_moe.kernels.cuda import nvrtc
from thunder_moe.kernels.cuda import router as routers
from thunder_moe.kernels.cuda.arguments import (
    CombineArguments,
    DequantizeArguments,
    GatherArguments,
    GemmArguments,
    RouteArguments,
    RowStartsArguments,
    SwigluArguments,
    TmaGemmArguments,
)
from thunder_moe.kernels.cuda.configs import COMMON, TILED, GemmConfig
from thunder_moe.kernels.cuda.plan import CACHE_LINE, GemmPlan, plan_gemm
from thunder_moe.kernels.cuda.workspace import semaphore_pool
from thunder_moe.kernels.slow_paths import to_linear, warn_once
from thunder_moe.routing import RouterForm, gather_rows

__all__ = [
    "combine",
    "dequantize",
    "grouped_mm",
    "grouped_mm_combine",
    "grouped_mm_dgrad",
    "grouped_swiglu",
    "mm",
    "mm_dgrad",
    "route",
    "router",
    "row_starts",
    "swiglu",
    "unavailable_reason",
]

_DEQUANTIZE = (COMMON, COMMON.with_name("dequantize.cu"))
_ROUTE = (COMMON, COMMON.with_name("route.cu"))
_SWIGLU = (COMMON, COMMON.with_name("swiglu.cu"))
MAX_EXPERTS = 1024
_ROUTE_THREADS = 256
_ELEMENTWISE_THREADS = 256
_ELEMENTWISE_BLOCKS = 1 << 20  # at most: threads loop over items
_ROUTE_SLOTS = 2048  # of a block; a single block takes up to twice as many


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """None when the backend can run on a device (by default the current one), else a sentence that says why not."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the device has compute capability {capability}, the kernels need (8, 0)"
    return nvrtc.missing_reason()


def grouped_mm(activation: Tensor, weight: NVFP4Weight, offsets: Tensor, *, config: GemmConfig | None = None) -> Tensor:
    """(M, K) rows sorted by expert, offsets (E,) row ends -> (M, N) in the activation's dtype."""
    if _runs_on_reference(activation, weight):
        return reference.grouped_mm(activation, weight.to_layout(LINEAR), offsets)
    return _gemm(activation, weight, offsets, None, None, None, None, config)


def grouped_swiglu(
    activation: Tensor,
    weight: NVFP4Weight,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    form: GLU = SWIGLU,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """Rows (M, K), or tokens (T, K) with row_slot (M,); weight (E, 2I, K) with the gate's rows first -> (M, I)."""
    if _runs_on_reference(activation, weight):
        return reference.grouped_swiglu(activation, weight.to_layout(LINEAR), offsets, row_slot, slot_scale, bias, form)
    if weight.layout == TILED and weight.shape[1] // 2 % 64 != 0:  # a block of weights has rows of gate and of up
        gate_up = _gemm(gather_rows(activation, row_slot), weight, offsets, None, None, None, None)
        return swiglu(gate_up, offsets, row_slot, slot_scale, bias, form)
    return _gemm(activation, weight, offsets, row_slot, slot_scale, bias, form, config)


def grouped_mm_combine(
    activation: Tensor,
    weight: NVFP4Weight,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """(M, K) -> (T, N): each slot's row, plus bias (E, N), times slot_weight (T, A), summed per token."""
    if _runs_on_reference(activation, weight):
        return reference.grouped_mm_combine(activation, weight.to_layout(LINEAR), offsets, slot_row, slot_weight, bias)
    return combine(_gemm(activation, weight, offsets, None, None, bias, None), slot_row, slot_weight)


def grouped_mm_dgrad(grad: Tensor, weight: NVFP4Weight, offsets: Tensor) -> Tensor:
    """Gradient (M, N) of `grouped_mm`'s output -> gradient (M, K) of its activation."""
    n = weight.shape[1]
    capability = _device_facts(grad.device)[1]
    what = None
    if grad.dtype != torch.bfloat16:
        what = f"gradients of activations in {str(grad.dtype).removeprefix('torch.')}"
    elif n % 8 != 0:
        what = f"gradients of activations with out_features no multiple of 8 ({n})"
    elif capability < (9, 0):
        what = f"gradients of activations on devices of compute capability {capability}"
    if what is not None or grad.shape[0] == 0:
        if what is not None:
            _warn_of_reference(what, grad, weight, "train in bfloat16 on compute capability (9, 0) or higher")
        return reference.grouped_mm_dgrad(grad, weight.to_layout(LINEAR), offsets)
    ends = row_starts(offsets, grad.shape[0])[1:]
    return torch._grouped_mm(_aligned(grad.detach()), dequantize(weight, grad.dtype), ends)


def mm(
    activation: Tensor, weight: NVFP4Weight, bias: Tensor | None = None, *, config: GemmConfig | None = None
) -> Tensor:
    """(M, K), a weight (1, N, K), bias (N,) -> (M, N) in the activation's dtype: one group that ends at M."""
    if _runs_on_reference(activation, weight):
        return reference.mm(activation, weight.to_layout(LINEAR), bias)
    return _gemm(activation, weight, None, None, None, bias, None, config)


def mm_dgrad(grad: Tensor, weight: NVFP4Weight) -> Tensor:
    """Gradient (M, N) of `mm`'s output -> gradient (M, K) of its activation."""
    if _runs_on_reference(grad, weight):
        return reference.mm_dgrad(grad, weight.to_layout(LINEAR))
    with torch.autocast("cuda", enabled=False):
        return grad.detach() @ dequantize(weight, grad.dtype)[0]


def combine(rows: Tensor, slot_row: Tensor, slot_weight: Tensor | None) -> Tensor:
    """(M, N) -> (T, N): each slot's row, times slot_weight (T, A), summed per token."""
    tokens, top_k = slot_row.shape
    n = rows.shape[1]
    out = rows.new_empty(tokens, n)
    if rows.shape[0] == 0:
        return out.zero_()
    if out.numel() == 0:
        return out
    slot_row = slot_row.contiguous()
    slot_weight = floats(slot_weight)
    argument = CombineArguments(
        *map(pointer, (rows, slot_row, slot_weight, out)), rows.shape[0], tokens, top_k, n, dtype_code(slot_weight)
    )
    _launch_elementwise(_ROUTE, f"combine<{_is_bf16(rows)}>", tokens * -(-n // 8), argument, rows.device)
    return out


def swiglu(
    gate_up: Tensor,
    offsets: Tensor,
    row_slot: Tensor | None,
    slot_scale: Tensor | None,
    bias: Tensor | None,
    form: GLU,
) -> Tensor:
    """(M, 2I) of a GEMM -> (M, I): times slot_scale, plus bias (E, 2I), then the activation, in float32."""
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, features)
    if out.numel() == 0:
        return out
    offsets, slot_scale, bias = offsets.contiguous(), floats(slot_scale), floats(bias)
    row_slot = None if row_slot is None else row_slot.contiguous()
    tensors = (gate_up, offsets, row_slot, slot_scale, bias, out)
    argument = SwigluArguments(
        *map(pointer, tensors), rows, offsets.shape[0], features, dtype_code(slot_scale), dtype_code(bias),
        form.alpha, -1.0 if form.limit is None else form.limit, form.up_shift,
    )  # fmt: skip
    _launch_elementwise(_SWIGLU, f"swiglu<{_is_bf16(gate_up)}>", rows * -(-features // 8), argument, gate_up.device)
    return out


def dequantize(weight: NVFP4Weight, dtype: torch.dtype) -> Tensor:
    """The same as `dequantize` of formats/nvfp4.py, bit for bit: (E, N, K) of bfloat16 or float16."""
    num_experts, n, k = weight.shape
    name = "dequantize_tiled"
    if weight.layout != TILED:
        name, weight = "dequantize", to_linear(weight, "the kernels of gradients")
    qdata, scale, global_scale = (_aligned(tensor) for tensor in weight.tensors())
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    pointers = map(pointer, (qdata, scale, global_scale, out))
    argument = DequantizeArguments(*pointers, num_experts * n, 1 if global_scale.ndim == 2 else n, k)
    _launch_elementwise(_DEQUANTIZE, f"{name}<{_is_bf16(out)}>", out.numel() // 16, argument, weight.device)
    return out


def route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, A) -> row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
    slots, buckets = expert_ids.numel(), num_experts + 1
    shared_bytes = 4 * _ROUTE_THREADS // 32 * buckets
    if slots == 0 or num_experts > MAX_EXPERTS:
        return reference.route(expert_ids, num_experts)
    expert_ids = expert_ids.contiguous()
    row_slot = torch.empty(slots, dtype=torch.int32, device=expert_ids.device)
    offsets = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    slot_row = torch.empty_like(expert_ids, dtype=torch.int32)
    whole = -(-slots // _ROUTE_THREADS) * _ROUTE_THREADS
    per_block = whole if whole <= 2 * _ROUTE_SLOTS else _ROUTE_SLOTS
    blocks = -(-slots // per_block)
    counts = torch.empty(blocks, buckets, dtype=torch.int32, device=expert_ids.device) if blocks > 1 else None
    tensors = (expert_ids, counts, row_slot, offsets, slot_row)
    wide = expert_ids.dtype == torch.int64
    argument = RouteArguments(*map(pointer, tensors), slots, num_experts, wide, per_block)
    for name in ("route_count", "route_scatter")[0 if blocks > 1 else 1 :]:
        _launch(_ROUTE, name, _ROUTE_THREADS, shared_bytes, blocks, argument, expert_ids.device)
    return row_slot, offsets, slot_row


def router(
    logits: Tensor, bias: Tensor | None, form: RouterForm, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(T, E), (E,) -> scores (T, A) in a dtype, ids int64 (T, A), row_slot, offsets and slot_row, as `moe_router`."""
    reason = routers.unserved_reason(logits, form)
    if reason is not None:
        warn_once(("router", reason), f"no CUDA kernel serves a router with {reason}: plain torch, about ten launches")
    if reason is not None or logits.shape[0] == 0:
        return reference.router(logits, bias, form, dtype)
    results, launches = routers.plan(logits, bias, form, dtype)
    for expression, threads, shared_bytes, blocks, argument in launches:
        _launch(routers.SOURCES, expression, threads, shared_bytes, blocks, argument, logits.device)
    return results


def row_starts(offsets: Tensor, rows: int) -> Tensor:
    """Offsets (E,) -> int32 (E + 1,): 0 and the offsets, clamped so that they never decrease nor exceed `rows`.

    For torch's grouped GEMM, which trusts its offsets.
    """
    offsets = offsets.contiguous()
    starts = offsets.new_empty(offsets.shape[0] + 1)
    argument = RowStartsArguments(*map(pointer, (offsets, starts)), offsets.shape[0], rows)
    _launch(_ROUTE, "row_starts", 32, 0, 1, argument, offsets.device)
    return starts


def _is_bf16(tensor: Tensor) -> str:
    return str(tensor.dtype == torch.bfloat16).lower()


def _runs_on_reference(activation: Tensor, weight: NVFP4Weight) -> bool:
    """True for fp32 activations or more than 1024 experts: no CUDA kernel serves them. Warns of it."""
    reasons = []
    if activation.dtype == torch.float32:
        reasons.append(("activations in float32", "cast them, or the model, to bfloat16 or float16"))
    if weight.shape[0] > MAX_EXPERTS:
        reasons.append((f"more than {MAX_EXPERTS} experts", "shard the experts, by groups or over devices"))
    for what, remedy in reasons:
        _warn_of_reference(what, activation, weight, remedy)
    return bool(reasons)


def _warn_of_reference(what: str, activation: Tensor, weight: NVFP4Weight, remedy: str) -> None:
    warn_once(
        ("reference", what),
        f"no CUDA kernel serves {what} (got {activation.dtype} {tuple(activation.shape)} and a weight of {weight.shape}"
        f" in layout {weight.layout!r}): plain torch dequantizes every expert at each call, many times slower;"
        f" {remedy}",
    )


def _gemm(
    activation: Tensor,
    weight: NVFP4Weight,
    offsets: Tensor | None,
    row_slot: Tensor | None,
    slot_scale: Tensor | None,
    bias: Tensor | None,
    form: GLU | None,
    config: GemmConfig | None = None,
) -> Tensor:
    num_experts, n, k = weight.shape
    rows = (activation if row_slot is None else row_slot).shape[0]
    features = n if form is None else n // 2
    out = activation.new_empty(rows, features + features % 2)  # the kernels store pairs
    if out.numel() == 0:
        return out
    device, dtype = activation.device, activation.dtype
    activation = _aligned(activation.detach())
    offsets = None if offsets is None else offsets.contiguous()  # None: one group of all rows
    slot_scale, bias = floats(slot_scale), floats(bias)
    row_slot = None if row_slot is None else row_slot.contiguous()
    top_k = 1 if row_slot is None else rows // activation.shape[0]
    weight = weight if weight.layout == TILED else to_linear(weight)
    multiprocessors, capability = _device_facts(device)
    plan = plan_gemm(
        rows, num_experts, n, k, form is not None, row_slot is not None, slot_scale is not None, dtype,
        weight.layout, multiprocessors, capability, config,
    )  # fmt: skip
    qdata, scale, global_scale = (_aligned(tensor) for tensor in weight.to_layout(plan.config.layout).tensors())
    if plan.gather is not None:
        activation = _gathered(activation, row_slot, rows, top_k, plan)
    tile_counter = semaphores = partial_sums = None
    if plan.workspace:
        tile_counter = semaphore_pool(device).take(plan.workspace)
    if tile_counter is not None and plan.partial_sums:
        semaphores = tile_counter[CACHE_LINE:]
        partial_sums = torch.empty(plan.partial_sums, dtype=torch.float32, device=device)
    form = form or SWIGLU
    tensors = (
        activation, qdata, scale, global_scale, offsets, row_slot, slot_scale, bias, out, partial_sums, semaphores
    )  # fmt: skip
    argument: ctypes.Structure = GemmArguments(
        *map(pointer, tensors), rows, num_experts, n, k, top_k,
        global_scale.ndim == 2, dtype_code(slot_scale), dtype_code(bias),
        form.alpha, -1.0 if form.limit is None else form.limit, form.up_shift, pointer(tile_counter), plan.read_once,
    )  # fmt: skip
    if plan.config.argument is TmaGemmArguments:
        argument = TmaGemmArguments(_tensor_map(activation, 8 * plan.config.token_blocks), argument)
    _launch(
        plan.sources, plan.expression, plan.threads, plan.shared_bytes, plan.blocks, argument, device, multiprocessors
    )
    return out if features % 2 == 0 else out[:, :features].contiguous()


def _gathered(x: Tensor, row_slot: Tensor | None, rows: int, top_k: int, plan: GemmPlan) -> Tensor:
    """The rows of a GEMM by wgmma, gathered beforehand; "wgmma" has them in the order of k of order_rows."""
    assert plan.gather is not None
    name, shape = plan.gather
    out = x.new_empty(*shape)
    argument = GatherArguments(*map(pointer, (x, row_slot, out)), rows, x.shape[1], top_k)
    _launch_elementwise(plan.sources, name, out.numel() // 8, argument, x.device)
    return out


def _tensor_map(x: Tensor, box_rows: int) -> ctypes.Array[ctypes.c_byte]:
    """`TensorMap` of ptx.cuh: a matrix (rows, K) in boxes of box_rows rows by 64 k."""
    return (ctypes.c_byte * 128).from_buffer_copy(nvrtc.tensor_map(x.data_ptr(), x.shape[0], x.shape[1], box_rows))


def _device_facts(device: torch.device) -> tuple[int, tuple[int, int]]:
    """(multiprocessors, compute capability)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)


def _launch_elementwise(
    sources: tuple[Path, ...], expression: str, items: int, argument: ctypes.Structure, device: torch.device
) -> None:
    """Launches a kernel whose threads loop over `items`."""
    blocks = min(-(-items // _ELEMENTWISE_THREADS), _ELEMENTWISE_BLOCKS)
    _launch(sources, expression, _ELEMENTWISE_THREADS, 0, blocks, argument, device)


def _launch(
    sources: tuple[Path, ...],
    expression: str,
    threads: int,
    shared_bytes: int,
    blocks: int,
    argument: ctypes.Structure,
    device: torch.device,
    multiprocessors: int | None = None,
) -> None:
    """Launches `blocks` blocks; with `multiprocessors` at most as many as run at once (persistent kernels)."""
    assert device.index is not None
    kernel = nvrtc.kernel(sources, expression, threads, shared_bytes, device.index, type(argument))
    if multiprocessors is not None:
        blocks = min(blocks, multiprocessors * kernel.blocks_per_multiprocessor)
    with torch.cuda.device(device):
        nvrtc.bind_context(device.index)
        kernel(blocks, argument, torch.cuda.current_stream(device).cuda_stream)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes, as the kernels load; a copy only where it is not already."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

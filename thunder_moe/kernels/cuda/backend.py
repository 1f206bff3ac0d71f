"""The CUDA backend: grouped GEMMs of 16-bit rows and packed weights on SM80 and newer, compiled on first use.
Called through kernels/select.py with validated operands; calls prepared.py and launch.py beside it, which launch the
kernels of src/*.cu.

Float32 rows run on kernels/reference.py, with a warning. The gradient of 16-bit rows is a grouped GEMM with dequantized
weights (linear.py, or torch's where that is faster). For many rows on SM90, weights in layout "linear" are converted
first (many_rows.py). Nothing synchronizes with the host.
Offsets, row_slot and slot_row are not trusted: nothing out of range is read or written (`row_end` of grouped_mm.cuh,
`slot_of_row` of common.cuh), and the results of such rows are undefined.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from thunder_moe import routing
from thunder_moe.activations import GLU, SWIGLU
from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.tiled_64x64 import scale_table
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels import by_parts, reference
from thunder_moe.kernels.arguments import DTYPE_CODES, dtype_code, floats, pointer
from thunder_moe.kernels.by_parts import Order
from thunder_moe.kernels.cuda import configs, launch, many_rows, nvrtc
from thunder_moe.kernels.cuda import router as routers
from thunder_moe.kernels.cuda.arguments import (
    DequantizeArguments,
    QuantizeArguments,
    RowStartsArguments,
    SwigluArguments,
)
from thunder_moe.kernels.cuda.configs import COMMON, TILED, GemmConfig, choose_config
from thunder_moe.kernels.cuda.layer import LayerLaunch, Weight
from thunder_moe.kernels.cuda.prepared import (
    DEQUANTIZE,
    ELEMENTWISE_THREADS,
    ROUTE,
    CombinedLaunch,
    GemmLaunch,
    combine_launch,
    dequantize_kernel,
    dgrad_launch,
    elementwise_blocks,
    gemm_launch,
    route_launch,
)
from thunder_moe.kernels.slow_paths import to_linear, warn_once
from thunder_moe.routing import RouterForm, gather_rows

__all__ = [
    "FORMATS",
    "PREPARED",
    "combine",
    "dequantize",
    "grouped_mm",
    "grouped_mm_combine",
    "grouped_mm_dgrad",
    "grouped_swiglu",
    "launch_per_block",
    "layer_launch",
    "linear_router",
    "mm",
    "mm_dgrad",
    "moe_expert_rows",
    "moe_experts",
    "route",
    "router",
    "row_starts",
    "swiglu",
    "to_tiled",
    "unavailable_reason",
]

_DEQUANTIZE = DEQUANTIZE
_QUANTIZE = (COMMON, COMMON.with_name("dequantize.cu"), COMMON.with_name("quantize.cu"))
_QUANTIZE_BLOCKS = 16384  # of a launch, about
_ROUTE = ROUTE
_SWIGLU = (COMMON, COMMON.with_name("swiglu.cu"))
MAX_EXPERTS = 1024
FORMATS = configs.FORMATS
Packed = TypeVar("Packed", bound=PackedWeight)


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """None when the backend can run on a device (by default the current one), else a sentence that says why not."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the device has compute capability {capability}, the kernels need (8, 0)"
    return nvrtc.missing_reason()


def grouped_mm(
    activation: Tensor, weight: PackedWeight, offsets: Tensor, *, config: GemmConfig | None = None
) -> Tensor:
    """(M, K) rows sorted by expert, offsets (E,) row ends -> (M, N) in the activation's dtype."""
    if _runs_on_reference(activation, weight):
        return reference.grouped_mm(activation, weight.to_layout(LINEAR), offsets)
    weight = _for_rows(weight, activation.shape[0], config)
    return _gemm(activation, weight, offsets, None, None, None, None, config)


def grouped_swiglu(
    activation: Tensor,
    weight: PackedWeight,
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
    rows = (activation if row_slot is None else row_slot).shape[0]
    weight = _for_rows(weight, rows, config)
    split_blocks = weight.layout == TILED and weight.shape[1] // 2 % 64 != 0  # they have rows of gate and of up
    if split_blocks or (config is None and _way(weight, rows) == many_rows.IN_16_BITS):
        gate_up = _gemm(gather_rows(activation, row_slot), weight, offsets, None, None, None, None)
        return swiglu(gate_up, offsets, row_slot, slot_scale, bias, form)
    return _gemm(activation, weight, offsets, row_slot, slot_scale, bias, form, config)


def grouped_mm_combine(
    activation: Tensor,
    weight: PackedWeight,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """(M, K) -> (T, N): each slot's row, plus bias (E, N), times slot_weight (T, A), summed per token."""
    if _runs_on_reference(activation, weight):
        return reference.grouped_mm_combine(activation, weight.to_layout(LINEAR), offsets, slot_row, slot_weight, bias)
    weight = _for_rows(weight, activation.shape[0])
    slot_row, slot_weight = slot_row.contiguous(), floats(slot_weight)  # before the GEMM: behind it is `combine` alone
    rows = _gemm(activation, weight, offsets, None, None, bias, None)
    return combine(rows, slot_row, slot_weight, late_rows=weight.shape[1] % 2 == 0)


def moe_experts(
    hidden_states: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    order: Order | None,
    weight_on_input: bool,
    form: GLU,
    *,
    configs: tuple[GemmConfig | None, GemmConfig | None] = (None, None),
    live_rows: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The same as `by_parts.moe_experts` of this module, bit for bit, by the chain of layer.py.

    Args:
        hidden_states: as there, and so are all but the last three.
        configs: of the two GEMMs, in place of those that are best.
        live_rows: how many of the ids are expected to be experts of this device, which the choice of configurations
            takes for the number of rows.
        out: contiguous (T, H) that the result is written into.
    """
    rows = expert_ids.numel() and (live_rows or expert_ids.numel())
    steps, gate_up, down = _for_chain(hidden_states, gate_up, down, rows, configs)
    if steps:
        result = by_parts.moe_experts(
            sys.modules[__name__], hidden_states, expert_ids, expert_weights, gate_up, down, gate_up_bias, down_bias,
            order, weight_on_input, form,
        )  # fmt: skip
        return result if out is None else out.copy_(result)
    gate_up_bias, down_bias = floats(gate_up_bias), floats(down_bias)
    x, ids, weights = hidden_states.detach().contiguous(), expert_ids.contiguous(), floats(expert_weights)
    run, first, second = _layer(
        x, ids, weights, gate_up, down, gate_up_bias, down_bias, order is None, weight_on_input, form, configs,
        live_rows,
    )  # fmt: skip
    order = None if order is None else _contiguous(order)
    return run(x, ids, weights, first, second, gate_up_bias, down_bias, order, out)


def moe_expert_rows(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: PackedWeight, down: PackedWeight,
    order: Order, live_rows: int,
) -> Tensor:  # fmt: skip
    """The rows (M, H) that `moe_experts` with weight_on_input adds up, in its order and by its kernels."""
    rows = expert_ids.numel() and max(live_rows, 1)
    steps, gate_up, down = _for_chain(hidden_states, gate_up, down, rows, (None, None))
    if steps:
        return by_parts.moe_expert_rows(sys.modules[__name__], hidden_states, expert_weights, gate_up, down, order)
    x, ids, weights = hidden_states.detach().contiguous(), expert_ids.contiguous(), floats(expert_weights)
    run, first, second = _layer(
        x, ids, weights, gate_up, down, None, None, False, True, SWIGLU, (None, None), live_rows
    )  # fmt: skip
    return run.rows(x, weights, first, second, None, None, _contiguous(order))


def _for_chain(
    hidden_states: Tensor, gate_up: PackedWeight, down: PackedWeight, rows: int,
    configs: tuple[GemmConfig | None, GemmConfig | None],
) -> tuple[bool, PackedWeight, PackedWeight]:  # fmt: skip
    """Whether the chain of layer.py does not serve these operands (see `grouped_swiglu`), and the weights, in the
    layouts in which so many rows are multiplied."""
    if rows == 0 or _runs_on_reference(hidden_states, gate_up):
        return True, gate_up, down
    in_16_bits = False
    if configs == (None, None):
        gate_up, down = _for_rows(gate_up, rows), _for_rows(down, rows)
        in_16_bits = many_rows.IN_16_BITS in (_way(gate_up, rows), _way(down, rows))
    split_blocks = gate_up.layout == TILED and down.shape[2] % 64 != 0
    return split_blocks or in_16_bits, gate_up, down


def _contiguous(order: Order) -> Order:
    return order[0].contiguous(), order[1].contiguous(), order[2].contiguous()


def _layer(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: PackedWeight, down: PackedWeight, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, routes: bool, weight_on_input: bool, form: GLU,
    configs: tuple[GemmConfig | None, GemmConfig | None], live_rows: int | None,
) -> tuple[LayerLaunch, Weight, Weight]:  # fmt: skip
    """The chain for operands of the backend, and the weights' tensors in its layouts."""
    first, second = (each if each.layout == TILED else to_linear(each) for each in (gate_up, down))
    features = down.shape[2]
    if live_rows is not None:
        best = _configs(
            live_rows, first.shape[0], x.shape[1], features, first.layout, second.layout, first.format.name,
            second.format.name, _device_facts(x.device),
        )  # fmt: skip
        configs = configs[0] or best[0], configs[1] or best[1]
    run = layer_launch(
        x, ids, weights, first.layout, second.layout, _per_row(first), _per_row(second), _dtype(gate_up_bias),
        _dtype(down_bias), first.shape[0], features, routes, weight_on_input, form, configs,
        (first.format.name, second.format.name),
    )  # fmt: skip
    return run, _tensors(first, run.gate_up.layout), _tensors(second, run.down.layout)


@functools.lru_cache(maxsize=1024)
def _configs(
    rows: int, num_experts: int, hidden_size: int, features: int, gate_up_layout: str, down_layout: str,
    gate_up_format: str, down_format: str, facts: tuple[int, tuple[int, int]],
) -> tuple[GemmConfig, GemmConfig]:  # fmt: skip
    """The best ones of gate_up and down for so many rows."""
    return (
        choose_config(rows, num_experts, features, hidden_size, True, *facts, gate_up_layout, gate_up_format),
        choose_config(rows, num_experts, hidden_size, features, False, *facts, down_layout, down_format),
    )


def _tensors(weight: PackedWeight, layout: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors of a weight in a layout, contiguous; None for the global scale of a format without."""
    weight = weight.to_layout(layout)
    global_scale = weight.global_scale
    return (
        weight.qdata.contiguous(),
        weight.scale.contiguous(),
        None if global_scale is None else global_scale.contiguous(),
    )


def _per_row(weight: PackedWeight) -> bool:
    """Whether there is a global scale for each row."""
    return _is_per_row(weight.global_scale)


def _is_per_row(global_scale: Tensor | None) -> bool:
    return global_scale is not None and global_scale.ndim == 2


def layer_launch(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up_layout: str, down_layout: str,
    gate_up_per_row: bool, down_per_row: bool, gate_up_bias: torch.dtype | None, down_bias: torch.dtype | None,
    num_experts: int, features: int, routes: bool, weight_on_input: bool, form: GLU,
    configs: tuple[GemmConfig | None, GemmConfig | None] = (None, None), formats: tuple[str, str] = ("nvfp4", "nvfp4"),
) -> LayerLaunch:  # fmt: skip
    """The launches of `moe_experts` for operands of the dtypes, shapes and layouts of these."""
    (tokens, top_k), hidden_size = expert_ids.shape, hidden_states.shape[1]
    dtype, weight_dtype, device = hidden_states.dtype, expert_weights.dtype, hidden_states.device
    rows, facts = tokens * top_k, _device_facts(device)
    on_input, on_output = (weight_dtype, None) if weight_on_input else (None, weight_dtype)
    return LayerLaunch(
        route_launch((tokens, top_k), num_experts, expert_ids.dtype, device) if routes else None,
        gemm_launch(
            rows, num_experts, 2 * features, hidden_size, top_k, dtype, gate_up_layout, gate_up_per_row, on_input,
            gate_up_bias, form, device, facts, configs[0], formats[0],
        ),
        gemm_launch(
            rows, num_experts, hidden_size, features, None, dtype, down_layout, down_per_row, None, down_bias, None,
            device, facts, configs[1], formats[1],
        ),
        combine_launch(rows, tokens, top_k, hidden_size, dtype, on_output, device, True),
        weight_on_input,
        device.index,
    )  # fmt: skip


def grouped_mm_dgrad(grad: Tensor, weight: PackedWeight, offsets: Tensor) -> Tensor:
    """Gradient (M, N) of `grouped_mm`'s output -> gradient (M, K) of its activation."""
    rows, (experts, n, k) = grad.shape[0], weight.shape
    if grad.dtype == torch.float32:
        _warn_of_reference("gradients of activations in float32", grad, weight, "train in bfloat16 or float16")
    if grad.dtype == torch.float32 or grad.numel() == 0 or k == 0:
        return reference.grouped_mm_dgrad(grad, weight.to_layout(LINEAR), offsets)
    _warn_of_odd_features(n)
    weight = weight if weight.layout == TILED else to_linear(weight, "the kernels of gradients")
    run = dgrad_launch(
        rows, experts, n, k, grad.dtype, weight.layout == TILED, _per_row(weight), grad.device,
        _device_facts(grad.device), weight.format.name,
    )  # fmt: skip
    return run(grad.detach().contiguous(), *_tensors(weight, weight.layout), offsets.contiguous())


def _warn_of_odd_features(n: int) -> None:
    if n % 8 != 0:
        warn_once(
            ("dgrad", n),
            f"gradients of activations with out_features no multiple of 8 ({n}) are computed without tensor cores, many"
            " times slower; pad the weight",
        )


def mm(
    activation: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, config: GemmConfig | None = None
) -> Tensor:
    """(M, K), a weight (1, N, K), bias (N,) -> (M, N) in the activation's dtype: one group that ends at M."""
    if _runs_on_reference(activation, weight):
        return reference.mm(activation, weight.to_layout(LINEAR), bias)
    weight = _for_rows(weight, activation.shape[0], config)
    return _gemm(activation, weight, None, None, None, bias, None, config)


def mm_dgrad(grad: Tensor, weight: PackedWeight) -> Tensor:
    """Gradient (M, N) of `mm`'s output -> gradient (M, K) of its activation."""
    if _runs_on_reference(grad, weight):
        return reference.mm_dgrad(grad, weight.to_layout(LINEAR))
    with torch.autocast("cuda", enabled=False):
        return grad.detach() @ dequantize(weight, grad.dtype)[0]


def combine(
    rows: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None,
    *,
    late_rows: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """(M, N) -> (T, N), contiguous and in `out` where it is given: each slot's row, times slot_weight (T, A), summed
    per token; late_rows: see `CombineLaunch`."""
    tokens, top_k = slot_row.shape
    n = rows.shape[1]
    if rows.shape[0] == 0 or tokens == 0 or n == 0:
        return rows.new_zeros(tokens, n) if out is None else out.zero_()
    slot_row, slot_weight = slot_row.contiguous(), floats(slot_weight)
    run = combine_launch(rows.shape[0], tokens, top_k, n, rows.dtype, _dtype(slot_weight), rows.device, late_rows)
    return run(rows, slot_row, slot_weight, out)


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


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The same as `dequantize` of the module of the weight's format, bit for bit: (E, N, K) of bfloat16 or float16."""
    num_experts, n, k = weight.shape
    weight = weight if weight.layout == TILED else to_linear(weight, "the kernels of gradients")
    global_scale = None if weight.global_scale is None else _aligned(weight.global_scale)
    tensors = _aligned(weight.qdata), _aligned(weight.scale), global_scale
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    argument = DequantizeArguments(
        *map(pointer, (*tensors, out)), None, num_experts * n, 1 if _per_row(weight) else n, k, n
    )
    expression = dequantize_kernel(weight.format.name, weight.layout == TILED, dtype)
    _launch_elementwise(_DEQUANTIZE, expression, out.numel() // 16, argument, weight.device)
    return out


def route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, A) -> row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
    if expert_ids.numel() == 0 or num_experts > MAX_EXPERTS:
        return reference.route(expert_ids, num_experts)
    tokens, top_k = expert_ids.shape
    return route_launch((tokens, top_k), num_experts, expert_ids.dtype, expert_ids.device)(expert_ids.contiguous())


def router(
    logits: Tensor, bias: Tensor | None, form: RouterForm, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(T, E), (E,) -> scores (T, A) in a dtype, ids int64 (T, A), row_slot, offsets and slot_row, as `moe_router`."""
    reason = routers.unserved_reason(logits.shape[1], form)
    if reason is not None:
        warn_once(("router", reason), f"no CUDA kernel serves a router with {reason}: plain torch, about ten launches")
    if reason is not None or logits.shape[0] == 0:
        return reference.router(logits, bias, form, dtype)
    bias = None if bias is None else bias.contiguous()
    tokens, experts = logits.shape
    run = routers.router_launch((tokens, experts), form, logits.dtype, _dtype(bias), dtype, logits.device)
    return run(logits.contiguous(), bias)


def linear_router(
    hidden: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    bias: Tensor | None,
    form: RouterForm,
    logits_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(T, H), (E, H) -> what `router` gives for the logits, and the logits (T, E), as `moe_linear_router`."""
    shape = hidden.shape[0], weight.shape[0]
    if not routers.serves_linear(shape, hidden.shape[1], form, hidden.dtype):
        return routing.linear_router(hidden, weight, linear_bias, bias, form, logits_dtype, dtype, choose=router)
    linear_bias, bias = (None if b is None else b.contiguous() for b in (linear_bias, bias))
    run = routers.linear_router_launch(
        shape, hidden.shape[1], form, hidden.dtype, linear_bias is not None, _dtype(bias), logits_dtype, dtype,
        hidden.device,
    )  # fmt: skip
    return run(hidden.contiguous(), weight.contiguous(), linear_bias, bias)


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


def _runs_on_reference(activation: Tensor, weight: PackedWeight) -> bool:
    """True for fp32 activations or more than 1024 experts: no CUDA kernel serves them. Warns of it."""
    reasons = []
    if activation.dtype == torch.float32:
        reasons.append(("activations in float32", "cast them, or the model, to bfloat16 or float16"))
    if weight.shape[0] > MAX_EXPERTS:
        reasons.append((f"more than {MAX_EXPERTS} experts", "shard the experts, by groups or over devices"))
    for what, remedy in reasons:
        _warn_of_reference(what, activation, weight, remedy)
    return bool(reasons)


def _warn_of_reference(what: str, activation: Tensor, weight: PackedWeight, remedy: str) -> None:
    warn_once(
        ("reference", what),
        f"no CUDA kernel serves {what} (got {activation.dtype} {tuple(activation.shape)} and a weight of {weight.shape}"
        f" in layout {weight.layout!r}): plain torch dequantizes every expert at each call, many times slower;"
        f" {remedy}",
    )


def to_tiled(weight: Packed) -> Packed:
    """A weight in layout "linear" in layout "tiled_64x64", as `PackedWeight.to_layout` gives it.

    The callers have checked that the layout fits.
    """
    codes, scales = _aligned(weight.qdata), _aligned(weight.scale)
    qdata, scale = torch.empty_like(codes), torch.empty_like(scales)
    of_nvfp4 = weight.format is NVFP4
    table = scale_table(weight.device) if of_nvfp4 else None
    tensors = (None, codes, scales, table, None, qdata, scale, None)
    kernel = "write_tiled" if of_nvfp4 else "write_tiled_mxfp8"
    launch_per_block((kernel,), tensors, weight.shape, weight.format.block_size)
    tiled: Any = weight
    return cast("Packed", replace(tiled, qdata=qdata, scale=scale, layout=TILED))


def launch_per_block(
    kernels: tuple[str, ...], tensors: tuple[Tensor | None, ...], shape: tuple[int, ...], block_size: int
) -> None:
    """Launches kernels one after the other of src/quantize.cu on the tensors of a weight (E, N, K), a thread for
    each block of weights."""
    experts, n, k = shape
    (device,) = {tensor.device for tensor in tensors if tensor is not None}
    threads = n * (k // block_size)  # of an expert
    per_expert = max(1, min(-(-threads // ELEMENTWISE_THREADS), _QUANTIZE_BLOCKS // experts))
    argument = QuantizeArguments(*map(pointer, tensors), n, k, per_expert)
    for kernel in kernels:
        _launch(_QUANTIZE, kernel, ELEMENTWISE_THREADS, 0, experts * per_expert, argument, device)


def _way(weight: PackedWeight, rows: int) -> str | None:
    """How so many rows are multiplied by a weight: one of `many_rows.WAYS`, or None."""
    _, capability = _device_facts(weight.device)
    return many_rows.way(weight.layout, weight.shape, weight.format.name, rows, capability)


def _for_rows(weight: Packed, rows: int, config: GemmConfig | None = None) -> Packed:
    """The weight in the layout in which so many rows are multiplied; as it is for a given configuration."""
    return to_tiled(weight) if config is None and _way(weight, rows) == many_rows.IN_TILES else weight


def _gemm(
    activation: Tensor,
    weight: PackedWeight,
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
    if rows == 0 or features == 0:
        return activation.new_empty(rows, features)
    activation = activation.detach().contiguous()
    offsets = None if offsets is None else offsets.contiguous()  # None: one group of all rows
    slot_scale, bias = floats(slot_scale), floats(bias)
    row_slot = None if row_slot is None else row_slot.contiguous()
    top_k = None if row_slot is None else rows // activation.shape[0]
    weight = weight if weight.layout == TILED else to_linear(weight)
    plain = row_slot is None and slot_scale is None and bias is None and form is None
    if plain and offsets is not None and config is None and _way(weight, rows) == many_rows.IN_16_BITS:
        values = dequantize(weight, activation.dtype)
        return many_rows.multiply(activation, values, offsets, _device_facts(activation.device))
    run = gemm_launch(
        rows, num_experts, n, k, top_k, activation.dtype, weight.layout, _per_row(weight), _dtype(slot_scale),
        _dtype(bias), form, activation.device, _device_facts(activation.device), config, weight.format.name,
    )  # fmt: skip
    return run(activation, *_tensors(weight, run.layout), offsets, row_slot, slot_scale, bias)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@functools.cache
def _device_facts(device: torch.device) -> tuple[int, tuple[int, int]]:
    """(multiprocessors, compute capability)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)


def _launch_elementwise(
    sources: tuple[Path, ...], expression: str, items: int, argument: ctypes.Structure, device: torch.device
) -> None:
    """Launches a kernel whose threads loop over `items`."""
    _launch(sources, expression, ELEMENTWISE_THREADS, 0, elementwise_blocks(items), argument, device)


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
    index: Any = device.index
    run = launch.launcher(sources, expression, threads, shared_bytes, blocks, type(argument), index, multiprocessors)
    if launch.current_device() == index:
        run.launch(launch.current_stream(index), argument)
    else:
        with torch.cuda.device(index):
            run.launch(launch.current_stream(index), argument)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes, as the kernels load; a copy only where it is not already."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


# ---- the operators on operands of one kind: what `select.prepare` asks for


def _prepared_gemm(
    activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor | None,
    row_slot: Tensor | None, slot_scale: Tensor | None, bias: Tensor | None, layout: str, form: GLU | None,
    format: BlockFormat,
) -> GemmLaunch | None:  # fmt: skip
    """What runs `_gemm` on operands like these; None where they have to be converted or gathered first."""
    num_experts, codes, n = packed.shape
    rows = (activation if row_slot is None else row_slot).shape[0]
    features = n if form is None else n // 2
    if (
        activation.dtype == torch.float32
        or num_experts > MAX_EXPERTS
        or rows == 0
        or features == 0
        or layout not in (LINEAR, TILED)
        or (layout == TILED and form is not None and features % 64 != 0)
        or many_rows.way(
            layout,
            (num_experts, n, format.codes_per_byte * codes),
            format.name,
            rows,
            _device_facts(activation.device)[1],
        )
        or not all(map(_is_read, (activation, packed.mT, scale, global_scale, offsets, row_slot)))
        or not all(map(_is_read_as_float, (slot_scale, bias)))
    ):
        return None
    top_k = None if row_slot is None else rows // activation.shape[0]
    run = gemm_launch(
        rows, num_experts, n, format.codes_per_byte * codes, top_k, activation.dtype, layout, _is_per_row(global_scale),
        _dtype(slot_scale), _dtype(bias), form, activation.device, _device_facts(activation.device), None, format.name,
    )  # fmt: skip
    return run if run.layout == layout else None


def _is_read(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.is_contiguous()


def _is_read_as_float(tensor: Tensor | None) -> bool:
    return tensor is None or (tensor.is_contiguous() and tensor.dtype in DTYPE_CODES)


def _prepare_grouped_mm(
    activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, *_: Any,
    layout: str = LINEAR, format: BlockFormat = NVFP4,
) -> Callable[..., Tensor] | None:  # fmt: skip
    gemm = _prepared_gemm(activation, packed, scale, global_scale, offsets, None, None, None, layout, None, format)
    if gemm is None:
        return None

    def run(
        activation: Tensor,
        packed: Tensor,
        scale: Tensor,
        global_scale: Tensor | None,
        offsets: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        return gemm(activation, packed, scale, global_scale, offsets, None, None, None)

    return run


def _prepare_grouped_swiglu(
    activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor,
    row_slot: Tensor | None = None, slot_scale: Tensor | None = None, bias: Tensor | None = None, *,
    layout: str = LINEAR, format: BlockFormat = NVFP4, **form: Any,
) -> Callable[..., Tensor] | None:  # fmt: skip
    gemm = _prepared_gemm(
        activation, packed, scale, global_scale, offsets, row_slot, slot_scale, bias, layout, GLU(**form), format
    )
    if gemm is None:
        return None

    def run(
        activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor,
        row_slot: Tensor | None = None, slot_scale: Tensor | None = None, bias: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        return gemm(activation, packed, scale, global_scale, offsets, row_slot, slot_scale, bias)

    return run


def _prepare_combine(
    activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, slot_row: Tensor,
    slot_weight: Tensor | None = None, bias: Tensor | None = None, *, layout: str = LINEAR,
    format: BlockFormat = NVFP4,
) -> Callable[..., Tensor] | None:  # fmt: skip
    (tokens, top_k), n = slot_row.shape, packed.shape[2]
    gemm = _prepared_gemm(activation, packed, scale, global_scale, offsets, None, None, bias, layout, None, format)
    if gemm is None or tokens == 0 or not (_is_read(slot_row) and _is_read_as_float(slot_weight)):
        return None
    summed = combine_launch(
        activation.shape[0], tokens, top_k, n, activation.dtype, _dtype(slot_weight), activation.device, n % 2 == 0
    )
    if gemm.alone:
        return CombinedLaunch(gemm, summed)

    def run(
        activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor,
        slot_row: Tensor, slot_weight: Tensor | None = None, bias: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        return summed(gemm(activation, packed, scale, global_scale, offsets, None, None, bias), slot_row, slot_weight)

    return run


def _prepare_experts(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    gate_up: Tensor, gate_up_scale: Tensor, gate_up_global_scale: Tensor | None,
    down: Tensor, down_scale: Tensor, down_global_scale: Tensor | None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    row_slot: Tensor | None = None, offsets: Tensor | None = None, slot_row: Tensor | None = None,
    *, weight_on_input: bool = False, gate_up_layout: str = LINEAR, down_layout: str = LINEAR,
    format: BlockFormat = NVFP4, expert_ranks: int = 1, **form: Any,
) -> Callable[..., Tensor] | None:  # fmt: skip
    num_experts, features = gate_up.shape[0], gate_up.shape[2] // 2
    hidden_size, rows, (_, capability) = hidden_states.shape[1], expert_ids.numel(), _device_facts(hidden_states.device)
    read = (hidden_states, expert_ids, gate_up.mT, gate_up_scale, down.mT, down_scale, row_slot, offsets, slot_row)
    if (
        hidden_states.dtype == torch.float32
        or num_experts > MAX_EXPERTS
        or expert_ids.numel() == 0
        or not {gate_up_layout, down_layout} <= {LINEAR, TILED}
        or (gate_up_layout == TILED and features % 64 != 0)
        or many_rows.way(gate_up_layout, (num_experts, 2 * features, hidden_size), format.name, rows, capability)
        or many_rows.way(down_layout, (num_experts, hidden_size, features), format.name, rows, capability)
        or not all(map(_is_read, (*read, gate_up_global_scale, down_global_scale)))
        or not all(map(_is_read_as_float, (expert_weights, gate_up_bias, down_bias)))
    ):
        return None
    configs: tuple[GemmConfig | None, GemmConfig | None] = (None, None)
    if expert_ranks > 1:
        configs = _configs(
            -(-expert_ids.numel() // expert_ranks), num_experts, hidden_states.shape[1], features, gate_up_layout,
            down_layout, format.name, format.name, _device_facts(hidden_states.device),
        )  # fmt: skip
    chain = layer_launch(
        hidden_states, expert_ids, expert_weights, gate_up_layout, down_layout, _is_per_row(gate_up_global_scale),
        _is_per_row(down_global_scale), _dtype(gate_up_bias), _dtype(down_bias), num_experts, features,
        row_slot is None, weight_on_input, GLU(**form), configs, (format.name, format.name),
    )  # fmt: skip
    if (chain.gate_up.layout, chain.down.layout) != (gate_up_layout, down_layout):
        return None

    def run(
        hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor,
        gate_up: Tensor, gate_up_scale: Tensor, gate_up_global_scale: Tensor | None,
        down: Tensor, down_scale: Tensor, down_global_scale: Tensor | None,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
        row_slot: Tensor | None = None, offsets: Tensor | None = None, slot_row: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        order = None if row_slot is None or offsets is None or slot_row is None else (row_slot, offsets, slot_row)
        return chain(
            hidden_states, expert_ids, expert_weights, (gate_up, gate_up_scale, gate_up_global_scale),
            (down, down_scale, down_global_scale), gate_up_bias, down_bias, order,
        )  # fmt: skip

    return run


def _prepare_route(expert_ids: Tensor, num_experts: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    if expert_ids.numel() == 0 or num_experts > MAX_EXPERTS or not expert_ids.is_contiguous():
        return None
    tokens, top_k = expert_ids.shape
    sort = route_launch((tokens, top_k), num_experts, expert_ids.dtype, expert_ids.device)
    return lambda expert_ids, num_experts: sort(expert_ids)


def _prepare_router(
    logits: Tensor, bias: Tensor | None = None, *, top_k: int, scores_dtype: torch.dtype | None = None, **options: Any
) -> Callable[..., tuple[Tensor, ...]] | None:
    form = RouterForm(top_k, **options)
    tokens, experts = logits.shape
    if tokens == 0 or routers.unserved_reason(experts, form) is not None or not (_is_read(logits) and _is_read(bias)):
        return None
    choose = routers.router_launch(
        (tokens, experts), form, logits.dtype, _dtype(bias), scores_dtype or logits.dtype, logits.device
    )
    return lambda logits, bias=None, **_: choose(logits, bias)


def _prepare_linear_router(
    hidden: Tensor, weight: Tensor, linear_bias: Tensor | None = None, bias: Tensor | None = None, *, top_k: int,
    logits_dtype: torch.dtype | None = None, scores_dtype: torch.dtype | None = None, **options: Any,
) -> Callable[..., tuple[Tensor, ...]] | None:  # fmt: skip
    form, shape = RouterForm(top_k, **options), (hidden.shape[0], weight.shape[0])
    read = all(map(_is_read, (hidden, weight, linear_bias, bias)))
    if not read or not routers.serves_linear(shape, hidden.shape[1], form, hidden.dtype):
        return None
    choose = routers.linear_router_launch(
        shape, hidden.shape[1], form, hidden.dtype, linear_bias is not None, _dtype(bias),
        logits_dtype or hidden.dtype, scores_dtype or hidden.dtype, hidden.device,
    )  # fmt: skip

    def run(
        hidden: Tensor, weight: Tensor, linear_bias: Tensor | None = None, bias: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, ...]:
        return choose(hidden, weight, linear_bias, bias)

    return run


def _prepare_mm(
    activation: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor | None, bias: Tensor | None = None, *,
    layout: str = LINEAR, format: BlockFormat = NVFP4,
) -> Callable[..., Tensor] | None:  # fmt: skip
    leading, rows = activation.shape[:-1], activation.flatten(0, -2) if activation.ndim > 1 else activation[None]
    weight = packed[None], scale[None], None if global_scale is None else global_scale[None]
    gemm = _prepared_gemm(rows, *weight, None, None, None, bias, layout, None, format)
    if gemm is None or not activation.is_contiguous():
        return None
    shape = *leading, packed.shape[1]

    def run(
        activation: Tensor,
        packed: Tensor,
        scale: Tensor,
        global_scale: Tensor | None,
        bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        out: Tensor = torch.ops.aten._unsafe_view.default(  # a result is no view, to autograd
            gemm(activation, packed, scale, global_scale, None, None, None, bias), shape
        )
        return out

    return run


def _prepare_dgrad(
    grad: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    offsets: Tensor,
    *,
    layout: str = LINEAR,
    format: BlockFormat = NVFP4,
) -> Callable[..., Tensor] | None:
    experts, codes, n = packed.shape
    operands = grad, packed.mT, scale, global_scale, offsets
    unserved = grad.dtype == torch.float32 or grad.numel() == 0 or codes == 0 or layout not in (LINEAR, TILED)
    if unserved or not all(map(_is_read, operands)):
        return None
    multiply = dgrad_launch(
        grad.shape[0], experts, n, format.codes_per_byte * codes, grad.dtype, layout == TILED,
        _is_per_row(global_scale), grad.device, _device_facts(grad.device), format.name,
    )  # fmt: skip
    return lambda grad, packed, scale, global_scale, offsets, **_: multiply(grad, packed, scale, global_scale, offsets)


def _in_mxfp8(prepare: Callable[..., Any], *places: int) -> Callable[..., Callable[..., Any] | None]:
    """What prepares an operator of MXFP8 weights, from NVFP4's, which gets None at the places of global scales."""

    def with_places(args: tuple[Any, ...]) -> tuple[Any, ...]:
        for place in places:
            args = (*args[:place], None, *args[place:])
        return args

    def prepared(*args: Any, **options: Any) -> Callable[..., Any] | None:
        run = prepare(*with_places(args), format=MXFP8, **options)
        return None if run is None else lambda *args, **options: run(*with_places(args), **options)

    return prepared


# By the operator's name: its arguments -> what runs it on all operands of the same shapes, strides, dtypes and devices.
PREPARED: dict[str, Callable[..., Callable[..., Any] | None]] = {
    "f16a_mxfp8weight_scaled_grouped_mm": _in_mxfp8(_prepare_grouped_mm, 3),
    "f16a_mxfp8weight_grouped_swiglu": _in_mxfp8(_prepare_grouped_swiglu, 3),
    "f16a_mxfp8weight_grouped_mm_combine": _in_mxfp8(_prepare_combine, 3),
    "f16a_mxfp8weight_moe_experts": _in_mxfp8(_prepare_experts, 5, 8),
    "f16a_mxfp8weight_scaled_grouped_mm_dgrad": _in_mxfp8(_prepare_dgrad, 3),
    "f16a_mxfp8weight_scaled_mm": _in_mxfp8(_prepare_mm, 3),
    "f16a_nvfp4weight_scaled_grouped_mm": _prepare_grouped_mm,
    "f16a_nvfp4weight_grouped_swiglu": _prepare_grouped_swiglu,
    "f16a_nvfp4weight_grouped_mm_combine": _prepare_combine,
    "f16a_nvfp4weight_moe_experts": _prepare_experts,
    "f16a_nvfp4weight_scaled_grouped_mm_dgrad": _prepare_dgrad,
    "f16a_nvfp4weight_scaled_mm": _prepare_mm,
    "moe_linear_router": _prepare_linear_router,
    "moe_route": _prepare_route,
    "moe_router": _prepare_router,
}

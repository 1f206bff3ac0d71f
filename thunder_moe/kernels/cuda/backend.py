"""The CUDA backend: grouped GEMMs of 16-bit rows and packed weights on SM80 and newer, compiled on first use.
Called through kernels/select.py with validated operands; calls prepared.py and router.py beside it, whose chains
launch the kernels of src/*.cu.

Float32 rows run on kernels/reference.py, with a warning. The gradient of 16-bit rows is a grouped GEMM with dequantized
weights (linear.py, or torch's where that is faster). For many rows on SM90, weights in layout "linear" are converted
first (many_rows.py). Nothing synchronizes with the host.
Offsets, row_slot and slot_row are not trusted: nothing out of range is read or written (`row_end` of grouped_mm.cuh,
`slot_of_row` of common.cuh), and the results of such rows are undefined.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from thunder_moe import routing
from thunder_moe.activations import GLU, SWIGLU
from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.tiled_64x64 import scale_table
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels import by_parts, reference
from thunder_moe.kernels.arguments import DTYPE_CODES, dtype_code, floats, pointer
from thunder_moe.kernels.by_parts import Order
from thunder_moe.kernels.cuda import chain, configs, many_rows, nvrtc, prepared
from thunder_moe.kernels.cuda import router as routers
from thunder_moe.kernels.cuda.arguments import (
    DequantizeArguments,
    QuantizeArguments,
    RowStartsArguments,
    SwigluArguments,
)
from thunder_moe.kernels.cuda.chain import launched
from thunder_moe.kernels.cuda.configs import COMMON, TILED, GemmConfig, choose_config
from thunder_moe.kernels.cuda.launch import launch
from thunder_moe.kernels.cuda.linear import MAX_EXPERTS
from thunder_moe.kernels.cuda.prepared import DEQUANTIZE, ELEMENTWISE_THREADS, ROUTE, elementwise_blocks
from thunder_moe.kernels.slow_paths import to_linear, warn_once
from thunder_moe.kernels.specs import DgradSpec, ExpertsSpec, GemmSpec, RouterSpec, Target, WeightSpec
from thunder_moe.routing import RouterForm, gather_rows

__all__ = [
    "FORMATS",
    "MAX_EXPERTS",
    "aligned",
    "combine",
    "dequantize",
    "grouped_mm",
    "grouped_mm_combine",
    "grouped_mm_dgrad",
    "grouped_swiglu",
    "launch_per_block",
    "linear_router",
    "mm",
    "mm_dgrad",
    "moe_expert_rows",
    "moe_experts",
    "route",
    "router",
    "row_starts",
    "swiglu",
    "target",
    "tensors_of",
    "to_tiled",
    "unavailable_reason",
    "weight_spec",
]

_QUANTIZE = (COMMON, COMMON.with_name("dequantize.cu"), COMMON.with_name("quantize.cu"))
_QUANTIZE_BLOCKS = 16384  # of a launch, about
_SWIGLU = (COMMON, COMMON.with_name("swiglu.cu"))
FORMATS = configs.FORMATS
Packed = TypeVar("Packed", bound=PackedWeight)


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """None when the backend can run on a device (by default the current one), else a sentence that says why not."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the device has compute capability {capability}, the kernels need (8, 0)"
    return nvrtc.missing_reason() or chain.missing_reason()


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
    """Compute what `by_parts.moe_experts` of this module computes, bit for bit, by a chain of kernels.

    Args:
        hidden_states: as there, and so are all but the last three.
        configs: of the two GEMMs, in place of those that are best.
        live_rows: how many of the ids are expected to be experts of this device, which the choice of configurations
            takes for the number of rows.
        out: contiguous (T, H) that the result is written into.
    """
    spec, gate_up, down = _experts_spec(
        hidden_states, expert_ids, expert_weights, gate_up, down, gate_up_bias, down_bias, order, weight_on_input, form,
        live_rows or expert_ids.numel(), configs,
    )  # fmt: skip
    if spec is None:
        result = by_parts.moe_experts(
            sys.modules[__name__], hidden_states, expert_ids, expert_weights, gate_up, down, gate_up_bias, down_bias,
            order, weight_on_input, form,
        )  # fmt: skip
        return result if out is None else out.copy_(result)
    into = () if out is None else (out,)
    return _run_experts(
        replace(spec, into=out is not None), live_rows, configs, hidden_states, expert_ids, expert_weights, gate_up,
        down, gate_up_bias, down_bias, order, *into,
    )  # fmt: skip


def moe_expert_rows(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: PackedWeight, down: PackedWeight,
    order: Order, live_rows: int,
) -> Tensor:  # fmt: skip
    """The rows (M, H) that `moe_experts` with weight_on_input adds up, in its order and by its kernels."""
    live_rows = max(live_rows, 1)
    spec, gate_up, down = _experts_spec(
        hidden_states, expert_ids, expert_weights, gate_up, down, None, None, order, True, SWIGLU, live_rows,
        (None, None),
    )  # fmt: skip
    if spec is None:
        return by_parts.moe_expert_rows(sys.modules[__name__], hidden_states, expert_weights, gate_up, down, order)
    return _run_experts(
        replace(spec, summed=False), live_rows, (None, None), hidden_states, expert_ids, expert_weights, gate_up, down,
        None, None, order,
    )  # fmt: skip


def _experts_spec(
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: PackedWeight, down: PackedWeight,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, order: Order | None, weight_on_input: bool, form: GLU,
    live_rows: int, configs: tuple[GemmConfig | None, GemmConfig | None],
) -> tuple[ExpertsSpec | None, PackedWeight, PackedWeight]:  # fmt: skip
    """Return the spec of a layer's experts, or None if no chain serves it, and the weights, converted as so many rows
    need them."""
    rows = live_rows if expert_ids.numel() else 0
    if rows == 0 or _runs_on_reference(hidden_states, gate_up):
        return None, gate_up, down
    if configs == (None, None):
        gate_up, down = _for_rows(gate_up, rows), _for_rows(down, rows)
    first, second = (each if each.layout == TILED else to_linear(each) for each in (gate_up, down))
    (tokens, top_k), (experts, hidden_size, features) = expert_ids.shape, down.shape
    spec = ExpertsSpec(
        tokens, top_k, experts, hidden_size, features, hidden_states.dtype, expert_ids.dtype,
        _float_dtype(expert_weights) or torch.float32, weight_spec(first), weight_spec(second), form,
        target(hidden_states.device), _float_dtype(gate_up_bias), _float_dtype(down_bias), order is not None,
        weight_on_input,
    )  # fmt: skip
    by_rows = configs == (None, None) and many_rows.IN_16_BITS in (_way(gate_up, rows), _way(down, rows))
    return None if by_rows or splits_blocks(spec) else spec, first, second


def splits_blocks(spec: ExpertsSpec) -> bool:
    """True if a block of tiles has rows of gate and of up, which no fused activation serves."""
    return spec.gate_up.layout == TILED and spec.intermediate_size % 64 != 0


def _run_experts(
    spec: ExpertsSpec, live_rows: int | None, configs: tuple[GemmConfig | None, GemmConfig | None],
    hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: PackedWeight, down: PackedWeight,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, order: Order | None, *into: Tensor,
) -> Tensor:  # fmt: skip
    """Convert the operands as the chain reads them, and launch it."""
    if live_rows is not None:
        best = experts_configs(spec, live_rows)
        configs = configs[0] or best[0], configs[1] or best[1]
    run = prepared.prepare_experts(spec, configs)
    weights = [each.to_layout(layout) for each, layout in zip((gate_up, down), run.layouts, strict=True)]
    places = (None, None, None) if order is None else tuple(each.contiguous() for each in order)
    inputs = aligned(hidden_states.detach()), expert_ids.contiguous(), floats(expert_weights)
    packed = *tensors_of(weights[0]), *tensors_of(weights[1])
    biases = floats(gate_up_bias), floats(down_bias)
    out: Tensor = launched(run.chain, *inputs, *packed, *biases, *places, *into)
    return out


@functools.lru_cache(maxsize=1024)
def experts_configs(spec: ExpertsSpec, rows: int) -> tuple[GemmConfig, GemmConfig]:
    """The best configurations of gate_up and down for so many rows."""

    def best(gemm: GemmSpec) -> GemmConfig:
        weight, where = gemm.weight, gemm.target
        return choose_config(
            rows, gemm.num_experts, gemm.features, gemm.k, gemm.activation is not None, where.multiprocessors,
            where.capability, weight.layout, weight.format,
        )  # fmt: skip

    return best(spec.gate_up_gemm), best(spec.down_gemm)


def tensors_of(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors of a weight as chains read them: codes and scales as uint8; None without a global scale."""
    scale = weight.global_scale
    codes, scales = (aligned(each).view(torch.uint8) for each in (weight.qdata, weight.scale))
    return codes, scales, None if scale is None else aligned(scale)


def weight_spec(weight: PackedWeight) -> WeightSpec:
    """The spec of a packed weight."""
    scale = weight.global_scale
    return WeightSpec(weight.layout, weight.format.name, scale is not None and scale.ndim == 2)


def grouped_mm_dgrad(grad: Tensor, weight: PackedWeight, offsets: Tensor) -> Tensor:
    """Gradient (M, N) of `grouped_mm`'s output -> gradient (M, K) of its activation."""
    rows, (experts, n, k) = grad.shape[0], weight.shape
    if grad.dtype == torch.float32:
        _warn_of_reference("gradients of activations in float32", grad, weight, "train in bfloat16 or float16")
    if grad.dtype == torch.float32 or grad.numel() == 0 or k == 0:
        return reference.grouped_mm_dgrad(grad, weight.to_layout(LINEAR), offsets)
    _warn_of_odd_features(n)
    weight = weight if weight.layout == TILED else to_linear(weight, "the kernels of gradients")
    run = prepared.prepare_dgrad(DgradSpec(rows, experts, n, k, grad.dtype, weight_spec(weight), target(grad.device)))
    out: Tensor = launched(run, aligned(grad.detach()), *tensors_of(weight), offsets.contiguous())
    return out


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
    per token; late_rows: see `prepared.append_combine`."""
    (tokens, top_k), n = slot_row.shape, rows.shape[1]
    if rows.shape[0] == 0 or tokens == 0 or n == 0:
        return rows.new_zeros(tokens, n) if out is None else out.zero_()
    slot_row, slot_weight = slot_row.contiguous(), floats(slot_weight)
    run = prepared.prepare_combine(
        rows.shape[0], (tokens, top_k), n, rows.dtype, _dtype(slot_weight), rows.device, late_rows, out is not None
    )
    into = () if out is None else (out,)
    summed: Tensor = launched(run, aligned(rows), slot_row, slot_weight, *into)
    return summed


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
    blocks = elementwise_blocks(rows * -(-features // 8))
    launch(_SWIGLU, f"swiglu<{_is_bf16(gate_up)}>", ELEMENTWISE_THREADS, 0, blocks, argument, gate_up.device)
    return out


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The same as `dequantize` of the module of the weight's format, bit for bit: (E, N, K) of bfloat16 or float16."""
    num_experts, n, k = weight.shape
    weight = weight if weight.layout == TILED else to_linear(weight, "the kernels of gradients")
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    spec = weight_spec(weight)
    argument = DequantizeArguments(
        *map(pointer, (*tensors_of(weight), out)), None, num_experts * n, 1 if spec.per_row_scale else n, k, n
    )
    expression = prepared.dequantize_kernel(spec.format, spec.layout == TILED, dtype)
    blocks = elementwise_blocks(out.numel() // 16)
    launch(DEQUANTIZE, expression, ELEMENTWISE_THREADS, 0, blocks, argument, weight.device)
    return out


def route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, A) -> row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
    if expert_ids.numel() == 0 or num_experts > MAX_EXPERTS:
        return reference.route(expert_ids, num_experts)
    tokens, top_k = expert_ids.shape
    run = prepared.prepare_route((tokens, top_k), num_experts, expert_ids.dtype, expert_ids.device)
    order: Order = launched(run, expert_ids.contiguous())
    return order


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
    spec = RouterSpec(tokens, experts, form, logits.dtype, _dtype(bias), dtype, target(logits.device))
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = launched(
        routers.prepare_router(spec), logits.contiguous(), bias
    )
    return results


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
    spec = RouterSpec(
        *shape, form, logits_dtype, _dtype(bias), dtype, target(hidden.device), hidden.shape[1], hidden.dtype,
        linear_bias is not None,
    )  # fmt: skip
    operands = aligned(hidden), aligned(weight), linear_bias, bias
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = launched(
        routers.prepare_linear_router(spec), *operands
    )
    return results


def row_starts(offsets: Tensor, rows: int) -> Tensor:
    """Offsets (E,) -> int32 (E + 1,): 0 and the offsets, clamped so that they never decrease nor exceed `rows`.

    For torch's grouped GEMM, which trusts its offsets.
    """
    offsets = offsets.contiguous()
    starts = offsets.new_empty(offsets.shape[0] + 1)
    argument = RowStartsArguments(*map(pointer, (offsets, starts)), offsets.shape[0], rows)
    launch(ROUTE, "row_starts", 32, 0, 1, argument, offsets.device)
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
    codes, scales = aligned(weight.qdata), aligned(weight.scale)
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
        launch(_QUANTIZE, kernel, ELEMENTWISE_THREADS, 0, experts * per_expert, argument, device)


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
    offsets = None if offsets is None else offsets.contiguous()  # None: one group of all rows
    activation, slot_scale, bias = aligned(activation.detach()), floats(slot_scale), floats(bias)
    row_slot = None if row_slot is None else row_slot.contiguous()
    weight = weight if weight.layout == TILED else to_linear(weight)
    spec = GemmSpec(
        rows, num_experts, n, k, activation.dtype, weight_spec(weight), target(activation.device),
        None if row_slot is None else rows // activation.shape[0], _dtype(slot_scale), _dtype(bias), form,
    )  # fmt: skip
    plain = row_slot is None and slot_scale is None and bias is None and form is None
    if plain and offsets is not None and config is None and _way(weight, rows) == many_rows.IN_16_BITS:
        return many_rows.multiply(activation, dequantize(weight, activation.dtype), offsets, spec.target)
    slot_scale = None if slot_scale is None else slot_scale.flatten()
    bias = None if bias is None else bias.view(num_experts, n)  # (N,) of one weight alone
    run = prepared.prepare_gemm(spec, config, offsets is not None, 0 if slot_scale is None else slot_scale.numel())
    operands = tensors_of(weight.to_layout(run.layout))
    return run(activation, operands, offsets, row_slot, slot_scale, bias)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _float_dtype(tensor: Tensor | None) -> torch.dtype | None:
    """The dtype of `floats` of a tensor."""
    return None if tensor is None else tensor.dtype if tensor.dtype in DTYPE_CODES else torch.float32


def target(device: torch.device) -> Target:
    """Return the device in the form that specs have."""
    return Target(device, *_device_facts(device))


@functools.cache
def _device_facts(device: torch.device) -> tuple[int, tuple[int, int]]:
    """(multiprocessors, compute capability)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes, as the kernels load; a copy only where it is not already."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

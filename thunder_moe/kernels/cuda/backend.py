"""The CUDA backend: grouped GEMMs of 16-bit rows and packed weights on SM80 and newer, compiled on first use.
Called through kernels/select.py with validated operands, and by integrations.vllm.experts; calls operators.py beside it
for chains of launches, on operands in the form that kernels read, and launch.py for single launches.

Float32 rows run on kernels/reference.py, with a warning. The gradient of 16-bit rows is a grouped GEMM with dequantized
weights (linear.py, or torch's where that is faster). For many rows on SM90, weights in layout "linear" are converted
first (prefill.py). Nothing synchronizes with the host.
Offsets, row_slot and slot_row are not trusted: nothing out of range is read or written (`row_end` of grouped_mm.cuh,
`slot_of_row` of common.cuh), and the results of such rows are undefined.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from thunder_moe import routing
from thunder_moe.activations import SWIGLU, SwiGLUConfig
from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.tiled_64x64 import linear_scale_table, scale_table
from thunder_moe.formats.weight import PackedWeight, WeightOperands
from thunder_moe.kernels import add_norm, reference
from thunder_moe.kernels.arguments import dtype_code, pointer
from thunder_moe.kernels.batch_invariance import is_batch_invariant
from thunder_moe.kernels.cuda import chain, configs, nvrtc, operators, prefill, prepared
from thunder_moe.kernels.cuda import router as routers
from thunder_moe.kernels.cuda.arguments import (
    DequantizeArguments,
    QuantizeArguments,
    RowStartsArguments,
    SwigluArguments,
)
from thunder_moe.kernels.cuda.configs import COMMON, TILED, GemmConfig
from thunder_moe.kernels.cuda.launch import launch
from thunder_moe.kernels.cuda.linear import MAX_EXPERTS
from thunder_moe.kernels.cuda.operands import aligned, aligned_float, operands_of, target, weight_spec
from thunder_moe.kernels.cuda.prepared import DEQUANTIZE, ELEMENTWISE_THREADS, ROUTE, elementwise_blocks
from thunder_moe.kernels.experts import ExpertsCall, unfused
from thunder_moe.kernels.slow_paths import to_linear, warn_once
from thunder_moe.routing import RouterConfig, gather_rows

__all__ = ["FORMATS", "MAX_EXPERTS", "combine", "dequantize", "launch_per_block", "row_starts", "swiglu", "to_layout"]
__all__ += reference.__all__

_QUANTIZE = (COMMON, COMMON.with_name("dequantize.cu"), COMMON.with_name("quantize.cu"))
_QUANTIZE_BLOCKS = 16384  # of a launch, about
_SWIGLU = (COMMON, COMMON.with_name("swiglu.cu"))
FORMATS = configs.FORMATS
WeightT = TypeVar("WeightT", bound=PackedWeight)


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """Return None if the backend can run on a device (by default the current one), else the reason in words."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the device has compute capability {capability}, the kernels need (8, 0)"
    return nvrtc.missing_reason() or chain.missing_reason()


def grouped_mm(
    activation: Tensor, weight: PackedWeight, offsets: Tensor, *, config: GemmConfig | None = None
) -> Tensor:
    """Multiply (M, K) rows sorted by expert, with offsets (E,) of row ends: -> (M, N) in the activation's dtype."""
    if _runs_on_reference(activation, weight):
        return reference.grouped_mm(activation, weight.to_layout(LINEAR), offsets)
    rows = activation.shape[0]
    if rows == 0 or weight.shape[1] == 0:
        return activation.new_empty(rows, weight.shape[1])
    weight, activation, offsets = _for_rows(weight, rows, config), aligned(activation.detach()), offsets.contiguous()
    if config is None and _prefill_strategy(weight, rows) == prefill.DEQUANTIZE_FIRST:
        values = dequantize(weight, activation.dtype)
        return prefill.multiply(activation, values, offsets, target(activation.device))
    return _run("scaled_grouped_mm", weight, config, activation, operands_of(weight), offsets)


def grouped_swiglu(
    activation: Tensor,
    weight: PackedWeight,
    offsets: Tensor,
    row_slot: Tensor | None = None,
    slot_scale: Tensor | None = None,
    bias: Tensor | None = None,
    form: SwiGLUConfig = SWIGLU,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """Return (M, I) of rows (M, K), or of tokens (T, K) with row_slot (M,); weight (E, 2I, K) has gate rows first."""
    if _runs_on_reference(activation, weight):
        return reference.grouped_swiglu(activation, weight.to_layout(LINEAR), offsets, row_slot, slot_scale, bias, form)
    rows, features = (activation if row_slot is None else row_slot).shape[0], weight.shape[1] // 2
    if rows == 0 or features == 0:
        return activation.new_empty(rows, features)
    weight = _for_rows(weight, rows, config)
    split_blocks = weight.layout == TILED and features % 64 != 0  # they have rows of gate and of up
    if split_blocks or (config is None and _prefill_strategy(weight, rows) == prefill.DEQUANTIZE_FIRST):
        gate_up = grouped_mm(gather_rows(activation, row_slot), weight, offsets)
        return swiglu(gate_up, offsets, row_slot, slot_scale, bias, form)
    row_slot = None if row_slot is None else row_slot.contiguous()
    operands = aligned(activation.detach()), operands_of(weight), offsets.contiguous()
    slot_scale, bias = aligned_float(slot_scale), aligned_float(bias)
    return _run("grouped_swiglu", weight, config, *operands, row_slot, slot_scale, bias, form=form)


def grouped_mm_combine(
    activation: Tensor,
    weight: PackedWeight,
    offsets: Tensor,
    slot_row: Tensor,
    slot_weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Multiply (M, K) -> (T, N): each slot's row, plus bias (E, N), times slot_weight (T, A), summed per token."""
    if _runs_on_reference(activation, weight):
        return reference.grouped_mm_combine(activation, weight.to_layout(LINEAR), offsets, slot_row, slot_weight, bias)
    rows, n = activation.shape[0], weight.shape[1]
    if rows == 0 or n == 0 or slot_row.numel() == 0:
        return activation.new_zeros(slot_row.shape[0], n)
    weight, offsets = _for_rows(weight, rows), offsets.contiguous()
    operands, bias = (aligned(activation.detach()), operands_of(weight), offsets), aligned_float(bias)
    if n % 2 == 0 and (bias is not None or _prefill_strategy(weight, rows) != prefill.DEQUANTIZE_FIRST):
        routing = slot_row.contiguous(), aligned_float(slot_weight)
        return _run("grouped_mm_combine", weight, None, *operands, *routing, bias)
    if bias is None:
        product = grouped_mm(activation, weight, offsets)
    else:
        product = _run("scaled_grouped_mm", weight, None, *operands, None, None, bias)
    return combine(product, slot_row, slot_weight)


def moe_experts(
    call: ExpertsCall, *, configs: tuple[GemmConfig | None, GemmConfig | None] = (None, None), out: Tensor | None = None
) -> Tensor:
    """Compute what `unfused` computes by this module, bit for bit, by a chain of kernels if one serves it.

    Args:
        call: the operands.
        configs: the configurations of the two GEMMs; None for the best ones.
        out: contiguous (T, H) that the result is written into.
    """
    if not _runs_on_reference(call.hidden_states, call.gate_up) and call.expert_ids.numel():
        gate_up, down = call.gate_up, call.down
        if configs == (None, None):
            live_rows = -(-call.expert_ids.numel() // call.expert_ranks)
            gate_up, down = _for_rows(gate_up, live_rows), _for_rows(down, live_rows)
        call = call._replace(gate_up=_readable(gate_up), down=_readable(down))
        order = (None, None, None) if call.order is None else tuple(each.contiguous() for each in call.order)
        args = (
            aligned(call.hidden_states.detach()), call.expert_ids.contiguous(), aligned_float(call.expert_weights),
            operands_of(call.gate_up), operands_of(call.down),
            aligned_float(call.gate_up_bias), aligned_float(call.down_bias),
            *order, out,
        )  # fmt: skip
        options = dict(
            weight_on_input=call.weight_on_input, gate_up_layout=call.gate_up.layout, down_layout=call.down.layout,
            expert_ranks=call.expert_ranks, summed=call.summed, configs=configs, **_form_options(call.form),
            **_mode(),
        )  # fmt: skip
        fused: Tensor | None = operators.attempt(_name("moe_experts", call.gate_up), *args, **options)
        if fused is not None:
            return fused
    result = unfused(sys.modules[__name__], call)
    return result if out is None else out.copy_(result)


def grouped_mm_dgrad(grad: Tensor, weight: PackedWeight, offsets: Tensor) -> Tensor:
    """Return the gradient (M, K) of `grouped_mm`'s activation, from the gradient (M, N) of its output."""
    _, n, k = weight.shape
    if grad.dtype == torch.float32:
        _warn_of_reference("gradients of activations in float32", grad, weight, "train in bfloat16 or float16")
    if grad.dtype == torch.float32 or grad.numel() == 0 or k == 0:
        return reference.grouped_mm_dgrad(grad, weight.to_layout(LINEAR), offsets)
    _warn_of_odd_features(n)
    weight = weight if weight.layout == TILED else to_linear(weight, "the kernels of gradients")
    return _run(
        "scaled_grouped_mm_dgrad", weight, None, aligned(grad.detach()), operands_of(weight), offsets.contiguous()
    )


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
    """Multiply (M, K) by a weight (1, N, K), plus bias (N,): -> (M, N) in the activation's dtype, as one group of M."""
    if _runs_on_reference(activation, weight):
        return reference.mm(activation, weight.to_layout(LINEAR), bias)
    rows, n = activation.shape[0], weight.shape[1]
    if rows == 0 or n == 0:
        return activation.new_empty(rows, n)
    weight = _for_rows(weight, rows, config)
    operands = aligned(activation.detach()), _operands_of_one(weight), aligned_float(bias)
    return _run("scaled_mm", weight, config, *operands)


def _operands_of_one(weight: PackedWeight) -> WeightOperands:
    """Return `operands_of` a weight (1, N, K), without the dimension of experts."""
    codes, scale, global_scale, *_ = operands_of(weight)
    return WeightOperands(codes[0], scale[0], None if global_scale is None else global_scale[0], weight.format)


def mm_dgrad(grad: Tensor, weight: PackedWeight) -> Tensor:
    """Return the gradient (M, K) of `mm`'s activation, from the gradient (M, N) of its output."""
    if _runs_on_reference(grad, weight):
        return reference.mm_dgrad(grad, weight.to_layout(LINEAR))
    with torch.autocast("cuda", enabled=False):
        return grad.detach() @ dequantize(weight, grad.dtype)[0]


def combine(rows: Tensor, slot_row: Tensor, slot_weight: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Sum (M, N) -> (T, N), contiguous and in `out` if it is given: each slot's row, times slot_weight (T, A), summed
    per token."""
    if rows.numel() == 0 or slot_row.numel() == 0:
        return rows.new_zeros(slot_row.shape[0], rows.shape[1]) if out is None else out.zero_()
    return operators.run("combine", aligned(rows), slot_row.contiguous(), aligned_float(slot_weight), out)


def swiglu(
    gate_up: Tensor,
    offsets: Tensor,
    row_slot: Tensor | None,
    slot_scale: Tensor | None,
    bias: Tensor | None,
    form: SwiGLUConfig,
) -> Tensor:
    """Activate (M, 2I) of a GEMM -> (M, I): times slot_scale, plus bias (E, 2I), then the activation, in float32."""
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, features)
    if out.numel() == 0:
        return out
    offsets, slot_scale, bias = offsets.contiguous(), aligned_float(slot_scale), aligned_float(bias)
    row_slot = None if row_slot is None else row_slot.contiguous()
    tensors = (gate_up, offsets, row_slot, slot_scale, bias, out)
    argument = SwigluArguments(
        *map(pointer, tensors), rows, offsets.shape[0], features, dtype_code(slot_scale), dtype_code(bias),
        form.alpha, -1.0 if form.limit is None else form.limit, form.up_shift,
    )  # fmt: skip
    blocks = elementwise_blocks(rows * -(-features // 8))
    kernel = nvrtc.instance("swiglu", gate_up.dtype == torch.bfloat16)
    launch(_SWIGLU, kernel, ELEMENTWISE_THREADS, 0, blocks, argument, gate_up.device)
    return out


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the bits of `dequantize` of the weight's format: (E, N, K) of bfloat16 or float16."""
    num_experts, n, k = weight.shape
    weight = weight if weight.layout == TILED else to_linear(weight, "the kernels of gradients")
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    spec, tensors = weight_spec(weight), (aligned(weight.qdata), aligned(weight.scale), weight.global_scale, out)
    rows_per_global = 1 if spec.per_row_scale else n
    argument = DequantizeArguments(*map(pointer, tensors), None, num_experts * n, rows_per_global, k, n)
    expression = prepared.dequantize_kernel(spec.format, spec.layout == TILED, dtype)
    blocks = elementwise_blocks(out.numel() // 16)
    launch(DEQUANTIZE, expression, ELEMENTWISE_THREADS, 0, blocks, argument, weight.device)
    return out


def route(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort slots by expert: (T, A) -> row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
    if expert_ids.numel() == 0 or num_experts > MAX_EXPERTS:
        return reference.route(expert_ids, num_experts)
    return operators.run("moe_route", expert_ids.contiguous(), num_experts)


def router(
    logits: Tensor, bias: Tensor | None, form: RouterConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Route (T, E), (E,) -> scores (T, A) in a dtype, int64 ids (T, A), row_slot, offsets, slot_row (`moe_router`)."""
    reason = routers.unserved_reason(logits.shape[1], form)
    if reason is not None:
        warn_once(("router", reason), f"no CUDA kernel serves a router with {reason}: plain torch, about ten launches")
    if reason is not None or logits.shape[0] == 0:
        return reference.router(logits, bias, form, dtype)
    options = _router_options(form, logits.dtype, scores_dtype=dtype)
    return operators.run("moe_router", aligned(logits), aligned_float(bias), **options)


def linear_router(
    hidden: Tensor, weight: Tensor, linear_bias: Tensor | None, bias: Tensor | None, form: RouterConfig,
    logits_dtype: torch.dtype, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Route (T, H), (E, H) -> the results of `router`, and the logits (T, E), like `moe_linear_router`."""
    served = routers.serves_linear((hidden.shape[0], weight.shape[0]), hidden.shape[1], form, hidden.dtype)
    if not served or is_batch_invariant():
        given = hidden, weight, linear_bias, bias, form, logits_dtype, dtype
        return routing.linear_router(*given, choose=router, logits_of=_router_logits)
    options = _router_options(form, hidden.dtype, logits_dtype=logits_dtype, scores_dtype=dtype)
    operands = aligned(hidden), aligned(weight), aligned_float(linear_bias), aligned_float(bias)
    return operators.run("moe_linear_router", *operands, **options)


def _router_options(form: RouterConfig, default: torch.dtype, **dtypes: torch.dtype) -> dict[str, Any]:
    """Return the options of a router's operator; a dtype that it has by default is None."""
    return {name: None if dtype == default else dtype for name, dtype in dtypes.items()} | vars(form)


def _router_logits(hidden: Tensor, weight: Tensor, linear_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `routing.router_logits`, in the batch-invariant mode by the kernels of 16-bit and float32 weights.

    These sum in the order of k for any number of rows (`training.grouped_mm`). A bias of 16 bits is then added to
    rounded logits. Float32 logits of 16-bit rows take float32 products, without tensor cores.
    """
    if not is_batch_invariant() or hidden.shape[0] == 0:
        return routing.router_logits(hidden, weight, linear_bias, dtype)
    rows, experts = aligned(hidden.detach().to(dtype)), aligned(weight.detach().to(dtype))
    ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)
    logits = prefill.multiply(rows, experts[None], ends, target(rows.device))
    return logits if linear_bias is None else logits + linear_bias


def decode_attention(*operands: Any) -> Tensor:
    """Attend with one new token per text (B, Hq, D) and write to the cache, like the operator `decode_attention`."""
    tensors, options = operands[:11], dict(zip(("epsilon", "scale"), operands[11:], strict=True)) | _mode()
    chain = operators.prepare("decode_attention", tensors, options)
    result: Tensor | None = None if chain is None else chain(*tensors, **options)
    if result is None:
        _, reason = operators.describe("decode_attention", tensors, options)
        reason = reason or "an operand is not aligned to 16 bytes"
        warn_once(("decode_attention", reason), f"decode_attention runs in plain torch, about 20 launches: {reason}")
        return reference.decode_attention(*operands)
    return result


def add_norm_mm(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: PackedWeight, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add, normalize and multiply rows (M, K), like the operator `f16a_nvfp4weight_add_norm_scaled_mm`."""
    if is_batch_invariant():  # the kernel of both splits K
        return add_norm.add_norm_mm(x, residual, norm_weight, weight, bias, epsilon, mm=mm)
    operands = *map(aligned, (x, residual, norm_weight)), _operands_of_one(weight), aligned_float(bias)
    name, options = _name("add_norm_scaled_mm", weight), dict(layout=weight.layout, epsilon=epsilon)
    results: tuple[Tensor, Tensor] | None = operators.attempt(name, *operands, **options)
    if results is not None:
        return results
    _warn_of_parts(name, operands, options)
    return add_norm.add_norm_mm(x, residual, norm_weight, weight, bias, epsilon, mm=mm)


def add_norm_linear_router(
    x: Tensor, residual: Tensor, norm_weight: Tensor, norm_epsilon: float, weight: Tensor, linear_bias: Tensor | None,
    bias: Tensor | None, form: RouterConfig, logits_dtype: torch.dtype, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Add, normalize and route (T, H), (E, H), like the operator `add_norm_linear_router`."""
    parts = x, residual, norm_weight, norm_epsilon, weight, linear_bias, bias, form, logits_dtype, dtype
    if is_batch_invariant():  # the kernel of both serves few rows
        return add_norm.add_norm_linear_router(*parts, linear_router=linear_router)
    options = _router_options(form, x.dtype, logits_dtype=logits_dtype, scores_dtype=dtype)
    options["norm_epsilon"] = norm_epsilon
    operands = *map(aligned, (x, residual, norm_weight, weight)), aligned_float(linear_bias), aligned_float(bias)
    results: tuple[Tensor, ...] | None = operators.attempt("add_norm_linear_router", *operands, **options)
    if results is not None:
        return results
    _warn_of_parts("add_norm_linear_router", operands, options)
    return add_norm.add_norm_linear_router(*parts, linear_router=linear_router)


def _warn_of_parts(name: str, operands: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Warn that an operator runs as several kernels."""
    _, reason = operators.describe(name, operands, options)
    warn_once((name, reason), f"{name} adds and normalizes in plain torch, about 8 launches: {reason}")


def row_starts(offsets: Tensor, rows: int) -> Tensor:
    """Return int32 (E + 1,): 0 and the offsets (E,), clamped so that they never decrease nor exceed `rows`.

    torch's grouped GEMM needs them, because it trusts its offsets.
    """
    offsets = offsets.contiguous()
    starts = offsets.new_empty(offsets.shape[0] + 1)
    argument = RowStartsArguments(*map(pointer, (offsets, starts)), offsets.shape[0], rows)
    launch(ROUTE, "row_starts", 32, 0, 1, argument, offsets.device)
    return starts


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


def to_layout(weight: WeightT, layout: str) -> WeightT:
    """Return a weight in the other one of the layouts "linear" and "tiled_64x64", as `PackedWeight.to_layout` gives it.

    The callers have checked that the layout fits.
    """
    codes, scales = aligned(weight.qdata), aligned(weight.scale)
    qdata, scale = torch.empty_like(codes), torch.empty_like(scales)
    table, name = None, "convert_layout_mxfp8"
    if weight.format is NVFP4:
        table, name = (scale_table if layout == TILED else linear_scale_table)(weight.device), "convert_layout"
    tensors = (None, codes, scales, table, None, qdata, scale, None, None)
    launch_per_block((nvrtc.instance(name, layout == TILED),), tensors, weight.shape, weight.format.block_size)
    converted: Any = weight
    return replace(converted, qdata=qdata, scale=scale, layout=layout)


def launch_per_block(
    kernels: tuple[str, ...], tensors: tuple[Tensor | None, ...], shape: tuple[int, ...], block_size: int
) -> None:
    """Launch kernels of src/quantize.cu in turn on the tensors of a weight (E, N, K), one thread per block."""
    experts, n, k = shape
    (device,) = {tensor.device for tensor in tensors if tensor is not None}
    threads = n * (k // block_size)  # of an expert
    per_expert = max(1, min(-(-threads // ELEMENTWISE_THREADS), _QUANTIZE_BLOCKS // experts))
    argument = QuantizeArguments(*map(pointer, tensors), n, k, per_expert)
    for kernel in kernels:
        launch(_QUANTIZE, kernel, ELEMENTWISE_THREADS, 0, experts * per_expert, argument, device)


def _prefill_strategy(weight: PackedWeight, rows: int) -> str | None:
    """Return the conversion of a weight that so many rows are multiplied by, as `prefill.strategy`, or None."""
    capability = target(weight.device).capability
    shape, format = weight.shape, weight.format.name
    return prefill.strategy(weight.layout, shape, format, rows, capability, is_batch_invariant())


def _for_rows(weight: WeightT, rows: int, config: GemmConfig | None = None) -> WeightT:
    """Return the weight in the layout of a given configuration, or else in the layout for so many rows."""
    if config is not None:
        return weight.to_layout(config.layout)
    return to_layout(weight, TILED) if _prefill_strategy(weight, rows) == prefill.RETILE_FIRST else _readable(weight)


def _readable(weight: WeightT) -> WeightT:
    """Return the weight in a layout that kernels read."""
    return weight if weight.layout == TILED else to_linear(weight)


def _run(
    name: str, weight: PackedWeight, config: GemmConfig | None, *args: Any, form: SwiGLUConfig | None = None
) -> Tensor:
    """Return the result of an operator of packed weights."""
    options: dict[str, Any] = dict(layout=weight.layout, **({} if form is None else _form_options(form)))
    if not name.endswith("dgrad"):
        options |= _mode()
    if config is not None:
        options["config"] = config
    return operators.run(_name(name, weight), *args, **options)


def _mode() -> dict[str, bool]:
    """Return the option of chains that are batch-invariant, in that mode."""
    return dict(batch_invariant=True) if is_batch_invariant() else {}


def _form_options(form: SwiGLUConfig) -> dict[str, float | None]:
    """Return the options of an activation for operators, as floats: a limit of 7, from a config, becomes 7.0."""
    return {name: None if value is None else float(value) for name, value in vars(form).items()}


def _name(name: str, weight: PackedWeight) -> str:
    """Return the whole name of an operator, for the format of a weight."""
    return f"f16a_{weight.format.name}weight_{name}"

"""Chains of operators: for arguments of one kind, the launches that an operator's kernel makes, checks included.
Called by ops/operator.py and by modules in eager inference, through kernels/select.py; calls prepared.py and router.py.

A chain reads an operator's arguments without a copy. Where some have to be converted first, or no CUDA kernel serves
them, the operator runs the functions of backend.py instead. Legend: as in prepared.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_moe.activations import GLU
from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda import backend, many_rows, prepared, router
from thunder_moe.kernels.cuda.chain import Address, ChainBuilder
from thunder_moe.kernels.cuda.configs import TILED
from thunder_moe.kernels.cuda.plan import plan_gemm
from thunder_moe.kernels.cuda.prepared import ExpertsOperands, Order, Weight
from thunder_moe.kernels.specs import DgradSpec, ExpertsSpec, GemmSpec, RouterSpec, WeightSpec
from thunder_moe.routing import RouterForm

__all__ = ["explain", "prepare", "unserved_reason"]

_INTEGERS = (torch.int32, torch.int64)


class _UnservedError(Exception):
    """There is no chain; the message says why."""


class _Call(NamedTuple):
    """An operator's arguments, in the order of its NVFP4 description.

    Attributes:
        chain: that takes them.
        samples: the arguments; None for those that the operator of another format does not have.
        places: the addresses of those that are tensors.
        format: of the weights.
    """

    chain: ChainBuilder
    samples: Sequence[Any]
    places: Sequence[Any]
    format: BlockFormat


def prepare(name: str, args: Sequence[Any], options: dict[str, Any]) -> tuple[Callable[..., Any] | None, str]:
    """The chain of an operator for all arguments of the kind of these.

    Args:
        name: of the operator.
        args: its positional arguments, which have passed its checks; weights as `WeightOperands`.
        options: its keyword arguments.

    Returns:
        The chain and "", or None and why there is none. The chain takes the same arguments, and gives what the operator
        gives, or None for arguments of another kind.
    """
    of_mxfp8 = name.replace(MXFP8.name, NVFP4.name)
    describe = _OPERATORS.get(of_mxfp8)
    if describe is None:
        return None, "the operator has no chain"
    chain = ChainBuilder(args[0].device)
    samples: list[Any] = []
    places: list[Any] = []
    for argument in args:
        weight = isinstance(argument, WeightOperands)
        given = argument[:3] if weight else (argument,)
        samples += given
        places += [None if weight and each is None else chain.like(each, align=_alignment(each)) for each in given]
    chain.options(options)
    call = _Call(chain, samples, places, NVFP4 if of_mxfp8 == name else MXFP8)
    try:
        finish = describe(call, **options)
    except _UnservedError as reason:
        return None, str(reason)
    return prepared.finished(chain.build(), finish), ""


def _alignment(argument: Any) -> int:
    """Kernels load 16 bytes at a time of everything but indices, which may be part of a larger tensor."""
    return 1 if isinstance(argument, Tensor) and argument.dtype in _INTEGERS else 16


def unserved_reason(spec: GemmSpec) -> str | None:
    """Return why no chain serves a GEMM, or None where one does.

    It lists every condition: dtype, number of experts, no rows, layout, blocks of tiles that a fused activation would
    split, and many rows, whose weights are converted first.
    """
    if spec.dtype == torch.float32:
        return "no CUDA kernel serves activations in float32"
    if spec.num_experts > backend.MAX_EXPERTS:
        return f"no CUDA kernel serves more than {backend.MAX_EXPERTS} experts"
    if spec.rows == 0 or spec.features == 0:
        return "there is nothing to compute"
    if spec.weight.layout not in (LINEAR, TILED):
        return f"layout {spec.weight.layout!r} is converted to {LINEAR!r} first"
    if spec.weight.layout == TILED and spec.activation is not None and spec.features % 64 != 0:
        return f"blocks of layout {TILED!r} have rows of gate and of up: the activation is a kernel of its own"
    way = many_rows.way(
        spec.weight.layout, (spec.num_experts, spec.n, spec.k), spec.weight.format, spec.rows, spec.target.capability
    )
    return None if way is None else f"so many rows are multiplied by weights that are converted first, to {way}"


def explain(spec: GemmSpec) -> str:
    """Return, in words, what runs a GEMM: the kernel, its tiles and its memory, or why no chain serves it.

    It needs no GPU. Every choice follows from the spec.

    Raises:
        ValueError: as `plan_gemm`.
    """
    reason = unserved_reason(spec)
    if reason is not None:
        return f"no chain: {reason}"
    plan = plan_gemm(spec)
    config, converted = plan.config, ""
    if config.layout != spec.weight.layout:
        converted = f", after the weight has been converted to layout {config.layout!r} at every call"
    lines = [
        f"{plan.expression}{converted}",
        f"tiles of {8 * config.token_blocks} rows x {config.tile_features(spec.activation is not None)} features,"
        f" {plan.blocks} blocks of {plan.threads} threads, {plan.shared_bytes} bytes of shared memory",
        f"{4 * plan.workspace} bytes of semaphores, {4 * plan.partial_sums} bytes of partial sums",
    ]
    if plan.gather is not None:
        lines.insert(0, f"{plan.gather[0]} writes the rows beforehand, {plan.gather[1][0]} x {plan.gather[1][1]}")
    return "\n".join(lines)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _UnservedError(reason)


def _require_served(spec: GemmSpec) -> None:
    reason = unserved_reason(spec)
    _require(reason is None, reason or "")


def _require_contiguous(*tensors: Tensor | None) -> None:
    _require(all(t is None or t.is_contiguous() for t in tensors), "an operand is not contiguous")


def _require_floats(*tensors: Tensor | None) -> None:
    _require_contiguous(*tensors)
    _require(all(t is None or t.dtype in DTYPE_CODES for t in tensors), "an operand is converted to float32 first")


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _weight(call: _Call, first: int, layout: str) -> tuple[Weight, WeightSpec, tuple[int, int, int]]:
    """The weight whose transposed codes (E, K, N), scales and global scales are three arguments, and (E, N, K)."""
    codes, scale, global_scale = call.samples[first : first + 3]
    _require_contiguous(codes.mT, scale, global_scale)
    spec = WeightSpec(layout, call.format.name, global_scale is not None and global_scale.ndim == 2)
    experts, width, n = codes.shape
    return Weight(*call.places[first : first + 3]), spec, (experts, n, call.format.codes_per_byte * width)


def _gemm(
    call: _Call, layout: str, *, row_slot: int | None = None, slot_scale: int | None = None, bias: int | None = None,
    form: GLU | None = None,
) -> tuple[GemmSpec, Callable[..., Address]]:  # fmt: skip
    """The GEMM of (activation, codes, scale, global_scale, offsets, ...), and what appends it to the call's chain.

    row_slot, slot_scale, bias: the positions of these arguments.
    """
    activation, offsets = call.samples[0], call.samples[4]
    slots, scales, biases = (None if place is None else call.samples[place] for place in (row_slot, slot_scale, bias))
    _require_contiguous(activation, offsets, slots)
    _require_floats(scales, biases)
    weight, weight_spec, (experts, n, k) = _weight(call, 1, layout)
    rows = (activation if slots is None else slots).shape[0]
    top_k = None if slots is None or rows == 0 else rows // activation.shape[0]
    spec = GemmSpec(
        rows, experts, n, k, activation.dtype, weight_spec, backend.target(activation.device), top_k, _dtype(scales),
        _dtype(biases), form,
    )  # fmt: skip
    _require_served(spec)
    plan = plan_gemm(spec)
    _require(plan.config.layout == layout, f"the weight is converted to {plan.config.layout!r} first")
    more = [None if place is None else call.places[place] for place in (row_slot, slot_scale, bias)]

    def append(out: Address | None = None) -> Address:
        return prepared.append_gemm(call.chain, spec, plan, call.places[0], weight, call.places[4], *more, out=out)

    return spec, append


def _result(call: _Call, spec: GemmSpec) -> Address:
    _require(spec.features % 2 == 0, "the kernels store pairs: a column is cut off afterwards")
    return call.chain.result((spec.rows, spec.features), spec.dtype)


def _scaled_grouped_mm(call: _Call, *, layout: str = LINEAR) -> None:
    spec, append = _gemm(call, layout)
    append(_result(call, spec))


def _grouped_swiglu(call: _Call, *, layout: str = LINEAR, **form: Any) -> None:
    places = [place if len(call.samples) > place else None for place in (5, 6, 7)]
    row_slot, slot_scale, bias = (
        place if place is not None and call.samples[place] is not None else None for place in places
    )
    spec, append = _gemm(call, layout, row_slot=row_slot, slot_scale=slot_scale, bias=bias, form=GLU(**form))
    append(_result(call, spec))


def _grouped_mm_combine(call: _Call, *, layout: str = LINEAR) -> None:
    slot_row, weight = call.samples[5], _at(call.samples, 6)
    bias = 7 if _at(call.samples, 7) is not None else None
    spec, append = _gemm(call, layout, bias=bias)
    shape, n = tuple(slot_row.shape), spec.n
    _require(shape[0] > 0, "there is nothing to compute")
    _require(n % 2 == 0, "the kernels store pairs: a column is cut off in between")
    _require_contiguous(slot_row)
    _require_floats(weight)
    out = call.chain.result((shape[0], n), spec.dtype)
    prepared.append_combine(
        call.chain, spec.rows, shape, n, spec.dtype, append(), call.places[5], _at(call.places, 6), _dtype(weight), out,
        late_rows=True,
    )  # fmt: skip


def _at(items: Sequence[Any], place: int) -> Any:
    """An argument that may have been left out."""
    return items[place] if len(items) > place else None


def _scaled_mm(call: _Call, *, layout: str = LINEAR) -> None:
    activation, bias = call.samples[0], _at(call.samples, 4)
    _require_contiguous(activation)
    _require_floats(bias)
    codes, scale, global_scale = call.samples[1:4]
    _require_contiguous(codes.mT, scale, global_scale)
    (width, n), rows = codes.shape, activation[..., 0].numel() if activation.ndim else 0
    weight_spec = WeightSpec(layout, call.format.name, global_scale is not None and global_scale.ndim == 1)
    spec = GemmSpec(
        rows, 1, n, call.format.codes_per_byte * width, activation.dtype, weight_spec,
        backend.target(activation.device), bias=_dtype(bias),
    )  # fmt: skip
    _require_served(spec)
    _require(n % 2 == 0, "the kernels store pairs: a column is cut off afterwards")
    plan = plan_gemm(spec)
    _require(plan.config.layout == layout, f"the weight is converted to {plan.config.layout!r} first")
    out = call.chain.result((*activation.shape[:-1], n), spec.dtype)
    weight = Weight(*call.places[1:4])
    prepared.append_gemm(call.chain, spec, plan, call.places[0], weight, None, bias=_at(call.places, 4), out=out)


def _moe_experts(
    call: _Call, *, weight_on_input: bool = False, gate_up_layout: str = LINEAR, down_layout: str = LINEAR,
    expert_ranks: int = 1, **form: Any,
) -> None:  # fmt: skip
    x, ids, scores = call.samples[:3]
    samples, places = ([_at(each, place) for place in range(9, 14)] for each in (call.samples, call.places))
    biases, order = samples[:2], samples[2:]
    _require_contiguous(x, ids, *order)
    _require_floats(scores, *biases)
    gate_up, gate_up_spec, (experts, _, hidden_size) = _weight(call, 3, gate_up_layout)
    down, down_spec, (_, _, features) = _weight(call, 6, down_layout)
    tokens, top_k = ids.shape
    spec = ExpertsSpec(
        tokens, top_k, experts, hidden_size, features, x.dtype, ids.dtype, scores.dtype, gate_up_spec, down_spec,
        GLU(**form), backend.target(x.device), _dtype(biases[0]), _dtype(biases[1]), order[0] is not None,
        weight_on_input,
    )  # fmt: skip
    for gemm in (spec.gate_up_gemm, spec.down_gemm):
        _require_served(gemm)
    configs: tuple[Any, Any] = (None, None)
    if expert_ranks > 1:
        configs = backend.experts_configs(spec, -(-spec.rows // expert_ranks))
    plans = plan_gemm(spec.gate_up_gemm, configs[0]), plan_gemm(spec.down_gemm, configs[1])
    layouts = tuple(plan.config.layout for plan in plans)
    _require(layouts == (gate_up_layout, down_layout), "a weight is converted to another layout first")
    operands = ExpertsOperands(
        call.places[0],
        call.places[1],
        call.places[2],
        gate_up,
        down,
        places[0],
        places[1],
        Order(*places[2:]) if spec.sorted else None,
    )
    out = call.chain.result((spec.tokens, hidden_size), spec.dtype)
    prepared.append_experts(call.chain, spec, plans, operands, out)


def _scaled_grouped_mm_dgrad(call: _Call, *, layout: str = LINEAR) -> Any:
    grad, offsets = call.samples[0], call.samples[4]
    _require_contiguous(grad, offsets)
    weight, weight_spec, (experts, n, k) = _weight(call, 1, layout)
    _require(grad.dtype != torch.float32, "no CUDA kernel serves gradients in float32")
    _require(grad.numel() > 0 and k > 0, "there is nothing to compute")
    _require(layout in (LINEAR, TILED), f"layout {layout!r} is converted to {LINEAR!r} first")
    _require(n % 8 == 0, "out_features that are no multiple of 8 are warned of")
    spec = DgradSpec(grad.shape[0], experts, n, k, grad.dtype, weight_spec, backend.target(grad.device))
    return prepared.append_dgrad(call.chain, spec, call.places[0], weight, call.places[4])


def _moe_route(call: _Call) -> None:
    ids, num_experts = call.samples
    _require_contiguous(ids)
    _require(ids.numel() > 0, "there is nothing to compute")
    _require(num_experts <= backend.MAX_EXPERTS, f"no CUDA kernel serves more than {backend.MAX_EXPERTS} experts")
    shape = tuple(ids.shape)
    order = prepared.order_results(call.chain, shape, num_experts)
    prepared.append_route(call.chain, shape, num_experts, call.places[0], ids.dtype == torch.int64, order)


def _moe_router(call: _Call, *, top_k: int, scores_dtype: torch.dtype | None = None, **options: Any) -> None:
    logits, bias = call.samples[0], _at(call.samples, 1)
    _require_floats(logits, bias)
    tokens, experts = logits.shape
    spec = RouterSpec(
        tokens, experts, RouterForm(top_k, **options), logits.dtype, _dtype(bias), scores_dtype or logits.dtype,
        backend.target(logits.device),
    )  # fmt: skip
    reason = router.unserved_reason(spec.num_experts, spec.form)
    _require(reason is None, f"no CUDA kernel serves a router with {reason}")
    _require(spec.tokens > 0, "there is nothing to compute")
    router.append_router(call.chain, spec, call.places[0], _at(call.places, 1))


def _moe_linear_router(
    call: _Call, *, top_k: int, logits_dtype: torch.dtype | None = None, scores_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:  # fmt: skip
    hidden, weight = call.samples[:2]
    linear_bias, bias = _at(call.samples, 2), _at(call.samples, 3)
    _require_contiguous(hidden, weight, linear_bias)
    _require_floats(bias)
    form, shape = RouterForm(top_k, **options), (hidden.shape[0], weight.shape[0])
    served = router.serves_linear(shape, hidden.shape[1], form, hidden.dtype)
    _require(served, "the linear layer is torch's, the router a kernel behind it")
    spec = RouterSpec(
        *shape, form, logits_dtype or hidden.dtype, _dtype(bias), scores_dtype or hidden.dtype,
        backend.target(hidden.device), hidden.shape[1], hidden.dtype, linear_bias is not None,
    )  # fmt: skip
    places = [_at(call.places, place) for place in range(4)]
    router.append_linear_router(call.chain, spec, *places)


# By the operator's name in NVFP4: what describes its chain.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "f16a_nvfp4weight_scaled_grouped_mm": _scaled_grouped_mm,
    "f16a_nvfp4weight_grouped_swiglu": _grouped_swiglu,
    "f16a_nvfp4weight_grouped_mm_combine": _grouped_mm_combine,
    "f16a_nvfp4weight_moe_experts": _moe_experts,
    "f16a_nvfp4weight_scaled_grouped_mm_dgrad": _scaled_grouped_mm_dgrad,
    "f16a_nvfp4weight_scaled_mm": _scaled_mm,
    "moe_linear_router": _moe_linear_router,
    "moe_route": _moe_route,
    "moe_router": _moe_router,
}

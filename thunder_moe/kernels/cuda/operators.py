"""Builds the chain of kernels that computes an operator's result, for arguments of one kind.
Called by backend.py and ops/operator.py (through kernels/select.py); calls plan.py, and prepared.py,
direct.py, router.py and decode_attention.py, which append the launches.

Every condition of a chain is here: `describe` gives the reason if no chain serves the arguments. A chain reads the
arguments without a copy; backend.py converts operands that no chain can read. Legend: as in prepared.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels import chains
from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda import decode_attention, direct, prefill, prepared, router
from thunder_moe.kernels.cuda.chain import Address, ChainBuilder, launched
from thunder_moe.kernels.cuda.configs import TILED, GemmConfig, choose_config
from thunder_moe.kernels.cuda.linear import MAX_EXPERTS
from thunder_moe.kernels.cuda.operands import target
from thunder_moe.kernels.cuda.plan import plan_gemm
from thunder_moe.kernels.cuda.prepared import Adapter, ExpertsOperands, Order, Weight
from thunder_moe.kernels.specs import CombineSpec, DgradSpec, ExpertsSpec, GemmSpec, RouterSpec, WeightSpec
from thunder_moe.routing import RouterConfig

_ANYWHERE = (torch.int32, torch.int64, torch.bool)  # dtypes of indices and masks
Finish = Callable[[Tensor, Any], Tensor]  # (the first operand, a chain's results) -> the result


class _UnservedError(Exception):
    """Raised if no chain serves a call; the message says why."""


class _Call(NamedTuple):
    """An operator's arguments, in the order of its NVFP4 description.

    Attributes:
        chain: the chain under construction that takes them.
        samples: the arguments; None for an argument that the operator of another format lacks.
        places: the addresses of the tensors among them.
        format: the number format of the weights.
    """

    chain: ChainBuilder
    samples: Sequence[Any]
    places: Any
    format: BlockFormat

    def sample(self, place: int) -> Any:
        """Return an argument; None if it has been left out."""
        return self.samples[place] if len(self.samples) > place else None

    def address(self, place: int) -> Any:
        """Return the address of an argument; None if it is not given."""
        return self.places[place] if len(self.places) > place else None


def describe(name: str, args: Sequence[Any], options: dict[str, Any]) -> tuple[Callable[..., Any] | None, str]:
    """Return the chain of an operator for all arguments of the kind of these.

    Args:
        name: the name of the operator, or of a step that no operator has (`combine`,
            `f16a_nvfp4weight_grouped_mm_low_rank`).
        args: its positional arguments, which have passed its checks; weights as `WeightOperands`.
        options: its keyword arguments, and further ones of `_OPERATORS` that the operator itself does not have.

    Returns:
        The chain and "", or None and the reason. The chain takes the same arguments, and returns the operator's result,
        or None for arguments of another kind.
    """
    of_mxfp8 = name.replace(MXFP8.name, NVFP4.name)
    if of_mxfp8 not in _OPERATORS:
        return None, "the operator has no chain"
    chain, defaults = ChainBuilder(args[0].device), _defaults(name)
    samples: list[Any] = []
    places: list[Any] = []
    for argument in args:
        weight = isinstance(argument, WeightOperands)
        given = argument[:3] if weight else (argument,)
        samples += given
        places += [None if weight and each is None else chain.like(each, align=_alignment(each)) for each in given]
    chain.options({**defaults, **options}, defaults)
    call = _Call(chain, samples, places, NVFP4 if of_mxfp8 == name else MXFP8)
    try:
        finish = _OPERATORS[of_mxfp8](call, **options)
    except _UnservedError as reason:
        return None, str(reason)
    return prepared.finished(chain.build(), finish), ""


def prepare(
    name: str, args: Sequence[Any], options: dict[str, Any], kind: Hashable = None
) -> Callable[..., Any] | None:
    """Return the chain of `describe`, made once for a kind of arguments; None if no chain serves them. `kind` is their
    `chains.kind_of`, if it is known."""
    kind = chains.kind_of(name, _flat(args), options, _defaults(name)) if kind is None else kind
    chain = chains.find(kind)
    if chain is chains.UNKNOWN:
        last = max((place + 1 for place, argument in enumerate(args) if argument is not None), default=0)
        chain, _ = describe(name, args[:last], options)
        chains.remember(kind, chain)
    return chain


def attempt(name: str, *args: Any, **options: Any) -> Any:
    """Return the result of an operator, by the chain for its arguments; None if no chain serves them."""
    chain = prepare(name, args, options)
    return None if chain is None else launched(chain, *_flat(args), **options)


def run(name: str, *args: Any, **options: Any) -> Any:
    """Return the result of an operator, by the chain for its arguments.

    Raises:
        ValueError: no chain serves them.
    """
    result = attempt(name, *args, **options)
    if result is None:
        raise ValueError(f"{name}: {describe(name, args, options)[1]}")
    return result


def _flat(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with the tensors of each weight in its place."""
    flat: list[Any] = []
    for argument in args:
        flat += argument.tensors if isinstance(argument, WeightOperands) else (argument,)
    return flat


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    """Return the defaults of an operator's keyword arguments, including the fields of a form that it takes."""
    function = _OPERATORS[name.replace(MXFP8.name, NVFP4.name)]
    parameters = inspect.signature(function).parameters.values()
    found = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    for each in parameters:
        if each.kind is each.VAR_KEYWORD:
            found |= {field.name: field.default for field in fields(_FORMS[each.name])}
    return {key: value for key, value in found.items() if value not in (inspect.Parameter.empty, MISSING)}


_FORMS = {"activation_form": SwiGLUConfig, "router_form": RouterConfig}  # what an operator's `**options` make


def _alignment(argument: Any) -> int:
    """Return the alignment in bytes that kernels need: 16, but 1 for indices and masks, parts of larger ones."""
    return 1 if isinstance(argument, Tensor) and argument.dtype in _ANYWHERE else 16


def unserved_reason(spec: GemmSpec, rows: int | None = None) -> str | None:
    """Return why no chain serves a GEMM, or None if one does.

    It lists every condition: dtype, number of experts, no rows, layout, blocks of tiles that a fused activation would
    split, and many rows, whose weights are converted first.

    Args:
        spec: the spec of the GEMM.
        rows: the expected number of rows that belong to its experts.
    """
    if spec.dtype == torch.float32:
        return "no CUDA kernel serves activations in float32"
    if spec.num_experts > MAX_EXPERTS:
        return f"no CUDA kernel serves more than {MAX_EXPERTS} experts"
    if spec.rows == 0 or spec.features == 0:
        return "there is nothing to compute"
    if spec.weight.layout not in (LINEAR, TILED):
        return f"layout {spec.weight.layout!r} is converted to {LINEAR!r} first"
    if spec.weight.layout == TILED and spec.activation is not None and spec.features % 64 != 0:
        return f"blocks of layout {TILED!r} have rows of gate and of up: the activation is a kernel of its own"
    strategy = prefill.strategy(
        spec.weight.layout, (spec.num_experts, spec.n, spec.k), spec.weight.format, spec.rows if rows is None else rows,
        spec.target.capability, spec.batch_invariant,
    )  # fmt: skip
    if strategy == prefill.DEQUANTIZE_FIRST and spec.bias is not None and spec.activation is None:
        return None  # the kernels of 16-bit weights add no bias
    if strategy is None:
        return None
    return f"so many rows are multiplied by weights that are converted first, to {strategy}"


def explain(spec: GemmSpec) -> str:
    """Return, in words, what runs a GEMM: the kernel, its tiles and its memory, or why no chain serves it.

    It needs no GPU. Every choice follows from the spec. One expert is a dense layer.

    Raises:
        ValueError: as `plan_gemm`.
    """
    reason = unserved_reason(spec)
    if reason is not None:
        return f"no chain: {reason}"
    if direct.serves_mm(spec):
        return direct.explain_mm(spec)
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


def _require_served(spec: GemmSpec, rows: int | None = None) -> None:
    reason = unserved_reason(spec, rows)
    _require(reason is None, reason or "")


def _require_contiguous(*tensors: Tensor | None) -> None:
    _require(all(t is None or t.is_contiguous() for t in tensors), "an operand is not contiguous")


def _require_floats(*tensors: Tensor | None) -> None:
    _require_contiguous(*tensors)
    _require(all(t is None or t.dtype in DTYPE_CODES for t in tensors), "an operand is converted to float32 first")


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _weight(call: _Call, first: int, layout: str) -> tuple[Weight, WeightSpec, tuple[int, int, int]]:
    """Return the weight whose transposed codes (E, K, N), scales and global scales are arguments, and (E, N, K)."""
    codes, scale, global_scale = call.samples[first : first + 3]
    _require_contiguous(codes.mT, scale, global_scale)
    (*experts, width, n), count = codes.shape, codes.ndim - 2  # one weight alone has no dimension of experts
    spec = WeightSpec(layout, call.format.name, global_scale is not None and global_scale.ndim == 1 + count)
    shape = experts[0] if experts else 1, n, call.format.codes_per_byte * width
    return Weight(*call.places[first : first + 3]), spec, shape


def _gemm(
    call: _Call, layout: str, config: GemmConfig | None, *, offsets: int | None = 4, row_slot: int | None = None,
    slot_scale: int | None = None, bias: int | None = None, form: SwiGLUConfig | None = None, transposed: bool = False,
    prefetch: bool = False, batch_invariant: bool = False,
) -> tuple[GemmSpec, Callable[..., Address]]:  # fmt: skip
    """Return the GEMM of (activation, codes, scale, global_scale, ...), and a function that appends it to the chain.

    Args:
        config: a configuration instead of the best one.
        offsets, row_slot, slot_scale, bias: the positions of these arguments; None for no such argument.
        transposed: the weight is (E, K, N).
        prefetch: the kernel in front of this one does not write the weight.
    """
    positions = (offsets, row_slot, slot_scale, bias)
    ends, slots, scales, biases = (None if place is None else call.sample(place) for place in positions)
    activation = call.samples[0]
    _require_contiguous(activation, ends, slots)
    _require_floats(scales, biases)
    weight, weight_spec, (experts, n, k) = _weight(call, 1, layout)
    n, k = (k, n) if transposed else (n, k)
    rows = activation[..., 0].numel() if slots is None else slots.shape[0]
    top_k = None if slots is None or rows == 0 else rows // activation.shape[0]
    spec = GemmSpec(
        rows, experts, n, k, activation.dtype, weight_spec, target(activation.device), top_k, _dtype(scales),
        _dtype(biases), form, batch_invariant,
    )  # fmt: skip
    _require_served(spec, 0 if config else None)
    plan = plan_gemm(spec, config)
    _require(plan.config.layout == layout, f"the weight is converted to {plan.config.layout!r} first")
    addresses = [None if place is None else call.address(place) for place in positions]

    def append(out: Address | None = None, adapter: Adapter | None = None) -> Address:
        if config is None and offsets is None and out is not None and direct.serves_mm(spec):
            direct.append_mm(call.chain, spec, call.places[0], weight, addresses[3], out, prefetch=prefetch)
            return out
        return prepared.append_gemm(
            call.chain, spec, plan, call.places[0], weight, *addresses, out=out, adapter=adapter, prefetch=prefetch
        )  # fmt: skip

    return spec, append


def _finished_gemm(
    call: _Call, gemm: tuple[GemmSpec, Callable[..., Address]], adapter: Adapter | None = None
) -> Finish | None:
    """Append a GEMM whose result is the call's; a column that its kernel adds is cut off."""
    spec, append = gemm
    shape = *call.samples[0].shape[:-1], prepared.columns_of(spec)
    if spec.top_k is not None:
        shape = spec.rows, shape[-1]
    append(call.chain.result(shape, spec.dtype), adapter)
    if shape[-1] == spec.features:
        return None
    return lambda _, out: out[..., : spec.features].clone(memory_format=torch.contiguous_format)


def _scaled_grouped_mm(
    call: _Call, *, layout: str = LINEAR, config: GemmConfig | None = None, batch_invariant: bool = False
) -> Finish | None:
    """Append the GEMM; the call has the operator's arguments, then a bias (E, N)."""
    return _finished_gemm(call, _gemm(call, layout, config, bias=7, batch_invariant=batch_invariant))


def _scaled_mm(
    call: _Call, *, layout: str = LINEAR, config: GemmConfig | None = None, prefetch: bool = False,
    batch_invariant: bool = False,
) -> Finish | None:  # fmt: skip
    options: dict[str, Any] = dict(prefetch=prefetch, batch_invariant=batch_invariant)
    return _finished_gemm(call, _gemm(call, layout, config, offsets=None, bias=4, **options))


def _grouped_swiglu(
    call: _Call, *, layout: str = LINEAR, config: GemmConfig | None = None, batch_invariant: bool = False,
    **activation_form: Any,
) -> Finish | None:  # fmt: skip
    options: dict[str, Any] = dict(form=SwiGLUConfig(**activation_form), batch_invariant=batch_invariant)
    return _finished_gemm(call, _gemm(call, layout, config, row_slot=5, slot_scale=6, bias=7, **options))


def _grouped_mm_low_rank(
    call: _Call, *, layout: str = LINEAR, config: GemmConfig, transposed: bool = False
) -> Finish | None:
    """Append the GEMM of (activation, codes, scale, global_scale, offsets, inner (M, R), b (E, N, R)), plus the
    adapter's product; transposed: the weight is (E, K, N)."""
    inner, b = call.samples[5:7]
    _require_contiguous(inner, b)
    adapter = Adapter(call.places[5], call.places[6], b.shape[2], transposed)
    return _finished_gemm(call, _gemm(call, layout, config, transposed=transposed), adapter)


def _grouped_mm_combine(
    call: _Call, *, layout: str = LINEAR, config: GemmConfig | None = None, batch_invariant: bool = False
) -> None:
    slot_row, weight = call.samples[5], call.sample(6)
    spec, append = _gemm(call, layout, config, bias=7, batch_invariant=batch_invariant)
    _require(slot_row.numel() > 0, "there is nothing to compute")
    _require(spec.n % 2 == 0, "the kernels store pairs: a column is cut off in between")
    _require_contiguous(slot_row)
    _require_floats(weight)
    tokens, top_k = slot_row.shape
    summed = CombineSpec(spec.rows, tokens, top_k, spec.n, spec.dtype, _dtype(weight))
    out = call.chain.result((tokens, spec.n), spec.dtype)
    prepared.append_combine(
        call.chain, summed, append(), call.places[5], call.address(6), out, rows_from_previous_kernel=True
    )


def _combine(call: _Call) -> None:
    """Append the sum per token of (rows (M, N), slot_row (T, A), slot_weight (T, A) or None, `out` to write into)."""
    rows, slot_row, weight = (call.sample(place) for place in range(3))
    _require_contiguous(rows, slot_row)
    _require_floats(weight)
    _require(rows.numel() > 0 and slot_row.numel() > 0, "there is nothing to compute")
    (m, n), (tokens, top_k) = rows.shape, slot_row.shape
    spec, out = CombineSpec(m, tokens, top_k, n, rows.dtype, _dtype(weight)), _result(call, 3, (tokens, n), rows.dtype)
    rows_place, slots_place = call.places[:2]
    prepared.append_combine(
        call.chain, spec, rows_place, slots_place, call.address(2), out, rows_from_previous_kernel=False
    )


def _result(call: _Call, place: int, shape: tuple[int, int], dtype: torch.dtype) -> Address:
    """Return the address of the result: of the argument to write into, if it is given, else of a new tensor.

    Raises:
        ValueError: it has another shape or dtype, or is not contiguous.
    """
    out = call.sample(place)
    if out is None:
        return call.chain.result(shape, dtype)
    fits = tuple(out.shape) == shape and out.dtype == dtype and out.is_contiguous()
    require(fits, "out", out, f"contiguous {dtype} {shape}")
    return call.chain.result_in(call.places[place], shape, dtype)


def _moe_experts(
    call: _Call, *, weight_on_input: bool = False, gate_up_layout: str = LINEAR, down_layout: str = LINEAR,
    expert_ranks: int = 1, summed: bool = True, configs: tuple[GemmConfig | None, GemmConfig | None] = (None, None),
    batch_invariant: bool = False, **activation_form: Any,
) -> None:  # fmt: skip
    """Append a layer; the call has the operator's arguments, then `out`; summed: False for the rows (M, H)."""
    x, ids, scores = call.samples[:3]
    samples, places = ([get(place) for place in range(9, 14)] for get in (call.sample, call.address))
    biases, order = samples[:2], samples[2:]
    _require_contiguous(x, ids, *order)
    _require_floats(scores, *biases)
    gate_up, gate_up_spec, (experts, _, hidden_size) = _weight(call, 3, gate_up_layout)
    down, down_spec, (_, _, features) = _weight(call, 6, down_layout)
    tokens, top_k = ids.shape
    spec = ExpertsSpec(
        tokens, top_k, experts, hidden_size, features, x.dtype, ids.dtype, scores.dtype, gate_up_spec, down_spec,
        SwiGLUConfig(**activation_form), target(x.device), _dtype(biases[0]), _dtype(biases[1]), order[0] is not None,
        weight_on_input, summed, batch_invariant,
    )  # fmt: skip
    live_rows = -(-spec.rows // expert_ranks)
    gemms = spec.gate_up_gemm, spec.down_gemm
    plans = []
    for gemm, config in zip(gemms, configs, strict=True):
        _require_served(gemm, 0 if config else live_rows)
        if config is None and expert_ranks > 1:
            config = choose_config(replace(gemm, rows=live_rows))
        plans.append(plan_gemm(gemm, config))
    layouts = tuple(plan.config.layout for plan in plans)
    _require(layouts == (gate_up_layout, down_layout), "a weight is converted to another layout first")
    x_place, ids_place, scores_place = call.places[:3]
    rows_order = Order(*places[2:]) if spec.sorted else None
    operands = ExpertsOperands(x_place, ids_place, scores_place, gate_up, down, places[0], places[1], rows_order)
    out = _result(call, 14, (spec.tokens if summed else spec.rows, hidden_size), spec.dtype)
    prepared.append_experts(call.chain, spec, (plans[0], plans[1]), operands, out)


def _scaled_grouped_mm_dgrad(call: _Call, *, layout: str = LINEAR) -> Finish | None:
    """Append the GEMM; the call has the operator's arguments, then outer (M, R) and a (E, R, K) of an adapter."""
    grad, offsets = call.samples[0], call.samples[4]
    outer, a = call.sample(5), call.sample(6)
    _require_contiguous(grad, offsets, outer, a)
    weight, weight_spec, (experts, n, k) = _weight(call, 1, layout)
    _require(grad.dtype != torch.float32, "no CUDA kernel serves gradients in float32")
    _require(grad.numel() > 0 and k > 0, "there is nothing to compute")
    _require(layout in (LINEAR, TILED), f"layout {layout!r} is converted to {LINEAR!r} first")
    rank = 0 if a is None else a.shape[1]
    spec = DgradSpec(grad.shape[0], experts, n, k, grad.dtype, weight_spec, target(grad.device), rank)
    adapter = Adapter(call.places[5], call.places[6], rank) if rank else None
    return prepared.append_dgrad(call.chain, spec, call.places[0], weight, call.places[4], adapter)


def _moe_route(call: _Call) -> None:
    ids, num_experts = call.samples
    _require_contiguous(ids)
    _require(ids.numel() > 0, "there is nothing to compute")
    _require(num_experts <= MAX_EXPERTS, f"no CUDA kernel serves more than {MAX_EXPERTS} experts")
    shape = tuple(ids.shape)
    order = prepared.order_results(call.chain, shape, num_experts)
    prepared.append_route(call.chain, shape, num_experts, call.places[0], ids.dtype == torch.int64, order)


def _moe_router(call: _Call, *, scores_dtype: torch.dtype | None = None, **router_form: Any) -> None:
    logits, bias = call.samples[0], call.sample(1)
    _require_floats(logits, bias)
    tokens, experts = logits.shape
    spec = RouterSpec(
        tokens, experts, RouterConfig(**router_form), logits.dtype, _dtype(bias), scores_dtype or logits.dtype,
        target(logits.device),
    )  # fmt: skip
    reason = router.unserved_reason(spec.num_experts, spec.form)
    _require(reason is None, f"no CUDA kernel serves a router with {reason}")
    _require(spec.tokens > 0, "there is nothing to compute")
    router.append_router(call.chain, spec, call.places[0], call.address(1))


def _add_norm_scaled_mm(call: _Call, *, epsilon: float, layout: str = LINEAR, prefetch: bool = False) -> None:
    activation, bias = call.samples[0], call.sample(6)
    _require_contiguous(*call.samples[:3])
    _require_floats(bias)
    weight, weight_spec, (experts, n, k) = _weight(call, 3, layout)
    rows, where = activation[..., 0].numel(), target(activation.device)
    spec = GemmSpec(rows, experts, n, k, activation.dtype, weight_spec, where, bias=_dtype(bias))
    _require_served(spec)
    _require(direct.serves_mm(spec), "the layer alone has a kernel with a pipeline")
    _require(rows <= direct.MOST_NORM_ROWS, f"a norm of more than {direct.MOST_NORM_ROWS} rows is a kernel of its own")
    out, total = (call.chain.result((*activation.shape[:-1], width), spec.dtype) for width in (n, k))
    norm = direct.NormOperands(call.places[1], call.places[2], total, epsilon)
    direct.append_mm(call.chain, spec, call.places[0], weight, call.address(6), out, prefetch=prefetch, norm=norm)


def _moe_linear_router(
    call: _Call, *, logits_dtype: torch.dtype | None = None, scores_dtype: torch.dtype | None = None,
    prefetch: bool = False, **router_form: Any,
) -> None:  # fmt: skip
    _append_linear_router(call, RouterConfig(**router_form), logits_dtype, scores_dtype, prefetch)


def _add_norm_linear_router(
    call: _Call, *, norm_epsilon: float, logits_dtype: torch.dtype | None = None,
    scores_dtype: torch.dtype | None = None, prefetch: bool = False, **router_form: Any,
) -> None:  # fmt: skip
    _require_contiguous(*call.samples[1:3])
    norm = *call.places[1:3], norm_epsilon
    call = call._replace(samples=[call.samples[0], *call.samples[3:]], places=[call.places[0], *call.places[3:]])
    _append_linear_router(call, RouterConfig(**router_form), logits_dtype, scores_dtype, prefetch, norm)


def _append_linear_router(
    call: _Call, form: RouterConfig, logits_dtype: torch.dtype | None, scores_dtype: torch.dtype | None, prefetch: bool,
    norm: tuple[Address, Address, float] | None = None,
) -> None:  # fmt: skip
    """Append a router; the call has hidden states, weight, linear_bias and bias."""
    hidden, weight = call.samples[:2]
    linear_bias, bias = call.sample(2), call.sample(3)
    _require_contiguous(hidden, weight, linear_bias)
    _require_floats(bias)
    shape = hidden.shape[0], weight.shape[0]
    served = router.serves_linear(shape, hidden.shape[1], form, hidden.dtype)
    _require(served, "the linear layer is torch's, the router a kernel behind it")
    spec = RouterSpec(
        *shape, form, logits_dtype or hidden.dtype, _dtype(bias), scores_dtype or hidden.dtype, target(hidden.device),
        hidden.shape[1], hidden.dtype, linear_bias is not None,
    )  # fmt: skip
    operands = [call.address(place) for place in range(4)]
    router.append_linear_router(call.chain, spec, *operands, prefetch=prefetch, norm=norm)


def _decode_attention(
    call: _Call, *, epsilon: float = 0.0, scale: float, prefetch: bool = False, batch_invariant: bool = False
) -> Finish:
    query, key, value, key_cache, value_cache, _, mask, cos, sin, *norms = (call.sample(place) for place in range(11))
    (texts, heads, width), (_, key_heads, length, _) = query.shape, key_cache.shape
    reason = decode_attention.unserved_reason(query.device, query.dtype, heads, key_heads, width)
    _require(reason is None, f"no CUDA kernel serves {reason}")
    _require(texts > 0 and length > 0, "there is nothing to compute")
    _require_contiguous(key_cache, value_cache, *norms)
    together = all(each.stride()[1:] == (width, 1) for each in (query, key, value))
    together = together and all(each is None or each.stride(-1) == 1 for each in (mask, cos, sin))
    _require(together, "a row of an operand is not contiguous")
    _require(cos is None or cos.stride(0) == sin.stride(0), "cos and sin have different strides")
    samples, places = ([get(place) for place in range(11)] for get in (call.sample, call.address))
    numbers = epsilon, scale, prefetch, batch_invariant
    decode_attention.append_decode_attention(call.chain, samples, places, *numbers)
    return lambda _, results: results[0]


# The function that describes an operator's chain, by the operator's name in NVFP4.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add_norm_linear_router": _add_norm_linear_router,
    "combine": _combine,
    "decode_attention": _decode_attention,
    "f16a_nvfp4weight_add_norm_scaled_mm": _add_norm_scaled_mm,
    "f16a_nvfp4weight_scaled_grouped_mm": _scaled_grouped_mm,
    "f16a_nvfp4weight_grouped_swiglu": _grouped_swiglu,
    "f16a_nvfp4weight_grouped_mm_combine": _grouped_mm_combine,
    "f16a_nvfp4weight_grouped_mm_low_rank": _grouped_mm_low_rank,
    "f16a_nvfp4weight_moe_experts": _moe_experts,
    "f16a_nvfp4weight_scaled_grouped_mm_dgrad": _scaled_grouped_mm_dgrad,
    "f16a_nvfp4weight_scaled_mm": _scaled_mm,
    "moe_linear_router": _moe_linear_router,
    "moe_route": _moe_route,
    "moe_router": _moe_router,
}

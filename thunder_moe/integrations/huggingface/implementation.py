"""The experts of a transformers layer on NVFP4 weights, and its experts implementation "thunder_moe"; the experts
implementations "thunder_moe_mxfp8" and "thunder_moe_fp8", which train in 8 bits.
Called by experts and, once imported, by transformers; calls ops.experts, ops.grouped_linear, nn.grouped_linear,
weight_cache and compilers.safety.

Legend: T tokens, A = top_k, M = T * A rows, E experts, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from thunder_moe import weight_cache
from thunder_moe.compilers.safety import is_hidden_training_forward
from thunder_moe.formats.gate_up import deinterleave
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.integrations.huggingface.forms import (
    SHAPES_THE_FORM,
    ExpertsForm,
    apply_gate,
    require_form,
    stored_weights,
)
from thunder_moe.kernels.batch_invariance import refuse
from thunder_moe.kernels.recipes import RECIPES
from thunder_moe.nn.autocast import autocast_rows
from thunder_moe.nn.grouped_linear import autocast
from thunder_moe.nn.lora import LoRALinear
from thunder_moe.ops import experts_lora  # noqa: F401  (registers the operator)
from thunder_moe.ops.experts import moe_experts
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import op_name_for
from thunder_moe.routing import expert_of_row, gather_rows, invert, live_rows, sort_by_expert
from thunder_moe.weight_cache import stacked_layout


def run_experts(
    module: Any,
    own_class: type,
    form: ExpertsForm,
    inputs: tuple[Tensor, Tensor, Tensor],
    gate_up: PackedWeight,
    down: PackedWeight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    order: tuple[Tensor, Tensor, Tensor] | None = None,
    adapted: tuple[LoRALinear | None, LoRALinear | None] = (None, None),
) -> Tensor:
    """Run a layer's experts by the fused operators, or around the gate or norm of `own_class`.

    `order` is what `moe_route` gives for the ids, where the router has left it; `adapted` the projections that have
    LoRA adapters.
    """
    inputs, ops = (autocast_rows(inputs[0]), *inputs[1:]), torch.ops.thunder_moe
    hidden, ids, slot_weight = inputs
    first, second = (None if linear is None or not linear.lora_active else linear for linear in adapted)
    on_input, on_output = (slot_weight, None) if form.weight_on_input else (None, slot_weight)
    dropping = any(linear is not None and linear.lora_drops_out() for linear in (first, second))
    if form.swiglu is not None and not form.post_norm and not dropping:
        alpha, limit, up_shift = form.swiglu.alpha, form.swiglu.limit, form.swiglu.up_shift
        options: dict[str, Any] = dict(
            weight_on_input=form.weight_on_input, alpha=alpha, limit=limit, up_shift=up_shift
        )
        if first is None and second is None:
            options |= dict(gate_up_bias=gate_up_bias, down_bias=down_bias, order=order)
            return moe_experts(*inputs, gate_up, down, **options)
        pairs = (None if linear is None else linear.lora_pair(hidden.dtype) for linear in (first, second))
        (a1, b1), (a2, b2) = (pair or (None, None) for pair in pairs)
        run = getattr(ops, op_name_for("f16a_nvfp4weight_moe_experts_lora", gate_up.format))
        out: Tensor = run(
            *inputs, *operands(gate_up), *operands(down), a1, b1, a2, b2, gate_up_bias, down_bias,
            *(order or ops.moe_route(ids, gate_up.shape[0])),  # the backward reads it, too
            gate_up_layout=gate_up.layout, down_layout=down.layout, **options,
        )[0]  # fmt: skip
        return out
    # torch's exponentials depend on a row's place on a CPU, and its sums over the rows of a token on CUDA.
    if not torch.compiler.is_compiling() and (not hidden.is_cuda or form.post_norm or second is not None):
        refuse("experts with a gate, norm or adapter that torch computes", "run them outside of it, and merge adapters")
    row_slot, offsets, slot_row = ops.moe_route(ids, gate_up.shape[0]) if order is None else order
    # Rows past the last group are undefined; zero them where other rows' gradients could meet theirs.
    live = live_rows(offsets, row_slot.shape[0])

    def project(rows: Tensor, weight: PackedWeight, lora: LoRALinear | None, bias: Tensor | None) -> Tensor:
        grouped_mm = getattr(ops, op_name_for("f16a_nvfp4weight_scaled_grouped_mm", weight.format))
        out = grouped_mm(rows, *operands(weight), offsets, layout=weight.layout)
        out = out if lora is None else lora.plus_lora(out, rows, offsets)
        out = out if bias is None else out + bias[expert_of_row(offsets, rows.shape[0])].to(out.dtype)
        return torch.where(live, out, 0)

    rows = gather_rows(hidden, row_slot)
    if on_input is not None:
        rows = rows * on_input.flatten()[row_slot, None].to(rows.dtype)
    rows = project(torch.where(live, rows, 0), gate_up, first, gate_up_bias)
    rows = apply_gate(module, own_class, rows, form.interleaved) if form.gated else module.act_fn(rows)
    if not form.post_norm and second is None:
        combine = getattr(ops, op_name_for("f16a_nvfp4weight_grouped_mm_combine", down.format))
        out = combine(rows, *operands(down), offsets, slot_row, on_output, down_bias, layout=down.layout)
        return out
    rows = project(rows, down, second, down_bias)
    rows = module.post_expert_norm(rows) if form.post_norm else rows
    picked = rows[slot_row.clamp_min(0)].float()  # [T, A, H]
    picked = picked if on_output is None else picked * on_output.float()[..., None]
    return torch.where(slot_row[..., None] >= 0, picked, 0).sum(1).to(hidden.dtype)


# What is refused in the batch-invariant mode: torch's grouped GEMM.
_IN_16_BITS = "experts that train in transformers' 16-bit code", "freeze them, or quantize_(model)"
# The state of each module when its form was determined, and the form.
_FORMS: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], ExpertsForm]] = WeakKeyDictionary()


def thunder_moe_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts implementation "thunder_moe" of transformers on a module that keeps its 16-bit weights.

    Frozen weights (or any, while gradients are disabled) are quantized on first use, and again when they have changed;
    weights that are being trained, or parametrized, run in 16 bits through transformers' own grouped_mm. Under
    torch.compile the backend "thunder_moe" decides the same, under Thunder its moe_executor.

    Raises:
        ValueError: another backend of torch.compile compiles it, which would run in 16 bits; they run in 16 bits in the
            batch-invariant mode.
    """
    inputs = (hidden_states, top_k_index, top_k_weights)
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling():
            _require_backend()
        return _run_trained(self, *inputs)
    if parametrize.is_parametrized(self):  # its weights are computed at each access (PEFT's LoRA, for one)
        refuse(*_IN_16_BITS)
        return grouped_mm_experts_forward(self, *inputs)
    form = _form_now(self)
    first, second, *stored_biases = stored_weights(self, form).values()
    biases: list[Tensor] = [*stored_biases]
    trained = first.requires_grad or second.requires_grad
    if trained and (torch.is_grad_enabled() or is_hidden_training_forward()):
        refuse(*_IN_16_BITS)
        weight_cache.changed(first, second)  # an optimizer may change them without a new version number
        return grouped_mm_experts_forward(self, *inputs)
    layouts = [stacked_layout(weight, transposed=form.transposed) for weight in (first, second)]
    gate_up = weight_cache.get(first, transposed=form.transposed, interleaved=form.interleaved, layout=layouts[0])
    down = weight_cache.get(second, transposed=form.transposed, layout=layouts[1])
    if biases and form.interleaved:
        biases[0] = deinterleave(biases[0])
    return run_experts(self, type(self), form, inputs, gate_up, down, *(biases or (None, None)))


def _form_now(module: nn.Module) -> ExpertsForm:
    """Return the form of a module, determined once and again when its activation or gate was replaced."""
    state = type(module), vars(module).get("_apply_gate"), *(getattr(module, name, None) for name in SHAPES_THE_FORM)
    known, form = _FORMS.get(module, (None, None))
    if form is None or known != state:
        form = require_form(module)
        _FORMS[module] = state, form
    return form


def _run_trained(module: Any, hidden: Tensor, ids: Tensor, slot_weight: Tensor, recipe: str | None = None) -> Tensor:
    """Run transformers' grouped_mm, written in operations that both compilers trace (Thunder lacks histc, for one);
    with an 8-bit recipe its products are `grouped_linear`."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    experts, top_k = first.shape[0], ids.shape[1]
    ids = ids.reshape(-1)  # [M]
    order, offsets = sort_by_expert(ids, experts + 1)  # the last one: ids of other devices' experts
    offsets = offsets[:experts]
    expert, live = ids[order], None
    if getattr(module, "_is_expert_parallel", False):
        live = (expert < experts)[:, None]
        expert = expert.clamp(max=experts - 1)

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        if recipe is None:
            rows = F.grouped_mm(rows, weight if module.is_transposed else weight.transpose(-2, -1), offs=offsets)
        else:
            rows, weight = autocast(rows, weight.transpose(-2, -1) if module.is_transposed else weight)
            rows = torch.ops.thunder_moe.grouped_linear(rows, weight, offsets, None, None, recipe)
        rows = rows + getattr(module, f"{name}_bias")[expert] if module.has_bias else rows
        return rows if live is None else torch.where(live, rows, 0)

    rows = hidden[order // top_k].to(first.dtype)
    rows = linear(
        rows if live is None else torch.where(live, rows, 0), "gate_up_proj" if module.has_gate else "up_proj"
    )
    rows = linear(module._apply_gate(rows) if module.has_gate else module.act_fn(rows), "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    rows = rows * slot_weight.reshape(-1)[order][:, None]
    return rows[invert(order)].reshape(hidden.shape[0], top_k, hidden.shape[-1]).sum(1).to(hidden.dtype)


def _check_backend() -> None:
    """Raise a ValueError, while dynamo traces, unless the backend "thunder_moe" is going to get the graph."""
    output = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    name = getattr(output.compiler_fn, "_compiler_name", None)
    if name not in ("thunder_moe", "thunder_moe_backend"):
        raise ValueError(
            f'torch.compile: got backend {name!r} for a model of experts_implementation="thunder_moe"; use'
            ' backend="thunder_moe", or thunder_moe.quantize_(model) ahead of any backend'
        )


_constant: Any = torch.compiler.assume_constant_result
_require_backend: Callable[[], None] = _constant(_check_backend)
ALL_EXPERTS_FUNCTIONS.register("thunder_moe", thunder_moe_experts)
for _recipe in RECIPES:
    ALL_EXPERTS_FUNCTIONS.register(f"thunder_moe_{_recipe}", partial(_run_trained, recipe=_recipe))

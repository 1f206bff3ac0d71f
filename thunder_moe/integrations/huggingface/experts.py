"""`NVFP4Experts`: the 4-bit (or MXFP8) form of the experts modules of Hugging Face models, with given or own weights.
Called by families, quantizer, writing and users; calls implementation to run, forms for the layout of the weights.
Importing it registers the experts implementation "thunder_moe".

Legend: T tokens, A = top_k, E experts, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.checkpoint.experts import UNSHARDED, ExpertsPart
from thunder_moe.formats.gate_up import deinterleave, interleave
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.integrations.huggingface import forms
from thunder_moe.integrations.huggingface.implementation import run_experts
from thunder_moe.integrations.huggingface.routers import OWN_STATE, RowOrders
from thunder_moe.integrations.huggingface.sharded_forward import local_of, sharding_of
from thunder_moe.kernels.select import lay_out, quantize
from thunder_moe.nn import NVFP4GroupedLinear
from thunder_moe.nn.autocast import autocast_rows
from thunder_moe.nn.lora import LoRALinear, NVFP4LoRAGroupedLinear
from thunder_moe.nn.quantized import calls_only_its_class, name_of_container
from thunder_moe.ops.operator import operator_for
from thunder_moe.quantization.families import weight_key
from thunder_moe.quantization.replaceable import copy_hook, has_hook, has_own_forward

# PEFT's names of adapters below the experts: of a fused parameter, or of a projection of one expert.
_OF_PEFT = re.compile(r"(base_layer\.)*lora_[AB]\.|\d+\.\w+\.lora_[AB]\.")


class NVFP4Experts(nn.Module):
    """The experts of a layer with frozen 4-bit weights, in the place of an experts module of transformers.

    Called as that module is: ``(hidden_states (T, H), top_k_index (T, A), top_k_weights (T, A)) -> (T, H)``; ids
    outside [0, E) (expert parallelism's sentinels) contribute nothing. What else the module had (its configuration,
    activation, norm) it has under the same names. `from_weights` makes one, `families.put_experts` puts it into
    a model.

    Attributes:
        gate_up_proj: `NVFP4GroupedLinear` (E, 2I, H), gate rows first, then up rows; (E, I, H) for experts without a
            gate.
        down_proj: `NVFP4GroupedLinear` (E, H, I).
        gate_up_bias: parameter (E, 2I) in the order of gate_up_proj's rows, or None.
        down_bias: parameter (E, H), or None.
        experts_class: the class that it stands for.
        form: how that class keeps its weights, and which activation it has.
        part: what it has of the layer's experts, where several processes share them.
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    row_orders: RowOrders | None = None  # of the layer's router, where that leaves the order of rows for these experts
    part: ExpertsPart = UNSHARDED
    part_mesh: Any = None

    def __init__(
        self,
        experts: nn.Module,
        form: forms.ExpertsForm,
        gate_up_proj: NVFP4GroupedLinear,
        down_proj: NVFP4GroupedLinear,
    ) -> None:
        super().__init__()
        self.experts_class, self.form = type(experts), form
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        _copy_attributes(experts, self, skip=forms.stored_weights(experts, form))
        self.train(experts.training)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; another activation, limit or gate is fused only if `fused_gate` knows it, too."""
        super().__setattr__(name, value)
        if name in (*forms.SHAPES_THE_FORM, "_apply_gate") and self.form.gated:
            self.form = replace(self.form, swiglu=forms.fused_gate(self, self.experts_class, self.form.interleaved))

    @classmethod
    def from_weights(
        cls,
        hf_experts_module: nn.Module,
        gate_up: PackedWeight,
        down: PackedWeight,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        auto_layout: bool = False,
    ) -> NVFP4Experts:
        """Make the NVFP4 form of an experts module.

        Args:
            hf_experts_module: one of `expert_blocks`; its weights are not read, so they may be on the "meta" device.
            gate_up: (E, 2I, H), gate rows first, then up rows, even where the module interleaves them; (E, I, H) for
                experts without a gate.
            down: (E, H, I).
            gate_up_bias: (E, 2I) in the same order of rows, if the module has one.
            down_bias: (E, H), likewise.
            auto_layout: whether the weights are laid out for the device that the module is moved to.

        Raises:
            TypeError: the module is not an experts module that this package knows.
            ValueError: the module has hooks or a forward of its own, which would be lost; a weight or bias does not
                have its sizes, or a bias is missing or too many.
        """
        form = forms.require_form(hf_experts_module)
        if (reason := forms.not_plain_experts(hf_experts_module)) is not None:
            raise ValueError(f"hf_experts_module: cannot replace this {type(hf_experts_module).__name__}: {reason}")
        stored = [*forms.stored_weights(hf_experts_module, form).values()]
        linears = []
        for name, weight, (old, view) in zip(
            ("gate_up", "down"), (gate_up, down), expert_weights(hf_experts_module), strict=True
        ):
            if weight.shape != view.shape:
                raise ValueError(f"{name}: got shape {weight.shape}, wanted {tuple(view.shape)}, the module's own")
            options: dict[str, Any] = dict(weight_dtype=old.dtype, weight_requires_grad=old.requires_grad)
            linears.append(NVFP4GroupedLinear(weight, **options, auto_layout=auto_layout))
        new = cls(hf_experts_module, form, *linears)
        own_biases: list[nn.Parameter | None] = [*stored[2:]] or [None, None]
        for name, bias, own in zip(("gate_up_bias", "down_bias"), (gate_up_bias, down_bias), own_biases, strict=True):
            shape, wanted = (None if tensor is None else tuple(local_of(tensor).shape) for tensor in (bias, own))
            if shape != wanted:
                raise ValueError(f"{name}: got shape {shape}, wanted {wanted}, the module's own")
            if bias is None or own is None:
                new.register_parameter(name, None)
            elif isinstance(bias, nn.Parameter):
                new.register_parameter(name, bias)
            else:
                new.register_parameter(name, nn.Parameter(bias.detach(), requires_grad=own.requires_grad))
        copy_hook(new, hf_experts_module)
        return new

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load as every module does, but refuse adapters that PEFT made for the 16-bit experts, which PEFT would leave
        out with a warning."""
        if strange := [key for key in state_dict if key.startswith(prefix) and _OF_PEFT.match(key[len(prefix) :])]:
            args[-1].append(
                f"{strange[0]} and {len(strange) - 1} more: got adapters of PEFT's for 4-bit experts, wanted "
                "load_peft_model of thunder_moe.integrations.huggingface.lora, which reads them"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        hidden_states = autocast_rows(hidden_states)
        inputs = (hidden_states, top_k_index, top_k_weights)
        modules, parameters = self._modules, self._parameters
        first: Any = modules["gate_up_proj"]
        second: Any = modules["down_proj"]
        order = None if self.row_orders is None else self.row_orders.take(top_k_index, getattr(first, "num_experts", 0))
        try:  # nn.Module's own look-up takes half a microsecond
            biases = parameters["gate_up_bias"], parameters["down_bias"]
        except KeyError:  # parametrized
            biases = self.gate_up_bias, self.down_bias
        form = self.form
        plain = calls_only_its_class(first, NVFP4GroupedLinear) and calls_only_its_class(second, NVFP4GroupedLinear)
        if form.swiglu is not None and not form.post_norm and plain:
            (format, gate_up_layout, gate_up), (of_down, down_layout, down) = first.read(), second.read()
            if format is of_down:
                run = operator_for("f16a_nvfp4weight_moe_experts", format)
                out: Tensor = run(
                    *inputs, *gate_up, *down, *biases, *(order or (None, None, None)),
                    weight_on_input=form.weight_on_input, gate_up_layout=gate_up_layout, down_layout=down_layout,
                    alpha=form.swiglu.alpha, limit=form.swiglu.limit, up_shift=form.swiglu.up_shift,
                )  # fmt: skip
                return out
        weights = _weight_of(first), _weight_of(second), *biases
        adapted = (first if isinstance(first, LoRALinear) else None, second if isinstance(second, LoRALinear) else None)
        return run_experts(self, self.experts_class, form, inputs, *weights, order, adapted)

    def dequantized(self, memo: dict[Any, Any]) -> nn.Module:
        """Return the 16-bit module of `experts_class` with the dequantized weights; `memo` keeps tied weights tied."""
        form = self.form
        experts = self.experts_class.__new__(self.experts_class)
        nn.Module.__init__(experts)
        projections = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
        own = ("experts_class", "form", *projections, "row_orders")
        _copy_attributes(self, experts, skip=own)
        first = "gate_up_proj" if form.gated else "up_proj"
        for name, linear in ((first, self.gate_up_proj), ("down_proj", self.down_proj)):
            key = weight_key(linear.qdata, order=_order(form, name == first))
            if key not in memo:
                (weight,), (requires_grad,) = linear.dequantized(), linear.weights_require_grad
                weight = interleave(weight) if form.interleaved and name == first else weight
                weight = weight.transpose(1, 2).contiguous() if form.transposed else weight
                memo[key] = [nn.Parameter(weight, requires_grad=requires_grad)]
            (parameter,) = memo[key]
            experts.register_parameter(name, parameter)
        for name, bias in ((f"{first}_bias", self.gate_up_bias), ("down_proj_bias", self.down_bias)):
            if bias is None:
                continue
            if form.interleaved and name != "down_proj_bias":
                if id(bias) not in memo:
                    memo[id(bias)] = nn.Parameter(interleave(bias.detach()), requires_grad=bias.requires_grad)
                bias = memo[id(bias)]
            experts.register_parameter(name, bias)
        copy_hook(experts, self)
        return experts.train(self.training)

    def note_part(self, part: ExpertsPart, mesh: Any = None) -> None:
        """Note which part of the layer's weights these are, where the processes of a mesh share them."""
        self.part, self.part_mesh = part, mesh
        whole_experts = part.feature_ranks == 1
        for dim, linear in ((1, self.gate_up_proj), (2, self.down_proj)):
            by_features = (dim, part.feature_rank, part.feature_ranks)
            linear.process_part = (0, part.expert_rank, part.expert_ranks) if whole_experts else by_features

    def _get_name(self) -> str:
        return name_of_container(self)

    def extra_repr(self) -> str:
        return f"{self.experts_class.__name__}, {self.gate_up_proj.num_experts} experts, {self.form}"


def expert_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts modules of transformers in a model that can be quantized, by qualified name; each once."""
    return {name: module for name, module in model.named_modules() if forms.form_of(module) is not None}


def expert_weights(experts: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the two weights of one of `expert_blocks`, each with a view (E, N, K) of what this process has of it."""
    form = forms.require_form(experts)
    parameters = [*forms.stored_weights(experts, form).values()][:2]
    views = [local_of(parameter) for parameter in parameters]
    views = [view.transpose(1, 2) if form.transposed else view for view in views]
    return list(zip(parameters, views, strict=True))


@torch.no_grad()
def quantized_experts(
    experts: nn.Module, memo: dict[Any, Any], pack: Callable[[Tensor], PackedWeight] = quantize, layout: str = "linear"
) -> NVFP4Experts:
    """Quantize one of `expert_blocks`, in 16 bits or float32; the `memo` of a model keeps tied weights tied.

    `pack` quantizes the weights (E, N, K). Raises what `NVFP4Experts.from_weights` and `nvfp4.quantize` raise.
    """
    form = forms.require_form(experts)
    first, second, *biases = forms.stored_weights(experts, form).values()
    sharding = sharding_of(experts)

    def once(parameter: nn.Parameter, order: str, convert: Any) -> Any:
        # Plain parameters, which all live when the first is converted: an id names one of them for the whole run.
        key = weight_key(parameter, order=order)
        if key not in memo:
            memo[key] = convert(local_of(parameter))
        return memo[key]

    if sharding is not None:
        pack = partial(sharding.pack, pack=pack)
        biases = [once(bias, "local", partial(nn.Parameter, requires_grad=bias.requires_grad)) for bias in biases]
    if biases and form.interleaved:
        biases[0] = once(
            biases[0], "bias", lambda bias: nn.Parameter(deinterleave(bias), requires_grad=bias.requires_grad)
        )
    weights = [
        once(parameter, _order(form, is_first), partial(_pack, form, is_first, pack=pack, layout=layout))
        for parameter, is_first in ((first, True), (second, False))
    ]
    new = NVFP4Experts.from_weights(experts, *weights, *biases, auto_layout=layout == "auto")
    if sharding is not None:
        new.note_part(sharding.part, sharding.mesh)
        sharding.install(new)
    return new


@torch.no_grad()
def pack_ahead(
    experts: nn.Module,
    name: str,
    weight: Tensor,
    memo: dict[Any, Any],
    pack: Callable[[Tensor], PackedWeight],
    layout: str,
) -> None:
    """Quantize one of the weights of an experts module on "meta" before its others are there.

    The module gets a parameter on "meta" in the place of it, and `memo` the 4-bit weight for the later call of
    `quantized_experts`. The memo is of this module alone: parameters that are gone by then leave their ids to others.
    """
    form = forms.require_form(experts)
    is_first, sharding = name != "down_proj", sharding_of(experts)
    if sharding is not None:
        pack = partial(sharding.pack, pack=pack)
    packed = _pack(form, is_first, weight, pack=pack, layout=layout)
    stand_in = nn.Parameter(torch.empty_like(weight, device="meta"))
    experts.register_parameter(name, stand_in)
    memo[weight_key(stand_in, order=_order(form, is_first))] = packed


def _pack(
    form: forms.ExpertsForm, first: bool, weight: Tensor, *, pack: Callable[[Tensor], PackedWeight], layout: str
) -> PackedWeight:
    """Pack the first or the second weight of a module, gate rows ahead of up rows."""
    packed = pack(weight.transpose(1, 2) if form.transposed else weight)
    if form.interleaved and first:
        qdata, scale, *others = packed.tensors()
        rows = (deinterleave(tensor.view(torch.uint8)).view(tensor.dtype) for tensor in (qdata, scale))
        packed = packed.with_tensors((*rows, *others))
    return lay_out(packed, layout)


def _order(form: forms.ExpertsForm, first: bool) -> str:
    """Return how the first or the second weight of a class lies in memory, for `families.weight_key`."""
    return " ".join(["transposed"] * form.transposed + ["interleaved"] * (form.interleaved and first))


def _weight_of(linear: Any) -> PackedWeight:
    """Return the weight of a projection, which the operators read without a call of the module.

    A module with something that would have to run is a ValueError.
    """
    classes = NVFP4GroupedLinear, NVFP4LoRAGroupedLinear
    # A hook of accelerate's would only move tensors to where the experts module's own has moved them.
    hooked = type(linear) in classes and has_hook(linear) and has_own_forward(linear)
    if not hooked and not any(calls_only_its_class(linear, kind) for kind in classes):
        raise ValueError(
            f"NVFP4Experts: a projection is a {type(linear).__name__} with hooks or a forward of its own, which would"
            " not run: experts are one operator; hook or wrap the experts module, or dequantize_ it before"
        )
    weight: PackedWeight = linear.read_weight()
    return weight


def _copy_attributes(source: nn.Module, target: nn.Module, *, skip: Container[str]) -> None:
    """Give a module the attributes, children, parameters and buffers of another one, except the forward and `skip`."""
    for name, value in vars(source).items():
        if name not in OWN_STATE and name not in skip:
            vars(target)[name] = value
    for name, child in source._modules.items():
        if name not in skip:
            target.register_module(name, child)
    for name, parameter in source._parameters.items():
        if name not in skip:
            target.register_parameter(name, parameter)
    for name, buffer in source._buffers.items():
        if name not in skip:
            target.register_buffer(name, buffer, persistent=name not in source._non_persistent_buffers_set)

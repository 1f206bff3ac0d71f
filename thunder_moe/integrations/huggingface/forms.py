"""`ExpertsForm`: the weight layout and the activation of an experts module of transformers, and how to recognize it.
Called by experts, families, implementation, quantizer and llama4; calls known_code.

Legend: E experts, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.nvfp4 import WEIGHT_DTYPES
from thunder_moe.integrations.huggingface.known_code import (
    key,
    names,
    origin,
    runs_class_forward,
    tell,
    unknown_version,
)
from thunder_moe.integrations.huggingface.sharded_forward import sharding_of
from thunder_moe.nn import NVFP4GroupedLinear
from thunder_moe.quantization.replaceable import customization, has_own_forward, instance_customization

# Attributes, beside a patched `_apply_gate`, that decide what a module computes between its projections.
SHAPES_THE_FORM = ("act_fn", "limit", "swiglu_limit", "alpha", "swiglu_alpha", "has_gate", "is_concatenated")
_INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# Classes outside of the experts interface with its weight layout: (is_transposed, weight_on_input).
_OTHERS = {
    ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): (True, True),
    ("transformers.models.step3p7.modeling_step3p7", "Step3p7Experts"): (False, False),
}
# Module and name of the class of an activation -> a, of ``x * sigmoid(a * x)``.
_ALPHAS = {
    ("torch.nn.modules.activation", "SiLU"): 1.0,
    ("transformers.activations", "SiLUActivation"): 1.0,
    ("transformers.activations", "QuickGELUActivation"): 1.702,
}


@dataclass(frozen=True)
class GateKind:
    """Describe what a gate computes of (..., 2I): a `SwiGLUConfig`, by attributes of the experts module."""

    # The value, or the attribute that has it; None for the one of ``act_fn``, if `alpha_of` knows that
    alpha: float | str | None = None
    limit: str | None = None  # the attribute that has it; None without a limit
    # The limit is one of the activated gate, which is a `SwiGLUConfig` only if it is infinite
    clamps_output: bool = False
    up_shift: float = 0.0  # as in `SwiGLUConfig`
    interleaved: bool = False  # gate and up are the even and odd features, not the halves

    def form(self, module: Any) -> SwiGLUConfig | None:
        """Return the `SwiGLUConfig` of an experts module; None if by its attributes it computes something else."""
        alpha: Any = getattr(module, self.alpha, None) if isinstance(self.alpha, str) else self.alpha
        alpha = alpha_of(getattr(module, "act_fn", None)) if self.alpha is None else alpha
        limit: Any = _NO_LIMIT if self.limit is None else getattr(module, self.limit, None)
        if not all(isinstance(value, int | float) and value > 0 for value in (alpha, limit)):
            return None
        if self.clamps_output and limit != _NO_LIMIT:
            return None
        return SwiGLUConfig(float(alpha), None if limit == _NO_LIMIT else float(limit), self.up_shift)


_NO_LIMIT = float("inf")
_GPT_OSS = GateKind(alpha="alpha", limit="limit", up_shift=1.0)
_ROWS = (
    (GateKind(), "beam.BeamExperts._apply_gate llama4.Llama4TextExperts.forward"),
    (GateKind(limit="limit"), "deepseek_v4.DeepseekV4Experts._apply_gate"),
    (GateKind(limit="limit", clamps_output=True), "step3p7.Step3p7Experts._apply_gate"),
    (GateKind(alpha=1.0, limit="swiglu_limit"), """
        glm5_next.Glm5NextTextExperts._apply_gate hy_v4.HYV4Experts._apply_gate hy_v4_vl.HYV4VLExperts._apply_gate
    """),
    (_GPT_OSS, "openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate"),
    (replace(_GPT_OSS, interleaved=True), "gpt_oss.GptOssExperts._apply_gate"),
    (replace(_GPT_OSS, alpha="swiglu_alpha", limit="swiglu_limit"), "minimax_m3_vl.MiniMaxM3VLExperts._apply_gate"),
)  # fmt: skip
# Module and name of the function that is the gate of a class -> what it computes.
GATES = {name: kind for kind, rows in _ROWS for name in names(rows)}
GATES["transformers.integrations.moe", "_default_apply_gate"] = GateKind()


@dataclass(frozen=True)
class ExpertsForm:
    """Describe the weight layout of an experts module and what it computes."""

    gated: bool  # the first projection is of gate and up; else of up alone, followed by ``act_fn``
    transposed: bool  # the weights are (E, in_features, out_features)
    interleaved: bool  # gate and up are the even and odd output features, not the halves
    weight_on_input: bool  # the router's weights multiply the input, not the output
    # The fused form of the activation; None for one that only the module's own code computes
    swiglu: SwiGLUConfig | None
    post_norm: bool  # each expert's output goes through the module's ``post_expert_norm``

    def __str__(self) -> str:
        text = "own gate" if self.gated else "own activation"
        if self.swiglu is not None:
            text = f"fused {self.swiglu}"
        return f"{text}, own norm" if self.post_norm else text


def has_interface(module: nn.Module) -> bool:
    """True if a module is of transformers' experts interface."""
    return all(hasattr(module, name) for name in _INTERFACE) and hasattr(module, "_apply_gate")


def has_experts(module: nn.Module) -> bool:
    """True if a module is of transformers' experts interface or one of `_OTHERS`, customized or not."""
    return has_interface(module) or any(key(cls) in _OTHERS for cls in type(module).__mro__)


def not_plain_experts(module: nn.Module) -> str | None:
    """Return why an experts module, in 16 or (`NVFP4Experts`) 4 bits, cannot be replaced; None when it can.

    Its forward has to be the interface's, or the known class's: what a subclass or an instance computes itself
    is not known, nor do hooks survive, except accelerate's.
    """
    if (reason := instance_customization(module)) is not None:
        return reason
    sharded = sharding_of(module) is not None
    if sharded and not has_experts(module):
        return "it is one process' part of the experts of several"
    if not sharded and not has_own_forward(module):
        return "something (expert parallelism?) has wrapped its forward"
    for name, child in module.named_modules():
        if child is not module and (reason := instance_customization(child)) is not None:
            return f"{name}: {reason}"
    if not has_experts(module):
        return _not_plain_nvfp4(module)
    forward: Any = type(module).forward
    known = next((cls for cls in type(module).__mro__ if key(cls) in _OTHERS), None)
    if known is None and getattr(forward, "__globals__", {}).get("__name__") != "transformers.integrations.moe":
        return f"{type(module).__name__} has a forward of its own"
    written = forward.__module__, forward.__qualname__
    if known is not None and written != (known.__module__, f"{known.__name__}.forward"):
        return f"{type(module).__name__} has another forward than {known.__name__}"
    if (form := form_of(module)) is None:
        down = getattr(module, "down_proj", None)
        what = f"{down.dtype} of shape {tuple(down.shape)}" if isinstance(down, Tensor) else type(down).__name__
        return f"its down_proj is {what}, wanted a parameter of three dimensions and 16 or 32 bits"
    first = "gate_up_proj" if form.gated else "up_proj"
    stored = stored_weights(module, form)
    if first not in stored:
        return f"it has no parameter {first}"
    for name, parameter in stored.items():
        if type(parameter) is not nn.Parameter and not (sharded and hasattr(parameter, "placements")):
            return f"its {name} is a {type(parameter).__name__}, not a plain parameter"
    return None


def _not_plain_nvfp4(module: nn.Module) -> str | None:
    for name in ("gate_up_proj", "down_proj"):
        child = module._modules[name]
        if not isinstance(child, NVFP4GroupedLinear):
            return f"its {name} is a {type(child).__name__}, not a NVFP4GroupedLinear"
        if (reason := customization(child)) is not None:
            return f"{name}: {reason}"
    return None


def form_of(module: nn.Module) -> ExpertsForm | None:
    """Return the form of an experts module of transformers (on any device, "meta" too); None for any other module."""
    other = next((_OTHERS[row] for cls in type(module).__mro__ if (row := key(cls)) in _OTHERS), None)
    if other is None and not has_interface(module):
        return None
    down = module._parameters.get("down_proj")
    if down is None or down.ndim != 3 or down.dtype not in WEIGHT_DTYPES:
        return None
    if other is not None:
        transposed, on_input = other
        return ExpertsForm(True, transposed, False, on_input, fused_gate(module, type(module), False), False)
    attributes: Any = module
    gated, interleaved = attributes.has_gate, not attributes.is_concatenated
    swiglu = fused_gate(module, type(module), interleaved) if gated else None
    post_norm = getattr(module, "has_post_expert_norm", False)  # transformers 5.7 has no such thing
    return ExpertsForm(gated, attributes.is_transposed, interleaved, False, swiglu, post_norm)


def require_form(module: nn.Module) -> ExpertsForm:
    """Return the form of an experts module; raise a TypeError for any other module."""
    if (form := form_of(module)) is None:
        raise TypeError(
            f"hf_experts_module: got {type(module).__name__}, wanted an experts module of transformers with weights of"
            " 16 or 32 bits (expert_blocks(model) lists the experts modules of a model)"
        )
    return form


def stored_weights(module: nn.Module, form: ExpertsForm) -> dict[str, nn.Parameter]:
    """Return the parameters that quantization replaces, by name: first projection, down_proj, then the biases."""
    first = "gate_up_proj" if form.gated else "up_proj"
    names = (first, "down_proj", f"{first}_bias", "down_proj_bias")
    return {name: parameter for name in names if (parameter := module._parameters.get(name)) is not None}


def apply_gate(module: Any, own_class: type, gate_up: Tensor, interleaved: bool) -> Tensor:
    """Run the gate of `own_class` with the attributes of `module`: (..., 2I), gate first -> (..., I)."""
    gate_fn = getattr(own_class, "_apply_gate", None)
    if gate_fn is None:  # Llama 4
        gate, up = gate_up.chunk(2, -1)
        out: Tensor = up * module.act_fn(gate)
        return out
    if interleaved:
        gate_up = torch.stack(gate_up.chunk(2, -1), -1).flatten(-2)
    patched = vars(module).get("_apply_gate")
    out = gate_fn(module, gate_up) if patched is None else patched(gate_up)
    return out


def fused_gate(module: Any, own_class: type, interleaved: bool) -> SwiGLUConfig | None:
    """Return the form of the gate that `apply_gate` runs, by `GATES`; None for one that is not there.

    The module may be of 16 or 4 bits; the class is of its 16-bit form. Interleaved: its rows of gate and up take turns.
    """
    function = getattr(own_class, "_apply_gate", getattr(own_class, "forward", None))
    kind = GATES.get(origin(function) or ("", ""))
    if kind is None:
        text = f"the gate of {own_class.__name__} runs apart from its GEMM, slower: GATES has no row for it"
        tell(text, logging.INFO)
    if kind is None or "_apply_gate" in vars(module) or kind.interleaved != interleaved:
        return None
    form, why = kind.form(module), unknown_version()
    if form is not None and why is not None:
        text = f"the gate of {own_class.__name__} runs apart from its GEMM, slower: it is known to be {form} {why}"
        tell(text, logging.WARNING)
        return None
    return form


def alpha_of(activation: Any) -> float | None:
    """Return a of an activation that is ``x * sigmoid(a * x)``, as SiLU (1.0) is; None for any other."""
    if activation is F.silu:
        return 1.0
    plain = (
        isinstance(activation, nn.Module)
        and instance_customization(activation) is None
        and runs_class_forward(activation)
    )
    return _ALPHAS.get(key(type(activation))) if plain else None

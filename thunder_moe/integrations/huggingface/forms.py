"""`ExpertsForm`: the weight layout and the activation of an experts module of transformers, and how to recognize it.
Called by experts, families, implementation and quantizer; calls the module's own gate to prove that a fused form
computes the same.

Legend: E experts, H hidden_size, I intermediate_size, P probes of the gate.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.activations import GLU
from thunder_moe.formats.nvfp4 import WEIGHT_DTYPES
from thunder_moe.integrations.huggingface.sharded_forward import sharding_of
from thunder_moe.nn import NVFP4GroupedLinear
from thunder_moe.replaceable import has_own_forward, impure, not_plain

__all__ = [
    "SHAPES_THE_FORM",
    "ExpertsForm",
    "apply_gate",
    "form_of",
    "fused_gate",
    "has_experts",
    "not_plain_experts",
    "require_form",
    "stored_weights",
]

# Attributes, beside a patched `_apply_gate`, that decide what a module computes between its projections.
SHAPES_THE_FORM = ("act_fn", "limit", "swiglu_limit", "alpha", "swiglu_alpha", "has_gate", "is_concatenated")
_INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# Classes outside of the experts interface with its weight layout: (is_transposed, weight_on_input).
_OTHERS = {
    ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): (True, True),
    ("transformers.models.step3p7.modeling_step3p7", "Step3p7Experts"): (False, False),
}
_KNOWN_TENSORS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias", "post_expert_norm.")
# Gates and ups at which a module's activation is compared with a fused form; those around its limit come on top.
_PROBES = (0.0, 1e-3, 0.1, 0.5, 1.0, 1.7, 2.5, 3.9, 6.5, 6.99, 7.01, 9.0, 15.0, 17.0, 40.0, 100.0)


@dataclass(frozen=True)
class ExpertsForm:
    """The weight layout of an experts module and what it computes.

    Attributes:
        gated: the first projection is of gate and up; else of up alone, followed by ``act_fn``.
        transposed: the weights are (E, in_features, out_features).
        interleaved: gate and up are the even and odd output features, not the halves.
        weight_on_input: the router's weights multiply the input, not the output.
        swiglu: the fused form of the activation; None for one that only the module's own code computes.
        post_norm: each expert's output goes through the module's ``post_expert_norm``.
    """

    gated: bool
    transposed: bool
    interleaved: bool
    weight_on_input: bool
    swiglu: GLU | None
    post_norm: bool

    def __str__(self) -> str:
        text = "own gate" if self.gated else "own activation"
        if self.swiglu is not None:
            text = f"fused {self.swiglu}"
        return f"{text}, own norm" if self.post_norm else text


def has_experts(module: nn.Module) -> bool:
    """Whether a module is of transformers' experts interface or one of `_OTHERS`, customized or not."""
    interface = all(hasattr(module, name) for name in _INTERFACE) and hasattr(module, "_apply_gate")
    return interface or any(_key(cls) in _OTHERS for cls in type(module).__mro__)


def not_plain_experts(module: nn.Module) -> str | None:
    """Why an experts module, in 16 or (`NVFP4Experts`) 4 bits, has to stay as it is; None when it can be replaced.

    Its forward has to be that of the interface, or of the known class: what a subclass or an instance computes itself
    is not known, nor do hooks survive, except accelerate's.
    """
    reason = impure(module)
    if reason is not None:
        return reason
    sharded = sharding_of(module) is not None
    if sharded and not has_experts(module):
        return "it is one process' part of the experts of several"
    if not sharded and not has_own_forward(module):
        return "something (expert parallelism?) has wrapped its forward"
    for name, child in module.named_modules():
        reason = impure(child) if child is not module else None
        if reason is not None:
            return f"{name}: {reason}"
    if not has_experts(module):
        return _not_plain_nvfp4(module)
    forward: Any = type(module).forward
    known = next((cls for cls in type(module).__mro__ if _key(cls) in _OTHERS), None)
    if known is None and getattr(forward, "__globals__", {}).get("__name__") != "transformers.integrations.moe":
        return f"{type(module).__name__} has a forward of its own"
    if known is not None and (forward.__module__, forward.__qualname__) != (
        known.__module__,
        f"{known.__name__}.forward",
    ):
        return f"{type(module).__name__} has another forward than {known.__name__}"
    form = form_of(module)
    if form is None:
        down = getattr(module, "down_proj", None)
        what = f"{down.dtype} of shape {tuple(down.shape)}" if isinstance(down, Tensor) else type(down).__name__
        return f"its down_proj is {what}, wanted a parameter of three dimensions and 16 or 32 bits"
    first = "gate_up_proj" if form.gated else "up_proj"
    stored = stored_weights(module, form)
    for name in (first, "down_proj"):
        if name not in stored:
            return f"it has no parameter {name}"
    for name, parameter in stored.items():
        if type(parameter) is not nn.Parameter and not (sharded and hasattr(parameter, "placements")):
            return f"its {name} is a {type(parameter).__name__}, not a plain parameter"
    return None


def _not_plain_nvfp4(module: nn.Module) -> str | None:
    for name in ("gate_up_proj", "down_proj"):
        child = module._modules[name]
        if not isinstance(child, NVFP4GroupedLinear):
            return f"its {name} is a {type(child).__name__}, not a NVFP4GroupedLinear"
        reason = not_plain(child)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def form_of(module: nn.Module) -> ExpertsForm | None:
    """The form of an experts module of transformers (on any device, "meta" too); None for any other module."""
    other = next((_OTHERS[key] for key in map(_key, type(module).__mro__) if key in _OTHERS), None)
    if other is None and not (all(hasattr(module, name) for name in _INTERFACE) and hasattr(module, "_apply_gate")):
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
    """The form of an experts module; TypeError for any other module."""
    form = form_of(module)
    if form is None:
        raise TypeError(
            f"hf_experts_module: got {type(module).__name__}, wanted an experts module of transformers with weights of"
            " 16 or 32 bits (expert_blocks(model) lists those of a model)"
        )
    return form


def stored_weights(module: nn.Module, form: ExpertsForm) -> dict[str, nn.Parameter]:
    """The module's own parameters that quantization replaces, by name: first projection, down_proj, then the biases."""
    first = "gate_up_proj" if form.gated else "up_proj"
    names = (first, "down_proj", f"{first}_bias", "down_proj_bias")
    return {name: parameter for name in names if (parameter := module._parameters.get(name)) is not None}


def apply_gate(module: Any, own_class: type, gate_up: Tensor, interleaved: bool) -> Tensor:
    """What the gate of `own_class` makes of (..., 2I), gate first, with the attributes of `module` -> (..., I)."""
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


@torch.no_grad()
def fused_gate(module: Any, own_class: type, interleaved: bool) -> GLU | None:
    """Return the fused form that agrees with `apply_gate` at all probes, to float32 rounding; None without one."""
    tensors = [name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())]
    if not all(name.startswith(_KNOWN_TENSORS) for name in tensors):
        return None  # an activation with tensors of its own
    limits = {None} | {_finite(getattr(module, name, None)) for name in ("limit", "swiglu_limit")}
    probes = [*_PROBES, *(factor * limit for limit in limits if limit is not None for factor in (0.9, 1.1, 4.0))]
    signed = [sign * probe for probe in probes for sign in (1.0, -1.0)]
    values = torch.tensor(signed, dtype=torch.float32, device="cpu")  # independent of the default dtype
    gate, up = torch.cartesian_prod(values, values).unbind(-1)  # [P]
    own = apply_gate(module, own_class, torch.cat([gate, up])[None], interleaved)[0]
    if own.shape != gate.shape:
        return None  # a gate that depends on the sizes of its layer
    alphas = {1.0, 1.702} | {float(getattr(module, name, 1.0)) for name in ("alpha", "swiglu_alpha")}
    for alpha, limit, up_shift in itertools.product(sorted(alphas), limits, (0.0, 1.0)):
        form = GLU(alpha, limit, up_shift)
        if torch.allclose(form(gate, up), own, rtol=1e-5, atol=1e-6):
            return form
    return None


def _finite(limit: Any) -> float | None:
    return None if limit is None or limit == float("inf") else float(limit)


def _key(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__

"""Checks that a module may be replaced by its 4-bit or 16-bit form: one without hooks, wrappers or extra tensors. Keeps
accelerate's hooks, which move activations between devices, when modules or their classes change.
Called by the other modules of quantization, finetune and integrations; calls nn for its classes, and accelerate where a
module has its hook.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from thunder_moe.nn import GroupedLinear, GroupedSwiGLU, NVFP4GroupedLinear, NVFP4GroupedSwiGLU, NVFP4Linear
from thunder_moe.nn.linear import NVFP4LinearPart
from thunder_moe.nn.lora import LoRALinear, NVFP4LoRAGroupedLinear
from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP

# The names that accelerate adds to a module's __dict__: the hook, and the forward that calls it.
HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")

# Module class -> its children, parameters and buffers; `_FORWARDS`: its forward.
_PROJECTIONS = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), GroupedLinear)
_PACKED = dict.fromkeys(("gate_up_proj", "down_proj"), NVFP4GroupedLinear)
_PACKED_TENSORS = ("qdata", "scale", "global_scale")
_PARTS: dict[type[nn.Module], tuple[dict[str, type[nn.Module]], tuple[str, ...], tuple[str, ...]]] = {
    GroupedLinear: ({}, ("weight", "bias"), ()),
    GroupedSwiGLU: ({**_PROJECTIONS}, (), ()),
    GroupedMLP: (dict(gate_up_proj=GroupedLinear, activation=nn.Module, down_proj=GroupedLinear), (), ()),
    # merge_lora_ makes these 16-bit. Listed before their base class, because the first match counts.
    NVFP4LoRAGroupedLinear: (dict(lora_A=nn.Module, lora_B=nn.Module), ("bias",), _PACKED_TENSORS),
    NVFP4GroupedLinear: ({}, ("bias",), _PACKED_TENSORS),
    NVFP4GroupedSwiGLU: ({**_PACKED}, (), ()),
    NVFP4GroupedMLP: ({**_PACKED, "activation": nn.Module}, (), ()),
    nn.Linear: ({}, ("weight", "bias"), ()),
    NVFP4Linear: ({}, ("bias",), _PACKED_TENSORS),
    NVFP4LinearPart: ({}, (), ()),
}
_FORWARDS = {cls: cls.forward for cls in _PARTS}
_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_state_dict_hooks": "state dict hooks",
    "_state_dict_pre_hooks": "state dict pre-hooks",
    "_load_state_dict_pre_hooks": "hooks on loading",
    "_load_state_dict_post_hooks": "hooks on loading",
}


def customization(module: nn.Module, *, hooked: bool = False) -> str | None:
    """Return how a module of `_PARTS` (or of a subclass) is customized; None if it is not.

    With `hooked` a hook of accelerate's is none, because the caller copies it.

    Checks in this order: parametrizations, the class, hooks, methods or a forward of the instance's own, tensors and
    children that the class does not have or that are of another type; then the children likewise.
    """
    known = next((cls for cls in _PARTS if isinstance(module, cls)), None)
    assert known is not None
    if parametrize.is_parametrized(module):
        return f"its {_listed(module.parametrizations)} is parametrized"
    if isinstance(module, LoRALinear) and not getattr(module, "lora_to_restore", False):
        return "it has LoRA adapters: merge_lora_(model, dequantize=True) or remove_lora_(model)"
    if type(module) is not known:
        return f"it is a {type(module).__name__}, not a {known.__name__} itself"
    if known.forward is not _FORWARDS[known]:
        return f"the forward of {known.__name__} was replaced"
    if (reason := instance_customization(module)) is not None:
        return reason
    if not has_own_forward(module) or (has_hook(module) and not hooked):
        return "its forward is wrapped or replaced"
    children, parameters, buffers = _PARTS[known]
    for kind, wanted, has in (
        ("parameter", parameters, module._parameters),
        ("buffer", buffers, module._buffers),
        ("child", (*children,), module._modules),
    ):
        if set(wanted) != set(has):
            return f"it has the {kind} {_listed(set(wanted) ^ set(has))} more or less than a {known.__name__}"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}, not a plain parameter"
    for name, child in module._modules.items():
        if not isinstance(child, children[name]):
            return f"its {name} is a {type(child).__name__}, not a {children[name].__name__}"
        if children[name] is nn.Module:  # kept unchanged
            continue
        if (reason := customization(child)) is not None:
            return f"{name}: {reason}"
    if known is GroupedSwiGLU:
        gate, up, down = (tuple(module.get_parameter(f"{name}.weight").shape) for name in _PROJECTIONS)
        if not gate == up == (*down[:1], *down[:0:-1]):
            return f"its weights have shapes {gate}, {up} and {down}, which do not match"
    if isinstance(module, GroupedLinear) and module.need_backward_dw():
        return "a gradient of its weight waits for backward_dw()"
    return None


def instance_customization(module: nn.Module) -> str | None:
    """Return which customization of an instance a replacement would lose: hooks of torch, methods, a compiled call.

    `has_own_forward` checks the forward."""
    if parametrize.is_parametrized(module):
        return f"its {_listed(module.parametrizations)} is parametrized"
    if any(vars(part).get("_sharding") is not None for part in module.modules()):  # parallel.shards
        return "its weight is cut over ranks: call it before parallelize_module"
    if hooks := {text: None for name, text in _HOOKS.items() if getattr(module, name, None)}:
        return f"it has {' and '.join(hooks)}"
    if vars(module).get("_compiled_call_impl") is not None:
        return "it was compiled by its own compile()"
    patched = [name for name in vars(module) if name != "forward" and callable(getattr(type(module), name, None))]
    return f"its {_listed(patched)} is patched" if patched else None


def has_hook(module: nn.Module) -> bool:
    """True if accelerate has put a hook on a module."""
    return "_hf_hook" in vars(module)


def has_own_forward(module: nn.Module) -> bool:
    """True if a module runs the forward of its class, alone or inside of accelerate's hook."""
    forward = vars(module).get("forward")
    if has_hook(module) and forward is not None:
        hooked = isinstance(forward, functools.partial) and forward.args == (module,)
        if not hooked or getattr(forward.func, "__module__", None) != "accelerate.hooks":
            return False
        forward = vars(module).get("_old_forward")
    if forward is None:
        return True
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return False
    own: Any = type(module).forward  # may have been wrapped after the hook was added
    while own is not None and own is not forward.__func__:
        own = getattr(own, "__wrapped__", None)
    return own is not None


def copy_hook(module: nn.Module, other: nn.Module) -> None:
    """Copy accelerate's hook of another module, if it has one, to a module."""
    if has_hook(other):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(module, vars(other)["_hf_hook"])


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module; accelerate's hook on it then wraps the forward of that class.

    The module stays the same object, as in torch's `register_parametrization` and `fully_shard`: the model itself may
    be a linear, a stack knows its parts, and callers hold linears whose adapters come, merge and go.
    """
    old: Any = type(module)
    hook = vars(module).get("_hf_hook")
    if hook is None or old.forward is cls.forward or not has_own_forward(module):
        module.__class__ = cls
        return
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    remove_hook_from_module(module)
    vars(module).pop("forward", None)  # accelerate leaves the forward of the old class there
    module.__class__ = cls
    add_hook_to_module(module, hook)


def wrapped_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules inside of wrappers, which would keep using a replaced module, with the reason for users."""
    reasons: dict[nn.Module, str] = {}
    for parent in model.modules():
        kind = type(parent)
        if kind.__module__.partition(".")[0] == "peft":  # adds to the module's parameters by name, at every call
            reasons |= dict.fromkeys(parent.children(), f"a {kind.__name__} of PEFT wraps it: quantize_ before PEFT")
        elif kind.__module__.startswith("torch._dynamo") and kind.__name__ == "OptimizedModule":
            reasons |= dict.fromkeys(
                parent.children(), "torch.compile wraps it and calls what it was: compile afterwards"
            )
        elif kind.__module__ == "thunder.core.module":
            why = "thunder.jit has compiled a module that holds it and keeps what it saw: compile afterwards"
            reasons |= dict.fromkeys(parent.modules(), why)
    return reasons


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names)))

"""accelerate's hooks, which move activations between the devices of a model, kept when modules or their classes change.
Called by dense_linears, finetune and integrations.huggingface; imports accelerate where a module has such a hook.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from thunder_moe.quantization.replaceable import has_hook, has_own_forward

__all__ = ["HOOK_ATTRIBUTES", "copy_hook", "set_class"]

# The names that accelerate adds to a module's __dict__: the hook, and the forward that calls it.
HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def copy_hook(module: nn.Module, other: nn.Module) -> None:
    """Copies accelerate's hook of another module, if it has one, to a module."""
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

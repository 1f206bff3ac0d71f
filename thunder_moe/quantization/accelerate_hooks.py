"""accelerate's hooks, which move activations between the devices of a model, kept through a replacement of modules.
Called by dense_linears, finetune.lora and integrations.huggingface; imports accelerate where a module has such a hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from thunder_moe.quantization.replaceable import has_hook

__all__ = ["HOOK_ATTRIBUTES", "copy_hook", "unhooked"]

# The names that accelerate adds to a module's __dict__: the hook, and the forward that calls it.
HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def copy_hook(module: nn.Module, other: nn.Module) -> None:
    """Copies accelerate's hook of another module, if it has one, to a module."""
    if has_hook(other):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(module, vars(other)["_hf_hook"])


@contextlib.contextmanager
def unhooked(module: nn.Module) -> Iterator[None]:
    """Removes a module's hook and adds it again afterwards, so that it wraps the forward of a class set meanwhile."""
    hook = vars(module).get("_hf_hook")
    if hook is None:
        yield
        return
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    remove_hook_from_module(module)
    vars(module).pop("forward", None)  # accelerate leaves the forward of the old class there
    yield
    add_hook_to_module(module, hook)

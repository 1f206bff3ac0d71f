"""accelerate's hooks, with which a model on several devices carries its activations about, through a swap of modules.
Called by experts and families; imports accelerate where a module has such a hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from thunder_moe.replaceable import has_hook

__all__ = ["HOOK_ATTRIBUTES", "hook_alike", "unhooked"]

# What accelerate puts into a module's __dict__: the hook, and what wraps the forward in it.
HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def hook_alike(module: nn.Module, other: nn.Module) -> None:
    """Gives a module the hook of another one, if that has one."""
    if has_hook(other):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(module, vars(other)["_hf_hook"])


@contextlib.contextmanager
def unhooked(module: nn.Module) -> Iterator[None]:
    """Takes a module's hook off and puts it on again, so that it wraps the forward of a class that has changed."""
    hook = vars(module).get("_hf_hook")
    if hook is None:
        yield
        return
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    remove_hook_from_module(module)
    vars(module).pop("forward", None)  # accelerate leaves the old class' forward there
    yield
    add_hook_to_module(module, hook)

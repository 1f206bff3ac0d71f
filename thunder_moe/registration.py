"""`register` and `unregister`: this package's entries in the registries of torch.compile, Thunder and transformers.
Called by users, and by `import thunder_moe` for the packages that are imported already; calls compilers.thunder_compat
and integrations.huggingface.quantizer, which import Thunder and transformers.

docs/changes.md lists every entry, and all that is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable

_COMPAT = "thunder_moe.compilers.thunder_compat"
_QUANTIZER = "thunder_moe.integrations.huggingface.quantizer"  # importing it adds the entries in transformers


def register(*packages: str) -> contextlib.ExitStack:
    """Import torch.compile, Thunder and transformers, and add this package's entries to their registries.

    - torch.compile knows the backend "thunder_moe" (the entry point of an installed thunder_moe has the same effect).
    - Thunder is imported, like by ``from thunder_moe import moe_executor``, and knows the plugin "nvfp4-moe".
    - transformers knows ``experts_implementation="thunder_moe"``, ``attn_implementation="thunder_moe_sdpa"`` and the
      checkpoints that `save_checkpoint` writes; ``from_pretrained`` reads NVFP4 and MXFP8 checkpoints of
      compressed-tensors by this package's reader, which replaces transformers' own until `unregister`.

    Calling it again changes nothing. ``with thunder_moe.register("transformers"): ...`` unregisters at the end of the
    block, unless an earlier call had registered the reader.

    Args:
        *packages: "torch", "thunder" or "transformers"; without any, all of these that are installed.

    Raises:
        ValueError: a package is not one of these.
        ImportError: a named package is missing or too old, or an earlier import of Thunder has failed.
    """
    if unknown := [package for package in packages if package not in tuple(_REGISTER)]:
        raise ValueError(f"packages: got {unknown[0]!r}, wanted some of {tuple(_REGISTER)}")
    undo = contextlib.ExitStack()
    for package in packages or [name for name in _REGISTER if _is_installed(name)]:
        if _REGISTER[package]():
            undo.callback(unregister)
    return undo


def unregister() -> None:
    """Restore transformers' own reader of compressed-tensors checkpoints, which `register` has replaced.

    Entries under this package's own names stay; they act only for users who ask for them by name.
    """
    if _QUANTIZER in sys.modules:
        importlib.import_module(_QUANTIZER).unregister()


def on_import() -> None:
    """Add this package's own entries to packages that are imported already.

    The environment variable THUNDER_MOE_AUTO_REGISTER changes that: "0" adds none, "1" calls `register`."""
    switch = os.environ.get("THUNDER_MOE_AUTO_REGISTER")
    if switch == "1":
        register()
    elif switch != "0":
        if "torch._dynamo.backends.registry" in sys.modules:
            _add_backend()
        # Too old, or another package of that name: `register` says so to who asks for it.
        with contextlib.suppress(ImportError):
            if sys.modules.get("thunder") is not None:
                importlib.import_module(_COMPAT).add_plugin()
        with contextlib.suppress(ImportError):
            if sys.modules.get("transformers") is not None:
                importlib.import_module(_QUANTIZER)


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _add_backend() -> bool:
    """Add the entry point that an installed package declares, for a source tree that is not installed.

    Dynamo loads it when the backend is first used, and replaces it by the entry point of an installed package."""
    from importlib.metadata import EntryPoint

    from torch._dynamo.backends import registry

    value, group = "thunder_moe.compilers.dynamo.backend:thunder_moe_backend", "torch_dynamo_backends"
    registry._BACKENDS.setdefault("thunder_moe", EntryPoint("thunder_moe", value, group))
    return False


def _import_thunder() -> bool:
    importlib.import_module(_COMPAT).import_thunder()
    return False


def _register_reader() -> bool:
    replaced: bool = importlib.import_module(_QUANTIZER).register()
    return replaced


# Package -> function that adds this package's entries to it; returns True if `unregister` has something to restore.
_REGISTER: dict[str, Callable[[], bool]] = {
    "torch": _add_backend,
    "thunder": _import_thunder,
    "transformers": _register_reader,
}

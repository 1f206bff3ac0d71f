"""`register` and `unregister`: this package's entries in the registries of torch.compile, Thunder and transformers.
Called by users, and by `import thunder_moe` for the packages that are imported already; calls compilers.thunder.compat
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

__all__ = ["on_import", "register", "unregister"]

_COMPAT = "thunder_moe.compilers.thunder.compat"
_QUANTIZER = "thunder_moe.integrations.huggingface.quantizer"  # importing it adds the entries in transformers


def register(*packages: str) -> contextlib.ExitStack:
    """Import torch.compile, Thunder and transformers, make this package known to them, and read their checkpoints.

    - torch.compile knows the backend "thunder_moe" (which the entry point of an installed thunder_moe does anyway).
    - Thunder is imported as ``from thunder_moe import moe_executor`` does it, and knows the plugin "nvfp4-moe".
    - transformers knows ``experts_implementation="thunder_moe"``, ``attn_implementation="thunder_moe_sdpa"`` and the
      checkpoints that `save_checkpoint` writes; ``from_pretrained`` reads NVFP4 and MXFP8 checkpoints of
      compressed-tensors by this package's reader, which replaces transformers' own until `unregister`.

    Calling it again does nothing more. ``with thunder_moe.register("transformers"): ...`` unregisters at the end of the
    block, unless an earlier call had registered the reader.

    Args:
        *packages: "torch", "thunder" or "transformers"; none: those that are installed.

    Raises:
        ValueError: another package.
        ImportError: a package that is named is missing or too old, or an earlier import of Thunder has failed.
    """
    if unknown := [package for package in packages if package not in tuple(_REGISTER)]:
        raise ValueError(f"packages: got {unknown[0]!r}, wanted some of {tuple(_REGISTER)}")
    undo = contextlib.ExitStack()
    for package in packages or [name for name in _REGISTER if _is_installed(name)]:
        if _REGISTER[package]():
            undo.callback(unregister)
    return undo


def unregister() -> None:
    """Give transformers back what `register` has replaced: its own reader of compressed-tensors checkpoints.

    Entries of this package's own names stay; they serve nobody who does not ask for them.
    """
    if _QUANTIZER in sys.modules:
        importlib.import_module(_QUANTIZER).unregister()


def on_import() -> None:
    """Add this package's own entries to packages that are imported already. THUNDER_MOE_AUTO_REGISTER in the
    environment: "0" adds none, "1" calls `register`."""
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

    It is loaded when the backend is first asked for. Dynamo puts an installed package's own in its place."""
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


# Package -> what makes this package known to it; True if that has replaced something that `unregister` gives back.
_REGISTER: dict[str, Callable[[], bool]] = {
    "torch": _add_backend,
    "thunder": _import_thunder,
    "transformers": _register_reader,
}

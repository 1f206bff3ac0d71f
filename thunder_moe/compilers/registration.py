"""Makes `import thunder` work and torch.compile know the backend "thunder_moe", and imports neither of them early.
Called by thunder_moe on import; calls compat while Thunder is imported, and writes to dynamo's list of backends.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType

from thunder_moe.import_hooks import after_import, around_import

__all__ = ["install"]


def install() -> None:
    """Cures Thunder's import, whoever imports it; registers the backend once dynamo has its registry."""
    around_import("thunder", _import_thunder)
    after_import("torch._dynamo.backends.registry", _register_backend)


def _import_thunder(_: ModuleType) -> contextlib.AbstractContextManager:
    return importlib.import_module("thunder_moe.compilers.thunder.compat").importing_thunder()


def _register_backend(registry: ModuleType) -> None:
    """Adds the entry point that an installed package declares, for a source tree that is not installed.

    It is loaded when the backend is first asked for. Dynamo puts an installed package's own in its place."""
    from importlib.metadata import EntryPoint

    value, group = "thunder_moe.compilers.dynamo.backend:thunder_moe_backend", "torch_dynamo_backends"
    registry._BACKENDS.setdefault("thunder_moe", EntryPoint("thunder_moe", value, group))

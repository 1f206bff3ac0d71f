"""What `import thunder_moe` registers with Thunder and torch.compile, whichever is imported first; it imports neither.
Called by thunder_moe on import; calls compilers.thunder.compat while Thunder is imported.

| registered | where | loaded |
|---|---|---|
| backend "thunder_moe" | torch.compile's list of backends | when a torch.compile asks for it |
| plugin "nvfp4-moe" | Thunder's list of plugins | when a thunder.compile asks for it |
| cures of Thunder 0.2.6 | the table in compilers/thunder/compat.py | when somebody imports thunder |

What integrations/huggingface/registration.py registers with transformers comes beside it. With
THUNDER_MOE_AUTO_REGISTER=0 in the environment, `import thunder_moe` registers nothing; `install()` does it later, and
``from thunder_moe import moe_executor`` does all that Thunder needs.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType
from typing import Any

from thunder_moe.import_hooks import after_import, around_import

__all__ = ["PLUGIN", "install", "register_plugin"]

PLUGIN = "nvfp4-moe"


def install() -> None:
    """Register the backend and the plugin, and cure Thunder's import, whoever imports it."""
    around_import("thunder", _import_thunder)
    after_import("torch._dynamo.backends.registry", _register_backend)
    register_plugin()


def register_plugin() -> None:
    """Make ``thunder.compile(model, plugins="nvfp4-moe")`` known."""
    after_import("thunder.plugins", lambda plugins: plugins.register_plugin(PLUGIN, _make_plugin))


def _make_plugin() -> Any:
    # Thunder calls what is registered, its classes, without arguments.
    return importlib.import_module("thunder_moe.compilers.thunder.plugin").NVFP4MoE()


def _import_thunder(_: ModuleType) -> contextlib.AbstractContextManager[None]:
    context: contextlib.AbstractContextManager[None] = importlib.import_module(
        "thunder_moe.compilers.thunder.compat"
    ).importing_thunder()
    return context


def _register_backend(registry: Any) -> None:
    """Add the entry point that an installed package declares, for a source tree that is not installed.

    It is loaded when the backend is first asked for. Dynamo puts an installed package's own in its place."""
    from importlib.metadata import EntryPoint

    value, group = "thunder_moe.compilers.dynamo.backend:thunder_moe_backend", "torch_dynamo_backends"
    registry._BACKENDS.setdefault("thunder_moe", EntryPoint("thunder_moe", value, group))

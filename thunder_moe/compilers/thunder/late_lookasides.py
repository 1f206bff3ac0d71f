"""`LateLookasides`: an executor of Thunder that has lookasides for functions of transformers once these are imported.
The base of `MoEExecutor` (symbols); imports the thunder_* modules of integrations.huggingface.

`thunder.jit` reads an executor's lookasides when it is called, and by then the model's own modules are imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from thunder.extend import OperatorExecutor

__all__ = ["LateLookasides"]

# A module of transformers -> the module that has `LOOKASIDES` for it. By name: neither is imported early.
_MODULES = {
    "transformers.models.llama4.modeling_llama4": "thunder_moe.integrations.huggingface.thunder_llama4",
    "transformers.utils.output_capturing": "thunder_moe.integrations.huggingface.thunder_outputs",
    "transformers.cache_utils": "thunder_moe.integrations.huggingface.thunder_cache",
}


class LateLookasides(OperatorExecutor):
    """An operator executor whose `_lookasides` are completed whenever Thunder reads them."""

    _added: dict[Any, Callable[..., Any]]

    @property
    def _lookasides(self) -> dict[Any, Callable[..., Any]]:
        for theirs, ours in _MODULES.items():
            if theirs in sys.modules:
                self._added.update(importlib.import_module(ours).LOOKASIDES)
        return self._added

    @_lookasides.setter
    def _lookasides(self, lookasides: dict[Any, Callable[..., Any]]) -> None:
        self._added = lookasides

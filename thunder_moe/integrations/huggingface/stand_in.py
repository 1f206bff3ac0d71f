"""`StandIn`: what transformers finds as a quantization config class until the first checkpoint needs the real one.
Made by registration, withdrawn by quantizer; calls what it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["StandIn"]


class StandIn:
    """In the place of a quantization config class of transformers; imports the quantizer when a checkpoint is met.

    Args:
        mapping: transformers' registry of those classes.
        method: the key there.
        load: imports what registers the real class, and withdraws this.
    """

    def __init__(self, mapping: dict[str, Any], method: str, load: Callable[[], None]) -> None:
        self.mapping, self.method, self.load = mapping, method, load
        self.original = mapping.get(method)

    def from_dict(self, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        self.load()
        return self.mapping[self.method].from_dict(config_dict, **kwargs)

    def withdraw(self) -> None:
        """Puts back what was there."""
        if self.original is None:
            del self.mapping[self.method]
        else:
            self.mapping[self.method] = self.original

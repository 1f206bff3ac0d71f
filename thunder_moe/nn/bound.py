"""`Bound`: the kernels that a module has bound to its tensors, for eager inference without the operators' host time.
Called by linear and by integrations.huggingface; what it holds comes from kernels.cuda.bound.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Bound"]


class Bound:
    """A place beside a module for what it has bound. A copy of the module, or one that is loaded, binds anew.

    Attributes:
        kernels: None, or what the module keeps there, which it replaces as a whole: threads may share it.
    """

    __slots__ = ("kernels",)

    def __init__(self) -> None:
        self.kernels: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Bound, ()

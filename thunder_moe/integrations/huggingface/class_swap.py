"""`OtherForward`: another forward for a module of transformers, in place and with a way back.
Base of `FusedRouter`, `FusedNorm` and Llama 4's routed layer and router; calls accelerate_hooks.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from thunder_moe.quantization.accelerate_hooks import unhooked

__all__ = ["OtherForward"]


class OtherForward(nn.Module):
    """Base of classes whose forward takes the place of a module's own, which it can call as ``super().forward``.

    `put_on` changes the class of the module to a subclass of its own class, as torch's parametrizations and
    fully_shard do. The module stays the same object, with its place in every parent, its ties, hooks, parameters and
    names in the state dict, and isinstance holds. A new module in its place would lose the references of others, and
    a model that is one norm has no parent to put it into. A forward set on the instance would read the tensors of the
    module that it was made for even in a copy that got others (DataParallel's replicas).

    Attributes:
        own_class: the module's class without it.
        added: names of the attributes that `take_off` deletes.
    """

    own_class: type[nn.Module]
    added: tuple[str, ...] = ()

    @classmethod
    def put_on(cls, module: nn.Module, **attributes: Any) -> None:
        """Give a module this forward, and attributes that it reads."""
        if not cls.is_on(module):
            forward: Any = cls
            kind: Any = type(module)
            with unhooked(module):
                module.__class__ = _class_of(forward, kind)
        vars(module).update(attributes)

    @classmethod
    def is_on(cls, module: nn.Module) -> bool:
        """True if a module has this forward; False also if somebody has made a class of that class."""
        forward: Any = cls
        kind: Any = type(module)
        return issubclass(kind, cls) and kind is _class_of(forward, kind.own_class)

    @classmethod
    def take_off(cls, module: nn.Module) -> None:
        """Undo `put_on`; leave any other module as it is."""
        if cls.is_on(module):
            kind: Any = type(module)
            for name in cls.added:
                vars(module).pop(name, None)
            with unhooked(module):
                module.__class__ = kind.own_class

    def __reduce_ex__(self, protocol: Any) -> Any:
        forward = next(cls for cls in type(self).__mro__ if OtherForward in cls.__bases__)
        return _unpickled, (forward, self.own_class), self.__dict__


@functools.cache
def _class_of(forward: Any, own_class: Any) -> Any:
    """Return the subclass of both; `forward` itself if it is one."""
    if issubclass(forward, own_class):
        return forward
    return type(f"Fused{own_class.__name__}", (forward, own_class), {"own_class": own_class, "__module__": __name__})


def _unpickled(forward: Any, own_class: Any) -> Any:
    kind = _class_of(forward, own_class)
    return kind.__new__(kind)

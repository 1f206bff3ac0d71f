"""`OtherMethods`: other methods for a module of transformers, in place and with a way back.
Base of `QuantizedModel`, `FusedRouter`, `FusedNorm` and Llama 4's routed layer and router; calls replaceable.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from thunder_moe.quantization.replaceable import set_class


class OtherMethods(nn.Module):
    """Base of classes whose methods take the place of a module's own, which they can call by ``super()``.

    `put_on` changes the class of the module to a subclass of its own class, as torch's parametrizations and
    fully_shard do. The module stays the same object, with its place in every parent, its ties, hooks, parameters and
    names in the state dict, and isinstance holds. A new module in its place would lose the references of others, and
    a model that is one norm lacks a parent to put it into. A forward set on the instance would read the tensors of the
    module that it was made for even in a copy that got others (DataParallel's replicas).
    """

    own_class: type[nn.Module]  # the module's class without it
    prefix = "Fused"  # of the new class's name; "": it has the name and the module of the module's own class
    added: tuple[str, ...] = ()  # names of the attributes that `take_off` deletes

    @classmethod
    def put_on(cls, module: nn.Module, **attributes: Any) -> None:
        """Give a module these methods, and attributes that they read."""
        if not cls.is_on(module):
            methods: Any = cls
            kind: Any = type(module)
            set_class(module, _class_of(methods, kind))
        vars(module).update(attributes)

    @classmethod
    def is_on(cls, module: nn.Module) -> bool:
        """True if a module has these methods; False also if somebody has made a class of its class."""
        methods: Any = cls
        kind: Any = type(module)
        return issubclass(kind, cls) and kind is _class_of(methods, kind.own_class)

    @classmethod
    def take_off(cls, module: nn.Module) -> None:
        """Undo `put_on`; leave any other module unchanged."""
        if cls.is_on(module):
            kind: Any = type(module)
            for name in cls.added:
                vars(module).pop(name, None)
            set_class(module, kind.own_class)

    def __reduce_ex__(self, protocol: Any) -> Any:
        methods = next(cls for cls in type(self).__mro__ if cls.__bases__[0] is OtherMethods)
        return _unpickled, (methods, self.own_class), *super().__reduce_ex__(protocol)[2:]


@functools.cache
def _class_of(methods: Any, own_class: Any) -> Any:
    """Return the subclass of both; `methods` itself if it is one."""
    if issubclass(methods, own_class):
        return methods
    members = {"own_class": own_class, "__module__": __name__}
    if not methods.prefix:
        members |= {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
    return type(f"{methods.prefix}{own_class.__name__}", (methods, own_class), members)


def _unpickled(methods: Any, own_class: Any) -> Any:
    kind = _class_of(methods, own_class)
    return kind.__new__(kind)

"""Runs code around the first import of another package's module, without importing that module early.
Called by compilers/registration.py, compilers/thunder/compat.py and integrations/huggingface/registration.py; calls
nothing of the package.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["after_import", "around_import"]


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Runs `action` on a module: now if it is imported, else right after somebody imports it."""

    @contextlib.contextmanager
    def then_act(module: ModuleType) -> Iterator[None]:
        yield
        action(module)

    if name in sys.modules:
        action(sys.modules[name])
    else:
        around_import(name, then_act)


def around_import(name: str, context: Callable[[ModuleType], contextlib.AbstractContextManager[Any]]) -> None:
    """Executes a module under `context(module)` when somebody imports it; nothing happens if it is imported already."""
    if name not in sys.modules:
        finder: Any = _Finder(name, context)  # without importlib.abc, whose import takes longer than this package's
        sys.meta_path.insert(0, finder)


class _Finder:
    """A finder of one module: asks the finders behind it, executes the module under a context, removes itself."""

    def __init__(self, name: str, context: Callable[[ModuleType], contextlib.AbstractContextManager[Any]]) -> None:
        self.name, self.context = name, context

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        finders: list[Any] = sys.meta_path
        for finder in finders[finders.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _Loader(spec.loader, self)
                    spec.loader = loader
                return spec
        return None


class _Loader:
    """A module's own loader, which executes the module under the finder's context."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self.loader, self.finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        with self.finder.context(module):
            self.loader.exec_module(module)
        finders: list[Any] = sys.meta_path
        if self.finder in finders:  # whoever only asks for the spec, or fails to import the module, leaves it there
            finders.remove(self.finder)

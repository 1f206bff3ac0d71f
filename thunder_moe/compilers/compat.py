"""Cures for Thunder 0.2.6 on newer torch, each with the version that makes it unnecessary.
Called by compilers.registration when somebody imports thunder, by the modules that need it, and by the torch.compile
backend; calls nothing of the package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["alias_nvfuser", "import_thunder", "importing_thunder", "thunderfx_compile"]

_REMOVED_TENSOR_METHODS = ("rename", "has_names", "refine_names", "align_to", "align_as")


def import_thunder() -> None:
    """Imports Thunder.

    Raises:
        ImportError: lightning-thunder is missing, and the message names the extra to install; or an earlier import of
            it has failed.
    """
    try:
        import thunder  # noqa: F401  (under importing_thunder: compilers/registration.py)
    except ModuleNotFoundError as error:
        if error.name != "thunder":
            raise
        raise ImportError("moe_executor needs lightning-thunder: pip install 'thunder_moe[thunder]'") from error
    alias_nvfuser()


@contextlib.contextmanager
def importing_thunder() -> Iterator[None]:
    """What Thunder's own modules need of torch while they are imported; torch is as it was afterwards.

    Raises:
        ImportError: an earlier import of Thunder has failed.
    """
    if any(name.startswith("thunder.") for name in sys.modules):
        raise ImportError(
            "an earlier `import thunder` failed in this process and left half of its modules behind: start a new "
            "process and import thunder_moe before thunder, which makes it work on this version of torch"
        )
    with _removed_tensor_methods(), _apply_as_python_method(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformer_engine module not found")
        yield
    alias_nvfuser()


@contextlib.contextmanager
def _removed_tensor_methods() -> Iterator[None]:
    """Thunder 0.2.6 lists some Tensor methods by name that torch 2.13 removed (named tensors).
    Unnecessary from the first Thunder release that imports on torch 2.13."""
    missing = [name for name in _REMOVED_TENSOR_METHODS if not hasattr(torch.Tensor, name)]
    for name in missing:
        setattr(torch.Tensor, name, _removed(name))
    try:
        yield
    finally:
        for name in missing:
            delattr(torch.Tensor, name)


@contextlib.contextmanager
def _apply_as_python_method() -> Iterator[None]:
    """From torch 2.14 on `autograd.Function.apply` is a method written in C, without the `__func__` that Thunder 0.2.6
    reads when it is imported. Unnecessary from the first Thunder release that imports on torch 2.14.

    Models that call an `autograd.Function` of their own still cannot be traced by Thunder 0.2.6 on torch 2.14."""
    function = torch.autograd.Function
    if hasattr(function.apply, "__func__"):
        yield
        return
    original = function.__dict__["apply"]
    function.apply = classmethod(lambda cls, *args, **kwargs: original.__get__(None, cls)(*args, **kwargs))  # type: ignore
    try:
        yield
    finally:
        function.apply = original  # type: ignore[method-assign]


def thunderfx_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], executor: Any) -> tuple[Any, Callable]:
    """(thunderfx's compiler, what it made of the graph), with an executor before Thunder's own.

    From torch 2.12 on Thunder 0.2.6 traces into the lazy recompilation of dynamo's graph modules and fails: force it
    first, and have none made inside. Unnecessary from the first Thunder release whose thunderfx runs on torch 2.12."""
    import thunder
    from thunder.dynamo import ThunderCompiler
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

    compiler = ThunderCompiler(executors=[executor, *thunder.get_default_executors()])
    _LazyGraphModule.force_recompile(gm)
    with _use_lazy_graph_module(False):
        return compiler, compiler(gm, inputs)


def alias_nvfuser() -> None:
    """nvFuser wheels from 0.2.36 on have the package `nvfuser_direct` alone, from which Thunder 0.2.6 imports all but
    one function. Unnecessary from the first Thunder release that takes `compute_tensor_descriptor` from there too."""
    direct = sys.modules.get("nvfuser_direct")
    if direct is None or "nvfuser" in sys.modules or importlib.util.find_spec("nvfuser") is not None:
        return
    alias = types.ModuleType("nvfuser", "compute_tensor_descriptor of nvfuser_direct, where Thunder 0.2.6 looks for it")
    alias.compute_tensor_descriptor = direct.compute_tensor_descriptor  # type: ignore[attr-defined]
    sys.modules["nvfuser"] = alias


def _removed(name: str):
    def method(self, *args, **kwargs):
        raise RuntimeError(f"Tensor.{name}: named tensors were removed from torch {torch.__version__}")

    method.__name__ = name
    method.__qualname__ = f"Tensor.{name}"
    return method

"""Cures for Thunder 0.2.6 on newer torch, each with the version that makes it unnecessary.
Called by compilers.registration when somebody imports thunder, by the modules that need it, and by the torch.compile
backend; calls nothing of the package but report, for its warning.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder_moe.compilers.report import RewriteWarning

__all__ = [
    "alias_nvfuser",
    "import_thunder",
    "importing_thunder",
    "put_first",
    "refuse_delayed_changes",
    "thunderfx_compile",
]

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


def put_first(compile_data: Any, transform: Any) -> None:
    """Makes a transform the first of a compilation that is under way, if it is none of it yet.

    Thunder 0.2.6 goes through the list that the user gave to `thunder.jit`, which is not ours to change: its function
    gets a copy. Unnecessary from the first Thunder release in which an executor brings its own transforms."""
    if transform in compile_data.transforms:
        return
    function = compile_data.apply_transforms_and_build_cache_entry
    cell = function.__closure__[function.__code__.co_freevars.index("transforms")]
    compile_data.transforms = cell.cell_contents = [transform, *compile_data.transforms]


def without_gradient(proxy: Any) -> Any:
    """A proxy of the same name that requires no gradient. Thunder's own copies get names of their own."""
    if not getattr(proxy, "requires_grad", False):
        return proxy
    frozen = copy.copy(proxy)
    frozen._requires_grad = False
    return frozen


def refuse_delayed_changes(backward_trace: Any) -> None:
    """Thunder 0.2.6 moves in-place operations of the forward whose result nobody reads (a write to a slice of an
    argument, at the end) to the backward. Unnecessary from the first Thunder release that keeps them in the forward.

    Raises:
        NotImplementedError: a forward's change is among the backward's symbols.
    """
    from thunder.core.symbol import BoundSymbolTag

    for bsym in backward_trace.bound_symbols:
        if bsym.sym.name == "copy_" and BoundSymbolTag.BACKWARD not in bsym.tags:
            raise NotImplementedError(
                "Thunder makes an in-place change of the traced function in its backward instead of its forward: "
                "return the changed tensor, make the change outside of the function, or call it under torch.no_grad()"
            )


def thunderfx_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], executor: Any) -> tuple[Any, Callable]:
    """(thunderfx's compiler, what it made of the graph), with an executor before Thunder's own.

    From torch 2.12 on Thunder 0.2.6 traces into the lazy recompilation of dynamo's graph modules and fails: force it
    first, and have none made inside. Unnecessary from the first Thunder release whose thunderfx runs on torch 2.12."""
    import thunder
    from thunder.dynamo import ThunderCompiler
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

    compiler = ThunderCompiler(executors=[executor, *thunder.get_default_executors()])
    _LazyGraphModule.force_recompile(gm)
    with _use_lazy_graph_module(False), _grouped_mm_is_supported(gm):
        return compiler, compiler(gm, inputs)


@contextlib.contextmanager
def _grouped_mm_is_supported(gm: torch.fx.GraphModule) -> Iterator[None]:
    """thunderfx tries Thunder's own symbol for grouped_mm, with its gradient, which that one lacks in 0.2.6: graphs
    that need gradients would go to inductor without a word. The executor has a gradient, so its calls are supported,
    but in checkpoints, where thunderfx replaces calls of torch by Thunder's own symbols: those go to inductor.
    Unnecessary from the first Thunder release whose grouped_mm has a gradient."""
    import thunder.dynamo.utils as fx_utils

    functions, try_symbol = (torch._grouped_mm, torch.nn.functional.grouped_mm), fx_utils.try_execute_thunder_symbol
    nested = [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule) and module is not gm]
    checkpointed = any(node.target in functions for module in nested for node in module.graph.nodes)

    def try_execute(symbol: Any, node: torch.fx.Node, options: dict[str, Any]) -> tuple[bool, Any]:
        if node.target not in functions:
            return try_symbol(symbol, node, options)
        given: dict[str, Any] = dict(zip(("mat_a", "mat_b", "offs", "bias"), node.args, strict=False)) | node.kwargs
        operands = (given[name].meta.get("example_value") for name in ("mat_a", "mat_b"))
        dims = [getattr(operand, "ndim", None) for operand in operands]
        if dims == [2, 3] and given.get("offs") is not None and given.get("bias") is None and not checkpointed:
            return True, None
        reason = "moe_executor takes 2-D rows, 3-D weights, offsets and no bias, in graphs without checkpointed ones"
        return False, fx_utils.SplitReason(fx_utils.SplitReasonType.MISSING_OP_SUPPORT, reason)

    if checkpointed:
        warnings.warn(
            "thunder_moe rewrote no expert GEMM to NVFP4: thunderfx leaves those of torch.utils.checkpoint, and their "
            'whole graph, to inductor; use the backend\'s own "thunder_moe.inner", or thunder.jit',
            RewriteWarning,
            stacklevel=3,
        )
    fx_utils.try_execute_thunder_symbol = try_execute
    try:
        yield
    finally:
        fx_utils.try_execute_thunder_symbol = try_symbol


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

"""Changes Thunder 0.2.6, or torch for Thunder; each function says why, and until which release.
Called by thunder_moe.registration and by compilers.thunder and its modules; calls nothing of the package.
docs/changes.md has the table.

`import_thunder` is called by ``from thunder_moe import moe_executor`` and ``thunder_moe.register("thunder")``, never by
``import thunder_moe`` alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

PLUGIN = "nvfp4-moe"
_REMOVED_TENSOR_METHODS = ("rename", "has_names", "refine_names", "align_to", "align_as")


def import_thunder() -> None:
    """Import Thunder, and make the changes in it that stay.

    Raises:
        ImportError: lightning-thunder is missing, and the message names the extra to install; or an earlier import of
            it has failed.
    """
    try:
        with contextlib.nullcontext() if "thunder" in sys.modules else _importing_thunder():
            import thunder  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "thunder":
            raise
        raise ImportError("moe_executor needs lightning-thunder: pip install 'thunder_moe[thunder]'") from error
    alias_nvfuser()  # each time: nvFuser may have been imported in between
    add_plugin()
    _cure_recipes()


def add_plugin() -> None:
    """Make ``thunder.compile(model, plugins="nvfp4-moe")`` known to Thunder, which has been imported."""
    from thunder.plugins import register_plugin

    # Thunder calls what is registered, its classes, without arguments.
    register_plugin(PLUGIN, lambda: importlib.import_module("thunder_moe.compilers.thunder.executor").NVFP4MoE())


@contextlib.contextmanager
def _importing_thunder() -> Iterator[None]:
    """Change in torch what Thunder's modules need while they are imported; undo the changes afterwards.

    Raises:
        ImportError: an earlier import of Thunder has failed.
    """
    if any(name.startswith("thunder.") for name in sys.modules):
        raise ImportError(
            "an earlier `import thunder` failed in this process and left half of its modules behind: start a new "
            "process and write `from thunder_moe import moe_executor` before `import thunder`, which makes Thunder "
            "work on this version of torch"
        )
    with _removed_tensor_methods(), _apply_as_python_method(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformer_engine module not found")
        yield


@functools.cache
def _cure_recipes() -> None:
    import thunder.recipes.base
    import thunder.recipes.hf_transformers

    _recipe_without_nvfuser(thunder.recipes.base)
    _recipe_on_transformers_5(thunder.recipes.hf_transformers)


@contextlib.contextmanager
def _removed_tensor_methods() -> Iterator[None]:
    """Add the Tensor methods that Thunder 0.2.6 lists by name and torch 2.13 removed (named tensors).
    Unnecessary from the first Thunder release that imports on torch 2.13."""
    missing = [name for name in _REMOVED_TENSOR_METHODS if not hasattr(torch.Tensor, name)]
    for name in missing:

        def method(self: torch.Tensor) -> None:
            """Stand for a method that is gone when somebody could call it."""

        method.__name__ = name  # Thunder's for its symbol
        setattr(torch.Tensor, name, method)
    try:
        yield
    finally:
        for name in missing:
            delattr(torch.Tensor, name)


@contextlib.contextmanager
def _apply_as_python_method() -> Iterator[None]:
    """Make `autograd.Function.apply` a Python method, with the `__func__` that Thunder 0.2.6 reads when it is imported.

    From torch 2.14 on it is a method written in C. Unnecessary from the first Thunder release that imports on torch
    2.14. Models that call an `autograd.Function` of their own still cannot be traced by Thunder 0.2.6 on torch 2.14."""
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


def _recipe_without_nvfuser(recipes: Any) -> None:
    """Drop the executor None from Thunder 0.2.6's default recipe, which fails on it if nvFuser is not installed.
    Unnecessary from the first Thunder release whose default recipe runs without nvFuser."""
    original = recipes.BaseRecipe.setup_executors

    @functools.wraps(original)
    def setup_executors(self: Any) -> list[Any]:
        return [executor for executor in original(self) if executor is not None]

    recipes.BaseRecipe.setup_executors = setup_executors


def _recipe_on_transformers_5(recipes: Any) -> None:
    """Have Thunder 0.2.6's recipe for Hugging Face replace no mask function on transformers 5, as before 4.55.
    It replaces `sdpa_mask_recent_torch`, which transformers 5 no longer has; Thunder can trace its masks.
    Unnecessary from the first Thunder release whose recipe takes transformers 5."""
    original = recipes.SDPAMaskTransform.__init__

    @functools.wraps(original)
    def init(self: Any) -> None:
        import thunder.extend
        import transformers.masking_utils

        if hasattr(transformers.masking_utils, "sdpa_mask_recent_torch"):
            original(self)
        else:
            self.executor = thunder.extend.OperatorExecutor("sdpa_mask_transform_ex")
            thunder.extend.register_executor(self.executor)

    recipes.SDPAMaskTransform.__init__ = init


def with_python_types(name: str) -> Callable[..., Any]:
    """Return a function of thunder.torch that makes tensors and takes a Python type as the dtype. Thunder 0.2.6 passes
    such a type to code that knows only Thunder's dtypes. Unnecessary from the first Thunder release that takes it."""
    by_type = {bool: torch.bool, int: torch.int64, float: torch.float64}

    def make(*args: Any, dtype: Any = None, **options: Any) -> Any:
        import thunder.torch as ltorch

        return getattr(ltorch, name)(*args, dtype=by_type.get(dtype, dtype), **options)

    return make


def scaled_dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Return torch's attention for Thunder's traces. Thunder 0.2.6 has no `enable_gqa`: here each head of the keys and
    values is repeated for the query heads that share it. Unnecessary from the first Thunder release that has it."""
    import thunder.torch as ltorch

    if options.pop("enable_gqa", False):
        key, value = (_repeated_heads(tensor, query.shape[-3] // tensor.shape[-3]) for tensor in (key, value))
    return ltorch.scaled_dot_product_attention(query, key, value, *args, **options)


def _repeated_heads(tensor: Any, times: int) -> Any:
    """Repeat heads: (..., heads, rows, width) -> (..., heads * times, rows, width)."""
    import thunder.torch as ltorch

    if times == 1:
        return tensor
    *batch, heads, rows, width = tensor.shape
    wide = ltorch.expand(ltorch.unsqueeze(tensor, -3), *batch, heads, times, rows, width)
    return ltorch.reshape(wide, *batch, heads * times, rows, width)


def put_first(compile_data: Any, transform: Any) -> None:
    """Make a transform the first of a running compilation, if the compilation does not have it yet.

    Thunder 0.2.6 iterates over the list that the user gave to `thunder.jit`. That list must not change, so Thunder's
    function gets a copy. Unnecessary from the first Thunder release in which an executor brings its own transforms."""
    if transform in compile_data.transforms:
        return
    function = compile_data.apply_transforms_and_build_cache_entry
    cell = function.__closure__[function.__code__.co_freevars.index("transforms")]
    compile_data.transforms = cell.cell_contents = [transform, *compile_data.transforms]


def without_gradient(proxy: Any) -> Any:
    """Return a proxy of the same name that requires no gradient. Thunder's own copies get names of their own."""
    if not getattr(proxy, "requires_grad", False):
        return proxy
    frozen = copy.copy(proxy)
    frozen._requires_grad = False
    return frozen


def refused_dtensors() -> dict[Any, Callable[..., Any]]:
    """Return lookasides that refuse to trace DTensors. On torch 2.13, Thunder 0.2.6 ends the process or fails in its
    interpreter when it traces them. Unnecessary from the first Thunder release that traces DTensors there."""
    if not torch.distributed.is_available() or torch.__version__ < "2.13":
        return {}
    from torch.distributed.tensor import DTensor

    def refuse(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            "DTensor.from_local (torch's ColwiseParallel and RowwiseParallel call it): Thunder 0.2.6 cannot trace it on"
            " torch 2.13 and newer; shard by thunder_moe.parallel, which computes with local tensors"
        )

    return {DTensor.from_local: refuse}


def refuse_changes_in_graphs(transforms: Sequence[Any], written: Sequence[Any]) -> None:
    """Refuse in-place changes of arguments inside Thunder's CUDA graphs (NotImplementedError). Thunder 0.2.6 captures a
    graph of copies of the arguments, and loses changes of the copies. It does not copy parameters and buffers, and
    changes them in three runs before the capture. Unnecessary from the first Thunder release whose graphs keep such
    changes."""
    from thunder.transforms.cudagraph import CUDAGraphTransform

    if written and any(isinstance(transform, CUDAGraphTransform) for transform in transforms):
        names = ", ".join(argument.name for argument in written)
        raise NotImplementedError(
            f"CUDAGraphTransform: the traced function changes {names} in place, and Thunder's CUDA graphs change "
            "copies: return the changed tensors, or compile without that transform (plugin reduce-overhead)"
        )


def refuse_delayed_changes(backward_trace: Any) -> None:
    """Raise a NotImplementedError if Thunder has moved an in-place operation of the forward to the backward.

    Thunder 0.2.6 does so if nothing reads the result: a write to a slice of an argument, at the end.
    Unnecessary from the first Thunder release that keeps such operations in the forward.
    """
    from thunder.core.symbol import BoundSymbolTag

    for bsym in backward_trace.bound_symbols:
        if bsym.sym.name == "copy_" and BoundSymbolTag.BACKWARD not in bsym.tags:
            raise NotImplementedError(
                "Thunder makes an in-place change of the traced function in its backward instead of its forward: "
                "return the changed tensor, make the change outside of the function, or call it under torch.no_grad()"
            )


def route_thunderfx(takes: Callable[[Any], bool], compile_graph: Callable[..., Any]) -> None:
    """Let `compile_graph(compiler, gm, inputs)`, not ThunderCompiler, compile dynamo's graphs if `takes(compiler)`.
    Thunder 0.2.6 has no other way for an executor to see a graph before thunderfx splits it.
    Unnecessary from the first Thunder release in which an executor can take part in that."""

    from thunder.dynamo.compiler import ThunderCompiler

    @functools.wraps(ThunderCompiler.__call__)
    def call(self: Any, gm: torch.fx.GraphModule, sample_args: Any) -> Any:
        return (compile_graph if takes(self) else call.__wrapped__)(self, gm, sample_args)

    ThunderCompiler.__call__ = call


def original_thunderfx(compiler: Any, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return what Thunder's own ThunderCompiler makes of a graph.

    From torch 2.12 on Thunder 0.2.6 traces into the lazy recompilation of dynamo's graph modules and fails: force it
    first, and have none made inside. Unnecessary from the first Thunder release whose thunderfx runs on torch 2.12."""
    from thunder.dynamo import ThunderCompiler
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

    original: Any = ThunderCompiler.__call__
    _LazyGraphModule.force_recompile(gm)
    with _use_lazy_graph_module(False):
        compiled: Callable[..., Any] = original.__wrapped__(compiler, gm, inputs)
    return compiled


def alias_nvfuser() -> None:
    """Register an alias `nvfuser` of `nvfuser_direct` with the one function that Thunder 0.2.6 looks for there.

    nvFuser wheels from 0.2.36 on have `nvfuser_direct` alone, and Thunder takes everything else from it.
    Unnecessary from the first Thunder release that takes `compute_tensor_descriptor` from there, too."""
    direct = sys.modules.get("nvfuser_direct")
    if direct is None or "nvfuser" in sys.modules or importlib.util.find_spec("nvfuser") is not None:
        return
    alias = types.ModuleType("nvfuser", "compute_tensor_descriptor of nvfuser_direct, where Thunder 0.2.6 looks for it")
    alias.compute_tensor_descriptor = direct.compute_tensor_descriptor  # type: ignore[attr-defined]
    sys.modules["nvfuser"] = alias

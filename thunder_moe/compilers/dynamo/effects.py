"""The reads, in-place writes and grad mode of each node of an FX graph: the graph as a `safety.Program`.
Called by scopes.py, sites.py and the rewrites; calls safety.py.

Tensors that share their memory share the storage of their example values, across inputs and nested graphs too. What a
node changes is told by its name (methods), by its schema (operators), or by running it on the example values and
watching the schemas of the operators that it is made of (all other functions).
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_moe.compilers.safety import Program, Step

_NOTHING: frozenset[int] = frozenset()
# The storage of tensors that have none (sparse ones): they may all share one.
_NO_STORAGE = -1
_IN_PLACE_METHODS = {"__setitem__", "__delitem__"} | {
    name
    for name in vars(operator)
    if re.fullmatch("__i(?!ndex|nv|nvert).+__", name)  # __iadd__, ...
}
_IN_PLACE_OPERATORS = {getattr(operator, name) for name in _IN_PLACE_METHODS}


def storages_of(value: Any) -> frozenset[int]:
    """Return the storages of all tensors in a value."""
    return frozenset(storage for leaf in tree_leaves(value) for storage in _storages(leaf))


def _storages(leaf: Any) -> Iterable[int]:
    if not isinstance(leaf, torch.Tensor):
        return
    while is_in_a_function_transform(leaf):
        leaf = torch._C._functorch.get_unwrapped(leaf)
    if is_traceable_wrapper_subclass(leaf):
        for name in leaf.__tensor_flatten__()[0]:
            yield from _storages(getattr(leaf, name))
        return
    try:
        yield leaf.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        yield _NO_STORAGE


def is_in_a_function_transform(value: Any) -> bool:
    """True if a tensor is wrapped by torch.func.grad, vmap, ..."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def is_wrapped(value: Any) -> bool:
    """True if a tensor is wrapped by torch.func, or of a subclass that holds others (DTensor): kernels get neither."""
    return is_in_a_function_transform(value) or is_traceable_wrapper_subclass(value)


def grad_modes(graph: fx.Graph, initial: bool) -> dict[fx.Node, bool]:
    """Return the grad mode while each node runs, in a graph that is called in an initial mode; nodes may change it."""
    modes, mode = {}, initial
    entered: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        modes[node] = mode
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_set_grad_enabled":
            mode = bool(node.args[0])
        elif name == "_enter_inference_mode":
            entered[node], mode = mode, not node.args[0]
        elif name == "_exit_inference_mode":
            mode = entered.get(node.args[0], mode)
    return modes


@dataclass(frozen=True)
class _NodeStep(Step):
    """A node as a step. Its writes are determined when they are first asked for, because that costs time; a node can
    write only tensors that it reads."""

    find: Callable[[], Collection[int]] = lambda: _NOTHING

    @cached_property
    def _written(self) -> frozenset[Any]:
        return self.reads.intersection(self.find())

    def changes(self, storages: Iterable[Any]) -> bool:
        touched = self.reads.intersection(storages)
        return self.opaque or bool(touched and touched & self._written)


def program_of(
    graph: fx.Graph,
    modes: Mapping[fx.Node, bool],
    value_of: Callable[[fx.Node], Any],
    nested: Mapping[fx.Node, Sequence[tuple[Program, frozenset[int]]]],
) -> Program:
    """Return the nodes of a graph with example values as steps, in order.

    `nested` has the programs of the graphs that higher-order operators call, and the storages of those graphs' inputs.
    """
    return Program([_step(node, modes[node], value_of, nested.get(node)) for node in graph.nodes])


def _step(
    node: fx.Node,
    grad_enabled: bool,
    value_of: Callable[[fx.Node], Any],
    nested: Sequence[tuple[Program, frozenset[int]]] | None,
) -> Step:
    calls = node.op.startswith("call_")
    reads = storages_of([value_of(source) for source in node.all_input_nodes]) if calls else _NOTHING
    given = node.args, node.kwargs  # now: the node may be erased when somebody asks

    def find() -> Collection[int]:
        if nested is not None:
            changed = {
                storage
                for program, inputs in nested
                for storage in reads | inputs
                if program.writer((storage,)) is not None
            }
            # If the subgraph writes an input that is not an argument of this call, it may alias any argument.
            return changed if changed <= reads else reads
        written = _written(node, fx.map_arg(given, value_of))
        return reads if written is None else written

    name = _name(node)
    return _NodeStep(name, reads, grad_enabled=grad_enabled, opaque=calls and name.split(".")[-1] == "set_", find=find)


def _name(node: fx.Node) -> str:
    """Return the name of a node's operation, without its overload: "mul_", "aten.mul_"."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _written(node: fx.Node, values: Any) -> Collection[int] | None:
    """Return the storages that a node writes, given its args and kwargs by value; None if they are unknown."""
    target: Any = node.target
    args, kwargs = values
    if node.op == "call_method":
        in_place = target in _IN_PLACE_METHODS or (target.endswith("_") and not target.endswith("__"))
        return storages_of(args[:1]) if in_place else _NOTHING
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
        return None
    if isinstance(target, torch._ops.OpOverload):
        return _schema_writes(target, args, kwargs)
    if target is getattr or (vars(operator).get(target.__name__) is target and target not in _IN_PLACE_OPERATORS):
        return _NOTHING
    return _observed_writes(target, args, kwargs)


def _schema_writes(operation: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    written: set[int] = set()
    for position, argument in enumerate(operation._schema.arguments):
        # The schema of aten::native_batch_norm does not say that it writes its running statistics.
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or argument.name.startswith("running_"):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= storages_of(given)
    return written


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        mode: Any = super()
        mode.__init__()  # has no annotations
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.written |= _schema_writes(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _observed_writes(target: Callable[..., Any], args: Any, kwargs: Any) -> set[int] | None:
    """Return the storages that a function writes when it runs on its example values; None if it cannot be run.

    It runs on aliases, so that the example values keep their shapes and strides."""
    fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    if not fakes:
        return None
    fake_mode = fakes[0].fake_mode  # of dynamo's tracing; the backend has another one
    shapes = fake_mode.shape_env
    fresh_symbols = shapes.ignore_fresh_unbacked_symbols() if shapes is not None else contextlib.nullcontext()
    recorder = _Recorder()
    try:
        with torch.no_grad(), fake_mode, fresh_symbols:
            aliases = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            with recorder:
                target(*aliases[0], **aliases[1])
    except Exception:  # user code may raise anything on fake tensors
        return None
    return recorder.written

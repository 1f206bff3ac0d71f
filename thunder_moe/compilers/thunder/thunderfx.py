"""thunderfx with moe_executor: dynamo's graph is rewritten as for any other compiler before Thunder splits it.
Called by ThunderCompiler (thunder_compat.py puts `compile_graph` there) and by the torch.compile backend; calls
dynamo/compiled_graph.py for the rewrite and Thunder's own ThunderCompiler for what it leaves.

Thunder takes the operators of the rewritten graph by the executor's lookasides. What it does not take goes to inductor,
with the operators: 4 bits stay 4 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import thunder
import torch
from thunder.extend import resolve_executors
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from thunder_moe.compilers.dynamo import compiled_graph
from thunder_moe.compilers.dynamo.effects import grad_modes, program_of, storages_of
from thunder_moe.compilers.dynamo.nodes import calls, given, operator_of, value_of
from thunder_moe.compilers.dynamo.scopes import copy_of
from thunder_moe.compilers.thunder import nvfuser
from thunder_moe.compilers.thunder.symbols import EXECUTOR, OPTION, decided_before
from thunder_moe.compilers.thunder_compat import original_thunderfx

_COLLECTIVES = torch.ops._c10d_functional


def compile_graph(compiler: Any, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph of dynamo in the place of `ThunderCompiler.__call__`.

    Its option `moe_format` chooses the number format of the weights. `options` are the owner, format and option of
    `compiled_graph.compile_graph`, where they are not the compiler's.
    """
    given = dict(owner=compiler, format=compiler.thunder_options.get(OPTION), option=OPTION) | options
    listed = nvfuser.is_listed(resolve_executors(compiler.thunder_options.get("executors")))
    note = "; not by nvFuser: it gets expert GEMMs from thunder.jit, not from thunderfx" if listed else ""
    return compiled_graph.compile_graph(gm, inputs, partial(_compile, compiler), attention=False, note=note, **given)


def compiler_with(executor: Any, **options: Any) -> Any:
    """Return a ThunderCompiler with options of `thunder.jit`; the executor comes before theirs, or Thunder's own."""
    from thunder.dynamo import ThunderCompiler

    executors = options.pop("executors", thunder.get_default_executors())
    return ThunderCompiler(executors=[executor, *executors], **options)


def _compile(compiler: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Have Thunder compile a graph whose GEMMs have been decided on; NotImplementedError for what it gets wrong."""
    if any(isinstance(value_of(node), FakeScriptObject) for node in gm.graph.nodes):
        raise NotImplementedError(
            "DTensor: Thunder 0.2.6 takes no graph of dynamo's that computes with DTensors on this torch: shard experts"
            " by thunder_moe.parallel.TensorParallel() and call them without gradients, or compile by thunder.jit or"
            " inductor"
        )
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.target is torch.autograd.grad_mode._enter_inference_mode:
                raise NotImplementedError(
                    "torch.inference_mode() inside of what thunderfx compiles: Thunder would leave the whole process in"
                    " it; enter it around the call of the compiled function, or use torch.no_grad()"
                )
    for node in gm.graph.nodes:
        if operator_of(node) is _COLLECTIVES.wait_tensor and operator_of(node.args[0]) is not _COLLECTIVES.all_reduce:
            raise NotImplementedError(
                "ExpertParallel, or another collective than all-reduce, in what thunderfx compiles: Thunder 0.2.6 does"
                " not wait for it; wanted TensorParallel(), or inductor"
            )
    changes = any(map(_may_change, gm.graph.nodes))
    gm = copy_of(gm)
    _add_example_values(gm)
    _spell_out_sizes(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is getattr and _is_transpose(node):
            # Thunder does not know that it is a view, and moves reads of it past changes of its base.
            node.op, node.target, node.args = "call_method", "transpose", (node.args[0], -2, -1)
        elif node.op == "call_method" and node.target == "narrow" and len(node.args) == 4:
            _slice(node)
        elif node.op == "call_function":
            node.target = _taken_by_thunder(node)
    options = compiler.thunder_options
    executors = resolve_executors(options.get("executors"))
    compiler.thunder_options = options | {
        OPTION: decided_before,
        "transforms": list(options.get("transforms") or ()),  # Thunder adds to it at each graph
        # Passes of other executors move reads of a tensor past its in-place changes.
        "executors": [EXECUTOR] if changes else executors,
    }
    try:
        compiled: Callable[..., Any] = original_thunderfx(compiler, gm, inputs)
    finally:
        compiler.thunder_options = options
    if changes:
        functions = compiler.subgraph_infos[-1].submodule_to_compiled_functions.items()
        parts = {function.compiled_fn: part.graph for part, function in functions}
        return _separated(cast(fx.GraphModule, compiled), parts)
    return compiled


def _may_change(node: fx.Node) -> bool:
    """True if a call may change a tensor in place, judged by its name, or because nothing reads its result."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") or name == "setitem" or (name.startswith("i") and hasattr(operator, name))
    return in_place or "out" in node.kwargs or not node.users


def _add_example_values(gm: fx.GraphModule) -> None:
    """Give inputs and calls that the rewrite added example values of dynamo's fake mode, like all other nodes'. Thunder
    reads shapes, requires_grad, and the inputs of inductor's graphs from them."""
    tensors = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    mode = next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)
    if mode is None:
        return
    with mode:
        for module in gm.modules():
            for node in module.graph.find_nodes(op="placeholder") if isinstance(module, fx.GraphModule) else ():
                value = value_of(node)
                if isinstance(value, FakeTensor) and value.fake_mode is not mode:  # of the compilation
                    node.meta["example_value"] = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )
        for node in gm.graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
            known = any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs)))
            if node.meta or not (known or node.target is torch.arange):
                continue  # dynamo's own, without meta data where it changes the grad mode
            if node.op == "call_method":
                node.meta["example_value"] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_function":
                node.meta["example_value"] = node.target(*args, **kwargs)


def _spell_out_sizes(graph: fx.Graph) -> None:
    """Replace sizes by their numbers: a torch.Size as an argument (``y.reshape(x.shape)``), and calls that give ints.
    thunderfx splits graphs at both, and its autograd fails if either is the result of a part."""
    for node in graph.find_nodes(op="call_method", target="size"):
        value: Any = value_of(node)
        users = [user for user in node.users if user.target is not operator.getitem]
        if not users or not isinstance(value, (int, torch.Size)):
            continue
        if isinstance(value, torch.Size):
            with graph.inserting_after(node):
                value = tuple(
                    size if isinstance(size, int) else graph.call_method("size", (node.args[0], dim))
                    for dim, size in enumerate(value)
                )
            for size, new in zip(value_of(node), value, strict=True):
                if isinstance(new, fx.Node):
                    new.meta = dict(node.meta, example_value=size)
        for user in users:
            replacing = partial(_replaced, node, value)
            user.args, user.kwargs = fx.map_arg(user.args, replacing), fx.map_arg(user.kwargs, replacing)
        if not node.users:
            graph.erase_node(node)


def _separated(compiled: fx.GraphModule, parts: Mapping[Any, fx.Graph]) -> Callable[..., Any]:
    """Copy inputs of Thunder's parts that share memory with another input: q, k and v of one GEMM, for example.

    Where a part changes a tensor in place, Thunder 0.2.6 takes inputs of one storage for one tensor, also if they
    are different parts of it: v would have the numbers of k. `parts` has the graph of dynamo's nodes of each part.

    Raises:
        NotImplementedError: one of the inputs may be changed in place; or, raised by the result, the inputs of a call
            share memory otherwise than the inputs of the compilation.
    """
    positions = {node: position for position, node in enumerate(compiled.graph.find_nodes(op="placeholder"))}
    groups: list[list[int]] = []  # the positions of the inputs that a part gets
    for call in compiled.graph.find_nodes(op="call_module"):
        part = getattr(compiled, call.target)
        if not isinstance(part, thunder.ThunderModule) or not any(map(_may_change, parts[part].nodes)):
            continue
        graph = parts[part]
        program = program_of(graph, grad_modes(graph, True), value_of, {})
        first: dict[frozenset[int], torch.Tensor] = {}
        for index, placeholder in enumerate(graph.find_nodes(op="placeholder")):
            tensor = value_of(placeholder)
            storages = storages_of(tensor)
            if not storages or _is_same(tensor, first.setdefault(storages, tensor)):
                continue
            if program.reason_against_packing(storages):
                raise NotImplementedError(
                    f"{placeholder.name} shares memory with another tensor, and one of them is changed in place:"
                    " Thunder 0.2.6 would take both for the same tensor; wanted no such pair, or inductor"
                )
            with compiled.graph.inserting_before(call):
                call.update_arg(index, compiled.graph.call_method("clone", (call.args[index],)))
        groups.append([positions[node] for node in call.all_input_nodes if node in positions])
    compiled.recompile()

    def run(*inputs: Any) -> Any:
        for group in groups:
            first: dict[int, torch.Tensor] = {}
            for position in group:
                tensor = inputs[position]
                # Thunder looks at no parameters and at no subclasses.
                if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
                    continue
                other = first.setdefault(tensor.untyped_storage().data_ptr(), tensor)
                if other is not tensor and not _is_same(tensor, other):
                    raise NotImplementedError(
                        f"inputs of shapes {tuple(other.shape)} and {tuple(tensor.shape)} share memory, which the"
                        " inputs of the compilation did not: Thunder 0.2.6 would take both for the same tensor; clone"
                        " one"
                    )
        return compiled(*inputs)

    return run


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one storage have one dtype, the same numbers in the same order, and the same gradient."""
    if (tensor.requires_grad or other.requires_grad) and (tensor.is_leaf or other.is_leaf):
        return False  # one is the other, detached
    places = [
        (each.dtype, each.is_conj(), each.is_neg(), each.storage_offset(), each.numel()) for each in (tensor, other)
    ]
    strides = [(each.shape, each.stride()) for each in (tensor, other)]
    return places[0] == places[1] and (strides[0] == strides[1] or (tensor.is_contiguous() and other.is_contiguous()))


def _slice(node: fx.Node) -> None:
    """Make a slice of ``x.narrow(dim, start, length)``, which Thunder does not know and leaves to inductor."""
    sizes: tuple[Any, ...] = value_of(node.args[0]).shape
    dim, start, length = cast(tuple[Any, ...], node.args[1:])
    if all(isinstance(number, int) for number in (dim, start, length)):
        start += sizes[dim] if start < 0 else 0
        index = (slice(None),) * (dim % len(sizes)) + (slice(start, start + length),)
        node.op, node.target, node.args = "call_function", operator.getitem, (node.args[0], index)


def _is_transpose(node: fx.Node) -> bool:
    return node.args[1:] == ("mT",) or (node.args[1:] == ("T",) and value_of(node.args[0]).ndim == 2)


def _replaced(old: fx.Node, new: Any, node: fx.Node) -> Any:
    return new if node is old else node


def _taken_by_thunder(node: fx.Node) -> Any:
    """Return the target of a call as Thunder's splitter takes it: marked, where the executor has a lookaside for it."""
    function: Any = operator_of(node)
    if calls(node, "grouped_mm"):
        named = given(node)
        function = torch._grouped_mm if function is torch.ops.aten._grouped_mm else function
        dims = [getattr(value_of(named[name]), "ndim", None) for name in ("mat_a", "mat_b")]
        taken = dims == [2, 3] and "offs" in named and "bias" not in named
    else:
        taken = isinstance(function, torch._ops.OpOverloadPacket) and function in EXECUTOR._lookasides
    return _marked(function) if taken else node.target


@cache
def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another one, marked as traceable for Thunder's splitter."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.thunder_supported = True  # type: ignore[attr-defined]
    EXECUTOR._lookasides[call] = EXECUTOR._lookasides[function]
    return call

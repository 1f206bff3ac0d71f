"""Reads nodes of FX graphs by the table of spellings: what they call, with which arguments, and what they return.
Called by the matchers of dynamo's graphs; calls spellings.py.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from thunder_moe.compilers.spellings import IN_PLACE, TARGETS, Spelling, keeps_order, require

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def value_of(node: Any) -> Any:
    """Return the example value of a node, None if it has none."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None


def static_example(tensor: Tensor, name: str) -> tuple[Any, Any]:
    """Return the example value of an input of fixed size that dynamo does not know, and a source for it.

    The compiler has to get the same tensor: it finds the value by the tensor."""
    from torch._dynamo.source import ConstantSource

    fake_mode = torch._guards.detect_fake_mode()
    assert fake_mode is not None, "dynamo compiles under a fake mode"
    source = ConstantSource(name)
    return fake_mode.from_tensor(tensor, static_shapes=True, source=source), source


def operator_of(node: Any) -> Any:
    """Return the function that a node calls, an operator without its overload; None for other nodes."""
    is_function = isinstance(node, fx.Node) and node.op == "call_function"
    return getattr(node.target, "overloadpacket", node.target) if is_function else None


def given(node: Any) -> dict[str, Any]:
    """Return the arguments of a call by the names of its spelling; empty for what has none in the table."""
    row = _row(node)
    return {} if row is None else row.named(node.args, node.kwargs) or {}


def _row(node: Any) -> Spelling | None:
    is_call = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    # The tensor that is changed in place has to be the first positional argument.
    return TARGETS.get(node.target) if is_call and (node.args or node.target not in IN_PLACE) else None


def kind_of(node: Any) -> str:
    """Return the kind of operation that a node calls; "" for what is not in the table."""
    row = _row(node)
    return row.kind if row is not None and given(node) else ""


def is_in_place(node: Any) -> bool:
    """True if a node changes its first argument, by an operation of the table."""
    return _row(node) is not None and node.target in IN_PLACE


def calls(node: Any, *kinds: str) -> bool:
    """True if a node calls an operation of one of some kinds that changes nothing in place."""
    row = _row(node)
    return row is not None and row.kind in kinds and node.target not in IN_PLACE and bool(given(node))


def arguments(node: Any, *kinds: str) -> dict[str, Any]:
    """Return the arguments of a call of one of some kinds, in place or not; MismatchError for other nodes."""
    require(kind_of(node) in kinds, f"{node} is not {' or '.join(kinds)}")
    return given(node)


def in_both_orders(node: Any, kind: str) -> list[tuple[Any, Any]]:
    """Return the two factors of a product ("mul"), or terms of a sum ("add"), in both orders; none for other nodes."""
    both = tuple(given(node).values()) if calls(node, kind) else ()
    return [(both[0], both[1]), (both[1], both[0])] if len(both) == 2 else []


def part_of_result(node: Any, kind: str, index: int) -> Any:
    """Return the call of a kind whose result of an index a node is; None for other nodes."""
    named = given(node)
    found = calls(node, "getitem") and named["index"] == index and calls(named["input"], kind)
    return named["input"] if found else None


def source_of(node: Any, *kinds: str) -> Any:
    """Return the input of an operation of some kinds that returns the same numbers, dtype and device; else None.

    The kind "order" stands for views that keep the order of all elements."""
    kind, named = kind_of(node), given(node)
    if is_in_place(node) or not (kind in kinds or ("order" in kinds and keeps_order(kind, named))):
        return None
    new, old = value_of(node), value_of(named["input"])
    if new is None and kind != "cast":  # a view that one of our rewrites has inserted
        return named["input"]
    both = isinstance(new, Tensor) and isinstance(old, Tensor)
    return named["input"] if both and (new.dtype, new.device) == (old.dtype, old.device) else None


def behind(node: Any, *kinds: str, passed: set[fx.Node] | None = None) -> Any:
    """Return the first tensor behind a chain of `source_of`; `passed` gets the nodes of the chain."""
    while (source := source_of(node, *kinds)) is not None:
        if passed is not None:
            passed.add(node)
        node = source
    return node


def tensor(node: Any, ndim: int, *shape: Any) -> Tensor:
    """Return the example value of a node that is a tensor of so many dims, of these sizes where they are not None;
    MismatchError for other nodes."""
    value = value_of(node)
    require(isinstance(value, Tensor) and value.ndim == ndim, f"{node} is not a tensor of {ndim} dims")
    sizes = zip(value.shape, shape, strict=False)
    require(all(size is None or same(size, actual) for actual, size in sizes), f"{node} has another shape")
    found: Tensor = value
    return found


def same(size: Any, other: Any) -> bool:
    """True if two sizes, or two sequences of sizes, are equal in all calls."""
    if isinstance(size, (tuple, list)):
        return len(size) == len(other) and all(same(a, b) for a, b in zip(size, other, strict=True))
    return statically_known_true(size == other)


def sole_user(node: fx.Node, otherwise: str = "") -> fx.Node:
    """Return the only node that reads another; MismatchError where there are more or none."""
    require(len(node.users) == 1, otherwise)
    return next(iter(node.users))


def traced_frame(graph: fx.Graph) -> tuple[str, int] | None:
    """Return file and line of the code that dynamo traced the graph from, as its first node tells."""
    traces = (_frames(node) for node in graph.nodes)
    return next((frames[0] for frames in traces if frames), None)


def user_line(node: fx.Node) -> str | None:
    """Return file:line of the innermost frame outside of torch and of this package."""
    for path, line in reversed(_frames(node)):
        if not path.startswith((torch.__path__[0], _PACKAGE)):
            inside = path.startswith(os.getcwd() + os.sep)
            return f"{os.path.relpath(path) if inside else path}:{line}"
    return None


def _frames(node: fx.Node) -> list[tuple[str, int]]:
    """Return (file, line) of each frame of a node's stack, the outermost first."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return [(path, int(line)) for path, line in found]
